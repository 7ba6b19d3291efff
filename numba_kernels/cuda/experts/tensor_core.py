"""Products of rows with experts, tier 2: the tiles of `gemm.tensor_core`, of 16-bit rows on 16-byte bounds.

Against the tiled tier it changes the arithmetic (`mma.sync`) and the way in (`cp.async` ahead of it, each row by the
list of rows). Each expert has its own addresses of weight and bias, and end of rows. There are as many blocks as
possible tiles; they go down 8 row tiles, then on to the next columns, so that tiles of an expert read its weight
together.

Sums run over k from first to last in steps of 16, whatever the tile: a row has the same bits in any batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba_kernels.cuda.experts.tiled import ARGUMENT_TYPES, kernel_of_tiles
from numba_kernels.cuda.gemm.epilogue import GATES
from numba_kernels.cuda.gemm.tensor_core import (
    EFFICIENCY,
    MEDIUM,
    SKINNY,
    SMALL,
    Tile,
    min_blocks,
    tile_finder,
    tile_multiplier,
)
from numba_kernels.cuda.intrinsics.element_types import VECTOR_WIDTH
from numba_kernels.cuda.specialisation import Launch, Specialisation

TILES = (SKINNY, SMALL, MEDIUM)


@functools.cache
def _kernel(dtype: str, tile: Tile, activation: str) -> Specialisation:
    """The arguments of all tiers (`tiled`)."""
    multiply_tile = tile_multiplier(dtype, dtype, tile, True, True, False, activation, True)
    find_tile = tile_finder(tile.block_m, tile.block_n // 2 if activation else tile.block_n)

    return Specialisation(
        name=f"experts_tensor_core_{dtype}_{tile}{f'_{activation}' if activation else ''}",
        kernel=kernel_of_tiles(find_tile, multiply_tile),
        argument_types=ARGUMENT_TYPES,
        max_threads=tile.num_warps * 32,
        min_blocks=min_blocks(tile),
        constants={"dtype": dtype, "tile": str(tile), "activation": activation},
    )


def can_plan(dtype: str, *depths: int) -> bool:
    """Whether it multiplies rows of this type and of all these lengths; they begin on 16-byte bounds."""
    return dtype != "f32" and all(depth % VECTOR_WIDTH[dtype] == 0 for depth in depths)


def choose_tile(num_rows: int, num_experts: int, columns: int, num_multiprocessors: int) -> Tile:
    """The tile for so many rows of that many experts, taken as spread evenly. The choice changes no bit."""
    touched = min(num_experts, num_rows)
    rows = -(-num_rows // touched)  # of an expert
    if rows <= SKINNY.block_m:
        return SKINNY

    def cost(tile: Tile) -> float:
        blocks = touched * -(-rows // tile.block_m) * -(-columns // tile.block_n)
        return -(-blocks // num_multiprocessors) * tile.block_m * tile.block_n / EFFICIENCY[tile]

    return min((SMALL, MEDIUM), key=cost)


def tile_of(tile_rows: int) -> Tile:
    """The tile of so many rows."""
    return next(tile for tile in TILES if tile.block_m == tile_rows)


def plan(tiles: int, columns: int, dtype: str, activation: str, tile: Tile) -> Launch:
    """The launch for at most so many tiles of rows, at least one, if `can_plan`."""
    block_columns = tile.block_n // 2 if activation else tile.block_n
    grid = (tiles * -(-columns // block_columns), 1, 1)
    return Launch(_kernel(dtype, tile, activation), grid, (tile.num_warps * 32, 1, 1), shared_bytes=tile.shared_bytes)


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for dtype in ("f16", "bf16"):
        for tile in TILES:
            for activation in ("", *GATES):
                yield _kernel(dtype, tile, activation)
