"""Memory, streams, events and graphs of the real device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from runtime.device.allocator import DeviceBlock
from runtime.device.gpu import Gpu
from tests.gpu.reuse import on_hardware
from tests.runtime.device import test_gpu as device
from tests.runtime.device import test_graph as graph

pytestmark = pytest.mark.gpu


@pytest.fixture
def x(gpu: Gpu) -> Iterator[DeviceBlock]:
    """Graphs' input."""
    block = gpu.allocate(graph.SIZE)
    gpu.write(block.address, graph.RAMP)
    yield block
    block.release()


def test_properties(gpu: Gpu) -> None:
    properties = gpu.properties
    assert properties.name
    assert properties.capability >= (8, 0)
    assert gpu.arch.startswith(f"sm_{properties.capability[0]}{properties.capability[1]}")
    assert properties.num_sms > 0
    assert properties.total_memory_bytes > 1 << 30


test_arrays_there_and_back = on_hardware(device.test_arrays_there_and_back)
test_the_array_may_change_after_a_write = on_hardware(device.test_the_array_may_change_after_a_write)
test_uploads_and_downloads = on_hardware(device.test_uploads_and_downloads)
test_copy_and_fill = on_hardware(device.test_copy_and_fill)
test_events_order_streams = on_hardware(device.test_events_order_streams)
test_timed_events = on_hardware(device.test_timed_events)

test_replay_equals_eager = on_hardware(graph.test_replay_equals_eager)
test_a_replay_is_one_call = on_hardware(graph.test_a_replay_is_one_call_and_allocates_nothing)
test_nothing_is_launched_while_recording = on_hardware(graph.test_nothing_is_launched_while_recording)
test_its_memory_stays_reserved = on_hardware(graph.test_its_memory_stays_reserved)
test_bound_launches_are_recorded_too = on_hardware(graph.test_bound_launches_are_recorded_too)


def test_the_allocator_keeps_every_block_apart(gpu: Gpu) -> None:
    """Three thousand seeded allocations and releases over three streams; each block is filled when it is taken, and
    read when it is returned. Sizes that were seen before ask the driver for nothing."""
    rng = np.random.default_rng(7)
    streams = [gpu.stream, gpu.new_stream(), gpu.new_stream()]
    known = (2.0 ** rng.uniform(4, 21, 60)).astype(np.int64)
    live: list[list[tuple[DeviceBlock, int, int]]] = [[], [], []]
    driver_calls = 0
    for number in range(3000):
        which = number % 3
        with gpu.use(streams[which]):
            if len(live[which]) > 15:
                block, size, byte = live[which].pop(int(rng.integers(16)))
                found = np.empty(size, np.uint8)
                gpu.read(block.address, found)
                assert (found == byte).all()
                block.release()
            size, byte = int(rng.choice(known)), number % 251
            block = gpu.allocate(size)
            gpu.fill(block.address, byte, size)
            live[which].append((block, size, byte))
        if number == 1500:
            driver_calls = gpu.allocator.statistics.num_driver_allocations
    gpu.allocator.check_integrity()
    assert gpu.allocator.statistics.num_driver_allocations <= driver_calls + 3  # one segment a stream, at most
