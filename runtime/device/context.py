"""A device's primary context, current in whichever thread calls the driver; its properties, as the driver reports them;
its streams and events: work in order, and points in it that others wait for.

The Programming Guide's chapters on asynchronous execution are the source:
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#asynchronous-concurrent-execution
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.device.driver import Driver
from runtime.device.errors import InvalidDeviceError
from runtime.errors import DeviceError

current = threading.local()
""".context is the Context that this thread made current last; only Context sets it."""


class Context:
    """The primary context of one device, which all libraries of the process share. Kept until the process ends; after
    that finalisers no longer call the driver.

    Attributes:
        driver: of the device.
        index: the device's number with that driver.
        device: the driver's own handle of the device.
        handle: the context's.
    """

    def __init__(self, driver: Driver, index: int) -> None:
        """Raises InvalidDeviceError where the driver has no device of that number."""
        count = driver.call("cuDeviceGetCount")
        if not 0 <= index < count:
            raise InvalidDeviceError(f"there is no device {index}: the driver has {count}, numbered from 0")
        self.driver = driver
        self.index = index
        self.device = driver.call("cuDeviceGet", index)
        self.handle = driver.call("cuDevicePrimaryCtxRetain", self.device)

    def make_current(self) -> None:
        """Makes the context the calling thread's, unless it is already."""
        if getattr(current, "context", None) is not self:
            self.driver.call("cuCtxSetCurrent", self.handle)
            current.context = self

    def call(self, function: str, *arguments: Any) -> Any:
        """`Driver.call` with this context current."""
        if getattr(current, "context", None) is not self:
            self.make_current()
        return self.driver.call(function, *arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """A device's properties, as its driver reports them.

    Attributes:
        name: the product's.
        capability: (major, minor).
        total_memory_bytes: all of it.
        num_sms: streaming multiprocessors.
        shared_bytes_per_block: most dynamic shared memory of a block, by opt-in.
        shared_bytes_per_sm, registers_per_sm, threads_per_sm: of one multiprocessor.
        l2_bytes: the second-level cache.
        clock_khz, memory_clock_khz, memory_bus_bits: 0 if the driver does not report it.
    """

    name: str
    capability: tuple[int, int]
    total_memory_bytes: int
    num_sms: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    registers_per_sm: int
    threads_per_sm: int
    l2_bytes: int
    clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int

    @property
    def arch(self) -> str:
        """The architecture that kernels are compiled for: "sm_86"; from Hopper on with its own features, "sm_90a"."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


_ATTRIBUTES = {
    "num_sms": "MULTIPROCESSOR_COUNT",
    "shared_bytes_per_block": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "shared_bytes_per_sm": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "registers_per_sm": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "threads_per_sm": "MAX_THREADS_PER_MULTIPROCESSOR",
    "l2_bytes": "L2_CACHE_SIZE",
    "clock_khz": "CLOCK_RATE",
    "memory_clock_khz": "MEMORY_CLOCK_RATE",
    "memory_bus_bits": "GLOBAL_MEMORY_BUS_WIDTH",
}


def query_properties(driver: Driver, index: int) -> DeviceProperties:
    """Queries the driver for the device of that number; needs no context."""
    kinds = driver.types.CUdevice_attribute
    device = driver.call("cuDeviceGet", index)

    def attribute(name: str) -> int:
        return int(driver.call("cuDeviceGetAttribute", getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

    name = driver.call("cuDeviceGetName", 256, device)
    return DeviceProperties(
        name=name.split(b"\0")[0].decode(errors="replace") if isinstance(name, bytes) else str(name),
        capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        total_memory_bytes=int(driver.call("cuDeviceTotalMem", device)),
        **{field: attribute(name) for field, name in _ATTRIBUTES.items()},
    )


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
