"""An emulated GPU whose driver's calls are counted by name."""

from __future__ import annotations

from collections import Counter
from typing import Any

from cuda.bindings import driver as bindings

from runtime.device.driver import Driver
from runtime.device.gpu import Gpu
from runtime.emulator.driver.emulated_driver import EmulatedDriver
from tests.runtime.device.emulated import new_gpu


class CountedCalls:
    """Stands before a driver's functions."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._api, name)
        if not name.startswith("cu"):
            return found

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return found(*arguments)

        return call


def counted_gpu(arch: str = "sm_90a", *, index: int = 1, api: Any = None) -> tuple[Gpu, Counter[str]]:
    """The device, and the calls so far."""
    counted = CountedCalls(api or EmulatedDriver(arch))
    driver = Driver(counted, bindings, arch=arch)
    driver.call("cuInit", 0)
    return new_gpu(arch, index=index, driver=driver), counted.calls
