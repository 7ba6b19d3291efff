"""A GPU on an emulated driver of its own, whose faults end nothing but the test that made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cuda.bindings import driver as bindings

from runtime.device.device import Device
from runtime.device.driver import Driver
from runtime.device.gpu import Gpu
from runtime.device.kernel_cache import KernelCache
from runtime.emulator.driver.emulated_driver import EmulatedDriver


def new_gpu(
    arch: str = "sm_90a", *, index: int = 0, driver: Driver | None = None, folder: Path | None = None, **options: Any
) -> Gpu:
    """`options` are EmulatedDriver's; `driver`: another's, for a second device of it; `folder`: of compiled kernels."""
    if driver is None:
        driver = Driver(EmulatedDriver(arch, **options), bindings, arch=arch)
        driver.call("cuInit", 0)
    name = f"emulated:{arch}:{index}"
    return Gpu(Device(name), driver, kernel_cache=KernelCache(folder) if folder is not None else None)
