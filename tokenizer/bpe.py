"""The BPE model: one word in, its token ids out.

Byte pair encoding (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909): the word's characters are merged
pair by pair, always the pair of lowest rank, leftmost first. Short words use a plain loop over a list of
ranks; long ones a heap over a linked list, so that a word of n characters costs O(n log n).

It knows nothing of bytes and spaces: the words come from the pre-tokenizer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import pairwise, repeat
from typing import Any

from tokenizer.json_fields import Fields, shown

_NO_RANK = 1 << 60
_LONGEST_LISTED = 96  # longer words use the heap
_LONGEST_CACHED = 256
_MOST_CACHED = 1 << 16
_KNOWN = (
    "type",
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
    "vocab",
    "merges",
)


class BpeModel:
    """A vocabulary and its merges. Immutable after construction, so that threads may share it."""

    def __init__(self, fields: Fields) -> None:
        """Read the "model" object. Raises `TokenizerFileError`."""
        if fields.get("type") is not None:
            fields.one_of("model", ["BPE"])
        fields.known(_KNOWN)
        if fields.get("dropout") not in (None, 0, 0.0):
            fields.fail("dropout", f"only null is supported, found {shown(fields.get('dropout'))}")
        self.vocab = _read_vocab(fields)
        self._prefix = fields.optional_string("continuing_subword_prefix") or ""
        self._suffix = fields.optional_string("end_of_word_suffix") or ""
        self._fuse_unk = fields.boolean("fuse_unk", False)
        self._ignore_merges = fields.boolean("ignore_merges", False)
        self._unk_token = self._read_unk(fields)
        self._falls_back = fields.boolean("byte_fallback", False)
        self._is_plain = not self._prefix and not self._suffix
        self._read_merges(fields)

    def _read_unk(self, fields: Fields) -> str | None:
        token = fields.optional_string("unk_token")
        if token is not None and token not in self.vocab:
            fields.fail("unk_token", f"{token!r} is not in the vocabulary")
        return token

    def _read_merges(self, fields: Fields) -> None:
        merges = fields.items("merges")
        self._separator = " "
        if merges and isinstance(merges[0], str):
            merges = _checked_strings(fields, merges)
        else:
            self._separator, merges = _joined_pairs(fields, merges)
        skipped, separator = len(self._prefix), self._separator
        merged: list[str] = list(map(str.replace, merges, repeat(separator), repeat("")))
        if skipped:
            merged = [left + right[skipped:] for left, right in (merge.split(separator) for merge in merges)]
        if not all(map(self.vocab.__contains__, merged)):
            i = next(i for i, token in enumerate(merged) if token not in self.vocab)
            fields.fail(f"merges[{i}]", f"the token {shown(merged[i])} is not in the vocabulary")
        # Keyed by the merge as it is written, "left right": making ids of it would take most of the loading.
        self._ranks: dict[str, int] = dict(zip(merges, range(len(merges)), strict=True))

    def encode_word(self, word: str) -> list[int]:
        """The ids of one word, which is not empty."""
        vocab = self.vocab
        if self._ignore_merges and (whole := vocab.get(word)) is not None:
            return [whole]
        tokens = self._character_tokens(word)
        merge = self._merge_listed if len(tokens) <= _LONGEST_LISTED else self._merge_heaped
        return [vocab[token] for token in merge(tokens)]

    def _character_tokens(self, word: str) -> list[str]:
        """The tokens to begin with, one for each character that the vocabulary knows."""
        if self._is_plain and all(map(self.vocab.__contains__, word)):
            return list(word)
        tokens: list[str] = []
        is_unk_pending = False
        for i, character in enumerate(word):
            symbol = (self._prefix if i else "") + character + (self._suffix if i == len(word) - 1 else "")
            if symbol in self.vocab:
                if is_unk_pending and self._unk_token is not None:
                    tokens.append(self._unk_token)
                    is_unk_pending = False
                tokens.append(symbol)
                continue
            fallback = [f"<0x{byte:02X}>" for byte in symbol.encode("utf-8", "replace")]
            if self._falls_back and all(map(self.vocab.__contains__, fallback)):
                tokens += fallback
            elif self._unk_token is not None:
                if is_unk_pending and not self._fuse_unk:
                    tokens.append(self._unk_token)
                is_unk_pending = True
        if is_unk_pending and self._unk_token is not None:
            tokens.append(self._unk_token)
        return tokens

    def _merge_listed(self, tokens: list[str]) -> list[str]:
        """Merge in place, with the rank of each neighbouring pair in a list beside the tokens."""
        rank_of, separator, skipped = self._ranks.get, self._separator, len(self._prefix)
        ranks = [rank_of(left + separator + right, _NO_RANK) for left, right in pairwise(tokens)]
        while ranks:
            rank = min(ranks)
            if rank == _NO_RANK:
                break
            i = ranks.index(rank)
            merged = tokens[i] = tokens[i] + tokens[i + 1][skipped:]
            del tokens[i + 1]
            del ranks[i]
            if i:
                ranks[i - 1] = rank_of(tokens[i - 1] + separator + merged, _NO_RANK)
            if i < len(ranks):
                ranks[i] = rank_of(merged + separator + tokens[i + 1], _NO_RANK)
        return tokens

    def _merge_heaped(self, tokens: list[str]) -> list[str]:
        """Merge with a heap of (rank, position) and a linked list; a merged-away position holds ""."""
        rank_of, separator, skipped = self._ranks.get, self._separator, len(self._prefix)
        size = len(tokens)
        following = list(range(1, size + 1))  # size: no neighbour
        preceding = list(range(-1, size - 1))  # -1: no neighbour
        heap = []
        for i, (left, right) in enumerate(pairwise(tokens)):
            rank = rank_of(left + separator + right)
            if rank is not None:
                heap.append(rank * size + i)
        heapq.heapify(heap)
        pop, push = heapq.heappop, heapq.heappush
        while heap:
            rank, i = divmod(pop(heap), size)
            j = following[i]
            if j == size or not tokens[i] or rank_of(tokens[i] + separator + tokens[j]) != rank:
                continue  # the pair has changed since it was queued
            merged = tokens[i] = tokens[i] + tokens[j][skipped:]
            tokens[j] = ""
            after = following[i] = following[j]
            if after != size:
                preceding[after] = i
                new_rank = rank_of(merged + separator + tokens[after])
                if new_rank is not None:
                    push(heap, new_rank * size + i)
            before = preceding[i]
            if before >= 0:
                new_rank = rank_of(tokens[before] + separator + merged)
                if new_rank is not None:
                    push(heap, new_rank * size + before)
        return [token for token in tokens if token]


class WordCache(dict[str, tuple[int, ...]]):
    """Words already encoded. `cache[word]` encodes what is missing.

    Bounded: it starts anew when it holds 65,536 words, and holds none longer than 256 characters. Threads
    may share it: each operation is one step of the interpreter, and the worst race encodes a word twice.
    """

    def __init__(self, encode_word: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._encode_word = encode_word

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(self._encode_word(word))
        if len(word) <= _LONGEST_CACHED:
            if len(self) >= _MOST_CACHED:
                self.clear()
            self[word] = ids
        return ids


def _read_vocab(fields: Fields) -> dict[str, int]:
    vocab: dict[str, int] = fields.object("vocab").values  # type: ignore[assignment]
    ids = vocab.values()
    if not all(type(i) is int for i in ids) or (vocab and not 0 <= min(ids) <= max(ids) < 1 << 32):
        for token, i in vocab.items():
            if type(i) is not int or not 0 <= i < 1 << 32:
                fields.fail(
                    "vocab",
                    f"the id of {shown(token)} must be an integer from 0 to 2**32 - 1, found {shown(i)}",
                )
    return vocab


def _checked_strings(fields: Fields, merges: list[Any]) -> list[str]:
    """Merges written "left right"."""
    if set(map(type, merges)) != {str} or not set(map(str.count, merges, repeat(" "))) <= {1}:
        for i, merge in enumerate(merges):
            if not isinstance(merge, str) or (merge.count(" ") != 1 and not merge.startswith("#version")):
                fields.fail(f"merges[{i}]", f"expected a pair of tokens, found {shown(merge)}")
    return [merge for merge in merges if not merge.startswith("#version")]


def _joined_pairs(fields: Fields, merges: list[Any]) -> tuple[str, list[str]]:
    """Merges written ["left", "right"], whose tokens may hold spaces: a separator, and them joined by it."""
    for i, merge in enumerate(merges):
        if not isinstance(merge, list) or len(merge) != 2 or not all(isinstance(part, str) for part in merge):
            fields.fail(f"merges[{i}]", f"expected a pair of tokens, found {shown(merge)}")
    # No text holds a lone surrogate when it reaches the model.
    separator = "\ud800" if any(" " in left or " " in right for left, right in merges) else " "
    return separator, list(map(separator.join, merges))
