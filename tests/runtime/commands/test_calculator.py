"""The chat's calculator: arithmetic as Python has it, and nothing that is not arithmetic."""

from __future__ import annotations

import json

import pytest

from runtime.commands.calculator import answer


@pytest.mark.parametrize(
    ("expression", "result"),
    [("34*12", "408"), ("7/2", "3.5"), ("10/3", "3.333"), ("2^10", "1024"), ("-(3+4)*2", "-14"), ("9 // 2+9 % 2", "5")],
)
def test_numbers(expression: str, result: str) -> None:
    assert answer("calculator", json.dumps({"expression": expression})) == result


@pytest.mark.parametrize(
    "arguments",
    [
        "", "[]", "{}", "3", '{"expression": 3}', '{"expression": ""}', '{"formula": "1"}', '{"expression": "1/0"}',
        '{"expression": "9**9**9**9"}', '{"expression": "2**65"}', '{"expression": "__import__(\'os\')"}',
        '{"expression": "a"}', '{"expression": "(1).real"}', '{"expression": "[1]"}', '{"expression": "True"}',
        '{"expression": "(-8)**0.5"}', '{"expression": "1e308*10"}', '{"expression": "1;2"}',
        json.dumps({"expression": "(" * 300}), json.dumps({"expression": "(" * 99 + "1" + ")" * 99}),
        json.dumps({"expression": "\x00"}), '{"expression": "0**-1"}',
    ],
)  # fmt: skip
def test_what_is_none_is_said_to_be_wrong(arguments: str) -> None:
    assert answer("calculator", arguments).startswith(("error: ", "1"))
    if "(" * 99 not in arguments:
        assert answer("calculator", arguments).startswith("error: ")


def test_there_is_one_tool() -> None:
    assert answer("delete", "{}") == "error: there is no tool 'delete', only 'calculator'"
