"""Loops over whole vectors that kernels of recurrent layers share, as LLVM IR: a causal convolution, gates, and a sum
of products."""

from __future__ import annotations

import functools

import llvmlite.ir as ir
from numba import njit
from numba.core import cgutils, types

from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.emitted import LITERAL, emitted
from numba_kernels.cpu.intrinsics.scalars import exp_f32
from numba_kernels.cpu.intrinsics.simd import F32, I32, I64, constant_like
from numba_kernels.cpu.rows import for_each_vector
from numba_kernels.cpu.running.launch import address, float32_at
from numba_kernels.cpu.target import LANES

NORMED, SIGMOID, SILU, GATE_ONLY = range(4)  # forms of `gate_tile`
_PART = 16  # vectors of channels that are convolved together
_AHEAD = 8  # rows that are prefetched before they are read


@emitted(types.void, LITERAL, LITERAL, *[types.intp] * 8)
def _convolve_vectors(builder, taps, has_silu, rows, count, first, conv, bias, out, out_stride, vectors):
    """The first ``vectors * LANES`` channels of `convolve`; all addresses and bytes.

    Up to _PART vectors of a token are computed before the next token's, so that neighbouring lines of its row are read
    together: rows may lie pages apart."""
    whole = simd.vector(F32, taps * LANES)
    undefined = ir.Constant(whole, ir.Undefined)
    table = cgutils.alloca_once(builder, ir.ArrayType(simd.vector(F32), (taps + 1) * _PART))

    def entry(vector, number):
        return builder.gep(table, [ir.Constant(I64, 0), builder.add(vector, ir.Constant(I64, number * _PART))])

    parts = builder.sdiv(builder.add(vectors, ir.Constant(I64, _PART - 1)), ir.Constant(I64, _PART))
    with cgutils.for_range(builder, parts, intp=I64) as part:
        begin = builder.mul(part.index, ir.Constant(I64, _PART))
        left = builder.sub(vectors, begin)
        size = builder.select(builder.icmp_signed("<", left, ir.Constant(I64, _PART)), left, ir.Constant(I64, _PART))
        moved = builder.mul(begin, ir.Constant(I64, LANES * 4))
        place, to = builder.add(first, moved), builder.add(out, moved)
        with cgutils.for_range(builder, size, intp=I64) as channels:
            line = builder.add(moved, builder.mul(channels.index, ir.Constant(I64, LANES * 4)))
            filters = simd.load(builder, builder.add(conv, builder.mul(line, ir.Constant(I64, taps))), whole, 4)
            for tap in range(taps):
                order = ir.Constant(simd.vector(I32), [lane * taps + tap for lane in range(LANES)])
                builder.store(builder.shuffle_vector(filters, undefined, order), entry(channels.index, tap))
            start = entry(channels.index, taps)
            builder.store(simd.splat_constant(F32, 0.0), start)
            with builder.if_then(builder.icmp_signed("!=", bias, ir.Constant(I64, 0))):
                builder.store(simd.load(builder, builder.add(bias, line), simd.vector(F32), 4), start)
        with cgutils.for_range(builder, count, intp=I64) as tokens:
            at = builder.add(rows, builder.mul(tokens.index, ir.Constant(I64, 8)))
            given = [
                builder.add(simd.load(builder, simd.offset(builder, at, 8 * tap), I64, 8), place) for tap in range(taps)
            ]
            result = builder.add(to, builder.mul(tokens.index, out_stride))
            left = builder.sub(builder.sub(count, tokens.index), ir.Constant(I64, 1))  # tokens after this one
            rows_ahead = ir.Constant(I64, _AHEAD)
            rows_ahead = builder.select(builder.icmp_signed("<", rows_ahead, left), rows_ahead, left)
            ahead = builder.add(simd.offset(builder, at, 8 * taps - 8), builder.mul(rows_ahead, ir.Constant(I64, 8)))
            ahead = builder.add(simd.load(builder, ahead, I64, 8), place)
            with cgutils.for_range(builder, size, intp=I64) as channels:
                line = builder.mul(channels.index, ir.Constant(I64, LANES * 4))
                simd.prefetch(builder, builder.add(ahead, line), is_near=True)
                total = builder.load(entry(channels.index, taps))
                for tap, row in enumerate(given):
                    value = simd.load(builder, builder.add(row, line), simd.vector(F32), 4)
                    total = simd.fma(builder, builder.load(entry(channels.index, tap)), value, total)
                if has_silu:
                    total = builder.fmul(total, simd.sigmoid(builder, total))
                simd.store(builder, total, builder.add(result, line))


