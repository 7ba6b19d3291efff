"""SentencePiece's models (Kudo and Richardson 2018, https://arxiv.org/abs/1808.06226) in the form of `tokenizer.json`:
from `tokenizer.model`, a protobuf (`sentencepiece_model.proto`), or from GGUF's copy of its lists.

By a token's type, control tokens are special, user-defined ones are found in a text first and never cut, and bytes
encode text that no other token covers. BPE merges any two tokens whose joined string is one, the highest score first.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenizer.components.normalizers import SENTENCEPIECE
from tokenizer.errors import TokenizerFileError
from tokenizer.json_fields import shown
from tokenizer.unigram.charsmap import tables_of
from tokenizer.unigram.model import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

_SPACE = "▁"
_UNIGRAM, _BPE, _WORDS, _CHARACTERS = range(1, 5)
_SPECIAL_IDS = {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2), "pad_token": (43, -1)}


@dataclass(slots=True)
class Pieces:
    """A `tokenizer.model`.

    Attributes:
        tokens, scores, types: of the vocabulary, by id.
        special_ids: of the tokens that the trainer named.
        kind: the number of its model's kind.
        has_prefix: whether a blank is put in front of a text; `is_suffix`: at its end instead.
        drops_blanks: whether of several blanks one stays, and those at both ends go.
        escapes: whether blanks are written as "▁".
        falls_back: whether bytes encode characters without a token.
        charsmap: the table that replaces characters; empty for none.
    """

    tokens: list[str]
    scores: list[float]
    types: list[int]
    special_ids: dict[str, int]
    kind: int = _BPE
    has_prefix: bool = True
    is_suffix: bool = False
    drops_blanks: bool = False
    escapes: bool = True
    falls_back: bool = True
    charsmap: bytes = b""

    def replace(self, i: int, token: str) -> None:
        """Replaces the token of an id: a fine-tune replaces unused ones."""
        if 0 <= i < len(self.tokens) and self.tokens[i] != token:
            self.tokens[i], self.types[i] = token, UNUSED

    def of_type(self, kind: int) -> list[str]:
        """The tokens of a type."""
        return [token for token, own in zip(self.tokens, self.types, strict=True) if own == kind]


def read_pieces(file: Path) -> Pieces:
    """Reads the file. Raises `TokenizerFileError` for one that is not a SentencePiece model."""

    def refuse(problem: str) -> TokenizerFileError:
        return TokenizerFileError(file.name, "", problem)

    try:
        top = list(_fields(file.read_bytes()))
        pieces = [dict(_fields(value)) for number, value in top if number == 1]
        specs = [{k: v for n, value in top if n == number for k, v in _fields(value)} for number in (2, 3, 5)]
        names = [bytes(piece[1]) for piece in pieces]
        scores = [struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces]
        kinds = [piece.get(3, NORMAL) for piece in pieces]
    except OSError as error:
        raise refuse(f"cannot be read: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError, struct.error) as error:
        raise refuse("is no SentencePiece model, or is cut off") from error
    trainer, normalizer, denormalizer = specs
    if not names:
        raise refuse("is no SentencePiece model, or has no pieces")
    if (kind := trainer.get(3, _UNIGRAM)) not in (_UNIGRAM, _BPE, _CHARACTERS):
        what = "words" if kind == _WORDS else f"an unknown kind, {kind}"
        raise refuse(f"is a model of {what}; read are Unigram, BPE and characters: take the model's tokenizer.json")
    if denormalizer.get(2):
        raise refuse("replaces characters of an answer (denormalizer_spec), which is not supported")
    charsmap = normalizer.get(2, b"")
    try:
        if charsmap:
            tables_of(charsmap)
    except ValueError as error:
        raise refuse(f"precompiled_charsmap {error}") from error
    types = [own if own in range(NORMAL, BYTE + 1) else NORMAL for own in kinds]
    tokens = []
    for i, (name, score) in enumerate(zip(names, scores, strict=True)):
        try:
            tokens.append(name.decode())
        except UnicodeDecodeError:
            raise refuse(f"pieces[{i}] is {shown(name)}, which is not UTF-8") from None
        if not name:
            raise refuse(f"pieces[{i}] is empty")
        if not math.isfinite(score):
            raise refuse(f"the score of pieces[{i}], {shown(tokens[i])}, is {score}, must be finite")
    places = {token: i for i, token in enumerate(tokens)}
    if len(places) != len(tokens):
        i = next(i for i, token in enumerate(tokens) if places[token] != i)
        raise refuse(f"pieces[{i}] and pieces[{places[tokens[i]]}] are both {shown(tokens[i])}")
    ids = {name: trainer.get(number, default) for name, (number, default) in _SPECIAL_IDS.items()}
    special = (CONTROL, UNKNOWN, USER_DEFINED)
    if UNKNOWN in types:
        ids["unk_token"] = types.index(UNKNOWN)
    return Pieces(
        tokens, scores, types, {name: i for name, i in ids.items() if 0 <= i < len(tokens) and types[i] in special},
        kind=kind, has_prefix=bool(normalizer.get(3, 1)), is_suffix=bool(trainer.get(24, 0)),
        drops_blanks=bool(normalizer.get(4, 1)), escapes=bool(normalizer.get(5, 1)),
        falls_back=bool(trainer.get(35, 0)), charsmap=charsmap,
    )  # fmt: skip


def content_of_pieces(pieces: Pieces, *, is_first_alone: bool = False) -> dict[str, Any]:
    """The content of a `tokenizer.json` that encodes each stretch between added tokens as SentencePiece encodes a text;
    with `is_first_alone`, only the first of them gets the blank in front."""
    scheme = ("first" if is_first_alone else "always") if pieces.has_prefix else "never"
    unknown, own = pieces.special_ids.get("unk_token"), pieces.of_type(USER_DEFINED)
    model: dict[str, Any]
    if pieces.kind == _UNIGRAM:
        model = {
            "type": "Unigram", "vocab": list(zip(pieces.tokens, pieces.scores, strict=True)), "unk_id": unknown,
            "byte_fallback": pieces.falls_back, "types": pieces.types,
        }  # fmt: skip
    else:
        has_merges = pieces.kind == _BPE
        model = {
            **_merging(pieces.tokens, pieces.scores, pieces.types if has_merges else [CONTROL] * len(pieces.types)),
            "unk_token": None if unknown is None else pieces.tokens[unknown], "byte_fallback": pieces.falls_back,
            "whole": own,
        }  # fmt: skip
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if pieces.has_prefix else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return {
        "normalizer": {
            "type": SENTENCEPIECE, "precompiled_charsmap": pieces.charsmap, "drops_blanks": pieces.drops_blanks,
            "escapes": pieces.escapes, "prefix": scheme, "is_suffix": pieces.is_suffix, "kept": own,
        },
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": model,
        "added_tokens": [entry for entry in added_tokens(pieces.tokens, pieces.types) if entry["special"]],
    }  # fmt: skip


def content_of(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], *, unknown: int | None, has_prefix: bool
) -> dict[str, Any]:
    """The normalizer, model and decoder of a `tokenizer.json` for the lists of a GGUF file, without added tokens."""
    return {
        **spaces_as_marks(has_prefix=has_prefix),
        "model": {
            **_merging(tokens, scores, types),
            "unk_token": None if unknown is None else tokens[unknown],
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
    tokens: Sequence[str], types: Sequence[int], strips_right: Collection[str] = (), strips_left: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """Entries of `added_tokens`; `strips_right` names those that swallow the blanks after them, `strips_left` those
    before them."""
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (CONTROL, USER_DEFINED):
            yield {
                "id": i, "content": token, "special": kind == CONTROL, "normalized": False, "single_word": False,
                "lstrip": token in strips_left, "rstrip": token in strips_right,
            }  # fmt: skip


def _merging(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> dict[str, Any]:
    """Fields of a BPE model in which the token of the highest score is merged first.

    llama.cpp's converter gives every token the same score if it had only a tokenizer.json; then the lowest id comes
    first, as a SentencePiece model's scores fall from id to id.
    """
    is_normal = np.array(types) == NORMAL
    values = np.asarray(scores, np.float64)
    if is_normal.any() and len(set(values[is_normal].tolist())) == 1:
        values = -np.arange(len(values), dtype=np.float64)
    ranks = np.unique(-values, return_inverse=True)[1].reshape(-1)
    return {
        "type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "fuse_unk": True,
        "ranks": np.where(is_normal, ranks, -1).tolist(),
    }  # fmt: skip


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
