"""One of several ranks that time NCCL's collectives: `python -m tools.gpu.collective_rank TASK`.

Rank 0 prints a row for each collective, size and way (called, in a registered window, as a graph), after a comparison
with numpy.

The bus bandwidth is a link's traffic: `2 (n - 1) / n` bytes per byte that n ranks reduce, `(n - 1) / n` per byte that
they gather or scatter, and 1 for a broadcast, as in NCCL's own tests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph
from runtime.device.nccl import NcclComm, open_nccl
from runtime.dtype import float32
from runtime.errors import XservError

WINDOW_BYTES = 1 << 20
"""Collectives of up to so many bytes are also timed in a registered window."""
_BUS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


class Rank:
    """A rank with a send and a receive buffer, each of the largest size."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.rank, self.num_ranks = task["rank"], task["num_ranks"]
        self.num_calls, self.num_rounds = task["num_calls"], task["num_rounds"]
        device = Device.parse(task["device"])
        self.gpu = gpu = Gpu.of(device)
        nccl = open_nccl(gpu.driver)
        self.comm = NcclComm(gpu, nccl, bytes.fromhex(task["unique_id"]), self.rank, self.num_ranks)
        most = max(task["sizes"])
        self.source, self.target = gpu.allocate(most), gpu.allocate(most)
        self.window = self.comm.new_window(2 * min(WINDOW_BYTES, most))

    def rows(self, collective: str, size: int) -> list[dict[str, Any]]:
        """One row for each way."""
        places = {"call": (self.source.address, self.target.address)}
        if size <= WINDOW_BYTES:
            places["window"] = (self.window.address, self.window.address + self.window.size_bytes // 2)
        works = {way: self._work(collective, size, *place) for way, place in places.items()}
        for way, place in places.items():
            self._verify(collective, size, works[way], *place)
        graph = Graph.capture(self.gpu, works["window" if "window" in works else "call"])
        works["graph"] = graph.replay
        times: dict[str, list[float]] = {way: [] for way in works}
        for _ in range(self.num_rounds):
            for way, work in works.items():
                times[way].append(self._time(work))
        graph.release()
        share = _BUS[collective] * (self.num_ranks - 1) / self.num_ranks if collective in _BUS else 1.0
        return [
            {
                "collective": collective, "bytes": size, "way": way, "us": (us := median(found)),
                "gb_per_s": size / us / 1e3, "bus_gb_per_s": share * size / us / 1e3,
            }
            for way, found in times.items()
        ]  # fmt: skip

    def _work(self, collective: str, size: int, source: int, target: int) -> Callable[[], None]:
        count, comm = size // 4, self.comm
        part = count // self.num_ranks
        if collective == "all_reduce":
            return lambda: comm.all_reduce(source, target, count, float32)
        if collective == "all_gather":
            return lambda: comm.all_gather(source, target, part, float32)
        if collective == "reduce_scatter":
            return lambda: comm.reduce_scatter(source, target, part, float32)
        return lambda: comm.broadcast(source, target, count, float32, root=0)

    def _verify(self, collective: str, size: int, work: Callable[[], None], source: int, target: int) -> None:
        count, ranks = size // 4, self.num_ranks
        part = count // ranks
        given = [_numbers(rank, count) for rank in range(ranks)]
        self.gpu.write(source, given[self.rank])
        work()
        total = np.stack(given).sum(axis=0, dtype=np.float32).reshape(count)
        expected: NDArray[np.float32] = {
            "all_reduce": total,
            "all_gather": np.concatenate([each[:part] for each in given]),
            "reduce_scatter": total[self.rank * part :][:part],
            "broadcast": given[0],
        }[collective]
        found = np.empty(len(expected), np.float32)
        self.gpu.read(target, found)
        if not np.array_equal(found, expected):
            raise XservError(f"rank {self.rank}: {collective} of {size} bytes is not what numpy gives")

    def _time(self, work: Callable[[], None]) -> float:
        """Microseconds a call."""
        work()
        start = self.gpu.stream.record(is_timed=True)
        for _ in range(self.num_calls):
            work()
        end = self.gpu.stream.record(is_timed=True)
        end.synchronize()
        milliseconds: float = end.elapsed_ms(start)
        return milliseconds * 1e3 / int(self.num_calls)


def _numbers(rank: int, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Small integers: their sums are exact in any order."""
    return ((np.arange(count) * 7 + rank * 13) % 61).astype(np.float32)


def main() -> None:
    task = json.loads(sys.argv[1])
    rank = Rank(task)
    rows = [row for collective in task["collectives"] for size in task["sizes"] for row in rank.rows(collective, size)]
    rank.comm.destroy()
    if not task["rank"]:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
