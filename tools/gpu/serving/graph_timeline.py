"""The time of a decode step, node by node of its graph.

Only CUPTI, which torch's profiler includes, sees a graph's kernels one by one; it traces the whole process. Without
torch, and on an emulated device, the nodes are listed without times.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from runtime.device.gpu import Gpu
from runtime.device.graph import Graph
from tools.gpu.sections import Options, Result

LEAST_NODES = 8
"""A launch of fewer kernels than that is no decode step."""

Node = tuple[str, float, float]
"""A kernel or a copy: name, microseconds from the step's first node to its start, its own microseconds."""


def node_timeline(options: Options, name: str, run: Callable[[], Any], graphs: Iterable[Any]) -> Result:
    """Profiles `run`, which replays graphs. `graphs`: the recorded ones.

    The result's "beside" has the median step's nodes; "kernels" sums them up: {name: [count, microseconds]}.
    """
    names = ([kernel.specialisation.name for kernel in graph.kernels] for graph in graphs if isinstance(graph, Graph))
    recorded = list(names)
    if not options.is_real or options.is_dry:
        run()
        return {"skipped": "needs a GPU", "nodes": max(map(len, recorded), default=0)}
    try:
        import torch
    except ImportError:
        return {"skipped": "needs torch, for its profiler", "recorded": recorded}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        Gpu.of(options.device).synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        steps = steps_of(json.loads(path.read_text(encoding="utf-8")))
    if not steps:
        return {"skipped": "torch's profiler saw no graph of so many kernels", "recorded": recorded}
    step = median_step(steps)
    summed: dict[str, list[float]] = {}
    for kernel, _, duration in step:
        entry = summed.setdefault(kernel, [0, 0.0])
        entry[0] += 1
        entry[1] = round(entry[1] + duration, 3)
    end = max(start + duration for _, start, duration in step)
    return {
        "steps": len(steps), "nodes": len(step), "step_us": round(end, 2),
        "busy_us": round(sum(duration for _, _, duration in step), 2), "gaps_us": gaps(step),
        "kernels": dict(sorted(summed.items(), key=lambda item: -item[1][1])),
        "beside": {f"timeline-{name}.json": {"nodes": step, "recorded": recorded}},
    }  # fmt: skip


def steps_of(trace: dict[str, Any]) -> list[list[Node]]:
    """The launches of a trace with at least `LEAST_NODES` kernels, the nodes of each in the order of their start."""
    launches: dict[int, list[tuple[str, float, float]]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            correlation = event.get("args", {}).get("correlation", -1)
            launches.setdefault(correlation, []).append((event["name"], float(event["ts"]), float(event["dur"])))
    found = []
    for nodes in launches.values():
        if len(nodes) >= LEAST_NODES:
            nodes.sort(key=lambda node: node[1])
            first = nodes[0][1]
            found.append([(name, round(start - first, 3), duration) for name, start, duration in nodes])
    return found


def median_step(steps: list[list[Node]]) -> list[Node]:
    """The step of median length among those with the most common number of nodes."""
    usual = statistics.mode(len(step) for step in steps)
    alike = sorted((step for step in steps if len(step) == usual), key=lambda step: step[-1][1] + step[-1][2])
    return alike[len(alike) // 2]


def gaps(step: list[Node]) -> dict[str, float]:
    """Microseconds between a node's end and the next one's start: sum and median of those above 0, and the sum of
    overlaps, as in dependent launches."""
    between = [after[1] - (before[1] + before[2]) for before, after in itertools.pairwise(step)]
    open_gaps = [gap for gap in between if gap > 0]
    return {
        "sum": round(sum(open_gaps), 2), "median": round(statistics.median(open_gaps or [0.0]), 3),
        "overlap": round(-sum(gap for gap in between if gap < 0), 2),
    }  # fmt: skip
