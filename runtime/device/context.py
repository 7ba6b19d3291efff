"""A device's primary context, current in whichever thread calls the driver, and its properties, as the driver reports
them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from runtime.device.driver import Driver
from runtime.device.errors import InvalidDeviceError

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
