"""Divides a machine's processors or GPUs among several engines, and combines their stats into those of one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from runtime.device.device import Device
from runtime.engine.messages import EngineStats

SHARED = {"max_waiting": max, "last_step_s": max, "sleep_level": max}
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


def cores_of(engine: int, num_engines: int, cores: Sequence[int]) -> tuple[int, ...]:
    """An engine's part of these processors: adjacent ones, as many as the others have, or one more. If there are more
    engines than processors, engines share them."""
    if len(cores) < num_engines:
        return (cores[engine % len(cores)],)
    first, last = (number * len(cores) // num_engines for number in (engine, engine + 1))
    return tuple(cores[first:last])


def device_of(engine: int, num_engines: int, device: str, num_ranks: int) -> str:
    """The first device of an engine, of those that begin with ``device``: a GPU for each rank, else the one that all
    share. Raises ``DeviceError`` if there are not enough GPUs, and for a name that is not a device's."""
    first = Device.parse(device)
    if first.kind != "cuda":
        return first.type
    Device(f"cuda:{first.index + num_engines * num_ranks - 1}").require()
    return f"cuda:{first.index + engine * num_ranks}"
