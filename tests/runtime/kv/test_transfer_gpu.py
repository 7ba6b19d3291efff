"""Blocks moved on an emulated GPU, all checkers on: the right bytes though streams run as late as they may."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.device import gpu as gpu_module
from runtime.device.context import Event, Stream
from runtime.device.errors import LaunchError
from runtime.device.gpu import Gpu
from runtime.dtype import DType, bfloat16, float16, float32
from runtime.emulator.execution.fault import FaultKind
from runtime.errors import OutOfMemoryError
from runtime.kv.cache import HostPages, KVCache, KVCacheSpec
from runtime.kv.transfer import KVTransfer
from tests.runtime.device.emulated import new_gpu
from tests.runtime.kv.test_transfer import random_pairs

pytestmark = pytest.mark.emulator

NUM_LAYERS, NUM_BLOCKS, NUM_SLOTS = 3, 10, 7


class Rig:
    """A cache of random bytes on a GPU, and what should be in it.

    Attributes:
        pages: ``[num_layers, 2, num_blocks, page_bytes]``, what should be in the cache.
    """

    def __init__(self, gpu: Gpu, dtype: DType = bfloat16) -> None:
        self.gpu = gpu
        spec = KVCacheSpec.uniform(NUM_LAYERS, 2, head_dim=12, block_size=8, dtype=dtype, device=gpu.device)
        self.kv_cache = KVCache(spec, NUM_BLOCKS)
        self.transfer = KVTransfer(self.kv_cache, HostPages(spec, NUM_SLOTS))
        self.page_bytes = spec.planes[0][0].size_bytes
        rng = np.random.default_rng(1)
        self.pages = rng.integers(0, 256, (NUM_LAYERS, 2, NUM_BLOCKS, self.page_bytes), np.uint8)
        for layer in range(NUM_LAYERS):
            for tensor, pages in zip(self.kv_cache.layer(layer), self.pages[layer]):
                self.gpu.write(tensor.address, pages)

    def page(self, layer: int, plane: int, block: int) -> int:
        """The address of a page of K (0) or V (1), as the forward pass gets it."""
        return self.kv_cache.layer(layer)[plane].address + block * self.page_bytes

    def fill(self, layer: int, block: int, byte: int) -> None:
        """A step's kernel that writes a page of K and of V."""
        for plane in range(2):
            self.gpu.fill(self.page(layer, plane, block), byte, self.page_bytes)
            self.pages[layer, plane, block] = byte

    def read(self) -> NDArray[np.uint8]:
        """What is in the cache."""
        result = np.empty_like(self.pages)
        for layer in range(NUM_LAYERS):
            for tensor, pages in zip(self.kv_cache.layer(layer), result[layer]):
                self.gpu.read(tensor.address, pages)
        return result


