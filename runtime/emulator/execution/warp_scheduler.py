"""Scheduling of warps: clusters from the grid into slots, their warps in turns until each blocks, yields or exits.

One OS thread runs a number of slots. Within a cluster warps take turns, in the order of their numbers, or shuffled anew
each round where a seed is given. A cluster that only polls (its warps yield, without progress) makes room
for another one beside it, since it may wait for another block. If every warp of a cluster is blocked and none has
moved, it is a deadlock: warps block only on their own cluster.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.residency import begin_cluster, shape_at, slot_at
from runtime.emulator.execution.state import BLOCKED, EXITED, FAULT, YIELDED, launch_at
from runtime.emulator.memory.pointers import atomic_add_u64, call_run, trailing_zeros
from runtime.emulator.records import Long, Record, at
from runtime.emulator.synchronisation.barriers import settle_barriers
from runtime.emulator.translation.operations import call_operation


class Grid(Record):
    """The clusters of a launch, shared by its OS threads."""

    next = Long()  # clusters handed out; the first field
    count = Long()  # clusters of the grid
    stop = Long()  # 1 after a fault
    factor, shift = Long(), Long()  # cluster = (number * factor + shift) % count


grid_at = at(Grid)

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
    close = warp.launch.close_warp
    if close and call_operation(close, warp, 0, 0):
        return 1
    slot.live_warps -= 1
    block.num_exited_warps += 1
    block.progress += 1
    settle_barriers(block)
    return 0


@njit
def _close_cluster(slot):
    """The slot's cluster has ended or is given up."""
    slot.is_running = 0
    for rank in range(slot.num_blocks):
        block = slot.blocks[rank]
        close = block.launch.close_block
        if close:
            call_operation(close, block.warps, 0, 0)


def abandon(slots, num_slots):
    """After a launch that is given up: the clusters that still run are closed."""
    for index in range(num_slots):
        slot = slot_at(i64_at(slots)[index])
        if slot.is_running:
            _close_cluster(slot)
    return 0


@njit
def _progress(slot):
    """A number that rises with each event in the cluster that a blocked warp may wait for, but for steps."""
    total = 0
    for rank in range(slot.num_blocks):
        total += slot.blocks[rank].progress
    return total


@njit
def _run_round(slot, launch, run, shape, random):
    """Every live warp of a cluster runs once. Returns FAULT, or 0."""
    num_warps = shape.num_warps
    count = shape.num_blocks * num_warps
    order = slot.order
    if random[0] != 0:
        _shuffle(order, count, random)
    progress = _progress(slot)
    moved = launch.steps + progress
    any_yielded = False
    for turn in range(count):
        number = order[turn]
        block = slot.blocks[number // num_warps]
        warp = block.warps[number % num_warps]
        if warp.state == EXITED:
            continue
        state = call_run(run, warp)
        warp.state = state
        if state == FAULT:
            return FAULT
        if state == EXITED:
            if _exit_warp(slot, block, warp):
                return FAULT
        elif state == YIELDED:
            any_yielded = True
    after = _progress(slot)
    slot.polling_rounds = slot.polling_rounds + 1 if any_yielded and progress == after else 0
    slot.idle_rounds = slot.idle_rounds + 1 if not any_yielded and moved == launch.steps + after else 0
    return 0


@njit
def _report_deadlock(slot, shape):
    """The fault names the first warp that still lives; launch.py describes the others."""
    for rank in range(shape.num_blocks):
        block = slot.blocks[rank]
        for index in range(block.num_warps):
            warp = block.warps[index]
            if warp.state != EXITED:
                lane = trailing_zeros(warp.live)
                site = warp.site if warp.state == BLOCKED else warp.pcs[lane]
                report(warp, FaultKind.DEADLOCK, site, lane, 0, slot.cluster, 0, 0, 0)
                return


def run_clusters(grid_address, launch_address, run, slots_address, num_slots, shape_address, shared_bytes, random_at):
    """Runs clusters until the grid is done (ALL_DONE), a fault occurs (FAULTED, see the record), or all slots
    only poll (NEEDS_SLOT: call again with one more, laid out).

    Args:
        run: address of the translated kernel.
        slots_address: of the addresses of slots.
        random_at: address of the state of the seed, or of a 0 for the natural order.
    """
    queue, launch, shape = grid_at(grid_address), launch_at(launch_address), shape_at(shape_address)
    slots, random = i64_at(slots_address), i64_at(random_at)
    running = 0
    for index in range(num_slots):
        running += slot_at(slots[index]).is_running
    while True:
        all_poll = True
        for index in range(num_slots):
            slot = slot_at(slots[index])
            if slot.is_running == 0:
                if queue.next >= queue.count:
                    continue
                number = int(atomic_add_u64(grid_address, 1))
                if number >= queue.count:
                    continue
                cluster = (number * queue.factor + queue.shift) % queue.count
                begin_cluster(slot, launch, shape, cluster, shared_bytes)
                running += 1
            if queue.stop:
                return ALL_DONE
            if _run_round(slot, launch, run, shape, random) == FAULT:
                queue.stop = 1
                return FAULTED
            if slot.live_warps == 0:
                _close_cluster(slot)
                running -= 1
                all_poll = False
            elif slot.idle_rounds >= _IDLE_BEFORE_DEADLOCK or slot.polling_rounds >= _POLLS_BEFORE_DEADLOCK:
                _report_deadlock(slot, shape)
                queue.stop = 1
                return FAULTED
            elif slot.polling_rounds < _POLLS_BEFORE_COMPANY:
                all_poll = False
        if running == 0 and queue.next >= queue.count:
            return ALL_DONE
        if all_poll and queue.next < queue.count:
            return NEEDS_SLOT
