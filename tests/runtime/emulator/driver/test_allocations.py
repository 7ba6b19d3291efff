"""Memory of the emulated driver: allocation, copies and when they happen, fills, what pointers are, leaks."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cu

from runtime.emulator.execution.fault import FaultKind
from runtime.emulator.races.stream_order import DriverFault
from tests.runtime.emulator.driver.driver_harness import MEMORY_BYTES, Harness, R

P = cu.CUpointer_attribute


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_allocation_is_bounded_and_counted(harness: Harness) -> None:
    free, total = harness("cuMemGetInfo")
    assert (free, total) == (MEMORY_BYTES, MEMORY_BYTES)
    address = harness("cuMemAlloc", 1000)
    assert isinstance(address, cu.CUdeviceptr)
    assert int(address) % 256 == 0
    assert harness("cuMemGetInfo")[0] == MEMORY_BYTES - 1000
    assert harness.status("cuMemAlloc", MEMORY_BYTES) == R.CUDA_ERROR_OUT_OF_MEMORY
    assert f"{MEMORY_BYTES:,} bytes" in harness.driver.last_reason
    assert harness.status("cuMemAlloc", 0) == R.CUDA_ERROR_INVALID_VALUE
    harness("cuMemFree", address)
    assert harness("cuMemGetInfo")[0] == MEMORY_BYTES
    harness("cuMemFree", 0)


def test_only_the_start_of_an_allocation_is_freed_and_only_once(harness: Harness) -> None:
    address = int(harness("cuMemAlloc", 1000))
    assert harness.status("cuMemFree", address + 8) == R.CUDA_ERROR_INVALID_VALUE
    assert "8 bytes into allocation #1" in harness.driver.last_reason
    assert harness.status("cuMemFree", harness("cuMemHostAlloc", 100, 0)) == R.CUDA_ERROR_INVALID_VALUE
    harness("cuMemFree", address)
    assert harness.status("cuMemFree", address) == R.CUDA_ERROR_INVALID_VALUE
    assert "freed" in harness.driver.last_reason


def test_copies_there_and_back(harness: Harness) -> None:
    source = np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8)
    a, b, stream = harness("cuMemAlloc", 5000), harness("cuMemAlloc", 5000), harness.stream()
    out = np.zeros_like(source)
    harness("cuMemcpyHtoDAsync", a, source, 5000, stream)
    harness("cuMemcpyDtoDAsync", b, a, 5000, stream)
    harness("cuMemcpyDtoHAsync", out, b, 5000, stream)
    np.testing.assert_array_equal(out, source)
    harness("cuMemcpyDtoHAsync", out.ctypes.data + 100, int(b) + 4000, 50, stream)  # addresses as numbers
    np.testing.assert_array_equal(out[100:150], source[4000:4050])
    harness("cuMemcpyHtoDAsync", int(a) + 10, bytes(range(50)), 50, stream)
    harness("cuMemcpyDtoHAsync", out, a, 5000, stream)
    assert out[10:60].tolist() == list(range(50))
    harness("cuMemcpyHtoDAsync", 0, 0, 0, stream)  # nothing to do


@pytest.mark.parametrize("size", [101, 4096])
def test_copies_outside_of_an_allocation_are_refused(harness: Harness, size: int) -> None:
    address, host = harness("cuMemAlloc", 100), np.zeros(size, np.uint8)
    for call in (
        ("cuMemcpyHtoDAsync", address, host, size),
        ("cuMemcpyDtoHAsync", host, address, size),
        ("cuMemcpyDtoDAsync", address, address, size),
        ("cuMemsetD8Async", address, 0, size),
        ("cuMemcpyHtoDAsync", host.ctypes.data, host, size),
        ("cuMemcpyHtoDAsync", 0, host, size),
    ):
        assert harness.status(*call, 0) == R.CUDA_ERROR_INVALID_VALUE
    assert harness.driver.last_fault is None


def test_fills(harness: Harness) -> None:
    address, stream = int(harness("cuMemAlloc", 64)), harness.stream()
    harness("cuMemsetD8Async", address, 7, 64, stream)
    harness("cuMemsetD8Async", address + 2, 0x134, 3, stream)
    harness("cuMemsetD8Async", address, 0, 0, stream)
    assert harness.get(address, 64, np.uint8).tolist() == [7, 7, 0x34, 0x34, 0x34, *[7] * 59]


def test_pageable_memory_is_read_at_once_and_pinned_memory_late(harness: Harness) -> None:
    address, stream = harness("cuMemAlloc", 400), harness.stream()
    pageable = np.ones(100, np.float32)
    harness("cuMemcpyHtoDAsync", address, pageable, 400, stream)
    pageable[:] = 5
    assert harness.get(address, 100).max() == 1
    pinned = harness.pinned(100)
    pinned[:] = 2
    harness("cuMemcpyHtoDAsync", address, pinned.ctypes.data, 400, stream)
    pinned[:] = 9  # too early: the copy has not run
    assert harness.get(address, 100).min() == 9


def test_pinned_memory_is_written_late(harness: Harness) -> None:
    address = harness.put(np.full(10, 3, np.float32))
    stream, pinned = harness.stream(), harness.pinned(10)
    assert set(pinned.view(np.uint8)) == {0xA5}
    harness("cuMemcpyDtoHAsync", pinned.ctypes.data, address, 40, stream)
    assert set(pinned.view(np.uint8)) == {0xA5}
    harness("cuStreamSynchronize", stream)
    assert pinned.tolist() == [3] * 10


def test_host_memory_of_the_driver(harness: Harness) -> None:
    address = harness("cuMemHostAlloc", 100, 0)
    assert isinstance(address, int)
    ctypes.memset(address, 1, 100)
    assert harness("cuMemGetInfo")[0] == MEMORY_BYTES
    assert harness.status("cuMemHostAlloc", 100, 64) == R.CUDA_ERROR_INVALID_VALUE


def test_copies_between_devices() -> None:
    harness = Harness(num_devices=2)
    first = harness.put(np.arange(10, dtype=np.float32))
    other = harness.use(1)
    second, stream = harness("cuMemAlloc", 40), harness.stream()
    harness("cuMemcpyPeerAsync", second, other, first, harness.context, 40, stream)
    assert harness.get(second, 10).tolist() == list(range(10))
    assert harness.status("cuMemcpyPeerAsync", second, harness.context, first, other, 40, stream) == (
        R.CUDA_ERROR_INVALID_VALUE
    )
    assert harness.status("cuMemcpyPeerAsync", second, 0, first, other, 40, stream) == R.CUDA_ERROR_INVALID_CONTEXT
    assert harness.status("cuMemcpyPeerAsync", second, other, first, harness.context, 44, stream) == (
        R.CUDA_ERROR_INVALID_VALUE
    )


def test_freeing_waits_for_the_context(harness: Harness) -> None:
    stream, address = harness.stream(), harness("cuMemAlloc", 400)
    harness("cuMemsetD8Async", address, 1, 400, stream)
    harness("cuMemFree", address)
    harness("cuCtxSynchronize")


def test_leaks_are_named_with_their_place(harness: Harness) -> None:
    harness("cuMemAlloc", 1234)
    kept = harness("cuMemAlloc", 99)
    harness("cuMemHostAlloc", 555, 0)
    harness("cuMemFree", kept)
    with pytest.raises(DriverFault) as caught:
        harness.driver.close()
    assert caught.value.kind == FaultKind.LEAK
    assert "1,234 bytes" in str(caught.value)
    assert "555 bytes" in str(caught.value)
    assert "driver_harness.py" in str(caught.value)
    assert "99 bytes" not in str(caught.value)


def test_a_clean_program_ends_without_a_word(harness: Harness) -> None:
    address = harness("cuMemAlloc", 1234)
    harness("cuMemFree", address)
    harness.driver.close()
    assert harness.status("cuMemAlloc", 1) == R.CUDA_ERROR_NOT_INITIALIZED


def batch(sizes: list[int], targets: list[int], sources: list[int]) -> tuple[Any, ...]:
    """The arguments of cuMemcpyBatchAsync without the stream."""
    attributes = cu.CUmemcpyAttributes()
    attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    pointers = [[cu.CUdeviceptr(address) for address in addresses] for addresses in (targets, sources)]
    return *pointers, sizes, len(sizes), [attributes], [0], 1


def test_a_batch_of_copies_in_all_directions(harness: Harness) -> None:
    device, pinned = int(harness("cuMemAlloc", 1000)), harness("cuMemHostAlloc", 1000, 0)
    host = np.ctypeslib.as_array((ctypes.c_uint8 * 1000).from_address(pinned))
    host[:] = np.arange(1000) % 251
    stream = harness.stream()
    harness("cuMemcpyHtoDAsync", device, pinned, 500, stream)
    targets, sources = [device + 500, device + 600, pinned + 700], [pinned + 100, device + 10, device + 200]
    harness("cuMemcpyBatchAsync", *batch([50, 60, 70], targets, sources), stream)
    host[100:150] = 7  # what the stream has not come to yet may be changed
    harness("cuStreamSynchronize", stream)
    out = np.zeros(160, np.uint8)
    harness("cuMemcpyDtoHAsync", out[:50], device + 500, 50, stream)
    harness("cuMemcpyDtoHAsync", out[50:110], device + 600, 60, stream)
    assert (out[:50] == 7).all()
    np.testing.assert_array_equal(out[50:110], np.arange(10, 70))
    np.testing.assert_array_equal(host[700:770], np.arange(200, 270) % 251)


def test_batches_that_cuda_leaves_open_or_refuses(harness: Harness) -> None:
    a, b = int(harness("cuMemAlloc", 1000)), int(harness("cuMemAlloc", 1000))
    stream = harness.stream()

    def status(*arguments: Any, on: Any = stream) -> Any:
        return harness.status("cuMemcpyBatchAsync", *arguments, on)

    invalid = R.CUDA_ERROR_INVALID_VALUE
    assert status(*batch([10, 10], [a, a + 10], [b, b])) == R.CUDA_SUCCESS  # two may read the same
    for sizes, targets, sources in (
        ([10, 10], [a, a + 9], [b, b + 10]),  # two write one byte
        ([10, 10], [a, b + 5], [b, b + 100]),  # the second writes what the first reads
        ([10, 10], [a, b], [b + 50, a + 9]),  # the second reads what the first writes
        ([10], [a], [a]),
    ):
        assert status(*batch(sizes, targets, sources)) == invalid
        assert "overlap" in harness.driver.last_reason
    assert status(*batch([10, 0], [a, a + 10], [b, b])) == invalid
    assert status(*batch([10], [a, a + 10], [b, b])) == invalid
    assert status(*batch([], [], [])) == invalid
    assert status(*batch([1000], [a + 1], [b])) == invalid
    assert status(*batch([10], [a], [b]), on=0) == invalid
    good = batch([10], [a], [b])
    assert status(*good[:4], [], [], 0) == invalid
    assert status(*good[:5], [1], 1) == invalid
    assert status(*good[:4], [cu.CUmemcpyAttributes()], [0], 1) == R.CUDA_ERROR_NOT_SUPPORTED
    pageable = np.zeros(10, np.uint8)
    assert status(*batch([10], [a], [pageable.ctypes.data])) == R.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises(TypeError, match="CUdeviceptr"):
        status([a], [b], *good[2:])
    harness("cuStreamBeginCapture", stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    assert status(*good) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED


def test_a_batch_is_watched_like_its_copies(harness: Harness) -> None:
    a, b = int(harness("cuMemAlloc", 1000)), int(harness("cuMemAlloc", 1000))
    one, two = harness.stream(), harness.stream()
    harness("cuMemsetD8Async", b + 500, 1, 100, one)
    harness("cuMemcpyBatchAsync", *batch([10, 10], [a, a + 100], [b, b + 550]), two)
    assert harness.status("cuCtxSynchronize") == R.CUDA_ERROR_LAUNCH_FAILED
    fault = harness.driver.last_fault
    assert isinstance(fault, DriverFault)
    assert fault.kind is FaultKind.MISSING_EVENT
    assert any("batch of 2 copies" in label for label in fault.works)
