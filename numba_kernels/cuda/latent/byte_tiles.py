"""Tiles of latent rows of fp8 in shared memory, as they lie in pages, widened to tiles of 16 bits."""

from __future__ import annotations

import functools
from typing import Any

from numba import float32, uint32

from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16, unpack_bf16, unpack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.memory import (
    shared_load_2xb32,
    shared_load_4xb32,
    shared_load_f32,
    shared_store_4xb32,
)
from numba_kernels.latent_rows import GROUP, LatentBytes


@functools.cache
def tile_widener(dtype: str, layout: LatentBytes, num_keys: int, byte_pitch: int, pitch: int, threads: int) -> Any:
    """A device function ``(source, target, thread)``: `num_keys` rows, `byte_pitch` apart, as rows of the rotated
    numbers (a multiple of 16) and the values, `pitch` apart."""
    pack = pack_bf16 if dtype == "bf16" else pack_f16
    value_items, rotated_items = layout.value_bytes // 8, layout.rotary // 8
    scales_at, rotated_at, first_value = layout.value_bytes, layout.rotated_at, 2 * layout.rotary
    is_copied, is_even = dtype == "bf16", threads % value_items == 0

    @device_function
    def halves(word):
        """Bytes 0 and 2 as numbers, 2^8 times too small: e4m3 has one bit of the exponent less than float16."""
        fields = ((word << uint32(7)) & uint32(0x3F803F80)) | ((word << uint32(8)) & uint32(0x80008000))
        return unpack_f16(fields)

    @device_function
    def pairs(word, scale):
        first, third = halves(word)
        second, fourth = halves(word >> uint32(8))
        return pack(first * scale, second * scale), pack(third * scale, fourth * scale)

    @device_function
    def narrowed(word):
        low, high = unpack_bf16(word)
        return pack(low, high)

    @device_function
    def widen(source, target, thread):
        index = thread
        row = uint32(thread // uint32(value_items))
        item = uint32(thread - row * uint32(value_items))
        place = uint32(source + row * uint32(byte_pitch))
        at = uint32(target + row * uint32(pitch) + uint32(first_value))
        while index < uint32(num_keys * value_items):
            if not is_even:
                row = uint32(index // uint32(value_items))
                item = uint32(index - row * uint32(value_items))
                place = uint32(source + row * uint32(byte_pitch))
                at = uint32(target + row * uint32(pitch) + uint32(first_value))
            scale = shared_load_f32(uint32(place + uint32(scales_at) + (item // uint32(GROUP // 8)) * uint32(4)))
            first, second = shared_load_2xb32(uint32(place + item * uint32(8)))
            a, b = pairs(first, scale * float32(256))
            c, d = pairs(second, scale * float32(256))
            shared_store_4xb32(uint32(at + item * uint32(16)), (a, b, c, d))
            index = uint32(index + uint32(threads))
            if is_even:
                place = uint32(place + uint32(threads // value_items * byte_pitch))
                at = uint32(at + uint32(threads // value_items * pitch))
        index = thread
        while index < uint32(num_keys * rotated_items):
            row = uint32(index // uint32(rotated_items))
            item = uint32((index - row * uint32(rotated_items)) * uint32(16))
            a, b, c, d = shared_load_4xb32(uint32(source + row * uint32(byte_pitch) + uint32(rotated_at) + item))
            at = uint32(target + row * uint32(pitch) + item)
            if is_copied:
                shared_store_4xb32(at, (a, b, c, d))
            else:
                shared_store_4xb32(at, (narrowed(a), narrowed(b), narrowed(c), narrowed(d)))
            index = uint32(index + uint32(threads))

    return widen
