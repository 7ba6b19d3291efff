"""The recipe of docs/adding.md for a kind of cache, on a toy: nothing but the class knows it, and the block pool, the
prefix tree, the scheduler and the router serve it."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from runtime.engine.scheduling.block_pool import BlockPool, Chain
from runtime.kv.groups import NO_BLOCK, cut_layers
from runtime.kv.kinds import FULL, CacheKind, blocks_of_sequence, findable_pages
from tests.runtime.engine.scheduler_driver import Driver, add_random_request, random_limits
from tests.runtime.engine.scheduling.test_block_pool import BLOCK_SIZE, Tokens


class Checkpoints(CacheKind, frozen=True, tag="checkpoints"):
    """A layer that needs its last page alone, and can go on from every ``every``-th one, as a recurrent state does that
    is kept there."""

    every: int
    is_whole: ClassVar[bool] = False

    def first_page(self, num_tokens: int, block_size: int) -> int:
        return max(0, num_tokens - 1) // block_size

    def gives_up_at(self, page: int, block_size: int) -> int:
        return (page + 1) * block_size + 1

    def most_pages(self, num_tokens: int, block_size: int, chunk: int | None) -> int:
        pages = -(-num_tokens // block_size)
        return pages if chunk is None else min(pages, (chunk + block_size - 1) // block_size + 1)

    def reserved_tokens(self, remaining: int) -> int:
        return min(remaining, 1)

    def findable_pages(self, path: Sequence[bool], most: int, block_size: int) -> int:
        places = range(most - most % self.every, 0, -self.every)
        return next((pages for pages in places if path[pages - 1]), 0)


def test_a_prefix_is_found_as_far_as_the_kind_can_go_on() -> None:
    kinds: Any = (FULL, Checkpoints(2))
    pool, tokens = BlockPool(16, BLOCK_SIZE, kinds=kinds), Tokens(*range(5 * BLOCK_SIZE))
    blocks = [pool.allocate(5), pool.allocate(5)]
    pool.record(Chain(), blocks, [0, 0], 5 * BLOCK_SIZE, tokens, is_final=True)
    hit = pool.find(tokens.ids)
    assert hit.num_tokens - hit.num_partial == 4 * BLOCK_SIZE, "five pages lie there, the fourth is a checkpoint"
    assert hit.first_pages == [0, 3]
    assert hit.blocks == [blocks[0][:4], [NO_BLOCK] * 3 + blocks[1][3:4]]
    assert pool.find(tokens.ids[: 2 * BLOCK_SIZE - 1]).num_shared_pages == 0, "there is none so early"


def test_the_longest_prefix_of_all_groups() -> None:
    paths = [[True] * 7, [True, True, False, True, True, True, False]]
    kinds: Any = (FULL, Checkpoints(2))
    assert findable_pages(paths, kinds, 4) == 6
    assert findable_pages([[True] * 5 + [False] * 2, paths[1]], kinds, 4) == 4
    assert findable_pages([[False] * 7, paths[1]], kinds, 4) == 0
    assert blocks_of_sequence(100, kinds, 4, chunk=8) == 25 + 3
    assert FULL.gives_up_at(3, 4) == sys.maxsize


def test_layers_of_one_kind_share_a_group() -> None:
    toy: Any = Checkpoints(2)
    groups = cut_layers([toy, FULL, toy, FULL])
    assert [(group.kind, group.layers) for group in groups] == [(FULL, (1, 3)), (toy, (0, 2))]


def test_random_requests_find_what_they_need() -> None:
    """Each chunk finds the pages of its kind, whatever was preempted, shared and given up before, and every request
    ends."""
    num_preemptions = num_cached = 0
    for seed in range(24):
        rng = random.Random(seed)
        kinds: Any = (FULL, Checkpoints(2)) if seed % 2 else (Checkpoints(3),)
        driver = Driver(rng, random_limits(rng, cache_kinds=kinds), overlaps=seed % 3 == 0)
        for _ in range(24):
            add_random_request(driver, rng)
        driver.drain()
        assert driver.outcome.finished + driver.outcome.refused >= 24, f"scenario {seed}"
        num_preemptions += driver.scheduler.num_preemptions
        num_cached += driver.pool.counters.hit_tokens
    assert num_preemptions > 10
    assert num_cached > 10
