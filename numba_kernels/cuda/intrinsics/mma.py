"""The tensor cores of sm_80 on: `mma.sync` on 16x8x16 tiles, and `ldmatrix`, which brings their operands.

    accumulator = mma_bf16(accumulator, a, b)      # D[16, 8] = A[16, 16] . B[16, 8] + D, float32, over a warp

With g = lane // 4 and t = lane % 4, a lane holds (pairs have the lower index in the low half):

    a: 4 pairs   A[g, 2t..], A[g + 8, 2t..], A[g, 2t + 8..], A[g + 8, 2t + 8..]
    b: 2 pairs   B[2t.., g], B[2t + 8.., g]
    accumulator: D[g, 2t], D[g, 2t + 1], D[g + 8, 2t], D[g + 8, 2t + 1]

`ldmatrix` reads 8x8 matrices of 16-bit elements from shared memory; lane 8 i + r gives the address of matrix i's row r
(16 bytes, aligned), and receives of matrix i the pair at row g, columns 2t, 2t + 1; transposed: rows 2t, 2t + 1 of
column g. `stmatrix` (sm_90 on) stores what `ldmatrix` reads. PTX ISA, "mma.sync", "ldmatrix", "stmatrix".

    flip = accumulator_flip(64)    # float32 [row, column] of a tile of 64 columns lies at 64 row + (column ^ flip(row))

Laid out so, accumulators are stored to shared memory in pairs, and read along rows, without a bank conflict.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import types

from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function


def _mma(kind: str) -> Any:
    return instruction(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$0,$1,$2,$3};",
        "ffff",
        "rrrr rr",
        is_pure=True,
        is_accumulating=True,
    )


mma_bf16 = _mma("bf16")
mma_f16 = _mma("f16")

load_matrix_x4 = instruction("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "rrrr", "r")
load_matrix_x4_transposed = instruction(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];", "rrrr", "r"
)

store_matrix_x4 = instruction("stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};", "", "r rrrr")
load_matrix_x2 = instruction("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {$0,$1}, [$2];", "rr", "r")  # of lanes 0 to 15
load_matrix_x2_transposed = instruction("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {$0,$1}, [$2];", "rr", "r")
transpose_matrix = instruction("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r", "r")  # an 8x8 matrix in registers


@device_function
def put_4(words, four):
    """Puts a tuple of four into an array."""
    a, b, c, d = four
    words[0] = a
    words[1] = b
    words[2] = c
    words[3] = d


@functools.cache
def product_adder(dtype: str) -> Any:
    """A device function ``(sums, a, b)``: `mma_bf16` or `mma_f16` on an array of an accumulator's four."""
    mma = mma_bf16 if dtype == "bf16" else mma_f16

    @device_function
    def add_product(sums, a, b):
        put_4(sums, mma((sums[0], sums[1], sums[2], sums[3]), a, b))

    return add_product


@functools.cache
def accumulator_flip(num_columns: int) -> Any:
    """A device function ``row -> bits of the column that are exchanged``, in a tile of so many columns (16, 32, ...).

    Half a warp stores pairs of 4 neighbouring rows, 8 columns of each. Rows of whole 128 bytes begin in one bank: each
    of the 4 goes to 8 banks of its own. Other rows alternate between two beginnings, 16 banks apart: two of the 4 are
    moved by 8.
    """
    uint32 = types.uint32
    if num_columns % 32 == 0:
        return device_function(lambda row: (row & uint32(3)) << uint32(3))
    return device_function(lambda row: (row & uint32(2)) << uint32(2))
