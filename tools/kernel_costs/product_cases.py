"""Matrix products for the kernel report: each tier, in floats, in segments, and with quantised weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from numba_kernels.cuda import (
    dequantize,
    dynamic_quantisation,
    gemm,
)
from numba_kernels.cuda.gemm import hopper, mixed_input, quantised_gemv, skinny_shape
from numba_kernels.cuda.gemm.hopper_packed import HIGH, LOW
from numba_kernels.cuda.gemm.hopper_ring import Tile
from numba_kernels.cuda.gemm.packed_stream import ROWS as PACKED_ROWS
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.packing import packing_of
from numba_kernels.split_k import SEGMENTS
from runtime.bench.kernels.cases import product_case
from tools.kernel_costs.counts import Bench, Case, Work, counted

_ONE_COLUMN_A_LANE = (
    "the tier's point: neighbouring lanes read different rows of the weight, and every element comes from memory"
)


def product_cases() -> Iterator[Case]:
    for tier, dtype in (("naive", "f32"), ("tiled", "f32"), ("naive", "bf16"), ("tiled", "bf16")):
        yield gemm_case(tier, (256, 256, 256), dtype, reason=_ONE_COLUMN_A_LANE if tier == "naive" else "")
    for tier, dtype in (("register", "f32"), ("register", "bf16"), ("tensor_core", "bf16")):
        yield gemm_case(tier, (256, 256, 256), dtype, (64, 64))
    for dtype in ("bf16", "f32"):
        yield gemm_case("gemv", (1, 1024, 1024), dtype, (1, 4))  # a warp reads x by itself
    for rows in (1, 16, 64):
        yield gemm_case("skinny", (rows, 1024, 1024), "bf16", (64, 32))
    # The large tile, of two blocks, alternating between two multiprocessors; small ones; narrow ones, four of which
    # share a sum.
    yield gemm_case("hopper", (512, 512, 256), "bf16", (256, 256), hopper_tile=hopper.LARGE, num_multiprocessors=2)
    yield gemm_case("hopper", (256, 256, 256), "bf16", (128, 128), hopper_tile=hopper.SMALL)
    yield gemm_case("hopper", (128, 256, 1024), "bf16", (64, 128), hopper_tile=hopper.NARROW, parts=4)
    for rows in (1, 128):
        yield _exact_gemm(rows, 1024, 1024)
    for packing in ("u8", "u4_g128", "e4m3_g128", "e2m1_g32_exponents", "e2m1_g16_e4m3"):
        for rows in (1, 16, 64) if packing in ("u8", "u4_g128") else (1,):
            yield _packed_gemm(packing, rows, 1024, 1024)
    for packing in ("u8", "u4_g128"):
        yield _packed_gemm(packing, 1, 1024, 1024, "quantised_gemv")
    for packing in ("u8", "u4_g128", "e4m3_g128", "e2m1_g32_exponents"):
        yield _packed_gemm(packing, 256, 512, 512, "mixed_input")
    for packing, tile in (("u4_g128", HIGH), ("u4_g128", LOW), ("u8", HIGH), ("e2m1_g32_exponents", HIGH)):
        yield _packed_gemm(packing, tile.block_m, 512, 512, "hopper_packed", tile)
    yield _bytes_gemm("u8", 256, 512, 512)
    for packing in gemm.hopper_bytes.WEIGHTS:
        yield _bytes_gemm(packing, 256, 512, 512, arch="sm_120a")
        yield _bytes_gemm(packing, 256, 512, 512)
    for packing in ("e4m3_g128", "u4_g128"):
        yield _dequantized(packing, 256, 1024)


def gemm_case(
    tier: str, sizes: tuple[int, int, int], dtype: str, tile: tuple[int, int] = (0, 0), *, reason: str = "",
    hopper_tile: Tile | None = None, parts: int = 1, num_multiprocessors: int = 132,
) -> Case:  # fmt: skip
    """`tile`: rows and columns of the result that share reads of x and the weight; `hopper_tile` and `parts` override
    the tier's choice."""
    m, n, k = sizes
    operation = product_case(tier, m, n, k, dtype, tile=hopper_tile, parts=parts, num_sms=num_multiprocessors)
    size, tiled_bytes = ITEM_BYTES[dtype], 0
    if tile != (0, 0):
        tiled_bytes = (-(-n // tile[1]) * m + -(-m // tile[0]) * n) * k * size + m * n * size
    line = counted(
        operation, "gemm", scattered_because=reason, tiled_bytes=tiled_bytes, has_16_bits=dtype != "f32",
        is_on_tensor_cores=tier in ("tensor_core", "skinny", "hopper"),
    )  # fmt: skip
    return replace(line, name=f"gemm {tier} {dtype} m={m}")


def _exact_gemm(m: int, n: int, k: int) -> Case:
    """A product with K in segments: their sums are written, and read again."""

    def run(bench: Bench) -> None:
        product = gemm.Product(
            m, n, k, "bf16", out="f32", epilogue=gemm.Epilogue(has_residual=False, is_aligned=True), exact=True,
            num_segments=SEGMENTS,
        )  # fmt: skip
        launch = gemm.plan(product, gemm.machine_of(bench.gpu.arch), "auto")
        x, weight = bench.normal((m, k), "bf16"), bench.normal((n, k), "bf16")
        sums, out = bench.empty(SEGMENTS * m * n * 4), bench.empty(m * n * 2)
        bench.launch(launch, x, weight, 0, 0, sums, m, n, k, 0, *gemm.NO_SQUARES)
        bench.launch(gemm.split_k.plan_add(SEGMENTS, m, n, "bf16"), sums, 0, 0, out, m, n, 0)

    work = Work((m + n) * k * 2 + m * n * 2, 2 * m * n * k, True)
    rows = 16 if m <= 16 else 64
    tiled_bytes = (-(-n // 64) * m + -(-m // rows) * n) * k * 2 + m * n * (2 + 2 * SEGMENTS * 4)
    return Case(f"gemm exact bf16 m={m}", "gemm", f"{m} x {n} x {k}", work, run, "", tiled_bytes, True)


def _packed_gemm(name: str, m: int, n: int, k: int, tier: str = "skinny", hopper_tile: Tile | None = None) -> Case:
    """A product with a packed weight of random bits, which all are valid. `hopper_tile`: whole K, by that tile."""
    packing = packing_of(name)
    assert packing is not None
    weight_bytes = packing.size_bytes(n, k, "bf16")

    def run(bench: Bench) -> None:
        epilogue = gemm.Epilogue(has_residual=False, is_aligned=True)
        product = gemm.Product(m, n, k, "bf16", name, epilogue=epilogue)
        machine = gemm.machine_of(bench.gpu.arch)
        launch = gemm.plan(product, machine, tier)
        if hopper_tile is not None:
            launch = hopper.plan_tile(product, machine, hopper_tile)
        x, weight = bench.normal((m, k), "bf16"), bench.put(np.zeros(weight_bytes, np.uint8))
        bench.launch(launch, x, weight, 0, 0, bench.empty(m * n * 2), m, n, k, 0, *gemm.NO_SQUARES)

    work = Work(m * k * 2 + weight_bytes + m * n * 2, 2 * m * n * k, True)
    columns, rows = mixed_input.BLOCK_N, mixed_input.BLOCK_M  # of a block
    if tier == "skinny":
        columns = skinny_shape.COLUMNS * skinny_shape.BLOCK_WARPS // skinny_shape.split(n, k, name)
        product = gemm.Product(m, n, k, "bf16", name)
        rows = 16 * skinny_shape.choose(product, gemm.machine_of("sm_90a")).row_tiles
    elif hopper_tile is not None:
        columns, rows = hopper_tile.block_n, hopper_tile.block_m
    elif tier == "quantised_gemv":
        columns = PACKED_ROWS * quantised_gemv.teams(n, is_gated=False)
    x_reads = 2 if tier == "quantised_gemv" else 1  # for the absolute maximum, and for staging
    tiled_bytes = -(-m // rows) * weight_bytes + -(-n // columns) * x_reads * m * k * 2 + m * n * 2
    return Case(f"gemm {tier} {name} m={m}", "gemm", f"{m} x {n} x {k}", work, run, "", tiled_bytes, True)


def _bytes_gemm(name: str, m: int, n: int, k: int, arch: str = "") -> Case:
    """A product of rows rounded to bytes by a previous launch, which is not counted: by `w8a8` for int8, and for
    e4m3 on an architecture other than the report's, else by `hopper_bytes`."""
    packing, is_by_tiles = packing_of(name), name == "u8" or arch != ""
    assert packing is not None
    weight_bytes = packing.size_bytes(n, k, "bf16")
    scales, x_bytes = dynamic_quantisation.sections(m, k, is_grouped=packing.group > 0)

    def run(bench: Bench) -> None:
        epilogue = gemm.Epilogue(has_residual=False, is_aligned=True)
        product, machine = gemm.Product(m, n, k, "bf16", name, epilogue=epilogue), gemm.machine_of(bench.gpu.arch)
        launch = gemm.w8a8.plan(product) if is_by_tiles else gemm.hopper_bytes.plan(product, machine)
        weight, x = (bench.put(np.zeros(size, np.uint8)) for size in (weight_bytes, x_bytes))
        bench.launch(
            launch, x, weight, 0, 0, bench.empty(m * n * 2), m, n, k, 0, x + scales, 0, 0.0,
            0 if is_by_tiles else weight,
        )  # fmt: skip

    work = Work(x_bytes + weight_bytes + m * n * 2, 2 * m * n * k, True)
    rows, columns = -(-m // gemm.w8a8.BLOCK_M), -(-n // gemm.w8a8.BLOCK_N)
    tiled_bytes = rows * weight_bytes + columns * x_bytes + m * n * 2
    if packing.group:  # each of 8 warps reads the scales of its 16 rows and 128 columns by itself, or of 64 and 32
        warp_rows, warp_columns = (64, 32) if is_by_tiles else (16, 128)
        scales_bytes = 8 * (4 * warp_rows + 2 * warp_columns) * k // packing.group
        tiled_bytes = rows * (n * k + 4 * n) + columns * m * k + m * n * 2 + rows * columns * scales_bytes
    tier = "w8a8" if is_by_tiles else "hopper_bytes"
    title = f"gemm {tier} {name} m={m}{' ' if arch else ''}{arch}"
    return Case(title, "gemm", f"{m} x {n} x {k}", work, run, "", tiled_bytes, True, arch)


def _dequantized(name: str, n: int, k: int) -> Case:
    packing = packing_of(name)
    assert packing is not None
    size = packing.size_bytes(n, k, "bf16")

    def run(bench: Bench) -> None:
        packed, out = bench.put(np.zeros(size, np.uint8)), bench.empty(n * k * 2)
        bench.launch(dequantize.plan(packing, n, k, "bf16"), packed, 0, out, 0, n, n, k, 1.0)

    work = Work(size + n * k * 2, 2 * n * k)
    return Case(f"dequantize {name} bf16", "dequantize", f"{n} x {k}", work, run, "", size + n * k * 2)
