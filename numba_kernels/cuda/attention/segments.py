"""Attention over a long sequence, a segment of its keys at a time: one launch each, in their order.

Long prompts expand latent rows: keys and values of all heads are made in a workspace, rows [keys, heads, qk_dim +
v_dim] of both. It has room for one segment, so that each launch takes the queries of one sequence against the next
segment's keys, and leaves its results to the following launch: each thread its own accumulators (sums, largest scores
and totals of its rows), which its successor brings to one scale and adds. The last launch writes rows out. The order of
these sums depends on where segments begin, and on nothing else.

A launch's arguments are those of all tiers, of which some mean another thing: `k_cache` and `v_cache` are the first key
and value, `workspace` has the results, `window` is the segment's first key, `workspace_columns` its most keys, and
`table_width` 1 for the last launch, else 0.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import uint32, uint64

from numba_kernels.cuda.attention.online_softmax import origin_of, subtract
from numba_kernels.cuda.attention.tiles import (
    Variant,
    end_finder,
    page_copier,
    rows_of_thread,
    tile_shape,
    visible_end,
)
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.math import exp2, minimum_u32
from numba_kernels.cuda.intrinsics.memory import copy_async_16, load_f32, store_f32
from numba_kernels.cuda.intrinsics.warp import maximum_f32

BLOCK_SIZE = 16
"""Expanded rows that kernels take for a page."""


def state_bytes(items: int, sums: int, rows: int, threads: int) -> int:
    """Results of so many tiles of queries: each thread's sums, and of each of its rows two numbers."""
    return items * (sums + 2 * rows) * threads * 4


@functools.cache
def segment_end(is_expanded: bool) -> Any:
    """A device function ``(seq_len, query_len, token, first, most)``: one past the last key that the token sees, among
    those of its segment; without segments among all."""
    if not is_expanded:
        return device_function(lambda seq_len, query_len, token, first, most: visible_end(seq_len, query_len, token))

    @device_function
    def end_of(seq_len, query_len, token, first, most):
        end = visible_end(seq_len, query_len, token)
        if end < first:
            end = first
        return minimum_u32(uint32(end - first), most)

    return end_of


@functools.cache
def end_finder_of(variant: Variant) -> Any:
    """A device function ``(bidirectional_until, first_token, seq_len, query_len, token, first, most)``: `segment_end`,
    or `tiles.end_finder`'s for kernels without segments."""
    if variant.is_expanded:
        find = segment_end(True)

        @device_function
        def find_end(bidirectional_until, first_token, seq_len, query_len, token, first, most):
            return find(seq_len, query_len, token, first, most)

        return find_end
    end_of = end_finder(variant.has_spans)

    @device_function
    def whole_end(bidirectional_until, first_token, seq_len, query_len, token, first, most):
        return end_of(bidirectional_until, first_token, seq_len, query_len, token)

    return whole_end


