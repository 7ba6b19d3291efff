"""A kernel's accesses to device memory, for the checker of streams: `stream_order.py`, in compiled code.

The launch array's LAUNCH_STREAM_ORDER is the address of five int64: the cells' address, the arena's, its bytes, the
address of the work's vector clock (uint32 a slot), its epoch. Or it is 0, where streams are not checked.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at, u32_at
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.warp_state import LAUNCH_STREAM_ORDER, WARP_LAUNCH

ORDER_CELLS, ORDER_ARENA, ORDER_ARENA_BYTES, ORDER_CLOCK, ORDER_EPOCH = range(5)
ORDER_FIELDS = 5
GRANULE_SHIFT = 5
CELLS = 4
"""uint32 a granule: the epoch of its last write, then of three reads."""
SEQUENCE_BITS = 24
MAX_SEQUENCE = (1 << SEQUENCE_BITS) - 1

_MISSING_EVENT = int(FaultKind.MISSING_EVENT)


@njit
def _is_unordered(clock, epoch):
    return clock[epoch >> SEQUENCE_BITS] < (epoch & MAX_SEQUENCE)


@njit
def _touch(order, granule, is_write):
    """Notes a read or write of a granule; True if it is unordered with another stream's access there."""
    cells = u32_at(order[ORDER_CELLS] + granule * (4 * CELLS))
    epoch = order[ORDER_EPOCH]
    clock = u32_at(order[ORDER_CLOCK])
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
    order = i64_at(launch[LAUNCH_STREAM_ORDER])
    before = -1
    for lane in range(32):
        if mask >> lane & 1:
            relative = int(addresses[lane]) + offset - order[ORDER_ARENA]
            granule = relative >> GRANULE_SHIFT
            if granule != before and 0 <= relative < order[ORDER_ARENA_BYTES]:
                before = granule
                if _touch(order, granule, is_write):
                    return True
    return False


@njit
def touch_range(warp, site, lane, address, size, is_write):
    """A range of device memory that one lane touches. Returns 1 with a fault reported, or 0."""
    launch = i64_at(warp[WARP_LAUNCH])
    if launch[LAUNCH_STREAM_ORDER] == 0 or size <= 0:
        return 0
    order = i64_at(launch[LAUNCH_STREAM_ORDER])
    relative = address - order[ORDER_ARENA]
    if 0 <= relative <= order[ORDER_ARENA_BYTES] - size:
        for granule in range(relative >> GRANULE_SHIFT, ((relative + size - 1) >> GRANULE_SHIFT) + 1):
            if _touch(order, granule, is_write):
                at = order[ORDER_ARENA] + (granule << GRANULE_SHIFT)
                return report(warp, _MISSING_EVENT, site, lane, at, 1 if is_write else 0, size, 0, 0)
    return 0
