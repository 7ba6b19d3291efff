"""Times on the device by events, the competitors taking turns, each run with a cold cache and a full queue.

Before each run the second-level cache is overwritten. While the device is at that, the host queues the first event,
the work and the second event, so that neither the host's time for a launch nor the other competitor's data counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runtime.device.gpu import Gpu

FLUSH_BYTES = 512 << 20
"""Takes a GPU at least 100 µs to write, which is longer than the host takes for any of the launches."""


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


class Stopwatch:
    """Times work on one device. An emulated one's times say nothing of a GPU; `is_emulated` goes with each of them."""

    def __init__(self, gpu: Gpu, num_runs: int) -> None:
        self.gpu = gpu
        self.num_runs = num_runs
        self.is_emulated = gpu.device.kind == "emulated"
        self._flushed = None if self.is_emulated else gpu.allocate(FLUSH_BYTES)
        self._events = [gpu.new_event(is_timed=True) for _ in range(2)]

    def times(self, competitors: Mapping[str, Callable[[], Any]]) -> dict[str, Times]:
        """Each competitor's times, from `num_runs` rounds in which who begins alternates, after two of warm-up."""
        found: dict[str, list[float]] = {name: [] for name in competitors}
        order = list(competitors)
        for number in range(-2 if not self.is_emulated else 0, self.num_runs):
            for name in order if number % 2 else reversed(order):
                seconds = self._once(competitors[name])
                if number >= 0:
                    found[name].append(seconds)
        return {name: Times.of(values) for name, values in found.items()}

    def _once(self, work: Callable[[], Any]) -> float:
        start, end = self._events
        if self._flushed is not None:
            self.gpu.fill(self._flushed.address, 0, FLUSH_BYTES)
        start.record(self.gpu.stream)
        work()
        end.record(self.gpu.stream)
        end.synchronize()
        return 1e3 * end.elapsed_ms(start)
