"""The walk of a computing group over tiles of keys: products of one tile run beside the softmax of another.

    S(j) = Q K(j)^T     begun, asynchronous
    O += P(j-1) V(j-1)  begun after it, P in registers
    P(j) = exp2(S(j))   while O's products run; then O is scaled to the new maximum

The two groups take turns at beginning products (a named barrier each), so that one's softmax also runs beside the
other's products. A walk is compiled once for tiles that all rows see whole, without any masking, and once for those at
an edge.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import uint32

from numba_kernels.cuda.attention.hopper_softmax import score_weigher, weight_packer
from numba_kernels.cuda.attention.hopper_tiles import PANEL_COLUMNS, ROW_BYTES, HopperTiles
from numba_kernels.cuda.attention.tiles import Variant
from numba_kernels.cuda.intrinsics import mbarrier, wgmma
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.sync import arrive_named, sync_named

GROUP_THREADS = 128


def _column_steps(tiles: HopperTiles, panel_bytes: int) -> tuple[int, ...]:
    """Bytes from one product's 16 columns to the next, over panels."""
    count, per_panel = -(-tiles.head_dim // 16), PANEL_COLUMNS // 16
    return tuple(32 if (i + 1) % per_panel else panel_bytes - 32 * (per_panel - 1) for i in range(count - 1))


@functools.cache
def score_multiplier(dtype: str, tiles: HopperTiles) -> Any:
    """A device function ``(scores, queries, keys)`` of descriptors: begins a tile's scores."""
    query_steps, key_steps = (_column_steps(tiles, each) for each in (tiles.query_panel_bytes, tiles.panel_bytes))
    return wgmma.group_multiply(
        dtype, tiles.num_keys, len(query_steps) + 1, query_steps, key_steps, is_fresh=True
    )  # fmt: skip


@functools.cache
def value_multiplier(dtype: str, tiles: HopperTiles) -> Any:
    """A device function ``(sums, weights, values, 1)``: begins the product of a tile's weights with its values."""
    return wgmma.group_multiply(
        dtype, tiles.panels * PANEL_COLUMNS, tiles.num_keys // 16, 0, 16 * ROW_BYTES, a_in_registers=True,
        b_is_transposed=True,
    )  # fmt: skip


@device_function
def release(barrier, lane):
    """The warp has done with a tile."""
    if lane == uint32(0):
        mbarrier.arrive(barrier)


@functools.cache
def key_walker(dtype: str, tiles: HopperTiles, masking: str, variant: Variant) -> Any:
    """A device function, see above; `masking` as `score_weigher` takes it.

    `turn` and `stop` count tiles that went through the rings, `last` is where the row's end; tile j begins at key
    origin + j num_keys. `keys_full` is the first of the four rings of barriers; `own` is the group's number, 0 or 1.
    The previous tile's weights are given; the last tile's are left.
    """
    stages, keys = tiles.stages, tiles.num_keys
    tile_units, ring_bytes, phase_shift = tiles.tile_bytes >> 4, 8 * stages, stages.bit_length() - 1
    multiply_queries, multiply_values = score_multiplier(dtype, tiles), value_multiplier(dtype, tiles)
    sum_count = tiles.panels * PANEL_COLUMNS // 2
    wait_for_scores, wait_for_sums = wgmma.group_wait(1, keys // 2), wgmma.group_wait(0, sum_count)
    weigh, pack_weights = score_weigher(keys, masking, variant), weight_packer(dtype, keys)

    @device_function
    def walk(
        turn, stop, last, origin, queries, key_tiles, value_tiles, keys_full, own, lane, column, upper_end,
        lower_end, shortest_end, longest_end, window, scale, scores, weights, sums, largest, totals, factors,
    ):  # fmt: skip
        while turn < stop:
            stage = uint32(turn & uint32(stages - 1))
            before = uint32(turn - uint32(1))
            value_stage = uint32(before & uint32(stages - 1))
            values_full = uint32(keys_full + uint32(2 * ring_bytes) + value_stage * uint32(8))
            sync_named(uint32(own + uint32(1)), uint32(2 * GROUP_THREADS))
            multiply_queries(scores, queries, wgmma.advance(key_tiles, stage * uint32(tile_units)))
            mbarrier.wait(values_full, uint32((before >> uint32(phase_shift)) & uint32(1)))
            multiply_values(sums, weights, wgmma.advance(value_tiles, value_stage * uint32(tile_units)), uint32(1))
            key = uint32(origin + turn * uint32(keys))
            turn = uint32(turn + uint32(1))
            arrive_named(uint32(uint32(2) - own), uint32(2 * GROUP_THREADS))
            wait_for_scores(scores)
            release(uint32(keys_full + uint32(ring_bytes) + stage * uint32(8)), lane)
            weigh(
                scores, largest, totals, factors, upper_end, lower_end, key, column, window, scale, shortest_end,
                longest_end,
            )  # fmt: skip
            # Here, and not in the next turn: ptxas moves the wait for the sums to the head of its basic block.
            if turn < last:
                following = uint32(keys_full + uint32(turn & uint32(stages - 1)) * uint32(8))
                mbarrier.wait(following, uint32((turn >> uint32(phase_shift)) & uint32(1)))
            wait_for_sums(sums)
            release(uint32(values_full + uint32(ring_bytes)), lane)
            for i in range(sum_count // 4):
                for j in range(2):
                    sums[4 * i + j] = sums[4 * i + j] * factors[0]
                    sums[4 * i + 2 + j] = sums[4 * i + 2 + j] * factors[1]
            pack_weights(weights, scores)

    return walk
