"""`bench profile`: a step's time by kernel and by part of the host's work.

Steps run one after another, on GPUs eagerly. On a GPU events surround each launch; on an emulated device each kernel's
work is counted, and compared with the product's rates; on the cpu each launch is clocked, of recorded steps, too. The
host's parts are those of the engine's timeline.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from numba_kernels.cpu.running.launch import Kernel
from numba_kernels.cpu.running.recording import Recording, current
from runtime.bench.environment import finished
from runtime.bench.kernels.counted import Counts, counting
from runtime.bench.load.samples import random_prompts
from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.engines import Stepper, local
from runtime.bench.svg import panels
from runtime.device.gpu import Gpu
from runtime.emulator.driver.architectures import model_of
from runtime.engine.engine import Engine
from runtime.engine.timeline import StepRecord

HOST_PARTS = ("schedule", "prepare", "run", "commit")
CPU_PRODUCTS = "linear", "experts", "head_maps"
"""The cpu's kernels that multiply by weights."""
ISSUES_PER_CLOCK = 4
"""Warp instructions that a multiprocessor issues in a clock at most: one for each of its four schedulers."""


@dataclass(slots=True)
class Spent:
    """The cost of one kernel or operation over all its runs: seconds, or counted work."""

    runs: int = 0
    seconds: float = 0.0
    counted: dict[str, int] = field(default_factory=dict)


Ledger = dict[str, Spent]


@contextmanager
def _clocked(ledger: Ledger) -> Iterator[None]:
    """Clocks the cpu's launches, those of recordings one by one, which costs about a microsecond each."""
    call, replay = Kernel.__call__, Recording._run

    def timed(name: str, work: Callable[[], None]) -> None:
        start = time.perf_counter()
        work()
        spent = ledger.setdefault(name, Spent())
        spent.runs += 1
        spent.seconds += time.perf_counter() - start

    def launched(kernel: Kernel, *arguments: Any, **keywords: Any) -> None:
        work = functools.partial(call, kernel, *arguments, **keywords)
        if current() is None:
            timed(kernel.name, work)
        else:
            work()

    def replayed(recording: Recording, begin: int, end: int) -> None:
        for number in range(begin, end):
            timed(recording.names[number], functools.partial(replay, recording, number, number + 1))

    for kind, name, method in ((Kernel, "__call__", launched), (Recording, "_run", replayed)):
        setattr(kind, name, method)
    try:
        yield
    finally:
        Kernel.__call__, Recording._run = call, replay  # type: ignore[method-assign]


@contextmanager
def _timed_launches(gpu: Gpu, ledger: Ledger) -> Iterator[None]:
    """Puts timed events around each launch."""
    launch = gpu.launch
    taken: list[tuple[str, Any, Any]] = []

    def timed(asked: Any, *arguments: Any, stream: Any = None) -> None:
        start = (stream or gpu.stream).record(is_timed=True)
        launch(asked, *arguments, stream=stream)
        taken.append((asked.specialisation.name, start, (stream or gpu.stream).record(is_timed=True)))

    vars(gpu)["launch"] = timed
    try:
        yield
        gpu.synchronize()
    finally:
        del vars(gpu)["launch"]
    for name, start, end in taken:
        spent = ledger.setdefault(name, Spent())
        spent.runs += 1
        spent.seconds += 1e-3 * end.elapsed_ms(start)


@contextmanager
def _counted_launches(gpu: Gpu, ledger: Ledger) -> Iterator[None]:
    """Counts each kernel's work on an emulated device."""
    launch = gpu.launch
    runs: dict[str, int] = {}

    def counted(asked: Any, *arguments: Any, stream: Any = None) -> None:
        runs[asked.specialisation.name] = runs.get(asked.specialisation.name, 0) + 1
        launch(asked, *arguments, stream=stream)

    vars(gpu)["launch"] = counted
    parts: dict[str, Counts] = {}
    try:
        with counting(gpu, parts):
            yield
    finally:
        del vars(gpu)["launch"]
    for name, found in parts.items():
        spent = ledger.setdefault(name, Spent())
        spent.runs += runs.get(name, 0)
        for key, value in (
            ("warp_instructions", found.warp_instructions), ("moved_bytes", found.moved_bytes),
            ("tensor_flops", found.tensor_flops),
        ):  # fmt: skip
            spent.counted[key] = spent.counted.get(key, 0) + value