@functools.cache
def tile_sources(
    variant: Variant, dtype: str, qk_dim: int, v_dim: int, block_size: int, num_keys: int, threads: int
) -> tuple[Any, tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """``locate(block_tables, table, first_key, seen, end_key, num_kv_heads, thread)`` gives the places of a thread's
    rows of keys and of values; then for each of them device functions as `tiles.page_copier`'s: ``column``,
    ``scales_of`` and ``copy``, of pages or of expanded rows."""
    if variant.is_expanded:
        (locate_keys, *keys), (locate_values, *values) = (
            _row_copier(dtype, columns, qk_dim + v_dim, num_keys, threads) for columns in (qk_dim, v_dim)
        )
    else:
        locate_keys, *keys = page_copier(
            dtype, variant.pages, qk_dim, block_size, num_keys, threads, variant.has_window
        )
        locate_values, values = locate_keys, keys
    is_even = qk_dim == v_dim

    @device_function
    def locate(block_tables, table, first_key, seen, end_key, num_kv_heads, thread):
        page = locate_keys(block_tables, table, first_key, seen, end_key, num_kv_heads, thread)
        value_page = page
        if not is_even:
            value_page = locate_values(block_tables, table, first_key, seen, end_key, num_kv_heads, thread)
        return page, value_page

    return locate, tuple(keys), tuple(values)


def _row_copier(dtype: str, columns: int, pair: int, num_keys: int, threads: int) -> tuple[Any, Any, Any, Any]:
    """As `tiles.page_copier`, for expanded rows of `pair` numbers a head, keys or values: in the place of scales stand
    the bytes from one key's rows to the next."""
    shape, item = tile_shape(dtype, columns), ITEM_BYTES[dtype]
    pieces, pitch, stored_pieces, head_bytes = shape.pieces, shape.pitch, columns * item // 16, pair * item
    unit = rows_of_thread(num_keys, pieces, threads)
    busy = num_keys // unit * pieces

    @device_function
    def column(rows, head, num_heads, thread):
        piece = uint32(thread % uint32(pieces))
        return rows + uint64(head) * uint64(head_bytes) + uint64(uint32(piece * uint32(16)))

    @device_function
    def locate(block_tables, table, first_key, seen, end_key, num_heads, thread):
        key = uint32(first_key + uint32(thread // uint32(pieces)) * uint32(unit))
        return uint64(key) * uint64(uint32(num_heads * uint32(head_bytes)))

    @device_function
    def row_bytes_of(scales, head, num_heads):
        return uint64(uint32(num_heads * uint32(head_bytes)))

    @device_function
    def copy(tile, column, row_bytes, offset, first_key, seen, end_key, thread):
        row = uint32(uint32(thread // uint32(pieces)) * uint32(unit))
        piece = uint32(thread % uint32(pieces))
        target = uint32(tile + row * uint32(pitch) + piece * uint32(16))
        source = column + offset
        if busy == threads or thread < uint32(busy):
            for i in range(unit):
                size = uint32(0)
                if uint32(first_key + row + uint32(i)) < end_key and piece < uint32(stored_pieces):
                    size = uint32(16)
                copy_async_16(uint32(target + uint32(i * pitch)), source, size)
                source = source + row_bytes

    return locate, column, row_bytes_of, copy


@functools.cache
def writes_out(is_expanded: bool) -> Any:
    """A device function ``(is_last)``: whether rows are finished."""
    if is_expanded:
        return device_function(lambda is_last: is_last != uint32(0))
    return device_function(lambda is_last: True)


@device_function
def _shares(largest, before, unit):
    """(the larger score, factors of this launch's sums and of those before it)."""
    most = maximum_f32(largest, before)
    origin = origin_of(most) * unit
    return most, exp2(subtract(largest * unit, origin)), exp2(subtract(before * unit, origin))


def _flat(sums, row, i):
    return sums[4 * (i // 2) + 2 * row + i % 2]


def _set_flat(sums, row, i, value):
    sums[4 * (i // 2) + 2 * row + i % 2] = value


def _paired(sums, row, i):
    return sums[i // 2, 2 * row + i % 2]


def _set_paired(sums, row, i, value):
    sums[i // 2, 2 * row + i % 2] = value


def _by_row(sums, row, i):
    return sums[row, i]


def _set_by_row(sums, row, i, value):
    sums[row, i] = value


_PLACES: dict[str, tuple[Any, Any]] = {
    "flat": (_flat, _set_flat),
    "paired": (_paired, _set_paired),
    "rows": (_by_row, _set_by_row),
}


@functools.cache
def results_carrier(rows: int, row_sums: int, places: str, threads: int, is_expanded: bool) -> Any:
    """A device function ``(state, item, thread, first, is_last, unit, sums, largest, totals)`` that brings a thread's
    results of the launches before to those of this one, and keeps them for the next.

    A row has so many `sums`: "flat" as `wgmma` leaves them, "paired" as `mma.sync` does, or "rows". Largest scores are
    in `unit`s of log 2. `item` is the tile's number among all of the launch. Without segments it does nothing.
    """
    take, put = (device_function(each) for each in _PLACES[places])
    stride = uint64(threads * 4)

    @device_function
    def carry(state, item, thread, first, is_last, unit, sums, largest, totals):
        own = state + (uint64(item) * uint64((row_sums + 2) * rows * threads) + uint64(thread)) * uint64(4)
        if first > uint32(0):
            place = own
            for row in range(rows):
                most, share, share_before = _shares(largest[row], load_f32(place), unit)
                largest[row] = most
                totals[row] = totals[row] * share + load_f32(place + stride) * share_before
                for i in range(row_sums):
                    before = load_f32(place + uint64(i + 2) * stride)
                    put(sums, row, i, take(sums, row, i) * share + before * share_before)
                place = place + uint64(row_sums + 2) * stride
        if is_last == uint32(0):
            place = own
            for row in range(rows):
                store_f32(place, largest[row])
                store_f32(place + stride, totals[row])
                for i in range(row_sums):
                    store_f32(place + uint64(i + 2) * stride, take(sums, row, i))
                place = place + uint64(row_sums + 2) * stride

    if is_expanded:
        return carry
    return device_function(lambda state, item, thread, first, is_last, unit, sums, largest, totals: None)
