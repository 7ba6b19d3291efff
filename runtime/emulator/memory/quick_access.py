"""A warp's loads and stores, the quick way: the operations ``load_32x1`` … ``store_64x4`` (slot width, vector length).

They try `lane_vectors`, after the race checker has checked the whole warp. Accesses that fail, and all while traffic is
counted, go to one operation, ``memory_careful`` of `careful_access.py`.
"""

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from runtime.emulator.execution.state import CHECK_MEMORY, CHECK_RACES, CHECK_UNINITIALIZED, COUNT_MEMORY, SHARED_WINDOW
from runtime.emulator.memory.careful_access import IS_SIGNED, IS_STORE, IS_STRONG, extend_sign, memory_careful
from runtime.emulator.memory.lane_vectors import load_lanes, store_lanes
from runtime.emulator.memory.locate import CONST, GENERIC, GLOBAL, SHARED, SHARED_CLUSTER
from runtime.emulator.memory.pointers import address_of, addresses_of, trailing_zeros
from runtime.emulator.races.accesses import warp_is_fine
from runtime.emulator.races.stream_touch import touch_lanes
from runtime.emulator.translation.operations import OPERATIONS as OPERATIONS
from runtime.emulator.translation.operations import operation

_EVERY_BYTE = 0x0101010101010101


@njit
def window_of(warp, addresses, offset, mask, space, flags, total):
    """The likely window of a warp access of `total` bytes a lane: (start, bytes, host, shadow, need, want) for
    `lane_vectors`. Zero bytes where only the careful way will do. The race checker has run."""
    block, launch = warp.block, warp.launch
    checks = launch.checks
    start, size, host, shadow = types.int64(0), types.int64(0), types.int64(0), types.int64(0)
    is_racing = checks & CHECK_RACES != 0 and bool(warp.clock)
    if checks & COUNT_MEMORY or warp.is_before_dependency or (is_racing and flags & IS_STRONG):
        return start, size, host, shadow, start, start
    block_address = types.int64(0)
    inside = space
    if space == GENERIC and mask != 0:
        first = types.int64(addresses[trailing_zeros(mask)]) + offset
        inside = SHARED if first >= SHARED_WINDOW else GLOBAL
        start = types.int64(SHARED_WINDOW) if first >= SHARED_WINDOW else start
    if inside in (GLOBAL, CONST):
        start, size, host = launch.arena, launch.arena_bytes, launch.arena
        shadow = launch.arena_shadow
        if launch.stream_order and touch_lanes(launch, addresses, offset, mask, flags & IS_STORE != 0):
            size = types.int64(0)
    elif inside in (SHARED, SHARED_CLUSTER) and not (flags & IS_STORE and block.proxy):
        size, host, shadow = block.shared_bytes, block.shared, block.shared_shadow
        block_address = address_of(warp.block)
    if (
        is_racing
        and size
        and not warp_is_fine(warp, mask, addresses, offset, start, size, block_address, total, flags & IS_STORE)
    ):
        size = types.int64(0)
    if flags & IS_STORE:
        need, want = types.int64(0x71 * _EVERY_BYTE), types.int64(_EVERY_BYTE)
    elif checks & CHECK_UNINITIALIZED:
        need, want = types.int64(0x13 * _EVERY_BYTE), types.int64(0x03 * _EVERY_BYTE)
    else:
        need, want = types.int64(0x11 * _EVERY_BYTE), types.int64(_EVERY_BYTE)
    if not checks & (CHECK_MEMORY | CHECK_UNINITIALIZED):
        shadow = types.int64(0)
    return start, size, host, shadow, need, want


def _of_size(move, count, is_wide):
    """``f(warp, mask, site, addresses, offset, space, size, flags, slots)``: an access of `count` elements a lane.

    `move` is `load_lanes` or `store_lanes` for these, all of one size; `is_wide`: their slots have 64 bits.
    """

    @njit
    def access(warp, mask, site, addresses, offset, space, size, flags, slots):
        start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, count * size)
        if move(addresses, offset, mask, start, limit, host, shadow, need, want, *slots):
            return 0
        places = addresses_of(slots)
        return memory_careful(warp, mask, site, addresses, offset, space, size, count, is_wide, flags, *places)

    return access


def _of_any_size(make, count):
    """As `_of_size`, of elements of 1, 2 or 4 bytes in 32-bit slots. `make`: `load_lanes` or `store_lanes`."""
    one, two, four = make(1, count, 32), make(2, count, 32), make(4, count, 32)

    @njit
    def access(warp, mask, site, addresses, offset, space, size, flags, slots):
        start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, count * size)
        done = 0
        if size == 4:
            done = four(addresses, offset, mask, start, limit, host, shadow, need, want, *slots)
        elif size == 2:
            done = two(addresses, offset, mask, start, limit, host, shadow, need, want, *slots)
        else:
            done = one(addresses, offset, mask, start, limit, host, shadow, need, want, *slots)
        places = addresses_of(slots)
        if not done:
            return memory_careful(warp, mask, site, addresses, offset, space, size, count, 0, flags, *places)
        if flags & IS_SIGNED:
            for index in range(count):
                extend_sign(mask, places[index], size, 0, flags)
        return 0

    return access


# Operations take slots one by one.


def _with_1_slot(access):
    def run(warp, mask, site, addresses, offset, space, size, flags, a):
        return access(warp, mask, site, addresses, offset, space, size, flags, (a,))

    return run


def _with_2_slots(access):
    def run(warp, mask, site, addresses, offset, space, size, flags, a, b):
        return access(warp, mask, site, addresses, offset, space, size, flags, (a, b))

    return run


def _with_4_slots(access):
    def run(warp, mask, site, addresses, offset, space, size, flags, a, b, c, d):
        return access(warp, mask, site, addresses, offset, space, size, flags, (a, b, c, d))

    return run


def _with_8_slots(access):
    def run(warp, mask, site, addresses, offset, space, size, flags, a, b, c, d, e, f, g, h):
        return access(warp, mask, site, addresses, offset, space, size, flags, (a, b, c, d, e, f, g, h))

    return run


for _name, _make in (("load", load_lanes), ("store", store_lanes)):
    for _count, _with_slots in ((1, _with_1_slot), (2, _with_2_slots), (4, _with_4_slots)):
        operation(f"{_name}_32x{_count}", "qllll" + "p" * _count)(_with_slots(_of_any_size(_make, _count)))
        operation(f"{_name}_64x{_count}", "qllll" + "q" * _count)(
            _with_slots(_of_size(_make(8, _count, 64), _count, 1))
        )
    operation(f"{_name}_32x8", "qllll" + "p" * 8)(_with_8_slots(_of_size(_make(4, 8, 32), 8, 0)))
