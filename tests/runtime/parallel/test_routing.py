"""The router's digests are the engines', its choice follows prefixes and load, its books are balanced."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.engine.config import RoutingPolicy
from runtime.engine.messages import CacheGroupInfo, EngineInfo
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.block_events import BlockChanges, SharedDigest
from runtime.engine.scheduling.block_pool import BlockPool, Chain
from runtime.engine.scheduling.pictures import Picture, PictureKeys, Pictures
from runtime.engine.scheduling.prefix_cache import Salt, SaltedPrefixes
from runtime.engine.scheduling.sequence import Request
from runtime.kv.kinds import FULL, State, kind_of_window
from runtime.parallel.prefix_index import PrefixIndex, PromptDigests, found_tokens
from runtime.parallel.routing import FIRST_OUTPUT_TOKENS, Router

SECRET = b"sixteen bytes..."
SIZE = 4


def info(*windows: int | None, longrope_threshold: int | None = None) -> EngineInfo:
    groups = tuple(CacheGroupInfo(kind_of_window(window), 1, 0) for window in windows or (None,))
    return EngineInfo(
        model_name="", model_path="", architecture="", device="cpu", dtype="float32", vocab_size=1000,
        eos_token_ids=(), max_model_len=1000, max_num_seqs=8, max_num_batched_tokens=64, max_waiting=8,
        block_size=SIZE, num_blocks=64, kv_cache_bytes=0, weight_bytes=0, cache_groups=groups,
        longrope_threshold=longrope_threshold,
    )  # fmt: skip


def request(
    prompt: list[int], *, salt: str | None = None, n: int = 1, max_tokens: int = 1000, **fields: Any
) -> Request:
    return Request(
        "r", np.array(prompt, np.int32), SamplingParams(n=n), cache_salt=salt, max_tokens=max_tokens, arrival_s=0.0,
        **fields,
    )  # fmt: skip


def router(policy: RoutingPolicy = "prefix-aware", num_engines: int = 3, *windows: int | None) -> Router:
    return Router(policy, num_engines, PromptDigests.of_info(info(*windows), SECRET))


def choose(each: Router, asked: Request, is_ready: list[bool] | None = None) -> Any:
    return each.choose(asked, each.digests_of(asked), is_ready or [True] * 3)


class Prompt:
    def __init__(self, keys: NDArray[np.int32]) -> None:
        self.keys = keys

    def prefix_keys(self, start: int, end: int) -> NDArray[np.int32]:
        return self.keys[start:end]


class Engine:
    """A pool that has computed prompts and tells of it."""

    def __init__(self, *windows: int | None, num_blocks: int = 64) -> None:
        self.windows = windows or (None,)
        self.pictures = PictureKeys()
        self.pool = BlockPool(num_blocks, SIZE, kinds=tuple(map(kind_of_window, self.windows)))
        self.events = self.pool.publish(SharedDigest(SECRET, self.pictures.digest_of))

    def compute(self, asked: Request, salt: Salt = None) -> BlockChanges | None:
        keys = asked.prompt_ids
        if asked.pictures is not None:
            keys = self.pictures.prompt_keys(keys, asked.pictures)
        num_pages = -(-len(keys) // SIZE)
        blocks = [self.pool.allocate(num_pages) for _ in self.windows]
        chain = Chain(salt or asked.cache_salt)
        self.pool.record(chain, blocks, [0] * len(blocks), len(keys), Prompt(keys), is_final=True)
        for ids in blocks:
            self.pool.release(ids)
        self.pool.forget(chain)
        return self.events.take()

    def found(self, asked: Request, salt: Salt = None) -> int:
        """Full pages' tokens that its cache gives."""
        keys = asked.prompt_ids
        if asked.pictures is not None:
            keys = self.pictures.prompt_keys(keys, asked.pictures)
        hit = self.pool.find(keys[:-1], salt or asked.cache_salt)
        return len(hit.blocks[0]) * SIZE


def pictured(digest: bytes, first: int) -> Any:
    return Pictures.of([Picture(digest, first, 2, 2)], 20, [], [], has_axes=False, are_whole=False)


