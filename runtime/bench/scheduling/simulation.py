"""The real scheduler in virtual time: requests come from a trace, a step takes what a step-time model says.

A ``Replica`` is what an engine is to its scheduler, without a model: it admits requests between steps, runs what
``schedule`` chose by moving its clock, commits, appends a token to each sequence whose chunk was its last, and finishes
those that have all theirs. Which token is drawn plays no part, so it is always the same one; every answer has exactly
the trace's length. Blocks that move between device and host take their time before the step. A ``Router`` chooses the
replica at a request's arrival.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.bench.load.traces import Trace, numbered
from runtime.bench.metrics import BenchmarkError, check_finite, percentiles_of
from runtime.bench.scheduling.step_model import StepModel, WindowShares, features_of
from runtime.engine.config import EngineLimits
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.block_pool import BlockPool
from runtime.engine.scheduling.host_pool import HostPool
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Request, Sequence

_TOKEN = -(1 << 31)  # what every step "draws": a number that no prompt has
PERCENTILES = (50.0, 90.0, 99.0)


class Replica:
    """A scheduler with its blocks and a clock (seconds since the trace's first request)."""

    def __init__(
        self,
        limits: EngineLimits,
        model: StepModel,
        windows: WindowShares = (),
        block_transfer_s: float = 0.0,
        wake_s: float = 0.0,
    ) -> None:
        self.pool = BlockPool(
            limits.num_blocks,
            limits.block_size,
            windows=limits.group_windows,
            enable_prefix_caching=limits.enable_prefix_caching,
            host_pool=HostPool(limits.num_host_blocks) if limits.num_host_blocks else None,
        )
        self.scheduler = Scheduler(limits, self.pool)
        self.clock_s = 0.0
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_open_tokens = 0
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
        self.num_open_tokens += sequence.num_tokens + request.max_tokens
        self.scheduler.add(sequence)

    def advance(self, until_s: float) -> None:
        """Run every step that begins before this time."""
        while self.clock_s < until_s and self.scheduler.has_work:
            self.step()

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
        if sequence.num_output_tokens >= sequence.request.max_tokens:
            self.num_open_tokens -= sequence.num_tokens
            self.scheduler.finish(sequence)


Router = Callable[[Sequences[Replica], NDArray[np.int32]], Replica]
"""Chooses one of the replicas for a prompt, ``[num_prompt_tokens]`` int32."""


def round_robin() -> Router:
    """Each replica in turn."""
    turns = itertools.count()
    return lambda replicas, prompt: replicas[next(turns) % len(replicas)]


def least_loaded() -> Router:
    """The replica with the fewest tokens of open requests, prompts and answers to come together."""
    return lambda replicas, prompt: min(replicas, key=_load)


def prefix_aware() -> Router:
    """The replica with the least to do for it: tokens of open requests, less those of the prompt that it has."""

    def choose(replicas: Sequences[Replica], prompt: NDArray[np.int32]) -> Replica:
        known = prompt[:-1]  # the last token is computed in any case
        return min(replicas, key=lambda replica: _load(replica) - replica.pool.find(known, None).num_tokens)

    return choose


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "prefix-aware": prefix_aware,
}


