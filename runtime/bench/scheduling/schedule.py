"""`bench schedule`: one trace through the real engine under each way of batching.

Each style serves the same requests at the same times, in turns, round by round; the median round is reported.
Stalls are the gaps between two tokens of a request: a whole prompt computed beside decodes stalls them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from runtime.bench.environment import finished
from runtime.bench.load.burst import Burst, run_burst
from runtime.bench.load.traces import Trace, random_tokens
from runtime.bench.metrics import BenchmarkError, check_outputs, interleaved, percentiles_of
from runtime.bench.scheduling.engines import like, served
from runtime.bench.scheduling.timeline_view import chrome_trace
from runtime.bench.svg import panels
from runtime.engine.engine import Engine

_PANELS = (
    ("Time to first token, median and 99th percentile (ms)", ("p50_ttft_ms", "p99_ttft_ms")),
    ("Time per output token, median and 99th percentile (ms)", ("p50_tpot_ms", "p99_tpot_ms")),
    ("Gap between two tokens, 99th percentile and worst stall (ms)", ("p99_gap_ms", "worst_stall_ms")),
    ("Output tokens a second", ("output_throughput",)),
)
STAGE_LENGTH_SHARE = 2  # staged chunks reach their smallest after the longest prompt divided by this


@dataclass(frozen=True, slots=True)
class Style:
    """A way of batching: its name on the command line, and its settings."""

    name: str
    settings: Mapping[str, Any]


def styles_named(names: str, *, budget: int, longest_prompt: int) -> tuple[Style, ...]:
    """The styles of comma-separated names, in that order; `BenchmarkError` for an unknown or duplicate one.

    "staged" is stall-free with chunks that shrink from `budget` to a quarter of it while a prompt proceeds.
    """
    stages = (max(32, budget), max(32, budget // 4), 4, max(4, longest_prompt // STAGE_LENGTH_SHARE))
    known: dict[str, Mapping[str, Any]] = {
        "stall-free": {"batching": "stall-free"},
        "staged": {"batching": "stall-free", "prefill_chunk_stages": stages},
        "prefill-first": {"batching": "prefill-first"},
        "orca": {"batching": "orca"},
        "static": {"batching": "static"},
    }
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in known]
    if unknown or len(set(wanted)) != len(wanted):
        raise BenchmarkError(f"--styles {names!r}: each at most once of {', '.join(known)}")
    return tuple(Style(name, known[name]) for name in wanted)


@dataclass(frozen=True, slots=True)
class Replay:
    """One round of one style."""

    burst: Burst
    events: dict[str, Any]
    num_preemptions: int

    def figures(self) -> dict[str, float]:
        """Milliseconds, and output tokens per second."""
        records = self.burst.records
        gaps = [gap for record in records for gap in record.gaps_s] or [0.0]
        tpots = [record.tpot_s for record in records if record.tpot_s is not None] or [0.0]
        ttft = percentiles_of([1e3 * record.ttft_s for record in records], (50, 99))
        tpot = percentiles_of([1e3 * value for value in tpots], (50, 99))
        return {
            "p50_ttft_ms": ttft["50"],
            "p99_ttft_ms": ttft["99"],
            "p50_tpot_ms": tpot["50"],
            "p99_tpot_ms": tpot["99"],
            "p99_gap_ms": percentiles_of([1e3 * gap for gap in gaps], (99,))["99"],
            "worst_stall_ms": 1e3 * max(gaps),
            "output_throughput": sum(len(record.token_ids) for record in records) / self.burst.wall_s,
            "num_preemptions": float(self.num_preemptions),
        }


def bench_schedule(
    engine: Engine, trace: Trace, styles: Sequence[Style], *, num_rounds: int, seed: int = 0
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The report, and each style's last round as a Chrome trace.

    `results[i]` has the `style`, its `settings`, the median of each figure over the rounds, and `rounds`, and
    `same_tokens`, the share of requests whose greedy tokens are those of the first style (floats summed in another
    order may break a tie; in exact mode it must be 1, or `BenchmarkError` is raised).
    """
    if num_rounds < 1:
        raise BenchmarkError(f"--num-rounds {num_rounds} must be at least 1")
    if trace.longest > engine.limits.max_model_len:
        raise BenchmarkError(
            f"a request of {trace.longest} tokens exceeds max_model_len={engine.limits.max_model_len}: scale the "
            "lengths or raise it"
        )
    prompts = prompts_of(trace, engine.info.vocab_size, seed)
    replay(engine, trace, prompts, styles[0].settings)  # warms up
    works = {style.name: partial(replay, engine, trace, prompts, style.settings) for style in styles}
    rounds = interleaved(works, num_rounds)
    first = rounds[styles[0].name][0].burst.token_ids
    results = []
    for style in styles:
        figures = [each.figures() for each in rounds[style.name]]
        tokens = rounds[style.name][-1].burst.token_ids
        same = sum(ours == theirs for ours, theirs in zip(tokens, first)) / len(first)
        if engine.limits.exact and same < 1.0:
            raise BenchmarkError(f"{style.name}: {1 - same:.0%} of the answers differ in exact mode")
        medians = {name: statistics.median(each[name] for each in figures) for name in figures[0]}
        results.append(
            {"style": style.name, "settings": dict(style.settings), **medians, "same_tokens": same, "rounds": figures}
        )
    report = {
        "trace": trace.name,
        "num_requests": len(trace.requests),
        "num_prompt_tokens": sum(request.input_len for request in trace.requests),
        "num_output_tokens": sum(request.output_len for request in trace.requests),
        "last_arrival_s": trace.requests[-1].arrival_s,
        "num_rounds": num_rounds,
        "results": results,
    }
    return finished(report, engine.info), {name: replays[-1].events for name, replays in rounds.items()}


def prompts_of(trace: Trace, vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts with the trace's lengths and shared prefixes."""
    fill = random_tokens(vocab_size, seed)
    return [trace.prompt_ids(index, fill).tolist() for index in range(len(trace.requests))]


def replay(engine: Engine, trace: Trace, prompts: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> Replay:
    """Serve the trace once, with an empty prefix cache, and check that every answer is whole."""
    other = like(engine, **settings)
    arrivals = [request.arrival_s for request in trace.requests]
    lengths = [request.output_len for request in trace.requests]
    with served(other) as client:
        burst = run_burst(client, prompts, lengths, arrivals_s=arrivals)
    for tokens, length in zip(burst.token_ids, lengths):
        check_outputs([tokens], length, engine.info.vocab_size, "replay")
    submitted = {f"burst-{index}": record.submit_s for index, record in enumerate(burst.records)}
    return Replay(burst, chrome_trace(list(other.timeline), submitted), other.scheduler.num_preemptions)


def svg(report: Mapping[str, Any]) -> str:
    """Four panels, in each a group of bars for every style; the longest bar of a panel fills its width."""
    results: Sequence[Mapping[str, Any]] = report["results"]
    groups = []
    for title, names in _PANELS:
        most = max(result[name] for result in results for name in names) or 1.0
        rows = [(r["style"], [(r[name] / most, f"{r[name]:,.2f}") for name in names]) for r in results]
        groups.append((title, rows))
    return panels(groups, 900, 120, 13, ("#3b6fb6", "#d9a441"))