@pytest.mark.parametrize("windows", [(None,), (8,), (None, 6), (5, None, 3)])
def test_the_router_finds_what_the_engine_finds(windows: tuple[int | None, ...]) -> None:
    rng = random.Random(0)
    each, engine = router("prefix-aware", 3, *windows), Engine(*windows, num_blocks=40)
    num_hits = 0
    for _ in range(300):
        asked = request([rng.randrange(2) for _ in range(rng.randrange(1, 30))], salt=rng.choice([None, "a"]))
        expected = engine.found(asked)
        route = choose(each, asked, [False, True, False])
        assert route.num_cached == expected
        num_hits += expected > 0
        if (changes := engine.compute(asked)) is not None:
            each.change(1, changes)
        each.drawn(route, 1)
        each.ended(route)
    assert num_hits > 20
    assert len(each.index) > 0
    each.change(1, None)
    assert len(each.index) == 0


def test_the_router_finds_pages_before_a_state_inside_a_page() -> None:
    """And none that the engine dropped with their state."""
    kinds = FULL, State()
    pool = BlockPool((8, 2), SIZE, kinds=kinds, pools=(0, 1))
    events, index, how = pool.publish(SharedDigest(SECRET)), PrefixIndex(), PromptDigests(SECRET, SIZE, kinds)

    def found(asked: Request) -> list[int]:
        if (changes := events.take()) is not None:
            index.change(1, changes)
        return found_tokens(how.of(asked), kinds, SIZE, (index,), 2).tolist()

    asked = request(list(range(14)))
    blocks, chain = [pool.allocate(4), pool.allocate(1, 1)], Chain(None)
    pool.record(chain, blocks, [0, 0], 14, Prompt(asked.prompt_ids), is_final=True)
    for ids in blocks:
        pool.release(ids)
    pool.forget(chain)
    assert found(request([*range(14), 1, 1, 1])) == [0, 12]
    assert pool.find(np.arange(17, dtype=np.int32)).num_tokens == 14
    pool.release(pool.allocate(2, 1))  # the state is evicted
    assert found(asked) == [0, 0]


def test_digests_tell_tenants_pictures_and_rotations_apart() -> None:
    prompt = list(range(100, 120))
    known, engine = router(), Engine()
    plain, cat, dog = request(prompt), *(request(prompt, pictures=pictured(digest * 16, 5)) for digest in (b"c", b"d"))
    for number, asked in enumerate((plain, cat, dog, request(prompt, salt="a"))):
        assert choose(known, asked).num_cached == 0, number
        for place in range(3):
            known.change(place, None)
    changes = engine.compute(dog)
    assert changes is not None
    engine.pictures = PictureKeys()  # whose keys mean other pictures now
    known = router()
    known.change(2, changes)
    assert choose(known, cat).num_cached == SIZE, "what stands before the picture"
    assert choose(known, dog, [False, False, True]).num_cached == 16

    rotated = Router("prefix-aware", 3, PromptDigests.of_info(info(longrope_threshold=10), SECRET))
    engine = Engine()
    changes = engine.compute(plain, SaltedPrefixes(None, 10))
    assert changes is not None
    rotated.change(1, changes)
    assert choose(rotated, plain).num_cached == 16
    assert choose(rotated, request(prompt[:9])).num_cached == 0, "a short prompt is rotated otherwise"


def test_another_secret_gives_other_digests() -> None:
    asked = request(list(range(40)))
    digests = [PromptDigests(secret, SIZE).of(asked) for secret in (SECRET, b"another secret..")]
    assert not set(digests[0][0]) & set(digests[1][0])
    assert router("least-load").digests_of(asked) == []


def test_round_robin_passes_over_who_is_not_ready() -> None:
    each = router("round-robin")
    assert [choose(each, request([1])).engine for _ in range(4)] == [0, 1, 2, 0]
    assert [choose(each, request([1]), [True, False, True]).engine for _ in range(3)] == [2, 0, 2]


