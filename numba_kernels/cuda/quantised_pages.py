"""KV pages of a byte a number, "s8" and "e4m3", with a scale a token and head: written by rows, read by fragments.

A row x of a head's keys or values is stored as round(x / scale), scale = max |x| / 127, or / 448, ties to even: the
bytes and scales of the cpu (`numba_kernels.cpu.quantised_rows`), by the same arithmetic on all architectures. Scales
are float32 ``[num_blocks, num_kv_heads, block_size]``, of keys and of values.

**Fragments.** Bytes lie in shared memory as they lie in the page, and are widened in registers. `ldmatrix` gives a
lane 4 neighbouring bytes of a row of keys, 4 t to 4 t + 3: bytes 0 and 2 become the operand's first pair, 1 and 3 its
second. The tensor core takes them for columns 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 of 16: queries have their columns
exchanged alike (`column_exchanger`), once, which changes no sum. From transposed values a lane gets columns 2 g and 2 g
+ 1 of keys 2 t and 2 t + 1: bytes 0 and 2 are a pair of column 2 g, 1 and 3 one of column 2 g + 1. So the even columns
of 16 are one tile of results, the odd ones the next.

A key's scale multiplies its score, a value's its softmax weight, each with the factor that unpacking leaves out
(`page_factor`).
"""

from __future__ import annotations

import functools
from typing import Any

from numba import float32, uint32, uint64

from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.convert import bits_from_f32, f32_from_bits
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element_types import SHIFTS
from numba_kernels.cuda.intrinsics.math import maximum_u32
from numba_kernels.cuda.intrinsics.memory import (
    load_u8,
    shared_load_4xb32,
    shared_store_4xb32,
    store_2xb32,
    store_b8,
    store_b32,
)
from numba_kernels.cuda.intrinsics.rounded import divide, f32_from_u32, multiply
from numba_kernels.cuda.intrinsics.unpack import half_pair, unpack_all

PAGES = ("s8", "e4m3")
"""The types of pages that have scales."""

_LARGEST = {"s8": 127.0, "e4m3": 448.0}
_INFINITY_BITS = 0x7F800000
_LEAST = 1e-30  # a row below it counts as zeros: 448 / it is finite

_nearest = instruction("cvt.rni.s32.f32 $0, $1;", "r", "f", is_pure=True)


def page_factor(pages: str, dtype: str) -> float:
    """A scale's factor, for the numbers that `fragment_unpacker` makes."""
    return 2.0 ** SHIFTS[pages, dtype] if dtype == "f16" else 1.0


@functools.cache
def fragment_unpacker(pages: str, dtype: str, num_words: int) -> Any:
    """A device function ``(pairs, words, room)`` on arrays of uint32: word w becomes pairs 2 w (bytes 0 and 2) and
    2 w + 1; `room` has one element."""
    has_factor = pages == "e4m3" and dtype == "bf16"  # 2^-129 is too small to be summed
    plan = tuple((2 * word, word, 0 if has_factor else -1, -1) for word in range(0, num_words, 2))
    unpack = unpack_all(pages, dtype, plan, has_zeros=False)
    factor = uint32(half_pair(2.0 ** SHIFTS["e4m3", "bf16"], "bf16"))

    @device_function
    def unpack_words(pairs, words, room):
        room[0] = factor
        unpack(pairs, words, room, room)

    return unpack_words


