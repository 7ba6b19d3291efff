"""Groups lists of block moves into runs of adjacent pages, in waves that have to stay in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.errors import InvalidArgumentError

Pairs = Sequence[tuple[int, int]]


class Run(NamedTuple):
    """`num_pages` pages that are adjacent in both places."""

    source: int
    target: int
    num_pages: int


Wave = list[Run]
"""Runs that are independent: none touches what another writes. Waves act one after another."""


def waves_of(name: str, pairs: Pairs, sources: tuple[str, int], targets: tuple[str, int]) -> list[Wave]:
    """The pairs as waves of runs; a pair sees the effect of earlier ones.

    `name` is the list's. `sources` and `targets` give the unit ("block") and its number; if the two are equal, a pair's
    target may be another's source.

    Raises InvalidArgumentError if a source or target does not exist.
    """
    num_sources, num_targets = sources[1], targets[1]
    is_within = sources == targets
    waves: list[Wave] = []
    wave: list[tuple[int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for index, (source, target) in enumerate(pairs):
        if not (0 <= source < num_sources and 0 <= target < num_targets):
            (what, limit), value = (targets, target) if 0 <= source < num_sources else (sources, source)
            raise InvalidArgumentError(
                f"{name}[{index}]: {what} is {value}, must be 0 or more and below {limit}", param=name
            )
        if is_within and source == target:
            continue  # nothing to do
        if target in written or (is_within and (target in read or source in written)):
            waves.append(_runs(wave))
            wave = []
            read.clear()
            written.clear()
        wave.append((source, target))
        read.add(source)
        written.add(target)
    if wave:
        waves.append(_runs(wave))
    return waves


def _runs(pairs: list[tuple[int, int]]) -> Wave:
    """One or more independent pairs, as runs by source."""
    pairs.sort()
    runs: Wave = []
    source, target = first, to = pairs[0]
    for pair in pairs[1:]:
        source += 1
        target += 1
        if pair != (source, target):
            runs.append(Run(first, to, source - first))
            source, target = first, to = pair
    runs.append(Run(first, to, source - first + 1))
    return runs
