"""The online softmax of Hopper's attention: one lane's part of 64 rows of scores in a computing group.

A lane's scores, of `wgmma`'s layout, belong to two rows, `upper` and eight below it, and there to pairs of neighbouring
columns: of row `below` (0, 1) those at 4 i + 2 below + j, of column 8 i + 2 (lane % 4) + j.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import float32, uint32

from numba_kernels.cuda.attention.online_softmax import MINUS_INFINITY, group_max, origin_of, score_scaler, subtract
from numba_kernels.cuda.attention.tiles import Variant, is_hidden
from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import exp2, fma
from numba_kernels.cuda.intrinsics.warp import maximum_f32


@functools.cache
def score_weigher(num_keys: int, masking: str, variant: Variant) -> Any:
    """A device function: scores of a lane's two rows become weights, measured from the rows' largest so far.

    ``(scores, largest, totals, factors, upper_end, lower_end, key, column, window, scale, shortest_end, longest_end)``:
    `factors` rescale earlier weights, `key` is the tile's first, `column` the lane's.
    `masking`: "none" where all rows see all keys; "all" at an edge; "edges" where it is checked. Capped scores are
    scaled already, and so is `largest` then.
    """
    has_window, is_capped, capped = variant.has_window, variant.softcap > 0, score_scaler(variant.softcap)
    hidden, is_masked, is_asked = is_hidden(has_window), masking != "none", masking == "edges"

    @device_function
    def weigh(
        scores, largest, totals, factors, upper_end, lower_end, key, column, window, scale, shortest_end, longest_end
    ):  # fmt: skip
        if is_capped:
            for i in range(num_keys // 2):
                scores[i] = capped(scores[i], scale)
            scale = float32(1)
        if is_masked and (
            not is_asked
            or uint32(key + uint32(num_keys)) > shortest_end
            or (has_window and uint32(key + window) < longest_end)
        ):
            for i in range(num_keys // 8):
                for j in range(2):
                    at = uint32(key + column + uint32(8 * i + j))
                    if hidden(at, upper_end, window):
                        scores[4 * i + j] = MINUS_INFINITY
                    if hidden(at, lower_end, window):
                        scores[4 * i + 2 + j] = MINUS_INFINITY
        for row in range(2):
            before = largest[row]
            most = before
            for i in range(num_keys // 8):
                most = maximum_f32(most, maximum_f32(scores[4 * i + 2 * row], scores[4 * i + 2 * row + 1]))
            most = group_max(most, 4)
            largest[row] = most
            origin = origin_of(most) * scale
            factor = exp2(subtract(before * scale, origin))
            total = totals[row] * factor
            for i in range(num_keys // 8):
                left = exp2(fma(scores[4 * i + 2 * row], scale, -origin))
                right = exp2(fma(scores[4 * i + 2 * row + 1], scale, -origin))
                scores[4 * i + 2 * row] = left
                scores[4 * i + 2 * row + 1] = right
                total = total + (left + right)
            totals[row] = total
            factors[row] = factor

    return weigh


@functools.cache
def weight_packer(dtype: str, num_keys: int) -> Any:
    """A device function ``(weights, scores)``: rounded, and laid out as the left operand of the product with values."""
    pack = pack_bf16 if dtype == "bf16" else pack_f16

    @device_function
    def pack_weights(weights, scores):
        for i in range(num_keys // 4):
            weights[i] = pack(scores[2 * i], scores[2 * i + 1])

    return pack_weights
