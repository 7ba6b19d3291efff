"""Rows of a table in ggml's blocks as they lie in a file, as floats: of tables that are never loaded whole, one row a
token is read. The products are those of llama.cpp's `dequantize_row_*`, in its order, then times a multiplier.

Status 1: a number outside the table.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, njit

from numba_kernels.closure_cache import name_by_content
from numba_kernels.cpu.embedding import FIELDS, rows_of
from numba_kernels.cpu.intrinsics.scalars import load_f32
from numba_kernels.cpu.running.launch import Kernel, float32_at, int8_at
from numba_kernels.ggml_blocks import ROW_BLOCKS


@njit(nogil=True)
def _half(at, offset):
    return load_f32(np.int16, at + offset, 0)


@njit(nogil=True)
def _signed(byte):
    return np.float32(np.int32(byte) - (256 if byte > 127 else 0))


@njit(nogil=True)
def _q8_0(at, raw, out):
    d = _half(at, 0)
    for i in range(32):
        out[i] = d * _signed(raw[2 + i])


@njit(nogil=True)
def _q4_0(at, raw, out):
    d = _half(at, 0)
    for i in range(16):
        out[i] = d * np.float32(np.int32(raw[2 + i] & 15) - 8)
        out[16 + i] = d * np.float32(np.int32(raw[2 + i] >> 4) - 8)


@njit(nogil=True)
def _q5_0(at, raw, out):
    d = _half(at, 0)
    for i in range(32):
        low = raw[6 + i % 16] >> (4 * (i // 16)) & 15
        high = (raw[2 + i // 8] >> (i % 8)) & 1
        out[i] = d * np.float32(np.int32(low | high << 4) - 16)


@njit(nogil=True)
def _six_bits(raw, group, other):
    """The scale (`other` 0) or minimum (4) of a group, out of the twelve bytes from 4 on."""
    if group < 4:
        return raw[4 + other + group] & 63
    return (raw[8 + group] >> other & 15) | (raw[other + group] >> 6) << 4


@njit(nogil=True)
def _q4_k(at, raw, out):
    d, dmin = _half(at, 0), _half(at, 2)
    for group in range(8):
        scale, minimum = d * np.float32(_six_bits(raw, group, 0)), dmin * np.float32(_six_bits(raw, group, 4))
        for i in range(32):
            q = raw[16 + group // 2 * 32 + i] >> (4 * (group % 2)) & 15
            out[32 * group + i] = scale * np.float32(q) - minimum


@njit(nogil=True)
def _q5_k(at, raw, out):
    d, dmin = _half(at, 0), _half(at, 2)
    for group in range(8):
        scale, minimum = d * np.float32(_six_bits(raw, group, 0)), dmin * np.float32(_six_bits(raw, group, 4))
        for i in range(32):
            q = raw[48 + group // 2 * 32 + i] >> (4 * (group % 2)) & 15
            out[32 * group + i] = scale * np.float32(q | (raw[16 + i] >> group & 1) << 4) - minimum


@njit(nogil=True)
def _q6_k(at, raw, out):
    d = _half(at, 208)
    for i in range(256):
        half, inside = i // 128, i % 128
        low = raw[64 * half + inside % 64] >> (4 * (inside // 64)) & 15
        high = raw[128 + 32 * half + inside % 32] >> (2 * (inside // 32)) & 3
        out[i] = d * _signed(raw[192 + i // 16]) * np.float32(np.int32(low | high << 4) - 32)


_DECODERS = {"Q4_0": _q4_0, "Q5_0": _q5_0, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}


@functools.cache
def stored_rows_kernel(name: str) -> Kernel:
    """``out [R, W]`` = rows ``indices [R]`` of a table of these blocks times ``multiplier``; `embedding.FIELDS`."""
    (elements, block_bytes), decode = ROW_BLOCKS[name], _DECODERS[name]

    @njit(nogil=True)
    @name_by_content
    def read_row(address, width, multiplier, out):
        for block in range(width // elements):
            at = address + block * block_bytes
            values = out[block * elements : (block + 1) * elements]
            decode(at, int8_at(at, block_bytes).view(np.uint8), values)
            for i in range(elements):
                values[i] *= np.float32(multiplier)

    def stored_rows(arguments: Any, work_item: Any) -> None:
        a = carray(arguments, 1)[0]
        indices, start, end = rows_of(a, work_item)
        row_bytes = a.width // elements * block_bytes
        for row in range(start, end):
            address = a.table + np.int64(indices[row]) * row_bytes
            read_row(address, a.width, a.multiplier, float32_at(a.out + row * a.width * 4, a.width))

    return Kernel(stored_rows, FIELDS)
