"""Clusters and the small instructions around asynchronous work.

barrier.cluster, mapa, elect.sync, fence.proxy.async, fence.mbarrier_init, setmaxnreg, griddepcontrol.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from runtime.emulator.async_copies.proxy import fence, synchronised
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import (
    DONE,
    FULL_MASK,
    RETRY,
    SHARED_OFFSET_MASK,
    SHARED_RANK_SHIFT,
    SHARED_WINDOW,
)
from runtime.emulator.memory.locate import is_shared
from runtime.emulator.memory.pointers import address_of, trailing_zeros
from runtime.emulator.races.vector_clocks import acquire, complete, release
from runtime.emulator.synchronisation.mbarrier_state import progress
from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.operations import operation
from runtime.emulator.translation.ptx import Instruction, Pair, Sink

_ALIGNED, _RELAXED = 1, 2


@njit
def _all_arrived(warp, generation):
    """Whether every lane of the cluster has arrived in this generation or exited."""
    cluster = warp.block.cluster
    for rank in range(warp.launch.cluster_size):
        block = cluster[rank]
        for index in range(block.num_warps):
            other = block.warps[index]
            phase = other.cluster_phase
            here = phase & FULL_MASK if phase >> 32 == generation else 0
            here |= other.lanes & ~other.live
            if here != other.lanes:
                return False
    return True


@njit
def _settle(warp):
    """Ends the cluster barrier's phase if all have arrived. Returns the generation under way."""
    state = warp.block.cluster[0]
    generation = state.cluster_generation
    if _all_arrived(warp, generation):
        complete(warp, address_of(warp.block.cluster))
        generation += 1
        state.cluster_generation = generation
        progress(warp)
    return generation


@operation("cluster_arrive", "l")
def cluster_arrive(warp, mask, site, flags):
    if flags & _ALIGNED and mask != warp.live:
        return report(warp, FaultKind.DIVERGENT_ALIGNED, site, 0, 0, mask, warp.live, 0, 0)
    state = warp.block.cluster[0]
    generation, lanes = state.cluster_generation, mask
    phase = warp.cluster_phase
    arrived = phase & FULL_MASK
    if arrived & lanes or (arrived and phase >> 32 != generation):
        return report(warp, FaultKind.CLUSTER_BARRIER, site, 0, 0, arrived, 0, 0, 0)
    if flags & _RELAXED:
        if warp.hides_barrier:
            return report(warp, FaultKind.MISSING_INIT_FENCE, site, 0, 0, 0, 0, 0, 0)
        release(warp, address_of(warp.block.cluster), 0)
    else:
        warp.hides_barrier = 0
        release(warp, address_of(warp.block.cluster), 1)
    warp.cluster_phase = generation << 32 | arrived | lanes
    _settle(warp)
    return DONE


@operation("cluster_wait", "l")
def cluster_wait(warp, mask, site, flags):
    if flags & _ALIGNED and mask != warp.live:
        return report(warp, FaultKind.DIVERGENT_ALIGNED, site, 0, 0, mask, warp.live, 0, 0)
    phase, lanes = warp.cluster_phase, mask
    if lanes & ~phase:
        return report(warp, FaultKind.CLUSTER_BARRIER, site, 0, 0, lanes & ~phase, 0, 0, 0)
    if _settle(warp) == phase >> 32:
        return RETRY
    warp.cluster_phase = phase & ~lanes
    acquire(warp, address_of(warp.block.cluster))
    synchronised(warp)
    return DONE


