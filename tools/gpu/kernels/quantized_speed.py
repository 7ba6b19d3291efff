"""Speed of products with quantised weights and of mixtures of experts, compared with bfloat16's at the same sizes.

Ours is verified just before it is timed, on the same input; bfloat16's products are in "kernels". The launches of an
operation are recorded once and repeated, like a graph in serving: the host's planning time does not count.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from runtime import ops
from runtime.bench.kernels.cases import Inputs, sampled
from runtime.bench.kernels.timing import Stopwatch
from runtime.device.gpu import Gpu
from runtime.linear.experts import ExpertsWeight
from runtime.routing import Routing, RoutingRule
from tools.gpu.kernels.packed_layers import Layer, float_layer, packed_layer
from tools.gpu.kernels.quantized import Wanted, check, errors, put
from tools.gpu.kernels.speed import stopwatch_of
from tools.gpu.sections import Case, Options, Result
from tools.gpu.serving.quick_weights import copied

FORMATS = ("int4 g128", "mxfp4", "fp8 blocks", "fp8", "w8a8", "int8", "int4 g32", "nvfp4")
ROWS = (1, 16, 2048, 64, 128)
SHAPES = ((8192, 8192), (6144, 4096), (4096, 12288))
MIXTURES = {"gpt-oss-20b": (32, 4, 2880, 2880), "qwen3-30b-a3b": (128, 8, 2048, 768)}
"""Experts, how many of them a token chooses, hidden, inner."""
ROWS_OF_EXPERT = 128
"""Rows of each expert in a prompt."""


class Recorded:
    """The launches of an operation, for repetition; its allocations are kept.

    Raises AssertionError if it also fills or copies memory, which is not recorded.
    """

    def __init__(self, gpu: Gpu, work: Callable[[], Any]) -> None:
        self._gpu, self._held = gpu, list[Any]([work])  # the work holds its inputs
        self._launches: list[tuple[Any, tuple[Any, ...]]] = []
        allocate, launch = gpu.allocate, gpu.launch

        def kept(*arguments: Any, **more: Any) -> Any:
            self._held.append(allocate(*arguments, **more))
            return self._held[-1]

        def noted(what: Any, *arguments: Any, **more: Any) -> None:
            self._launches.append((what, arguments))
            launch(what, *arguments, **more)

        def missing(*_: Any, **__: Any) -> None:
            raise AssertionError("an operation that is timed copies or fills memory")

        with contextlib.ExitStack() as patches:
            for name, instead in (("allocate", kept), ("launch", noted), ("copy", missing), ("fill", missing)):
                patches.enter_context(patch.object(gpu, name, instead))
            self.result = work()

    def __call__(self) -> None:
        with self._gpu.chained():
            for launch, arguments in self._launches:
                self._gpu.launch(launch, *arguments)

    @property
    def kernels(self) -> list[str]:
        """The kernels' names, in order."""
        return [launch.specialisation.name for launch, _ in self._launches]


def linear(options: Options) -> Iterator[Case]:
    """Products of few rows and of many."""
    stopwatch = stopwatch_of(options)
    for width, depth in [(64, 128)] if options.is_quick else SHAPES:
        for name in FORMATS[:1] if options.is_quick else FORMATS:
            for rows in (1,) if options.is_quick else ROWS:
                wanted = Wanted(name, rows, width, depth)
                yield Case(wanted.name, functools.partial(_linear, options, stopwatch, wanted))


def _linear(options: Options, stopwatch: Stopwatch, wanted: Wanted) -> Result:
    gpu, (m, n, k) = stopwatch.gpu, (wanted.rows, wanted.width, wanted.depth)
    row: Result = {"format": wanted.format, "sizes": [m, n, k], **check(gpu, wanted, is_dry=options.is_dry)}
    x = put(gpu, Inputs(gpu, 1).normal((m, k), "bf16"))
    weight, floats = packed_layer(gpu, wanted.format, n, k).weight, float_layer(gpu, n, k).weight
    ours, theirs = (Recorded(gpu, lambda each=each: ops.linear(x, each)) for each in (weight, floats))  # type: ignore[misc]
    row["bf16_kernels"] = theirs.kernels
    return row | _timed(stopwatch, {"ours": ours, "bf16": theirs}, weight.size_bytes + 2 * m * (n + k), 2.0 * m * n * k)


def _timed(stopwatch: Stopwatch, competitors: Mapping[str, Recorded], least_bytes: int, flops: float) -> Result:
    """`least_bytes`, `flops`: of "ours"."""
    times = stopwatch.times(competitors)
    row: Result = {"least_bytes": least_bytes, "flops": flops}
    row["times"] = {name: each.as_json() for name, each in times.items()}
    if not stopwatch.is_emulated and (ours := times["ours"].median_us):
        row["gb_per_s"] = round(least_bytes / ours / 1e3, 1)
        row["tflop_per_s"] = round(flops / ours / 1e6, 2)
        row["times_as_fast_as_bf16"] = round(times["bf16"].median_us / ours, 3)
    return row


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

    @property
    def name(self) -> str:
        return f"{self.model}, {self.format}, {self.tokens} tokens"


