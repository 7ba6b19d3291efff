"""Capture of streams into graphs, replay, changed arguments; and each way in which a capture is broken."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cu

from runtime.emulator.execution.fault import FaultKind
from runtime.emulator.races.stream_order import DriverFault
from tests.runtime.emulator.driver.driver_harness import Harness, R, config

MODE = cu.CUstreamCaptureMode
GLOBAL, THREAD_LOCAL, RELAXED = (
    MODE.CU_STREAM_CAPTURE_MODE_GLOBAL, MODE.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, MODE.CU_STREAM_CAPTURE_MODE_RELAXED,
)  # fmt: skip
NODE = cu.CUgraphNodeType
COUNT = 64


class Case(Harness):
    """A harness with two kernels, two arrays of ones and a stream."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scale_kernel, self.shift_kernel = self.function("scale"), self.function("shift")
        self.x, self.y = (self.put(np.ones(COUNT, np.float32)) for _ in range(2))
        self.s = self.stream()

    def times(self, address: int, factor: float, stream: Any = None) -> None:
        self.scale(self.scale_kernel, address, COUNT, factor, stream or self.s)

    def plus(self, source: int, target: int, term: float, stream: Any = None) -> None:
        self.shift(self.shift_kernel, source, target, COUNT, term, stream or self.s)

    def begin(self, mode: Any = THREAD_LOCAL, stream: Any = None) -> None:
        self("cuStreamBeginCapture", stream or self.s, mode)

    def end(self) -> Any:
        return self("cuStreamEndCapture", self.s)

    def replay(self, graph: Any, times: int = 1) -> Any:
        executable = self("cuGraphInstantiate", graph, 0)
        self("cuGraphUpload", executable, self.s)
        for _ in range(times):
            self("cuGraphLaunch", executable, self.s)
        return executable

    def values(self, address: int) -> float:
        found = self.get(address, COUNT)
        assert (found == found[0]).all()
        return float(found[0])

    def nodes(self, graph: Any) -> list[Any]:
        _, count = self("cuGraphGetNodes", graph)
        return list(self("cuGraphGetNodes", graph, count)[0])


def test_what_is_captured_does_not_run_and_is_replayed() -> None:
    case = Case()
    case.begin()
    case.times(case.x, 3.0)
    case.plus(case.x, case.y, 1.0)
    graph = case.end()
    assert case.values(case.x) == 1.0
    executable = case.replay(graph, 3)
    assert (case.values(case.x), case.values(case.y)) == (27.0, 28.0)
    case("cuGraphExecDestroy", executable)
    assert case.status("cuGraphLaunch", executable, case.s) == R.CUDA_ERROR_INVALID_VALUE
    case("cuGraphDestroy", graph)
    assert case.status("cuGraphDestroy", graph) == R.CUDA_ERROR_INVALID_VALUE
    assert case.status("cuGraphInstantiate", graph, 0) == R.CUDA_ERROR_INVALID_VALUE


def test_nodes_edges_and_types() -> None:
    case = Case()
    pinned = case.pinned(COUNT)
    case.begin()
    case("cuMemsetD8Async", case.x, 0, 4 * COUNT, case.s)
    case("cuMemcpyDtoHAsync", pinned.ctypes.data, case.x, 4 * COUNT, case.s)
    case.times(case.x, 2.0)
    graph = case.end()
    nodes = case.nodes(graph)
    kinds = [case("cuGraphNodeGetType", node) for node in nodes]
    assert kinds == [
        NODE.CU_GRAPH_NODE_TYPE_MEMSET, NODE.CU_GRAPH_NODE_TYPE_MEMCPY, NODE.CU_GRAPH_NODE_TYPE_KERNEL,
    ]  # fmt: skip
    assert case("cuGraphGetEdges", graph)[3] == 2
    sources, targets, data, count = case("cuGraphGetEdges", graph, 3)
    assert ([int(n) for n in sources[:2]], [int(n) for n in targets[:2]]) == (
        [int(n) for n in nodes[:2]], [int(n) for n in nodes[1:]],
    )  # fmt: skip
    assert (int(sources[2]), len(data), count) == (0, 3, 2)
    assert case.status("cuGraphNodeGetType", 5) == R.CUDA_ERROR_INVALID_VALUE


