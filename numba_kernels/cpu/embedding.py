"""Rows of a table, picked by number and widened: token embeddings, and positions added to them.

A table is stored row by row, or as the panels of a linear layer whose weight it shares (`linear`): element (n, k) lies
in panel n / PANEL_COLUMNS, at row k and column n % PANEL_COLUMNS.

Status 1: a number outside the table.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import carray

from numba_kernels.cpu.launch import Fields, Kernel, float32_at, int32_at
from numba_kernels.cpu.scalars import load_f32

FIELDS = Fields(
    "indices table out num_rows table_rows width row_stride panel_columns panel_stride column_stride is_added "
    "rows_a_ticket"
)
BAD_INDEX = 1


@functools.cache
def embedding_kernel(stored: type) -> Kernel:
    """``out [R, W]`` = rows ``indices [R]`` of a table of ``stored``, added to ``out`` where ``is_added``.
    A ticket is some rows.

    Element (n, k) is number ``n // panel_columns * panel_stride + n % panel_columns * row_stride + k * column_stride``.
    """

    def embedding(arguments, ticket):
        a = carray(arguments, 1)[0]
        indices = int32_at(a.indices, a.num_rows)
        start = ticket * a.rows_a_ticket
        end = min(a.num_rows, start + a.rows_a_ticket)
        for row in range(start, end):
            if indices[row] < 0 or indices[row] >= a.table_rows:
                a.status = BAD_INDEX
                return
        table, width, step = a.table, a.width, a.column_stride
        for row in range(start, end):
            index = np.int64(indices[row])
            first = index // a.panel_columns * a.panel_stride + index % a.panel_columns * a.row_stride
            out = float32_at(a.out + row * width * 4, width)
            if a.is_added != 0:
                for i in range(width):
                    out[i] += load_f32(stored, table, first + i * step)
            else:
                for i in range(width):
                    out[i] = load_f32(stored, table, first + i * step)

    return Kernel(embedding, FIELDS)
