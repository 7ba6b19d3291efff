"""Steps of Hopper's latent attention: shared memory of a block, bringing a tile, scores and weights of two rows a lane.

Lanes and their rows are as in `attention.hopper_softmax`; what a group does with the steps, `hopper` tells.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import uint32, uint64

from numba_kernels.cuda.attention.hopper_tiles import ALIGNMENT, PANEL_COLUMNS, ROW_BYTES
from numba_kernels.cuda.attention.online_softmax import MINUS_INFINITY, group_max, origin_of, subtract
from numba_kernels.cuda.attention.parts import scratch_bytes
from numba_kernels.cuda.intrinsics import mbarrier, tma, wgmma
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import exp2
from numba_kernels.cuda.intrinsics.memory import (
    shared_load_4xb32,
    shared_load_f32,
    shared_store_4xb32,
    shared_store_b32,
    shared_store_f32,
    store_4xb32,
)
from numba_kernels.cuda.intrinsics.warp import maximum_f32, sync_warp

NUM_ROWS, NUM_KEYS = 64, 64
GROUP_THREADS = 128
THREADS = 3 * GROUP_THREADS
PANEL_BYTES = NUM_KEYS * ROW_BYTES
PARTS = 3  # of a tile: its rotated panel, and each group's columns
_SCORES = NUM_KEYS // 2  # of a lane
_load_page = tma.load(4)
_describe = wgmma.descriptor(ROW_BYTES, 8 * ROW_BYTES)


@dataclass(frozen=True, slots=True)
class LatentPanels:
    """Shared memory of a block, in bytes from an aligned beginning: queries, two tiles, barriers, largest scores and
    sums, for `part_finder`."""

    value_dim: int

    @property
    def half(self) -> int:
        """Panels of a group's columns."""
        return self.value_dim // (2 * PANEL_COLUMNS)

    @property
    def panels(self) -> int:
        return 1 + 2 * self.half

    @property
    def tiles_at(self) -> int:
        return self.panels * PANEL_BYTES

    @property
    def tile_bytes(self) -> int:
        return self.panels * PANEL_BYTES

    @property
    def barriers_at(self) -> int:
        """Queries full, a zeroed tile landed; then full and empty of each part of each tile."""
        return self.tiles_at + 2 * self.tile_bytes

    @property
    def statistics_at(self) -> int:
        return self.barriers_at + 8 * (2 + 4 * PARTS)

    @property
    def found_at(self) -> int:
        """Numbers that are wanted again at the end, and take no registers until then."""
        return self.statistics_at + 2 * NUM_ROWS * 4

    @property
    def scratch_at(self) -> int:
        return self.found_at + 32

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, with what aligning it may take."""
        return self.scratch_at + scratch_bytes(THREADS) + ALIGNMENT


@device_function
def empty_of(full):
    return uint32(full + uint32(8 * 2 * PARTS))


@device_function
def scale_and_hide(scores, scale, key, shortest_end, ends, column):
    for i in range(_SCORES):
        scores[i] = scores[i] * scale
    if uint32(key + uint32(NUM_KEYS)) > shortest_end:
        for i in range(NUM_KEYS // 8):
            for j in range(2):
                at = uint32(key + column + uint32(8 * i + j))
                for row in range(2):
                    if at >= ends[row]:
                        scores[4 * i + 2 * row + j] = MINUS_INFINITY


@device_function
def raise_largest(largest, totals, factors, highest):
    """`highest`: each row's new largest score."""
    for row in range(2):
        factors[row] = exp2(subtract(largest[row], origin_of(highest[row])))
        largest[row] = highest[row]
        totals[row] = totals[row] * factors[row]


