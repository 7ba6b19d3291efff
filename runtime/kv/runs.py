"""Groups lists of block moves into runs of adjacent pages, in waves that have to stay in order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
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


class Moves(NamedTuple):
    """The moves of one pool, by numbers inside it."""

    swap_out: list[Wave]
    swap_in: list[Wave]
    copies: list[Wave]


class Places(NamedTuple):
    """Numbered places, those of the first pool first: their unit ("block"), and how many each pool has."""

    unit: str
    pool_sizes: tuple[int, ...]


def split(name: str, pairs: Pairs, sources: Places, targets: Places) -> list[list[tuple[int, int]]]:
    """The pairs of each pool, by numbers inside it. `name` is the list's.

    Raises InvalidArgumentError if a source or target does not exist, or they are of two pools.
    """
    bounds = [list(accumulate(each.pool_sizes, initial=0)) for each in (sources, targets)]
    found: list[list[tuple[int, int]]] = [[] for _ in sources.pool_sizes]
    for index, pair in enumerate(pairs):
        for what, limits, number in zip((sources, targets), bounds, pair):
            if not 0 <= number < limits[-1]:
                raise InvalidArgumentError(
                    f"{name}[{index}]: {what.unit} is {number}, must be 0 or more and below {limits[-1]}", param=name
                )
        pool, other = (bisect_right(limits, number) - 1 for limits, number in zip(bounds, pair))
        if pool != other:
            raise InvalidArgumentError(
                f"{name}[{index}]: {sources.unit} {pair[0]} is in pool {pool}, {targets.unit} {pair[1]} in {other}",
                param=name,
            )
        found[pool].append((pair[0] - bounds[0][pool], pair[1] - bounds[1][pool]))
    return found


def waves_of(pairs: Pairs, *, is_within: bool = False) -> list[Wave]:
    """The pairs as waves of runs; a pair sees the effect of earlier ones. ``is_within``: a pair's target may be
    another's source."""
    waves: list[Wave] = []
    wave: list[tuple[int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
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
