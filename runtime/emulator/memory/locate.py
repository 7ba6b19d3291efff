"""Resolves one lane's address, in any state space, and checks whether its bytes may be touched.

The careful way, one lane at a time: an error becomes a fault that names the first bad byte. In the fault
record `a` is the action, `b` the access's size in bytes, `c` the state space, `d` the lane's own address; addresses are
as the program sees them (shared and local ones are offsets).
"""

from __future__ import annotations

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at, u8_at
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.warp_state import (
    BLOCK_SHARED,
    BLOCK_SHARED_BYTES,
    BLOCK_SHARED_SHADOW,
    CHECK_MEMORY,
    CHECK_UNINITIALIZED,
    LAUNCH_ARENA,
    LAUNCH_ARENA_BYTES,
    LAUNCH_ARENA_SHADOW,
    LAUNCH_CHECKS,
    LAUNCH_LOCAL_BYTES,
    LAUNCH_PARAMETER_BYTES,
    LAUNCH_PARAMETERS,
    LAUNCH_REGIONS,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_OFFSET_MASK,
    SHARED_RANK_SHIFT,
    SHARED_WINDOW,
    WARP_BEFORE_DEPENDENCY,
    WARP_BLOCK,
    WARP_LAUNCH,
    WARP_LOCAL,
    WARP_LOCAL_SHADOW,
)
from runtime.emulator.memory.cluster_window import block_of_rank
from runtime.emulator.memory.device_memory import (
    IS_ALLOCATED,
    IS_BEING_READ,
    IS_FREED,
    IS_HOST,
    IS_IMMUTABLE,
    IS_IN_FLIGHT,
    IS_INITIALISED,
)
from runtime.emulator.races.accesses import ATOMIC as ATOMIC
from runtime.emulator.races.accesses import LOAD as LOAD
from runtime.emulator.races.accesses import STORE as STORE
from runtime.emulator.races.stream_touch import touch_range

ACTIONS = {LOAD: "load", STORE: "store", ATOMIC: "atomic"}
GENERIC, GLOBAL, SHARED, SHARED_CLUSTER, LOCAL, PARAM, CONST = range(7)
SPACE_NAMES = ("generic", "global", "shared", "shared::cluster", "local", "param", "const")

HOST, BLOCK, SHADOW = range(3)
"""The result of `locate`: host address; address of the block array whose shared memory it is, else 0; address of the
first shadow byte, or 0 without checks."""
NOT_DEVICE = -1  # BLOCK of local, param and const places, which cannot race

_OUT_OF_BOUNDS = int(FaultKind.OUT_OF_BOUNDS)
_ACCESS_AFTER_FREE = int(FaultKind.ACCESS_AFTER_FREE)
_MISALIGNED = int(FaultKind.MISALIGNED)
_UNINITIALIZED = int(FaultKind.UNINITIALIZED)
_WRONG_SPACE = int(FaultKind.WRONG_SPACE)
_NO_PEER_ACCESS = int(FaultKind.NO_PEER_ACCESS)
_IN_FLIGHT = int(FaultKind.IN_FLIGHT)
_SOURCE_IN_FLIGHT = int(FaultKind.SOURCE_IN_FLIGHT)
_BEFORE_DEPENDENCY = int(FaultKind.BEFORE_DEPENDENCY)
_IMMUTABLE_WRITTEN = int(FaultKind.IMMUTABLE_WRITTEN)


@njit
def _space_of(address):
    """The state space that a generic address lies in."""
    if address >= SHARED_WINDOW:
        return SHARED_CLUSTER
    if address >= LOCAL_WINDOW:
        return LOCAL
    if address >= PARAM_WINDOW:
        return PARAM
    return GLOBAL


@njit
def _shared_place(warp, site, lane, address, size, action, space, place):
    """`address` is a shared address."""
    block_address = warp[WARP_BLOCK]
    rank = (address >> SHARED_RANK_SHIFT) - 1
    if address < 0 or address >> 32 != 0:
        return report(warp, _OUT_OF_BOUNDS, site, lane, address, action, size, space, address)
    if rank >= 0:
        block_address = block_of_rank(warp, site, lane, rank)
        if block_address == 0:
            return 1
        if space == SHARED and block_address != warp[WARP_BLOCK]:
            return report(warp, _WRONG_SPACE, site, lane, address, action, size, space, address)
    block = i64_at(block_address)
    offset = address & SHARED_OFFSET_MASK
    if offset + size > block[BLOCK_SHARED_BYTES]:
        first = address + max(0, block[BLOCK_SHARED_BYTES] - offset)
        return report(warp, _OUT_OF_BOUNDS, site, lane, first, action, size, space, address)
    place[HOST] = block[BLOCK_SHARED] + offset
    place[BLOCK] = block_address
    place[SHADOW] = block[BLOCK_SHARED_SHADOW] + offset if block[BLOCK_SHARED_SHADOW] else 0
    return 0


@njit
def _may_touch_early(launch, address, size, action):
    """Whether a dependent launch may touch a range before griddepcontrol.wait: it only reads immutable bytes."""
    relative = address - launch[LAUNCH_ARENA]
    if action != LOAD or not 0 <= relative <= launch[LAUNCH_ARENA_BYTES] - size:
        return False
    shadow, every = u8_at(launch[LAUNCH_ARENA_SHADOW] + relative), 255
    for index in range(size):
        every &= shadow[index]
    return every & IS_IMMUTABLE != 0


