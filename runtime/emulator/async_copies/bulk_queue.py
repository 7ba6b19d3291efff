"""Bulk copies in flight: those that `cp.async.bulk…` started and no wait has covered yet.

Each block keeps a list of them (`Block.copies`). A copy is carried out as late as it may: one with an mbarrier when a
thread waits for that mbarrier in vain, one of a bulk group at the `wait_group` of its thread, whose `.read` form
carries out the reading alone. Until then its target bytes are marked in flight and its source bytes as being read.

A copy's source is read when the copy lands, or, in shared memory, at `wait_group.read`, into a snapshot.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, attr-defined"

from __future__ import annotations

from numba_kernels.cache import njit
from runtime.emulator.async_copies.reduction import reduce
from runtime.emulator.async_copies.tensor_map import element_bytes
from runtime.emulator.memory.careful_access import global_range
from runtime.emulator.memory.locate import free, landed, make_room, malloc, was_read, zeroed
from runtime.emulator.memory.pointers import address_of, copy_bytes, fill_bytes
from runtime.emulator.races.clocks import ATOMIC
from runtime.emulator.records import Long, Longs, Record, To, at
from runtime.emulator.synchronisation.mbarrier_state import add_transactions
from runtime.emulator.translation.operations import call_operation

COPY, REDUCE, TENSOR_LOAD, TENSOR_STORE, TENSOR_REDUCE = range(1, 6)
"""COPY and REDUCE: plain bytes either way."""


class Copy(Record):
    """A copy in flight. Targets, sources and mbarriers are host addresses; a block of 0 means global memory."""

    kind, site, lane = Long(), Long(), Long()
    warp = To("Warp")
    group = Long()  # of its lane's bulk groups, -1 with an mbarrier
    target, target_block = Long(), Long()
    source, source_block = Long(), Long()
    size = Long()
    mbarrier = Long()
    operation, type = Long(), Long()  # of a reduction
    snapshot = Long()  # address of the bytes of a source that has been read, or 0
    offset = Long()  # shared offset of a tensor's tile, whose bits swizzle it
    mover, reducer = Long(), Long()  # addresses of the operations move_tile and reduce_run, if the copy needs them
    coordinates = Longs(5)
    map = Longs(16)  # the tensor map as it was at the instruction


class CopyQueue(Record):
    """A block's copies in flight."""

    count, capacity = Long(), Long()
    entries = To("Copy")


copy_at = at(Copy)
_COPY_BYTES, _QUEUE_BYTES = Copy.size_bytes, CopyQueue.size_bytes


@njit
def new_copy(warp):
    """A record of zeros in the queue of the warp's block; valid until the next one is made."""
    block = warp.block
    if not block.copies:
        block.copies = zeroed(_QUEUE_BYTES)
    queue = block.copies
    make_room(queue, _COPY_BYTES)
    copy = queue.entries[queue.count]
    fill_bytes(address_of(copy), 0, _COPY_BYTES)
    queue.count += 1
    return copy


@njit
def _land_and_remove(queue, index):
    """Carries a copy out and takes it from its queue. Returns 1 and a fault, or 0."""
    failed = _land(queue.entries[index])
    queue.count -= 1
    for later in range(index, queue.count):
        copy_bytes(address_of(queue.entries[later]), address_of(queue.entries[later + 1]), _COPY_BYTES)
    return failed


@njit
def read_source(copy):
    """Carries out the reading of a copy whose source is shared memory: its bytes go to a snapshot."""
    if copy.source_block != 0 and copy.snapshot == 0:
        warp = copy.warp
        copy.snapshot = malloc(copy.size)
        copy_bytes(copy.snapshot, copy.source, copy.size)
        was_read(warp, copy.source_block, copy.source, copy.size)


@njit
def _land(copy):
    """Carries a copy out. Returns 1 and a fault, or 0."""
    read_source(copy)
    warp = copy.warp
    kind, site, lane = copy.kind, copy.site, copy.lane
    target, block, size = copy.target, copy.target_block, copy.size
    source = copy.snapshot if copy.snapshot != 0 else copy.source
    failed = 0
    if kind == COPY:
        copy_bytes(target, source, size)
        landed(warp, block, target, size)
    elif kind == REDUCE:
        failed = global_range(warp, site, lane, target, size, ATOMIC, 0)
        if not failed:
            count = size // element_bytes(copy.type)
            reduce(warp, site, copy.reducer, copy.operation, copy.type, target, source, count)
    else:
        failed = call_operation(copy.mover, warp, site, address_of(copy))
        if kind == TENSOR_LOAD:
            landed(warp, block, target, size)
    if copy.snapshot != 0:
        free(copy.snapshot)
        copy.snapshot = 0
    if not failed and copy.mbarrier != 0:
        failed = add_transactions(warp, site, lane, copy.mbarrier, -size) < 0
    return 1 if failed else 0


@njit
def land_for(warp, mbarrier):
    """Carries out the cluster's copies in flight towards an mbarrier. Returns 1 and a fault, or 0."""
    for rank in range(warp.launch.cluster_size):
        queue = warp.block.cluster[rank].copies
        index = 0
        while queue and index < queue.count:
            if queue.entries[index].mbarrier != mbarrier:
                index += 1
            elif _land_and_remove(queue, index):
                return 1
    return 0


@njit
def land_groups(warp, lane, before, only_read):
    """Carries out the copies of a lane's bulk groups below `before`, or the reading of them alone."""
    queue = warp.block.copies
    index = 0
    while queue and index < queue.count:
        copy = queue.entries[index]
        if not _is_of(copy, warp) or copy.lane != lane or copy.group >= before:
            index += 1
        elif only_read:
            read_source(copy)
            index += 1
        elif _land_and_remove(queue, index):
            return 1
    return 0


@njit
def _is_of(copy, warp):
    """Whether a copy belongs to a bulk group of a warp."""
    return address_of(copy.warp) == address_of(warp) and copy.group >= 0


@njit
def first_unread(warp):
    """The site of a copy of this warp's bulk groups that has not read its shared memory yet, or -1."""
    queue = warp.block.copies
    if queue:
        for index in range(queue.count):
            copy = queue.entries[index]
            if _is_of(copy, warp) and copy.source_block != 0 and copy.snapshot == 0:
                return copy.site
    return -1


@njit
def first_into(block, queue_block):
    """The site of a copy of `queue_block` that will still write shared memory of the block at an address, or -1."""
    queue = queue_block.copies
    if queue:
        for index in range(queue.count):
            if queue.entries[index].target_block == block:
                return queue.entries[index].site
    return -1


@njit
def finish(warp):
    """Carries out the rest of the warp's bulk groups, after its exit. Returns 1 and a fault, or 0."""
    for lane in range(32):
        if land_groups(warp, lane, 1 << 62, 0):
            return 1
    return 0


@njit
def drop(block):
    """Forgets a block's queue and frees its memory."""
    queue = block.copies
    if queue:
        for index in range(queue.count):
            if queue.entries[index].snapshot != 0:
                free(queue.entries[index].snapshot)
        free(address_of(queue.entries))
        free(address_of(queue))
        block.copies = 0
