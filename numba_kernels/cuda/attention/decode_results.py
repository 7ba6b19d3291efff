"""The end of a tile in `decode_tensor_core`: a block's warps bring their results to one scale and write the rows out,
or records of them, if other blocks have other keys of the tile."""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, float32, uint32, uint64

from numba_kernels.cuda.attention.decode_block import CUT_BYTES, DecodeBlock
from numba_kernels.cuda.attention.online_softmax import (
    MINUS_INFINITY,
    load_sink,
    origin_of,
    reciprocal_of,
    share_of_keys,
    subtract,
)
from numba_kernels.cuda.attention.parts import count_in, record_place, records_adder, word_at
from numba_kernels.cuda.attention.tiles import head_row, sink_head
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import elements_storer
from numba_kernels.cuda.intrinsics.math import exp2
from numba_kernels.cuda.intrinsics.memory import (
    shared_load_4xf32,
    shared_load_f32,
    shared_store_2xf32,
    shared_store_b32,
    shared_store_f32,
    store_2xb32,
    store_2xf32,
    store_4xf32,
)
from numba_kernels.cuda.intrinsics.sync import sync_block
from numba_kernels.cuda.intrinsics.warp import maximum_f32, shuffle_xor_f32

_lane_here = instruction("mov.u32 $0, %laneid;", "r")  # read again, not kept in a register from turn to turn
_NUM_PARTS, _ARRIVAL = 1, 5  # words of a cut tile in shared memory


@functools.cache
def result_leaver(block: DecodeBlock) -> Any:
    """``leave(own_results, sums, maxima, totals)``: a warp's results go to shared memory."""
    steps, groups, has_scales = block.steps, block.groups, block.pages != ""
    pitch, statistics_at = block.result_pitch, block.statistics_at

    @device_function
    def leave(own_results, sums, maxima, totals):
        lane = _lane_here()
        query, below = uint32((lane & uint32(3)) * uint32(2)), uint32(lane >> uint32(2))
        for n in range(groups):
            for j in range(2):
                total = totals[n, j] + shuffle_xor_f32(totals[n, j], uint32(4))
                total = total + shuffle_xor_f32(total, uint32(8))
                totals[n, j] = total + shuffle_xor_f32(total, uint32(16))
        place = uint32(own_results + query * uint32(pitch) + below * uint32(8 if has_scales else 4))
        for i in range(steps):
            for n in range(groups):
                for j in range(2):
                    at = uint32(place + uint32((8 * n + j) * pitch + 64 * i))
                    if has_scales:  # columns 2 g and 2 g + 1
                        shared_store_2xf32(at, (sums[i, n, j], sums[i, n, 2 + j]))
                    else:
                        shared_store_f32(at, sums[i, n, j])
                        shared_store_f32(uint32(at + uint32(32)), sums[i, n, 2 + j])
        if below == uint32(0):
            for n in range(groups):
                for j in range(2):
                    at = uint32(own_results + uint32(statistics_at) + (query + uint32(8 * n + j)) * uint32(8))
                    shared_store_2xf32(at, (maxima[n, j], totals[n, j]))

    return leave


