"""A sequence in parts: how a batch is cut, where a block finds its part, and the kernel that combines the results.

With few queries there are few tiles of rows, and one block walking over a long sequence would leave the device idle.
So sequences are cut into parts, one a block, by their measured lengths: the grid is fixed by what `plan` knows, which
may be a captured graph's, and each block reads the lengths as they are.

With `wanted` blocks for one KV head, a part is the batch's keys over `wanted`, but `MIN_PART_KEYS` at least, and a
sequence has as many equal parts as it needs to have none longer. Rounding up adds less than one part a tile of rows, so
that `wanted` and the number of tiles bound the blocks whatever the lengths are, and those left over leave at once.
Blocks lie in the order of sequences, then tiles, then parts.

A block whose sequence is not cut writes its rows out. Others leave for each row a record of float32 in the workspace:
the weighted values (not divided), then at `columns` the largest score and the sum; -inf and zeros for a part without
keys. The block of the first part leaves where the row's records begin, and how many there are. The combine kernel
brings the records to one scale and adds them in an order that depends on their number alone: deterministic.
https://crfm.stanford.edu/2023/10/12/flashdecoding.html
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.attention.online_softmax import (
    MINUS_INFINITY,
    load_sink,
    origin_of,
    reciprocal_of,
    share_of_keys,
    subtract,
)
from numba_kernels.cuda.attention.tiles import tile_shape, visible_end, visible_first
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import ITEM_BYTES, elements_storer
from numba_kernels.cuda.intrinsics.integer import divide_u32
from numba_kernels.cuda.intrinsics.math import exp2
from numba_kernels.cuda.intrinsics.memory import (
    load_2xb32,
    load_2xf32,
    load_f32,
    shared_address,
    shared_load_b32,
    shared_load_f32,
    shared_store_b32,
    shared_store_f32,
    store_2xb32,
)
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index, maximum_f32, sum_to_lane_u32
from numba_kernels.cuda.specialisation import Specialisation

UNIT_KEYS = 16
MIN_PART_KEYS = 128  # fewer, and writing and combining the parts costs more than it gains
_FOUND_WORDS = 8


def record(head_dim: int) -> int:
    """Floats of one part's record of one row: whole tile columns, then largest score and sum, in 16-byte units."""
    return tile_shape("f32", head_dim).columns + 4


