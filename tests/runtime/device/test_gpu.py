"""Copies, streams, events, pinned memory and peers, on emulated devices and on a driver that can be made to fail."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda.bindings import driver as bindings

from runtime.device.device import Device
from runtime.device.driver import Driver
from runtime.device.errors import (
    CaptureError,
    DeviceOutOfMemoryError,
    DriverError,
    InvalidDeviceError,
    LaunchError,
)
from runtime.device.gpu import STAGING_BYTES, Gpu
from runtime.errors import DeviceError, InvalidArgumentError
from tests.runtime.device.emulated import new_gpu
from tests.runtime.device.fake_driver import FakeDriver
from tests.runtime.device.kernels import launch_of, scale

MIB = 1 << 20


@pytest.fixture
def gpu() -> Gpu:
    return new_gpu()


def test_there_is_one_object_of_a_device() -> None:
    gpu = Gpu.of("emulated")
    assert gpu is Gpu.of(Device("emulated:sm_90a"))
    assert (gpu.arch, gpu.capability, gpu.device.type) == ("sm_90a", (9, 0), "emulated:sm_90a")
    assert Gpu.of("emulated:sm_90a:1") is not gpu
    with pytest.raises(InvalidArgumentError, match="no GPU"):
        Gpu.of("cpu")
    with pytest.raises(InvalidDeviceError, match="numbered from 0"):
        Gpu.of("emulated:sm_90a:9")


@pytest.mark.parametrize(("arch", "capability"), [("sm_80", (8, 0)), ("sm_90a", (9, 0)), ("sm_120a", (12, 0))])
def test_properties(arch: str, capability: tuple[int, int]) -> None:
    gpu = new_gpu(arch)
    properties = gpu.properties
    assert (properties.capability, gpu.arch, properties.arch) == (capability, arch, arch)
    assert properties.num_sms > 10
    assert properties.total_memory_bytes > 1 << 30
    assert 99 * 1024 <= properties.shared_bytes_per_block <= 227 * 1024
    assert properties.name


def test_how_many_clusters_run_at_once() -> None:
    """By groups of 16 and 18 multiprocessors."""
    assert new_gpu("sm_90a").max_clusters == ((2, 66), (4, 32), (8, 16))
    assert new_gpu("sm_80").max_clusters == ()


# Copies


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(12, dtype=np.int64).reshape(3, 4).T,
        np.array(7, np.int32),
        np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16),
        np.zeros((0, 3), np.float16),
        np.arange(STAGING_BYTES * 2 + 5, dtype=np.uint32).astype(np.uint8),
        np.arange(20, dtype=np.int8)[::2],
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_there_and_back(gpu: Gpu, array: np.ndarray) -> None:
    block = gpu.allocate(array.nbytes)
    gpu.write(block.address, array)
    found = np.empty(array.shape, array.dtype)
    gpu.read(block.address, found)
    np.testing.assert_array_equal(found, array)
    gpu.pinned.check_integrity()


def test_the_array_may_change_after_a_write(gpu: Gpu) -> None:
    array = np.arange(1000, dtype=np.float32)
    block = gpu.allocate(array.nbytes)
    gpu.write(block.address, array)
    array[:] = -1
    found = np.empty_like(array)
    gpu.read(block.address, found)
    np.testing.assert_array_equal(found, np.arange(1000))


def test_pinned_memory_is_reused_only_after_the_copy(fake_gpu: Gpu, fake: FakeDriver) -> None:
    first = fake_gpu.pinned.allocate(1000)
    address = first.address
    fake.are_events_done = False
    first.release_after(fake_gpu.stream)
    assert fake_gpu.pinned.allocate(1000).address != address
    fake.are_events_done = True
    fake_gpu.pinned.allocate(5).release()
    assert fake_gpu.pinned.allocate(1000).address == address
    gc.collect()
    fake_gpu.pinned.check_integrity()


def test_uploads_and_downloads(gpu: Gpu) -> None:
    source, target, block = gpu.pinned.allocate(100), gpu.pinned.allocate(100), gpu.allocate(100)
    source.array[:] = np.arange(100)
    gpu.upload(block.address, source)
    gpu.download(target, block.address + 10, 20)
    gpu.synchronize()
    np.testing.assert_array_equal(target.array[:20], np.arange(10, 30))
    for copy in (gpu.upload, gpu.download):
        arguments = (block.address, source) if copy == gpu.upload else (target, block.address)
        with pytest.raises(InvalidArgumentError, match="101 bytes"):
            copy(*arguments, 101)  # type: ignore[operator]


def test_copy_and_fill(gpu: Gpu) -> None:
    first, second = gpu.allocate(300), gpu.allocate(300)
    gpu.fill(first.address, 0xAB, 300)
    gpu.fill(second.address, 0x01, 300)
    gpu.copy(second.address + 100, first.address, 100)
    gpu.copy(0, 0, 0)
    gpu.fill(0, 0, 0)
    found = np.empty(300, np.uint8)
    gpu.read(second.address, found)
    np.testing.assert_array_equal(found, np.repeat(np.array([1, 0xAB, 1], np.uint8), 100))


def test_reads_need_memory_that_can_be_filled(gpu: Gpu) -> None:
    block = gpu.allocate(64)
    fixed = np.zeros(4, np.uint8)
    fixed.flags.writeable = False
    for array in (np.zeros((4, 4), np.uint8)[:, ::2], fixed):
        with pytest.raises(InvalidArgumentError, match="C-contiguous"):
            gpu.read(block.address, array)


# Streams and events


def test_events_order_streams(gpu: Gpu) -> None:
    """Without the event the emulator refuses (tests/runtime/emulator/driver/test_pool_blocks.py)."""
    n, other = 1000, gpu.new_stream(priority=-1)
    x, y = gpu.allocate(4 * n), gpu.allocate(4 * n)
    gpu.write(x.address, np.arange(n, dtype=np.float32))
    other.wait(gpu.stream.record())
    with gpu.use(other):
        assert gpu.stream is other
        gpu.launch(launch_of(scale(), n), x.address, y.address, n, 3.0)
    done = other.record()
    gpu.stream.wait(done)
    gpu.launch(launch_of(scale(), n), y.address, y.address, n, 2.0)
    found = np.empty(n, np.float32)
    gpu.read(y.address, found)
    np.testing.assert_array_equal(found, 6 * np.arange(n))
    assert done.is_done()
    assert other.is_done()


def test_timed_events(gpu: Gpu) -> None:
    n = 1000
    x = gpu.allocate(4 * n)
    gpu.fill(x.address, 0, 4 * n)
    start = gpu.stream.record(is_timed=True)
    gpu.launch(launch_of(scale(), n), x.address, x.address, n, 3.0)
    end = gpu.stream.record(is_timed=True)
    end.synchronize()
    assert 0 < end.elapsed_ms(start) < 60_000
    plain = gpu.new_event().record(gpu.stream)
    plain.synchronize()
    with pytest.raises(DriverError):
        plain.elapsed_ms(start)


def test_not_done_yet(fake_gpu: Gpu, fake: FakeDriver) -> None:
    event = fake_gpu.stream.record()
    fake.are_events_done = False
    assert not event.is_done()
    assert not fake_gpu.stream.is_done()
    fake.are_events_done = True
    assert event.is_done()
    fake.failing["cuEventQuery"] = bindings.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(LaunchError):
        event.is_done()


def test_handles_are_destroyed_with_their_objects(fake_gpu: Gpu, fake: FakeDriver) -> None:
    stream = fake_gpu.new_stream()
    event = stream.record()
    fake.failing["cuEventDestroy"] = bindings.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS  # of a context that is lost
    del stream, event
    gc.collect()
    assert (fake.counts["cuStreamDestroy"], fake.counts["cuEventDestroy"]) == (1, 1)


def test_a_process_that_leaves_everything_behind_ends_in_silence() -> None:
    code = """
