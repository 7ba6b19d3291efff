"""An emulated driver that runs no work: it hands out addresses, and copies, fills and kernels are only accepted.

With it a program goes through its launches on a device of some architecture, at no cost and with memory of zeros, to
list the kernels that it needs.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

from cuda.bindings import driver as cu

from runtime.emulator.driver.emulated_driver import EmulatedDriver
from runtime.emulator.driver.launches import read_attributes
from runtime.emulator.driver.state import OK
from runtime.emulator.execution.launch import Checks

MEMORY_BYTES = 1 << 38
"""The device's memory: more than any model needs. It is never touched, so it costs nothing."""


class DryDriver(EmulatedDriver):
    """One device of an architecture that runs no work."""

    def __init__(self, arch: str) -> None:
        super().__init__(arch, num_devices=1, memory_bytes=MEMORY_BYTES, checks=Checks.NONE, is_order_checked=False)
        self._next_handle = itertools.count(1)

    def _accept(self, *_: Any) -> tuple[Any]:
        return OK

    def _new(self, *_: Any) -> tuple[Any, int]:
        return cu.CUresult.CUDA_SUCCESS, next(self._next_handle)

    def cuMemAlloc(self, bytesize: int) -> tuple[Any, Any]:
        """An address of its own; the size does not matter, since it is never written."""
        return cu.CUresult.CUDA_SUCCESS, cu.CUdeviceptr(next(self._next_handle) << 44)

    def cuOccupancyMaxActiveClusters(self, func: Any, config: Any) -> tuple[Any, int]:
        """The answer for a kernel that has a multiprocessor's shared memory to itself, for any kernel."""
        size = read_attributes(config).cluster[0]
        return cu.CUresult.CUDA_SUCCESS, self.devices[0].model.clusters_at_once(size, 1)

    def cuMemcpyDtoHAsync(self, dstHost: int, srcDevice: int, ByteCount: int, hStream: Any) -> tuple[Any]:
        """Zeros, at once."""
        ctypes.memset(dstHost, 0, ByteCount)
        return OK

    cuMemFree = cuFuncSetAttribute = cuLaunchKernelEx = emuDivide = emuMarkAsync = _accept  # type: ignore[assignment]
    emuDeclareImmutableAsync = _accept  # type: ignore[assignment]
    cuMemcpyHtoDAsync = cuMemcpyDtoDAsync = cuMemcpyBatchAsync = cuMemsetD8Async = _accept  # type: ignore[assignment]
    cuModuleLoadData = cuModuleGetFunction = _new  # type: ignore[assignment]
