"""A driver for tests of the bookkeeping above it: memory is the host's, everything runs at once, every call is counted.

It has what the emulated driver cannot offer: a limit on memory, events that pass when a test says so, and any function
failing on request. What kernels do it does not know: a launch only records its arguments.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from typing import Any

from cuda.bindings import driver as bindings

SUCCESS = bindings.CUresult.CUDA_SUCCESS
OUT_OF_MEMORY = bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY
INVALID_VALUE = bindings.CUresult.CUDA_ERROR_INVALID_VALUE
NOT_READY = bindings.CUresult.CUDA_ERROR_NOT_READY

ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "MULTIPROCESSOR_COUNT": 4,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232_448,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233_472,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65_536,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2_048,
}


class FakeDriver:
    """Offers what runtime.device calls.

    `counts`: calls by name. `total_bytes`: cuMemAlloc fails beyond it. `are_events_done`: what cuEventQuery answers.
    `failing`: results by function's name, returned instead of doing anything. `launches`: (function, config's grid,
    arguments' address, stream) of each.
    """

    def __init__(self, *, total_bytes: int = 1 << 40, num_devices: int = 2) -> None:
        self.counts: Counter[str] = Counter()
        self.total_bytes = total_bytes
        self.num_devices = num_devices
        self.are_events_done = True
        self.failing: dict[str, Any] = {}
        self.launches: list[tuple[Any, ...]] = []
        self.memory: dict[int, tuple[int, mmap.mmap, Any]] = {}
        self.used_bytes = 0
        self.order: list[tuple[str, Any]] = []
        self._handles = 0x1000
        self._marks: list[tuple[int, int, bool]] = []

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name.startswith("cu"):
            self.counts[name] += 1
            if (status := self.failing.get(name)) is not None:
                return lambda *_: (status,)
        return value

    def _new(self, kind: Any) -> Any:
        self._handles += 1
        return kind(self._handles)

    # Devices and contexts

    def cuGetErrorName(self, status: Any) -> tuple[Any, bytes]:
        return SUCCESS, status.name.encode()

    def cuGetErrorString(self, status: Any) -> tuple[Any, bytes]:
        return SUCCESS, b"as asked by the test"

    def cuDeviceGetCount(self) -> tuple[Any, int]:
        return SUCCESS, self.num_devices

    def cuDeviceGet(self, index: int) -> tuple[Any, Any]:
        return SUCCESS, bindings.CUdevice(index)

    def cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any, Any]:
        return SUCCESS, bindings.CUcontext(0x100 + int(device))

    def cuCtxSetCurrent(self, context: Any) -> tuple[Any]:
        return (SUCCESS,)

    def cuCtxSynchronize(self) -> tuple[Any]:
        return (SUCCESS,)

    def cuDeviceGetName(self, length: int, device: Any) -> tuple[Any, bytes]:
        return SUCCESS, b"Fake\0"

    def cuDeviceTotalMem(self, device: Any) -> tuple[Any, int]:
        return SUCCESS, self.total_bytes

    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> tuple[Any, int]:
        return SUCCESS, ATTRIBUTES.get(attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_"), 0)

    def cuDeviceCanAccessPeer(self, device: Any, peer: Any) -> tuple[Any, int]:
        return SUCCESS, int(int(device) != int(peer))

    def cuCtxEnablePeerAccess(self, peer: Any, flags: int) -> tuple[Any]:
        return (SUCCESS,)

    # Memory

    def cuMemGetInfo(self) -> tuple[Any, int, int]:
        return SUCCESS, self.total_bytes - self.used_bytes, self.total_bytes

    def cuMemAlloc(self, size: int) -> tuple[Any, ...]:
        if self.used_bytes + size > self.total_bytes:
            return (OUT_OF_MEMORY,)
        self.used_bytes += size
        return SUCCESS, bindings.CUdeviceptr(self._map(size))

    def cuMemFree(self, address: Any) -> tuple[Any]:
        size, _, _ = self.memory.pop(int(address))
        self.used_bytes -= size
        return (SUCCESS,)

    def cuMemHostAlloc(self, size: int, flags: int) -> tuple[Any, int]:
        return SUCCESS, self._map(size)

    def _map(self, size: int) -> int:
        pages = mmap.mmap(-1, size)  # touched pages alone take memory
        view = (ctypes.c_char * size).from_buffer(pages)
        address = ctypes.addressof(view)
        self.memory[address] = (size, pages, view)
        return address

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: Any) -> tuple[Any]:
        ctypes.memmove(int(target), source, size)
        return (SUCCESS,)

    def cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: Any) -> tuple[Any]:
        ctypes.memmove(target, int(source), size)
        return (SUCCESS,)

    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: Any) -> tuple[Any]:
        ctypes.memmove(target, source, size)
        return (SUCCESS,)

    def cuMemcpyPeerAsync(self, target: int, to: Any, source: int, start: Any, size: int, stream: Any) -> tuple[Any]:
        assert (int(to), int(start)) != (int(start), int(to))
        ctypes.memmove(target, source, size)
        return (SUCCESS,)

    def cuMemsetD8Async(self, target: int, byte: int, size: int, stream: Any) -> tuple[Any]:
        ctypes.memset(target, byte, size)
        return (SUCCESS,)

    # Streams and events

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[Any, Any]:
        return SUCCESS, self._new(bindings.CUstream)

    def cuStreamDestroy(self, stream: Any) -> tuple[Any]:
        return (SUCCESS,)

    def cuStreamSynchronize(self, stream: Any) -> tuple[Any]:
        return (SUCCESS,)

    def cuStreamQuery(self, stream: Any) -> tuple[Any]:
        return (SUCCESS,) if self.are_events_done else (NOT_READY,)

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> tuple[Any]:
        self.order.append(("wait", (int(stream), int(event))))
        return (SUCCESS,)

    def cuEventCreate(self, flags: int) -> tuple[Any, Any]:
        return SUCCESS, self._new(bindings.CUevent)

    def cuEventRecord(self, event: Any, stream: Any) -> tuple[Any]:
        self.order.append(("record", (int(event), int(stream))))
        return (SUCCESS,)

    def cuEventQuery(self, event: Any) -> tuple[Any]:
        return (SUCCESS,) if self.are_events_done else (NOT_READY,)

    def cuEventSynchronize(self, event: Any) -> tuple[Any]:
        self.order.append(("synchronize", int(event)))
        return (SUCCESS,)

    def cuEventElapsedTime(self, start: Any, end: Any) -> tuple[Any, float]:
        return SUCCESS, 1.5

    def cuEventDestroy(self, event: Any) -> tuple[Any]:
        return (SUCCESS,)

    # Kernels

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, Any]:
        return SUCCESS, self._new(bindings.CUmodule)

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[Any, Any]:
        return SUCCESS, self._new(bindings.CUfunction)

    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: int) -> tuple[Any]:
        return (SUCCESS,)

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: int) -> tuple[Any]:
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        self.launches.append((int(function), grid, parameters, int(config.hStream), config))
        return (SUCCESS,)
