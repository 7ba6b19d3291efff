"""Dates and times: Python's own parsers take all that the patterns match, and the patterns match what is usual."""

from __future__ import annotations

import datetime
import itertools
import json
import re
from typing import Any

import pytest

from runtime.engine.grammar.compiler import compile_grammar
from runtime.engine.grammar.grammar import Grammar
from runtime.engine.grammar.matcher import Vocabulary
from runtime.engine.grammar.schema_strings import PATTERNS, with_narrow_formats
from tokenizer import Tokenizer


def accepts(schema: Any, value: Any, vocabulary: Vocabulary, tokenizer: Tokenizer) -> bool:
    (matcher,) = compile_grammar(Grammar(kind="json_schema", text=json.dumps(schema)), vocabulary, 1)
    ids = tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False)
    return matcher.ll_matcher.try_consume_tokens(ids) == len(ids) and matcher.ll_matcher.is_accepting()


def test_every_date_that_is_one_matches_and_no_other() -> None:
    years = (1000, 1900, 1999, 2000, 2023, 2024, 2100, 2400, 9999)
    for year, month, day in itertools.product(years, range(14), range(33)):
        text = f"{year:04}-{month:02}-{day:02}"
        try:
            datetime.date.fromisoformat(text)
            is_date = True
        except ValueError:
            is_date = False
        assert bool(re.search(PATTERNS["date"], text)) == is_date, text


def test_leap_years_are_those_of_the_calendar() -> None:
    for year in range(1000, 10_000):
        is_leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        assert bool(re.search(PATTERNS["date"], f"{year}-02-29")) == is_leap, year


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("time", ["23:59:59Z", "00:00:00.5+02:00", "12:30:00-11:30"], ["24:00:00Z", "12:00:60Z", "12:00:00z", "12:00"]),
        ("date-time", ["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z", "2024-01-01t10:00:00Z", "2024-01-01"]),
        ("date", ["2024-02-29"], ["2023-02-29", "0000-01-01", "2024-1-1"]),
    ],
)
def test_a_grammar_has_them(
    name: str, good: list[str], bad: list[str], vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    for schema in (
        {"type": "string", "format": name},
        {"format": name, "type": ["string", "null"]},
        {"type": "string", "format": name, "pattern": "[0-9]"},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "string", "format": name}}},
    ):
        assert all(accepts(schema, text, vocabulary, tokenizer) for text in good), schema
        assert not any(accepts(schema, text, vocabulary, tokenizer) for text in bad), schema
    assert accepts({"type": ["string", "null"], "format": name}, None, vocabulary, tokenizer)


def test_data_and_names_stay_as_they_are() -> None:
    schema = {
        "type": "object",
        "properties": {"format": {"const": {"format": "date"}}, "enum": {"type": "string", "format": "date"}},
        "default": {"type": "string", "format": "date"},
    }
    narrowed = with_narrow_formats(schema)
    assert narrowed["default"] == schema["default"]
    assert narrowed["properties"]["format"] == schema["properties"]["format"]  # type: ignore[index]
    assert narrowed["properties"]["enum"]["pattern"] == PATTERNS["date"]
    assert with_narrow_formats({"type": "string", "format": "email"}) == {"type": "string", "format": "email"}
