"""The scalars of an online softmax: largest score so far, sum so far, and their origin.

Scores are in units of log 2 (multiplied by log2 e with the scale), so that exp2 is their exponential.

A sink is a learned logit of a query head that every row's softmax has beside its keys' scores, and that has no value:
the weights then sum to less than 1. It is applied once, when a row's keys are all summed (`share_of_keys`).
https://arxiv.org/abs/2508.10925
"""

from __future__ import annotations

import functools
import math
from typing import Any

from numba import float32, uint32, uint64

from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import absolute, exp2, fma, reciprocal
from numba_kernels.cuda.intrinsics.memory import load_f32
from numba_kernels.cuda.intrinsics.warp import maximum_f32, shuffle_xor_f32

MINUS_INFINITY = float32(float("-inf"))
LOG2_E = float32(math.log2(math.e))

# Never fused with the product before it: the largest score less itself is exactly 0, its weight exactly 1.
subtract = instruction("sub.rn.f32 $0, $1, $2;", "f", "f f", is_pure=True)


@device_function
def origin_of(largest):
    """The origin of scores: the largest, or 0 for a row that has seen none, since inf - inf is NaN."""
    origin = largest
    if largest == MINUS_INFINITY:
        origin = float32(0)
    return origin


@device_function
def next_origin(largest, before, is_larger):
    """A row's origin, the factor of what was added up before it, and `is_larger`, or 1 if the row's largest score is
    larger than the one before."""
    origin = origin_of(largest)
    factor = exp2(subtract(before, origin))
    if largest > before:
        is_larger = uint32(1)
    return origin, factor, is_larger


@functools.cache
def score_scaler(softcap: float) -> Any:
    """A device function ``(score, scale) -> score * scale``, in units of log 2; with a cap, cap tanh(score / cap).

    tanh is (1 - e) / (1 + e) with e = exp(-2 |x|), which is exact to 2^-22 of the cap.
    https://arxiv.org/abs/2408.00118
    """
    if not softcap:
        return device_function(lambda score, scale: score * scale)
    bound, exponent = float32(softcap * math.log2(math.e)), float32(-2 / softcap)

    @device_function
    def capped(score, scale):
        scaled = score * scale
        e = exp2(absolute(scaled) * exponent)
        result = bound * ((float32(1) - e) * reciprocal(float32(1) + e))
        if scaled < float32(0):
            result = -result
        return result

    return capped


@device_function
def reciprocal_of(total):
    """1 / total, or 0 for a row that has seen no key, whose result is 0.

    One step of Newton's on the approximation; totals, 1 or more, need no path for subnormals, whose call costs a kernel
    full of accumulators its registers, and makes ptxas serialise `wgmma`.
    """
    share = float32(0)
    if total != float32(0):
        share = reciprocal(total)
        share = fma(share, fma(-total, share, float32(1)), share)
    return share


@device_function
def load_sink(sinks, head):
    """A query head's sink, in units of log 2."""
    return load_f32(sinks + uint64(head) * uint64(4)) * LOG2_E


@device_function
def share_of_keys(largest, total, sink):
    """The factor of a row's sums: 1 / (total + the sink's weight), both measured from `largest`."""
    highest = maximum_f32(largest, sink)
    origin = origin_of(highest)
    factor = exp2(subtract(largest, origin))
    return factor * reciprocal_of(total * factor + exp2(subtract(sink, origin)))


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
