"""A pytest plugin that runs the emulator's tests on a real GPU, in place of the emulated devices.

Every emulated device of a test, and of a driver that it makes, is the GPU, with the GPU's kernels. A test of several
architectures runs for the GPU's own. Tests of the emulator itself, its counts or its error messages, are skipped at the
point of use.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from numba_kernels.cuda.specialisation import Specialisation
from runtime.device import device as device_module
from runtime.device import gpu as gpu_module
from runtime.device.compiled_kernel import CompiledKernel
from runtime.device.device import CPU, Device
from runtime.device.driver import Driver
from runtime.device.gpu import Gpu
from runtime.device.kernel_cache import KernelCache
from tests.runtime.device import emulated
from tools.gpu.sections import Options

MEMORY_BYTES = 6 << 30
"""Memory of each process's device: many share it."""


class StandIn:
    """The replacement, until the process ends."""

    def __init__(self, options: Options) -> None:
        gpu = Gpu.of(options.device)
        self.arch = gpu.arch
        driver = Driver(_Api(gpu.driver.api, gpu.device.index), gpu.driver.types)
        driver.c_function = gpu.driver.c_function  # type: ignore[method-assign]

        def new_gpu(arch: str = self.arch, *, index: int = 0, folder: Path | None = None, **more: Any) -> Gpu:
            if more:
                pytest.skip(f"needs an emulated driver with {', '.join(more)}")
            cache = gpu.kernel_cache if folder is None else KernelCache(folder)
            return Gpu(Device(f"emulated:{arch}:{index}"), driver, kernel_cache=cache)

        made = Gpu.__init__

        def make(self: Gpu, *arguments: Any, kernel_cache: KernelCache | None = None) -> None:
            made(self, *arguments, kernel_cache=kernel_cache or gpu.kernel_cache)
            self.arch = gpu.arch

        def compiled(self: KernelCache, specialisation: Specialisation, arch: str, *, is_ptx: bool) -> CompiledKernel:
            pytest.skip(f"{specialisation.name} is not in the bundle")

        Gpu.__init__ = make  # type: ignore[assignment]
        if not options.is_dry:  # nor may it be compiled while a GPU waits
            KernelCache._compiled = compiled  # type: ignore[method-assign]
        for module in (device_module, gpu_module):
            vars(module)["open_driver"] = lambda arch=None: driver
        vars(device_module)["best_device"] = lambda: CPU  # for tests that name no device
        emulated.new_gpu = new_gpu

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselects cpu-only tests, tests of other architectures that also run on the GPU's, and tests of the
        emulator's own errors."""
        names = {item.nodeid for item in items}
        left_out = [
            item for item in items
            if self._is_on_cpu(item) or item.get_closest_marker("planted")
            or self._of_gpu(item.nodeid) in names - {item.nodeid}
        ]  # fmt: skip
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

    def _of_gpu(self, name: str) -> str:
        return re.sub(r"sm_\d+[af]?", self.arch, name)

    def _is_on_cpu(self, item: pytest.Item) -> bool:
        return hasattr(item, "callspec") and "cpu" in item.callspec.params.values()


class _Api:
    """A real driver's functions, with one device as all devices, and smaller limits."""

    def __init__(self, api: Any, index: int) -> None:
        self._api, self._index = api, index

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._api, name):
            if name.startswith("__") or name in ("last_fault", "last_reason"):
                raise AttributeError(name)
            pytest.skip(f"asks the emulator for {name}")
        return getattr(self._api, name)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return self._api.cuDeviceGet(self._index)

    def cuDeviceGetCount(self) -> tuple[Any, int]:
        status, count = self._api.cuDeviceGetCount()
        return status, 2 * count

    def cuMemGetInfo(self) -> tuple[Any, int, int]:
        status, free, total = self._api.cuMemGetInfo()
        return status, min(free, MEMORY_BYTES), min(total, MEMORY_BYTES)

    def cuDeviceTotalMem(self, device: Any) -> tuple[Any, int]:
        status, total = self._api.cuDeviceTotalMem(device)
        return status, min(total, MEMORY_BYTES)
