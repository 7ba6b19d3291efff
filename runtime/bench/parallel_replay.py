"""`bench parallel --replay`: a trace's requests, at its times, through a model in one piece, on ranks, in stages, and
through several engines under each routing policy.

Prompts begin alike where the trace says so, and prefix caches are on: what a router finds is what the trace has. Each
round runs everything in turns, with beginnings that no run before had.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from runtime.bench.environment import describe_engine
from runtime.bench.load.burst import Burst, run_burst
from runtime.bench.load.traces import Trace
from runtime.bench.metrics import BenchmarkError, check_finite, percentiles_of
from runtime.bench.parallel import Layout, engine_in
from runtime.bench.scheduling.engines import served
from runtime.bench.scheduling.schedule import prompts_of
from runtime.engine.config import RoutingPolicy

if TYPE_CHECKING:
    from runtime.engine.process.client import EngineClient
    from runtime.rank_notices import Tally

STATS_S = 1.2
"""What engines in processes take to say what they did last."""


def bench_replay(
    arguments: Mapping[str, Any], trace: Trace, *, layouts: Sequence[Layout], num_engines: int = 2,
    policies: Sequence[RoutingPolicy] = (), num_rounds: int = 3,
) -> dict[str, Any]:  # fmt: skip
    """A row for each layout, and for ``num_engines`` engines under each policy: the medians of ``rounds``.

    ``same_tokens`` is the share of answers that are those of the first row, in float32 and another order of sums; in
    exact mode it must be 1. Raises ``BenchmarkError`` for that, for a trace that does not fit, and for a request that
    does not end by its length.
    """
    runs: dict[str, list[dict[str, Any]]] = {}
    report: dict[str, Any] = {
        "trace": trace.name, "num_requests": len(trace.requests), "num_rounds": num_rounds,
        "num_prompt_tokens": sum(request.input_len for request in trace.requests),
        "num_output_tokens": sum(request.output_len for request in trace.requests),
        "last_arrival_s": trace.requests[-1].arrival_s, "num_engines": num_engines,
    }  # fmt: skip
    expected: list[list[int]] = []

    def measure(name: str, client: EngineClient, tallies: Callable[[], list[Tally]], *, wait_s: float = 0.0) -> None:
        if trace.longest > client.info.max_model_len:
            raise BenchmarkError(
                f"a request of {trace.longest} tokens exceeds max_model_len={client.info.max_model_len}: scale --length"
            )
        report.setdefault("environment", describe_engine(client.info))
        prompts = prompts_of(trace, client.info.vocab_size, seed=0)
        _replayed(client, trace, prompts)  # compiles and records
        for _ in range(num_rounds):
            counts, then = _counts(client, wait_s), tallies()
            burst = _replayed(client, trace, prompts)
            idle = _idle(then, tallies(), burst.wall_s)
            figures = _figures(burst) | {"hit_rate": _hit_rate(counts, _counts(client, wait_s)), "idle": idle}
            expected.extend([] if expected else burst.token_ids)
            same = sum(ours == theirs for ours, theirs in zip(burst.token_ids, expected, strict=True)) / len(expected)
            if arguments.get("exact") and same < 1.0:
                raise BenchmarkError(f"{name}: {1 - same:.0%} of the answers differ in exact mode")
            runs.setdefault(name, []).append(figures | {"same_tokens": same})

    for layout in layouts:
        with ExitStack() as stack:
            engine = engine_in(layout, {"seed": 0, **arguments})
            stack.callback(engine.close)
            measure(layout.name, stack.enter_context(served(engine)), engine.executor.tallies)
    if policies:
        from runtime.parallel.fleet import Fleet

        settings = {**arguments, "data_parallel_size": num_engines, "routing_policy": "prefix-aware"}
        fleet = Fleet(settings.pop("model", None), **settings)
        try:
            for policy in policies:
                fleet.router.policy = policy
                measure(f"{num_engines} engines, {policy}", fleet, list, wait_s=STATS_S)
        finally:
            fleet.close()
    report["results"] = [
        {"name": name, **{each: _median([run[each] for run in rounds]) for each in rounds[0]}, "rounds": rounds}
        for name, rounds in runs.items()
    ]
    for result in report["results"]:
        check_finite(result)
    return report


def _replayed(client: EngineClient, trace: Trace, prompts: Sequence[Sequence[int]]) -> Burst:
    """Whose prefixes are of no other run: each burst has a salt of its own."""
    lengths = [request.output_len for request in trace.requests]
    return run_burst(client, prompts, lengths, arrivals_s=[request.arrival_s for request in trace.requests])


def _figures(burst: Burst) -> dict[str, float]:
    """Milliseconds, requests and tokens a second."""
    records = burst.records
    ttft = percentiles_of([1e3 * record.ttft_s for record in records], (50, 99))
    tpot = percentiles_of([1e3 * each for record in records if (each := record.tpot_s) is not None] or [0.0], (50,))
    return {
        "requests_per_s": len(records) / burst.wall_s,
        "output_throughput": sum(len(record.token_ids) for record in records) / burst.wall_s,
        "p50_ttft_ms": ttft["50"], "p99_ttft_ms": ttft["99"], "p50_tpot_ms": tpot["50"],
    }  # fmt: skip


def _counts(client: EngineClient, wait_s: float) -> tuple[int, int]:
    """Prompt tokens that were looked up and found so far."""
    time.sleep(wait_s)
    stats = client.stats()
    return stats.prefix_cache_queries, stats.prefix_cache_hits


def _hit_rate(before: tuple[int, int], after: tuple[int, int]) -> float:
    queried, hit = (now - then for then, now in zip(before, after, strict=True))
    return hit / queried if queried else 0.0


def _idle(before: Sequence[Tally], after: Sequence[Tally], seconds: float) -> list[float]:
    """The share of the time in which each rank computed nothing."""
    return [
        1.0 - (now.step_ns - then.step_ns - now.waited_ns + then.waited_ns) / 1e9 / seconds
        for then, now in zip(before, after, strict=True)
    ]


def _median(values: Sequence[Any]) -> Any:
    if isinstance(values[0], list):
        return [statistics.median(each) for each in zip(*values, strict=True)]
    return statistics.median(values)


def as_lines(report: Mapping[str, Any]) -> list[str]:
    """A row for each of the results."""
    columns = ("requests_per_s", "output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms")
    titles = ("requests/s", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p50")
    width = 2 + max(len(result["name"]) for result in report["results"])
    lines = [f"{'':<{width}}" + "".join(f"{title:>12}" for title in titles) + "   found   same   idle, by rank"]
    for result in report["results"]:
        cells = "".join(f"{result[name]:>12,.2f}" for name in columns)
        idle = ", ".join(f"{100 * share:.0f} %" for share in result["idle"]) or "-"
        lines.append(
            f"{result['name']:<{width}}{cells}{100 * result['hit_rate']:>6.0f} %{100 * result['same_tokens']:>5.0f} %"
            f"   {idle}"
        )
    lines.append(
        f"milliseconds; medians of {report['num_rounds']} rounds of {report['num_requests']} requests "
        f"({report['trace']}), {report['num_prompt_tokens']:,} tokens of prompts, the last after "
        f"{report['last_arrival_s']:.1f} s"
    )
    return lines
