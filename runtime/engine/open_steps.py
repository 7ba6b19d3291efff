"""The open steps: how each is planned, laid out, started and finished.

The engine's loop (``runtime.engine.engine``) decides their order. Steps end in the order in which they were started; a
step that is planned while another runs is brought up to date before it starts.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.engine.grammar.masks import MaskComputer
from runtime.engine.messages import ITERATION_TOKEN_BOUNDS, EngineOutput
from runtime.engine.open_requests import OpenRequests
from runtime.engine.picture_queue import PictureQueue
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.scheduling.step import Step
from runtime.engine.speculation.speculator import Speculator
from runtime.engine.steps.assemble import Assembled, Assembler
from runtime.engine.steps.executor import Computation, Executor, ExecutorLostError
from runtime.engine.steps.step_input import RowLoad, Sampled
from runtime.engine.timeline import TIMELINE_STEPS, ChunkKey, StepRecord, Timeline

logger = logging.getLogger("xserv.engine")

Poll = Callable[[], list[EngineOutput]]
"""Admits and cancels what has come in (``admit``, ``cancel``); returns the outputs of cancelled requests."""


@dataclass(slots=True)
class StepCounters:
    """Counts since the engine's start: steps, blocks that they swapped out and in, tokens that they computed, and a
    histogram of tokens a step (``ITERATION_TOKEN_BOUNDS``)."""

    steps: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    step_tokens: int = 0
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(ITERATION_TOKEN_BOUNDS) + 1))

    def count_tokens(self, num_tokens: int) -> None:
        self.steps_by_tokens[bisect_left(ITERATION_TOKEN_BOUNDS, num_tokens)] += 1
        self.step_tokens += num_tokens


@dataclass(slots=True)
class OpenStep:
    """A planned step. ``assembled`` is None if it has no work, and then it is not started; ``computation`` is set once
    it runs, unless it only moves blocks."""

    step: Step
    assembled: Assembled | None
    record: StepRecord
    started_s: float = 0.0
    computation: Computation | None = None


class OpenSteps:
    """Steps that are planned or running. Not thread-safe: it belongs to the engine's loop.

    open        those that were started and are not finished, in order
    timeline    a record of each of the latest steps
    speculator  proposes draft tokens for decodes, or None
    on_start    called with each step before it starts, ``on_ran`` once it has run, or failed
    pictures    its budget observes the times of decode steps; None if the model reads none
    """

    def __init__(
        self,
        scheduler: Scheduler,
        requests: OpenRequests,
        executor: Executor,
        assembler: Assembler,
        max_num_seqs: int,
        pictures: PictureQueue | None,
    ) -> None:
        self.open: deque[OpenStep] = deque()
        self.timeline: Timeline = deque(maxlen=TIMELINE_STEPS)
        self.counters = StepCounters()
        self.speculator: Speculator | None = None
        self.pictures = pictures
        self.on_start: Callable[[Step], None] | None = None
        self.on_ran: Callable[[], None] | None = None
        self._scheduler = scheduler
        self._requests = requests
        self._executor = executor
        self._assembler = assembler
        self._overlaps = executor.overlaps
        self._masks = MaskComputer()
        self._keys: list[ChunkKey] = [ChunkKey("", 0, 0, 0.0)] * max_num_seqs  # by row
        self._chunk_keys: list[ChunkKey] = []  # of the step assembled last, with its rows
        self._chunk_rows: NDArray[np.int64] | None = None

    def fill(self, poll: Poll, outputs: list[EngineOutput]) -> OpenStep:
        """Start steps, each of sequences that are in no other, until as many are open as the executor takes. Returns
        the oldest, or one without work if none is open."""
        while True:
            outputs += poll()
            planned = self.start(self.plan(outputs))
            if not planned.step.chunks or len(self.open) == self._executor.depth:
                return self.open[0] if self.open else planned

    def plan(self, outputs: list[EngineOutput]) -> OpenStep:
        """Schedule the next step and lay it out; the previous one may still run."""
        record = StepRecord(self._scheduler.num_steps, time.monotonic())
        record.num_running, record.num_waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        if self.speculator is not None:
            self._scheduler.drafts = self.speculator.plan(self._scheduler.running)
        step = self._scheduler.schedule()
        planned = time.monotonic()
        record.schedule_s = planned - record.start_s
        record.num_free_blocks = self._scheduler.pool.num_free
        opened = OpenStep(step, None, record)
        self._assemble(opened, outputs)
        record.prepare_s = time.monotonic() - planned
        return opened

    def overlap(self, following: OpenStep, poll: Poll, outputs: list[EngineOutput]) -> bool:
        """Start a planned step while the previous one runs, if a graph runs both and no request has just arrived.

        Sequences that the previous step ends are computed once more, and the result is dropped. Their last writes lie
        after their committed tokens, and the next owner of the blocks writes later. Waiting sequences get their blocks
        one step later.
        """
        assembled, waiting = following.assembled, self._scheduler.waiting
        if assembled is None or not self._executor.can_overlap(assembled.input):
            return False
        num_waiting = len(waiting)
        cancelled = poll()
        outputs += cancelled
        if cancelled or len(waiting) > num_waiting:
            return False
        self.start(following)
        return True

    def revise(self, opened: OpenStep, outputs: list[EngineOutput]) -> OpenStep:
        """Update a planned step: drop finished sequences and add new arrivals."""
        step, record = opened.step, opened.record
        begun = time.monotonic()
        planned, num_left = step.chunks, len(step.chunks)
        self._scheduler.extend(step)
        extended = time.monotonic()
        record.schedule_s += extended - begun
        if step.chunks is not planned or len(step.chunks) > num_left:
            self._assemble(opened, outputs)
            record.prepare_s += time.monotonic() - extended
        if not step.chunks:  # the commit may have made room for paused sequences
            self.finish(self.start(opened), outputs)
            return self.plan(outputs)
        return opened

    def _assemble(self, opened: OpenStep, outputs: list[EngineOutput]) -> None:
        """Make the step's input."""
        step, record = opened.step, opened.record
        loads = self._loads(step, outputs)
        opened.assembled = self._assembler.assemble(step, loads) if step.has_work else None
        if opened.assembled is not None:
            made = opened.assembled.input
            if made.loads or made.rows is not self._chunk_rows:
                self._chunk_rows, self._chunk_keys = made.rows, [self._keys[row] for row in made.rows.tolist()]
            record.set_chunks(self._chunk_keys, made.starts, made.counts)

    def _loads(self, step: Step, outputs: list[EngineOutput]) -> list[RowLoad]:
        """The rows of sequences that start to run; a sequence whose row cannot be made ends its own request."""
        starting = [chunk.sequence for chunk in step.chunks if chunk.is_first]
        if not starting:
            return []
        now, loads = time.monotonic(), []
        for sequence in starting:
            request, row = sequence.request, sequence.row
            if sequence.is_finished:
                continue  # an earlier choice could not be started
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now
            self._requests.mark_scheduled(request)
            assert row is not None
            self._keys[row] = ChunkKey(
                request.request_id, sequence.index, sequence.num_prompt_tokens, request.arrival_s, sequence.miss
            )
            try:
                loads.append(self._assembler.load_of(sequence))
            except Exception:
                logger.exception("request %s could not be started", request.request_id)
                outputs += self._requests.end(request, "error", "the request could not be started")
        step.drop_finished()
        if len(loads) < len(starting):
            rows = {chunk.sequence.row for chunk in step.chunks}
            loads = [load for load in loads if load.row in rows]
        return loads

    def start(self, opened: OpenStep) -> OpenStep:
        """Start the step after all earlier ones are over. Without chunks it is done at once."""
        step, record, assembled = opened.step, opened.record, opened.assembled
        opened.started_s = time.monotonic()
        if self._overlaps:
            record.start_s = opened.started_s
        if assembled is None:
            return opened
        made = assembled.input
        if made.has_transfers:  # those of sequences that have since ended were dropped
            made.swap_out, made.swap_in, made.copies = step.swap_out, step.swap_in, step.copies
            self._count_transfers(step, record)
        drafts: dict[Sequence, list[int]] = {}
        if step.num_drafts:
            drafts = {chunk.sequence: chunk.draft_ids for chunk in step.chunks if chunk.draft_ids}
        masks = self._masks.start(assembled.sampling_sequences, made.num_samples, drafts)
        proposed = self.speculator.distributions(drafts) if self.speculator is not None and drafts else {}
        if self.on_start is not None:
            self.on_start(step)
        if proposed:
            computation = self._executor.start(
                made, masks, [proposed.get(sequence) for sequence in assembled.sampling_sequences]
            )
        else:
            computation = self._executor.start(made, masks)
        self._assembler.sent(made)
        if step.chunks or self._executor.depth > 1:
            opened.computation = computation
            self.open.append(opened)
            record.prepare_s += computation.started_s - opened.started_s
            opened.started_s = computation.started_s
        return opened

    def _count_transfers(self, step: Step, record: StepRecord) -> None:
        record.swapped_out, record.swapped_in = len(step.swap_out), len(step.swap_in)
        record.copied = len(step.copies)
        self.counters.swapped_out_blocks += record.swapped_out
        self.counters.swapped_in_blocks += record.swapped_in

    def finish(self, opened: OpenStep, outputs: list[EngineOutput]) -> None:
        """Wait for the step and output its sampled tokens."""
        step, record = opened.step, opened.record
        sampled: Sampled | None = None
        if opened.computation is not None:
            first = self.open.popleft()
            assert first is opened, "steps end in their order"
        following = self.open[0] if self.open else None
        if opened.computation is not None:
            try:
                sampled = opened.computation.result()
            except ExecutorLostError:
                raise
            except Exception:
                logger.exception("a step of %d sequences failed", len(step.chunks))
                record.has_failed = True
        ended = time.monotonic()
        record.run_s = ended - opened.started_s
        if self.on_ran is not None:
            self.on_ran()
        if record.has_failed:
            self._scheduler.abandon(step)
            for chunk in step.chunks:
                outputs += self._requests.end(chunk.sequence.request, "error", "the model failed in this step")
        else:
            accepted = None
            if sampled is not None and sampled.counts is not None and opened.assembled is not None:
                accepted = dict(zip(opened.assembled.sampling_sequences, sampled.counts, strict=True))
            self._scheduler.commit(step, accepted)
            if sampled is not None and opened.assembled is not None:
                if self.speculator is not None:
                    self.speculator.observe(step, opened.assembled.sampling_sequences, accepted)
                self._requests.append(opened.assembled, sampled, ended, outputs)
                if self.speculator is not None and following is None:
                    self.speculator.follow(opened.assembled, self._executor.auxiliary_hidden_states)
                num_tokens = opened.assembled.input.num_tokens
                if self.pictures is not None and opened.assembled.input.are_decodes:
                    self.pictures.budget.observe(record.run_s)
                if num_tokens:
                    self._scheduler.costs.observe_step(num_tokens, record.run_s)
                    if self._executor.depth > 1:
                        made = opened.assembled.input
                        num_pairs = int((made.counts * (2 * made.starts + made.counts)).sum())
                        self._scheduler.prompt_times.observe(num_tokens, num_pairs, record.run_s)
                    self.counters.count_tokens(num_tokens)
            num_bytes, seconds = self._executor.take_timed()
            if num_bytes:
                self._scheduler.costs.observe_transfer(num_bytes, seconds)
        record.preempted = [(s.request.request_id, s.index, way) for s, way in step.preempted]
        record.end_s = time.monotonic()
        record.commit_s = record.end_s - ended
        if following is not None:  # it was queued after this one
            following.started_s, following.record.start_s = ended, record.end_s
        if opened.computation is not None or step.has_transfers:
            self.timeline.append(record)

    def close(self) -> None:
        """Drop the running steps; the executor is closed."""
        self._masks.close()
        for opened in self.open:
            self._scheduler.abandon(opened.step)
        self.open.clear()
