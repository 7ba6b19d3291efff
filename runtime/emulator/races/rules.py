"""The rules of races: unordered accesses to one place, at least one of them a write.

For each granule (1, 2 or 4 bytes, the smallest access of the kernel) of shared memory: the epoch of its last write and
the clock of every warp's last read; of device memory: the epoch of its last write, and of its last read by a warp of an
even and of an odd cluster (so some reads are forgotten before a conflicting write comes: a race may be missed there,
none is invented). An epoch is clock << 32 | warp << 6 | is strong << 5 | lane.

Not races: two strong accesses (atomics, .volatile, .relaxed and stronger), two writes of the same value, accesses
ordered by a barrier, an mbarrier or a published fence. A plain read of another lane's write in the same warp since the
last bar.warp.sync is a race.

A `_run` checks a contiguous range at once: True if there can be no race, having noted the access; else the caller
checks lane by lane, by a `_lane`, which reports. `lane_entry` and `run_entry` are compiled once, for the first launch
that checks races, and called by their addresses (`clocks.py`).
"""

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at, u32_at, u64_at
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import block_at, warp_at
from runtime.emulator.memory.pointers import (
    CHUNK,
    count_16_longs,
    fill_16_longs,
    fill_16_words,
    highest_16_longs,
    highest_16_words,
    raise_16_words,
)
from runtime.emulator.races.clocks import (
    ACCESS_NC,
    ACCESS_SAME,
    ACCESS_STRONG,
    IN_GLOBAL,
    IN_SHARED,
    LOAD,
    STORE,
)
from runtime.emulator.races.vector_clocks import known

_STRONG = 32


@njit
def _epoch(record, agent, lane, strong):
    return (record.now << 32) | (agent << 6) | (strong << 5) | lane


@njit
def _highest(address, count):
    """The highest of `count` epochs."""
    highest = types.uint64(0)
    while count >= CHUNK:
        highest = max(highest, highest_16_longs(address))
        address += CHUNK * 8
        count -= CHUNK
    while count > 0:
        highest = max(highest, u64_at(address)[0])
        address += 8
        count -= 1
    return highest


@njit
def _highest_clock(address, count):
    """The highest of `count` clocks."""
    highest = types.int64(0)
    while count >= CHUNK:
        highest = max(highest, highest_16_words(address))
        address += CHUNK * 4
        count -= CHUNK
    while count > 0:
        highest = max(highest, types.int64(u32_at(address)[0]))
        address += 4
        count -= 1
    return highest


@njit
def _set_run(address, count, epoch, shift):
    """Each lane's own epoch; a lane has 1 << shift granules."""
    done = 0
    while count - done >= CHUNK:
        # A lane of more granules than CHUNK does not exist, so a chunk begins with a new lane or inside of none.
        count_16_longs(address + done * 8, epoch + (done >> shift), shift)
        done += CHUNK
    while done < count:
        i64_at(address)[done] = epoch + (done >> shift)
        done += 1


@njit
def _fill(address, count, value):
    while count >= CHUNK:
        fill_16_longs(address, value)
        address += CHUNK * 8
        count -= CHUNK
    while count > 0:
        i64_at(address)[0] = value
        address += 8
        count -= 1


# --- shared memory; `area` is the races array of the block that owns it, offsets are shared addresses ---


@njit
def _shared_read_run(record, area, offset, size):
    """A plain read of `size` bytes by one warp."""
    races = record.races
    shift = races.shift
    first = offset >> shift
    count = ((offset + size - 1) >> shift) - first + 1
    if _highest(area.writes + first * 8, count) >> 32 > record.floor:
        return False
    _note_shared_read(record, area, first, count)
    return True


@njit
def _note_shared_read(record, area, first, count):
    now = record.now
    row = area.reads + (record.index * area.granules + first) * 4
    latest = area.latest_read + first * 4
    while count >= CHUNK:
        fill_16_words(row, now)
        raise_16_words(latest, now)
        row += CHUNK * 4
        latest += CHUNK * 4
        count -= CHUNK
    while count > 0:
        u32_at(row)[0] = now
        u32_at(latest)[0] = max(types.int64(u32_at(latest)[0]), now)
        row += 4
        latest += 4
        count -= 1


@njit
def _shared_write_run(record, area, offset, size, lane, lane_bytes):
    """A plain write by lanes from `lane` on, `lane_bytes` each."""
    races = record.races
    shift = races.shift
    first = offset >> shift
    count = ((offset + size - 1) >> shift) - first + 1
    floor = record.floor
    if _highest(area.writes + first * 8, count) >> 32 > floor:
        return False
    if _highest_clock(area.latest_read + first * 4, count) > floor:
        return False
    lane_shift = 0
    while (1 << (lane_shift + shift)) < lane_bytes:
        lane_shift += 1
    _set_run(area.writes + first * 8, count, _epoch(record, record.index, lane, 0), lane_shift)
    return True


