"""Mixtures of experts: one declaration of a layer's step, verified, timed beside dense products, and tuned by tiles.

Experts' matrices are at most `KINDS` distinct ones, each expert's in memory of its own. A result is compared with
numpy's for rows from the first to the last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np

from numba_kernels.cuda.experts import hopper
from numba_kernels.cuda.gemm.epilogue import LIMIT, SLOPE
from numba_kernels.cuda.gemm.hopper import ARCH
from numba_kernels.cuda.gemm.hopper_ring import Tile
from runtime import ops
from runtime.backends import cuda_plans
from runtime.bench.kernels.cases import TOLERANCE, Array, Inputs, sampled
from runtime.bench.kernels.timing import Stopwatch
from runtime.device.gpu import Gpu
from runtime.linear.experts import ExpertsWeight
from runtime.routing import Routing, RoutingRule
from runtime.tensor.tensor import Tensor
from tools.gpu.kernels.packed_layers import Layer, float_layer, packed_layer
from tools.gpu.kernels.quantized import errors, put
from tools.gpu.kernels.quantized_speed import Recorded, timed
from tools.gpu.kernels.speed import stopwatch_of
from tools.gpu.sections import Case, Options, Result
from tools.gpu.serving.quick_weights import copied

MIXTURES = {"gpt-oss-20b": (32, 4, 2880, 2880), "qwen3-30b-a3b": (128, 8, 2048, 768)}
"""Experts, how many of them a token chooses, hidden, inner."""
ROWS_OF_EXPERT = 128
"""Rows of each expert in a prompt."""
KINDS = 17
"""Distinct matrices; a prime, so that no expert shares its with the one that a wrong stride of 2^n would read."""
TUNED_ROWS = {
    ("gpt-oss-20b", "mxfp4"): (128, 8, 512, 64, 2, 256, 32), ("gpt-oss-20b", "bf16"): (32, 64, 128, 192, 256),
    ("qwen3-30b-a3b", "bf16"): (32, 64, 128, 256),
}  # fmt: skip
"""Rows of each expert, by model and format."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """A step's tokens over a layer's experts. `format`: "bf16", or one of `packed_layers.FORMATS`."""

    model: str
    format: str
    tokens: int
    num_experts: int
    top_k: int
    hidden: int
    inner: int
    activation: str = "silu"
    has_bias: bool = False

    @property
    def name(self) -> str:
        sizes = f"{self.top_k} of {self.num_experts} experts, {self.hidden} x {self.inner}"
        return f"{self.model or sizes}, {self.format}, {self.tokens} tokens"

    def weights(self, gpu: Gpu) -> tuple[tuple[ExpertsWeight, ExpertsWeight], list[list[Layer]]]:
        """Gate and up, and down; and the distinct layers of both."""
        return _weights(gpu, self.format, self.num_experts, self.hidden, self.inner, self.has_bias)

    def routing(self, gpu: Gpu) -> tuple[Array, Array, Routing]:
        """The chosen experts, each as often where that is possible, their shares, and both on the device."""
        rng, shape = np.random.default_rng(0), (self.tokens, self.num_experts)
        ids = np.argsort(rng.random(shape), 1)[:, : self.top_k].astype(np.int32)
        if self.tokens * self.top_k % self.num_experts == 0:
            turns = np.arange(self.tokens * self.top_k).reshape(self.tokens, -1)
            ids = rng.permutation(self.num_experts)[turns % self.num_experts].astype(np.int32)
        shares = rng.uniform(size=ids.shape).astype(np.float32)
        rule = RoutingRule(num_experts=self.num_experts, top_k=self.top_k)
        on_gpu = put(gpu, ids), put(gpu, shares)
        for each in on_gpu:  # the second product reads them before the first has ended
            each.storage.freeze()
        return ids, shares, Routing(*on_gpu, rule)

    def rows(self, gpu: Gpu) -> Array:
        return Inputs(gpu, 1).normal((self.tokens, self.hidden), "bf16")


@functools.lru_cache(maxsize=1)  # kept for all token counts, which follow each other
def _weights(
    gpu: Gpu, format: str, num_experts: int, hidden: int, inner: int, has_bias: bool
) -> tuple[tuple[ExpertsWeight, ExpertsWeight], list[list[Layer]]]:
    layers, made = [], []
    for width, depth in ((2 * inner, hidden), (hidden, inner)):
        make = float_layer if format == "bf16" else functools.partial(packed_layer, name=format)
        seeds = range(min(KINDS, num_experts))
        layers.append([make(gpu, width=width, depth=depth, seed=seed, has_bias=has_bias) for seed in seeds])
        weights = [layers[-1][expert % KINDS].weight for expert in range(num_experts)]
        made.append(ExpertsWeight([each if at < KINDS else copied(each) for at, each in enumerate(weights)]))
    return (made[0], made[1]), layers


def expected(x: Array, ids: Array, shares: Array, layers: list[list[Layer]], activation: str) -> Array:
    """Tokens' sums over their experts, float32; intermediate results are rounded as on the device."""
    total = np.zeros(x.shape, np.float32)
    for kind, (gate_up, down) in enumerate(zip(*layers, strict=True)):
        gate, up = np.split(gate_up.expected(x), 2, 1)
        slope = 1.0
        if activation == "clamped_silu":
            gate, up, slope = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT) + 1, SLOPE
        inner = (gate / (1 + np.exp(-slope * gate)) * up).astype(x.dtype)
        share = np.where(ids % len(layers[0]) == kind, shares, 0).sum(1, keepdims=True)
        total += share * down.expected(inner)
    return total


