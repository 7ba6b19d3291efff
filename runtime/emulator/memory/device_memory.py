"""One emulated device's memory: a sparse mapping of this process with a shadow byte beside each byte.

A device address is the host address itself, so translated kernels dereference it directly. The shadow of a byte records
whether it belongs to a live allocation, has been written, or was freed; kernels' loads and stores check it
(`careful_access.py`), and so do the host's functions here. Allocations keep at least REDZONE_BYTES of dead bytes
between each other and exact ends, so that an access one byte outside is found. Freed memory stays dead until the rest
of the address range, which is twice the device's memory, has been used.

Device memory and pinned host memory lie in the same mapping; pinned bytes carry IS_HOST in their shadow, and every
machine that is connected may touch them. Machines of one process that are connected (`connect`) can be given peer
access to each other's device memory, one direction at a time.

Kernels, streams and contexts are handled elsewhere.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field

from runtime.emulator.protocols import DividedAllocations
from runtime.errors import DeviceError, InvalidArgumentError, OutOfMemoryError

IS_ALLOCATED, IS_INITIALISED, IS_FREED, IS_HOST, IS_IN_FLIGHT, IS_BEING_READ, IS_IMMUTABLE = 1, 2, 4, 8, 16, 32, 64
"""The bits of a shadow byte. A byte that was never allocated, or lies between allocations, has none. IS_IN_FLIGHT: an
asynchronous write will land here; IS_BEING_READ: an asynchronous read has not happened yet; IS_IMMUTABLE: the program
has declared the bytes constant while the allocation, or the pool's block, lives."""

REDZONE_BYTES = 256
PAGE_BYTES = 4096
ALIGNMENT_BYTES = 256

_MADE_IMMUTABLE = bytes(state | IS_IMMUTABLE for state in range(256))
_MADE_MUTABLE = bytes(state & ~IS_IMMUTABLE for state in range(256))
_IMMUTABLE_BIT = bytes(state & IS_IMMUTABLE for state in range(256))

_PROT_READ_WRITE = 3
_MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x02 | 0x20 | 0x4000
_MADV_DONTNEED = 4
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class DeviceMemoryError(DeviceError):
    """The host named device memory that it may not use; `address` is the first byte at fault."""

    def __init__(self, message: str, address: int) -> None:
        super().__init__(message)
        self.address = address


class Mapping:
    """A sparse, zeroed, private range of this process's memory, given back when it is closed or collected."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        address = _libc.mmap(None, self.size_bytes, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
        if address is None or address == _MAP_FAILED:
            errno = ctypes.get_errno()
            raise OutOfMemoryError(f"the host refuses to map {self.size_bytes:,} bytes (errno {errno})")
        self.address: int = address

    def drop(self, address: int, size_bytes: int) -> None:
        """Gives whole pages inside the range back to the host: they read as zero again."""
        first = -(-address // PAGE_BYTES) * PAGE_BYTES
        last = (address + size_bytes) // PAGE_BYTES * PAGE_BYTES
        if last > first:
            _libc.madvise(first, last - first, _MADV_DONTNEED)

    def close(self) -> None:
        if self.address:
            _libc.munmap(self.address, self.size_bytes)
            self.address = 0

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.close()


@dataclass(frozen=True, slots=True)
class Allocation:
    """A live or freed range. `serial` counts the machine's allocations from 1, for the leak list."""

    address: int
    size_bytes: int
    is_host: bool
    serial: int
    label: str = ""

    @property
    def end(self) -> int:
        return self.address + self.size_bytes

    def __str__(self) -> str:
        kind = "pinned host allocation" if self.is_host else "allocation"
        label = f" ({self.label})" if self.label else ""
        return f"{kind} #{self.serial}{label} of {self.size_bytes:,} bytes at {self.address:#x}"


@dataclass(slots=True)
class _Extents:
    """Allocations by address; ranges do not overlap."""

    starts: list[int] = field(default_factory=list)
    by_start: dict[int, Allocation] = field(default_factory=dict)

    def add(self, allocation: Allocation) -> None:
        bisect.insort(self.starts, allocation.address)
        self.by_start[allocation.address] = allocation

    def remove(self, address: int) -> Allocation:
        del self.starts[bisect.bisect_left(self.starts, address)]
        return self.by_start.pop(address)

    def at_or_below(self, address: int) -> Allocation | None:
        index = bisect.bisect_right(self.starts, address) - 1
        return self.by_start[self.starts[index]] if index >= 0 else None

    def above(self, address: int) -> Allocation | None:
        index = bisect.bisect_right(self.starts, address)
        return self.by_start[self.starts[index]] if index < len(self.starts) else None


