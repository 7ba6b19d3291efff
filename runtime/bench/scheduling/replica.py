"""A simulated engine: a real scheduler without a model, with a clock driven by a step-time model.

It admits requests between steps, runs ``schedule``'s choice by advancing the clock, commits, appends a token to each
sequence whose chunk was its last, and finishes complete ones. The sampled token does not matter, so it is always the
same one; every answer has exactly the trace's length. Blocks that move between device and host take time before the
step.

With pipeline stages as many steps are open as there are stages, as in the engine: it starts steps until so many are
open, waits for the oldest, and commits it. A stage computes one step at a time, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.step_model import Pipeline, StepFeatures, StepModel, WindowShards, features_of
from runtime.engine.limits import EngineLimits
from runtime.engine.scheduling.block_events import BlockChanges
from runtime.engine.scheduling.block_pool import BlockPool
from runtime.engine.scheduling.host_pool import HostPool
from runtime.engine.scheduling.prefix_cache import Digest
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Request, Sequence
from runtime.engine.scheduling.step import Step

_TOKEN = -(1 << 31)  # the "sampled" token of every step: no prompt has it


class Replica:
    """A scheduler with its blocks and a clock (seconds since the trace's first request).

    digest    under which it publishes its blocks' contents; None if it does not
    on_token  called with each token of a request, and whether it was the last, at its step's end
    stage_s   busy seconds of each stage
    worked_s  seconds with a step to compute, in any stage
    """

    def __init__(
        self,
        limits: EngineLimits,
        model: StepModel | Pipeline,
        windows: WindowShards = (),
        block_transfer_s: float = 0.0,
        wake_s: float = 0.0,
        digest: Digest | None = None,
    ) -> None:
        self.pool = BlockPool(
            limits.num_blocks,
            limits.block_size,
            kinds=limits.cache_kinds,
            enable_prefix_caching=limits.enable_prefix_caching,
            host_pool=HostPool(limits.num_host_blocks) if limits.num_host_blocks else None,
        )
        self.events = None if digest is None else self.pool.publish(digest)
        self.on_token: Callable[[Request, bool], None] = _ignore
        self._pipeline = model if isinstance(model, Pipeline) else Pipeline((model,), _at_once)
        depth = len(self._pipeline.stages)
        self.scheduler = Scheduler(limits, self.pool, depth)
        self.clock_s = 0.0
        self.stage_s = [0.0] * depth
        self.worked_s = 0.0
        self.num_steps = 0
        self.worst_gaps_s: dict[int, float] = {}
        self._open: deque[_Open] = deque()
        self._free_at_s = [0.0] * depth  # by stage
        self._ended_s = 0.0  # the end of the latest step
        self._windows = windows
        self._block_transfer_s = block_transfer_s
        self._wake_s = wake_s

    def add(self, request: Request) -> None:
        """Queues a request that arrives now, after the step during its arrival has run."""
        if not self.has_work:
            self.clock_s = max(self.clock_s, request.arrival_s + self._wake_s)
        sequence = Sequence(request, 0)
        request.sequences = [sequence]
        self.scheduler.add(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._open) or self.scheduler.has_work

    def take_block_changes(self) -> BlockChanges | None:
        """Changes of its blocks' contents since the last call, or None without changes or publishing."""
        return None if self.events is None else self.events.take()

    def step(self) -> None:
        """Start steps until as many are open as there are stages, advances the clock to the oldest's end, and commits
        it."""
        scheduler = self.scheduler
        while len(self._open) < len(self.stage_s):
            step = scheduler.schedule()
            if not step.has_work:
                break
            self._open.append(self._started(step))
            if not step.chunks:
                break
        if not self._open:
            raise BenchmarkError(f"the scheduler has work but chose nothing at {self.clock_s:.6f} s: a deadlock")
        step, begun_s, moved_s, ended_s = self._open.popleft()
        seconds = ended_s - max(begun_s, self._ended_s)
        self.worked_s += seconds
        self.clock_s = self._ended_s = ended_s
        self.num_steps += 1
        if step.chunks:
            seconds -= moved_s
            scheduler.observe(step.num_tokens, seconds)
            if len(self.stage_s) > 1:
                pairs = sum(chunk.num_tokens * (2 * chunk.start + chunk.num_tokens) for chunk in step.chunks)
                scheduler.observe_prompts(step.num_tokens, pairs, seconds)
        scheduler.commit(step)
        for chunk in step.chunks:
            if chunk.is_last:
                self._append(chunk.sequence, ended_s)

    def _started(self, step: Step) -> _Open:
        """The end of a step that starts now, after the open ones."""
        moved_s = 0.0
        if step.has_transfers:
            num_blocks = len(step.swap_out) + len(step.swap_in)
            moved_s = num_blocks * self._block_transfer_s
            self.scheduler.observe_transfer(num_blocks, moved_s)
        at_s = self.clock_s + moved_s
        if step.chunks:
            features = features_of([(chunk.start, chunk.num_tokens) for chunk in step.chunks], self._windows)
            for number, stage in enumerate(self._pipeline.stages):
                if number:
                    at_s += self._pipeline.sent_s(features)
                seconds = stage.seconds(features)
                at_s = max(at_s, self._free_at_s[number]) + seconds
                self._free_at_s[number] = at_s
                self.stage_s[number] += seconds
        before_s = self._open[-1].ended_s if self._open else 0.0
        return _Open(step, self.clock_s, moved_s, max(at_s, before_s))

    def _append(self, sequence: Sequence, now: float) -> None:
        before = sequence.last_token_s
        if before is None:
            sequence.first_token_s = now
        else:
            number = sequence.request.number
            if now - before > self.worst_gaps_s.get(number, 0.0):
                self.worst_gaps_s[number] = now - before
        sequence.last_token_s = now
        sequence.append(_TOKEN)
        has_ended = sequence.num_output_tokens >= sequence.request.max_tokens
        if has_ended:
            self.scheduler.finish(sequence)
        self.on_token(sequence.request, has_ended)


class _Open(NamedTuple):
    """An open step: its start, the time of its block transfers, and its end."""

    step: Step
    begun_s: float
    moved_s: float
    ended_s: float


def _at_once(features: StepFeatures) -> float:
    """No transfer time: there is a single stage."""
    return 0.0


def _ignore(request: Request, has_ended: bool) -> None:
    """Ignores tokens."""
