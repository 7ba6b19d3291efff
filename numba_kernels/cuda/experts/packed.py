"""Products of 16-bit rows with experts that stay quantised, many or few: the tiles of `gemm.mixed_input`.

The table has the addresses of packed weights (`packing`); all else is as in `tensor_core`. A tile has 128 rows, or 16,
where experts have few: then a block's 128 columns stream, with three slots of them in flight. Sums run over k from
first to last in both: a row has the same bits in any batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba_kernels.cuda.experts.tiled import ARGUMENT_TYPES, kernel_of_tiles
from numba_kernels.cuda.gemm.mixed_input import (
    BLOCK_M,
    BLOCK_N,
    FEW_ROWS,
    TILE_COLUMNS,
    can_read,
    num_threads,
    shared_bytes,
    tile_multiplier,
)
from numba_kernels.cuda.gemm.tensor_core import tile_finder
from numba_kernels.cuda.intrinsics.element_types import VECTOR_WIDTH
from numba_kernels.cuda.packing import PACKINGS, Packing
from numba_kernels.cuda.specialisation import Launch, Specialisation

_FEW = 2 * FEW_ROWS  # rows of an expert up to which its tiles have 16
_FLOPS = 240e12  # of tiles of 128 rows, measured on an H200 with MXFP4 (INT4: 222, FP8: 201)


@functools.cache
def _kernel(dtype: str, weight_name: str, tile_rows: int, activation: str) -> Specialisation:
    """The arguments of all tiers (`tiled`)."""
    multiply_tile = tile_multiplier(dtype, weight_name, dtype, activation, tile_rows, True)
    find_tile = tile_finder(tile_rows, BLOCK_N // 2 if activation else BLOCK_N)

    return Specialisation(
        name=f"experts_packed_{weight_name}_{dtype}_{tile_rows}{f'_{activation}' if activation else ''}",
        kernel=kernel_of_tiles(find_tile, multiply_tile),
        argument_types=ARGUMENT_TYPES,
        max_threads=num_threads(tile_rows),
        min_blocks=1,
        constants={"dtype": dtype, "weight": weight_name, "tile_rows": tile_rows, "activation": activation},
    )


def can_plan(packing: Packing, dtype: str, columns: int, depth: int, *, is_gated: bool) -> bool:
    """Whether it multiplies 16-bit rows of this length by experts of so many columns; a gated one has as many twice."""
    is_whole = depth % VECTOR_WIDTH[dtype] == 0 and (not is_gated or columns % TILE_COLUMNS == 0)
    return dtype != "f32" and is_whole and can_read(packing, dtype)


def choose_tile_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a tile, for rows spread evenly. The choice changes no bit."""
    return FEW_ROWS if num_rows <= _FEW * min(num_experts, num_rows) else BLOCK_M


def seconds(num_rows: int, num_experts: int, columns: int, depth: int, num_multiprocessors: int) -> float:
    """Seconds of a product with weights of `columns` rows, in tiles of 128 rows, spread evenly, on a Hopper."""
    touched = min(num_experts, num_rows)
    rows = -(-num_rows // touched)  # of an expert
    blocks = touched * -(-rows // BLOCK_M) * -(-columns // BLOCK_N)
    return 2.0 * depth * BLOCK_M * BLOCK_N * -(-blocks // num_multiprocessors) * num_multiprocessors / _FLOPS


def plan(tiles: int, columns: int, dtype: str, weight_name: str, activation: str, tile_rows: int) -> Launch:
    """The launch for at most so many tiles of rows, at least one, if `can_plan`."""
    grid = (tiles * -(-columns // (BLOCK_N // 2 if activation else BLOCK_N)), 1, 1)
    return Launch(
        _kernel(dtype, weight_name, tile_rows, activation), grid, (num_threads(tile_rows), 1, 1),
        shared_bytes=shared_bytes(weight_name, dtype, tile_rows),
    )  # fmt: skip


def specialisations() -> Iterator[Specialisation]:
    """Specialisations of bf16 that published models use; others are compiled at their first launch."""
    for weight in PACKINGS:
        for tile_rows in (FEW_ROWS, BLOCK_M):
            for activation in ("", "silu", *(("clamped_silu",) if weight == "e2m1_g32_exponents" else ())):
                yield _kernel("bf16", weight, tile_rows, activation)
