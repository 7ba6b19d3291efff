"""`bench schedule`: one trace through the real engine under each way of batching.

Each style serves the same requests at the same times, in turns, round by round; the median round is reported.
Stalls are the gaps between two tokens of a request: a whole prompt computed beside decodes stalls them.

`--trace` has each request's phases: it is queued from its arrival to its first chunk, then in prefill until its prompt
is computed, then decodes; a preempted one waits again until its next chunk. ``chrome_trace`` writes these spans, the
steps with their host times, and the counters of queue and blocks, for Perfetto (ui.perfetto.dev) or chrome://tracing.
Format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from runtime.bench.environment import finished
from runtime.bench.load.burst import Burst, run_burst
from runtime.bench.load.traces import Trace, random_tokens
from runtime.bench.metrics import BenchmarkError, check_outputs, interleaved, percentiles_of
from runtime.bench.scheduling.engines import like, served
from runtime.bench.svg import panels
from runtime.engine.engine import Engine
from runtime.engine.timeline import StepRecord

SpanKind = Literal["queued", "prefill", "decode", "preempted"]


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a request's life; times in seconds of the records' clock, with ``num_tokens`` computed."""

    request_id: str
    index: int
    kind: SpanKind
    start_s: float
    end_s: float
    num_tokens: int


def spans_of(records: Iterable[StepRecord], arrivals_s: Mapping[str, float]) -> list[Span]:
    """Every request's spans in the order of their ends; ``arrivals_s`` has known arrivals; a request without one has no
    "queued" span."""
    spans: list[Span] = []
    waiting_since: dict[tuple[str, int], float] = {}
    seen: set[tuple[str, int]] = set()
    for record in records:
        for request_id, index, _ in record.preempted:
            waiting_since[request_id, index] = record.start_s
        for chunk in record.chunks:
            key = (chunk.request_id, chunk.index)
            if key in waiting_since:
                spans.append(Span(*key, "preempted", waiting_since.pop(key), record.start_s, 0))
            elif key not in seen and chunk.request_id in arrivals_s and chunk.index == 0:
                spans.append(Span(*key, "queued", arrivals_s[chunk.request_id], record.start_s, 0))
            seen.add(key)
            spans.append(Span(*key, chunk.kind, record.start_s, record.end_s, chunk.num_tokens))
    return spans


def chrome_trace(records: Sequence[StepRecord], arrivals_s: Mapping[str, float]) -> dict[str, Any]:
    """A trace whose first process is the engine (its steps, its counters) and whose second has a thread for each
    choice of each request. Times in microseconds since the first event."""
    spans = spans_of(records, arrivals_s)
    begin = min([*(record.start_s for record in records), *(span.start_s for span in spans)], default=0.0)
    rows = {key: place for place, key in enumerate(dict.fromkeys((span.request_id, span.index) for span in spans))}
    events: list[dict[str, Any]] = [
        _name("process_name", "engine", 1),
        _name("process_name", "requests", 2),
        _name("thread_name", "steps", 1, 0),
        *(_name("thread_name", _title(*key), 2, row) for key, row in rows.items()),
    ]

    def complete(name: str, start_s: float, end_s: float, pid: int, tid: int, args: Mapping[str, Any]) -> None:
        events.append(
            {"name": name, "ph": "X", "ts": _us(start_s - begin), "dur": _us(end_s - start_s), "pid": pid, "tid": tid}
            | {"args": dict(args)}
        )

    for record in records:
        args = {"sequences": len(record.chunks), "tokens": record.num_tokens}
        times = {f"{part}_us": _us(getattr(record, f"{part}_s")) for part in ("schedule", "prepare", "run", "commit")}
        complete(f"step {record.number}", record.start_s, record.end_s, 1, 0, args | times)
        for name, values in (
            ("sequences", {"running": record.num_running, "waiting": record.num_waiting}),
            ("blocks", {"free": record.num_free_blocks}),
        ):
            events.append({"name": name, "ph": "C", "ts": _us(record.start_s - begin), "pid": 1, "args": values})
    for span in spans:
        row = rows[span.request_id, span.index]
        complete(span.kind, span.start_s, span.end_s, 2, row, {"tokens": span.num_tokens})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, name: str, pid: int, tid: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _title(request_id: str, index: int) -> str:
    return request_id if index == 0 else f"{request_id} [{index}]"


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


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


def serve_trace(
    engine: Engine, trace: Trace, prompts: Sequence[Sequence[int]], settings: Mapping[str, Any]
) -> tuple[Burst, Engine]:
    """Serves the trace once, with these settings and an empty prefix cache; returns its requests, and the engine that
    did. Raises `BenchmarkError` for an answer that is not whole."""
    other = like(engine, **settings)
    lengths = [request.output_len for request in trace.requests]
    with served(other) as client:
        burst = run_burst(client, prompts, lengths, arrivals_s=[request.arrival_s for request in trace.requests])
    for tokens, length in zip(burst.token_ids, lengths):
        check_outputs([tokens], length, engine.info.vocab_size, "replay")
    return burst, other


def replay(engine: Engine, trace: Trace, prompts: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> Replay:
    """One round of a style with these settings."""
    burst, other = serve_trace(engine, trace, prompts, settings)
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
    return panels(groups, 900, 120, 13)
