"""Streams and events: work in order on a device, and points in it that others wait for.

The Programming Guide's chapters on asynchronous execution are the source:
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#asynchronous-concurrent-execution
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from runtime.device.context import Context
from runtime.errors import DeviceError

_NOT_READY = 600


class Event:
    """A point in a stream's work. Freed with the object."""

    def __init__(self, context: Context, *, is_timed: bool = False) -> None:
        """With `is_timed` it takes the time, which costs the device a little."""
        flags = context.driver.types.CUevent_flags
        flag = flags.CU_EVENT_DEFAULT if is_timed else flags.CU_EVENT_DISABLE_TIMING
        self.context = context
        self.is_timed = is_timed
        self.handle = context.call("cuEventCreate", int(flag))

    def record(self, stream: Stream) -> Event:
        """Moves the event to the end of the work now in the stream."""
        self.context.call("cuEventRecord", self.handle, stream.handle)
        return self

    def is_done(self) -> bool:
        """Whether the device has come past it; True where it was never recorded."""
        return _is_done(self.context, "cuEventQuery", self.handle)

    def synchronize(self) -> None:
        """Waits until the device has come past it. Raises LaunchError where earlier work failed."""
        self.context.call("cuEventSynchronize", self.handle)

    def elapsed_ms(self, start: Event) -> float:
        """Milliseconds on the device from `start` to this event; both timed, recorded and done.

        Raises DriverError where they are not.
        """
        return float(self.context.call("cuEventElapsedTime", start.handle, self.handle))

    def __del__(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        if (handle := getattr(self, "handle", None)) and not is_over():
            with contextlib.suppress(DeviceError):  # of a context that a failed kernel has ended
                self.context.call("cuEventDestroy", handle)


class Stream:
    """A queue of work on a device, which does not wait for the legacy default stream. Freed with the object."""

    def __init__(self, context: Context, *, priority: int = 0) -> None:
        """A lower `priority` runs first; the driver moves it into the range that the device has."""
        flag = int(context.driver.types.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.context = context
        self.handle = context.call("cuStreamCreateWithPriority", flag, priority)

    def synchronize(self) -> None:
        """Waits until everything in it has run. Raises LaunchError where some of it failed."""
        self.context.call("cuStreamSynchronize", self.handle)

    def is_done(self) -> bool:
        """Whether everything in it has run."""
        return _is_done(self.context, "cuStreamQuery", self.handle)

    def record(self, *, is_timed: bool = False) -> Event:
        """A new event at the end of the work now in the stream."""
        return Event(self.context, is_timed=is_timed).record(self)

    def wait(self, event: Event) -> None:
        """Lets later work in this stream wait for the event, on the device; the host goes on."""
        self.context.call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def __del__(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        if (handle := getattr(self, "handle", None)) and not is_over():
            with contextlib.suppress(DeviceError):
                self.context.call("cuStreamDestroy", handle)


def _is_done(context: Context, function: str, handle: object) -> bool:
    context.make_current()
    (status,) = getattr(context.driver.api, function)(handle)
    if int(status) == _NOT_READY:
        return False
    if status:
        raise context.driver.error(function, status)
    return True
