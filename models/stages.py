"""Distributes layers to the stages of a pipeline: neighbouring layers, so that the stages read as many bytes in a step.

A step reads each layer's weights, and those of the output head in the last stage. The embedding table does not count:
only a few rows are looked up. Bytes are known before anything runs; a user may set each stage's layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from models.errors import ConfigError


def balanced(
    layer_bytes: Sequence[int], num_stages: int, *, first_bytes: int = 0, last_bytes: int = 0, least_first: int = 1,
    least_last: int = 1, name: str = "",
) -> tuple[range, ...]:  # fmt: skip
    """The layers of each stage, at least one, of layers that have so many bytes: the largest stage is as small as
    possible; ties go to the most even stages.

    `first_bytes` and `last_bytes` are what the first and the last stage read besides; the first has at least
    `least_first` layers, the last `least_last`. Raises `ConfigError` where there are fewer layers than stages; `name`
    is the model's in it.
    """
    count = len(layer_bytes)
    if count < num_stages + least_first + least_last - 2:
        limits = f", of which the first has at least {least_first}" if least_first > 1 else ""
        limits += f", of which the last has at least {least_last}" if least_last > 1 else ""
        raise ConfigError(f"{name}: {count} layers cannot be split over {num_stages} stages{limits}")
    sums = [0, *accumulate(layer_bytes)]

    def size(stage: int, first: int, end: int) -> int:
        more = (first_bytes if stage == 0 else 0) + (last_bytes if stage == num_stages - 1 else 0)
        return sums[end] - sums[first] + more

    def best(limit: int | None) -> tuple[int, list[int]]:
        """Ends of the stages with the smallest largest stage; with a limit to it, with the smallest squares."""
        # By the number of layers in the stages so far: their cost, and each stage's end.
        found: dict[int, tuple[int, list[int]]] = {0: (0, [])}
        for stage in range(num_stages):
            left = num_stages - 1 - stage
            behind = left + least_last - 1 if left else 0  # layers of later stages, at least
            following: dict[int, tuple[int, list[int]]] = {}
            for first, (cost, ends) in found.items():
                least = first + (least_first if stage == 0 else 1)
                for end in range(least, count - behind + 1) if left else (count,):
                    own = size(stage, first, end)
                    if limit is not None and own > limit:
                        continue
                    whole = max(cost, own) if limit is None else cost + own * own
                    if end not in following or whole < following[end][0]:
                        following[end] = whole, [*ends, end]
            found = following
        return found[count]

    largest, _ = best(None)
    _, ends = best(largest)
    return tuple(range(first, end) for first, end in zip((0, *ends), ends))


def counted(
    counts: Sequence[int], num_layers: int, *, least_first: int = 1, least_last: int = 1, name: str = ""
) -> tuple[range, ...]:
    """Stages of so many layers. Raises `ConfigError` where these are not all layers, and each at least one, the first
    at least `least_first`, the last `least_last`; `name` is the model's in it."""
    shown = ", ".join(map(str, counts))
    if sum(counts) != num_layers or min(counts) < 1:
        raise ConfigError(f"{name}: stages of {shown} layers must have {num_layers} together, and each at least 1")
    if counts[0] < least_first:
        raise ConfigError(f"{name}: stages of {shown} layers: the first must have at least {least_first}")
    if counts[-1] < least_last:
        raise ConfigError(
            f"{name}: stages of {shown} layers: the last must have at least {least_last}, which share their keys and "
            "values"
        )
    ends = list(accumulate(counts))
    return tuple(range(first, end) for first, end in zip((0, *ends), ends))
