"""Products of rows with experts, tier 1: tiles of 16 x 16 in shared memory, an element a thread. Every type and size.

    out[r] = x[token of r] . weight[e]^T + bias[e]              for the rows r of expert e; or
    out[r] = f(gate, up)                                        of a weight that has gate's rows, then up's

Rows are grouped by expert (`order`); a block takes one of its tiles of rows and 16 columns, and exits at once where
there is no such tile. Each sum runs over k from first to last, so that a row has the same bits in any batch.

Arguments of all tiers: x, table, tiles, num_tiles, tokens (0 if row r of x is r's), out addresses; N, K, E. The table
[2, E] has the addresses of each expert's weight and of its bias, float32, or 0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.epilogue import GATES, Arguments
from numba_kernels.cuda.gemm.naive import SIDE
from numba_kernels.cuda.gemm.tiled import ACROSS_STRIDE
from numba_kernels.cuda.intrinsics.element import element_loader, element_storer
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES
from numba_kernels.cuda.intrinsics.memory import load_4xb32, load_b32, load_b64, load_f32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

ARGUMENT_TYPES = (types.uint64,) * 6 + (types.uint32,) * 3
TILE_ROWS = SIDE


def kernel_of_tiles(find_tile: Any, multiply_tile: Any) -> Any:
    """A kernel whose blocks take a tile each of a dense product (`gemm`), with the weight and bias of its expert."""

    def experts(x, table, tiles, num_tiles, tokens, out, n, k, num_experts):
        wait_for_previous_grid()
        count = load_b32(num_tiles)
        row_tile, first_column = find_tile(count, n)
        if row_tile < count and first_column < n:
            expert, first_row, rows, _ = load_4xb32(tiles + uint64(row_tile) * uint64(16))
            weight = load_b64(table + uint64(expert) * uint64(8))
            bias = load_b64(table + uint64(uint32(num_experts + expert)) * uint64(8))
            given = Arguments(
                x, weight, bias, uint64(0), out, uint32(first_row + rows), n, k, uint32(1), uint64(0), uint32(0),
                float32(0.0), uint64(0),
            )  # fmt: skip
            multiply_tile(given, first_row, first_column, tokens)

    return cuda.jit(experts)


@functools.cache
def _kernel(dtype: str, activation: str) -> Specialisation:
    load, store, item_bytes = element_loader(dtype), element_storer(dtype), ITEM_BYTES[dtype]
    is_gated, gated = activation != "", GATES.get(activation)
    parts = 2 if is_gated else 1

    def experts(x, table, tiles, num_tiles, tokens, out, n, k, num_experts):
        x_tile = cuda.shared.array((SIDE, SIDE), float32)  # [row, k]
        weight_tile = cuda.shared.array((parts, SIDE, ACROSS_STRIDE), float32)  # [gate or up, k, column]
        totals = cuda.local.array(parts, float32)
        tx, ty = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        tile = uint32(cuda.blockIdx.y)
        wait_for_previous_grid()
        launch_dependents()
        if tile < load_b32(num_tiles):
            expert, first_row, rows, _ = load_4xb32(tiles + uint64(tile) * uint64(16))
            weight = load_b64(table + uint64(expert) * uint64(8))
            bias = load_b64(table + uint64(uint32(num_experts + expert)) * uint64(8))
            first_column = uint32(uint32(cuda.blockIdx.x) * uint32(SIDE))
            column = uint32(first_column + tx)
            row = uint32(first_row + ty)
            source = row
            if ty < rows and tokens != uint64(0):
                source = load_b32(tokens + uint64(row) * uint64(4))
            x_row = x + uint64(source) * uint64(k) * uint64(item_bytes)
            for part in range(parts):
                totals[part] = float32(0.0)
            start = uint32(0)
            while start < k:
                inside = uint32(start + tx)
                element = float32(0.0)
                if ty < rows and inside < k:
                    element = load(x_row + uint64(inside) * uint64(item_bytes))
                x_tile[ty, tx] = element
                for part in range(parts):
                    element = float32(0.0)
                    if uint32(first_column + ty) < n and inside < k:
                        weight_row = uint64(first_column + ty) + uint64(part) * uint64(n)
                        element = load(weight + (weight_row * uint64(k) + uint64(inside)) * uint64(item_bytes))
                    weight_tile[part, tx, ty] = element
                sync_block()
                for i in range(SIDE):
                    for part in range(parts):
                        totals[part] += x_tile[ty, i] * weight_tile[part, i, tx]
                sync_block()
                start = uint32(start + uint32(SIDE))
            if ty < rows and column < n:
                if bias != uint64(0):
                    for part in range(parts):
                        place = uint64(column) + uint64(part) * uint64(n)
                        totals[part] += load_f32(bias + place * uint64(4))
                value = totals[0]
                if is_gated:
                    value = gated(totals[0], totals[1])
                store(out + (uint64(row) * uint64(n) + uint64(column)) * uint64(item_bytes), value)

    return Specialisation(
        name=f"experts_tiled_{dtype}{f'_{activation}' if activation else ''}",
        kernel=cuda.jit(experts),
        argument_types=ARGUMENT_TYPES,
        max_threads=SIDE * SIDE,
        constants={"dtype": dtype, "activation": activation},
    )


def plan(tiles: int, columns: int, dtype: str, activation: str) -> Launch:
    """The launch for at most so many tiles of rows."""
    return Launch(_kernel(dtype, activation), (-(-columns // SIDE), tiles, 1), (SIDE, SIDE, 1))


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for dtype in DTYPES:
        for activation in ("", *GATES):
            yield _kernel(dtype, activation)
