"""One to eight rows times a packed weight: the forms of x and the weight for tensor cores.

Lesson: the choice of the factor that is made to fit the other. Unpacking costs more than memory does where each pair of
numbers is shifted, masked, centred and scaled (`skinny`), and `mma.sync` computes 8 columns where few are needed. So

    digits    integers: as int8, which takes a shift and a `lop3` for four numbers. x becomes a whole number of 23 bits,
              times a power of two that brings its largest number below 2^22, and that three digits of 8 bits, in three
              of the columns: a second row is free, two more rows are a second product, and a fifth is free in both.
              Sums of digits are exact in int32, until a group's scale multiplies them. Numbers below 2^-23 of the
              largest are lost
    halves    e4m3 and e2m1: as float16, by moving their fields. x becomes float16, its largest number 2^14, a row a
              column; numbers of at least 2^-31 of that are kept

Each row has its own largest number, and sums of its own: its bits do not depend on the others.

Neither moves a register before it is multiplied: the weight is the first factor, 16 rows of it, and x is staged in the
order that its bytes come in. A row of x with an infinity or NaN gives NaN.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.byte_mma import f32_from_s32, multiply_bytes
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import floats_loader, vector_loader
from numba_kernels.cuda.intrinsics.element_types import SHIFTS
from numba_kernels.cuda.intrinsics.fragments import load_all, multiply_all
from numba_kernels.cuda.intrinsics.math import minimum_u32
from numba_kernels.cuda.intrinsics.unpack import moved_all
from numba_kernels.cuda.intrinsics.unpack_bytes import BYTE_ORDER, BYTES_SHIFT, bytes_all
from numba_kernels.cuda.intrinsics.warp import shuffle_xor_f32
from numba_kernels.cuda.packing import Packing

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

ROW_GAP = 64  # bytes between rows in shared memory, so that two of them are in different banks
_PLANES = 3  # digits of a number
_ROUNDS = 1.5 * 2.0**23  # float32 from here on are whole numbers, and that far up or down have its exponent
_DIGITS = 0x00408080  # turns such a number's low bytes into its digits, 128 too large: its own are 0x400000
_NOTHING, _SIGNS = 0x00808080, 0x80808080
_LARGEST_WHOLE, _LARGEST_HALF = 21, 14  # the exponent of x's largest number
_INFINITE = 0x7F80

load_row, _load_weights = vector_loader("bf16"), floats_loader(8)
as_float = instruction("mov.b32 $0, $1;", "f", "r", is_pure=True)
_bytes_of = instruction("prmt.b32 $0, $1, $2, $3;", "r", "r r r", is_pure=True)


@dataclass(frozen=True, slots=True)
class Factors:
    """Device functions that stage a row in shared memory, and take a step of 32 of K.

    Attributes:
        num_x: products a step, each with an address of x of its own.
        planes: that a row is staged in, one after the other; the next row follows after `ROW_GAP`.
        plane_bytes: of each number in a plane.
        part_type: of a group's sums; `num_parts` of them a lane.
        num_sums: finished ones of a lane.
        scale_by: ``largest magnitude's bits -> (factor of x, factor of sums)``.
        stage: ``(x_row, norm, target, (part, parts, lane), k, padded, factor)``: this warp's chunks of `numbers_of` a
            row go to shared memory, zeros after k.
        place: ``(target, padded, lane) -> address`` of the lane's first numbers, for the first product.
        apart: ``(row_bytes, padded, lane) -> bytes`` from there to those for the second product.
        step_taker: ``(first word of a slot, step) -> (parts, pairs, x_words, words, x_at)``, a device function.
        settle: ``(sums, parts, upper, lower)``: a group's sums, times the scales of the weight's rows g and g + 8, are
            added to `sums`.
        leave: ``(sums, target, lane)``: the finished sums go to shared memory, float32, 16 for each row of x.
        place_of: ``index -> (row of x, row of the weight)``: which of these sums is the one of that number.
        shift: a power of two that sums lack.
    """

    num_x: int
    planes: int
    plane_bytes: int
    part_type: Any
    num_parts: int
    num_sums: int
    scale_by: Any
    stage: Any
    place: Any
    apart: Any
    step_taker: Any
    settle: Any
    leave: Any
    place_of: Any
    shift: int


_WEIGHT_ROWS = 16


def row_counts(packing: Packing) -> tuple[int, ...]:
    """The numbers of x's rows that there are functions for."""
    return (1, 2, 4, 5) if packing.element in BYTE_ORDER else (1, 2, 4, 8)


