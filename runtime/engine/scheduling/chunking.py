"""The most tokens of one prompt in a step.

Smaller chunks let the decodes of other sequences go on sooner, larger ones read the weights less often. Sarathi-Serve
(Agrawal et al., 2024, and its scheduler's dynamic chunking) shrinks them as a prompt proceeds: attention to a longer
context makes later chunks more expensive, so equal times need smaller ones. ``PromptTimes`` fits their times to
measured steps:

    t = c + b x + a (2 L x + x²)

for x tokens after L: a constant, a cost a token, and a cost for each pair of tokens in attention. A model's stages
compute steps one after another, and a stage that is done sooner waits, so steps should take equal times. SGLang's
chunked pipelines (2026) fit the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engine.config import SchedulingConfig
from runtime.engine.scheduling.pictures import Pictures
from runtime.engine.scheduling.step import Step
from runtime.engine.scheduling.step_limit import StepLimit

_MEMORY = 0.98
"""The factor of a measurement's weight at the next one."""
_LEAST_STEPS = 8
"""Measurements before the fit is used."""

CHUNK_MULTIPLE = 32
"""Staged chunks are multiples of this, as the tiles of matrix products are."""


class PromptTimes:
    """Decaying sums of measurements: of the products of ``(1, x, 2 L x + x²)`` with each other and with seconds."""

    def __init__(self) -> None:
        self._products: NDArray[np.float64] = np.zeros((3, 3))
        self._seconds: NDArray[np.float64] = np.zeros(3)
        self._num_steps = 0

    def observe(self, num_tokens: int, num_pairs: int, seconds: float) -> None:
        """Record a step of so many tokens and pairs (``2 L x + x²`` of each chunk) that took this long."""
        row = np.array([1.0, num_tokens, num_pairs])
        self._products = _MEMORY * self._products + np.outer(row, row)
        self._seconds = _MEMORY * self._seconds + seconds * row
        self._num_steps += 1

    def pair_tokens(self) -> float:
        """``a / b``: the cost of a pair, in tokens; 0.0 while it is unknown."""
        if self._num_steps < _LEAST_STEPS:
            return 0.0
        scale = np.sqrt(np.diag(self._products))
        if not (scale > 0.0).all():
            return 0.0
        scaled = self._products / np.outer(scale, scale)
        if np.linalg.matrix_rank(scaled, tol=1e-6) < 3:
            return 0.0
        _, b, a = np.linalg.solve(scaled, self._seconds / scale) / scale
        return float(a / b) if a > 0.0 and b > 0.0 and math.isfinite(a / b) else 0.0

    def as_long_as(self, size: int, num_computed: int) -> float:
        """The tokens after ``num_computed`` that take as long as the first ``size`` tokens of a prompt do."""
        pair = self.pair_tokens()
        if pair == 0.0:
            return float(size)
        cost = size + pair * size * size
        linear = 1.0 + 2.0 * pair * num_computed
        return 2.0 * cost / (linear + math.sqrt(linear * linear + 4.0 * pair * cost))


class Chunking(Protocol):
    """``most(num_computed)`` is the most tokens of a prompt in one step after ``num_computed`` tokens."""

    def most(self, num_computed: int) -> int: ...


class FixedChunks:
    """The same everywhere in a prompt."""

    def __init__(self, size: int) -> None:
        self.size = size

    def most(self, num_computed: int) -> int:
        return self.size


class StagedChunks:
    """``stages`` sizes from ``high`` down to ``low``, evenly spaced and rounded up to multiples of 32; each holds for
    an equal share of the first ``over_tokens`` tokens, the last for all that follow."""

    def __init__(self, high: int, low: int, stages: int, over_tokens: int) -> None:
        fall = (high - low) / max(1, stages - 1)
        self.sizes = [round_up(high - fall * stage) for stage in range(stages)]
        self.tokens_per_stage = -(-over_tokens // stages)

    def most(self, num_computed: int) -> int:
        return self.sizes[min(num_computed // self.tokens_per_stage, len(self.sizes) - 1)]


class EqualChunks:
    """Chunks that take as long as the first ``size`` tokens of a prompt, by measured times, in multiples of 32. For
    several open steps, one after another in a model's stages."""

    def __init__(self, size: int, times: PromptTimes) -> None:
        self.size, self.times = size, times

    def most(self, num_computed: int) -> int:
        if not num_computed:
            return self.size
        return min(self.size, round_up(self.times.as_long_as(self.size, num_computed)))


def round_up(size: float) -> int:
    """The smallest multiple of 32 that is not less."""
    return -int(-size // CHUNK_MULTIPLE) * CHUNK_MULTIPLE


def chunking_of(config: SchedulingConfig, max_num_batched_tokens: int, depth: int, times: PromptTimes) -> Chunking:
    """The chunking that the configuration names. By default a step's budget is the only limit, or, with ``depth`` open
    steps, all of them share it and take equal times."""
    if config.prefill_chunk_stages is not None:
        return StagedChunks(*config.prefill_chunk_stages)
    if depth > 1 and config.prefill_chunk is None:
        size = max(CHUNK_MULTIPLE, round_up(max_num_batched_tokens / depth))
        return EqualChunks(min(size, max_num_batched_tokens), times)
    return FixedChunks(config.prefill_chunk or max_num_batched_tokens)


@dataclass(slots=True)
class PromptChunks:
    """Cuts prompts into steps, if they may be cut; ``limit``: by the steps' time, too."""

    chunking: Chunking
    cuts_prompts: bool
    limit: StepLimit | None = None

    def size(self, step: Step, num_computed: int, remaining: int, pictures: Pictures | None) -> int:
        """How many of a prompt's ``remaining`` tokens the step may compute. A prompt that may not be cut may exceed the
        budget if it is alone; an image that may not be cut may exceed the chunk's size."""
        if self.cuts_prompts:
            most = min(remaining, step.budget)
            count = min(most, self.chunking.most(num_computed))
            if pictures is not None and pictures.whole and count > 0:
                return pictures.whole_chunk(num_computed, count, most)
            return count if self.limit is None else self.limit.most(step.chunks, num_computed, count)
        return remaining if remaining <= step.budget or not step.chunks else 0
