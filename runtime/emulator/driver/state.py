"""State shared by the emulated driver's functions: devices, contexts, handles, sticky errors; and the entry of every
call.

A function of the driver is a method marked with `entry`; it returns its values alone, or raises `Refused` with the
driver's own status, and the caller gets the tuple that `cuda.bindings.driver` would give.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from cuda.bindings import driver as cu

from runtime.emulator.driver.architectures import GpuModel
from runtime.emulator.driver.work_queues import (
    IDLE_S,
    MODE,
    Capture,
    MeetingTemplate,
    Node,
    NodeOperation,
    Operation,
    Queue,
    Scheduler,
    Work,
)
from runtime.emulator.memory.device_memory import Allocation, Machine
from runtime.emulator.protocols import LoadedModule
from runtime.emulator.races.stream_order import Conflict, Overlap, StreamOrder, missing_event, status_of

R = cu.CUresult
OK = (R.CUDA_SUCCESS,)

_FIRST_HANDLE = 0x5E00_0000_0010
_HANDLE_STEP = 0x10


class Refused(Exception):
    """A call ends with a status that is not CUDA_SUCCESS. `reason` adds words to the status."""

    def __init__(self, status: Any, reason: str = "") -> None:
        super().__init__(status, reason)
        self.status, self.reason = status, reason


def handle_of(value: Any) -> int:
    """The number in a handle of `cuda.bindings`, in an int, or in None, which is 0."""
    return 0 if value is None else int(value)


@dataclass(eq=False, slots=True)
class Device:
    """One emulated device; its context appears when it is first retained."""

    ordinal: int
    model: GpuModel
    machine: Machine
    context: Context | None = None


class Context:
    """A device's primary context.

    Attributes:
        error: the sticky status of a fault, which every later call returns, or None.
        streams: those that live, the legacy stream first.
        modules: by handle.
        events: handles of its events.
        peers: handles of the contexts whose memory it may touch.
    """

    def __init__(self, handle: int, device: Device) -> None:
        self.handle, self.device = handle, device
        self.error: Any = None
        self.streams: dict[int, Stream] = {}
        self.events: set[int] = set()
        self.modules: dict[int, LoadedModule] = {}
        self.peers: set[int] = set()

    @property
    def machine(self) -> Machine:
        return self.device.machine


class Stream:
    """A stream.

    Attributes:
        is_blocking: whether it and the legacy stream wait for each other.
        capture: the capture that its calls go to, else None.
        dependencies: while it is captured, the nodes that its next node comes after.
        number: for messages; 0 is the legacy stream.
    """

    __slots__ = ("capture", "context", "dependencies", "handle", "is_blocking", "number", "queue")

    def __init__(self, handle: int, number: int, context: Context, queue: Queue, flags: int) -> None:
        self.handle, self.number, self.context, self.queue = handle, number, context, queue
        self.is_blocking = not flags & int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.capture: Capture | None = None
        self.dependencies: list[Node] = []

    def __str__(self) -> str:
        return "the legacy stream" if self.number == 0 else f"stream {self.number}"


_P = ParamSpec("_P")
_S = TypeVar("_S", bound="DriverState")


def entry(
    outputs: int = 0, *, before_init: bool = False, is_release: bool = False
) -> Callable[[Callable[Concatenate[_S, _P], Any]], Callable[Concatenate[_S, _P], tuple[Any, ...]]]:
    """Makes a method a function of the driver: under its lock, with `outputs` values after the status.

    The method returns None, its one value, or a tuple of `outputs` values. If garbage collection calls the driver in
    the middle of another call, a release (a call that frees or waits, without a result) is done after that call.
    """

    def decorate(function: Callable[Concatenate[_S, _P], Any]) -> Callable[Concatenate[_S, _P], tuple[Any, ...]]:
        nothing = (None,) * outputs

        @functools.wraps(function)
        def call(self: _S, /, *arguments: _P.args, **keywords: _P.kwargs) -> tuple[Any, ...]:
            with self.lock:
                if is_release and self.depth:
                    self.deferred.append(functools.partial(call, self, *arguments, **keywords))
                    return OK
                self.depth += 1
                try:
                    if not before_init and not self.is_ready:
                        raise Refused(R.CUDA_ERROR_NOT_INITIALIZED, "cuInit has not been called")
                    result = function(self, *arguments, **keywords)
                except Refused as refusal:
                    self.last_reason = refusal.reason
                    return (refusal.status, *nothing)
                finally:
                    self.depth -= 1
                    if self.deferred and not self.depth:
                        self.deferred.popleft()()
            if outputs == 0:
                return OK
            return (R.CUDA_SUCCESS, result) if outputs == 1 else (R.CUDA_SUCCESS, *result)

        return call

    return decorate


class _Thread(threading.local):
    """State of a host thread: its current context."""

    def __init__(self) -> None:
        self.context: Context | None = None


class DriverState:
    """Devices, handles and queued work. `EmulatedDriver` adds the functions.

    Attributes:
        last_fault: the full fault of a kernel, a copy or between streams, or None.
        last_reason: text for the status of the last refused call.
        leaks: allocations that were alive when their context was destroyed.
        captures: under way, in any context.
    """

    def __init__(self, models: Sequence[GpuModel], memory_bytes: int, *, seed: int, is_order_checked: bool) -> None:
        self.lock = threading.RLock()
        self.thread = _Thread()
        self.depth = 0  # calls under way, one within the other, in the thread that has the lock
        self.deferred: deque[Callable[[], tuple[Any, ...]]] = deque()
        self.is_ready = False
        self.seed = seed
        self.devices = [
            Device(index, model, Machine(memory_bytes, model.arch, index)) for index, model in enumerate(models)
        ]
        self.order = StreamOrder(is_wanted=is_order_checked)
        self.scheduler = Scheduler(seed, self._fail, self.wait_a_moment)
        self._moment = threading.Condition(self.lock)
        self.last_fault: Exception | None = None
        self.last_reason = ""
        self.leaks: list[Allocation] = []
        self._handles = itertools.count(_FIRST_HANDLE, _HANDLE_STEP)
        self.contexts: dict[int, Context] = {}
        self.streams: dict[int, Stream] = {}
        self.captures: list[Capture] = []
        self._stream_numbers = itertools.count(1)

    def new_handle(self) -> int:
        return next(self._handles)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Lets another library use the driver's state until the block ends, as `entry` does for the driver."""
        with self.lock:
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1
                if self.deferred and not self.depth:
                    self.deferred.popleft()()

    def wait_a_moment(self) -> None:
        """Lets other threads call the driver meanwhile: all wait for another process, or for them."""
        depth, self.depth = self.depth, 0
        self._moment.wait(IDLE_S)
        self.depth = depth

    # -- contexts -------------------------------------------------------------------------------------------------

    def context(self) -> Context:
        """The calling thread's context, in order. Raises Refused."""
        context = self.thread.context
        if context is None:
            raise Refused(R.CUDA_ERROR_INVALID_CONTEXT, "no context is current in this thread")
        if context.handle not in self.contexts:
            raise Refused(R.CUDA_ERROR_CONTEXT_IS_DESTROYED, "the current context has been destroyed")
        if context.error is not None:
            raise Refused(context.error, "an earlier fault")
        return context

    def raise_if_failed(self, context: Context) -> None:
        """Ends a call that has run work."""
        if context.error is not None:
            raise Refused(context.error, str(self.last_fault))

    def _fail(self, work: Work, failure: Exception) -> None:
        """A work's operation raised: its context is lost, as on hardware."""
        context: Context = work.queue.owner
        if isinstance(failure, Conflict):
            failure = missing_event(self.order, work, failure)
        self.set_fault(context, failure)

    def set_fault(self, context: Context, failure: Exception) -> None:
        self.last_fault = failure
        context.error = status_of(failure)
        self.scheduler.drop(context)

    def destroy_context(self, context: Context) -> None:
        """Finishes queued work, then frees the context's objects; live allocations join `leaks`."""
        self.scheduler.finish_all(context)
        for stream in context.streams.values():
            self.close_stream(stream)
        for module in list(context.modules.values()):
            module.unload()
        machine = context.machine
        leaked = machine.live_allocations()
        for allocation in leaked:
            machine.free(allocation.address)
            self.order.forget(machine, allocation.address, allocation.size_bytes)
        self.leaks += leaked
        for other in self.contexts.values():
            if context.handle in other.peers:
                other.peers.discard(context.handle)
                other.machine.disable_peer(machine)
            if other.handle in context.peers:
                machine.disable_peer(other.machine)
        del self.contexts[context.handle]
        context.device.context = None

    def close_stream(self, stream: Stream) -> None:
        """Ends a stream; its queued work still runs. A capture that it takes part in is broken."""
        if stream.capture is not None:
            stream.capture.broken_by = stream.capture.broken_by or "destruction of one of its streams"
            stream.capture.streams.remove(stream)
            if not stream.capture.streams:
                self.captures.remove(stream.capture)
        self.order.close(stream.queue)
        self.streams.pop(stream.handle, None)

    # -- queued work ----------------------------------------------------------------------------------------------

    def stream(self, handle: Any) -> Stream:
        """The stream meant by a handle: 0 and CU_STREAM_LEGACY are the current context's legacy one. Raises Refused."""
        number = handle_of(handle)
        stream = self.streams.get(number)
        if stream is None:
            if number in (0, 1):
                stream = self.context().streams[0]
                if self.captures:
                    self._refuse_legacy(stream.context)
            else:
                raise Refused(R.CUDA_ERROR_INVALID_HANDLE, f"stream {number:#x} does not exist")
        if stream.context.error is not None:
            raise Refused(stream.context.error, "an earlier fault")
        return stream

    def _refuse_legacy(self, context: Context) -> None:
        """The legacy stream waits for all blocking streams, which one that is captured cannot be part of."""
        for capture in self.captures:
            if any(stream.context is context and stream.is_blocking for stream in capture.streams):
                capture.broken_by = capture.broken_by or "use of the legacy stream"
                raise Refused(R.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "the legacy stream waits for a captured one")

    def new_stream(self, context: Context, flags: int, *, is_legacy: bool = False) -> Stream:
        queue = Queue(context)
        self.order.open(queue)
        handle = 0 if is_legacy else self.new_handle()
        stream = Stream(handle, 0 if is_legacy else next(self._stream_numbers), context, queue, flags)
        context.streams[handle] = stream
        if not is_legacy:
            self.streams[handle] = stream
        return stream

    def submit(self, stream: Stream, operation: NodeOperation) -> Work | None:
        """Gives a stream an operation: queued, or (then None) a node of the capture there. Raises Refused."""
        if stream.capture is not None:
            self.add_captured(stream, operation)
            return None
        return self.enqueue(stream, operation)

    def add_captured(self, stream: Stream, operation: NodeOperation, *, is_programmatic: bool = False) -> Node:
        """The operation as the next node of a stream that is captured."""
        graph = self.valid_capture(stream).graph
        node = Node(self.new_handle(), graph, operation, list(stream.dependencies))
        if is_programmatic:
            node.programmatic.update(node.dependencies)
        graph.nodes.append(node)
        stream.dependencies = [node]
        return node

    @staticmethod
    def valid_capture(stream: Stream) -> Capture:
        """The capture of a stream that is captured. Raises Refused where it is broken."""
        capture = stream.capture
        assert capture is not None
        if capture.broken_by is not None:
            raise Refused(R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, f"the capture was broken by {capture.broken_by}")
        return capture

    def refuse_unsafe(self, call: str) -> None:
        """Refuses a call that may synchronise, by the modes of the captures under way, and breaks what it disturbs."""
        me = threading.get_ident()
        disturbed = [
            capture for capture in self.captures
            if (capture.thread == me and capture.mode != MODE.CU_STREAM_CAPTURE_MODE_RELAXED)
            or capture.mode == MODE.CU_STREAM_CAPTURE_MODE_GLOBAL
        ]  # fmt: skip
        self._break(disturbed, call)

    def refuse_while_captured(self, context: Context, call: str) -> None:
        """Refuses a call that would wait for a stream of a context that is captured, whatever the mode."""
        self._break([c for c in self.captures if any(s.context is context for s in c.streams)], call)

    @staticmethod
    def _break(captures: Sequence[Capture], call: str) -> None:
        for capture in captures:
            capture.broken_by = capture.broken_by or call
        if captures:
            raise Refused(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, f"{call} while a stream is captured")

    def enqueue(
        self, stream: Stream, operation: Operation | None, waits: Sequence[Work] = (), overlap: Overlap = Overlap.NONE,
        *, starts_next_early: bool = False,
    ) -> Work:  # fmt: skip
        """Queues work in a stream that is not captured, after the waits of the legacy stream's rule."""
        context = stream.context
        if stream.handle == 0:
            others = [s.queue.last for s in context.streams.values() if s.is_blocking and s is not stream]
        elif stream.is_blocking:
            others = [context.streams[0].queue.last]
        else:
            others = []
        if others:
            waits = [*waits, *(work for work in others if work is not None)]
        if isinstance(operation, MeetingTemplate):
            operation = operation.queued()
        work = self.scheduler.submit(stream.queue, operation, waits)
        if self.order.is_active:
            self.stamp(
                work, waits, f"{operation.label} in {stream}" if operation is not None else "", overlap,
                starts_next_early=starts_next_early,
            )  # fmt: skip
        return work

    def stamp(
        self, work: Work, waits: Sequence[Work], label: str, overlap: Overlap, *, starts_next_early: bool = False
    ) -> None:
        if self.order.is_exhausted(work.queue):
            self.scheduler.finish_all()
            streams = [stream for context in self.contexts.values() for stream in context.streams.values()]
            self.order.restart([stream.queue for stream in streams])
        self.order.stamp(work, waits, label=label, overlap=overlap, starts_next_early=starts_next_early)

    def wait_for(self, work: Work | None, context: Context) -> None:
        """Runs until a work is done, and orders the host after it. Raises Refused for a fault on the way."""
        if work is not None:
            self.scheduler.finish((work,))
            self.order.host_knows(work)
        self.raise_if_failed(context)

    def synchronize_context(self, context: Context) -> None:
        """Finishes a context's work and orders the host after it. Raises Refused for a fault."""
        self.scheduler.finish_all(context)
        for stream in context.streams.values():
            self.order.host_knows(stream.queue.last)
        self.raise_if_failed(context)

    # -- memory ---------------------------------------------------------------------------------------------------

    def machine_at(self, address: int) -> Machine | None:
        """The machine in whose address range an address lies."""
        for device in self.devices:
            machine = device.machine
            if machine.base <= address < machine.base + machine.span:
                return machine
        return None

    def allocation_at(self, address: int) -> tuple[Machine, Allocation] | None:
        machine = self.machine_at(address)
        allocation = machine.allocation_of(address) if machine is not None else None
        return None if machine is None or allocation is None else (machine, allocation)


_DEVICE_ROOM = str(Path(__file__).resolve().parents[2])


def caller_label() -> str:
    """The nearest place outside the emulator and `runtime.device`, for the list of leaks: "engine.py:120 in build"."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_DEVICE_ROOM):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
