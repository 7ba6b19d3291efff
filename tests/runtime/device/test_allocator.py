"""The caching allocator: a million operations, other streams, running out of memory, graphs. On a counting driver."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any

import numpy as np
import pytest

from runtime.device.allocator import Allocator, DeviceBlock
from runtime.device.arena import round_to_class
from runtime.device.errors import CaptureError, DeviceOutOfMemoryError, PoolTooSmallError
from runtime.device.gpu import Gpu
from runtime.errors import InvalidArgumentError, OutOfMemoryError
from tests.runtime.device.fake_driver import FakeDriver

MIB = 1 << 20


@pytest.mark.parametrize("num_operations", [300_000, pytest.param(1_000_000, marks=pytest.mark.exhaustive)])
def test_random_operations_over_several_streams(fake_gpu: Gpu, fake: FakeDriver, num_operations: int) -> None:
    """Random sizes from 64 bytes to 4 MiB, on four streams with up to 128 MiB in use on each. The sizes of the second
    half have all been seen in the first, and the driver is asked for nothing; what is reserved stays near what was in
    use."""
    most_bytes = 128 * MIB
    allocator, rng = fake_gpu.allocator, np.random.default_rng(20)
    streams = [fake_gpu.stream, *(fake_gpu.new_stream() for _ in range(3))]
    known = (2.0 ** rng.uniform(6, 22, 5000)).astype(np.int64)
    sizes = known[rng.integers(0, len(known), num_operations)].tolist()
    picks = rng.random(num_operations).tolist()
    choices = rng.integers(0, len(streams), num_operations).tolist()
    is_freeing = (rng.random(num_operations) < 0.48).tolist()
    live: list[list[DeviceBlock]] = [[] for _ in streams]
    in_use = [0] * len(streams)
    driver_calls = []
    for number in range(num_operations):
        which = choices[number]
        blocks = live[which]
        size = sizes[number]
        if blocks and (is_freeing[number] or in_use[which] + size > most_bytes):
            position = int(picks[number] * len(blocks))
            block = blocks[position]
            blocks[position] = blocks[-1]
            blocks.pop()
            in_use[which] -= block.size_bytes
            block.release()
        else:
            blocks.append(allocator.allocate(size, streams[which]))
            in_use[which] += size
        if number % (num_operations // 8) == 0:
            allocator.check_integrity()
            driver_calls.append(allocator.statistics.num_driver_allocations)
    allocator.check_integrity()
    statistics = allocator.statistics
    assert statistics.num_driver_allocations == driver_calls[4] == fake.counts["cuMemAlloc"]
    assert statistics.num_driver_frees == 0
    assert statistics.requested_bytes == sum(in_use)
    assert statistics.reserved_bytes <= 1.5 * statistics.peak_allocated_bytes
    del block, blocks, live
    assert allocator.statistics.allocated_bytes == 0
    assert allocator.trim() == statistics.reserved_bytes
    assert fake.used_bytes == 0
    allocator.check_integrity()


def test_a_size_that_was_freed_asks_the_driver_for_nothing(fake_gpu: Gpu, fake: FakeDriver) -> None:
    rng = np.random.default_rng(3)
    for size in [
        0,
        1,
        511,
        512,
        513,
        MIB,
        MIB + 1,
        40 * MIB,
        *(int(2.0**exponent) for exponent in rng.uniform(0, 28, 50)),
    ]:
        fake_gpu.allocate(size).release()
        before = fake.counts["cuMemAlloc"]
        again = fake_gpu.allocate(size)
        assert fake.counts["cuMemAlloc"] == before
        again.release()
    statistics = fake_gpu.allocator.statistics
    assert statistics.num_hits == statistics.num_allocations - statistics.num_driver_allocations


def test_blocks_are_apart_and_aligned(fake_gpu: Gpu) -> None:
    blocks = [fake_gpu.allocate(size) for size in (0, 0, 1, 700, 512, 3 * MIB, 5, 40 * MIB)]
    spans = sorted((block.address, block.address + block.size_bytes) for block in blocks)
    assert all(start % 256 == 0 and start > 0 for start, _ in spans)
    assert len({start for start, _ in spans}) == len(blocks)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert fake_gpu.allocator.statistics.requested_bytes == sum(block.size_bytes for block in blocks)


def test_memory_comes_back_by_release_or_with_the_object(fake_gpu: Gpu) -> None:
    allocator = fake_gpu.allocator
    block = fake_gpu.allocate(1000)
    address = block.address
    block.release()
    block.release()  # once is enough
    assert allocator.statistics.allocated_bytes == 0
    other = fake_gpu.allocate(1000)
    assert other.address == address
    del other
    gc.collect()
    assert allocator.statistics.allocated_bytes == 0
    allocator.check_integrity()


def test_statistics(fake_gpu: Gpu) -> None:
    allocator = fake_gpu.allocator
    first, second = fake_gpu.allocate(100_000), fake_gpu.allocate(3 * MIB)
    now = allocator.statistics
    assert now.requested_bytes == 100_000 + 3 * MIB
    assert now.allocated_bytes == round_to_class(100_000) + round_to_class(3 * MIB)
    assert (now.num_allocations, now.num_hits, now.num_driver_allocations, now.num_segments) == (2, 1, 1, 1)
    assert now.reserved_bytes == 32 * MIB == now.peak_reserved_bytes
    second.release()
    assert allocator.statistics.peak_allocated_bytes == now.allocated_bytes
    first.release()


def test_a_negative_size_is_refused(fake_gpu: Gpu) -> None:
    with pytest.raises(InvalidArgumentError, match="-1") as caught:
        fake_gpu.allocate(-1)
    assert caught.value.param == "size_bytes"


# Streams


def test_streams_do_not_share_blocks(fake_gpu: Gpu) -> None:
    other = fake_gpu.new_stream()
    block = fake_gpu.allocate(4096)
    address = block.address
    block.release()
    assert fake_gpu.allocate(4096, other).address != address
    assert fake_gpu.allocate(4096).address == address


def test_any_thread_may_return_a_block(fake_gpu: Gpu) -> None:
    blocks = [fake_gpu.allocate(1000 + number) for number in range(2000)]
    halves = [blocks[::2], blocks[1::2]]
    del blocks

    def work(mine: list[DeviceBlock]) -> None:
        while mine:
            mine.pop().release()
            fake_gpu.allocate(700).release()

    threads = [threading.Thread(target=work, args=(half,)) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake_gpu.allocator.statistics.allocated_bytes == 0
    fake_gpu.allocator.check_integrity()


# Out of memory


def test_cached_memory_is_given_up_before_memory_is_missing(fake_gpu: Gpu, fake: FakeDriver) -> None:
    fake.total_bytes = 100 * MIB
    fake_gpu.allocate(60 * MIB).release()
    big = fake_gpu.allocate(80 * MIB)  # only when the 60 went back
    statistics = fake_gpu.allocator.statistics
    assert (statistics.reserved_bytes, statistics.num_driver_frees) == (80 * MIB, 1)
    big.release()


def test_near_the_limit_segments_are_no_larger_than_needed(fake_gpu: Gpu, fake: FakeDriver) -> None:
    fake.total_bytes = 4 * MIB
    block = fake_gpu.allocate(3 * MIB)  # a segment of 32 MiB does not fit
    assert fake_gpu.allocator.statistics.reserved_bytes == 4 * MIB
    block.release()


def test_blocks_in_cycles_are_collected(fake_gpu: Gpu, fake: FakeDriver) -> None:
    fake.total_bytes = 100 * MIB
    cycle: dict[str, Any] = {"block": fake_gpu.allocate(40 * MIB)}
    cycle["self"] = cycle
    del cycle
    gc.disable()
    try:
        block = fake_gpu.allocate(90 * MIB)
    finally:
        gc.enable()
    block.release()
    fake_gpu.allocator.check_integrity()


def test_out_of_memory_says_where_it_is(fake_gpu: Gpu, fake: FakeDriver) -> None:
    fake.total_bytes = 64 * MIB
    kept = fake_gpu.allocate(40 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        fake_gpu.allocate(30 * MIB)
    error = caught.value
    assert isinstance(error, DeviceOutOfMemoryError)
    assert error.requested_bytes == 30 * MIB
    text = str(error)
    for words in (
        "cuda:0",
        "31,457,280 bytes",
        "device",
        "67,108,864",
        "reserved here",
        "41,943,040",
        "stream",
    ):
        assert words in text, words
    fake_gpu.allocator.check_integrity()
    assert fake_gpu.allocator.statistics.requested_bytes == kept.size_bytes
    assert fake_gpu.allocate(20 * MIB).size_bytes == 20 * MIB  # and life goes on


def test_trim_gives_back_whole_segments_only(fake_gpu: Gpu, fake: FakeDriver) -> None:
    small, large, huge = fake_gpu.allocate(1000), fake_gpu.allocate(10 * MIB), fake_gpu.allocate(33 * MIB)
    large.release()
    huge.release()
    assert fake_gpu.allocator.trim() == 34 * MIB
    assert fake.used_bytes == 32 * MIB
    small.release()
    assert fake_gpu.allocator.trim() == 32 * MIB
    assert fake_gpu.allocator.trim() == 0


def test_pieces_for_small_blocks_become_large_ones_again(fake_gpu: Gpu, fake: FakeDriver) -> None:
    small = [fake_gpu.allocate(60_000) for _ in range(500)]
    assert fake.counts["cuMemAlloc"] == 1
    for block in small:
        block.release()
    assert fake_gpu.allocate(32 * MIB).size_bytes == 32 * MIB
    assert fake.counts["cuMemAlloc"] == 1
    fake_gpu.allocator.check_integrity()


# Graphs


def test_what_a_capture_returns_is_retained(fake_gpu: Gpu, fake: FakeDriver) -> None:
    allocator, stream = fake_gpu.allocator, fake_gpu.stream
    pool = allocator.new_private_pool(stream)
    outside = fake_gpu.allocate(1000)
    address = outside.address
    with allocator.redirect(stream, pool):
        fake_gpu.allocate(1000).release()  # fills the pool
        allocator.begin_capture(pool)
        driver_calls = sum(fake.counts.values())
        inside = fake_gpu.allocate(1000)
        inside_address = inside.address
        inside.release()
        assert fake_gpu.allocate(1000).address == inside_address  # of the graph: used again at once
        outside.release()
        with pytest.raises(CaptureError, match="cannot be freed"):
            allocator.trim()
        with pytest.raises(PoolTooSmallError, match="do not fit") as caught:
            fake_gpu.allocate(33 * MIB)
        assert sum(fake.counts.values()) == driver_calls  # no driver call, whatever happens
        assert caught.value.missing_bytes == round_to_class(33 * MIB)
        retained = allocator.end_capture()
        allocator.enlarge(pool, caught.value.missing_bytes)
        allocator.begin_capture(pool)
        fake_gpu.allocate(33 * MIB).release()
        assert allocator.end_capture() == []
    allocator.check_integrity()
    assert allocator.statistics.allocated_bytes == 0
    assert fake_gpu.allocate(1000).address != address  # the graph may still use it
    allocator.forget(retained)
    assert fake_gpu.allocate(1000).address == address
    allocator.check_integrity()


def test_a_graphs_memory_stays_until_it_is_dropped(fake_gpu: Gpu, fake: FakeDriver) -> None:
    allocator, stream = fake_gpu.allocator, fake_gpu.stream
    pool = allocator.new_private_pool(stream)
    with allocator.redirect(stream, pool):
        kept, other = fake_gpu.allocate(10 * MIB), fake_gpu.allocate(40 * MIB)
    other.release()
    assert allocator.trim() == 0
    reserved = allocator.statistics.reserved_bytes
    allocator.drop(pool)
    assert allocator.statistics.reserved_bytes == reserved - 40 * MIB == fake.used_bytes
    allocator.check_integrity()
    kept.release()
    assert allocator.statistics.reserved_bytes == 0 == fake.used_bytes
    allocator.check_integrity()


def test_one_capture_at_a_time(fake_gpu: Gpu) -> None:
    allocator, stream = fake_gpu.allocator, fake_gpu.stream
    pool = allocator.new_private_pool(stream)
    allocator.begin_capture(pool)
    with pytest.raises(CaptureError, match="another graph"):
        allocator.begin_capture(pool)
    allocator.end_capture()
    with (
        allocator.redirect(stream, pool),
        pytest.raises(CaptureError, match="already"),
        allocator.redirect(stream, pool),
    ):
        pass


def test_the_integrity_check_can_fail(fake_gpu: Gpu) -> None:
    def damaged(change: Any) -> None:
        block = fake_gpu.allocate(1000)
        allocator = fake_gpu.allocator
        before = {name: getattr(allocator, name) for name in ("_allocated", "_reserved")}
        change(allocator)
        with pytest.raises(AssertionError):
            allocator.check_integrity()
        for name, value in before.items():
            setattr(allocator, name, value)
        block.release()
        allocator.check_integrity()

    def change(name: str) -> Any:
        return lambda allocator: setattr(allocator, name, getattr(allocator, name) + 512)

    damaged(change("_allocated"))
    damaged(change("_reserved"))
    assert isinstance(fake_gpu.allocator, Allocator)
