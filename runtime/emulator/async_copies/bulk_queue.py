"""Bulk copies in flight: those that `cp.async.bulk…` started and no wait has covered yet.

Each block keeps a list of records (BLOCK_ASYNC). A record is carried out as late as it may: one with an mbarrier when a
thread waits for that mbarrier in vain, one of a bulk group at the `wait_group` of its thread, whose `.read` form
carries out the reading alone. Until then its target bytes are marked in flight and its source bytes as being read.

A record's source is read when the copy lands, or, in shared memory, at `wait_group.read`, into a snapshot.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at
from runtime.emulator.async_copies.bulk_records import (
    COPY,
    R_BYTES,
    R_GROUP,
    R_KIND,
    R_LANE,
    R_MBARRIER,
    R_MOVER,
    R_OPERATION,
    R_REDUCER,
    R_SITE,
    R_SNAPSHOT,
    R_SOURCE,
    R_SOURCE_BLOCK,
    R_TARGET,
    R_TARGET_BLOCK,
    R_TYPE,
    R_WARP,
    RECORD_WORDS,
    REDUCE,
    TENSOR_LOAD,
)
from runtime.emulator.async_copies.reduction import reduce
from runtime.emulator.async_copies.tensor_map import element_bytes
from runtime.emulator.execution.warp_state import (
    BLOCK_ASYNC,
    BLOCK_CLUSTER,
    LAUNCH_CLUSTER_SIZE,
    WARP_BLOCK,
    WARP_LAUNCH,
)
from runtime.emulator.memory.checked_ranges import global_range
from runtime.emulator.memory.cluster_window import free, landed, malloc, realloc, was_read
from runtime.emulator.memory.pointers import address_of, copy_bytes
from runtime.emulator.races.accesses import ATOMIC
from runtime.emulator.synchronisation.mbarrier_state import add_transactions
from runtime.emulator.translation.operation_calls import by_address

_HEADER_WORDS = 2  # count, capacity


@njit
def new_record(warp):
    """A zeroed record of the warp's block, as an int64 pointer; valid until the next one is made."""
    block = i64_at(warp[WARP_BLOCK])
    queue = block[BLOCK_ASYNC]
    if queue == 0:
        queue = malloc((_HEADER_WORDS + 16 * RECORD_WORDS) * 8)
        i64_at(queue)[0] = 0
        i64_at(queue)[1] = 16
    elif i64_at(queue)[0] == i64_at(queue)[1]:
        capacity = 2 * i64_at(queue)[1]
        queue = realloc(queue, (_HEADER_WORDS + capacity * RECORD_WORDS) * 8)
        i64_at(queue)[1] = capacity
    block[BLOCK_ASYNC] = queue
    header = i64_at(queue)
    record = i64_at(queue + (_HEADER_WORDS + header[0] * RECORD_WORDS) * 8)
    for index in range(RECORD_WORDS):
        record[index] = 0
    header[0] += 1
    return record


@njit
def record_at(queue, index):
    return i64_at(queue + (_HEADER_WORDS + index * RECORD_WORDS) * 8)


@njit
def _remove(queue, index):
    header = i64_at(queue)
    header[0] -= 1
    for later in range(index, header[0]):
        copy_bytes(address_of(record_at(queue, later)), address_of(record_at(queue, later + 1)), RECORD_WORDS * 8)


@njit
def read_source(record):
    """Carries out the reading of a record whose source is shared memory: its bytes go to a snapshot."""
    if record[R_SOURCE_BLOCK] != 0 and record[R_SNAPSHOT] == 0:
        warp = i64_at(record[R_WARP])
        record[R_SNAPSHOT] = malloc(record[R_BYTES])
        copy_bytes(record[R_SNAPSHOT], record[R_SOURCE], record[R_BYTES])
        was_read(warp, record[R_SOURCE_BLOCK], record[R_SOURCE], record[R_BYTES])


