"""Streams and events of the emulated driver: what is ordered, what is not, and that a missing event is found."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cu

from runtime.emulator.execution.fault import FaultKind
from runtime.emulator.execution.launch import Checks
from runtime.emulator.races.stream_order import DriverFault
from tests.runtime.emulator.driver.driver_harness import Harness, R, config


def fault_of(harness: Harness) -> DriverFault:
    fault = harness.driver.last_fault
    assert isinstance(fault, DriverFault), fault
    return fault


def test_streams_have_flags() -> None:
    harness = Harness()
    stream = harness("cuStreamCreateWithPriority", 1, -9)
    assert harness.status("cuStreamCreateWithPriority", 6, 0) == R.CUDA_ERROR_INVALID_VALUE
    harness("cuStreamDestroy", stream)
    for call in (("cuStreamDestroy", stream), ("cuStreamSynchronize", stream), ("cuStreamQuery", 12345)):
        assert harness.status(*call) == R.CUDA_ERROR_INVALID_HANDLE


def test_a_query_comes_to_an_end() -> None:
    harness = Harness(seed=3)
    address, stream, event = harness("cuMemAlloc", 64), harness.stream(), harness.event()
    harness("cuStreamQuery", stream)
    harness("cuEventQuery", event)  # never recorded
    for _ in range(30):
        harness("cuMemsetD8Async", address, 0, 64, stream)
    harness("cuEventRecord", event, stream)
    answers = [harness.status("cuEventQuery", event) for _ in range(40)]
    first = answers.index(R.CUDA_SUCCESS)
    assert 0 < first < 35
    assert set(answers[:first]) == {R.CUDA_ERROR_NOT_READY}
    assert set(answers[first:]) == {R.CUDA_SUCCESS}
    harness("cuStreamQuery", stream)


def test_destroying_a_stream_or_event_does_not_lose_its_work() -> None:
    harness = Harness()
    address, stream, event = harness("cuMemAlloc", 4), harness.stream(), harness.event()
    harness("cuMemsetD8Async", address, 9, 4, stream)
    harness("cuEventRecord", event, stream)
    other = harness.stream()
    harness("cuStreamWaitEvent", other, event, 0)
    harness("cuEventDestroy", event)
    harness("cuStreamDestroy", stream)
    pinned = harness.pinned(4, np.uint8)
    harness("cuMemcpyDtoHAsync", pinned.ctypes.data, address, 4, other)
    harness("cuStreamSynchronize", other)
    assert pinned.tolist() == [9] * 4
    assert harness.status("cuEventRecord", event, other) == R.CUDA_ERROR_INVALID_HANDLE


def test_events_measure_time() -> None:
    harness = Harness()
    stream, start, end = harness.stream(), harness.event(0), harness.event(0)
    assert harness.status("cuEventElapsedTime", start, end) == R.CUDA_ERROR_INVALID_HANDLE
    harness("cuEventRecord", start, stream)
    harness("cuEventSynchronize", start)
    time.sleep(0.02)
    harness("cuMemsetD8Async", harness("cuMemAlloc", 16), 0, 16, stream)
    harness("cuEventRecord", end, stream)
    assert harness.status("cuEventElapsedTime", start, end) == R.CUDA_ERROR_NOT_READY
    harness("cuEventSynchronize", end)
    assert 19 < harness("cuEventElapsedTime", start, end) < 60_000
    assert harness("cuEventElapsedTime", start, start) == 0
    assert harness("cuEventElapsedTime", end, start) < 0
    untimed = harness.event(2)
    harness("cuEventRecord", untimed, stream)
    harness("cuEventSynchronize", untimed)
    assert harness.status("cuEventElapsedTime", start, untimed) == R.CUDA_ERROR_INVALID_HANDLE
    assert harness.status("cuEventCreate", 8) == R.CUDA_ERROR_INVALID_VALUE
    assert harness.status("cuEventCreate", 4) == R.CUDA_ERROR_INVALID_VALUE
    assert harness.status("cuEventCreate", 6) == R.CUDA_ERROR_NOT_SUPPORTED


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_missing_event_between_streams_is_found_whatever_the_order(is_ordered: bool, seed: int) -> None:
    """One kernel writes y, another in a second stream scales it. With the event the result is the right one."""
    harness = Harness(seed=seed)
    scale, shift = harness.function("scale"), harness.function("shift")
    x = harness.put(np.arange(100, dtype=np.float32))
    y = harness.put(np.zeros(100, np.float32))
    one, two, event = harness.stream(), harness.stream(), harness.event()
    harness.shift(shift, x, y, 100, 1.0, one)
    if is_ordered:
        harness("cuEventRecord", event, one)
        harness("cuStreamWaitEvent", two, event, 0)
    harness.scale(scale, y, 100, 2.0, two)
    if is_ordered:
        np.testing.assert_array_equal(harness.get(y, 100), 2 * (np.arange(100) + 1))
        return
    assert harness.status("cuCtxSynchronize") == R.CUDA_ERROR_LAUNCH_FAILED
    fault = fault_of(harness)
    assert fault.kind == FaultKind.MISSING_EVENT
    assert sorted(fault.works) == ["kernel scale in stream 2", "kernel shift in stream 1"]
    assert y <= fault.address < y + 400
    assert fault.kernel == fault.works[1].split()[1]
    assert "global.f32" in fault.text
    for words in ("missing event between streams", "kernel scale", "kernel shift", "allocation #2", "PTX line"):
        assert words in str(fault)


def test_kernels_that_only_read_the_same_memory_need_no_event() -> None:
    for seed in range(4):
        harness = Harness(seed=seed)
        shift = harness.function("shift")
        x = harness.put(np.arange(200, dtype=np.float32))
        targets = [harness.put(np.zeros(200, np.float32)) for _ in range(3)]
        for index, target in enumerate(targets):
            harness.shift(shift, x, target, 200, index, harness.stream())
        for index, target in enumerate(targets):
            np.testing.assert_array_equal(harness.get(target, 200), np.arange(200) + index)


def test_the_checker_of_streams_works_without_the_others_and_can_be_left_out() -> None:
    for is_checked in (True, False):
        harness = Harness(checks=Checks.NONE, is_order_checked=is_checked)
        shift = harness.function("shift")
        x, y = harness.put(np.zeros(4000, np.float32)), harness.put(np.zeros(4000, np.float32))
        harness.shift(shift, x, y, 4000, 1.0, harness.stream())
        harness.shift(shift, x, y, 4000, 1.0, harness.stream())
        status = harness.status("cuCtxSynchronize")
        assert status == (R.CUDA_ERROR_LAUNCH_FAILED if is_checked else R.CUDA_SUCCESS)


def test_a_copy_that_overtakes_a_kernel_is_found() -> None:
    statuses = set()
    for seed in range(8):
        harness = Harness(seed=seed)
        scale = harness.function("scale")
        x = harness.put(np.ones(64, np.float32))
        harness.scale(scale, x, 64, 3.0, harness.stream())
        statuses.add(harness.status("cuMemcpyDtoHAsync", np.zeros(64, np.float32), x, 256, harness.stream()))
        assert harness.status("cuCtxSynchronize") == R.CUDA_ERROR_LAUNCH_FAILED
        assert fault_of(harness).kind == FaultKind.MISSING_EVENT
        assert "copy of 256 bytes from device to pageable memory" in str(fault_of(harness))
    assert statuses == {R.CUDA_SUCCESS, R.CUDA_ERROR_LAUNCH_FAILED}  # whether the kernel ran before the copy or not


def test_waiting_on_the_host_orders_too() -> None:
    for wait in ("stream", "event", "context", "query"):
        harness = Harness(seed=5)
        scale = harness.function("scale")
        x = harness.put(np.ones(64, np.float32))
        one, two, event = harness.stream(), harness.stream(), harness.event()
        harness.scale(scale, x, 64, 3.0, one)
        harness("cuEventRecord", event, one)
        if wait == "stream":
            harness("cuStreamSynchronize", one)
        elif wait == "event":
            harness("cuEventSynchronize", event)
        elif wait == "context":
            harness("cuCtxSynchronize")
        else:
            while harness.status("cuEventQuery", event) != R.CUDA_SUCCESS:
                pass
        harness.scale(scale, x, 64, 2.0, two)
        assert harness.get(x, 64).tolist() == [6.0] * 64


def test_orders_differ_by_seed_where_nothing_is_checked() -> None:
    results = set()
    for seed in range(12):
        harness = Harness(seed=seed, is_order_checked=False)
        scale, shift = harness.function("scale"), harness.function("shift")
        x = harness.put(np.ones(4, np.float32))
        harness.scale(scale, x, 4, 3.0, harness.stream())
        harness.shift(shift, x, x, 4, 1.0, harness.stream())
        results.add(float(harness.get(x, 4)[0]))
    assert results == {4.0, 6.0}


def test_the_legacy_stream_waits_for_blocking_streams_and_they_for_it() -> None:
    for seed in range(5):
        harness = Harness(seed=seed)
        scale, shift = harness.function("scale"), harness.function("shift")
        x = harness.put(np.ones(4, np.float32))
        one, two = harness.stream(0), harness.stream(0)
        harness.scale(scale, x, 4, 3.0, one)
        harness.shift(shift, x, x, 4, 1.0, 0)
        harness.scale(scale, x, 4, 5.0, two)
        harness("cuStreamSynchronize", cu.CUstream(cu.CU_STREAM_LEGACY))
        assert harness.get(x, 4).tolist() == [20.0] * 4
    harness.scale(scale, x, 4, 3.0, 0)
    harness.scale(scale, x, 4, 3.0, harness.stream(1))  # a non-blocking one does not wait
    assert harness.status("cuCtxSynchronize") == R.CUDA_ERROR_LAUNCH_FAILED


def test_events_between_devices() -> None:
    harness = Harness(num_devices=2)
    first = harness("cuMemAlloc", 4)
    one, event = harness.stream(), harness.event()
    harness("cuMemsetD8Async", first, 7, 4, one)
    harness("cuEventRecord", event, one)
    other = harness.use(1)
    second, two = harness("cuMemAlloc", 4), harness.stream()
    assert harness.status("cuEventRecord", event, two) == R.CUDA_ERROR_INVALID_HANDLE
    harness("cuStreamWaitEvent", two, event, 0)
    harness("cuMemcpyPeerAsync", second, other, first, harness.context, 4, two)
    assert harness.get(second, 4, np.uint8).tolist() == [7] * 4


def test_waiting_twice_and_recording_again() -> None:
    """A wait is for what the event stood for when it was asked."""
    harness = Harness()
    scale = harness.function("scale")
    x, y = harness.put(np.ones(4, np.float32)), harness.put(np.ones(4, np.float32))
    one, two, event = harness.stream(), harness.stream(), harness.event()
    harness.scale(scale, x, 4, 3.0, one)
    harness("cuEventRecord", event, one)
    harness("cuStreamWaitEvent", two, event, 0)
    harness.scale(scale, y, 4, 3.0, one)
    harness("cuEventRecord", event, one)
    harness.scale(scale, x, 4, 3.0, two)
    harness.scale(scale, y, 4, 3.0, two)  # the second record was not waited for
    assert harness.status("cuCtxSynchronize") == R.CUDA_ERROR_LAUNCH_FAILED
    assert y <= fault_of(harness).address < y + 32
    assert harness.status("cuStreamWaitEvent", two, event, 1) == R.CUDA_ERROR_LAUNCH_FAILED


TOUCHES = {
    "ld.global.nc.v4.u32 {{%r1, %r2, %r3, %r4}}, [%x+16];": False,
    "ld.u64 %y, [%x+8];": False,
    "st.global.v2.u64 [%x], {{%z, %z}};": True,
    "red.global.add.u32 [%x+4], %r0;": True,
    "atom.global.exch.b32 %r1, [%x+4], %r0;": True,
    "cp.async.ca.shared.global [tile], [%x], 16;": False,
    "cp.async.bulk.global.shared::cta.bulk_group [%x], [tile], 16;": True,
}


@pytest.mark.parametrize("statement", TOUCHES)
def test_every_way_to_touch_memory_is_seen(statement: str) -> None:
    """A fill in one stream, the instruction in another; and, of those that only read, twice the instruction."""
    text = (
        ".version 8.3\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 p) {\n"
        ".reg .b64 %x, %y, %z; .reg .b32 %r<5>; .shared .align 16 .b8 tile[16];\n"
        "mov.u64 %z, 0; mov.u32 %r0, 1; ld.param.u64 %x, [p]; st.shared.v2.u64 [tile], {%z, %z};\n"
        "fence.proxy.async;\n" + statement.format() + "\ncp.async.wait_all; cp.async.bulk.commit_group;\n"
        "cp.async.bulk.wait_group 0;\nret; }\n"
    )

    def run(*actions: str) -> Any:
        harness = Harness("sm_90a", seed=4)
        function, x = harness.function("k", text), harness.put(np.zeros(64, np.uint32))
        params = ((x,), (ctypes.c_uint64,))
        for action in actions:
            stream = harness.stream()
            if action == "fill":
                harness("cuMemsetD8Async", x, 0, 32, stream)
            else:
                harness("cuLaunchKernelEx", config((1, 1, 1), (1, 1, 1), stream), function, params, 0)
            if "waited" in actions:
                harness("cuStreamSynchronize", stream)
        return harness.status("cuCtxSynchronize"), harness.driver.last_fault

    status, fault = run("fill", "kernel")
    assert status == R.CUDA_ERROR_LAUNCH_FAILED
    assert isinstance(fault, DriverFault), fault
    assert fault.kind == FaultKind.MISSING_EVENT
    status, fault = run("kernel", "kernel")
    assert (status == R.CUDA_SUCCESS) is not TOUCHES[statement], fault
