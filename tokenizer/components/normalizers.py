"""Normalizers: changes to a piece of text before it is cut into words.

A normalizer takes the text and whether it stands at the very start of the input, and returns both anew: a
Metaspace pre-tokenizer with the scheme "first" asks whether the first character still comes from the input's
first character.

Supported: NFC, NFD, NFKC, NFKD, Prepend, Replace, Lowercase, Strip, StripAccents, Nmt, ByteLevel, BertNormalizer,
Precompiled, Sequence; and SentencePiece, which stands for a `tokenizer.model`'s own.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable
from typing import Any, Literal

from tokenizer.byte_level import to_byte_level
from tokenizer.json_fields import Fields
from tokenizer.patterns import unicode_tables
from tokenizer.patterns.compiled import (
    Pattern,
    compile_literal,
    compile_pattern,
    compile_raw,
    find_spans,
)
from tokenizer.patterns.oniguruma import PatternError
from tokenizer.unigram.charsmap import Charsmap, SentencePieceNormalizer, precompiled

Normalizer = Callable[[str, bool], tuple[str, bool]]
"""(text, is_at_start) → (text, is_at_start)."""

SENTENCEPIECE = "SentencePiece"
"""The type of the normalizer that a `tokenizer.model` has."""

_FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")
_TYPES = (
    *_FORMS,
    "Prepend",
    "Replace",
    "Lowercase",
    "Strip",
    "StripAccents",
    "Nmt",
    "ByteLevel",
    "BertNormalizer",
    "Precompiled",
    "Sequence",
)


def build_normalizer(fields: Fields | None) -> Normalizer | None:
    """The normalizer of a "normalizer" object, or None if it does nothing.

    Raises `TokenizerFileError` for a type that is not supported.
    """
    if fields is None:
        return None
    if fields.get("type") == SENTENCEPIECE:
        return SentencePieceNormalizer(fields)
    kind = fields.one_of("normalizer", _TYPES)
    for form in _FORMS:
        if kind == form:
            fields.known(["type"])
            return functools.partial(_unicode_form, form)
    if kind == "Sequence":
        fields.known(["type", "normalizers"])
        parts = [build_normalizer(part) for part in fields.objects("normalizers")]
        return functools.partial(_sequence, [part for part in parts if part is not None])
    if kind == "Prepend":
        fields.known(["type", "prepend"])
        return functools.partial(_prepend, fields.string("prepend"))
    if kind == "Replace":
        fields.known(["type", "pattern", "content"])
        return functools.partial(_replace, read_pattern(fields), fields.string("content"))
    if kind == "Strip":
        fields.known(["type", "strip_left", "strip_right"])
        return functools.partial(_strip, fields.boolean("strip_left"), fields.boolean("strip_right"))
    if kind == "BertNormalizer":
        fields.known(["type", "clean_text", "handle_chinese_chars", "strip_accents", "lowercase"])
        lowers = fields.boolean("lowercase", True)
        strips = lowers if fields.get("strip_accents") is None else fields.boolean("strip_accents")
        cleans, spaces_chinese = fields.boolean("clean_text", True), fields.boolean("handle_chinese_chars", True)
        return functools.partial(_bert, (cleans, spaces_chinese, strips, lowers))
    if kind == "Precompiled":
        fields.known(["type", "precompiled_charsmap"])
        charsmap = precompiled(fields)
        return None if charsmap is None else functools.partial(_replace_characters, charsmap)
    fields.known(["type"])
    simple: dict[str, Normalizer] = {
        "Lowercase": _lowercase,
        "StripAccents": _strip_accents,
        "Nmt": _nmt,
        "ByteLevel": _byte_level,
    }
    return simple[kind]


def leaves_alone(normalizer: Normalizer | None, text: str) -> bool:
    """Whether `text`, and each part of it, is known to be normalized already."""
    if normalizer is None:
        return True
    if not isinstance(normalizer, functools.partial) or normalizer.func is not _unicode_form:
        return False
    return text.isascii() or unicodedata.is_normalized(normalizer.args[0], text)


def read_pattern(fields: Fields) -> Pattern:
    """The field "pattern": `{"String": ...}` or `{"Regex": ...}`."""
    pattern = fields.object("pattern")
    pattern.known(["String", "Regex"])
    if len(pattern.values) != 1:
        fields.wrong("pattern", "an object with either String or Regex")
    if "String" in pattern.values:
        return compile_literal(pattern.string("String"))
    try:
        return compile_pattern(pattern.string("Regex"))
    except PatternError as error:
        pattern.fail("Regex", str(error))


def replace_spans(pattern: Pattern, content: str, text: str) -> str:
    """`text` with each match of `pattern` replaced by `content`, which is literal."""
    if pattern.literal:
        return text.replace(pattern.literal, content)
    return "".join(content if is_match else text[start:end] for start, end, is_match in find_spans(pattern, text))


def _sequence(parts: list[Normalizer], text: str, is_at_start: bool) -> tuple[str, bool]:
    for part in parts:
        text, is_at_start = part(text, is_at_start)
    return text, is_at_start


@functools.cache
def _barriers(is_compatibility: bool) -> Any:
    barriers = unicode_tables.NORMALIZATION_BARRIERS
    if is_compatibility:
        barriers += unicode_tables.COMPATIBILITY_BARRIERS
    return compile_raw(f"([{barriers}])")


def _unicode_form(form: Literal["NFC", "NFD", "NFKC", "NFKD"], text: str, is_at_start: bool) -> tuple[str, bool]:
    if text.isascii():
        return text, is_at_start
    barriers = _barriers("K" in form)
    if barriers.search(text) is None:
        return unicodedata.normalize(form, text), is_at_start
    return "".join(_normalize_piece(form, piece, i) for i, piece in enumerate(barriers.split(text))), is_at_start


def _normalize_piece(form: Literal["NFC", "NFD", "NFKC", "NFKD"], piece: str, index: int) -> str:
    """Odd pieces are the barriers themselves, which stay as they are."""
    return piece if index % 2 else unicodedata.normalize(form, piece)


def _prepend(prefix: str, text: str, is_at_start: bool) -> tuple[str, bool]:
    return (prefix + text if text else text), is_at_start


def _replace(pattern: Pattern, content: str, text: str, is_at_start: bool) -> tuple[str, bool]:
    if is_at_start and (match := pattern.for_text(text).match(text)) is not None:
        is_at_start = len(match.group()) <= 1 and content != ""
    return replace_spans(pattern, content, text), is_at_start


def _lowercase(text: str, is_at_start: bool) -> tuple[str, bool]:
    # Character by character: str.lower alone would make a final sigma.
    return text.replace("Σ", "σ").lower(), is_at_start


def _strip(left: bool, right: bool, text: str, is_at_start: bool) -> tuple[str, bool]:
    if left:
        stripped = text.lstrip(unicode_tables.WHITE_SPACE)
        is_at_start = is_at_start and len(stripped) == len(text)
        text = stripped
    return (text.rstrip(unicode_tables.WHITE_SPACE) if right else text), is_at_start


@functools.cache
def _combining_marks() -> Any:
    return compile_raw(f"[{unicode_tables.COMBINING_MARKS}]+")


def _strip_accents(text: str, is_at_start: bool) -> tuple[str, bool]:
    marks = _combining_marks()
    is_at_start = is_at_start and marks.match(text) is None
    return marks.sub("", text), is_at_start


_NMT_REMOVED = (*range(0x01, 0x09), 0x0B, *range(0x0E, 0x20), 0x7F, 0x8F, 0x9F)
_NMT_SPACES = (0x09, 0x0A, 0x0C, 0x0D, 0x1680, *range(0x200B, 0x2010), 0x2028, 0x2029, 0x2581, 0xFEFF, 0xFFFD)
_NMT_TABLE: dict[int, str | None] = {**dict.fromkeys(_NMT_REMOVED), **dict.fromkeys(_NMT_SPACES, " ")}


def _nmt(text: str, is_at_start: bool) -> tuple[str, bool]:
    """SentencePiece's "nmt": control characters are dropped, other white space becomes a space."""
    is_at_start = is_at_start and ord(text[0]) not in _NMT_REMOVED if text else is_at_start
    return text.translate(_NMT_TABLE), is_at_start


