"""Blocks that leave the cpu's pages, come back, and are copied; what is refused; what is counted."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.dtype import DType, bfloat16, float16, float32
from runtime.errors import InvalidArgumentError
from runtime.kv.cache import HostPages, KVCache, KVCacheSpec
from runtime.kv.transfer import KVTransfer, Run, waves_of

NUM_BLOCKS, NUM_SLOTS = 12, 9


def new_spec(dtype: DType = bfloat16, *, head_dim: int = 24) -> KVCacheSpec:
    """Keys and values have pages of different sizes."""
    return KVCacheSpec.uniform(num_layers=2, num_kv_heads=3, head_dim=head_dim, block_size=8, dtype=dtype)


def fill(kv_cache: KVCache, seed: int = 0) -> None:
    """Random bytes, NaN patterns among them."""
    rng = np.random.default_rng(seed)
    for index in range(kv_cache.spec.num_layers):
        for tensor in kv_cache.layer(index):
            pages = tensor.array.reshape(-1).view(np.uint8)
            pages[:] = rng.integers(0, 256, pages.size, np.uint8)


def blocks(kv_cache: KVCache) -> NDArray[np.uint8]:
    """A copy of all pages: ``[num_blocks, bytes_per_block]``."""
    planes = [tensor.array for index in range(kv_cache.spec.num_layers) for tensor in kv_cache.layer(index)]
    return np.concatenate([plane.reshape(kv_cache.num_blocks, -1).view(np.uint8) for plane in planes], axis=1)


def new_transfer(dtype: DType = bfloat16) -> tuple[KVCache, KVTransfer]:
    spec = new_spec(dtype)
    kv_cache = KVCache(spec, NUM_BLOCKS)
    fill(kv_cache)
    return kv_cache, KVTransfer(kv_cache, HostPages(spec, NUM_SLOTS))


@pytest.mark.parametrize("dtype", [float32, float16, bfloat16], ids=repr)
def test_what_went_out_comes_back_elsewhere_bit_for_bit(dtype: DType) -> None:
    kv_cache, transfer = new_transfer(dtype)
    before = blocks(kv_cache)
    transfer.run([(3, 0), (4, 1), (5, 2), (9, 7), (0, 4)], [], [])
    np.testing.assert_array_equal(blocks(kv_cache), before)
    fill(kv_cache, seed=1)
    expected = blocks(kv_cache)
    assert (expected != before).any(axis=1).all()
    transfer.run([], [(0, 8), (1, 9), (2, 3), (7, 0), (4, 1)], [])
    expected[[8, 9, 3, 0, 1]] = before[[3, 4, 5, 9, 0]]
    np.testing.assert_array_equal(blocks(kv_cache), expected)


def test_the_three_lists_act_in_their_order() -> None:
    kv_cache, transfer = new_transfer()
    before = blocks(kv_cache)
    transfer.run([(1, 0), (2, 1)], [], [])
    fill(kv_cache, seed=1)
    now = blocks(kv_cache)
    # Block 4 leaves, block 1's old bytes take its place, and are copied to block 6; what is in block 4 now, not before.
    transfer.run([(4, 5)], [(0, 4)], [(4, 6)])
    expected = now.copy()
    expected[4] = expected[6] = before[1]
    np.testing.assert_array_equal(blocks(kv_cache), expected)
    transfer.run([], [(5, 10), (1, 11)], [])
    expected[10], expected[11] = now[4], before[2]
    np.testing.assert_array_equal(blocks(kv_cache), expected)


def test_random_lists_do_what_one_block_after_another_does() -> None:
    rng = random.Random(3)
    kv_cache, transfer = new_transfer()
    pages, host = blocks(kv_cache), np.zeros((NUM_SLOTS, kv_cache.spec.block_bytes[0]), np.uint8)
    transfer.run([(index, index) for index in range(NUM_SLOTS)], [], [])
    host[:] = pages[:NUM_SLOTS]
    for _ in range(300):
        out = random_pairs(rng, NUM_BLOCKS, NUM_SLOTS)
        back = random_pairs(rng, NUM_SLOTS, NUM_BLOCKS)
        copies = random_pairs(rng, NUM_BLOCKS, NUM_BLOCKS)
        transfer.run(out, back, copies)
        for block, slot in out:
            host[slot] = pages[block]
        for slot, block in back:
            pages[block] = host[slot]
        for source, target in copies:
            pages[target] = pages[source]
        np.testing.assert_array_equal(blocks(kv_cache), pages)


def random_pairs(rng: random.Random, num_sources: int, num_targets: int) -> list[tuple[int, int]]:
    """Up to six; some follow one another, some touch what others write."""
    pairs: list[tuple[int, int]] = []
    for _ in range(rng.randrange(4)):
        source, target = rng.randrange(num_sources), rng.randrange(num_targets)
        pairs.append((source, target))
        if source + 1 < num_sources and target + 1 < num_targets and rng.random() < 0.5:
            pairs.append((source + 1, target + 1))
    return pairs


@pytest.mark.parametrize(
    ("lists", "param", "message"),
    [
        (([(12, 0)], [], []), "swap_out", r"swap_out\[0\]: block is 12, must be 0 or more and below 12"),
        (([(0, 0), (1, 9)], [], []), "swap_out", r"swap_out\[1\]: host slot is 9, must be 0 or more and below 9"),
        (([(-1, 0)], [], []), "swap_out", "block is -1"),
        (([], [(9, 0)], []), "swap_in", r"swap_in\[0\]: host slot is 9, must be 0 or more and below 9"),
        (([], [(0, -2)], []), "swap_in", "block is -2"),
        (([], [], [(1, 2), (3, 4), (5, 12)]), "copies", r"copies\[2\]: block is 12"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_moves(
    lists: tuple[list[tuple[int, int]], ...], param: str, message: str
) -> None:
    kv_cache, transfer = new_transfer()
    transfer.run([(0, 0), (1, 1)], [], [])
    before, counted = blocks(kv_cache), transfer.counters.out_bytes
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        transfer.run(lists[0] or [(5, 0)], lists[1] or [(1, 6)], lists[2] or [(7, 8)])
    assert caught.value.param == param
    np.testing.assert_array_equal(blocks(kv_cache), before)
    assert transfer.counters.out_bytes == counted


def test_without_host_pages_only_pages_are_copied() -> None:
    kv_cache = KVCache(new_spec(), NUM_BLOCKS)
    fill(kv_cache)
    before = blocks(kv_cache)
    transfer = KVTransfer(kv_cache)
    transfer.run([], [], [(2, 5)])
    before[5] = before[2]
    np.testing.assert_array_equal(blocks(kv_cache), before)
    for name, lists in {"swap_out": ([(0, 0)], []), "swap_in": ([], [(0, 0)])}.items():
        with pytest.raises(InvalidArgumentError, match=f"{name}: there are no host pages"):
            transfer.run(*lists, [])
    with pytest.raises(InvalidArgumentError, match="host_pages are for"):
        KVTransfer(kv_cache, HostPages(new_spec(float16), 2))


def test_bytes_and_seconds_are_counted() -> None:
    kv_cache, transfer = new_transfer()
    size = kv_cache.spec.block_bytes[0]
    transfer.run([], [], [])
    transfer.run([], [], [(0, 1)])
    assert transfer.bandwidth is None
    assert transfer.counters.swap_s == 0
    transfer.run([(0, 0), (1, 1)], [], [(2, 3)])
    transfer.run([], [(0, 5)], [])
    counters = transfer.counters
    assert (counters.out_bytes, counters.in_bytes, counters.copied_bytes) == (2 * size, size, 2 * size)
    assert counters.swap_bytes == 3 * size
    assert counters.num_driver_calls == 0
    assert 0 < counters.swap_s < 10
    assert transfer.bandwidth == counters.swap_bytes / counters.swap_s
    assert transfer.take_timed() == (3 * size, counters.swap_s)
    assert transfer.take_timed() == (0, 0.0)
    transfer.run([(7, 8)], [], [])
    num_bytes, seconds = transfer.take_timed()
    assert num_bytes == size
    assert seconds == pytest.approx(transfer.counters.swap_s - counters.swap_s)


def test_pairs_that_follow_one_another_are_one_run() -> None:
    pairs = [(5, 1), (3, 7), (6, 2), (4, 0), (7, 4), (3, 9)]
    assert waves_of(pairs) == [[Run(3, 7, 1), Run(3, 9, 1), Run(4, 0, 3), Run(7, 4, 1)]]
    assert waves_of([(index, index + 2) for index in range(18)]) == [[Run(0, 2, 18)]]
    assert waves_of([]) == []


def test_pairs_whose_order_matters_are_waves() -> None:
    assert waves_of([(3, 7), (4, 8), (5, 7)]) == [[Run(3, 7, 2)], [Run(5, 7, 1)]]
    assert waves_of([(3, 4), (4, 5)]) == [[Run(3, 4, 2)]]
    assert waves_of([(3, 4), (4, 5)], is_within=True) == [[Run(3, 4, 1)], [Run(4, 5, 1)]]
    assert waves_of([(3, 9), (8, 3), (2, 4)], is_within=True) == [
        [Run(3, 9, 1)],
        [Run(2, 4, 1), Run(8, 3, 1)],
    ]
    assert waves_of([(3, 3), (4, 5)], is_within=True) == [[Run(4, 5, 1)]]
    assert waves_of([(3, 3)], is_within=True) == []
