"""The scalars of an online softmax: largest score so far, sum so far, and what they are measured from.

Scores are in units of log 2 (multiplied by log2 e with the scale), so that exp2 is their exponential.
"""

from __future__ import annotations

from numba import float32, uint32

from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import divide
from numba_kernels.cuda.intrinsics.warp import maximum_f32, shuffle_xor_f32

MINUS_INFINITY = float32(float("-inf"))

# Never fused with the product in front of it: the largest score less itself is exactly 0, its weight exactly 1.
subtract = instruction("sub.rn.f32 $0, $1, $2;", "f", "f f", is_pure=True)


@device_function
def origin_of(largest):
    """What scores are measured from: the largest, or 0 for a row that has seen none, since inf - inf is NaN."""
    origin = largest
    if largest == MINUS_INFINITY:
        origin = float32(0)
    return origin


@device_function
def reciprocal_of(total):
    """1 / total, or 0 for a row that has seen nothing, whose result is 0."""
    reciprocal = float32(0)
    if total != float32(0):
        reciprocal = divide(float32(1), total)
    return reciprocal


@device_function
def group_max(value, lanes):
    """The maximum over each group of `lanes` (2, 4 ... 32) neighbouring lanes, in each of them."""
    distance = uint32(lanes // 2)
    while distance > uint32(0):
        value = maximum_f32(value, shuffle_xor_f32(value, distance))
        distance = uint32(distance >> uint32(1))
    return value


@device_function
def group_sum(value, lanes):
    """The sum over each group of `lanes` (2, 4 ... 32) neighbouring lanes, the same bits in each of them."""
    distance = uint32(lanes // 2)
    while distance > uint32(0):
        value = value + shuffle_xor_f32(value, distance)
        distance = uint32(distance >> uint32(1))
    return value
