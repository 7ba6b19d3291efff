"""The block pool with its prefix cache: what is found, who holds it, what is given up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.engine.errors import RequestError
from runtime.engine.messages import PrefixMiss
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.block_pool import BlockPool, Chain, Hit
from runtime.engine.scheduling.eviction import POLICIES, ByReplay, ReuseGap
from runtime.engine.scheduling.host_pool import HostPool
from runtime.engine.scheduling.placement import checkpoints
from runtime.engine.scheduling.prefix_cache import CachedBlock, PrefixCache
from runtime.engine.scheduling.sequence import Request
from runtime.engine.scheduling.sequence import Sequence as Choice
from runtime.kv.kinds import FULL, State
from tests.runtime.engine.scheduling.replayed import lru_hits, scheduler_hits

BLOCK_SIZE = 4


class Tokens:
    """A sequence of known tokens."""

    def __init__(self, *ids: int) -> None:
        self.ids: NDArray[np.int32] = np.array(ids, np.int32)

    def prefix_keys(self, start: int, end: int) -> NDArray[np.int32]:
        return self.ids[start:end]


def run(pool: BlockPool, *ids: int, salt: str | None = None) -> list[int]:
    """Compute a sequence without looking anything up, and let it go again."""
    block_ids = pool.allocate(-(-len(ids) // BLOCK_SIZE))
    record(pool, block_ids, Tokens(*ids), salt=salt, is_final=True)
    pool.release(block_ids)
    pool.check_invariants([])
    return block_ids


def record(
    pool: BlockPool,
    block_ids: list[int],
    tokens: Tokens,
    count: int | None = None,
    *,
    salt: str | None = None,
    is_final: bool = False,
) -> None:
    """Record the first ``count`` tokens, all if None."""
    count = len(tokens.ids) if count is None else count
    pool.record(Chain(salt), [block_ids], [0], count, tokens, is_final=is_final)


def hit_of(
    block_ids: list[int], host_slots: list[int], partial: tuple[int, int] | None = None, num_tokens: int = 0
) -> Hit:
    """Of one group."""
    blocks = [*block_ids, *([None] * len(host_slots))]
    found = {} if partial is None else {0: partial[0]}
    num_partial = 0 if partial is None else partial[1]
    return Hit([blocks], [0], [host_slots], found, num_partial, num_tokens, len(blocks))


NOTHING = hit_of([], [])


def find(pool: BlockPool, *ids: int, salt: str | None = None) -> Hit:
    return pool.find(np.array(ids, np.int32), salt)


def test_counts_references() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    first = pool.allocate(3)
    pool.share(first[:2])
    pool.release(first)
    assert pool.num_free == 2
    pool.check_invariants([first[:2]])
    pool.release(first[:2])
    assert pool.num_free == 4
    pool.check_invariants([])


@pytest.mark.parametrize("misuse", ["release", "share"])
def test_refuses_free_blocks(misuse: str) -> None:
    with pytest.raises(AssertionError):
        getattr(BlockPool(2, BLOCK_SIZE), misuse)([0])


def test_refuses_more_than_it_has() -> None:
    with pytest.raises(AssertionError):
        BlockPool(2, BLOCK_SIZE).allocate(3)


def test_check_sees_leaks_and_doubles() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.check_invariants([blocks[:1]])
    with pytest.raises(AssertionError):
        pool.check_invariants([blocks, blocks[:1]])
    with pytest.raises(AssertionError):
        pool.check_invariants([[blocks[0], blocks[0]], [blocks[1]]])


def test_finds_full_blocks_and_the_beginning_of_the_next() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    blocks = run(pool, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert find(pool, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11) == hit_of(blocks[:2], [], (blocks[2], 2), 10)
    assert find(pool, 1, 2, 3, 4, 5, 6, 0) == hit_of(blocks[:1], [], (blocks[1], 2), 6)
    assert find(pool, 1, 2, 3) == hit_of([], [], (blocks[0], 3), 3)
    assert find(pool, 2, 2, 3, 4) == NOTHING
    assert find(pool) == NOTHING


def test_salts_do_not_see_each_other() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    (plain,) = run(pool, 1, 2, 3, 4)
    assert find(pool, 1, 2, 3, 4, salt="a").num_tokens == 0
    assert find(pool, 1, 2, 3, 4, salt="").num_tokens == 0
    (salted,) = run(pool, 1, 2, 3, 4, salt="a")
    assert find(pool, 1, 2, 3, 4, salt="a").blocks[0] == [salted]
    assert find(pool, 1, 2, 3, 4).blocks[0] == [plain]


def test_a_colliding_digest_serves_nobody_elses_block() -> None:
    pool = BlockPool(8, BLOCK_SIZE, digest=lambda parent, tokens: 7)
    (first,) = run(pool, 1, 2, 3, 4)
    run(pool, 5, 6, 7, 8)
    assert find(pool, 5, 6, 7, 8) == NOTHING, "another content has this digest"
    assert find(pool, 1, 2, 3, 4, 1, 2, 3, 4).blocks[0] == [first], "equal tokens, but not after the same ones"
    assert find(pool, 1, 2, 3, 4, salt="a") == NOTHING
    run(pool, 1, 2, 3, 4, salt="a")
    assert find(pool, 1, 2, 3, 4, salt="a") == NOTHING


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(4, BLOCK_SIZE, enable_prefix_caching=False)
    run(pool, 1, 2, 3, 4, 5)
    assert find(pool, 1, 2, 3, 4, 5) == NOTHING
    assert pool.num_cached == 0


def test_the_second_of_two_equal_blocks_takes_over_when_the_first_is_let_go() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    tokens = Tokens(*range(8))
    first, second = pool.allocate(2), pool.allocate(2)
    record(pool, first, tokens, 8)
    record(pool, second, tokens, 8)
    assert find(pool, *range(8)).blocks[0] == first
    pool.release(first)
    pool.check_invariants([second])
    assert find(pool, *range(8)).blocks[0] == second
    assert pool.num_cached == 0
    pool.release(second)
    assert pool.num_cached == 2


def test_a_held_block_takes_over_from_an_idle_one() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    run(pool, 1, 2, 3, 4)
    other = pool.allocate(1)
    record(pool, other, Tokens(1, 2, 3, 4), 4)
    pool.check_invariants([other])
    assert find(pool, 1, 2, 3, 4).blocks[0] == other
    assert pool.num_cached == 0


def test_a_longer_block_replaces_the_partial_one_that_it_continues() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    run(pool, 1, 2, 3, 4, 5)
    run(pool, 1, 2, 3, 4, 5, 6)
    assert pool.num_cached == 2
    run(pool, 1, 2, 3, 4, 5)
    assert pool.num_cached == 2, "a beginning of what is there is not recorded"
    assert find(pool, 1, 2, 3, 4, 5, 6, 7).num_tokens == 6


def test_evicts_the_end_of_the_least_recently_used_first() -> None:
    pool = BlockPool(4, BLOCK_SIZE, eviction="lru")
    run(pool, *range(8))
    run(pool, *range(10, 18))
    hit = find(pool, *range(8))
    pool.share(hit.shared)
    pool.release(hit.shared)
    pool.release(pool.allocate(1))
    assert find(pool, *range(10, 18)).num_tokens == 4
    pool.release(pool.allocate(2))
    assert find(pool, *range(10, 18)).num_tokens == 0
    assert find(pool, *range(8)).num_tokens == 8
    assert pool.counters.evictions == 2


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(RequestError, match=r"eviction must be one of lru.*'fifo'"):
        BlockPool(4, BLOCK_SIZE, eviction="fifo")


def test_evicted_blocks_are_found_in_the_host_pool() -> None:
    host = HostPool(2)
    pool = BlockPool(3, BLOCK_SIZE, host_pool=host)
    blocks = run(pool, *range(10))
    taken = pool.allocate(3)
    assert [block for block, _ in pool.offloads] == [blocks[1], blocks[0]], "the partial block is not worth it"
    slots = [slot for _, slot in reversed(pool.offloads)]
    pool.offloads.clear()
    hit = find(pool, *range(10))
    assert hit == hit_of([], slots, None, 8)
    pool.release(taken)
    fresh = pool.allocate(3)
    host.hold(hit.host_slots[0])
    assert host.take([1]) is None, "a step reads both slots"
    host.release(hit.host_slots[0])
    record(pool, fresh, Tokens(*range(10)), 8)
    assert find(pool, *range(8)) == hit_of(fresh[:2], [], None, 8)
    pool.release(fresh)
    pool.allocate(3)
    assert not pool.offloads, "their bytes are in the host pool already"
    assert host.take([1]) == [slots[1:]], "what continues a prefix is dropped before it"
    assert find(pool, *range(8)).host_slots == [slots[:1]]
    assert host.take([1]) == [slots[:1]]
    assert find(pool, *range(8)) == NOTHING
    host.check_invariants([slots])


def test_counters() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    assert pool.count_query(10, replace(Hit.none(1), num_tokens=9, num_known=8)) is None
    miss = pool.count_query(15, replace(Hit.none(1), num_tokens=4, num_known=8, reasons=("evicted", "unseen")))
    assert miss == PrefixMiss("unseen", 8, 4)
    assert (pool.counters.queried_tokens, pool.counters.hit_tokens) == (25, 13)
    assert pool.counters.missed_tokens == {"unseen": 8, "evicted": 4, "no_checkpoint": 0, "prompt_logprobs": 0}


def test_reused_blocks_outlive_what_came_once() -> None:
    """A conversation returns after more new blocks than the pool has: too late for least recently used."""
    found = {}
    for eviction in POLICIES:
        pool = BlockPool(10, BLOCK_SIZE, eviction=eviction)
        hits = 0
        for turn in range(60):
            hit = find(pool, *range(8))
            pool.share(hit.shared)
            block_ids = hit.shared + pool.allocate(2 - len(hit.shared))
            record(pool, block_ids, Tokens(*range(8)), 8)
            pool.release(block_ids)
            hits += len(hit.shared)
            for other in range(11):
                run(pool, *range(100 + 1000 * turn + 20 * other, 104 + 1000 * turn + 20 * other))
        found[eviction] = hits
    assert found["lru"] == 0
    assert found["reuse-gap"] > 0


@pytest.mark.parametrize("eviction", POLICIES)
@pytest.mark.parametrize("num_blocks", [8, 32])
def test_a_loop_random_prompts_and_a_shared_prompt_lose_nothing(eviction: str, num_blocks: int) -> None:
    """Hits of each policy beside those of a plain ordered dictionary."""
    samples = np.random.default_rng(1)
    patterns = {
        "loop": [[10 * (turn % 12), 10 * (turn % 12) + 1] for turn in range(300)],
        "random": [[int(first), int(first) + 1000] for first in samples.integers(0, 40, 300)],
        "shared": [[0, 1, 2, 100 + turn] for turn in range(300)],
        "new": [[turn] for turn in range(300)],
    }
    for name, prompts in patterns.items():
        assert scheduler_hits(prompts, num_blocks, eviction) >= 0.9 * lru_hits(prompts, num_blocks), name


def test_states_go_by_the_tokens_that_would_be_computed_again_and_their_uses() -> None:
    cache, policy = PrefixCache(BLOCK_SIZE), ByReplay()

    def after(parent: CachedBlock, token: int) -> CachedBlock:
        node = cache.add(parent, np.full(BLOCK_SIZE, token, np.int32).tobytes())
        assert node is not None
        return node

    root = cache.root(None, 0)
    near, spare = after(root, 0), after(root, 1)
    far = after(after(after(near, 2), 3), 4)  # the two pages between have no state
    near.block_id, spare.block_id, far.block_id, spare.is_spare = 0, 1, 2, True
    assert [each.replay_tokens() for each in (near, spare, far)] == [4, 4, 12]
    for node in (far, near, spare):
        policy.add(node)
    assert [policy.pop() for _ in range(3)] == [spare, near, far]
    near.times_reused = 3
    for node in (near, far):
        policy.add(node)
    assert [policy.pop(), policy.pop(), len(policy)] == [far, near, 0]


def pool_with_states(num_tokens: int, ends: tuple[int, ...], *, num_slots: int = 0) -> BlockPool:
    """Three pages of tokens, and a state a number of ``ends``, after so many tokens of one sequence 0, 1, ..."""
    host = HostPool((num_slots, num_slots)) if num_slots else None
    pool = BlockPool((3, len(ends)), BLOCK_SIZE, kinds=(FULL, State()), pools=(0, 1), host_pool=host)
    pages, chain, tokens = pool.allocate(-(-num_tokens // BLOCK_SIZE)), Chain(), Tokens(*range(num_tokens))
    for end in ends:
        state = pool.allocate(1, 1)
        pool.record(chain, [pages, state], [0, 0], end, tokens, is_final=end == ends[-1])
        pool.release(state)
    pool.release(pages)
    pool.forget(chain)
    pool.check_invariants([])
    return pool


def test_a_state_inside_a_page_and_the_page_come_back_from_the_host() -> None:
    pool = pool_with_states(6, (6,), num_slots=4)
    pool.release(pool.allocate(3))
    pool.release(pool.allocate(1, 1))
    assert len(pool.offloads) == 3
    hit = find(pool, *range(7))
    assert (hit.num_tokens, hit.blocks, hit.partial) == (6, [[None, None], [None]], {})
    assert sorted(slot for slots in hit.host_slots for slot in slots) == sorted(slot for _, slot in pool.offloads)


def test_an_evicted_state_inside_a_page_is_no_missing_checkpoint() -> None:
    pool = pool_with_states(12, (6, 12))
    assert find(pool, *range(11)).num_tokens == 6
    pool.allocate(1, 1)
    hit = find(pool, *range(11))
    assert (hit.num_tokens, hit.num_known, hit.reasons[0]) == (0, 8, "evicted")
    assert find(pool, *range(13)).num_tokens == 12


def test_the_beginning_of_a_page_goes_with_its_last_state() -> None:
    pool = pool_with_states(10, (8, 10))
    pool.allocate(2)  # of three, the partial one is the last in use
    assert [find(pool, *range(11)).num_tokens, pool.num_cached] == [0, 0]
    pool = pool_with_states(10, (8, 10))
    assert pool.num_cached == 5
    pool.allocate(1, 1)  # the state after 10, which costs two tokens
    assert (find(pool, *range(11)).num_tokens, pool.num_cached) == (8, 3)


def test_a_state_is_kept_where_an_evicted_prompt_ended() -> None:
    pool = pool_with_states(12, (12,))
    pool.allocate(1, 1)  # the state, and with it all pages
    hit = find(pool, *range(22))
    assert (hit.num_tokens, hit.num_known, hit.num_seen, pool.num_cached) == (0, 0, 12, 0)
    prompt = Request("", np.arange(22, dtype=np.int32), SamplingParams(), max_tokens=1, arrival_s=0.0)
    assert checkpoints(Choice(prompt, 0), hit, pool) == [12, 20, 22]


def test_what_goes_with_a_victim_is_known_when_it_comes_back() -> None:
    cache, policy = PrefixCache(BLOCK_SIZE), ReuseGap(4)
    nodes = [cache.add(cache.root(None, 0), np.full(BLOCK_SIZE, token, np.int32).tobytes()) for token in range(3)]
    first, second, third = (node for node in nodes if node is not None)
    for node in (first, second, third):
        policy.add(node)
    assert policy.pop() is first
    policy.drop(second)
    policy.discard(third)
    for node in (first, second, third):
        policy.add(node)
    assert [node.times_reused for node in (first, second, third)] == [1, 1, 0]


@pytest.mark.parametrize(("inside", "end"), [(6, 9), (3, 5)])
def test_a_page_stays_for_the_state_inside_it(inside: int, end: int) -> None:
    pool = pool_with_states(end, (inside, end))
    for num_tokens, num_cached in ((inside, inside // BLOCK_SIZE + 2), (0, 0)):
        pool.allocate(1, 1)
        assert (find(pool, *range(end + 1)).num_tokens, pool.num_cached) == (num_tokens, num_cached)


def test_a_state_is_used_by_those_who_start_with_it() -> None:
    pool = pool_with_states(8, (8,))
    hit = find(pool, *range(9))
    for has_started in (False, True):
        pool.share(hit.shared)
        if has_started:
            pool.count_uses(hit)
        pool.release(hit.shared)
        node = pool._nodes[hit.blocks[1][0] or 0]
        assert node is not None
        assert node.times_reused == has_started


@pytest.mark.parametrize("eviction", POLICIES)
def test_prefixes_are_dropped_but_for_those_that_are_held(eviction: str) -> None:
    host = HostPool(4)
    pool = BlockPool(8, BLOCK_SIZE, host_pool=host, eviction=eviction)
    run(pool, *range(12))
    held = run(pool, *range(100, 108))
    pool.share(held[:1])
    pool.release(pool.allocate(5))  # some of the others go to the host
    pool.offloads.clear()
    assert host.num_prefixes > 0
    dropped, num_held = pool.drop_prefixes()
    assert dropped >= 1
    assert num_held == 1
    assert host.num_prefixes == pool.num_cached == 0
    assert pool.num_free == 7
    assert find(pool, *range(12)) == NOTHING
    assert find(pool, *range(100, 108)) == hit_of(held[:1], [], None, 4)
    pool.check_invariants([held[:1]])
    host.check_invariants([])
    again = pool.allocate(3)
    record(pool, again, Tokens(*range(12)), is_final=True)
    pool.release(again)
    assert find(pool, *range(12)) == hit_of(again, [], None, 12)
    assert pool.drop_prefixes() == (3, 1)
    pool.release(held[:1])
    assert pool.drop_prefixes() == (1, 0)
    pool.check_invariants([])