def factors_of(packing: Packing, rows: int = 1) -> Factors:
    """The functions for so many rows of x, of `row_counts`. Raises ValueError for a packing without them."""
    if packing.element in BYTE_ORDER:
        return _digits(packing.element, packing.lane_words, rows)
    if packing.element in ("e4m3", "e2m1"):
        return _halves(packing.element, packing.lane_words, rows)
    raise ValueError(f"packing: rows of bfloat16 are not multiplied by {packing.element}")


@device_function
def numbers_of(x_row, norm, at):
    """8 numbers of a row from `at` on, times the norm's weights, float32 at that address unless it is 0."""
    return times_norm(load_row(x_row + uint64(at) * uint64(2)), norm, at)


@device_function
def times_norm(values, norm, at):
    """8 numbers of a row from `at` on, times the norm's weights."""
    a, b, c, d, e, f, g, h = values
    if norm != uint64(0):
        weights = _load_weights(norm + uint64(at) * uint64(4))
        a *= weights[0]
        b *= weights[1]
        c *= weights[2]
        d *= weights[3]
        e *= weights[4]
        f *= weights[5]
        g *= weights[6]
        h *= weights[7]
    return a, b, c, d, e, f, g, h


def _scaler(largest: int) -> Any:
    @device_function
    def scale_by(most):
        field = minimum_u32(uint32(uint32(254 + largest) - (most >> uint32(7))), uint32(253))
        back = as_float(uint32(uint32(uint32(254) - field) << uint32(23)))
        if most >= uint32(_INFINITE):
            back = float32(float("nan"))
        return as_float(uint32(field << uint32(23))), back

    return scale_by