def check(mixture: Mixture, result: Tensor, x: Array, ids: Array, shares: Array, layers: list[list[Layer]]) -> Result:
    """The errors of a result. Raises AssertionError if it is wrong."""
    some = sampled(mixture.tokens)
    found = result.to("cpu").array.astype(np.float32)[some]
    return errors(found, expected(x[some], ids[some], shares[some], layers, mixture.activation))


def cases(options: Options) -> Iterator[Case]:
    """Few tokens that read their experts directly, some that stream them in tiles of 16 rows, and many in large
    tiles. Nothing is timed."""
    gpu = Gpu.of(options.device)
    if options.is_quick:
        found = [Mixture("", "mxfp4", 2, 3, 2, 64, 32, "clamped_silu", True)]
        found += [Mixture("", "bf16", 6, 3, 2, 64, 32, has_bias=True)]
    else:
        found = [
            Mixture("", "bf16", tokens, 16, 4, 2048, 768, has_bias=True)
            for tokens in (1, 4, 5, 64, 200, 333, 500, 4000)
        ]
        found += [Mixture("", "mxfp4", tokens, 5, 4, 2880, 2880, "clamped_silu", True) for tokens in (1, 3, 16, 300)]
        found += [
            Mixture("", weight, tokens, 8, 2, 1024, 512, has_bias=True)
            for weight in ("int4 g32", "int8", "fp8") for tokens in (1, 9, 400, 1600)
        ]  # fmt: skip
    for each in found:
        yield Case(each.name, functools.partial(_verified, options, gpu, each))


def _verified(options: Options, gpu: Gpu, mixture: Mixture) -> Result:
    (weights, layers), x, (ids, shares, chosen) = mixture.weights(gpu), mixture.rows(gpu), mixture.routing(gpu)
    result = ops.experts(put(gpu, x), chosen, *weights, mixture.activation)  # type: ignore[arg-type]
    return {} if options.is_dry else check(mixture, result, x, ids, shares, layers)


def speed(options: Options) -> Iterator[Case]:
    """One token, few, and prompts with `ROWS_OF_EXPERT` rows per expert and four times as many, compared with dense
    bfloat16 products of as many rows of these sizes."""
    stopwatch = stopwatch_of(options)
    found = [Mixture("tiny", "mxfp4", 2, 4, 2, 64, 64)]
    if not options.is_quick:
        found.clear()
        for model, sizes in MIXTURES.items():
            prompt = ROWS_OF_EXPERT * sizes[0] // sizes[1]
            for name in ("mxfp4", "bf16") if model == "gpt-oss-20b" else ("bf16", "fp8 blocks", "int4 g128", "mxfp4"):
                found += [Mixture(model, name, tokens, *sizes) for tokens in (1, 16, prompt, 4 * prompt, 4, 64)]
    for each in found:
        yield Case(each.name, functools.partial(_speed, options, stopwatch, each))


