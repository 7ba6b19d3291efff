"""One of several ranks that share a GPU: `python -m tools.gpu.collective_rank TASK` compares NCCL's collectives with
numpy. Rank 0 prints a row for each collective and size: microseconds of a call."""

from __future__ import annotations

import json
import sys
from statistics import median
from typing import Any

import numpy as np

from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.device.nccl import NcclComm, open_nccl
from runtime.dtype import float32
from runtime.errors import XservError


def row(gpu: Gpu, comm: NcclComm, collective: str, size: int, num_calls: int) -> dict[str, Any]:
    """Verifies a collective whose result has `size` bytes, and times it. Raises XservError for a wrong result."""
    count = size // 4 // (comm.num_ranks if collective == "all_gather" else 1)
    given = [_numbers(rank, count) for rank in range(comm.num_ranks)]
    source, target = gpu.allocate(4 * count), gpu.allocate(size)
    gpu.write(source.address, given[comm.rank])
    microseconds = []
    for _ in range(1 + num_calls):
        start = gpu.stream.record(is_timed=True)
        getattr(comm, collective)(source.address, target.address, count, float32)
        end = gpu.stream.record(is_timed=True)
        end.synchronize()
        microseconds.append(1e3 * end.elapsed_ms(start))
    found = np.empty(size // 4, np.float32)
    gpu.read(target.address, found)
    if not np.array_equal(found, np.concatenate(given) if collective == "all_gather" else np.sum(given, axis=0)):
        raise XservError(f"rank {comm.rank}: {collective} of {size} bytes is not what numpy gives")
    return {"collective": collective, "bytes": size, "us": median(microseconds[1:])}


def _numbers(rank: int, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Small integers: their sums are exact in any order."""
    return ((np.arange(count) * 7 + rank * 13) % 61).astype(np.float32)


def main() -> None:
    task = json.loads(sys.argv[1])
    gpu = Gpu.of(Device.parse(task["device"]))
    comm = NcclComm(gpu, open_nccl(gpu.driver), bytes.fromhex(task["unique_id"]), task["rank"], task["num_ranks"])
    rows = [row(gpu, comm, each, size, task["num_calls"]) for each in task["collectives"] for size in task["sizes"]]
    comm.destroy()
    if not task["rank"]:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