@njit
def global_place(warp, site, lane, address, size, action, space, place):
    launch = i64_at(warp[WARP_LAUNCH])
    if warp[WARP_BEFORE_DEPENDENCY] and not _may_touch_early(launch, address, size, action):
        return report(warp, _BEFORE_DEPENDENCY, site, lane, address, action, size, space, address)
    place[HOST] = address
    place[BLOCK] = 0
    place[SHADOW] = 0
    relative = address - launch[LAUNCH_ARENA]
    if 0 <= relative <= launch[LAUNCH_ARENA_BYTES] - size:
        place[SHADOW] = launch[LAUNCH_ARENA_SHADOW] + relative
        return touch_range(warp, site, lane, address, size, action != LOAD)
    if launch[LAUNCH_REGIONS]:
        regions = i64_at(launch[LAUNCH_REGIONS])
        for index in range(regions[0]):
            region = i64_at(launch[LAUNCH_REGIONS] + 8 + index * 32)  # base, bytes, shadow delta, pinned bytes only
            relative = address - region[0]
            if 0 <= relative <= region[1] - size:
                place[SHADOW] = address + region[2]
                place[BLOCK] = NOT_DEVICE
                state = u8_at(place[SHADOW])[0]
                if region[3] and state & IS_ALLOCATED and not state & IS_HOST:
                    return report(warp, _NO_PEER_ACCESS, site, lane, address, action, size, space, address)
                return 0
    return report(warp, _OUT_OF_BOUNDS, site, lane, address, action, size, space, address)


@njit
def locate(warp, site, lane, address, size, action, space, place):
    """Fills `place` for the `size` bytes (a power of two) at a lane's address. Returns 1 with a fault reported, or 0.

    The address is a device address, a shared one, an offset, or generic, by `space`. `check_bytes` checks the bytes
    themselves.
    """
    launch = i64_at(warp[WARP_LAUNCH])
    if address & (size - 1):
        return report(warp, _MISALIGNED, site, lane, address, action, size, space, address)
    inside, plain = space, address
    if space == GENERIC:
        inside = _space_of(address)
        if inside == SHARED_CLUSTER:
            plain = address - SHARED_WINDOW
        elif inside == LOCAL:
            plain = address - LOCAL_WINDOW
        elif inside == PARAM:
            plain = address - PARAM_WINDOW
    elif space in (GLOBAL, CONST) and address >= PARAM_WINDOW:
        return report(warp, _WRONG_SPACE, site, lane, address, action, size, space, address)
    if inside in (GLOBAL, CONST):
        return global_place(warp, site, lane, address, size, action, space, place)
    if inside in (SHARED, SHARED_CLUSTER):
        return _shared_place(warp, site, lane, plain, size, action, inside, place)
    place[BLOCK] = NOT_DEVICE
    place[SHADOW] = 0
    limit = launch[LAUNCH_PARAMETER_BYTES] if inside == PARAM else launch[LAUNCH_LOCAL_BYTES]
    if plain < 0 or plain + size > limit:
        return report(warp, _OUT_OF_BOUNDS, site, lane, plain, action, size, inside, plain)
    if inside == PARAM:
        if action != LOAD:
            return report(warp, _WRONG_SPACE, site, lane, plain, action, size, inside, plain)
        place[HOST] = launch[LAUNCH_PARAMETERS] + plain
        return 0
    place[HOST] = warp[WARP_LOCAL] + lane * limit + plain
    if warp[WARP_LOCAL_SHADOW]:
        place[SHADOW] = warp[WARP_LOCAL_SHADOW] + lane * limit + plain
    return 0


@njit
def check_bytes(warp, site, lane, address, size, action, space, shadow_address):
    """Looks at the shadow of a located range. Returns 1 with a fault reported, or 0."""
    checks = i64_at(warp[WARP_LAUNCH])[LAUNCH_CHECKS]
    if shadow_address == 0 or not checks & (CHECK_MEMORY | CHECK_UNINITIALIZED):
        return 0
    shadow = u8_at(shadow_address)
    every, some = 255, 0
    for index in range(size):
        every &= shadow[index]
        some |= shadow[index]
    forbidden = IS_IN_FLIGHT if action == LOAD else IS_IN_FLIGHT | IS_BEING_READ | IS_IMMUTABLE
    wanted = IS_ALLOCATED
    if action != STORE and checks & CHECK_UNINITIALIZED:
        wanted |= IS_INITIALISED
    if every & wanted == wanted and not some & forbidden:
        return 0
    for index in range(size):
        state = shadow[index]
        at = address + index
        if not state & IS_ALLOCATED:
            kind = _ACCESS_AFTER_FREE if state & IS_FREED else _OUT_OF_BOUNDS
            return report(warp, kind, site, lane, at, action, size, space, address)
        if state & IS_IMMUTABLE & forbidden:
            return report(warp, _IMMUTABLE_WRITTEN, site, lane, at, action, size, space, address)
        if state & forbidden:
            kind = _IN_FLIGHT if state & IS_IN_FLIGHT else _SOURCE_IN_FLIGHT
            return report(warp, kind, site, lane, at, site, size, space, address)
        if state & wanted != wanted:
            return report(warp, _UNINITIALIZED, site, lane, at, action, size, space, address)
    return 0


@njit
def mark_written(shadow_address, size):
    if shadow_address != 0:
        shadow = u8_at(shadow_address)
        for index in range(size):
            shadow[index] |= IS_INITIALISED
