"""`bench peers`: this engine against llama.cpp and Hugging Face transformers, on the same weights, in turns.

For each model and type of its weights, one folder of seeded random weights is written, and every side loads it; or a
GGUF file is given. First they are compared: logits of one prompt, and the greedy tokens of every workload. Then each
workload is timed in rounds, all sides in turns (the first one rotates), while the others are idle, which is measured,
too. A ratio above 1 means that ours is faster. The processor's limits are also measured in every round; the best are
used.

Ours is timed through `EngineClient`, scheduler, paged cache and sampler included; a peer through its model's forward in
the leanest loop (`peer_transformers`, `peer_llama`), with all cores, and with the fastest of its own settings for each
workload.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.checkpoints.hub import resolve_model
from runtime.bench.environment import describe_engine, usable_cores
from runtime.bench.metrics import BenchmarkError, check_finite
from runtime.bench.peers.child_process import ChildProcess, PeerDiedError
from runtime.bench.peers.cpu_limits import LimitMeter, ModelSize, limit_rate, open_meter
from runtime.bench.peers.host_work import NAMES, bench_load, bench_pack, tokenizer_rows
from runtime.bench.peers.ik_llama import NAME as IK_LLAMA
from runtime.bench.peers.ik_llama import IkLlama
from runtime.bench.peers.report import PEER_GOALS, host_row
from runtime.bench.peers.rounds import (
    LLAMA,
    OURS,
    PEER_ENGINES,
    OurSide,
    Peer,
    PeerEngine,
    PeerSide,
    compare_logits,
    measure_workload,
)
from runtime.bench.peers.workloads import GPT2, Gpt2Shape, Group, Workload
from runtime.llm import LLM

KV_CACHE_BYTES = 512 << 20

Say = Callable[[str], None]


def bench_peers(
    pythons: Mapping[str, Path],
    groups: Sequence[Group],
    *,
    host_work: Sequence[str] = (),
    tokenizer: Path | None = None,
    num_rounds: int = 5,
    shape: Gpt2Shape | None = None,
    meter: LimitMeter | None = None,
    seed: int = 0,
    clock: str = "wall",
    ik_llama: Path | None = None,
    kv_cache_bytes: int = KV_CACHE_BYTES,
    say: Say = lambda line: print(line, file=sys.stderr, flush=True),
) -> dict[str, Any]:
    """Measures every workload of the groups, and the host's work named.

    pythons    each peer's Python, by the engine's name; a peer without one is reported as missing
    tokenizer  the tokenizer.json of `host_work`'s "tokenizer"; by default the bundled model's, which tiktoken cannot
               express
    shape      of GPT-2; by default that of the 124M model
    meter      of the limits; a new one if None
    clock      "processor" takes each side's processor time, which other processes hardly change; on one core alone
    ik_llama   the folder of ik_llama.cpp's benchmarks; they run GGUF files, and those that llama.cpp's side has written
    say        gets progress messages

    A peer that dies is left out of the rest of its group; `died` has the reason. `results[i]` is `measure_workload`'s
    report with `limit_tokens_per_second`, `share_of_limit`, `missing` (unavailable peers), and, with a goal, `goal`,
    `ratio` and `verdict`. Workloads that cannot be timed, because sides disagree or a peer fails, are in `refused` with
    the reason. `host_results[i]` has `value` and `verdict`.
    """
    if num_rounds < 1:
        raise BenchmarkError(f"--num-rounds {num_rounds} must be at least 1")
    if clock != "wall" and usable_cores() != 1:
        raise BenchmarkError(f"--clock {clock} needs one core, not {usable_cores()}: `taskset -c 0 xserv bench peers`")
    if clock != "wall" and ik_llama is not None:
        raise BenchmarkError(f"--ik-llama tells wall time alone, not --clock {clock}: leave one of them away")
    shape = shape or Gpt2Shape()
    for group in groups:
        longest = max(workload.longest for workload in group.workloads)
        if group.model == GPT2 and longest > shape.max_positions:
            raise BenchmarkError(f"a workload of {longest} tokens exceeds the {shape.max_positions} positions")
    report: dict[str, Any] = {
        "limits": None,
        "num_rounds": num_rounds,
        "clock": clock,
        "peers": {},
        "results": [],
        "refused": [],
        "died": [],
        "host_results": [],
        "environment": {},
    }
    if groups:
        with contextlib.ExitStack() as stack:
            if meter is None:
                say("the limits of this processor")
                meter = stack.enter_context(open_meter())
            measured: list[_Measured] = []
            for group in groups:
                say(f"{group.model}, {group.dtype}: writing and loading")
                with tempfile.TemporaryDirectory(prefix="xserv-peers-") as name:
                    group.write(Path(name), shape, seed)
                    try:
                        _measure_group(
                            group,
                            Path(name),
                            pythons,
                            meter,
                            num_rounds,
                            seed,
                            clock,
                            ik_llama,
                            kv_cache_bytes,
                            measured,
                            report,
                            say,
                        )
                    except BenchmarkError as error:
                        what = f"all of {group.model}"
                        report["refused"].append({"workload": what, "dtype": group.dtype, "reason": str(error)})
            report["limits"] = meter.report()
            report["results"] = [_judged(*each, meter) for each in measured]
    if host_work:
        with tempfile.TemporaryDirectory(prefix="xserv-peers-") as name:
            if {"load", "pack"} & set(host_work):
                Group(GPT2, "float32", ()).write(Path(name), shape, seed)
            for key in host_work:
                say(key)
                report["host_results"] += _host_rows(key, Path(name), tokenizer, num_rounds)
    check_finite(report)
    return report


def failures(report: Mapping[str, Any]) -> list[str]:
    """The failures of `--check`: missed or undecided goals, refused workloads, and peers that died."""
    rows = [*report["results"], *report["host_results"]]
    words = [
        f"{row['name']} ({row['dtype']}): {row['verdict']}" if "dtype" in row else f"{row['name']}: {row['verdict']}"
        for row in rows
        if row.get("verdict") in ("missed", "unknown")
    ]
    words += [f"{each['workload']} ({each['dtype']}): {each['reason']}" for each in report["refused"]]
    return words + [f"{each['model']} ({each['dtype']}): {each['reason']}" for each in report["died"]]


def _host_rows(key: str, folder: Path, tokenizer: Path | None, num_rounds: int) -> list[dict[str, Any]]:
    if key == "load":
        return [bench_load(folder, num_rounds)]
    if key == "pack":
        return [bench_pack(folder, num_rounds)]
    file = tokenizer or Path(resolve_model(None)) / "tokenizer.json"
    return [tokenizer_row(row) for row in tokenizer_rows(file, num_rounds=num_rounds)]


def tokenizer_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `tokenizer_rows` with its goal: the prompt's is a time, the others' a ratio to tiktoken."""
    medians = {name: row[name]["median"] for name in NAMES if name in row}
    said = ", ".join(f"{name} {median:.3g}" for name, median in medians.items()) + f" {row['unit']}"
    details = {"what": row["work"], "said": f"{row['work']}: {said}", "medians": medians, "unit": row["unit"]}
    if row["unit"] == "us":
        return host_row("tokenizer_prompt", medians["ours"], **details)
    ratio = medians["ours"] / medians["tiktoken"] if "tiktoken" in medians else None
    return host_row("tokenizer_encode", ratio, **details)


