"""What GPUs need to tell each other something: by a link's latency and bandwidth, or by the times of `bench nccl`.

A ring of n ranks sends `2 (n - 1) / n` of what they reduce over each link, and `(n - 1) / n` of what they gather, as
NCCL's own tests count; so a link's bandwidth is what these call the bus bandwidth. A collective's latency is taken to
be the same for 2 ranks and for 8.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runtime.bench.metrics import BenchmarkError


class Link(Protocol):
    """Seconds of a collective of so many bytes on each rank (``all_gather``: in all), and of sending them on."""

    def all_reduce_s(self, num_bytes: float, num_ranks: int) -> float: ...

    def all_gather_s(self, num_bytes: float, num_ranks: int) -> float: ...

    def send_s(self, num_bytes: float) -> float: ...


@dataclass(frozen=True, slots=True)
class PlainLink:
    """A latency, and bytes a second in one direction."""

    latency_s: float
    bytes_per_s: float

    def all_reduce_s(self, num_bytes: float, num_ranks: int) -> float:
        return self.latency_s + 2 * (num_ranks - 1) / num_ranks * num_bytes / self.bytes_per_s

    def all_gather_s(self, num_bytes: float, num_ranks: int) -> float:
        return self.latency_s + (num_ranks - 1) / num_ranks * num_bytes / self.bytes_per_s

    def send_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


LINKS = {"nvlink4": PlainLink(10e-6, 370e9), "infiniband400": PlainLink(26e-6, 48e9)}
"""NVLink 4 in a machine of H100s or H200s: NCCL's bandwidth in a ring (NVIDIA/nccl-tests, issue 212), and a latency
between 7 µs (one shot, two H100s) and 17 µs (fused, of 10 KB). A port of 400 Gbit/s between machines: what NCCL itself
takes a sum of 4 KB on H100s to need (NVIDIA/nccl, issue 1453), and 96 % of the line's rate."""


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """What `bench nccl` measured among ``num_ranks`` GPUs, each collective's best way; between two sizes on a line in
    both logarithms, beyond the largest at its bandwidth. A stage's sending is taken to be a broadcast."""

    num_ranks: int
    times: Mapping[str, Sequence[tuple[int, float]]]

    @classmethod
    def read(cls, path: Path) -> MeasuredLink:
        """From a report. Raises ``BenchmarkError`` for what is none, and for one of emulated GPUs."""
        try:
            report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if report["is_emulated"]:
                raise BenchmarkError(f"{path}: its times are of emulated GPUs, which say nothing of a link")
            best: dict[str, dict[int, float]] = {}
            for row in report["results"]:
                times = best.setdefault(row["collective"], {})
                times[row["bytes"]] = min(times.get(row["bytes"], math.inf), 1e-6 * row["us"])
            times_of = {name: sorted(best[name].items()) for name in ("all_reduce", "all_gather", "broadcast")}
            if not all(size > 0 and 0.0 < seconds < math.inf for each in times_of.values() for size, seconds in each):
                raise ValueError("a size or a time is not positive")
            return cls(int(report["num_ranks"]), times_of)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchmarkError(f"{path} is no report of `bench nccl`: {type(error).__name__}: {error}") from None

    def all_reduce_s(self, num_bytes: float, num_ranks: int) -> float:
        return self._seconds("all_reduce", num_bytes, num_ranks)

    def all_gather_s(self, num_bytes: float, num_ranks: int) -> float:
        return self._seconds("all_gather", num_bytes, num_ranks)

    def send_s(self, num_bytes: float) -> float:
        return self._seconds("broadcast", num_bytes, self.num_ranks)

    def _seconds(self, collective: str, num_bytes: float, num_ranks: int) -> float:
        if num_ranks != self.num_ranks:
            raise BenchmarkError(f"the link was measured among {self.num_ranks} ranks, not {num_ranks}")
        times = self.times[collective]
        at = bisect_left(times, num_bytes, key=lambda each: each[0])
        if at == 0:
            return times[0][1]
        (size, seconds), following = times[at - 1], times[at : at + 1]
        if not following:
            return seconds * num_bytes / size
        [(next_size, next_s)] = following
        share = math.log(num_bytes / size) / math.log(next_size / size)
        return seconds * math.exp(share * math.log(next_s / seconds))


def link_of(text: str) -> Link:
    """One of ``LINKS`` by its name, `MICROSECONDS,GB_PER_S`, or the file of a report. Raises ``BenchmarkError``."""
    if text in LINKS:
        return LINKS[text]
    latency, comma, rate = text.partition(",")
    if comma:
        try:
            link = PlainLink(1e-6 * float(latency), 1e9 * float(rate))
        except ValueError:
            raise BenchmarkError(f"a link is {text!r}: its latency and bandwidth must be numbers") from None
        if not (0.0 <= link.latency_s < math.inf and 0.0 < link.bytes_per_s < math.inf):
            raise BenchmarkError(f"a link is {text!r}: its bandwidth must be positive, its latency not negative")
        return link
    if Path(text).is_file():
        return MeasuredLink.read(Path(text))
    raise BenchmarkError(f"a link is {text!r}, must be {', '.join(LINKS)}, MICROSECONDS,GB_PER_S, or a report's file")
