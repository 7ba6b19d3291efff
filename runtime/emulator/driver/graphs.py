"""The driver's functions for graphs: capture of streams with its rules and refusals, nodes and edges, replay."""

from __future__ import annotations

import threading
from typing import Any

from cuda.bindings import driver as cu

from runtime.emulator.driver.launches import KernelLaunch, LaunchFunctions, overlap_of
from runtime.emulator.driver.state import R, Refused, Stream, entry, handle_of
from runtime.emulator.driver.work_queues import (
    MODE,
    Capture,
    Graph,
    GraphExec,
    MeetingTemplate,
    Node,
    Operation,
    Queue,
    Step,
    Work,
    plan_replay,
)
from runtime.emulator.protocols import CapturedStream
from runtime.emulator.races.stream_order import Overlap

_PROGRAMMATIC = cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


def edge_data(is_programmatic: bool) -> Any:
    """The data of an edge, as the driver gives it."""
    data = cu.CUgraphEdgeData()
    if is_programmatic:
        data.from_port = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        data.type = _PROGRAMMATIC
    return data


_USE_NODE_PRIORITY = 8  # CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY


class GraphFunctions(LaunchFunctions):
    """cuStreamBeginCapture, cuStreamEndCapture, cuGraph…"""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.graphs: dict[int, Graph] = {}
        self.execs: dict[int, GraphExec] = {}

    @entry()
    def cuStreamBeginCapture(self, hStream: Any, mode: Any) -> None:
        if handle_of(hStream) in (0, 1):
            raise Refused(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the legacy stream cannot be captured")
        stream = self.stream(hStream)
        if stream.capture is not None:
            raise Refused(R.CUDA_ERROR_ILLEGAL_STATE, f"{stream} is captured already")
        try:
            mode = MODE(int(mode))
        except ValueError:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"capture mode {mode!r}") from None
        graph = Graph(self.new_handle(), is_owned_by_capture=True)
        self.graphs[graph.handle] = graph
        stream.capture = Capture(graph, mode, threading.get_ident(), [stream])
        stream.dependencies = []
        self.captures.append(stream.capture)

    @entry(1)
    def cuStreamEndCapture(self, hStream: Any) -> Any:
        stream = self.stream(hStream)
        capture = stream.capture
        if capture is None:
            raise Refused(R.CUDA_ERROR_ILLEGAL_STATE, f"{stream} is not captured")
        if capture.streams[0] is not stream:
            capture.broken_by = capture.broken_by or "its end in another stream"
            raise Refused(R.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, f"the capture began in {capture.streams[0]}")
        if capture.mode != MODE.CU_STREAM_CAPTURE_MODE_RELAXED and capture.thread != threading.get_ident():
            raise Refused(R.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "the capture began in another thread")
        unjoined = self._unjoined(capture, stream)
        for member in capture.streams:
            member.capture, member.dependencies = None, []
        self.captures.remove(capture)
        graph = capture.graph
        graph.is_owned_by_capture = False
        if capture.broken_by is None and unjoined is None:
            return cu.CUgraph(graph.handle)
        del self.graphs[graph.handle]
        if capture.broken_by is not None:
            raise Refused(R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, f"the capture was broken by {capture.broken_by}")
        raise Refused(R.CUDA_ERROR_STREAM_CAPTURE_UNJOINED, f"{stream} does not wait for {unjoined}")

    @staticmethod
    def _unjoined(capture: Capture, origin: Stream) -> CapturedStream | None:
        """A stream with nodes that the capture's first stream does not come after."""
        reached = capture.graph.ancestors(origin.dependencies)
        for stream in capture.streams:
            if any(node not in reached for node in stream.dependencies):
                return stream
        return None

    # -- graphs ---------------------------------------------------------------------------------------------------

    def _graph(self, handle: Any) -> Graph:
        graph = self.graphs.get(handle_of(handle))
        if graph is None:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"graph {handle_of(handle):#x} does not exist")
        return graph

    def _node(self, handle: Any) -> Node:
        number = handle_of(handle)
        for graph in self.graphs.values():
            for node in graph.nodes:
                if node.handle == number:
                    return node
        raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"graph node {number:#x} does not exist")

    @entry(is_release=True)
    def cuGraphDestroy(self, hGraph: Any) -> None:
        graph = self._graph(hGraph)
        if graph.is_owned_by_capture:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, "the graph is being captured")
        del self.graphs[graph.handle]

    @entry(2)
    def cuGraphGetNodes(self, hGraph: Any, numNodes: int = 0) -> tuple[list[Any], int]:
        """As the driver: without a number of nodes only their count, else that many, filled up with null."""
        nodes = self._graph(hGraph).nodes
        if numNodes == 0:
            return [], len(nodes)
        handles = [node.handle for node in nodes][:numNodes]
        return [cu.CUgraphNode(handle) for handle in handles + [0] * (numNodes - len(handles))], len(handles)

    @entry(4)
    def cuGraphGetEdges(self, hGraph: Any, numEdges: int = 0) -> tuple[list[Any], list[Any], list[Any], int]:
        graph = self._graph(hGraph)
        edges = [(before, node) for node in graph.nodes for before in node.dependencies]
        if numEdges == 0:
            return [], [], [], len(edges)
        edges = edges[:numEdges]
        missing = [cu.CUgraphNode(0)] * (numEdges - len(edges))
        data = [edge_data(before in node.programmatic) for before, node in edges]
        data += [edge_data(False) for _ in missing]
        return (
            [cu.CUgraphNode(before.handle) for before, _ in edges] + missing,
            [cu.CUgraphNode(node.handle) for _, node in edges] + missing,
            data,
            len(edges),
        )

    @entry(1)
    def cuGraphNodeGetType(self, hNode: Any) -> Any:
        return self._node(hNode).type

    @entry(1)
    def cuGraphKernelNodeGetParams(self, hNode: Any) -> Any:
        """A kernel node's parameters but the arguments."""
        launch = self._node(hNode).operation
        if not isinstance(launch, KernelLaunch):
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"graph node {handle_of(hNode):#x} is no kernel node")
        params = cu.CUDA_KERNEL_NODE_PARAMS()
        params.func = cu.CUfunction(launch.function.handle)
        params.gridDimX, params.gridDimY, params.gridDimZ = launch.grid
        params.blockDimX, params.blockDimY, params.blockDimZ = launch.block
        params.sharedMemBytes = launch.shared_bytes
        return params

    # -- executable graphs ----------------------------------------------------------------------------------------

    def _exec(self, handle: Any) -> GraphExec:
        found = self.execs.get(handle_of(handle))
        if found is None:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"executable graph {handle_of(handle):#x} does not exist")
        return found

    @entry(1)
    def cuGraphInstantiate(self, hGraph: Any, flags: int) -> Any:
        self.context()
        graph = self._graph(hGraph)
        if graph.is_owned_by_capture:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, "the graph is being captured")
        if int(flags) & ~_USE_NODE_PRIORITY:
            raise Refused(R.CUDA_ERROR_NOT_SUPPORTED, f"flags {int(flags):#x}")
        steps, num_branches = plan_replay(graph)
        found = GraphExec(self.new_handle(), graph, steps, num_branches)
        self.execs[found.handle] = found
        return cu.CUgraphExec(found.handle)

    @entry(is_release=True)
    def cuGraphExecDestroy(self, hGraphExec: Any) -> None:
        del self.execs[self._exec(hGraphExec).handle]

    @entry()
    def cuGraphUpload(self, hGraphExec: Any, hStream: Any) -> None:
        """An executable graph needs no upload to an emulated device; the stream and the graph must exist."""
        self._exec(hGraphExec)
        if self.stream(hStream).capture is not None:
            raise Refused(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "cuGraphUpload in a stream that is captured")

    @entry()
    def cuGraphLaunch(self, hGraphExec: Any, hStream: Any) -> None:
        found, stream = self._exec(hGraphExec), self.stream(hStream)
        if stream.capture is not None:
            self.valid_capture(stream)
            raise Refused(R.CUDA_ERROR_NOT_SUPPORTED, "child graph nodes are not emulated")
        self._replay(found, stream)

    def _replay(self, found: GraphExec, stream: Stream) -> None:
        """Queues the steps: the first branch in the stream itself, the others in queues of their own."""
        start = self.enqueue(stream, None, () if found.last is None else (found.last,))
        queues = [stream.queue]
        for _ in range(1, found.num_branches):
            queue = Queue(stream.context)
            self.order.open(queue)
            queues.append(queue)
        works: list[Work] = []
        for step in found.steps:
            waits = tuple(works[index] for index in step.waits)
            if step.branch and not step.node.dependencies:
                waits = (start,)
            operation: Operation = step.operation
            if isinstance(operation, MeetingTemplate):
                operation = operation.queued()
            work = self.scheduler.submit(queues[step.branch], operation, waits)
            if self.order.is_active:
                kernel = step.operation.function if isinstance(step.operation, KernelLaunch) else None
                self.stamp(
                    work, waits, f"{step.operation.label} of a graph in {stream}", self._overlap(step),
                    starts_next_early=kernel is not None and kernel.starts_next_early,
                )  # fmt: skip
            works.append(work)
        ends = tuple(queue.last for queue in queues[1:] if queue.last is not None)
        found.last = self.enqueue(stream, None, ends)
        for queue in queues[1:]:
            self.order.close(queue)

    @staticmethod
    def _overlap(step: Step) -> Overlap:
        if not isinstance(step.operation, KernelLaunch):
            return Overlap.NONE
        return overlap_of(step.operation) if step.is_programmatic else Overlap.KERNEL
