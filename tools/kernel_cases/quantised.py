"""Products with quantised weights: as in serving, through `runtime.ops`, and by a named tier for the kernel report.

A product is compared with numpy's of the dequantised matrix, for sampled rows and all columns. If the checkpoint rounds
x and the product was planned so, numpy's x is rounded, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import ml_dtypes
import numpy as np

from numba_kernels.cuda import dequantize, gemm
from numba_kernels.cuda.dynamic_quantisation import sections
from numba_kernels.cuda.gemm import hopper, mixed_input, quantised_gemv, skinny_shape
from numba_kernels.cuda.gemm.hopper_ring import Tile
from numba_kernels.cuda.gemm.packed_stream import ROWS as PACKED_ROWS
from numba_kernels.split_k import SEGMENTS
from runtime import ops
from runtime.backends import cuda_plans
from runtime.bench.kernels.case import TOLERANCE, Case, Inputs, Prepared, sampled
from runtime.linear.norm import RmsNorm
from runtime.linear.weight import PackedWeight
from runtime.tensor.tensor import Tensor
from tools.kernel_cases import torch_peers
from tools.kernel_cases.operation import Recorded, put, recorded
from tools.kernel_cases.quantised_layers import FORMATS, dynamic_quantisation, float_layer, packed_layer, planned_of

Use = Literal["plain", "normed", "residual", "gated"]
EPS = 1e-6
_PLAIN = gemm.Epilogue(has_residual=False, is_aligned=True)


def weight_bytes_of(format: str, rows: int, depth: int) -> int:
    """Bytes of a packed matrix."""
    return FORMATS[format].packing.size_bytes(rows, depth, "bf16")


def served_case(format: str, m: int, n: int, k: int, use: Use = "plain", *, has_peer: bool = False) -> Case:
    """`m` rows of bfloat16 times ``[n, k]`` of a format. `use`: the operation fused into the same launch, or into the
    previous one. `has_peer`: compared with bfloat16's product of these sizes."""

    def prepare(inputs: Inputs) -> Prepared:
        gpu, layer = inputs.gpu, packed_layer(inputs.gpu, format, n, k)
        weight, x = layer.weight, inputs.normal((m, k), "bf16")
        norm = inputs.normal((k,), "f32") if use == "normed" else None
        residual = inputs.normal((m, n), "bf16") if use == "residual" else None
        weight.plans.clear()
        given, scales, added = (None if each is None else put(gpu, each) for each in (x, norm, residual))
        assert given is not None

        def product() -> Tensor:
            if use == "gated":
                return ops.linear_glu(given, weight, "silu")
            if scales is None:
                return ops.linear(given, weight, residual=added)
            if weight.rounds_rows:
                return ops.linear(given, weight, norm=RmsNorm(scales, EPS, median=1.0))
            return ops.linear(ops.rms_norm(given, scales, EPS), weight)

        rows = sampled(m)
        ready = recorded(gpu, product, rows, np.empty(0, np.float32))
        wide = x[rows]
        if norm is not None:
            wide = wide.astype(np.float32)
            wide = (wide / np.sqrt(np.square(wide).mean(1, keepdims=True) + EPS) * norm).astype(ml_dtypes.bfloat16)
        if planned_of(weight).rounding is not None:
            wide = dynamic_quantisation(wide, weight)
        ready.expected = layer.expected(wide)
        if use == "gated":
            gate, up = np.split(ready.expected, 2, 1)
            ready.expected = gate / (1 + np.exp(-gate)) * up
        if residual is not None:
            ready.expected = ready.expected + residual[rows]
        if has_peer:
            floats = float_layer(gpu, n, k).weight
            theirs = Recorded(gpu, lambda: ops.linear(given, floats))
            ready.peers, ready.notes["bf16_kernels"] = {"bf16": theirs}, theirs.kernels
            is_rounded = planned_of(weight).rounding is not None
            ready.torch = torch_peers.of_product(format, x, layer, is_rounded=is_rounded) if use == "plain" else None
        return ready

    least_bytes = weight_bytes_of(format, n, k) + 2 * m * (n + k)
    return Case(format, f"{m} x {n} x {k}, {use}", least_bytes, 2.0 * m * n * k, TOLERANCE["bf16"], prepare)


