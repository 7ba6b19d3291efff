"""SentencePiece's models of the BPE kind (Kudo and Richardson 2018, https://arxiv.org/abs/1808.06226) in the form of
`tokenizer.json`: from `tokenizer.model`, a protobuf (`sentencepiece_model.proto`), or from GGUF's copy of its lists.

By a token's type, control tokens are special, user-defined ones are found in a text first, and bytes encode text that
no other token covers. Scores become merges, as transformers makes them.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizer.errors import TokenizerFileError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_SPACE = "▁"
_KINDS = {1: "Unigram", 3: "words", 4: "characters"}  # not BPE
_SPECIAL_IDS = {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2), "pad_token": (43, -1)}


@dataclass(slots=True)
class Pieces:
    """The vocabulary of a `tokenizer.model`: tokens with their scores and types, by id; the ids of special ones."""

    tokens: list[str]
    scores: list[float]
    types: list[int]
    special_ids: dict[str, int]
    has_prefix: bool

    def replace(self, i: int, token: str) -> None:
        """Replaces the token of an id: a fine-tune replaces unused ones."""
        if 0 <= i < len(self.tokens) and self.tokens[i] != token:
            self.tokens[i], self.types[i] = token, UNUSED


def read_pieces(file: Path) -> Pieces:
    """Reads the vocabulary. Raises `TokenizerFileError` for a file that is not a SentencePiece model of kind BPE."""

    def refuse(problem: str) -> TokenizerFileError:
        return TokenizerFileError(file.name, "", problem)

    try:
        top = list(_fields(file.read_bytes()))
        pieces = [dict(_fields(value)) for number, value in top if number == 1]
        specs = [{k: v for n, value in top if n == number for k, v in _fields(value)} for number in (2, 3)]
        tokens = [piece[1].decode() for piece in pieces]
        scores = [struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces]
    except OSError as error:
        raise refuse(f"cannot be read: {error}") from error
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, struct.error) as error:
        raise refuse("is no SentencePiece model") from error
    trainer, normalizer = specs
    if not tokens:
        raise refuse("is no SentencePiece model, or has no pieces")
    if (kind := trainer.get(3, 1)) != 2:
        raise refuse(f"is a model of {_KINDS.get(kind, kind)}, not of BPE")
    if normalizer.get(2):
        raise refuse("maps characters before it cuts words (precompiled_charsmap)")
    if normalizer.get(4, 1) or not normalizer.get(5, 1) or trainer.get(24, 0):
        raise refuse("drops blanks, or writes them otherwise than as ▁ before words (remove_extra_whitespaces)")
    ids = {name: trainer.get(number, default) for name, (number, default) in _SPECIAL_IDS.items()}
    return Pieces(
        tokens, scores, [piece.get(3, NORMAL) for piece in pieces],
        {name: i for name, i in ids.items() if 0 <= i < len(tokens)}, bool(normalizer.get(3, 1)),
    )  # fmt: skip


def content_of(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], *, unknown: int | None, has_prefix: bool
) -> dict[str, Any]:
    """The normalizer, model and decoder of a `tokenizer.json`, without its added tokens."""
    return {
        **spaces_as_marks(has_prefix=has_prefix),
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": _merges_by_score(tokens, scores, types),
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": BYTE in types,
        },
    }


def spaces_as_marks(*, has_prefix: bool = False) -> dict[str, Any]:
    """The normalizer that writes blanks as "▁", with one in front of a text if it `has_prefix`, and its decoder."""
    prefix, strip = [], []
    if has_prefix:
        prefix = [{"type": "Prepend", "prepend": _SPACE}]
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
    }


def added_tokens(
    tokens: Sequence[str], types: Sequence[int], strips_right: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """Entries of `added_tokens`; `strips_right` names those that swallow the blanks after them."""
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (CONTROL, USER_DEFINED):
            yield {
                "id": i, "content": token, "special": kind == CONTROL, "normalized": False, "single_word": False,
                "lstrip": False, "rstrip": token in strips_right,
            }  # fmt: skip


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[list[str]]:
    """Every split of a normal token into two others, the highest score first.

    As transformers' `generate_merges`: equal scores are sorted by the lengths of the parts, then by the token's id,
    then by the parts' ids. llama.cpp's converter gives every token the same score if it had only a tokenizer.json; then
    the lowest id comes first, as a SentencePiece model's scores fall from id to id.
    """
    normal = {token: i for i, token in enumerate(tokens) if types[i] == NORMAL}
    if len({scores[i] for i in normal.values()}) == 1:
        scores = [-i for i in range(len(scores))]
    merges: list[tuple[float, int, int, str, str]] = []
    for token, i in normal.items():
        ways = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [way for way in ways if way[0] in normal and way[1] in normal]
        known.sort(key=lambda way: (normal[way[0]], normal[way[1]]))
        merges += [(scores[i], len(left), len(right), left, right) for left, right in known]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [[left, right] for *_, left, right in merges]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message, by number: integers, or bytes. Raises `ValueError` and `IndexError`."""
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        value: int | bytes
        if kind == 0:
            value, at = _varint(message, at)
        else:
            size, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, end + 1), at)
            value, at = message[at : at + size], at + size
        if at > end:
            raise ValueError
        yield number, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return (value - (1 << 64) if value >> 63 else value), at
        if shift > 63:
            raise ValueError
