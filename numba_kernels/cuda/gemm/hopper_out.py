"""How the Hopper tier's sums leave: a warp by itself, through its own pieces of shared memory, no other warp asked."""

from __future__ import annotations

import functools
from typing import Any

from numba import types

from numba_kernels.cuda.gemm.epilogue import can_finish_quads, finisher, quad_finisher
from numba_kernels.cuda.gemm.hopper_ring import PIECE_BYTES, PIECE_COLUMNS
from numba_kernels.cuda.intrinsics import convert, mbarrier, memory, mma, tma
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import exp, fma, reciprocal
from numba_kernels.cuda.intrinsics.warp import sync_warp

uint32, uint64, float32 = types.uint32, types.uint64, types.float32


@functools.cache
def row_finisher(dtype: str, out_dtype: str, num_columns: int) -> Any:
    """A device function that finishes a warp's sums, 16 rows of `num_columns`, and stores them along rows.

    They pass through the warp's own piece of shared memory, `PIECE_COLUMNS` columns at a time. It serves any output:
    rows that can be written 4 elements at a time are, others element by element.
    """
    finish, finish_quad = finisher(dtype, out_dtype), quad_finisher(dtype, out_dtype)
    store_pair, load_4, load_1 = memory.shared_store_2xf32, memory.shared_load_4xf32, memory.shared_load_f32
    flip_of = mma.accumulator_flip(PIECE_COLUMNS)
    width, quads = PIECE_COLUMNS, PIECE_COLUMNS // 4

    @device_function
    def finish_rows(sums, piece, lane, bias, bias_is_f32, residual, out, m, n, first_row, first_column):
        is_by_quads = can_finish_quads(bias, residual, out, n)
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
                    if first_row + row < m and part_column + column < n:
                        values = load_4(uint32(piece + (row * uint32(width) + (column ^ flip_of(row))) * uint32(4)))
                        finish_quad(
                            bias, bias_is_f32, residual, out, n, first_row + row, part_column + column, values
                        )  # fmt: skip
                    item = uint32(item + uint32(32))
            else:
                while item < uint32(16 * width):
                    row, column = item // uint32(width), item % uint32(width)
                    if first_row + row < m and part_column + column < n:
                        value = load_1(uint32(piece + (row * uint32(width) + (column ^ flip_of(row))) * uint32(4)))
                        finish(bias, bias_is_f32, residual, out, n, first_row + row, part_column + column, value)
                    item = uint32(item + uint32(32))

    return finish_rows


@functools.cache
def _pair_loader(dtype: str) -> Any:
    """A device function ``(bias, bias_is_f32, column) -> 2 float32``; all on bounds of pairs."""
    unpack = {"f16": convert.unpack_f16, "bf16": convert.unpack_bf16}[dtype]
    load_pair, load_word = memory.load_2xf32, memory.load_b32

    @device_function
    def load_bias(bias, bias_is_f32, column):
        if bias_is_f32 != uint32(0):
            low, high = load_pair(bias + uint64(column) * uint64(4))
        else:
            low, high = unpack(load_word(bias + uint64(column) * uint64(2)))
        return low, high

    return load_bias