@functools.cache
def result_merger(block: DecodeBlock, has_sinks: bool) -> Any:
    """``merge(scratch, tile, addresses, sizes, kv_head, thread)``: what `leave` has left, after a barrier. `addresses`
    are those of workspace, arrivals, q, out and sinks, `sizes` (num_q_heads, num_kv_heads, share, table width)."""
    dtype, head_dim, num_rows, columns = block.dtype, block.head_dim, block.num_rows, block.columns
    warps, threads, stage_bytes, result_pitch = block.warps, block.threads, block.stage_bytes, block.result_pitch
    results_at, factors_at = block.stages_at + block.results_at, block.factors_at
    statistics_at = results_at + block.statistics_at
    place_of = record_place(head_dim, num_rows)
    store, pack = elements_storer(dtype, 1), pack_bf16 if dtype == "bf16" else pack_f16
    row_threads = 1 << (threads // num_rows).bit_length() - 1  # 8 lanes have 128 bytes of a row, in different banks
    row_turns = -(-(columns // 4) // row_threads)
    is_whole = columns // 4 % row_threads == 0
    has_pairs = head_dim % 4 == 0

    @device_function
    def weigh(scratch, tile, addresses, sizes, kv_head, thread):
        """A thread a row: each warp's factor."""
        record, _, num_parts, _, first_row, _ = tile
        workspace, _, _, _, sinks = addresses
        _, num_kv_heads, share, _ = sizes
        shares = cuda.local.array(warps, float32)
        statistics = uint32(scratch + uint32(statistics_at) + thread * uint32(8))
        largest = MINUS_INFINITY
        for i in range(warps):
            largest = maximum_f32(largest, shared_load_f32(uint32(statistics + uint32(i * stage_bytes))))
        origin = origin_of(largest)
        total = float32(0)
        for i in range(warps):
            at = uint32(statistics + uint32(i * stage_bytes))
            shares[i] = exp2(subtract(shared_load_f32(at), origin))
            total = total + shares[i] * shared_load_f32(uint32(at + uint32(4)))
        common = float32(1)
        if num_parts == uint32(1):
            common = reciprocal_of(total)
            if has_sinks:
                row = uint32(first_row + thread)
                common = share_of_keys(largest, total, load_sink(sinks, sink_head(row, share, kv_head)))
        else:
            target = place_of(workspace, record, kv_head, num_kv_heads, thread)
            store_2xf32(target + uint64(columns * 4), (largest, total))
        for i in range(warps):
            at = uint32(scratch + uint32(factors_at + 4 * i) + thread * uint32(4 * warps))
            shared_store_f32(at, shares[i] * common)

    @device_function
    def write(scratch, tile, addresses, sizes, kv_head, own_row, thread):
        """`row_threads` threads a row."""
        record, _, num_parts, first_token, first_row, _ = tile
        workspace, _, _, out, _ = addresses
        num_q_heads, num_kv_heads, share, _ = sizes
        shares = cuda.local.array(warps, float32)
        values = cuda.local.array(4, float32)
        value = cuda.local.array(1, float32)
        for i in range(warps):
            shares[i] = shared_load_f32(uint32(scratch + uint32(factors_at + 4 * i) + own_row * uint32(4 * warps)))
        source = place_of(workspace, record, kv_head, num_kv_heads, own_row)
        target = out + head_row(uint32(first_row + own_row), share, kv_head, num_q_heads, first_token) * uint64(
            head_dim * 2
        )
        for i in range(row_turns):
            column = uint32(uint32(thread % uint32(row_threads) + uint32(i * row_threads)) * uint32(4))
            if is_whole or column < uint32(columns):
                for j in range(4):
                    values[j] = float32(0)
                for other in range(warps):
                    at = uint32(scratch + uint32(results_at + other * stage_bytes) + own_row * uint32(result_pitch))
                    a, b, c, d = shared_load_4xf32(uint32(at + column * uint32(4)))
                    values[0] = values[0] + a * shares[other]
                    values[1] = values[1] + b * shares[other]
                    values[2] = values[2] + c * shares[other]
                    values[3] = values[3] + d * shares[other]
                if num_parts > uint32(1):
                    store_4xf32(source + uint64(column) * uint64(4), (values[0], values[1], values[2], values[3]))
                elif has_pairs:
                    if head_dim == columns or column < uint32(head_dim):
                        packed = (pack(values[0], values[1]), pack(values[2], values[3]))
                        store_2xb32(target + uint64(column) * uint64(2), packed)
                else:
                    for j in range(4):
                        if uint32(column + uint32(j)) < uint32(head_dim):
                            value[0] = values[j]
                            store(target + uint64(uint32(column + uint32(j))) * uint64(2), value)

    @device_function
    def merge(scratch, tile, addresses, sizes, kv_head, thread):
        _, _, _, _, first_row, rows = tile
        if thread < uint32(num_rows) and uint32(first_row + thread) < rows:
            weigh(scratch, tile, addresses, sizes, kv_head, thread)
        sync_block()
        own_row = uint32(thread // uint32(row_threads))
        if own_row < uint32(num_rows) and uint32(first_row + own_row) < rows:
            write(scratch, tile, addresses, sizes, kv_head, own_row, thread)

    return merge


@functools.cache
def cut_tiles(block: DecodeBlock, has_sinks: bool) -> tuple[Any, Any, Any]:
    """Functions for the first and the last tile of a run, which may be cut: other blocks have other keys. First
    ``forget(scratch)``, then, a barrier after the records' stores, ``count(scratch, place, tile, arrivals,
    num_kv_heads, kv_head)``, each by one thread, with 0 as the `place` of the first tile and 1 of the last; another
    barrier later all threads call ``add(scratch, addresses, sizes, kv_head, thread)``, which writes the rows of those
    tiles out that no other block will."""
    add_records = records_adder(block.dtype, block.head_dim, block.num_rows, block.threads, has_sinks)

    @device_function
    def forget(scratch):
        for place in range(2):
            shared_store_b32(uint32(scratch + uint32(CUT_BYTES * place + 4 * _NUM_PARTS)), uint32(0))
            shared_store_b32(uint32(scratch + uint32(CUT_BYTES * place + 4 * _ARRIVAL)), uint32(0))

    @device_function
    def count(scratch, place, tile, arrivals, num_kv_heads, kv_head):
        record, part, num_parts, first_token, first_row, rows = tile
        if num_parts > uint32(1):
            at, first = uint32(scratch + uint32(place * uint32(CUT_BYTES))), uint32(record - part)
            arrival = count_in(arrivals, first, num_parts, kv_head, num_kv_heads)
            words = first, num_parts, first_token, first_row, rows, arrival
            for i in range(6):
                shared_store_b32(uint32(at + uint32(4 * i)), words[i])

    @device_function
    def add(scratch, addresses, sizes, kv_head, thread):
        place = uint32(0)
        while place < uint32(2):
            at = uint32(scratch + uint32(place * uint32(CUT_BYTES)))
            num_parts = word_at(at, _NUM_PARTS)
            is_last = uint32(word_at(at, _ARRIVAL) + uint32(1)) == num_parts
            if is_last:
                tile = word_at(at, 0), num_parts, word_at(at, 2), word_at(at, 3), word_at(at, 4)
                add_records(is_last, tile, addresses, sizes, kv_head, thread)
            place = uint32(place + uint32(1))

    return forget, count, add
