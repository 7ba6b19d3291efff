"""Collectives among GPUs by NCCL: by function, size, as single calls, as a graph, and in a registered window.

Each rank is a process (`runtime.bench.collective_rank`). What is timed was compared with numpy's sum or order of the
same numbers before. A bus bandwidth is what a link carries: `2 (n - 1) / n` bytes for each that n ranks reduce,
`(n - 1) / n` for each that they gather or scatter, all of them for what one sends to all, as NCCL's own tests count.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from runtime.bench.environment import describe_machine
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.device.nccl import open_nccl
from runtime.errors import InvalidArgumentError, XservError
from runtime.own_packages import python_module

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
SIZES = tuple(1 << shift for shift in range(10, 29, 2))
"""Bytes: 1 KiB to 256 MiB."""
_COMMAND = python_module("runtime.bench.collective_rank")
_LEAST_RANKS = 2


def bench_collectives(
    device: str, *, num_ranks: int, sizes: tuple[int, ...] = SIZES, collectives: tuple[str, ...] = COLLECTIVES,
    num_calls: int = 20, num_rounds: int = 5, timeout_s: float = 600.0,
) -> dict[str, Any]:  # fmt: skip
    """A row for each collective, size and way: microseconds a call, and bandwidths in GB/s.

    Raises:
        InvalidArgumentError: for fewer than two ranks, a size that is not positive and a multiple of 16 bytes a rank,
            an unknown collective, or the cpu.
        XservError: what a rank said when it failed.
    """
    first = Device.parse(device)
    if first.kind == "cpu":
        raise InvalidArgumentError("device is 'cpu', must be cuda or emulated: the cpu has no NCCL", param="device")
    if num_ranks < _LEAST_RANKS:
        raise InvalidArgumentError(f"num_ranks is {num_ranks}, must be at least 2", param="num_ranks")
    for name in collectives:
        if name not in COLLECTIVES:
            raise InvalidArgumentError(f"{name!r} is none of {', '.join(COLLECTIVES)}", param="collectives")
    for size in sizes:
        if size < 1 or size % (16 * num_ranks):
            raise InvalidArgumentError(
                f"a size is {size} bytes, must be a multiple of 16 a rank, {16 * num_ranks}", param="sizes"
            )
    if first.kind == "cuda":
        Device(f"cuda:{first.index + num_ranks - 1}").require()
    nccl = open_nccl(Gpu.of(first).driver)
    task = {
        "num_ranks": num_ranks, "unique_id": nccl.unique_id().hex(), "sizes": sizes, "collectives": collectives,
        "num_calls": num_calls, "num_rounds": num_rounds,
    }  # fmt: skip
    processes = []
    try:
        for rank in range(num_ranks):
            own = f"cuda:{first.index + rank}" if first.kind == "cuda" else first.type
            given = json.dumps({**task, "rank": rank, "device": own})
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", *_COMMAND, given],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    encoding="utf-8",
                )
            )
        said = [process.communicate(timeout=timeout_s) for process in processes]
    except subprocess.TimeoutExpired:
        raise XservError(f"the ranks were not done after {timeout_s:g} s") from None
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    for rank, (process, (_, errors)) in enumerate(zip(processes, said)):
        if process.returncode:
            raise XservError(f"rank {rank} failed: {(errors.strip().splitlines() or ['without a word'])[-1]}")
    return {
        "device": first.type, "num_ranks": num_ranks, "nccl": nccl.version(), "is_emulated": nccl.is_emulated,
        "machine": describe_machine(), "results": json.loads(said[0][0]),
    }  # fmt: skip


def as_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    lines = []
    if report["is_emulated"]:
        lines.append("emulated: numbers were compared, times say nothing of a GPU")
    lines.append(f"{'collective':<16}{'bytes':>12}{'way':>9}{'us':>12}{'GB/s':>9}{'bus GB/s':>10}")
    lines += [
        f"{row['collective']:<16}{row['bytes']:>12,}{row['way']:>9}{row['us']:>12.1f}{row['gb_per_s']:>9.2f}"
        f"{row['bus_gb_per_s']:>10.2f}"
        for row in report["results"]
    ]
    return lines
