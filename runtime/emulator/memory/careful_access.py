"""A warp's loads and stores, the careful way: lane by lane, with every check of the launch; and ranges of memory.

`load_store.py` falls back to this. Instructions that touch more than a load or a store does check ranges: bounds, life,
contents, data in flight and races. A write passes the host address of its bytes, `source`, since two writes of the same
value are no race; 0 stands for bytes that do not lie in one piece.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call, no-untyped-def"

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at, u8_at, u16_at, u32_at, u64_at
from runtime.emulator.async_copies.proxy import wrote
from runtime.emulator.execution.counters import count_access
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import CHECK_RACES, COUNT_MEMORY, LOCAL_WINDOW, PARAM_WINDOW, block_at
from runtime.emulator.memory.locate import (
    BLOCK,
    GLOBAL,
    HOST,
    PARAM,
    SHADOW,
    SHARED,
    check_bytes,
    global_place,
    is_shared,
    locate,
    mark_written,
    shared_block,
    shared_host,
)
from runtime.emulator.memory.pointers import address_of, bytes_equal, stack_longs
from runtime.emulator.races.clocks import (
    ACCESS_NC,
    ACCESS_SAME,
    ACCESS_STRONG,
    ATOMIC,
    LOAD,
    SCOPE_GPU,
    STORE,
)
from runtime.emulator.races.rules import lane_races, run_is_fine
from runtime.emulator.races.vector_clocks import strong_read, strong_write
from runtime.emulator.translation.operations import compiled_once

# --- an instruction's modifiers, as bits of `flags` ---
IS_STORE = 1
IS_STRONG = 8  # .volatile, .relaxed, .acquire, .release
IS_RELEASE = 16
IS_NC = 32
SCOPE_SHIFT = 8  # one of clocks.SCOPE_…


@njit
def element(address, size):
    """`size` bytes as an unsigned number."""
    if size == 4:
        return types.uint64(u32_at(address)[0])
    if size == 8:
        return u64_at(address)[0]
    if size == 2:
        return types.uint64(u16_at(address)[0])
    return types.uint64(u8_at(address)[0])


@njit
def set_element(address, size, value):
    if size == 4:
        u32_at(address)[0] = value
    elif size == 8:
        u64_at(address)[0] = value
    elif size == 2:
        u16_at(address)[0] = value
    else:
        u8_at(address)[0] = value


@njit
def slot_value(slot, lane, is_wide):
    """A lane of a slot by the slot's address."""
    return u64_at(slot)[lane] if is_wide else types.uint64(u32_at(slot)[lane])


@njit
def _is_same(places, slots, lane, size, count, is_wide):
    """Whether a store would keep the contents."""
    mask = types.uint64(0xFFFFFFFFFFFFFFFF) >> types.uint64(64 - 8 * size)
    for index in range(count):
        if element(places[lane] + index * size, size) != slot_value(slots[index], lane, is_wide) & mask:
            return False
    return True


@njit
def races_of_lane(warp, site, place, block_address, size, lane, action, flags, same):
    """Reports one lane's access to the race checker. Returns 1 with a fault reported, or 0."""
    access = (ACCESS_STRONG if flags & IS_STRONG else 0) | (ACCESS_NC if flags & IS_NC else 0)
    return lane_races(warp, site, place, block_address, size, lane, action, access | (ACCESS_SAME if same else 0))


@njit
def _check_races(warp, site, mask, places, blocks, slots, size, count, is_wide, flags):
    """The race checker's view of a warp's load or store, before the data moves."""
    is_store, total, scope = flags & IS_STORE, size * count, flags >> SCOPE_SHIFT
    lane = 0
    while lane < 32:
        if not mask >> lane & 1 or blocks[lane] < 0:
            lane += 1
            continue
        first = lane
        if flags & IS_STRONG:
            if not is_store:
                strong_read(warp, places[lane], scope)
        else:
            while lane < 31 and mask >> (lane + 1) & 1 and blocks[lane + 1] == blocks[first]:
                step = places[lane + 1] - places[lane]
                if step != total and (step != 0 or is_store):
                    break
                lane += 1
            length = places[lane] + total - places[first]
            if run_is_fine(warp, places[first], blocks[first], length, is_store, first, total):
                lane += 1
                continue
        while first <= lane:
            same = is_store != 0 and _is_same(places, slots, first, size, count, is_wide)
            action = STORE if is_store else LOAD
            if races_of_lane(warp, site, places[first], blocks[first], total, first, action, flags, same):
                return 1
            if is_store and flags & IS_STRONG:
                strong_write(warp, places[first], scope, flags & IS_RELEASE != 0)
            first += 1
        lane += 1
    return 0