@contextmanager
def _watched(engine: Engine, ledger: Ledger) -> Iterator[None]:
    device = local(engine).model.device
    if device.kind == "cpu":
        with _clocked(ledger):
            yield
        return
    gpu = Gpu.of(device)
    with (_counted_launches if gpu.driver.is_emulated else _timed_launches)(gpu, ledger):
        yield


def bench_profile(engine: Engine, *, batch: int, prompt_len: int, num_steps: int, seed: int = 0) -> dict[str, Any]:
    """Profiles the prefill of `batch` prompts and then `num_steps` decode steps of all of them.

    The engine runs its plain loop, on GPUs eagerly: overlap "off", decode_graphs "off". Returns {"phases": {"prefill":
    ..., "decode": ...}, ...}: of each phase its "steps", "host" (milliseconds a step by part), and "work": of each
    kernel "runs" and either "ms", over all steps, or the counts and "bound_ms", the emulated product's lower bound; on
    the cpu "products_share", of products with weights in all launches.

    Raises BenchmarkError for sizes below 1 or beyond the engine's limits, another loop, or steps that are not all
    decodes.
    """
    for name, value in (("batch", batch), ("prompt_len", prompt_len), ("num_steps", num_steps)):
        if value < 1:
            raise BenchmarkError(f"{name} is {value}, must be at least 1")
    limits, on_cpu = engine.limits, local(engine).model.device.kind == "cpu"
    if engine.overlaps or (local(engine).graphs is not None and not on_cpu):
        raise BenchmarkError('a profile needs the plain loop without graphs: overlap="off", decode_graphs="off"')
    output_len = num_steps + 4
    if prompt_len + output_len > limits.max_model_len or batch > limits.max_num_seqs:
        raise BenchmarkError(
            f"{batch} sequences of {prompt_len} + {output_len} tokens do not fit max_num_seqs={limits.max_num_seqs}, "
            f"max_model_len={limits.max_model_len}"
        )
    stepper = Stepper(engine)
    vocab_size = engine.info.vocab_size
    for prompt in random_prompts(batch, prompt_len, vocab_size, seed + 1):  # everything is compiled here
        stepper.add(prompt, 3)
    stepper.drain()
    phases = {}
    ids = [stepper.add(prompt, output_len) for prompt in random_prompts(batch, prompt_len, vocab_size, seed)]
    ledger: Ledger = {}
    first = _number(engine)
    with _watched(engine, ledger):
        waiting = set(ids)
        while waiting:
            waiting -= {output.request_id for output in stepper.step()[1] if output.new_token_ids}
    phases["prefill"] = _phase(engine, ledger, _since(engine, first))
    ledger, first = {}, _number(engine)
    with _watched(engine, ledger):
        for _ in range(num_steps):
            stepper.step()
    records = _since(engine, first)
    if any(len(record.chunks) != batch or record.num_tokens != batch for record in records):
        raise BenchmarkError("a step that was to decode all sequences did something else")
    phases["decode"] = _phase(engine, ledger, records)
    stepper.cancel_all()
    device = local(engine).model.device
    report = {
        "batch": batch, "prompt_len": prompt_len, "num_steps": num_steps, "phases": phases,
        "measured_by": {"cpu": "clocks", "emulated": "counts"}.get(device.kind, "events"),
    }  # fmt: skip
    return finished(report, engine.info)


def _number(engine: Engine) -> int:
    return engine.timeline[-1].number if engine.timeline else -1


def _since(engine: Engine, number: int) -> list[StepRecord]:
    return [record for record in engine.timeline if record.number > number]