@pytest.mark.parametrize("seed", range(6))
def test_fork_and_join_by_events(seed: int) -> None:
    case = Case(seed=seed)
    other, fork, join = case.stream(), case.event(), case.event()
    case.begin()
    case("cuEventRecord", fork, case.s)
    case("cuStreamWaitEvent", other, fork, 0)
    case.times(case.x, 3.0)
    case.times(case.x, 2.0)
    case.times(case.y, 5.0, other)
    case("cuEventRecord", join, other)
    case("cuStreamWaitEvent", case.s, join, 0)
    case.plus(case.x, case.y, 1.0)
    graph = case.end()
    assert case("cuGraphGetEdges", graph)[3] == 3
    _, targets, _, _ = case("cuGraphGetEdges", graph, 3)
    assert [int(node) for node in targets].count(int(case.nodes(graph)[3])) == 2
    case.replay(graph, 2)
    assert (case.values(case.x), case.values(case.y)) == (36.0, 37.0)


def test_what_follows_a_replay_comes_after_all_its_branches() -> None:
    for seed in range(6):
        case = Case(seed=seed)
        other, fork, join = case.stream(), case.event(), case.event()
        case.begin()
        case("cuEventRecord", fork, case.s)
        case("cuStreamWaitEvent", other, fork, 0)
        case.times(case.x, 3.0)
        case.times(case.y, 5.0, other)
        case("cuEventRecord", join, other)
        case("cuStreamWaitEvent", case.s, join, 0)  # and nothing after it: two ends
        executable = case.replay(case.end())
        case.plus(case.y, case.y, 1.0)
        case("cuGraphLaunch", executable, case.s)
        assert (case.values(case.x), case.values(case.y)) == (9.0, 30.0)


@pytest.mark.parametrize("has_root", [False, True])
def test_branches_of_a_graph_that_touch_the_same_memory_are_found(has_root: bool) -> None:
    for seed in range(4):
        case = Case(seed=seed)
        other, fork, join = case.stream(), case.event(), case.event()
        case.begin()
        if has_root:
            case.times(case.y, 1.0)
        case("cuEventRecord", fork, case.s)
        case("cuStreamWaitEvent", other, fork, 0)
        case.times(case.x, 3.0)
        case.plus(case.x, case.y, 5.0, other)
        case("cuEventRecord", join, other)
        case("cuStreamWaitEvent", case.s, join, 0)
        case.replay(case.end())
        assert case.status("cuCtxSynchronize") == R.CUDA_ERROR_LAUNCH_FAILED
        fault = case.driver.last_fault
        assert isinstance(fault, DriverFault)
        assert fault.kind == FaultKind.MISSING_EVENT
        assert sorted(fault.works) == [
            "kernel scale of a graph in stream 1", "kernel shift of a graph in stream 1",
        ]  # fmt: skip


def test_a_replay_is_ordered_with_its_stream_and_not_with_others() -> None:
    case = Case()
    case.begin()
    case.times(case.x, 3.0)
    graph = case.end()
    case.plus(case.x, case.x, 1.0)
    executable = case.replay(graph, 2)
    case.plus(case.x, case.x, 1.0)
    assert case.values(case.x) == 19.0
    case("cuGraphLaunch", executable, case.s)
    case.times(case.x, 2.0, case.stream())
    assert case.status("cuCtxSynchronize") == R.CUDA_ERROR_LAUNCH_FAILED


def test_an_executable_graph_never_overlaps_itself() -> None:
    case = Case()
    case.begin()
    case.times(case.x, 3.0)
    executable = case.replay(case.end())
    case("cuGraphLaunch", executable, case.stream())  # ordered after the launch in the first stream
    assert case.values(case.x) == 9.0


def test_what_a_kernel_node_launches() -> None:
    case = Case()
    case.begin()
    case.times(case.x, 3.0)
    case("cuMemsetD8Async", case.x, 0, 4, case.s)
    kernel, fill = case.nodes(case.end())
    params = case("cuGraphKernelNodeGetParams", kernel)
    assert int(params.func) == int(case.scale_kernel)
    assert (params.gridDimX, params.blockDimX, params.sharedMemBytes) == (1, 64, 0)
    assert case.status("cuGraphKernelNodeGetParams", fill) == R.CUDA_ERROR_INVALID_VALUE


