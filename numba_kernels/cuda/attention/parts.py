"""Split-KV: cuts a batch's sequences into parts, finds a block's part, and combines the results.

With few queries there are few tiles of rows, and one block walking over a long sequence would leave the device idle.
So sequences are cut into parts, one a block, by their measured lengths: the grid is fixed by `plan`'s bounds, which may
be a captured graph's, and each block reads the lengths as they are.

With `wanted` blocks for one KV head, a part is the batch's keys over `wanted`, but some `MIN_PART_KEYS` at least, and a
sequence has as many equal parts as it needs to have none longer. Rounding up adds less than one part a tile of rows, so
that `wanted` and the number of tiles bound the blocks for all lengths, and surplus blocks exit at once.
Blocks lie in the order of sequences, then tiles, then parts.

A block whose sequence is not cut writes its rows out. Others leave for each row a record of float32 in the workspace:
the weighted values (not divided), then at `columns` the largest score and the sum; -inf and zeros for a part without
keys. Then a block counts itself in. The last one of a tile brings the tile's records to one scale, adds them in the
order of parts, and writes the rows out: deterministic, whichever block it is.
https://crfm.stanford.edu/2023/10/12/flashdecoding.html
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, float32, uint32, uint64

from numba_kernels.cuda.attention.online_softmax import (
    MINUS_INFINITY,
    load_sink,
    origin_of,
    reciprocal_of,
    share_of_keys,
    subtract,
)
from numba_kernels.cuda.attention.tiles import (
    head_row,
    list_reader,
    sink_head,
    tile_shape,
    visible_end,
    visible_first,
)
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import elements_storer, quad_storer
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.math import divide_u32, exp2, minimum_u32
from numba_kernels.cuda.intrinsics.memory import (
    load_2xf32,
    load_4xf32,
    shared_load_b32,
    shared_store_b32,
)
from numba_kernels.cuda.intrinsics.sync import sync_block, sync_named
from numba_kernels.cuda.intrinsics.warp import lane_index, maximum_f32, sum_to_lane_u32

UNIT_KEYS = 16
MIN_PART_KEYS = 128  # fewer, and writing and combining the parts costs more than it gains
_FOUND_WORDS = 8


def record(head_dim: int) -> int:
    """Floats of one part's record of one row: whole tile columns, then largest score and sum, in 32-byte sectors."""
    return tile_shape("f32", head_dim).columns + 8


word_at = device_function(lambda at, index: shared_load_b32(uint32(at + uint32(4 * index))))


