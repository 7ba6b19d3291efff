"""A kernel's accesses to device memory, for the checker of streams: `stream_order.py`, in compiled code."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba_kernels.cache import njit
from numba_kernels.pointers import u32_at
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.records import Long, Record, Words


class StreamTouch(Record):
    """A launch's data of the checker, at launch.stream_order if streams are checked."""

    cells = Long()  # address of the granules' cells
    arena, arena_bytes = Long(), Long()
    clock = Words()  # the work's vector clock
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