def test_a_dependent_launch_keeps_its_edge() -> None:
    case = Case(devices="sm_90a")
    case.begin()
    case.times(case.x, 2.0)
    made = config((1, 1, 1), (COUNT, 1, 1), case.s, dependent=1)
    params = ((case.y, COUNT, 2.0), (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float))
    case("cuLaunchKernelEx", made, case.scale_kernel, params, 0)
    _, _, (edge,), _ = case("cuGraphGetEdges", case.end(), 1)
    assert edge.type == int(cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    assert edge.from_port == 1


UNSAFE = {
    "cuMemAlloc": (16,),
    "cuMemFree": (0,),
    "cuMemHostAlloc": (16, 0),
    "cuModuleLoadData": (b"",),
    "cuEventQuery": ("event",),
    "cuEventSynchronize": ("event",),
    "cuStreamSynchronize": ("other",),
    "cuStreamQuery": ("other",),
    "cuStreamSynchronize ": ("own",),
    "cuStreamQuery ": ("own",),
    "cuCtxSynchronize": (),
}


@pytest.mark.parametrize("name", UNSAFE)
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL])
def test_unsafe_calls_are_refused_and_break_the_capture(name: str, mode: Any) -> None:
    case = Case()
    event, other = case.event(), case.stream()
    case("cuEventRecord", event, other)
    named = {"event": event, "other": other, "own": case.s}
    arguments = [named.get(value, value) if isinstance(value, str) else value for value in UNSAFE[name]]
    case.begin(mode)
    case.times(case.x, 2.0)
    assert case.status(name.strip(), *arguments) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    with pytest.raises(AssertionError, match="INVALIDATED"):
        case.times(case.x, 2.0)
    assert case.status("cuStreamEndCapture", case.s) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    assert name.strip() in case.driver.last_reason
    case.times(case.x, 2.0)  # the stream is an ordinary one again
    assert case.values(case.x) == 2.0


def test_a_relaxed_capture_lets_unsafe_calls_pass() -> None:
    case = Case()
    case.begin(RELAXED)
    case.times(case.x, 2.0)
    case("cuMemAlloc", 16)
    case("cuEventQuery", case.event())
    case("cuStreamSynchronize", case.stream())
    assert case.status("cuStreamSynchronize", case.s) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED  # but never this
    assert case.status("cuStreamEndCapture", case.s) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


