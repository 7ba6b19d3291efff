"""Our side of the comparison: a tier per line, each with its plan's launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_kernels.cuda import attention, gemm
from numba_kernels.cuda.attention import hopper_tiles
from numba_kernels.cuda.experts import hopper as experts_hopper
from numba_kernels.cuda.experts import tensor_core as experts_tensor_core
from numba_kernels.cuda.gemm import hopper, hopper_ring, tensor_core
from numba_kernels.cuda.specialisation import Specialisation
from runtime.device import tensor_map
from tools.kernel_costs.counts import Bench

ARCHS = ("sm_80", "sm_90a")
PAGE = 16  # tokens

Run = Callable[[Bench, Any], tuple[Specialisation, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Tier:
    """One of our kernels. `run(bench, work)` launches it and returns the launch and a block's tile.

    `least_rows`: of a product; no plan uses the kernel for fewer, which leave blocks of a cluster empty. For experts,
        with `most_rows`: the rows of one.
    """

    name: str
    archs: tuple[str, ...]
    run: Run
    least_rows: int = 1
    most_rows: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Product:
    """y [m, n] = x [m, k] weight [n, k]^T, bf16, with the arrays' addresses."""

    m: int
    n: int
    k: int
    x: int
    weight: int
    y: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Products of draws with their experts, bf16, with the addresses.

    x is [draws / top_k, k], weight [experts, n, k], y [draws, n]: for ours sorted by expert, for Triton by draw.

    Attributes:
        starts: where each expert's draws begin in `order`, and their number at the end.
        order: the draws sorted by expert.
    """

    n: int
    k: int
    top_k: int
    starts: tuple[int, ...]
    order: np.ndarray[Any, Any]
    x: int
    weight: int
    y: int

    @property
    def num_experts(self) -> int:
        return len(self.starts) - 1

    def tiles(self, tile_rows: int) -> list[tuple[int, int, int]]:
        """(expert, first of its draws in `order`, number) of each tile of rows."""
        return [
            (expert, first, min(tile_rows, end - first))
            for expert, (start, end) in enumerate(zip(self.starts, self.starts[1:]))
            for first in range(start, end, tile_rows)
        ]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Causal attention of `heads` heads, each with its own keys, over `length` tokens, bf16; with the addresses.

    q, k, v, out are [heads, length, head_dim] for Triton, [length, heads, head_dim] and pages for ours.
    """

    heads: int
    length: int
    head_dim: int
    q: int
    k: int
    v: int
    out: int
    block_tables: int = 0


def _tensor_core(bench: Bench, work: Product) -> tuple[Specialisation, tuple[int, ...]]:
    """The tile of large products: shapes are small here only for the emulator."""
    product = gemm.Product(work.m, work.n, work.k, "bf16")
    launch = gemm.plan(product, gemm.machine_of(num_multiprocessors=1), "tensor_core")
    assert launch is not None
    bench.launch(launch, work.x, work.weight, 0, 0, work.y, work.m, work.n, work.k, 0, *gemm.NO_SQUARES)
    tile = str(launch.specialisation.constants["tile"]).split("_")[0]  # "128x128x32_s5"
    return launch.specialisation, tuple(map(int, tile.split("x")))


def _hopper(tile: hopper_ring.Tile, bench: Bench, work: Product) -> tuple[Specialisation, tuple[int, ...]]:
    epilogue = gemm.Epilogue(has_residual=False, is_aligned=True)
    product = gemm.Product(work.m, work.n, work.k, "bf16", epilogue=epilogue)
    launch = hopper.plan_tile(product, gemm.machine_of(hopper.ARCH), tile)
    bench.launch(launch, work.x, work.weight, 0, 0, work.y, work.m, work.n, work.k, 0, *gemm.NO_SQUARES)
    return launch.specialisation, (tile.block_m, tile.block_n, hopper_ring.BLOCK_K)