def exact_case(m: int, n: int, k: int) -> Case:
    """A product with K in segments: their sums are written, and read again."""

    def prepare(inputs: Inputs) -> Prepared:
        product = gemm.Product(m, n, k, "bf16", out="f32", epilogue=_PLAIN, exact=True, num_segments=SEGMENTS)
        launch = gemm.plan(product, gemm.machine_of(inputs.gpu.arch), "auto")
        x, weight = inputs.normal((m, k), "bf16"), inputs.normal((n, k), "bf16", k**-0.5)
        sums, out = inputs.empty(SEGMENTS * m * n * 4), inputs.result(m * n * 2)
        run = inputs.bind(
            (launch, (inputs.put(x), inputs.put(weight), 0, 0, sums, m, n, k, 0, *gemm.NO_SQUARES)),
            (gemm.split_k.plan_add(SEGMENTS, m, n, "bf16"), (sums, 0, 0, out, m, n, 0)),
        )
        rows = sampled(m)
        expected = x[rows].astype(np.float32) @ weight.astype(np.float32).T
        return Prepared(run, out, (m, n), "bf16", rows, expected)

    block_rows = 16 if m <= 16 else 64
    tiled_bytes = (-(-n // 64) * m + -(-m // block_rows) * n) * k * 2 + m * n * (2 + 2 * SEGMENTS * 4)
    return _reported(f"gemm exact bf16 m={m}", m, n, k, (m + n) * k * 2, tiled_bytes, prepare)


def packed_case(format: str, m: int, n: int, k: int, tier: str = "skinny", tile: Tile | None = None) -> Case:
    """A product by a tier that unpacks the weight. `tile`: whole K, by that tile of Hopper's."""
    packing = FORMATS[format].packing
    name, weight_bytes = packing.name, weight_bytes_of(format, n, k)

    def prepare(inputs: Inputs) -> Prepared:
        product = gemm.Product(m, n, k, "bf16", name, epilogue=_PLAIN)
        machine, layer = gemm.machine_of(inputs.gpu.arch), packed_layer(inputs.gpu, format, n, k)
        launch = gemm.plan(product, machine, tier) if tile is None else hopper.plan_tile(product, machine, tile)
        x, out, rows = inputs.normal((m, k), "bf16"), inputs.result(m * n * 2), sampled(m)
        arguments = inputs.put(x), layer.weight.address, 0, 0, out, m, n, k, 0, *gemm.NO_SQUARES
        inputs.keep(layer)
        return Prepared(inputs.bind((launch, arguments)), out, (m, n), "bf16", rows, layer.expected(x[rows]))

    columns, rows = mixed_input.BLOCK_N, mixed_input.BLOCK_M  # of a block
    if tier == "skinny":
        columns = skinny_shape.COLUMNS * skinny_shape.BLOCK_WARPS // skinny_shape.split(n, k, name)
        product = gemm.Product(m, n, k, "bf16", name)
        rows = 16 * skinny_shape.choose(product, gemm.machine_of("sm_90a")).row_tiles
    elif tile is not None:
        columns, rows = tile.block_n, tile.block_m
    elif tier == "quantised_gemv":
        columns = PACKED_ROWS * quantised_gemv.teams(n, is_gated=False)
    x_reads = 2 if tier == "quantised_gemv" else 1  # for the absolute maximum, and for staging
    tiled_bytes = -(-m // rows) * weight_bytes + -(-n // columns) * x_reads * m * k * 2 + m * n * 2
    title = f"gemm {tier} {name} m={m}"
    return _reported(title, m, n, k, m * k * 2 + weight_bytes, tiled_bytes, prepare)


def bytes_case(format: str, m: int, n: int, k: int, arch: str = "") -> Case:
    """A product of rows rounded to bytes by a previous launch, which is not counted: by `w8a8` for int8, and for e4m3
    on an architecture other than the report's, else by `hopper_bytes`."""
    packing = FORMATS[format].packing
    weight_bytes, is_by_tiles = weight_bytes_of(format, n, k), packing.name == "u8" or arch != ""
    codes, x_bytes = sections(m, k, is_grouped=packing.group > 0)

    def prepare(inputs: Inputs) -> Prepared:
        gpu, layer = inputs.gpu, packed_layer(inputs.gpu, format, n, k)
        product = gemm.Product(m, n, k, "bf16", packing.name, epilogue=_PLAIN)
        machine, weight, x = gemm.machine_of(gpu.arch), layer.weight, inputs.normal((m, k), "bf16")
        assert isinstance(weight, PackedWeight)
        planned = cuda_plans.plan_rounded(weight, product, machine, has_norm=False)
        rounded = inputs.empty(x_bytes)
        inputs.bind((planned.rounding, (inputs.put(x), rounded, rounded + codes, m, k)))()
        launch = gemm.w8a8.plan(product) if is_by_tiles else gemm.hopper_bytes.plan(product, machine)
        out, rows = inputs.result(m * n * 2), sampled(m)
        last = (0,) if is_by_tiles else (weight.address, weight.address)
        arguments = rounded, weight.address, 0, 0, out, m, n, k, 0, rounded + codes, 0, 0.0, *last
        expected = layer.expected(dynamic_quantisation(x[rows], weight))
        inputs.keep(weight)
        return Prepared(inputs.bind((launch, arguments)), out, (m, n), "bf16", rows, expected)

    rows, columns = -(-m // gemm.w8a8.BLOCK_M), -(-n // gemm.w8a8.BLOCK_N)
    tiled_bytes = rows * weight_bytes + columns * x_bytes + m * n * 2
    if packing.group:  # the TMA brings a tile's scales once, or each of 8 warps reads those of 64 rows and 32 columns
        scales_bytes = (8 * (4 * 64 + 2 * 32) if is_by_tiles else 4 * 128 + 2 * 128) * k // packing.group
        tiled_bytes = rows * (n * k + 4 * n) + columns * m * k + m * n * 2 + rows * columns * scales_bytes
    tier = "w8a8" if is_by_tiles else "hopper_bytes"
    title = f"gemm {tier} {packing.name} m={m}{' ' if arch else ''}{arch}"
    return _reported(title, m, n, k, x_bytes + weight_bytes, tiled_bytes, prepare, arch)


def _reported(
    name: str,
    m: int,
    n: int,
    k: int,
    factor_bytes: int,
    tiled_bytes: int,
    prepare: Callable[[Inputs], Prepared],
    arch: str = "",
) -> Case:
    return Case(
        name, f"{m} x {n} x {k}", factor_bytes + m * n * 2, 2 * m * n * k, TOLERANCE["bf16"], prepare, "gemm",
        tiled_bytes, True, True, arch=arch,
    )  # fmt: skip


def dequantised_case(format: str, n: int, k: int) -> Case:
    """A packed matrix written out in bfloat16."""
    packing, size = FORMATS[format].packing, weight_bytes_of(format, n, k)

    def prepare(inputs: Inputs) -> Prepared:
        layer, out, rows = packed_layer(inputs.gpu, format, n, k), inputs.result(n * k * 2), sampled(n)
        inputs.keep(layer)
        launch = dequantize.plan(packing, n, k, "bf16"), (layer.weight.address, 0, out, 0, n, n, k, 1.0)
        return Prepared(inputs.bind(launch), out, (n, k), "bf16", rows, layer.matrix[layer.rows[rows]])

    return Case(
        f"dequantize {packing.name} bf16", f"{n} x {k}", size + n * k * 2, 2 * n * k, TOLERANCE["bf16"], prepare,
        "dequantize", size + n * k * 2,
    )  # fmt: skip
