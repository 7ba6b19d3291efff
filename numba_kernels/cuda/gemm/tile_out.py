"""The epilogue of tiles of `mma.sync`: for kernels whose warps each have a tile of the output.

They pass through shared memory, each warp by itself, 16 rows at a time, so that bias, residual and output are read and
written along rows, four elements a lane. There a swizzle (`mma.accumulator_flip`) keeps lanes out of each other's
banks. In a gated unit half of a warp's columns are the gate's, the others those of up's that belong to them.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import types

from numba_kernels.cuda.gemm.epilogue import (
    GATED,
    Output,
    biased_gater,
    can_finish_quads,
    finisher,
    quad_finisher,
    quad_gater,
    scale_element,
    scale_quad,
    squares_leaver,
)
from numba_kernels.cuda.intrinsics import memory, mma
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.warp import sync_warp

uint32, uint64, float32 = types.uint32, types.uint64, types.float32


@functools.cache
def sums_leaver(
    dtype: str, out_dtype: str, warp_m: int, warp_n: int, activation: str = "", *, is_cut: bool = False,
    is_biased: bool = False,
) -> Any:  # fmt: skip
    """A device function that finishes a warp's tile of ``[warp_m, warp_n]``, whose shared memory is no longer in use.

    `sums` holds quads of `mma.sync`: of 16 rows, then of 16 columns, then of 8. They are used up. `staged` is 16 rows
    of float32 of this warp's own; `scales` the shared address of its rows' scales, which a segment's sums
    (`is_cut`) do not have. Gate and up may have float32 biases (`is_biased`), added before they meet; rows are not
    scaled then.
    """
    is_gated = activation != ""
    gated = gate_quad = gate_biased = gate_biased_quad = None
    if is_gated and is_biased:
        gate_biased, gate_biased_quad = biased_gater(activation, 1), biased_gater(activation, 4)
    elif is_gated:
        gated, gate_quad = GATED[activation], quad_gater(activation)
    finish, finish_quad = finisher(dtype, out_dtype), quad_finisher(dtype, out_dtype)
    store_pair, load_4, load_1 = memory.shared_store_2xf32, memory.shared_load_4xf32, memory.shared_load_f32
    m_tiles, n_pairs = warp_m // 16, warp_n // 16
    columns_out = warp_n // 2 if is_gated else warp_n
    quads, flip_of = columns_out // 4, mma.accumulator_flip(warp_n)
    leave_squares = squares_leaver(columns_out, quads)
    num_sums, pass_sums = m_tiles * n_pairs * 8, n_pairs * 8

    @device_function
    def leave_sums(given, sums, staged, scales, first_row, first_column, lane):
        pair = staged + ((lane >> uint32(2)) * uint32(warp_n) + (lane & uint32(3)) * uint32(2)) * uint32(4)
        flip = flip_of(lane >> uint32(2)) * uint32(4)
        m, n, bias, behind = given.m, given.n, given.bias, given
        in_quads = can_finish_quads(given)
        if is_gated and is_biased:
            behind = Output(uint64(0), given.residual, given.out, m, n, given.bias_is_f32, uint64(0))
        passed = uint32(0)
        while passed < uint32(m_tiles):  # registers cannot be indexed, so the sums move up by 16 rows each time
            for j in range(n_pairs):
                for h in range(2):
                    at = pair + (uint32((j * 16 + h * 8) * 4) ^ flip)
                    store_pair(at, (sums[8 * j + 4 * h], sums[8 * j + 4 * h + 1]))
                    store_pair(at + uint32(8 * warp_n * 4), (sums[8 * j + 4 * h + 2], sums[8 * j + 4 * h + 3]))
            for e in range(num_sums - pass_sums):
                sums[e] = sums[e + pass_sums]
            sync_warp()
            item = lane
            if in_quads:
                while item < uint32(16 * quads):
                    row, column = item // uint32(quads), item % uint32(quads) * uint32(4)
                    total = float32(0.0)
                    if first_row + row < m and first_column + column < n:
                        at_row, row_flip = staged + row * uint32(warp_n * 4), flip_of(row)
                        scale = float32(1.0) if is_cut else load_1(uint32(scales + row * uint32(4)))
                        values = load_4(uint32(at_row + (column ^ row_flip) * uint32(4)))
                        if is_gated:
                            ups = load_4(uint32(at_row + ((column + uint32(columns_out)) ^ row_flip) * uint32(4)))
                            if is_biased:
                                values = gate_biased_quad(values, ups, bias, uint32(first_column + column), n)
                            else:
                                values = gate_quad(values, ups, scale)
                        elif not is_cut:
                            values = scale_quad(values, scale)
                        total = finish_quad(behind, first_row + row, first_column + column, values)
                    if not (is_gated or is_cut):
                        leave_squares(given, total, column == uint32(0), first_row + row, first_column)
                    item += uint32(32)
            else:
                while item < uint32(16 * columns_out):
                    row, column = item // uint32(columns_out), item % uint32(columns_out)
                    if first_row + row < m and first_column + column < n:
                        at_row, row_flip = staged + row * uint32(warp_n * 4), flip_of(row)
                        scale = float32(1.0) if is_cut else load_1(uint32(scales + row * uint32(4)))
                        value = scale_element(load_1(uint32(at_row + (column ^ row_flip) * uint32(4))), scale)
                        if is_gated:
                            up = load_1(uint32(at_row + ((column + uint32(columns_out)) ^ row_flip) * uint32(4)))
                            if is_biased:
                                value = gate_biased(value, up, bias, uint32(first_column + column), n)
                            else:
                                value = gated(value, scale_element(up, scale))
                        finish(behind, first_row + row, first_column + column, value)
                    item += uint32(32)
            if not is_cut:
                scales = uint32(scales + uint32(64))
            sync_warp()
            first_row += uint32(16)
            passed += uint32(1)

    return leave_sums