@njit
def _shared_read_lane(warp, site, record, area, offset, size, lane, strong):
    """A read by one lane. Returns 1 with the fault reported, or 0."""
    races = record.races
    shift = races.shift
    first = offset >> shift
    count = ((offset + size - 1) >> shift) - first + 1
    writes = i64_at(area.writes + first * 8)
    vector = u32_at(record.vector)
    for index in range(count):
        epoch = writes[index]
        clock = epoch >> 32
        if clock > record.floor and not (strong and epoch & _STRONG):
            writer = (epoch & 0xFFFFFFFF) >> 6
            at = offset + (index << shift)
            if writer == record.index:
                if clock == record.now and epoch & 31 != lane and not strong and not epoch & _STRONG:
                    return report(warp, FaultKind.RACE_WITHIN_WARP, site, lane, at, IN_SHARED, size, writer, epoch & 31)
            elif clock > vector[writer]:
                return report(
                    warp, FaultKind.RACE_READ_AFTER_WRITE, site, lane, at, IN_SHARED, size, writer, epoch & 31
                )
    if not strong:
        _note_shared_read(record, area, first, count)
    return 0


@njit
def _shared_write_lane(warp, site, record, area, offset, size, lane, strong, same):
    """A write by one lane; with `same` the value is already there. Returns 1 with the fault reported, or 0."""
    races = record.races
    shift, width = races.shift, races.width
    first = offset >> shift
    count = ((offset + size - 1) >> shift) - first + 1
    writes = i64_at(area.writes + first * 8)
    latest = u32_at(area.latest_read + first * 4)
    vector = u32_at(record.vector)
    me = record.index
    mine = _epoch(record, me, lane, strong)
    for index in range(count):
        epoch = writes[index]
        clock = epoch >> 32
        at = offset + (index << shift)
        if clock > record.floor and not same and not (strong and epoch & _STRONG):
            writer = (epoch & 0xFFFFFFFF) >> 6
            if writer != me and clock > vector[writer]:
                return report(
                    warp, FaultKind.RACE_WRITE_AFTER_WRITE, site, lane, at, IN_SHARED, size, writer, epoch & 31
                )
        if latest[index] > record.floor and not same:
            reads = u32_at(area.reads + (first + index) * 4)
            for reader in range(width):
                if reader != me and reads[reader * area.granules] > vector[reader]:
                    return report(warp, FaultKind.RACE_WRITE_AFTER_READ, site, lane, at, IN_SHARED, size, reader, -1)
        writes[index] = mine
    return 0


# --- device memory ---


