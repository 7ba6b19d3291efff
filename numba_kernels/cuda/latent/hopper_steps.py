"""Steps of Hopper's latent attention: shared memory of a block, bringing a tile, scores and weights of two rows a lane.

Lanes and their rows are as in `attention.hopper_softmax`; what a group does with the steps, `hopper` tells.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

from numba import uint32

from numba_kernels.cuda.attention.hopper_softmax import GROUP_THREADS, sum_rescaler, weight_packer
from numba_kernels.cuda.attention.hopper_tiles import ALIGNMENT, PANEL_COLUMNS, ROW_BYTES
from numba_kernels.cuda.attention.online_softmax import MINUS_INFINITY, group_max, origin_of, subtract
from numba_kernels.cuda.attention.parts import scratch_bytes
from numba_kernels.cuda.intrinsics import mbarrier, tma, wgmma
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import exp2
from numba_kernels.cuda.intrinsics.memory import (
    shared_load_f32,
    shared_store_4xb32,
    shared_store_b32,
    shared_store_f32,
)
from numba_kernels.cuda.intrinsics.sync import arrive_named, sync_named
from numba_kernels.cuda.intrinsics.warp import maximum_f32, sync_warp

NUM_ROWS, NUM_KEYS = 64, 64
THREADS = 3 * GROUP_THREADS
PANEL_BYTES = NUM_KEYS * ROW_BYTES
PARTS = 3  # of a tile: its rotated panel, and each group's columns
_SCORES = NUM_KEYS // 2  # of a lane
_SCORED, _WEIGHTS_READY = 3, 1  # named barriers, for each group
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
    def sum_count(self) -> int:
        """A lane's sums."""
        return self.half * PANEL_COLUMNS // 2

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


Held = namedtuple("Held", "scores weights sums largest highest totals factors ends")
"""A lane's registers: scores, weights and sums; of its two rows the largest score so far, the new one, the sum of
weights, the factor of what was summed before, and one past the last key."""


Spot = namedtuple("Spot", "own warp lane upper column")
"""A lane's group, 0 or 1, its warp there and itself; its upper row (the other is eight below it), and its first of two
neighbouring columns."""


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
def _raise_largest(held):
    """`highest`: each row's new largest score."""
    for row in range(2):
        held.factors[row] = exp2(subtract(held.largest[row], origin_of(held.highest[row])))
        held.largest[row] = held.highest[row]
        held.totals[row] = held.totals[row] * held.factors[row]


@device_function
def _find_highest(scores, largest, highest):
    for row in range(2):
        most = MINUS_INFINITY
        for i in range(NUM_KEYS // 8):
            most = maximum_f32(most, maximum_f32(scores[4 * i + 2 * row], scores[4 * i + 2 * row + 1]))
        highest[row] = maximum_f32(largest[row], group_max(most, 4))


@device_function
def _weigh(scores, largest, totals):
    for row in range(2):
        origin = origin_of(largest[row])
        for i in range(NUM_KEYS // 8):
            for j in range(2):
                weight = exp2(subtract(scores[4 * i + 2 * row + j], origin))
                scores[4 * i + 2 * row + j] = weight
                totals[row] = totals[row] + weight


@device_function
def publish(numbers, statistics, spot):
    """Numbers of the lane's two rows, for the other group."""
    for row in range(2):
        if spot.lane & uint32(3) == uint32(0):
            shared_store_f32(uint32(statistics + uint32(spot.upper + uint32(8 * row)) * uint32(4)), numbers[row])


@device_function
def read_statistics(statistics, upper, found):
    for row in range(2):
        found[row] = shared_load_f32(uint32(statistics + uint32(upper + uint32(8 * row)) * uint32(4)))


@functools.cache
def weight_sharers(dtype: str, sum_count: int) -> tuple[Any, Any, Any]:
    """Device functions of a group: ``soften(held)``: scores become weights, measured from the rows' largest so far;
    ``hand_over(held, own, panel, statistics, spot)``: group `own`, all of which has scored, leaves weights and largest
    scores for the other one; ``take_over(held, other, statistics, spot)``: group `other`'s largest scores are there,
    and its weights, and sums are measured from them."""
    pack_weights, rescale = weight_packer(dtype, NUM_KEYS), sum_rescaler(sum_count)

    @device_function
    def soften(held):
        _find_highest(held.scores, held.largest, held.highest)
        _raise_largest(held)
        _weigh(held.scores, held.largest, held.totals)
        pack_weights(held.weights, held.scores)

    @device_function
    def hand_over(held, own, panel, statistics, spot):
        sync_named(uint32(_SCORED + own), uint32(GROUP_THREADS))
        flip, column = uint32(spot.upper & uint32(7)), uint32((spot.lane & uint32(3)) * uint32(4))
        for row in range(2):
            place = uint32(panel + uint32(spot.upper + uint32(8 * row)) * uint32(ROW_BYTES) + column)
            for i in range(NUM_KEYS // 8):
                swizzled = uint32((uint32(i) ^ flip) * uint32(16))
                shared_store_b32(uint32(place + swizzled), held.weights[2 * i + row])
        publish(held.largest, statistics, spot)
        tma.fence_shared()
        arrive_named(uint32(_WEIGHTS_READY + own), uint32(2 * GROUP_THREADS))

    @device_function
    def take_over(held, other, statistics, spot):
        sync_named(uint32(_WEIGHTS_READY + other), uint32(2 * GROUP_THREADS))
        read_statistics(statistics, spot.upper, held.highest)
        _raise_largest(held)
        rescale(held.sums, held.factors)

    return soften, hand_over, take_over


@device_function
def init_barriers(queries_full, bringers):
    full = uint32(queries_full + uint32(16))
    mbarrier.init(queries_full, uint32(1))
    mbarrier.init(uint32(queries_full + uint32(8)), uint32(1))
    for i in range(2 * PARTS):
        mbarrier.init(uint32(full + uint32(8 * i)), uint32(bringers))
        mbarrier.init(uint32(empty_of(full) + uint32(8 * i)), uint32(4))
    mbarrier.fence_init()


@functools.cache
def tile_bringer(value_dim: int, block_size: int) -> Any:
    """A device function of the warp that loads: ``(source, target, page, unwritten, lane)``, `target` being (the
    tile, its first barrier, that of a tile with zeros, the phase) and `unwritten` (the first row that was never
    written, how many). All parts of a tile; of the last one, such rows become zeros."""
    panels = LatentPanels(value_dim)
    half, count, tile_bytes, pages_a_tile = panels.half, panels.panels, panels.tile_bytes, NUM_KEYS // block_size
    part_panels, first_panels = (1, half, half), (0, 1, 1 + half)

    @device_function
    def bring_tile(source, target, page, unwritten, lane):
        (tile, full, landed, phase), (first_unwritten, num_unwritten) = target, unwritten
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
                at = uint32(tile + panel * uint32(PANEL_BYTES) + inside * uint32(block_size * ROW_BYTES))
                _load_page(at, source, barrier, uint32(panel * uint32(PANEL_COLUMNS)), uint32(0), uint32(0), page)
        if num_unwritten > uint32(0):
            mbarrier.wait(landed, uint32(0))  # once
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
