"""A line of the kernel table: a case verified on its input, and only then timed, competitors taking turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from runtime.bench.kernels.cases import GUARD_BYTES, Array, Case, Inputs, Prepared, numpy_dtype
from runtime.bench.kernels.timing import Stopwatch, Times
from runtime.device.gpu import Gpu


def read_rows(gpu: Gpu, ready: Prepared) -> Array:
    """Reads the rows of `Prepared.expected` from the device's result."""
    found = np.empty((len(ready.rows), *ready.shape[1:]), numpy_dtype(ready.dtype))
    row_bytes = found[0].nbytes
    for place, row in enumerate(ready.rows):
        gpu.read(ready.out + int(row) * row_bytes, found[place])
    return found


def spoil(gpu: Gpu, ready: Prepared) -> None:
    """Overwrites a case's result, and its guard memory, with NaN, so that an earlier run's result cannot pass."""
    gpu.fill(ready.out, 0xFF, _size_bytes(ready) + GUARD_BYTES)


def _size_bytes(ready: Prepared) -> int:
    return int(np.prod(ready.shape)) * numpy_dtype(ready.dtype).itemsize


def error_share(found: Array, ready: Prepared, tolerance: float, whose: str) -> float:
    """The largest difference as a share of the largest value. Raises AssertionError above `tolerance`, and for NaN."""
    found = found.reshape(ready.expected.shape)
    difference = np.abs(found.astype(np.float32) - ready.expected)
    share = float(difference.max() / np.abs(ready.expected).max())
    if not share <= tolerance:
        place = np.unravel_index(int(np.nan_to_num(difference, nan=np.inf).argmax()), difference.shape)
        off = float(np.mean(~(difference <= tolerance * np.abs(ready.expected).max())))
        raise AssertionError(
            f"{whose} result is wrong: off by {share:.3g} of the largest value, allowed {tolerance:g}; most at row"
            f" {ready.rows[place[0]]}, element {[int(each) for each in place[1:]]}: {found[place]}, not"
            f" {ready.expected[place]}; {off:.1%} of the elements are off, {np.isnan(difference).mean():.1%} are NaN"
        )
    return share


def verify(gpu: Gpu, case: Case, ready: Prepared, run: Callable[[], Any], whose: str = "ours") -> float:
    """Runs the case and compares its result: `error_share`. Also raises AssertionError if the guard memory was
    written."""
    spoil(gpu, ready)
    run()
    behind = np.empty(GUARD_BYTES, np.uint8)
    gpu.read(ready.out + _size_bytes(ready), behind)
    if not (behind == 0xFF).all():
        raise AssertionError(f"{whose}: something was written behind the result")
    return error_share(read_rows(gpu, ready), ready, case.tolerance, whose)


def prepare(gpu: Gpu, case: Case, seed: int) -> tuple[Inputs, Prepared]:
    """The case's arrays on the device, valid while the first result is kept, and the prepared case."""
    inputs = Inputs(gpu, seed)
    return inputs, case.prepare(inputs)


def check(gpu: Gpu, case: Case, seed: int = 0) -> dict[str, Any]:
    """{"error_share": ...} of a right case. Raises AssertionError for a wrong one."""
    _inputs, ready = prepare(gpu, case, seed)
    return {"error_share": verify(gpu, case, ready, ready.run)}


def row_of(case: Case, error: float) -> dict[str, Any]:
    """The row of a case that is verified and not yet timed."""
    return {
        "case": case.name, "shape": case.shape, "least_bytes": case.least_bytes, "flops": case.flops,
        "error_share": error,
    }  # fmt: skip


def timed(
    row: dict[str, Any], case: Case, competitors: Mapping[str, Callable[[], Any]], stopwatch: Stopwatch
) -> dict[str, Any]:
    """The row with the times of all competitors, including "ours", and our rates on the device."""
    times: dict[str, Times] = stopwatch.times(competitors)
    row["times"] = {name: value.as_json() for name, value in times.items()}
    if not stopwatch.is_emulated:
        row["gb_per_s"] = round(case.least_bytes / times["ours"].median_us / 1e3, 1)
        row["tflop_per_s"] = round(case.flops / times["ours"].median_us / 1e6, 2)
        for name, value in times.items():
            if name != "ours":
                row[f"share_of_{name}"] = round(value.median_us / times["ours"].median_us, 3)
    return row
