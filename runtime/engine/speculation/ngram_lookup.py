"""Growing texts as arrays, and lookup of earlier occurrences of a text's end (`numba_kernels.cpu.ngram_lookup`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cpu.ngram_lookup import (
    BREAK,
    COUNT,
    DEPTH,
    END,
    HEADS,
    IDS,
    LIMIT,
    MOST_MATCH,
    NUM_DISTINCT,
    NUM_HEADS,
    NUM_INDEXED,
    PLACE,
    PREVIOUS,
    START,
    TEXT_WORDS,
    TOKENS,
    ngram_lookup_kernel,
)
from numba_kernels.cpu.running.launch import OwnLaunch, address_of
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import NOTHING, SUREST, Ids

__all__ = ["BREAK", "MOST_IDS", "Lookup", "Text", "follow", "load"]

MOST_IDS = 64
"""Most tokens that a look returns."""

_LEAST_HEADS = 256

assert MOST_MATCH == SUREST


class Text:
    """Tokens in one array, and their index, which is updated before a search: 8 bytes a token, and 6 to 11 for each
    different one."""

    __slots__ = ("_end", "_heads", "_previous", "_state", "_tokens", "_words", "address")

    def __init__(self, tokens: Ids, *, start: int = 0, capacity: int = 0) -> None:
        """Tokens before ``start`` are neither matched nor found. ``capacity`` is the number of tokens before a
        reallocation."""
        self._state: NDArray[np.int64] = np.zeros(TEXT_WORDS, np.int64)
        self.address, self._words = address_of(self._state), self._state.data
        self._words[START] = start
        self._end = len(tokens)
        self._tokens: Ids = np.empty(max(self._end + 256, capacity), np.int32)
        self._tokens[: self._end] = tokens
        self._previous: Ids
        self._heads: Ids
        self._lay_out(_power_of_two(max(_LEAST_HEADS, self._end // 4)))

    def __len__(self) -> int:
        return self._end

    def tokens(self, start: int = 0) -> Ids:
        """A view of the tokens from ``start`` on."""
        return self._tokens[start : self._end]

    def append(self, token_id: int) -> None:
        """Append a token."""
        end = self._end
        if end == len(self._tokens):
            self._grow(end + 1)
        self._tokens[end] = token_id
        self._end = self._words[END] = end + 1

    def extend(self, ids: Ids) -> None:
        """Append tokens."""
        end = self._end + len(ids)
        if end > len(self._tokens):
            self._grow(end)
        self._tokens[self._end : end] = ids
        self._end = self._words[END] = end

    def keep(self, start: int) -> None:
        """From now on tokens before ``start`` are not found."""
        self._words[START] = start

    def forget(self, count: int) -> None:
        """Drop the first tokens and reindex the others."""
        kept = self._tokens[count : self._end].copy()
        self._end = len(kept)
        self._tokens[: self._end] = kept
        self._words[START] = max(0, self._words[START] - count)
        self._lay_out(self._words[NUM_HEADS])

    def _grow(self, least: int) -> None:
        words = self._words
        tokens: Ids = np.empty(max(least, 2 * len(self._tokens)), np.int32)
        tokens[: self._end] = self._tokens[: self._end]
        previous: Ids = np.empty(len(tokens), np.int32)
        previous[: words[NUM_INDEXED]] = self._previous[: words[NUM_INDEXED]]
        self._tokens, self._previous = tokens, previous
        words[TOKENS], words[PREVIOUS] = address_of(tokens), address_of(previous)

    def add_heads(self) -> None:
        """Rebuild the index with room for more different tokens."""
        self._lay_out(2 * self._words[NUM_HEADS])

    def _lay_out(self, num_heads: int) -> None:
        words = self._words
        self._previous = np.empty(len(self._tokens), np.int32)
        self._heads = np.full(num_heads, -1, np.int32)
        words[TOKENS], words[PREVIOUS] = address_of(self._tokens), address_of(self._previous)
        words[HEADS] = address_of(self._heads)
        words[NUM_HEADS], words[NUM_INDEXED], words[NUM_DISTINCT], words[END] = num_heads, 0, 0, self._end


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def follow(text: Text, sequence: Sequence) -> None:
    """Append the sequence's new tokens, so that the text has all of them."""
    known = len(text)
    count = sequence.num_tokens - known
    if count == 1:
        text.append(sequence.last_token_id)
    elif count > 1:
        text.extend(sequence.token_ids(known, sequence.num_tokens))


def load() -> None:
    """Compile the lookup, or load it from disk, so that no draft waits for that."""
    ngram_lookup_kernel()


class Lookup:
    """Looks up the end of one text in another one, which may be the same.

    place  the index of the match's continuation in the text, or -1 if there is none, or it is in another
    """

    __slots__ = ("_answer", "_launch", "_searched", "_words")

    def __init__(self, ending: Text, searched: Text) -> None:
        self._answer: Ids = np.zeros(IDS + MOST_IDS, np.int32)
        self._words = self._answer.data
        self._searched = searched
        self._launch = OwnLaunch(
            ngram_lookup_kernel(), "second", ending.address, searched.address, 0, address_of(self._answer), MOST_IDS
        )

    def __call__(self, most: int, other: Text | None = None) -> tuple[Ids, int]:
        """The tokens after the latest of the longest matches, up to a break and at most ``most``, and the length of the
        match: `LEAST_MATCH` to `MOST_MATCH`, or 0 for none. They repeat themselves at the text's end. ``other`` is
        searched as well, for a longer match."""
        words = self._words
        words[LIMIT] = most
        while status := self._launch(0 if other is None else other.address):
            full = self._searched if status == 1 else other
            assert full is not None
            full.add_heads()
        count = words[COUNT]
        return (self._answer[IDS : IDS + count].copy(), words[DEPTH]) if count else (NOTHING, 0)

    @property
    def place(self) -> int:
        """The index of the match's continuation."""
        place: int = self._words[PLACE]
        return place