def _expert_arguments(bench: Bench, work: Experts, tile_rows: int) -> tuple[int, list[int]]:
    """The number of tiles, and the common arguments of all tiers."""
    tiles = work.tiles(tile_rows)
    weights = [work.weight + expert * work.n * work.k * 2 for expert in range(work.num_experts)]
    table = np.array([weights, [0] * work.num_experts], np.int64)
    listed = np.array([(*tile, 0) for tile in tiles], np.int32)
    tokens = (work.order // work.top_k).astype(np.int32)
    arguments = [
        work.x, bench.put(table), bench.put(listed), bench.put(np.array([len(tiles)], np.int32)), bench.put(tokens),
        work.y, work.n, work.k, work.num_experts,
    ]  # fmt: skip
    return len(tiles), arguments


def _experts_tensor_core(tile: tensor_core.Tile, bench: Bench, work: Experts) -> tuple[Specialisation, tuple[int, ...]]:
    num_tiles, arguments = _expert_arguments(bench, work, tile.block_m)
    launch = experts_tensor_core.plan(num_tiles, work.n, "bf16", "", tile)
    bench.launch(launch, *arguments)
    return launch.specialisation, tuple(map(int, str(tile).split("_")[0].split("x")))  # "128x128x32_s3"


def _experts_hopper(tile: hopper_ring.Tile, bench: Bench, work: Experts) -> tuple[Specialisation, tuple[int, ...]]:
    num_tiles, arguments = _expert_arguments(bench, work, experts_hopper.tile_rows(tile))
    layout = experts_hopper.map_layout("bf16", work.n, work.k)
    weights = [work.weight + expert * work.n * work.k * 2 for expert in range(work.num_experts)]
    maps = b"".join(tensor_map.encode(bench.gpu.driver, address, layout) for address in weights)
    launch = experts_hopper.plan(num_tiles, work.n, "bf16", "", tile, gemm.machine_of(hopper.ARCH, 132))
    bench.launch(launch, *arguments, bench.put(np.frombuffer(maps, np.uint8)))
    return launch.specialisation, (tile.block_m, tile.block_n, hopper_ring.BLOCK_K)


def _flash(tier: str, bench: Bench, work: Prefill) -> tuple[Specialisation, tuple[int, ...]]:
    pages = -(-work.length // PAGE)
    plan = attention.plan(
        num_tokens=work.length, num_seqs=1, max_query_len=work.length, max_seq_len=work.length,
        num_q_heads=work.heads, num_kv_heads=work.heads, head_dim=work.head_dim, table_width=pages,
        dtype="bf16", block_size=PAGE, num_sms=132, tier=tier, arch=bench.gpu.arch, num_blocks=pages,
    )  # fmt: skip
    starts = bench.put(np.array([0, work.length], np.int32))
    lengths = bench.put(np.array([work.length], np.int32))
    arguments = (work.q, work.k, work.v, work.out, 0, 0, starts, lengths, work.block_tables, work.head_dim**-0.5)
    bench.launch(plan.launch, *plan.arguments(*arguments))
    if tier == "flash_hopper":
        return plan.launch.specialisation, (hopper_tiles.NUM_ROWS, hopper_tiles.hopper_tiles(work.head_dim).num_keys)
    kernel = plan.launch.specialisation
    return kernel, (kernel.constants["num_rows"], kernel.constants["num_keys"])


GEMMS = [
    Tier("tensor_core", ("sm_80",), _tensor_core),
    *(
        Tier("hopper", ("sm_90a",), functools.partial(_hopper, tile), tile.block_m * tile.cluster)
        for tile in (hopper.SMALL, hopper.LARGE)  # Triton's tutorial has these two
    ),
]
PREFILLS = [
    Tier("flash", ("sm_80",), functools.partial(_flash, "flash")),
    Tier("flash_hopper", ("sm_90a",), functools.partial(_flash, "flash_hopper")),
]
EXPERTS = [
    Tier("tensor_core", ("sm_80",), functools.partial(_experts_tensor_core, tensor_core.MEDIUM), 128),
    Tier("tensor_core", ("sm_80",), functools.partial(_experts_tensor_core, tensor_core.SMALL), 32, 127),
    Tier("tensor_core", ARCHS, functools.partial(_experts_tensor_core, tensor_core.SKINNY), 1, 16),
    Tier("hopper", ("sm_90a",), functools.partial(_experts_hopper, experts_hopper.LOW), 17, 127),
    Tier("hopper", ("sm_90a",), functools.partial(_experts_hopper, experts_hopper.ALONE), 128),
    Tier("hopper", ("sm_90a",), functools.partial(_experts_hopper, experts_hopper.PAIR), 256),
]
