"""Benchmarks the engine of another checkout against this one's, in turns: a change's effect on speed.

    git worktree add ../before COMMIT    # and a .venv there
    python -m tools.comparing.compare_checkouts ../before --output-json before-after.json

Both engines load the same folders of random weights (GPT-2's shape, small) on the cpu and run the workloads of
`bench peers`; decode steps of a tiny model, whose kernels take no time, show the host's costs. Each round is a turn of
either side; the first side alternates. Then `bench overhead` of both is run in turns. Other load on the machine only
makes a turn slower, so the best rounds are shown beside the medians. On a busy machine `--num-cores 1` is steadier,
since no thread waits for another, and CPU time is then more reliable than wall time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.bench.environment import describe_machine
from runtime.bench.load.samples import random_prompts
from runtime.bench.metrics import BenchmarkError, check_outputs, markdown_table
from runtime.bench.peers.child_process import ChildProcess
from runtime.bench.peers.workloads import WORKLOADS, Gpt2Shape, Workload, write_gpt2_folder

SCRIPT = Path(__file__).parent / "checkouts" / "engine_side.py"
SIDES = ("before", "after")

SMALL = Gpt2Shape(hidden_size=384, num_layers=6, num_heads=6, vocab_size=16384)
TINY = Gpt2Shape(hidden_size=32, num_layers=2, num_heads=2, vocab_size=64)
STEPS = tuple(
    Workload(f"steps-{count}", f"tiny model, decode, batch {count}", count, 16, 129, "decode") for count in (1, 8, 32)
)
PEER_KEYS = ("decode-1", "prefill", "decode-8", "decode-32", "burst")


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its workloads; `dtype` as in `bench peers`."""

    model: str
    shape: Gpt2Shape
    dtype: str
    workloads: tuple[Workload, ...]

    @property
    def stored_dtype(self) -> str:
        return "float32" if self.dtype == "int8" else self.dtype

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of `LLM`."""
        settings = {"dtype": self.stored_dtype, "max_num_seqs": 32, "kv_cache_bytes": 128 << 20, "overlap": "off"}
        return {**settings, "quantization": "int8"} if self.dtype == "int8" else settings


PEER_WORKLOADS = tuple(each for each in WORKLOADS if each.key in PEER_KEYS)
CASES = (
    Case("small", SMALL, "bfloat16", PEER_WORKLOADS),
    Case("small", SMALL, "int8", PEER_WORKLOADS),
    Case("tiny", TINY, "float32", STEPS),
)


def compare(pythons: dict[str, Path], cases: tuple[Case, ...], num_rounds: int, seed: int = 0) -> list[dict[str, Any]]:
    """Two rows for each workload of the cases, its rate and the CPU time of a run, measured in turns by the
    sides' Pythons. Raises `BenchmarkError`."""
    rows = []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with contextlib.ExitStack() as stack:
        sides = {
            side: stack.enter_context(ChildProcess([str(pythons[side]), str(SCRIPT)], side, environment))
            for side in SIDES
        }
        for case in cases:
            with tempfile.TemporaryDirectory() as folder:
                write_gpt2_folder(Path(folder), case.shape, seed, case.stored_dtype)
                for side in sides.values():
                    side.ask("load", folder=folder, settings=case.settings)
            for workload in case.workloads:
                print(f"{case.model}, {case.dtype}: {workload.name}", file=sys.stderr, flush=True)
                rows += _rows(sides, case, workload, num_rounds, seed)
    return rows


def _rows(
    sides: dict[str, ChildProcess], case: Case, workload: Workload, num_rounds: int, seed: int
) -> list[dict[str, Any]]:
    prompts = random_prompts(workload.num_prompts, workload.prompt_len, case.shape.vocab_size, seed + 1)
    token_ids: dict[str, list[list[int]]] = {}
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    used_ms: dict[str, list[float]] = {side: [] for side in SIDES}
    for number, side in _turns(num_rounds + 2):
        reply = sides[side].ask("run", prompts=prompts, new_tokens=workload.new_tokens, salt=str(number))
        check_outputs(reply["token_ids"], workload.new_tokens, case.shape.vocab_size, f"{workload.name}, {side}")
        if token_ids.setdefault(side, reply["token_ids"]) != reply["token_ids"]:
            raise BenchmarkError(f"{workload.name}: {side} gave other tokens than before")
        if number >= 2:  # the first rounds record graphs for the others
            rates[side].append(_rate(workload, reply))
            used_ms[side].append(1e3 * reply["processor_s"])
    row: dict[str, Any] = {"model": case.model, "dtype": case.dtype, "workload": workload.key, "name": workload.name}
    row["has_same_tokens"] = token_ids["before"] == token_ids["after"]
    return [
        {**row, "unit": "tokens/s", **_compared(rates, best=max)},
        {**row, "unit": "processor ms", **_compared(used_ms, best=min)},
    ]


