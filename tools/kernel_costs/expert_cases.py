"""Products of experts for the kernel report, beside dense ones: many rows an expert, and one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from numba_kernels.cuda.experts import packed, tensor_core, tiled
from numba_kernels.cuda.gemm.packed_tiles import BLOCK_M, BLOCK_N, FEW_ROWS
from numba_kernels.cuda.gemm.tensor_core import MEDIUM, SKINNY, SMALL, Tile
from numba_kernels.cuda.packing import packing_of
from numba_kernels.cuda.specialisation import Launch
from tools.kernel_costs.counts import Bench, Work

Run = Callable[[Bench], None]

_N, _K = 512, 512


def expert_cases() -> Iterator[tuple[str, str, Work, Run, int, bool]]:
    """Name, shape, least work, run, bytes of the tiling, and whether tensor cores do the products."""
    yield _case("tiled", "bf16", 2, 32, tiled.TILE_ROWS, 16, tiled.plan)
    for tile, rows in ((MEDIUM, 128), (SMALL, 64), (SKINNY, 1)):
        yield _case(f"tensor_core {tile}", "bf16", 4, rows, tile.block_m, tile.block_n, _with_tile(tile))
    for name in ("e2m1_g32_exponents", "u4_g128", "u8"):
        for tile_rows, rows in ((BLOCK_M, 128), (FEW_ROWS, 1)):
            yield _case("packed", name, 4, rows, tile_rows, BLOCK_N, _with_packing(name, tile_rows))


def _with_tile(tile: Tile) -> Callable[..., Launch]:
    return lambda tiles, columns, dtype, activation: tensor_core.plan(tiles, columns, dtype, activation, tile)


def _with_packing(name: str, tile_rows: int) -> Callable[..., Launch]:
    return lambda tiles, columns, dtype, activation: packed.plan(tiles, columns, dtype, name, activation, tile_rows)


def _case(
    tier: str, weight_name: str, count: int, rows: int, tile_rows: int, tile_columns: int, plan: Callable[..., Launch]
) -> tuple[str, str, Work, Run, int, bool]:
    """`count` experts of `rows` rows each, without biases; rows come by a list, which is shuffled."""
    packing = packing_of(weight_name)
    weight_bytes = _N * _K * 2 if packing is None else packing.size_bytes(_N, _K, "bf16")
    total = count * rows

    def run(bench: Bench) -> None:
        tiles = np.array(
            [
                (expert, expert * rows + first, min(tile_rows, rows - first), 0)
                for expert in range(count) for first in range(0, rows, tile_rows)
            ],
            np.int32,
        )  # fmt: skip
        weights = [
            bench.normal((_N, _K), "bf16") if packing is None else bench.put(np.zeros(weight_bytes, np.uint8))
            for _ in range(count)
        ]
        table = bench.put(np.array([weights, [0] * count], np.int64))
        tokens = bench.put(bench.rng.permutation(total).astype(np.int32))
        bench.launch(
            plan(len(tiles), _N, "bf16", ""), bench.normal((total, _K), "bf16"), table, bench.put(tiles),
            bench.put(np.array([len(tiles)], np.int32)), tokens, bench.empty(total * _N * 2), _N, _K, count,
        )  # fmt: skip

    work = Work(total * _K * 2 + count * weight_bytes, total * _N * 2, 2 * total * _N * _K, True)
    row_tiles = count * -(-rows // tile_rows)
    together = 256 // (64 if packing is None else packing.slot)  # rows that a warp copies at once
    x_rows = row_tiles * max(min(rows, tile_rows), tile_rows // together)  # the last one is repeated: once a warp
    tiled_bytes = row_tiles * weight_bytes + -(-_N // tile_columns) * x_rows * _K * 2 + total * _N * 2
    name = f"experts {tier}{'' if packing is None else f' {weight_name}'} rows={rows}"
    return name, f"{count} x {rows} x {_N} x {_K}", work, run, tiled_bytes if tier != "tiled" else 0, tier != "tiled"
