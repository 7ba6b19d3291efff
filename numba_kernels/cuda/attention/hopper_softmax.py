"""The online softmax of Hopper's attention: one lane's part of 64 rows of scores in a computing group.

A lane's scores, of `wgmma`'s layout, belong to two rows, `upper` and eight below it, and there to pairs of neighbouring
columns: of row `below` (0, 1) those at 4 i + 2 below + j, of column 8 i + 2 (lane % 4) + j.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

from numba import cuda, float32, uint32

from numba_kernels.cuda.attention.hopper_tiles import GROUP_ROWS, ROW_BYTES, HopperTiles
from numba_kernels.cuda.attention.online_softmax import MINUS_INFINITY, group_max, origin_of, score_scaler, subtract
from numba_kernels.cuda.attention.tiles import Variant, is_hidden
from numba_kernels.cuda.intrinsics import tma
from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import exp2, fma
from numba_kernels.cuda.intrinsics.memory import shared_load_f32, shared_store_b32, shared_store_f32
from numba_kernels.cuda.intrinsics.sync import sync_named
from numba_kernels.cuda.intrinsics.warp import maximum_f32

GROUP_THREADS = 128


Held = namedtuple("Held", "scores weights sums largest totals factors room")
"""A lane's registers: scores, weights (or the descriptor of shared ones) and sums; of its two rows the largest
score, the sum of weights and the factors of what was summed before; `exchanger`'s room."""


Sight = namedtuple("Sight", "upper_end lower_end shortest_end longest_end window")
"""The ends of keys of a lane's two rows, and of the shortest and the longest row of the tile; the window."""


@functools.cache
def score_weigher(tiles: HopperTiles, masking: str, variant: Variant) -> Any:
    """A device function: scores of a lane's two rows become weights, measured from the rows' largest so far.

    ``(held, sight, key, column, scale)``: `key` is the tile's first, `column` the lane's.
    `masking`: "none" where all rows see all keys; "all" at an edge; "edges" where it is checked. Capped scores are
    scaled already, and so is `largest` then.
    """
    has_window, is_capped, capped = variant.has_window, variant.softcap > 0, score_scaler(variant.softcap)
    hidden, is_masked, is_asked = is_hidden(has_window), masking != "none", masking == "edges"
    num_keys, tile_keys, shares_rows = tiles.own_keys, tiles.num_keys, tiles.shares_rows
    exchange = exchanger(5)

    @device_function
    def weigh(held, sight, key, column, scale):
        scores, largest, totals = held.scores, held.largest, held.totals
        if is_capped:
            for i in range(num_keys // 2):
                scores[i] = capped(scores[i], scale)
            scale = float32(1)
        if is_masked and (
            not is_asked
            or uint32(key + uint32(tile_keys)) > sight.shortest_end
            or (has_window and uint32(key + sight.window) < sight.longest_end)
        ):
            for i in range(num_keys // 8):
                for j in range(2):
                    at = uint32(key + column + uint32(8 * i + j))
                    if hidden(at, sight.upper_end, sight.window):
                        scores[4 * i + j] = MINUS_INFINITY
                    if hidden(at, sight.lower_end, sight.window):
                        scores[4 * i + 2 + j] = MINUS_INFINITY
        found = cuda.local.array(2, float32)
        for row in range(2):
            most = largest[row]
            for i in range(num_keys // 8):
                most = maximum_f32(most, maximum_f32(scores[4 * i + 2 * row], scores[4 * i + 2 * row + 1]))
            found[row] = group_max(most, 4)
        if shares_rows:
            upper, lower = exchange(held.room, found[0], found[1])
            found[0] = maximum_f32(found[0], upper)
            found[1] = maximum_f32(found[1], lower)
        for row in range(2):
            before = largest[row]
            most = found[row]
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
            held.factors[row] = factor

    return weigh


@functools.cache
def exchanger(barrier: int) -> Any:
    """A device function ``(room, a, b)``: the other group's numbers of a lane's two rows, by way of the panels' end.

    `room` is (address of the weights' panels, the lane's upper row, group's number, lane) in one array. A row's four
    lanes have the same numbers. Both groups meet at the named barrier, and between two exchanges at another one.
    """
    maxima_at = 2 * GROUP_ROWS * ROW_BYTES

    @device_function
    def exchange(room, a, b):
        rows = uint32(room[0] + uint32(maxima_at) + room[1] * uint32(4))
        own = uint32(rows + room[2] * uint32(4 * GROUP_ROWS))
        if (room[3] & uint32(3)) == uint32(0):
            shared_store_f32(own, a)
            shared_store_f32(uint32(own + uint32(32)), b)
        sync_named(uint32(barrier), uint32(2 * GROUP_THREADS))
        other = uint32(rows + (uint32(1) - room[2]) * uint32(4 * GROUP_ROWS))
        return shared_load_f32(other), shared_load_f32(uint32(other + uint32(32)))

    return exchange


@functools.cache
def weight_keeper(dtype: str, tiles: HopperTiles) -> Any:
    """A device function ``(weights, scores, room, turn)``: rounded, and laid out as the left operand of the product
    with values, in registers; where groups share rows, in one of two panels in shared memory."""
    pack, num_keys = pack_bf16 if dtype == "bf16" else pack_f16, tiles.own_keys

    @device_function
    def share_weights(weights, scores, room, turn):
        panel = uint32(room[0] + (turn & uint32(1)) * uint32(GROUP_ROWS * ROW_BYTES))
        place = uint32(panel + room[1] * uint32(ROW_BYTES) + (room[3] & uint32(3)) * uint32(4))
        flip = uint32((room[3] >> uint32(2)) * uint32(16))
        for i in range(num_keys // 8):
            piece = uint32(uint32(room[2] * uint32(2 * num_keys) + uint32(16 * i)) ^ flip)
            for row in range(2):
                pair = pack(scores[4 * i + 2 * row], scores[4 * i + 2 * row + 1])
                shared_store_b32(uint32(place + piece + uint32(8 * row * ROW_BYTES)), pair)
        tma.fence_shared()

    if tiles.shares_rows:
        return share_weights
    pack_weights = weight_packer(dtype, num_keys)
    return device_function(lambda weights, scores, room, turn: pack_weights(weights, scores))


@functools.cache
def weight_packer(dtype: str, num_keys: int) -> Any:
    """A device function ``(weights, scores)``, in registers."""
    pack = pack_bf16 if dtype == "bf16" else pack_f16

    @device_function
    def pack_weights(weights, scores):
        for i in range(num_keys // 4):
            weights[i] = pack(scores[2 * i], scores[2 * i + 1])

    return pack_weights


@functools.cache
def sum_rescaler(sum_count: int) -> Any:
    """A device function ``(sums, factors)``, of a lane's two rows."""

    @device_function
    def rescale(sums, factors):
        for i in range(sum_count // 4):
            for row in range(2):
                for j in range(2):
                    sums[4 * i + 2 * row + j] = sums[4 * i + 2 * row + j] * factors[row]

    return rescale
