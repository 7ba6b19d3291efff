"""Planes of pages are copied layer by layer while a step runs; the last wait for its end."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from numba_kernels.cpu.running import pool
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.dtype import float32
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.kv.layer_copies import LayerCopies, PassCopy, has_free_core
from runtime.kv.page_bytes import PageBytes
from tests.waiting import wait_until

NUM_LAYERS, BLOCKS = 4, [5, 2, 3]


def write(cache: KVCache, layer: int) -> list[NDArray[np.uint8]]:
    """Random bytes in all pages of a layer, as its kernels would write them; returns those of `BLOCKS`."""
    found = []
    for plane, tensor in enumerate(cache.layer(layer)):
        pages = np.random.default_rng([layer, plane]).standard_normal(tensor.shape).astype(np.float32)
        if cache.device.kind == "cpu":
            tensor.array[:] = pages
        else:
            Gpu.of(cache.device).write(tensor.address, pages)
        found.append(pages[BLOCKS].reshape(len(BLOCKS), -1).view(np.uint8))
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("emulated:sm_80", marks=pytest.mark.emulator)])
def test_planes_go_while_later_layers_are_computed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.kv.layer_copies.PART_BYTES", 1)
    cache = KVCache(KVCacheSpec.uniform(NUM_LAYERS, 2, 8, 8, float32, Device.parse(device)), 7)
    pages = PageBytes(cache)
    copies = LayerCopies(cache, pages)
    bounds = copies.bounds(0, len(BLOCKS))
    assert bounds == [0, 2, 4, 6]
    taken: list[NDArray[np.uint8]] = []

    def take(first: int, planes: list[NDArray[np.uint8]]) -> bool:
        assert first == len(taken)
        taken.extend(planes)
        return True

    job, known = PassCopy(0, BLOCKS, bounds, take), []
    assert copies.follower is None
    copies.begin([job])
    with cache.followed_by(copies.follower):
        for layer in range(NUM_LAYERS):
            known += write(cache, layer)  # the cache is asked for the layer first
            wait_until(lambda layer=layer: len(taken) == 2 * layer)
    copies.finish()
    assert job.num_planes == 6
    assert copies.follower is None
    rest = pages.copy_out(0, BLOCKS, job.num_planes)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip([*taken, *rest], known, strict=True))


def test_pages_that_are_not_wanted_are_not_copied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.kv.layer_copies.PART_BYTES", 1)
    cache = KVCache(KVCacheSpec.uniform(NUM_LAYERS, 2, 8, 8, float32), 7)
    copies, calls = LayerCopies(cache, PageBytes(cache)), list[int]()
    job = PassCopy(0, BLOCKS, copies.bounds(0, 3), lambda first, _: bool(calls.append(first)))
    copies.begin([job])
    for layer in range(NUM_LAYERS):
        copies.passed(layer)
    copies.finish()
    assert calls == [0]


def test_the_memory_of_a_copy_is_used_again_once_it_is_freed() -> None:
    cache = KVCache(KVCacheSpec.uniform(1, 2, 8, 8, float32), 7)
    pages, known = PageBytes(cache), write(cache, 0)
    kept = pages.copy_out(0, BLOCKS)
    others = [pages.copy_out(0, BLOCKS[:1])[0].ctypes.data for _ in range(3)]
    assert len(set(others)) == 1
    for tensor in cache.layer(0):
        tensor.array.fill(0)
    pages.copy_out(0, BLOCKS)
    assert all(map(np.array_equal, kept, known))


def test_few_pages_are_one_part() -> None:
    cache = KVCache(KVCacheSpec.uniform(NUM_LAYERS, 2, 8, 8, float32), 7)
    assert LayerCopies(cache, PageBytes(cache)).bounds(0, 3) == [0]


def test_a_cpu_copies_ahead_if_its_kernels_leave_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    try:
        pool.limit_threads(1)
        assert has_free_core()
        pool.limit_threads(2)
        assert not has_free_core()
    finally:
        pool.limit_threads(pool.NUM_THREADS)
