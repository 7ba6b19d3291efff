"""How long a chunk of a prompt takes behind so many computed tokens, fitted to measured steps, and which chunks take as
long as another.

    t = c + b x + a (2 L x + x²)

for x tokens behind L: a constant, a share for each token, and one for each pair of tokens that attention looks at. A
model's stages compute steps one behind the other, and a stage that is done sooner waits: so each step should take as
long as the next. SGLang's chunked pipelines (2026) fit the same.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_MEMORY = 0.98
"""What is left of a measurement's weight one measurement later."""
_LEAST_STEPS = 8
"""Measurements before anything is told from them."""


class PromptTimes:
    """Faded sums of what was measured: of the products of ``(1, x, 2 L x + x²)`` with each other and with seconds."""

    def __init__(self) -> None:
        self._products: NDArray[np.float64] = np.zeros((3, 3))
        self._seconds: NDArray[np.float64] = np.zeros(3)
        self._num_steps = 0

    def observe(self, num_tokens: int, num_pairs: int, seconds: float) -> None:
        """A step of so many tokens, which looked at so many pairs (``2 L x + x²`` of each chunk), took this long."""
        row = np.array([1.0, num_tokens, num_pairs])
        self._products = _MEMORY * self._products + np.outer(row, row)
        self._seconds = _MEMORY * self._seconds + seconds * row
        self._num_steps += 1

    def pair_tokens(self) -> float:
        """``a / b``: what a pair costs, in tokens; 0.0 as long as that cannot be told."""
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
        """The tokens behind ``num_computed`` that take as long as the first ``size`` tokens of a prompt do."""
        pair = self.pair_tokens()
        if pair == 0.0:
            return float(size)
        cost = size + pair * size * size
        linear = 1.0 + 2.0 * pair * num_computed
        return 2.0 * cost / (linear + math.sqrt(linear * linear + 4.0 * pair * cost))
