"""The driver's functions for memory: allocation, pinned host memory, copies and fills."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from runtime.emulator.driver.state import Context, DriverState, R, Refused, Stream, caller_label, entry, handle_of
from runtime.emulator.driver.work_queues import Work
from runtime.emulator.memory.device_memory import Allocation, DeviceMemoryError, Machine
from runtime.errors import OutOfMemoryError

_FRESH_HOST_BYTE = 0xA5
"""Contents of new pinned memory: no plausible result."""
_HOST_FLAGS = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP | cu.CU_MEMHOSTALLOC_WRITECOMBINED


_NODE = cu.CUgraphNodeType
_LEGACY_STREAMS = (0, 1)
_STREAM_ORDER = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


@dataclass(frozen=True, slots=True)
class Place:
    """One end of a copy: an address, and the machine and allocation that it lies in, None for pageable memory."""

    address: int
    machine: Machine | None
    allocation: Allocation | None

    @property
    def is_pageable(self) -> bool:
        return self.machine is None

    @property
    def kind(self) -> str:
        return "pageable" if self.machine is None else "pinned" if self.is_host else "device"

    @property
    def is_host(self) -> bool:
        return self.allocation is None or self.allocation.is_host


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of bytes. `data`, where it is not None, is the source, read when the copy was queued."""

    driver: DriverState
    target: Place
    source: Place
    size_bytes: int
    data: bytes | None = None

    node_type = _NODE.CU_GRAPH_NODE_TYPE_MEMCPY

    @property
    def label(self) -> str:
        return f"copy of {self.size_bytes:,} bytes from {self.source.kind} to {self.target.kind} memory"

    def run(self, work: Work) -> None:
        source, target, size = self.source, self.target, self.size_bytes
        for place, is_write in ((source, False), (target, True)):
            if place.machine is not None:
                place.machine.check(place.address, size, self.label, is_write=is_write)
                place.machine.check_block(place.address, size, self.label)
                self.driver.order.touch(work, place.machine, place.address, size, is_write=is_write)
        if target.machine is None:
            ctypes.memmove(target.address, source.address, size)
        elif source.machine is None or source.is_host:
            ctypes.memmove(target.address, self.data if self.data is not None else source.address, size)
            target.machine.mark_written(target.address, size)
        elif target.is_host:
            ctypes.memmove(target.address, source.address, size)
        else:
            target.machine.copy(target.address, source.address, size, source.machine)


@dataclass(frozen=True, slots=True)
class Batch:
    """Copies in one call, whose order is undefined: here the last one runs first."""

    copies: tuple[Copy, ...]

    @property
    def label(self) -> str:
        return f"batch of {len(self.copies)} copies, the first a {self.copies[0].label}"

    def run(self, work: Work) -> None:
        for copy in reversed(self.copies):
            copy.run(work)


@dataclass(frozen=True, slots=True)
class Fill:
    """Bytes set to a value."""

    driver: DriverState
    target: Place
    value: int
    size_bytes: int

    node_type = _NODE.CU_GRAPH_NODE_TYPE_MEMSET

    @property
    def label(self) -> str:
        return f"fill of {self.size_bytes:,} bytes"

    def run(self, work: Work) -> None:
        machine, address = self.target.machine, self.target.address
        assert machine is not None
        machine.check(address, self.size_bytes, self.label, is_write=True)
        machine.check_block(address, self.size_bytes, self.label)
        self.driver.order.touch(work, machine, address, self.size_bytes, is_write=True)
        machine.fill(address, self.value, self.size_bytes)


