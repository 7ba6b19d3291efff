"""Times on the device by events, the competitors taking turns, each run with a cold cache and a full queue.

Before each run other data is read through the second-level cache, which then holds no dirty lines (with writes instead,
an H200 took up to 14 µs longer for work larger than that cache). Meanwhile the host queues the first event, the work
and the second event, so that neither the host's launch time nor the other competitor's data counts. Some 4 µs of a
launch remain.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from numba_kernels.cuda.probes import THREADS, read_kernel
from numba_kernels.cuda.specialisation import Launch
from runtime.bench.metrics import interleaved
from runtime.device.gpu import Gpu

FLUSH_BYTES = 512 << 20
"""Takes a GPU at least 100 µs to read, which is longer than the host takes for any of the launches."""


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of one competitor: the median, the quartiles and the number of runs."""

    median_us: float
    low_us: float
    high_us: float
    num_runs: int

    @staticmethod
    def of(values_us: list[float]) -> Times:
        """The times of single runs, at least one, as quartiles."""
        low, middle, high = statistics.quantiles(values_us, n=4) if len(values_us) > 1 else values_us * 3
        return Times(middle, low, high, len(values_us))

    def as_json(self) -> dict[str, Any]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


class _Flush:
    """Evicts everything else from the second-level cache by reads."""

    def __init__(self, gpu: Gpu) -> None:
        blocks = 4 * gpu.properties.num_sms
        size = FLUSH_BYTES // (64 * blocks * THREADS) * (64 * blocks * THREADS)
        self._data, self._sums, self._count = gpu.allocate(size), gpu.allocate(4 * blocks * THREADS), size // 16
        self._read = gpu.bind(Launch(read_kernel(), (blocks, 1, 1), (THREADS, 1, 1)))
        gpu.fill(self._data.address, 0, size)

    def run(self) -> None:
        self._read(self._data.address, self._sums.address, self._count)


class Stopwatch:
    """Times work on one device. An emulated one's times are meaningless, and marked by `is_emulated`."""

    def __init__(self, gpu: Gpu, num_runs: int) -> None:
        self.gpu = gpu
        self.num_runs = num_runs
        self.is_emulated = gpu.device.kind == "emulated"
        self._flush = None if self.is_emulated else _Flush(gpu)
        self._events = [gpu.new_event(is_timed=True) for _ in range(2)]

    def times(self, competitors: Mapping[str, Callable[[], Any]]) -> dict[str, Times]:
        """Each competitor's times, from `num_runs` rounds in turns, after two warm-up rounds."""
        works = {name: partial(self._once, work) for name, work in competitors.items()}
        found = interleaved(works, self.num_runs, warm_ups=0 if self.is_emulated else 2)
        return {name: Times.of(values) for name, values in found.items()}

    def _once(self, work: Callable[[], Any]) -> float:
        start, end = self._events
        if self._flush is not None:
            self._flush.run()
        start.record(self.gpu.stream)
        work()
        end.record(self.gpu.stream)
        end.synchronize()
        return 1e3 * end.elapsed_ms(start)
