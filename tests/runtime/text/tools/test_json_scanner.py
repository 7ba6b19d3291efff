"""The scanner against Python's parsers: where a value ends, where a text stops being one, and what it is as JSON."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.text.tools.json_scanner import JsonScanner, as_json
from tests.runtime.text.answers import cut

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def scan(pieces: list[str]) -> tuple[str, int]:
    """What the value turned out to be, and how many characters were read."""
    scanner, place, written = JsonScanner(), 0, ""
    for piece in pieces:
        read = scanner.push(piece, 0)
        place += read
        written += scanner.take()
        if scanner.is_complete or scanner.is_broken:
            break
        assert read == len(piece)
    text = "".join(pieces)[:place]
    assert text.endswith(scanner.waiting)
    if not any(mark in text for mark in ("'", "\\", "True", "False", "None", ",")) and text.isprintable():
        assert written + scanner.waiting == text
    if scanner.is_complete and place > 1:
        json.loads(written)
    return "complete" if scanner.is_complete else "broken" if scanner.is_broken else "open", place


def first_value(text: str) -> int | None:
    """How many characters at the beginning of the text are an object or an array."""
    for end in range(1, len(text) + 1):
        try:
            json.loads(text[:end])
        except ValueError:
            continue
        return end
    return None


@settings(max_examples=100, deadline=None)
@given(value=values, is_ascii=st.booleans(), indent=st.sampled_from([None, 1]), places=st.lists(st.integers(0, 99)))
def test_a_value_ends_where_it_ends(value: object, is_ascii: bool, indent: int | None, places: list[int]) -> None:
    text = json.dumps([value], ensure_ascii=is_ascii, indent=indent)
    for rest in ("", "}", "\n</tool_call>", '"x"', "]"):
        assert scan(cut(text + rest, places)) == ("complete", len(text))
    assert scan(cut(text[:-1], places)) == ("open", len(text) - 1)


@settings(max_examples=150, deadline=None)
@given(value=values, places=st.lists(st.integers(0, 99)))
def test_a_literal_of_pythons_becomes_json(value: object, places: list[int]) -> None:
    for text in (repr([value]), repr({"a": value, 'b"': [value]}), repr([value, 1])[:-1] + ", ]"):
        scanner, written = JsonScanner(), ""
        for piece in cut(text, places):
            assert scanner.push(piece, 0) == len(piece)
            written += scanner.take()
        assert scanner.is_complete
        assert as_json(text) == written
        assert json.loads(written) == ast.literal_eval(text)


@settings(max_examples=100, deadline=None)
@given(value=values, places=st.lists(st.integers(0, 99)))
def test_json_stays_as_it_is(value: object, places: list[int]) -> None:
    text = json.dumps({"a": value}, ensure_ascii=False)
    scanner, written = JsonScanner(), ""
    for piece in cut(text, places):
        scanner.push(piece, 0)
        written += scanner.take()
    assert written == as_json(text) == text


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('"a\nb\tc\x00\x1f"', "a\nb\tc\x00\x1f"),
        (r'"C:\users\d \u12 \x4"', r"C:\users\d \u12 \x4"),
        (r'"it\'s \x41 \n"', "it's A \n"),
        (r"""'it\'s "so" \" \\'""", 'it\'s "so" " \\'),
        ('"a\\\nb"', "a\\\nb"),
    ],
)
def test_strings_that_are_not_quite_json(written: str, meant: str) -> None:
    assert json.loads(as_json(f"[{written}]") or "") == [meant]


def test_what_is_no_object_or_array_is_none() -> None:
    assert [as_json(text) for text in ("'a'", "1 ", "[1] 2", "{", "{a: 1}", "{'a'}")] == [None] * 6


@settings(max_examples=150, deadline=None)
@given(body=st.text('{}[]",:\\u0e1-.tfn ralse\n', max_size=24), places=st.lists(st.integers(0, 99)))
def test_whatever_is_no_value_is_found_out(body: str, places: list[int]) -> None:
    for text in ("{" + body, "[" + body, '{"a":' + body, '["' + body):
        state, place = scan(cut(text, places))
        assert (state, place) == scan(list(text))
        end = first_value(text)
        if end is not None:
            assert (state, place) == ("complete", end)
        elif state == "complete":
            json.loads(as_json(text[:place]) or "")
        if state == "broken":  # no text with this beginning is JSON
            assert first_value(text[: place + 1] + '"}]}]}]') is None or text[place] in "-+.0123456789abcdefghijklnrstu"


@pytest.mark.parametrize(
    "text",
    ["{,", '{"a",', '{"a":1,,', "[1,,", "[,", "[}", "{a", "[01]", "[1.]", "[-]", "[nul]", "(", "[TRUE]", "{'a'}"],
)
def test_broken(text: str) -> None:
    assert scan(list(text)) == ("broken", len(text) - 1)


def test_a_number_alone_ends_at_what_is_none_of_it() -> None:
    assert scan(list("-12.5e+3,")) == ("complete", 8)
    assert scan(list("-12.5e+3")) == ("open", 8)
    assert scan(["1" * 5000])[0] == "broken"
