"""A warp's loads and stores, the quick way: the operations ``load_32x1`` … ``store_64x4`` (slot width, vector length).

They try `lane_vectors`, after the race checker has been asked about the whole warp. Whatever does not pass, and every
access while traffic is counted, goes to one operation, ``memory_careful`` of `careful_access.py`.
"""

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at
from runtime.device.emulator.execution.warp_state import (
    BLOCK_PROXY,
    BLOCK_SHARED,
    BLOCK_SHARED_BYTES,
    BLOCK_SHARED_SHADOW,
    CHECK_MEMORY,
    CHECK_RACES,
    CHECK_UNINITIALIZED,
    COUNT_MEMORY,
    LAUNCH_ARENA,
    LAUNCH_ARENA_BYTES,
    LAUNCH_ARENA_SHADOW,
    LAUNCH_CHECKS,
    LAUNCH_STREAM_ORDER,
    SHARED_WINDOW,
    WARP_BEFORE_DEPENDENCY,
    WARP_BLOCK,
    WARP_CLOCK,
    WARP_LAUNCH,
)
from runtime.device.emulator.memory.careful_access import IS_SIGNED, IS_STORE, IS_STRONG, extend_sign
from runtime.device.emulator.memory.lane_vectors import load_lanes, store_lanes
from runtime.device.emulator.memory.locate import CONST, GENERIC, GLOBAL, SHARED, SHARED_CLUSTER
from runtime.device.emulator.memory.pointers import address_of, trailing_zeros
from runtime.device.emulator.races.accesses import warp_is_fine
from runtime.device.emulator.races.stream_touch import touch_lanes
from runtime.device.emulator.translation.operation_calls import by_symbol
from runtime.device.emulator.translation.operations import OPERATIONS as OPERATIONS
from runtime.device.emulator.translation.operations import operation

_EVERY_BYTE = 0x0101010101010101
_CAREFUL = by_symbol("memory_careful", "qliiiiillllllll")


@njit
def window_of(warp, addresses, offset, mask, space, flags, total):
    """Where a warp access of `total` bytes a lane most likely goes: (start, bytes, host, shadow, need, want) for
    `lane_vectors`. Zero bytes where only the careful way will do. The race checker has been asked."""
    block, launch = i64_at(warp[WARP_BLOCK]), i64_at(warp[WARP_LAUNCH])
    checks = launch[LAUNCH_CHECKS]
    start, size, host, shadow = types.int64(0), types.int64(0), types.int64(0), types.int64(0)
    is_racing = checks & CHECK_RACES != 0 and warp[WARP_CLOCK] != 0
    if checks & COUNT_MEMORY or warp[WARP_BEFORE_DEPENDENCY] or (is_racing and flags & IS_STRONG):
        return start, size, host, shadow, start, start
    block_address = types.int64(0)
    inside = space
    if space == GENERIC and mask != 0:
        first = types.int64(addresses[trailing_zeros(mask)]) + offset
        inside = SHARED if first >= SHARED_WINDOW else GLOBAL
        start = types.int64(SHARED_WINDOW) if first >= SHARED_WINDOW else start
    if inside in (GLOBAL, CONST):
        start, size, host = launch[LAUNCH_ARENA], launch[LAUNCH_ARENA_BYTES], launch[LAUNCH_ARENA]
        shadow = launch[LAUNCH_ARENA_SHADOW]
        if launch[LAUNCH_STREAM_ORDER] and touch_lanes(launch, addresses, offset, mask, flags & IS_STORE != 0):
            size = types.int64(0)
    elif inside in (SHARED, SHARED_CLUSTER) and not (flags & IS_STORE and block[BLOCK_PROXY]):
        size, host, shadow = block[BLOCK_SHARED_BYTES], block[BLOCK_SHARED], block[BLOCK_SHARED_SHADOW]
        block_address = warp[WARP_BLOCK]
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


_load_1x1, _load_2x1, _load_4x1 = load_lanes(1, 1, 32), load_lanes(2, 1, 32), load_lanes(4, 1, 32)
_load_1x2, _load_2x2, _load_4x2 = load_lanes(1, 2, 32), load_lanes(2, 2, 32), load_lanes(4, 2, 32)
_load_1x4, _load_2x4, _load_4x4 = load_lanes(1, 4, 32), load_lanes(2, 4, 32), load_lanes(4, 4, 32)
_load_4x8 = load_lanes(4, 8, 32)
_load_8x1, _load_8x2, _load_8x4 = load_lanes(8, 1, 64), load_lanes(8, 2, 64), load_lanes(8, 4, 64)
_store_1x1, _store_2x1, _store_4x1 = store_lanes(1, 1, 32), store_lanes(2, 1, 32), store_lanes(4, 1, 32)
_store_1x2, _store_2x2, _store_4x2 = store_lanes(1, 2, 32), store_lanes(2, 2, 32), store_lanes(4, 2, 32)
_store_1x4, _store_2x4, _store_4x4 = store_lanes(1, 4, 32), store_lanes(2, 4, 32), store_lanes(4, 4, 32)
_store_4x8 = store_lanes(4, 8, 32)
_store_8x1, _store_8x2, _store_8x4 = store_lanes(8, 1, 64), store_lanes(8, 2, 64), store_lanes(8, 4, 64)


