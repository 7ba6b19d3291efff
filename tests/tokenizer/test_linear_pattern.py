"""Patterns matched in linear time find what the `regex` module finds."""

from __future__ import annotations

import random

import pytest
import regex

from tokenizer.patterns.linear_pattern import LinearPattern
from tokenizer.patterns.linear_program import PatternError

_ATOMS = (
    "a",
    "b",
    "c",
    ".",
    r"\w",
    r"\s",
    r"\d",
    "[ab]",
    "[^a]",
    r"[\w.-]",
    r"\n",
    r"\.",
    "é",
    r"\x61",
    r"\u00e9",
    "ab",
)
_ASSERTIONS = (r"\b", r"\B", r"\A", r"\Z")
_REPEATS = ("?", "*", "+", "??", "*?", "+?", "{2}", "{1,3}", "{1,}", "{,2}", "{1,3}?")
_TEXT = "aaabbbccé.-_ \n1"


def pattern(draw: random.Random, depth: int, names: list[str]) -> str:
    """A random pattern that never repeats what may be empty, which libraries treat differently."""
    parts = []
    for _ in range(draw.randrange(1, 4)):
        if depth and draw.random() < 0.3:
            inner = "|".join(pattern(draw, depth - 1, names) for _ in range(draw.randrange(1, 3)))
            opening = "(?:"
            if len(names) < 3 and draw.random() < 0.5:
                names.append(f"n{len(names)}")
                opening = f"(?P<{names[-1]}>"
            part = f"{opening}{inner})"
            if draw.random() < 0.5 and not (LinearPattern(part).may_be_empty or LinearPattern(part).looks_ahead):
                part += draw.choice(_REPEATS)
        elif draw.random() < 0.1:
            part = draw.choice(_ASSERTIONS)
        else:
            part = draw.choice(_ATOMS)
            if len(part) != 2 or part[0] == "\\":
                part += draw.choice(_REPEATS) if draw.random() < 0.4 else ""
        parts.append(part)
    return "".join(parts)


def check(seed: int, count: int) -> int:
    draw, num_matches = random.Random(seed), 0
    for _ in range(count):
        text = pattern(draw, 2, [])
        try:
            ours = LinearPattern(text)
        except PatternError as error:
            assert "more than 256 places" in str(error)  # noqa: PT017
            continue
        if ours.may_be_empty:
            continue
        theirs = regex.compile(text, flags=regex.DOTALL | regex.VERSION0)
        for _ in range(4):
            subject = "".join(draw.choice(_TEXT) for _ in range(draw.randrange(12)))
            expected = [
                (found.start(), found.end(), {k: v for k, v in found.groupdict().items() if v is not None})
                for found in theirs.finditer(subject)
            ]
            if any(start == end for start, end, _ in expected):  # an assertion alone
                continue
            assert [tuple(found) for found in ours.matches(subject)] == expected, (text, subject)
            num_matches += len(expected)
    return num_matches


def test_matches_are_those_of_the_library() -> None:
    assert check(1, 600) > 600


@pytest.mark.exhaustive
def test_matches_are_those_of_the_library_in_many_patterns() -> None:
    assert check(2, 20_000) > 20_000


def test_literals_are_matched_as_they_are_the_longest_first() -> None:
    found = LinearPattern.of_literals(["<a", "<a>\n", "a|b"]).matches("<a>\n a|b <a")
    assert [(match.start, match.end) for match in found] == [(0, 4), (5, 8), (9, 11)]


def test_a_pattern_of_exponential_time_takes_linear_time() -> None:
    """A backtracking matcher never ends here."""
    assert not list(LinearPattern(r"\A(?:a+)+\Z").matches("a" * 2_000 + "b"))