@pytest.mark.parametrize(("mode", "is_allowed"), [(GLOBAL, False), (THREAD_LOCAL, True), (RELAXED, True)])
def test_other_threads(mode: Any, is_allowed: bool) -> None:
    case = Case()
    case.begin(mode)
    case.times(case.x, 2.0)
    statuses = []

    def other() -> None:
        case("cuCtxSetCurrent", case.context)
        if mode == THREAD_LOCAL:
            statuses.append(case.status("cuStreamEndCapture", case.s))
        statuses.append(case.status("cuMemAlloc", 16))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert statuses[-1] == (R.CUDA_SUCCESS if is_allowed else R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    if mode == THREAD_LOCAL:
        assert statuses[0] == R.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
    end = case.status("cuStreamEndCapture", case.s)
    assert end == (R.CUDA_SUCCESS if is_allowed else R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)


def test_a_stream_that_was_not_joined() -> None:
    case = Case()
    other, fork = case.stream(), case.event()
    case.begin()
    case("cuEventRecord", fork, case.s)
    case("cuStreamWaitEvent", other, fork, 0)
    case.times(case.x, 2.0)
    case.times(case.y, 2.0, other)
    assert case.status("cuStreamEndCapture", other) == R.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
    case = Case()
    other, fork = case.stream(), case.event()
    case.begin()
    case("cuEventRecord", fork, case.s)
    case("cuStreamWaitEvent", other, fork, 0)
    case.times(case.y, 2.0, other)
    assert case.status("cuStreamEndCapture", case.s) == R.CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    case.times(case.y, 2.0, other)  # no longer captured
    assert case.values(case.y) == 2.0


def test_what_was_recorded_outside_cannot_be_waited_for() -> None:
    case = Case()
    event = case.event()
    case("cuEventRecord", event, case.stream())
    case.begin()
    assert case.status("cuStreamWaitEvent", case.s, event, 0) == R.CUDA_ERROR_STREAM_CAPTURE_ISOLATION
    assert case.status("cuStreamEndCapture", case.s) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


def test_two_captures_cannot_become_one() -> None:
    case = Case()
    other, event = case.stream(), case.event()
    case.begin(RELAXED)
    case.begin(RELAXED, other)
    case("cuEventRecord", event, other)
    assert case.status("cuStreamWaitEvent", case.s, event, 0) == R.CUDA_ERROR_STREAM_CAPTURE_MERGE
    for stream in (case.s, other):
        assert case.status("cuStreamEndCapture", stream) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


def test_events_of_a_capture_are_no_events_of_the_host() -> None:
    case = Case()
    event = case.event()
    case.begin()
    case("cuEventRecord", event, case.s)
    assert case.status("cuEventQuery", event) == R.CUDA_ERROR_CAPTURED_EVENT
    assert case.status("cuStreamEndCapture", case.s) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    assert case.status("cuEventSynchronize", event) == R.CUDA_ERROR_CAPTURED_EVENT
    assert case.status("cuStreamWaitEvent", case.s, event, 0) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    case("cuEventRecord", event, case.s)
    case("cuEventSynchronize", event)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_the_legacy_stream_while_another_is_captured(is_blocking: bool) -> None:
    case = Case()
    stream = case.stream(0 if is_blocking else 1)
    case.begin(THREAD_LOCAL, stream)
    case.times(case.x, 2.0, stream)
    params = ((case.y, COUNT, 2.0), (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float))
    status = case.status("cuLaunchKernelEx", config((1, 1, 1), (64, 1, 1)), case.scale_kernel, params, 0)
    assert status == (R.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT if is_blocking else R.CUDA_SUCCESS)
    end = case.status("cuStreamEndCapture", stream)
    assert end == (R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED if is_blocking else R.CUDA_SUCCESS)
    assert case.status("cuStreamBeginCapture", 0, RELAXED) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED


def test_state_of_a_capture() -> None:
    case = Case()
    assert case.status("cuStreamEndCapture", case.s) == R.CUDA_ERROR_ILLEGAL_STATE
    assert case.status("cuStreamBeginCapture", case.s, 7) == R.CUDA_ERROR_INVALID_VALUE
    case.begin()
    assert case.status("cuStreamBeginCapture", case.s, RELAXED) == R.CUDA_ERROR_ILLEGAL_STATE
    graph = case.driver.captures[0].graph.handle
    assert case.status("cuGraphDestroy", graph) == R.CUDA_ERROR_INVALID_VALUE
    assert case.status("cuGraphInstantiate", graph, 0) == R.CUDA_ERROR_INVALID_VALUE
    assert case.nodes(case.end()) == []


def test_pageable_memory_and_what_is_not_emulated() -> None:
    for call in (
        ("cuMemcpyHtoDAsync", "x", np.zeros(4, np.float32), 16, "s"),
        ("cuMemcpyDtoHAsync", np.zeros(4, np.float32), "x", 16, "s"),
    ):
        case = Case()
        case.begin(RELAXED)
        arguments = [getattr(case, value) if isinstance(value, str) else value for value in call[1:]]
        assert case.status(call[0], *arguments) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        assert case.status("cuStreamEndCapture", case.s) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    case.begin()
    case.times(case.x, 1.0)
    executable = case.replay(case.end())
    case.begin()
    assert case.status("cuGraphLaunch", executable, case.s) == R.CUDA_ERROR_NOT_SUPPORTED
    assert case.status("cuGraphUpload", executable, case.s) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    case.end()


def test_a_destroyed_stream_breaks_its_capture() -> None:
    case = Case()
    other, fork = case.stream(), case.event()
    case.begin()
    case("cuEventRecord", fork, case.s)
    case("cuStreamWaitEvent", other, fork, 0)
    case("cuStreamDestroy", other)
    assert case.status("cuStreamEndCapture", case.s) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    case.begin()
    case("cuStreamDestroy", case.s)
    assert case.driver.captures == []
    case("cuCtxSynchronize")
