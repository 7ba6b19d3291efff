"""Rows of a table, picked by number, widened and multiplied: token embeddings, and positions added to them; and columns
of matrices in other places: in another order, for a weight with reordered columns, and side by side.

A table is stored row by row, or as the panels of a linear layer whose weight it shares (`panels`). Bytes are int8 plus
ZERO_POINT, with a scale for each row.

Status 1: a number outside the table.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import carray, njit
from numba.core import types

from numba_kernels.blocks import BLOCKS
from numba_kernels.closure_cache import name_by_content
from numba_kernels.cpu.gemm.arranged_rows import ELEMENTS_A_WORD
from numba_kernels.cpu.gemm.block_rows import row_reader
from numba_kernels.cpu.gemm.packed_words import ZERO_POINT
from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.emitted import KIND, emitted
from numba_kernels.cpu.intrinsics.scalars import load_f32
from numba_kernels.cpu.intrinsics.simd import F32, I64
from numba_kernels.cpu.layout import PANEL_COLUMNS
from numba_kernels.cpu.rows import for_each_vector
from numba_kernels.cpu.running.launch import Fields, Kernel, float32_at, int32_at

FIELDS = Fields(
    "*indices *table *scales *out num_rows table_rows width is_packed is_added rows_a_work_item", "multiplier"
)
BAD_INDEX = 1


@njit(nogil=True)
def rows_of(a, work_item):
    """All indices, and the range of the work item's rows, which is empty where one lies outside the table, with status
    1."""
    indices = int32_at(a.indices, a.num_rows)
    start = work_item * a.rows_a_work_item
    end = min(a.num_rows, start + a.rows_a_work_item)
    for row in range(start, end):
        if indices[row] < 0 or indices[row] >= a.table_rows:
            a.status = BAD_INDEX
            return indices, start, start
    return indices, start, end


@emitted(types.void, KIND, types.intp, types.intp, types.float32, types.intp, types.intp)
def add_row(builder, stored, source, count, multiplier, target, is_added):
    """``target[i] = source[i] * multiplier`` for ``count`` stored elements, plus what was there where ``is_added`` is
    not 0; sums begin at zero."""
    factor, zero = simd.splat(builder, multiplier), simd.splat_constant(F32, 0.0)
    has_old = builder.icmp_signed("!=", is_added, ir.Constant(I64, 0))
    item_bytes = stored.bitwidth // 8

    def piece(place, mask):
        at = builder.add(source, builder.udiv(place, ir.Constant(I64, 4 // item_bytes)))
        to = builder.add(target, place)
        old = simd.masked_load(builder, to, builder.and_(mask, simd.splat(builder, has_old)))
        bits = simd.masked_load(builder, at, mask, F32 if item_bytes == 4 else simd.I16, item_bytes)
        value = builder.fmul(simd.widen(builder, bits, stored), factor)
        simd.masked_store(builder, builder.fadd(builder.select(has_old, old, zero), value), to, mask)

    for_each_vector(builder, count, piece)


@functools.cache
def embedding_kernel(stored: Any) -> Kernel:
    """``out [R, W]`` = rows ``indices [R]`` of a table of ``stored`` times ``multiplier``, added to ``out`` where
    ``is_added``. The table is ``[table_rows, W]``, or panels of it where ``is_packed``; ``scales [table_rows]`` are
    those of bytes. A work item is some rows.
    """
    if stored in BLOCKS:
        return _block_kernel(stored)
    elements = ELEMENTS_A_WORD[np.dtype(stored).name]
    is_int8 = stored is np.uint8
    is_float, item_bytes = not is_int8, np.dtype(stored).itemsize
    panel_step = PANEL_COLUMNS * elements

    @njit(nogil=True)
    @name_by_content
    def element(a, index, place):
        value = load_f32(stored, a.table, place)
        if is_int8:
            value = (value - np.float32(ZERO_POINT)) * float32_at(a.scales, a.table_rows)[index]
        return value * np.float32(a.multiplier)

    def embedding(arguments, work_item):
        a = carray(arguments, 1)[0]
        indices, start, end = rows_of(a, work_item)
        width, whole_words = a.width, a.width // elements
        words = -(-width // elements)
        for row in range(start, end):
            index = np.int64(indices[row])
            out = float32_at(a.out + row * width * 4, width)
            if a.is_packed == 0 and is_float:
                at = a.table + index * width * item_bytes
                add_row(stored, at, width, np.float32(a.multiplier), a.out + row * width * 4, a.is_added)
                continue
            if a.is_added == 0:
                out[:] = 0.0
            if a.is_packed == 0:
                for i in range(width):
                    out[i] += element(a, index, index * width + i)
                continue
            first = index // PANEL_COLUMNS * words * panel_step + index % PANEL_COLUMNS * elements
            for word in range(whole_words):
                for i in range(elements):
                    out[word * elements + i] += element(a, index, first + word * panel_step + i)
            for i in range(width - whole_words * elements):
                out[whole_words * elements + i] += element(a, index, first + whole_words * panel_step + i)

    return Kernel(embedding, FIELDS)


def _block_kernel(stored: str) -> Kernel:
    """The same for panels of blocks."""
    block, read_row = BLOCKS[stored], row_reader(stored)
    elements, block_words = block.elements, block.words

    def embedding(arguments, work_item):
        a = carray(arguments, 1)[0]
        indices, start, end = rows_of(a, work_item)
        words = -(-a.width // elements) * block_words
        for row in range(start, end):
            index = np.int64(indices[row])
            out = float32_at(a.out + row * a.width * 4, a.width)
            if a.is_added == 0:
                out[:] = 0.0
            panel = a.table + index // PANEL_COLUMNS * words * PANEL_COLUMNS * 4
            read_row(panel, index % PANEL_COLUMNS, a.width, a.multiplier, out)

    return Kernel(embedding, FIELDS)


@functools.cache
def take_columns_kernel() -> Kernel:
    """``out [R, K]`` of ``x [R, K]``: column j is x's column ``order[j]``. A work item is some rows."""

    def take_columns(arguments, work_item):
        a = carray(arguments, 1)[0]
        depth = a.depth
        order = int32_at(a.order, depth)
        first = work_item * a.rows_a_work_item
        for row in range(first, min(a.num_rows, first + a.rows_a_work_item)):
            x, out = float32_at(a.x + row * depth * 4, depth), float32_at(a.out + row * depth * 4, depth)
            for i in range(depth):
                out[i] = x[order[i]]

    return Kernel(take_columns, Fields("*x *order *out num_rows depth rows_a_work_item"))


@functools.cache
def put_columns_kernel() -> Kernel:
    """``out [R, total]`` gets ``x [R, width]`` from column ``first`` on; a work item is some rows."""

    def put_columns(arguments, work_item):
        a = carray(arguments, 1)[0]
        width = a.width
        start = work_item * a.rows_a_work_item
        for row in range(start, min(a.num_rows, start + a.rows_a_work_item)):
            x = float32_at(a.x + row * width * 4, width)
            out = float32_at(a.out + (row * a.total + a.first) * 4, width)
            for i in range(width):
                out[i] = x[i]

    return Kernel(put_columns, Fields("*x *out num_rows width total first rows_a_work_item"))
