"""Scheduling of warps: clusters from the grid into slots, their warps in turns until each blocks, yields or exits.

One OS thread runs a number of slots. Within a cluster warps take turns, in the order of their numbers, or shuffled anew
each round where a seed is given. A cluster that only polls (its warps yield, without progress) makes room
for another one beside it, since it may wait for another block. If every warp of a cluster is blocked and none has
moved, it is a deadlock: warps block only on their own cluster.
"""

from __future__ import annotations

from numba_kernels.cache import njit
from numba_kernels.pointers import i32_at, i64_at
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.residency import (
    P_BLOCKS,
    P_WARPS,
    S_BLOCKS,
    S_CLUSTER,
    S_IDLE_ROUNDS,
    S_IS_RUNNING,
    S_LIVE_WARPS,
    S_NUM_BLOCKS,
    S_ORDER,
    S_POLLING_ROUNDS,
    begin_cluster,
)
from runtime.emulator.execution.warp_state import (
    BLOCK_EXITED_WARPS,
    BLOCK_LAUNCH,
    BLOCK_NUM_WARPS,
    BLOCK_PROGRESS,
    BLOCK_WARPS,
    BLOCKED,
    EXITED,
    FAULT,
    LAUNCH_CLOSE_BLOCK,
    LAUNCH_CLOSE_WARP,
    LAUNCH_STEPS,
    WARP_FIELDS,
    WARP_LANES,
    WARP_LAUNCH,
    WARP_LIVE,
    WARP_PCS,
    WARP_SITE,
    WARP_STATE,
    YIELDED,
)
from runtime.emulator.memory.pointers import address_of, atomic_add_u64, call_operation, call_run, trailing_zeros
from runtime.emulator.synchronisation.barriers import settle_barriers

# --- what OS threads of a launch share: int64 array ---
Q_NEXT = 0  # clusters handed out
Q_COUNT = 1  # clusters of the grid
Q_STOP = 2  # 1 after a fault
Q_FACTOR, Q_SHIFT = 3, 4  # cluster = (number * factor + shift) % count
QUEUE_FIELDS = 8

# --- what run_clusters returns ---
ALL_DONE, FAULTED, NEEDS_SLOT = 0, 1, 2

_POLLS_BEFORE_COMPANY = 256
_POLLS_BEFORE_DEADLOCK = 1 << 22
_IDLE_BEFORE_DEADLOCK = 2


@njit
def _random(state):
    """xorshift64 (Marsaglia 2003); `state[0]` is not zero."""
    x = state[0]
    x ^= x << 13
    x ^= (x >> 7) & ((1 << 57) - 1)
    x ^= x << 17
    state[0] = x
    return x & 0x7FFFFFFF


@njit
def _shuffle(order, count, random):
    for index in range(count - 1, 0, -1):
        other = _random(random) % (index + 1)
        order[index], order[other] = order[other], order[index]


@njit
def _exit_warp(slot, block, warp):
    """Returns 1 and a fault, or 0."""
    close = i64_at(warp[WARP_LAUNCH])[LAUNCH_CLOSE_WARP]
    if close and call_operation(close, address_of(warp), warp[WARP_LANES], 0):
        return 1
    slot[S_LIVE_WARPS] -= 1
    block[BLOCK_EXITED_WARPS] += 1
    block[BLOCK_PROGRESS] += 1
    settle_barriers(block)
    return 0


@njit
def _close_cluster(slot):
    """The slot's cluster has ended or is given up."""
    slot[S_IS_RUNNING] = 0
    for rank in range(slot[S_NUM_BLOCKS]):
        block = i64_at(i64_at(slot[S_BLOCKS])[rank])
        close = i64_at(block[BLOCK_LAUNCH])[LAUNCH_CLOSE_BLOCK]
        if close:
            call_operation(close, block[BLOCK_WARPS], 1, 0)


@njit
def abandon(slots):
    """After a launch that is given up: the clusters that still run are closed."""
    for index in range(len(slots)):
        slot = i64_at(slots[index])
        if slot[S_IS_RUNNING]:
            _close_cluster(slot)


@njit
def _moved(slot, launch):
    """A number that rises with each event in the cluster that a blocked warp may wait for."""
    total = launch[LAUNCH_STEPS]
    for rank in range(slot[S_NUM_BLOCKS]):
        total += i64_at(i64_at(slot[S_BLOCKS])[rank])[BLOCK_PROGRESS]
    return total


