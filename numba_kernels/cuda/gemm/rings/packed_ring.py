"""`packed_stream` by a warp's ring: a stage has a few slots of 16 rows of a packed weight, and their groups' scales.

The slots of a warp's part of K lie one after another, so a stage is one bulk copy for each 8 rows, and one of scales.
The ring goes on over a block's tiles of columns; registers hold the words of one slot.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.packed_stream import DTYPE, packed_reader
from numba_kernels.cuda.gemm.rings.warp_ring import copy_in, next_stage
from numba_kernels.cuda.intrinsics import mbarrier
from numba_kernels.cuda.intrinsics.device import device_function, in_turn
from numba_kernels.cuda.intrinsics.fragments import load_all
from numba_kernels.cuda.intrinsics.math import minimum_u32
from numba_kernels.cuda.intrinsics.warp import sync_warp
from numba_kernels.cuda.packing import TILE_BYTES, TILE_ROWS, packing_of

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

SLOTS = (4, 2)  # of a stage: fewer where x is long; each stage costs 37 to 75 instructions
STATE = 6  # numbers that a warp keeps of its ring, see `PackedRing`


@dataclass(frozen=True, slots=True)
class PackedRing:
    """Device functions of a packing for kernels with rings.

    A warp's state is an array of uint32: the stage that it reads next and its phase; the number of stages; the tile
    and the slot that it asks for next; and whether it asks at all.

    Attributes:
        stage_bytes: of a warp.
        fill: ``(state, rows, scale_rows, ring, source)``: asks for all stages, from the one that is read next on.
            `rows` and `scale_rows` are addresses of the slots to ask for next.
        multiply: ``(sums, state, rows, scale_rows, ring, source, x)``: as `PackedReader.multiply`; stages are asked for
            again as soon as they are read.

    `ring` is (stages, barriers), `source` (weight, places, first, last, lane), and `places` (tiles beside this block's
    first warp's, stride from tile to tile, last tile, tiles in front of this warp's rows, the weight's rows, k).
    """

    stage_bytes: int
    fill: Any
    multiply: Any


@functools.cache
def packed_ring(weight_name: str, num_rows: int, slots: int) -> PackedRing:
    """The functions for so many rows of x, of `row_counts`, and up to four slots of a stage."""
    packing = packing_of(weight_name)
    assert packing is not None
    reader, is_grouped = packed_reader(weight_name, num_rows), packing.group > 0
    scale_words, scale_step = packing.chunk_bytes(DTYPE) // 4, TILE_ROWS * packing.chunk_bytes(DTYPE)
    num_scale_words = max(1, scale_words)
    rows_bytes = slots * TILE_BYTES
    stage_bytes = 2 * rows_bytes + slots * scale_step
    factors, aim, take_slot = reader.factors, reader.aim, reader.take_slot
    part_type, num_parts, num_sums = factors.part_type, factors.num_parts, factors.num_sums
    num_x, num_x_words, slot_bytes = factors.num_x, 4 * factors.num_x, packing.slot * factors.plane_bytes
    settle, of_sums = factors.settle, reader.of_sums

    def slot_taker(slot: int) -> Any:
        load_words = load_all("shared", ((0, 0, slot * TILE_BYTES), (4, 0, rows_bytes + slot * TILE_BYTES)))
        scales_at = 2 * rows_bytes + slot * scale_step
        load_scales = load_all("shared", ((0, 1, scales_at),), scale_words) if is_grouped else None

        @device_function
        def take(state):
            sums, parts, pairs, x_words, words, scales, x_at, at, left = state
            if left > uint32(slot):
                load_words(words, at)
                if is_grouped:
                    load_scales(scales, at)
                take_slot(sums, parts, pairs, x_words, words, scales, x_at)
                for j in range(num_x):
                    x_at[j] = uint32(x_at[j] + uint32(slot_bytes))

        return take

    take_slots = in_turn([slot_taker(slot) for slot in range(slots)])

    @device_function
    def ask(state, rows, scale_rows, target, barrier, source):
        """The next stage's slots, and steps on."""
        weight, (beside, stride, last_tile, before, both, k), first, last, lane = source
        if lane == uint32(0):
            count = minimum_u32(uint32(slots), uint32(last - state[4]))
            mbarrier.arrive_expecting(barrier, uint32(count * uint32(2 * TILE_BYTES + scale_step)))
            copy_in(target, rows[0], uint32(count * uint32(TILE_BYTES)), barrier)
            copy_in(uint32(target + uint32(rows_bytes)), rows[1], uint32(count * uint32(TILE_BYTES)), barrier)
            if is_grouped:
                scales_at = uint32(target + uint32(2 * rows_bytes))
                copy_in(scales_at, scale_rows[0], uint32(count * uint32(scale_step)), barrier)
        state[4] = uint32(state[4] + uint32(slots))
        rows[0] += uint64(rows_bytes)
        rows[1] += uint64(rows_bytes)
        scale_rows[0] += uint64(slots * scale_step)
        if state[4] >= last:
            state[3] = uint32(state[3] + stride)
            state[4] = first
            if uint32(state[3] - beside) > last_tile:  # the same in all teams
                state[5] = uint32(0)
            else:
                tile = uint32(minimum_u32(state[3], last_tile) + before)
                aim(rows, scale_rows, weight, tile, both, k, first, uint32(0))

    @device_function
    def fill(state, rows, scale_rows, ring, source):
        (stages, barriers), stage, left = ring, state[0], state[2]
        while left != uint32(0) and state[5] != uint32(0):
            target, barrier = uint32(stages + stage * uint32(stage_bytes)), uint32(barriers + stage * uint32(8))
            ask(state, rows, scale_rows, target, barrier, source)
            stage, left = next_stage(stage, uint32(0), state[2])[0], uint32(left - uint32(1))

    @device_function
    def multiply(sums, state, rows, scale_rows, ring, source, x):
        (stages, barriers), (_, _, first, last, lane), (x_place, apart) = ring, source, x
        parts = cuda.local.array(num_parts, part_type)
        pairs, x_words = cuda.local.array(8, uint32), cuda.local.array(num_x_words, uint32)
        words, scales = cuda.local.array(8, uint32), cuda.local.array(num_scale_words, uint32)
        x_at, at = cuda.local.array(num_x, uint32), cuda.local.array(2, uint32)
        for e in range(num_parts):
            parts[e] = part_type(0)
        for e in range(num_sums):
            sums[e] = float32(0.0)
        for j in range(num_x):
            x_at[j] = uint32(x_place + first * uint32(slot_bytes) + uint32(j) * apart)
        slot = first
        while slot < last:
            target, barrier = uint32(stages + state[0] * uint32(stage_bytes)), uint32(barriers + state[0] * uint32(8))
            mbarrier.wait(barrier, state[1])
            at[0] = uint32(target + lane * uint32(16))
            at[1] = uint32(target + (lane >> uint32(2)) * uint32(4 * scale_words))
            take_slots((sums, parts, pairs, x_words, words, scales, x_at, at, uint32(last - slot)))
            sync_warp()  # all lanes have read the stage
            if state[5] != uint32(0):
                ask(state, rows, scale_rows, target, barrier, source)
            state[0], state[1] = next_stage(state[0], state[1], state[2])
            slot = uint32(slot + uint32(slots))
        if not is_grouped:
            settle(sums, parts, float32(1.0), float32(1.0))
        for e in range(num_sums):
            sums[e] *= float32(of_sums)

    return PackedRing(stage_bytes, fill, multiply)
