"""Chooses the draft length of each sequence in a step, so that speculation pays.

A plain step of n sequences gives n / t(0) tokens a second. With d draft tokens it gives (n + sum of their acceptance
chances) / t(d). Chances fall along a draft, since a token is accepted only with all before it, so the best d are those
with the highest chances. t is measured (`step_times`); chances are counted by sequence and by the drafter's confidence.
If no d is better than 0, none is tried, and drafts are looked for only now and then.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from runtime.engine.grammar.matcher import GrammarMatcher
from runtime.engine.scheduling.sequence import Request, Sequence
from runtime.engine.speculation.acceptance import Acceptance, SpeculationCounters
from runtime.engine.speculation.account import TrialAccount
from runtime.engine.speculation.drafter import (
    SUREST,
    BatchDrafter,
    DistributionDrafter,
    Drafter,
    LeftChunk,
    StateDrafter,
)
from runtime.engine.speculation.naps import Naps
from runtime.engine.speculation.prediction import PredictionDrafter
from runtime.engine.speculation.step_times import WIDTHS, StepTimes
from runtime.engine.speculation.width_choice import FIRST, RUN_STEPS, SHORT_S, WidthChoice
from runtime.engine.steps.executor import KeptRows

logger = logging.getLogger("xserv.engine")

SHARE_PAYING = 0.25
"""Fraction of a step's time that looking for drafts may take while they pay; otherwise see `naps`."""

TRIAL_STEPS = 64
"""Overlapped steps between two that are not, to see whether drafts would pay."""

TRIAL_STEPS_PREDICTED = 4
"""The same while a request has a prediction, whose lookup is fast."""

PLAIN_STEPS, MOST_PLAIN_STEPS = 16, 128
"""Steps with drafts before a few without, although they pay, and at most between two such pauses, each time twice as
many: they update the times of plain steps if the machine's speed changes."""

COLD, COLD_FADING = 1.6, 0.75
"""How many times more than later ones the first of such steps is longer than a plain one, and the factor of that a step
later, if steps are short: the code and memory are cold."""

LEAST_WEIGHT = 24.0
"""Draft tokens of a kind that have to be compared with samples before any are tried, if steps are short: a trial costs
more than a look."""

MOST_DISTURBED = 2.0
"""Upper limit of a step's charge, as a multiple of twice the time of plain steps for its tokens: it may lack a
processor that others use, but the machine may have slept, too."""

KEPT_STEPS = 8
"""Short steps between two choices."""

HANG_S = 1.0

_INT32 = np.dtype(np.int32)


