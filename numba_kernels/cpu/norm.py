"""RMSNorm and LayerNorm over rows.

    rms_norm    (x / sqrt(mean(x^2) + eps) * weight + residual) * factor    https://arxiv.org/abs/1910.07467
    layer_norm  (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias    https://arxiv.org/abs/1607.06450

LayerNorm goes over the row twice, which does not cancel as the difference of two large sums would. A row's sum has the
same order whatever the batch. Weights stay in their stored type.
"""

from __future__ import annotations

import functools
import math

import llvmlite.ir as ir
import numpy as np
from numba import carray
from numba.core import cgutils, types

from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.emitted import KIND, LITERAL, emitted
from numba_kernels.cpu.intrinsics.scalars import load_f32
from numba_kernels.cpu.intrinsics.simd import F32, I64
from numba_kernels.cpu.rows import for_each_vector
from numba_kernels.cpu.running.launch import Fields, Kernel, float32_at

FIELDS = Fields("*x *weight *added *out num_rows width rows_a_work_item", "eps factor")
_REASSOCIATE = {"reassoc", "contract", "nsz"}  # lets LLVM sum in vector lanes


@functools.cache
def rms_norm_kernel(stored: type) -> Kernel:
    """``out [R, W]`` from ``x [R, W]``, ``weight [W]`` of ``stored`` and a residual ``added [R, W]``, or 0 for none; a
    work item is some rows."""

    def rms_norm(arguments, work_item):
        a = carray(arguments, 1)[0]
        # Locals: LLVM must assume that a store to ``out`` changes fields.
        width, weight, factor = a.width, a.weight, np.float32(a.factor)
        first = work_item * a.rows_a_work_item
        for row in range(first, min(a.num_rows, first + a.rows_a_work_item)):
            x = float32_at(a.x + row * width * 4, width)
            out = float32_at(a.out + row * width * 4, width)
            total = np.float32(0.0)
            for i in range(width):
                total += x[i] * x[i]
            scale = np.float32(1.0 / math.sqrt(total / width + a.eps))
            if a.added != 0:
                residual = float32_at(a.added + row * width * 4, width)
                for i in range(width):
                    out[i] = (residual[i] + x[i] * scale * load_f32(stored, weight, i)) * factor
            else:
                for i in range(width):
                    out[i] = x[i] * scale * load_f32(stored, weight, i) * factor

    return Kernel(rms_norm, FIELDS, fastmath=_REASSOCIATE)


_ROWS_AT_ONCE = 4  # whose sums are under way together: one row's would wait for each other


@emitted(types.void, KIND, LITERAL, *[types.intp] * 5, types.float32)
def _normalise(builder, stored, height, x, weight, bias, out, width, eps):
    """LayerNorm of ``height`` rows, a literal. A row's arithmetic does not depend on it."""
    item_bytes, element = stored.bitwidth // 8, F32 if stored == types.float32 else simd.I16
    row_bytes = builder.mul(width, ir.Constant(I64, 4))
    starts = [builder.mul(row_bytes, ir.Constant(I64, r)) for r in range(height)]
    zero = simd.splat_constant(F32, 0.0)
    sums = [cgutils.alloca_once(builder, simd.vector(F32)) for _ in range(height)]
    count = builder.sitofp(width, F32)

    def value(start, offset, mask):
        return simd.masked_load(builder, builder.add(builder.add(x, start), offset), mask)

    def vector_at(base, offset, mask):
        at = builder.add(base, builder.udiv(builder.mul(offset, ir.Constant(I64, item_bytes)), ir.Constant(I64, 4)))
        return simd.widen(builder, simd.masked_load(builder, at, mask, element, item_bytes), stored)

    def means(add):
        """The rows' sums of what ``add(row, sum, offset, mask)`` adds to them, over the width."""
        for each in sums:
            builder.store(zero, each)

        def piece(offset, mask):
            for r, each in enumerate(sums):
                builder.store(add(r, builder.load(each), offset, mask), each)

        for_each_vector(builder, width, piece)
        return [builder.fdiv(simd.reduce_sum(builder, builder.load(each)), count) for each in sums]

    def centred(r, offset, mask):
        return builder.fsub(value(starts[r], offset, mask), middles[r])

    def add_square(r, total, offset, mask):
        moved = builder.select(mask, centred(r, offset, mask), zero)
        return simd.fma(builder, moved, moved, total)

    found = means(lambda r, total, offset, mask: builder.fadd(total, value(starts[r], offset, mask)))
    middles = [simd.splat(builder, each) for each in found]
    scales = []
    for variance in means(add_square):
        deviation = simd.call(builder, "llvm.sqrt.f32", F32, [builder.fadd(variance, eps)])
        scales.append(simd.splat(builder, builder.fdiv(ir.Constant(F32, 1.0), deviation)))

    def write(has_bias):
        def piece(offset, mask):
            factor = vector_at(weight, offset, mask)
            added = vector_at(bias, offset, mask) if has_bias else None
            for r, start in enumerate(starts):
                scaled = builder.fmul(centred(r, offset, mask), scales[r])
                result = simd.fma(builder, scaled, factor, added) if has_bias else builder.fmul(scaled, factor)
                simd.masked_store(builder, result, builder.add(builder.add(out, start), offset), mask)

        for_each_vector(builder, width, piece)

    with builder.if_else(builder.icmp_signed("!=", bias, ir.Constant(I64, 0))) as (moved, plain):
        with moved:
            write(True)
        with plain:
            write(False)


@functools.cache
def layer_norm_kernel(stored: type) -> Kernel:
    """As `rms_norm_kernel`, with a bias ``added [W]`` of ``stored``, or 0 for none."""

    def layer_norm(arguments, work_item):
        a = carray(arguments, 1)[0]
        eps, row_bytes = np.float32(a.eps), a.width * 4
        row, last = work_item * a.rows_a_work_item, min(a.num_rows, (work_item + 1) * a.rows_a_work_item)
        while row < last:
            x, out = a.x + row * row_bytes, a.out + row * row_bytes
            if row + _ROWS_AT_ONCE <= last:
                _normalise(stored, _ROWS_AT_ONCE, x, a.weight, a.added, out, a.width, eps)
                row += _ROWS_AT_ONCE
            else:
                _normalise(stored, 1, x, a.weight, a.added, out, a.width, eps)
                row += 1

    return Kernel(layer_norm, FIELDS)
