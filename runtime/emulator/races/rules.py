"""The rules of races: unordered accesses to one place, at least one of them a write.

For each granule (1, 2 or 4 bytes, the smallest access of the kernel) of shared memory: the epoch of its last write and
the clock of every warp's last read; of device memory: the epoch of its last write, and of its last read by a warp of an
even and of an odd cluster (so some reads are forgotten before a conflicting write comes: a race may be missed there,
none is invented). An epoch is clock << 32 | warp << 6 | is strong << 5 | lane.

Not races: two strong accesses (atomics, .volatile, .relaxed and stronger), two writes of the same value, accesses
ordered by a barrier, an mbarrier or a published fence. A plain read of another lane's write in the same warp since the
last bar.warp.sync is a race.

A contiguous range of lanes is checked at once by `run_is_fine`: if there can be no race, the access is noted; else the
caller checks lane by lane, by `lane_races`, which reports.
"""

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at, u32_at, u64_at
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import block_at
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
from runtime.emulator.translation.operations import compiled_once

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


@njit
def _area(warp, block_address):
    """Memory of a block, or (0) device memory: its first address, its granules' write epochs, the clock up to which all
    is ordered, and the agent's number that the first warp of this warp's cluster has there."""
    record = warp.clock
    if block_address == 0:
        races = record.races
        return warp.launch.arena, races.global_writes, races.base, record.cluster
    block = block_at(block_address)
    return block.shared, block.shared_races.writes, record.floor, types.int64(0)


@njit
def _granules(races, offset, size):
    """The first granule of a range, and how many."""
    first = offset >> races.shift
    return first, ((offset + size - 1) >> races.shift) - first + 1


