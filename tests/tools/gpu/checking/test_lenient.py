"""Tests that go on behind what fails."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tools.gpu.checking import collect
from tools.gpu.checking.collect import _Ignoring

SOURCE = """
def check(value):
    assert value

def test_it(seen):
    assert seen.append("asserted")
    check(0)
    def kernel():
        check(1)
        assert False, "stays"
    return kernel
"""


def test_assertions_are_evaluated_and_ignored_but_in_functions_within_functions() -> None:
    names: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(_Ignoring().visit(ast.parse(SOURCE))), "x", "exec"), names)
    seen: list[str] = []
    kernel = names["test_it"](seen)
    assert seen == ["asserted"]
    with pytest.raises(AssertionError, match="stays"):
        kernel()


def test_the_command_runs_after_all_is_defined() -> None:
    """`gpu_bundle` runs the module by name; imported, as here, it does not show what a call of `main` finds."""
    last = ast.parse(Path(collect.__file__).read_text(encoding="utf-8")).body[-1]
    assert ast.unparse(last).startswith("if __name__ == '__main__':")