def host_address(value: Any) -> int:
    """The address of a host argument: an int, an object with a buffer, or None. Raises TypeError as bindings do."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    if hasattr(value, "__int__") and type(value).__module__.startswith("cuda."):
        return int(value)
    if isinstance(value, np.ndarray):
        if not (value.flags.c_contiguous or value.flags.f_contiguous):
            raise TypeError("a host array must be contiguous")
        return value.ctypes.data
    return np.frombuffer(value, np.uint8).ctypes.data if len(memoryview(value)) else 0


def _check_independent(copies: list[Copy]) -> None:
    """Raises Refused where one of the copies touches what another writes."""
    spans = [(copy.target.address, copy.target.address + copy.size_bytes, True) for copy in copies]
    spans += [(copy.source.address, copy.source.address + copy.size_bytes, False) for copy in copies]
    read_until = written_until = 0
    for start, end, is_write in sorted(spans):
        if start < written_until or (is_write and start < read_until):
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"copies of one batch overlap at {start:#x}")
        if is_write:
            written_until = end
        else:
            read_until = max(read_until, end)


class MemoryFunctions(DriverState):
    """cuMemAlloc…, cuMemFree…, cuMemHost…, cuMemGet…, cuMemcpy…, cuMemset…"""

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

    # -- copies and fills ----

    def _device_place(self, address: int, size: int, what: str) -> Place:
        machine = self.machine_at(address)
        if machine is None:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{what}: {address:#x} is no device memory")
        return self._in_machine(machine, address, size, what)

    def _in_machine(self, machine: Machine, address: int, size: int, what: str) -> Place:
        try:
            machine.check(address, size, what)
        except DeviceMemoryError as error:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, str(error)) from None
        return Place(address, machine, machine.allocation_of(address))

    def _any_place(self, address: int, size: int, what: str) -> Place:
        machine = self.machine_at(address)
        if machine is not None:
            return self._in_machine(machine, address, size, what)
        if address == 0:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{what}: a null pointer")
        return Place(address, None, None)

    def _copy(self, stream: Stream, target: Place, source: Place, size: int) -> None:
        """Queues a copy; returns when the driver's rules allow the caller to go on."""
        data = None
        if target.is_pageable or source.is_pageable:
            if stream.capture is not None:
                self.refuse_while_captured(stream.context, "a copy of pageable memory")
            if source.is_pageable:
                data = ctypes.string_at(source.address, size)
        work = self.submit(stream, Copy(self, target, source, size, data))
        if target.is_pageable:
            self.wait_for(work, stream.context)

    @entry()
    def cuMemcpyHtoDAsync(self, dstDevice: Any, srcHost: Any, ByteCount: int, hStream: Any) -> None:
        stream = self.stream(hStream)
        if ByteCount:
            target = self._device_place(handle_of(dstDevice), ByteCount, "cuMemcpyHtoD, destination")
            source = self._any_place(host_address(srcHost), ByteCount, "cuMemcpyHtoD, source")
            self._copy(stream, target, source, ByteCount)

    @entry()
    def cuMemcpyDtoHAsync(self, dstHost: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
        stream = self.stream(hStream)
        if ByteCount:
            target = self._any_place(host_address(dstHost), ByteCount, "cuMemcpyDtoH, destination")
            source = self._device_place(handle_of(srcDevice), ByteCount, "cuMemcpyDtoH, source")
            self._copy(stream, target, source, ByteCount)

    @entry()
    def cuMemcpyDtoDAsync(self, dstDevice: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
        stream = self.stream(hStream)
        if ByteCount:
            target = self._device_place(handle_of(dstDevice), ByteCount, "cuMemcpyDtoD, destination")
            source = self._device_place(handle_of(srcDevice), ByteCount, "cuMemcpyDtoD, source")
            self._copy(stream, target, source, ByteCount)

    @entry()
    def cuMemcpyPeerAsync(
        self, dstDevice: Any, dstContext: Any, srcDevice: Any, srcContext: Any, ByteCount: int, hStream: Any
    ) -> None:
        stream, places = self.stream(hStream), []
        for address, handle, what in ((dstDevice, dstContext, "destination"), (srcDevice, srcContext, "source")):
            context = self.contexts.get(handle_of(handle))
            if context is None:
                raise Refused(R.CUDA_ERROR_INVALID_CONTEXT, f"the {what}'s context does not exist")
            if ByteCount:
                places.append(self._in_machine(context.machine, handle_of(address), ByteCount, f"cuMemcpyPeer, {what}"))
        if places:
            self._copy(stream, places[0], places[1], ByteCount)

    @entry()
    def cuMemcpyBatchAsync(
        self,
        dsts: Sequence[Any],
        srcs: Sequence[Any],
        sizes: Sequence[int],
        count: int,
        attrs: Sequence[Any],
        attrsIdxs: Sequence[int],
        numAttrs: int,
        hStream: Any,
    ) -> None:
        """Copies device and pinned memory. A batch in which a copy touches what another writes is refused: CUDA leaves
        its result open."""
        stream = self.stream(hStream)
        if handle_of(hStream) in _LEGACY_STREAMS:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, "cuMemcpyBatchAsync on the legacy stream")
        if stream.capture is not None:
            self.refuse_while_captured(stream.context, "a batch of copies")
        for values in (dsts, srcs):
            if not all(isinstance(value, cu.CUdeviceptr) for value in values):
                raise TypeError("cuMemcpyBatchAsync takes lists of CUdeviceptr")
        if not len(dsts) == len(srcs) == len(sizes) == count > 0 or min(sizes) < 1:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{len(dsts)}, {len(srcs)}, {len(sizes)}: not {count} copies")
        indices = list(attrsIdxs)
        is_rising = indices[:1] == [0] and all(a < b for a, b in itertools.pairwise([*indices, count]))
        if not len(attrs) == len(indices) == numAttrs or not is_rising:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"attributes from {indices}: not {numAttrs} for {count} copies")
        if any(each.srcAccessOrder != _STREAM_ORDER for each in attrs):
            raise Refused(R.CUDA_ERROR_NOT_SUPPORTED, "sources that are not read in the stream's order")
        copies = []
        for target, source, size in zip(dsts, srcs, sizes):
            to = self._any_place(int(target), size, "cuMemcpyBatchAsync, destination")
            origin = self._any_place(int(source), size, "cuMemcpyBatchAsync, source")
            if to.is_pageable or origin.is_pageable:
                raise Refused(R.CUDA_ERROR_NOT_SUPPORTED, "pageable memory in a batch of copies")
            copies.append(Copy(self, to, origin, size))
        _check_independent(copies)
        self.enqueue(stream, Batch(tuple(copies)))

    @entry()
    def cuMemsetD8Async(self, dstDevice: Any, uc: int, N: int, hStream: Any) -> None:
        stream = self.stream(hStream)
        if not N:
            return
        target = self._device_place(handle_of(dstDevice), N, "cuMemset")
        self.submit(stream, Fill(self, target, int(uc) & 0xFF, N))
