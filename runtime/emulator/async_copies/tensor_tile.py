"""The tile that TMA moves: a box of a tensor in global memory, packed in shared memory and swizzled there.

Rows of the innermost dimension lie one after another in shared memory, the second dimension next, and so on. Elements
outside of the tensor are zero (or NaN) on the way in and left alone on the way out (PTX ISA, "Tensors": tiled mode,
out-of-bound access, swizzling modes).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba_kernels.cache import njit
from numba_kernels.pointers import u16_at, u32_at, u64_at
from runtime.emulator.async_copies.bulk_queue import TENSOR_LOAD, TENSOR_REDUCE, TENSOR_STORE, copy_at
from runtime.emulator.async_copies.reduction import reduce
from runtime.emulator.async_copies.swizzle import swizzled
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
)
from runtime.emulator.execution.counters import count_run
from runtime.emulator.memory.careful_access import global_range
from runtime.emulator.memory.locate import landed
from runtime.emulator.memory.pointers import address_of, copy_bytes, fill_bytes
from runtime.emulator.races.clocks import ATOMIC, LOAD, STORE
from runtime.emulator.tensor_cores.products import scratch_words
from runtime.emulator.translation.operations import operation

TILE_LOAD, TILE_STORE, TILE_REDUCE = (kind - TENSOR_LOAD for kind in (TENSOR_LOAD, TENSOR_STORE, TENSOR_REDUCE))
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
    """Moves the tile that a record of bulk_queue.py describes, into shared memory or out of the snapshot of it."""
    record = copy_at(record_address)
    words, coordinates = record.map, record.coordinates
    direction, lane, offset = record.kind - TENSOR_LOAD, record.lane, record.offset
    tile = record.target if direction == TILE_LOAD else record.snapshot
    kind, mode, fill = map_type(words), map_swizzle(words), map_fill(words)
    element = element_bytes(kind)
    extent, step = map_extent(words, 0), map_step(words, 0)
    size = extent * element
    row = address_of(scratch_words(_ROW_WORDS))
    first, last = inner_part(words, coordinates[0])
    for index in range(num_rows(words)):
        address = row_address(words, coordinates, index, first)
        inside = last > first and address != 0
        if direction == TILE_LOAD:
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
                action = ATOMIC if direction == TILE_REDUCE else STORE
                if global_range(warp, site, lane, to, count * element, action, of):
                    return 1
                if direction == TILE_REDUCE:
                    reduce(warp, site, record.reducer, record.operation, kind, to, of, count)
                else:
                    copy_bytes(to, of, count * element)
                    landed(warp, 0, to, count * element)
    return 0
