"""The character sets, code point by code point, against the `tokenizers` library.

Only code points assigned in Unicode 14: the library, Python and the `regex` module each follow another version.
"""

from __future__ import annotations

import random
import unicodedata
from functools import cache

import pytest

from tests.tokenizer.support import assigned_codes, random_text
from tokenizer.components.normalizers import build_normalizer
from tokenizer.json_fields import Fields
from tokenizer.patterns import unicode_tables
from tokenizer.patterns.compiled import compile_pattern, compile_raw

tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers library")

_PROPERTIES = [
    *(
        r"\s",
        r"\S",
        r"\w",
        r"\W",
        r"\d",
        r"\h",
        ".",
        r"[^\s\p{L}]",
        r"[\w-]",
        r"[^\w]",
        "[[:word:]]",
        r"\p{Word}",
        r"[\p{Word}]",
        r"\p{^L}",
        r"\P{L}",
    ),
    *(f"\\p{{{name}}}" for name in ("L", "N", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "P", "S", "Nd", "Z", "C")),
    *(f"\\p{{{name}}}" for name in ("Han", "Hiragana", "Katakana", "Hangul", "Latin", "Alpha", "Alnum", "Punct")),
    *(
        "[[:punct:]]",
        "[[:alpha:]_]",
        "[[:space:]]",
        "[[:upper:]]",
        "[[:lower:]]",
        "[[:alnum:]]",
        "[[:digit:]]",
    ),
    *(f"(?i:{letter})" for letter in "skiImåσµ"),
    *(
        "(?i:[a-z])",
        "(?i:[sdmt])",
        r"(?i)\p{Lu}",
        r"[\p{Lu}\p{Lo}]",
        r"[\p{Ll}\p{Lm}]",
        r"[^\p{Ll}]",
        r"[^\p{Lo}x]",
    ),
]


@cache
def _codes() -> list[int]:
    return assigned_codes()


@cache
def _everything() -> str:
    return "".join(map(chr, _codes()))


@pytest.mark.parametrize("pattern", _PROPERTIES)
def test_property(pattern: str) -> None:
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "removed")
    kept = "".join(piece for piece, _ in split.pre_tokenize_str(_everything()))
    ours = compile_pattern(pattern).for_text(_everything()).sub("", _everything())
    assert ours == kept


def test_white_space() -> None:
    split = tokenizers.pre_tokenizers.WhitespaceSplit()
    kept = "".join(piece for piece, _ in split.pre_tokenize_str(_everything()))
    assert "".join(c for c in _everything() if c not in unicode_tables.WHITE_SPACE) == kept


def test_punctuation() -> None:
    split = tokenizers.pre_tokenizers.Punctuation("removed")
    kept = "".join(piece for piece, _ in split.pre_tokenize_str(_everything()))
    assert compile_raw(f"[{unicode_tables.PUNCTUATION}]").sub("", _everything()) == kept


@pytest.mark.parametrize("kind", ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt"])
def test_normalizer(kind: str) -> None:
    theirs = getattr(tokenizers.normalizers, kind)()
    ours = build_normalizer(Fields({"type": kind}, "tokenizer.json"))
    assert ours is not None
    for code in _codes():
        assert ours(chr(code), True)[0] == theirs.normalize_str(chr(code)), hex(code)
    source = random.Random(0)
    for _ in range(500):
        text = random_text(source)
        assert ours(text, True)[0] == theirs.normalize_str(text), text
    marks = [chr(code) for code in _codes() if unicodedata.combining(chr(code))]
    for mark in marks:  # canonical order and composition
        text = "a" + mark + "".join(source.choice(marks) for _ in range(3)) + "\u0301e\u0301"
        assert ours(text, True)[0] == theirs.normalize_str(text), text
