"""Packed weights for the Hopper tier's ring: warps unpack them into the stages, where `wgmma` reads them.

`wgmma` takes a factor from shared memory, or the first one from registers. There lane t of a row has the pair t of each
16 bytes, where a packed weight's lane has all four (`packing.py`). But a step unpacks to one chunk of 16 bytes, for one
store, at the TMA's place. So

- some warps only unpack, 32 of the tile's columns each or twice as many. Each loads its columns, 16 bytes a lane, a
  slot or two ahead, to registers (`weight_stream.py`): the loads start long before a stage is free;
- a step is half a stage. Lanes of odd rows take the second one first: neighbours in a store lie in other banks so;
- a stage is full once each of these warps has handed its part over, by a fence, and the TMA has brought x, which the
  first of them loads;
- the weight passes through shared memory in 16 bits, and up to there in its own bytes.

The scales of the weight's rows are columns' of the output, and wait in registers for the sums.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.epilogue import scale_element
from numba_kernels.cuda.gemm.hopper_ring import BLOCK_K, Tile, stage_advancer
from numba_kernels.cuda.gemm.weight_stream import STEP, TILE_COLUMNS, packed_stream
from numba_kernels.cuda.intrinsics import mbarrier, memory, tma
from numba_kernels.cuda.intrinsics.device import device_function, in_turn, passed_on
from numba_kernels.cuda.intrinsics.fragments import exchange_all
from numba_kernels.cuda.intrinsics.math import minimum_u32
from numba_kernels.cuda.intrinsics.sync import wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import shuffle_index_f32, sync_warp
from numba_kernels.cuda.packing import Packing, packing_of

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

WARP_ROWS = 32  # of the weight


def slots_ahead(tile: Tile, packing: Packing) -> int:
    """Slots that a warp has in flight: as many as registers allow. A slot of 4 bits is two stages."""
    return 2 if tile.block_n == WARP_ROWS * tile.num_unpackers or packing.slot == BLOCK_K else 1


@functools.cache
def stage_unpacker(tile: Tile, weight: str, dtype: str, is_gated: bool, slot: int, pair: int) -> Any:
    """A device function for an unpacking warp: two steps of its slot, which are a stage, go to shared memory."""
    packing = packing_of(weight)
    assert packing is not None
    assert 2 * STEP == BLOCK_K  # and slots are even numbers of steps
    stream = packed_stream(packing, dtype, is_gated, slots_ahead(tile, packing))
    assert stream.spread is not None
    assert stream.unpack_words is not None
    first, second = 2 * pair, 2 * pair + 1
    second_base = 0 if stream.is_spread_alike else 8
    spread_first, spread_second = stream.spread(slot, first), stream.spread(slot, second, 8)
    unpack_first, unpack_second = stream.unpack_words(slot, first), stream.unpack_words(slot, second, second_base)
    lane_words, has_two_factors = packing.lane_words, not stream.is_spread_alike
    exchange_words = exchange_all(
        tuple(
            (16 * slot + 4 * r + lane_words * first + w, 16 * slot + 4 * r + lane_words * second + w)
            for r in range(4) for w in range(lane_words)
        )
    )  # fmt: skip
    has_zeros = packing.has_zeros
    exchange_factors = exchange_all(tuple((e, 8 + e) for e in range(8 if has_zeros else 4)))
    store, row_bytes = memory.shared_store_4xb32, 2 * BLOCK_K
    halves_apart = (tile.block_n // 2 - WARP_ROWS // 2) * row_bytes if is_gated else 0

    @device_function
    def store_chunks(pairs, at):
        for r in range(4):
            place = uint32(at + uint32(r * 8 * row_bytes + (halves_apart if r >= 2 else 0)))
            store(place, (pairs[4 * r], pairs[4 * r + 1], pairs[4 * r + 2], pairs[4 * r + 3]))

    @device_function
    def unpack_stage(kept, factors, pairs, at, is_odd):
        words, scales, zeros = kept
        exchange_words(words, is_odd)
        spread_first(factors, scales, zeros)
        if has_two_factors:
            spread_second(factors, scales, zeros)
            exchange_factors(factors, is_odd)
        unpack_first(pairs, factors, words)
        store_chunks(pairs, at)
        unpack_second(pairs, factors, words)
        store_chunks(pairs, uint32(at ^ uint32(row_bytes // 2)))

    return unpack_stage


@functools.cache
def tile_unpacker(tile: Tile, weight: str, dtype: str, is_gated: bool, fetch: Any, hand_over: Any) -> Any:
    """A device function ``(x, weight, ring, at, warp, lane, (rows, first column, n, k), (start, end))`` for all
    unpacking warps: loads one tile's data, stage by stage, like `hopper_ring.tile_loader`'s. It returns the next `at`,
    (stage, phase, late); the first `late` is (0, 0).

    Args:
        fetch: ``(x, stage's address, full barrier, rows, start, k, warp, lane)``, called by each warp once the stage is
            free: loads x's part. `rows` is the function's argument.
        hand_over: ``(full, stage, lane, late) -> late``, called by each warp when it has written its part of the stage.
    """
    packing = packing_of(weight)
    has_two_parts = tile.block_n == 2 * WARP_ROWS * tile.num_unpackers
    assert packing is not None
    assert tile.cluster == 1
    assert has_two_parts or tile.block_n == WARP_ROWS * tile.num_unpackers
    num_slots, slot_elements, stages_a_slot = slots_ahead(tile, packing), packing.slot, packing.slot // BLOCK_K
    stream = packed_stream(packing, dtype, is_gated, num_slots)
    num_stages, stage_bytes, x_bytes = tile.num_stages, tile.stage_bytes, tile.x_bytes
    group, columns = num_slots * slot_elements, WARP_ROWS // 2 if is_gated else WARP_ROWS
    warp_columns = 2 * columns if has_two_parts else columns
    place, advance = stream.place, stream.advance
    num_words, num_scale_words, num_zero_words = stream.num_words, stream.num_scale_words, stream.num_zero_words
    load_early, next_stage = in_turn([stream.load_early(slot) for slot in range(num_slots)]), stage_advancer(num_stages)

    def taker(slot: int, pair: int) -> Any:
        unpack_stage = stage_unpacker(tile, weight, dtype, is_gated, slot, pair)
        inside, part_bytes = slot * slot_elements + pair * BLOCK_K, columns * 2 * BLOCK_K

        @device_function
        def take_stage(place, state):
            (stage, phase, late), (x, ring, rows_of_x, span, warp, lane, target, own, more, factors, pairs) = (
                place,
                state,
            )
            start, _, end, _, k = span
            at_k = uint32(start + uint32(inside))
            if at_k < end:
                mbarrier.wait(uint32(ring.empty + stage * uint32(8)), phase)
                barrier, at = uint32(ring.full + stage * uint32(8)), uint32(ring.shared + stage * uint32(stage_bytes))
                fetch(x, at, barrier, rows_of_x, at_k, k, warp, lane)
                at, is_odd = uint32(at + target), uint32((lane >> uint32(2)) & uint32(1))
                unpack_stage(own[0], factors, pairs, at, is_odd)
                if has_two_parts:
                    unpack_stage(more[0], factors, pairs, uint32(at + uint32(part_bytes)), is_odd)
                late = hand_over(ring.full, stage, lane, late)
                stage, phase = next_stage(stage, phase)
            return stage, phase, late

        return take_stage

    def loader(slot: int) -> Any:
        load = stream.load(slot)

        @device_function
        def load_slot(place, state):
            _, next_start, end, is_whole, _ = state[3]
            (kept, places), (more_kept, more_places) = state[7], state[8]
            load((kept, places, next_start, end, is_whole))
            if has_two_parts:
                load((more_kept, more_places, next_start, end, is_whole))
            return place

        return load_slot

    take_group = passed_on(
        [
            each for slot in range(num_slots)
            for each in (*(taker(slot, pair) for pair in range(stages_a_slot)), loader(slot))
        ]
    )  # fmt: skip

    @device_function
    def unpack_tile(x, weight, ring, at, warp, lane, place_of, span_of):
        (rows_of_x, first_column, n, k), (start, end) = place_of, span_of
        rows, more_rows = cuda.local.array(4, uint64), cuda.local.array(4, uint64)
        scale_rows, more_scale_rows = cuda.local.array(2, uint64), cuda.local.array(2, uint64)
        zero_rows, more_zero_rows = cuda.local.array(2, uint64), cuda.local.array(2, uint64)
        words, more_words = cuda.local.array(num_words, uint32), cuda.local.array(num_words, uint32)
        scales, more_scales = cuda.local.array(num_scale_words, uint32), cuda.local.array(num_scale_words, uint32)
        zeros, more_zeros = cuda.local.array(num_zero_words, uint32), cuda.local.array(num_zero_words, uint32)
        pairs, factors = cuda.local.array(16, uint32), cuda.local.array(16, uint32)
        own, more = ((words, scales, zeros), (rows, scale_rows, zero_rows)), (
            (more_words, more_scales, more_zeros), (more_rows, more_scale_rows, more_zero_rows)
        )  # fmt: skip
        column = uint32(first_column + warp * uint32(warp_columns))
        place(own[1], weight, n, k, column, start, lane)
        load_early((own[0], own[1], start, end, False))
        if has_two_parts:
            place(more[1], weight, n, k, uint32(column + uint32(columns)), start, lane)
            load_early((more[0], more[1], start, end, False))
        wait_for_previous_grid()  # the weight is immutable; x may be the previous grid's output
        # Row g of its tiles of 8; chunk t, or of odd rows the one half a row further, in its swizzled place.
        g = lane >> uint32(2)
        chunk = uint32(((lane & uint32(3)) | ((g & uint32(1)) << uint32(2))) ^ g)
        first_row = uint32(warp * uint32(warp_columns) + g)
        target = uint32(uint32(x_bytes) + first_row * uint32(2 * BLOCK_K) + (chunk << uint32(4)))
        while start < end:
            next_start, is_whole = uint32(start + uint32(group)), uint32(start + uint32(2 * group)) <= end
            advance(own[1])
            if has_two_parts:
                advance(more[1])
            span = start, next_start, end, is_whole, k
            at = take_group(at, (x, ring, rows_of_x, span, warp, lane, target, own, more, factors, pairs))
            start = next_start
        return at

    return unpack_tile


@functools.cache
def dense_unpacker(tile: Tile, weight: str, dtype: str, is_gated: bool) -> Any:
    """`tile_unpacker` where the TMA brings the rows of x from `rows_of_x` on, issued by a lane of the first warp."""
    x_bytes, load = tile.x_bytes, tma.load(2)

    @device_function
    def fetch(x, at, barrier, row, start, k, warp, lane):
        if uint32(warp | lane) == uint32(0):
            mbarrier.arrive_expecting(barrier, uint32(x_bytes))
            load(at, x, barrier, start, row)

    @device_function
    def hand_over(full, stage, lane, late):
        tma.fence_shared()
        sync_warp()
        if lane == uint32(0):
            mbarrier.arrive(uint32(full + stage * uint32(8)))
        return late

    return tile_unpacker(tile, weight, dtype, is_gated, fetch, hand_over)


@functools.cache
def column_scaler(tile: Tile, weight: str, dtype: str, is_gated: bool) -> tuple[Any, Any]:
    """Two device functions for consumers: loads the scales of a tile's columns, which a warp's lanes hold together; and
    multiplies sums by those of their columns."""
    packing = packing_of(weight)
    assert packing is not None
    row_scales_of = packed_stream(packing, dtype, is_gated, slots_ahead(tile, packing)).row_scales
    block_n, load, shuffle = tile.block_n, memory.load_f32, shuffle_index_f32
    count, half = block_n // 32, tile.block_n // 2

    @device_function
    def load_scales(held, weight, n, k, first_column, lane):
        row_scales = row_scales_of(weight, n, k)
        last = uint32((uint32(n + uint32(TILE_COLUMNS - 1)) & uint32(0xFFFFFFF0)) - uint32(1))
        for i in range(count):
            if is_gated and 32 * i >= half:
                column = uint32(minimum_u32(uint32(first_column + uint32(32 * i - half) + lane), last) + n)
            else:
                column = minimum_u32(uint32(first_column + uint32(32 * i) + lane), last)
            held[i] = load(row_scales + uint64(column) * uint64(4))

    def scaler(number: int) -> Any:
        """Scales of 32 columns."""

        @device_function
        def scale_some(state):
            sums, held, lane = state
            for i in range(4):
                at = 16 * number + 4 * i
                source = uint32(uint32(8 * i) + (lane & uint32(3)) * uint32(2))
                low, high = shuffle(held[number], source), shuffle(held[number], uint32(source + uint32(1)))
                sums[at], sums[at + 1] = scale_element(sums[at], low), scale_element(sums[at + 1], high)
                sums[at + 2], sums[at + 3] = scale_element(sums[at + 2], low), scale_element(sums[at + 3], high)

        return scale_some

    return load_scales, in_turn([scaler(number) for number in range(count)])
