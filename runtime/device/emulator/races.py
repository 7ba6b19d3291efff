"""Races: accesses to one place that nothing orders, at least one of them a write. Needs the clocks of `clocks.py`.

For each granule (1, 2 or 4 bytes, the smallest access of the kernel) of shared memory: the epoch of its last write and
the clock of every warp's last read; of device memory: the epoch of its last write, and of its last read by a warp of an
even and of an odd cluster (so some reads are forgotten before a conflicting write comes: a race may be missed there,
none is invented). An epoch is clock << 32 | warp << 6 | is strong << 5 | lane.

Not races: two strong accesses (atomics, .volatile, .relaxed and stronger), two writes of the same value, whatever a
barrier, an mbarrier or a published fence orders. A plain read of what another lane of the same warp wrote since the
last bar.warp.sync is one.

The functions ending in `_run` look at a contiguous range at once and say True where nothing can be wrong, having noted
the access; else the caller asks lane by lane with the functions ending in `_lane`, which report.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from numba_kernels.cache import njit
from runtime.device.emulator.clocks import (
    CLOCK_CLUSTER,
    CLOCK_FLOOR,
    CLOCK_INDEX,
    CLOCK_NOW,
    CLOCK_RACES,
    CLOCK_VECTOR,
    ENTRY_FIELDS,
    RACES_AGENTS,
    RACES_BASE,
    RACES_CLOCK,
    RACES_FIELDS,
    RACES_GLOBAL_READS,
    RACES_GLOBAL_WRITES,
    RACES_NEXT,
    RACES_SCRATCH,
    RACES_SHARED_GRANULES,
    RACES_SHIFT,
    RACES_TABLE,
    RACES_WIDTH,
    SHARED_GRANULES,
    SHARED_LATEST_READ,
    SHARED_READS,
    SHARED_WRITES,
    TABLE_ENTRIES,
    known,
)
from runtime.device.emulator.context import LAUNCH_ARENA, LAUNCH_ARENA_BYTES, WARP_CLOCK, WARP_LAUNCH
from runtime.device.emulator.fault import FaultKind, report
from runtime.device.emulator.memory import Machine, Mapping
from runtime.device.emulator.pointers import i64_at, u32_at, u64_at
from runtime.device.emulator.ptx import TYPE_BYTES, Instruction

_READ_AFTER_WRITE = int(FaultKind.RACE_READ_AFTER_WRITE)
_WRITE_AFTER_WRITE = int(FaultKind.RACE_WRITE_AFTER_WRITE)
_WRITE_AFTER_READ = int(FaultKind.RACE_WRITE_AFTER_READ)
_WITHIN_WARP = int(FaultKind.RACE_WITHIN_WARP)
_NC_WRITTEN = int(FaultKind.NC_WRITTEN)

IN_SHARED, IN_GLOBAL = 0, 1
_STRONG = 32


@njit
def _epoch(record, agent, lane, strong):  # type: ignore[no-untyped-def]
    return (record[CLOCK_NOW] << 32) | (agent << 6) | (strong << 5) | lane


@njit
def _highest(address, count):  # type: ignore[no-untyped-def]
    entries = u64_at(address)
    highest = entries[0]
    for index in range(count):
        highest = max(highest, entries[index])
    return highest


@njit
def _set_run(address, count, epoch, shift):  # type: ignore[no-untyped-def]
    """Each lane's own epoch; a lane has 1 << shift granules."""
    entries = i64_at(address)
    for index in range(count):
        entries[index] = epoch + (index >> shift)


@njit
def _fill(address, count, value):  # type: ignore[no-untyped-def]
    entries = i64_at(address)
    for index in range(count):
        entries[index] = value


# --- shared memory; `area` is the races array of the block that owns it, offsets are shared addresses ---


@njit
def shared_read_run(record, area, offset, size):  # type: ignore[no-untyped-def]
    """A plain read of `size` bytes by one warp."""
    races = i64_at(record[CLOCK_RACES])
    shift = races[RACES_SHIFT]
    first = offset >> shift
    count = ((offset + size - 1) >> shift) - first + 1
    if _highest(area[SHARED_WRITES] + first * 8, count) >> 32 > record[CLOCK_FLOOR]:
        return False
    _note_shared_read(record, area, first, count)
    return True


@njit
def _note_shared_read(record, area, first, count):  # type: ignore[no-untyped-def]
    now = record[CLOCK_NOW]
    row = u32_at(area[SHARED_READS] + (record[CLOCK_INDEX] * area[SHARED_GRANULES] + first) * 4)
    for index in range(count):
        row[index] = now
    latest = u32_at(area[SHARED_LATEST_READ] + first * 4)
    for index in range(count):
        latest[index] = max(latest[index], now)


