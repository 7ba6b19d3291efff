"""The driver's functions for the capture of streams into graphs, with its rules and its refusals."""

from __future__ import annotations

import threading
from typing import Any

from cuda.bindings import driver as cu

from runtime.emulator.driver.graph_nodes import MODE, Capture, Graph
from runtime.emulator.driver.state import DriverState, R, Refused, Stream, entry, handle_of

_PROGRAMMATIC = cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


def edge_data(is_programmatic: bool) -> Any:
    """The data of an edge, as the driver gives it."""
    data = cu.CUgraphEdgeData()
    if is_programmatic:
        data.from_port = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        data.type = _PROGRAMMATIC
    return data


class CaptureFunctions(DriverState):
    """cuStreamBeginCapture, cuStreamEndCapture"""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.graphs: dict[int, Graph] = {}

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
    def _unjoined(capture: Capture, origin: Stream) -> Stream | None:
        """A stream with nodes that the capture's first stream does not come after."""
        reached = capture.graph.ancestors(origin.dependencies)
        for stream in capture.streams:
            if any(node not in reached for node in stream.dependencies):
                return stream
        return None
