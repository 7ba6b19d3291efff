"""The driver's functions for memory: allocation, pinned host memory, attributes of pointers."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cu

from runtime.emulator.driver.state import Context, DriverState, R, Refused, caller_label, entry, handle_of
from runtime.errors import OutOfMemoryError

_FRESH_HOST_BYTE = 0xA5
"""Contents of new pinned memory: no plausible result."""
_HOST_FLAGS = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP | cu.CU_MEMHOSTALLOC_WRITECOMBINED


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
        address = handle_of(dptr)
        if address == 0:
            return
        found = self.allocation_at(address)
        if found is None or found[1].address != address or found[1].is_host:
            machine = self.machine_at(address)
            what = f": {machine.describe(address)}" if machine is not None else ""
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{address:#x} starts no device allocation{what}")
        machine, allocation = found
        for owner in {context, *(c for c in self.contexts.values() if c.machine is machine)}:
            self.synchronize_context(owner)
        machine.free(address)
        self.order.forget(machine, address, allocation.size_bytes)

    def synchronize_context(self, context: Context) -> None:
        """Finishes a context's work and orders the host after it. Raises Refused for a fault."""
        self.scheduler.finish_all(context)
        for stream in context.streams.values():
            self.order.host_knows(stream.queue.last)
        self.raise_if_failed(context)

    @entry(2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        machine = self.context().machine
        return machine.size_bytes - machine.used_bytes, machine.size_bytes

    @entry(1)
    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> int:
        if int(Flags) & ~_HOST_FLAGS:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"flags {int(Flags):#x}")
        context = self.context()
        self.refuse_unsafe("cuMemHostAlloc")
        address = self._allocate(context, int(bytesize), is_host=True)
        context.machine.fill(address, _FRESH_HOST_BYTE, int(bytesize))  # the host writes unseen: it counts as written
        return address
