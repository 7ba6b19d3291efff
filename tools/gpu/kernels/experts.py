"""Mixtures of experts against numpy, at sizes of serving: few tokens and many, in 16 bits and packed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from models.quantized.on_load import ROUNDINGS
from numba_kernels.cuda.gemm.epilogue import LIMIT, SLOPE
from runtime import ops
from runtime.bench.kernels.cases import TOLERANCE, Array, Inputs, sampled
from runtime.device.gpu import Gpu
from runtime.dtype import float32
from runtime.linear.experts import ExpertsWeight
from runtime.linear.options import LoadOptions
from runtime.linear.packed_matrix import MatrixPart, prepare_packed
from runtime.linear.quantise import Rounding, quantise
from runtime.linear.weight import LinearWeight
from runtime.routing import Routing, RoutingRule
from runtime.tensor.tensor import Tensor
from tools.gpu.sections import Case, Options, Result

_ROUNDINGS = ROUNDINGS | {"int8": Rounding("int8", (1, 0), np.dtype(np.float32))}


@dataclass(frozen=True, slots=True)
class Mixture:
    """A layer's experts, and the tokens of a step. `weight`: "bf16", or one of `_ROUNDINGS`."""

    tokens: int
    num_experts: int
    top_k: int
    hidden: int
    inner: int
    weight: str = "bf16"
    activation: str = "silu"

    @property
    def name(self) -> str:
        sizes = f"{self.tokens} tokens, {self.top_k} of {self.num_experts} experts, {self.hidden} x {self.inner}"
        return f"{sizes}, {self.weight}, {self.activation}"


def cases(options: Options) -> Iterator[Case]:
    """Few tokens that read their experts directly, some that stream them in tiles of 16 rows, and many in large
    tiles."""
    gpu = Gpu.of(options.device)
    if options.is_quick:
        found = [Mixture(2, 3, 2, 64, 32, "mxfp4", "clamped_silu"), Mixture(6, 3, 2, 64, 32)]
    else:
        found = [Mixture(tokens, 16, 4, 2048, 768) for tokens in (1, 4, 5, 64, 200, 333, 500, 4000)]
        found += [Mixture(tokens, 5, 4, 2880, 2880, "mxfp4", "clamped_silu") for tokens in (1, 3, 16, 300)]
        found += [
            Mixture(tokens, 8, 2, 1024, 512, weight)
            for weight in ("int4", "int8", "fp8") for tokens in (1, 9, 400, 1600)
        ]  # fmt: skip
    for each in found:
        yield Case(each.name, functools.partial(check, gpu, each))


def check(gpu: Gpu, wanted: Mixture, seed: int = 0) -> Result:
    """Runs a layer and compares rows from the first to the last. Raises AssertionError if it is wrong."""
    inputs, rng = Inputs(gpu, seed + 1), np.random.default_rng(seed)
    gate_up, down, matrices = _layer(gpu, wanted.num_experts, wanted.hidden, wanted.inner, wanted.weight)
    rule = RoutingRule(num_experts=wanted.num_experts, top_k=wanted.top_k)
    ids = np.argsort(rng.random((wanted.tokens, wanted.num_experts)), 1)[:, : wanted.top_k].astype(np.int32)
    shares = rng.uniform(size=ids.shape).astype(np.float32)
    x = inputs.normal((wanted.tokens, wanted.hidden), "bf16")
    chosen = Routing(_put(gpu, ids), _put(gpu, shares), rule)
    result = ops.experts(_put(gpu, x), chosen, gate_up, down, wanted.activation)  # type: ignore[arg-type]
    found = result.to("cpu").array.astype(np.float32)
    some = sampled(wanted.tokens)
    expected = np.array([_expected(x[row], ids[row], shares[row], matrices, wanted.activation) for row in some])
    error = float(np.abs(found[some] - expected).max() / np.abs(expected).max())
    if not error <= TOLERANCE["bf16"]:
        raise AssertionError(f"off by {error:.3g} of the largest value, {np.isnan(found).mean():.1%} are NaN")
    return {"error_share": error}


@functools.lru_cache(maxsize=1)  # cases of one layer follow each other
def _layer(
    gpu: Gpu, num_experts: int, hidden: int, inner: int, weight: str
) -> tuple[ExpertsWeight, ExpertsWeight, list[list[Array]]]:
    """Gate and up, down, and the matrices of both in float32, a bias in the last column."""
    inputs = Inputs(gpu, 0)
    matrices: list[list[Array]] = [[], []]
    made: list[list[LinearWeight]] = [[], []]
    for number, (rows, depth) in enumerate(((2 * inner, hidden), (hidden, inner))):
        for _ in range(num_experts):
            matrix, bias = inputs.normal((rows, depth), "bf16", depth**-0.5), inputs.normal((rows,), "f32")
            prepared, kept = _prepared(gpu, matrix, bias, weight)
            made[number].append(prepared)
            matrices[number].append(np.concatenate([kept, bias[:, None]], 1))
    gate_up, down = (ExpertsWeight(each) for each in made)
    return gate_up, down, matrices


def _put(gpu: Gpu, array: Array) -> Tensor:
    return Tensor.from_numpy(np.ascontiguousarray(array)).to(gpu.device)


def _prepared(gpu: Gpu, matrix: Array, bias: Array, weight: str) -> tuple[LinearWeight, Array]:
    """The map on the device, and its matrix, float32."""
    options = LoadOptions.parse(device=str(gpu.device), dtype="bfloat16")
    terms = Tensor.from_numpy(bias)
    if weight == "bf16":
        return ops.prepare_linear(Tensor.from_numpy(matrix), terms, options), matrix.astype(np.float32)
    quantised = quantise(matrix.astype(np.float32), _ROUNDINGS[weight])
    part = MatrixPart(quantised, slice(0, matrix.shape[0]), slice(0, matrix.shape[1]))
    return prepare_packed([part], [terms], options, None), quantised.dequantise(float32)


def _expected(x: Array, ids: Array, shares: Array, matrices: list[list[Array]], activation: str) -> Array:
    """A token's row, float32; intermediate results are rounded as on the device."""
    row, total = np.append(x.astype(np.float32), np.float32(1)), np.zeros(x.shape, np.float32)
    for expert, share in zip(ids, shares):
        gate, up = np.split(matrices[0][expert] @ row, 2)
        if activation == "clamped_silu":
            gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT) + 1
            inner = gate / (1 + np.exp(-SLOPE * gate)) * up
        else:
            inner = gate / (1 + np.exp(-gate)) * up
        rounded = inner.astype(ml_dtypes.bfloat16).astype(np.float32)
        total += share * (matrices[1][expert] @ np.append(rounded, np.float32(1)))
    return total
