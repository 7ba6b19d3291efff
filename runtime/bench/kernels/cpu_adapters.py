"""`bench kernels --device cpu --parts adapters`: what low-rank adapters add to the linear maps of a decoder's layers.

The maps are those of Qwen3-0.6B: queries, keys and values; attention's output; gate and up; down. Some layers take
turns, so that neither weights nor adapters stay in a cache, and each case has adapters of its own in all of them. All
cases take turns too, on one thread, by its processor time. `bytes_share` is the least that an adapter can cost where
memory is the limit: its numbers' share of the weights' bytes. Everything timed has just been compared with numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from models.quantized.on_load import ROUNDINGS
from numba_kernels.cpu.running.arena import Arena
from numba_kernels.cpu.running.recording import Recording, record
from runtime import ops
from runtime.bench.cpu_rates import medians, one_thread_report, thread_seconds
from runtime.bench.metrics import BenchmarkError
from runtime.dtype import bfloat16
from runtime.linear.low_rank_slots import CpuSlots, DensePair, LowRank, SlotShape
from runtime.linear.quantise import quantise
from runtime.linear.weight import LinearWeight
from runtime.tensor.tensor import Tensor

MAPS = (((2048, 1024, 1024), 1024), ((1024,), 2048), ((3072, 3072), 1024), ((1024,), 3072))  # outputs, inputs
FORMATS = ("bfloat16", "int4", "fp8")
CASES = ((1, 0), (1, 1), (32, 0), (32, 1), (32, 8))  # rows, and adapters among them
SLOTS, RANK, MOST_ERROR = 8, 16, 2e-2
LAYERS = {"bfloat16": 3, "int4": 8, "fp8": 5}


class Layers:
    """Maps of some layers in a format, and slots for their adapters."""

    def __init__(self, format: str, maps: Sequence[tuple[tuple[int, ...], int]], layers: int, rank: int) -> None:
        rng, rounding = np.random.default_rng(0), ROUNDINGS.get(format)
        self.format, self.rank = format, rank
        self.maps: list[tuple[LinearWeight, CpuSlots]] = []
        self.weight_bytes = self.adapter_bytes = 0
        for heights, depth in maps:
            matrix = rng.standard_normal((sum(heights), depth)).astype(np.float32) / np.float32(depth**0.5)
            rounded = None if rounding is None else quantise(matrix, rounding)
            pairs = [
                [DensePair(self._drawn(rng, rank, depth), self._drawn(rng, height, rank)) for height in heights]
                for _ in range(SLOTS)
            ]
            for _ in range(layers):
                source = Tensor.from_numpy(matrix).to(bfloat16) if rounded is None else [rounded]
                weight = ops.prepare_linear(source)
                slots = CpuSlots(SlotShape(heights, depth, rank, SLOTS), bfloat16)
                for slot, own in enumerate(pairs):
                    slots.write(slot, own, None)
                self.maps.append((weight, slots))
                self.weight_bytes += weight.size_bytes
                self.adapter_bytes += 2 * rank * (sum(heights) + depth * len(heights))
        self._pairs = pairs  # of the last map

    @staticmethod
    def _drawn(rng: np.random.Generator, rows: int, columns: int) -> Any:
        return rng.standard_normal((rows, columns)).astype(np.float32) / np.float32(columns**0.5)

    def recording(self, rows: int, adapters: int) -> Recording:
        """All maps' products, recorded as a decode step is; rows take so many adapters in turns."""
        rng = np.random.default_rng(1)
        given = {slots.shape.depth: self._drawn(rng, rows, slots.shape.depth) for _, slots in self.maps}
        x = {depth: Tensor.from_numpy(each) for depth, each in given.items()}
        ids = Tensor.from_numpy((np.arange(rows) % max(1, adapters)).astype(np.int32))
        computed: dict[Any, Any] = {}
        with record(Arena()) as recording:
            for weight, slots in self.maps:
                own = x[slots.shape.depth]
                ops.linear(own, weight, low_rank=LowRank(slots, own, ids, computed) if adapters else None)
        return recording

    def verify(self, rows: int, adapters: int) -> float:
        """The largest error of what adapters add in the last map, as a share of the largest number. Raises
        BenchmarkError if it is too large, or NaN."""
        weight, slots = self.maps[-1]
        x = self._drawn(np.random.default_rng(2), rows, slots.shape.depth)
        ids = (np.arange(rows) % adapters).astype(np.int32)
        given = Tensor.from_numpy(x)
        low_rank = LowRank(slots, given, Tensor.from_numpy(ids), {})
        found = ops.linear(given, weight, low_rank=low_rank).numpy() - ops.linear(given, weight).numpy()
        expected = np.stack([
            np.concatenate([pair.up @ (pair.down @ row) for pair in self._pairs[slot]])
            for row, slot in zip(x, ids, strict=True)
        ])  # fmt: skip
        error = float(np.abs(found - expected).max() / np.abs(expected).max())
        if not error <= MOST_ERROR:
            raise BenchmarkError(f"{self.format}, {rows} rows: off by {error:.2e} of the largest, at most {MOST_ERROR}")
        return error


def bench_adapters(
    *, formats: Sequence[str] = FORMATS, maps: Sequence[tuple[tuple[int, ...], int]] = MAPS,
    layers: dict[str, int] = LAYERS, num_runs: int = 15,
    report_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """The report: {"tiles", "rank", "rows", "environment"}. A row has the seconds of a layer's maps (medians of turns),
    and what they are more than without adapters."""

    def measured() -> Any:
        for format in formats:
            report_progress(f"{format}: making weights and adapters")
            made = Layers(format, maps, layers[format], RANK)
            errors = {(rows, count): made.verify(rows, count) for rows, count in CASES if count}
            works = {
                f"{rows} {count}": partial(thread_seconds, made.recording(rows, count).replay) for rows, count in CASES
            }
            report_progress(f"{format}: timing")
            found = medians(works, num_runs)
            for rows, count in CASES:
                seconds, base = found[f"{rows} {count}"], found[f"{rows} 0"]
                yield {
                    "format": format, "sequences": rows, "adapters": count, "seconds": seconds / layers[format],
                    "more": seconds / base - 1, "bytes_share": count * made.adapter_bytes / made.weight_bytes,
                    "error": errors.get((rows, count), 0.0),
                }  # fmt: skip

    return {"rank": RANK, **one_thread_report(measured())}


def as_lines(report: dict[str, Any]) -> list[str]:
    """A table for people."""
    lines = [
        f"a layer's linear maps with adapters of rank {report['rank']}, one thread, tiles {report['tiles']}",
        f"{'weights':<10}{'sequences':>10}{'adapters':>10}{'us':>9}{'more':>8}{'of bytes':>10}",
    ]
    for row in report["rows"]:
        lines.append(
            f"{row['format']:<10}{row['sequences']:>10}{row['adapters']:>10}{row['seconds'] * 1e6:>9.0f}"
            f"{row['more']:>8.1%}{row['bytes_share']:>10.1%}"
        )
    return lines
