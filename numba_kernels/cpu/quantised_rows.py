"""KV pages of a byte a number: int8, and fp8 (e4m3, https://arxiv.org/abs/2209.05433), with a scale a token and head.

A row x of a head's keys or values is stored as round(x / scale) with scale = max |x| / 127, or / 448, ties to even. On
the cpu np.int8 names the one type, np.uint8 the bits of the other.

e4m3 is read as float16, whose exponent has one bit more, and another bias: a shift, and a factor of 2^8 that
`read_factor` puts into the scale. Subnormal numbers come out right, too.
"""

from __future__ import annotations

import llvmlite.ir as ir
import numpy as np
from numba import njit
from numba.core import types

from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.scalars import float_bits
from numba_kernels.cpu.intrinsics.simd import I8, I16
from numba_kernels.cpu.running.launch import float32_at, int8_at

_LARGEST: dict[type, np.float32] = {np.int8: np.float32(127), np.uint8: np.float32(448)}
_LEAST = np.float32(1e-30)  # a row below it counts as zeros: 448 / it is finite


def is_quantised(stored: type) -> bool:
    """Whether pages of ``stored`` have scales."""
    return stored in _LARGEST


def largest_number(stored: type) -> np.float32:
    """The number that a row's largest becomes; 1 for floats, which have no scale."""
    return _LARGEST.get(stored, np.float32(1))


def read_factor(stored: type) -> np.float32:
    """The factor that `load_page` leaves out of each number."""
    return np.float32(256) if stored is np.uint8 else np.float32(1)


@njit(nogil=True)
def _to_e4m3(x):
    """The bits of a float32 of at most 448 without a sign."""
    if x < np.float32(2.0**-6):
        return np.int32(np.rint(x * np.float32(512)))  # in steps of the least subnormal number
    bits = np.int32(float_bits(x))
    return np.int32(((bits + np.int32(0x7FFFF) + ((bits >> np.int32(20)) & np.int32(1))) >> np.int32(20)) - 120 * 8)


@njit(nogil=True)
def store_row(address, stride, row, largest_number, scale_at):
    """Quantises ``row`` (float32) to int8, or e4m3 where ``largest_number`` is 448, ``stride`` bytes apart from
    ``address`` on, and its scale. A row with a NaN or an infinity gets the scale NaN."""
    scale = float32_at(scale_at, 1)
    size = row.shape[0]
    target = int8_at(address, size * stride)
    largest = np.float32(0.0)
    is_finite = True
    for i in range(size):
        value = abs(row[i])
        is_finite = is_finite and value < np.float32(np.inf)
        if value > largest:
            largest = value
    if not is_finite or largest < _LEAST:
        scale[0] = np.float32(0.0) if is_finite else np.float32(np.nan)
        for i in range(size):
            target[i * stride] = np.int8(0)
        return
    scale[0] = largest / largest_number
    inverse = np.float32(largest_number / largest)
    if largest_number == np.float32(127.0):
        for i in range(size):
            target[i * stride] = np.int8(np.rint(row[i] * inverse))
        return
    for i in range(size):
        value = row[i] * inverse
        bits = _to_e4m3(min(abs(value), np.float32(448)))
        target[i * stride] = np.int8(bits - 128 if value < np.float32(0.0) else bits)


def load_page(builder: ir.IRBuilder, address: ir.Value, stored: types.Type, lanes: int) -> ir.Value:
    """``lanes`` elements of a page at ``address`` as floats; those of a byte without scale and `read_factor`."""
    if stored not in (types.int8, types.uint8):
        return simd.load_wide(builder, address, stored, lanes)
    numbers = simd.load(builder, address, simd.vector(I8, lanes), 1)
    if stored == types.int8:
        return builder.sitofp(numbers, simd.vector(simd.F32, lanes))
    wide = builder.shl(builder.sext(numbers, simd.vector(I16, lanes)), simd.splat_constant(I16, 7, lanes))
    half = builder.and_(wide, simd.splat_constant(I16, 0xBFFF, lanes))
    return simd.widen(builder, half, types.int16, lanes)