@njit
def shared_write_run(record, area, offset, size, lane, lane_bytes):  # type: ignore[no-untyped-def]
    """A plain write by lanes from `lane` on, `lane_bytes` each."""
    races = i64_at(record[CLOCK_RACES])
    shift = races[RACES_SHIFT]
    first = offset >> shift
    count = ((offset + size - 1) >> shift) - first + 1
    floor = record[CLOCK_FLOOR]
    if _highest(area[SHARED_WRITES] + first * 8, count) >> 32 > floor:
        return False
    latest = u32_at(area[SHARED_LATEST_READ] + first * 4)
    highest = latest[0]
    for index in range(count):
        highest = max(highest, latest[index])
    if highest > floor:
        return False
    lane_shift = 0
    while (1 << (lane_shift + shift)) < lane_bytes:
        lane_shift += 1
    _set_run(area[SHARED_WRITES] + first * 8, count, _epoch(record, record[CLOCK_INDEX], lane, 0), lane_shift)
    return True


@njit
def shared_read_lane(warp, site, record, area, offset, size, lane, strong, address):  # type: ignore[no-untyped-def]
    """A read by one lane. Returns 1 with the fault reported, or 0."""
    races = i64_at(record[CLOCK_RACES])
    shift = races[RACES_SHIFT]
    first = offset >> shift
    count = ((offset + size - 1) >> shift) - first + 1
    writes = i64_at(area[SHARED_WRITES] + first * 8)
    vector = u32_at(record[CLOCK_VECTOR])
    for index in range(count):
        epoch = writes[index]
        clock = epoch >> 32
        if clock > record[CLOCK_FLOOR] and not (strong and epoch & _STRONG):
            writer = (epoch & 0xFFFFFFFF) >> 6
            at = address + (index << shift)
            if writer == record[CLOCK_INDEX]:
                if clock == record[CLOCK_NOW] and epoch & 31 != lane and not strong and not epoch & _STRONG:
                    return report(warp, _WITHIN_WARP, site, lane, at, IN_SHARED, size, writer, epoch & 31)
            elif clock > vector[writer]:
                return report(warp, _READ_AFTER_WRITE, site, lane, at, IN_SHARED, size, writer, epoch & 31)
    if not strong:
        _note_shared_read(record, area, first, count)
    return 0


@njit
def shared_write_lane(warp, site, record, area, offset, size, lane, strong, same, address):  # type: ignore[no-untyped-def]
    """A write by one lane; `same`: the value is what is there already. Returns 1 with the fault reported, or 0."""
    races = i64_at(record[CLOCK_RACES])
    shift, width = races[RACES_SHIFT], races[RACES_WIDTH]
    first = offset >> shift
    count = ((offset + size - 1) >> shift) - first + 1
    writes = i64_at(area[SHARED_WRITES] + first * 8)
    latest = u32_at(area[SHARED_LATEST_READ] + first * 4)
    vector = u32_at(record[CLOCK_VECTOR])
    me = record[CLOCK_INDEX]
    mine = _epoch(record, me, lane, strong)
    for index in range(count):
        epoch = writes[index]
        clock = epoch >> 32
        at = address + (index << shift)
        if clock > record[CLOCK_FLOOR] and not same and not (strong and epoch & _STRONG):
            writer = (epoch & 0xFFFFFFFF) >> 6
            if writer != me and clock > vector[writer]:
                return report(warp, _WRITE_AFTER_WRITE, site, lane, at, IN_SHARED, size, writer, epoch & 31)
        if latest[index] > record[CLOCK_FLOOR] and not same:
            reads = u32_at(area[SHARED_READS] + (first + index) * 4)
            for reader in range(width):
                if reader != me and reads[reader * area[SHARED_GRANULES]] > vector[reader]:
                    return report(warp, _WRITE_AFTER_READ, site, lane, at, IN_SHARED, size, reader, -1)
        writes[index] = mine
    return 0


# --- device memory ---


@njit
def _reads_of(races, launch, agent):  # type: ignore[no-untyped-def]
    """The address of the read epochs that this warp's cluster writes."""
    granules = launch[LAUNCH_ARENA_BYTES] >> races[RACES_SHIFT]
    parity = (agent // races[RACES_WIDTH]) & 1
    return races[RACES_GLOBAL_READS] + parity * granules * 8


@njit
def global_read_run(warp, record, address, size):  # type: ignore[no-untyped-def]
    """A plain read of `size` bytes by one warp."""
    races, launch = i64_at(record[CLOCK_RACES]), i64_at(warp[WARP_LAUNCH])
    shift = races[RACES_SHIFT]
    first = (address - launch[LAUNCH_ARENA]) >> shift
    count = ((address - launch[LAUNCH_ARENA] + size - 1) >> shift) - first + 1
    if _highest(races[RACES_GLOBAL_WRITES] + first * 8, count) >> 32 > races[RACES_BASE]:
        return False
    cluster = record[CLOCK_CLUSTER]
    _fill(_reads_of(races, launch, cluster) + first * 8, count, _epoch(record, cluster + record[CLOCK_INDEX], 0, 0))
    return True


@njit
def global_write_run(warp, record, address, size, lane, lane_bytes):  # type: ignore[no-untyped-def]
    """A plain write by lanes from `lane` on, `lane_bytes` each."""
    races, launch = i64_at(record[CLOCK_RACES]), i64_at(warp[WARP_LAUNCH])
    shift, base = races[RACES_SHIFT], races[RACES_BASE]
    first = (address - launch[LAUNCH_ARENA]) >> shift
    count = ((address - launch[LAUNCH_ARENA] + size - 1) >> shift) - first + 1
    if _highest(races[RACES_GLOBAL_WRITES] + first * 8, count) >> 32 > base:
        return False
    granules = launch[LAUNCH_ARENA_BYTES] >> shift
    if _highest(races[RACES_GLOBAL_READS] + first * 8, count) >> 32 > base:
        return False
    if _highest(races[RACES_GLOBAL_READS] + (granules + first) * 8, count) >> 32 > base:
        return False
    lane_shift = 0
    while (1 << (lane_shift + shift)) < lane_bytes:
        lane_shift += 1
    agent = record[CLOCK_CLUSTER] + record[CLOCK_INDEX]
    _set_run(races[RACES_GLOBAL_WRITES] + first * 8, count, _epoch(record, agent, lane, 0), lane_shift)
    return True


@njit
def global_read_lane(warp, site, record, address, size, lane, strong, is_nc):  # type: ignore[no-untyped-def]
    """A read by one lane; `is_nc`: through the read-only path. Returns 1 with the fault reported, or 0."""
    races, launch = i64_at(record[CLOCK_RACES]), i64_at(warp[WARP_LAUNCH])
    shift = races[RACES_SHIFT]
    first = (address - launch[LAUNCH_ARENA]) >> shift
    count = ((address - launch[LAUNCH_ARENA] + size - 1) >> shift) - first + 1
    writes = i64_at(races[RACES_GLOBAL_WRITES] + first * 8)
    me = record[CLOCK_CLUSTER] + record[CLOCK_INDEX]
    for index in range(count):
        epoch = writes[index]
        clock = epoch >> 32
        if clock > races[RACES_BASE]:
            writer = (epoch & 0xFFFFFFFF) >> 6
            at = address + (index << shift)
            if is_nc:
                return report(warp, _NC_WRITTEN, site, lane, at, IN_GLOBAL, size, writer, epoch & 31)
            if strong and epoch & _STRONG:
                continue
            if writer == me:
                if clock == record[CLOCK_NOW] and epoch & 31 != lane and not strong and not epoch & _STRONG:
                    return report(warp, _WITHIN_WARP, site, lane, at, IN_GLOBAL, size, writer, epoch & 31)
            elif clock > known(record, races, writer):
                return report(warp, _READ_AFTER_WRITE, site, lane, at, IN_GLOBAL, size, writer, epoch & 31)
    if not strong:
        _fill(_reads_of(races, launch, record[CLOCK_CLUSTER]) + first * 8, count, _epoch(record, me, lane, 0))
    return 0


@njit
def global_write_lane(warp, site, record, address, size, lane, strong, same):  # type: ignore[no-untyped-def]
    """A write by one lane; `same`: the value is what is there already. Returns 1 with the fault reported, or 0."""
    races, launch = i64_at(record[CLOCK_RACES]), i64_at(warp[WARP_LAUNCH])
    shift, base = races[RACES_SHIFT], races[RACES_BASE]
    first = (address - launch[LAUNCH_ARENA]) >> shift
    count = ((address - launch[LAUNCH_ARENA] + size - 1) >> shift) - first + 1
    granules = launch[LAUNCH_ARENA_BYTES] >> shift
    writes = i64_at(races[RACES_GLOBAL_WRITES] + first * 8)
    reads = i64_at(races[RACES_GLOBAL_READS] + first * 8)
    me = record[CLOCK_CLUSTER] + record[CLOCK_INDEX]
    mine = _epoch(record, me, lane, strong)
    for index in range(count):
        at = address + (index << shift)
        epoch = writes[index]
        clock = epoch >> 32
        if clock > base and not same and not (strong and epoch & _STRONG):
            writer = (epoch & 0xFFFFFFFF) >> 6
            if writer != me and clock > known(record, races, writer):
                return report(warp, _WRITE_AFTER_WRITE, site, lane, at, IN_GLOBAL, size, writer, epoch & 31)
        if not same:
            for parity in range(2):
                read = reads[parity * granules + index]
                if read >> 32 > base:
                    reader = (read & 0xFFFFFFFF) >> 6
                    if reader != me and read >> 32 > known(record, races, reader):
                        return report(warp, _WRITE_AFTER_READ, site, lane, at, IN_GLOBAL, size, reader, -1)
        writes[index] = mine
    return 0


@njit
def clock_record(warp):  # type: ignore[no-untyped-def]
    """The warp's clock record; only where races are checked."""
    return i64_at(warp[WARP_CLOCK])


def granule_shift(instructions: Iterable[Instruction]) -> int:
    """log2 of the bytes that a shadow entry stands for: the smallest access to shared or device memory, at most 4."""
    smallest = 4
    for instruction in instructions:
        parts = instruction.parts
        if parts[0] in ("ld", "ldu", "st", "atom", "red") and not {"param", "local", "const"} & set(parts):
            smallest = min(smallest, *(TYPE_BYTES[part] for part in parts if part in TYPE_BYTES))
    return smallest.bit_length() - 1


_RACE_BYTES = 1 << 40
_CLOCK_LIMIT = 1 << 30


class RaceMemory:
    """What the race checker keeps for one launch: one array for each OS thread, and the machine's global shadow.

    Args:
        machine: whose memory the kernel runs on.
        shift: of `granule_shift`.
        num_warps: of a block.
        cluster_size: blocks a cluster.
        num_blocks: of the grid.
        shared_bytes: of a block, as BLOCK_SHARED_BYTES.
        num_threads: OS threads.
    """

    def __init__(
        self, machine: Machine, *, shift: int, num_warps: int, cluster_size: int, num_blocks: int, shared_bytes: int,
        num_threads: int,
    ) -> None:  # fmt: skip
        self._machine = machine
        machine.race_clock = clock = 0 if machine.race_clock > _CLOCK_LIMIT else machine.race_clock
        if clock == 0:
            machine.race_shadows.clear()
        granules = machine.span >> shift
        if shift not in machine.race_shadows:
            machine.race_shadows[shift] = Mapping(granules * 24)
        shadow = machine.race_shadows[shift].address
        self._mapping = Mapping(_RACE_BYTES)
        self._addresses = []
        width = num_warps * cluster_size
        for thread in range(num_threads):
            address = self._mapping.address + thread * (_RACE_BYTES // num_threads)
            table = address + RACES_FIELDS * 8
            scratch = table + (TABLE_ENTRIES + 1) * ENTRY_FIELDS * 8
            fields = (ctypes.c_int64 * RACES_FIELDS).from_address(address)
            fields[RACES_BASE] = fields[RACES_CLOCK] = clock
            fields[RACES_TABLE] = table
            fields[RACES_SCRATCH] = scratch
            fields[RACES_NEXT] = (scratch + width * 4 + 63) // 64 * 64
            fields[RACES_AGENTS] = num_blocks * num_warps
            fields[RACES_WIDTH] = width
            fields[RACES_SHIFT] = shift
            fields[RACES_GLOBAL_WRITES] = shadow
            fields[RACES_GLOBAL_READS] = shadow + granules * 8
            fields[RACES_SHARED_GRANULES] = (shared_bytes >> shift) + 1
            self._addresses.append(address)

    def address(self, thread: int) -> int:
        """What belongs into LAUNCH_GLOBAL_RACES of an OS thread's launch array."""
        return self._addresses[thread]

    def close(self) -> None:
        """Ends the launch: whatever it wrote is in order for the next."""
        for address in self._addresses:
            fields = (ctypes.c_int64 * RACES_FIELDS).from_address(address)
            self._machine.race_clock = max(self._machine.race_clock, fields[RACES_CLOCK])
        self._addresses = []
        self._mapping.close()
