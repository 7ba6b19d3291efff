"""The driver's functions for streams and events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cu

from runtime.emulator.driver.state import Context, DriverState, R, Refused, Stream, entry, handle_of
from runtime.emulator.driver.work_queues import Capture, Node, Work

_EVENT_FLAGS = 0x1 | 0x2 | 0x4  # blocking sync, no timing, interprocess
_NO_TIMING = 0x2
_INTERPROCESS = 0x4
_STREAM_FLAGS = 0x1  # non-blocking


@dataclass(eq=False, slots=True)
class Event:
    """An event.

    Attributes:
        work: the mark in the stream that it was recorded in last; None before.
        captured: where it was recorded last in a stream that is captured: the capture, and what a wait comes after.
    """

    handle: int
    context: Context
    flags: int
    work: Work | None = None
    captured: tuple[Capture, list[Node]] | None = None


class StreamFunctions(DriverState):
    """cuStream… but for capture, cuEvent…"""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.events: dict[int, Event] = {}

    # -- streams --------------------------------------------------------------------------------------------------

    @entry(1)
    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Any:
        """Priorities are accepted, without effect."""
        context = self.context()
        if int(flags) & ~_STREAM_FLAGS:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"stream flags {int(flags):#x}")
        return cu.CUstream(self.new_stream(context, int(flags)).handle)

    @entry(is_release=True)
    def cuStreamDestroy(self, hStream: Any) -> None:
        handle = handle_of(hStream)
        stream = self.streams.get(handle)
        if stream is None:
            raise Refused(R.CUDA_ERROR_INVALID_HANDLE, f"stream {handle:#x} does not exist")
        self.close_stream(stream)
        del stream.context.streams[handle]

    @entry(is_release=True)
    def cuStreamSynchronize(self, hStream: Any) -> None:
        stream = self._uncaptured(hStream, "cuStreamSynchronize")
        self.wait_for(self._tail(stream), stream.context)

    @entry()
    def cuStreamQuery(self, hStream: Any) -> None:
        stream = self._uncaptured(hStream, "cuStreamQuery")
        self._query(self._tail(stream), stream.context)

    def _uncaptured(self, handle: Any, call: str) -> Stream:
        stream = self.stream(handle)
        if stream.capture is not None:
            self._break([stream.capture], call)
        self.refuse_unsafe(call)
        return stream

    def _tail(self, stream: Stream) -> Work | None:
        """The last work of a stream; for the legacy stream also the works that it would wait for."""
        others = [s.queue.last for s in stream.context.streams.values() if s.is_blocking and s is not stream]
        if stream.handle == 0 and any(work is not None and not work.is_done for work in others):
            return self.enqueue(stream, None)
        return stream.queue.last

    def _query(self, work: Work | None, context: Context) -> None:
        if work is not None and not work.is_done:
            self.scheduler.progress()
        self.raise_if_failed(context)
        if work is not None and not work.is_done:
            raise Refused(R.CUDA_ERROR_NOT_READY)
        self.order.host_knows(work)

    @entry()
    def cuStreamWaitEvent(self, hStream: Any, hEvent: Any, Flags: int) -> None:
        stream, event = self.stream(hStream), self._event(hEvent)
        if Flags:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"flags {Flags}: external event nodes are not emulated")
        if event.captured is not None:
            self.join_capture(stream, *event.captured)
        elif stream.capture is not None:
            capture = self.valid_capture(stream)
            if event.work is not None:
                capture.broken_by = "a wait for an event that was recorded outside the capture"
                raise Refused(R.CUDA_ERROR_STREAM_CAPTURE_ISOLATION, capture.broken_by)
        elif event.work is not None:
            self.enqueue(stream, None, (event.work,))

    def join_capture(self, stream: Stream, capture: Capture, nodes: list[Node]) -> None:
        """A stream waits for an event of a capture: it takes part from now on."""
        if capture.broken_by is not None:
            raise Refused(R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, f"the capture was broken by {capture.broken_by}")
        if capture not in self.captures:
            raise Refused(R.CUDA_ERROR_CAPTURED_EVENT, "the event was recorded in a capture that has ended")
        if stream.handle == 0:
            capture.broken_by = "the legacy stream's wait for an event of the capture"
            raise Refused(R.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, capture.broken_by)
        if stream.capture is not None and stream.capture is not capture:
            for broken in (stream.capture, capture):
                broken.broken_by = broken.broken_by or "a wait across two captures"
            raise Refused(R.CUDA_ERROR_STREAM_CAPTURE_MERGE, "the stream and the event belong to two captures")
        if stream.capture is None:
            stream.capture = capture
            capture.streams.append(stream)
            stream.dependencies = []
        stream.dependencies += [node for node in nodes if node not in stream.dependencies]

    # -- events ---------------------------------------------------------------------------------------------------

    def _event(self, handle: Any) -> Event:
        event = self.events.get(handle_of(handle))
        if event is None:
            raise Refused(R.CUDA_ERROR_INVALID_HANDLE, f"event {handle_of(handle):#x} does not exist")
        if event.context.error is not None:
            raise Refused(event.context.error, "an earlier fault")
        return event

    @entry(1)
    def cuEventCreate(self, Flags: int) -> Any:
        context, flags = self.context(), int(Flags)
        if flags & ~_EVENT_FLAGS or (flags & _INTERPROCESS and not flags & _NO_TIMING):
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"event flags {flags:#x}")
        if flags & _INTERPROCESS:
            raise Refused(R.CUDA_ERROR_NOT_SUPPORTED, "events between processes are not emulated")
        event = Event(self.new_handle(), context, flags)
        self.events[event.handle] = event
        context.events.add(event.handle)
        return cu.CUevent(event.handle)

    @entry(is_release=True)
    def cuEventDestroy(self, hEvent: Any) -> None:
        event = self.events.pop(handle_of(hEvent), None)
        if event is None:
            raise Refused(R.CUDA_ERROR_INVALID_HANDLE, f"event {handle_of(hEvent):#x} does not exist")
        event.context.events.discard(event.handle)

    @entry()
    def cuEventRecord(self, hEvent: Any, hStream: Any) -> None:
        event, stream = self._event(hEvent), self.stream(hStream)
        if event.context is not stream.context:
            raise Refused(R.CUDA_ERROR_INVALID_HANDLE, "the event and the stream are of two contexts")
        if stream.capture is not None:
            event.captured = self.valid_capture(stream), list(stream.dependencies)
            event.work = None
            return
        event.work = self.enqueue(stream, None)
        event.captured = None

    def _uncaptured_event(self, hEvent: Any, call: str) -> Event:
        event = self._event(hEvent)
        if event.captured is not None:
            capture = event.captured[0]
            if capture in self.captures:
                capture.broken_by = capture.broken_by or call
            raise Refused(R.CUDA_ERROR_CAPTURED_EVENT, f"{call} of an event that was recorded in a capture")
        return event

    @entry(is_release=True)
    def cuEventSynchronize(self, hEvent: Any) -> None:
        event = self._uncaptured_event(hEvent, "cuEventSynchronize")
        self.refuse_unsafe("cuEventSynchronize")
        self.wait_for(event.work, event.context)

    @entry()
    def cuEventQuery(self, hEvent: Any) -> None:
        event = self._uncaptured_event(hEvent, "cuEventQuery")
        self.refuse_unsafe("cuEventQuery")
        self._query(event.work, event.context)

    @entry(1)
    def cuEventElapsedTime(self, hStart: Any, hEnd: Any) -> float:
        """Milliseconds of this machine's clock between the moments at which the two events' turn came."""
        events = [self._uncaptured_event(handle, "cuEventElapsedTime") for handle in (hStart, hEnd)]
        for event in events:
            if event.flags & _NO_TIMING or event.work is None:
                raise Refused(R.CUDA_ERROR_INVALID_HANDLE, "an event without timing, or never recorded")
        if not all(event.work is not None and event.work.is_done for event in events):
            raise Refused(R.CUDA_ERROR_NOT_READY)
        start, end = (event.work.ended_s for event in events if event.work is not None)
        return (end - start) * 1e3
