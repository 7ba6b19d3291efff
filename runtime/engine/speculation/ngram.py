"""Drafters that look up what follows an earlier occurrence of a text's end (`numba_kernels.cpu.ngram_lookup`).

Code that is edited, texts that are summarised and answers that quote repeat long stretches of their prompts (prompt
lookup decoding, Saxena 2023). An incremental index of each text finds the latest positions of the last token. A request
may also have a prediction, a text that its answer may repeat, as in OpenAI's `prediction`.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cpu.ngram_lookup import (
    BREAK,
    COUNT,
    DEPTH,
    END,
    HEADS,
    IDS,
    LEAST_MATCH,
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


class _Own(NamedTuple):
    """A sequence's text, and its lookup."""

    text: Text
    lookup: Lookup


class NgramDrafter:
    """Drafts from the sequence's own prompt and output."""

    name = "ngram"

    def __init__(self) -> None:
        load()
        self._texts: dict[Sequence, _Own] = {}

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        return self._lookup(sequence)(most)

    def end(self, sequence: Sequence) -> None:
        self._texts.pop(sequence, None)

    def _lookup(self, sequence: Sequence) -> Lookup:
        """The lookup over the text, brought up to date with the sequence."""
        own = self._texts.get(sequence)
        if own is None:
            text = Text(sequence.token_ids(0, sequence.num_tokens))
            own = self._texts[sequence] = _Own(text, Lookup(text, text))
        else:
            follow(own.text, sequence)
        return own.lookup


MOST_KEPT_TOKENS = 32_768
"""Tokens of a tenant's ended sequences; the oldest are dropped first."""

_SLACK = 4096
"""Dropped tokens that stay in the array before the others are moved."""

MOST_TENANTS = 256


class _History:
    """The outputs of a tenant's ended sequences, in one text, with breaks between."""

    def __init__(self) -> None:
        self.text = Text(np.empty(0, np.int32), capacity=MOST_KEPT_TOKENS + _SLACK)

    def add(self, tokens: Ids) -> None:
        text = self.text
        tokens = tokens[-(MOST_KEPT_TOKENS - 1) :]
        if len(text) + len(tokens) + 1 > MOST_KEPT_TOKENS + _SLACK:
            text.forget(len(text) + len(tokens) + 1 - MOST_KEPT_TOKENS)
        text.extend(tokens)
        text.append(BREAK)
        text.keep(max(0, len(text) - MOST_KEPT_TOKENS))


class SuffixDrafter(NgramDrafter):
    """Drafts from the sequence's own tokens, or from answers to other requests of the same tenant (``cache_salt``) if
    those match for longer."""

    name = "suffix"

    def __init__(self) -> None:
        super().__init__()
        self._histories: OrderedDict[str | None, _History] = OrderedDict()

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        history = self._histories.get(sequence.request.cache_salt)
        return self._lookup(sequence)(most, None if history is None else history.text)

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        salt = sequence.request.cache_salt
        if sequence.num_output_tokens > LEAST_MATCH:
            history = self._histories.setdefault(salt, _History())
            self._histories.move_to_end(salt)
            history.add(sequence.output_ids)
            for oldest in list(islice(self._histories, max(0, len(self._histories) - MOST_TENANTS))):
                del self._histories[oldest]


class _Followed:
    """An answer's position in its prediction.

    num_followed  tokens of the sequence that were compared, prompt included
    place         the index in the prediction, or -1
    """

    __slots__ = ("lookup", "num_followed", "place", "text")

    def __init__(self, sequence: Sequence) -> None:
        self.text = Text(sequence.token_ids(0, sequence.num_tokens), start=sequence.num_prompt_tokens)
        self.lookup = Lookup(self.text, Text(sequence.request.prediction))
        self.num_followed, self.place = sequence.num_prompt_tokens, 0


class PredictionDrafter:
    """Follows an answer through its prediction. After a difference it continues after the place with the longest match
    of the answer's end, as n-grams do; before the first token it is at the prediction's start."""

    name = "prediction"

    def __init__(self) -> None:
        load()
        self._followed: dict[Sequence, _Followed] = {}

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        predicted = sequence.request.prediction
        one = self._followed.get(sequence)
        if one is None:
            one = self._followed[sequence] = _Followed(sequence)
        else:
            follow(one.text, sequence)
        fresh, confidence = one.text.tokens(one.num_followed), SUREST
        if one.place >= 0 and np.array_equal(predicted[one.place : one.place + len(fresh)], fresh):
            one.place += len(fresh)
        else:
            _, confidence = one.lookup(1)
            one.place = one.lookup.place
        one.num_followed = len(one.text)
        return (NOTHING, 0) if one.place < 0 else (predicted[one.place : one.place + most], confidence)

    def end(self, sequence: Sequence) -> None:
        self._followed.pop(sequence, None)
