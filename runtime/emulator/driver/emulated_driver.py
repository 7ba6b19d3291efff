"""The emulated CUDA driver: the functions of `cuda.bindings.driver` that the runtime uses, on emulated devices.

Names, arguments and return shapes are those of `cuda.bindings.driver`, whose enumerations, handles and structures it
uses; no driver's library is needed. Queued work runs late, in an order that a seed chooses among all that streams and
events allow (`work_queues.py`), and memory that two works touch without an order between them is a fault
(`races/stream_order.py`).

Unsupported features are refused with CUDA_ERROR_NOT_SUPPORTED: memory nodes and child graphs, external event nodes,
events between processes, launch attributes that no kernel here uses. Functions that do not exist here raise
AttributeError.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as cu

from runtime.emulator.driver.architectures import GpuModel, model_of
from runtime.emulator.driver.copies import CopyFunctions, MemoryFunctions
from runtime.emulator.driver.devices import DeviceFunctions, TensorMapFunctions
from runtime.emulator.driver.graphs import GraphFunctions
from runtime.emulator.driver.launches import read_attributes
from runtime.emulator.driver.pool_blocks import ImmutableFunctions, PoolFunctions
from runtime.emulator.driver.state import OK
from runtime.emulator.driver.stream_faults import leak
from runtime.emulator.driver.streams import StreamFunctions
from runtime.emulator.execution.launch import Checks
from runtime.emulator.memory.device_memory import Allocation
from runtime.errors import InvalidArgumentError

DEFAULT_MEMORY_BYTES = 2 << 30
DEFAULT_NUM_DEVICES = 2


class EmulatedDriver(
    DeviceFunctions,
    MemoryFunctions,
    CopyFunctions,
    StreamFunctions,
    GraphFunctions,
    TensorMapFunctions,
    PoolFunctions,
    ImmutableFunctions,
):
    """One driver with its devices, as a process would find it.

    Beside the driver's functions it has, unlike a real one: `last_fault`, `last_reason`, `counters`, `leaks`,
    `close`, and checks that may be changed at any time.

    Attributes: those of `DriverState` and `LaunchFunctions`.
    """

    def __init__(
        self,
        devices: str | GpuModel | Sequence[str | GpuModel] = "sm_90a",
        *,
        num_devices: int | None = None,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        checks: Checks = Checks.ALL,
        is_order_checked: bool = True,
        seed: int = 1,
        num_threads: int = 2,
    ) -> None:
        """
        Args:
            devices: an architecture or a product for all devices ("sm_80", "H100"), or one for each.
            num_devices: how many where one is named for all; default 2.
            memory_bytes: device memory of each; only touched memory costs anything.
            checks: the checks of kernels.
            is_order_checked: whether works of different streams are.
            seed: of every order that may be chosen; 0 runs blocks and warps in their natural order.
            num_threads: OS threads that a kernel may use.

        Raises:
            InvalidArgumentError: for a device that cannot be emulated, or for no device.
        """
        if isinstance(devices, str | GpuModel):
            count = DEFAULT_NUM_DEVICES if num_devices is None else num_devices
            devices = [devices] * count
        elif num_devices is not None and num_devices != len(devices):
            raise InvalidArgumentError(f"num_devices {num_devices}: {len(devices)} are named", param="num_devices")
        if not devices:
            raise InvalidArgumentError("a driver needs at least one device", param="devices")
        if num_threads < 1:
            raise InvalidArgumentError(f"num_threads is {num_threads}: at least 1", param="num_threads")
        models = [device if isinstance(device, GpuModel) else model_of(device) for device in devices]
        super().__init__(models, memory_bytes, seed=seed, is_order_checked=is_order_checked)
        self.checks = checks
        self.num_threads = num_threads

    def live_allocations(self) -> list[Allocation]:
        """Live allocations on all devices, with pinned memory, oldest first on each."""
        return [allocation for device in self.devices for allocation in device.machine.live_allocations()]

    def close(self) -> None:
        """Ends the driver as a program's exit would: all contexts are destroyed, and their memory is gone.

        Raises:
            DriverFault: LEAK, when allocations are alive: each with the place that made it.
            Exception: the fault of work that was still queued.
        """
        with self.lock:
            before = self.last_fault
            for context in list(self.contexts.values()):
                self.destroy_context(context)
            for device in self.devices:
                device.machine.close()
            leaks, self.leaks = self.leaks, []
            self.is_ready = False
        if self.last_fault is not None and self.last_fault is not before:
            raise self.last_fault
        if leaks:
            raise leak(leaks)


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
