"""How an expert's gate and up become one number, and what its product adds: biases, if its maps have some.

    silu, gelu_tanh     f(gate) * up
    clamped_silu        gate' = min(gate, 7), up' = clamp(up, -7, 7):  gate' sigmoid(1.702 gate') (up' + 1)

The last one is gpt-oss's (arXiv 2508.10925).
"""

from __future__ import annotations

from numba import float32

from numba_kernels.cuda.gemm.epilogue import GATED
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import exp, maximum_nan, minimum_nan, reciprocal

SLOPE, LIMIT = 1.702, 7.0


@device_function
def _clamped_silu(gate, up):
    gate = minimum_nan(gate, float32(LIMIT))
    up = minimum_nan(maximum_nan(up, float32(-LIMIT)), float32(LIMIT))
    return gate * reciprocal(float32(1) + exp(-float32(SLOPE) * gate)) * (up + float32(1))


ACTIVATIONS = {**GATED, "clamped_silu": _clamped_silu}
"""Device functions ``(gate, up) -> number``."""