@dataclass(frozen=True, slots=True)
class Simulation:
    """A finished run: the replicas, and each request's life in the trace's order."""

    trace: Trace
    replicas: list[Replica]
    requests: list[Request]

    @property
    def ttfts_s(self) -> list[float]:
        """Seconds from each request's arrival to its first token."""
        return [_time(request.sequences[0].first_token_s) - request.arrival_s for request in self.requests]

    @property
    def tpots_s(self) -> list[float]:
        """Seconds per token after the first, of each request that has more than one."""
        lives = [request.sequences[0] for request in self.requests if request.max_tokens > 1]
        return [(_time(life.last_token_s) - _time(life.first_token_s)) / (life.num_output_tokens - 1) for life in lives]

    def report(self) -> dict[str, Any]:
        """Seconds, tokens and counts; percentiles over the requests. TPOT and the worst gap are of requests with
        more than one output token; the hit rate is of prompt tokens."""
        gaps = [gap for replica in self.replicas for gap in replica.worst_gaps_s.values()]
        arrivals = np.array([request.arrival_s for request in self.requests])
        lasts = np.array([request.sequences[0].last_token_s for request in self.requests], np.float64)
        duration = float(lasts.max() - arrivals.min())
        outputs = sum(request.max_tokens for request in self.requests)
        inputs = sum(request.num_prompt_tokens for request in self.requests)
        queried, hit = (
            sum(getattr(replica.pool.counters, name) for replica in self.replicas)
            for name in ("queried_tokens", "hit_tokens")
        )
        report: dict[str, Any] = {
            "num_requests": len(self.requests),
            "duration_s": duration,
            "request_throughput": len(self.requests) / duration,
            "output_throughput": outputs / duration,
            "total_token_throughput": (outputs + inputs) / duration,
            "ttft_s": _summary(self.ttfts_s),
            "tpot_s": _summary(self.tpots_s),
            "latency_s": _summary(lasts - arrivals),
            "worst_gap_s": _summary(gaps),
            "hit_rate": hit / queried if queried else 0.0,
            "num_preemptions": sum(replica.scheduler.num_preemptions for replica in self.replicas),
            "num_swaps": sum(replica.scheduler.num_swaps for replica in self.replicas),
            "num_steps": sum(replica.num_steps for replica in self.replicas),
            "busy_share": [replica.busy_s / duration for replica in self.replicas],
        }
        check_finite(report)
        return report


def simulate(
    trace: Trace,
    limits: EngineLimits,
    model: StepModel,
    *,
    windows: WindowShares = (),
    num_replicas: int = 1,
    router: Router | None = None,
    block_transfer_s: float = 0.0,
    wake_s: float = 0.0,
) -> Simulation:
    """Run the whole trace.

    windows           of the model's layers; those of its cache groups are in ``limits``
    router            None: round robin
    block_transfer_s  of one block between device and host
    wake_s            that an idle replica waits for more after a request came (the engine's ``BURST_PAUSE_S``)

    Raises ``BenchmarkError`` for a request that is longer than ``limits.max_model_len``.
    """
    if num_replicas < 1:
        raise BenchmarkError(f"{num_replicas} replicas: at least 1 is needed")
    if trace.longest > limits.max_model_len:
        raise BenchmarkError(f"a request of {trace.longest} tokens exceeds max_model_len={limits.max_model_len}")
    replicas = [Replica(limits, model, windows, block_transfer_s, wake_s) for _ in range(num_replicas)]
    choose = router or round_robin()
    requests: list[Request] = []
    for index, entry in enumerate(trace.requests):
        for replica in replicas:
            replica.advance(entry.arrival_s)
        request = Request(
            str(index),
            trace.prompt_ids(index, numbered),
            _PARAMS,
            max_tokens=entry.output_len,
            arrival_s=entry.arrival_s,
        )
        request.number = index
        choose(replicas, request.prompt_ids).add(request)
        requests.append(request)
    for replica in replicas:
        replica.advance(float("inf"))
    return Simulation(trace, replicas, requests)


_PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


def _time(seconds: float | None) -> float:
    assert seconds is not None, "a request has not ended"
    return seconds


def _load(replica: Replica) -> int:
    return replica.num_open_tokens


def _summary(values: Sequences[float] | NDArray[np.float64]) -> dict[str, float]:
    """Mean, percentiles and the largest; all zero where there are no values."""
    numbers = np.asarray(values if len(values) else [0.0], np.float64)
    return {
        "mean": float(numbers.mean()),
        **{f"p{name}": value for name, value in percentiles_of(numbers.tolist(), PERCENTILES).items()},
        "max": float(numbers.max()),
    }
