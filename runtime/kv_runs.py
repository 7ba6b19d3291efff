"""Lists of blocks to move, as runs of pages that lie side by side, in waves that may not overtake one another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidArgumentError

Pairs = Sequence[tuple[int, int]]


class Run(NamedTuple):
    """`num_pages` pages that follow one another in both places."""

    source: int
    target: int
    num_pages: int


Wave = list[Run]
"""Runs whose order does not matter: none touches what another writes. Waves act one after another."""


def waves_of(name: str, pairs: Pairs, sources: tuple[str, int], targets: tuple[str, int]) -> list[Wave]:
    """The pairs as waves of runs: a pair finds what those before it have left.

    `name` is the list's. `sources` and `targets`: what they count ("block"), and how many there are.

    Raises InvalidArgumentError where there is no such source or target.
    """
    if not pairs:
        return []
    table = np.array(pairs, np.int64).reshape(len(pairs), 2)
    for column, (what, limit) in enumerate((sources, targets)):
        wrong = (table[:, column] < 0) | (table[:, column] >= limit)
        if wrong.any():
            index = int(wrong.argmax())
            raise InvalidArgumentError(
                f"{name}[{index}]: {what} is {table[index, column]}, must be 0 or more and below {limit}", param=name
            )
    is_within = sources == targets
    if is_within:
        table = table[table[:, 0] != table[:, 1]]  # nothing to do
    cuts = [0, *_cuts(table, is_within=is_within), len(table)]
    return [_runs(table[start:end]) for start, end in itertools.pairwise(cuts) if start < end]


def _cuts(table: NDArray[np.int64], *, is_within: bool) -> list[int]:
    """Where a pair touches what one before it writes, or writes what one before it reads, since the last cut.

    `is_within`: sources and targets are of one kind.
    """
    if len(np.unique(table[:, 1])) == len(table) and not (is_within and np.isin(table[:, 0], table[:, 1]).any()):
        return []
    cuts: list[int] = []
    read: set[int] = set()
    written: set[int] = set()
    for index, (source, target) in enumerate(table.tolist()):
        if target in written or (is_within and (target in read or source in written)):
            cuts.append(index)
            read.clear()
            written.clear()
        read.add(source)
        written.add(target)
    return cuts


def _runs(table: NDArray[np.int64]) -> Wave:
    """Pairs ``[n, 2]`` whose order does not matter, as runs by source."""
    table = table[table[:, 0].argsort(kind="stable")]
    steps = np.diff(table, axis=0)
    starts = np.flatnonzero(np.concatenate(([True], (steps != 1).any(axis=1))))
    counts = np.diff(starts, append=len(table))
    return [Run(*each) for each in np.column_stack((table[starts], counts)).tolist()]
