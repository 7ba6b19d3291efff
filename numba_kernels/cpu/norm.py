"""RMSNorm and LayerNorm over rows.

    rms_norm    (x / sqrt(mean(x^2) + eps) * weight + residual) * factor    https://arxiv.org/abs/1910.07467
    layer_norm  (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias    https://arxiv.org/abs/1607.06450

LayerNorm goes over the row twice, which does not cancel as the difference of two large sums would. A row's sum has the
same order whatever the batch. Weights stay in their stored type.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numba import carray

from numba_kernels.cpu.intrinsics.scalars import load_f32
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


@functools.cache
def layer_norm_kernel(stored: type) -> Kernel:
    """As `rms_norm_kernel`, with a bias ``added [W]`` of ``stored``, or 0 for none."""

    def layer_norm(arguments, work_item):
        a = carray(arguments, 1)[0]
        width, weight, bias = a.width, a.weight, a.added
        first = work_item * a.rows_a_work_item
        for row in range(first, min(a.num_rows, first + a.rows_a_work_item)):
            x = float32_at(a.x + row * width * 4, width)
            out = float32_at(a.out + row * width * 4, width)
            total = np.float32(0.0)
            for i in range(width):
                total += x[i]
            mean = np.float32(total / width)
            squares = np.float32(0.0)
            for i in range(width):
                centred = x[i] - mean
                squares += centred * centred
            scale = np.float32(1.0 / math.sqrt(squares / width + a.eps))
            if bias != 0:
                for i in range(width):
                    out[i] = (x[i] - mean) * scale * load_f32(stored, weight, i) + load_f32(stored, bias, i)
            else:
                for i in range(width):
                    out[i] = (x[i] - mean) * scale * load_f32(stored, weight, i)

    return Kernel(layer_norm, FIELDS, fastmath=_REASSOCIATE)