class Speculator:
    """Proposes draft tokens before the engine plans a step. It belongs to the engine's loop.

    drafter   of all sequences; with None only requests' predictions are used
    most      the highest draft length of a sequence
    fixed     try as many draft tokens as there are, whether or not it pays: for measurements
    counters  of tried draft tokens
    hang_s    a drafter that takes so long for one sequence is turned off
    clock     seconds
    wanted    the hidden states that the drafter reads, or None
    reads_states  whether `follow` is to be called
    num_resting   steps to come without calls, which the engine counts down. If
                  steps are short, a call for each would take more than a percent of them.
    """

    def __init__(
        self, drafter: Drafter | None, most: int, vocab_size: int, *, fixed: bool = False,
        hang_s: float = HANG_S, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.times = StepTimes()
        self._drafter: Drafter | None = drafter
        self._distribution_drafter = drafter if isinstance(drafter, DistributionDrafter) else None  # the same
        self._batch_drafter = drafter if isinstance(drafter, BatchDrafter) else None  # the same
        self._predictions: Drafter | None = PredictionDrafter()
        self._num_predicted = 0  # unfinished sequences with predictions
        self._follower = drafter if isinstance(drafter, StateDrafter) else None  # checking protocols is slow
        self.wanted = None if self._follower is None else self._follower.wanted
        self._most = most
        self._vocab_size = vocab_size
        self._fixed = fixed
        self._acceptance = Acceptance(most)
        self._predicted: set[Sequence] = set()  # sequences drafted for from predictions
        self._lookup_s = 0.0  # of one sequence, fading
        self._pays = True  # as far as is known
        self._next = 0  # the sequence to look at first
        self._last_end: tuple[int, int, float] | None = None  # of the previous step: number, sequences, end
        self._has_just_tried = False  # in the step before
        self._num_in_run = 0  # steps with proposals since the latest nap
        self._chosen: dict[Sequence, int] = {}  # draft length of each, while the choice is kept
        self._most_wanted = 0  # of one sequence in the previous look, limited by its end
        self._num_tried, self._most_tried = 0, PLAIN_STEPS  # steps with drafts since the latest plain one
        self._num_asked = 0
        self._is_held = False
        self.reads_states = self._follower is not None
        self.num_resting = 0
        self._hang_s = hang_s
        self._clock = clock
        self._account = TrialAccount()
        self._choice = WidthChoice(self.times, self._account)
        self._naps = Naps()
        self._plain_s = 0.0  # of a plain step of as many sequences

    @property
    def counters(self) -> SpeculationCounters:
        return self._acceptance.counters

    @property
    def observes(self) -> bool:
        """Whether `observe` is to be called for the latest step, unless it rests."""
        return self._naps.is_seen and self.is_asked

    @property
    def _is_short(self) -> bool:
        return self._plain_s < SHORT_S

    @property
    def is_on(self) -> bool:
        """Whether the drafter has not been turned off."""
        return self._drafter is not None

    @property
    def is_asked(self) -> bool:
        """Whether drafts are possible now."""
        return self._drafter is not None or self._num_predicted > 0

    def tries_all(self) -> None:
        """From now on try as many draft tokens as there are."""
        self._fixed = True
        self._wake()

    def expect(self, request: Request) -> None:
        """A request was admitted."""
        if len(request.prediction) and request.speculates:
            self._num_predicted += len(request.open_sequences)
            self._wake()

    def _wake(self) -> None:
        self._naps.end()
        self.num_resting = 0

    def wants_tokens(self) -> bool:
        """Whether to plan the next step only after the running one's tokens are known: while drafts pay, and now and
        then to see whether they would. Called once a step, if steps overlap."""
        self._num_asked += 1
        every = TRIAL_STEPS_PREDICTED if self._num_predicted else TRIAL_STEPS
        self._is_held = self._fixed or bool(self._acceptance.tried) or self._num_asked % every == 0
        if self._is_held:
            self._wake()
        return self._is_held

    def propose(self, running: Iterable[Sequence]) -> dict[Sequence, list[int]]:
        """Drafts that are worth trying in the next step, for sequences that lack only their next token. All of a
        sequence's tokens have to be known."""
        if self._acceptance.tried:
            self._acceptance.tried = {}
        if not self._is_held and self._naps.sleeps_on():
            return {}
        if self._num_tried >= self._most_tried and not self._fixed and not self._is_held:
            self._num_tried, self._most_tried = 0, min(2 * self._most_tried, MOST_PLAIN_STEPS)
            self.num_resting = self._naps.pause() - 1  # this one is the first
            return {}
        begun = self._clock()
        drafts = self._propose(running)
        self._num_tried += 1 if drafts else 0
        if not drafts and self._plain_s > 0.0 and not self._fixed and not self._num_predicted:
            if self._has_just_tried and self._most_wanted < self._most:
                # These sequences are too near their ends; drafts of others are looked for when they have ended.
                self.num_resting = self._most_wanted
                return drafts
            self._num_tried, self._most_tried = 0, PLAIN_STEPS
            num_steps = self._naps.begin(self._clock() - begun, self._plain_s)
            self.num_resting = self._naps.num_resting
            self._num_in_run = 0
            self._account.earn(self._plain_s, num_steps)
            self.times.pass_by(num_steps)
        return drafts

    def _propose(self, running: Iterable[Sequence]) -> dict[Sequence, list[int]]:
        decodes = [s for s in running if s.num_tokens + s.num_pending - s.num_computed == 1 and not s.is_drawing_last]
        plain = self.times.plain(len(decodes))
        self._plain_s = plain or 0.0
        if not decodes or (plain is None and not self._fixed):
            return {}
        acceptance = self._acceptance
        acceptance.compare()
        found = self._look(decodes, 0.0 if plain is None or self._fixed else plain)
        if not found:
            return {}
        if self._fixed:
            counts = {sequence: len(ids) for sequence, (ids, _) in found.items()}
        else:
            counts = self._best(found, len(decodes))
            self._pays = len(counts) > 0
        drafts = {}
        for sequence, (ids, sureness) in found.items():
            count = counts.get(sequence, 0)
            if count:
                drafts[sequence] = ids[:count]
                acceptance.try_(sequence, sureness, is_predicted=sequence in self._predicted)
            else:
                acceptance.watch(sequence, ids, sureness)
        return drafts

    def _best(self, found: dict[Sequence, tuple[list[int], int]], num_decodes: int) -> dict[Sequence, int]:
        """The draft length of each sequence, by the chance that its next token is accepted. While drafts pay, the
        choice is kept for a few steps: choosing takes a part of a short one."""
        kept = self._chosen
        if (
            self._num_in_run % KEPT_STEPS
            and kept.keys() == found.keys()
            and self._account.allows(0.0)
            and all(len(found[sequence][0]) >= count for sequence, count in kept.items())
        ):
            return kept
        curve = self.times.curve(num_decodes, num_decodes * self._most)
        first = min(len(curve) - 1, 1 + bisect_left(WIDTHS, FIRST * num_decodes))
        self._account.bound(curve[first], max(curve))
        acceptance, least = self._acceptance, LEAST_WEIGHT if self._is_short else 0.0
        sequences, chances = list(found), list[tuple[float, int, int]]()
        for number, sequence in enumerate(sequences):
            ids, sureness = found[sequence]
            if acceptance.weight(sureness) >= least:
                together, chance = 1.0, acceptance.chance(sequence, sureness)
                for place in range(1, 1 + len(ids)):
                    together *= chance
                    chances.append((-together, place, number))
        if len(sequences) > 1:  # short steps use one length for all: another layout of rows costs more than it gains
            chances.sort(key=itemgetter(1) if self._is_short else None)
        likeliest = [-together for together, _, _ in chances]
        width = self._choice.best(
            likeliest, num_decodes, len(found), self._most, curve, self._num_in_run,
            ends_soon=self._most_wanted < self._most,
        )  # fmt: skip
        counts: dict[Sequence, int] = {}
        for _, place, number in chances[:width]:
            sequence = sequences[number]
            counts[sequence] = max(counts.get(sequence, 0), place)
        self._chosen = counts if self._is_short and self._num_in_run >= RUN_STEPS else {}
        return counts

    def distributions(self, drafts: dict[Sequence, list[int]]) -> dict[Sequence, NDArray[np.float32]]:
        """The distributions ``[proposals, vocab_size]`` of those drafts that rejection sampling is to verify; the
        others are accepted if they equal the sample."""
        drafter, found = self._distribution_drafter, {}
        for sequence, ids in drafts.items() if drafter is not None else ():
            if sequence not in self._predicted:
                known = drafter.distributions(sequence, len(ids))  # type: ignore[union-attr]
                if known is not None:
                    assert known.shape == (len(ids), self._vocab_size), "one for each proposal"
                    found[sequence] = known
        return found

    def observe(self, number: int, drafted: dict[Sequence, int], kept: dict[Sequence, int], is_pure: bool) -> None:
        """Record that step ``number`` is over. ``drafted`` is the draft length of each sequence, ``kept`` the tokens
        kept of each that sampled; ``is_pure`` means that it computed nothing else."""
        now = self._clock()
        if drafted:
            self._acceptance.observe(drafted, kept)
        total = sum(drafted.values())
        was_trying, self._has_just_tried = self._has_just_tried, total > 0
        place = self._num_in_run
        self._num_in_run += 1 if total else 0
        is_asleep = self._naps.is_asleep
        last, self._last_end = self._last_end, None
        if is_pure:
            self._last_end = number, len(kept), self._clock() if is_asleep else now
        if last is None or not is_pure or last[:2] != (number - 1, len(kept)):
            return
        if total:
            self._settle(len(kept), total, sum(kept.values()), now - last[2], place)
        elif not self._is_held:  # a held one is not plain
            plain = self.times.plain(len(kept))
            if is_asleep or plain is None or not (was_trying or self._naps.takes_naps):
                self.times.observe(len(kept), 0, now - last[2])
            if not is_asleep and plain is not None:  # naps have paid
                self._account.earn(plain)

    def _settle(self, num_sequences: int, num_drafts: int, num_kept: int, seconds: float, place: int) -> None:
        """Account for a step with drafts that took ``seconds``; ``place`` is its index in the run."""
        is_first, plain = not self.times.is_known(num_sequences, num_drafts), self.times.plain(num_sequences)
        if plain is None:
            self.times.observe(num_sequences, num_drafts, seconds)
            return
        # One that takes twice as long as plain steps for its tokens was disturbed.
        most = 2.0 * plain * (1 + num_drafts / num_sequences)
        cold = COLD * COLD_FADING**place if self._is_short else 0.0
        warm_s = plain + max(0.0, min(seconds, most) - plain) / (1.0 + cold)
        self.times.observe(num_sequences, num_drafts, warm_s)
        worth_s = num_kept / num_sequences * plain
        if is_first:
            self._account.set_up(seconds - worth_s, plain)
            return
        self._account.settle(worth_s - min(seconds, MOST_DISTURBED * most))
        if self._naps.takes_naps and worth_s > (self.times.tried(num_sequences + num_drafts) or seconds):
            self._wake()

    def follow(self, kept: KeptRows, chunks: Callable[[], list[LeftChunk]]) -> None:
        """Pass on the hidden states of a step that is over. See `StateDrafter`."""
        drafter = self._follower
        if drafter is not None:
            try:
                drafter.follow(kept, chunks, pays=self._fixed or self._pays)
            except Exception:
                assert self._drafter is not None
                self._turn_off(self._drafter, "failed", with_trace=True)

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        if len(sequence.request.prediction) and sequence.request.speculates:
            self._num_predicted -= 1
        self._acceptance.end(sequence)
        self._chosen.pop(sequence, None)
        for drafter in (self._drafter, self._predictions):
            if drafter is not None:
                try:
                    drafter.end(sequence)
                except Exception:
                    self._turn_off(drafter, "failed", with_trace=True)

    def _look(self, decodes: list[Sequence], step_s: float) -> dict[Sequence, tuple[list[int], int]]:
        """Drafts of as many sequences as time allows."""
        num_asked = len(decodes)
        if step_s > 0.0 and self._lookup_s > 0.0 and self._pays:
            num_asked = min(num_asked, max(1, int(SHARE_PAYING * step_s / self._lookup_s)))
        first = self._next % len(decodes)
        asked = [*decodes[first:], *decodes[:first]][:num_asked] if num_asked < len(decodes) else decodes
        self._next = first + num_asked if num_asked < len(decodes) else 0
        found = {}
        self._predicted.clear()
        begun = time.perf_counter()
        wanted, self._most_wanted = [], 0
        for sequence in asked:
            most = min(self._most, sequence.max_tokens - sequence.num_output_tokens - 1)
            if most > 0 and not sequence.num_pending and sequence.request.speculates:
                wanted.append((sequence, most))
                self._most_wanted = max(self._most_wanted, most)
        if self._batch_drafter is not None and wanted:
            self._prepare(self._batch_drafter, wanted)
        for sequence, most in wanted:
            ids, sureness = self._ask(sequence, most)
            if sequence.matcher is not None:
                ids, sureness = _within(sequence.matcher, ids, sureness, most)
            if ids:
                found[sequence] = ids, sureness
        spent = (time.perf_counter() - begun) / num_asked
        self._lookup_s = spent if self._lookup_s == 0.0 else 0.9 * self._lookup_s + 0.1 * spent
        return found

    def _prepare(self, drafter: BatchDrafter, wanted: list[tuple[Sequence, int]]) -> None:
        """Prepare drafts. A drafter that fails, or takes too long without new sequences, is turned off."""
        begun = time.perf_counter()
        try:
            drafter.prepare(wanted)
        except Exception:
            self._turn_off(drafter, "failed", with_trace=True)
            return
        has_new = not all(self._acceptance.knows(sequence) for sequence, _ in wanted)  # whose prompt it computes
        if not has_new and time.perf_counter() - begun > self._hang_s * len(wanted):
            self._turn_off(drafter, f"took more than {self._hang_s:g} s for each of {len(wanted)} sequences")

    def _ask(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        """The draft from the request's prediction, or else from the drafter."""
        if self._predictions is not None and len(sequence.request.prediction):
            ids, sureness = self._sound(self._predictions, sequence, most)
            if ids:
                self._predicted.add(sequence)
                return ids, sureness
        return ([], 0) if self._drafter is None else self._sound(self._drafter, sequence, most)

    def _sound(self, drafter: Drafter, sequence: Sequence, most: int) -> tuple[list[int], int]:
        """A drafter's valid draft. A drafter that fails, gives invalid tokens or takes too long is turned off."""
        begun = time.perf_counter()
        try:
            ids, sureness = drafter.propose(sequence, most)
            if not isinstance(ids, np.ndarray) or ids.dtype != _INT32 or ids.ndim != 1 or len(ids) > most:
                self._turn_off(drafter, f"proposed no array of at most {most} ids")
                return [], 0
            said: list[int] = ids.tolist()
            if said and not (min(said) >= 0 and max(said) < self._vocab_size):
                self._turn_off(drafter, f"proposed ids outside the vocabulary of {self._vocab_size}")
                return [], 0
            sureness = int(sureness)
            if not 0 <= sureness <= SUREST:
                sureness = 0 if sureness < 0 else SUREST
        except Exception:
            self._turn_off(drafter, "failed", with_trace=True)
            return [], 0
        if time.perf_counter() - begun > self._hang_s:
            self._turn_off(drafter, f"took more than {self._hang_s:g} s for one sequence")
            return [], 0
        return said, sureness

    def _turn_off(self, drafter: Drafter, why: str, *, with_trace: bool = False) -> None:
        logger.error("the drafter %s %s: it is off", drafter.name, why, exc_info=with_trace)
        if drafter is self._drafter:
            self._drafter = self._follower = self._batch_drafter = self._distribution_drafter = None
            self.reads_states = False
        else:
            self._predictions = None


def _within(matcher: GrammarMatcher, ids: list[int], sureness: int, most: int) -> tuple[list[int], int]:
    """The draft tokens that a grammar accepts, or else those that it forces."""
    if ids:
        ids = ids[: matcher.num_allowed(ids)]
    return (ids, sureness) if ids else (matcher.forced()[:most], SUREST)
