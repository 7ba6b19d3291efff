"""`cp.async` of 4, 8 or 16 bytes a lane, its groups, and the mbarrier arrivals that it can trigger.

Each warp keeps a list of the copies in flight. They land at the `wait_group` or `wait_all` of their lane, or when a
thread waits for an mbarrier at which a later `cp.async.mbarrier.arrive` arrives; until then their target in shared
memory may not be touched. Groups are counted by lane, since lanes may commit under divergence.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at
from runtime.emulator.async_copies.proxy import wrote
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.traffic import count_access
from runtime.emulator.execution.warp_state import (
    BLOCK_NUM_WARPS,
    BLOCK_SHARED,
    BLOCK_WARPS,
    DONE,
    FAILED,
    LAUNCH_TRAFFIC,
    WARP_BLOCK,
    WARP_COPIES,
    WARP_FIELDS,
    WARP_LAUNCH,
)
from runtime.emulator.memory.checked_ranges import read_any, shared_range
from runtime.emulator.memory.cluster_window import (
    aligned,
    claim,
    free,
    landed,
    malloc,
    realloc,
    shared_block,
    shared_host,
)
from runtime.emulator.memory.device_memory import IS_IN_FLIGHT
from runtime.emulator.memory.pointers import address_of, copy_bytes, fill_bytes, stack_longs
from runtime.emulator.races.accesses import STORE
from runtime.emulator.synchronisation.mbarrier_state import add_pending, arrive, locate
from runtime.emulator.translation.lowering import Lowering, lowers
from runtime.emulator.translation.operations import operation
from runtime.emulator.translation.ptx import Instruction, Integer, Register
from runtime.emulator.translation.vectors import I32, splat, truths_of

_SIZE = int(FaultKind.ASYNC_SIZE)

# A warp's list: number of entries, capacity, groups committed by each lane (cp.async, then bulk), entries.
_COUNT, _CAPACITY, _GROUPS, _BULK_GROUPS, _HEADER = 0, 1, 2, 34, 66
# An entry: site, lanes still in flight, bytes; then of each lane target, source, source bytes | group << 8.
_SITE, _LANES, _BYTES, _TARGETS, _SOURCES, _INFO, _ENTRY = 0, 1, 2, 4, 36, 68, 100
_ARRIVAL = 0  # _BYTES of an entry that is an arrival at the mbarriers in _TARGETS


@njit
def copies_of(warp):
    """The warp's list, made at first use."""
    if warp[WARP_COPIES] == 0:
        warp[WARP_COPIES] = malloc((_HEADER + 16 * _ENTRY) * 8)
        fill_bytes(warp[WARP_COPIES], 0, _HEADER * 8)
        i64_at(warp[WARP_COPIES])[_CAPACITY] = 16
    return i64_at(warp[WARP_COPIES])


@njit
def bulk_groups(warp, lane):
    """The bulk groups that a lane has committed."""
    return copies_of(warp)[_BULK_GROUPS + lane]


@njit
def commit_bulk(warp, lane):
    copies_of(warp)[_BULK_GROUPS + lane] += 1


@njit
def _entry_at(warp, index):
    return i64_at(warp[WARP_COPIES] + (_HEADER + index * _ENTRY) * 8)


@njit
def _new_entry(warp, site, size):
    copies = copies_of(warp)
    if copies[_COUNT] == copies[_CAPACITY]:
        capacity = 2 * copies[_CAPACITY]
        warp[WARP_COPIES] = realloc(warp[WARP_COPIES], (_HEADER + capacity * _ENTRY) * 8)
        copies = i64_at(warp[WARP_COPIES])
        copies[_CAPACITY] = capacity
    entry = _entry_at(warp, copies[_COUNT])
    copies[_COUNT] += 1
    entry[_SITE], entry[_LANES], entry[_BYTES] = site, 0, size
    return entry


