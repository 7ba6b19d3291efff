"""How much of the machine other processes used while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")


class Disturbance:
    """Begins to watch when made; `share` ends it.

    Counts the processor time of the whole machine (Linux' `/proc/stat`, in ticks of 10 ms, so that it says little about
    less than a fifth of a second) less the time of those who were meant to run.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._busy_s = _busy_s()
        self._own_s = time.process_time()

    def share(self, peer_s: float) -> float | None:
        """Processor time of others, as a share of all cores' time; `peer_s` is that of a helper process of ours.

        None where the system does not tell.
        """
        wall = time.perf_counter() - self._start
        busy = _busy_s()
        if self._busy_s is None or busy is None:
            return None
        others = busy - self._busy_s - (time.process_time() - self._own_s) - peer_s
        return max(0.0, others) / (wall * (os.cpu_count() or 1))


def _busy_s() -> float | None:
    """Seconds that all cores together have worked since the machine started."""
    if not _STAT.exists():
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, _STAT.read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
