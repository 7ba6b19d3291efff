"""A product by a chosen tier, tile and way out, verified against numpy on rows from the first to the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import hopper
from numba_kernels.cuda.specialisation import Launch
from runtime.bench.kernels.cases import TOLERANCE, Array, Inputs, numpy_dtype, sampled
from runtime.device.gpu import Gpu
from tools.gpu.sections import Result


@dataclass(frozen=True, slots=True)
class Wanted:
    """``out [m, n] = act(x [m, k] . w^T + bias) + residual``.

    Attributes:
        tier: of `gemm.TIERS`, or "auto".
        tile: of the Hopper tier, instead of what it plans; with `parts`, into how many K is split.
        activation: "silu" or "gelu_tanh", by the Hopper tier: the weight has 2 n rows, gate and then up, and out is
            ``act(gate) * up``.
        is_aligned: whether out and its terms begin on 16-byte bounds, as the plan is told.
    """

    m: int
    n: int
    k: int
    tier: str = "auto"
    dtype: str = "bf16"
    out_dtype: str = ""
    tile: Any = None
    parts: int = 1
    has_bias: bool = False
    has_residual: bool = False
    activation: str = ""
    is_aligned: bool = True
    exact: bool = False

    @property
    def name(self) -> str:
        words = [self.tier if self.tile is None else f"hopper {self.tile}", f"{self.m} x {self.n} x {self.k}"]
        words += [f"{self.parts} parts"] * (self.parts > 1) + ["bias"] * self.has_bias
        words += ["residual"] * self.has_residual + [self.activation] * bool(self.activation)
        words += [self.dtype] * (self.dtype != "bf16") + [f"to {self.out_dtype}"] * bool(self.out_dtype)
        return ", ".join(words + ["rows on any bounds"] * (not self.is_aligned) + ["exact"] * self.exact)

    @property
    def out(self) -> str:
        return self.out_dtype or self.dtype


def plan(gpu: Gpu, wanted: Wanted) -> Launch:
    """Its launch. Raises AssertionError where there is none."""
    epilogue = gemm.Epilogue(
        has_residual=wanted.has_residual, is_aligned=wanted.is_aligned, activation=wanted.activation
    )
    product = gemm.Product(
        wanted.m, wanted.n, wanted.k, wanted.dtype, out=wanted.out, epilogue=epilogue, exact=wanted.exact
    )
    machine = gemm.machine_of(gpu.arch, gpu.properties.num_sms, gpu.max_clusters)
    launch: Launch | None
    if wanted.tile is None:
        launch = gemm.plan(product, machine, wanted.tier)
    else:
        launch = hopper.plan_tile(product, machine, wanted.tile, wanted.parts)
    if launch is None:
        raise AssertionError("there is no such launch")
    return launch


def check_product(gpu: Gpu, wanted: Wanted, seed: int = 0) -> Result:
    """Launches it and compares. Raises AssertionError where it is wrong."""
    m, n, k = wanted.m, wanted.n, wanted.k
    inputs = Inputs(gpu, seed)
    columns = 2 * n if wanted.activation else n
    x, weight = inputs.normal((m, k), wanted.dtype), inputs.normal((columns, k), wanted.dtype, k**-0.5)
    bias = inputs.normal((n,), wanted.dtype) if wanted.has_bias else None
    residual = inputs.normal((m, n), wanted.out) if wanted.has_residual else None
    launch = plan(gpu, wanted)
    out_type = numpy_dtype(wanted.out)
    size_bytes = m * n * out_type.itemsize
    out = inputs.empty(size_bytes + 256)
    gpu.fill(out, 0xFF, size_bytes + 256)
    terms = [0 if term is None else inputs.put(term) for term in (bias, residual)]
    gpu.launch(launch, inputs.put(x), inputs.put(weight), *terms, out, m, n, k, 0, *gemm.NO_SQUARES)
    found, behind = np.empty((m, n), out_type), np.empty(256, np.uint8)
    gpu.read(out, found)
    gpu.read(out + size_bytes, behind)
    if not (behind == 0xFF).all():
        raise AssertionError("something was written behind the result")
    rows = sampled(m)
    expected = _expected(wanted, x[rows], weight, bias, None if residual is None else residual[rows])
    difference = np.abs(found[rows].astype(np.float32) - expected)
    error = float(difference.max() / np.abs(expected).max())
    if not error <= TOLERANCE[wanted.dtype]:
        row, column = (int(place) for place in np.unravel_index(int(np.nanargmax(difference)), difference.shape))
        share = float(np.mean(~(difference <= TOLERANCE[wanted.dtype] * np.abs(expected).max())))
        raise AssertionError(
            f"off by {error:.3g} of the largest value, at row {rows[row]}, column {column}: "
            f"{found[rows[row], column]}, not {expected[row, column]}; {share:.1%} of the elements are off, "
            f"{np.isnan(difference).mean():.1%} are NaN; {launch.specialisation.name}"
        )
    return {
        "kernel": launch.specialisation.name, "grid": launch.grid, "cluster": launch.cluster, "error_share": error,
    }  # fmt: skip


def _expected(wanted: Wanted, x: Array, weight: Array, bias: Array | None, residual: Array | None) -> Array:
    """The results of the rows in x, float32."""
    found = x.astype(np.float32) @ weight.astype(np.float32).T
    if bias is not None:
        found += bias.astype(np.float32)
    if wanted.activation:
        gate, up = found[:, : wanted.n], found[:, wanted.n :]
        cubic = np.float32(0.7978845608) * (gate + np.float32(0.044715) * gate**3)
        silu = gate / (1 + np.exp(-gate))
        found = (silu if wanted.activation == "silu" else gate * (1 + np.tanh(cubic)) / 2) * up
    if residual is not None:
        found += residual.astype(np.float32)
    return found
