"""The real scheduler in virtual time: requests from a trace, step times from a step-time model.

A `Replica` is a simulated engine. It admits requests between steps, runs `schedule`'s choice by advancing the clock,
commits, appends a token to each sequence whose chunk was its last, and finishes complete ones. The sampled token does
not matter, so it is always the same one; every answer has exactly the trace's length. Blocks that move between device
and host take time before the step. With pipeline stages as many steps are open as there are stages, as in the engine.

`simulate` runs one replica or several, with the `Router` of a fleet of engines: it gets blocks and tokens at the end of
their step, and chooses at a request's arrival.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.bench.load.traces import Trace, numbered
from runtime.bench.metrics import BenchmarkError, check_finite, percentiles_of
from runtime.engine.config import RoutingPolicy
from runtime.engine.limits import EngineLimits
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.block_events import BlockChanges, SharedDigest
from runtime.engine.scheduling.block_pool import pool_of
from runtime.engine.scheduling.prefix_cache import Digest
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Request, Sequence
from runtime.engine.scheduling.step import Step
from runtime.engine.scheduling.step_limit import StepLimit
from runtime.engine.scheduling.step_model import (
    LinearStepModel,
    Pipeline,
    StepFeatures,
    StepModel,
    WindowShards,
    features_of,
)
from runtime.parallel.prefix_index import PromptDigests
from runtime.parallel.routing import Route, Router

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
        self.pool = pool_of(limits)
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
            scheduler.costs.observe_step(step.num_tokens, seconds)
            if len(self.stage_s) > 1:
                pairs = sum(chunk.num_tokens * (2 * chunk.start + chunk.num_tokens) for chunk in step.chunks)
                scheduler.prompt_times.observe(step.num_tokens, pairs, seconds)
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
            self.scheduler.costs.observe_transfer(num_blocks * self.scheduler.limits.block_bytes[0], moved_s)
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


PERCENTILES = (50.0, 90.0, 99.0)
_SECRET = b"of no importance"


@dataclass(frozen=True, slots=True)
class Simulation:
    """A finished run: the replicas, and each request's life in the trace's order."""

    trace: Trace
    replicas: list[Replica]
    requests: list[Request]
    router: Router

    @property
    def ttfts_s(self) -> list[float]:
        """Seconds from each request's arrival to its first token."""
        return [_time(request.sequences[0].first_token_s) - request.arrival_s for request in self.requests]

    @property
    def tpots_s(self) -> list[float]:
        """Seconds per token after the first, of each request with more than one."""
        lives = [request.sequences[0] for request in self.requests if request.max_tokens > 1]
        return [(_time(life.last_token_s) - _time(life.first_token_s)) / (life.num_output_tokens - 1) for life in lives]

    def report(self) -> dict[str, Any]:
        """Seconds, tokens and counts; percentiles over the requests. TPOT and the worst gap are of requests with
        more than one output token; the hit rate is of prompt tokens. A stage's idle share is relative to the time in
        which its replica had a step to compute."""
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
            "requests_by_replica": self.router.num_routed,
            "busy_share": [replica.worked_s / duration for replica in self.replicas],
        }
        if len(self.replicas[0].stage_s) > 1:
            worked_s = sum(replica.worked_s for replica in self.replicas)
            computed = [sum(each) for each in zip(*(replica.stage_s for replica in self.replicas))]
            report["idle_share_by_stage"] = [1.0 - seconds / worked_s for seconds in computed]
        check_finite(report)
        return report


