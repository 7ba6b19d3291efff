"""A device's memory as the host sees it: allocation, life, redzones, what the shadow says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from runtime.emulator.memory.device_memory import DeviceMemoryError, Machine, connect
from runtime.emulator.translation.ptx import parse
from runtime.emulator.translation.symbols import SHARED_START, place_variables, shared_layout
from runtime.errors import InvalidArgumentError, OutOfMemoryError
from tests.runtime.emulator.memory_harness import HEADER


@pytest.fixture
def machine() -> Machine:
    return Machine(1 << 20)


def test_bytes_written_are_read(machine: Machine) -> None:
    address = machine.allocate(100)
    machine.write(address, bytes(range(100)))
    machine.fill(address + 10, 0xAB, 5)
    assert machine.read(address, 100) == bytes([*range(10), *[0xAB] * 5, *range(15, 100)])
    array = np.arange(10, dtype=np.float32)
    machine.write(address, memoryview(array))
    assert machine.read(address, 40) == array.tobytes()


def test_alignment_and_distance(machine: Machine) -> None:
    extents = []
    for size, alignment in [(1, 256), (257, 256), (4096, 4096), (3, 1), (1000, 1024)]:
        address = machine.allocate(size, alignment)
        assert address % max(alignment, 256) == 0
        extents.append((address, address + size))
    extents.sort()
    assert all(after[0] - before[1] >= 256 for before, after in itertools.pairwise(extents))


@pytest.mark.parametrize("action", ["write", "read", "fill"])
def test_the_host_is_checked_too(machine: Machine, action: str) -> None:
    address = machine.allocate(64, label="weights")

    def touch(at: int, size: int) -> None:
        if action == "write":
            machine.write(at, bytes(size))
        elif action == "read":
            machine.read(at, size)
        else:
            machine.fill(at, 0, size)

    touch(address, 64)
    with pytest.raises(DeviceMemoryError, match=r"0 bytes past the end of allocation #1 \(weights\)") as over:
        touch(address + 60, 5)
    assert over.value.address == address + 64
    with pytest.raises(DeviceMemoryError, match="1 bytes before"):
        touch(address - 1, 1)
    machine.free(address)
    with pytest.raises(DeviceMemoryError, match=r"8 bytes into allocation #1 .* which has been freed"):
        touch(address + 8, 4)
    with pytest.raises(DeviceMemoryError, match="starts no allocation"):
        machine.free(address)
    with pytest.raises(DeviceMemoryError, match="null page"):
        touch(0, 4)


def test_out_of_memory_names_the_sizes(machine: Machine) -> None:
    first = machine.allocate(1 << 19)
    with pytest.raises(OutOfMemoryError, match=r"cannot allocate 524,289 bytes: 524,288 of 1,048,576"):
        machine.allocate((1 << 19) + 1)
    machine.allocate(1 << 22, is_host=True)  # pinned memory is the host's
    machine.free(first)
    machine.allocate(1 << 20)


@pytest.mark.parametrize(("size", "alignment"), [(0, 256), (-4, 256), (4, 0), (4, 24)])
def test_bad_sizes(machine: Machine, size: int, alignment: int) -> None:
    with pytest.raises(InvalidArgumentError):
        machine.allocate(size, alignment)


def test_leaks_are_listed(machine: Machine) -> None:
    addresses = [machine.allocate(8 * (index + 1)) for index in range(5)]
    machine.free(addresses[1])
    machine.free(addresses[3])
    assert [(leak.serial, leak.size_bytes) for leak in machine.live_allocations()] == [(1, 8), (3, 24), (5, 40)]


def test_freed_memory_is_dead_until_the_range_is_used_up() -> None:
    machine = Machine(1 << 20, spare_bytes=1 << 20)
    first = machine.allocate(1 << 19)
    machine.write(first, b"x")
    machine.free(first)
    seen = [first]
    while True:
        address = machine.allocate(1 << 19)
        if address in seen:
            break
        assert machine.is_freed(first)
        seen.append(address)
        machine.free(address)
    assert len(seen) >= 4
    assert not machine.is_freed(address)
    assert not machine.is_written(address, 1)


def test_many_random_allocations_keep_their_contents() -> None:
    machine = Machine(1 << 22)
    random = np.random.default_rng(5)
    live: dict[int, bytes] = {}
    for step in range(3000):
        if live and random.random() < 0.5:
            address = list(live)[int(random.integers(len(live)))]
            assert machine.read(address, len(live[address])) == live.pop(address)
            machine.free(address)
        else:
            size = int(random.integers(1, 5000))
            try:
                address = machine.allocate(size)
            except OutOfMemoryError:
                continue
            live[address] = bytes([step % 256]) * size
            machine.write(address, live[address])
    assert {leak.address for leak in machine.live_allocations()} == set(live)
    assert machine.used_bytes == sum(map(len, live.values()))


def test_copies_carry_over_what_was_never_written() -> None:
    first, second = Machine(1 << 20, index=0), Machine(1 << 20, index=1)
    connect([first, second])
    source, target = first.allocate(100), second.allocate(200)
    first.write(source, bytes(range(50)))
    second.copy(target, source, 100, first)
    assert second.read(target, 50) == bytes(range(50))
    assert second.is_written(target, 50)
    assert not second.is_written(target, 51)
    with pytest.raises(DeviceMemoryError, match="copy from"):
        second.copy(target, source, 101, first)


def test_peers() -> None:
    first, second, third = (Machine(1 << 20, index=index) for index in range(3))
    connect([first, second])
    assert not first.can_access(second)
    first.enable_peer(second)
    assert first.can_access(second)
    assert not second.can_access(first)
    first.disable_peer(second)
    assert not first.can_access(second)
    with pytest.raises(InvalidArgumentError, match="not connected"):
        first.enable_peer(third)
    with pytest.raises(InvalidArgumentError, match="same index"):
        connect([first, Machine(1 << 20, index=0)])


# --- variables ---

MODULE = parse(
    HEADER
    + """
