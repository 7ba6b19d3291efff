"""Draws a schedule: one row per request, from a Chrome trace of `xserv bench schedule --trace`.

    python -m tools.plot_timeline out.json -o timeline.svg [--start MS] [--end MS]

Queueing, prefill chunks, decodes and preemption each have a colour; below the rows, the tokens of each step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.bench.svg import page, rectangle, text

COLOURS = {"queued": "#d9d9d9", "prefill": "#3b6fb6", "decode": "#8fb339", "preempted": "#c8553d"}
_WIDTH, _LABEL, _ROW, _BARS = 1200, 120, 16, 60


class TraceFileError(ValueError):
    """The file is not a trace that `bench schedule` wrote."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle on a request's row, or a step's; milliseconds since the trace's begin."""

    row: int
    kind: str
    start_ms: float
    end_ms: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The rows' names from top to bottom, their bars, and the steps'."""

    names: list[str]
    bars: list[Bar]
    steps: list[Bar]


def read_timeline(trace: Any) -> Timeline:
    """The requests and steps of a Chrome trace. Raises ``TraceFileError``."""
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise TraceFileError("there is no list of traceEvents")
    processes = {event["args"]["name"]: event["pid"] for event in events if event.get("name") == "process_name"}
    if not {"engine", "requests"} <= set(processes):
        raise TraceFileError("there are no processes 'engine' and 'requests' in the trace")
    names: dict[int, str] = {}
    bars: list[Bar] = []
    steps: list[Bar] = []
    for event in events:
        is_request = event.get("pid") == processes["requests"]
        if event.get("name") == "thread_name" and is_request:
            names[event["tid"]] = event["args"]["name"]
        if event.get("ph") != "X":
            continue
        start_ms = event["ts"] / 1e3
        bar = Bar(event["tid"], event["name"], start_ms, start_ms + event["dur"] / 1e3, event["args"]["tokens"])
        if not is_request:
            steps.append(bar)
        elif bar.kind in COLOURS:
            bars.append(bar)
        else:
            raise TraceFileError(f"a request cannot be {bar.kind!r}; known are {', '.join(COLOURS)}")
    if not bars:
        raise TraceFileError("no request ran in the trace")
    return Timeline([names[row] for row in sorted(names)], bars, steps)


def svg(timeline: Timeline, start_ms: float = 0.0, end_ms: float | None = None) -> str:
    """The picture of the time from ``start_ms`` to ``end_ms`` (by default the end)."""
    end_ms = max(bar.end_ms for bar in timeline.bars) if end_ms is None else end_ms
    if not start_ms < end_ms:
        raise TraceFileError(f"nothing lies between {start_ms:g} and {end_ms:g} ms")
    scale = (_WIDTH - _LABEL - 20) / (end_ms - start_ms)

    def left(time_ms: float) -> float:
        return _LABEL + (min(max(time_ms, start_ms), end_ms) - start_ms) * scale

    def shape(bar: Bar, top: float, height: float, colour: str) -> str:
        width = max(left(bar.end_ms) - left(bar.start_ms), 0.3)
        what = f"{bar.kind}, {bar.num_tokens} tokens, {bar.start_ms:.2f} to {bar.end_ms:.2f} ms"
        return rectangle(left(bar.start_ms), top, width, height, colour, what)

    def is_visible(bar: Bar) -> bool:
        return bar.end_ms > start_ms and bar.start_ms < end_ms

    parts = _legend()
    shown = sorted({bar.row for bar in timeline.bars if is_visible(bar)})
    tops = {row: 34 + _ROW * place for place, row in enumerate(shown)}
    for row, top in tops.items():
        parts.append(text(_LABEL - 6, top + 11, timeline.names[row], anchor="end"))
    parts += [shape(bar, tops[bar.row] + 2, _ROW - 4, COLOURS[bar.kind]) for bar in timeline.bars if is_visible(bar)]
    floor = 34 + _ROW * len(shown) + 10 + _BARS
    most = max((step.num_tokens for step in timeline.steps), default=1)
    parts.append(text(_LABEL - 6, floor - _BARS + 11, f"{most} tokens", anchor="end"))
    parts.append(text(_LABEL - 6, floor, "a step", anchor="end"))
    for step in filter(is_visible, timeline.steps):
        height = _BARS * step.num_tokens / most
        parts.append(shape(step, floor - height, height, "#8a8a8a"))
    parts += _ruler(start_ms, end_ms, floor, scale)
    return page(parts, _WIDTH, floor + 30)


def _legend() -> list[str]:
    parts = []
    for place, (kind, colour) in enumerate(COLOURS.items()):
        x = _LABEL + 110 * place
        parts += [rectangle(x, 10, 12, 12, colour), text(x + 16, 20, kind)]
    return parts


def _ruler(start_ms: float, end_ms: float, floor: float, scale: float) -> list[str]:
    span = end_ms - start_ms
    step = next(
        unit * 10.0**power for power in range(-4, 9) for unit in (1.0, 2.0, 5.0) if unit * 10.0**power >= span / 10
    )
    parts = [rectangle(_LABEL, floor, span * scale, 1, "#222")]
    mark = -(-start_ms // step) * step
    while mark <= end_ms:
        x = _LABEL + (mark - start_ms) * scale
        parts += [rectangle(x, floor, 1, 4, "#222"), text(x, floor + 16, f"{mark:g} ms", anchor="middle")]
        mark += step
    return parts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="plot_timeline", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, help="JSON of `xserv bench schedule --trace`")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the SVG to write")
    parser.add_argument("--start", type=float, default=0.0, help="milliseconds; default: the begin")
    parser.add_argument("--end", type=float, help="milliseconds; default: the end")
    options = parser.parse_args(arguments)
    try:
        options.output.write_text(
            svg(read_timeline(json.loads(options.trace.read_text(encoding="utf-8"))), options.start, options.end),
            encoding="utf-8",
        )
    except (OSError, ValueError) as error:
        print(f"plot_timeline: {options.trace}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