class Machine:
    """The memory of one emulated device.

    Attributes:
        size_bytes: device memory, the most that can be allocated at once.
        arch: the architecture that the device poses as, "sm_90a".
        index: the device's number, for messages.
        base, span: the arena's first address and its length in bytes.
        shadow_delta: the address of a shadow byte minus that of its byte in the arena.
        used_bytes: device memory allocated now; pinned memory is not counted.

    Args:
        spare_bytes: address space beyond twice `size_bytes`, for redzones, freed and pinned memory. Costs nothing.
    """

    def __init__(self, size_bytes: int, arch: str = "sm_90a", index: int = 0, *, spare_bytes: int = 4 << 30) -> None:
        if size_bytes <= 0:
            raise InvalidArgumentError(f"Machine: size_bytes must be positive, not {size_bytes}", param="size_bytes")
        self.size_bytes, self.arch, self.index = size_bytes, arch, index
        self.span = -(-(2 * size_bytes + spare_bytes) // PAGE_BYTES) * PAGE_BYTES
        self._mapping = Mapping(2 * self.span)
        self.base = self._mapping.address
        self.shadow_delta = self.span
        self.used_bytes = 0
        self.neighbours: list[Machine] = []
        self.pool_blocks: DividedAllocations | None = None  # where a caching allocator reports its blocks
        self.race_clock = 0  # the race checker's latest clock; see execution/launch.py
        self.race_shadows: dict[int, Mapping] = {}  # its shadow of the arena, by granule
        self._peers: set[int] = set()
        self._live, self._dead = _Extents(), _Extents()
        self._next = self.base + REDZONE_BYTES  # all above has never been allocated
        self._free: list[tuple[int, int]] = []  # (address, size) of ranges that may be used again
        self._quarantine: list[int] = []  # freed starts, oldest first
        self._serial = 0

    def close(self) -> None:
        """Gives the memory back to the host. Addresses of this machine must not be used afterwards."""
        self._mapping.close()

    # -- allocation ----------------------------------------------------------------------------------------------

    def allocate(
        self, size_bytes: int, alignment: int = ALIGNMENT_BYTES, *, is_host: bool = False, label: str = ""
    ) -> int:
        """The address of `size_bytes` new bytes, uninitialised.

        Raises:
            InvalidArgumentError: for a size below 1 or an alignment that is no power of two.
            OutOfMemoryError: with the sizes.
        """
        if size_bytes <= 0:
            raise InvalidArgumentError(f"allocate: size_bytes must be positive, not {size_bytes}", param="size_bytes")
        if alignment <= 0 or alignment & (alignment - 1):
            raise InvalidArgumentError(f"allocate: alignment {alignment} is no power of two", param="alignment")
        if not is_host and self.used_bytes + size_bytes > self.size_bytes:
            raise OutOfMemoryError(
                f"emulated device {self.index}: cannot allocate {size_bytes:,} bytes: {self.used_bytes:,} of "
                f"{self.size_bytes:,} are in use by {len(self._live.starts)} allocations"
            )
        alignment = max(alignment, ALIGNMENT_BYTES)
        address = self._place(size_bytes, alignment)
        self._serial += 1
        allocation = Allocation(address, size_bytes, is_host, self._serial, label)
        self._live.add(allocation)
        self.used_bytes += 0 if is_host else size_bytes
        self.shade(address, size_bytes, IS_ALLOCATED | (IS_HOST if is_host else 0))
        return address

    def _place(self, size_bytes: int, alignment: int) -> int:
        need = -(-(size_bytes + REDZONE_BYTES) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        address = -(-self._next // alignment) * alignment
        if address + need <= self.base + self.span:
            self._next = address + need
            return address
        while True:
            for index, (start, size) in enumerate(self._free):
                address = -(-start // alignment) * alignment
                if address + need <= start + size:
                    rest = [(start, address - start), (address + need, start + size - address - need)]
                    self._free[index : index + 1] = [piece for piece in rest if piece[1] >= ALIGNMENT_BYTES]
                    return address
            if not self._quarantine:
                raise OutOfMemoryError(
                    f"emulated device {self.index}: no free range of {size_bytes:,} bytes aligned to {alignment}, "
                    f"though only {self.used_bytes:,} of {self.size_bytes:,} are in use: memory is fragmented"
                )
            self._release(len(self._quarantine) // 2 + 1)

    def _release(self, count: int) -> None:
        """Makes the `count` ranges freed first usable again; from now on they are forgotten."""
        for start in self._quarantine[:count]:
            old = self._dead.remove(start)
            size = -(-(old.size_bytes + REDZONE_BYTES) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            self._free.append((old.address, size))
        del self._quarantine[:count]
        merged: list[tuple[int, int]] = []
        for address, size in sorted(self._free):
            if merged and merged[-1][0] + merged[-1][1] == address:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((address, size))
        self._free = merged

    def free(self, address: int) -> None:
        """Ends an allocation by its first address.

        Raises:
            DeviceMemoryError: the address starts no live allocation.
        """
        if address not in self._live.by_start:
            raise DeviceMemoryError(f"free: {address:#x} starts no allocation; {self.describe(address)}", address)
        allocation = self._live.remove(address)
        if self.pool_blocks is not None:
            self.pool_blocks.forget(address)
        self.used_bytes -= 0 if allocation.is_host else allocation.size_bytes
        self._mapping.drop(address, allocation.size_bytes)
        self.shade(address, allocation.size_bytes, 0)
        self._dead.add(allocation)
        self._quarantine.append(address)

    def live_allocations(self) -> list[Allocation]:
        """Live allocations, oldest first: at the end of a program, its leaks."""
        return sorted(self._live.by_start.values(), key=lambda allocation: allocation.serial)

    def allocation_of(self, address: int) -> Allocation | None:
        """The live allocation that holds a byte."""
        found = self._live.at_or_below(address)
        return found if found is not None and address < found.end else None

    # -- what the host does with it ------------------------------------------------------------------------------

    def check(self, address: int, size_bytes: int, action: str, *, is_write: bool = False) -> None:
        """Raises DeviceMemoryError unless all of a range lies in one live allocation and, for a write, none of it is
        immutable."""
        found = self._live.at_or_below(address)
        if size_bytes < 0:
            raise InvalidArgumentError(f"{action}: a size of {size_bytes} bytes", param="size_bytes")
        if found is not None and address + size_bytes <= found.end:
            if is_write:
                self._check_writable(address, size_bytes, action)
            return
        first = found.end if found is not None and address < found.end else address
        raise DeviceMemoryError(
            f"{action} of {size_bytes:,} bytes at {address:#x} on emulated device {self.index}: {self.describe(first)}",
            first,
        )

    def _check_writable(self, address: int, size_bytes: int, action: str) -> None:
        states = ctypes.string_at(address + self.shadow_delta, size_bytes)
        first = states.translate(_IMMUTABLE_BIT).find(IS_IMMUTABLE)
        if first >= 0:
            raise DeviceMemoryError(
                f"{action} of {size_bytes:,} bytes at {address:#x} on emulated device {self.index}, some of which were "
                f"declared immutable: {self.describe(address + first)}",
                address + first,
            )

    def declare_immutable(self, address: int, size_bytes: int, *, is_immutable: bool = True) -> None:
        """Freezes a range inside one allocation, or thaws it. Raises DeviceMemoryError."""
        self.check(address, size_bytes, "declaration of immutable memory")
        states = ctypes.string_at(address + self.shadow_delta, size_bytes)
        made = states.translate(_MADE_IMMUTABLE if is_immutable else _MADE_MUTABLE)
        ctypes.memmove(address + self.shadow_delta, made, size_bytes)

    def check_block(self, address: int, size_bytes: int, action: str) -> None:
        """The same of a range in an allocation that a pool has divided: it must lie in one block that lives now."""
        if self.pool_blocks is not None:
            self.pool_blocks.check(address, size_bytes, action)

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        """Copies a C-contiguous buffer to device memory. Raises DeviceMemoryError."""
        view = memoryview(data).cast("B")
        self.check(address, len(view), "write", is_write=True)
        if not len(view):
            return
        if view.readonly:
            ctypes.memmove(address, bytes(view), len(view))
        else:
            ctypes.memmove(address, (ctypes.c_char * len(view)).from_buffer(view), len(view))
        self.mark_written(address, len(view))

    def read(self, address: int, size_bytes: int) -> bytes:
        """A copy of device memory. Raises DeviceMemoryError, but not for bytes never written."""
        self.check(address, size_bytes, "read")
        return ctypes.string_at(address, size_bytes)

    def fill(self, address: int, byte: int, size_bytes: int) -> None:
        """Sets bytes to a value from 0 to 255. Raises DeviceMemoryError."""
        self.check(address, size_bytes, "fill", is_write=True)
        ctypes.memset(address, byte, size_bytes)
        self.mark_written(address, size_bytes)

    def copy(self, destination: int, source: int, size_bytes: int, source_machine: Machine | None = None) -> None:
        """Copies between allocations, of one machine or two; never-written bytes stay marked so."""
        other = source_machine or self
        self.check(destination, size_bytes, "copy to", is_write=True)
        other.check(source, size_bytes, "copy from")
        ctypes.memmove(destination, source, size_bytes)
        allocation = self.allocation_of(destination)
        states = ctypes.string_at(source + other.shadow_delta, size_bytes)
        flag = IS_HOST if allocation is not None and allocation.is_host else 0
        keep = bytes((state & (IS_ALLOCATED | IS_INITIALISED)) | flag for state in range(256))
        ctypes.memmove(destination + self.shadow_delta, states.translate(keep), size_bytes)

    def is_written(self, address: int, size_bytes: int) -> bool:
        """Whether every byte of a range in one allocation has been written."""
        self.check(address, size_bytes, "is_written")
        states = ctypes.string_at(address + self.shadow_delta, size_bytes)
        return not states.translate(None, bytes(state for state in range(256) if state & IS_INITIALISED))

    def mark_written(self, address: int, size_bytes: int) -> None:
        """Marks a range inside one allocation as written."""
        allocation = self.allocation_of(address)
        host = IS_HOST if allocation is not None and allocation.is_host else 0
        self.shade(address, size_bytes, IS_ALLOCATED | IS_INITIALISED | host)

    def shade(self, address: int, size_bytes: int, state: int) -> None:
        """Sets the shadow bytes of a range."""
        shadow = address + self.shadow_delta
        if state == 0 and size_bytes >= 1 << 20:  # inner pages go back to the host and read as zero
            self._mapping.drop(shadow, size_bytes)
            ctypes.memset(shadow, 0, PAGE_BYTES)
            ctypes.memset(shadow + size_bytes - PAGE_BYTES, 0, PAGE_BYTES)
        else:
            ctypes.memset(shadow, state, size_bytes)

    # -- other machines ------------------------------------------------------------------------------------------

    def enable_peer(self, other: Machine) -> None:
        """Lets this machine's kernels touch another's device memory."""
        if other is self or other not in self.neighbours:
            raise InvalidArgumentError(f"device {self.index} is not connected to device {other.index}", param="other")
        self._peers.add(other.index)

    def disable_peer(self, other: Machine) -> None:
        self._peers.discard(other.index)

    def can_access(self, other: Machine) -> bool:
        return other is self or other.index in self._peers

    def regions(self) -> list[tuple[int, int, int, int]]:
        """The memory that its kernels may reach: (base, span, shadow delta, 1 if only pinned bytes are allowed)."""
        others = [(m.base, m.span, m.shadow_delta, 0 if self.can_access(m) else 1) for m in self.neighbours]
        return [(self.base, self.span, self.shadow_delta, 0), *others]

    def is_freed(self, address: int) -> bool:
        """Whether a byte belonged to an allocation that has been freed, as far as that is remembered."""
        dead = self._dead.at_or_below(address)
        return dead is not None and address < dead.end

    # -- words for messages --------------------------------------------------------------------------------------

    def describe(self, address: int) -> str:
        """A description of the memory at an address, or next to it: for the message of a fault."""
        for other in self.neighbours:
            if other.base <= address < other.base + other.span:
                mine = other.allocation_of(address)
                if mine is not None and not mine.is_host and not self.can_access(other):
                    return f"{mine} on device {other.index}, whose memory device {self.index} has no peer access to"
                return f"{other.describe(address)} on device {other.index}"
        if not self.base <= address < self.base + self.span:
            where = "the null page" if 0 <= address < PAGE_BYTES else "no device memory"
            return f"{address:#x} is in {where}"
        live = self.allocation_of(address)
        if live is not None:
            if self.pool_blocks is not None and (block := self.pool_blocks.describe(address)) is not None:
                return f"{block}, in {live}"
            return f"{address - live.address:,} bytes into {live}"
        dead = self._dead.at_or_below(address)
        if dead is not None and address < dead.end:
            return f"{address - dead.address:,} bytes into {dead}, which has been freed"
        below = max(
            filter(None, (self._live.at_or_below(address), self._dead.at_or_below(address))),
            key=lambda allocation: allocation.end, default=None,
        )  # fmt: skip
        above = min(
            filter(None, (self._live.above(address), self._dead.above(address))),
            key=lambda allocation: allocation.address, default=None,
        )  # fmt: skip
        words = []
        if below is not None:
            words.append(f"{address - below.end:,} bytes past the end of {self._named(below)}")
        if above is not None:
            words.append(f"{above.address - address:,} bytes before {self._named(above)}")
        return " and ".join(words) or "nothing has been allocated there"

    def _named(self, allocation: Allocation) -> str:
        return f"{allocation}" + (", freed" if allocation.address in self._dead.by_start else "")


def connect(machines: Iterable[Machine]) -> None:
    """Makes machines the devices of one system: they see each other's pinned memory and can become peers."""
    found = list(machines)
    if len({machine.index for machine in found}) != len(found):
        raise InvalidArgumentError("connect: two machines have the same index", param="machines")
    for machine in found:
        machine.neighbours = [other for other in found if other is not machine]
