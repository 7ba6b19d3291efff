"""Fits the time of a prompt's chunk, by its length and the computed tokens before it, to measured steps, and finds
chunks of equal time.

    t = c + b x + a (2 L x + x²)

for x tokens after L: a constant, a cost a token, and a cost for each pair of tokens in attention. A model's stages
compute steps one after another, and a stage that is done sooner waits, so steps should take equal times. SGLang's
chunked pipelines (2026) fit the same.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_MEMORY = 0.98
"""The factor of a measurement's weight at the next one."""
_LEAST_STEPS = 8
"""Measurements before the fit is used."""


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