@functools.cache
def residual_loader() -> Any:
    """A device function that has the TMA bring the residual of a warp's first two pieces, one lane calling it."""
    load, wait_read = tma.load(2), tma.store_wait_read(0)

    @device_function
    def begin(piece, barriers, residual, row, column):
        wait_read()  # the last tile has left them
        for half in range(2):
            barrier = uint32(barriers + uint32(8 * half))
            mbarrier.arrive_expecting(barrier, uint32(PIECE_BYTES // 2))
            target = uint32(piece + uint32(half * (PIECE_BYTES // 2)))
            load(target, residual, barrier, uint32(column + uint32(half * PIECE_COLUMNS)), row)

    return begin


@device_function
def _silu_gated(gate, up):
    return gate * reciprocal(float32(1) + exp(-gate)) * up


@device_function
def _gelu_tanh_gated(gate, up):
    twice = float32(2 * 0.7978845608028654)
    return gate * reciprocal(float32(1) + exp(-gate * fma(gate * gate, twice * float32(0.044715), twice))) * up


_GATED = {"silu": _silu_gated, "gelu_tanh": _gelu_tanh_gated}


@functools.cache
def tile_storer(dtype: str, num_columns: int, *, has_residual: bool = False, activation: str = "") -> Any:
    """A device function that finishes a warp's sums, 16 rows of `num_columns`, and gives them to the TMA.

    `PIECE_COLUMNS` 16-bit columns are 128 bytes: a piece lies swizzled over them in shared memory, where `stmatrix`
    writes it and the TMA reads it without conflicts, and what lies beyond the output is not written. Each warp has two
    pieces, one that is filled while the other leaves, and asks no other warp. The residual comes into the same place
    (`residual_loader`), and `ldmatrix` reads it as `stmatrix` writes.

    With an `activation` f there are twice as many sums, f(first) * second is stored, and there is no bias or residual.
    """
    pack = {"f16": convert.pack_f16, "bf16": convert.pack_bf16}[dtype]
    unpack = {"f16": convert.unpack_f16, "bf16": convert.unpack_bf16}[dtype]
    load_bias = _pair_loader(dtype)
    load_matrices, store_matrices = mma.load_matrix_x4, mma.store_matrix_x4
    load, store, wait_but_one, wait_read = tma.load(2), tma.store(2), tma.store_wait_read(1), tma.store_wait_read(0)
    num_parts, half_bytes = num_columns // PIECE_COLUMNS, PIECE_BYTES // 2
    is_gated, gated = activation != "", _GATED.get(activation)

    @device_function
    def store_tile(sums, piece, barriers, phase, lane, bias, bias_is_f32, residual, out, n, first_row, first_column):
        place = uint32((lane & uint32(15)) * uint32(128) + (((lane >> uint32(4)) ^ (lane & uint32(7))) << uint32(4)))
        for part in range(num_parts):
            target = uint32(piece + uint32(part % 2 * half_bytes))
            part_column = uint32(first_column + uint32(part * PIECE_COLUMNS))
            if has_residual:
                mbarrier.wait(uint32(barriers + uint32(part % 2 * 8)), phase ^ uint32(part // 2 % 2))
            else:
                if lane == uint32(0):
                    wait_but_one()
                sync_warp()
            for i in range(PIECE_COLUMNS // 16):
                at = uint32(target + (place ^ uint32(32 * i)))
                e = part * (PIECE_COLUMNS // 2) + 8 * i
                if is_gated:
                    u = e + num_columns // 2
                    upper_left = gated(sums[e], sums[u]), gated(sums[e + 1], sums[u + 1])
                    lower_left = gated(sums[e + 2], sums[u + 2]), gated(sums[e + 3], sums[u + 3])
                    upper_right = gated(sums[e + 4], sums[u + 4]), gated(sums[e + 5], sums[u + 5])
                    lower_right = gated(sums[e + 6], sums[u + 6]), gated(sums[e + 7], sums[u + 7])
                else:
                    a, b, c, d = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
                    column = uint32(part_column + uint32(16 * i) + (lane & uint32(3)) * uint32(2))
                    if bias != uint64(0):
                        if column < n:
                            a, b = load_bias(bias, bias_is_f32, column)
                        if column + uint32(8) < n:
                            c, d = load_bias(bias, bias_is_f32, uint32(column + uint32(8)))
                    upper_left, upper_right = (sums[e] + a, sums[e + 1] + b), (sums[e + 4] + c, sums[e + 5] + d)
                    lower_left, lower_right = (sums[e + 2] + a, sums[e + 3] + b), (sums[e + 6] + c, sums[e + 7] + d)
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
                store(target, out, part_column, first_row)
                tma.store_commit()
                if has_residual and part + 2 < num_parts:
                    wait_read()
                    barrier = uint32(barriers + uint32(part % 2 * 8))
                    mbarrier.arrive_expecting(barrier, uint32(half_bytes))
                    load(target, residual, barrier, uint32(part_column + uint32(2 * PIECE_COLUMNS)), first_row)

    return store_tile
