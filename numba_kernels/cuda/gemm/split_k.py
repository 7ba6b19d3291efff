"""K in segments (split-K): the bounds of each, and the sums of all in one tree (`numba_kernels.split_k`).

A tier computes the segments of an exact product as if each were a product of its own: the grid's y counts them, and
their sums go to device memory, float32 ``[segments, m, n]``. A second launch adds them in pairs, adds bias and residual
and rounds. So few rows fill a GPU, too; and partial sums of several ranks are added in the same way by the same kernel.

The sums of many rows would take much memory, and bandwidth: products of more than `most_rows` rows come in several
launches, whose sums take turns in the second-level cache.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.epilogue import (
    Arguments,
    Output,
    can_finish_quads,
    finisher,
    quad_finisher,
    squares_leaver,
)
from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element_types import DTYPES
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.specialisation import Launch, Specialisation
from numba_kernels.split_k import SEGMENTS, STEP

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

NUM_SUMS = (2, 4, 8)
WORKSPACE_BYTES = 32 << 20  # of sums at a time, if that is not too few rows
LEAST_ROWS = 128
_THREADS = 128
_COLUMNS = 4 * _THREADS  # of a block
SQUARE_COLUMNS = 128  # of a warp: their squares make one sum


@device_function
def segment_of(k):
    """(first element, length) of the block's segment of K: `blockIdx.y` of `gridDim.y`."""
    steps = uint32(uint32(k + uint32(STEP - 1)) // uint32(STEP))
    number, count = uint32(cuda.blockIdx.y), uint32(cuda.gridDim.y)
    first = minimum_u32(uint32(divide_u32(uint32(steps * number), count) * uint32(STEP)), k)
    end = minimum_u32(uint32(divide_u32(uint32(steps * uint32(number + uint32(1))), count) * uint32(STEP)), k)
    return first, uint32(end - first)


@device_function
def in_segment(given):
    """The arguments, ``out`` being the block's segment of ``[segments, m, n]`` float32."""
    x, weight, bias, residual, out, m, n, k, bias_is_f32, x_squares, x_parts, eps, squares = given
    out += uint64(uint32(cuda.blockIdx.y)) * uint64(m) * uint64(n) * uint64(4)
    return Arguments(x, weight, bias, residual, out, m, n, k, bias_is_f32, x_squares, x_parts, eps, squares)


@functools.cache
def _tree(count: int, width: int) -> Any:
    """A device function ``(address, stride) -> sums``: `count` vectors of `width` (1 or 4) floats, added in pairs."""
    if count == 1:
        load_1, load_4 = memory.load_f32, memory.load_4xf32
        if width == 1:
            return device_function(lambda address, stride: load_1(address))
        return device_function(lambda address, stride: load_4(address))
    half, lower = _tree(count // 2, width), count // 2

    @device_function
    def add(address, stride):
        return half(address, stride) + half(address + uint64(lower) * stride, stride)

    @device_function
    def add_quads(address, stride):
        a = half(address, stride)
        b = half(address + uint64(lower) * stride, stride)
        return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]

    return add if width == 1 else add_quads


@functools.cache
def _kernel(count: int, out_dtype: str) -> Specialisation:
    finish, finish_quad = finisher("f32", out_dtype), quad_finisher("f32", out_dtype)
    tree, tree_of_quads, leave_squares = _tree(count, 1), _tree(count, 4), squares_leaver(SQUARE_COLUMNS, 32)

    def add(sums, bias, residual, out, m, n, squares):
        wait_for_previous_grid()
        launch_dependents()
        blocks = uint32(uint32(n + uint32(_COLUMNS - 1)) // uint32(_COLUMNS))
        row = divide_u32(uint32(cuda.blockIdx.x), blocks)
        column = uint32(uint32(uint32(cuda.blockIdx.x) - row * blocks) * uint32(_COLUMNS))
        stride = uint64(m) * uint64(n) * uint64(4)
        given = Output(bias, residual, out, m, n, uint32(1), squares)
        in_quads = can_finish_quads(Output(bias | sums, residual, out, m, n, uint32(1), squares))
        thread = uint32(cuda.threadIdx.x)
        column = uint32(column + (thread * uint32(4) if in_quads else thread))
        at = sums + (uint64(row) * uint64(n) + uint64(column)) * uint64(4)
        if in_quads:
            total = float32(0.0)
            if column < n:
                total = finish_quad(given, row, column, tree_of_quads(at, stride))
            leave_squares(given, total, thread & uint32(31) == uint32(0), row, column)
        else:
            for _ in range(4):
                if column < n:
                    finish(given, row, column, tree(at, stride))
                column = uint32(column + uint32(_THREADS))
                at += uint64(4 * _THREADS)

    return Specialisation(
        name=f"gemm_segments_{count}_{out_dtype}",
        kernel=cuda.jit(add),
        argument_types=(types.uint64,) * 4 + (types.uint32,) * 2 + (types.uint64,),
        max_threads=_THREADS,
        constants={"count": count, "out_dtype": out_dtype, "square_columns": SQUARE_COLUMNS},
    )


def plan_add(count: int, m: int, n: int, out_dtype: str) -> Launch:
    """Adds ``sums [count, m, n]`` float32 in pairs, then ``bias [n]`` float32 and ``residual [m, n]`` (addresses; 0 =
    none), and rounds to ``out [m, n]``; m and n at least 1. Arguments: sums, bias, residual, out, m, n, squares (or
    0)."""
    return Launch(_kernel(count, out_dtype), (m * -(-n // _COLUMNS), 1, 1), (_THREADS, 1, 1))


def most_rows(count: int, n: int) -> int:
    """Rows whose sums of so many segments are made at a time."""
    rows = WORKSPACE_BYTES // (4 * max(1, count * n))
    return max(LEAST_ROWS, rows // LEAST_ROWS * LEAST_ROWS)


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan_add` can return."""
    assert max(NUM_SUMS) == SEGMENTS
    for count in NUM_SUMS:
        for out_dtype in DTYPES:
            yield _kernel(count, out_dtype)