@functools.cache
def _digits(element: str, lane_words: int, rows: int) -> Factors:
    """x: three planes, each of them 8 bytes of a lane's two steps one after the other, lane after lane."""
    first, second = BYTE_ORDER[element]
    num_x, second_row, has_fifth = -(-min(rows, 4) // 2), min(rows - 1, 1), rows == 5
    num_parts, num_pairs = num_x * 4, min(rows, 4)  # of sums, in all lanes alike
    gap = ROW_GAP if has_fifth else 0  # after the first plane: lanes read two planes of the fifth row at once
    multiply, multiply_odd = (
        multiply_bytes("s8", tuple((4 * j, (0, 1, 2, 3), (4 * j + half, 4 * j + half + 1)) for j in range(num_x)))
        for half in (0, 2)
    )

    @device_function
    def whole(number, factor):
        """A whole number whose low three bytes are its digits, each 128 too large."""
        return uint32(convert.bits_from_f32(number * factor + float32(_ROUNDS)) + uint32(_DIGITS))

    @device_function
    def planes_of(a, b, c, d):
        """The first, second and third digits of four numbers."""
        low, high = _bytes_of(a, b, uint32(0x5140)), _bytes_of(c, d, uint32(0x5140))
        top = _bytes_of(_bytes_of(a, b, uint32(0x0062)), _bytes_of(c, d, uint32(0x0062)), uint32(0x5410))
        middle, last = _bytes_of(low, high, uint32(0x7632)), _bytes_of(low, high, uint32(0x5410))
        return uint32(top ^ uint32(_SIGNS)), uint32(middle ^ uint32(_SIGNS)), uint32(last ^ uint32(_SIGNS))

    @device_function
    def stage(x_row, norm, target, place_in, k, padded, factor):
        part, parts, lane = place_in
        numbers = cuda.local.array(8, uint32)
        at = uint32((part * uint32(32) + lane) * uint32(8))
        while at < padded:
            for e in range(8):
                numbers[e] = uint32(_NOTHING)
            if at < k:
                values = numbers_of(x_row, norm, at)
                for e in range(8):
                    numbers[e] = whole(values[e], factor)
            a, b, c = planes_of(numbers[first[0]], numbers[first[1]], numbers[first[2]], numbers[first[3]])
            d, e, f = planes_of(numbers[second[0]], numbers[second[1]], numbers[second[2]], numbers[second[3]])
            # Step at // 32, lane (at // 8) % 4 of a row: two steps are 64 bytes of a plane.
            inside = uint32(((at & uint32(24)) << uint32(1)) | ((at & uint32(32)) >> uint32(2)))
            place = uint32(target + uint32((at >> uint32(6)) << uint32(6)) + inside)
            memory.shared_store_2xb32(place, (a, d))
            memory.shared_store_2xb32(uint32(place + uint32(padded + uint32(gap))), (b, e))
            memory.shared_store_2xb32(uint32(place + uint32(uint32(2) * padded + uint32(gap))), (c, f))
            at = uint32(at + parts * uint32(256))

    @device_function
    def place(target, padded, lane):
        # Columns 0, 2 and 4 are the digits' of one row, 1, 3 and 5 the other's: lane 4 g + t has column g of x, and
        # sums of columns 2 t and 2 t + 1. A fifth row has the last two columns: two digits, in the second product one.
        plane = minimum_u32(uint32(lane >> uint32(3)), uint32(_PLANES - 1))
        row = uint32(lane >> uint32(2)) & uint32(second_row)
        if has_fifth and lane >= uint32(24):
            plane, row = row, uint32(4)
        row_at = uint32(target + row * uint32(padded * uint32(_PLANES) + uint32(ROW_GAP)))
        row_at = uint32(row_at + minimum_u32(plane, uint32(1)) * uint32(gap))
        return uint32(row_at + plane * padded + (lane & uint32(3)) * uint32(16))

    @device_function
    def apart(row_bytes, padded, lane):
        between = uint32(row_bytes * uint32(2))
        if has_fifth and lane >= uint32(24):
            between = uint32(padded * uint32(2) + uint32(gap)) if lane < uint32(28) else padded
        return between

    def step_taker(word: int, step: int) -> Any:
        unpack = bytes_all(element, word + lane_words * step, word + 4 + lane_words * step)
        load_x = load_all("shared", tuple((4 * j, j, step // 2 * 64) for j in range(num_x)))
        is_even = step % 2 == 0
        product = multiply if is_even else multiply_odd

        @device_function
        def take_step(parts, pairs, x_words, words, x_at):
            if is_even:
                load_x(x_words, x_at)
            unpack(pairs, words)
            product(parts, pairs, x_words)

        return take_step

    @device_function
    def settle(sums, parts, upper, lower):
        for r in range(num_pairs):
            at = 4 * (r // 2) + r % 2
            sums[2 * r] += f32_from_s32(parts[at]) * upper
            sums[2 * r + 1] += f32_from_s32(parts[at + 2]) * lower
        for e in range(num_parts):
            parts[e] = uint32(0)

    @device_function
    def leave(sums, target, lane):
        digit = uint32(lane & uint32(3))
        factor = as_float(uint32(uint32(uint32(127 + 16) - digit * uint32(8)) << uint32(23)))
        if has_fifth:  # all of its digits are lane 3's of four; lane 0 keeps it
            for e in range(2):
                fifth = sums[e] * float32(65536.0) + sums[e + 2] * float32(256.0) + sums[e + 4]
                sums[8 + e] = shuffle_xor_f32(fifth, uint32(3))
        for e in range(2 * num_pairs):
            total = sums[e] * factor if digit < uint32(_PLANES) else float32(0.0)
            total += shuffle_xor_f32(total, uint32(1))
            sums[e] = total + shuffle_xor_f32(total, uint32(2))
        if digit == uint32(0):
            for r in range(rows):
                at = uint32(target + lane + uint32(r * 4 * _WEIGHT_ROWS))  # of lane 4 g
                memory.shared_store_f32(at, sums[2 * r])
                memory.shared_store_f32(uint32(at + uint32(32)), sums[2 * r + 1])

    place_of = device_function(lambda index: (uint32(index >> uint32(4)), uint32(index & uint32(15))))
    return Factors(
        num_x, _PLANES, 1, uint32, num_parts, 2 * rows, _scaler(_LARGEST_WHOLE), stage, place, apart, step_taker,
        settle, leave, place_of, BYTES_SHIFT[element],
    )  # fmt: skip


@functools.cache
def _halves(element: str, lane_words: int, rows: int) -> Factors:
    num_sums = 2 * min(rows, 2)
    multiply = multiply_all("f16", ((0, (0, 4, 1, 5), (0, 1)), (0, (2, 6, 3, 7), (2, 3))))

    @device_function
    def stage(x_row, norm, target, place_in, k, padded, factor):
        part, parts, lane = place_in
        at = uint32((part * uint32(32) + lane) * uint32(8))
        while at < padded:
            a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            if at < k:
                values = numbers_of(x_row, norm, at)
                a = convert.pack_f16(values[0] * factor, values[1] * factor)
                b = convert.pack_f16(values[2] * factor, values[3] * factor)
                c = convert.pack_f16(values[4] * factor, values[5] * factor)
                d = convert.pack_f16(values[6] * factor, values[7] * factor)
            memory.shared_store_4xb32(uint32(target + at * uint32(2)), (a, b, c, d))
            at = uint32(at + parts * uint32(256))

    @device_function
    def place(target, padded, lane):
        # Lane 4 g + t has column g of x, and sums of columns 2 t and 2 t + 1.
        row = uint32(lane >> uint32(2)) & uint32(rows - 1)
        row_at = uint32(target + row * uint32(padded * uint32(2) + uint32(ROW_GAP)))
        return uint32(row_at + (lane & uint32(3)) * uint32(16))

    apart = device_function(lambda row_bytes, padded, lane: uint32(0))  # there is no second product

    def step_taker(word: int, step: int) -> Any:
        unpack = moved_all(element, tuple((4 * r, word + 4 * r + lane_words * step) for r in range(2)))
        load_x = load_all("shared", ((0, 0, step * 64),))

        @device_function
        def take_step(parts, pairs, x_words, words, x_at):
            load_x(x_words, x_at)
            unpack(pairs, words)
            multiply(parts, pairs, x_words)

        return take_step

    @device_function
    def settle(sums, parts, upper, lower):
        sums[0] += parts[0] * upper
        sums[1] += parts[2] * lower
        if rows > 1:
            sums[2] += parts[1] * upper
            sums[3] += parts[3] * lower
        for e in range(4):
            parts[e] = float32(0.0)

    half = max(1, rows // 2)  # even rows of x come first, and the columns of the upper four exchanged by eights: lanes
    # of a store are in different banks

    @device_function
    def leave(sums, target, lane):
        t = uint32(lane & uint32(3))
        at = uint32(target + t * uint32(4 * _WEIGHT_ROWS) + (uint32(lane & uint32(28)) ^ uint32((t >> uint32(1)) << 5)))
        for r in range(num_sums // 2):
            if uint32(t * uint32(2) + uint32(r)) < uint32(rows):
                memory.shared_store_f32(uint32(at + uint32(r * half * 4 * _WEIGHT_ROWS)), sums[2 * r])
                memory.shared_store_f32(
                    uint32((at ^ uint32(32)) + uint32(r * half * 4 * _WEIGHT_ROWS)), sums[2 * r + 1]
                )

    @device_function
    def place_of(index):
        at = uint32(index >> uint32(4))
        row = uint32(uint32(at % uint32(half)) * uint32(2) + uint32(at // uint32(half)))
        return row, uint32((index & uint32(15)) ^ uint32((row >> uint32(2)) << uint32(3)))

    return Factors(
        1, 1, 2, float32, 4, num_sums, _scaler(_LARGEST_HALF), stage, place, apart, step_taker, settle, leave, place_of,
        SHIFTS[element, "f16"],
    )  # fmt: skip
