"""Proposals out of what was said before: the tokens behind the latest place that ends as the sequence does now.

Code that is edited, texts that are summarised and answers that quote repeat long stretches of their prompts (prompt
lookup decoding, Saxena 2023). The place is looked for anew each time: one comparison of all tokens with the last, some
ten microseconds for 32,000, and no index to keep.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

import numpy as np

from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import NOTHING, SUREST, Ids, Text

LEAST_MATCH = 2
"""Tokens that have to agree: after a single one the next is anybody's guess."""

BREAK = -1
"""Stands between texts, and equals no token."""


MOST_PLACES = 64
"""Places that are compared; the latest."""

_BACK = np.arange(SUREST, dtype=np.int64)


def best_place(tokens: Ids, ending: Ids) -> tuple[int, int]:
    """Behind which of ``tokens`` the longest agreement with ``ending`` is (the latest of equals), and for how many
    tokens it lasts, at most ``SUREST``; (-1, 0): nowhere for long enough. The last token is no place, nor is one before
    a break, since nothing follows."""
    end = len(tokens) - 1
    length = min(len(ending), SUREST)
    if end < LEAST_MATCH or length < LEAST_MATCH:
        return -1, 0
    places = (tokens[:end] == ending[-1]).nonzero()[0][-MOST_PLACES:]
    places = places[tokens[places + 1] != BREAK]
    if not places.size:
        return -1, 0
    back = np.maximum(places[:, None] - _BACK[:length], 0)  # what is before the first token is cut off below
    agrees = tokens[back] == ending[::-1][:length]
    depths = np.where(agrees.all(1), length, agrees.argmin(1))
    depths = np.minimum(depths, places + 1)
    best = len(depths) - 1 - int(depths[::-1].argmax())
    depth = int(depths[best])
    return (int(places[best]) + 1, depth) if depth >= LEAST_MATCH else (-1, 0)


def continuation(tokens: Ids, ending: Ids, most: int) -> tuple[Ids, int]:
    """What follows at the `best_place`, and for how many tokens that agrees. A proposal that runs over the end of
    ``tokens`` repeats itself."""
    first, depth = best_place(tokens, ending)
    if first < 0:
        return NOTHING, 0
    found = tokens[first : first + most]
    if len(found) < most:
        found = np.resize(tokens[first:], most)
    return found, depth


class NgramDrafter:
    """The sequence's own prompt and output."""

    name = "ngram"

    def __init__(self) -> None:
        self._texts: dict[Sequence, Text] = {}

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        tokens = self._tokens(sequence)
        return continuation(tokens, tokens[-SUREST:], most)

    def end(self, sequence: Sequence) -> None:
        self._texts.pop(sequence, None)

    def _tokens(self, sequence: Sequence) -> Ids:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = Text(sequence)
        return text.follow(sequence)


MOST_KEPT_TOKENS = 32_768
"""Of a tenant's ended sequences; the oldest are forgotten first."""

MOST_TENANTS = 256


class _History:
    """The outputs of a tenant's ended sequences, in one array, with breaks between."""

    def __init__(self) -> None:
        self._tokens: Ids = np.full(2 * MOST_KEPT_TOKENS, BREAK, np.int32)
        self._end = 0

    @property
    def tokens(self) -> Ids:
        return self._tokens[max(0, self._end - MOST_KEPT_TOKENS) : self._end]

    def add(self, tokens: Ids) -> None:
        tokens = tokens[-(MOST_KEPT_TOKENS - 1) :]
        if self._end + len(tokens) + 1 > len(self._tokens):
            kept = self.tokens.copy()
            self._tokens[: len(kept)] = kept
            self._end = len(kept)
        self._tokens[self._end : self._end + len(tokens)] = tokens
        self._end += len(tokens) + 1
        self._tokens[self._end - 1] = BREAK


class SuffixDrafter(NgramDrafter):
    """The sequence's own tokens, and, where these do not agree for as long, what other requests of the same tenant
    (its ``cache_salt``) have got as answers."""

    name = "suffix"

    def __init__(self) -> None:
        super().__init__()
        self._histories: OrderedDict[str | None, _History] = OrderedDict()

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        found, depth = super().propose(sequence, most)
        history = self._histories.get(sequence.request.cache_salt)
        if history is None or depth == SUREST:
            return found, depth
        others, depth_there = continuation(history.tokens, self._tokens(sequence)[-SUREST:], most)
        if depth_there > depth:
            breaks = np.flatnonzero(others == BREAK)
            others = others[: breaks[0]] if breaks.size else others
            if len(others):
                return others, depth_there
        return found, depth

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        salt = sequence.request.cache_salt
        if sequence.num_output_tokens > LEAST_MATCH:
            history = self._histories.setdefault(salt, _History())
            self._histories.move_to_end(salt)
            history.add(sequence.output_ids)
            for oldest in list(islice(self._histories, max(0, len(self._histories) - MOST_TENANTS))):
                del self._histories[oldest]