def _rate(workload: Workload, reply: dict[str, list[float]]) -> float:
    """Tokens per second of the workload's measured phase."""
    arrival, first, last = min(reply["arrival_s"]), max(reply["first_token_s"]), max(reply["last_token_s"])
    if workload.measure == "decode":
        return workload.num_prompts * (workload.new_tokens - 1) / (last - first)
    if workload.measure == "prefill":
        return workload.num_prompts * workload.prompt_len / (first - arrival)
    return workload.num_prompts * workload.new_tokens / (last - arrival)


def compare_overhead(pythons: dict[str, Path], num_rounds: int, num_steps: int = 200) -> list[dict[str, Any]]:
    """A row for each number of `bench overhead`, milliseconds a step, at batch 1, 8 and 32."""
    command = ["-m", "runtime.cli", "bench", "overhead", "--batch-sizes", "1,8,32", "--context-lens", "64"]
    command += ["--num-steps", str(num_steps), "--json"]
    found: dict[tuple[int, str], dict[str, list[float]]] = {}
    for _, side in _turns(num_rounds):
        print(f"bench overhead: {side}", file=sys.stderr, flush=True)
        # Run in the checkout's own folder, so that its modules come before this one's.
        root = pythons[side].parents[2]
        done = subprocess.run(
            [str(pythons[side]), *command], cwd=root, capture_output=True, text=True, check=False, encoding="utf-8"
        )
        if done.returncode:
            raise BenchmarkError(f"bench overhead of {side}: status {done.returncode}: {done.stderr[-500:]}")
        for result in json.loads(done.stdout)["results"]:
            for name in ("host_ms", "graph_host_ms"):
                if name in result:
                    values = found.setdefault((result["num_seqs"], name), {each: [] for each in SIDES})
                    values[side].append(result[name])
    return [
        {"workload": f"overhead-{count}-{name}", "name": f"bench overhead, batch {count}, {name}", "unit": "ms"}
        | _compared(values, best=min)
        for (count, name), values in found.items()
    ]


def _turns(num_rounds: int) -> Iterator[tuple[int, str]]:
    for number in range(num_rounds):
        for side in SIDES if number % 2 else reversed(SIDES):
            yield number, side


def _compared(values: dict[str, list[float]], best: Any) -> dict[str, Any]:
    medians = {side: statistics.median(values[side]) for side in SIDES}
    bests = {side: best(values[side]) for side in SIDES}
    return {
        "medians": medians,
        "bests": bests,
        "ratio_of_medians": medians["after"] / medians["before"],
        "ratio_of_bests": bests["after"] / bests["before"],
        "rounds": values,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    head = ("what", "weights", "unit", *SIDES, "after / before", "best before", "best after", "ratio of bests")
    lines = []
    for row in rows:
        numbers = [
            *(f"{row['medians'][side]:,.4g}" for side in SIDES), f"{row['ratio_of_medians']:.2f}",
            *(f"{row['bests'][side]:,.4g}" for side in SIDES), f"{row['ratio_of_bests']:.2f}",
        ]  # fmt: skip
        lines.append([row["name"], row.get("dtype", ""), row["unit"], *numbers])
    return markdown_table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine of another checkout beside this one's, in turns.")
    parser.add_argument("before", type=Path, help="the other checkout, with a .venv")
    parser.add_argument("--num-rounds", type=int, default=9)
    parser.add_argument("--num-cores", type=int, help="use so many (Linux); default: all")
    parser.add_argument("--output-json", type=Path)
    arguments = parser.parse_args()
    if arguments.num_cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.num_cores])  # the sides inherit it
    before, after = arguments.before.resolve(), Path(__file__).resolve().parents[2]
    pythons = {side: root / ".venv" / "bin" / "python" for side, root in (("before", before), ("after", after))}
    commits = {
        side: subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            encoding="utf-8",
        ).stdout.strip()
        for side, root in (("before", before), ("after", after))
    }
    rows = compare(pythons, CASES, arguments.num_rounds)
    rows += compare_overhead(pythons, arguments.num_rounds)
    report = {
        "commits": commits,
        "num_rounds": arguments.num_rounds,
        "results": rows,
        "environment": describe_machine(),
    }
    if arguments.output_json is not None:
        arguments.output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
