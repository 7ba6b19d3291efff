"""Measurements of drafts and steps: how often draft tokens are accepted, and how long steps take."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import SUREST, Ids

PRIOR, PRIOR_WEIGHT, SEQUENCE_WEIGHT = 0.6, 4.0, 24.0
"""A kind of drafts counts at first as so many tokens with this rate of acceptance, a sequence as so many with the rate
of the kind."""
FADING, SEQUENCE_FADING = 0.985, 0.95
"""The share of such counts that is left after each further draft: the latest 70 drafts of a kind count, and 20 of a
sequence."""

KEPT_TIMES = 8
"""Times of one kind that are kept. Their lower quartile is used, since others use the machine, too."""
STALE_STEPS = 512
"""Steps after which a time is forgotten, as contexts have grown; also the longest back-off."""
BACK_OFF_AGE = 1 / 8
"""The age of a time in steps that one step of a back-off adds: nothing is measured there, and most steps are."""
DRAFTED_S = 1.5e-4
"""Seconds that any draft adds to a step, until measured: mostly Python's."""
TOKEN_COST, SHARED_BY = 0.5, 16
"""The part of its cost that a token beyond the measured ones is taken for, so that what is promising is tried: of one
token's between the two longest steps, or, until these are measured, of a plain step's over its sequences, at least
over so many, since a step of few mostly reads weights."""
DOUBT = 0.5
"""The part of a step's excess over a plain one that is not believed after one measurement, its square after two: a
disturbed one is repeated."""
NEAR = 0.15
"""Relative distance in tokens within which a time counts as measured: less than a tile of products."""
WIDTHS = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8), *range(80, 257, 16))
"""Draft tokens that a step may have in all: few, since each shape is recorded."""


@dataclass(slots=True)
class SpeculationCounters:
    """Counts since the engine's start. ``accepted_by_position``: of the first draft token, of the second, ..."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)


class Draft(NamedTuple):
    """Draft tokens of a sequence, not empty, of a kind whose acceptance is counted together."""

    ids: list[int]
    kind: int
    is_predicted: bool = False


class Ended(NamedTuple):
    """A step that is over: its number, the draft tokens and the kept tokens of each sequence that sampled, and whether
    it computed nothing else."""

    number: int
    drafted: dict[Sequence, int]
    kept: dict[Sequence, int]
    is_pure: bool


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


class Acceptance:
    """Acceptance by sequence and by the kind of draft. Drafts that are not tried are compared with later samples, which
    tells as much, without the cost.

    tried  the drafts of the running or planned step
    """

    def __init__(self, most: int) -> None:
        self.counters = SpeculationCounters(accepted_by_position=[0] * most)
        self.tried: dict[Sequence, Draft] = {}
        self._kinds = [_Chance(FADING) for _ in range(SUREST + 1)]
        self._sequences: dict[Sequence, _Chance] = {}
        self._watched: dict[Sequence, tuple[int, Ids, int]] = {}  # from a place on, these ids of a kind

    def knows(self, sequence: Sequence) -> bool:
        """Whether the sequence had draft tokens before."""
        return sequence in self._sequences

    def chance(self, sequence: Sequence, kind: int) -> float:
        """The chance that a draft token is accepted if all before it are."""
        own = self._sequences.setdefault(sequence, _Chance(SEQUENCE_FADING))
        return own.of(self._kinds[kind].of(PRIOR, PRIOR_WEIGHT), SEQUENCE_WEIGHT)

    def evidence(self, kind: int) -> float:
        """Compared draft tokens of the kind; recent ones count most."""
        return self._kinds[kind].kept + self._kinds[kind].lost

    def try_or_watch(self, drafts: dict[Sequence, Draft], counts: dict[Sequence, int]) -> None:
        """The next step tries drafts of these lengths. It compares one draft at a time of other sequences."""
        for sequence, draft in drafts.items():
            self._sequences.setdefault(sequence, _Chance(SEQUENCE_FADING))
            if counts.get(sequence):
                self.tried[sequence] = draft
            elif sequence not in self._watched:
                self._watched[sequence] = sequence.num_tokens, np.array(draft.ids, np.int32), draft.kind

    def compare(self, sequence: Sequence, *, has_ended: bool = False) -> None:
        """Count an untried draft against the samples since."""
        start, ids, kind = self._watched[sequence]
        came = sequence.token_ids(start, min(sequence.num_tokens, start + len(ids)))
        differs = (came != ids[: len(came)]).nonzero()[0]
        if differs.size or has_ended or len(came) == len(ids):
            del self._watched[sequence]
            self._note(sequence, kind, int(differs[0]) if differs.size else len(came), differs.size > 0)

    def compare_all(self) -> None:
        for sequence in [*self._watched]:
            self.compare(sequence)

    def observe(self, drafted: dict[Sequence, int], kept: dict[Sequence, int]) -> None:
        """Record a step's draft tokens and kept tokens."""
        counters = self.counters
        for sequence, count in drafted.items():
            draft = self.tried.get(sequence)
            if draft is None or not count:
                continue
            accepted = kept[sequence] - 1
            self._note(sequence, draft.kind, accepted, accepted < count)
            counters.num_drafts += 1
            counters.num_draft_tokens += count
            counters.num_accepted_tokens += accepted
            for position in range(accepted):
                counters.accepted_by_position[position] += 1
            counts = sequence.proposals = sequence.proposals or [0, 0, 0, 0]
            for place in (0, 2) if draft.is_predicted else (0,):
                counts[place] += count
                counts[place + 1] += accepted

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        if sequence in self._watched:
            self.compare(sequence, has_ended=True)
        self._sequences.pop(sequence, None)

    def _note(self, sequence: Sequence, kind: int, kept: int, is_lost: bool) -> None:
        self._kinds[kind].note(kept, is_lost)
        if own := self._sequences.get(sequence):
            own.note(kept, is_lost)


