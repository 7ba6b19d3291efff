"""Rows of floats as whole vectors: the loop over one, and what rotations, sampling and log probabilities need."""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils, types

from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.emitted import emitted
from numba_kernels.cpu.intrinsics.simd import F32, I64
from numba_kernels.cpu.target import LANES

F64 = ir.DoubleType()


def for_each_vector(builder, count, piece):
    """Emits ``piece(byte offset, mask)`` twice: for the whole vectors of ``count`` floats, and for those left over."""
    whole = builder.sdiv(count, ir.Constant(I64, LANES))
    with cgutils.for_range(builder, whole, intp=I64) as loop:
        every = ir.Constant(simd.vector(simd.I1), [1] * LANES)
        piece(builder.mul(loop.index, ir.Constant(I64, LANES * 4)), every)
    done = builder.mul(whole, ir.Constant(I64, LANES))
    with builder.if_then(builder.icmp_signed("<", done, count)):
        piece(builder.mul(done, ir.Constant(I64, 4)), simd.lanes_below(builder, 0, builder.sub(count, done)))


@emitted(types.void, types.intp, types.intp, types.intp, types.float32)
def scale_floats(builder, source, target, count, factor):
    """``target[i] = source[i] * factor`` for ``count`` floats at these addresses."""
    factors = simd.splat(builder, factor)

    def piece(place, mask):
        value = simd.masked_load(builder, builder.add(source, place), mask)
        simd.masked_store(builder, builder.fmul(value, factors), builder.add(target, place), mask)

    for_each_vector(builder, count, piece)


@emitted(types.void, *[types.intp] * 5)
def rotate_halves(builder, row, cos, sin, half, distance):
    """Rotates ``half`` floats at the address ``row`` and those ``distance`` floats after them by the angles whose
    cosines and sines lie at these addresses."""
    behind = builder.add(row, builder.mul(distance, ir.Constant(I64, 4)))

    def piece(place, mask):
        starts = [builder.add(start, place) for start in (row, behind, cos, sin)]
        low, high, c, s = (simd.masked_load(builder, start, mask) for start in starts)
        lower = builder.fsub(builder.fmul(low, c), builder.fmul(high, s))
        upper = builder.fadd(builder.fmul(high, c), builder.fmul(low, s))
        for start, value in zip(starts, (lower, upper)):
            simd.masked_store(builder, value, start, mask)

    for_each_vector(builder, half, piece)


@emitted(types.float32, types.intp, types.intp)
def largest_of(builder, x, count):
    """The largest of ``count`` floats at the address ``x``: NaN if one is NaN or +inf, -inf if there are none."""
    infinity = simd.splat_constant(F32, float("inf"))
    low = simd.splat_constant(F32, float("-inf"))
    peak = cgutils.alloca_once(builder, simd.vector(F32))
    bad = cgutils.alloca_once(builder, simd.vector(simd.I32))
    builder.store(low, peak)
    builder.store(simd.splat_constant(simd.I32, 0), bad)

    def piece(place, mask):
        value = builder.select(mask, simd.masked_load(builder, builder.add(x, place), mask), low)
        builder.store(simd.larger(builder, value, builder.load(peak)), peak)
        strange = builder.not_(builder.fcmp_ordered("<", value, infinity))
        strange = builder.sext(strange, simd.vector(simd.I32))
        builder.store(builder.or_(builder.load(bad), strange), bad)

    for_each_vector(builder, count, piece)
    largest = simd.reduce_max(builder, builder.load(peak))
    is_bad = builder.icmp_signed("!=", simd.fold(builder, builder.load(bad), builder.or_), ir.Constant(simd.I32, 0))
    return builder.select(is_bad, ir.Constant(F32, float("nan")), largest)


@emitted(types.float64, types.intp, types.float32, types.intp, types.intp)
def exponentials(builder, x, origin, count, out):
    """The float64 sum of ``e^(x[i] - origin)`` over ``count`` floats at ``x``; each is written to ``out`` unless 0."""
    origins = simd.splat(builder, origin)
    total = cgutils.alloca_once(builder, simd.vector(F64))
    builder.store(ir.Constant(simd.vector(F64), [0.0] * LANES), total)
    writes = builder.icmp_signed("!=", out, ir.Constant(I64, 0))

    def piece(place, mask):
        value = simd.exp(builder, builder.fsub(simd.masked_load(builder, builder.add(x, place), mask), origins))
        value = builder.select(mask, value, simd.splat_constant(F32, 0.0))
        wide = builder.fpext(value, simd.vector(F64))
        builder.store(builder.fadd(builder.load(total), wide), total)
        with builder.if_then(writes):
            simd.masked_store(builder, value, builder.add(out, place), mask)

    for_each_vector(builder, count, piece)
    lanes = builder.load(total)
    result = ir.Constant(F64, 0.0)
    for lane in range(LANES):
        result = builder.fadd(result, builder.extract_element(lanes, ir.Constant(simd.I32, lane)))
    return result