@njit
def _land_lane(warp, entry, lane):
    """Carries out one lane of an entry. Returns 1 and a fault, or 0."""
    entry[_LANES] &= ~(1 << lane)
    size, target = entry[_BYTES], entry[_TARGETS + lane]
    if size == _ARRIVAL:
        return 1 if arrive(warp, entry[_SITE], lane, target, 1, 0) < 0 else 0
    source_bytes = entry[_INFO + lane] & 0xFF
    copy_bytes(target, entry[_SOURCES + lane], source_bytes)
    fill_bytes(target + source_bytes, 0, size - source_bytes)
    block = warp[WARP_BLOCK]
    landed(warp, block, target, size)
    wrote(block, warp, target - i64_at(block)[BLOCK_SHARED], size)
    return 0


@njit
def _sweep(warp):
    """Removes the entries that have landed in all lanes."""
    copies = copies_of(warp)
    kept = 0
    for index in range(copies[_COUNT]):
        entry = _entry_at(warp, index)
        if entry[_LANES] != 0:
            if kept != index:
                copy_bytes(warp[WARP_COPIES] + (_HEADER + kept * _ENTRY) * 8,
                           warp[WARP_COPIES] + (_HEADER + index * _ENTRY) * 8, _ENTRY * 8)  # fmt: skip
            kept += 1
    copies[_COUNT] = kept


@njit
def _land_lane_before(warp, lane, count):
    """Carries out a lane's entries among the first `count`: those before an arrival."""
    for index in range(count):
        entry = _entry_at(warp, index)
        if (entry[_LANES] >> lane) & 1 and _land_lane(warp, entry, lane):
            return 1
    return 0


@njit
def land_arrivals(warp, mbarrier):
    """Carries out the arrivals at an mbarrier that cp.async of any warp of the block owes; 1 and a fault, or 0."""
    block = i64_at(warp[WARP_BLOCK])
    for index in range(block[BLOCK_NUM_WARPS]):
        other = i64_at(block[BLOCK_WARPS] + index * (WARP_FIELDS * 8))
        if other[WARP_COPIES] == 0:
            continue
        found = False
        for at in range(copies_of(other)[_COUNT]):
            entry = _entry_at(other, at)
            if entry[_BYTES] != _ARRIVAL:
                continue
            for lane in range(32):
                if (entry[_LANES] >> lane) & 1 and entry[_TARGETS + lane] == mbarrier:
                    found = True
                    if _land_lane_before(other, lane, at) or _land_lane(other, entry, lane):
                        return 1
        if found:
            _sweep(other)
    return 0


@njit
def _count(warp, site, entry, mask, blocks, size):
    """Counts both sides of a copy: its write to shared memory and, unless it fills with zeros, its read."""
    if i64_at(warp[WARP_LAUNCH])[LAUNCH_TRAFFIC] == 0:
        return
    count_access(warp, site, mask, i64_at(address_of(entry) + 8 * _TARGETS), blocks, size)
    reading = 0
    for lane in range(32):
        blocks[lane] = 0
        if (mask >> lane) & 1 and entry[_INFO + lane] & 0xFF:
            reading |= 1 << lane
    count_access(warp, site, reading, i64_at(address_of(entry) + 8 * _SOURCES), blocks, size)


@operation("cp_async", "qlqlpi")
def cp_async(warp, mask, site, targets, target_offset, sources, source_offset, source_sizes, size):
    entry, blocks, row = _new_entry(warp, site, size), stack_longs(32), stack_longs(2)
    for lane in range(32):
        if not (mask >> lane) & 1:
            continue
        address, source_bytes = types.int64(targets[lane]) + target_offset, types.int64(source_sizes[lane])
        source = types.int64(sources[lane]) + source_offset
        block = shared_block(warp, site, lane, address)
        if block == 0:
            return FAILED
        target = shared_host(block, address)
        if source_bytes > size:
            return report(warp, _SIZE, site, lane, address, size, source_bytes, 0, 0)
        if aligned(warp, site, lane, address, size) or aligned(warp, site, lane, source, size):
            return FAILED
        if source_bytes > 0:
            source = read_any(warp, site, lane, source, source_bytes)
            if source == 0:
                return FAILED
        row[0], row[1] = 0, 0  # what is beyond the source's bytes becomes zeros
        copy_bytes(address_of(row), source, source_bytes)
        if shared_range(warp, site, lane, block, target, size, STORE, address_of(row)):
            return FAILED
        if claim(warp, site, lane, block, target, size, IS_IN_FLIGHT):
            return FAILED
        entry[_TARGETS + lane], entry[_SOURCES + lane] = target, source
        entry[_INFO + lane] = source_bytes | copies_of(warp)[_GROUPS + lane] << 8
        entry[_LANES] |= 1 << lane
        blocks[lane] = block
    _count(warp, site, entry, mask, blocks, size)
    return DONE