@njit
def _finish(mask, size, is_wide, flags, d0, d1, d2, d3):
    if flags & IS_SIGNED:
        extend_sign(mask, d0, size, is_wide, flags)
        extend_sign(mask, d1, size, is_wide, flags)
        extend_sign(mask, d2, size, is_wide, flags)
        extend_sign(mask, d3, size, is_wide, flags)
    return 0


@operation("load_32x1", "qliiip")
def load_32x1(warp, mask, site, addresses, offset, space, size, flags, d0):
    start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, size)
    done = 0
    if size == 4:
        done = _load_4x1(addresses, offset, mask, start, limit, host, shadow, need, want, d0)
    elif size == 2:
        done = _load_2x1(addresses, offset, mask, start, limit, host, shadow, need, want, d0)
    else:
        done = _load_1x1(addresses, offset, mask, start, limit, host, shadow, need, want, d0)
    a0 = address_of(d0)
    if done:
        if flags & IS_SIGNED:
            extend_sign(mask, a0, size, 0, flags)
        return 0
    return _CAREFUL(warp, mask, site, addresses, offset, space, size, 1, 0, flags, a0, 0, 0, 0, 0, 0, 0, 0)


@operation("load_32x2", "qliiipp")
def load_32x2(warp, mask, site, addresses, offset, space, size, flags, d0, d1):
    start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, 2 * size)
    done = 0
    if size == 4:
        done = _load_4x2(addresses, offset, mask, start, limit, host, shadow, need, want, d0, d1)
    elif size == 2:
        done = _load_2x2(addresses, offset, mask, start, limit, host, shadow, need, want, d0, d1)
    else:
        done = _load_1x2(addresses, offset, mask, start, limit, host, shadow, need, want, d0, d1)
    a0, a1 = address_of(d0), address_of(d1)
    if done:
        if flags & IS_SIGNED:
            extend_sign(mask, a0, size, 0, flags)
            extend_sign(mask, a1, size, 0, flags)
        return 0
    return _CAREFUL(warp, mask, site, addresses, offset, space, size, 2, 0, flags, a0, a1, 0, 0, 0, 0, 0, 0)


@operation("load_32x4", "qliiipppp")
def load_32x4(warp, mask, site, addresses, offset, space, size, flags, d0, d1, d2, d3):
    start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, 4 * size)
    done = 0
    if size == 4:
        done = _load_4x4(addresses, offset, mask, start, limit, host, shadow, need, want, d0, d1, d2, d3)
    elif size == 2:
        done = _load_2x4(addresses, offset, mask, start, limit, host, shadow, need, want, d0, d1, d2, d3)
    else:
        done = _load_1x4(addresses, offset, mask, start, limit, host, shadow, need, want, d0, d1, d2, d3)
    a0, a1, a2, a3 = address_of(d0), address_of(d1), address_of(d2), address_of(d3)
    if done:
        return _finish(mask, size, 0, flags, a0, a1, a2, a3)
    return _CAREFUL(warp, mask, site, addresses, offset, space, size, 4, 0, flags, a0, a1, a2, a3, 0, 0, 0, 0)


@operation("load_32x8", "qliiipppppppp")
def load_32x8(warp, mask, site, addresses, offset, space, size, flags, d0, d1, d2, d3, d4, d5, d6, d7):
    start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, 8 * size)
    if _load_4x8(addresses, offset, mask, start, limit, host, shadow, need, want, d0, d1, d2, d3, d4, d5, d6, d7):
        return 0
    return _CAREFUL(
        warp, mask, site, addresses, offset, space, size, 8, 0, flags, address_of(d0), address_of(d1), address_of(d2),
        address_of(d3), address_of(d4), address_of(d5), address_of(d6), address_of(d7),
    )  # fmt: skip


@operation("load_64x1", "qliiiq")
def load_64x1(warp, mask, site, addresses, offset, space, size, flags, d0):
    start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, size)
    if _load_8x1(addresses, offset, mask, start, limit, host, shadow, need, want, d0):
        return 0
    a0 = address_of(d0)
    return _CAREFUL(warp, mask, site, addresses, offset, space, size, 1, 1, flags, a0, 0, 0, 0, 0, 0, 0, 0)


@operation("load_64x2", "qliiiqq")
def load_64x2(warp, mask, site, addresses, offset, space, size, flags, d0, d1):
    start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, 2 * size)
    if _load_8x2(addresses, offset, mask, start, limit, host, shadow, need, want, d0, d1):
        return 0
    a0, a1 = address_of(d0), address_of(d1)
    return _CAREFUL(warp, mask, site, addresses, offset, space, size, 2, 1, flags, a0, a1, 0, 0, 0, 0, 0, 0)