@operation("map_rank", "qqp")
def map_rank(warp, mask, site, target, addresses, ranks):
    """mapa: the same place of shared memory in another block of the cluster."""
    size = warp.launch.cluster_size
    for lane in range(32):
        if (mask >> lane) & 1:
            address, rank = addresses[lane], types.int64(ranks[lane])
            if not is_shared(address):
                return report(warp, FaultKind.NOT_SHARED, site, lane, address, 0, 0, 0, 0)
            if rank >= size:
                return report(warp, FaultKind.CLUSTER_RANK, site, lane, address, rank, size, 0, 0)
            window = SHARED_WINDOW if address >= SHARED_WINDOW else 0
            target[lane] = types.uint64(window | (rank + 1) << SHARED_RANK_SHIFT | address & SHARED_OFFSET_MASK)
    return DONE


@operation("elect", "ppp")
def elect(warp, mask, site, leader, elected, members):
    """The lowest member is elected."""
    elected[0] = types.uint32(0)
    for lane in range(32):
        if (mask >> lane) & 1:
            wanted = types.uint32(members[lane])
            if not (wanted >> types.uint32(lane)) & 1 or types.int64(wanted) & warp.live & ~mask:
                return report(warp, FaultKind.LANE_NOT_IN_MASK, site, lane, 0, wanted, 0, 0, 0)
            first = trailing_zeros(wanted)
            leader[lane] = types.uint32(first)
            if first == lane:
                elected[0] |= types.uint32(1) << types.uint32(lane)
    return DONE


@operation("init_fence", "")
def init_fence(warp, mask, site):
    if mask:
        warp.hides_barrier = 0
    return DONE


@operation("proxy_fence", "")
def proxy_fence(warp, mask, site):
    if mask:
        fence(warp)
    return DONE


@operation("set_max_registers", "lll")
def set_max_registers(warp, mask, site, count, grows, at_launch):
    """setmaxnreg. An increase waits until the warps of the block leave it enough of the 65,536 registers."""
    if mask != FULL_MASK:
        return report(warp, FaultKind.DIVERGENT_ALIGNED, site, 0, 0, mask, FULL_MASK, 0, 0)
    now = warp.max_registers if warp.max_registers else at_launch
    if (grows and count < now) or (not grows and count > now):
        return report(warp, FaultKind.REGISTER_BUDGET, site, 0, 0, count, now, at_launch, 0)
    if grows:
        block = warp.block
        taken = 0
        for index in range(block.num_warps):
            other = block.warps[index]
            if other.live != 0:
                taken += other.max_registers if other.max_registers else at_launch
        if (taken - now + count) * 32 > 65536:
            return RETRY
    warp.max_registers = count
    progress(warp)
    return DONE


@operation("dependency_wait", "")
def dependency_wait(warp, mask, site):
    if mask:
        warp.is_before_dependency = 0
    return DONE


def lower_elect(low: Lowering, ins: Instruction) -> None:
    target = ins.operands[0]
    leader, elected = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    members = low.slot(ins.operands[1], 32)
    low.call("elect", low.destination(leader, 32), low.predicate_destination(elected), members)


def lower_setmaxnreg(low: Lowering, ins: Instruction) -> None:
    count = low.uniform(ins.operands[0])
    if ins.parts[1] not in ("inc", "dec") or ins.parts[2:] != ("sync", "aligned", "u32"):
        raise low.refuse("modifiers")
    if not 24 <= count <= 256 or count % 8:
        raise low.refuse(f"{count} registers: a multiple of 8 from 24 to 256")
    threads = _threads(low)
    blocks = (low.kernel.directives.get("minnctapersm") or (1,))[0]
    at_launch = min(65536 // (threads * max(1, blocks)) // 8 * 8, 248)
    at_launch = (low.kernel.directives.get("maxnreg") or (at_launch,))[0]
    low.resume_here()
    low.call("set_max_registers", count, 1 if ins.parts[1] == "inc" else 0, at_launch, blocks=True)


def _threads(low: Lowering) -> int:
    for directive in ("reqntid", "maxntid"):
        if low.kernel.directives.get(directive):
            product = 1
            for size in low.kernel.directives[directive]:
                product *= size
            return product
    raise low.refuse("a kernel without .maxntid or .reqntid, whose registers are therefore not known")