@operation("cp_async_arrive", "qli")
def cp_async_arrive(warp, mask, site, addresses, offset, is_counted):
    """`is_counted` means .noinc: the arrival is one of those that the mbarrier expects."""
    entry = _new_entry(warp, site, _ARRIVAL)
    for lane in range(32):
        if (mask >> lane) & 1:
            host = locate(warp, site, lane, types.int64(addresses[lane]) + offset, False)
            if host == 0 or (not is_counted and add_pending(warp, site, lane, host, 1)):
                return FAILED
            entry[_TARGETS + lane] = host
            entry[_INFO + lane] = (1 << 40) << 8  # of no group
            entry[_LANES] |= 1 << lane
    return DONE


@operation("cp_async_commit", "")
def cp_async_commit(warp, mask, site):
    copies = copies_of(warp)
    for lane in range(32):
        copies[_GROUPS + lane] += (mask >> lane) & 1
    return DONE


@operation("cp_async_wait", "l")
def cp_async_wait(warp, mask, site, pending):
    """Waits for all groups but the last `pending`; for every copy, committed or not, if that is -1."""
    copies = copies_of(warp)
    for index in range(copies[_COUNT]):
        entry = _entry_at(warp, index)
        lanes = entry[_LANES] & mask
        if entry[_BYTES] == _ARRIVAL:
            continue
        for lane in range(32):
            is_covered = pending < 0 or (entry[_INFO + lane] >> 8) < copies[_GROUPS + lane] - pending
            if (lanes >> lane) & 1 and is_covered and _land_lane(warp, entry, lane):
                return FAILED
    _sweep(warp)
    return DONE


@njit
def close_copies(warp):
    """Forgets the copies in flight and frees the list. An arrival that follows copies is still carried out."""
    failed = 0
    if warp[WARP_COPIES] != 0:
        for index in range(copies_of(warp)[_COUNT]):
            entry = _entry_at(warp, index)
            for lane in range(32):
                if (entry[_LANES] >> lane) & 1 and not failed:
                    failed = _land_lane(warp, entry, lane)
        free(warp[WARP_COPIES])
        warp[WARP_COPIES] = 0
    return failed


_HINTS = {"L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"}
_SPACES = {"shared", "shared::cta", "global"}


@lowers("cp.async.ca", "cp.async.cg")
def lower_cp_async(low: Lowering, ins: Instruction) -> None:
    """cp.async.ca|cg.shared.global[hints] [dst], [src], size{, src-size | ignore-src}{, cache-policy}"""
    for part in ins.parts[3:]:
        if part not in _HINTS | _SPACES:
            raise low.refuse(f"modifier .{part}")
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
    low.call("cp_async", *low.address(ins.operands[0]), *low.address(ins.operands[1]), source_sizes, size)


@lowers("cp.async.commit_group", "cp.async.wait_all", "cp.async.wait_group")
def lower_groups(low: Lowering, ins: Instruction) -> None:
    if ins.parts[2] == "commit_group":
        low.call("cp_async_commit")
    else:
        low.call("cp_async_wait", low.uniform(ins.operands[0]) if ins.parts[2] == "wait_group" else -1)


@lowers("cp.async.mbarrier.arrive")
def lower_mbarrier_arrive(low: Lowering, ins: Instruction) -> None:
    rest = set(ins.parts[4:])
    if rest - {"noinc", "shared", "shared::cta", "b64"}:
        raise low.refuse("modifiers")
    low.call("cp_async_arrive", *low.address(ins.operands[0]), 1 if "noinc" in rest else 0)
