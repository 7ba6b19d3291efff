"""The memory checker sees the blocks of the caching allocator: overruns, use after return, streams without an order."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.device.allocator import DeviceBlock
from runtime.device.errors import LaunchError
from runtime.device.gpu import Gpu
from runtime.emulator.driver.launches import KernelLaunch
from runtime.emulator.driver.work_queues import MAX_QUEUED
from tests.runtime.device.emulated import new_gpu
from tests.runtime.device.kernels import launch_of, scale

N = 1000  # floats in each array
SIZE = 4 * N


@pytest.fixture
def gpu() -> Gpu:
    return new_gpu()


def filled(gpu: Gpu, num_elements: int = N) -> DeviceBlock:
    block = gpu.allocate(4 * num_elements)
    gpu.write(block.address, np.arange(num_elements, dtype=np.float32))
    return block


def run(gpu: Gpu, x: int, y: int, num_elements: int = N, **where: object) -> None:
    gpu.launch(launch_of(scale(), num_elements), x, y, num_elements, 2.0, **where)  # type: ignore[arg-type]


def fault_of(gpu: Gpu) -> str:
    with pytest.raises(LaunchError) as caught:
        gpu.synchronize()
    assert caught.value.__cause__ is not None
    return str(caught.value)


def test_what_is_right_passes(gpu: Gpu) -> None:
    x, y = filled(gpu), gpu.allocate(SIZE)
    run(gpu, x.address, y.address)
    found = np.empty(N, np.float32)
    gpu.read(y.address, found)
    assert (found == 2 * np.arange(N, dtype=np.float32)).all()


def test_a_read_one_past_the_end(gpu: Gpu) -> None:
    x, y = filled(gpu), gpu.allocate(SIZE + 4)
    run(gpu, x.address, y.address, N + 1)
    words = fault_of(gpu)
    assert "OUT_OF_BOUNDS: a load of 4 bytes" in words
    assert f"0 bytes past the end of a pool's block of 4,000 bytes at {x.address:#x}" in words
    assert "kernel scale, block (3, 0, 0), thread (232, 0, 0)" in words


def test_a_write_one_past_the_end(gpu: Gpu) -> None:
    x, y = filled(gpu, N + 1), gpu.allocate(SIZE)
    run(gpu, x.address, y.address, N + 1)
    words = fault_of(gpu)
    assert "OUT_OF_BOUNDS: a store of 4 bytes" in words
    assert f"0 bytes past the end of a pool's block of 4,000 bytes at {y.address:#x}" in words


def test_sizes_of_a_class_have_a_gap_too(gpu: Gpu) -> None:
    x, y, z = filled(gpu, 1024), gpu.allocate(4096), gpu.allocate(4096)
    assert abs(y.address - z.address) >= 4096 + 256
    run(gpu, x.address, y.address, 1025)
    assert "OUT_OF_BOUNDS" in fault_of(gpu)


def test_use_after_return(gpu: Gpu) -> None:
    x, y = filled(gpu), gpu.allocate(SIZE)
    address = y.address
    y.release()
    run(gpu, x.address, address)
    words = fault_of(gpu)
    assert "ACCESS_AFTER_FREE" in words
    assert f"a pool's block of 4,000 bytes at {address:#x}, which has been returned" in words


def test_memory_that_is_used_again_counts_as_unwritten(gpu: Gpu) -> None:
    x, y = filled(gpu), gpu.allocate(SIZE)
    address = x.address
    x.release()
    x = gpu.allocate(SIZE)
    assert x.address == address
    run(gpu, x.address, y.address)
    assert "UNINITIALIZED" in fault_of(gpu)


@pytest.mark.parametrize("what", ["write", "fill", "copy", "read"])
def test_copies_stay_in_one_block(gpu: Gpu, what: str) -> None:
    block, other = filled(gpu), filled(gpu, 2 * N)
    if what == "write":
        gpu.write(block.address + 4, np.zeros(N, np.float32))
    elif what == "fill":
        gpu.fill(block.address, 0, SIZE + 1)
    elif what == "copy":
        gpu.copy(block.address, other.address, SIZE + 4)
    else:
        with pytest.raises(LaunchError, match="past the end of a pool's block"):
            gpu.read(block.address, np.zeros(N + 1, np.float32))
        return
    assert "past the end of a pool's block of 4,000 bytes" in fault_of(gpu)


def test_a_block_is_not_returned_while_another_stream_uses_it(gpu: Gpu) -> None:
    x, y, other = filled(gpu), gpu.allocate(SIZE), gpu.new_stream()
    other.wait(gpu.stream.record())
    run(gpu, x.address, y.address, stream=other)
    x.release()
    words = fault_of(gpu)
    assert "USE_AFTER_FREE" in words
    assert "return of the block at" in words
    assert "kernel scale in stream" in words


def test_another_stream_waits_for_the_blocks_begin(gpu: Gpu) -> None:
    """Memory is given in the order of its stream: another that does not wait finds nothing there."""
    block, other = gpu.allocate(SIZE), gpu.new_stream()
    gpu.fill(block.address, 0, SIZE, stream=other)
    fault_of(gpu)


def test_trimmed_memory_is_gone(gpu: Gpu) -> None:
    x, y = filled(gpu), filled(gpu, 10_000_000)
    address = y.address
    y.release()
    assert gpu.allocator.trim() > 0
    run(gpu, x.address, address)
    assert "FREE" in fault_of(gpu)
    gpu.allocator.check_integrity()


def test_a_block_that_is_collected_while_a_kernel_runs(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end, one work more in a full queue, runs nothing in the middle of the kernel's own run."""
    x, y = filled(gpu), gpu.allocate(SIZE)
    collected = [gpu.allocate(SIZE) for _ in range(MAX_QUEUED)]
    gpu.synchronize()
    run_kernel, running, runs = KernelLaunch.run, [0], []

    def collecting(self: KernelLaunch, work: object) -> None:
        running[0] += 1
        runs.append(running[0])
        if collected:
            collected.pop().release()
        run_kernel(self, work)  # type: ignore[arg-type]
        running[0] -= 1

    monkeypatch.setattr(KernelLaunch, "run", collecting)
    for _ in range(MAX_QUEUED + 8):
        run(gpu, x.address, y.address)
    gpu.synchronize()
    assert runs == [1] * (MAX_QUEUED + 8)
