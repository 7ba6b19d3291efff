"""Products of experts for the kernel report, compared with dense ones: many rows per expert, and one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from numba_kernels.cuda.experts import hopper, packed, packed_gather, tensor_core, tiled
from numba_kernels.cuda.gemm import machine_of
from numba_kernels.cuda.gemm.hopper_ring import Tile as HopperTile
from numba_kernels.cuda.gemm.mixed_input import BLOCK_M, BLOCK_N, FEW_ROWS
from numba_kernels.cuda.gemm.packed_stream import ROWS as PACKED_ROWS
from numba_kernels.cuda.gemm.tensor_core import MEDIUM, SKINNY, SMALL, Tile
from numba_kernels.cuda.packing import packing_of
from numba_kernels.cuda.specialisation import Launch
from runtime.device import tensor_map
from tools.kernel_costs.counts import Bench, Work

Run = Callable[[Bench], None]

_N, _K = 512, 512


def expert_cases() -> Iterator[tuple[str, str, Work, Run, int, bool]]:
    """Name, shape, minimum work, run, bytes of the tiling, and whether tensor cores do the products."""
    yield _case("tiled", "bf16", 2, 32, tiled.TILE_ROWS, 16, tiled.plan)
    for tile, rows in ((MEDIUM, 128), (SMALL, 64), (SKINNY, 1)):
        yield _case(f"tensor_core {tile}", "bf16", 4, rows, tile.block_m, tile.block_n, _with_tile(tile))
    for name in ("e2m1_g32_exponents", "u4_g128", "u8"):
        for tile_rows, rows in ((BLOCK_M, 128), (FEW_ROWS, 1)):
            yield _case("packed", name, 4, rows, tile_rows, BLOCK_N, _with_packing(name, tile_rows))
    for each, rows in ((hopper.ALONE, 128), (hopper.PAIR, 256)):
        yield _case(
            f"hopper {each}", "bf16", 4, rows, hopper.tile_rows(each), each.block_n, _by_wgmma(each), has_maps=True
        )
    for name in ("e2m1_g32_exponents", "u4_g128"):
        for is_gated in (True, False):
            yield _gathered(name, is_gated)


def _by_wgmma(tile: HopperTile) -> Callable[..., Launch]:
    machine = machine_of("sm_90a", 132)
    return lambda tiles, columns, dtype, activation: hopper.plan(tiles, columns, dtype, activation, tile, machine)


def _gathered(weight_name: str, is_gated: bool) -> tuple[str, str, Work, Run, int, bool]:
    """A token that has chosen four of six experts: gate and up, or down with its sum."""
    packing, top_k, num_experts = packing_of(weight_name), 4, 6
    assert packing is not None
    rows = 2 * _N if is_gated else _N
    weight_bytes = packing.size_bytes(rows, _K, "bf16")
    x_rows = 1 if is_gated else top_k
    out_bytes = 2 * _N * (top_k if is_gated else 1)

    def run(bench: Bench) -> None:
        weights = [bench.put(np.zeros(weight_bytes, np.uint8)) for _ in range(num_experts)]
        table = bench.put(np.array([weights, [0] * num_experts], np.int64))
        ids, x = bench.put(np.array([5, 0, 3, 2], np.int32)), bench.normal((x_rows, _K), "bf16")
        if is_gated:
            activation = "clamped_silu" if packing.scale == "exponent" else "silu"
            launch = packed_gather.plan_gate_up(top_k, _N, _K, packing, activation, 132)
            bench.launch(launch, x, table, ids, bench.empty(out_bytes), _N, _K, num_experts, top_k)
        else:
            shares = bench.put(np.full(top_k, 0.25, np.float32))
            launch = packed_gather.plan_down(1, top_k, _N, _K, packing)
            arguments = (x, table, ids, shares, 0, 0, 0, bench.empty(out_bytes), 0)
            bench.launch(launch, *arguments, _N, _K, num_experts, top_k)

    work = Work(x_rows * _K * 2 + top_k * weight_bytes + out_bytes, 2 * top_k * rows * _K, True)
    x_reads = 2 * top_k * (_N // PACKED_ROWS) * _K * 2  # for the absolute maximum, and for staging
    name = f"experts packed_gather {weight_name} {'gate and up' if is_gated else 'down'}"
    return name, f"1 of {top_k} x {rows} x {_K}", work, run, top_k * weight_bytes + x_reads + out_bytes, True


def _with_tile(tile: Tile) -> Callable[..., Launch]:
    return lambda tiles, columns, dtype, activation: tensor_core.plan(tiles, columns, dtype, activation, tile)


def _with_packing(name: str, tile_rows: int) -> Callable[..., Launch]:
    return lambda tiles, columns, dtype, activation: packed.plan(tiles, columns, dtype, name, activation, tile_rows)


def _case(
    tier: str, weight_name: str, count: int, rows: int, tile_rows: int, tile_columns: int, plan: Callable[..., Launch],
    *, has_maps: bool = False,
) -> tuple[str, str, Work, Run, int, bool]:  # fmt: skip
    """`count` experts of `rows` rows each, without biases; rows are listed in random order."""
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
            *([_maps(bench, weights)] if has_maps else []),
        )  # fmt: skip

    work = Work(total * _K * 2 + count * weight_bytes + total * _N * 2, 2 * total * _N * _K, True)
    row_tiles = count * -(-rows // tile_rows)
    together = 256 // (64 if packing is None else packing.slot)  # rows that a warp copies at once
    if has_maps:
        together = tile_rows  # tiles are whole
    x_rows = row_tiles * max(min(rows, tile_rows), tile_rows // together)  # the last row is repeated: once per warp
    tiled_bytes = row_tiles * weight_bytes + -(-_N // tile_columns) * x_rows * _K * 2 + total * _N * 2
    name = f"experts {tier}{'' if packing is None else f' {weight_name}'} rows={rows}"
    return name, f"{count} x {rows} x {_N} x {_K}", work, run, tiled_bytes if tier != "tiled" else 0, tier != "tiled"


def _maps(bench: Bench, weights: list[int]) -> int:
    layout = hopper.map_layout("bf16", _N, _K)
    maps = b"".join(tensor_map.encode(bench.gpu.driver, address, layout) for address in weights)
    return bench.put(np.frombuffer(maps, np.uint8))