def emulated(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Gpu:
    """A device that the test may break: nobody else gets it."""
    gpu = new_gpu(**options)
    monkeypatch.setitem(gpu_module._opened, gpu.device.type, gpu)
    return gpu


@pytest.mark.parametrize("dtype", [float32, float16, bfloat16], ids=repr)
def test_what_went_out_comes_back_elsewhere_bit_for_bit(monkeypatch: pytest.MonkeyPatch, dtype: DType) -> None:
    check_round_trip(emulated(monkeypatch), dtype)


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_find_and_leave_the_right_bytes(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    check_random_steps(emulated(monkeypatch, seed=seed), seed)


def check_round_trip(gpu: Gpu, dtype: DType) -> None:
    rig = Rig(gpu, dtype)
    before = rig.pages.copy()
    rig.transfer.run([(3, 0), (4, 1), (5, 2), (9, 6), (0, 4)], [], [])
    for layer in range(NUM_LAYERS):
        for block in (3, 4, 5, 9, 0):
            rig.fill(layer, block, 0)
    rig.transfer.run([], [(0, 8), (1, 9), (2, 3), (6, 0), (4, 1)], [])
    rig.pages[:, :, [8, 9, 3, 0, 1]] = before[:, :, [3, 4, 5, 9, 0]]
    np.testing.assert_array_equal(rig.read(), rig.pages)


def check_random_steps(gpu: Gpu, seed: int) -> None:
    """Blocks are moved and overwritten, layer by layer, without the host ever waiting until the end."""
    rig = Rig(gpu)
    rng = random.Random(seed)
    slots = list(range(NUM_SLOTS))
    rig.transfer.run(list(zip(slots, slots)), [], [])
    host = rig.pages[:, :, :NUM_SLOTS].copy()
    for step in range(20):
        out = random_pairs(rng, NUM_BLOCKS, NUM_SLOTS)
        back = random_pairs(rng, NUM_SLOTS, NUM_BLOCKS)
        copies = random_pairs(rng, NUM_BLOCKS, NUM_BLOCKS)
        rig.transfer.run(out, back, copies)
        for block, slot in out:
            host[:, :, slot] = rig.pages[:, :, block]
        for slot, block in back:
            rig.pages[:, :, block] = host[:, :, slot]
        for source, target in copies:
            rig.pages[:, :, target] = rig.pages[:, :, source]
        for layer in range(NUM_LAYERS):
            for block in rng.sample(range(NUM_BLOCKS), 2):
                rig.fill(layer, block, 10 * step + layer)
    np.testing.assert_array_equal(rig.read(), rig.pages)
    rig.gpu.allocator.check_integrity()


@pytest.mark.planted
def test_a_layer_waits_for_its_own_pages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(emulated(monkeypatch))
    addresses = [rig.page(layer, 0, 0) for layer in range(NUM_LAYERS)]
    rig.transfer.run([(0, 0)], [], [])
    assert rig.kv_cache.arrivals.keys() == {0, 1, 2}
    rig.kv_cache.layer(0)
    assert rig.kv_cache.arrivals.keys() == {1, 2}
    rig.gpu.fill(addresses[0], 0, rig.page_bytes)
    rig.gpu.fill(addresses[2], 0, rig.page_bytes)
    with pytest.raises(LaunchError, match="missing event"):
        rig.gpu.synchronize()


def leave_and_overwrite(rig: Rig) -> None:
    rig.transfer.run([(1, 0)], [], [])
    rig.fill(2, 1, 7)


def arrive_and_read(rig: Rig) -> None:
    rig.transfer.run([], [(0, 2)], [])
    rig.read()


def arrive_copied_and_read(rig: Rig) -> None:
    rig.transfer.run([], [], [(0, 2)])
    rig.read()


def write_and_leave(rig: Rig) -> None:
    rig.fill(1, 3, 5)
    rig.transfer.run([(3, 0)], [], [])


def read_and_arrive(rig: Rig) -> None:
    target = rig.gpu.allocate(rig.page_bytes)
    rig.gpu.copy(target.address, rig.page(0, 0, 4), rig.page_bytes)
    rig.transfer.run([], [(0, 4)], [])


@pytest.mark.parametrize("is_planted", [False, pytest.param(True, marks=pytest.mark.planted)])
@pytest.mark.parametrize(
    ("hazard", "is_of_side_stream"),
    [
        (leave_and_overwrite, False),
        (arrive_and_read, False),
        (arrive_copied_and_read, False),
        (write_and_leave, True),
        (read_and_arrive, True),
    ],
)
def test_without_one_of_the_events_the_emulator_finds_the_hazard(
    monkeypatch: pytest.MonkeyPatch, hazard: Any, is_of_side_stream: bool, is_planted: bool
) -> None:
    rig = Rig(emulated(monkeypatch))
    rig.transfer.run([(5, 0)], [], [])  # slot 0 holds something
    rig.read()
    wait = Stream.wait

    def wait_unless_planted(stream: Stream, event: Event) -> None:
        if (stream is not rig.gpu.stream) != is_of_side_stream:
            wait(stream, event)

    if not is_planted:
        hazard(rig)
        rig.gpu.synchronize()
        return
    monkeypatch.setattr(Stream, "wait", wait_unless_planted)

    def run() -> None:
        hazard(rig)
        rig.gpu.synchronize()

    with pytest.raises(LaunchError, match="missing event between streams"):
        run()
    fault = rig.gpu.driver.fault()
    assert getattr(fault, "kind", None) is FaultKind.MISSING_EVENT


def test_a_step_costs_one_call_for_each_layer_and_list(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(emulated(monkeypatch))
    size = rig.kv_cache.spec.block_bytes[0]
    assert rig.transfer.bandwidth is None
    rig.transfer.run([(0, 3), (1, 0), (7, 6)], [], [])
    assert rig.transfer.counters.num_driver_calls == NUM_LAYERS
    rig.transfer.run([(2, 1)], [(3, 5), (0, 0)], [(9, 8)])
    rig.transfer.run([], [], [])
    rig.transfer.run([], [], [(8, 7), (9, 4)])
    rig.gpu.synchronize()
    counters = rig.transfer.counters
    assert counters.num_driver_calls == 5 * NUM_LAYERS
    assert (counters.out_bytes, counters.in_bytes, counters.copied_bytes) == (4 * size, 2 * size, 3 * size)
    assert counters.swap_bytes == 6 * size
    assert counters.swap_s > 0
    assert rig.transfer.bandwidth == counters.swap_bytes / counters.swap_s
    assert rig.transfer.take_timed() == (6 * size, counters.swap_s)
    rig.transfer.run([(7, 6)], [], [])
    rig.gpu.synchronize()
    assert rig.transfer.take_timed()[0] == size


def test_copies_under_way_outlive_who_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that goes back while it is copied would be written or read by the next to get it."""
    rig = Rig(emulated(monkeypatch))
    gpu, host_pages = rig.gpu, rig.transfer.host_pages
    assert host_pages is not None
    expected = rig.pages[:, :, 2].copy()
    rig.transfer.run([(2, 5)], [], [])
    del rig  # waits for the copies
    planes = np.array([plane[5] for plane in host_pages.planes])
    np.testing.assert_array_equal(planes.reshape(expected.shape), expected)
    block = gpu.allocate(1 << 12)
    gpu.fill(block.address, 0, 1 << 12)
    gpu.synchronize()
    gpu.pinned.check_integrity()


@pytest.mark.planted
def test_more_host_pages_than_can_be_pinned_are_refused_with_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = emulated(monkeypatch)
    spec = KVCacheSpec.uniform(1, num_kv_heads=2, head_dim=64, block_size=16, dtype=float16, device=gpu.device)
    size = 24 << 30  # one plane is more than the emulated driver can pin, where the machine has as much at all
    sizes = f"{size // spec.block_bytes[0]} slots of {spec.block_bytes[0]} bytes are {size} bytes, "
    with pytest.raises(OutOfMemoryError, match=sizes + "(which were refused: cuMemHostAlloc|the machine has)"):
        HostPages(spec, size // spec.block_bytes[0])
    assert [plane.shape for plane in HostPages(spec, 4).planes] == [(4, spec.planes[0][0].size_bytes)] * 2
    gpu.pinned.check_integrity()


def test_a_cache_that_is_never_moved_needs_no_second_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = emulated(monkeypatch)
    made: list[Stream] = []
    monkeypatch.setattr(gpu, "new_stream", lambda: made.append(Stream(gpu.context)) or made[-1])
    rig = Rig(gpu)
    rig.transfer.run([], [], [])
    assert not made
    rig.transfer.run([], [], [(0, 1)])
    rig.transfer.run([], [], [(0, 2)])
    assert len(made) == 1
    rig.pages[:, :, [1, 2]] = rig.pages[:, :, [0, 0]]
    np.testing.assert_array_equal(rig.read(), rig.pages)