@njit
def _move_lanes(mask, places, slots, size, count, is_wide, is_store):
    for lane in range(32):
        if mask >> lane & 1:
            at = places[lane]
            for index in range(count):
                slot = slots[index]
                if is_store:
                    set_element(at, size, slot_value(slot, lane, is_wide))
                elif is_wide:
                    u64_at(slot)[lane] = element(at, size)
                else:
                    u32_at(slot)[lane] = element(at, size)
                at += size


@njit
def _after_store(warp, site, mask, places, blocks, shadows, slots, size, count, is_wide, space, checks):
    """Marks written bytes, and finds lanes that wrote different values to one place."""
    total = size * count
    for lane in range(32):
        if mask >> lane & 1:
            mark_written(shadows[lane], total)
            if blocks[lane] > 0:
                block = block_at(blocks[lane])
                if block.proxy:
                    wrote(blocks[lane], warp, places[lane] - block.shared, total)
    if checks & CHECK_RACES:
        for lane in range(32):
            if mask >> lane & 1 and not _is_same(places, slots, lane, size, count, is_wide):
                shown = places[lane]
                if blocks[lane] > 0:
                    shown -= block_at(blocks[lane]).shared
                return report(warp, FaultKind.LANES_DIFFER, site, lane, shown, STORE, total, space, shown)
    return 0


@compiled_once("llqllllllllllllll")
def memory_careful(
    warp, mask, site, addresses, offset, space, size, count, is_wide, flags, s0, s1, s2, s3, s4, s5, s6, s7
):  # fmt: skip
    """A load or store of any kind, with all checks of the launch. Slots come as addresses."""
    places, blocks, shadows, slots = stack_longs(32), stack_longs(32), stack_longs(32), stack_longs(8)
    place = stack_longs(3)
    slots[0], slots[1], slots[2], slots[3], slots[4], slots[5], slots[6], slots[7] = s0, s1, s2, s3, s4, s5, s6, s7
    checks = warp.launch.checks
    total = size * count
    action = STORE if flags & IS_STORE else LOAD
    warp.is_strong_read = 1 if action == LOAD and flags & IS_STRONG else 0
    for lane in range(32):
        if mask >> lane & 1:
            address = addresses[lane] + offset
            if locate(warp, site, lane, address, total, action, space, address_of(place)):
                return 1
            places[lane], blocks[lane], shadows[lane] = place[HOST], place[BLOCK], place[SHADOW]
            if check_bytes(warp, site, lane, address, total, action, space, place[SHADOW]):
                return 1
    warp.is_strong_read = 0
    if checks & COUNT_MEMORY:
        count_access(warp, site, mask, address_of(places), address_of(blocks), total)
    is_racing = checks & CHECK_RACES != 0 and bool(warp.clock)
    if is_racing and _check_races(warp, site, mask, places, blocks, slots, size, count, is_wide, flags):
        return 1
    _move_lanes(mask, places, slots, size, count, is_wide, action == STORE)
    if action == STORE:
        return _after_store(warp, site, mask, places, blocks, shadows, slots, size, count, is_wide, space, checks)
    return 0


# --- for asynchronous instructions: ranges of one lane ---


@njit
def note_range(warp, site, lane, block_address, host, size, action, source):
    """Reports to the race checker a range that an instruction reads or writes at once, outside of loads and stores.

    `block_address`: the block whose shared memory it is, 0 for device memory. `source`: the host address of the bytes
    that a store writes; 0 for a load, or where they do not lie in one piece. Returns 1 with a fault reported, or 0.
    """
    launch = warp.launch
    if not warp.clock or not launch.checks & CHECK_RACES:
        return 0
    if block_address == 0 and not 0 <= host - launch.arena <= launch.arena_bytes - size:
        return 0
    flags = SCOPE_GPU << SCOPE_SHIFT
    same = source != 0 and bytes_equal(host, source, size)
    return races_of_lane(warp, site, host, block_address, size, lane, action, flags, same)


