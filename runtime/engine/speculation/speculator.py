"""Speculation as the engine sees it: drafts before a step is planned, and what became of them.

The `Speculator` asks drafters and turns off one that fails; how much of a draft is tried is `policy`'s decision.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from runtime.engine.grammar.matcher import GrammarMatcher
from runtime.engine.scheduling.sequence import Request, Sequence
from runtime.engine.scheduling.step import Step
from runtime.engine.speculation.drafter import (
    SUREST,
    BatchDrafter,
    DistributionDrafter,
    Drafter,
    LeftChunk,
    StateDrafter,
)
from runtime.engine.speculation.evidence import Draft, Ended, SpeculationCounters
from runtime.engine.speculation.ngram import PredictionDrafter
from runtime.engine.speculation.policy import DraftPolicy
from runtime.engine.steps.assemble import Assembled
from runtime.engine.steps.executor import AuxiliaryHiddenStates

logger = logging.getLogger("xserv.engine")

HELD_EVERY, HELD_EVERY_PREDICTED = 64, 4
"""Overlapped steps between two that are not, to see whether drafts would pay; the second while a request has a
prediction, whose lookup is fast."""

HANG_S = 1.0


class Speculator:
    """Proposes draft tokens before the engine plans a step. It belongs to the engine's loop.

    drafter   of all sequences; with None only requests' predictions are used
    most      the highest draft length of a sequence
    fixed     try as many draft tokens as there are, whether or not it pays: for measurements
    hang_s    a drafter that takes so long for one sequence is turned off
    clock     seconds
    wanted    the hidden states that the drafter reads, or None
    """

    def __init__(
        self, drafter: Drafter | None, most: int, vocab_size: int, *, fixed: bool = False,
        hang_s: float = HANG_S, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.policy = DraftPolicy(most, fixed=fixed, clock=clock)
        self.wanted = drafter.wanted if isinstance(drafter, StateDrafter) else None
        self._predictions: Drafter | None = PredictionDrafter()
        self._num_predicted = 0  # unfinished sequences with predictions
        self._most, self._vocab_size, self._hang_s = most, vocab_size, hang_s
        self._num_asked = 0
        self._set(drafter)

    def _set(self, drafter: Drafter | None) -> None:
        self._drafter = drafter
        # The same, if it is one: checking protocols is slow.
        self._batch_drafter = drafter if isinstance(drafter, BatchDrafter) else None
        self._state_drafter = drafter if isinstance(drafter, StateDrafter) else None
        self._distribution_drafter = drafter if isinstance(drafter, DistributionDrafter) else None

    @property
    def counters(self) -> SpeculationCounters:
        return self.policy.acceptance.counters

    @property
    def is_on(self) -> bool:
        """Whether the drafter has not been turned off."""
        return self._drafter is not None

    @property
    def _is_asked(self) -> bool:
        """Whether drafts are possible now."""
        return self._drafter is not None or self._num_predicted > 0

    def tries_all(self) -> None:
        """From now on try as many draft tokens as there are."""
        self.policy.fixed = True
        self.policy.wake()

    def expect(self, request: Request) -> None:
        """A request was admitted."""
        if len(request.prediction) and request.speculates:
            self._count_predicted(len(request.open_sequences))
            self.policy.wake()

    def _count_predicted(self, more: int) -> None:
        self._num_predicted += more
        self.policy.never_backs_off = self._num_predicted > 0

    def wants_tokens(self) -> bool:
        """Whether to plan the next step only after the running one's tokens are known: while drafts pay, and now and
        then to see whether they would. Called once a step, if steps overlap."""
        if not self._is_asked:
            return False
        policy = self.policy
        self._num_asked += 1
        every = HELD_EVERY_PREDICTED if self._num_predicted else HELD_EVERY
        policy.is_held = policy.fixed or bool(policy.acceptance.tried) or self._num_asked % every == 0
        if policy.is_held:
            policy.wake()
        return policy.is_held

    def plan(self, running: Iterable[Sequence]) -> dict[Sequence, list[int]]:
        """Drafts that are worth trying in the next step, for sequences that lack only their next token. All of a
        sequence's tokens have to be known."""
        if not self._is_asked:
            return {}
        counts = self.policy.plan(running, self._look)
        tried = self.policy.acceptance.tried
        return {sequence: tried[sequence].ids[:count] for sequence, count in counts.items()}

    def observe(self, step: Step, sampling_sequences: list[Sequence], accepted: dict[Sequence, int] | None) -> None:
        """Take up a step that is over: the sequences that sampled in it, and how many tokens each of them kept (None:
        one)."""
        if not (self._is_asked and self.policy.observes):
            return
        drafted: dict[Sequence, int] = {}
        if step.num_drafts:
            drafted = {chunk.sequence: len(chunk.draft_ids) for chunk in step.chunks if chunk.draft_ids}
        kept = dict.fromkeys(sampling_sequences, 1) if accepted is None else accepted
        self.policy.observe(
            Ended(step.number, drafted, kept, step.num_tokens == len(sampling_sequences) + step.num_drafts)
        )

    def distributions(self, drafts: dict[Sequence, list[int]]) -> dict[Sequence, NDArray[np.float32]]:
        """The distributions ``[proposals, vocab_size]`` of those drafts that rejection sampling is to verify; the
        others are accepted if they equal the sample."""
        drafter, tried, found = self._distribution_drafter, self.policy.acceptance.tried, {}
        for sequence, ids in drafts.items() if drafter is not None else ():
            if sequence not in tried or not tried[sequence].is_predicted:
                known = drafter.distributions(sequence, len(ids))  # type: ignore[union-attr]
                if known is not None:
                    assert known.shape == (len(ids), self._vocab_size), "one for each proposal"
                    found[sequence] = known
        return found

    def follow(self, assembled: Assembled, kept: AuxiliaryHiddenStates | None) -> None:
        """Pass on the hidden states of a step that is over, if it left any. See `StateDrafter`."""
        drafter = self._state_drafter
        if drafter is not None and kept is not None and kept.number == assembled.input.number:
            try:
                pays = self.policy.fixed or self.policy.pays
                drafter.follow(kept, partial(_left_chunks, assembled, kept), pays=pays)
            except Exception:
                self._turn_off(drafter, "failed", with_trace=True)

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        if len(sequence.request.prediction) and sequence.request.speculates:
            self._count_predicted(-1)
        self.policy.end(sequence)
        for drafter in (self._drafter, self._predictions):
            if drafter is not None:
                try:
                    drafter.end(sequence)
                except Exception:
                    self._turn_off(drafter, "failed", with_trace=True)

    def _look(self, decodes: list[Sequence]) -> dict[Sequence, Draft]:
        """The drafts of these sequences."""
        wanted = [
            (sequence, most)
            for sequence in decodes
            if (most := min(self._most, sequence.max_tokens - sequence.num_output_tokens - 1)) > 0
            and not sequence.num_pending
            and sequence.request.speculates
        ]
        if self._batch_drafter is not None and wanted:
            self._prepare(self._batch_drafter, wanted)
        return {sequence: draft for sequence, most in wanted if (draft := self._ask(sequence, most)).ids}

    def _prepare(self, drafter: BatchDrafter, wanted: list[tuple[Sequence, int]]) -> None:
        """Prepare drafts. A drafter that fails, or takes too long without new sequences, is turned off."""
        begun = time.perf_counter()
        try:
            drafter.prepare(wanted)
        except Exception:
            self._turn_off(drafter, "failed", with_trace=True)
            return
        has_new = not all(self.policy.acceptance.knows(sequence) for sequence, _ in wanted)  # whose prompt it computes
        if not has_new and time.perf_counter() - begun > self._hang_s * len(wanted):
            self._turn_off(drafter, f"took more than {self._hang_s:g} s for each of {len(wanted)} sequences")

    def _ask(self, sequence: Sequence, most: int) -> Draft:
        """The draft from the request's prediction, or else from the drafter, as far as a grammar accepts it, or else
        what the grammar forces."""
        draft, is_predicted = Draft([], 0), False
        if self._predictions is not None and len(sequence.request.prediction):
            draft = self._sound(self._predictions, sequence, most)
            is_predicted = len(draft.ids) > 0
        if not is_predicted and self._drafter is not None:
            draft = self._sound(self._drafter, sequence, most)
        if sequence.matcher is not None:
            draft = _within(sequence.matcher, draft, most)
        return draft._replace(is_predicted=True) if is_predicted else draft

    def _sound(self, drafter: Drafter, sequence: Sequence, most: int) -> Draft:
        """A drafter's valid draft. A drafter that fails, gives invalid tokens or takes too long is turned off."""
        begun = time.perf_counter()
        try:
            ids, kind = drafter.propose(sequence, most)
            is_array = isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.ndim == 1 and len(ids) <= most
            said: list[int] = ids.tolist() if is_array else []
            draft = Draft(said, min(max(0, int(kind)), SUREST))
        except Exception:
            self._turn_off(drafter, "failed", with_trace=True)
            return Draft([], 0)
        if not is_array:
            why = f"proposed no array of at most {most} ids"
        elif said and not (min(said) >= 0 and max(said) < self._vocab_size):
            why = f"proposed ids outside the vocabulary of {self._vocab_size}"
        elif time.perf_counter() - begun > self._hang_s:
            why = f"took more than {self._hang_s:g} s for one sequence"
        else:
            return draft
        self._turn_off(drafter, why)
        return Draft([], 0)

    def _turn_off(self, drafter: Drafter, why: str, *, with_trace: bool = False) -> None:
        logger.error("the drafter %s %s: it is off", drafter.name, why, exc_info=with_trace)
        if drafter is self._drafter:
            self._set(None)
        else:
            self._predictions = None


def _within(matcher: GrammarMatcher, draft: Draft, most: int) -> Draft:
    """The draft tokens that a grammar accepts, or else those that it forces."""
    ids = draft.ids[: matcher.num_allowed(draft.ids)] if draft.ids else []
    return draft._replace(ids=ids) if ids else Draft(matcher.forced()[:most], SUREST)


def _left_chunks(assembled: Assembled, kept: AuxiliaryHiddenStates) -> list[LeftChunk]:
    """The sequences whose hidden states a step kept, as far as the tokens after them are known."""
    made = assembled.input
    first = kept.last + 1 - made.counts
    places = zip(assembled.sequences, first.tolist(), made.starts.tolist(), made.counts.tolist(), strict=True)
    chunks = [
        LeftChunk(sequence, first, start, min(count, sequence.num_tokens - 1 - start))
        for sequence, first, start, count in places
        if not sequence.is_finished
    ]
    return [chunk for chunk in chunks if chunk.num_tokens > 0]