def test_least_load_counts_prompts_until_they_are_computed_and_choices_until_they_end() -> None:
    each = router("least-load", 2)
    first = choose(each, request([1] * 500, n=2, max_tokens=10), [True, True])
    assert each.loads() == [500.0 + 2 * 10, 0.0]
    second = choose(each, request([1] * 100), [True, True])
    assert (first.engine, second.engine) == (0, 1)
    assert each.loads()[1] == 100 + FIRST_OUTPUT_TOKENS
    each.drawn(first, 1)
    assert choose(each, request([1]), [True, True]).engine == 0
    each.ended(second)
    assert each.loads()[1] == 0
    each.ended(first)
    each.ended(first, has_failed=True)
    assert each.loads()[0] == 1 + FIRST_OUTPUT_TOKENS


def test_a_prefix_is_followed_while_the_others_are_busy() -> None:
    """Eight prefixes on two engines, many open requests on both: they stay where they are."""
    each, rng = router("prefix-aware", 2), random.Random(0)
    each.mean_output_tokens = each.mean_request_tokens = 16.0
    open_routes: list[Any] = []
    for number in range(1000):
        prefix = rng.randrange(8)
        asked = request([prefix] * 400 + [number], max_tokens=16)
        route = each.choose(asked, each.digests_of(asked), [True, True])
        stored = np.array(route.expected, np.uint64)
        open_routes.append(route)
        if len(open_routes) > 40:
            done = open_routes.pop(rng.randrange(40))
            each.change(done.engine, BlockChanges(np.array(done.expected, np.uint64), stored[:0]))
            each.drawn(done, 16)
            each.ended(done)
    assert each.num_moved <= 10, "one in a hundred"
    assert min(each.num_routed) > 400
    for done in open_routes:
        each.drawn(done, 16)
        each.ended(done)
    assert each.loads() == [0, 0]
    assert not any(each._num_open)
    assert len(each.expected) == 0
    assert each.mean_output_tokens == pytest.approx(16.0)


def test_a_long_queue_makes_a_prefix_come_second() -> None:
    each = router("prefix-aware", 2)
    first = choose(each, request([1] * 40), [True, True])
    each.drawn(first, 1)
    stored = np.array(each.digests_of(request([1] * 40))[0], np.uint64)
    each.change(first.engine, BlockChanges(stored, stored[:0]))
    long = choose(each, request([5] * 900), [first.engine == 0, first.engine == 1])
    assert choose(each, request([1] * 40), [True, True]).engine == 1 - long.engine


def test_a_skewed_load_is_shared_out() -> None:
    """Everybody has the same beginning: each engine computes it once, and none waits for another."""
    each, engines = router(), [Engine(num_blocks=200) for _ in range(3)]
    rng, counts, open_routes = random.Random(1), [0, 0, 0], []
    for _ in range(600):
        asked = request([*range(100), rng.randrange(1000)], max_tokens=16)
        route = choose(each, asked)
        counts[route.engine] += 1
        if (changes := engines[route.engine].compute(asked)) is not None:
            each.change(route.engine, changes)
        open_routes.append(route)
        if len(open_routes) > 60:
            done = open_routes.pop(0)
            each.drawn(done, 16)
            each.ended(done)
    assert max(counts) < 1.3 * min(counts)


def test_who_is_withdrawn_counts_no_more() -> None:
    each = router()
    route = choose(each, request([1] * 50, n=3))
    each.withdrawn(route)
    assert each.loads() == [0] * 3
    assert each.num_routed == [0] * 3
    assert len(each.expected) == 0


def test_the_index_is_bounded() -> None:
    index = PrefixIndex(most_digests=3)
    index.change(0, BlockChanges(np.arange(5, dtype=np.uint64), np.zeros(0, np.uint64)))
    index.add(1, [0, 1, 9])
    assert (len(index), index.num_untaken) == (3, 3)
    assert [index.engines_of(digest) for digest in (0, 2, 3)] == [0b11, 0b1, 0]
    index.discard(0, [0, 1, 2, 77])
    assert [index.engines_of(digest) for digest in (0, 1, 2)] == [0b10, 0b10, 0]
    index.clear(1)
    assert len(index) == 0
