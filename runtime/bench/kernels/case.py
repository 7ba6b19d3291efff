"""A kernel case: inputs, our launches, an oracle's result for a sample of its rows, a peer's call of the same arrays,
and the minimum of bytes and operations. One declaration is verified, counted on an emulated device, and timed.

`operations.py` declares those of `bench kernels`; `tools/kernel_cases/` adds those of `gpu_check` and the kernel
report. Nothing here imports torch: callers pass the module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from numba_kernels.cuda.specialisation import Launch
from runtime.bench.kernels.timing import Stopwatch, Times
from runtime.device.gpu import Gpu
from runtime.dtype import DType

GUARD_BYTES = 256
MOST_DRAWN = 4_194_301  # a prime
MOST_ROWS = 64
"""Rows of a result that are compared with the oracle's, the first and the last among them."""
TOLERANCE = {"f32": 1e-4, "f16": 4e-3, "bf16": 2e-2}

Array = NDArray[Any]


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    return DType.parse(dtype).numpy


def sampled(num_rows: int) -> Array:
    """At most `MOST_ROWS` of so many rows, spread from the first to the last."""
    return np.unique(np.linspace(0, num_rows - 1, min(num_rows, MOST_ROWS)).astype(np.int64))


class Inputs:
    """A case's arrays on the device, kept for the case's lifetime."""

    def __init__(self, gpu: Gpu, seed: int) -> None:
        self.gpu = gpu
        self.rng = np.random.default_rng(seed)
        self._held: list[Any] = []

    def normal(self, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Array:
        """Normal numbers; beyond `MOST_DRAWN` the first ones repeat, with a period that divides no shape."""
        count = math.prod(shape)
        values = self.rng.standard_normal(min(count, MOST_DRAWN), dtype=np.float32)
        values *= np.float32(scale)
        return np.resize(values.astype(numpy_dtype(dtype)), shape)

    def keys(self, shape: tuple[int, ...], dtype: str, pages: str) -> Array:
        """Normal numbers; for pages of one byte per number, positive ones of that type."""
        if not pages:
            return self.normal(shape, dtype)
        codes = self.rng.integers(0, 0x58, shape, np.uint8)
        return codes.view(np.int8 if pages == "s8" else ml_dtypes.float8_e4m3fn)

    def put(self, array: Array) -> int:
        address = self.empty(array.nbytes)
        self.gpu.write(address, array)
        return address

    def put_normal(self, *shape: int, dtype: str = "bf16") -> int:
        return self.put(self.normal(shape, dtype))

    def put_weight(self, array: Array) -> int:
        """As `put`, for read-only arrays: dependent launches may read them early."""
        address = self.put(array)
        self.gpu.declare_immutable(self._held[-1])
        return address

    def empty(self, size_bytes: int) -> int:
        block = self.gpu.allocate(size_bytes)
        self._held.append(block)
        return block.address

    def contents(self, address: int, size_bytes: int) -> bytes:
        """Bytes on the device, after the work that was queued before."""
        found = np.empty(size_bytes, np.uint8)
        self.gpu.read(address, found)
        return found.tobytes()

    def keep(self, *owners: Any) -> None:
        """Keeps the owners of other memory that the case's launches read."""
        self._held += owners

    def result(self, size_bytes: int) -> int:
        """As `empty`, with guard memory after it, which `verify` checks."""
        return self.empty(size_bytes + GUARD_BYTES)

    def bind(self, *launches: tuple[Launch | None, Sequence[int | float]]) -> Callable[[], None]:
        """A function that runs all of them, in order."""
        known = [(launch, arguments) for launch, arguments in launches if launch is not None]

        def run() -> None:
            for launch, arguments in known:
                self.gpu.launch(launch, *arguments)

        return run


@dataclass
class Prepared:
    """A case that is ready to run.

    Attributes:
        run: queues our kernels.
        out, shape, dtype: the result's address (of `Inputs.result`), shape and type; its first dimension is rows.
        rows: those that `expected` has, ascending.
        expected: float32 [len(rows), ...], computed by an oracle from the same arrays.
        torch: returns torch's call, given the module and a function that makes tensors of arrays; or None.
        operands, sizes: of a matrix product, the addresses of x and of the weight, and m, n, k, for a library; else ().
        guard_bytes: guard memory after the result.
        notes: more about the case, for reports.
        peers: other runs of the same work to time beside it, by name.
    """

    run: Callable[[], Any]
    out: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = "f32"
    rows: Array = field(default_factory=lambda: np.empty(0, np.int64))
    expected: Array = field(default_factory=lambda: np.empty(0, np.float32))
    torch: Callable[[Any, Callable[[Array], Any]], Callable[[], Any]] | None = None
    operands: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    guard_bytes: int = GUARD_BYTES
    notes: dict[str, Any] = field(default_factory=dict)
    peers: dict[str, Callable[[], Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One line of a table.

    Attributes:
        least_bytes, flops: the minimum of traffic and computation.
        tolerance: of the largest difference, as a share of the largest value; the RMS difference may have half that
            share of the RMS value.
        prepare: makes the inputs and plans the launches.
        family: in the kernel report.
        tiled_bytes: the minimum traffic of its tiling, without tables and lengths; 0 if unchecked.
        has_16_bits: whether its factors have 16 bits, so that tensor cores could do the products.
        is_on_tensor_cores: whether they should.
        scattered_because: why its accesses cannot fill whole sectors; "" if they should.
        arch: of its emulated device; the report's if "".
    """

    name: str
    shape: str
    least_bytes: int
    flops: float
    tolerance: float
    prepare: Callable[[Inputs], Prepared] = field(repr=False)
    family: str = ""
    tiled_bytes: int = 0
    has_16_bits: bool = False
    is_on_tensor_cores: bool = False
    scattered_because: str = ""
    arch: str = ""

    @property
    def title(self) -> str:
        return f"{self.name}, {self.shape}"


def prepare(gpu: Gpu, case: Case, seed: int) -> tuple[Inputs, Prepared]:
    """The case's arrays on the device, valid while the first result is kept, and the prepared case."""
    inputs = Inputs(gpu, seed)
    return inputs, case.prepare(inputs)


def read_rows(gpu: Gpu, ready: Prepared) -> Array:
    """Reads the rows of `Prepared.expected` from the device's result."""
    found = np.empty((len(ready.rows), *ready.shape[1:]), numpy_dtype(ready.dtype))
    row_bytes = found[0].nbytes
    for place, row in enumerate(ready.rows):
        gpu.read(ready.out + int(row) * row_bytes, found[place : place + 1])
    return found


def spoil(gpu: Gpu, ready: Prepared) -> None:
    """Overwrites a case's result, and its guard memory, with NaN, so that an earlier run's result cannot pass."""
    gpu.fill(ready.out, 0xFF, _size_bytes(ready) + ready.guard_bytes)


def _size_bytes(ready: Prepared) -> int:
    return int(np.prod(ready.shape)) * numpy_dtype(ready.dtype).itemsize


def errors(found: Array, ready: Prepared, tolerance: float, whose: str) -> dict[str, float]:
    """The largest difference as a share of the largest value, and the RMS difference of the RMS value. Raises
    AssertionError above `tolerance` and half of it, and for NaN."""
    expected = ready.expected
    difference = np.abs(found.reshape(expected.shape).astype(np.float32) - expected)
    largest = np.abs(expected).max()
    share = float(difference.max() / largest)
    rms = float(np.sqrt(np.square(difference).mean() / np.square(expected).mean()))
    if not (share <= tolerance and rms <= tolerance / 2):
        place = np.unravel_index(int(np.nan_to_num(difference, nan=np.inf).argmax()), difference.shape)
        off = float(np.mean(~(difference <= tolerance * largest)))
        raise AssertionError(
            f"{whose} result is wrong: off by {share:.3g} of the largest value, by {rms:.3g} on the whole, allowed"
            f" {tolerance:g}; most at row {ready.rows[place[0]]}, element {[int(each) for each in place[1:]]}:"
            f" {found.reshape(expected.shape)[place]}, not {expected[place]}; {off:.1%} of the elements are off,"
            f" {np.isnan(difference).mean():.1%} are NaN"
        )
    return {"error_share": share, "error_rms": rms}


def verify(
    gpu: Gpu, case: Case, ready: Prepared, run: Callable[[], Any] | None = None, whose: str = "ours"
) -> dict[str, float]:
    """Runs the case, or another run of it, and compares its result: `errors`. Also raises AssertionError if the guard
    memory was written."""
    spoil(gpu, ready)
    (run or ready.run)()
    after = np.empty(ready.guard_bytes, np.uint8)
    gpu.read(ready.out + _size_bytes(ready), after)
    if not (after == 0xFF).all():
        raise AssertionError(f"{whose}: something was written after the result")
    return errors(read_rows(gpu, ready), ready, case.tolerance, whose)


def row_of(case: Case, ready: Prepared, found: Mapping[str, float]) -> dict[str, Any]:
    """The row of a case that is verified and not yet timed."""
    return {
        "case": case.name, "shape": case.shape, "least_bytes": case.least_bytes, "flops": case.flops, **ready.notes,
        **found,
    }  # fmt: skip


def timed(
    row: dict[str, Any], case: Case, competitors: Mapping[str, Callable[[], Any]], stopwatch: Stopwatch
) -> dict[str, Any]:
    """The row with the times of all competitors, including "ours", and our rates on the device."""
    times: dict[str, Times] = stopwatch.times(competitors)
    row["times"] = {name: value.as_json() for name, value in times.items()}
    if not stopwatch.is_emulated and (ours := times["ours"].median_us):
        row["gb_per_s"] = round(case.least_bytes / ours / 1e3, 1)
        row["tflop_per_s"] = round(case.flops / ours / 1e6, 2)
        for name, value in times.items():
            if name != "ours":
                row[f"share_of_{name}"] = round(value.median_us / ours, 3)
    return row
