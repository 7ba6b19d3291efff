"""The layout in force: of weights and rows of x in memory, and the shapes of register tiles.

It belongs to the kind of tile (`target`) and does not depend on instructions: every layout is compiled for every
processor, with the same results.

Vectors are always ``<16 x float>`` in the IR; LLVM splits them where registers are narrower (two AVX2 or four NEON
registers each). So only the number of accumulators depends on the machine: with 32 registers of 16 lanes a product's
tile of 8 rows x 3 vectors keeps 24 of them busy, and the factors have the others (attention's tile has a power of two
of rows anyway; 9 rows would leave none for bfloat16). With 16 registers of 8 lanes, 6 rows x 1 vector (12 registers)
leave room for two halves of a weight and a broadcast; NEON's 32 registers of 4 lanes hold 4 rows x 1 vector (16
registers) and operands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from numba_kernels.cpu.target import EMULATED_BF16, LANES, available_tiles, layout_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes and order of one kind of tile's panels.

    rows             of a product's tile, at most
    attention_rows   of attention's tile, at most: a power of two
    vectors          of LANES columns, of a panel and of a product's tile
    dot              the form of int8 rows of x: words of four ``bytes``, for vpdpbusd, or ``pairs`` of int16, for
                     vpmaddwd (in blocks of small integers bytes, for vpmaddubsw)
    int8_rows        of a tile of int8 among more than ``rows`` rows, at most: its integer and its float sums together
                     fit the registers; 0 for ``rows``
    rounds_to_bf16   whether rows of x are rounded to pairs of bfloat16 before they meet a bfloat16 weight or FP8, by
                     vdpbf16ps
    amx_rows         of a tile of AMX registers, at most: two of their rows; 0 without them. bfloat16 weights always
                     meet such a tile, and rows of x are rounded; integers do where rows are many
    """

    rows: int
    attention_rows: int
    vectors: int
    dot: Literal["bytes", "pairs"]
    int8_rows: int = 0
    rounds_to_bf16: bool = False
    amx_rows: int = 0


LAYOUTS = {
    "portable": Layout(rows=4, attention_rows=4, vectors=1, dot="bytes"),
    "avx2": Layout(rows=6, attention_rows=4, vectors=1, dot="pairs"),
    "avx512": Layout(rows=8, attention_rows=8, vectors=3, dot="pairs"),
    "avx512_vnni": Layout(rows=8, attention_rows=8, vectors=3, dot="bytes", int8_rows=5),
    "avx512_bf16": Layout(rows=8, attention_rows=8, vectors=3, dot="bytes", int8_rows=5, rounds_to_bf16=True),
    "amx": Layout(rows=8, attention_rows=8, vectors=3, dot="bytes", int8_rows=5, amx_rows=32),
}
LAYOUTS[EMULATED_BF16] = replace(LAYOUTS[available_tiles()[-1]], rounds_to_bf16=True, amx_rows=0)

_LAYOUT = LAYOUTS[layout_name()]
GEMM_ROWS, TILE_ROWS, TILE_VECTORS = _LAYOUT.rows, _LAYOUT.attention_rows, _LAYOUT.vectors
DOT, ROUNDS_TO_BF16, AMX_ROWS = _LAYOUT.dot, _LAYOUT.rounds_to_bf16, _LAYOUT.amx_rows
INT8_ROWS = _LAYOUT.int8_rows or GEMM_ROWS
PANEL_COLUMNS = TILE_VECTORS * LANES  # columns of the weight that one panel holds
