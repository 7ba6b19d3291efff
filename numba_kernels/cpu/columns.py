"""Columns of matrices in other places: in another order, for a weight with reordered columns; and side by side."""

from __future__ import annotations

import functools

from numba import carray

from numba_kernels.cpu.running.launch import Fields, Kernel, float32_at, int32_at


@functools.cache
def take_columns_kernel() -> Kernel:
    """``out [R, K]`` of ``x [R, K]``: column j is x's column ``order[j]``. A ticket is some rows."""

    def take_columns(arguments, ticket):
        a = carray(arguments, 1)[0]
        depth = a.depth
        order = int32_at(a.order, depth)
        first = ticket * a.rows_a_ticket
        for row in range(first, min(a.num_rows, first + a.rows_a_ticket)):
            x, out = float32_at(a.x + row * depth * 4, depth), float32_at(a.out + row * depth * 4, depth)
            for i in range(depth):
                out[i] = x[order[i]]

    return Kernel(take_columns, Fields("*x *order *out num_rows depth rows_a_ticket"))


@functools.cache
def put_columns_kernel() -> Kernel:
    """``out [R, total]`` gets ``x [R, width]`` from column ``first`` on; a ticket is some rows."""

    def put_columns(arguments, ticket):
        a = carray(arguments, 1)[0]
        width = a.width
        start = ticket * a.rows_a_ticket
        for row in range(start, min(a.num_rows, start + a.rows_a_ticket)):
            x = float32_at(a.x + row * width * 4, width)
            out = float32_at(a.out + (row * a.total + a.first) * 4, width)
            for i in range(width):
                out[i] = x[i]

    return Kernel(put_columns, Fields("*x *out num_rows width total first rows_a_ticket"))
