"""A step's time from its features, fitted to measured steps.

Models map ``StepFeatures`` to seconds. The fitted one is linear in non-negative terms,

    t = c₀ + c₁·sequences + c₂·tokens + Σₖ cₖ·min(tokens, k) + Σₗ cₗ·max(tokens - l, 0) + c₃·pairs + c₄·context,

whose ``min`` terms make the first tokens of a step more expensive: a product with one row reads all weights,
one with 64 rows reads them once, too. The ``max`` terms make the last ones more expensive, where a GPU computes for
longer than it reads. Non-negative least squares (Lawson and Hanson, "Solving Least Squares Problems",
1974, chapter 23) keeps a term that the measurements do not support at zero instead of letting two cancel.

Pairs and context are those of a layer: with windows in some layers, the mean over all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidArgumentError

KNEES = (4, 16, 64)
BEYOND = (128, 512)
_BEYOND_TERMS = tuple(f"tokens_beyond_{knee}" for knee in BEYOND)
TERMS = (
    "constant", "sequences", "tokens", *(f"tokens_to_{knee}" for knee in KNEES), *_BEYOND_TERMS, "prefill_pairs",
    "decode_context",
)  # fmt: skip
LEAST_STEPS = 2 * len(TERMS)


class StepFeatures(NamedTuple):
    """The features of a step.

    tokens          in all chunks
    sequences       chunks
    prefill_pairs   query-key pairs of attention in chunks of more than one token, the mean over the layers
    decode_context  tokens that single-token chunks attend to, themselves included, the mean over the layers
    """

    tokens: int
    sequences: int
    prefill_pairs: float
    decode_context: float


WindowShards = tuple[tuple[int, float], ...]
"""Windows, each with the share of a model's layers that see so many tokens; the other layers see all."""


def window_shares(layer_windows: Sequence[int | None]) -> WindowShards:
    """The shares of layers with these windows; None for full attention."""
    counts = Counter(window for window in layer_windows if window is not None)
    return tuple((window, count / len(layer_windows)) for window, count in sorted(counts.items()))


def features_of(chunks: Sequence[tuple[int, int]], windows: WindowShards = ()) -> StepFeatures:
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
            furthest = start + count - window  # keys outside the window of the chunk's last query
            if furthest <= 0:
                continue
            nearest = max(start + 1 - window, 1)  # the fewest, of queries with keys outside their window
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
class Pipeline:
    """A model in stages: a step's time in each of them, and of the transfer between two, during which the sending stage
    can compute the next step."""

    stages: tuple[StepModel, ...]
    sent_s: Callable[[StepFeatures], float]


@dataclass(frozen=True, slots=True)
class LinearStepModel:
    """Seconds for each unit of each of ``TERMS``."""

    coefficients: tuple[float, ...]

    def seconds(self, features: StepFeatures) -> float:
        constant, per_sequence, per_token, first, second, third, more, most, per_pair, per_context = self.coefficients
        tokens, sequences, pairs, context = features
        return (
            constant
            + per_sequence * sequences
            + per_token * tokens
            + first * (tokens if tokens < KNEES[0] else KNEES[0])
            + second * (tokens if tokens < KNEES[1] else KNEES[1])
            + third * (tokens if tokens < KNEES[2] else KNEES[2])
            + more * (tokens - BEYOND[0] if tokens > BEYOND[0] else 0)
            + most * (tokens - BEYOND[1] if tokens > BEYOND[1] else 0)
            + per_pair * pairs
            + per_context * context
        )

    def as_json(self) -> dict[str, float]:
        """Seconds by the terms' names."""
        return dict(zip(TERMS, self.coefficients))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LinearStepModel:
        """The inverse of ``as_json``, also for files of before ``BEYOND``; raises `InvalidArgumentError` naming a term
        that is missing or invalid."""
        values = {**dict.fromkeys(_BEYOND_TERMS, 0.0), **values}
        if set(values) != set(TERMS):
            names = ", ".join(TERMS)
            raise InvalidArgumentError(f"a step model has exactly the terms {names}, not {', '.join(values)}")
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < np.inf:
                raise InvalidArgumentError(f"step model: {name} = {value!r} is not a number of seconds")
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


def fit(features: Sequence[StepFeatures], seconds: Sequence[float], least_steps: int = LEAST_STEPS) -> Fit:
    """The model that minimises Σ (t̂ - t)² / t̂, which weighs steps by their share of the time.

    The weights come from a first fit: weights by the noisy times themselves would bias the fit down.

    Raises `InvalidArgumentError` for fewer than ``least_steps`` steps or a time that is not positive.
    """
    times = np.asarray(seconds, np.float64)
    if len(times) < least_steps or len(times) != len(features):
        raise InvalidArgumentError(f"{len(times)} step times for {len(features)} steps: at least {least_steps} of each")
    if not (np.isfinite(times).all() and (times > 0.0).all()):
        raise InvalidArgumentError("a step time is not a positive number of seconds")
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


def _terms(features: StepFeatures) -> tuple[float, ...]:
    tokens, sequences, pairs, context = features
    to = (min(tokens, knee) for knee in KNEES)
    beyond = (max(tokens - knee, 0) for knee in BEYOND)
    return (1.0, sequences, tokens, *to, *beyond, pairs, context)
