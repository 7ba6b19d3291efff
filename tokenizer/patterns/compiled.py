"""The patterns of Split and Replace, compiled with the `regex` module.

The reference compiles them with Oniguruma; `oniguruma` translates. Unicode properties follow the installed
`regex` module; for all code points assigned in Unicode 14 they agree with the reference, but for U+0295,
which Unicode moved to another category and which is treated here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from runtime.later import later
from tokenizer.patterns.oniguruma import MOVED_LETTER, UNICODE_WORD, PatternError, translate

regex = later("regex")

# The Rust crate `regex`, which Whitespace and single_word use, has the joiners.
RUST_WORD = UNICODE_WORD + r"\u200c\u200d"
"""Class body: Unicode's \\w."""


class Pattern:
    """A compiled pattern.

    `usual` is the plain translation; `exact` also has U+0295 in its old category, which costs a look-ahead
    per character and is used only for text that holds it.
    """

    def __init__(self, usual: Any, exact: Any, literal: str = "") -> None:
        self.source: str = usual.pattern
        """The pattern in `regex`'s syntax."""
        self.usual = usual
        self.exact = exact
        self.literal = literal
        """The text that alone matches, or "" when the pattern is more than that."""

    def for_text(self, text: str) -> Any:
        """The `regex` object to use on `text`."""
        return self.exact if MOVED_LETTER in text else self.usual


@functools.lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> Pattern:
    """Compile an Oniguruma pattern. Raises `PatternError`. Groups are never captured."""
    try:
        usual = _compile(pattern, translate(pattern, is_exact=False))
        exact = _compile(pattern, translate(pattern, is_exact=True))
    except RecursionError as error:
        raise PatternError("the pattern is nested too deeply") from error
    return Pattern(usual, exact)


def _compile(pattern: str, translated: str) -> Any:
    try:
        return regex.compile(translated, flags=regex.VERSION1 if "&&" in translated else regex.VERSION0)
    except regex.error as error:
        raise PatternError(f"pattern {pattern!r}: {error}") from error


def compile_literal(text: str) -> Pattern:
    """Compile a pattern that matches exactly `text`."""
    literal = compile_raw(re.escape(text))
    return Pattern(literal, literal, text)


def compile_raw(pattern: str) -> Any:
    """Compile a pattern of our own, in the syntax of the `regex` module."""
    return regex.compile(pattern, flags=regex.VERSION0)


def find_spans(pattern: Pattern, text: str) -> list[tuple[int, int, bool]]:
    """Cut `text` into (start, end, is_match), covering all of it in order.

    An empty match right after a match is skipped, as in Oniguruma's iterator.
    """
    spans: list[tuple[int, int, bool]] = []
    previous = 0
    for start, end in _find_matches(pattern.for_text(text), text):
        if start != previous:
            spans.append((previous, start, False))
        spans.append((start, end, True))
        previous = end
    if previous != len(text):
        spans.append((previous, len(text), False))
    return spans


def _find_matches(pattern: Any, text: str) -> Iterator[tuple[int, int]]:
    position = 0
    last_end = -1
    while position <= len(text):
        match = pattern.search(text, position)
        if match is None:
            return
        start, end = match.span()
        if start == end == last_end:
            position = end + 1
            continue
        yield start, end
        position = last_end = end
