"""A matrix of floats rounded to small numbers with scales by block: the least error, or the largest magnitude."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from numba_kernels.cpu.gemm.packed_words import ZERO_POINT
from numba_kernels.cpu.running.pool import NUM_THREADS
from runtime.dtype import NDArray
from runtime.linear.quantized import NumberKind, QuantizedLayout, QuantizedMatrix, pack_halves

_ELEMENTS_AT_ONCE = 1 << 18
_SHARES = (
    0.75,
    0.8,
    0.84,
    0.87,
    0.9,
    0.93,
    0.96,
    1.0,
    1.04,
    1.08,
)  # of the largest magnitude, to try
_LARGEST_E4M3 = 448.0
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_EXPONENT_OF_E2M1 = 2  # of its largest number
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -126, 127


@dataclass(frozen=True, slots=True)
class Rounding:
    """The target of rounding a matrix.

    Attributes:
        kind: of the numbers; integers have their zero in the middle.
        block: rows of N by elements of K that share a scale; 0 means all.
        scale: numpy's type of the scales.
    """

    kind: NumberKind
    block: tuple[int, int]
    scale: np.dtype[Any]

    def takes(self, depth: int) -> bool:
        """Whether rows of so many elements are whole groups, or need not be."""
        rows, elements = self.block
        return not elements or rows > 1 or depth % elements == 0


def quantise(weight: NDArray, rounding: Rounding) -> QuantizedMatrix:
    """``weight [N, K]`` of finite floats, rounded.

    - "int8": multiples of a scale that is the largest magnitude over 127.
    - "int4": -8 to 7 times a scale of the least squared error, of those near the largest magnitude over 7.5 that are
      then fitted to the integers (as in llama.cpp's quantisers).
    - "fp8": e4m3 times a scale that makes the largest magnitude 448.
    - "fp4": e2m1 times a power of two of the least squared error (OCP MX, 1.0, takes the lower one of two).
    """
    width, depth = weight.shape
    layout = QuantizedLayout(rounding.kind, (width, depth), rounding.block, rounding.scale)
    codes, scales = np.zeros(layout.code_shape, np.uint8), np.zeros(layout.scale_shape, rounding.scale)

    def round_part(part: tuple[slice, slice]) -> None:
        rows, places = part
        numbers, found = _rounded(weight[rows].astype(np.float32), layout)
        codes[rows] = pack_halves(numbers) if layout.kind in ("int4", "fp4") else numbers
        scales[places] = found

    with ThreadPoolExecutor(NUM_THREADS) as threads:  # numpy holds no lock while it computes
        list(threads.map(round_part, _parts(layout)))
    return QuantizedMatrix(layout, codes, scales)


def _parts(layout: QuantizedLayout) -> Iterator[tuple[slice, slice]]:
    """Rows of the matrix with scales of their own, and the rows of these."""
    width, depth = layout.shape
    high = layout.block[0] or width
    step = max(1, _ELEMENTS_AT_ONCE // max(1, depth * high)) * high
    for first in range(0, width, step):
        last = min(first + step, width)
        yield slice(first, last), slice(first // high, -(-last // high))


def _rounded(values: NDArray, layout: QuantizedLayout) -> tuple[NDArray, NDArray]:
    """Numbers ``[rows, K]`` uint8, one in a byte, and the scales of these rows."""
    (rows, depth), (high, wide) = values.shape, (layout.block[0] or len(values), layout.block[1] or values.shape[1])
    padded = np.pad(values, ((0, -rows % high), (0, -depth % wide)))
    shape = len(padded) // high, high, padded.shape[1] // wide, wide
    blocks = padded.reshape(shape).transpose(0, 2, 1, 3).reshape(shape[0], shape[2], high * wide)
    largest = np.abs(blocks).max(axis=2)
    numbers, scales = {"int8": _int8, "int4": _int4, "fp8": _fp8, "fp4": _fp4}[layout.kind](
        blocks, largest, layout.scale
    )
    laid = numbers.reshape(shape[0], shape[2], high, wide).transpose(0, 2, 1, 3).reshape(padded.shape)
    return laid[:rows, :depth], scales


def _of_type(scales: NDArray, kind: np.dtype[Any]) -> tuple[NDArray, NDArray]:
    """Scales as they are kept, and what to divide by: 1 where all is 0."""
    kept = scales.astype(kind)
    used = kept.astype(np.float32)
    kept = np.where(used > 0, kept, np.ones((), kind))
    return kept, np.where(used > 0, used, np.float32(1))


def _int8(blocks: NDArray, largest: NDArray, kind: np.dtype[Any]) -> tuple[NDArray, NDArray]:
    kept, used = _of_type(largest / np.float32(127), kind)
    integers = np.clip(np.rint(blocks / used[..., None]), -128, 127)
    return (integers + 128).astype(np.uint8), kept


def _int4(blocks: NDArray, largest: NDArray, kind: np.dtype[Any]) -> tuple[NDArray, NDArray]:
    """The best scale for integers q is x . q / q . q, which takes (x . q)^2 / q . q off the error."""
    best_gain, best = np.full(largest.shape, -1, np.float32), np.zeros(largest.shape, np.float32)
    integers = np.empty_like(blocks)
    for share in _SHARES:
        inverse = np.float32(7.5 / share) / np.maximum(largest, np.float32(1e-30))
        np.multiply(blocks, inverse[..., None], out=integers)
        np.rint(integers, out=integers)
        np.clip(integers, -8, 7, out=integers)
        products = np.einsum("ijk,ijk->ij", blocks, integers)
        squares = np.maximum(np.einsum("ijk,ijk->ij", integers, integers), np.float32(1))
        gain = products * products / squares
        is_better = gain > best_gain
        best, best_gain = np.where(is_better, products / squares, best), np.where(is_better, gain, best_gain)
    kept, used = _of_type(best, kind)
    return (np.clip(np.rint(blocks / used[..., None]), -8, 7) + 8).astype(np.uint8), kept


def _fp8(blocks: NDArray, largest: NDArray, kind: np.dtype[Any]) -> tuple[NDArray, NDArray]:
    kept, used = _of_type(largest / np.float32(_LARGEST_E4M3), kind)
    values = np.clip(blocks / used[..., None], -_LARGEST_E4M3, _LARGEST_E4M3)
    return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), kept


def _fp4(blocks: NDArray, largest: NDArray, kind: np.dtype[Any]) -> tuple[NDArray, NDArray]:
    lower = np.frexp(np.maximum(largest, np.float32(2.0**-100)))[1] - 1 - _EXPONENT_OF_E2M1
    lower = np.clip(lower, _SMALLEST_EXPONENT, _LARGEST_EXPONENT - 1)
    found = []
    for exponents in (lower, lower + 1):
        scales = np.ldexp(np.float32(1), exponents).astype(np.float32)
        codes = _e2m1(blocks / scales[..., None])
        values = _E2M1[codes & 7] * np.where(codes & 8, np.float32(-1), np.float32(1)) * scales[..., None]
        found.append((codes, scales, np.square(blocks - values).sum(axis=2)))
    (codes, scales, error), (higher_codes, higher, higher_error) = found
    is_better = higher_error < error
    return np.where(is_better[..., None], higher_codes, codes), np.where(is_better, higher, scales).astype(kind)


def _e2m1(values: NDArray) -> NDArray:
    """Codes of the nearest numbers; of two the one whose code is even."""
    size = np.abs(values)
    codes = np.zeros(values.shape, np.uint8)
    for middle, is_up in zip((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (0, 1, 0, 1, 0, 1, 0), strict=True):
        codes += size >= middle if is_up else size > middle
    return codes | np.signbit(values).astype(np.uint8) << np.uint8(3)


_ROUNDED_AT_ONCE = 256
_SMALLEST_ROW = np.float32(1e-30)  # below, a row counts as zeros


def int8_rows(rows: NDArray, whole: NDArray) -> tuple[NDArray, NDArray]:
    """``rows [N, K]`` of floats -> integers ``[N, K]``, `ZERO_POINT` above their value, and scales float32 ``[N]``.

    A scale is the largest magnitude of the row in ``whole``, which has the same rows and perhaps more of K, over 127.
    It is not finite where the row is not.
    """
    codes, scales = np.empty(rows.shape, np.uint8), np.empty(len(rows), np.float32)
    for first in range(0, len(rows), _ROUNDED_AT_ONCE):
        some = slice(first, first + _ROUNDED_AT_ONCE)
        largest = np.abs(whole[some].astype(np.float32)).max(axis=1, initial=np.float32(0))
        is_usable = (largest >= _SMALLEST_ROW) & (largest < np.inf)
        inverse = np.where(is_usable, np.float32(127) / np.where(is_usable, largest, np.float32(1)), np.float32(0))
        with np.errstate(invalid="ignore"):
            product = rows[some].astype(np.float32) * inverse[:, None]
        codes[some] = (np.rint(np.where(np.isnan(product), np.float32(0), product)) + ZERO_POINT).astype(np.uint8)
        scales[some] = largest / np.float32(127)
    return codes, scales
