"""How much of pictures is encoded between two steps.

Where the host waits for the device, on the cpu, time is counted: while others decode, half of what a step of decodes
usually takes, so that their tokens come at most half as late again: in pieces that are enough for the threads and the
tiles of products, and over after milliseconds. While nothing else is there to do, pieces are larger, which is faster.
On a GPU, which goes on by itself, rows are counted.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from numba_kernels.cpu.running.pool import most_threads

SHARE = 0.5
"""Of the time of a usual step of decodes."""

FIRST_S, IDLE_S, MOST_S = 0.02, 0.05, 0.1
"""Before a step of decodes was seen; while nobody decodes, after which arrivals and cancellations are looked at again;
and at most."""

PIECE_ROWS, IDLE_PIECE_ROWS = 32, 96
"""Of a piece on the cpu, for each thread, of which two are counted at least; and of one while nobody waits for it."""

_STEPS = 15
"""Of which the median is the usual one."""


class EncodingBudget:
    """Belongs to the engine's loop.

    rows  between two steps, where a row counts twice in each layer; None: time is counted
    """

    def __init__(self, rows: int | None) -> None:
        self._rows = rows
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._left_s = self._last_s = 0.0
        self._left_rows = 0
        self._is_first, self._is_idle = True, False

    def observe(self, step_s: float) -> None:
        """What a step of decodes took."""
        self._steps.append(step_s)

    def begin(self, *, is_idle: bool) -> None:
        """A step is over. `is_idle`: nothing else is there to do."""
        self._is_first, self._is_idle = True, is_idle
        if is_idle:
            self._left_s = IDLE_S
        else:
            self._left_s = min(SHARE * median(self._steps), MOST_S) if self._steps else FIRST_S
        self._left_rows = self._rows or 0

    def next_rows(self) -> int:
        """Rows that may be encoded next; 0: the budget is spent. A piece is always allowed; of more, those of which
        the last one says that they fit."""
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
