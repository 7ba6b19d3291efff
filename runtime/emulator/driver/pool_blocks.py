"""Blocks that a caching allocator cuts from the driver's allocations, for the checkers.

To the driver such an allocation is one piece, and an access beside a block, or after the block was returned, stays
inside of it. So an emulated driver has two more functions: `emuDivide` declares that an allocation will be cut into
blocks, with none yet, and `emuMarkAsync`, in stream order, that a block begins or ends. From then on only the bytes of
live blocks may be touched, a new block counts as never written, and the end of a block must come after every use of it
in any stream.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cu

from runtime.emulator.driver.state import DriverState, R, Refused, entry, handle_of
from runtime.emulator.driver.work_queues import Work
from runtime.emulator.execution.fault import FaultKind
from runtime.emulator.memory.device_memory import IS_ALLOCATED, IS_FREED, DeviceMemoryError, Machine
from runtime.emulator.races.stream_order import Conflict, DriverFault

_MOST_REMEMBERED = 1000


class PoolBlocks:
    """The blocks of one machine's divided allocations. `Machine.pool_blocks` holds it, once there are some."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._segments: dict[int, int] = {}  # first address: size
        self._segment_starts: list[int] = []
        self._starts: list[int] = []  # of live blocks, in order
        self._sizes: dict[int, int] = {}
        self._returned: deque[tuple[int, int]] = deque(maxlen=_MOST_REMEMBERED)  # for messages

    def divide(self, address: int, size_bytes: int) -> None:
        """From now on only blocks of this allocation may be touched."""
        bisect.insort(self._segment_starts, address)
        self._segments[address] = size_bytes
        self._machine.shade(address, size_bytes, 0)

    def forget(self, address: int) -> None:
        """The allocation that begins here, if it is a divided one, is freed."""
        if (size := self._segments.pop(address, None)) is None:
            return
        self._segment_starts.remove(address)
        low, high = (bisect.bisect_left(self._starts, end) for end in (address, address + size))
        for start in self._starts[low:high]:
            del self._sizes[start]
        del self._starts[low:high]

    def begin(self, address: int, size_bytes: int, span_bytes: int) -> None:
        """Begins a block of `size_bytes`; the bytes after it, up to `span_bytes`, belong to no block."""
        if address not in self._sizes:
            bisect.insort(self._starts, address)
        self._sizes[address] = size_bytes
        self._machine.shade(address, size_bytes, IS_ALLOCATED)
        self._machine.shade(address + size_bytes, span_bytes - size_bytes, 0)

    def end(self, address: int, span_bytes: int) -> None:
        """The block that begins here, if there is one, ends."""
        if (size := self._sizes.pop(address, None)) is not None:
            del self._starts[bisect.bisect_left(self._starts, address)]
            self._returned.append((address, size))
        self._machine.shade(address, span_bytes, IS_FREED)

    def check(self, address: int, size_bytes: int, action: str) -> None:
        """Raises DeviceMemoryError where a range of a divided allocation is not inside one block."""
        if not size_bytes or self._segment_of(address) is None:
            return
        start = self._block_at_or_below(address)
        end = start + self._sizes[start] if start is not None else 0
        if address + size_bytes > end:
            first = max(address, end)
            words = self.describe(first)
            raise DeviceMemoryError(f"{action} of {size_bytes:,} bytes at {address:#x}: {words}", first)

    def describe(self, address: int) -> str | None:
        """A description of an address in a divided allocation; None for any other address."""
        if self._segment_of(address) is None:
            return None
        start = self._block_at_or_below(address)
        if start is not None and address < start + self._sizes[start]:
            return f"{address - start:,} bytes into {self._named(start, self._sizes[start])}"
        for before, size in reversed(self._returned):
            if before <= address < before + size:
                return f"{address - before:,} bytes into {self._named(before, size)}, which has been returned"
        if start is None:
            return "no block of a pool begins there or before it"
        return (
            f"{address - start - self._sizes[start]:,} bytes past the end of {self._named(start, self._sizes[start])}"
        )

    @staticmethod
    def _named(start: int, size: int) -> str:
        return f"a pool's block of {size:,} bytes at {start:#x}"

    def _segment_of(self, address: int) -> int | None:
        index = bisect.bisect_right(self._segment_starts, address) - 1
        if index < 0:
            return None
        start = self._segment_starts[index]
        return start if address < start + self._segments[start] else None

    def _block_at_or_below(self, address: int) -> int | None:
        """Its first address, where it lies in the same allocation."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or self._segment_of(self._starts[index]) != self._segment_of(address):
            return None
        return self._starts[index]


@dataclass(frozen=True, slots=True)
class Mark:
    """The begin of a block, or its end (`size_bytes` 0), at its place in a stream."""

    driver: DriverState
    machine: Machine
    address: int
    size_bytes: int
    span_bytes: int

    node_type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY

    @property
    def label(self) -> str:
        if self.size_bytes:
            return f"allocation of a block of {self.size_bytes:,} bytes"
        return f"return of the block at {self.address:#x}"

    def run(self, work: Work) -> None:
        blocks = self.machine.pool_blocks
        assert blocks is not None
        if self.size_bytes:
            blocks.begin(self.address, self.size_bytes, self.span_bytes)
            return
        order = self.driver.order
        try:
            order.touch(work, self.machine, self.address, self.span_bytes, is_write=True)
        except Conflict as conflict:
            user, me = order.label_of(conflict.earlier), order.label_of(work.epoch)
            raise DriverFault(
                FaultKind.USE_AFTER_FREE,
                f"{me} is not ordered after {user}, which uses {self.machine.describe(conflict.address)}",
                works=(user, me),
                address=conflict.address,
            ) from None
        blocks.end(self.address, self.span_bytes)


@dataclass(frozen=True, slots=True)
class Declaration:
    """A range that is immutable, or no longer, from this place in a stream on."""

    driver: DriverState
    machine: Machine
    address: int
    size_bytes: int
    is_immutable: bool

    @property
    def label(self) -> str:
        return f"declaration of {self.size_bytes:,} {'immutable' if self.is_immutable else 'mutable'} bytes"

    def run(self, work: Work) -> None:
        self.machine.check_block(self.address, self.size_bytes, self.label)
        self.driver.order.touch(work, self.machine, self.address, self.size_bytes, is_write=not self.is_immutable)
        self.machine.declare_immutable(self.address, self.size_bytes, is_immutable=self.is_immutable)


class PoolFunctions(DriverState):
    """Reports of a caching allocator to an emulated driver, and promises of a program."""

    @entry()
    def emuDivide(self, dptr: Any) -> None:
        """Declares that the allocation that begins here will be cut into blocks, with none yet."""
        address = handle_of(dptr)
        found = self.allocation_at(address)
        if found is None or found[1].address != address or found[1].is_host:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{address:#x} starts no device allocation")
        machine, allocation = found
        if machine.pool_blocks is None:
            machine.pool_blocks = PoolBlocks(machine)
        machine.pool_blocks.divide(address, allocation.size_bytes)

    @entry(is_release=True)  # a finaliser ends blocks in the middle of a kernel's run, too
    def emuMarkAsync(self, dptr: Any, size_bytes: int, span_bytes: int, hStream: Any) -> None:
        """A block of `size_bytes`, with `span_bytes` up to the next, begins; or, of size 0, the block there ends."""
        address = handle_of(dptr)
        machine = self.machine_at(address)
        if machine is None or machine.pool_blocks is None or not 0 <= size_bytes <= span_bytes:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"a block of {size_bytes} of {span_bytes} bytes at {address:#x}")
        self.submit(self.stream(hStream), Mark(self, machine, address, size_bytes, span_bytes))

    @entry()
    def emuDeclareImmutableAsync(self, dptr: Any, size_bytes: int, is_immutable: int, hStream: Any) -> None:
        """Freezes these bytes once the work now in the stream has run; or, with 0, thaws them."""
        address, stream = handle_of(dptr), self.stream(hStream)
        machine = self.machine_at(address)
        if machine is None:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{address:#x} is no device memory")
        try:
            machine.check(address, size_bytes, "emuDeclareImmutableAsync")
        except DeviceMemoryError as error:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, str(error)) from None
        if stream.capture is not None:
            self.refuse_while_captured(stream.context, "a declaration of immutable memory")
        self.enqueue(stream, Declaration(self, machine, address, size_bytes, bool(is_immutable)))
