"""An engine as its scheduler sees it, without a model: it moves a clock by what a step-time model says.

It admits requests between steps, runs what ``schedule`` chose by letting the time pass, commits, appends a token to
each sequence whose chunk was its last, and finishes those that have all theirs. Which token is drawn plays no part, so
it is always the same one; every answer has exactly the trace's length. Blocks that move between device and host take
their time before the step.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.step_model import StepModel, WindowShares, features_of
from runtime.engine.config import EngineLimits
from runtime.engine.scheduling.block_events import BlockChanges
from runtime.engine.scheduling.block_pool import BlockPool
from runtime.engine.scheduling.host_pool import HostPool
from runtime.engine.scheduling.prefix_cache import Digest
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Request, Sequence

_TOKEN = -(1 << 31)  # what every step "draws": a number that no prompt has


class Replica:
    """A scheduler with its blocks and a clock (seconds since the trace's first request).

    digest    under which it publishes what its blocks hold; None: it does not
    on_token  told of each token that a request got, and whether it was the last, when its step is over
    """

    def __init__(
        self,
        limits: EngineLimits,
        model: StepModel,
        windows: WindowShares = (),
        block_transfer_s: float = 0.0,
        wake_s: float = 0.0,
        digest: Digest | None = None,
    ) -> None:
        self.pool = BlockPool(
            limits.num_blocks,
            limits.block_size,
            windows=limits.group_windows,
            enable_prefix_caching=limits.enable_prefix_caching,
            host_pool=HostPool(limits.num_host_blocks) if limits.num_host_blocks else None,
        )
        self.events = None if digest is None else self.pool.publish(digest)
        self.on_token: Callable[[Request, bool], None] = _ignore
        self.scheduler = Scheduler(limits, self.pool)
        self.clock_s = 0.0
        self.busy_s = 0.0
        self.num_steps = 0
        self.worst_gaps_s: dict[int, float] = {}
        self._model = model
        self._windows = windows
        self._block_transfer_s = block_transfer_s
        self._wake_s = wake_s

    def add(self, request: Request) -> None:
        """Queue a request that arrives now: the step that its arrival fell into has been run."""
        if not self.scheduler.has_work:
            self.clock_s = max(self.clock_s, request.arrival_s + self._wake_s)
        sequence = Sequence(request, 0)
        request.sequences = [sequence]
        self.scheduler.add(sequence)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def take_block_changes(self) -> BlockChanges | None:
        """What its blocks hold otherwise than the last time; None: nothing, or nobody wants to know."""
        return None if self.events is None else self.events.take()

    def step(self) -> None:
        """Schedule, let the time pass, commit."""
        scheduler = self.scheduler
        step = scheduler.schedule()
        if not step.has_work:
            raise BenchmarkError(f"the scheduler has work but chose nothing at {self.clock_s:.6f} s: a deadlock")
        seconds = 0.0
        if step.chunks:
            chunks = [(chunk.start, chunk.num_tokens) for chunk in step.chunks]
            seconds = self._model.seconds(features_of(chunks, self._windows))
            scheduler.observe(step.num_tokens, seconds)
        if step.has_transfers:
            num_blocks = len(step.swap_out) + len(step.swap_in)
            scheduler.observe_transfer(num_blocks, num_blocks * self._block_transfer_s)
            seconds += num_blocks * self._block_transfer_s
        self.clock_s = now = self.clock_s + seconds
        self.busy_s += seconds
        self.num_steps += 1
        scheduler.commit(step)
        for chunk in step.chunks:
            if chunk.is_last:
                self._append(chunk.sequence, now)

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


def _ignore(request: Request, has_ended: bool) -> None:
    """Nobody counts tokens."""
