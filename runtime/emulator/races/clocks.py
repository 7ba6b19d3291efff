"""The layout of the race checkers' data, and a kernel's accesses to device memory for `stream_order.py`.

`vector_clocks.py` orders the warps of a launch, `rules.py` checks their accesses.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from collections.abc import Iterable

from numba_kernels.cache import njit
from numba_kernels.pointers import u32_at
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.records import Long, Record, To, Words, at
from runtime.emulator.translation.ptx import TYPE_BYTES, Instruction

SCOPE_CTA, SCOPE_CLUSTER, SCOPE_GPU = 1, 2, 3


class Races(Record):
    """The checker's data of one OS thread of a launch."""

    base = Long()  # clocks up to here are of earlier launches
    clock = Long()  # the highest clock given out on this thread
    next = Long()  # memory for vectors, taken from here upwards
    table = To("Entry")  # hash table of published vectors
    table_used = Long()
    agents = Long()  # warps of the launch
    width = Long()  # warps of a cluster
    shift = Long()  # log2 of the bytes a shadow entry stands for
    global_writes = Long()  # address of uint64 for each granule of the arena
    global_reads = Long()  # address of 2 uint64 for each granule of the arena
    version = Long()  # counts changes of vectors over all warps
    shared_granules = Long()
    scratch = Long()  # address of a vector over a cluster


class SharedRaces(Record):
    """The checker's data of a block."""

    writes = Long()  # address of uint64 for each granule: epoch of the last write
    latest_read = Long()  # address of uint32 for each granule: the highest clock of a read
    reads = Long()  # address of uint32[warps of the cluster, granules]: the clock of each warp's last read
    granules = Long()
    base = Long()  # the clock at which the block began
    warp_clocks = Long()  # address of the first warp's record


class Clock(Record):
    """The checker's data of a warp; the vector follows the record."""

    now = Long()
    floor = Long()  # everything of the cluster up to this clock is ordered before the warp
    index = Long()  # of the warp in its cluster
    vector = Long()  # address of uint32[3, stride]: the vector; covered by fences of any scope; of gpu scope
    stride = Long()  # warps of the cluster, rounded up to 16
    has_fence = Long()  # bit 0: the second row is in use, bit 1: the third is
    others = Long()  # address of uint32[warps of the launch], or 0 before any order with other clusters
    others_version = Long()
    cluster = Long()  # the number of the cluster's first warp among all warps of the launch
    races = To("Races")
    others_memory = Long()  # memory for `others` when needed; kept from block to block


class Entry(Record):
    """An entry of the hash table: the vectors published under a key."""

    key = Long()
    pending = Long()  # rows as Clock.vector's: arrived, phase not complete
    completed = Long()  # rows as Clock.vector's: a waiter is ordered after them
    launch = Long()  # vector over all warps, published at gpu scope
    cluster = Long()  # vector over a cluster, published at a smaller scope
    cluster_owner = Long()  # Clock.cluster of the cluster that `cluster` is of
    has_fence = Long()  # Clock.has_fence of pending (bits 0 and 1) and completed (bits 2 and 3)


shared_races_at, clock_at, entry_at = at(SharedRaces), at(Clock), at(Entry)
TABLE_ENTRIES = 16384
TABLE_LIMIT = 8192
"""Addresses of atomics beyond so many share one entry: then a race may be missed; none is invented."""
OVERFLOW_KEY = 1
FIND, CREATE, MUST_CREATE = 0, 1, 2

LOAD, STORE, ATOMIC = range(3)
IN_SHARED, IN_GLOBAL = 0, 1
ACCESS_STRONG, ACCESS_NC, ACCESS_SAME = 1, 2, 4
"""Flags of one lane's access: it is strong; it is a .nc load; it writes what is there already."""


def granule_shift(instructions: Iterable[Instruction]) -> int:
    """log2 of the bytes that a shadow entry stands for: the smallest access to shared or device memory, at most 4."""
    smallest = 4
    for instruction in instructions:
        parts = instruction.parts
        if parts[0] in ("ld", "st", "atom", "red") and not {"param", "local", "const"} & set(parts):
            smallest = min(smallest, *(TYPE_BYTES[part] for part in parts if part in TYPE_BYTES))
    return smallest.bit_length() - 1


class StreamTouch(Record):
    """A launch's data of the checker, at launch.stream_order if streams are checked."""

    cells = Long()  # address of the granules' cells
    arena, arena_bytes = Long(), Long()
    clock = Words()  # the work's vector clock
    early = Words()  # the clock of what had ended when the work began, if it may have begun early
    epoch = Long()


GRANULE_SHIFT = 5
CELLS = 4
"""uint32 a granule: the epoch of its last write, then of three reads."""
SEQUENCE_BITS = 24
MAX_SEQUENCE = (1 << SEQUENCE_BITS) - 1


@njit
def _is_unordered(clock, epoch):
    return clock[epoch >> SEQUENCE_BITS] < (epoch & MAX_SEQUENCE)


@njit
def _touch(order, granule, is_write):
    """Notes a read or write of a granule; True if it is unordered with another stream's access there."""
    cells = u32_at(order.cells + granule * (4 * CELLS))
    epoch = order.epoch
    clock = order.clock
    if cells[0] != epoch and _is_unordered(clock, cells[0]):
        return True
    if is_write:
        if cells[0] == epoch and cells[1] == 0 and cells[2] == 0 and cells[3] == 0:
            return False
        for index in range(1, CELLS):
            if _is_unordered(clock, cells[index]):
                return True
        cells[0] = epoch
        for index in range(1, CELLS):
            cells[index] = 0
        return False
    for index in range(1, CELLS):
        if cells[index] == epoch:
            return False
    for index in range(1, CELLS - 1):
        if not _is_unordered(clock, cells[index]):
            cells[index] = epoch
            return False
    cells[CELLS - 1] = epoch
    return False


@njit
def was_written_before(launch, address, size):
    """Whether all works that have written a range had ended when this dependent launch began."""
    order = launch.stream_order
    relative = address - order.arena
    for granule in range(relative >> GRANULE_SHIFT, ((relative + size - 1) >> GRANULE_SHIFT) + 1):
        if _is_unordered(order.early, u32_at(order.cells + granule * (4 * CELLS))[0]):
            return False
    return True


@njit
def touch_lanes(launch, addresses, offset, mask, is_write):
    """A warp's aligned accesses of at most 32 bytes a lane: each lies in one granule. True where one is at fault."""
    order = launch.stream_order
    before = -1
    for lane in range(32):
        if mask >> lane & 1:
            relative = int(addresses[lane]) + offset - order.arena
            granule = relative >> GRANULE_SHIFT
            if granule != before and 0 <= relative < order.arena_bytes:
                before = granule
                if _touch(order, granule, is_write):
                    return True
    return False


@njit
def touch_range(warp, site, lane, address, size, is_write):
    """A range of device memory that one lane touches. Returns 1 with a fault reported, or 0."""
    launch = warp.launch
    if not launch.stream_order or size <= 0:
        return 0
    order = launch.stream_order
    relative = address - order.arena
    if 0 <= relative <= order.arena_bytes - size:
        for granule in range(relative >> GRANULE_SHIFT, ((relative + size - 1) >> GRANULE_SHIFT) + 1):
            if _touch(order, granule, is_write):
                at = order.arena + (granule << GRANULE_SHIFT)
                return report(warp, FaultKind.MISSING_EVENT, site, lane, at, 1 if is_write else 0, size, 0, 0)
    return 0