_Measured = tuple[Workload, ModelSize, dict[str, Any]]
"""A workload, its model's size, and its report without the parts that depend on the limits."""


def _judged(workload: Workload, size: ModelSize, result: dict[str, Any], meter: LimitMeter) -> dict[str, Any]:
    """The report with its limit and verdict, after all measurements."""
    limit = limit_rate(meter.best(), size, result["dtype"], workload)
    rate = result["sides"][OURS]["median_tokens_per_second"]
    result.update(limit_tokens_per_second=limit, share_of_limit=rate / limit)
    goal = PEER_GOALS.get((workload.key, result["dtype"]))
    if goal is not None:
        result.update(goal=asdict(goal), ratio=goal.ratio(result["ratios"]), verdict=goal.verdict(result))
    return result


def _measure_group(
    group: Group,
    folder: Path,
    pythons: Mapping[str, Path],
    meter: LimitMeter,
    num_rounds: int,
    seed: int,
    clock: str,
    ik_llama: Path | None,
    kv_cache_bytes: int,
    measured: list[_Measured],
    report: dict[str, Any],
    say: Say,
) -> None:
    """Loads the folder on every side and adds the workloads' results to those measured."""
    model = group.gguf or folder
    size = (
        ModelSize.of_gguf(model)
        if group.gguf
        else ModelSize.of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    )
    wanted = [engine for engine in PEER_ENGINES if group.dtype in engine.dtypes]
    missing = [engine.name for engine in wanted if engine.name not in pythons]
    longest = max(workload.longest for workload in group.workloads)
    arguments: dict[str, Any] = {"quantization": "int8"} if group.dtype == "int8" else {}
    with contextlib.ExitStack() as stack:
        llm = stack.enter_context(
            LLM(
                str(model),
                device="cpu",
                dtype=group.stored_dtype,
                skip_tokenizer_init=True,
                max_model_len=longest + 1,
                kv_cache_bytes=kv_cache_bytes,
                **arguments,
            )
        )
        ours = OurSide(llm, clock)
        peers: list[Peer] = []

        def leave_out(died: PeerDiedError) -> None:
            peers[:] = [peer for peer in peers if peer.name != died.peer]
            missing.append(died.peer)
            report["died"].append({"peer": died.peer, "model": group.model, "dtype": group.dtype, "reason": str(died)})

        for engine in wanted:
            if engine.name not in pythons:
                continue
            try:
                peer = _start(engine, pythons[engine.name], folder, group, clock, stack)
                compare_logits(ours, peer, min(64, longest), group.dtype, seed)
            except PeerDiedError as died:
                leave_out(died)
                continue
            said = {**peer.versions, "logits_relative_error": peer.logits_error}
            report["peers"].setdefault(engine.name, {})[f"{group.model} {group.dtype}"] = said
            peers.append(peer)
        file = group.gguf or folder / f"model-{LLAMA.dtypes[group.dtype]}.gguf"  # llama.cpp's side has written it
        if ik_llama is not None and file.exists():
            try:
                ik = IkLlama(ik_llama, file)
                report["peers"].setdefault(IK_LLAMA, {})[f"{group.model} {group.dtype}"] = ik.versions()
                peers.append(ik)
            except PeerDiedError as died:
                leave_out(died)
        for workload in group.workloads:
            say(f"{group.model}, {group.dtype}: {workload.name}")
            result = None
            while result is None:
                try:
                    result = measure_workload(
                        ours, peers, workload, group.dtype, num_rounds, seed, meter, is_calm=clock == "wall"
                    )
                except PeerDiedError as died:
                    leave_out(died)
                except BenchmarkError as error:
                    report["refused"].append({"workload": workload.key, "dtype": group.dtype, "reason": str(error)})
                    break
            if result is not None:
                measured.append((workload, size, {**result, "missing": list(missing)}))
        report["environment"] = describe_engine(llm.client.info)


def _start(
    engine: PeerEngine, python: Path, folder: Path, group: Group, clock: str, stack: contextlib.ExitStack
) -> PeerSide:
    child = stack.enter_context(ChildProcess([str(python), str(engine.script)], engine.name))
    return PeerSide(engine, child, folder, group.gguf or folder, group.dtype, clock)
