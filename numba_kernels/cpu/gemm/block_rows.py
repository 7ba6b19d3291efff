"""Rows of a table that lies in panels of blocks (`blocks`), as floats: token embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from numba_kernels.blocks import BLOCKS
from numba_kernels.closure_cache import name_by_content
from numba_kernels.cpu.intrinsics.scalars import float_of_bits, load_f32
from numba_kernels.cpu.layout import PANEL_COLUMNS
from numba_kernels.cpu.running.launch import int32_at
from numba_kernels.cpu.target import LANES

_WORD_BYTES = LANES * 4  # from word to word of a column


def row_reader(stored: str) -> Any:
    """A compiled function that writes a row of a table, times a multiplier, to float32:
    ``(address of the panel, column in it, number of elements, multiplier, out)``, added where out is not zero."""
    block = BLOCKS[stored]
    elements, group, zero = block.elements, block.group, block.zero
    block_bytes, vector_bytes = block.words * PANEL_COLUMNS * 4, block.words * _WORD_BYTES
    scale_kind, minimum_field, is_bytes = block.scale, block.minimum, block.is_bytes
    scale_at, minimum_at = block.places.get("d", 0), block.places.get(minimum_field or "", 0)
    bits_at = block.places.get("scales", block.places.get("exponent", 0))
    planes = tuple((block.places[each.field], each.bits, each.run) for each in block.planes)
    first_plane, second_plane = planes[0], planes[-1]
    has_second, table = len(planes) > 1, np.array(block.table or (0,), np.int32)
    is_e4m3 = block.is_e4m3
    scale_step, scale_start = block.scale_planes.step, block.scale_planes.start
    scale_planes = tuple((block.places[each.field], each.bits, each.run) for each in block.scale_planes.planes)
    has_upper_scales, scale_planes = len(scale_planes) > 1, scale_planes or ((0, 1, 1),)
    is_float, num_groups = "d" in block.places and block.fields["d"].base == np.float32, block.num_groups
    has_table, table_values = block.table is not None, tuple(int(value) for value in table)

    @njit(nogil=True)
    @name_by_content
    def byte(at, index):
        return (int32_at(at + index // 4 * _WORD_BYTES, 1)[0] >> (8 * (index % 4))) & 255

    @njit(nogil=True)
    @name_by_content
    def half(at, index):
        return load_f32(np.int16, at + index // 4 * _WORD_BYTES, index % 4 // 2)

    @njit(nogil=True)
    @name_by_content
    def six_bits(at, own, other, group):
        if group < 4:
            return byte(at, bits_at + own + group) & 63
        low = byte(at, bits_at + 4 + group) >> own
        return (low & 15) | ((byte(at, bits_at + own + group - 4) >> 6) << 4)

    @njit(nogil=True)
    @name_by_content
    def bits_of(at, plane, i):
        first, bits, run = plane
        period = run * 8 // bits
        within = i % period
        return (byte(at, first + i // period * run + within % run) >> (within // run * bits)) & ((1 << bits) - 1)

    @njit(nogil=True)
    @name_by_content
    def scale_integer(at, index):
        found = bits_of(at, scale_planes[0], index)
        if has_upper_scales:
            found |= bits_of(at, scale_planes[1], index) << scale_planes[0][1]
        return np.float32(found * scale_step + scale_start)

    @njit(nogil=True)
    @name_by_content
    def scale_of_group(at, group):
        if scale_kind == "planes":
            factor = float_of_bits(int32_at(at + scale_at // 4 * _WORD_BYTES, 1)[0]) if is_float else half(at, scale_at)
            return factor * scale_integer(at, group)
        if scale_kind == "six_bits":
            return half(at, scale_at) * np.float32(six_bits(at, 0, 4, group))
        if scale_kind == "byte":
            bits = byte(at, bits_at + group)
            return half(at, scale_at) * np.float32(bits - 256 if bits > 127 else bits)
        if scale_kind == "e8m0":
            exponent = byte(at, bits_at + group)
            return float_of_bits(np.int32((0x200000 << exponent) if exponent < 2 else (exponent - 1) << 23))
        if scale_kind == "float":
            return float_of_bits(int32_at(at + (scale_at // 4 + group) * _WORD_BYTES, 1)[0])
        if scale_kind == "bfloat":
            return load_f32(np.uint16, at + (scale_at + 2 * group) // 4 * _WORD_BYTES, group % 2)
        return half(at, scale_at + 2 * group)

    @njit(nogil=True)
    @name_by_content
    def minimum_of_group(at, group):
        if scale_kind == "six_bits":
            return half(at, minimum_at) * np.float32(six_bits(at, 4, 0, group))
        if scale_kind == "planes":
            return half(at, minimum_at) * scale_integer(at, num_groups + group)
        if minimum_field == "z":
            return scale_of_group(at, group) * np.float32(byte(at, minimum_at + group) - (zero if is_bytes else 0))
        return -half(at, minimum_at + 2 * group)

    @njit(nogil=True)
    @name_by_content
    def integer(at, i):
        found = bits_of(at, first_plane, i)
        if has_second:
            found |= bits_of(at, second_plane, i) << first_plane[1]
        if is_bytes:
            return found - 256 if found > 127 else found
        if has_table:
            return table_values[found] - zero
        return found - zero

    @njit(nogil=True)
    @name_by_content
    def number(at, i):
        if not is_e4m3:
            return np.float32(integer(at, i))
        code = bits_of(at, first_plane, i)
        magnitude = code & 127
        found = np.float32(magnitude) * np.float32(2**-9)
        if magnitude > 7:
            found = float_of_bits(np.int32((magnitude << 20) + (120 << 23)))
        return -found if code > 127 else found

    @njit(nogil=True)
    @name_by_content
    def read_row(panel, column, width, multiplier, out):
        at = panel + column // LANES * vector_bytes + column % LANES * 4
        for first in range(0, width, elements):
            for index in range(elements // group):
                scale = scale_of_group(at, index)
                minimum = np.float32(0)
                if minimum_field is not None:
                    minimum = minimum_of_group(at, index)
                for i in range(index * group, min((index + 1) * group, width - first)):
                    value = scale * number(at, i)
                    out[first + i] += (value - minimum) * np.float32(multiplier)
            at += block_bytes

    return read_row
