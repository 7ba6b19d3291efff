"""Combines the stats of several engines into those of one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from runtime.engine.messages import EngineStats

SHARED = {"max_waiting": max, "last_step_s": max}
"""Fields that are not sums."""


def total_stats(found: Sequence[EngineStats]) -> EngineStats:
    """The sums of counts and counters; the queue's limit is the total, usage the fraction of all blocks, the last step
    the latest of any engine."""
    values: dict[str, Any] = {}
    for name in EngineStats.__struct_fields__:
        numbers = [getattr(stats, name) for stats in found]
        if isinstance(numbers[0], tuple):
            values[name] = tuple(map(sum, zip_longest(*numbers, fillvalue=0)))
        else:
            values[name] = SHARED.get(name, sum)(numbers)
    values["kv_cache_usage"] = 1.0 - values["num_free_blocks"] / values["num_blocks"]
    return EngineStats(**values)
