"""Acceptance rates of draft tokens, those tried and those only compared with later samples: as counters for metrics,
and as chances of the next drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import SUREST, Ids

PRIOR, PRIOR_WEIGHT, SEQUENCE_WEIGHT = 0.6, 4.0, 24.0
FADING, SEQUENCE_FADING = 0.985, 0.95
"""The priors: a drafter's counts start as so many draft tokens with this acceptance rate, a sequence's as so many with
the drafter's rate; they decay as new ones come."""


@dataclass(slots=True)
class SpeculationCounters:
    """Counts since the engine's start. ``accepted_by_position``: of the first draft token, of the second, ..."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Chance:
    """Decaying counts of accepted draft tokens and of first rejected ones."""

    fading: float
    kept: float = 0.0
    lost: float = 0.0

    def note(self, kept: int, is_lost: bool) -> None:
        self.kept = self.fading * self.kept + kept
        self.lost = self.fading * self.lost + is_lost

    def of(self, prior: float, weight: float) -> float:
        return (self.kept + weight * prior) / (self.kept + self.lost + weight)


class _Tried(NamedTuple):
    """Draft tokens in the step."""

    sureness: int
    is_predicted: bool


class _Watched(NamedTuple):
    """Draft tokens that were not tried, for positions from ``start`` of a sequence on."""

    start: int
    ids: Ids
    sureness: int


class Acceptance:
    """Acceptance by sequence and by the drafter's confidence.

    counters  of tried draft tokens
    tried     the draft tokens of the running or planned step
    """

    def __init__(self, most: int) -> None:
        """``most`` is the highest draft length of a sequence."""
        self.counters = SpeculationCounters(accepted_by_position=[0] * most)
        self.tried: dict[Sequence, _Tried] = {}
        self._chances = [_Chance(FADING) for _ in range(SUREST + 1)]  # by the drafter's confidence
        self._by_sequence: dict[Sequence, _Chance] = {}
        self._watched: dict[Sequence, _Watched] = {}

    def chance(self, sequence: Sequence, sureness: int) -> float:
        """The chance that a draft token is accepted if all before it are."""
        return self._own(sequence).of(self._chances[sureness].of(PRIOR, PRIOR_WEIGHT), SEQUENCE_WEIGHT)

    def _own(self, sequence: Sequence) -> _Chance:
        own = self._by_sequence.get(sequence)
        if own is None:
            own = self._by_sequence[sequence] = _Chance(SEQUENCE_FADING)
        return own

    def weight(self, sureness: int) -> float:
        """The number of compared draft tokens of this confidence; recent ones count most."""
        chance = self._chances[sureness]
        return chance.kept + chance.lost

    def knows(self, sequence: Sequence) -> bool:
        """Whether the sequence had draft tokens before."""
        return sequence in self._by_sequence

    def try_(self, sequence: Sequence, sureness: int, *, is_predicted: bool) -> None:
        """The next step tries draft tokens of the sequence."""
        self._own(sequence)
        self.tried[sequence] = _Tried(sureness, is_predicted)

    def watch(self, sequence: Sequence, ids: list[int], sureness: int) -> None:
        """Compare these untried draft tokens with later samples, unless others of this sequence are being compared."""
        if sequence not in self._watched:
            self._own(sequence)
            self._watched[sequence] = _Watched(sequence.num_tokens, np.array(ids, np.int32), sureness)

    def compare(self) -> None:
        """Count the watched draft tokens against the samples since: as informative as trying them, without the cost."""
        for sequence in [*self._watched]:
            self._compare(sequence)

    def _compare(self, sequence: Sequence, *, has_ended: bool = False) -> None:
        start, ids, sureness = self._watched[sequence]
        came = sequence.token_ids(start, min(sequence.num_tokens, start + len(ids)))
        differs = (came != ids[: len(came)]).nonzero()[0]
        if differs.size or has_ended or len(came) == len(ids):
            del self._watched[sequence]
            kept = int(differs[0]) if differs.size else len(came)
            self._note(sequence, sureness, kept, differs.size > 0)

    def observe(self, drafted: dict[Sequence, int], kept: dict[Sequence, int]) -> None:
        """Record a step with so many draft tokens, and so many kept tokens, of each sequence."""
        counters = self.counters
        for sequence, count in drafted.items():
            one = self.tried.get(sequence)
            if one is None or not count:
                continue
            accepted = kept[sequence] - 1
            self._note(sequence, one.sureness, accepted, accepted < count)
            counters.num_drafts += 1
            counters.num_draft_tokens += count
            counters.num_accepted_tokens += accepted
            for position in range(accepted):
                counters.accepted_by_position[position] += 1
            counts = sequence.proposals
            if counts is None:
                counts = sequence.proposals = [0, 0, 0, 0]
            counts[0] += count
            counts[1] += accepted
            if one.is_predicted:
                counts[2] += count
                counts[3] += accepted

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        if sequence in self._watched:
            self._compare(sequence, has_ended=True)
        self._by_sequence.pop(sequence, None)

    def _note(self, sequence: Sequence, sureness: int, kept: int, is_lost: bool) -> None:
        self._chances[sureness].note(kept, is_lost)
        own = self._by_sequence.get(sequence)
        if own is not None:
            own.note(kept, is_lost)
