"""Proposals out of a request's prediction: a text that its answer may repeat, as OpenAI's `prediction` gives it."""

from __future__ import annotations

import numpy as np

from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import NOTHING, SUREST, Ids, Text
from runtime.engine.speculation.ngram import best_place


class PredictionDrafter:
    """Follows an answer through its prediction. Where they part, it goes on behind the place that agrees with the
    answer's end for longest, as n-grams do; an answer that has not begun is at the prediction's beginning."""

    name = "prediction"

    def __init__(self) -> None:
        self._texts: dict[Sequence, Text] = {}
        self._places: dict[Sequence, tuple[int, int]] = {}  # output tokens that were followed, and where they led to

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        predicted = sequence.request.prediction
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = Text(sequence)
        output = text.follow(sequence)[sequence.num_prompt_tokens :]
        followed, place = self._places.get(sequence, (0, 0))
        fresh = output[followed:]
        sureness = SUREST
        if place >= 0 and np.array_equal(predicted[place : place + len(fresh)], fresh):
            place += len(fresh)
        else:
            place, sureness = best_place(predicted, output[-SUREST:])
        self._places[sequence] = len(output), place
        return (NOTHING, 0) if place < 0 else (predicted[place : place + most], sureness)

    def end(self, sequence: Sequence) -> None:
        self._texts.pop(sequence, None)
        self._places.pop(sequence, None)