def experts(options: Options) -> Iterator[Case]:
    """One token, few, and prompts with `ROWS_OF_EXPERT` rows per expert and four times as many, compared with dense
    bfloat16 products of as many rows of these sizes."""
    stopwatch = stopwatch_of(options)
    if options.is_quick:
        tiny = Mixture("tiny", "mxfp4", 2, 4, 2, 64, 64)
        yield Case(tiny.name, functools.partial(_experts, options, stopwatch, tiny))
        return
    for model, sizes in MIXTURES.items():
        prompt = ROWS_OF_EXPERT * sizes[0] // sizes[1]
        for name in ("mxfp4", "bf16") if model == "gpt-oss-20b" else ("bf16", "fp8 blocks", "int4 g128", "mxfp4"):
            for tokens in (1, 16, prompt, 4 * prompt, 4, 64):
                mixture = Mixture(model, name, tokens, *sizes)
                yield Case(mixture.name, functools.partial(_experts, options, stopwatch, mixture))


@functools.lru_cache(maxsize=1)
def mixture_weights(
    gpu: Gpu, format: str, num_experts: int, hidden: int, inner: int
) -> tuple[list[ExpertsWeight], list[list[Layer]]]:
    """Gate and up, and down; and their two distinct layers: every second expert has the same numbers, in memory of its
    own."""
    made, layers = [], []
    for width, depth in ((2 * inner, hidden), (hidden, inner)):
        pair = [_layer(gpu, format, width, depth, seed) for seed in (0, 1)]
        weights = [pair[number % 2].weight for number in range(num_experts)]
        made.append(ExpertsWeight([each if at < 2 else copied(each) for at, each in enumerate(weights)]))
        layers.append(pair)
    return made, layers


def _layer(gpu: Gpu, name: str, width: int, depth: int, seed: int) -> Layer:
    return float_layer(gpu, width, depth, seed) if name == "bf16" else packed_layer(gpu, name, width, depth, seed)


def _experts(options: Options, stopwatch: Stopwatch, mixture: Mixture) -> Result:
    gpu, rng, tokens = stopwatch.gpu, np.random.default_rng(0), mixture.tokens
    sizes = mixture.num_experts, mixture.hidden, mixture.inner
    (gate_up, down), layers = mixture_weights(gpu, mixture.format, *sizes)  # kept for all token counts
    x = Inputs(gpu, 1).normal((tokens, mixture.hidden), "bf16")
    ids = np.argsort(rng.random((tokens, mixture.num_experts)), 1)[:, : mixture.top_k].astype(np.int32)
    if mixture.tokens * mixture.top_k % mixture.num_experts == 0:  # each as often
        turns = np.arange(tokens * mixture.top_k).reshape(tokens, -1)
        ids = (rng.permutation(mixture.num_experts)[turns % mixture.num_experts]).astype(np.int32)
    shares = rng.uniform(size=ids.shape).astype(np.float32)
    rule = RoutingRule(num_experts=mixture.num_experts, top_k=mixture.top_k)
    chosen, on_gpu = Routing(put(gpu, ids), put(gpu, shares), rule), put(gpu, x)
    ours = Recorded(gpu, lambda: ops.experts(on_gpu, chosen, gate_up, down, "silu"))
    row: Result = {"sizes": [tokens, mixture.num_experts, mixture.top_k, mixture.hidden, mixture.inner]}
    row["kernels"] = ours.kernels
    if not options.is_dry:
        some = sampled(tokens)
        found = ours.result.to("cpu").array.astype(np.float32)[some]
        row |= errors(found, _expected(x[some], ids[some], shares[some], layers))
    touched = np.unique(ids).size
    row["touched"] = touched
    each = sum(part.experts[0].size_bytes for part in (gate_up, down))
    flops = 2.0 * tokens * mixture.top_k * 3 * mixture.hidden * mixture.inner
    dense = _dense(gpu, mixture)
    row["dense_kernels"] = dense.kernels
    return row | _timed(stopwatch, {"ours": ours, "bf16": dense}, touched * each + 4 * tokens * mixture.hidden, flops)


def _dense(gpu: Gpu, mixture: Mixture) -> Recorded:
    """Dense gate and up, and down, of one expert's size over as many rows as all experts have."""
    rows = mixture.tokens * mixture.top_k
    x = put(gpu, Inputs(gpu, 2).normal((rows, mixture.hidden), "bf16"))
    gate_up, down = _dense_layers(gpu, mixture.hidden, mixture.inner)
    return Recorded(gpu, lambda: ops.linear(ops.linear_glu(x, gate_up.weight, "silu"), down.weight))


@functools.lru_cache(maxsize=1)
def _dense_layers(gpu: Gpu, hidden: int, inner: int) -> tuple[Layer, Layer]:
    return float_layer(gpu, 2 * inner, hidden), float_layer(gpu, hidden, inner)


def _expected(x: Any, ids: Any, shares: Any, layers: list[list[Layer]]) -> Any:
    """Tokens' sums over the two kinds of experts, float32; intermediate results are rounded."""
    total = np.zeros(x.shape, np.float32)
    for kind in range(2):
        gate, up = np.split(layers[0][kind].expected(x), 2, 1)
        inner = (gate / (1 + np.exp(-gate)) * up).astype(x.dtype)
        share = np.where(ids % 2 == kind, shares, 0).sum(1, keepdims=True)
        total += share * layers[1][kind].expected(inner)
    return total
