"""One to eight rows times a packed weight: a warp's reads of 16 rows of it. `packed_factors` has the forms of both
factors.

A warp has `AHEAD` slots of its part of K in flight in registers, half as many where they have many scales. If its block
goes on to other rows of the weight, their first slots take the place of the last ones of these, so that loads never
pause. A group's scale multiplies its sum in float32, not its numbers. Rows are bfloat16; groups of 16, whose numbers
meet within one product, and packings with zero points of their own have no reader.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.packed_factors import Factors, as_float, factors_of, load_row, times_norm
from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.device import device_function, in_turn
from numba_kernels.cuda.intrinsics.element_types import SHIFTS
from numba_kernels.cuda.intrinsics.fragments import load_all
from numba_kernels.cuda.intrinsics.memory import load_f32
from numba_kernels.cuda.intrinsics.warp import maximum_u32_of_warp, warp_sum
from numba_kernels.cuda.packed_sections import sections_of
from numba_kernels.cuda.packing import TILE_BYTES, TILE_ROWS, Packing, packing_of

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

DTYPE = "bf16"  # of rows
ROWS = 16  # of a weight, that a warp multiplies
AHEAD = 4
NUM_WORDS = 8 * AHEAD  # of a lane, in flight
_FEW_SCALE_BYTES = 8  # of a lane's two rows and a slot: with more of them registers become few


@dataclass(frozen=True, slots=True)
class PackedReader:
    """Device functions of a packing, and the registers of a lane.

    Attributes:
        factors: how x is staged.
        of_sums: what finished sums are multiplied by.
        num_scale_words: of all slots, at least 1.
        aim: ``(rows, scale_rows, weight, tile, n, k, first, lane)``: the addresses of a tile's slots.
        begin: ``(words, scales, rows, scale_rows, first, last)``: loads the first slots.
        begin_early: the same before `wait_for_previous_grid`.
        multiply: ``(sums, (words, scales), (rows, scale_rows), (next_rows, next_scale_rows), goes_on, x, (first,
            last))``: the lane's sums of the tile's rows, which `factors.leave` completes, without the rows' scales. `x`
            is (where `factors` places the lane, bytes from there to the second product's x). With `goes_on` not 0, the
            next tile's first slots are loaded from `aim`'s addresses, and `rows` become its own.
        take_slot: ``(sums, parts, pairs, x_words, words, scales, x_at)``: multiplies one slot, the first of `words`.
        row_scale: ``(weight, n, k, row) -> number``.
        slots: ``k -> slots``.
    """

    factors: Factors
    of_sums: float
    num_scale_words: int
    aim: Any
    begin: Any
    begin_early: Any
    multiply: Any
    take_slot: Any
    row_scale: Any
    slots: Any


@functools.cache
def packed_reader(weight_name: str, num_rows: int = 1) -> PackedReader:
    """The functions for so many rows of x, of `row_counts`."""
    packing = packing_of(weight_name)
    assert packing is not None
    find, steps, is_grouped = sections_of(packing, DTYPE), packing.steps, packing.group > 0
    ahead = AHEAD if packing.chunk_bytes(DTYPE) <= _FEW_SCALE_BYTES else AHEAD // 2
    scale_words, scale_step = packing.chunk_bytes(DTYPE) // 4, TILE_ROWS * packing.chunk_bytes(DTYPE)
    factors, slot_elements = factors_of(packing, num_rows), packing.slot
    part_type, num_parts, num_sums = factors.part_type, factors.num_parts, factors.num_sums
    num_x, num_x_words = factors.num_x, 4 * factors.num_x
    settle = factors.settle
    is_exponent = packing.scale == "exponent"
    of_scale = 2.0 ** -SHIFTS.get((packing.element, DTYPE), 0)  # what a kept scale is too large by
    of_sums = of_scale if is_exponent else 1.0  # sums have room for such exponents (`EXPONENT_ROOM`)

    def loader(i: int, how: str = "stream") -> Any:
        load_words = load_all(how, tuple((8 * i + 4 * r, r, i * TILE_BYTES) for r in range(2)))
        load_scales = load_all(how, ((i * scale_words, 0, i * scale_step),), scale_words) if is_grouped else None

        @device_function
        def load(words, scales, rows, scale_rows):
            if is_grouped:
                load_scales(scales, scale_rows)
            load_words(words, rows)

        return load

    def scale_reader(i: int, group: int) -> Any:
        """Scales of rows g and g + 8, for the slot's group of that number."""
        if is_exponent:
            word, up = i * scale_words + group // 2, (16 * (group % 2), 16 * (group % 2) + 8)

            @device_function
            def read(scales):
                upper = as_float(uint32((scales[word] >> uint32(up[0])) & uint32(0xFF)) << uint32(23))
                lower = as_float(uint32((scales[word] >> uint32(up[1])) & uint32(0xFF)) << uint32(23))
                return upper, lower

        else:
            word = i * scale_words + group

            @device_function
            def read(scales):
                upper = as_float(uint32(scales[word] << uint32(16)))
                lower = as_float(uint32(scales[word] & uint32(0xFFFF0000)))
                return upper * float32(of_scale), lower * float32(of_scale)

        return read

    def step_taker(i: int, step: int) -> Any:
        take = factors.step_taker(8 * i, step)
        ends_group = is_grouped and (step + 1) * 32 % packing.kept_group == 0
        read = scale_reader(i, step * 32 // packing.kept_group) if ends_group else None

        @device_function
        def take_step(state):
            sums, parts, pairs, x_words, words, scales, x_at = state
            take(parts, pairs, x_words, words, x_at)
            if ends_group:
                upper, lower = read(scales)
                settle(sums, parts, upper, lower)

        return take_step

    def slot_taker(i: int) -> Any:
        take = in_turn([step_taker(i, step) for step in range(steps)])

        @device_function
        def take_slot(sums, parts, pairs, x_words, words, scales, x_at):
            take((sums, parts, pairs, x_words, words, scales, x_at))

        return take_slot

    slot_bytes = slot_elements * factors.plane_bytes

    @device_function
    def aim(rows, scale_rows, weight, tile, n, k, first, lane):
        all_words, all_scales, _, _, slots = find(weight, n, k)
        for r in range(2):
            at = (uint64(tile * uint32(2) + uint32(r)) * uint64(slots) + uint64(first)) * uint64(TILE_BYTES)
            rows[r] = all_words + at + uint64(lane * uint32(16))
        at = (uint64(tile) * uint64(slots) + uint64(first)) * uint64(scale_step)
        scale_rows[0] = all_scales + at + uint64(lane >> uint32(2)) * uint64(4 * scale_words)

    def beginner(how: str) -> Any:
        def asker(i: int) -> Any:
            load = loader(i, how)

            @device_function
            def ask(state):
                words, scales, rows, scale_rows, first, last = state
                if first + uint32(i) < last:
                    load(words, scales, rows, scale_rows)

            return ask

        ask_all = in_turn([asker(i) for i in range(ahead)])

        @device_function
        def begin(words, scales, rows, scale_rows, first, last):
            ask_all((words, scales, rows, scale_rows, first, last))

        return begin

    def turn_taker(i: int) -> Any:
        """One slot, whose place is filled again once it is used: with this tile's, or with the next one's."""
        load, take = loader(i), slot_taker(i)

        @device_function
        def take_turn(state):
            sums, parts, pairs, x_words, words, scales, x_at, rows, scale_rows, next_rows, next_scale_rows = state[:11]
            goes_on, left, count = state[11:]
            if left > uint32(i):
                take(sums, parts, pairs, x_words, words, scales, x_at)
                for j in range(num_x):
                    x_at[j] = uint32(x_at[j] + uint32(slot_bytes))
                if left > uint32(ahead + i):
                    load(words, scales, rows, scale_rows)
                elif goes_on != uint32(0) and uint32(i) < count:
                    load(words, scales, next_rows, next_scale_rows)

        return take_turn

    take_turns = in_turn([turn_taker(i) for i in range(ahead)])

    @device_function
    def multiply(sums, kept, places, next_places, goes_on, x, span):
        (words, scales), (rows, scale_rows), (next_rows, next_scale_rows) = kept, places, next_places
        (x_place, apart), (first, last) = x, span
        parts = cuda.local.array(num_parts, part_type)
        pairs, x_words = cuda.local.array(8, uint32), cuda.local.array(num_x_words, uint32)
        x_at = cuda.local.array(num_x, uint32)
        for e in range(num_parts):
            parts[e] = part_type(0)
        for e in range(num_sums):
            sums[e] = float32(0.0)
        for j in range(num_x):
            x_at[j] = uint32(x_place + first * uint32(slot_bytes) + uint32(j) * apart)
        slot, count = first, uint32(last - first)
        while slot < last:
            rows[0] += uint64(ahead * TILE_BYTES)
            rows[1] += uint64(ahead * TILE_BYTES)
            scale_rows[0] += uint64(ahead * scale_step)
            left = uint32(last - slot)
            take_turns((
                sums, parts, pairs, x_words, words, scales, x_at, rows, scale_rows, next_rows, next_scale_rows,
                goes_on, left, count,
            ))  # fmt: skip
            slot = uint32(slot + uint32(ahead))
        if not is_grouped:
            settle(sums, parts, float32(1.0), float32(1.0))
        for e in range(num_sums):
            sums[e] *= float32(of_sums)
        rows[0] = next_rows[0]
        rows[1] = next_rows[1]
        scale_rows[0] = next_scale_rows[0]

    @device_function
    def row_scale(weight, n, k, row):
        return load_f32(find(weight, n, k)[3] + uint64(row) * uint64(4))

    slots_of = device_function(lambda k: uint32(k + uint32(slot_elements - 1)) // uint32(slot_elements))
    return PackedReader(
        factors, of_sums, max(1, AHEAD * scale_words), aim, beginner("stream"), beginner("stream_early"), multiply,
        slot_taker(0), row_scale, slots_of,
    )  # fmt: skip


@device_function
def largest(x_row, part, parts, k, lane):
    """The largest magnitude's bits, among the chunks of 8 numbers of a row that are this warp's of so many."""
    most = uint32(0)
    at = uint32((part * uint32(32) + lane) * uint32(8))
    while at < k:
        words = memory.load_4xb32(x_row + uint64(at) * uint64(2))
        for e in range(4):
            most = max(most, words[e] & uint32(0x7FFF))
            most = max(most, (words[e] >> uint32(16)) & uint32(0x7FFF))
        at = uint32(at + parts * uint32(256))
    return maximum_u32_of_warp(most)


@device_function
def largest_normed(x_row, norm, part, parts, k, lane):
    """(the bits of the largest magnitude, cut to bfloat16, of this warp's chunks of a row times the norm's weights; the
    sum of the squares of the row's numbers themselves)."""
    most, squares = uint32(0), float32(0)
    at = uint32((part * uint32(32) + lane) * uint32(8))
    while at < k:
        values = load_row(x_row + uint64(at) * uint64(2))
        scaled = times_norm(values, norm, at)
        for e in range(8):
            squares += values[e] * values[e]
            most = max(most, (convert.bits_from_f32(scaled[e]) >> uint32(16)) & uint32(0x7FFF))
        at = uint32(at + parts * uint32(256))
    return maximum_u32_of_warp(most), warp_sum(squares)


def can_read(packing: Packing | None) -> bool:
    """Whether a packing has a reader."""
    return packing is not None and packing.group != 16 and not packing.has_zeros


def row_bytes(packing: Packing, depth: int) -> int:
    """Bytes of a row in shared memory."""
    factors = factors_of(packing)
    return -(-depth // packing.slot) * packing.slot * factors.planes * factors.plane_bytes
