"""How much of the pending images is encoded between two steps.

On the CPU, where the host waits for the device, the budget is time. While other requests decode, it is half of the
usual time of a decode step, so that their tokens come at most half as late again; a piece is large enough for the
threads and the tiles of products, and takes milliseconds. While the engine is otherwise idle, pieces are larger, which
is faster. On a GPU, which runs asynchronously, the budget is a number of rows.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from numba_kernels.cpu.running.pool import most_threads

SHARE = 0.5
"""Fraction of the usual time of a decode step."""

FIRST_S, IDLE_S, MOST_S = 0.02, 0.05, 0.1
"""Seconds: before a decode step was seen; while idle, until arrivals and cancellations are polled again; the upper
limit."""

PIECE_ROWS, IDLE_PIECE_ROWS = 32, 96
"""Rows of a piece on the CPU, for each thread (at least two are counted); and of one while the engine is idle."""

_STEPS = 15
"""Decode steps of which the median is taken."""


class EncodingBudget:
    """Belongs to the engine's loop.

    rows  between two steps, where a row counts twice in each layer; None means that time is counted
    """

    def __init__(self, rows: int | None) -> None:
        self._rows = rows
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._left_s = self._last_s = 0.0
        self._left_rows = 0
        self._is_first, self._is_idle = True, False

    def observe(self, step_s: float) -> None:
        """Record the duration of a decode step."""
        self._steps.append(step_s)

    def begin(self, *, is_idle: bool) -> None:
        """Start the budget after a step. `is_idle` means that there is no other work."""
        self._is_first, self._is_idle = True, is_idle
        if is_idle:
            self._left_s = IDLE_S
        else:
            self._left_s = min(SHARE * median(self._steps), MOST_S) if self._steps else FIRST_S
        self._left_rows = self._rows or 0

    def next_rows(self) -> int:
        """Rows that may be encoded next; 0 when the budget is spent. The first piece is always allowed; further ones if
        they fit by the time of the last."""
        if self._rows is not None:
            return max(0, self._left_rows)
        if not self._is_first and self._last_s > self._left_s:
            return 0
        return (IDLE_PIECE_ROWS if self._is_idle else PIECE_ROWS) * max(2, most_threads())

    def spend(self, rows: int, seconds: float) -> None:
        self._is_first = False
        self._left_rows -= rows
        self._left_s -= seconds
        self._last_s = seconds