def scratch_bytes(threads: int) -> int:
    """Shared memory that `part_finder` takes: 16-byte units."""
    return -(-(2 * (threads // 32) + _FOUND_WORDS) // 4) * 16


@functools.cache
def extent_reader(num_rows: int, turn_keys: int, least_turns: int, has_window: bool, is_early: bool = False) -> Any:
    """A device function ``extent(query_start, seq_lens, seq, share, window)``: the sequence's tiles of rows, the turns
    of each, some at least, its first key, first token, query length and length. The lists are those of `list_reader`.
    """
    read = list_reader(is_early)

    @device_function
    def extent(query_start, seq_lens, seq, share, window):
        first_token = read(query_start, seq)
        query_len = uint32(read(query_start, uint32(seq + uint32(1))) - first_token)
        seq_len = read(seq_lens, seq)
        first = uint32(0)
        if has_window:
            end = visible_end(seq_len, query_len, uint32(0))
            first = uint32(visible_first(end, window) // uint32(UNIT_KEYS) * uint32(UNIT_KEYS))
        tiles = uint32(uint32(query_len * share + uint32(num_rows - 1)) // uint32(num_rows))
        turns = uint32(uint32(seq_len - first + uint32(turn_keys - 1)) // uint32(turn_keys))
        if turns < uint32(least_turns):
            turns = uint32(least_turns)
        return tiles, turns, first, first_token, query_len, seq_len

    return extent


@functools.cache
def part_finder(num_rows: int, turn_keys: int, threads: int, has_window: bool) -> Any:
    """A device function that all threads of a block call, for tiles of `num_rows` rows.

    ``find(scratch, lists, share, window, wanted, block, thread)`` gives the block's (sequence, tile, part, number of
    parts, first key, keys of a part, first token, query length, sequence length), all uint32; the sequence is num_seqs
    for a block that is left over. `scratch` is a shared address, `lists` (query_start, seq_lens, num_seqs). Parts are
    multiples of `turn_keys`.
    """
    warps = threads // 32
    found = 8 * warps
    turn_units = turn_keys // UNIT_KEYS
    least_units = max(1, MIN_PART_KEYS // turn_keys) * turn_units
    extent = extent_reader(num_rows, UNIT_KEYS, 0, has_window)

    @device_function
    def rounded_up(units):
        return uint32(uint32(units + uint32(turn_units - 1)) // uint32(turn_units) * uint32(turn_units))

    @device_function
    def pieces_of(amount, size):
        return divide_u32(uint32(uint32(amount + size) - uint32(1)), size)

    @device_function
    def most_of(total, wanted):
        """Units of a part, at most."""
        most_units = rounded_up(pieces_of(total, wanted))
        return most_units if most_units > uint32(least_units) else uint32(least_units)

    @device_function
    def cut(units, most_units):
        num_parts, part_units = uint32(1), uint32(turn_units)
        if units > uint32(0):
            num_parts = pieces_of(units, most_units)
            part_units = rounded_up(pieces_of(units, num_parts))
            num_parts = pieces_of(units, part_units)
        return num_parts, part_units

    @device_function
    def find_alone(lists, share, window, wanted, block):
        """The part of a block of a lone sequence, without an exchange between threads."""
        query_start, seq_lens, num_seqs = lists
        tiles, units, first, first_token, query_len, seq_len = extent(query_start, seq_lens, uint32(0), share, window)
        num_parts, part_units = cut(units, most_of(uint32(tiles * units), wanted))
        seq = uint32(0) if block < uint32(tiles * num_parts) else num_seqs
        return seq, block, num_parts, first, uint32(part_units * uint32(UNIT_KEYS)), first_token, query_len, seq_len

    @device_function
    def find_among(scratch, lists, share, window, wanted, block, thread):
        query_start, seq_lens, num_seqs = lists
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
        most_units = most_of(total, wanted)

        before = uint32(0)
        base = uint32(0)
        while base < num_seqs and before <= block:
            seq, num_blocks, num_parts, part_units = uint32(base + thread), uint32(0), uint32(1), uint32(turn_units)
            first, first_token, query_len, seq_len = uint32(0), uint32(0), uint32(0), uint32(0)
            if seq < num_seqs:
                tiles, units, first, first_token, query_len, seq_len = extent(query_start, seq_lens, seq, share, window)
                num_parts, part_units = cut(units, most_units)
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
                words = (
                    seq, uint32(uint32(block + num_blocks) - behind), num_parts, first,
                    uint32(part_units * uint32(UNIT_KEYS)), first_token, query_len, seq_len,
                )  # fmt: skip
                for word in range(_FOUND_WORDS):
                    shared_store_b32(uint32(scratch + uint32(found + 4 * word)), words[word])
            sync_block()
            base = uint32(base + uint32(threads))
        at = uint32(scratch + uint32(found))
        return (
            word_at(at, 0), word_at(at, 1), word_at(at, 2), word_at(at, 3), word_at(at, 4), word_at(at, 5),
            word_at(at, 6), word_at(at, 7),
        )  # fmt: skip

    @device_function
    def find(scratch, lists, share, window, wanted, block, thread):
        zero = uint32(0)
        found = zero, zero, uint32(1), zero, uint32(1), zero, zero, zero
        if lists[2] == uint32(1):
            found = find_alone(lists, share, window, wanted, block)
        else:
            found = find_among(scratch, lists, share, window, wanted, block, thread)
        seq, index, num_parts, first, part_keys, first_token, query_len, seq_len = found
        tile = divide_u32(index, num_parts)
        part = uint32(index - tile * num_parts)
        return seq, tile, part, num_parts, first, part_keys, first_token, query_len, seq_len

    return find


@functools.cache
def row_finder(num_rows: int, turn_keys: int, threads: int, is_split: bool, has_window: bool) -> Any:
    """A device function that all threads of a block call, for its tile of `num_rows` rows: `part_finder`'s where split;
    else blocks lie over (tiles of the longest chunk, KV heads, sequences), and the longest rows come first, so that the
    last blocks to run are short.

    ``find(scratch, lists, share, window, wanted, thread)`` gives (whether there is a tile, sequence, first token, query
    length, sequence length, the sequence's rows, the tile's first, part, number of parts, first key, keys of a part).
    """
    find_part = part_finder(num_rows, turn_keys, threads, has_window)

    @device_function
    def find_split(scratch, lists, share, window, wanted, thread):
        seq, tile, part, num_parts, first_key, part_keys, first_token, query_len, seq_len = find_part(
            scratch, lists, share, window, wanted, uint32(cuda.blockIdx.x), thread
        )
        rows, first_row = uint32(query_len * share), uint32(tile * uint32(num_rows))
        has_tile = seq < lists[2]
        return has_tile, seq, first_token, query_len, seq_len, rows, first_row, part, num_parts, first_key, part_keys

    @device_function
    def find_whole(scratch, lists, share, window, wanted, thread):
        query_start, seq_lens, _ = lists
        block, seq = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.z)
        first_token = uint32(query_start[seq])
        query_len = uint32(uint32(query_start[uint32(seq + uint32(1))]) - first_token)
        seq_len = uint32(seq_lens[seq])
        rows = uint32(query_len * share)
        num_tiles = uint32(uint32(rows + uint32(num_rows - 1)) // uint32(num_rows))
        first_row = uint32(uint32(uint32(num_tiles - uint32(1)) - block) * uint32(num_rows))
        zero, one, has_tile = uint32(0), uint32(1), block < num_tiles
        return has_tile, seq, first_token, query_len, seq_len, rows, first_row, zero, one, zero, zero

    return find_split if is_split else find_whole


@functools.cache
def key_bounds(turn_keys: int, is_split: bool, has_window: bool) -> Any:
    """A device function ``(chunk, window, first_row, end, keys)``: (the first key that a tile's rows see, the first of
    the block's first turn, one past its last). `chunk` is (sequence length, query length, share), `end` one past the
    last key that the rows see, `keys` (first, part, keys of a part).

    Turns of a part begin at its first key or at multiples of `turn_keys` after it: one that reached beyond the part
    would take keys of the next for zeros.
    """

    @device_function
    def bound(chunk, window, first_row, end, keys):
        (seq_len, query_len, share), (first_key, part, part_keys) = chunk, keys
        key, seen, stop = uint32(0), uint32(0), end
        if is_split:
            key = uint32(first_key + part * part_keys)
            stop = minimum_u32(uint32(key + part_keys), end)
        if has_window:
            seen = visible_first(visible_end(seq_len, query_len, divide_u32(first_row, share)), window)
            if seen > key:
                key = uint32(key + uint32(seen - key) // uint32(turn_keys) * uint32(turn_keys))
        return seen, key, stop

    return bound


@functools.cache
def record_place(head_dim: int, num_rows: int) -> Any:
    """A device function ``place(workspace, block, kv_head, num_kv_heads, row) -> address`` of a block's record of a row
    of its tile: the workspace is [blocks, KV heads, num_rows, record]."""
    record_bytes = uint64(record(head_dim) * 4)

    @device_function
    def place(workspace, block, kv_head, num_kv_heads, row):
        index = (uint64(block) * uint64(num_kv_heads) + uint64(kv_head)) * uint64(num_rows) + uint64(row)
        return workspace + index * record_bytes

    return place


def workspace_bytes(head_dim: int, num_rows: int, num_blocks: int, num_kv_heads: int) -> int:
    """The records, laid out by `record_place`."""
    return num_blocks * num_kv_heads * num_rows * record(head_dim) * 4


_arrive = instruction("atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", "r", "l r")  # beyond the limit comes 0


@device_function
def count_in(arrivals, first, num_parts, kv_head, num_kv_heads):
    """One thread's call for its block's part of a tile, a barrier after the records' stores: how many of the
    tile's parts came before, whose records are there then. `first` is the place of the tile's first part."""
    tile = arrivals + (uint64(first) * uint64(num_kv_heads) + uint64(kv_head)) * uint64(4)
    return _arrive(tile, uint32(num_parts - uint32(1)))


@functools.cache
def parts_combiner(
    dtype: str, head_dim: int, num_rows: int, threads: int, has_sinks: bool, barrier: int = 0
) -> Any:  # fmt: skip
    """A device function that all threads of a block call once they have written its records: if the block is the last
    of its tile, it writes the tile's rows out. With a named `barrier` only so many threads of the block call it.

    ``combine(scratch, tile, addresses, counts, kv_head, thread)``: `scratch` is the shared address of 4 bytes, `tile`
    (the records' place, part, number of parts, first token, first row, rows), `addresses` those of workspace, arrivals,
    q, out and sinks, `counts` (num_q_heads, num_kv_heads, share, table width). `arrivals` counts a tile's blocks, in
    uint32 [blocks, KV heads] at that of its first part: zero before and after a launch.
    """
    add = records_adder(dtype, head_dim, num_rows, threads, has_sinks)
    meet = device_function(lambda: sync_named(uint32(barrier), uint32(threads))) if barrier else sync_block

    @device_function
    def combine(scratch, tile, addresses, counts, kv_head, thread):
        block, part, num_parts, first_token, first_row, rows = tile
        first = uint32(block - part)
        meet()
        if thread == uint32(0):
            shared_store_b32(scratch, count_in(addresses[1], first, num_parts, kv_head, counts[1]))
        meet()
        is_last = uint32(shared_load_b32(scratch) + uint32(1)) == num_parts
        add(is_last, (first, num_parts, first_token, first_row, rows), addresses, counts, kv_head, thread)

    return combine


@functools.cache
def records_adder(dtype: str, head_dim: int, num_rows: int, threads: int, has_sinks: bool) -> Any:
    """A device function ``(is_last, tile, addresses, counts, kv_head, thread)`` of all threads of a block: if it
    `is_last` of a tile, the tile's records are added, and its rows written out. `tile` is (its first record's place,
    number of parts, first token, first row, rows); the rest as in `parts_combiner`."""
    columns = tile_shape("f32", head_dim).columns
    warps, per_lane = threads // 32, -(-columns // 128)  # fours of columns
    ahead = 16 // per_lane  # records that a warp has under way
    record_bytes, item_bytes = uint64(record(head_dim) * 4), uint64(ITEM_BYTES[dtype])
    place_of, store, store_four = record_place(head_dim, num_rows), elements_storer(dtype, 1), quad_storer(dtype)
    is_whole, has_fours = columns % 128 == 0, head_dim % 4 == 0

    @device_function
    def add(is_last, tile, addresses, counts, kv_head, thread):
        first, num_parts, first_token, first_row, rows = tile
        (workspace, _, _, out, sinks), (num_q_heads, num_kv_heads, share, _) = addresses, counts
        lane = lane_index()
        sums = cuda.local.array((per_lane, 4), float32)
        values = cuda.local.array((ahead, per_lane, 4), float32)
        maxima = cuda.local.array(ahead, float32)
        totals = cuda.local.array(ahead, float32)
        value = cuda.local.array(1, float32)
        stride = uint64(num_kv_heads) * uint64(num_rows) * record_bytes
        own_row = uint32(thread >> uint32(5))
        while is_last and own_row < uint32(num_rows) and uint32(first_row + own_row) < rows:
            at = place_of(workspace, first, kv_head, num_kv_heads, own_row)
            for i in range(per_lane):
                for j in range(4):
                    sums[i, j] = float32(0)
            largest = MINUS_INFINITY
            total = float32(0)
            index = uint32(0)
            while index < num_parts:
                for a in range(ahead):
                    maxima[a] = MINUS_INFINITY
                    totals[a] = float32(0)
                    for i in range(per_lane):
                        for j in range(4):
                            values[a, i, j] = float32(0)
                    if uint32(index + uint32(a)) < num_parts:
                        maxima[a], totals[a] = load_2xf32(at + uint64(columns * 4))
                        for i in range(per_lane):
                            column = uint32(uint32(lane * uint32(4)) + uint32(128 * i))
                            if is_whole or column < uint32(columns):
                                loaded = load_4xf32(at + uint64(column) * uint64(4))
                                for j in range(4):
                                    values[a, i, j] = loaded[j]
                    at += stride
                for a in range(ahead):
                    highest = maximum_f32(largest, maxima[a])
                    origin = origin_of(highest)
                    kept = exp2(subtract(largest, origin))
                    factor = exp2(subtract(maxima[a], origin))
                    largest = highest
                    total = total * kept + totals[a] * factor
                    for i in range(per_lane):
                        for j in range(4):
                            sums[i, j] = sums[i, j] * kept + values[a, i, j] * factor
                index = uint32(index + uint32(ahead))
            row = uint32(first_row + own_row)
            scale = reciprocal_of(total)
            if has_sinks:
                scale = share_of_keys(largest, total, load_sink(sinks, sink_head(row, share, kv_head)))
            target = out + head_row(row, share, kv_head, num_q_heads, first_token) * uint64(head_dim) * item_bytes
            for i in range(per_lane):
                column = uint32(uint32(lane * uint32(4)) + uint32(128 * i))
                if has_fours:
                    if column < uint32(head_dim):
                        scaled = sums[i, 0] * scale, sums[i, 1] * scale, sums[i, 2] * scale, sums[i, 3] * scale
                        store_four(target + uint64(column) * item_bytes, scaled)
                else:
                    for j in range(4):
                        if uint32(column + uint32(j)) < uint32(head_dim):
                            value[0] = sums[i, j] * scale
                            store(target + uint64(uint32(column + uint32(j))) * item_bytes, value)
            own_row = uint32(own_row + uint32(warps))

    return add
