"""`bench products --rates`: what this processor's units do, and the kind of tile that follows from them.

One thread's loops of `numba_kernels.cpu.peaks` by its processor time, so that other load takes no share of it; caches
and memory are shared all the same. A row goes into docs/cpu.md's table of measured processors, from which
`numba_kernels.cpu.target` chooses: a measurement itself chooses nothing.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import median
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from numba_kernels.cpu import peaks
from numba_kernels.cpu.target import TILES, available_tiles
from runtime.backends.cpu_threads import num_workers, set_num_workers
from runtime.bench.environment import finished
from runtime.bench.metrics import interleaved, markdown_table
from runtime.bench.peers.cpu_limits import LOOP_S, READ_BUFFER_BYTES, unit_loops

UNITS = {
    "float32": "fused multiply-add", "bfloat16": "vdpbf16ps", "bfloat16 tiles": "tdpbf16ps", "int8": "vpdpbusd",
    "int8 tiles": "tdpbsud",
}  # fmt: skip
_TILES = {"bfloat16 tiles": "amx-bf16", "int8 tiles": "amx-int8"}


def thread_seconds(work: Callable[[], object]) -> float:
    """Processor seconds that this thread takes for a call."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def one_thread_report(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The report {"tiles", "rows", "environment"}; the rows are measured while kernels run on one thread."""
    before = num_workers()
    set_num_workers(1)
    try:
        found = list(rows)
    finally:
        set_num_workers(before)
    return finished({"tiles": TILES, "threads": 1, "time": "processor time of the thread", "rows": found})


def medians(works: Mapping[str, Callable[[], float]], num_runs: int) -> dict[str, float]:
    """The median of each work's results; all take turns, after one warm-up."""
    return {name: median(each) for name, each in interleaved(works, num_runs, warm_ups=1).items()}


def unit_rates(read_buffer_bytes: int = READ_BUFFER_BYTES) -> dict[str, Callable[[], float]]:
    """By unit that the processor has, and "read": a function that measures operations, or bytes, a second of one
    thread."""
    loops = unit_loops()
    for unit, feature in _TILES.items():
        if (loop := peaks.tile_loop(feature)) is not None:
            loops[unit] = loop, peaks.OPS_PER_TILE_ITERATION[feature]
    rates = {unit: _arithmetic(loop, operations) for unit, (loop, operations) in loops.items()}
    memory = mmap.mmap(-1, read_buffer_bytes)
    buffer = np.frombuffer(memory, np.uint8)
    buffer[:] = 1

    def reading() -> float:
        return buffer.nbytes / thread_seconds(lambda: peaks.read_loop(buffer.ctypes.data, buffer.nbytes))

    return {"read": reading, **rates}


def _arithmetic(loop: Callable[[int], Any], operations: int) -> Callable[[], float]:
    loop(1)  # compiles it
    iterations = 1000
    while thread_seconds(partial(loop, iterations)) < LOOP_S:
        iterations *= 2
    return lambda: iterations * operations / thread_seconds(partial(loop, iterations))


def bench_rates(num_rounds: int = 7, read_buffer_bytes: int = READ_BUFFER_BYTES) -> dict[str, Any]:
    """The report: {"processor", "tiles", "available_tiles", "rates", "environment"}. A rate has its median, best and
    lowest of the rounds."""
    found = interleaved(unit_rates(read_buffer_bytes), num_rounds, warm_ups=1)
    rates = {
        unit: {"median": median(each), "best": max(each), "lowest": min(each)} for unit, each in found.items()
    }  # fmt: skip
    report = {"processor": llvm.get_host_cpu_name(), "tiles": TILES, "available_tiles": list(available_tiles())}
    return finished({**report, "rates": rates})


def as_row(report: dict[str, Any]) -> str:
    """A table of one row for docs/cpu.md."""
    rates, environment = report["rates"], report["environment"]
    head = ["processor", "date", "read", *(f"{unit} ({name})" for unit, name in UNITS.items()), "tiles"]
    numbers = [f"{rates[unit]['median'] / 1e9:,.0f}" if unit in rates else "–" for unit in UNITS]
    row = [
        f"{environment['cpu']} ({report['processor']})", environment["date"][:10],
        f"{rates['read']['median'] / 1e9:.1f}", *numbers, f"`{report['tiles']}`",
    ]  # fmt: skip
    return markdown_table(head, [row])
