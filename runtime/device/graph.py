"""Graphs: work that is recorded once from a stream, and then launched whole.

    graph = Graph.capture(gpu, lambda: step(tensors))    # runs once eagerly, then once recorded
    graph.replay()

A captured stream allows no allocation, release, query or wait. So the work first runs once for real:
that compiles and loads its kernels and fills a pool of memory that is the graph's own. Then it is recorded, in the
thread-local mode, taking its memory from that pool; if that is full, the recording ends, the pool grows, and it begins
again. The addresses in the recorded launches stay valid because the pool stays reserved as long as the graph.

Graphs may share a pool (`GraphPool`), as the decode graphs of several batch sizes do: then they overwrite each other's
intermediate results, and each replay waits on the device for the one before it.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-graphs
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from graphlib import TopologicalSorter
from typing import Any

from runtime.collector import NO_COLLECTION
from runtime.device.context import Stream
from runtime.device.errors import CaptureError, PoolTooSmallError
from runtime.device.gpu import Gpu
from runtime.device.kernel import Kernel
from runtime.errors import DeviceError

MOST_ATTEMPTS = 8
"""Most retries of a recording whose pool had to grow."""


class GraphPool:
    """The memory of one graph, or of several that never run at the same time. Freed with the last of them."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.memory = gpu.allocator.new_private_pool(gpu.stream)
        self._last_stream: Stream | None = None

    @property
    def reserved_bytes(self) -> int:
        """The pool's share of the device's memory, in bytes."""
        return sum(self.memory.segments.values())

    def order(self, stream: Stream) -> None:
        """Lets later work on `stream` wait for the last work that used the pool."""
        last = self._last_stream
        if last is not stream:
            if last is not None:
                stream.wait(last.record())
            self._last_stream = stream

    def synchronize(self) -> None:
        """Waits for the last work that used the pool."""
        if self._last_stream is not None:
            self._last_stream.synchronize()

    def __del__(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        if (memory := getattr(self, "memory", None)) and not is_over():
            with contextlib.suppress(DeviceError):
                self.gpu.allocator.drop(memory)


class Graph:
    """Recorded work. Freed with the object, after its last replay.

    Attributes:
        pool: its memory.
        result: the work's return value from the recording; each replay writes its results into these tensors.
        num_nodes: kernels, copies and fills.
    """

    def __init__(self, pool: GraphPool, graph: Any, result: Any, retained: list[Any]) -> None:
        """Called by `capture`. Takes the recorded graph over."""
        self.pool = pool
        self.result = result
        self._gpu = pool.gpu
        self._retained = retained
        self._graph = graph
        self._exec: Any = None
        context = self._gpu.context
        kinds = context.driver.types.CUgraphNodeType
        nodes = [(node, context.call("cuGraphNodeGetType", node)) for node in _in_order(self._gpu, graph)]
        self.num_nodes = sum(kind != kinds.CU_GRAPH_NODE_TYPE_EMPTY for _, kind in nodes)
        self._kernel_nodes = [node for node, kind in nodes if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL]
        self._exec = context.call("cuGraphInstantiate", graph, 0)
        context.call("cuGraphUpload", self._exec, self._gpu.stream.handle)
        self._launch = context.driver.api.cuGraphLaunch

    @staticmethod
    def capture(gpu: Gpu, work: Callable[[], Any], *, pool: GraphPool | None = None, is_chained: bool = False) -> Graph:
        """Runs `work` once on the device's stream, then records it from there.

        `work` must launch the same kernels each time, copy only from and to pinned memory, and not wait. Its memory
        from `Gpu.allocate` lies in `pool`, or in a new one for None. With `is_chained` its kernels are recorded as in
        `Gpu.chained`.

        Raises:
            CaptureError: where it does something that cannot be recorded.
            DeviceOutOfMemoryError: where there is no room for its memory.
            The errors of `work`.
        """
        pool = pool or GraphPool(gpu)
        stream = gpu.stream
        pool.order(stream)
        with gpu.allocator.redirect(stream, pool.memory):
            work()
            stream.synchronize()
            for _ in range(MOST_ATTEMPTS):
                gpu.allocator.begin_capture(pool.memory)
                missing = 0
                try:
                    with gpu.chained() if is_chained else contextlib.nullcontext():
                        graph, result = _record(gpu, stream, work)
                except PoolTooSmallError as error:
                    missing = error.missing_bytes
                finally:
                    retained = gpu.allocator.end_capture()
                    if missing:
                        gpu.allocator.forget(retained)
                if not missing:
                    return Graph(pool, graph, result, retained)
                gpu.allocator.enlarge(pool.memory, missing)
        raise CaptureError(f"{gpu.device}: work asked for other memory in each of {MOST_ATTEMPTS} recordings")

    def replay(self, stream: Stream | None = None) -> None:
        """Launches the work, on the device's stream unless another is named; returns at once.

        Raises LaunchError or another DriverError.
        """
        stream = stream or self._gpu.stream
        self.pool.order(stream)
        self._gpu.context.make_current()
        status = self._launch(self._exec, stream.handle)[0]
        if status:
            raise self._gpu.driver.error("cuGraphLaunch", status)

    @functools.cached_property
    def kernels(self) -> list[Kernel]:
        """The kernels launched, in order."""
        asked = (self._gpu.context.call("cuGraphKernelNodeGetParams", node) for node in self._kernel_nodes)
        return [self._gpu.kernel_of(parameters.func) for parameters in asked]

    def release(self) -> None:
        """Frees the graph, after its last replay; its pool goes with the last graph that has it."""
        graph, self._graph = getattr(self, "_graph", None), None
        if graph is None:
            return
        context = self._gpu.context
        try:
            self.pool.synchronize()
            if self._exec is not None:
                context.call("cuGraphExecDestroy", self._exec)
            context.call("cuGraphDestroy", graph)
        finally:
            self._gpu.allocator.forget(self._retained)
            self.result = None

    def __del__(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_over():
            with contextlib.suppress(DeviceError):
                self.release()


def _record(gpu: Gpu, stream: Stream, work: Callable[[], Any]) -> tuple[Any, Any]:
    """(graph, return value of `work`). The stream is not captured any more, however this ends."""
    mode = gpu.driver.types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    gpu.context.call("cuStreamBeginCapture", stream.handle, mode)
    try:
        with gpu.captured(stream), NO_COLLECTION:  # a finaliser that frees or waits would end the recording
            result = work()
    except BaseException:
        status, *graph = gpu.driver.api.cuStreamEndCapture(stream.handle)
        if not status and graph and int(graph[0]):
            gpu.context.call("cuGraphDestroy", graph[0])
        raise
    return gpu.context.call("cuStreamEndCapture", stream.handle), result


def _in_order(gpu: Gpu, graph: Any) -> list[Any]:
    """A graph's nodes, each after those that it depends on."""
    call = gpu.context.call
    _, count = call("cuGraphGetNodes", graph, 0)
    if not count:
        return []
    nodes, _ = call("cuGraphGetNodes", graph, count)
    by_handle = {int(node): node for node in nodes}
    sorter: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(by_handle, ()))
    *_, num_edges = call("cuGraphGetEdges", graph, 0)
    if num_edges:
        sources, targets, *_ = call("cuGraphGetEdges", graph, num_edges)
        for source, target in zip(sources, targets):
            sorter.add(int(target), int(source))
    return [by_handle[handle] for handle in sorter.static_order()]
