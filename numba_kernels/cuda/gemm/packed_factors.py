"""One row times a packed weight: the forms of x and the weight for tensor cores.

Lesson: the choice of the factor that is made to fit the other. Unpacking costs more than memory does where each pair of
numbers is shifted, masked, centred and scaled (`skinny`), and `mma.sync` computes 8 columns where one is needed. So

    digits    integers, and e2m1, which is half an integer: as int8, which takes a shift and a `lop3` for four numbers.
              x becomes a whole number of 23 bits, times a power of two that brings its largest number below 2^22, and
              that three digits of 8 bits, in three of the columns. Sums of digits are exact in int32, until a group's
              scale multiplies them. Numbers below 2^-23 of the largest are lost
    halves    e4m3: as float16, by moving its fields. x becomes float16, its largest number 2^14, the same in all
              columns; numbers of at least 2^-31 of that are kept

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
from numba_kernels.cuda.intrinsics.element_types import SHIFTS
from numba_kernels.cuda.intrinsics.fragments import load_all, multiply_all
from numba_kernels.cuda.intrinsics.math import minimum_u32
from numba_kernels.cuda.intrinsics.unpack import moved_all
from numba_kernels.cuda.intrinsics.unpack_bytes import BYTE_ORDER, BYTES_SHIFT, bytes_all
from numba_kernels.cuda.intrinsics.warp import shuffle_xor_f32
from numba_kernels.cuda.packing import Packing

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

_PLANES = 3  # digits of a number
_ROUNDS = 1.5 * 2.0**23  # float32 from here on are whole numbers, and that far up or down have its exponent
_DIGITS = 0x00408080  # turns such a number's low bytes into its digits, 128 too large: its own are 0x400000
_NOTHING, _SIGNS = 0x00808080, 0x80808080
_LARGEST_WHOLE, _LARGEST_HALF = 21, 14  # the exponent of x's largest number
_INFINITE = 0x7F80

as_float = instruction("mov.b32 $0, $1;", "f", "r", is_pure=True)
_bytes_of = instruction("prmt.b32 $0, $1, $2, $3;", "r", "r r r", is_pure=True)


@dataclass(frozen=True, slots=True)
class Factors:
    """Device functions that stage a row in shared memory, and take a step of 32 of K.

    Attributes:
        planes: that a row is staged in, one after the other.
        plane_bytes: of each number in a plane.
        part_type: of a group's sums; `num_parts` of them a lane.
        scale_by: ``largest magnitude's bits -> (factor of x, factor of sums)``.
        stage: ``(x_row, target, part, parts, k, padded, factor, lane)``: this warp's chunks of a row go to shared
            memory, zeros after k.
        place: ``(target, padded, lane) -> address`` of the lane's first numbers.
        step_taker: ``(first word of a slot, step) -> (parts, pairs, x_words, words, x_at)``, a device function.
        settle: ``(sums, parts, upper, lower)``: a group's sums, times the scales of rows g and g + 8.
        finish: ``(sums, lane)``: reduces them over the lanes of a row.
        shift: a power of two that sums lack.
    """

    planes: int
    plane_bytes: int
    part_type: Any
    num_parts: int
    scale_by: Any
    stage: Any
    place: Any
    step_taker: Any
    settle: Any
    finish: Any
    shift: int


def factors_of(packing: Packing) -> Factors:
    """Raises ValueError for a packing without one."""
    if packing.element in BYTE_ORDER:
        return _digits(packing.element, packing.lane_words)
    if packing.element == "e4m3":
        return _halves(packing.element, packing.lane_words)
    raise ValueError(f"packing: one row of bfloat16 is not multiplied by {packing.element}")


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
def _digits(element: str, lane_words: int) -> Factors:
    """x: three planes, each of them 8 bytes of a lane's two steps one after the other, lane after lane."""
    first, second = BYTE_ORDER[element]
    has_signs = element == "e2m1"  # magnitudes of positive and of negative numbers, each with sums of its own
    num_parts = 8 if has_signs else 4
    multiply = multiply_bytes("s8", ((0, (0, 1, 2, 3), (0, 1)),))
    multiply_odd = multiply_bytes("s8", ((0, (0, 1, 2, 3), (2, 3)),))
    if has_signs:
        multiply = multiply_bytes("s8", ((0, (0, 1, 2, 3), (0, 1)), (4, (4, 5, 6, 7), (0, 1))))
        multiply_odd = multiply_bytes("s8", ((0, (0, 1, 2, 3), (2, 3)), (4, (4, 5, 6, 7), (2, 3))))

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
    def stage(x_row, target, part, parts, k, padded, factor, lane):
        numbers = cuda.local.array(8, uint32)
        at = uint32((part * uint32(32) + lane) * uint32(8))
        while at < padded:
            for e in range(8):
                numbers[e] = uint32(_NOTHING)
            if at < k:
                words = memory.load_4xb32(x_row + uint64(at) * uint64(2))
                for e in range(4):
                    low, high = convert.unpack_bf16(words[e])
                    numbers[2 * e] = whole(low, factor)
                    numbers[2 * e + 1] = whole(high, factor)
            a, b, c = planes_of(numbers[first[0]], numbers[first[1]], numbers[first[2]], numbers[first[3]])
            d, e, f = planes_of(numbers[second[0]], numbers[second[1]], numbers[second[2]], numbers[second[3]])
            # Step at // 32, lane (at // 8) % 4 of a row: two steps are 64 bytes of a plane.
            inside = uint32(((at & uint32(24)) << uint32(1)) | ((at & uint32(32)) >> uint32(2)))
            place = uint32(target + uint32((at >> uint32(6)) << uint32(6)) + inside)
            memory.shared_store_2xb32(place, (a, d))
            memory.shared_store_2xb32(uint32(place + padded), (b, e))
            memory.shared_store_2xb32(uint32(place + uint32(2) * padded), (c, f))
            at = uint32(at + parts * uint32(256))

    @device_function
    def place(target, padded, lane):
        # Columns 0, 2 and 4 are the digits': lane 4 g + t has column g of x, and sums of column 2 t. The others' are
        # unused.
        plane = minimum_u32(uint32(lane >> uint32(3)), uint32(_PLANES - 1))
        return uint32(target + plane * padded + (lane & uint32(3)) * uint32(16))

    def step_taker(word: int, step: int) -> Any:
        unpack = bytes_all(element, word + lane_words * step, word + 4 + lane_words * step)
        load_x = load_all("shared", ((0, 0, step // 2 * 64),))
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
        if has_signs:
            sums[0] += f32_from_s32(uint32(parts[0] - parts[4])) * upper
            sums[1] += f32_from_s32(uint32(parts[2] - parts[6])) * lower
        else:
            sums[0] += f32_from_s32(parts[0]) * upper
            sums[1] += f32_from_s32(parts[2]) * lower
        for e in range(num_parts):
            parts[e] = uint32(0)

    @device_function
    def finish(sums, lane):
        digit = uint32(lane & uint32(3))
        factor = as_float(uint32(uint32(uint32(127 + 16) - digit * uint32(8)) << uint32(23)))
        for e in range(2):
            total = sums[e] * factor if digit < uint32(_PLANES) else float32(0.0)
            total += shuffle_xor_f32(total, uint32(1))
            sums[e] = total + shuffle_xor_f32(total, uint32(2))

    return Factors(
        _PLANES, 1, uint32, num_parts, _scaler(_LARGEST_WHOLE), stage, place, step_taker, settle, finish,
        BYTES_SHIFT[element],
    )  # fmt: skip


@functools.cache
def _halves(element: str, lane_words: int) -> Factors:
    multiply = multiply_all("f16", ((0, (0, 4, 1, 5), (0, 1)), (0, (2, 6, 3, 7), (2, 3))))

    @device_function
    def stage(x_row, target, part, parts, k, padded, factor, lane):
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

    @device_function
    def place(target, padded, lane):
        return uint32(target + (lane & uint32(3)) * uint32(16))

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
        for e in range(4):
            parts[e] = float32(0.0)

    @device_function
    def finish(sums, lane):
        pass

    return Factors(
        1, 2, float32, 4, _scaler(_LARGEST_HALF), stage, place, step_taker, settle, finish, SHIFTS[element, "f16"]
    )
