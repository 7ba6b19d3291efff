"""Chooses the victims of preemption, and how their content is restored.

The victim is never the first in order, so there is always one sequence that runs to its end. Its content is either
recomputed or swapped to the host and back; the cost model compares the two by measured times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.engine.scheduling.sequence import Sequence

_MEMORY = 0.98
"""The factor of a measurement's weight at the next one: about fifty of them count."""


def latest(running: list[Sequence]) -> Sequence:
    """The last in order: under every policy the least urgent, and on a tie the latest."""
    return running[-1]


def least_recently_used(running: list[Sequence]) -> Sequence:
    """The one that has been in no step for longest; on a tie the last in order."""
    return min(reversed(running[1:]), key=_last_step)


def shortest_remaining(running: list[Sequence]) -> Sequence:
    """The one with the fewest output tokens left before its ``max_tokens``; on a tie the last in order."""
    return min(reversed(running[1:]), key=_remaining)


VICTIM_RULES: dict[str, Callable[[list[Sequence]], Sequence]] = {
    "latest": latest,
    "least-recently-used": least_recently_used,
    "shortest-remaining": shortest_remaining,
}
"""Each takes the running sequences in order, at least two, and never returns the first."""


@dataclass(slots=True)
class CostModel:
    """Estimates the seconds to compute tokens and to move bytes, from measurements with decaying weights.

    A step's time is modelled as a constant plus a cost a token: recomputed tokens mostly join steps that run anyway, so
    only their own cost counts.
    """

    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _tokens_squared: float = 0.0
    _tokens_seconds: float = 0.0
    _moved_bytes: float = 0.0
    _moved_seconds: float = 0.0

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Record that a step of ``num_tokens`` tokens took ``seconds``."""
        self._weight = _MEMORY * self._weight + 1.0
        self._tokens = _MEMORY * self._tokens + num_tokens
        self._seconds = _MEMORY * self._seconds + seconds
        self._tokens_squared = _MEMORY * self._tokens_squared + num_tokens * num_tokens
        self._tokens_seconds = _MEMORY * self._tokens_seconds + num_tokens * seconds

    def observe_transfer(self, num_bytes: int, seconds: float) -> None:
        """Record that moving ``num_bytes`` between device and host took ``seconds``."""
        self._moved_bytes = _MEMORY * self._moved_bytes + num_bytes
        self._moved_seconds = _MEMORY * self._moved_seconds + seconds

    def compute_s(self, num_tokens: int) -> float:
        """Seconds that so many tokens add to the steps; 0.0 before the first measurement."""
        if self._tokens <= 0.0:
            return 0.0
        mean = self._seconds / self._tokens
        spread = self._weight * self._tokens_squared - self._tokens * self._tokens
        if spread <= 1e-9 * self._tokens * self._tokens:  # all steps alike: the slope is unknown
            return num_tokens * mean
        slope = (self._weight * self._tokens_seconds - self._tokens * self._seconds) / spread
        return num_tokens * min(max(slope, 0.0), mean)

    def prefers_swap(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether moving ``num_bytes`` out and back is faster than recomputing ``num_tokens``. True before the first
        measured transfer."""
        if self._moved_bytes <= 0.0:
            return True
        return 2 * num_bytes * (self._moved_seconds / self._moved_bytes) < self.compute_s(num_tokens)


def _last_step(sequence: Sequence) -> int:
    return sequence.last_step


def _remaining(sequence: Sequence) -> int:
    return sequence.request.max_tokens - sequence.num_output_tokens
