"""Multipliers (as in Granite) and soft caps (as in Gemma 2: ``cap tanh(x / cap)``, arXiv 2408.00118)."""

from __future__ import annotations

import functools

import numpy as np
from numba import carray
from numba.core import types
from numba.extending import intrinsic

from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.simd import constant_like
from numba_kernels.cpu.rows import for_each_vector
from numba_kernels.cpu.running.launch import Fields, Kernel, float32_at


@intrinsic
def cap_floats(typingctx, values, count, scale, cap):
    """``x = cap tanh(x scale / cap)`` for the ``count`` floats at the address ``values``; NaN stays.

    tanh is (1 - e) / (1 + e) with e = exp(-2 |x|): its error is 1e-7 of the cap.
    """
    signature = types.void(types.intp, types.intp, types.float32, types.float32)

    def codegen(context, builder, signature, args):
        values, count, scale, cap = args
        factor, bound = simd.splat(builder, scale), simd.splat(builder, cap)
        exponent = builder.fdiv(constant_like(bound, -2.0), bound)
        one = constant_like(bound, 1.0)

        def piece(offset, mask):
            place = builder.add(values, offset)
            x = builder.fmul(simd.masked_load(builder, place, mask), factor)
            is_negative = builder.fcmp_ordered("<", x, constant_like(x, 0.0))
            size = builder.select(is_negative, builder.fsub(constant_like(x, -0.0), x), x)
            e = simd.exp(builder, builder.fmul(size, exponent), at_most_zero=True)
            result = builder.fmul(bound, builder.fdiv(builder.fsub(one, e), builder.fadd(one, e)))
            negative = builder.fsub(constant_like(x, -0.0), result)
            simd.masked_store(builder, builder.select(is_negative, negative, result), place, mask)

        for_each_vector(builder, count, piece)
        return context.get_dummy_value()

    return signature, codegen


@functools.cache
def logits_kernel() -> Kernel:
    """Multiplies ``logits [R, V]`` by ``scale`` and caps them where ``softcap`` is above 0; a ticket is some rows."""

    def scale_logits(arguments, ticket):
        a = carray(arguments, 1)[0]
        width, scale, softcap = a.width, np.float32(a.scale), np.float32(a.softcap)
        first = ticket * a.rows_a_ticket
        for row in range(first, min(a.num_rows, first + a.rows_a_ticket)):
            at = a.logits + row * width * 4
            if softcap > np.float32(0.0):
                cap_floats(at, width, scale, softcap)
            else:
                logits = float32_at(at, width)
                for i in range(width):
                    logits[i] *= scale

    return Kernel(scale_logits, Fields("*logits num_rows width rows_a_ticket", "scale softcap"))


@functools.cache
def add_scaled_kernel() -> Kernel:
    """``out [R, W] = x + scale y``; a ticket is some rows."""

    def add_scaled(arguments, ticket):
        a = carray(arguments, 1)[0]
        width, scale = a.width, np.float32(a.scale)
        first = ticket * a.rows_a_ticket
        count = (min(a.num_rows, first + a.rows_a_ticket) - first) * width
        at = first * width * 4
        x, y, out = float32_at(a.x + at, count), float32_at(a.y + at, count), float32_at(a.out + at, count)
        for i in range(count):
            out[i] = x[i] + scale * y[i]

    return Kernel(add_scaled, Fields("*x *y *out num_rows width rows_a_ticket", "scale"))
