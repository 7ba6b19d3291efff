"""The BPE model: one word in, its token ids out.

Byte pair encoding (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909): the word's characters are merged
pair by pair, always the pair of lowest rank, leftmost first. Short words use a plain loop over a list of
ranks; long ones a heap over a linked list, so that a word of n characters costs O(n log n).

It knows nothing of bytes and spaces: the words come from the pre-tokenizer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import pairwise
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
        self._unk_id = self._read_unk(fields)
        self._byte_ids: list[int | None] = [None] * 256
        if fields.boolean("byte_fallback", False):
            self._byte_ids = [self.vocab.get(f"<0x{byte:02X}>") for byte in range(256)]
        self._is_plain = not self._prefix and not self._suffix
        self._read_merges(fields)

    def _read_unk(self, fields: Fields) -> int | None:
        token = fields.optional_string("unk_token")
        if token is None:
            return None
        if token not in self.vocab:
            fields.fail("unk_token", f"{token!r} is not in the vocabulary")
        return self.vocab[token]

    def _read_merges(self, fields: Fields) -> None:
        pairs = _merge_pairs(fields)
        vocab, skipped = self.vocab, len(self._prefix)
        self._stride = stride = max(vocab.values(), default=0) + 1
        try:
            keys = [vocab[left] * stride + vocab[right] for left, right in pairs]
            self._merged_ids = [vocab[left + right[skipped:]] for left, right in pairs]
        except (KeyError, TypeError) as error:
            fields.fail("merges", f"the token {shown(error.args[0])} is not in the vocabulary")
        self._ranks: dict[int, int] = dict(zip(keys, range(len(keys)), strict=True))

    def encode_word(self, word: str) -> list[int]:
        """The ids of one word, which is not empty."""
        if self._ignore_merges and (whole := self.vocab.get(word)) is not None:
            return [whole]
        ids = self._character_ids(word)
        return self._merge_listed(ids) if len(ids) <= _LONGEST_LISTED else self._merge_heaped(ids)

    def _character_ids(self, word: str) -> list[int]:
        if self._is_plain:
            found = [self.vocab.get(character) for character in word]
            if None not in found:
                return found  # type: ignore[return-value]
        return self._character_ids_with_unknown(word)

    def _character_ids_with_unknown(self, word: str) -> list[int]:
        ids: list[int] = []
        is_unk_pending = False
        for i, character in enumerate(word):
            symbol = (self._prefix if i else "") + character + (self._suffix if i == len(word) - 1 else "")
            known = self.vocab.get(symbol)
            if known is not None:
                if is_unk_pending and self._unk_id is not None:
                    ids.append(self._unk_id)
                    is_unk_pending = False
                ids.append(known)
                continue
            fallback = [self._byte_ids[byte] for byte in symbol.encode("utf-8", "replace")]
            if None not in fallback:
                ids += fallback  # type: ignore[arg-type]
            elif self._unk_id is not None:
                if is_unk_pending and not self._fuse_unk:
                    ids.append(self._unk_id)
                is_unk_pending = True
        if is_unk_pending and self._unk_id is not None:
            ids.append(self._unk_id)
        return ids

    def _merge_listed(self, ids: list[int]) -> list[int]:
        """Merge in place, with the rank of each neighbouring pair in a list beside the ids."""
        rank_of, stride, merged_ids = self._ranks.get, self._stride, self._merged_ids
        ranks = [rank_of(left * stride + right, _NO_RANK) for left, right in pairwise(ids)]
        while ranks:
            rank = min(ranks)
            if rank == _NO_RANK:
                break
            i = ranks.index(rank)
            merged = ids[i] = merged_ids[rank]
            del ids[i + 1]
            del ranks[i]
            if i:
                ranks[i - 1] = rank_of(ids[i - 1] * stride + merged, _NO_RANK)
            if i < len(ranks):
                ranks[i] = rank_of(merged * stride + ids[i + 1], _NO_RANK)
        return ids

    def _merge_heaped(self, ids: list[int]) -> list[int]:
        """Merge with a heap of (rank, position) and a linked list; a merged-away position holds -1."""
        rank_of, stride, merged_ids = self._ranks.get, self._stride, self._merged_ids
        size = len(ids)
        following = list(range(1, size + 1))  # size: no neighbour
        preceding = list(range(-1, size - 1))  # -1: no neighbour
        heap = []
        for i in range(size - 1):
            rank = rank_of(ids[i] * stride + ids[i + 1])
            if rank is not None:
                heap.append(rank * size + i)
        heapq.heapify(heap)
        pop, push = heapq.heappop, heapq.heappush
        while heap:
            rank, i = divmod(pop(heap), size)
            j = following[i]
            if j == size or ids[i] < 0 or rank_of(ids[i] * stride + ids[j]) != rank:
                continue  # the pair has changed since it was queued
            merged = ids[i] = merged_ids[rank]
            ids[j] = -1
            after = following[i] = following[j]
            if after != size:
                preceding[after] = i
                new_rank = rank_of(merged * stride + ids[after])
                if new_rank is not None:
                    push(heap, new_rank * size + i)
            before = preceding[i]
            if before >= 0:
                new_rank = rank_of(ids[before] * stride + merged)
                if new_rank is not None:
                    push(heap, new_rank * size + before)
        return [i for i in ids if i >= 0]


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


def _merge_pairs(fields: Fields) -> list[Any]:
    """The merges as (left, right); both spellings are read: "a b" and ["a", "b"]."""
    merges = fields.items("merges")
    if merges and isinstance(merges[0], str):
        try:
            merges = [merge.split(" ") for merge in merges if not merge.startswith("#version")]
        except AttributeError:
            fields.fail("merges", "mixes strings and pairs")
    for i, merge in enumerate(merges):
        if not isinstance(merge, list) or len(merge) != 2:
            fields.fail(f"merges[{i}]", f"expected a pair of tokens, found {shown(merge)}")
    return merges
