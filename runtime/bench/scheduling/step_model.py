"""How long a step takes, from what is in it: fitted to measured steps, or a roofline of a GPU.

Both map ``StepFeatures`` to seconds. The fitted one is linear in non-negative terms,

    t = c₀ + c₁·sequences + c₂·tokens + Σₖ cₖ·min(tokens, k) + c₃·pairs + c₄·context,

whose ``min`` terms let the first tokens of a step be dearer than the next: a product with one row reads all weights,
one with 64 rows reads them once, too. Non-negative least squares (Lawson and Hanson, "Solving Least Squares Problems",
1974, chapter 23) keeps a term that the measurements do not support at zero instead of letting two cancel.

Pairs and context are those of a layer: where some layers see a window, the mean over all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.bench.metrics import BenchmarkError
from runtime.kv.groups import cut_layers

if TYPE_CHECKING:
    from models.config import ModelConfig

KNEES = (4, 16, 64)
TERMS = ("constant", "sequences", "tokens", *(f"tokens_to_{knee}" for knee in KNEES), "prefill_pairs", "decode_context")
LEAST_STEPS = 2 * len(TERMS)


class StepFeatures(NamedTuple):
    """What a step computes.

    tokens          in all chunks
    sequences       chunks
    prefill_pairs   query-key pairs of attention in chunks of more than one token, the mean over the layers
    decode_context  tokens that single-token chunks attend to, themselves included, the mean over the layers
    """

    tokens: int
    sequences: int
    prefill_pairs: float
    decode_context: float


WindowShares = tuple[tuple[int, float], ...]
"""Windows, each with the share of a model's layers that see so many tokens; the other layers see all."""


def window_shares(layer_windows: Sequence[int | None]) -> WindowShares:
    """The shares of layers with these windows; None: all tokens."""
    counts = Counter(window for window in layer_windows if window is not None)
    return tuple((window, count / len(layer_windows)) for window, count in sorted(counts.items()))


def features_of(chunks: Sequence[tuple[int, int]], windows: WindowShares = ()) -> StepFeatures:
    """Features of a step from each chunk's (start, number of tokens)."""
    tokens = 0
    pairs = context = 0.0
    for start, count in chunks:
        tokens += count
        if count == 1:
            context += start + 1
        else:
            pairs += count * start + count * (count + 1) // 2
    for window, share in windows:
        for start, count in chunks:
            furthest = start + count - window  # keys that the chunk's last query does not see
            if furthest <= 0:
                continue
            nearest = max(start + 1 - window, 1)  # the fewest, of those queries that miss any
            hidden = (nearest + furthest) * (furthest - nearest + 1) // 2
            if count == 1:
                context -= share * hidden
            else:
                pairs -= share * hidden
    return StepFeatures(tokens, len(chunks), pairs, context)


class StepModel(Protocol):
    """Seconds that a step with these features takes."""

    def seconds(self, features: StepFeatures) -> float: ...


