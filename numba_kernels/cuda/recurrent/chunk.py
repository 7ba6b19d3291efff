"""Chunks of sequences with state pages: the tokens, pages and convolution inputs of each.

Token t of a sequence has its inputs in x, if the chunk has the token, else in row ``taps - 1 + t - L`` of the page that
is read, whose state covers L tokens.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import float32, int32, uint32, uint64

from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_loader, element_storer, quad_loader
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.math import absolute, divide, exp, fma, reciprocal


@device_function
def find_chunk(query_start, seq_lens, table, table_width, lengths, seq):
    """``-> (first row of x, tokens, tokens before them, page that is read, page that is written, L)``, all int32; -1
    tokens before padding. Without tokens before them, L is 0, and no page is read."""
    start = int32(memory.load_b32(query_start + uint64(seq) * uint64(4)))
    count = int32(int32(memory.load_b32(query_start + uint64(seq) * uint64(4) + uint64(4))) - start)
    seq_len = int32(memory.load_b32(seq_lens + uint64(seq) * uint64(4)))
    before = int32(seq_len - count)
    if seq_len == int32(0):
        before = int32(-1)
    read = int32(0)
    written = int32(0)
    length = int32(0)
    if before >= int32(0):
        row = table + uint64(seq) * uint64(table_width) * uint64(4)
        written = int32(memory.load_b32(row))
        if before > int32(0):
            read = int32(memory.load_b32(row + uint64(4)))
            length = int32(memory.load_b32(lengths + uint64(uint32(read)) * uint64(4)))
    return start, count, before, read, written, length


@device_function
def covered(count, before, pending):
    """L of the page that is written."""
    is_tried = count > int32(1) and count <= int32(pending) + int32(1)
    return int32(before + int32(1)) if is_tried else int32(before + count)


@functools.cache
def run_loader(dtype: str, width: int) -> Any:
    """A device function ``address -> tuple of `width` (1, 2 or 4) float32``; that many elements divide the address."""
    if width == 4:
        return quad_loader(dtype)
    if width == 1:
        load_one = element_loader(dtype)
        return device_function(lambda address: (load_one(address),))
    if dtype == "f32":
        return memory.load_2xf32
    load, unpack = memory.load_b32, {"f16": convert.unpack_f16, "bf16": convert.unpack_bf16}[dtype]
    return device_function(lambda address: unpack(load(address)))


@functools.cache
def copier(dtype: str) -> Any:
    """A device function ``(target, source, count, lane)``: a warp copies elements; zeros for source 0."""
    load, store, item_bytes = element_loader(dtype), element_storer(dtype), uint64(ITEM_BYTES[dtype])

    @device_function
    def copy(target, source, count, lane):
        index = lane
        while index < count:
            at = uint64(index) * item_bytes
            value = float32(0)
            if source != uint64(0):
                value = load(source + at)
            store(target + at, value)
            index = uint32(index + uint32(32))

    return copy


@device_function
def silu(x):
    """x / (1 + e^-x)."""
    return x * reciprocal(float32(1) + exp(-x))


@device_function
def softplus(x):
    """log(1 + e^x), to float32's accuracy at both ends: max(x, 0) + 2 artanh(u / (2 + u)) with u = e^-|x|."""
    u = exp(-absolute(x))
    s = divide(u, float32(2) + u)
    square = s * s
    series = fma(square, float32(1 / 15), float32(1 / 13))
    series = fma(square, series, float32(1 / 11))
    series = fma(square, series, float32(1 / 9))
    series = fma(square, series, float32(1 / 7))
    series = fma(square, series, float32(1 / 5))
    series = fma(square, series, float32(1 / 3))
    series = fma(square, series, float32(1))
    above = x if x > float32(0) else float32(0)
    return above + float32(2) * s * series
