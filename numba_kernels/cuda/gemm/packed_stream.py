"""One row times a packed weight: how a warp reads 16 rows of the weight, and what x becomes for that.

What it teaches: which factor is unpacked to what. Unpacking costs more than memory does where each pair of numbers is
shifted, masked, centred and scaled (`few_rows`). Here

- x becomes float16, times a power of two that brings its largest number to 2^14: nothing is lost that is at least
  2^-31 of that. For float16 4 and 8 bits need no more than fields moved or a unit's exponent in front (`raise_all`);
- integers are not centred: x times the unit and the zero point is added up by tensor cores, too, by ones, and taken
  from the sum of a group;
- a group's scale multiplies its sum in float32, not its numbers;
- the weight is the first factor of `mma.sync`, 16 rows of it, x the second, the same in all 8 columns: no register
  moves before it is multiplied.

A warp has `AHEAD` slots of its part of K on their way in registers, half as many where they have many scales. Rows
are bfloat16; groups of 16, whose numbers meet within one product, and packings with zero points of their own have no
reader.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element_types import INTEGERS, SHIFTS
from numba_kernels.cuda.intrinsics.fragments import load_all, multiply_all
from numba_kernels.cuda.intrinsics.integer import minimum_u32
from numba_kernels.cuda.intrinsics.memory import load_f32
from numba_kernels.cuda.intrinsics.unpack import RAISED, raise_all
from numba_kernels.cuda.intrinsics.warp import maximum_u32_of_warp
from numba_kernels.cuda.packed_sections import sections_of
from numba_kernels.cuda.packing import TILE_BYTES, TILE_ROWS, Packing, packing_of

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

DTYPE = "bf16"  # of rows
ROWS = 16  # of a weight, that a warp multiplies
AHEAD = 4
NUM_WORDS = 8 * AHEAD  # of a lane, on their way
MOST_SHARED_BYTES = 96 << 10
_FEW_SCALE_BYTES = 8  # of a lane's two rows and a slot: with more of them registers become few
_STEP_BYTES = 64  # of 32 numbers of x
_LARGEST = 14  # the exponent of x's largest number
_ONES = 0x3C003C00

_as_float = instruction("mov.b32 $0, $1;", "f", "r", is_pure=True)


@dataclass(frozen=True, slots=True)
class PackedReader:
    """Device functions of a packing, and the registers of a lane.

    Attributes:
        num_scale_words: of all slots, at least 1.
        begin: ``(words, scales, rows, scale_rows, weight, tile, n, k, first, last, lane)``: asks for the first slots.
        begin_early: the same in front of `wait_for_previous_grid`.
        multiply: ``(sums, words, scales, rows, scale_rows, x, first, last)``: sums[0] and sums[1] are those of rows g
            and g + 8 of the tile, without the rows' scales; x is the shared address of the lane's numbers.
        row_scale: ``(weight, n, k, row) -> number``.
        slots: ``k -> slots``.
        shift: a power of two that sums lack.
    """

    num_scale_words: int
    begin: Any
    begin_early: Any
    multiply: Any
    row_scale: Any
    slots: Any
    shift: int


@functools.cache
def packed_reader(weight_name: str) -> PackedReader:
    packing = packing_of(weight_name)
    assert packing is not None
    find, steps, is_grouped = sections_of(packing, DTYPE), packing.steps, packing.group > 0
    ahead = AHEAD if packing.chunk_bytes(DTYPE) <= _FEW_SCALE_BYTES else AHEAD // 2
    has_more = ahead > 2
    scale_words, scale_step = packing.chunk_bytes(DTYPE) // 4, TILE_ROWS * packing.chunk_bytes(DTYPE)
    is_integer, slot_elements = packing.element in INTEGERS, packing.slot
    offset = -float(RAISED[packing.element] + (1 << (8 if packing.element == "u8" else 4)) // 2) if is_integer else 0.0
    of_scale = 2.0 ** -SHIFTS.get((packing.element, DTYPE), 0)  # what a kept scale is too large by
    is_exponent = packing.scale == "exponent"

    def loader(i: int, how: str = "stream") -> Any:
        load_words = load_all(how, tuple((8 * i + 4 * r, r, i * TILE_BYTES) for r in range(2)))
        load_scales = load_all(how, ((i * scale_words, 0, i * scale_step),), scale_words) if is_grouped else None

        @device_function
        def load(words, scales, rows, scale_rows):
            if is_grouped:
                load_scales(scales, scale_rows)
            load_words(words, rows)

        return load

    @device_function
    def settle(sums, parts, totals, upper, lower):
        """A group's sums, times the scales of rows g and g + 8."""
        if is_integer:
            sums[0] += (parts[0] + totals[0] * float32(offset)) * upper
            sums[1] += (parts[2] + totals[0] * float32(offset)) * lower
        else:
            sums[0] += parts[0] * upper
            sums[1] += parts[2] * lower
        for e in range(4):
            parts[e] = float32(0.0)
            totals[e] = float32(0.0)

    def scale_reader(i: int, group: int) -> Any:
        """Of the slot's group of that number: the scales of rows g and g + 8."""
        if is_exponent:
            word, up = i * scale_words + group // 2, (16 * (group % 2), 16 * (group % 2) + 8)

            @device_function
            def read(scales):
                upper = _as_float(uint32((scales[word] >> uint32(up[0])) & uint32(0xFF)) << uint32(23))
                lower = _as_float(uint32((scales[word] >> uint32(up[1])) & uint32(0xFF)) << uint32(23))
                return upper * float32(of_scale), lower * float32(of_scale)

        else:
            word = i * scale_words + group

            @device_function
            def read(scales):
                upper = _as_float(uint32(scales[word] << uint32(16)))
                lower = _as_float(uint32(scales[word] & uint32(0xFFFF0000)))
                return upper * float32(of_scale), lower * float32(of_scale)

        return read

    def step_taker(i: int, step: int) -> Any:
        raise_pairs = raise_all(
            packing.element, tuple((4 * r, 8 * i + 4 * r + packing.lane_words * step) for r in range(2))
        )
        load_x = load_all("shared", ((0, 0, step * _STEP_BYTES),))
        multiply_tile = multiply_all("f16", ((0, (0, 4, 1, 5), (0, 1)), (0, (2, 6, 3, 7), (2, 3))))
        add_up = multiply_all("f16", ((0, (0, 0, 0, 0), (0, 1)), (0, (0, 0, 0, 0), (2, 3))))
        ends_group = is_grouped and (step + 1) * 32 % packing.kept_group == 0
        read = scale_reader(i, step * 32 // packing.kept_group) if ends_group else None

        @device_function
        def take_step(sums, parts, totals, pairs, ones, x_words, words, scales, x_at):
            load_x(x_words, x_at)
            raise_pairs(pairs, words)
            multiply_tile(parts, pairs, x_words)
            if is_integer:
                add_up(totals, ones, x_words)
            if ends_group:
                upper, lower = read(scales)
                settle(sums, parts, totals, upper, lower)

        return take_step

    def slot_taker(i: int) -> Any:
        takers: list[Any] = [step_taker(i, step) for step in range(steps)] + [None] * (4 - steps)
        take_0, take_1, take_2, take_3 = takers
        has_four = steps == 4

        @device_function
        def take_slot(sums, parts, totals, pairs, ones, x_words, words, scales, x_at):
            take_0(sums, parts, totals, pairs, ones, x_words, words, scales, x_at)
            take_1(sums, parts, totals, pairs, ones, x_words, words, scales, x_at)
            if has_four:
                take_2(sums, parts, totals, pairs, ones, x_words, words, scales, x_at)
                take_3(sums, parts, totals, pairs, ones, x_words, words, scales, x_at)

        return take_slot

    load_0, load_1, load_2, load_3 = (loader(i) for i in range(AHEAD))
    slot_0, slot_1, slot_2, slot_3 = (slot_taker(i) for i in range(AHEAD))
    slot_bytes = slot_elements * 2  # of x

    def beginner(how: str) -> Any:
        ask_0, ask_1, ask_2, ask_3 = (loader(i, how) for i in range(AHEAD))

        @device_function
        def begin(words, scales, rows, scale_rows, weight, tile, n, k, first, last, lane):
            all_words, all_scales, _, _, slots = find(weight, n, k)
            for r in range(2):
                at = (uint64(tile * uint32(2) + uint32(r)) * uint64(slots) + uint64(first)) * uint64(TILE_BYTES)
                rows[r] = all_words + at + uint64(lane * uint32(16))
            at = (uint64(tile) * uint64(slots) + uint64(first)) * uint64(scale_step)
            scale_rows[0] = all_scales + at + uint64(lane >> uint32(2)) * uint64(4 * scale_words)
            if first < last:
                ask_0(words, scales, rows, scale_rows)
            if first + uint32(1) < last:
                ask_1(words, scales, rows, scale_rows)
            if has_more:
                if first + uint32(2) < last:
                    ask_2(words, scales, rows, scale_rows)
                if first + uint32(3) < last:
                    ask_3(words, scales, rows, scale_rows)

        return begin

    @device_function
    def multiply(sums, words, scales, rows, scale_rows, x, first, last):
        parts, totals = cuda.local.array(4, float32), cuda.local.array(4, float32)
        pairs, ones, x_words = cuda.local.array(8, uint32), cuda.local.array(1, uint32), cuda.local.array(4, uint32)
        x_at = cuda.local.array(1, uint32)
        ones[0] = uint32(_ONES)
        for e in range(4):
            parts[e] = float32(0.0)
            totals[e] = float32(0.0)
        sums[0] = float32(0.0)
        sums[1] = float32(0.0)
        x_at[0] = uint32(x + first * uint32(slot_bytes))
        slot = first
        while slot < last:
            rows[0] += uint64(ahead * TILE_BYTES)
            rows[1] += uint64(ahead * TILE_BYTES)
            scale_rows[0] += uint64(ahead * scale_step)
            left = uint32(last - slot)
            slot_0(sums, parts, totals, pairs, ones, x_words, words, scales, x_at)
            x_at[0] = uint32(x_at[0] + uint32(slot_bytes))
            if left > uint32(ahead):
                load_0(words, scales, rows, scale_rows)
            if left > uint32(1):
                slot_1(sums, parts, totals, pairs, ones, x_words, words, scales, x_at)
                x_at[0] = uint32(x_at[0] + uint32(slot_bytes))
                if left > uint32(ahead + 1):
                    load_1(words, scales, rows, scale_rows)
            if has_more and left > uint32(2):
                slot_2(sums, parts, totals, pairs, ones, x_words, words, scales, x_at)
                x_at[0] = uint32(x_at[0] + uint32(slot_bytes))
                if left > uint32(ahead + 2):
                    load_2(words, scales, rows, scale_rows)
            if has_more and left > uint32(3):
                slot_3(sums, parts, totals, pairs, ones, x_words, words, scales, x_at)
                x_at[0] = uint32(x_at[0] + uint32(slot_bytes))
                if left > uint32(ahead + 3):
                    load_3(words, scales, rows, scale_rows)
            slot = uint32(slot + uint32(ahead))
        if not is_grouped:
            settle(sums, parts, totals, float32(1.0), float32(1.0))

    @device_function
    def row_scale(weight, n, k, row):
        return load_f32(find(weight, n, k)[3] + uint64(row) * uint64(4))

    slots_of = device_function(lambda k: uint32(k + uint32(slot_elements - 1)) // uint32(slot_elements))
    shift = SHIFTS.get((packing.element, "f16"), 0)
    return PackedReader(
        max(1, AHEAD * scale_words), beginner("stream"), beginner("stream_early"), multiply, row_scale, slots_of, shift
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
def factors(most):
    """(the power of two that x is multiplied by, what sums are multiplied by) for a largest magnitude's bits."""
    field = minimum_u32(uint32(uint32(254 + _LARGEST) - (most >> uint32(7))), uint32(253))
    return _as_float(uint32(field << uint32(23))), _as_float(uint32(uint32(uint32(254) - field) << uint32(23)))


@device_function
def stage(x_row, target, part, parts, k, padded, factor, lane):
    """This warp's chunks of a row go to shared memory as float16, zeros behind k."""
    at = uint32((part * uint32(32) + lane) * uint32(8))
    while at < padded:
        a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
        if at < k:
            words = memory.load_4xb32(x_row + uint64(at) * uint64(2))
            low, high = convert.unpack_bf16(words[0])
            a = convert.pack_f16(low * factor, high * factor)
            low, high = convert.unpack_bf16(words[1])
            b = convert.pack_f16(low * factor, high * factor)
            low, high = convert.unpack_bf16(words[2])
            c = convert.pack_f16(low * factor, high * factor)
            low, high = convert.unpack_bf16(words[3])
            d = convert.pack_f16(low * factor, high * factor)
        memory.shared_store_4xb32(uint32(target + at * uint32(2)), (a, b, c, d))
        at = uint32(at + parts * uint32(256))


def can_read(packing: Packing | None) -> bool:
    """Whether there is a reader of a packing."""
    return packing is not None and packing.group != 16 and not packing.has_zeros


def row_bytes(packing: Packing, depth: int) -> int:
    """Of a row in shared memory."""
    return -(-depth // packing.slot) * packing.slot * 2