@njit
def _progress(slot):
    total = 0
    for rank in range(slot[S_NUM_BLOCKS]):
        total += i64_at(i64_at(slot[S_BLOCKS])[rank])[BLOCK_PROGRESS]
    return total


@njit
def _run_round(slot, launch, run, shape, random):
    """Every live warp of a cluster runs once. Returns FAULT, or 0."""
    num_warps = shape[P_WARPS]
    count = shape[P_BLOCKS] * num_warps
    order = i64_at(slot[S_ORDER])
    if random[0] != 0:
        _shuffle(order, count, random)
    moved, progress = _moved(slot, launch), _progress(slot)
    any_yielded = False
    for turn in range(count):
        number = order[turn]
        block = i64_at(i64_at(slot[S_BLOCKS])[number // num_warps])
        address = block[BLOCK_WARPS] + number % num_warps * (WARP_FIELDS * 8)
        warp = i64_at(address)
        if warp[WARP_STATE] == EXITED:
            continue
        state = call_run(run, address)
        warp[WARP_STATE] = state
        if state == FAULT:
            return FAULT
        if state == EXITED:
            if _exit_warp(slot, block, warp):
                return FAULT
        elif state == YIELDED:
            any_yielded = True
    slot[S_POLLING_ROUNDS] = slot[S_POLLING_ROUNDS] + 1 if any_yielded and progress == _progress(slot) else 0
    slot[S_IDLE_ROUNDS] = slot[S_IDLE_ROUNDS] + 1 if not any_yielded and moved == _moved(slot, launch) else 0
    return 0


@njit
def _report_deadlock(slot, shape):
    """The fault names the first warp that still lives; launch.py describes the others."""
    for rank in range(shape[P_BLOCKS]):
        block = i64_at(i64_at(slot[S_BLOCKS])[rank])
        for index in range(block[BLOCK_NUM_WARPS]):
            warp = i64_at(block[BLOCK_WARPS] + index * WARP_FIELDS * 8)
            if warp[WARP_STATE] != EXITED:
                lane = trailing_zeros(warp[WARP_LIVE])
                site = warp[WARP_SITE] if warp[WARP_STATE] == BLOCKED else i32_at(warp[WARP_PCS])[lane]
                report(warp, FaultKind.DEADLOCK, site, lane, 0, slot[S_CLUSTER], 0, 0, 0)
                return


@njit
def run_clusters(queue_address, launch_address, run, slots, num_slots, shape, shared_bytes, random):
    """Runs clusters until the grid is done (ALL_DONE), a fault occurs (FAULTED, see the record), or all slots
    only poll (NEEDS_SLOT: call again with one more, laid out).

    Args:
        slots: int64 array of slot addresses.
        random: int64 array whose first element is the seed's state, or 0 for the natural order.
    """
    queue, launch = i64_at(queue_address), i64_at(launch_address)
    running = 0
    for index in range(num_slots):
        running += i64_at(slots[index])[S_IS_RUNNING]
    while True:
        all_poll = True
        for index in range(num_slots):
            slot = i64_at(slots[index])
            if slot[S_IS_RUNNING] == 0:
                if queue[Q_NEXT] >= queue[Q_COUNT]:
                    continue
                number = int(atomic_add_u64(queue_address + Q_NEXT * 8, 1))
                if number >= queue[Q_COUNT]:
                    continue
                cluster = (number * queue[Q_FACTOR] + queue[Q_SHIFT]) % queue[Q_COUNT]
                begin_cluster(slots[index], launch_address, shape, cluster, shared_bytes)
                running += 1
            if queue[Q_STOP]:
                return ALL_DONE
            if _run_round(slot, launch, run, shape, random) == FAULT:
                queue[Q_STOP] = 1
                return FAULTED
            if slot[S_LIVE_WARPS] == 0:
                _close_cluster(slot)
                running -= 1
                all_poll = False
            elif slot[S_IDLE_ROUNDS] >= _IDLE_BEFORE_DEADLOCK or slot[S_POLLING_ROUNDS] >= _POLLS_BEFORE_DEADLOCK:
                _report_deadlock(slot, shape)
                queue[Q_STOP] = 1
                return FAULTED
            elif slot[S_POLLING_ROUNDS] < _POLLS_BEFORE_COMPANY:
                all_poll = False
        if running == 0 and queue[Q_NEXT] >= queue[Q_COUNT]:
            return ALL_DONE
        if all_poll and queue[Q_NEXT] < queue[Q_COUNT]:
            return NEEDS_SLOT
