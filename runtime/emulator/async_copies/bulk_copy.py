"""`cp.async.bulk` and `cp.reduce.async.bulk` of plain bytes between device and shared memory, and their groups.

Each becomes a record of the block's queue (bulk_queue.py), which carries it out as late as it may.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from runtime.emulator.async_copies.bulk_queue import COPY, REDUCE, land_groups, new_copy
from runtime.emulator.async_copies.cp_async import bulk_groups, commit_bulk
from runtime.emulator.async_copies.proxy import check_read
from runtime.emulator.async_copies.reduction import reduction_of
from runtime.emulator.execution.counters import count_run
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import DONE, FAILED, block_at
from runtime.emulator.memory.careful_access import read_any, shared_range, write_any
from runtime.emulator.memory.device_memory import IS_BEING_READ, IS_IN_FLIGHT
from runtime.emulator.memory.locate import (
    aligned,
    block_of_rank,
    claim,
    shared_block,
    shared_host,
)
from runtime.emulator.races.clocks import LOAD, STORE
from runtime.emulator.races.vector_clocks import release
from runtime.emulator.synchronisation.mbarrier_state import mbarrier_at
from runtime.emulator.translation.lowering import Lowering, Value
from runtime.emulator.translation.operations import operation
from runtime.emulator.translation.ptx import Instruction, Integer, Operand

NO_REDUCTION = -1


@njit
def start_record(warp, site, lane, kind, size):
    """A record with the fields that every kind has; it belongs to the lane's open bulk group."""
    record = new_copy(warp)
    record.kind, record.site, record.warp, record.lane = kind, site, warp, lane
    record.group, record.size = bulk_groups(warp, lane), size
    return record


@njit
def set_mbarrier(warp, record, host):
    """The record completes a transaction of an mbarrier (a host address) instead of belonging to a group."""
    record.group, record.mbarrier = -1, host
    release(warp, host, 1)


@njit
def claim_shared_target(warp, site, lane, block, host, size, source):
    """Checks shared memory as the target of an asynchronous write and marks it. Returns 1 and a fault, or 0."""
    if shared_range(warp, site, lane, block, host, size, STORE, source):
        return 1
    return claim(warp, site, lane, block, host, size, IS_IN_FLIGHT)


@njit
def claim_shared_source(warp, site, lane, block, host, size):
    """Checks shared memory as the source of an asynchronous read and marks it. Returns 1 and a fault, or 0."""
    if shared_range(warp, site, lane, block, host, size, LOAD, 0) or check_read(warp, site, lane, block, host, size):
        return 1
    return claim(warp, site, lane, block, host, size, IS_BEING_READ)


@njit
def _plain(warp, site, lane, target, source, size):
    """The limits of a plain bulk copy. Returns 1 and a fault, or 0."""
    if size <= 0 or size % 16:
        return report(warp, FaultKind.ASYNC_SIZE, site, lane, target, size, size, 0, 0)
    return aligned(warp, site, lane, target, 16) or aligned(warp, site, lane, source, 16)


@njit
def _copy_in(warp, site, lane, block, target, source, size, mbarrier):
    """A record for global → shared memory of one block."""
    host = shared_host(block, target)
    if claim_shared_target(warp, site, lane, block, host, size, source):
        return 1
    record = start_record(warp, site, lane, COPY, size)
    record.target, record.target_block, record.source = host, block, source
    set_mbarrier(warp, record, mbarrier)
    return 0


@operation("bulk_load", "qlqlpqlp")
def bulk_load(
    warp, mask, site, targets, target_offset, sources, source_offset, sizes, mbarriers, mbarrier_offset, cluster_mask
):
    """Global → shared. A non-zero `cluster_mask`: into each named block, at the same offsets there."""
    for lane in range(32):
        if not (mask >> lane) & 1:
            continue
        target, size = targets[lane] + target_offset, types.int64(sizes[lane])
        source = sources[lane] + source_offset
        if _plain(warp, site, lane, target, source, size):
            return FAILED
        source = read_any(warp, site, lane, source, size)
        if source == 0:
            return FAILED
        block = shared_block(warp, site, lane, target)
        mbarrier = mbarrier_at(warp, site, lane, mbarriers[lane] + mbarrier_offset, False)
        if block == 0 or mbarrier == 0:
            return FAILED
        if warp.launch.traffic:
            count_run(warp, site, source, size, 1)
        ranks, at = types.int64(cluster_mask[lane]), mbarrier - block_at(block).shared
        if ranks >> warp.launch.cluster_size:
            return report(warp, FaultKind.CLUSTER_RANK, site, lane, target, ranks, warp.launch.cluster_size, 0, 0)
        for rank in range(16 if ranks else 1):
            if ranks == 0 or (ranks >> rank) & 1:
                other = block_of_rank(warp, site, lane, rank) if ranks else block
                if other == 0:
                    return FAILED
                there = block_at(other).shared + at if ranks else mbarrier
                if _copy_in(warp, site, lane, other, target, source, size, there):
                    return FAILED
    return DONE


