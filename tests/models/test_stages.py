"""Which layers a stage has, against all ways that there are."""

from __future__ import annotations

import itertools
import random

import pytest

from models.errors import ConfigError
from models.stages import balanced, counted


def _ways(count: int, num_stages: int) -> list[tuple[range, ...]]:
    inner = itertools.combinations(range(1, count), num_stages - 1)
    return [tuple(itertools.starmap(range, itertools.pairwise((0, *cuts, count)))) for cuts in inner]


def test_the_largest_stage_is_as_small_as_can_be() -> None:
    rng = random.Random(4)
    for _ in range(60):
        sizes = [rng.randrange(1, 30) for _ in range(rng.randrange(1, 10))]
        num_stages = rng.randrange(1, len(sizes) + 1)
        first, last = rng.randrange(40), rng.randrange(40)
        least = rng.randrange(1, len(sizes) - num_stages + 2)

        def costs(way: tuple[range, ...], sizes: list[int] = sizes, more: tuple[int, int] = (first, last)) -> list[int]:
            found = [sum(sizes[layer] for layer in own) for own in way]
            found[0] += more[0]
            found[-1] += more[1]
            return found

        best = min(
            (max(costs(way)), sum(cost * cost for cost in costs(way)))
            for way in _ways(len(sizes), num_stages) if len(way[0]) >= least
        )  # fmt: skip
        found = balanced(sizes, num_stages, first_bytes=first, last_bytes=last, least_first=least)
        assert len(found[0]) >= least
        assert [layer for own in found for layer in own] == list(range(len(sizes)))
        assert (max(costs(found)), sum(cost * cost for cost in costs(found))) == best


def test_equal_layers_are_dealt_out_evenly() -> None:
    assert balanced([5] * 8, 4) == (range(2), range(2, 4), range(4, 6), range(6, 8))
    assert balanced([5] * 8, 2, last_bytes=10) == (range(5), range(5, 8))


def test_too_few_layers_are_named() -> None:
    with pytest.raises(ConfigError, match="A: 3 layers cannot be split over 4 stages"):
        balanced([1] * 3, 4, name="A")
    with pytest.raises(ConfigError, match="over 2 stages, of which the first has at least 3"):
        balanced([1] * 3, 2, least_first=3, name="A")


def test_stages_of_named_sizes() -> None:
    assert counted((3, 1, 2), 6) == (range(3), range(3, 4), range(4, 6))
    for counts, words in (((3, 2), "must have 6 together"), ((6, 0), "each at least 1"), ((1, 5), "at least 2")):
        with pytest.raises(ConfigError, match=words):
            counted(counts, 6, least_first=2, name="Toy")
