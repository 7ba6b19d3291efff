"""Every cell of docs/disaggregation.md: `bench roles` for each model, trace and size of a fleet, in one report.

    python -m tools.simulate_roles TRACES PARTS OUT.json --plot docs/roles.svg

TRACES holds Azure's AzureLLMInferenceTrace_conv.csv and AzureLLMInferenceTrace_code.csv, and Mooncake's
mooncake_conversation.jsonl. PARTS keeps each run's report; a run whose report is there is not made again. With
``--before FOLDER``, the parts of an earlier run, auto alone is searched beside their chunked prefill and splits. With
``--collect`` nothing is run, and the report names what is not there. ``--note TEXT`` adds to the report's notes; those
of an OUT.json that is there stay in it.

The first half of a cell's windows was used when `AutoRoles` was written; the others are ``held_out``. The variance of
open answers came later, for gpt-oss-20b's Mooncake cell of 16 engines and 7.5 ms, of which both windows were seen.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from runtime.bench.scheduling.ablation import plot, ratio

STEPS = "docs/measurements/2026-11-30-step-times.json"
TRACES = {
    "conv": "AzureLLMInferenceTrace_conv.csv",
    "code": "AzureLLMInferenceTrace_code.csv",
    "moon": "mooncake_conversation.jsonl",
}
AZURE = "github.com/Azure/AzurePublicDataset, data/"
SOURCES = {
    "conv": AZURE + TRACES["conv"],
    "code": AZURE + TRACES["code"] + ", commit b469a113",
    "moon": "github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl",
}
TARGETS = {
    ("qwen3-8b", "conv"): "0.25/0.0075,0.5/0.015,1/0.05",
    ("gpt-oss-20b", "conv"): "0.25/0.0075,0.5/0.015,1/0.05",
    ("qwen3-8b", "code"): "0.5/0.0075,1/0.015,2/0.05",
    ("gpt-oss-20b", "code"): "0.5/0.0075,1/0.015,2/0.05",
    ("qwen3-8b", "moon"): "3/0.01,5/0.02,10/0.05",
    ("gpt-oss-20b", "moon"): "3/0.0075,5/0.015,10/0.05",
    ("qwen3-0.6b-cpu", "conv"): "25/0.2,30/0.3,60/0.6",
}
REQUESTS = {2: 400, 4: 300, 8: 250, 16: 250}
"""Requests of an engine in a window."""


LESS = {
    ("gpt-oss-20b", "moon", 8): 120, ("qwen3-8b", "moon", 16): 60,
    ("gpt-oss-20b", "code", 16): 125, ("qwen3-0.6b-cpu", "conv", 16): 125,
}  # fmt: skip
"""Runs that would take long have fewer."""


class Run(NamedTuple):
    """A run of the command: its model, its trace, and the engines of its fleet."""

    model: str
    trace: str
    engines: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.trace}-{self.engines}.json"

    def command(self, traces: Path, parts: Path, before: Path | None) -> list[str]:
        windows = 2 if self.engines == 16 or (self.engines == 8 and self.trace != "moon") else 4
        return [
            sys.executable, "-m", "runtime.cli", "bench", "roles", str(traces / TRACES[self.trace]), "--steps", STEPS,
            "--model", self.model, "--engines", str(self.engines), "--targets", TARGETS[self.model, self.trace],
            "--requests-per-engine", str(LESS.get(self, REQUESTS[self.engines])), "--windows", str(windows),
            "--links", "infiniband400", "--output-json", str(parts / self.name),
            *(("--before", str(before / self.name)) if before is not None else ()),
        ]  # fmt: skip


def runs() -> Iterator[Run]:
    """Small fleets first."""
    for engines in REQUESTS:
        for model, trace in TARGETS:
            yield Run(model, trace, engines)


def held_out(cell: dict[str, Any]) -> dict[str, Any] | None:
    """The ratio of auto to the better of the others in the second half of the windows, and its standard error."""
    rival = max(("chunked", "static"), key=cell["best"].__getitem__)
    half = len(cell["first_requests"]) // 2
    found = ratio(*(cell["in_windows"][kind][half:] for kind in ("auto", rival)))
    return found if half and found["auto_of_better"] is not None else None


def summary(ratios: Sequence[float]) -> dict[str, Any]:
    """How many cells are within 3 % of the better, and the least."""
    return {"num_cells": len(ratios), "num_within_3_percent": sum(each >= 0.97 for each in ratios),
            "smallest_auto_of_better": min(ratios), "median_auto_of_better": float(np.median(ratios))}  # fmt: skip


def rounded(value: Any) -> Any:
    """Numbers with four digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def digests(traces: Path) -> dict[str, dict[str, str]]:
    """The source of each trace, and its digest here."""
    return {
        name: {"source": SOURCES[trace], "sha256": hashlib.sha256((traces / name).read_bytes()).hexdigest()}
        for trace, name in TRACES.items()
    }


