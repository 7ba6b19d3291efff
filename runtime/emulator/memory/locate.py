"""Resolves one lane's address, in any state space, and checks whether its bytes may be touched.

The careful way, one lane at a time: an error becomes a fault that names the first bad byte. In the fault
record `a` is the action, `b` the access's size in bytes, `c` the state space, `d` the lane's own address; addresses are
as the program sees them (shared and local ones are offsets).
"""

from __future__ import annotations

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at, u8_at
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import (
    CHECK_MEMORY,
    CHECK_UNINITIALIZED,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_OFFSET_MASK,
    SHARED_RANK_SHIFT,
    SHARED_WINDOW,
    block_at,
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
from runtime.emulator.memory.pointers import address_of
from runtime.emulator.races.accesses import ATOMIC as ATOMIC
from runtime.emulator.races.accesses import LOAD as LOAD
from runtime.emulator.races.accesses import STORE as STORE
from runtime.emulator.races.stream_touch import touch_range
from runtime.emulator.translation.operations import compiled_once

ACTIONS = {LOAD: "load", STORE: "store", ATOMIC: "atomic"}
GENERIC, GLOBAL, SHARED, SHARED_CLUSTER, LOCAL, PARAM, CONST = range(7)
SPACE_NAMES = ("generic", "global", "shared", "shared::cluster", "local", "param", "const")

HOST, BLOCK, SHADOW = range(3)
"""The result of `locate`: host address; address of the block array whose shared memory it is, else 0; address of the
first shadow byte, or 0 without checks."""
NOT_DEVICE = -1  # BLOCK of local, param and const places, which cannot race


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
    block_address = address_of(warp.block)
    rank = (address >> SHARED_RANK_SHIFT) - 1
    if address < 0 or address >> 32 != 0:
        return report(warp, FaultKind.OUT_OF_BOUNDS, site, lane, address, action, size, space, address)
    if rank >= 0:
        block_address = block_of_rank(warp, site, lane, rank)
        if block_address == 0:
            return 1
        if space == SHARED and block_address != address_of(warp.block):
            return report(warp, FaultKind.WRONG_SPACE, site, lane, address, action, size, space, address)
    block = block_at(block_address)
    offset = address & SHARED_OFFSET_MASK
    if offset + size > block.shared_bytes:
        first = address + max(0, block.shared_bytes - offset)
        return report(warp, FaultKind.OUT_OF_BOUNDS, site, lane, first, action, size, space, address)
    place[HOST] = block.shared + offset
    place[BLOCK] = block_address
    place[SHADOW] = block.shared_shadow + offset if block.shared_shadow else 0
    return 0


@njit
def _may_touch_early(launch, address, size, action):
    """Whether a dependent launch may touch a range before griddepcontrol.wait: it only reads immutable bytes."""
    relative = address - launch.arena
    if action != LOAD or not 0 <= relative <= launch.arena_bytes - size:
        return False
    shadow, every = u8_at(launch.arena_shadow + relative), 255
    for index in range(size):
        every &= shadow[index]
    return every & IS_IMMUTABLE != 0


@njit
def global_place(warp, site, lane, address, size, action, space, place):
    launch = warp.launch
    if warp.is_before_dependency and not _may_touch_early(launch, address, size, action):
        return report(warp, FaultKind.BEFORE_DEPENDENCY, site, lane, address, action, size, space, address)
    place[HOST] = address
    place[BLOCK] = 0
    place[SHADOW] = 0
    relative = address - launch.arena
    if 0 <= relative <= launch.arena_bytes - size:
        place[SHADOW] = launch.arena_shadow + relative
        return touch_range(warp, site, lane, address, size, action != LOAD)
    if launch.regions:
        regions = i64_at(launch.regions)
        for index in range(regions[0]):
            region = i64_at(launch.regions + 8 + index * 32)  # base, bytes, shadow delta, pinned bytes only
            relative = address - region[0]
            if 0 <= relative <= region[1] - size:
                place[SHADOW] = address + region[2]
                place[BLOCK] = NOT_DEVICE
                state = u8_at(place[SHADOW])[0]
                if region[3] and state & IS_ALLOCATED and not state & IS_HOST:
                    return report(warp, FaultKind.NO_PEER_ACCESS, site, lane, address, action, size, space, address)
                return 0
    return report(warp, FaultKind.OUT_OF_BOUNDS, site, lane, address, action, size, space, address)


@compiled_once("lllllll")
def locate(warp, site, lane, address, size, action, space, place_address):
    """Fills the place at `place_address` for the `size` bytes (a power of two) at a lane's address.

    Returns 1 with a fault reported, or 0.
    The address is a device address, a shared one, an offset, or generic, by `space`. `check_bytes` checks the bytes
    themselves.
    """
    launch, place = warp.launch, i64_at(place_address)
    if address & (size - 1):
        return report(warp, FaultKind.MISALIGNED, site, lane, address, action, size, space, address)
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
        return report(warp, FaultKind.WRONG_SPACE, site, lane, address, action, size, space, address)
    if inside in (GLOBAL, CONST):
        return global_place(warp, site, lane, address, size, action, space, place)
    if inside in (SHARED, SHARED_CLUSTER):
        return _shared_place(warp, site, lane, plain, size, action, inside, place)
    place[BLOCK] = NOT_DEVICE
    place[SHADOW] = 0
    limit = launch.parameter_bytes if inside == PARAM else launch.local_bytes
    if plain < 0 or plain + size > limit:
        return report(warp, FaultKind.OUT_OF_BOUNDS, site, lane, plain, action, size, inside, plain)
    if inside == PARAM:
        if action != LOAD:
            return report(warp, FaultKind.WRONG_SPACE, site, lane, plain, action, size, inside, plain)
        place[HOST] = launch.parameters + plain
        return 0
    place[HOST] = warp.local + lane * limit + plain
    if warp.local_shadow:
        place[SHADOW] = warp.local_shadow + lane * limit + plain
    return 0


@compiled_once("lllllll")
def check_bytes(warp, site, lane, address, size, action, space, shadow_address):
    """Looks at the shadow of a located range. Returns 1 with a fault reported, or 0."""
    checks = warp.launch.checks
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
            kind = FaultKind.ACCESS_AFTER_FREE if state & IS_FREED else FaultKind.OUT_OF_BOUNDS
            return report(warp, kind, site, lane, at, action, size, space, address)
        if state & IS_IMMUTABLE & forbidden:
            return report(warp, FaultKind.IMMUTABLE_WRITTEN, site, lane, at, action, size, space, address)
        if state & forbidden:
            kind = FaultKind.IN_FLIGHT if state & IS_IN_FLIGHT else FaultKind.SOURCE_IN_FLIGHT
            return report(warp, kind, site, lane, at, site, size, space, address)
        if state & wanted != wanted:
            return report(warp, FaultKind.UNINITIALIZED, site, lane, at, action, size, space, address)
    return 0


@njit
def mark_written(shadow_address, size):
    if shadow_address != 0:
        shadow = u8_at(shadow_address)
        for index in range(size):
            shadow[index] |= IS_INITIALISED
