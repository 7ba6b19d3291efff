"""Intrinsics on single values at raw addresses, for kernels written as plain loops, which LLVM then vectorises; and
Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

A stored type is named by the numpy class whose bits carry it: float32; uint16 for bfloat16; int16 for float16; uint8
for an unsigned byte. A draw is a pure function of key and counter, so that it does not matter which thread, batch or
device makes it.
"""

from __future__ import annotations

import llvmlite.ir as ir
import numpy as np
from numba import njit
from numba.core import types

from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.emitted import KIND, emitted
from numba_kernels.cpu.intrinsics.simd import F32, I8, I16, I32
from numba_kernels.cpu.target import HAS_HALF


@emitted(types.float32, types.float32)
def exp_f32(builder, x):
    """e^x of a float32, within 2e-7 relative."""
    return simd.exp(builder, x)


@emitted(types.float32, types.float32)
def exp2_f32(builder, x):
    """2^x of a float32 of at most 0, within 2e-7 relative."""
    return simd.exp2(builder, x)


@emitted(types.int32, types.float32)
def float_bits(builder, x):
    """The bits of a float32 as int32."""
    return builder.bitcast(x, I32)


@emitted(types.float32, types.int32)
def float_of_bits(builder, bits):
    """The float32 with the bits of an int32."""
    return builder.bitcast(bits, F32)


def _place(builder, kind, address, index):
    """A pointer to element ``index``: by getelementptr, so that LLVM sees an array and vectorises loops over it."""
    element = F32 if kind == types.float32 else I8 if kind == types.uint8 else I16
    return builder.gep(builder.inttoptr(address, element.as_pointer()), [index])


@emitted(types.float32, KIND, types.intp, types.intp)
def load_f32(builder, stored, address, index):
    """Element ``index`` of the array of ``stored`` at ``address``, as float32."""
    value = builder.load(_place(builder, stored, address, index))
    if stored == types.float32:
        return value
    if stored == types.uint8:
        return builder.uitofp(value, F32)
    if stored == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(value, I32), ir.Constant(I32, 16)), F32)
    one = simd.widen(builder, builder.bitcast(value, simd.vector(I16, 1)), stored, 1)
    return builder.extract_element(one, ir.Constant(I32, 0))


@emitted(types.void, KIND, types.intp, types.intp, types.float32)
def store_f32(builder, stored, address, index, value):
    """Writes a float32 to element ``index``, rounded to the nearest (ties to even) where ``stored`` is narrower."""
    if stored == types.uint16:
        value = _to_bfloat16(builder, value)
    elif stored == types.int16:
        value = _to_float16(builder, value)
    builder.store(value, _place(builder, stored, address, index))


def _to_float16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Without an instruction for it, in integers: subnormal results are rounded by adding a half, whose last bit is
    worth as much as float16's least number."""
    if HAS_HALF:
        return builder.bitcast(builder.fptrunc(value, ir.HalfType()), I16)

    def number(value: int) -> ir.Constant:
        return ir.Constant(I32, value)

    bits = builder.bitcast(value, I32)
    magnitude = builder.and_(bits, number(0x7FFFFFFF))
    last = builder.and_(builder.lshr(magnitude, number(13)), number(1))
    rounded = builder.add(builder.add(magnitude, number(0xFFF)), last)
    normal = builder.lshr(builder.sub(rounded, number((127 - 15) << 23)), number(13))
    half = number(126 << 23)
    added = builder.fadd(builder.bitcast(magnitude, F32), builder.bitcast(half, F32))
    small = builder.sub(builder.bitcast(added, I32), half)
    finite = builder.select(builder.icmp_unsigned("<", magnitude, number((127 - 14) << 23)), small, normal)
    is_finite = builder.icmp_unsigned("<", rounded, number((127 + 16) << 23))  # below 2^16 after rounding
    nan = builder.or_(number(0x7E00), builder.and_(builder.lshr(magnitude, number(13)), number(0x3FF)))
    is_nan = builder.icmp_unsigned(">", magnitude, number(0x7F800000))
    result = builder.select(is_nan, nan, builder.select(is_finite, finite, number(0x7C00)))
    sign = builder.lshr(builder.and_(bits, number(0x80000000)), number(16))
    return builder.trunc(builder.or_(result, sign), I16)


def _to_bfloat16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The upper half after adding just under half of its last bit; a NaN keeps its upper half, made quiet."""
    bits = builder.bitcast(value, I32)
    last = builder.and_(builder.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
    rounded = builder.add(builder.add(bits, ir.Constant(I32, 0x7FFF)), last)
    quiet = builder.or_(bits, ir.Constant(I32, 0x00400000))
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, ir.Constant(I32, 16)), I16)


_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


@njit(nogil=True)
def philox(c0, c1, c2, c3, k0, k1):
    """Four words of 32 random bits (as uint32) for a counter of four and a key of two uint32 words."""
    for _ in range(10):
        product0 = _MULTIPLIERS[0] * np.uint64(c0)
        product1 = _MULTIPLIERS[1] * np.uint64(c2)
        c0 = np.uint32(product1 >> _SHIFT) ^ c1 ^ k0
        c2 = np.uint32(product0 >> _SHIFT) ^ c3 ^ k1
        c1 = np.uint32(product1 & _LOW)
        c3 = np.uint32(product0 & _LOW)
        k0 = np.uint32(k0 + _KEY_STEPS[0])
        k1 = np.uint32(k1 + _KEY_STEPS[1])
    return c0, c1, c2, c3
