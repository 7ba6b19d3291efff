"""The Hopper tier's epilogue: each warp stores its sums through its own pieces of shared memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.epilogue import (
    GATED,
    can_finish_quads,
    finisher,
    norm_scale,
    quad_finisher,
    scale_element,
    scale_quad,
    squares_leaver,
)
from numba_kernels.cuda.gemm.hopper_ring import PIECE_COLUMNS
from numba_kernels.cuda.intrinsics import convert, mbarrier, memory, mma, tma
from numba_kernels.cuda.intrinsics.device import device_function, in_turn
from numba_kernels.cuda.intrinsics.warp import shuffle_index_f32, shuffle_xor_f32, sync_warp

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

SQUARE_PIECES = 2  # whose squares are added up in one sum
_PARTS_AT_ONCE = 4  # vectors of parts of a row's squares that a lane has in flight


@device_function
def load_scales(given, first_row, lane):
    """The scales of the two rows, lane / 4 and 8 further on, that a lane of a warp has sums of; 1 where there are none.
    Four lanes add up the parts of a row."""
    upper, lower = float32(1.0), float32(1.0)
    if given.x_squares != uint64(0):
        values = cuda.local.array((_PARTS_AT_ONCE, 2, 4), float32)
        totals = cuda.local.array(2, float32)
        for j in range(2):
            totals[j] = float32(0.0)
        row = uint32(first_row + (lane >> uint32(2)))
        part = uint32((lane & uint32(3)) * uint32(4))
        while part < given.x_parts:
            for i in range(_PARTS_AT_ONCE):
                at = uint32(part + uint32(16 * i))
                for j in range(2):
                    for e in range(4):
                        values[i, j, e] = float32(0.0)
                    if at < given.x_parts and uint32(row + uint32(8 * j)) < given.m:
                        place = uint64(uint32(row + uint32(8 * j))) * uint64(given.x_parts) + uint64(at)
                        loaded = memory.load_4xf32(given.x_squares + place * uint64(4))
                        for e in range(4):
                            values[i, j, e] = loaded[e]
            for i in range(_PARTS_AT_ONCE):
                for j in range(2):
                    totals[j] += (values[i, j, 0] + values[i, j, 1]) + (values[i, j, 2] + values[i, j, 3])
            part = uint32(part + uint32(16 * _PARTS_AT_ONCE))
        for j in range(2):
            totals[j] += shuffle_xor_f32(totals[j], uint32(1))
            totals[j] += shuffle_xor_f32(totals[j], uint32(2))
        upper, lower = norm_scale(totals[0], given.k, given.eps), norm_scale(totals[1], given.k, given.eps)
    return upper, lower


@functools.cache
def row_finisher(dtype: str, out_dtype: str, num_columns: int, piece_columns: int = PIECE_COLUMNS) -> Any:
    """A device function that finishes a warp's sums, 16 rows of `num_columns`, and stores them along rows.

    They pass through the warp's own piece of shared memory, `piece_columns` columns at a time. It serves any output:
    rows that can be written 4 elements at a time are, others element by element.
    """
    finish, finish_quad = finisher(dtype, out_dtype), quad_finisher(dtype, out_dtype)
    store_pair, load_4, load_1 = memory.shared_store_2xf32, memory.shared_load_4xf32, memory.shared_load_f32
    flip_of = mma.accumulator_flip(piece_columns)
    width, quads = piece_columns, piece_columns // 4

    @device_function
    def scale_of(scales, row):
        """The scale of a row of the 16, from its lane; all lanes call this."""
        lane = uint32((row & uint32(7)) << uint32(2))
        upper, lower = shuffle_index_f32(scales[0], lane), shuffle_index_f32(scales[1], lane)
        return upper if row < uint32(8) else lower

    @device_function
    def finish_rows(given, sums, scales, piece, first_row, first_column, lane):
        m, n, is_by_quads = given.m, given.n, can_finish_quads(given)
        pair = uint32(piece + ((lane >> uint32(2)) * uint32(width) + (lane & uint32(3)) * uint32(2)) * uint32(4))
        flip = uint32(flip_of(lane >> uint32(2)) * uint32(4))
        for part in range(num_columns // width):
            sync_warp()  # the part before has been read
            for i in range(width // 8):
                at = uint32(pair + (uint32(i * 32) ^ flip))
                e = part * (width // 2) + 4 * i
                store_pair(at, (sums[e], sums[e + 1]))
                store_pair(uint32(at + uint32(8 * width * 4)), (sums[e + 2], sums[e + 3]))
            sync_warp()
            part_column = uint32(first_column + uint32(part * width))
            item = lane
            if is_by_quads:
                while item < uint32(16 * quads):
                    row, column = item // uint32(quads), item % uint32(quads) * uint32(4)
                    scale = scale_of(scales, row)
                    if first_row + row < m and part_column + column < n:
                        values = load_4(uint32(piece + (row * uint32(width) + (column ^ flip_of(row))) * uint32(4)))
                        values = scale_quad(values, scale)
                        finish_quad(given, first_row + row, part_column + column, values)
                    item = uint32(item + uint32(32))
            else:
                while item < uint32(16 * width):
                    row, column = item // uint32(width), item % uint32(width)
                    scale = scale_of(scales, row)
                    if first_row + row < m and part_column + column < n:
                        value = load_1(uint32(piece + (row * uint32(width) + (column ^ flip_of(row))) * uint32(4)))
                        value = scale_element(value, scale)
                        finish(given, first_row + row, part_column + column, value)
                    item = uint32(item + uint32(32))

    return finish_rows


@functools.cache
def _pair_loader(dtype: str) -> Any:
    """A device function ``(given, column) -> 2 float32``, of the bias; all on bounds of pairs."""
    unpack = {"f16": convert.unpack_f16, "bf16": convert.unpack_bf16}[dtype]
    load_pair, load_word = memory.load_2xf32, memory.load_b32

    @device_function
    def load_bias(given, column):
        if given.bias_is_f32 != uint32(0):
            low, high = load_pair(given.bias + uint64(column) * uint64(4))
        else:
            low, high = unpack(load_word(given.bias + uint64(column) * uint64(2)))
        return low, high

    return load_bias


@functools.cache
def residual_loader(piece_columns: int) -> Any:
    """A device function that has the TMA bring the residual of a warp's first two pieces, one lane calling it."""
    load, wait_read, half_bytes = tma.load(2), tma.store_wait_read(0), 32 * piece_columns

    @device_function
    def begin(piece, barriers, residual, row, column):
        wait_read()  # the last tile has left them
        for half in range(2):
            barrier = uint32(barriers + uint32(8 * half))
            mbarrier.arrive_expecting(barrier, uint32(half_bytes))
            target = uint32(piece + uint32(half * half_bytes))
            load(target, residual, barrier, uint32(column + uint32(half * piece_columns)), row)

    return begin