def _phase(engine: Engine, ledger: Ledger, records: Sequence[StepRecord]) -> dict[str, Any]:
    if not records:
        raise BenchmarkError("no step was recorded")
    host = {f"{part}_ms": 1e3 * statistics.fmean(getattr(each, f"{part}_s") for each in records) for part in HOST_PARTS}
    work = []
    for name, spent in ledger.items():
        line: dict[str, Any] = {"name": name, "runs": spent.runs}
        if spent.counted:
            line |= spent.counted | {"bound_ms": _bound_ms(engine, spent.counted)}
        else:
            line["ms"] = 1e3 * spent.seconds
        work.append(line)
    key = "bound_ms" if any("bound_ms" in line for line in work) else "ms"
    total = sum(line[key] for line in work)
    for line in work:
        line["share"] = line[key] / total if total else 0.0
    work.sort(key=lambda line: -line["share"])
    found = {"steps": len(records), "tokens": sum(each.num_tokens for each in records), "host": host, "work": work}
    if local(engine).model.device.kind == "cpu":
        found["products_share"] = sum(line["share"] for line in work if line["name"] in CPU_PRODUCTS)
    return found


def _bound_ms(engine: Engine, counted: dict[str, int]) -> float:
    """The lower bound of the emulated product: by memory, tensor cores, or issued PTX instructions."""
    device = local(engine).model.device
    assert device.arch is not None
    model = model_of(device.arch)
    issued = counted["warp_instructions"] / (ISSUES_PER_CLOCK * model.num_sms * model.clock_khz * 1e3)
    memory, tensor = counted["moved_bytes"] / model.memory_bytes_per_s, counted["tensor_flops"] / model.bf16_flops
    return 1e3 * max(issued, memory, tensor)


def as_lines(report: dict[str, Any]) -> list[str]:
    """The report for a person."""
    lines = []
    for name, phase in report["phases"].items():
        host = ", ".join(f"{part} {phase['host'][f'{part}_ms']:,.3f}" for part in HOST_PARTS)
        lines += [f"{name}: {phase['steps']} steps, {phase['tokens']} tokens", f"  host (ms a step): {host}"]
        if "products_share" in phase:
            share, kernels_ms = phase["products_share"], sum(line["ms"] for line in phase["work"]) / phase["steps"]
            lines.append(
                f"  launches: {kernels_ms:,.3f} ms a step, of it {1 - share:.1%} besides products with weights"
            )
        is_counted = report["measured_by"] == "counts"
        heads = ("instructions", "MB moved", "MFLOP", "bound ms") if is_counted else ("ms a step",)
        lines.append(f"  {'':<52}{'runs':>7}" + "".join(f"{head:>14}" for head in heads) + f"{'share':>8}")
        for line in phase["work"]:
            if is_counted:
                values = [
                    f"{line['warp_instructions']:,}", f"{line['moved_bytes'] / 1e6:,.3f}",
                    f"{line['tensor_flops'] / 1e6:,.1f}", f"{line['bound_ms']:,.4f}",
                ]  # fmt: skip
            else:
                values = [f"{line['ms'] / phase['steps']:,.4f}"]
            cells = "".join(f"{value:>14}" for value in values)
            lines.append(f"  {line['name']:<52}{line['runs']:>7}{cells}{line['share']:>8.1%}")
        lines.append("")
    if report["measured_by"] == "counts":
        lines.append("counted on an emulated device; the host's times mean nothing for a GPU")
    return lines


def profile_svg(report: Mapping[str, Any]) -> str:
    """A bar for each kernel's share of a phase, and one for each part of the host's work."""
    groups = []
    for name, phase in report["phases"].items():
        longest = max(phase["host"].values()) or 1.0
        work = [(each["name"], [(each["share"], f"{each['share']:.1%}")]) for each in phase["work"]]
        host = [(part, [(value / longest, f"{value:,.3f}")]) for part, value in phase["host"].items()]
        groups += [
            (f"{name}: shares by kernel ({report['measured_by']})", work), (f"{name}: the host (ms a step)", host),
        ]  # fmt: skip
    return panels(groups, 1000, 380, 16)