@njit
def _land(record):
    """Carries a record out. Returns 1 and a fault, or 0."""
    read_source(record)
    warp = i64_at(record[R_WARP])
    kind, site, lane = record[R_KIND], record[R_SITE], record[R_LANE]
    target, block, size = record[R_TARGET], record[R_TARGET_BLOCK], record[R_BYTES]
    source = record[R_SNAPSHOT] if record[R_SNAPSHOT] != 0 else record[R_SOURCE]
    failed = 0
    if kind == COPY:
        copy_bytes(target, source, size)
        landed(warp, block, target, size)
    elif kind == REDUCE:
        failed = global_range(warp, site, lane, target, size, ATOMIC, 0)
        if not failed:
            count = size // element_bytes(record[R_TYPE])
            reduce(warp, site, record[R_REDUCER], record[R_OPERATION], record[R_TYPE], target, source, count)
    else:
        failed = by_address(record[R_MOVER], warp, types.uint32(0), types.int32(site), address_of(record))
        if kind == TENSOR_LOAD:
            landed(warp, block, target, size)
    if record[R_SNAPSHOT] != 0:
        free(record[R_SNAPSHOT])
        record[R_SNAPSHOT] = 0
    if not failed and record[R_MBARRIER] != 0:
        failed = add_transactions(warp, site, lane, record[R_MBARRIER], -size) < 0
    return 1 if failed else 0


@njit
def land_for(warp, mbarrier):
    """Carries out the cluster's copies in flight towards an mbarrier. Returns 1 and a fault, or 0."""
    cluster = i64_at(i64_at(warp[WARP_BLOCK])[BLOCK_CLUSTER])
    for rank in range(i64_at(warp[WARP_LAUNCH])[LAUNCH_CLUSTER_SIZE]):
        queue = i64_at(cluster[rank])[BLOCK_ASYNC]
        index = 0
        while queue != 0 and index < i64_at(queue)[0]:
            record = record_at(queue, index)
            if record[R_MBARRIER] != mbarrier:
                index += 1
                continue
            failed = _land(record)
            _remove(queue, index)
            if failed:
                return 1
    return 0


@njit
def land_groups(warp, lane, before, only_read):
    """Carries out the copies of a lane's bulk groups below `before`, or the reading of them alone."""
    queue = i64_at(warp[WARP_BLOCK])[BLOCK_ASYNC]
    index = 0
    while queue != 0 and index < i64_at(queue)[0]:
        record = record_at(queue, index)
        mine = record[R_WARP] == address_of(warp) and record[R_LANE] == lane
        if not mine or record[R_GROUP] < 0 or record[R_GROUP] >= before:
            index += 1
        elif only_read:
            read_source(record)
            index += 1
        else:
            failed = _land(record)
            _remove(queue, index)
            if failed:
                return 1
    return 0


@njit
def first_unread(warp):
    """The site of a copy of this warp's bulk groups that has not read its shared memory yet, or -1."""
    queue = i64_at(warp[WARP_BLOCK])[BLOCK_ASYNC]
    if queue != 0:
        for index in range(i64_at(queue)[0]):
            record = record_at(queue, index)
            unread = record[R_SOURCE_BLOCK] != 0 and record[R_SNAPSHOT] == 0
            if record[R_WARP] == address_of(warp) and record[R_GROUP] >= 0 and unread:
                return record[R_SITE]
    return -1


@njit
def first_into(block, queue_block):
    """The site of a copy of `queue_block` that will still write shared memory of `block`, or -1."""
    queue = i64_at(queue_block)[BLOCK_ASYNC]
    if queue != 0:
        for index in range(i64_at(queue)[0]):
            if record_at(queue, index)[R_TARGET_BLOCK] == block:
                return record_at(queue, index)[R_SITE]
    return -1


@njit
def finish(warp):
    """Carries out the rest of the warp's bulk groups, after its exit. Returns 1 and a fault, or 0."""
    for lane in range(32):
        if land_groups(warp, lane, 1 << 62, False):
            return 1
    return 0


@njit
def drop(block):
    """Forgets a block's queue and frees its memory."""
    fields = i64_at(block)
    queue = fields[BLOCK_ASYNC]
    if queue != 0:
        for index in range(i64_at(queue)[0]):
            if record_at(queue, index)[R_SNAPSHOT] != 0:
                free(record_at(queue, index)[R_SNAPSHOT])
        free(queue)
        fields[BLOCK_ASYNC] = 0
