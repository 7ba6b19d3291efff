"""Drafts from a request's prediction: a text that its answer may repeat, as in OpenAI's `prediction`."""

from __future__ import annotations

import numpy as np

from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import NOTHING, SUREST, Ids
from runtime.engine.speculation.ngram_lookup import Lookup, Text, follow, load


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