def notes_of(report: Path) -> list[str]:
    """The notes of a report, none if it is not there."""
    found: list[str] = json.loads(report.read_text(encoding="utf-8")).get("notes", []) if report.exists() else []
    return found


def collected(parts: Path, traces: Path, notes: Sequence[str] = ()) -> dict[str, Any]:
    """One report of all parts that are there."""
    reports = [
        json.loads((parts / run.name).read_text(encoding="utf-8")) for run in runs() if (parts / run.name).exists()
    ]
    cells = [cell for report in reports for cell in report["cells"]]
    for cell in cells:
        cell["held_out"] = held_out(cell)
    measured = [cell for cell in cells if cell["auto_of_better"] is not None]
    report: dict[str, Any] = rounded({
        "what": "goodput of simulated fleets: requests a second at which 90 % keep TTFT and TPOT; chunked prefill "
        "(budgets of 256 to 8,192), static splits (every ratio) and auto, over infiniband400 layer by layer",
        "command": "python -m tools.simulate_roles TRACES PARTS OUT.json --plot docs/roles.svg",
        "machine": "simulated in virtual time: no number depends on the machine",
        "date": reports[0]["environment"]["date"][:10],
        "notes": list(notes),
        "traces": digests(traces),
        "environment": reports[0]["environment"],
        "all_windows": summary([cell["auto_of_better"] for cell in measured]),
        "held_out_windows": summary([cell["held_out"]["auto_of_better"] for cell in measured if cell["held_out"]]),
        "cells_that_nothing_serves": len(cells) - len(measured),
        "not_run": list(_missing(parts)),
        "runs": [{key: value for key, value in report.items() if key != "environment"} for report in reports],
    })  # fmt: skip
    return report


def _missing(parts: Path) -> Iterator[str]:
    """The cells that no part has."""
    for run in runs():
        path = parts / run.name
        there = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else []
        found = {(cell["ttft_s"], cell["tpot_s"]) for cell in there}
        for target in TARGETS[run.model, run.trace].split(","):
            ttft_s, tpot_s = map(float, target.split("/"))
            if (ttft_s, tpot_s) not in found:
                yield f"{run.model}, {run.trace}, {run.engines} engines, {target}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("parts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--note", action="append", default=[])
    options = parser.parse_args()
    options.parts.mkdir(parents=True, exist_ok=True)
    missing = [] if options.collect else [run for run in runs() if not (options.parts / run.name).exists()]
    with ThreadPoolExecutor(options.jobs) as pool:
        for run in missing:
            pool.submit(subprocess.run, run.command(options.traces, options.parts, options.before), check=False)
    report = collected(options.parts, options.traces, [*notes_of(options.out), *options.note])
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        options.plot.write_text(plot(report["runs"]), encoding="utf-8")
    failed = [run.name for run in missing if not (options.parts / run.name).exists()]
    if failed:
        sys.exit(f"these runs failed, their messages are above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
