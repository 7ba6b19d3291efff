"""The driver's functions for memory: allocation, pinned host memory, what a pointer is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cu

from runtime.device.emulator.driver.copies import host_address
from runtime.device.emulator.driver.state import Context, DriverState, R, Refused, caller_label, entry, handle_of
from runtime.device.emulator.driver.stream_faults import DriverFault
from runtime.device.emulator.driver.work_queues import Work
from runtime.device.emulator.execution.fault import FaultKind
from runtime.device.emulator.memory.device_memory import Machine
from runtime.device.emulator.races.stream_order import Conflict
from runtime.errors import OutOfMemoryError

_FRESH_HOST_BYTE = 0xA5
"""What new pinned memory holds: nothing that could be taken for a result."""
_HOST_FLAGS = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP | cu.CU_MEMHOSTALLOC_WRITECOMBINED


@dataclass(frozen=True, slots=True)
class Free:
    """The end of an allocation, at its place in a stream."""

    driver: DriverState
    machine: Machine
    address: int
    size_bytes: int

    node_type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEM_FREE

    @property
    def label(self) -> str:
        return f"cuMemFreeAsync of {self.address:#x}"

    def run(self, work: Work) -> None:
        try:
            self.driver.order.touch(work, self.machine, self.address, self.size_bytes, is_write=True)
        except Conflict as conflict:
            user, me = self.driver.order.label_of(conflict.earlier), self.driver.order.label_of(work.epoch)
            raise DriverFault(
                FaultKind.USE_AFTER_FREE,
                f"{me} is not ordered after {user}, which uses {self.machine.describe(conflict.address)}",
                works=(user, me),
                address=conflict.address,
            ) from None
        self.machine.free(self.address)
        self.driver.order.forget(self.machine, self.address, self.size_bytes)


class MemoryFunctions(DriverState):
    """cuMemAlloc…, cuMemFree…, cuMemHost…, cuMemGet…, cuPointer…"""

    # -- allocation -----------------------------------------------------------------------------------------------

    def _allocate(self, context: Context, size: int, *, is_host: bool) -> int:
        if size <= 0:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"a size of {size} bytes")
        try:
            address = context.machine.allocate(size, is_host=is_host, label=caller_label())
        except OutOfMemoryError as error:
            raise Refused(R.CUDA_ERROR_OUT_OF_MEMORY, str(error)) from None
        self.order.forget(context.machine, address, size)
        return address

    @entry(1)
    def cuMemAlloc(self, bytesize: int) -> Any:
        context = self.context()
        self.refuse_unsafe("cuMemAlloc")
        return cu.CUdeviceptr(self._allocate(context, int(bytesize), is_host=False))

    @entry(is_release=True)
    def cuMemFree(self, dptr: Any) -> None:
        """Waits for the context's work first, as the driver does."""
        context = self.context()
        self.refuse_unsafe("cuMemFree")
        self._free(context, handle_of(dptr), is_host=False)

    def _free(self, context: Context, address: int, *, is_host: bool) -> None:
        if address == 0:
            return
        found = self.allocation_at(address)
        if found is None or found[1].address != address or found[1].is_host != is_host:
            machine = self.machine_at(address)
            raise Refused(
                R.CUDA_ERROR_INVALID_VALUE,
                f"{address:#x} starts no {'pinned' if is_host else 'device'} allocation"
                + (f": {machine.describe(address)}" if machine is not None else ""),
            )
        machine, allocation = found
        for owner in {context, *(c for c in self.contexts.values() if c.machine is machine)}:
            self.synchronize_context(owner)
        machine.free(address)
        self.order.forget(machine, address, allocation.size_bytes)

    def synchronize_context(self, context: Context) -> None:
        """Finishes a context's work; the host knows of it. Raises Refused for a fault."""
        self.scheduler.finish_all(context)
        for stream in context.streams.values():
            self.order.host_knows(stream.queue.last)
        self.raise_if_failed(context)

    @entry(1)
    def cuMemAllocAsync(self, bytesize: int, hStream: Any) -> Any:
        stream = self.stream(hStream)
        if stream.capture is not None:
            raise Refused(R.CUDA_ERROR_NOT_SUPPORTED, "memory nodes in graphs are not emulated")
        size = int(bytesize)
        address = self._allocate(stream.context, size, is_host=False)
        work = self.enqueue(stream, None)
        if work.clock is not None:  # who uses it must come after: its birth counts as a write
            self.order.touch(work, stream.context.machine, address, size, is_write=True)
        return cu.CUdeviceptr(address)

    @entry(is_release=True)
    def cuMemFreeAsync(self, dptr: Any, hStream: Any) -> None:
        stream = self.stream(hStream)
        if stream.capture is not None:
            raise Refused(R.CUDA_ERROR_NOT_SUPPORTED, "memory nodes in graphs are not emulated")
        address = handle_of(dptr)
        found = self.allocation_at(address)
        if found is None or found[1].address != address or found[1].is_host:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{address:#x} starts no device allocation")
        self.enqueue(stream, Free(self, found[0], address, found[1].size_bytes))

    @entry(2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        machine = self.context().machine
        return machine.size_bytes - machine.used_bytes, machine.size_bytes

    @entry(1)
    def cuMemAllocHost(self, bytesize: int) -> int:
        return self._allocate_host(int(bytesize), "cuMemAllocHost")

    @entry(1)
    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> int:
        if int(Flags) & ~_HOST_FLAGS:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"flags {int(Flags):#x}")
        return self._allocate_host(int(bytesize), "cuMemHostAlloc")

    def _allocate_host(self, size: int, call: str) -> int:
        context = self.context()
        self.refuse_unsafe(call)
        address = self._allocate(context, size, is_host=True)
        context.machine.fill(address, _FRESH_HOST_BYTE, size)  # the host writes there unseen: it counts as written
        return address

    @entry(is_release=True)
    def cuMemFreeHost(self, p: Any) -> None:
        context = self.context()
        self.refuse_unsafe("cuMemFreeHost")
        self._free(context, host_address(p), is_host=True)

    @entry(1)
    def cuMemHostGetDevicePointer(self, p: Any, Flags: int) -> Any:
        self.context()
        address = host_address(p)
        found = self.allocation_at(address)
        if Flags or found is None or not found[1].is_host:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{address:#x} with flags {Flags} is no pinned memory")
        return cu.CUdeviceptr(address)

    @entry(1)
    def cuPointerGetAttribute(self, attribute: Any, ptr: Any) -> Any:
        address = handle_of(ptr)
        found = self.allocation_at(address)
        if found is None:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{address:#x} is no address that the driver has given out")
        machine, allocation = found
        device = self.devices[machine.index]
        a = cu.CUpointer_attribute
        kinds = cu.CUmemorytype
        answers: dict[Any, Any] = {
            a.CU_POINTER_ATTRIBUTE_CONTEXT: cu.CUcontext(device.context.handle if device.context else 0),
            a.CU_POINTER_ATTRIBUTE_MEMORY_TYPE: (
                kinds.CU_MEMORYTYPE_HOST if allocation.is_host else kinds.CU_MEMORYTYPE_DEVICE
            ),
            a.CU_POINTER_ATTRIBUTE_DEVICE_POINTER: cu.CUdeviceptr(address),
            a.CU_POINTER_ATTRIBUTE_BUFFER_ID: allocation.serial,
            a.CU_POINTER_ATTRIBUTE_IS_MANAGED: False,
            a.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: device.ordinal,
            a.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: cu.CUdeviceptr(allocation.address),
            a.CU_POINTER_ATTRIBUTE_RANGE_SIZE: allocation.size_bytes,
            a.CU_POINTER_ATTRIBUTE_MAPPED: True,
        }
        if allocation.is_host:
            answers[a.CU_POINTER_ATTRIBUTE_HOST_POINTER] = address
        if attribute not in answers:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{attribute!r} of {allocation}")
        return answers[attribute]

    @entry(2)
    def cuMemGetAddressRange(self, dptr: Any) -> tuple[Any, int]:
        self.context()
        found = self.allocation_at(handle_of(dptr))
        if found is None or found[1].is_host:
            raise Refused(R.CUDA_ERROR_NOT_FOUND, f"{handle_of(dptr):#x} is in no device allocation")
        return cu.CUdeviceptr(found[1].address), found[1].size_bytes
