"""Packed weights for `hopper_few`: unpacked into registers, where `wgmma` takes its first factor. Lesson: move the
smaller factor.

A lane of `wgmma`'s first factor has pairs t of each 16 bytes of a row, where a packed weight's lane has all four pairs
of 16 bytes (`packing.py`). Both factors may take K in any order, and x is the one with few rows. So

- the TMA brings a stage's slots of 16 tiles of 8 rows, 512 bytes each, and their groups' scales, as they are stored;
- another one exchanges words of x in its stage, once the TMA has brought it: word i of chunks 0 to 3 of a step go to
  chunk i. The 16 bytes of a lane are its pairs then;
- a warp that multiplies has 16 rows of the weight. It unpacks half a stage into registers, and the tensor cores
  multiply that while the block's other group unpacks.

Where a group's scale suffices for a stage (`weight_stream.settles`), it multiplies the stage's float32 sums, else the
numbers, rounded.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.hopper_ring import BLOCK_K, stage_advancer
from numba_kernels.cuda.gemm.rings.few_weights import BLOCK_ROWS, Block, FewWeight, loaders
from numba_kernels.cuda.gemm.weight_stream import NOTHING, packed_stream, settles, unpackers
from numba_kernels.cuda.intrinsics import convert, mbarrier, memory, tma, wgmma
from numba_kernels.cuda.intrinsics.device import device_function, in_turn
from numba_kernels.cuda.intrinsics.fragments import add_scaled, load_all
from numba_kernels.cuda.intrinsics.sync import split_schedule
from numba_kernels.cuda.intrinsics.warp import sync_warp
from numba_kernels.cuda.packing import TILE_BYTES, TILE_ROWS, packing_of
from numba_kernels.cuda.specialisation import TensorMapLayout

uint32, float32 = types.uint32, types.float32

_TILES = BLOCK_ROWS // TILE_ROWS  # of 8 rows of the weight
_PAIRS = _TILES // 2
_REGISTERS = 16  # of a lane, for half a stage and 16 rows


def maps_of(weight: str, rows: int, k: int, dtype: str, *, is_gated: bool) -> tuple[TensorMapLayout, ...]:
    """The maps of a packed weight [rows, k]: its words, groups' scales and offsets; the words' for what it lacks."""
    packing, parts = packing_of(weight), 2 if is_gated else 1
    assert packing is not None
    slots, a_stage, sections = -(-k // packing.slot), 2 * BLOCK_K // packing.slot, packing.sections(rows, k, dtype)

    def layout(num_bytes: int, tiles: int, tiles_a_block: int, offset: int) -> TensorMapLayout:
        """A section whose rows have so many bytes a slot."""
        count = num_bytes // 4
        box = count * a_stage, tiles_a_block // parts
        return TensorMapLayout("f32", (count * slots, tiles), (num_bytes * slots,), box, offset=offset)

    pairs = -(-rows // (2 * TILE_ROWS))
    words = layout(TILE_BYTES, 2 * pairs, _TILES, 0)
    return words, *(
        layout(TILE_ROWS * packing.halves * chunk, pairs, _PAIRS, offset) if chunk else words
        for chunk, offset in zip((packing.chunk_bytes(dtype), packing.zeros_bytes(dtype)), sections, strict=False)
    )  # fmt: skip


@functools.cache
def _weight_loader(dtype: str, block: Block, *, is_gated: bool) -> Any:
    """A device function for one thread, ``(matrix, shared, full, stage, row, up, start)``: a stage's weight."""
    packing, size, expected = block.packing, block.stage_bytes, block.stage_bytes + block.scale_bytes
    assert packing is not None
    slot, slots, load = packing.slot, block.depth // packing.slot, tma.load(2)
    scales_at, scale_bytes = block.scales_of_groups_at, block.scale_bytes
    a_slot, zeros_a_slot = (
        TILE_ROWS * packing.halves * chunk for chunk in (packing.chunk_bytes(dtype), packing.zeros_bytes(dtype))
    )
    # The second half of a gated unit's tile, in shared memory
    half, half_scales, half_zeros = (
        slots * tiles // 2 * each
        for tiles, each in ((_TILES, TILE_BYTES), (_PAIRS, a_slot), (_PAIRS, zeros_a_slot))
    )  # fmt: skip

    @device_function
    def load_weight(matrix, shared, full, stage, row, up, start):
        words, scales, zeros = matrix
        barrier, target = uint32(full + stage * uint32(8)), uint32(shared + stage * uint32(size))
        first, tile, pair = uint32(start // uint32(slot)), row >> uint32(3), row >> uint32(4)
        mbarrier.arrive_expecting(barrier, uint32(expected))
        at = uint32(first * uint32(TILE_BYTES // 4))
        load(target, words, barrier, at, tile)
        if is_gated:
            load(uint32(target + uint32(half)), words, barrier, at, uint32(tile + (up >> uint32(3))))
        target = uint32(shared + uint32(scales_at) + stage * uint32(scale_bytes))
        if a_slot > 0:
            at = uint32(first * uint32(a_slot // 4))
            load(target, scales, barrier, at, pair)
            if is_gated:
                load(uint32(target + uint32(half_scales)), scales, barrier, at, uint32(pair + (up >> uint32(4))))
        if zeros_a_slot > 0:
            at, target = uint32(first * uint32(zeros_a_slot // 4)), uint32(target + uint32(2 * half_scales))
            load(target, zeros, barrier, at, pair)
            if is_gated:
                load(uint32(target + uint32(half_zeros)), zeros, barrier, at, uint32(pair + (up >> uint32(4))))

    return load_weight


@functools.cache
def _arranger(block: Block) -> Any:
    """See `FewWeight`. Lane r + 8 i has rows r, r + 8 and so on of step i of the stage."""
    width, size, weight_bytes, num_stages = block.width, block.stage_bytes, block.weight_bytes, block.num_stages
    load, store = load_all("shared", tuple((4 * c, c, 0) for c in range(4))), memory.shared_store_4xb32
    next_stage, row_bytes = stage_advancer(num_stages), 2 * BLOCK_K

    @device_function
    def arrange(shared, full, ready, stage, phase, num_steps, lane, nothing):
        words, places = cuda.local.array(16, uint32), cuda.local.array(4, uint32)
        row, step, count = lane & uint32(7), lane >> uint32(3), uint32(0)
        box = uint32((step >> uint32(1)) * uint32(width * row_bytes) + row * uint32(row_bytes) + uint32(weight_bytes))
        stride = uint32(nothing + uint32(8 * row_bytes))  # else the loop is unrolled, which takes registers
        first_chunk = uint32((step & uint32(1)) << uint32(2))
        while count < num_steps:
            mbarrier.wait(uint32(full + stage * uint32(8)), phase)
            at = uint32(shared + stage * uint32(size) + box)
            for c in range(4):
                places[c] = uint32(at + ((uint32(first_chunk + uint32(c)) ^ row) << uint32(4)))
            past = uint32(at + uint32(width * row_bytes))
            while at < past:
                load(words, places)
                at = uint32(at + stride)
                for c in range(4):
                    store(places[c], (words[c], words[4 + c], words[8 + c], words[12 + c]))
                    places[c] = uint32(places[c] + stride)
            tma.fence_shared()
            sync_warp()
            if lane == uint32(0):
                mbarrier.arrive(uint32(ready + stage * uint32(8)))
            stage, phase = next_stage(stage, phase)
            count = uint32(count + uint32(1))
        return stage, phase

    return arrange


@functools.cache
def _step_unpacker(dtype: str, block: Block, step: int, *, is_settled: bool) -> Any:
    """A device function ``(first, kept, factors, places)``: a step of a stage's, 32 of K, of a warp's rows in
    registers, half of `wgmma`'s first factor. `kept` are (words, scales, zeros), which a slot's first step loads."""
    packing = block.packing
    assert packing is not None
    slots = block.depth // packing.slot
    (slot, own_step), base = divmod(step, packing.steps), _REGISTERS // 2 * (step % 2)
    spreader, unpacker = unpackers(packing, dtype, 2, is_settled=is_settled, nothing=NOTHING)
    spread, unpack_words = spreader(0, own_step), unpacker(0, own_step)
    scale_words, zero_words = packing.chunk_bytes(dtype) // 4, packing.zeros_bytes(dtype) // 4
    a_slot, zeros_a_slot = TILE_ROWS * packing.halves * 4 * scale_words, TILE_ROWS * packing.halves * 4 * zero_words
    is_new, has_scales, has_zeros = own_step == 0, scale_words > 0, zero_words > 0
    load_words = load_all("shared", tuple((4 * r, 0, (slots * r + slot) * TILE_BYTES) for r in range(2)))
    load_scales = load_all("shared", ((0, 1, slot * a_slot),), scale_words) if has_scales else None
    load_zeros = load_all("shared", ((0, 2, slot * zeros_a_slot),), zero_words) if has_zeros else None

    @device_function
    def unpack_step(state):
        first, kept, factors, places = state
        words, scales, zeros = kept
        pairs = cuda.local.array(8, uint32)
        if is_new:
            load_words(words, places)
            if has_scales:
                load_scales(scales, places)
            if has_zeros:
                load_zeros(zeros, places)
        spread(factors, scales, zeros)
        unpack_words(pairs, factors, words)
        for q in range(2):
            for e in range(2):
                for r in range(2):
                    first[base + 4 * q + 2 * e + r] = pairs[4 * r + 2 * q + e]

    return unpack_step


@functools.cache
def _multiplier(dtype: str, block: Block, *, is_settled: bool) -> Any:
    """See `FewWeight`."""
    packing = block.packing
    assert packing is not None
    width, num_stages, size, holds = block.width, block.num_stages, block.stage_bytes, block.holds_stage
    scales_at, scale_bytes, slots, box_bytes = (
        block.scales_of_groups_at, block.scale_bytes, block.depth // packing.slot, width * 2 * BLOCK_K
    )  # fmt: skip
    chunk, zeros_chunk, halves = packing.chunk_bytes(dtype), packing.zeros_bytes(dtype), packing.halves
    num_sums, weight_bytes = width // 2, block.weight_bytes
    multiply, begin = (
        wgmma.group_multiply(dtype, width, BLOCK_K // 16, 0, 32, a_in_registers=True, is_fresh=is_fresh)
        for is_fresh in (False, True)
    )
    describe, next_stage = wgmma.descriptor(128, 1024), stage_advancer(num_stages)
    wait_for_all = wgmma.group_wait(0, num_sums)
    unpack_first, unpack_second = (
        in_turn([_step_unpacker(dtype, block, step, is_settled=is_settled) for step in steps])
        for steps in ((0, 1), (2, 3))
    )
    unpack_scales = {"bf16": convert.unpack_bf16, "f16": convert.unpack_f16}[dtype]
    add = add_scaled(tuple((e, e // 2 % 2) for e in range(num_sums)))
    num_parts, num_factors = num_sums if is_settled else 1, NOTHING + 1
    num_scales, num_zeros = max(1, chunk // 4), max(1, zeros_chunk // 4)

    @device_function
    def multiply_tile(sums, ring, stage, phase, thread, shares, num_steps, nothing):
        (shared, full, ready, empty), (warp, lane) = ring, thread
        first = cuda.local.array(_REGISTERS, uint32)
        words, scales = cuda.local.array(8, uint32), cuda.local.array(num_scales, uint32)
        zeros, factors = cuda.local.array(num_zeros, uint32), cuda.local.array(num_factors, uint32)
        places, parts = cuda.local.array(3, uint32), cuda.local.array(num_parts, float32)
        row_factors = cuda.local.array(2, float32)
        factors[NOTHING] = nothing
        if is_settled:
            for e in range(num_sums):
                sums[e] = float32(0.0)
        own = uint32(warp * uint32(slots) * uint32(TILE_ROWS * halves))
        of_lane = lane >> uint32(2)
        if halves == 2:
            of_lane = uint32(of_lane * uint32(2) + ((lane & uint32(3)) >> uint32(1)))
        own_scales = uint32(shared + uint32(scales_at) + uint32(own + of_lane) * uint32(chunk))
        own_zeros = uint32(shared + uint32(scales_at + _PAIRS * slots * TILE_ROWS * halves * chunk))
        own_zeros = uint32(own_zeros + uint32(own + of_lane) * uint32(zeros_chunk))
        own_words = uint32(shared + warp * uint32(2 * slots * TILE_BYTES) + lane * uint32(16))
        first_x, added = describe(uint32(shared + uint32(weight_bytes))), sums
        if is_settled:
            added = parts
        last, count, kept, goes_on = stage, uint32(0), (words, scales, zeros), True
        while goes_on:  # else ptxas sees sums of no stage, and lets products wait for each other
            mbarrier.wait(uint32(full + stage * uint32(8)), phase)
            places[0] = uint32(own_words + stage * uint32(size))
            places[1] = uint32(own_scales + stage * uint32(scale_bytes))
            places[2] = uint32(own_zeros + stage * uint32(scale_bytes))
            wait_for_all(added)
            unpack_first((first, kept, factors, places))
            if count > uint32(0) and lane < shares:
                mbarrier.arrive_read(uint32(empty + last * uint32(8)))
            if is_settled:
                if count > uint32(0):
                    add(sums, parts, row_factors)
                row_factors[0], row_factors[1] = unpack_scales(scales[0])
            mbarrier.wait(uint32(ready + stage * uint32(8)), phase)
            x = wgmma.advance(first_x, uint32(stage * uint32(size // 16)))
            if is_settled:
                begin(added, first, x)
            else:
                multiply(added, first, x, count)
            wait_for_all(added)
            split_schedule(count)  # else the second half is unpacked early, which takes registers
            unpack_second((first, kept, factors, places))
            multiply(added, first, wgmma.advance(x, uint32(box_bytes // 16)), uint32(1))
            last = stage
            stage, phase = next_stage(stage, phase)
            count = uint32(count + uint32(1))
            goes_on = count < num_steps
        wait_for_all(added)
        if is_settled:
            add(sums, parts, row_factors)
        if not holds and lane < shares:
            mbarrier.arrive_read(uint32(empty + last * uint32(8)))
        return stage, phase, last

    return multiply_tile


@functools.cache
def packed_weight(dtype: str, block: Block, *, is_gated: bool) -> FewWeight:
    """A packed weight, for x of a type."""
    packing = block.packing
    assert packing is not None
    ask_ahead, load_tile = loaders(block, _weight_loader(dtype, block, is_gated=is_gated))
    stream = packed_stream(packing, dtype, is_gated, 1)
    multiply_tile = _multiplier(dtype, block, is_settled=settles(packing, block.width // 16))
    return FewWeight(ask_ahead, load_tile, _arranger(block), multiply_tile, (stream.scale_columns, stream.scale_column))
