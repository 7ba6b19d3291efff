"""`bench products`: matrix products on the cpu, by the format of their weights and the number of rows.

Each format keeps copies of one random matrix, so many that they do not fit in a cache, and a run goes over all of them,
recorded like a decode step. Everything timed has just been compared with numpy's product of the dequantised matrix.
Formats take turns; the best run, the least disturbed by other load, is shown beside the median. For block formats,
repacking a file's rows at load time is compared with copying them, each on all threads and into new memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

from numba_kernels.cpu.gemm.panels import empty_panels
from numba_kernels.cpu.running.arena import Arena
from numba_kernels.cpu.running.pool import NUM_THREADS
from numba_kernels.cpu.running.recording import Recording, record
from runtime import ops
from runtime.bench.environment import finished
from runtime.bench.metrics import BenchmarkError, interleaved, timed
from runtime.bench.peers.cpu_limits import open_meter
from runtime.dtype import NDArray, bfloat16, float32
from runtime.linear.format import INT8
from runtime.linear.kept import block_bytes, kept_format
from runtime.linear.options import LoadOptions
from runtime.linear.quantise import Rounding, quantise
from runtime.linear.quantized import QuantizedMatrix
from runtime.linear.weight import BlockRows, LinearWeight
from runtime.tensor.tensor import Tensor

_HALF, _FLOAT = np.dtype(np.float16), np.dtype(np.float32)
ROUNDINGS = {
    "fp8": Rounding("fp8", (128, 128), _FLOAT), "Q8_0": Rounding("int8", (1, 32), _HALF),
    "Q4_0": Rounding("int4", (1, 32), _HALF),
    "MXFP4": Rounding("fp4", (1, 32), np.dtype(ml_dtypes.float8_e8m0fnu)),
}  # fmt: skip
FORMATS = ("float32", "bfloat16", "int8", *ROUNDINGS)
MOST_ERROR = 0.02
"""As a share of a product's largest number; some formats round rows to bfloat16 or int8."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A format's copies of the matrix, and its floats."""

    weights: tuple[LinearWeight, ...]
    floats: NDArray

    @property
    def size_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(weight.size_bytes for weight in self.weights)


def bench_products(
    formats: Sequence[str] = FORMATS, *, rows: Sequence[int] = (1, 8, 32, 512), width: int = 3072, depth: int = 1024,
    num_rounds: int = 7, working_set_bytes: int = 128 << 20, report_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """The report: {"shape", "limits", "results", "arranging", "environment"}.

    A result has a format, rows, seconds and rates; `arranging` has, by format, seconds of arranging and of copying.

    Raises BenchmarkError for an unknown format, or a product that is wrong.
    """
    if unknown := [name for name in formats if name not in FORMATS]:
        raise BenchmarkError(f"--formats {unknown[0]!r} is none of {', '.join(FORMATS)}")
    random = np.random.default_rng(0)
    matrix = random.normal(0, 0.02, (width, depth)).astype(np.float32)
    kept = {}
    for name in formats:
        report_progress(f"{name}: a matrix of {width} x {depth}")
        kept[name] = _kept(name, matrix, working_set_bytes)
    results = []
    with open_meter() as meter:
        for count in rows:
            x = Tensor.from_numpy(random.standard_normal((count, depth)).astype(np.float32))
            for name, each in kept.items():
                _verify(name, each, x)
            report_progress(f"{count} rows: {num_rounds} rounds")
            replays = {name: timed(_recorded(each, x).replay) for name, each in kept.items()}
            seconds = interleaved(replays, num_rounds)
            meter.measure()
            for name, each in kept.items():
                results.append(_result(name, each, count, [one / len(each.weights) for one in seconds[name]]))
        limits = meter.report()
    report_progress("arranging rows as when a model is loaded")
    arranging = _arranging(matrix, [name for name in formats if name in ROUNDINGS], num_rounds, working_set_bytes)
    return finished({"shape": [width, depth], "limits": limits, "results": results, "arranging": arranging})


def as_lines(report: dict[str, Any]) -> list[str]:
    """A table for people."""
    limits = report["limits"]
    width, depth = report["shape"]
    lines = [
        f"{width} x {depth}, {limits['num_threads']} threads; at best {limits['read_bytes_per_s'] / 1e9:.1f} GB/s read,"
        f" {limits['float32_flops_per_s'] / 1e9:.0f} GFLOP/s in float32",
        f"{'format':<10}{'rows':>6}{'median us':>12}{'best us':>12}{'GB/s':>8}{'of read':>9}{'Gop/s':>9}",
    ]
    for row in report["results"]:
        share = row["bytes_per_s"] / limits["read_bytes_per_s"]
        lines.append(
            f"{row['format']:<10}{row['rows']:>6}{row['median_s'] * 1e6:>12.1f}{row['best_s'] * 1e6:>12.1f}"
            f"{row['bytes_per_s'] / 1e9:>8.1f}{share:>9.0%}{row['ops_per_s'] / 1e9:>9.0f}"
        )
    if report["arranging"]:
        lines += ["", f"{'arranging':<10}{'MB':>6}{'median ms':>12}{'copying ms':>12}{'times':>8}"]
    for row in report["arranging"]:
        lines.append(
            f"{row['format']:<10}{row['bytes'] / 1e6:>6.0f}{row['median_s'] * 1e3:>12.1f}"
            f"{row['copy_median_s'] * 1e3:>12.1f}{row['median_s'] / row['copy_median_s']:>8.2f}"
        )
    return lines


def _arranging(matrix: NDArray, formats: Sequence[str], num_rounds: int, size_bytes: int) -> list[dict[str, Any]]:
    """Median times of repacking ``size_bytes`` of rows of blocks, and of copying them, in turns."""
    found = []
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for name in formats:
            source = _block_rows(quantise(matrix, ROUNDINGS[name]))
            times = -(-size_bytes // source.raw.nbytes)
            rows = BlockRows(np.concatenate([source.raw] * times), source.format, source.depth)
            works = {make.__name__: timed(make, rows, threads) for make in (_arranged, _copied)}
            middle, copying = map(median, interleaved(works, num_rounds, warm_ups=1).values())
            found.append({"format": name, "bytes": rows.raw.nbytes, "median_s": middle, "copy_median_s": copying})
    return found


def _block_rows(matrix: QuantizedMatrix) -> BlockRows:
    """A matrix as a file's rows of blocks."""
    kept = kept_format(matrix.layout, LoadOptions())
    assert kept is not None, matrix.layout
    return BlockRows(block_bytes(matrix, kept), kept, matrix.shape[1])


