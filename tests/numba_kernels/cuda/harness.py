"""What the tests of GPU kernels share: arrays to the device and back, and comparisons that NaN fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.device.allocator import DeviceBlock
from runtime.device.gpu import Gpu
from runtime.dtype import DType

DEFAULT_DEVICE = "emulated:sm_90a"

both_archs = pytest.mark.parametrize(
    "gpu", [pytest.param("emulated:sm_80", marks=pytest.mark.exhaustive), DEFAULT_DEVICE], indirect=True
)
"""Decorates a test that is to run on each architecture's emulated device. Their PTX hardly differs, and compiling it is
what such a test costs: the second one is for `make test-all`."""


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """A numpy dtype from itself, or from a short name: "f32", "f16", "bf16", "e4m3" ..."""
    return DType.parse(dtype).numpy if isinstance(dtype, str) and dtype not in np.sctypeDict else np.dtype(dtype)


def put(gpu: Gpu, array: np.ndarray) -> DeviceBlock:
    """A block that holds the array's elements in C order; one of 0 bytes for an empty array."""
    array = np.ascontiguousarray(array)
    block = gpu.allocate(array.nbytes)
    if array.nbytes:
        gpu.write(block.address, array)
    return block


def empty(gpu: Gpu, shape: int | tuple[int, ...], dtype: Any) -> DeviceBlock:
    """A block for that many elements, which nothing has written: the emulator refuses to read them."""
    return gpu.allocate(int(np.prod(shape, dtype=np.int64)) * numpy_dtype(dtype).itemsize)


def get(gpu: Gpu, block: DeviceBlock, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    """The block's first elements as an array, after all that the stream holds has run."""
    array = np.empty(shape, numpy_dtype(dtype))
    if array.nbytes:
        gpu.read(block.address, array)
    return array


def assert_close(actual: np.ndarray, expected: np.ndarray, *, rtol: float, atol: float = 0.0) -> None:
    """Each ``|actual − expected| ≤ atol + rtol·|expected|``; infinities must be the same; a NaN anywhere fails."""
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    got, want = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert not np.isnan(want).any(), "the oracle itself holds NaN"
    with np.errstate(invalid="ignore"):
        is_close = (got == want) | (np.isfinite(want) & (np.abs(got - want) <= atol + rtol * np.abs(want)))
    if not is_close.all():
        first = tuple(int(index) for index in np.argwhere(~is_close)[0])
        with np.errstate(invalid="ignore"):
            worst = np.nanmax(np.abs(got - want)) if not np.isnan(got - want).all() else np.nan
        raise AssertionError(
            f"{(~is_close).sum()} of {got.size} elements differ; the first at {first}: {got[first]!r}, expected "
            f"{want[first]!r}; largest difference {worst:.3g}, {np.isnan(got).sum()} NaN (rtol {rtol:g}, atol {atol:g})"
        )


def assert_equal(actual: np.ndarray, expected: np.ndarray) -> None:
    """The same shape and the same values, exactly; a NaN anywhere fails."""
    assert_close(actual, expected, rtol=0.0)
