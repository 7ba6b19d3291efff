"""The Unigram model (Kudo 2018, https://arxiv.org/abs/1804.10959): of all segmentations the one of the highest sum of
scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from runtime.later import later
from tokenizer.bpe.merge_table import MergeTable, address
from tokenizer.byte_level import encode_utf8
from tokenizer.json_fields import Fields, shown
from tokenizer.warn import warn_once

_kernels = later("tokenizer.unigram.kernels")

_UNKNOWN_PENALTY = 10.0  # below the lowest score
_KNOWN = ("type", "unk_id", "vocab", "byte_fallback", "types")
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of SentencePiece's tokens."""


class UnigramModel:
    """A vocabulary with scores. Immutable after construction, so that threads may share it.

    Beside the fields of a tokenizer.json, the model may have `types` of its tokens, as SentencePiece numbers them: then
    sums and special types are as in SentencePiece, else as in the `tokenizers` library.
    """

    is_byte_level = False

    def __init__(self, fields: Fields) -> None:
        """Read the "model" object. Raises `TokenizerFileError`."""
        fields.known(_KNOWN)
        tokens, scores = _read_vocab(fields)
        self.vocab = dict(zip(tokens, range(len(tokens))))
        if len(self.vocab) != len(tokens):
            first = next(i for i, token in enumerate(tokens) if self.vocab[token] != i)
            warn_once(
                f"{fields.file}: {fields.field('vocab')}: {shown(tokens[first])} is twice in it; the later counts"
            )
        unknown = None if fields.get("unk_id") is None else fields.count("unk_id")
        if unknown is not None and unknown >= len(tokens):
            fields.fail("unk_id", f"is {unknown}, must be less than the vocabulary's size, {len(tokens)}")
        self._unknown = unknown
        self._falls_back = fields.boolean("byte_fallback", False) and all(map(self.vocab.__contains__, _BYTES))
        types: Sequence[int] | None = fields.get("types")
        self._is_single = types is not None
        self._table = MergeTable(self.vocab, [], " ", "")
        self._scores = np.array(scores, np.float64)[np.fromiter(self.vocab.values(), np.int64, len(self.vocab))]
        ordinary = self._scores
        if types is not None:
            kinds = np.array([types[i] for i in self.vocab.values()])
            ordinary = self._scores[kinds == NORMAL]
            for i in np.flatnonzero(kinds == USER_DEFINED):  # above all others, which are logarithms; long ones first
                size = int(self._table.starts[i + 1] - self._table.starts[i]) - 1
                self._scores[i] = np.float32(0.1 * (size - 1))
            self._scores[(kinds != NORMAL) & (kinds != USER_DEFINED)] = -math.inf
        self._unknown_score = float(ordinary.min(initial=math.inf)) - _UNKNOWN_PENALTY if ordinary.size else 0.0
        if self._is_single:
            self._unknown_score = float(np.float32(self._unknown_score))
        self._longest = int(np.diff(self._table.starts).max(initial=1)) - 1
        self.encode_word("a")  # compiles the loop

    def encode_word(self, word: str) -> list[int]:
        """The ids of a text, which is not empty."""
        text, table = encode_utf8(word), self._table
        padded = np.frombuffer(text + bytes(8), np.uint8)
        best, places = np.empty(len(text) + 1, np.float64), np.empty((2, len(text) + 1), np.int32)
        count = _kernels.segment(
            address(padded), len(text), address(table.tokens), address(table.starts), address(table.slots), table.mask,
            address(self._scores), self._longest, self._unknown_score, self._is_single, address(best),
            address(places[0]), address(places[1]),
        )  # fmt: skip
        symbols = places[1, :count]
        if symbols.min(initial=0) >= 0:
            found: list[int] = table.ids[symbols].tolist()
            return found
        return self._with_unknown(text, places[0, :count].tolist(), symbols.tolist())

    def _with_unknown(self, text: bytes, ends: list[int], symbols: list[int]) -> list[int]:
        """The ids where some characters have no token: their bytes', or one id for a run of them."""
        ids: list[int] = []
        start, was_unknown = 0, False
        for end, symbol in zip(ends, symbols, strict=True):
            if symbol >= 0:
                ids.append(int(self._table.ids[symbol]))
            elif self._falls_back:
                ids += [self.vocab[_BYTES[byte]] for byte in text[start:end]]
            elif self._unknown is not None and not was_unknown:
                ids.append(self._unknown)
            start, was_unknown = end, symbol < 0
        return ids


def _read_vocab(fields: Fields) -> tuple[list[str], list[float]]:
    entries = fields.items("vocab")
    if _are_tokens_with_scores(entries):
        return [token for token, _ in entries], [score for _, score in entries]
    tokens, scores = [], []
    for i, entry in enumerate(entries):
        if not (
            isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str)
            and isinstance(entry[1], int | float) and not isinstance(entry[1], bool)
        ):  # fmt: skip
            fields.fail(f"vocab[{i}]", f"expected a token and its score, found {shown(entry)}")
        if not math.isfinite(entry[1]):
            fields.fail(f"vocab[{i}]", f"the score of {shown(entry[0])} is {entry[1]}, must be finite")
        tokens.append(entry[0])
        scores.append(entry[1])
    return tokens, scores


def _are_tokens_with_scores(entries: list[Any]) -> bool:
    """Whether all are as they usually are: checked by whole passes, since there may be a quarter of a million."""
    if not {list, tuple}.issuperset(map(type, entries)) or not {2}.issuperset(map(len, entries)):
        return False
    tokens, scores = (map(itemgetter(place), entries) for place in (0, 1))
    kinds = {str}.issuperset(map(type, tokens)) and {int, float}.issuperset(map(type, scores))
    return kinds and all(map(math.isfinite, map(itemgetter(1), entries)))
