"""Pre-tokenizers: how text is cut into the words that are encoded one by one.

A step takes the pieces so far and whether the first of them stands at the very start of the input, and
returns both anew. No step ever hands on an empty piece.

Supported: ByteLevel, Split, Digits, Metaspace, Punctuation, Whitespace, WhitespaceSplit, BertPreTokenizer,
CharDelimiterSplit, FixedLength, Sequence.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable

from tokenizer.byte_level import to_byte_level
from tokenizer.components.normalizers import read_pattern
from tokenizer.json_fields import Fields
from tokenizer.patterns import unicode_tables
from tokenizer.patterns.compiled import RUST_WORD, Pattern, compile_literal, compile_pattern, compile_raw, find_spans

Step = Callable[[list[str], bool], tuple[list[str], bool]]
"""(pieces, is_at_start) → (pieces, is_at_start)."""

# openai/gpt-2, encoder.py
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BEHAVIORS = ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_TYPES = (
    "ByteLevel", "Split", "Digits", "Metaspace", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer",
    "CharDelimiterSplit", "FixedLength", "Sequence",
)  # fmt: skip


def build_pre_tokenizer(fields: Fields | None) -> list[Step]:
    """The steps of a "pre_tokenizer" object, in order.

    Raises `TokenizerFileError` for a type that is not supported.
    """
    if fields is None:
        return []
    kind = fields.one_of("pre-tokenizer", _TYPES)
    if kind == "Sequence":
        fields.known(["type", "pretokenizers"])
        return [step for part in fields.objects("pretokenizers") for step in build_pre_tokenizer(part)]
    if kind == "ByteLevel":
        return _build_byte_level(fields)
    if kind == "Split":
        fields.known(["type", "pattern", "behavior", "invert"])
        behavior = fields.choice("behavior", _BEHAVIORS)
        return [_split_step(read_pattern(fields), behavior, fields.boolean("invert"))]
    if kind == "Metaspace":
        return [_build_metaspace(fields)]
    if kind == "Digits":
        fields.known(["type", "individual_digits"])
        behavior = "Isolated" if fields.boolean("individual_digits") else "Contiguous"
        return [_split_step(compile_pattern(r"\p{N}"), behavior)]
    if kind == "Punctuation":
        fields.known(["type", "behavior"])
        return [_split_step(_punctuation(), fields.choice("behavior", _BEHAVIORS, "Isolated"))]
    if kind == "CharDelimiterSplit":
        fields.known(["type", "delimiter"])
        return [_split_step(compile_literal(fields.character("delimiter")), "Removed")]
    if kind == "FixedLength":
        fields.known(["type", "length"])
        length = fields.count("length", 5)
        if length == 0:
            fields.wrong("length", "a positive integer")
        return [functools.partial(_fixed_length, length)]
    fields.known(["type"])
    if kind == "Whitespace":
        words = _class_pattern(f"[{RUST_WORD}]+|[^{RUST_WORD}\\s]+")
        return [_split_step(words, "Removed", is_inverted=True)]
    white_space = _split_step(_class_pattern(r"\s"), "Removed")
    return [white_space] if kind == "WhitespaceSplit" else [white_space, _split_step(_punctuation(), "Isolated")]


def byte_level_step(pieces: list[str], is_at_start: bool) -> tuple[list[str], bool]:
    """Replace each byte by its character. A model folds this step into its word cache when it comes last."""
    return [to_byte_level(piece) for piece in pieces], is_at_start


def pre_tokenize(steps: Iterable[Step], text: str, is_at_start: bool) -> list[str]:
    """Cut `text` with all steps."""
    pieces = [text]
    for step in steps:
        pieces, is_at_start = step(pieces, is_at_start)
    return pieces


def word_pattern(steps: list[Step]) -> tuple[bool, str] | None:
    """Whether a space is put in front of each text, and the pattern whose matches are the words (of `regex`'s syntax).

    None unless the steps are those of one pattern and ByteLevel.
    """
    rest = list(steps)
    adds_prefix_space = bool(rest) and rest[0] is _prefix_space
    if adds_prefix_space:
        del rest[0]
    if not rest or rest.pop() is not byte_level_step:
        return None
    if not rest:
        return adds_prefix_space, r"[\s\S]+"
    [step] = rest if len(rest) == 1 else [None]
    if not isinstance(step, functools.partial):
        return None
    is_isolated = step.func is _isolate or (step.func is _split and step.args[1:] == ("Removed", True))
    return (adds_prefix_space, step.args[0].source) if is_isolated else None


def _build_byte_level(fields: Fields) -> list[Step]:
    fields.known(["type", "add_prefix_space", "trim_offsets", "use_regex"])
    steps: list[Step] = []
    if fields.boolean("add_prefix_space"):
        steps.append(_prefix_space)
    if fields.boolean("use_regex", True):
        steps.append(_split_step(compile_pattern(GPT2_PATTERN), "Isolated"))
    steps.append(byte_level_step)
    return steps


def _prefix_space(pieces: list[str], is_at_start: bool) -> tuple[list[str], bool]:
    return [piece if piece.startswith(" ") else " " + piece for piece in pieces], is_at_start


def _build_metaspace(fields: Fields) -> Step:
    fields.known(["type", "replacement", "add_prefix_space", "prepend_scheme", "split", "str_rep"])
    replacement = fields.character("replacement")
    return functools.partial(_metaspace, replacement, read_prepend_scheme(fields), fields.boolean("split", True))


def read_prepend_scheme(fields: Fields) -> str:
    """Metaspace's "prepend_scheme", or the one that the older "add_prefix_space" stands for."""
    scheme = fields.choice("prepend_scheme", ("first", "never", "always"), "always")
    if fields.get("add_prefix_space") is not None and not fields.boolean("add_prefix_space"):
        if scheme != "never" and "prepend_scheme" in fields.values:
            fields.fail("add_prefix_space", f"is false, but prepend_scheme is {scheme!r}")
        return "never"
    return scheme


def _metaspace(
    replacement: str, scheme: str, is_split: bool, pieces: list[str], is_at_start: bool
) -> tuple[list[str], bool]:
    replaced = []
    for i, piece in enumerate(pieces):
        text = piece.replace(" ", replacement)
        is_prefixed = scheme == "always" or (scheme == "first" and i == 0 and is_at_start)
        if is_prefixed and not text.startswith(replacement):
            text = replacement + text
        replaced.append(text)
    if not is_split:
        return replaced, is_at_start
    mark = re.escape(replacement)
    words = re.compile(f"{mark}[^{mark}]*|[^{mark}]+")
    return [word for text in replaced for word in words.findall(text)], is_at_start


def _fixed_length(length: int, pieces: list[str], is_at_start: bool) -> tuple[list[str], bool]:
    return [piece[i : i + length] for piece in pieces for i in range(0, len(piece), length)], is_at_start


@functools.cache
def _class_pattern(pattern: str) -> Pattern:
    compiled = compile_raw(pattern)
    return Pattern(compiled, compiled)


def _punctuation() -> Pattern:
    return _class_pattern(f"[{unicode_tables.PUNCTUATION}]")


def _split_step(pattern: Pattern, behavior: str, is_inverted: bool = False) -> Step:
    if behavior == "Isolated":
        return functools.partial(_isolate, pattern)
    return functools.partial(_split, pattern, behavior, is_inverted)


def _isolate(pattern: Pattern, pieces: list[str], is_at_start: bool) -> tuple[list[str], bool]:
    words: list[str] = []
    for piece in pieces:
        found: list[str] = pattern.for_text(piece).findall(piece)
        if not found and piece:  # most words
            words.append(piece)
            continue
        if sum(map(len, found)) != len(piece) or "" in found:  # some text is not part of a match
            found = [piece[start:end] for start, end, _ in find_spans(pattern, piece) if start != end]
        if len(pieces) == 1:
            return found, is_at_start
        words.extend(found)
    return words, is_at_start


def _split(
    pattern: Pattern, behavior: str, is_inverted: bool, pieces: list[str], is_at_start: bool
) -> tuple[list[str], bool]:
    words: list[str] = []
    for i, piece in enumerate(pieces):
        spans = [(start, end, is_match != is_inverted) for start, end, is_match in find_spans(pattern, piece)]
        kept = _merge_spans(spans, behavior)
        if i == 0:
            is_at_start = is_at_start and bool(kept) and kept[0][0] == 0
        words.extend(piece[start:end] for start, end in kept)
    return words, is_at_start


def _merge_spans(spans: list[tuple[int, int, bool]], behavior: str) -> list[tuple[int, int]]:
    """Joins or drops delimiters (the spans that match) by `behavior`; empty spans are dropped last."""
    if behavior == "Removed":
        merged = [(start, end) for start, end, is_match in spans if not is_match]
    elif behavior == "MergedWithNext":
        merged = _join(spans[::-1], only_matches=True)[::-1]
    else:
        merged = _join(spans, only_matches=behavior == "MergedWithPrevious")
    return [(start, end) for start, end in merged if start != end]


def _join(spans: list[tuple[int, int, bool]], only_matches: bool) -> list[tuple[int, int]]:
    """Join spans with the one before: a match to a non-match, or (not `only_matches`) like to like."""
    joined: list[tuple[int, int]] = []
    was_match = False
    for start, end, is_match in spans:
        is_joined = (is_match and not was_match) if only_matches else is_match == was_match
        if is_joined and joined:
            first, last = joined[-1]
            joined[-1] = (min(first, start), max(last, end))
        else:
            joined.append((start, end))
        was_match = is_match
    return joined
