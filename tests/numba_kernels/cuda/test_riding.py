"""Adapters that ride on a product's launch, against float64; a row's bits are those that it has alone."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from models.quantized.on_load import HEAD, ROUNDINGS
from numba_kernels.cuda.gemm import skinny
from runtime import ops
from runtime.device.device import Device
from runtime.dtype import bfloat16, float16, float32
from runtime.linear.gpu_slots import GpuSlots
from runtime.linear.low_rank_slots import DensePair, LowRank, SlotShape
from runtime.linear.norm import RmsNorm
from runtime.linear.options import LoadOptions
from runtime.linear.packed_matrix import MatrixPart, prepare_packed
from runtime.linear.quantise import quantise
from runtime.linear.quantized import ActivationScheme, QuantizedMatrix
from runtime.tensor.tensor import Tensor

BF16 = ml_dtypes.bfloat16
HEIGHTS, DEPTH, RANKS = (72, 1000, 16), 544, (16, 3, 8)


def _rounded(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray[Any, Any]:
    return (rng.standard_normal(shape) * scale).astype(BF16)


def quantised(kind: str, matrix: np.ndarray[Any, Any]) -> QuantizedMatrix:
    """A matrix rounded by a kind of `ROUNDINGS`, to int8, to fp8 for rows that are rounded, too, or to int4 with zeros
    or in an order of its own."""
    if kind == "int8":
        return quantise(matrix, HEAD)
    plain = quantise(matrix, ROUNDINGS.get(kind, ROUNDINGS["fp8" if kind == "rows" else "int4"]))
    if kind == "rows":
        return replace(plain, layout=replace(plain.layout, activation=ActivationScheme("fp8")))
    rng = np.random.default_rng(1)
    if kind == "zeros":
        zeros = rng.integers(6, 11, plain.scales.shape, np.uint8)
        return replace(plain, layout=replace(plain.layout, has_zeros=True), zeros=zeros)
    if kind == "order":
        order = rng.permutation(matrix.shape[1]).astype(np.int32)
        return replace(plain, layout=replace(plain.layout, has_order=True), order=order)
    return plain


_EXHAUSTIVE = [
    ("sm_90a", "", True, "", 2),
    ("sm_90a", "", True, "silu", 2), ("sm_80", "", False, "", 2), ("sm_80", "", True, "silu", 2),
    ("sm_90a", "int4", False, "", 4), ("sm_90a", "fp8", False, "", 2), ("sm_90a", "fp8", True, "silu", 4),
    ("sm_80", "int4", True, "silu", 1), ("sm_80", "fp8", False, "", 1),
    ("sm_90a", "int8", False, "", 1), ("sm_90a", "mxfp4", False, "silu", 1), ("sm_90a", "mxfp4", False, "", 4),
    ("sm_90a", "zeros", False, "silu", 1), ("sm_90a", "zeros", False, "", 32), ("sm_90a", "order", False, "", 2),
    ("sm_90a", "order", False, "silu", 8), ("sm_90a", "", True, "", 3), ("sm_90a", "", True, "silu", 32),
    ("sm_90a", "", False, "silu", 16), ("sm_90a", "", True, "", 32),
    ("sm_90a", "int4", True, "silu", 32), ("sm_90a", "int8", False, "", 16), ("sm_90a", "fp8", False, "silu", 8),
    ("sm_90a", "mxfp4", False, "", 24), ("sm_80", "", False, "", 20), ("sm_80", "int4", False, "silu", 8),
    ("sm_90a", "rows", True, "", 32), ("sm_100a", "int4", True, "", 30), ("sm_120a", "zeros", False, "silu", 9),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "rounding", "is_normed", "activation", "num_rows"),
    [
        ("sm_90a", "", True, "", 8), ("sm_90a", "int4", True, "silu", 2),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in _EXHAUSTIVE),
    ],
)  # fmt: skip
def test_equals_float64(arch: str, rounding: str, is_normed: bool, activation: str, num_rows: int) -> None:
    """Products of 16-bit and of packed weights, by `gemv`, `quantised_gemv`, `hopper_few` and `skinny`."""
    rng, device, width = np.random.default_rng(0), Device.parse(f"emulated:{arch}"), sum(HEIGHTS)

    def placed(array: np.ndarray[Any, Any]) -> Tensor:
        return Tensor.from_numpy(np.ascontiguousarray(array)).to(device)

    x, matrix, residual = (
        _rounded(rng, num_rows, DEPTH),
        _rounded(rng, width, DEPTH, scale=0.04),
        _rounded(rng, num_rows, width),
    )
    options = LoadOptions(device=device, dtype=bfloat16)
    slots = GpuSlots(SlotShape(HEIGHTS, DEPTH, max(RANKS), len(RANKS)), options)
    weights = rng.uniform(0.5, 1.5, DEPTH).astype(np.float32)
    norm = RmsNorm(placed(weights), 1e-6, 1.0) if is_normed else None
    if rounding:
        rounded = quantised(rounding, matrix.astype(np.float32))
        weight: Any = prepare_packed([MatrixPart(rounded, slice(None), slice(None))], None, options, None)
        assert weight.rounds_rows == ("rows" if rounding == "rows" else "")
        matrix = rounded.dequantise(float32)
    else:
        weight = ops.prepare_linear(Tensor.from_numpy(matrix), None, options, norm=norm)
    given, expected = x.astype(np.float64), np.zeros((len(RANKS), num_rows, width))
    if is_normed:
        given = given / np.sqrt((given**2).mean(1, keepdims=True) + 1e-6) * weights
    for slot, own in enumerate(RANKS):
        ones = [np.ones((rows, max(RANKS)), np.float32) for rows in (DEPTH, *HEIGHTS)]
        slots.write(slot, [DensePair(ones[0].T, each) for each in ones[1:]], np.ones(width, np.float32))
        bias = rng.standard_normal(width).astype(np.float32) if slot else None
        pairs: list[DensePair | None] = []
        for first, height in zip(np.cumsum((0, *HEIGHTS)), HEIGHTS, strict=False):
            down = _rounded(rng, own, DEPTH, scale=0.05).astype(np.float32)
            up = _rounded(rng, height, own).astype(np.float32)
            is_there = (slot, height) != (1, HEIGHTS[1])
            pairs.append(DensePair(down, up) if is_there else None)
            if is_there:
                expected[slot, :, first : first + height] = given @ down.T.astype(np.float64) @ up.T
        if bias is not None:
            expected[slot] += bias
        slots.write(slot, pairs, bias)

    def found(ids: list[int], row: int = 0) -> np.ndarray[Any, Any]:
        rows = slice(row, row + len(ids))
        own, adapters = placed(x[rows]), placed(np.array(ids, np.int32))
        assert ops.takes_low_rank(own, weight, norm, activation, slots)
        low_rank = LowRank(slots, own, adapters, {})
        if activation:
            out = ops.linear_glu(own, weight, activation, norm=norm, low_rank=low_rank)
        else:
            out = ops.linear(own, weight, residual=placed(residual[rows]), norm=norm, low_rank=low_rank)
        return out.to("cpu").numpy()

    product = given @ matrix.T.astype(np.float64)
    for ids in (([0, 1, 2, 1] * 8)[:num_rows], ([2, -1, -1, 0] * 8)[:num_rows]):
        out, wanted = found(ids), product.copy()
        for row, slot in enumerate(ids):
            if slot >= 0:
                wanted[row] += expected[slot, row]
        if activation:
            gate, up = np.split(wanted, 2, axis=1)
            wanted = gate / (1 + np.exp(-gate)) * up
        else:
            wanted += residual.astype(np.float64)
        assert np.abs(out.astype(np.float64) - wanted).max() <= 6e-3 * np.abs(wanted).max()
    alike = [count for count in ((1, 2), (3, 4), (5, 16), (17, 32)) if count[1] <= num_rows]  # by the same kernel
    for few, many in alike[-1:]:
        ids = [0, 0, 2, *[1] * (few - 3)][:few]
        for others in ([1, 0] * 16, [-1] * 32):
            np.testing.assert_array_equal(found(ids), found([*ids, *others][:many])[:few])


@pytest.mark.parametrize(
    ("rounding", "activation", "num_rows"),
    [
        ("int4", "silu", 2), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (
            ("", "", 1), ("", "silu", 2), ("int4", "silu", 1), ("int4", "", 2), ("fp8", "", 1), ("mxfp4", "silu", 2),
        )),
    ],
)  # fmt: skip
def test_blocks_that_finish_tiles_several_times(
    monkeypatch: pytest.MonkeyPatch, rounding: str, activation: str, num_rows: int
) -> None:
    """Blocks with rings, each of which takes more tiles than it keeps; only larger products have so many."""
    riding = importlib.import_module("numba_kernels.cuda.gemm.adapters.riding")
    tiles_of_products: list[int] = []

    def few_blocks(tiles: int, at_once: int, rows: int, ranks: int) -> tuple[int, int]:
        tiles_of_products.append(tiles)
        return 3, 3

    monkeypatch.setattr(riding, "shared_blocks", few_blocks)
    test_equals_float64("sm_90a", rounding, True, activation, num_rows)
    assert min(tiles_of_products) > 3 * riding.most_kept(num_rows)


@pytest.mark.parametrize(
    ("rounding", "num_rows"),
    [("", 8), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (("fp8", 32), ("fp8", 16)))],
)
def test_clusters_that_shrink_several_groups(monkeypatch: pytest.MonkeyPatch, rounding: str, num_rows: int) -> None:
    """Their blocks share K. One cluster takes all groups in turn, the last of which are fewer than it takes at once."""
    module, tiles = (importlib.import_module(name) for name in (__name__, "numba_kernels.cuda.gemm.adapters.tiles"))
    clusters: list[tuple[int, int]] = []

    def one_cluster(rows: int, ranks: int, idle: int, cluster: int, parts: int) -> int:
        clusters.append((cluster, parts))
        return cluster

    monkeypatch.setattr(tiles, "shrinking_blocks", one_cluster)
    monkeypatch.setattr(module, "DEPTH", 1104)
    test_equals_float64("sm_90a", rounding, not rounding, "", num_rows)
    assert all(cluster >= parts > 1 for cluster, parts in clusters)


@pytest.mark.parametrize(
    ("arch", "num_rows"),
    [("sm_90a", 8), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (("sm_80", 8), ("sm_90a", 1)))],
)
def test_float16_sums_between_may_be_large(arch: str, num_rows: int) -> None:
    """``down x``, and a row times the norm's weights, beyond float16's 65,504; y is not."""
    rng, device, half = np.random.default_rng(0), Device.parse(f"emulated:{arch}"), np.float16
    x = (rng.standard_normal((num_rows, DEPTH)) * 3000).astype(half)
    down = (rng.standard_normal((16, DEPTH)) * 60).astype(half)
    up = (rng.standard_normal((64, 16)) * 1e-4).astype(half)
    matrix = (rng.standard_normal((64, DEPTH)) * 1e-2).astype(half)
    options = LoadOptions(device=device, dtype=float16)
    slots = GpuSlots(SlotShape((64,), DEPTH, 16, 1), options)
    slots.write(0, [DensePair(down.astype(np.float32), up.astype(np.float32))], None)
    for norm_weight in (0.0, 5000.0):
        given, norm = x.astype(np.float64), None
        if norm_weight:
            norm = RmsNorm(Tensor.from_numpy(np.full(DEPTH, norm_weight, np.float32)).to(device), 1e-6, 1.0)
            given = given / np.sqrt((given**2).mean(1, keepdims=True) + 1e-6) * norm_weight
        weight = ops.prepare_linear(Tensor.from_numpy(matrix), None, options, norm=norm)
        own, adapters = Tensor.from_numpy(x).to(device), Tensor.from_numpy(np.zeros(num_rows, np.int32)).to(device)
        assert ops.takes_low_rank(own, weight, norm, "", slots)
        out = ops.linear(own, weight, norm=norm, low_rank=LowRank(slots, own, adapters, {})).to("cpu").numpy()
        between = given @ down.T.astype(np.float64)
        wanted = given @ matrix.T.astype(np.float64) + between @ up.T.astype(np.float64)
        assert np.abs(between).max() > 65504 > np.abs(wanted).max()
        assert norm is None or float(np.abs(x).max()) * norm_weight / 64 > 65504
        assert np.abs(out.astype(np.float64) - wanted).max() <= 2e-3 * np.abs(wanted).max()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("rounding", "activation", "num_rows", "num_blocks"), [("int4", "silu", 32, 2), ("fp8", "", 32, 2)]
)
def test_equals_float64_in_clusters(
    monkeypatch: pytest.MonkeyPatch, rounding: str, activation: str, num_rows: int, num_blocks: int
) -> None:
    """Blocks that share K expand tiles in turn; only larger products choose them."""
    chosen = skinny._shape_with_adapters

    def shape(product: skinny.Product, machine: skinny.Machine) -> skinny.Shape:
        found = chosen(product, machine)
        assert found is not None
        assert found.num_blocks == 1 < num_blocks <= found.num_streams
        return replace(found, num_blocks=num_blocks)

    monkeypatch.setattr(skinny, "_shape_with_adapters", shape)
    test_equals_float64("sm_90a", rounding, not rounding, activation, num_rows)