def _speed(options: Options, stopwatch: Stopwatch, mixture: Mixture) -> Result:
    gpu, tokens = stopwatch.gpu, mixture.tokens
    (weights, layers), x, (ids, shares, chosen) = mixture.weights(gpu), mixture.rows(gpu), mixture.routing(gpu)
    on_gpu = put(gpu, x)
    ours = Recorded(gpu, lambda: ops.experts(on_gpu, chosen, *weights, "silu"))
    dense, touched = _dense(gpu, mixture), np.unique(ids).size
    row: Result = {
        "sizes": [tokens, mixture.num_experts, mixture.top_k, mixture.hidden, mixture.inner],
        "kernels": ours.kernels, "touched": touched, "dense_kernels": dense.kernels,
    }  # fmt: skip
    if not options.is_dry:
        row |= check(mixture, ours.result, x, ids, shares, layers)
    least_bytes = touched * sum(part.experts[0].size_bytes for part in weights) + 4 * tokens * mixture.hidden
    flops = 2.0 * tokens * mixture.top_k * 3 * mixture.hidden * mixture.inner
    return row | timed(stopwatch, {"ours": ours, "bf16": dense}, least_bytes, flops)


def _dense(gpu: Gpu, mixture: Mixture) -> Recorded:
    """Dense gate and up, and down, of one expert's size over as many rows as all experts have."""
    rows = mixture.tokens * mixture.top_k
    x = put(gpu, Inputs(gpu, 2).normal((rows, mixture.hidden), "bf16"))
    gate_up = float_layer(gpu, 2 * mixture.inner, mixture.hidden).weight
    down = float_layer(gpu, mixture.hidden, mixture.inner).weight
    return Recorded(gpu, lambda: ops.linear(ops.linear_glu(x, gate_up, "silu"), down))


def tuning(options: Options) -> Iterator[Case]:
    """Finds the fastest tile by rows per expert, which `runtime.backends.cuda_plans` chooses by models: `mma.sync`
    beside each tile of `wgmma`, for quantised experts dequantised before it, or unpacked by it."""
    stopwatch = stopwatch_of(options)
    found = [Mixture("tiny", "mxfp4", 6, 3, 2, 64, 64)]
    if not options.is_quick:
        found = [
            Mixture(model, name, rows * MIXTURES[model][0] // MIXTURES[model][1], *MIXTURES[model])
            for (model, name), counts in TUNED_ROWS.items() for rows in counts
        ]  # fmt: skip
    for each in found:
        yield Case(each.name, functools.partial(_tiles, options, stopwatch, each))


def _tiles(options: Options, stopwatch: Stopwatch, mixture: Mixture) -> Result:
    """Microseconds of both products with sorting and sum, by tile. All experts have equally many rows.

    Raises AssertionError if a tile's results are not near those of `mma.sync`.
    """
    gpu, (gate_up, down) = stopwatch.gpu, mixture.weights(stopwatch.gpu)[0]
    x, chosen = put(gpu, mixture.rows(gpu)), mixture.routing(gpu)[2]

    def recorded(tile: Tile | None) -> Recorded:
        with patch.object(cuda_plans, "hopper_tile", lambda *_: tile):
            return Recorded(gpu, lambda: ops.experts(x, chosen, gate_up, down, "silu"))

    tiles: dict[str, Tile | None] = {"mma.sync": None, **{str(tile): tile for tile in hopper.TILES}}
    if gate_up.packing is not None and gpu.arch == ARCH:
        tiles |= {f"unpacked {tile}": tile for tile in hopper.UNPACKING_TILES}
    competitors: dict[str, Callable[[], None]] = {}
    results: dict[str, Array] = {}
    for name, tile in tiles.items():
        competitors[name] = ours = recorded(tile)
        if not options.is_dry:
            found = results[name] = ours.result.to("cpu").array.astype(np.float32)
            wanted = results["mma.sync"]
            error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
            if not error <= TOLERANCE["bf16"]:
                raise AssertionError(f"{name}: off by {error:.3g} of the largest value of mma.sync's")
    times = stopwatch.times(competitors)
    return {
        "sizes": [mixture.tokens, mixture.num_experts, mixture.top_k, mixture.hidden, mixture.inner],
        "us": {name: round(each.median_us, 2) for name, each in times.items()},
    }