def _arranged(rows: BlockRows, threads: ThreadPoolExecutor) -> LinearWeight:
    return ops.prepare_linear([rows], None, LoadOptions())


def _copied(rows: BlockRows, threads: ThreadPoolExecutor) -> NDArray:
    """The rows in memory like a weight's."""
    size = rows.raw.nbytes
    target = empty_panels(size, 4, np.dtype(np.uint8)).reshape(-1)[:size].reshape(rows.raw.shape)
    bounds = [len(rows.raw) * thread // NUM_THREADS for thread in range(NUM_THREADS + 1)]
    list(threads.map(lambda first, end: np.copyto(target[first:end], rows.raw[first:end]), bounds, bounds[1:]))
    return target


def _kept(name: str, matrix: NDArray, working_set_bytes: int) -> Kept:
    options = LoadOptions(format=INT8) if name == "int8" else LoadOptions()
    if name in ROUNDINGS:
        quantised = quantise(matrix, ROUNDINGS[name])
        floats = quantised.dequantise(float32)

        def made() -> LinearWeight:
            return ops.prepare_linear([quantised], None, options)
    else:
        source = Tensor.from_numpy(matrix).to(bfloat16 if name == "bfloat16" else float32)
        floats = source.to(float32).numpy()

        def made() -> LinearWeight:
            return ops.prepare_linear(source, None, options)

    first = made()
    copies = -(-working_set_bytes // first.size_bytes)
    return Kept((first, *(made() for _ in range(copies - 1))), floats)


def _verify(name: str, kept: Kept, x: Tensor) -> None:
    expected = x.numpy() @ kept.floats.T
    error = float(np.abs(ops.linear(x, kept.weights[-1]).numpy() - expected).max() / np.abs(expected).max())
    if not error <= MOST_ERROR:
        raise BenchmarkError(f"{name}, {x.shape[0]} rows: off by {error:.2e} of the largest, at most {MOST_ERROR}")


def _recorded(kept: Kept, x: Tensor) -> Recording:
    """The recorded products with all copies; all results share memory."""
    with record(Arena()) as recording:
        for weight in kept.weights:
            ops.linear(x, weight)
    return recording


def _result(name: str, kept: Kept, rows: int, seconds: list[float]) -> dict[str, Any]:
    width, depth = kept.floats.shape
    middle = median(seconds)
    return {
        "format": name, "rows": rows, "weight_bytes": kept.size_bytes // len(kept.weights), "median_s": middle,
        "best_s": min(seconds), "bytes_per_s": kept.size_bytes / len(kept.weights) / middle,
        "ops_per_s": 2 * rows * width * depth / middle,
    }  # fmt: skip
