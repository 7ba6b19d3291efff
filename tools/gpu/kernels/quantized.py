"""Linear maps with quantised weights, as in serving.

A product is compared with numpy's of the dequantised matrix, for sampled rows and all columns. If the checkpoint rounds
x and the product was planned so, numpy's x is rounded, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

from runtime import ops
from runtime.bench.kernels.cases import TOLERANCE, Array, Inputs, sampled
from runtime.device.gpu import Gpu
from runtime.linear.norm import RmsNorm
from runtime.tensor.tensor import Tensor
from tools.gpu.kernels.packed_layers import Layer, dynamic_quantisation, launched_names, packed_layer, planned_of
from tools.gpu.sections import Case, Options, Result

Use = Literal["plain", "normed", "residual", "gated"]
MOST_RMS = 1e-2
"""The error's share of the results: an element too many or too few in each row is 1 / sqrt(K)."""
EPS = 1e-6
FORMATS = (
    "int4 g128", "mxfp4", "fp8 blocks", "fp8", "w8a8", "int8", "nvfp4", "int4 g128 zeros", "int4 g32", "fp8 static",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wanted:
    """A product of `rows` of bfloat16 with a matrix ``[width, depth]`` of a format. `use`: the operation fused into the
    same launch, or into the previous one."""

    format: str
    rows: int
    width: int
    depth: int
    use: Use = "plain"

    @property
    def name(self) -> str:
        return f"{self.format}, {self.rows} x {self.width} x {self.depth}, {self.use}"


def cases(options: Options) -> Iterator[Case]:
    """All formats at one shape first, and then the other shapes."""
    gpu = Gpu.of(options.device)
    for wanted in _all(options.is_quick):
        yield Case(wanted.name, functools.partial(check, gpu, wanted, is_dry=options.is_dry))


def _all(is_quick: bool) -> Iterator[Wanted]:
    if is_quick:
        yield Wanted("int4 g128", 2, 530, 200)
        yield Wanted("fp8 blocks", 20, 48, 200, "residual")
        return
    for name in FORMATS:
        for rows in (1, 16, 128, 1000, 4, 17):
            yield Wanted(name, rows, 6144, 4096, "normed" if rows > 16 else "plain")
    for name in FORMATS:
        for rows in (1, 16, 1000):
            yield Wanted(name, rows, 24576, 4096, "gated")
        for rows in (1, 16, 128):
            yield Wanted(name, rows, 4096, 12288, "residual")
        for rows in (1, 5, 200):  # tiles, slots and groups that are not full
            yield Wanted(name, rows, 500, 1544)


def check(gpu: Gpu, wanted: Wanted, seed: int = 0, *, is_dry: bool = False) -> Result:
    """Multiplies and compares. Raises AssertionError if it is wrong."""
    layer = packed_layer(gpu, wanted.format, wanted.width, wanted.depth, seed)
    inputs = Inputs(gpu, seed + 1)
    x = inputs.normal((wanted.rows, wanted.depth), "bf16")
    norm = inputs.normal((wanted.depth,), "f32") if wanted.use == "normed" else None
    residual = inputs.normal((wanted.rows, wanted.width), "bf16") if wanted.use == "residual" else None
    layer.weight.plans.clear()
    result = _run(layer, put(gpu, x), wanted, *(None if each is None else put(gpu, each) for each in (norm, residual)))
    found = result.to("cpu").array.astype(np.float32)
    kernels = launched_names(layer.weight)
    if is_dry:
        return {"kernels": kernels}
    rows = sampled(wanted.rows)
    expected = _expected(layer, wanted, x[rows], norm, None if residual is None else residual[rows])
    return {"kernels": kernels, **errors(found[rows], expected)}


def put(gpu: Gpu, array: Array) -> Tensor:
    """The array on the device."""
    return Tensor.from_numpy(np.ascontiguousarray(array)).to(gpu.device)


def _run(layer: Layer, x: Tensor, wanted: Wanted, norm: Tensor | None, residual: Tensor | None) -> Tensor:
    if wanted.use == "gated":
        return ops.linear_glu(x, layer.weight, "silu")
    if norm is None:
        return ops.linear(x, layer.weight, residual=residual)
    if layer.weight.rounds_rows:
        return ops.linear(x, layer.weight, norm=RmsNorm(norm, EPS, median=1.0))
    return ops.linear(ops.rms_norm(x, norm, EPS), layer.weight)


def _expected(layer: Layer, wanted: Wanted, x: Array, norm: Array | None, residual: Array | None) -> Array:
    """The results of the rows in x, float32."""
    if norm is not None:
        wide = x.astype(np.float32)
        x = (wide / np.sqrt(np.square(wide).mean(1, keepdims=True) + EPS) * norm).astype(ml_dtypes.bfloat16)
    is_rounded = planned_of(layer.weight).rounding is not None
    found = layer.expected(dynamic_quantisation(x, layer.weight) if is_rounded else x)
    if wanted.use == "gated":
        gate, up = np.split(found, 2, 1)
        found = gate / (1 + np.exp(-gate)) * up
    if residual is not None:
        found = found + residual.astype(np.float32)
    return found


def errors(found: Array, expected: Array) -> Result:
    """The largest error relative to the largest value, and the RMS error relative to the RMS value. Raises
    AssertionError if either is too large, or NaN."""
    difference = np.abs(found - expected)
    largest = float(difference.max() / np.abs(expected).max())
    rms = float(np.sqrt(np.square(difference).mean() / np.square(expected).mean()))
    if not (largest <= TOLERANCE["bf16"] and rms <= MOST_RMS):
        worst = int(np.where(np.isnan(difference), np.inf, difference).argmax())
        row, column = (int(place) for place in np.unravel_index(worst, difference.shape))
        raise AssertionError(
            f"off by {largest:.3g} of the largest value, by {rms:.3g} on the whole, at sampled row {row}, column "
            f"{column}: {found[row, column]}, not {expected[row, column]}; {np.isnan(found).mean():.1%} are NaN"
        )
    return {"error_share": largest, "error_rms": rms}