@operation("bulk_store", "qlqlplll")
def bulk_store(warp, mask, site, targets, target_offset, sources, source_offset, sizes, reduction, kind, reducer):
    """Shared → global, of a bulk group, perhaps reducing."""
    for lane in range(32):
        if not (mask >> lane) & 1:
            continue
        target, size = targets[lane] + target_offset, types.int64(sizes[lane])
        source = sources[lane] + source_offset
        if _plain(warp, site, lane, target, source, size):
            return FAILED
        block = shared_block(warp, site, lane, source)
        if block == 0:
            return FAILED
        host = shared_host(block, source)
        if claim_shared_source(warp, site, lane, block, host, size):
            return FAILED
        if reduction == NO_REDUCTION:
            if write_any(warp, site, lane, target, size, host) == 0:
                return FAILED
            if claim(warp, site, lane, 0, target, size, IS_IN_FLIGHT):
                return FAILED
        if warp.launch.traffic:
            count_run(warp, site, target, size, 1)
        record = start_record(warp, site, lane, COPY if reduction == NO_REDUCTION else REDUCE, size)
        record.target, record.source, record.source_block = target, host, block
        record.operation, record.type, record.reducer = reduction, kind, reducer
    return DONE


@operation("bulk_commit", "")
def bulk_commit(warp, mask, site):
    for lane in range(32):
        if (mask >> lane) & 1:
            commit_bulk(warp, lane)
    return DONE


@operation("bulk_wait", "ll")
def bulk_wait(warp, mask, site, pending, only_read):
    for lane in range(32):
        if (mask >> lane) & 1 and land_groups(warp, lane, bulk_groups(warp, lane) - pending, only_read):
            return FAILED
    return DONE


MBARRIER = "mbarrier::complete_tx::bytes"
MULTICAST = "multicast::cluster"
HINT = "L2::cache_hint"


def last_operands(low: Lowering, ins: Instruction, first: int) -> Operand:
    """After the fixed operands: the block mask of .multicast::cluster (or 0), then a cache policy."""
    rest = list(ins.operands[first:])
    if HINT in ins.parts and rest:
        rest.pop()
    ranks: Operand = rest.pop(0) if MULTICAST in ins.parts and rest else Integer(0)
    if rest or (MULTICAST in ins.parts and ranks == Integer(0)):
        raise low.refuse(f"{len(ins.operands)} operands")
    return ranks


def lower_load(low: Lowering, ins: Instruction) -> None:
    low.only(MBARRIER, MULTICAST, HINT, first=5)
    target, source, size, mbarrier = ins.operands[:4]
    ranks = low.slot(last_operands(low, ins, 4), 32)
    addresses = (*low.address(target), *low.address(source))
    low.call("bulk_load", *addresses, low.slot(size, 32), *low.address(mbarrier), ranks)


def reducer_of(low: Lowering, reduction: int) -> Value:
    """The address of the operation that reduces, or 0 for a plain copy."""
    return 0 if reduction == NO_REDUCTION else low.operation_address("reduce_run")


def _reduction(low: Lowering, ins: Instruction) -> tuple[int, int]:
    if ins.parts[1] != "reduce":
        return NO_REDUCTION, 0
    found = reduction_of(ins.parts[2:])
    if found is None:
        raise low.refuse("this reduction")
    return found


def lower_store(low: Lowering, ins: Instruction) -> None:
    reduction, kind = _reduction(low, ins)
    if reduction == NO_REDUCTION:
        low.only("bulk_group", HINT, first=5)
    last_operands(low, ins, 3)
    target, source, size = ins.operands[:3]
    addresses = (*low.address(target), *low.address(source))
    low.call("bulk_store", *addresses, low.slot(size, 32), reduction, kind, reducer_of(low, reduction))
