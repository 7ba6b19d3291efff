"""Clusters in slots of memory, and the scheduling of their warps.

A *slot* holds one resident cluster and is used again for the next one. It is one flat buffer: its record, the table of
its blocks' addresses, then each block with its warps. `Shape` has the sizes of the parts, `lay_out` fills in every
address once a launch, `begin_cluster` the fields that change from cluster to cluster.

One OS thread runs a number of slots. Within a cluster warps take turns, in the order of their numbers, or shuffled anew
each round where a seed is given, each until it blocks, yields or exits. A cluster that only polls (its warps yield,
without progress) makes room for another one beside it, since it may wait for another block. If every warp of a cluster
is blocked and none has moved, it is a deadlock: warps block only on their own cluster. `close_warp` and `close_block`
end asynchronous work.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, attr-defined"

from __future__ import annotations

import numpy as np

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at, u32_at
from runtime.emulator.async_copies.bulk_queue import drop, finish, first_into, first_unread
from runtime.emulator.async_copies.cp_async import close_copies, drop_copies
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import (
    BLOCKED,
    CHECK_ASYNC,
    EXITED,
    FAULT,
    YIELDED,
    Block,
    Warp,
    block_at,
    launch_at,
)
from runtime.emulator.memory.pointers import (
    address_of,
    atomic_add_u64,
    call_run,
    copy_bytes,
    fill_bytes,
    trailing_zeros,
)
from runtime.emulator.races.vector_clocks import start_block
from runtime.emulator.records import Long, LongArray, Record, Table, at
from runtime.emulator.synchronisation.barriers import BARRIERS_BYTES, reset_barriers, settle_barriers
from runtime.emulator.tensor_cores.wgmma import close_wgmma
from runtime.emulator.translation.operations import call_operation, operation

_PCS_BYTES, _TOKENS_BYTES = 128, 256
_TID_BYTES = 384


class Slot(Record):
    """The state of one resident cluster."""

    is_running = Long()
    cluster = Long()  # index of the cluster in the grid
    live_warps = Long()
    blocks = Table("Block")
    num_blocks = Long()
    idle_rounds = Long()  # rounds in which every warp blocked
    polling_rounds = Long()  # rounds in which warps only polled
    order = LongArray()  # of the warps of the cluster: the order in which they run


class Shape(Record):
    """Sizes of a slot's parts in bytes, multiples of 64."""

    num_blocks = Long()  # of a cluster
    num_warps = Long()  # of a block
    registers = Long()  # a warp's register file
    shared = Long()  # of a block, from shared address 0
    shared_shadow = Long()  # 0 if memory has none
    local = Long()  # of a warp
    local_shadow = Long()
    proxy = Long()  # of the array at block.proxy, or 0
    shadow_image = Long()  # address of the bytes that a block's shared shadow begins with
    clears_registers = Long()  # 1 if a block's registers start as zeros; else with old contents

    @property
    def slot_bytes(self) -> int:
        warp = Warp.size_bytes + _PCS_BYTES + _TOKENS_BYTES + self.registers + self.local + self.local_shadow
        block = _BLOCK_BYTES + _BARRIERS_BYTES + self.proxy + self.shared + self.shared_shadow + self.num_warps * warp
        tables = round_up(8 * self.num_blocks) + round_up(8 * self.num_blocks * self.num_warps)
        return _SLOT_BYTES + tables + self.num_blocks * block


slot_at, shape_at = at(Slot), at(Shape)