_CHINESE = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff" + unicode_tables.character_class(
    "20000-2A6DF 2A700-2B81F 2B920-2CEAF 2F800-2FA1F"
)
"""Class body: ideographs, between which BERT puts spaces; the ranges are google-research/bert's."""


@functools.cache
def _bert_patterns() -> tuple[Any, Any, Any, Any]:
    """Characters that are dropped, that become a space, ideographs, and accents."""
    spaces = r"[\t\n\r\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
    return (
        compile_raw(f"[{unicode_tables.NOT_TEXT}]+"), compile_raw(spaces), compile_raw(f"[{_CHINESE}]"),
        compile_raw(f"[{unicode_tables.NONSPACING_MARKS}]+"),
    )  # fmt: skip


def _bert(switches: tuple[bool, bool, bool, bool], text: str, is_at_start: bool) -> tuple[str, bool]:
    """BERT's: characters that are no text go, white space becomes spaces, ideographs stand apart, accents go, letters
    become small."""
    cleans, spaces_chinese, strips, lowers = switches
    if text.isascii():
        if cleans and not text.isprintable():
            text = "".join(
                " " if each in "\t\n\r" else each for each in text if " " <= each < "\x7f" or each in "\t\n\r"
            )
        return (text.lower() if lowers else text), is_at_start
    dropped, spaces, ideographs, accents = _bert_patterns()
    if cleans:
        text = spaces.sub(" ", dropped.sub("", text))
    if spaces_chinese:
        text = ideographs.sub(r" \g<0> ", text)
    if strips:
        text = accents.sub("", _unicode_form("NFD", text, False)[0])
    return (_lowercase(text, False)[0] if lowers else text), is_at_start


def _replace_characters(charsmap: Charsmap, text: str, is_at_start: bool) -> tuple[str, bool]:
    return charsmap.replace_as_library(text), is_at_start


def _byte_level(text: str, is_at_start: bool) -> tuple[str, bool]:
    return to_byte_level(text), is_at_start
