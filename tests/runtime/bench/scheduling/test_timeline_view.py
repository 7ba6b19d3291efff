"""Step records as spans and as a Chrome trace, from records written by hand."""

from __future__ import annotations

import numpy as np

from runtime.bench.scheduling.schedule import Span, chrome_trace, spans_of
from runtime.engine.timeline import ChunkKey, StepRecord


def record(number: int, start_s: float, end_s: float, *chunks: tuple[str, int, int, int]) -> StepRecord:
    """Chunks as (request, prompt tokens, start, number of tokens)."""
    made = StepRecord(number, start_s)
    made.end_s = end_s
    made.num_running, made.num_waiting, made.num_free_blocks = len(chunks), 1, 7
    made.schedule_s, made.run_s = 0.001, 0.5
    keys = [ChunkKey(request_id, 0, num_prompt, 0.0) for request_id, num_prompt, _, _ in chunks]
    starts, counts = (np.array([chunk[place] for chunk in chunks], np.int64) for place in (2, 3))
    made.set_chunks(keys, starts, counts)
    return made


def story() -> list[StepRecord]:
    """A prompt of 6 in chunks of 4 and 2, then a decode; B comes, pushes A out, and A computes again."""
    records = [
        record(0, 10.0, 11.0, ("a", 6, 0, 4)),
        record(1, 11.0, 12.0, ("a", 6, 4, 2)),
        record(2, 12.0, 13.0, ("a", 6, 6, 1), ("b", 3, 0, 3)),
        record(3, 13.0, 14.0, ("b", 3, 3, 1)),
        record(4, 14.0, 16.0, ("a", 6, 0, 7)),
    ]
    records[3].preempted = [("a", 0, "recompute")]
    return records


def test_spans() -> None:
    assert spans_of(story(), {"a": 9.5, "b": 11.5}) == [
        Span("a", 0, "queued", 9.5, 10.0, 0),
        Span("a", 0, "prefill", 10.0, 11.0, 4),
        Span("a", 0, "prefill", 11.0, 12.0, 2),
        Span("a", 0, "decode", 12.0, 13.0, 1),
        Span("b", 0, "queued", 11.5, 12.0, 0),
        Span("b", 0, "prefill", 12.0, 13.0, 3),
        Span("b", 0, "decode", 13.0, 14.0, 1),
        Span("a", 0, "preempted", 13.0, 14.0, 0),
        Span("a", 0, "prefill", 14.0, 16.0, 7),
    ]
    assert not [span for span in spans_of(story(), {}) if span.kind == "queued"]


def test_chrome_trace() -> None:
    trace = chrome_trace(story(), {"a": 9.5, "b": 11.5})
    events = trace["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {(1, 0): "steps", (2, 0): "a", (2, 1): "b"}
    steps = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert [(step["name"], step["ts"], step["dur"]) for step in steps][2] == ("step 2", 2.5e6, 1e6)
    assert steps[2]["args"] == {
        "sequences": 2, "tokens": 4, "schedule_us": 1000.0, "prepare_us": 0.0, "run_us": 5e5, "commit_us": 0.0,
    }  # fmt: skip
    preempted = [event for event in events if event["name"] == "preempted"]
    assert [(event["tid"], event["ts"], event["dur"]) for event in preempted] == [(0, 3.5e6, 1e6)]
    counters = [event["args"] for event in events if event["ph"] == "C" and event["ts"] == 0.5e6]
    assert counters == [{"running": 1, "waiting": 1}, {"free": 7}]
    assert chrome_trace([], {})["traceEvents"]