@operation("load_64x4", "qliiiqqqq")
def load_64x4(warp, mask, site, addresses, offset, space, size, flags, d0, d1, d2, d3):
    start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, 4 * size)
    if _load_8x4(addresses, offset, mask, start, limit, host, shadow, need, want, d0, d1, d2, d3):
        return 0
    a0, a1, a2, a3 = address_of(d0), address_of(d1), address_of(d2), address_of(d3)
    return _CAREFUL(warp, mask, site, addresses, offset, space, size, 4, 1, flags, a0, a1, a2, a3, 0, 0, 0, 0)


@operation("store_32x1", "qliiip")
def store_32x1(warp, mask, site, addresses, offset, space, size, flags, s0):
    start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, size)
    done = 0
    if size == 4:
        done = _store_4x1(addresses, offset, mask, start, limit, host, shadow, need, want, s0)
    elif size == 2:
        done = _store_2x1(addresses, offset, mask, start, limit, host, shadow, need, want, s0)
    else:
        done = _store_1x1(addresses, offset, mask, start, limit, host, shadow, need, want, s0)
    if done:
        return 0
    a0 = address_of(s0)
    return _CAREFUL(warp, mask, site, addresses, offset, space, size, 1, 0, flags, a0, 0, 0, 0, 0, 0, 0, 0)


@operation("store_32x2", "qliiipp")
def store_32x2(warp, mask, site, addresses, offset, space, size, flags, s0, s1):
    start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, 2 * size)
    done = 0
    if size == 4:
        done = _store_4x2(addresses, offset, mask, start, limit, host, shadow, need, want, s0, s1)
    elif size == 2:
        done = _store_2x2(addresses, offset, mask, start, limit, host, shadow, need, want, s0, s1)
    else:
        done = _store_1x2(addresses, offset, mask, start, limit, host, shadow, need, want, s0, s1)
    if done:
        return 0
    a0, a1 = address_of(s0), address_of(s1)
    return _CAREFUL(warp, mask, site, addresses, offset, space, size, 2, 0, flags, a0, a1, 0, 0, 0, 0, 0, 0)


@operation("store_32x4", "qliiipppp")
def store_32x4(warp, mask, site, addresses, offset, space, size, flags, s0, s1, s2, s3):
    start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, 4 * size)
    done = 0
    if size == 4:
        done = _store_4x4(addresses, offset, mask, start, limit, host, shadow, need, want, s0, s1, s2, s3)
    elif size == 2:
        done = _store_2x4(addresses, offset, mask, start, limit, host, shadow, need, want, s0, s1, s2, s3)
    else:
        done = _store_1x4(addresses, offset, mask, start, limit, host, shadow, need, want, s0, s1, s2, s3)
    if done:
        return 0
    a0, a1, a2, a3 = address_of(s0), address_of(s1), address_of(s2), address_of(s3)
    return _CAREFUL(warp, mask, site, addresses, offset, space, size, 4, 0, flags, a0, a1, a2, a3, 0, 0, 0, 0)


@operation("store_32x8", "qliiipppppppp")
def store_32x8(warp, mask, site, addresses, offset, space, size, flags, s0, s1, s2, s3, s4, s5, s6, s7):
    start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, 8 * size)
    if _store_4x8(addresses, offset, mask, start, limit, host, shadow, need, want, s0, s1, s2, s3, s4, s5, s6, s7):
        return 0
    return _CAREFUL(
        warp, mask, site, addresses, offset, space, size, 8, 0, flags, address_of(s0), address_of(s1), address_of(s2),
        address_of(s3), address_of(s4), address_of(s5), address_of(s6), address_of(s7),
    )  # fmt: skip


@operation("store_64x1", "qliiiq")
def store_64x1(warp, mask, site, addresses, offset, space, size, flags, s0):
    start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, size)
    if _store_8x1(addresses, offset, mask, start, limit, host, shadow, need, want, s0):
        return 0
    a0 = address_of(s0)
    return _CAREFUL(warp, mask, site, addresses, offset, space, size, 1, 1, flags, a0, 0, 0, 0, 0, 0, 0, 0)


@operation("store_64x2", "qliiiqq")
def store_64x2(warp, mask, site, addresses, offset, space, size, flags, s0, s1):
    start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, 2 * size)
    if _store_8x2(addresses, offset, mask, start, limit, host, shadow, need, want, s0, s1):
        return 0
    a0, a1 = address_of(s0), address_of(s1)
    return _CAREFUL(warp, mask, site, addresses, offset, space, size, 2, 1, flags, a0, a1, 0, 0, 0, 0, 0, 0)


@operation("store_64x4", "qliiiqqqq")
def store_64x4(warp, mask, site, addresses, offset, space, size, flags, s0, s1, s2, s3):
    start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, 4 * size)
    if _store_8x4(addresses, offset, mask, start, limit, host, shadow, need, want, s0, s1, s2, s3):
        return 0
    a0, a1, a2, a3 = address_of(s0), address_of(s1), address_of(s2), address_of(s3)
    return _CAREFUL(warp, mask, site, addresses, offset, space, size, 4, 1, flags, a0, a1, a2, a3, 0, 0, 0, 0)