import sys
from runtime.device.gpu import Gpu
gpu = Gpu.of("emulated:sm_80")
stream = gpu.new_stream()
sys.left_behind = [gpu, stream, stream.record(), gpu.allocate(100), gpu.pinned.allocate(100)]
sys.left_behind.append(sys.left_behind)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Several devices


def test_peers() -> None:
    first = new_gpu()
    second = new_gpu(index=1, driver=first.driver)
    here, there = first.allocate(4000), second.allocate(4000)
    array = np.arange(1000, dtype=np.float32)
    first.write(here.address, array)
    second.fill(there.address, 0, 4000)
    first.copy_to_peer(second, there.address, here.address, 4000)
    found = np.empty_like(array)
    second.read(there.address, found)
    np.testing.assert_array_equal(found, array)
    assert first.enable_peer_access(second)
    assert first.enable_peer_access(second)
    first.launch(launch_of(scale(), 1000), there.address, here.address, 1000, 2.0)
    first.read(here.address, found)
    np.testing.assert_array_equal(found, 2 * array)


def test_peers_that_cannot_reach_each_other(fake: FakeDriver, fake_gpu: Gpu) -> None:
    assert not fake_gpu.enable_peer_access(fake_gpu)


def test_another_devices_memory_needs_peer_access() -> None:
    first = new_gpu()
    second = new_gpu(index=1, driver=first.driver)
    here, there = first.allocate(4000), second.allocate(4000)
    second.fill(there.address, 0, 4000)
    second.synchronize()
    first.launch(launch_of(scale(), 1000), there.address, here.address, 1000, 2.0)
    with pytest.raises(LaunchError, match="peer access"):
        first.synchronize()