@njit
def _note_read(warp, block_address, first, count):
    record = warp.clock
    races, now = record.races, record.now
    if block_address == 0:
        granules = warp.launch.arena_bytes >> races.shift
        parity = (record.cluster // races.width) & 1
        epoch = _epoch(record, record.cluster + record.index, 0, 0)
        _fill(races.global_reads + (parity * granules + first) * 8, count, epoch)
        return
    area = block_at(block_address).shared_races
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
def _latest_read(warp, block_address, first, count):
    """The highest clock of a read of some granules."""
    if block_address != 0:
        return _highest_clock(block_at(block_address).shared_races.latest_read + first * 4, count)
    races = warp.clock.races
    granules = warp.launch.arena_bytes >> races.shift
    even = _highest(races.global_reads + first * 8, count)
    return types.int64(max(even, _highest(races.global_reads + (granules + first) * 8, count)) >> types.uint64(32))


@njit
def _unordered_reader(warp, block_address, granule, floor):
    """The number of another warp whose read of a granule is not ordered before, or -1."""
    record = warp.clock
    races = record.races
    if block_address == 0:
        granules, me = warp.launch.arena_bytes >> races.shift, record.cluster + record.index
        for parity in range(2):
            read = i64_at(races.global_reads + (parity * granules + granule) * 8)[0]
            reader = (read & 0xFFFFFFFF) >> 6
            if read >> 32 > floor and reader != me and read >> 32 > known(record, races, reader):
                return reader
        return -1
    area = block_at(block_address).shared_races
    if u32_at(area.latest_read)[granule] > floor:
        reads, vector = u32_at(area.reads + granule * 4), u32_at(record.vector)
        for reader in range(races.width):
            if reader != record.index and reads[reader * area.granules] > vector[reader]:
                return reader
    return -1


@compiled_once("lllllll")
def lane_races(warp, site, place, block_address, size, lane, action, flags):
    """Checks one lane's access, of `action`, with ACCESS_… flags, at host address `place` (of the shared memory of
    a block, or of device memory where `block_address` is 0). Returns 1 with a fault reported, or 0."""
    record = warp.clock
    races = record.races
    strong, same = flags & ACCESS_STRONG, flags & ACCESS_SAME != 0
    origin, writes_address, floor, cluster = _area(warp, block_address)
    first, count = _granules(races, place - origin, size)
    space, start = (IN_GLOBAL, place) if block_address == 0 else (IN_SHARED, place - origin)
    writes = i64_at(writes_address + first * 8)
    me = cluster + record.index
    before = types.int64(0)
    for index in range(count if action != STORE else 0):
        epoch = writes[index]
        if epoch == before:  # as most of a range that one instruction wrote
            continue
        before = epoch
        clock, writer, at = epoch >> 32, (epoch & 0xFFFFFFFF) >> 6, start + (index << races.shift)
        if clock <= floor:
            continue
        if flags & ACCESS_NC and block_address == 0:
            return report(warp, FaultKind.NC_WRITTEN, site, lane, at, space, size, writer, epoch & 31)
        if strong and epoch & _STRONG:
            continue
        if writer == me:
            if clock == record.now and epoch & 31 != lane and not strong and not epoch & _STRONG:
                return report(warp, FaultKind.RACE_WITHIN_WARP, site, lane, at, space, size, writer, epoch & 31)
        elif clock > known(record, races, writer - cluster + record.cluster):
            return report(warp, FaultKind.RACE_READ_AFTER_WRITE, site, lane, at, space, size, writer, epoch & 31)
    if action != STORE and not strong:
        _note_read(warp, block_address, first, count)
    if action == LOAD:
        return 0
    for index in range(count):
        epoch = writes[index]
        clock, writer, at = epoch >> 32, (epoch & 0xFFFFFFFF) >> 6, start + (index << races.shift)
        is_allowed = same or writer == me or (strong and epoch & _STRONG)
        if clock > floor and not is_allowed and clock > known(record, races, writer - cluster + record.cluster):
            return report(warp, FaultKind.RACE_WRITE_AFTER_WRITE, site, lane, at, space, size, writer, epoch & 31)
        if not same:
            reader = _unordered_reader(warp, block_address, first + index, floor)
            if reader >= 0:
                return report(warp, FaultKind.RACE_WRITE_AFTER_READ, site, lane, at, space, size, reader, -1)
    _fill(writes_address + first * 8, count, _epoch(record, me, lane, strong))
    return 0


@njit
def _run(warp, place, block_address, size, is_store, lane, lane_bytes):
    """Whether a plain access of lanes from `lane` on, `lane_bytes` each, to a contiguous range can be no race; then it
    has been noted."""
    record = warp.clock
    races = record.races
    origin, writes, floor, cluster = _area(warp, block_address)
    first, count = _granules(races, place - origin, size)
    if types.int64(_highest(writes + first * 8, count) >> types.uint64(32)) > floor:
        return 0
    if not is_store:
        _note_read(warp, block_address, first, count)
        return 1
    if _latest_read(warp, block_address, first, count) > floor:
        return 0
    lane_shift = 0
    while (1 << (lane_shift + races.shift)) < lane_bytes:
        lane_shift += 1
    _set_run(writes + first * 8, count, _epoch(record, cluster + record.index, lane, 0), lane_shift)
    return 1


@compiled_once("llllll")
def run_is_fine(warp, place, block_address, size, is_store, lane, lane_bytes):
    return _run(warp, place, block_address, size, is_store, lane, lane_bytes)


@compiled_once("lqllllll")
def warp_is_fine(warp, mask, addresses, offset, start, limit, block_address, size, is_store):
    """Whether a whole warp's plain access, `size` bytes a lane, can be no race; then it has been noted.

    The lanes' addresses, plus `offset`, lie in a window that begins at `start` and has `limit` bytes: shared memory of
    a block, or the arena. Lanes of a store have to ascend.
    """
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
            return 0
        while lane < 31 and (mask >> (lane + 1)) & 1:
            following = addresses[lane + 1] + shift
            if following == end:
                end += size
            elif is_store or following != end - size:
                break
            lane += 1
        above = end
        if end > limit:
            return 0
        if not _run(warp, base + begin, block_address, end - begin, is_store, first, size):
            return 0
        lane += 1
    return 1