def simulate(
    trace: Trace,
    limits: EngineLimits,
    model: StepModel | Pipeline,
    *,
    windows: WindowShards = (),
    num_replicas: int = 1,
    routing_policy: RoutingPolicy = "prefix-aware",
    max_concurrency: int | None = None,
    block_transfer_s: float = 0.0,
    wake_s: float = 0.0,
    step_s: float = 0.0,
    most_saved_s: float = 0.0,
) -> Simulation:
    """Run the whole trace.

    windows           of the model's layers; those of its cache groups are in ``limits``
    max_concurrency   most open requests: the next arrives when one has ended, if not later; None for no limit
    block_transfer_s  of one block between device and host
    wake_s            that an idle replica waits for more after a request's arrival (the engine's ``BURST_PAUSE_S``)
    step_s            the most mean seconds of steps with decodes, and ``most_saved_s`` (`StepLimit`); 0.0: no limit

    Raises ``BenchmarkError`` for a request that is longer than ``limits.max_model_len``.
    """
    if num_replicas < 1:
        raise BenchmarkError(f"{num_replicas} replicas: at least 1 is needed")
    if max_concurrency is not None and max_concurrency < 1:
        raise BenchmarkError(f"{max_concurrency} open requests: at least 1 is needed")
    if trace.longest > limits.max_model_len:
        raise BenchmarkError(f"a request of {trace.longest} tokens exceeds max_model_len={limits.max_model_len}")
    publishes = num_replicas > 1 and routing_policy == "prefix-aware"
    digest = SharedDigest(_SECRET) if publishes else None
    replicas = [Replica(limits, model, windows, block_transfer_s, wake_s, digest) for _ in range(num_replicas)]
    digests = PromptDigests(_SECRET, limits.block_size, limits.cache_kinds, limits.longrope_threshold)
    if step_s:
        assert isinstance(model, LinearStepModel), "steps are limited by fitted times"
        for replica in replicas:
            replica.scheduler.limit_steps(StepLimit(limits.max_num_batched_tokens, step_s, model, most_saved_s))
    run = _Run(replicas, Router(routing_policy if num_replicas > 1 else "least-load", num_replicas, digests))
    requests: list[Request] = []
    for index, entry in enumerate(trace.requests):
        run.advance(entry.arrival_s)
        arrival_s = entry.arrival_s
        while max_concurrency is not None and run.num_open >= max_concurrency:
            arrival_s = run.go_on()
        request = Request(
            str(index), trace.prompt_ids(index, numbered), _PARAMS, max_tokens=entry.output_len, arrival_s=arrival_s,
            cache_salt=entry.tenant,
        )  # fmt: skip
        request.number = index
        run.add(request)
        requests.append(request)
    run.advance(float("inf"))
    return Simulation(trace, replicas, requests, run.router)


class _Run:
    """Replicas and their router. The earliest clock steps next; a step's results are delivered at its end."""

    def __init__(self, replicas: list[Replica], router: Router) -> None:
        self.router = router
        self.num_open = 0
        self._replicas = replicas
        self._working: list[tuple[float, int]] = []  # a heap of those that have work: clock, number
        self._news: list[_News] = []  # a heap
        self._num_steps = 0
        self._tokens: list[tuple[int, bool]] = []  # of the step that runs: request, whether it was its last
        self._routes: dict[int, Route] = {}
        for replica in replicas:
            replica.on_token = lambda request, has_ended: self._tokens.append((request.number, has_ended))

    def add(self, request: Request) -> None:
        """A request arrives."""
        router = self.router
        route = router.choose(request, router.digests_of(request), [True] * len(self._replicas))
        self._routes[request.number] = route
        replica = self._replicas[route.engine]
        had_work = replica.has_work
        replica.add(request)
        self.num_open += 1
        if not had_work:
            heapq.heappush(self._working, (replica.clock_s, route.engine))

    def advance(self, until_s: float) -> None:
        """Runs every step that starts before this time, and delivers the results of those that end by then."""
        while self._next_s() < until_s:
            self.go_on()
        while self._news and self._news[0][0] <= until_s:
            self._tell()

    def go_on(self) -> float:
        """Runs one step, or delivers the results of one, whichever is earlier; returns its time."""
        if self._news and (not self._working or self._news[0][0] <= self._working[0][0]):
            return self._tell()
        begun_s, number = self._working[0]
        replica = self._replicas[number]
        replica.step()
        self._num_steps += 1
        changes = replica.take_block_changes()
        heapq.heappush(self._news, (replica.clock_s, self._num_steps, number, changes, self._tokens))
        self._tokens = []
        if replica.has_work:
            heapq.heapreplace(self._working, (replica.clock_s, number))
        else:
            heapq.heappop(self._working)
        return begun_s

    def _next_s(self) -> float:
        return self._working[0][0] if self._working else float("inf")

    def _tell(self) -> float:
        ended_s, _, number, changes, tokens = heapq.heappop(self._news)
        if changes is not None:
            self.router.change(number, changes)
        for request, has_ended in tokens:
            route = self._routes[request]
            self.router.drawn(route, 1)
            if has_ended:
                self.router.ended(route)
                del self._routes[request]
                self.num_open -= 1
        return ended_s


_News = tuple[float, int, int, BlockChanges | None, list[tuple[int, bool]]]
"""A step's result: its end, its number, the replica's number, its blocks, the requests that got a token, and whether it
was their last one."""

_PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


def _time(seconds: float | None) -> float:
    assert seconds is not None, "a request has not ended"
    return seconds


def _summary(values: Sequences[float] | NDArray[np.float64]) -> dict[str, float]:
    """Mean, percentiles and the largest; all zero without values."""
    numbers = np.asarray(values if len(values) else [0.0], np.float64)
    return {
        "mean": float(numbers.mean()),
        **{f"p{name}": value for name, value in percentiles_of(numbers.tolist(), PERCENTILES).items()},
        "max": float(numbers.max()),
    }