@njit
def _reads_of(races, launch, agent):
    """The address of the read epochs that this warp's cluster writes."""
    granules = launch.arena_bytes >> races.shift
    parity = (agent // races.width) & 1
    return races.global_reads + parity * granules * 8


@njit
def _global_read_run(warp, record, address, size):
    """A plain read of `size` bytes by one warp."""
    races, launch = record.races, warp.launch
    shift = races.shift
    first = (address - launch.arena) >> shift
    count = ((address - launch.arena + size - 1) >> shift) - first + 1
    if _highest(races.global_writes + first * 8, count) >> 32 > races.base:
        return False
    cluster = record.cluster
    _fill(_reads_of(races, launch, cluster) + first * 8, count, _epoch(record, cluster + record.index, 0, 0))
    return True


@njit
def _global_write_run(warp, record, address, size, lane, lane_bytes):
    """A plain write by lanes from `lane` on, `lane_bytes` each."""
    races, launch = record.races, warp.launch
    shift, base = races.shift, races.base
    first = (address - launch.arena) >> shift
    count = ((address - launch.arena + size - 1) >> shift) - first + 1
    if _highest(races.global_writes + first * 8, count) >> 32 > base:
        return False
    granules = launch.arena_bytes >> shift
    if _highest(races.global_reads + first * 8, count) >> 32 > base:
        return False
    if _highest(races.global_reads + (granules + first) * 8, count) >> 32 > base:
        return False
    lane_shift = 0
    while (1 << (lane_shift + shift)) < lane_bytes:
        lane_shift += 1
    agent = record.cluster + record.index
    _set_run(races.global_writes + first * 8, count, _epoch(record, agent, lane, 0), lane_shift)
    return True


@njit
def _global_read_lane(warp, site, record, address, size, lane, strong, is_nc):
    """A read by one lane; `is_nc`: through the read-only path. Returns 1 with the fault reported, or 0."""
    races, launch = record.races, warp.launch
    shift = races.shift
    first = (address - launch.arena) >> shift
    count = ((address - launch.arena + size - 1) >> shift) - first + 1
    writes = i64_at(races.global_writes + first * 8)
    me = record.cluster + record.index
    for index in range(count):
        epoch = writes[index]
        clock = epoch >> 32
        if clock > races.base:
            writer = (epoch & 0xFFFFFFFF) >> 6
            at = address + (index << shift)
            if is_nc:
                return report(warp, FaultKind.NC_WRITTEN, site, lane, at, IN_GLOBAL, size, writer, epoch & 31)
            if strong and epoch & _STRONG:
                continue
            if writer == me:
                if clock == record.now and epoch & 31 != lane and not strong and not epoch & _STRONG:
                    return report(warp, FaultKind.RACE_WITHIN_WARP, site, lane, at, IN_GLOBAL, size, writer, epoch & 31)
            elif clock > known(record, races, writer):
                return report(
                    warp, FaultKind.RACE_READ_AFTER_WRITE, site, lane, at, IN_GLOBAL, size, writer, epoch & 31
                )
    if not strong:
        _fill(_reads_of(races, launch, record.cluster) + first * 8, count, _epoch(record, me, lane, 0))
    return 0


@njit
def _global_write_lane(warp, site, record, address, size, lane, strong, same):
    """A write by one lane; with `same` the value is already there. Returns 1 with the fault reported, or 0."""
    races, launch = record.races, warp.launch
    shift, base = races.shift, races.base
    first = (address - launch.arena) >> shift
    count = ((address - launch.arena + size - 1) >> shift) - first + 1
    granules = launch.arena_bytes >> shift
    writes = i64_at(races.global_writes + first * 8)
    reads = i64_at(races.global_reads + first * 8)
    me = record.cluster + record.index
    mine = _epoch(record, me, lane, strong)
    for index in range(count):
        at = address + (index << shift)
        epoch = writes[index]
        clock = epoch >> 32
        if clock > base and not same and not (strong and epoch & _STRONG):
            writer = (epoch & 0xFFFFFFFF) >> 6
            if writer != me and clock > known(record, races, writer):
                return report(
                    warp, FaultKind.RACE_WRITE_AFTER_WRITE, site, lane, at, IN_GLOBAL, size, writer, epoch & 31
                )
        if not same:
            for parity in range(2):
                read = reads[parity * granules + index]
                if read >> 32 > base:
                    reader = (read & 0xFFFFFFFF) >> 6
                    if reader != me and read >> 32 > known(record, races, reader):
                        return report(
                            warp, FaultKind.RACE_WRITE_AFTER_READ, site, lane, at, IN_GLOBAL, size, reader, -1
                        )
        writes[index] = mine
    return 0


def lane_entry(warp_address, site, place, block_address, size, lane, action, flags):
    """Checks one lane's access. Returns 1 with a fault reported, or 0."""
    warp = warp_at(warp_address)
    record = warp.clock
    strong, is_nc, same = flags & ACCESS_STRONG, (flags & ACCESS_NC) >> 1, (flags & ACCESS_SAME) >> 2
    if block_address == 0:
        if action != STORE and _global_read_lane(warp, site, record, place, size, lane, strong, is_nc):
            return types.int64(1)
        if action == LOAD:
            return types.int64(0)
        return types.int64(_global_write_lane(warp, site, record, place, size, lane, strong, same))
    block = block_at(block_address)
    area, offset = block.shared_races, place - block.shared
    if action != STORE and _shared_read_lane(warp, site, record, area, offset, size, lane, strong):
        return types.int64(1)
    if action == LOAD:
        return types.int64(0)
    return types.int64(_shared_write_lane(warp, site, record, area, offset, size, lane, strong, same))


@njit
def run_entry(warp_address, first, block_address, size, is_store, lane, lane_bytes):
    """A contiguous range of lanes from `lane` on. Returns 1 if there can be no race, having noted it, or 0."""
    warp = warp_at(warp_address)
    record = warp.clock
    if block_address == 0:
        if is_store:
            return types.int64(_global_write_run(warp, record, first, size, lane, lane_bytes))
        return types.int64(_global_read_run(warp, record, first, size))
    block = block_at(block_address)
    area, offset = block.shared_races, first - block.shared
    if is_store:
        return types.int64(_shared_write_run(record, area, offset, size, lane, lane_bytes))
    return types.int64(_shared_read_run(record, area, offset, size))


def warp_entry(warp_address, mask, addresses_address, offset, start, limit, block_address, shape):
    """A whole warp's plain access. Returns 1 if there can be no race, having noted it, or 0.

    The lanes' addresses, plus `offset`, lie in a window that begins at `start` and has `limit` bytes: shared memory of
    a block, or the arena. `shape` is the bytes a lane, plus 256 for a store. Lanes of a store have to ascend.
    """
    addresses = i64_at(addresses_address)
    is_store, size = shape >> 8, shape & 255
    base = block_at(block_address).shared if block_address != 0 else start
    shift = offset - start
    lane, above = types.int64(0), types.int64(-1)
    while lane < 32:
        if not (mask >> lane) & 1:
            lane += 1
            continue
        first, begin = lane, addresses[lane] + shift
        end = begin + size
        if begin < 0 or begin > limit - size or (is_store and begin < above):
            return types.int64(0)
        while lane < 31 and (mask >> (lane + 1)) & 1:
            following = addresses[lane + 1] + shift
            if following == end:
                end += size
            elif is_store or following != end - size:
                break
            lane += 1
        above = end
        if end > limit:
            return types.int64(0)
        if not run_entry(warp_address, base + begin, block_address, end - begin, is_store, first, size):
            return types.int64(0)
        lane += 1
    return types.int64(1)