@functools.cache
def _piece_storer(
    dtype: str, num_columns: int, number: int, piece_columns: int, *, has_residual: bool, activation: str
) -> Any:  # fmt: skip
    """A device function that stores a warp's piece of that number by the TMA, as in `tile_storer`. It takes the sums of
    squares of the piece before and returns them with its own."""
    pack = {"f16": convert.pack_f16, "bf16": convert.pack_bf16}[dtype]
    unpack = {"f16": convert.unpack_f16, "bf16": convert.unpack_bf16}[dtype]
    load_bias = _pair_loader(dtype)
    load_matrices, store_matrices = mma.load_matrix_x4, mma.store_matrix_x4
    load, store, wait_read = tma.load(2), tma.store(2), tma.store_wait_read(0)
    row_bytes, first_sum, num_pieces = 2 * piece_columns, number * (piece_columns // 2), num_columns // piece_columns
    half_bytes, has_two_behind = 16 * row_bytes, number + 2 < num_pieces
    # The half's last store is the one before the last, but for the first of an odd number of pieces: it is the last.
    wait_until_free = tma.store_wait_read(0 if number == 0 and num_pieces % 2 else 1)
    swizzle_shift, swizzle_mask = (0, 7) if row_bytes == 128 else (1, 3)  # two rows of 64 bytes lie in 128
    is_gated, gated = activation != "", GATED.get(activation)

    @device_function
    def store_piece(squared, state):
        given, sums, scales, piece, barriers, phase, row, first_column, lane = state
        s, t = scales
        upper_square, lower_square = squared
        column = uint32(first_column + uint32(number * piece_columns))
        swizzle = uint32((lane >> uint32(swizzle_shift)) & uint32(swizzle_mask))
        place = uint32((lane & uint32(15)) * uint32(row_bytes) + (((lane >> uint32(4)) ^ swizzle) << uint32(4)))
        target = uint32(piece + uint32(number % 2 * half_bytes))
        if has_residual:
            mbarrier.wait(uint32(barriers + uint32(number % 2 * 8)), phase ^ uint32(number // 2 % 2))
        else:
            if lane == uint32(0):
                wait_until_free()
            sync_warp()
        for i in range(piece_columns // 16):
            at = uint32(target + (place ^ uint32(32 * i)))
            e = first_sum + 8 * i
            if is_gated:
                u = e + num_columns // 2
                upper_left = gated(sums[e] * s, sums[u] * s), gated(sums[e + 1] * s, sums[u + 1] * s)
                lower_left = gated(sums[e + 2] * t, sums[u + 2] * t), gated(sums[e + 3] * t, sums[u + 3] * t)
                upper_right = gated(sums[e + 4] * s, sums[u + 4] * s), gated(sums[e + 5] * s, sums[u + 5] * s)
                lower_right = gated(sums[e + 6] * t, sums[u + 6] * t), gated(sums[e + 7] * t, sums[u + 7] * t)
            else:
                a, b, c, d = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
                pair_column = uint32(column + uint32(16 * i) + (lane & uint32(3)) * uint32(2))
                if given.bias != uint64(0):
                    if pair_column < given.n:
                        a, b = load_bias(given, pair_column)
                    if pair_column + uint32(8) < given.n:
                        c, d = load_bias(given, uint32(pair_column + uint32(8)))
                upper_left, upper_right = (
                    (sums[e] * s + a, sums[e + 1] * s + b), (sums[e + 4] * s + c, sums[e + 5] * s + d)
                )  # fmt: skip
                lower_left, lower_right = (
                    (sums[e + 2] * t + a, sums[e + 3] * t + b), (sums[e + 6] * t + c, sums[e + 7] * t + d)
                )  # fmt: skip
            if has_residual:
                before = load_matrices(at)
                pair = unpack(before[0])
                upper_left = (upper_left[0] + pair[0], upper_left[1] + pair[1])
                pair = unpack(before[1])
                lower_left = (lower_left[0] + pair[0], lower_left[1] + pair[1])
                pair = unpack(before[2])
                upper_right = (upper_right[0] + pair[0], upper_right[1] + pair[1])
                pair = unpack(before[3])
                lower_right = (lower_right[0] + pair[0], lower_right[1] + pair[1])
                upper_square += upper_left[0] * upper_left[0] + upper_left[1] * upper_left[1]
                upper_square += upper_right[0] * upper_right[0] + upper_right[1] * upper_right[1]
                lower_square += lower_left[0] * lower_left[0] + lower_left[1] * lower_left[1]
                lower_square += lower_right[0] * lower_right[0] + lower_right[1] * lower_right[1]
            store_matrices(
                at,
                (
                    pack(upper_left[0], upper_left[1]), pack(lower_left[0], lower_left[1]),
                    pack(upper_right[0], upper_right[1]), pack(lower_right[0], lower_right[1]),
                ),
            )  # fmt: skip
        tma.fence_shared()
        sync_warp()
        if lane == uint32(0):
            store(target, given.out, column, row)
            tma.store_commit()
            if has_residual and has_two_behind:
                wait_read()
                barrier = uint32(barriers + uint32(number % 2 * 8))
                mbarrier.arrive_expecting(barrier, uint32(half_bytes))
                load(target, given.residual, barrier, uint32(column + uint32(2 * piece_columns)), row)
        return upper_square, lower_square

    return store_piece


@functools.cache
def _pair_storer(store_pieces: Sequence[Any], columns: int, first_column: int, *, leaves_squares: bool) -> Any:
    """A device function ``(state)`` for up to two pieces, together `columns` wide, and their squares. Four lanes have a
    row's."""
    store_first, store_second, has_second = store_pieces[0], store_pieces[-1], len(store_pieces) > 1
    leave_squares = squares_leaver(columns, 4)

    @device_function
    def store_pair(state):
        squared = store_first((float32(0.0), float32(0.0)), state)
        if has_second:
            squared = store_second(squared, state)
        if leaves_squares:
            given, _, _, _, _, _, row, column, lane = state
            is_first, own_column = (lane & uint32(3)) == uint32(0), uint32(column + uint32(first_column))
            for half in range(2):
                own_row = uint32(row + (lane >> uint32(2)) + uint32(8 * half))
                leave_squares(given, squared[half], is_first, own_row, own_column)

    return store_pair


@functools.cache
def tile_storer(
    dtype: str, num_columns: int, piece_columns: int = PIECE_COLUMNS, *, has_residual: bool = False,
    activation: str = "",
) -> Any:  # fmt: skip
    """A device function that finishes a warp's sums, 16 rows of `num_columns`, and gives them to the TMA.

    `piece_columns` 16-bit columns, 64 or 32, are 128 or 64 bytes: a piece lies swizzled over them in shared memory,
    where `stmatrix` writes it and the TMA reads it without conflicts, and columns beyond the output are not written.
    Each warp has two pieces, one that is filled while the other is stored, and waits for no other warp. The residual
    comes into the same place (`residual_loader`; an even number of pieces), and `ldmatrix` reads it as `stmatrix`
    writes; the result's squares may be left then.

    With an `activation` f there are twice as many sums, f(first) * second is stored, and there is no bias or residual.
    """
    num_pieces = num_columns // piece_columns
    assert num_pieces % SQUARE_PIECES == 0 or not has_residual
    # Each piece's sums by constant places: LLVM does not unroll a loop so long, and registers cannot be indexed.
    pieces = [
        _piece_storer(dtype, num_columns, number, piece_columns, has_residual=has_residual, activation=activation)
        for number in range(num_pieces)
    ]
    return in_turn(
        [
            _pair_storer(
                tuple(pieces[number : number + SQUARE_PIECES]), SQUARE_PIECES * piece_columns, number * piece_columns,
                leaves_squares=has_residual,
            ) for number in range(0, num_pieces, SQUARE_PIECES)
        ]
    )  # fmt: skip