@njit(nogil=True)
def convolve(rows, count, first, width, taps, has_silu, conv, bias, out, out_stride):
    """Convolves ``width`` channels from ``first`` on of ``count`` tokens, with SiLU or without.

    ``rows`` (int64): addresses of the inputs of all channels, of token i's taps from row i on, oldest first.
    ``conv [channels, taps]`` and ``bias`` (0: none) are addresses of all channels', ``out`` of the first result, the
    next token's ``out_stride`` bytes further."""
    table, vectors = address(rows), 0
    own_conv, own_bias = conv + first * taps * 4, bias + first * 4 if bias != 0 else 0
    if taps == 4 and has_silu:
        vectors = width // LANES
        _convolve_vectors(4, 1, table, count, first * 4, own_conv, own_bias, out, out_stride, vectors)
    elif taps == 4:
        vectors = width // LANES
        _convolve_vectors(4, 0, table, count, first * 4, own_conv, own_bias, out, out_stride, vectors)
    elif taps == 3 and not has_silu:
        vectors = width // LANES
        _convolve_vectors(3, 0, table, count, first * 4, own_conv, own_bias, out, out_stride, vectors)
    weights = float32_at(own_conv, width * taps)
    for channel in range(vectors * LANES, width):
        for i in range(count):
            total = float32_at(own_bias, width)[channel] if bias != 0 else weights[0] * 0.0
            for tap in range(taps):
                total += weights[channel * taps + tap] * float32_at(rows[i + tap] + first * 4, width)[channel]
            if has_silu:
                total = total / (1.0 + exp_f32(-total))
            float32_at(out + i * out_stride, width)[channel] = total


# log(1 + t) / s with s = t / (2 + t), in powers of s^2, the highest first: for t up to 1 within 1e-8 relative
_LOG1P = tuple(2.0 / power for power in range(15, 0, -2))


def _softplus(builder, x):
    """log(1 + e^x), within 5e-7 relative."""
    number = functools.partial(constant_like, x)
    minus, is_above = builder.fsub(number(-0.0), x), builder.fcmp_ordered(">", x, number(0.0))
    small = simd.exp(builder, builder.select(is_above, minus, x))
    s = builder.fdiv(small, builder.fadd(small, number(2.0)))
    square, tail = builder.fmul(s, s), number(_LOG1P[0])
    for coefficient in _LOG1P[1:]:
        tail = simd.fma(builder, tail, square, number(coefficient))
    return simd.fma(builder, tail, s, builder.select(is_above, x, number(0.0)))


@emitted(types.void, LITERAL, *[types.intp] * 7, types.float32, types.float32)
def gate_factors(builder, is_delta, given, rates, bias, powers, decays, steps, count, least, most):
    """``decays`` and ``steps`` of ``count`` heads, all addresses: of the delta rule ``e^(powers softplus(rates +
    bias))`` and ``sigmoid(given)``; of mamba ``e^(powers steps)`` with ``steps = softplus(rates + bias)`` within
    ``least`` and ``most``."""
    low, high = simd.splat(builder, least), simd.splat(builder, most)

    def piece(place, mask):
        def of(start):
            return simd.masked_load(builder, builder.add(start, place), mask)

        def keep(value, start):
            simd.masked_store(builder, value, builder.add(start, place), mask)

        step = size = _softplus(builder, builder.fadd(of(rates), of(bias)))
        if is_delta:
            step = simd.sigmoid(builder, of(given))
        else:
            step = builder.select(builder.fcmp_ordered("<", size, low), low, size)
            step = size = builder.select(builder.fcmp_ordered(">", step, high), high, step)
        keep(simd.exp(builder, builder.fmul(of(powers), size)), decays)
        keep(step, steps)

    for_each_vector(builder, count, piece)


@emitted(types.float32, *[types.intp] * 3)
def inner_product(builder, x, y, count):
    """The sum of products of ``count`` floats at two addresses: LANES partial sums, then pairs of lanes, on every
    processor."""
    total = cgutils.alloca_once(builder, simd.vector(F32))
    builder.store(simd.splat_constant(F32, 0.0), total)

    def piece(place, mask):
        a, b = (simd.masked_load(builder, builder.add(each, place), mask) for each in (x, y))
        builder.store(simd.fma(builder, a, b, builder.load(total)), total)

    for_each_vector(builder, count, piece)
    return simd.reduce_sum(builder, builder.load(total))


@emitted(types.void, LITERAL, *[types.intp] * 5, types.float32)
def gate_tile(builder, form, x, gate, weight, out, count, scale):
    """``out`` of ``count`` floats, all addresses: NORMED ``x * scale * weight``; SIGMOID and SILU that times the gated
    function; GATE_ONLY ``x * silu(gate)``."""
    factor = simd.splat(builder, scale)

    def piece(place, mask):
        def of(start):
            return simd.masked_load(builder, builder.add(start, place), mask)

        value = of(x)
        if form != GATE_ONLY:
            value = builder.fmul(builder.fmul(value, factor), of(weight))
        if form != NORMED:
            given = of(gate)
            sigmoid = simd.sigmoid(builder, given)
            value = builder.fmul(value, sigmoid if form == SIGMOID else builder.fmul(given, sigmoid))
        simd.masked_store(builder, value, builder.add(out, place), mask)

    for_each_vector(builder, count, piece)