@njit
def check_range(warp, site, lane, block_address, host, size, action, source):
    """Bounds, life and contents of a range that an asynchronous instruction of one lane touches, and its races.

    A store is marked as written only when it lands. `source` is as in `note_range`. Returns 1 with a fault
    reported, or 0.
    """
    launch = warp.launch
    if block_address != 0:
        block = block_at(block_address)
        offset = host - block.shared
        if offset < 0 or offset + size > block.shared_bytes:
            return report(warp, FaultKind.OUT_OF_BOUNDS, site, lane, offset, action, size, SHARED, offset)
        shadow = block.shared_shadow + offset if block.shared_shadow else 0
        if check_bytes(warp, site, lane, offset, size, action, SHARED, shadow):
            return 1
    else:
        relative = host - launch.arena
        if not 0 <= relative <= launch.arena_bytes - size:
            return report(warp, FaultKind.OUT_OF_BOUNDS, site, lane, host, action, size, GLOBAL, host)
        if check_bytes(warp, site, lane, host, size, action, GLOBAL, launch.arena_shadow + relative):
            return 1
    return note_range(warp, site, lane, block_address, host, size, action, source)


@compiled_once("lllllll")
def range_check(warp, site, lane, block, host, size, action, source):
    """A range of shared memory of a block array, or (0) of device memory, pinned and peers' too."""
    if block != 0:
        return check_range(warp, site, lane, block, host, size, action, source)
    place = stack_longs(3)
    if global_place(warp, site, lane, host, size, action, GLOBAL, place):
        return 1
    if check_bytes(warp, site, lane, host, size, action, GLOBAL, place[SHADOW]):
        return 1
    if action == ATOMIC:  # reductions do not race with each other
        return 0
    return note_range(warp, site, lane, types.int64(0), host, size, action, source)


@compiled_once("lllllll")
def range_find(warp, site, lane, address, size, action, place, source):
    """A range at a shared, generic, device or (to read) parameter address; its host address goes to `place`."""
    block, host = types.int64(0), address
    if is_shared(address):
        block = shared_block(warp, site, lane, address)
        if block == 0:
            return 1
        host = shared_host(block, address)
    elif address >= (PARAM_WINDOW if action == STORE else LOCAL_WINDOW):
        return report(warp, FaultKind.WRONG_SPACE, site, lane, address, action, size, GLOBAL, address)
    elif address >= PARAM_WINDOW:
        launch, offset = warp.launch, address - PARAM_WINDOW
        if offset + size > launch.parameter_bytes:
            return report(warp, FaultKind.OUT_OF_BOUNDS, site, lane, offset, action, size, PARAM, offset)
        i64_at(place)[0] = launch.parameters + offset
        return 0
    i64_at(place)[0] = host
    return range_check(warp, site, lane, block, host, size, action, source)


@njit
def global_range(warp, site, lane, address, size, action, source):
    """0, or 1 and a fault: device memory (pinned and peers' too)."""
    return range_check(warp, site, lane, 0, address, size, action, source)


@njit
def shared_range(warp, site, lane, block, host, size, action, source):
    """0, or 1 and a fault: shared memory of a block array, by host address."""
    return range_check(warp, site, lane, block, host, size, action, source)


@njit
def read_any(warp, site, lane, address, size):
    """The host address of bytes to read at a shared, generic, device or parameter address; 0 and a fault."""
    place = stack_longs(1)
    failed = range_find(warp, site, lane, address, size, LOAD, address_of(place), 0)
    return types.int64(0) if failed else place[0]


@njit
def write_any(warp, site, lane, address, size, source):
    """The host address of bytes to write at a shared, generic or device address; 0 and a fault."""
    place = stack_longs(1)
    failed = range_find(warp, site, lane, address, size, STORE, address_of(place), source)
    return types.int64(0) if failed else place[0]
