"""A device's primary context, current in whichever thread calls the driver."""

from __future__ import annotations

import threading
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
