"""Converts an engine's step records to the phases of each request, and to Chrome's trace format.

A request is queued from its arrival to its first chunk, then in prefill until its prompt is computed, then decodes; a
preempted one waits again until its next chunk. ``chrome_trace`` writes these spans, the steps with their host times,
and the counters of queue and blocks; load the file in Perfetto (ui.perfetto.dev) or chrome://tracing. Format: "Trace
Event Format", Google, 2016.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
