"""The scheduler and the block pool alone, driven by hypothesis: invariants after each step, no deadlock, no
leak."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.engine.block_pool import BlockPool
from runtime.engine.config import EngineLimits
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduler import Scheduler
from runtime.engine.sequence import Request, Sequence, State

BLOCK_SIZE = 4


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the engine: adds requests, runs steps with random draws, cancels."""

    @initialize(
        num_blocks=st.integers(4, 24),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(6, 40),
    )
    def start(self, num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.limits = EngineLimits(
            max_model_len=num_blocks * BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_waiting=1000,
        )
        self.scheduler = Scheduler(self.limits, BlockPool(num_blocks, BLOCK_SIZE))
        self.open: list[Sequence] = []
        self.number = 0
        self.steps_since_finish = 0

    @rule(
        prompt_len=st.integers(1, 60),
        max_tokens=st.integers(1, 40),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
    )
    def add(self, prompt_len: int, max_tokens: int, n: int, priority: int) -> None:
        prompt_len = min(prompt_len, self.limits.max_model_len - 1)
        request = Request(
            f"r{self.number}",
            np.arange(prompt_len, dtype=np.int32),
            SamplingParams(n=n),
            priority=priority,
            max_tokens=min(max_tokens, self.limits.max_model_len - prompt_len),
            arrival_s=0.0,
        )
        request.number = self.number
        self.number += 1
        request.sequences = [Sequence(request, index) for index in range(n)]
        self.open += request.sequences
        self.scheduler.add(request.sequences[0])

    @precondition(lambda self: self.open)
    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.run_one()
            self.scheduler.check_invariants()

    @precondition(lambda self: self.open)
    @rule(choice=st.integers(0, 10**6))
    def cancel(self, choice: int) -> None:
        request = self.open[choice % len(self.open)].request
        for sequence in request.sequences:
            self.end(sequence)

    @precondition(lambda self: self.open)
    @rule()
    def drain(self) -> None:
        """Without newcomers everything ends: no deadlock, no livelock."""
        bound = 50 + 20 * sum(sequence.num_prompt_tokens + 40 for sequence in self.open)
        for _ in range(bound):
            if not self.open:
                break
            self.run_one()
            self.scheduler.check_invariants()
        assert not self.open, "no progress"
        assert not self.scheduler.has_work
        assert self.scheduler.pool.num_free == self.limits.num_blocks

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()

    def run_one(self) -> None:
        had_work = self.scheduler.has_work
        step = self.scheduler.schedule()
        chunks = step.chunks
        assert bool(chunks) == had_work, "work was left undone"
        assert sum(chunk.num_tokens for chunk in chunks) <= self.limits.max_num_batched_tokens
        assert len({chunk.sequence.order for chunk in chunks}) == len(chunks) <= self.limits.max_num_seqs
        kinds = [chunk.num_tokens == 1 and chunk.is_last and not chunk.is_first for chunk in chunks]
        assert kinds == sorted(kinds, reverse=True) or self.has_short_prompt(chunks), "decodes come first"
        for chunk in chunks:
            sequence = chunk.sequence
            assert sequence.state is State.RUNNING
            end = chunk.start + chunk.num_tokens
            assert end == sequence.num_computed
            assert chunk.is_last == (end == sequence.num_tokens)
            assert end <= len(sequence.block_ids) * BLOCK_SIZE, "a token has no slot"
        self.check_writes_are_private(chunks)
        self.scheduler.commit(step)
        for chunk in chunks:
            sequence = chunk.sequence
            if not chunk.is_last:
                continue
            if sequence.num_output_tokens == 0 and sequence.index == 0:
                for sibling in sequence.request.sequences[1:]:
                    self.scheduler.add(sibling)
            sequence.append(0)
            if sequence.num_output_tokens == sequence.request.max_tokens:
                self.end(sequence)

    def has_short_prompt(self, chunks: list) -> bool:
        """A prompt whose last chunk is one token looks like a decode."""
        return any(chunk.num_tokens == 1 and chunk.sequence.num_output_tokens == 0 for chunk in chunks)

    def check_writes_are_private(self, chunks: list) -> None:
        holders: dict[int, int] = {}
        for sequence in self.scheduler.running:
            for block_id in sequence.block_ids:
                holders[block_id] = holders.get(block_id, 0) + 1
        for chunk in chunks:
            first, last = chunk.start // BLOCK_SIZE, (chunk.start + chunk.num_tokens - 1) // BLOCK_SIZE
            for block_id in chunk.sequence.block_ids[first : last + 1]:
                assert holders[block_id] == 1, "a step writes into a shared block"

    def end(self, sequence: Sequence) -> None:
        if sequence.is_finished:
            return
        self.scheduler.finish(sequence)
        self.open.remove(sequence)


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase
