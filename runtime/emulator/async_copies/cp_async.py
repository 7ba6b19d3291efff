"""`cp.async` of 4, 8 or 16 bytes a lane, its groups, and the mbarrier arrivals that it can trigger.

Each warp keeps a list of the copies in flight. They land at the `wait_group` or `wait_all` of their lane, or when a
thread waits for an mbarrier at which a later `cp.async.mbarrier.arrive` arrives; until then their target in shared
memory may not be touched. Groups are counted by lane, since lanes may commit under divergence.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from runtime.emulator.async_copies.proxy import wrote
from runtime.emulator.execution.counters import count_access
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import DONE, FAILED
from runtime.emulator.memory.careful_access import read_any, shared_range
from runtime.emulator.memory.device_memory import IS_IN_FLIGHT
from runtime.emulator.memory.locate import (
    aligned,
    claim,
    free,
    landed,
    make_room,
    shared_block,
    shared_host,
    zeroed,
)
from runtime.emulator.memory.pointers import address_of, copy_bytes, fill_bytes, stack_longs
from runtime.emulator.races.clocks import STORE
from runtime.emulator.records import Long, Longs, Record, To
from runtime.emulator.synchronisation.mbarrier_state import add_pending, arrive, mbarrier_at
from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.operations import compiled_once, operation
from runtime.emulator.translation.ptx import Instruction, Integer, Register
from runtime.emulator.translation.vectors import I32, splat, truths_of

_ARRIVAL = 0
"""The size of an entry that is an arrival at the mbarriers in its targets."""


class CopyEntry(Record):
    """The copies that one instruction has started."""

    site = Long()
    lanes = Long()  # still in flight
    size = Long()  # bytes a lane, or _ARRIVAL
    targets, sources = Longs(32), Longs(32)  # host addresses
    info = Longs(32)  # source bytes | group << 8


class CopyList(Record):
    """A warp's copies in flight."""

    count, capacity = Long(), Long()
    entries = To("CopyEntry")
    groups, bulk_groups = Longs(32), Longs(32)  # committed by each lane, of cp.async and of bulk copies


_ENTRY_BYTES, _LIST_BYTES = CopyEntry.size_bytes, CopyList.size_bytes


@njit
def copies_of(warp):
    """The warp's list, made at first use."""
    if not warp.copies:
        warp.copies = zeroed(_LIST_BYTES)
    return warp.copies


@njit
def bulk_groups(warp, lane):
    """The bulk groups that a lane has committed."""
    return copies_of(warp).bulk_groups[lane]


@njit
def commit_bulk(warp, lane):
    copies_of(warp).bulk_groups[lane] += 1


@njit
def _new_entry(warp, site, size):
    copies = copies_of(warp)
    make_room(copies, _ENTRY_BYTES)
    entry = copies.entries[copies.count]
    copies.count += 1
    entry.site, entry.lanes, entry.size = site, 0, size
    return entry


@compiled_once("ll")
def land_lane(warp, number, lane):
    """Carries out one lane of the warp's entry of a number. Returns 1 and a fault, or 0."""
    entry = warp.copies.entries[number]
    entry.lanes &= ~(1 << lane)
    size, target = entry.size, entry.targets[lane]
    if size == _ARRIVAL:
        return 1 if arrive(warp, entry.site, lane, target, 1, 0) < 0 else 0
    source_bytes = entry.info[lane] & 0xFF
    copy_bytes(target, entry.sources[lane], source_bytes)
    fill_bytes(target + source_bytes, 0, size - source_bytes)
    landed(warp, address_of(warp.block), target, size)
    wrote(address_of(warp.block), warp, target - warp.block.shared, size)
    return 0


@njit
def _sweep(warp):
    """Removes the entries that have landed in all lanes."""
    copies = copies_of(warp)
    kept = 0
    for index in range(copies.count):
        if copies.entries[index].lanes != 0:
            if kept != index:
                copy_bytes(address_of(copies.entries[kept]), address_of(copies.entries[index]), _ENTRY_BYTES)
            kept += 1
    copies.count = kept


@njit
def _land_lane_before(warp, lane, count):
    """Carries out a lane's entries among the first `count`: those before an arrival."""
    for index in range(count):
        entry = copies_of(warp).entries[index]
        if (entry.lanes >> lane) & 1 and land_lane(warp, index, lane):
            return 1
    return 0


@njit
def land_arrivals(warp, mbarrier):
    """Carries out the arrivals at an mbarrier that cp.async of any warp of the block owes; 1 and a fault, or 0."""
    block = warp.block
    for index in range(block.num_warps):
        other = block.warps[index]
        if not other.copies:
            continue
        found = False
        for at in range(other.copies.count):
            entry = other.copies.entries[at]
            if entry.size != _ARRIVAL:
                continue
            for lane in range(32):
                if (entry.lanes >> lane) & 1 and entry.targets[lane] == mbarrier:
                    found = True
                    if _land_lane_before(other, lane, at) or land_lane(other, at, lane):
                        return 1
        if found:
            _sweep(other)
    return 0


@njit
def _count(warp, site, entry, mask, blocks, size):
    """Counts both sides of a copy: its write to shared memory and, unless it fills with zeros, its read."""
    count_access(warp, site, mask, address_of(entry.targets), address_of(blocks), size)
    reading = 0
    for lane in range(32):
        blocks[lane] = 0
        if (mask >> lane) & 1 and entry.info[lane] & 0xFF:
            reading |= 1 << lane
    count_access(warp, site, reading, address_of(entry.sources), address_of(blocks), size)


@operation("cp_async", "qlqlpll")
def cp_async(warp, mask, site, targets, target_offset, sources, source_offset, source_sizes, size, passes_cache):
    """`passes_cache` means .cg: past the first-level cache, as strong loads."""
    entry, blocks, row = _new_entry(warp, site, size), stack_longs(32), stack_longs(2)
    for lane in range(32):
        if not (mask >> lane) & 1:
            continue
        address, source_bytes = targets[lane] + target_offset, types.int64(source_sizes[lane])
        source = sources[lane] + source_offset
        block = shared_block(warp, site, lane, address)
        if block == 0:
            return FAILED
        target = shared_host(block, address)
        if source_bytes > size:
            return report(warp, FaultKind.ASYNC_SIZE, site, lane, address, size, source_bytes, 0, 0)
        if aligned(warp, site, lane, address, size) or aligned(warp, site, lane, source, size):
            return FAILED
        if source_bytes > 0:
            warp.is_strong_read = passes_cache
            source = read_any(warp, site, lane, source, source_bytes)
            warp.is_strong_read = 0
            if source == 0:
                return FAILED
        row[0], row[1] = 0, 0  # what is beyond the source's bytes becomes zeros
        copy_bytes(address_of(row), source, source_bytes)
        if shared_range(warp, site, lane, block, target, size, STORE, address_of(row)):
            return FAILED
        if claim(warp, site, lane, block, target, size, IS_IN_FLIGHT):
            return FAILED
        entry.targets[lane], entry.sources[lane] = target, source
        entry.info[lane] = source_bytes | copies_of(warp).groups[lane] << 8
        entry.lanes |= 1 << lane
        blocks[lane] = block
    if warp.launch.traffic:
        _count(warp, site, entry, mask, blocks, size)
    return DONE


@operation("cp_async_arrive", "qll")
def cp_async_arrive(warp, mask, site, addresses, offset, is_counted):
    """`is_counted` means .noinc: the arrival is one of those that the mbarrier expects."""
    entry = _new_entry(warp, site, _ARRIVAL)
    for lane in range(32):
        if (mask >> lane) & 1:
            host = mbarrier_at(warp, site, lane, addresses[lane] + offset, False)
            if host == 0 or (not is_counted and add_pending(warp, site, lane, host, 1)):
                return FAILED
            entry.targets[lane] = host
            entry.info[lane] = (1 << 40) << 8  # of no group
            entry.lanes |= 1 << lane
    return DONE


@operation("cp_async_commit", "")
def cp_async_commit(warp, mask, site):
    copies = copies_of(warp)
    for lane in range(32):
        copies.groups[lane] += (mask >> lane) & 1
    return DONE


@operation("cp_async_wait", "l")
def cp_async_wait(warp, mask, site, pending):
    """Waits for all groups but the last `pending`; for every copy, committed or not, if that is -1."""
    copies = copies_of(warp)
    for index in range(copies.count):
        entry = copies_of(warp).entries[index]
        lanes = entry.lanes & mask
        if entry.size == _ARRIVAL:
            continue
        for lane in range(32):
            is_covered = pending < 0 or (entry.info[lane] >> 8) < copies.groups[lane] - pending
            if (lanes >> lane) & 1 and is_covered and land_lane(warp, index, lane):
                return FAILED
    _sweep(warp)
    return DONE


@njit
def drop_copies(warp):
    """Frees the list."""
    if warp.copies:
        free(address_of(warp.copies.entries))
        free(address_of(warp.copies))
        warp.copies = 0


@njit
def close_copies(warp):
    """Forgets the copies in flight and frees the list. An arrival that follows copies is still carried out."""
    failed = 0
    if warp.copies:
        for index in range(copies_of(warp).count):
            entry = copies_of(warp).entries[index]
            for lane in range(32):
                if (entry.lanes >> lane) & 1 and not failed:
                    failed = land_lane(warp, index, lane)
        drop_copies(warp)
    return failed


_HINTS = {"L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"}
_SPACES = {"shared", "shared::cta", "global"}


def lower_cp_async(low: Lowering, ins: Instruction) -> None:
    """cp.async.ca|cg.shared.global[hints] [dst], [src], size{, src-size | ignore-src}{, cache-policy}"""
    low.only(*_HINTS, *_SPACES, first=3)
    size = low.uniform(ins.operands[2])
    if size not in ((16,) if ins.parts[2] == "cg" else (4, 8, 16)):
        raise low.refuse(f"a copy of {size} bytes")
    rest = list(ins.operands[3:])
    if "L2::cache_hint" in ins.parts:
        rest.pop()
    if len(rest) > 1:
        raise low.refuse(f"{len(ins.operands)} operands")
    source_sizes = low.slot(Integer(size), 32)
    if rest and isinstance(rest[0], Register) and rest[0].type == "pred":
        ignored = truths_of(low.builder, low.predicate(rest[0]))
        source_sizes = low.spill(low.builder.select(ignored, splat(I32, 0), splat(I32, size)))
    elif rest:
        source_sizes = low.slot(rest[0], 32)
    places = *low.address(ins.operands[0]), *low.address(ins.operands[1])
    low.call("cp_async", *places, source_sizes, size, ins.parts[2] == "cg")