@functools.cache
def column_exchanger(num_rows: int, columns: int, pitch: int, threads: int) -> Any:
    """A device function ``(tile, thread)``: in each 16 columns of 16 bits, those that a key's bytes have."""
    steps = columns // 16
    count = num_rows * steps

    @device_function
    def first_halves(a, b):
        return (a & uint32(0xFFFF)) | (b << uint32(16))

    @device_function
    def second_halves(a, b):
        return (a >> uint32(16)) | (b & uint32(0xFFFF0000))

    @device_function
    def exchange(tile, thread):
        index = thread
        while index < uint32(count):
            step = uint32(index // uint32(num_rows))  # neighbouring lanes take rows, in different banks
            place = uint32(tile + (index - step * uint32(num_rows)) * uint32(pitch) + step * uint32(32))
            a, b, c, d = shared_load_4xb32(place)
            e, f, g, h = shared_load_4xb32(uint32(place + uint32(16)))
            low = first_halves(a, b), first_halves(c, d), first_halves(e, f), first_halves(g, h)
            high = second_halves(a, b), second_halves(c, d), second_halves(e, f), second_halves(g, h)
            shared_store_4xb32(place, low)
            shared_store_4xb32(uint32(place + uint32(16)), high)
            index = uint32(index + uint32(threads))

    return exchange


@functools.cache
def byte_widener(pages: str) -> Any:
    """A device function from the bits of a number, in the low byte of a uint32, to float32."""
    if pages == "s8":
        return device_function(
            lambda bits: f32_from_u32((bits & uint32(0xFF)) ^ uint32(128)) - float32(128)  # exact
        )

    @device_function
    def widen(bits):
        fields = ((bits & uint32(0x80)) << uint32(24)) | ((bits & uint32(0x7F)) << uint32(20))
        return f32_from_bits(fields) * float32(2.0**120)

    return widen


@functools.cache
def page_element_loader(pages: str) -> Any:
    """A device function ``address -> float32`` of a number without its scale."""
    widen = byte_widener(pages)
    return device_function(lambda address: widen(load_u8(address)))


@device_function
def larger_bits(most, value):
    """The larger of `most`, bits of a number that is not negative, and those of |value|: NaN is more than infinity, and
    infinity than any number."""
    return maximum_u32(most, uint32(bits_from_f32(value) & uint32(0x7FFFFFFF)))


@functools.cache
def row_scaler(pages: str) -> Any:
    """A device function ``bits of the largest |x| -> (scale, factor)``: the row's scale, and its numbers' factor before
    rounding. A row with a NaN or an infinity has the scale NaN and the factor 0."""
    limit = float32(_LARGEST[pages])

    @device_function
    def scales(bits):
        largest = f32_from_bits(bits)
        scale = f32_from_bits(uint32(0x7FC00000))
        factor = float32(0)
        if bits < uint32(_INFINITY_BITS):
            scale = float32(0)
            if largest >= float32(_LEAST):
                scale = divide(largest, limit)
                factor = divide(limit, largest)
        return scale, factor

    return scales


@functools.cache
def _rounder(pages: str) -> Any:
    """A device function ``(value, factor) -> byte`` as uint32; 0 for the factor 0."""
    if pages == "s8":

        @device_function
        def to_s8(value, factor):
            bits = uint32(0)
            if factor != float32(0):
                bits = uint32(_nearest(multiply(value, factor)) & uint32(0xFF))
            return bits

        return to_s8

    @device_function
    def to_e4m3(value, factor):
        bits = uint32(0)
        if factor != float32(0):
            scaled = bits_from_f32(multiply(value, factor))
            size = uint32(scaled & uint32(0x7FFFFFFF))
            if size > uint32(0x43E00000):  # 448
                size = uint32(0x43E00000)
            if size < uint32(0x3C800000):  # 2^-6: in steps of the least subnormal number
                bits = _nearest(multiply(f32_from_bits(size), float32(512)))
            else:
                even = (size >> uint32(20)) & uint32(1)
                bits = uint32(((size + uint32(0x7FFFF) + even) >> uint32(20)) - uint32(120 * 8))
            bits = uint32(bits | ((scaled >> uint32(24)) & uint32(0x80)))
            if bits == uint32(0x80) and f32_from_bits(scaled) == float32(0):
                bits = uint32(0)
        return bits

    return to_e4m3


@functools.cache
def run_storer(pages: str, width: int) -> Any:
    """A device function ``(address, values, factor)`` that rounds and stores `width` (1, 4 or 8) neighbours."""
    to_byte = _rounder(pages)

    @device_function
    def four(values, first, factor):
        low = to_byte(values[first], factor) | (to_byte(values[first + 1], factor) << uint32(8))
        high = to_byte(values[first + 2], factor) | (to_byte(values[first + 3], factor) << uint32(8))
        return uint32(low | (high << uint32(16)))

    if width == 1:
        return device_function(lambda address, values, factor: store_b8(address, to_byte(values[0], factor)))
    if width == 4:
        return device_function(lambda address, values, factor: store_b32(address, four(values, 0, factor)))
    return device_function(
        lambda address, values, factor: store_2xb32(address, (four(values, 0, factor), four(values, 4, factor)))
    )


@functools.cache
def scale_address(block_size: int) -> Any:
    """A device function ``(scales, block, offset, head, num_kv_heads) -> address`` of a token's scale."""

    @device_function
    def address(scales, block, offset, head, num_kv_heads):
        row = (uint64(block) * uint64(num_kv_heads) + uint64(head)) * uint64(block_size) + uint64(offset)
        return scales + row * uint64(4)

    return address