@device_function
def find_highest(scores, largest, highest):
    for row in range(2):
        most = MINUS_INFINITY
        for i in range(NUM_KEYS // 8):
            most = maximum_f32(most, maximum_f32(scores[4 * i + 2 * row], scores[4 * i + 2 * row + 1]))
        highest[row] = maximum_f32(largest[row], group_max(most, 4))


@device_function
def weigh(scores, largest, totals):
    for row in range(2):
        origin = origin_of(largest[row])
        for i in range(NUM_KEYS // 8):
            for j in range(2):
                weight = exp2(subtract(scores[4 * i + 2 * row + j], origin))
                scores[4 * i + 2 * row + j] = weight
                totals[row] = totals[row] + weight


@device_function
def publish(weights, largest, target, statistics, upper, lane):
    """The group's weights and largest scores, for the other group."""
    flip = uint32(upper & uint32(7))
    for row in range(2):
        place = uint32(target + uint32(upper + uint32(8 * row)) * uint32(ROW_BYTES) + (lane & uint32(3)) * uint32(4))
        for i in range(NUM_KEYS // 8):
            swizzled = uint32((uint32(i) ^ flip) * uint32(16))
            shared_store_b32(uint32(place + swizzled), weights[2 * i + row])
        if lane & uint32(3) == uint32(0):
            shared_store_f32(uint32(statistics + uint32(upper + uint32(8 * row)) * uint32(4)), largest[row])
    tma.fence_shared()


@device_function
def read_statistics(statistics, upper, found):
    for row in range(2):
        found[row] = shared_load_f32(uint32(statistics + uint32(upper + uint32(8 * row)) * uint32(4)))


@device_function
def release(barrier, lane):
    if lane == uint32(0):
        mbarrier.arrive(barrier)


@device_function
def init_barriers(queries_full, landed, full, bringers):
    mbarrier.init(queries_full, uint32(1))
    mbarrier.init(landed, uint32(1))
    for i in range(2 * PARTS):
        mbarrier.init(uint32(full + uint32(8 * i)), uint32(bringers))
        mbarrier.init(uint32(empty_of(full) + uint32(8 * i)), uint32(4))
    mbarrier.fence_init()


@functools.cache
def tile_bringer(value_dim: int, block_size: int) -> Any:
    """A device function of the warp that loads; see its arguments."""
    panels = LatentPanels(value_dim)
    half, count, tile_bytes, pages_a_tile = panels.half, panels.panels, panels.tile_bytes, NUM_KEYS // block_size
    part_panels, first_panels = (1, half, half), (0, 1, 1 + half)

    @device_function
    def bring_tile(source, tile, full, landed, phase, landed_phase, page, lane, first_unwritten, num_unwritten):
        """All parts of a tile; of the last one, rows that were never written become zeros."""
        for part in range(PARTS):
            lanes = part_panels[part] * pages_a_tile
            is_full = uint32(full + uint32(8 * part))
            mbarrier.wait(empty_of(is_full), uint32(phase ^ uint32(1)))
            barrier = is_full
            if num_unwritten > uint32(0):
                barrier = landed
            if lane == uint32(0):
                if num_unwritten == uint32(0):
                    mbarrier.arrive_expecting(barrier, uint32(part_panels[part] * PANEL_BYTES))
                elif part == 0:
                    mbarrier.arrive_expecting(barrier, uint32(tile_bytes))
            sync_warp()
            if lane < uint32(lanes):
                panel = uint32(uint32(first_panels[part]) + lane // uint32(pages_a_tile))
                inside = uint32(lane % uint32(pages_a_tile))
                target = uint32(tile + panel * uint32(PANEL_BYTES) + inside * uint32(block_size * ROW_BYTES))
                _load_page(target, source, barrier, uint32(panel * uint32(PANEL_COLUMNS)), uint32(0), uint32(0), page)
        if num_unwritten > uint32(0):
            mbarrier.wait(landed, landed_phase)
            zero = uint32(0)
            for panel in range(count):
                done = lane
                while done < uint32(num_unwritten * uint32(ROW_BYTES // 16)):
                    at = uint32(tile + first_unwritten * uint32(ROW_BYTES) + done * uint32(16))
                    shared_store_4xb32(uint32(at + uint32(panel * PANEL_BYTES)), (zero, zero, zero, zero))
                    done = uint32(done + uint32(32))
            tma.fence_shared()
            sync_warp()
            if lane == uint32(0):
                for part in range(PARTS):
                    mbarrier.arrive(uint32(full + uint32(8 * part)))

    return bring_tile


@functools.cache
def tile_multiplier(dtype: str, value_dim: int) -> Any:
    """A device function ``(scores, queries, tile, full, phase)``: 64 rows of queries by a tile of keys."""
    half = LatentPanels(value_dim).half
    steps = tuple(
        32 if (i + 1) % 4 else PANEL_BYTES - 96 for i in range(4 * half - 1)
    )  # bytes from 16 columns to the next, over panels
    multiply_rotated = wgmma.group_multiply(dtype, NUM_KEYS, 4, 32, 32, is_fresh=True)
    multiply_half = wgmma.group_multiply(dtype, NUM_KEYS, 4 * half, steps, steps)
    wait_for_scores = wgmma.group_wait(0, _SCORES)

    @device_function
    def multiply_tile(scores, queries, tile, full, phase):
        """The scores of a tile, part after part as they come."""
        mbarrier.wait(full, phase)
        multiply_rotated(scores, _describe(queries), _describe(tile))
        for part in range(2):
            mbarrier.wait(uint32(full + uint32(8 * (1 + part))), phase)
            first = (1 + part * half) * PANEL_BYTES
            columns = _describe(uint32(tile + uint32(first)))
            multiply_half(scores, _describe(uint32(queries + uint32(first))), columns, uint32(1))
        wait_for_scores(scores)

    return multiply_tile


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


@functools.cache
def result_copier(value_dim: int) -> Any:
    """A device function of a warp: its 16 rows of its group's results, from the queries' place to global memory."""
    own_columns = value_dim // 2

    @device_function
    def copy_results(own_queries, out, first_token_row, first_row, rows, own, warp, lane):
        place = lane
        while place < uint32(16 * own_columns // 8):
            below = uint32(place // uint32(own_columns // 8))
            piece = uint32(place - below * uint32(own_columns // 8))
            own_row = uint32(warp * uint32(16) + below)
            if uint32(first_row + own_row) < rows:
                panel = uint32(own_queries + (piece >> uint32(3)) * uint32(PANEL_BYTES))
                swizzled = uint32(((piece ^ own_row) & uint32(7)) * uint32(16))
                values = shared_load_4xb32(uint32(panel + own_row * uint32(ROW_BYTES) + swizzled))
                at_row = uint64(uint32(first_token_row + first_row + own_row)) * uint64(2 * value_dim)
                first = uint32(own * uint32(2 * own_columns) + piece * uint32(16))
                store_4xb32(out + at_row + uint64(first), values)
            place = uint32(place + uint32(32))

    return copy_results
