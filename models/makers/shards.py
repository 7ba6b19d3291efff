"""A rank's share of a model's widths."""

from __future__ import annotations

from dataclasses import dataclass

UNIT = 32
"""Widths that cannot be divided evenly at multiples of it are cut there all the same, if they are multiples: blocks and
groups of quantised matrices, and tiles of kernels, are whole then."""


@dataclass(frozen=True, slots=True)
class Shard:
    """`count` of `whole`, from `first` on."""

    whole: int
    first: int
    count: int

    def times(self, factor: int) -> Shard:
        """The share of a width `factor` times as wide, such as heads' elements."""
        return Shard(self.whole * factor, self.first * factor, self.count * factor)

    @property
    def is_part(self) -> bool:
        """Whether other ranks have some, too."""
        return self.count < self.whole


def whole_shard(width: int) -> Shard:
    """Each rank has all of it."""
    return Shard(width, 0, width)


def equal_shard(count: int, rank: int, num_ranks: int) -> Shard:
    """A rank's share, equal for all ranks."""
    return Shard(count * num_ranks, count * rank, count)


def shard_of_width(width: int, rank: int, num_ranks: int, *, exact: bool) -> Shard | None:
    """A rank's share of columns: equal where that is at multiples of `UNIT`, or asked for by `exact`; else the first
    ranks may have a unit more. None if there are too few columns or, with `exact`, shares cannot be equal."""
    is_even = width % num_ranks == 0
    if is_even and (exact or width // num_ranks % UNIT == 0):
        return equal_shard(width // num_ranks, rank, num_ranks)
    if exact or width < num_ranks:
        return None
    unit = UNIT if width % UNIT == 0 and width >= UNIT * num_ranks else 1
    each, more = divmod(width // unit, num_ranks)
    first = rank * each + min(rank, more)
    return Shard(width, first * unit, (each + (rank < more)) * unit)


def shard_of_heads(num_heads: int, rank: int, num_ranks: int) -> Shard | None:
    """A rank's KV heads: its part of them, or, if they are fewer than ranks, the one that it has with others. None if
    neither divides the other."""
    if num_heads % num_ranks == 0:
        return equal_shard(num_heads // num_ranks, rank, num_ranks)
    return None if num_ranks % num_heads else Shard(num_heads, rank * num_heads // num_ranks, 1)