def scratch_bytes(threads: int) -> int:
    """Shared memory that `part_finder` takes: 16-byte units."""
    return -(-(2 * (threads // 32) + _FOUND_WORDS) // 4) * 16


@functools.cache
def part_finder(num_rows: int, turn_keys: int, threads: int, has_window: bool) -> Any:
    """A device function that all threads of a block call, for tiles of `num_rows` rows.

    ``find(scratch, query_start, seq_lens, num_seqs, share, window, wanted, block, thread)`` gives the block's
    (sequence, tile, part, number of parts, first key, keys of a part, first token, query length, sequence length), all
    uint32; the sequence is num_seqs for a block that is left over. `scratch` is a shared address. Parts are multiples
    of `turn_keys`.
    """
    warps = threads // 32
    found = 8 * warps
    turn_units = turn_keys // UNIT_KEYS
    least_units = -(-MIN_PART_KEYS // turn_keys) * turn_units

    @device_function
    def extent(query_start, seq_lens, seq, share, window):
        first_token = uint32(query_start[seq])
        query_len = uint32(uint32(query_start[uint32(seq + uint32(1))]) - first_token)
        seq_len = uint32(seq_lens[seq])
        first = uint32(0)
        if has_window:
            end = visible_end(seq_len, query_len, uint32(0))
            first = uint32(visible_first(end, window) // uint32(UNIT_KEYS) * uint32(UNIT_KEYS))
        tiles = uint32(uint32(query_len * share + uint32(num_rows - 1)) // uint32(num_rows))
        units = uint32(uint32(seq_len - first + uint32(UNIT_KEYS - 1)) // uint32(UNIT_KEYS))
        return tiles, units, first, first_token, query_len, seq_len

    @device_function
    def rounded_up(units):
        return uint32(uint32(units + uint32(turn_units - 1)) // uint32(turn_units) * uint32(turn_units))

    @device_function
    def pieces_of(amount, size):
        return divide_u32(uint32(uint32(amount + size) - uint32(1)), size)

    @device_function
    def find(scratch, query_start, seq_lens, num_seqs, share, window, wanted, block, thread):
        lane = uint32(thread & uint32(31))
        warp = uint32(thread >> uint32(5))
        total = uint32(0)
        seq = thread
        while seq < num_seqs:
            tiles, units, first, first_token, query_len, seq_len = extent(query_start, seq_lens, seq, share, window)
            total = uint32(total + tiles * units)
            seq = uint32(seq + uint32(threads))
        total = sum_to_lane_u32(total)
        if lane == uint32(31):
            shared_store_b32(uint32(scratch + warp * uint32(4)), total)
        if thread == uint32(0):
            shared_store_b32(uint32(scratch + uint32(found)), num_seqs)
            for word in range(1, _FOUND_WORDS):
                shared_store_b32(uint32(scratch + uint32(found + 4 * word)), uint32(1))
        sync_block()
        total = uint32(0)
        for other in range(warps):
            total = uint32(total + shared_load_b32(uint32(scratch + uint32(4 * other))))
        most_units = rounded_up(pieces_of(total, wanted))
        if most_units < uint32(least_units):
            most_units = uint32(least_units)

        before = uint32(0)
        base = uint32(0)
        while base < num_seqs and before <= block:
            seq = uint32(base + thread)
            num_blocks = uint32(0)
            num_parts = uint32(1)
            part_units = uint32(turn_units)
            first = uint32(0)
            first_token = uint32(0)
            query_len = uint32(0)
            seq_len = uint32(0)
            if seq < num_seqs:
                tiles, units, first, first_token, query_len, seq_len = extent(query_start, seq_lens, seq, share, window)
                if units > uint32(0):
                    num_parts = pieces_of(units, most_units)
                    part_units = rounded_up(pieces_of(units, num_parts))
                    num_parts = pieces_of(units, part_units)
                num_blocks = uint32(tiles * num_parts)
            behind = sum_to_lane_u32(num_blocks)
            if lane == uint32(31):
                shared_store_b32(uint32(scratch + uint32(4 * warps) + warp * uint32(4)), behind)
            sync_block()
            behind = uint32(behind + before)
            for other in range(warps):
                blocks_of_warp = shared_load_b32(uint32(scratch + uint32(4 * warps + 4 * other)))
                before = uint32(before + blocks_of_warp)
                if uint32(other) < warp:
                    behind = uint32(behind + blocks_of_warp)
            if block < behind and uint32(block + num_blocks) >= behind:
                place = uint32(scratch + uint32(found))
                shared_store_b32(place, seq)
                shared_store_b32(uint32(place + uint32(4)), uint32(uint32(block + num_blocks) - behind))
                shared_store_b32(uint32(place + uint32(8)), num_parts)
                shared_store_b32(uint32(place + uint32(12)), first)
                shared_store_b32(uint32(place + uint32(16)), uint32(part_units * uint32(UNIT_KEYS)))
                shared_store_b32(uint32(place + uint32(20)), first_token)
                shared_store_b32(uint32(place + uint32(24)), query_len)
                shared_store_b32(uint32(place + uint32(28)), seq_len)
            sync_block()
            base = uint32(base + uint32(threads))
        seq = shared_load_b32(uint32(scratch + uint32(found)))
        index = shared_load_b32(uint32(scratch + uint32(found + 4)))
        num_parts = shared_load_b32(uint32(scratch + uint32(found + 8)))
        first = shared_load_b32(uint32(scratch + uint32(found + 12)))
        part_keys = shared_load_b32(uint32(scratch + uint32(found + 16)))
        first_token = shared_load_b32(uint32(scratch + uint32(found + 20)))
        query_len = shared_load_b32(uint32(scratch + uint32(found + 24)))
        seq_len = shared_load_b32(uint32(scratch + uint32(found + 28)))
        tile = divide_u32(index, num_parts)
        part = uint32(index - tile * num_parts)
        return seq, tile, part, num_parts, first, part_keys, first_token, query_len, seq_len

    return find


@functools.cache
def record_place(head_dim: int, num_rows: int) -> Any:
    """A device function ``place(workspace, block, kv_head, num_kv_heads, row) -> address`` of a block's record of a row
    of its tile. The workspace is records [blocks, KV heads, num_rows, record], then (first record, number of parts) of
    each of the rows [T * Hq], two uint32 each."""
    record_bytes = uint64(record(head_dim) * 4)

    @device_function
    def place(workspace, block, kv_head, num_kv_heads, row):
        index = (uint64(block) * uint64(num_kv_heads) + uint64(kv_head)) * uint64(num_rows) + uint64(row)
        return workspace + index * record_bytes

    return place


@functools.cache
def records_leaver(head_dim: int, num_rows: int) -> Any:
    """A device function ``leave(workspace, at_row, block, kv_head, num_kv_heads, row, num_parts)`` for one row [T * Hq]
    of a first part: where the row's records begin; `num_parts` 1 where it has none."""
    rows_bytes = record(head_dim) * 4 * num_rows

    @device_function
    def leave(workspace, at_row, block, kv_head, num_kv_heads, row, num_parts):
        table = workspace + uint64(uint32(cuda.gridDim.x)) * uint64(num_kv_heads) * uint64(rows_bytes)
        first = uint32(uint32(uint32(block * num_kv_heads) + kv_head) * uint32(num_rows) + row)
        store_2xb32(table + at_row * uint64(8), (first, num_parts))

    return leave


def workspace_bytes(head_dim: int, num_rows: int, num_blocks: int, num_kv_heads: int, num_out_rows: int) -> int:
    """Records and their table, as `record_place` says."""
    return num_blocks * num_kv_heads * num_rows * record(head_dim) * 4 + -(-num_out_rows // 2) * 16


WARPS = 4
_AHEAD = 4  # records that a warp has under way


@functools.cache
def combine(dtype: str, head_dim: int, has_sinks: bool) -> Specialisation:
    """A block combines one row of out: grid T * Hq. Each warp takes every fourth part.

    Arguments: workspace, out [T * Hq, D], sinks [Hq] (0 without), num_records (blocks * KV heads * rows of a tile),
    stride (KV heads * rows of a tile: records from one part to the next), num_q_heads.
    """
    columns, size = tile_shape("f32", head_dim).columns, record(head_dim)
    per_lane = -(-columns // 32)
    threads = WARPS * 32
    own_columns = -(-columns // threads)
    item_bytes, store = uint64(ITEM_BYTES[dtype]), elements_storer(dtype, 1)
    is_whole = columns % 32 == 0
    num_results, num_statistics = WARPS * per_lane * 32, 2 * WARPS

    @cuda.jit
    def kernel(workspace, out, sinks, num_records, stride, num_q_heads):
        wait_for_previous_grid()
        launch_dependents()
        results = cuda.shared.array(num_results, float32)
        statistics = cuda.shared.array(num_statistics, float32)
        sums = cuda.local.array(per_lane, float32)
        parts = cuda.local.array((_AHEAD, per_lane), float32)
        maxima = cuda.local.array(_AHEAD, float32)
        totals = cuda.local.array(_AHEAD, float32)
        factors = cuda.local.array(WARPS, float32)
        value = cuda.local.array(1, float32)
        row = uint32(cuda.blockIdx.x)
        record_bytes = uint64(size * 4)
        first, num_parts = load_2xb32(workspace + uint64(num_records) * record_bytes + uint64(row) * uint64(8))
        if num_parts < uint32(2):
            return
        thread = uint32(cuda.threadIdx.x)
        lane = lane_index()
        warp = uint32(thread >> uint32(5))
        for i in range(per_lane):
            sums[i] = float32(0)
        largest = MINUS_INFINITY
        total = float32(0)
        part = warp
        while part < num_parts:
            for ahead in range(_AHEAD):
                place = uint32(part + uint32(ahead * WARPS))
                maxima[ahead] = MINUS_INFINITY
                totals[ahead] = float32(0)
                for i in range(per_lane):
                    parts[ahead, i] = float32(0)
                if place < num_parts:
                    at = workspace + (uint64(first) + uint64(place) * uint64(stride)) * record_bytes
                    maxima[ahead], totals[ahead] = load_2xf32(at + uint64(columns * 4))
                    for i in range(per_lane):
                        column = uint32(lane + uint32(32 * i))
                        if is_whole or column < uint32(columns):
                            parts[ahead, i] = load_f32(at + uint64(column) * uint64(4))
            for ahead in range(_AHEAD):
                highest = maximum_f32(largest, maxima[ahead])
                origin = origin_of(highest)
                kept = exp2(subtract(largest, origin))
                factor = exp2(subtract(maxima[ahead], origin))
                largest = highest
                total = total * kept + totals[ahead] * factor
                for i in range(per_lane):
                    sums[i] = sums[i] * kept + parts[ahead, i] * factor
            part = uint32(part + uint32(_AHEAD * WARPS))
        base = shared_address(results)
        own = uint32(base + (uint32(warp * uint32(per_lane * 32)) + lane) * uint32(4))
        for i in range(per_lane):
            shared_store_f32(uint32(own + uint32(128 * i)), sums[i])
        of_warps = shared_address(statistics)
        if lane == uint32(0):
            shared_store_f32(uint32(of_warps + warp * uint32(8)), largest)
            shared_store_f32(uint32(of_warps + warp * uint32(8) + uint32(4)), total)
        sync_block()
        largest = MINUS_INFINITY
        for other in range(WARPS):
            largest = maximum_f32(largest, shared_load_f32(uint32(of_warps + uint32(8 * other))))
        origin = origin_of(largest)
        total = float32(0)
        for other in range(WARPS):
            factor = exp2(subtract(shared_load_f32(uint32(of_warps + uint32(8 * other))), origin))
            factors[other] = factor
            total = total + shared_load_f32(uint32(of_warps + uint32(8 * other + 4))) * factor
        share = reciprocal_of(total)
        if has_sinks:
            head = uint32(row - divide_u32(row, num_q_heads) * num_q_heads)
            share = share_of_keys(largest, total, load_sink(sinks, head))
        for i in range(own_columns):
            column = uint32(thread + uint32(threads * i))
            if column < uint32(head_dim):
                result = float32(0)
                for other in range(WARPS):
                    place = uint32(base + (uint32(other * per_lane * 32) + column) * uint32(4))
                    result = result + shared_load_f32(place) * factors[other]
                value[0] = result * share
                store(out + (uint64(row) * uint64(head_dim) + uint64(column)) * item_bytes, value)

    name = f"attention_combine_{dtype}_d{head_dim}{'_sinks' if has_sinks else ''}"
    argument_types = (types.uint64, types.uint64, types.uint64, types.uint32, types.uint32, types.uint32)
    constants = {"dtype": dtype, "head_dim": head_dim, "has_sinks": has_sinks}
    return Specialisation(name, kernel, argument_types, threads, constants=constants)