.global .align 8 .b8 table[6] = {1, 2, 3};
.const .align 4 .u32 limit = 77;
.shared .align 16 .b8 outer[100];
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k() { .shared .align 4 .f32 inner[8]; ret; }
"""
)


def test_variables_of_device_memory_have_their_values(machine: Machine) -> None:
    addresses = place_variables(machine, MODULE)
    assert machine.read(addresses["table"], 6) == bytes([1, 2, 3, 0, 0, 0])
    assert machine.read(addresses["limit"], 4) == (77).to_bytes(4, "little")
    with pytest.raises(DeviceMemoryError, match=r"\.global table"):
        machine.read(addresses["table"], 7)


def test_shared_variables_lie_apart() -> None:
    layout = shared_layout(MODULE, MODULE.kernels["k"])
    assert layout.static_bytes == 144  # 100 bytes, 12 of padding … as ptxas packs them
    extents = sorted((layout.offsets[name], size) for name, size in (("outer", 100), ("inner", 32)))
    assert extents[0][0] >= SHARED_START
    assert extents[1][0] - sum(extents[0]) >= 128
    assert layout.offsets["dynamic"] % 1024 == 0
    shadow = layout.shadow(64)
    assert len(shadow) == layout.total_bytes(64)
    assert sum(shadow) == 100 + 32 + 64
    outer = layout.offsets["outer"]
    assert layout.name_at(outer + 5, 64) == "5 bytes into shared variable outer, which has 100 bytes"
    assert "3 bytes past the end of shared variable outer of 100 bytes" in layout.name_at(outer + 103, 64)
    assert layout.name_at(layout.dynamic_offset + 64, 64) == "0 bytes past the end of dynamic shared memory of 64 bytes"