@dataclass(slots=True)
class _Kind:
    """The latest times of a kind of steps. Beside one with drafts stands the time of a plain step of as many sequences
    then: plain steps are timed all the time, and show how fast the machine is now."""

    latest: float = 0.0
    seconds: float = 0.0  # the quantile of the times alone
    seen: deque[tuple[float, int, float]] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))


def _low(times: list[float]) -> float:
    return sorted(times)[len(times) // 4]


class StepTimes:
    """Seconds from the end of one step of decodes to the end of the next: of plain ones by their sequences, of those
    with drafts by their tokens."""

    def __init__(self) -> None:
        self._now = 0.0  # in steps
        self._plain: dict[int, _Kind] = {}
        self._tried: dict[int, _Kind] = {}
        self._shapes: dict[tuple[int, int], float] = {}

    def observe(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Record a step. The first of its shape may have been recorded, and is ignored."""
        is_known = self.is_known(num_sequences, num_drafts)
        self._now += 1.0
        self._shapes[num_sequences, num_drafts] = self._now
        if not is_known:
            return
        kinds, key = (self._tried, num_sequences + num_drafts) if num_drafts else (self._plain, num_sequences)
        kind = kinds.setdefault(key, _Kind())
        if self._is_stale(kind):
            kind.seen.clear()
        kind.seen.append((seconds, num_sequences, self.plain(num_sequences) or 0.0 if num_drafts else 0.0))
        kind.seconds = _low([each for each, _, _ in kind.seen])
        kind.latest = self._now

    def pass_by(self, num_steps: int) -> None:
        """Steps of a back-off."""
        self._now += BACK_OFF_AGE * num_steps

    def is_known(self, num_sequences: int, num_drafts: int) -> bool:
        """Whether a step of this shape was seen, not too long ago."""
        return self._now - self._shapes.get((num_sequences, num_drafts), -STALE_STEPS) < STALE_STEPS

    def plain(self, num_sequences: int) -> float | None:
        """Seconds of a plain step, or None if unknown."""
        kind = self._plain.get(num_sequences)
        return None if kind is None or self._is_stale(kind) else kind.seconds

    def tried(self, num_tokens: int) -> float | None:
        """Seconds of a step with drafts, by all its tokens, as fast as plain steps are now; None if unknown."""
        kind = self._tried.get(num_tokens)
        if kind is None or self._is_stale(kind):
            return None
        now = {num_sequences: self.plain(num_sequences) or 0.0 for _, num_sequences, _ in kind.seen}
        return _low([s * now[num] / before if now[num] and before else s for s, num, before in kind.seen])

    def is_timed(self, num_tokens: int) -> bool:
        """Whether a step with drafts was timed with about so many tokens."""
        return any(
            abs(tokens - num_tokens) <= NEAR * num_tokens and not self._is_stale(kind)
            for tokens, kind in self._tried.items()
        )

    def most_tokens(self, num_sequences: int) -> int:
        """Tokens of the longest steps with known times."""
        return max(num_sequences, *(tokens for tokens, kind in self._tried.items() if not self._is_stale(kind)), 0)

    def curve(self, num_sequences: int, most: int = WIDTHS[-1]) -> list[float]:
        """Seconds of a plain step, then with each of ``WIDTHS`` up to the first that is ``most`` or more; empty while
        the plain time is unknown. Interpolated linearly between known times; beyond them guessed too low."""
        plain = self.plain(num_sequences)
        if plain is None:
            return []
        points = [(num_sequences, plain + DRAFTED_S)]
        for tokens in sorted(self._tried):
            seconds = self.tried(tokens)
            if tokens > num_sequences and seconds is not None:
                doubt = DOUBT ** len(self._tried[tokens].seen)
                points.append((tokens, plain + max(0.0, seconds - plain) * (1.0 - doubt)))
        slope = TOKEN_COST * plain / max(SHARED_BY, num_sequences)
        if len(points) > 1:  # what any draft costs is at most half of what the shortest known one does
            points[0] = num_sequences, plain + min(DRAFTED_S, 0.5 * (points[1][1] - plain))
            (before, earlier), (last, seconds) = points[-2:]
            each = (seconds - earlier) / (last - before)
            slope = max(0.0, TOKEN_COST * each if len(points) > 2 else min(slope, each))
        places = [place for place, _ in points]
        widths = num_sequences + np.array(WIDTHS[: 1 + bisect_left(WIDTHS, most)])
        beyond = np.maximum(0, widths - places[-1]) * slope
        return [plain, *(np.interp(widths, places, [seconds for _, seconds in points]) + beyond).tolist()]

    def _is_stale(self, kind: _Kind) -> bool:
        return self._now - kind.latest >= STALE_STEPS