# Errors


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (2, DeviceOutOfMemoryError),
        (101, InvalidDeviceError),
        (700, LaunchError),
        (716, LaunchError),
        (900, CaptureError),
        (906, CaptureError),
        (1, DriverError),
        (999, DriverError),
    ],
)
def test_each_status_has_its_error(fake: FakeDriver, code: int, error: type[Exception]) -> None:
    status = bindings.CUresult(code)
    fake.failing["cuMemFree"] = status
    driver = Driver(fake, bindings)
    with pytest.raises(error) as caught:
        driver.call("cuMemFree", 1)
    assert type(caught.value) is error
    for words in ("cuMemFree", status.name, str(code), "as asked by the test"):
        assert words in str(caught.value)
    if isinstance(caught.value, DriverError):
        assert (caught.value.call, caught.value.code, caught.value.name) == ("cuMemFree", code, status.name)


def test_what_a_call_returns(fake: FakeDriver) -> None:
    driver = Driver(fake, bindings)
    assert driver.call("cuCtxSynchronize") is None
    assert driver.call("cuDeviceGetCount") == 2
    assert driver.call("cuMemGetInfo") == (fake.total_bytes, fake.total_bytes)


def test_an_emulated_refusal_gives_its_reason(gpu: Gpu) -> None:
    with pytest.raises(DriverError, match="a size of -5 bytes"):
        gpu.context.call("cuMemAlloc", -5)


def test_a_fault_is_the_cause_and_in_the_text(gpu: Gpu) -> None:
    block = gpu.allocate(4000)
    gpu.launch(launch_of(scale(), 1000), block.address, block.address, 1000, 1.0)
    calls: list[Callable[[], Any]] = [
        gpu.synchronize,
        lambda: gpu.read(block.address, np.empty(1000, np.float32)),
        lambda: gpu.launch(launch_of(scale(), 1000), block.address, block.address, 1000, 1.0),
    ]
    for call in calls:  # a context does not recover
        with pytest.raises(LaunchError, match=r"UNINITIALIZED.*(?s:.)*kernel scale, block") as caught:
            call()
        assert caught.value.__cause__ is gpu.driver.fault()
        assert isinstance(caught.value, DeviceError)
