"""The inverse of I + A for a strictly lower triangular A of 64 x 64 in shared memory, float32, in place.

Each of 4 warps inverts a diagonal block of 16 by forward substitution, a lane a column. Then neighbours are joined, to
blocks of 32 and to the whole:

    [I + A11         ]^-1   [T11                 ]
    [A21     I + A22 ]    = [-T22 A21 T11    T22 ]

Above the diagonal, blocks of 32 are not read; in them the matrix has zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda, float32, uint32

from numba_kernels.cuda.intrinsics.device import device_function, in_turn
from numba_kernels.cuda.intrinsics.memory import (
    shared_load_4xf32,
    shared_load_f32,
    shared_store_4xf32,
    shared_store_f32,
)
from numba_kernels.cuda.intrinsics.sync import sync_block, sync_named

PITCH = 72
"""Elements from a row to the next: pairs of 8 rows, and quads of one, lie in different banks."""
SIZE_BYTES = 64 * PITCH * 4
TEMPORARY_BYTES = 32 * PITCH * 4


@functools.cache
def _substitute(i: int) -> Callable[..., Any]:
    """Row i of a lane's column of the inverse."""

    @device_function
    def row(state):
        column, block, own = state
        value = float32(0)
        if own == uint32(i):
            value = float32(1)
        for j in range(i):
            value -= shared_load_f32(uint32(block + uint32((i * PITCH + j) * 4))) * column[j]
        column[i] = value

    return row


_substitute_all = in_turn([_substitute(i) for i in range(16)])


@device_function
def _multiply(target, left, right, first, step, size, sign):
    """``target = sign * left . right``, of `size` rows and columns, at shared addresses; quads of a row from `first`
    on, every `step`, are this thread's."""
    quads = uint32(size >> uint32(2))
    index = first
    while index < uint32(size * quads):
        row = uint32(index // quads)
        place = uint32(uint32(index - row * quads) * uint32(16))
        # Rows 0, 2, 1, 3, ...: the two that 8 lanes store for a size of 16 lie 16 banks apart.
        row = uint32(
            uint32(row & uint32(0xFC))
            | uint32(uint32(row & uint32(1)) * uint32(2))
            | uint32(row >> uint32(1) & uint32(1))
        )
        a, b, c, d = float32(0), float32(0), float32(0), float32(0)
        of_left = uint32(left + row * uint32(PITCH * 4))
        of_right = uint32(right + place)
        k = uint32(0)
        while k < size:
            factors = shared_load_4xf32(of_left)
            for i in range(4):
                e, f, g, h = shared_load_4xf32(uint32(of_right + uint32(i * PITCH * 4)))
                a += factors[i] * e
                b += factors[i] * f
                c += factors[i] * g
                d += factors[i] * h
            of_left = uint32(of_left + uint32(16))
            of_right = uint32(of_right + uint32(4 * PITCH * 4))
            k = uint32(k + uint32(4))
        shared_store_4xf32(uint32(target + row * uint32(PITCH * 4) + place), (a * sign, b * sign, c * sign, d * sign))
        index = uint32(index + step)


@device_function
def invert(matrix, temporary, thread):
    """The inverse in place, by 128 threads; `matrix` and `temporary` are shared addresses. A warp has written the 16
    rows of its own number itself. All threads meet, at the end too."""
    warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
    column = cuda.local.array(16, float32)
    own = uint32(lane & uint32(15))
    block = uint32(matrix + warp * uint32(16 * (PITCH + 1) * 4))
    sync_named(uint32(warp + uint32(1)), uint32(32))
    _substitute_all((column, block, own))
    sync_named(uint32(warp + uint32(1)), uint32(32))
    if lane < uint32(16):
        for i in range(16):
            shared_store_f32(uint32(block + uint32(i * PITCH * 4) + own * uint32(4)), column[i])
    sync_block()
    half, place = uint32(thread >> uint32(6)), uint32(thread & uint32(63))  # two joins of 16, at once
    upper = uint32(matrix + half * uint32(32 * (PITCH + 1) * 4))
    lower = uint32(upper + uint32(16 * (PITCH + 1) * 4))
    between = uint32(upper + uint32(16 * PITCH * 4))
    own_temporary = uint32(temporary + half * uint32(16 * PITCH * 4))
    _multiply(own_temporary, between, upper, place, uint32(64), uint32(16), float32(1))
    sync_block()
    _multiply(between, lower, own_temporary, place, uint32(64), uint32(16), float32(-1))
    sync_block()
    lower = uint32(matrix + uint32(32 * (PITCH + 1) * 4))
    between = uint32(matrix + uint32(32 * PITCH * 4))
    _multiply(temporary, between, matrix, thread, uint32(128), uint32(32), float32(1))
    sync_block()
    _multiply(between, lower, temporary, thread, uint32(128), uint32(32), float32(-1))
    sync_block()
