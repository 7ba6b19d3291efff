"""Gating of experts: gate and up become one number.

    silu, gelu_tanh     f(gate) * up
    clamped_silu        gate' = min(gate, 7), up' = clamp(up, -7, 7):  gate' sigmoid(1.702 gate') (up' + 1)

The last one is gpt-oss's (arXiv 2508.10925).
"""

from __future__ import annotations

import functools
from typing import Any

from numba import float32, types

from numba_kernels.cuda.gemm.epilogue import GATED
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import exp, maximum_nan, minimum_nan, reciprocal
from numba_kernels.cuda.intrinsics.memory import load_4xf32, load_f32

SLOPE, LIMIT = 1.702, 7.0


@device_function
def _clamped_silu(gate, up):
    gate = minimum_nan(gate, float32(LIMIT))
    up = minimum_nan(maximum_nan(up, float32(-LIMIT)), float32(LIMIT))
    return gate * reciprocal(float32(1) + exp(-float32(SLOPE) * gate)) * (up + float32(1))


ACTIVATIONS = {**GATED, "clamped_silu": _clamped_silu}
"""Device functions ``(gate, up) -> number``."""


@functools.cache
def biased_gater(activation: str, count: int) -> Any:
    """A device function ``(gates, ups, bias, column, n) -> numbers`` for 1 or 4 neighbours: adds the float32 biases of
    gate, at `column`, and of up, `n` after it, and gates. A `bias` of 0 means none."""
    gated = ACTIVATIONS[activation]

    @device_function
    def gate_one(gate, up, bias, column, n):
        if bias != types.uint64(0):
            at = bias + types.uint64(column) * types.uint64(4)
            gate += load_f32(at)
            up += load_f32(at + types.uint64(n) * types.uint64(4))
        return gated(gate, up)

    @device_function
    def gate_quad(gates, ups, bias, column, n):
        a, b, c, d = gates
        e, f, g, h = ups
        if bias != types.uint64(0):
            at = bias + types.uint64(column) * types.uint64(4)
            added = load_4xf32(at)
            a += added[0]
            b += added[1]
            c += added[2]
            d += added[3]
            added = load_4xf32(at + types.uint64(n) * types.uint64(4))
            e += added[0]
            f += added[1]
            g += added[2]
            h += added[3]
        return gated(a, e), gated(b, f), gated(c, g), gated(d, h)

    return gate_one if count == 1 else gate_quad
