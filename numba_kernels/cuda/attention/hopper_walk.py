"""The walk of a computing group over tiles of keys: products of one tile run beside the softmax of another.

    S(j) = Q K(j)^T     begun, asynchronous
    O += P(j-1) V(j-1)  begun after it, P in registers
    P(j) = exp2(S(j))   while O's products run; then O is scaled to the new maximum

The two groups take turns at beginning products (a named barrier each), so that one's softmax also runs beside the
other's products. Groups that share rows go side by side: each waits for the other's weights before it multiplies
values. A walk is compiled once for tiles that all rows see whole, without any masking, and once for those at
an edge.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

from numba import uint32

from numba_kernels.cuda.attention.hopper_softmax import GROUP_THREADS, score_weigher, sum_rescaler, weight_keeper
from numba_kernels.cuda.attention.hopper_tiles import GROUP_ROWS, PANEL_COLUMNS, ROW_BYTES, HopperTiles
from numba_kernels.cuda.attention.tiles import Variant
from numba_kernels.cuda.intrinsics import mbarrier, wgmma
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.sync import arrive_named, sync_named

Group = namedtuple("Group", "own lane upper column place own_queries queries key_tiles value_tiles keys_full")
"""A computing group: its number, 0 or 1; a lane of it, the lane's upper row in the tile, and its first column; the
first row of the lane's warp; the shared address of its queries; descriptors of queries and of the first tiles of
the rings; the first barrier of the four rings."""


def _column_steps(tiles: HopperTiles, panel_bytes: int) -> tuple[int, ...]:
    """Bytes from one product's 16 columns to the next, over panels."""
    count, per_panel = -(-tiles.qk_dim // 16), PANEL_COLUMNS // 16
    return tuple(32 if (i + 1) % per_panel else panel_bytes - 32 * (per_panel - 1) for i in range(count - 1))


@functools.cache
def score_multiplier(dtype: str, tiles: HopperTiles) -> Any:
    """A device function ``(scores, queries, keys)`` of descriptors: begins a tile's scores."""
    query_steps, key_steps = (_column_steps(tiles, each) for each in (tiles.query_panel_bytes, tiles.panel_bytes))
    return wgmma.group_multiply(
        dtype, tiles.own_keys, len(query_steps) + 1, query_steps, key_steps, is_fresh=True
    )  # fmt: skip


@functools.cache
def value_multiplier(dtype: str, tiles: HopperTiles) -> Any:
    """A device function ``(sums, weights, values, turn)``: begins the product of the turn's weights with its values.

    Where groups share rows, `weights` is the descriptor of the first of their two panels, and both have been written.
    """
    columns, in_registers = tiles.own_panels * PANEL_COLUMNS, not tiles.shares_rows
    multiply = wgmma.group_multiply(
        dtype, columns, tiles.num_keys // 16, 0 if in_registers else 32, 16 * ROW_BYTES, a_in_registers=in_registers,
        b_is_transposed=True,
    )  # fmt: skip
    if in_registers:
        return device_function(lambda sums, weights, values, turn: multiply(sums, weights, values, uint32(1)))

    @device_function
    def multiply_shared(sums, weights, values, turn):
        panel = wgmma.advance(weights, (turn & uint32(1)) * uint32(GROUP_ROWS * ROW_BYTES >> 4))
        multiply(sums, panel, values, uint32(1))

    return multiply_shared


@device_function
def release(barrier, lane):
    """The warp has done with a tile."""
    if lane == uint32(0):
        mbarrier.arrive(barrier)


@functools.cache
def key_walker(dtype: str, tiles: HopperTiles, masking: str, variant: Variant) -> Any:
    """A device function ``(group, held, sight, turn, stop, last, origin, scale)``, see above; `masking` as
    `score_weigher` takes it.

    `turn` and `stop` count tiles that went through the rings, `last` is where the row's end; tile j begins at key
    origin + j num_keys. The previous tile's weights are given; the last tile's are left.
    """
    stages, keys = tiles.stages, tiles.num_keys
    key_units, value_units = tiles.key_tile_bytes >> 4, tiles.value_tile_bytes >> 4
    ring_bytes, phase_shift = 8 * stages, stages.bit_length() - 1
    multiply_queries, multiply_values = score_multiplier(dtype, tiles), value_multiplier(dtype, tiles)
    sum_count, shares_rows = tiles.own_panels * PANEL_COLUMNS // 2, tiles.shares_rows
    wait_for_scores, wait_for_sums = wgmma.group_wait(1, tiles.own_keys // 2), wgmma.group_wait(0, sum_count)
    weigh, keep_weights = score_weigher(tiles, masking, variant), weight_keeper(dtype, tiles)
    rescale = sum_rescaler(sum_count)

    @device_function
    def walk(group, held, sight, turn, stop, last, origin, scale):
        own, lane, keys_full, sums, factors = group.own, group.lane, group.keys_full, held.sums, held.factors
        while turn < stop:
            stage = uint32(turn & uint32(stages - 1))
            before = uint32(turn - uint32(1))
            value_stage = uint32(before & uint32(stages - 1))
            values_full = uint32(keys_full + uint32(2 * ring_bytes) + value_stage * uint32(8))
            if not shares_rows:
                sync_named(uint32(own + uint32(1)), uint32(2 * GROUP_THREADS))
            multiply_queries(held.scores, group.queries, wgmma.advance(group.key_tiles, stage * uint32(key_units)))
            if shares_rows:
                sync_named(uint32(1), uint32(2 * GROUP_THREADS))  # the other's weights are there
            mbarrier.wait(values_full, uint32((before >> uint32(phase_shift)) & uint32(1)))
            values = wgmma.advance(group.value_tiles, value_stage * uint32(value_units))
            multiply_values(sums, held.weights, values, before)
            key = uint32(origin + turn * uint32(keys))
            turn = uint32(turn + uint32(1))
            if not shares_rows:
                arrive_named(uint32(uint32(2) - own), uint32(2 * GROUP_THREADS))
            wait_for_scores(held.scores)
            release(uint32(keys_full + uint32(ring_bytes) + stage * uint32(8)), lane)
            weigh(held, sight, key, group.column, scale)
            # Here, and not in the next turn: ptxas moves the wait for the sums to the head of its basic block.
            if turn < last:
                following = uint32(keys_full + uint32(turn & uint32(stages - 1)) * uint32(8))
                mbarrier.wait(following, uint32((turn >> uint32(phase_shift)) & uint32(1)))
            wait_for_sums(sums)
            release(uint32(values_full + uint32(ring_bytes)), lane)
            rescale(sums, factors)
            keep_weights(held.weights, held.scores, held.room, uint32(turn - uint32(1)))

    return walk