def round_up(size: int) -> int:
    """To a multiple of 64."""
    return -(-size // 64) * 64


_SLOT_BYTES, _BLOCK_BYTES, _BARRIERS_BYTES = map(round_up, (Slot.size_bytes, Block.size_bytes, BARRIERS_BYTES))
_BLOCK_ZEROS, _WARP_ZEROS = 8 * Block.shared_races.index, 8 * Warp.live.index
"""From here on a block's and a warp's record start with zeros."""
_WARP_BYTES = Warp.size_bytes
_BLOCK_ZERO_BYTES, _WARP_ZERO_BYTES = Block.size_bytes - _BLOCK_ZEROS, Warp.size_bytes - _WARP_ZEROS


class SlotBuffer:
    """The memory of one slot."""

    def __init__(self, shape: Shape) -> None:
        self._buffer = np.zeros(shape.slot_bytes + 64, dtype=np.uint8)
        self.address = -(-self._buffer.ctypes.data // 64) * 64


def lay_out(slot_address, launch_address, shape_address):
    """Writes every address of a slot, and the thread indices that its warps have in any block."""
    slot, launch, shape = slot_at(slot_address), launch_at(launch_address), shape_at(shape_address)
    num_blocks, num_warps = shape.num_blocks, shape.num_warps
    at = slot_address + _SLOT_BYTES
    slot.is_running = 0
    slot.blocks, slot.num_blocks = at, num_blocks
    table = i64_at(at)
    at += (8 * num_blocks + 63) // 64 * 64
    slot.order = at
    for index in range(num_blocks * num_warps):
        slot.order[index] = index
    at += (8 * num_blocks * num_warps + 63) // 64 * 64
    for rank in range(num_blocks):
        table[rank] = at
        block = block_at(at)
        fill_bytes(at, 0, _BLOCK_BYTES)
        at += _BLOCK_BYTES
        block.launch = launch_address
        block.rank = rank
        block.cluster = address_of(table)
        block.num_warps = num_warps
        block.warps = at
        fill_bytes(at, 0, num_warps * _WARP_BYTES)
        at += num_warps * _WARP_BYTES
        block.barriers = at
        at += _BARRIERS_BYTES
        block.proxy = at if shape.proxy else 0
        at += shape.proxy
        block.shared = at
        at += shape.shared
        block.shared_shadow = at if shape.shared_shadow else 0
        at += shape.shared_shadow
        for index in range(num_warps):
            warp = block.warps[index]
            warp.block, warp.launch, warp.index = address_of(block), launch_address, index
            warp.pcs = at
            at += _PCS_BYTES
            warp.tokens = at
            at += _TOKENS_BYTES
            warp.registers = at
            at += shape.registers
            warp.local = at
            at += shape.local
            warp.local_shadow = at if shape.local_shadow else 0
            at += shape.local_shadow
            warp.lanes = (1 << min(32, launch.num_threads - 32 * index)) - 1
            registers = u32_at(warp.registers)
            for lane in range(32):
                thread = 32 * index + lane
                registers[lane] = thread % launch.block_x
                registers[32 + lane] = thread // launch.block_x % launch.block_y
                registers[64 + lane] = thread // (launch.block_x * launch.block_y)
    return 0


@njit
def begin_cluster(slot, launch, shape, cluster, shared_bytes):
    """Makes a laid-out slot the cluster of the given index: everything as a block finds it when it starts."""
    cx, cy, cz = launch.cluster_x, launch.cluster_y, launch.cluster_z
    clusters_x, clusters_y = launch.grid_x // cx, launch.grid_y // cy
    first_x = cluster % clusters_x * cx
    first_y = cluster // clusters_x % clusters_y * cy
    first_z = cluster // (clusters_x * clusters_y) * cz
    for rank in range(shape.num_blocks):
        block = slot.blocks[rank]
        block.x, block.y, block.z = first_x + rank % cx, first_y + rank // cx % cy, first_z + rank // (cx * cy)
        block.linear = block.x + launch.grid_x * (block.y + launch.grid_y * block.z)
        block.shared_bytes = shared_bytes
        fill_bytes(address_of(block) + _BLOCK_ZEROS, 0, _BLOCK_ZERO_BYTES)
        reset_barriers(block)
        if shape.proxy:
            fill_bytes(block.proxy, 0, shape.proxy)
        if shape.shared_shadow:
            copy_bytes(block.shared_shadow, shape.shadow_image, shared_bytes)
        for index in range(shape.num_warps):
            warp = block.warps[index]
            fill_bytes(address_of(warp) + _WARP_ZEROS, 0, _WARP_ZERO_BYTES)
            warp.live = warp.lanes
            warp.state = YIELDED
            warp.is_before_dependency = launch.is_dependent
            fill_bytes(address_of(warp.pcs), 0, _PCS_BYTES)
            fill_bytes(address_of(warp.tokens), 0, _TOKENS_BYTES)
            if shape.clears_registers:
                fill_bytes(warp.registers + _TID_BYTES, 0, shape.registers - _TID_BYTES)
            if shape.local_shadow:
                fill_bytes(warp.local_shadow, 1, shape.local_shadow)
    for rank in range(shape.num_blocks):
        start_block(slot.blocks[rank].warps)
    slot.cluster = cluster
    slot.is_running = 1
    slot.live_warps = shape.num_blocks * shape.num_warps
    slot.idle_rounds = 0
    slot.polling_rounds = 0


class Grid(Record):
    """The clusters of a launch, shared by its OS threads."""

    next = Long()  # clusters handed out; the first field
    count = Long()  # clusters of the grid
    stop = Long()  # 1 after a fault
    factor, shift = Long(), Long()  # cluster = (number * factor + shift) % count


grid_at = at(Grid)


@operation("close_warp", "l")
def close_warp(warp, mask, site, nothing):
    """All lanes of the warp have exited. Its bulk stores are carried out; returns 1 and a fault, or 0.

    A copy that has not read its shared memory, a wgmma that was never waited for, and, with the block's last warp, a
    copy that will still write the block's shared memory, are faults under CHECK_ASYNC: the memory may belong to another
    block by then. `warp` still counts as running in `num_exited_warps`.
    """
    checked = warp.launch.checks & CHECK_ASYNC
    pending = max(close_wgmma(warp), first_unread(warp))
    if checked and pending >= 0:
        return report(warp, FaultKind.EXIT_IN_FLIGHT, pending, 0, 0, pending, 0, 0, 0)
    if finish(warp) or close_copies(warp):
        return 1
    block = warp.block
    if checked and block.num_exited_warps + 1 == block.num_warps:
        for rank in range(warp.launch.cluster_size):
            pending = first_into(address_of(block), block.cluster[rank])
            if pending >= 0:
                return report(warp, FaultKind.EXIT_IN_FLIGHT, pending, 0, 0, pending, 0, 0, 0)
    return 0


@operation("close_block", "l")
def close_block(warp, mask, site, nothing):
    """The cluster of the warp's block has ended, or the launch is given up: frees what the block's queues hold."""
    block = warp.block
    drop(block)
    for index in range(block.num_warps):
        other = block.warps[index]
        drop_copies(other)
        close_wgmma(other)
    return 0


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
