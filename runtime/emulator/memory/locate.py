"""Addresses resolved, in any state space: host bytes, their block, their shadow bytes; and whether they may be touched.

Loads and stores resolve one lane's address at a time, the careful way: an error becomes a fault that names the first
bad byte. In the fault's record `a` is the action, `b` the access's size in bytes, `c` the state space, `d` the lane's
own address; addresses are as the program sees them (shared and local ones are offsets).

An asynchronous instruction's address is a shared one (offset, with the rank above it when `mapa` made it), or generic;
a device address is the host address itself.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call, no-untyped-def"

from __future__ import annotations

from numba import types

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
from runtime.emulator.memory.device_memory import (
    IS_ALLOCATED,
    IS_BEING_READ,
    IS_FREED,
    IS_HOST,
    IS_IMMUTABLE,
    IS_IN_FLIGHT,
    IS_INITIALISED,
)
from runtime.emulator.memory.pointers import address_of, fill_bytes
from runtime.emulator.races.clocks import ATOMIC as ATOMIC
from runtime.emulator.races.clocks import LOAD as LOAD
from runtime.emulator.races.clocks import STORE as STORE
from runtime.emulator.races.clocks import touch_range, was_written_before
from runtime.emulator.translation.operations import compiled_once

malloc = types.ExternalFunction("malloc", types.int64(types.int64))
realloc = types.ExternalFunction("realloc", types.int64(types.int64, types.int64))
free = types.ExternalFunction("free", types.void(types.int64))


@njit
def zeroed(size):
    """The address of new memory, to be freed."""
    address = malloc(size)
    fill_bytes(address, 0, size)
    return address


@njit
def make_room(queue, entry_bytes):
    """Room for one more entry of a list: a record with `count`, `capacity` and `entries`."""
    if queue.count == queue.capacity:
        queue.capacity = 2 * queue.capacity + 16
        queue.entries = realloc(address_of(queue.entries), queue.capacity * entry_bytes)


@njit
def is_shared(address):
    """Whether an int64 is a shared address, plain or in the generic window."""
    return 0 <= address < (1 << 32) or address >= SHARED_WINDOW


@compiled_once("lll")
def block_of_rank(warp, site, lane, rank):
    """The block array of a rank of the warp's cluster; 0 and a fault if there is none or it has exited."""
    launch = warp.launch
    if rank < 0 or rank >= launch.cluster_size:
        report(warp, FaultKind.CLUSTER_RANK, site, lane, 0, rank, launch.cluster_size, 0, 0)
        return 0
    block = warp.block.cluster[rank]
    if rank != warp.block.rank and block.num_exited_warps == block.num_warps:
        report(warp, FaultKind.BLOCK_EXITED, site, lane, 0, rank, 0, 0, 0)
        return 0
    return address_of(block)


@njit
def shared_block(warp, site, lane, address):
    """The block array that a shared address lies in; 0 and a fault if it is none."""
    if not is_shared(address):
        report(warp, FaultKind.NOT_SHARED, site, lane, address, 0, 0, 0, 0)
        return 0
    rank = ((address & 0xFFFFFFFF) >> SHARED_RANK_SHIFT) - 1
    return address_of(warp.block) if rank < 0 else block_of_rank(warp, site, lane, rank)


@njit
def shared_host(block, address):
    """The host address of a shared address within its block."""
    return block_at(block).shared + (address & SHARED_OFFSET_MASK)


@njit
def shadow_of(warp, block, host):
    """The address of a host byte's shadow byte, in shared memory of `block` or (0) device memory; 0 if unchecked."""
    if block != 0:
        fields = block_at(block)
        if fields.shared_shadow == 0:
            return 0
        return host - fields.shared + fields.shared_shadow
    launch = warp.launch
    inside = launch.arena <= host < launch.arena + launch.arena_bytes
    return host - launch.arena + launch.arena_shadow if inside else 0


@njit
def aligned(warp, site, lane, address, multiple):
    """0, or 1 and a fault: whether an address is a multiple of `multiple` bytes (a power of two)."""
    if address & (multiple - 1):
        return report(warp, FaultKind.ASYNC_ALIGNMENT, site, lane, address, multiple, 0, 0, 0)
    return 0


@njit
def in_shared(block, host, size):
    fields = block_at(block)
    return fields.shared <= host and host + size <= fields.shared + fields.shared_bytes


@compiled_once("llllll")
def claim(warp, site, lane, block, host, size, bit):
    """Marks bytes as the target (IS_IN_FLIGHT) or the source (IS_BEING_READ) of an asynchronous copy.

    Returns 1 and a fault if another copy in flight writes them, or, for a target, reads them.
    """
    at = shadow_of(warp, block, host)
    if at == 0:
        return 0
    shadow = u8_at(at)
    seen = 0
    for index in range(size):
        seen |= shadow[index]
        shadow[index] |= bit
    forbidden = IS_IN_FLIGHT | (IS_BEING_READ if bit == IS_IN_FLIGHT else 0)
    if seen & forbidden:
        kind = FaultKind.IN_FLIGHT if seen & IS_IN_FLIGHT else FaultKind.SOURCE_IN_FLIGHT
        return report(warp, kind, site, lane, host, site, 0, 0, 0)
    return 0


@compiled_once("lllll")
def mark_shadow(warp, block, host, size, cleared, added):
    """Clears and adds bits of bytes' shadow."""
    at = shadow_of(warp, block, host)
    if at != 0:
        shadow = u8_at(at)
        for index in range(size):
            shadow[index] = (shadow[index] & ~cleared) | added
    return 0


@njit
def landed(warp, block, host, size):
    """Marks bytes as written and no longer in flight."""
    mark_shadow(warp, block, host, size, IS_IN_FLIGHT, IS_INITIALISED)


@njit
def was_read(warp, block, host, size):
    """Ends `claim` of a source."""
    mark_shadow(warp, block, host, size, IS_BEING_READ, 0)


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
def _may_touch_early(warp, address, size, action):
    """Whether a dependent launch may touch a range before griddepcontrol.wait: it reads immutable bytes, or, by strong
    loads, which pass the first-level cache, bytes that no work has written which may not have ended yet."""
    launch = warp.launch
    relative = address - launch.arena
    if action != LOAD or not 0 <= relative <= launch.arena_bytes - size:
        return False
    shadow, every = u8_at(launch.arena_shadow + relative), 255
    for index in range(size):
        every &= shadow[index]
    if every & IS_IMMUTABLE != 0:
        return True
    if not warp.is_strong_read or not launch.stream_order:
        return False
    return was_written_before(launch, address, size)


@njit
def global_place(warp, site, lane, address, size, action, space, place):
    launch = warp.launch
    if warp.is_before_dependency and not _may_touch_early(warp, address, size, action):
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
