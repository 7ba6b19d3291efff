"""Bulk copies in flight: those that `cp.async.bulk…` started and no wait has covered yet; and the tiles that TMA moves.

Each block keeps a list of them (`Block.copies`). A copy is carried out as late as it may: one with an mbarrier when a
thread waits for that mbarrier in vain, one of a bulk group at the `wait_group` of its thread, whose `.read` form
carries out the reading alone. Until then its target bytes are marked in flight and its source bytes as being read.
A copy's source is read when the copy lands, or, in shared memory, at `wait_group.read`, into a snapshot.

A tile is a box of a tensor in global memory, packed in shared memory and swizzled there. Rows of the innermost
dimension lie one after another, the second dimension next, and so on. Elements outside of the tensor are zero (or NaN)
on the way in and left alone on the way out (PTX ISA, "Tensors": tiled mode, out-of-bound access, swizzling modes).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, attr-defined"

from __future__ import annotations

from numba_kernels.cache import njit
from numba_kernels.pointers import u16_at, u32_at, u64_at
from runtime.emulator.async_copies.reduction import reduce
from runtime.emulator.async_copies.tensor_map import (
    MAP_ADDRESS,
    MAP_SIZES,
    MAP_STRIDES,
    element_bytes,
    map_extent,
    map_fill,
    map_rank,
    map_step,
    map_swizzle,
    map_type,
    swizzled,
)
from runtime.emulator.execution.counters import count_run
from runtime.emulator.memory.careful_access import global_range
from runtime.emulator.memory.locate import free, landed, make_room, malloc, was_read, zeroed
from runtime.emulator.memory.pointers import address_of, copy_bytes, fill_bytes
from runtime.emulator.races.clocks import ATOMIC, LOAD, STORE
from runtime.emulator.records import Long, Longs, Record, To, at
from runtime.emulator.synchronisation.mbarrier_state import add_transactions
from runtime.emulator.tensor_cores.products import scratch_words
from runtime.emulator.translation.operations import call_operation, compiled_once, operation

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


@compiled_once("ll")
def land_copy(warp, rank, index):
    """Carries a copy out, of the queue of a block of the warp's cluster, and takes it from there. Returns 1 and a
    fault, or 0."""
    queue = warp.block.cluster[rank].copies
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
            elif land_copy(warp, rank, index):
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
        elif land_copy(warp, warp.block.rank, index):
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


_ROW_WORDS = 512  # the longest row: 256 elements of 8 bytes


@njit
def _fill_row(row, size, element, fill):
    if fill == 0:
        fill_bytes(row, 0, size)
    elif element == 2:
        for index in range(size // 2):
            u16_at(row)[index] = 0x7FFF
    elif element == 4:
        for index in range(size // 4):
            u32_at(row)[index] = 0x7FFFFFFF
    else:
        for index in range(size // 8):
            u64_at(row)[index] = 0x7FFFFFFFFFFFFFFF


@njit
def _chunks(row, tile, offset, at, size, mode, is_store):
    """Moves a row between a plain buffer and its swizzled place, 16 bytes at a time."""
    for chunk in range(0, size, 16):
        place = tile + swizzled(offset + at + chunk, mode) - offset
        if is_store:
            copy_bytes(row + chunk, place, 16)
        else:
            copy_bytes(place, row + chunk, 16)


@njit
def inner_part(words, coordinate):
    """The part of a box's row that lies inside of the tensor: elements first … last."""
    extent, step = map_extent(words, 0), map_step(words, 0)
    first = min(extent, max(0, (-coordinate + step - 1) // step))
    last = min(extent, max(first, (words[MAP_SIZES] - coordinate + step - 1) // step))
    return first, last


@njit
def num_rows(words):
    """Rows of the innermost dimension that a box has."""
    rows = 1
    for dimension in range(1, map_rank(words)):
        rows *= map_extent(words, dimension)
    return rows


@njit
def row_address(words, coordinates, index, first):
    """The address of element `first` of a box's row `index`; 0 for a row outside of the tensor."""
    address = words[MAP_ADDRESS] + (coordinates[0] + first * map_step(words, 0)) * element_bytes(map_type(words))
    rest, inside = index, True
    for dimension in range(1, map_rank(words)):
        many = map_extent(words, dimension)
        at = coordinates[dimension] + rest % many * map_step(words, dimension)
        rest //= many
        inside = inside and 0 <= at < words[MAP_SIZES + dimension]
        address += at * words[MAP_STRIDES + dimension - 1]
    return address if inside else 0


@njit
def count_tile(warp, site, words, coordinates):
    """Counts one TMA copy's traffic with device memory: a request, and the sectors of each row inside of the tensor.

    `coordinates`: int64 tuple or pointer. Multicast to several blocks reads once."""
    first, last = inner_part(words, coordinates[0])
    size = ((last - first - 1) * map_step(words, 0) + 1) * element_bytes(map_type(words))
    for index in range(num_rows(words)):
        address = row_address(words, coordinates, index, first)
        if last > first and address != 0:
            count_run(warp, site, address, size, 0)
    count_run(warp, site, 0, 0, 1)


@operation("move_tile", "l")
def move_tile(warp, mask, site, record_address):
    """Moves the tile that a record describes, into shared memory or out of the snapshot of it."""
    record = copy_at(record_address)
    words, coordinates = record.map, record.coordinates
    direction, lane, offset = record.kind, record.lane, record.offset
    tile = record.target if direction == TENSOR_LOAD else record.snapshot
    kind, mode, fill = map_type(words), map_swizzle(words), map_fill(words)
    element = element_bytes(kind)
    extent, step = map_extent(words, 0), map_step(words, 0)
    size = extent * element
    row = address_of(scratch_words(_ROW_WORDS))
    first, last = inner_part(words, coordinates[0])
    for index in range(num_rows(words)):
        address = row_address(words, coordinates, index, first)
        inside = last > first and address != 0
        if direction == TENSOR_LOAD:
            if not inside or last - first < extent:
                _fill_row(row, size, element, fill)
            if inside:
                if global_range(warp, site, lane, address, ((last - first - 1) * step + 1) * element, LOAD, 0):
                    return 1
                if step == 1:
                    copy_bytes(row + first * element, address, (last - first) * element)
                else:
                    for item in range(last - first):
                        copy_bytes(row + (first + item) * element, address + item * step * element, element)
            _chunks(row, tile, offset, index * size, size, mode, False)
        elif inside:
            _chunks(row, tile, offset, index * size, size, mode, True)
            for item in range(last - first if step > 1 else 1):
                count = (last - first) if step == 1 else 1
                to, of = address + item * step * element, row + (first + item) * element
                action = ATOMIC if direction == TENSOR_REDUCE else STORE
                if global_range(warp, site, lane, to, count * element, action, of):
                    return 1
                if direction == TENSOR_REDUCE:
                    reduce(warp, site, record.reducer, record.operation, kind, to, of, count)
                else:
                    copy_bytes(to, of, count * element)
                    landed(warp, 0, to, count * element)
    return 0