@dataclass(frozen=True, slots=True)
class LinearStepModel:
    """Seconds for each unit of each of ``TERMS``."""

    coefficients: tuple[float, ...]

    def seconds(self, features: StepFeatures) -> float:
        constant, per_sequence, per_token, first, second, third, per_pair, per_context = self.coefficients
        tokens, sequences, pairs, context = features
        return (
            constant
            + per_sequence * sequences
            + per_token * tokens
            + first * (tokens if tokens < KNEES[0] else KNEES[0])
            + second * (tokens if tokens < KNEES[1] else KNEES[1])
            + third * (tokens if tokens < KNEES[2] else KNEES[2])
            + per_pair * pairs
            + per_context * context
        )

    def as_json(self) -> dict[str, float]:
        """Seconds by the terms' names."""
        return dict(zip(TERMS, self.coefficients))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LinearStepModel:
        """The inverse of ``as_json``; raises ``BenchmarkError`` naming a term that is missing or no time."""
        if set(values) != set(TERMS):
            raise BenchmarkError(f"a step model has exactly the terms {', '.join(TERMS)}, not {', '.join(values)}")
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < np.inf:
                raise BenchmarkError(f"step model: {name} = {value!r} is not a number of seconds")
        return cls(tuple(float(values[name]) for name in TERMS))


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model and how well it fits.

    num_steps       measured steps
    relative_error  median of |predicted - measured| / measured over the steps
    total_error     (predicted - measured) / measured of the sum of all steps
    """

    model: LinearStepModel
    num_steps: int
    relative_error: float
    total_error: float


def fit(features: Sequence[StepFeatures], seconds: Sequence[float]) -> Fit:
    """The model that minimises Σ (t̂ - t)² / t̂, which counts a step of a millisecond as much as its share of the time.

    The weights come from a first fit: those of the noisy times themselves would draw the whole down.

    Raises ``BenchmarkError`` for fewer than ``LEAST_STEPS`` steps or a time that is not positive.
    """
    times = np.asarray(seconds, np.float64)
    if len(times) < LEAST_STEPS or len(times) != len(features):
        raise BenchmarkError(f"{len(times)} step times for {len(features)} steps: at least {LEAST_STEPS} of each")
    if not (np.isfinite(times).all() and (times > 0.0).all()):
        raise BenchmarkError("a step time is not a positive number of seconds")
    table = np.array([_terms(each) for each in features], np.float64)  # [steps, terms]
    scale = np.maximum(np.abs(table).max(axis=0), 1.0)
    predicted = times
    for _ in range(3):
        weights = 1.0 / np.sqrt(np.maximum(predicted, 1e-3 * times))
        found = non_negative_least_squares(table / scale * weights[:, None], times * weights) / scale
        predicted = table @ found
    return Fit(
        LinearStepModel(tuple(found.tolist())),
        len(times),
        float(np.median(np.abs(predicted - times) / times)),
        float(predicted.sum() / times.sum() - 1.0),
    )


def non_negative_least_squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """x ≥ 0 that minimises ‖a x - b‖, ``a [m, n]``, ``b [m]``; Lawson and Hanson's active sets."""
    gram, moments = a.T @ a, a.T @ b
    x = np.zeros(a.shape[1])
    is_free = np.zeros(a.shape[1], bool)
    tolerance = 1e-12 * max(1.0, float(np.abs(moments).max()))
    for _ in range(10 * a.shape[1]):
        gradient = np.where(is_free, -np.inf, moments - gram @ x)
        best = int(gradient.argmax())
        if not gradient[best] > tolerance:
            break
        is_free[best] = True
        while True:
            free = np.flatnonzero(is_free)
            target = np.zeros_like(x)
            target[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if (target[free] > 0.0).all():
                x = target
                break
            falling = free[target[free] <= 0.0]
            share = float((x[falling] / np.maximum(x[falling] - target[falling], 1e-300)).min())
            x += share * (target - x)
            is_free &= x > 1e-15
            x[~is_free] = 0.0
    return x


@dataclass(frozen=True, slots=True)
class GpuRates:
    """What a GPU sustains in good kernels, below its data sheet: bytes and bf16 operations a second; its memory."""

    bytes_per_s: float
    flops_per_s: float
    memory_bytes: int


GPUS = {
    "h200": GpuRates(4.3e12, 790e12, 141_000_000_000),
    "h100": GpuRates(3.0e12, 790e12, 80_000_000_000),
    "a100": GpuRates(1.8e12, 270e12, 80_000_000_000),
}


@dataclass(frozen=True, slots=True)
class RooflineStepModel:
    """The larger of moving a step's bytes and computing its operations, and a constant for the host and launches.

    Attributes:
        weight_bytes: read once a step; kv_bytes_per_token: of all layers, keys and values.
        kv_bytes_per_block_token: of the layers of one cache group, padding included.
        flops_per_token: of the weights' products; flops_per_pair: of attention, a query with one key, all layers.
        flops_per_logits_row: of the output projection, once a sequence (an upper bound: unfinished prompts have none).
    """

    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_block_token: int
    flops_per_token: int
    flops_per_pair: int
    flops_per_logits_row: int
    rates: GpuRates
    overhead_s: float

    def seconds(self, features: StepFeatures) -> float:
        tokens, sequences, pairs, context = features
        moved = self.weight_bytes + self.kv_bytes_per_token * (context + tokens)
        flops = (
            self.flops_per_token * tokens
            + self.flops_per_pair * (pairs + context)
            + self.flops_per_logits_row * sequences
        )
        return max(moved / self.rates.bytes_per_s, flops / self.rates.flops_per_s) + self.overhead_s


def roofline(config: ModelConfig, rates: GpuRates, *, overhead_s: float, bytes_per_value: int = 2) -> RooflineStepModel:
    """The roofline of a dense model of these shapes with ``bytes_per_value`` for weights and KV cache."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    num_mlp = 3 if config.activation == "silu" else 2
    per_layer = 2 * config.hidden_size * (heads + kv_heads) + num_mlp * config.hidden_size * config.intermediate_size
    logits = config.vocab_size * config.hidden_size
    group = cut_layers(config.layer_windows)[0]
    kv_bytes = bytes_per_value * 2 * kv_heads  # of a token in a layer
    return RooflineStepModel(
        weight_bytes=bytes_per_value * (config.num_layers * per_layer + logits),
        kv_bytes_per_token=kv_bytes * config.num_layers,
        kv_bytes_per_block_token=kv_bytes * (len(group.layers) + group.num_padding),
        flops_per_token=2 * config.num_layers * per_layer,
        flops_per_pair=4 * config.num_layers * heads,
        flops_per_logits_row=2 * logits,
        rates=rates,
        overhead_s=overhead_s,
    )


def _terms(features: StepFeatures) -> tuple[float, ...]:
    tokens, sequences, pairs, context = features
    return (1.0, sequences, tokens, *(min(tokens, knee) for knee in KNEES), pairs, context)
