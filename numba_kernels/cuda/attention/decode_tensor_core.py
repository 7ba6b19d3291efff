"""Paged decode on the tensor cores, f16 and bf16: few queries against a long sequence, bound by the reading of K and V.

The tensor core multiplies 16 rows by 8 columns, and with few queries these are the columns: S^T = K Q^T and
O^T = V^T P^T, so that 8 rows of queries (rows as in `tiles`: with one query token, the query heads of a KV head
share its keys) cost half of what they would as rows. `movmatrix` turns scores into the second product's operand.
`num_rows` is 8 or 16.

A block takes one part of a sequence (`parts`); its warps take tiles of 16 keys in turn. Each warp has two tiles of keys
and two of values of its own, filled by cp.async, and its own running softmax: there is no block barrier until the end,
when the warps' results are merged in the order of warps. A tile's place is filled again as soon as its warp has read
it, so that three of the four are always in flight: with 3 warps, 2 blocks a multiprocessor and head dim 128, 72 KiB in
half of a multiprocessor. A tile's page is looked up once, for K and V, and a turn ahead.

Sums are rescaled only where a warp has found a larger score: else the factor is 1, and the bits are the same.

**One token a sequence.** With a `HeadForm` the block prepares its queries itself, from the projection's rows
(`prepared_heads`), and the block of a sequence's last part its key and value. Warps ask for their first tiles before
that, except the one whose tiles hold the new key: it waits for the block's barrier after the stores.
"""

from __future__ import annotations

import functools
from dataclasses import asdict

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.attention.online_softmax import (
    MINUS_INFINITY,
    load_sink,
    origin_of,
    reciprocal_of,
    score_scaler,
    share_of_keys,
    subtract,
)
from numba_kernels.cuda.attention.parts import key_bounds, parts_combiner, record_place, row_finder, scratch_bytes
from numba_kernels.cuda.attention.prepared_heads import ARGUMENT_TYPES as OF_HEADS
from numba_kernels.cuda.attention.prepared_heads import HeadForm, decode_preparer
from numba_kernels.cuda.attention.tiles import (
    ARGUMENT_TYPES,
    Variant,
    head_row,
    is_hidden,
    query_tile_copier,
    run_copier,
    sink_head,
    tile_shape,
    visible_end,
)
from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import elements_storer
from numba_kernels.cuda.intrinsics.math import divide_u32, exp2, minimum_u32
from numba_kernels.cuda.intrinsics.memory import (
    copy_async_commit,
    copy_async_wait,
    shared_address,
    shared_load_4xf32,
    shared_load_f32,
    shared_store_2xf32,
    shared_store_f32,
    store_2xb32,
    store_2xf32,
    store_4xf32,
)
from numba_kernels.cuda.intrinsics.mma import (
    load_matrix_x2,
    load_matrix_x4,
    load_matrix_x4_transposed,
    product_adder,
    put_4,
    transpose_matrix,
)
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, sync_named, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index, maximum_f32, or_b32, shuffle_xor_f32
from numba_kernels.cuda.kv_cache import check_pages
from numba_kernels.cuda.quantised_pages import column_exchanger, fragment_unpacker, page_factor
from numba_kernels.cuda.specialisation import Specialisation

NUM_KEYS = 16  # of a warp's tile
_WITH_HEADS = *ARGUMENT_TYPES, *OF_HEADS, types.float32

_wait_for_queries = copy_async_wait(3)  # three groups were committed after them
_wait_for_tile = copy_async_wait(2)  # two tiles were requested after it
_wait_for_copies = copy_async_wait(0)


def num_warps(head_dim: int, pages: str) -> int:
    """Warps of a block: two blocks of whole head dims take half of a multiprocessor's shared memory or registers."""
    return 2 if head_dim > 128 else 3 if head_dim > 64 and not pages else 4


def _tile_bytes(dtype: str, head_dim: int, pages: str) -> int:
    """A warp's tile of keys or values, with their scales."""
    return NUM_KEYS * (tile_shape(pages or dtype, head_dim).pitch + (4 if pages else 0))


def shared_bytes(dtype: str, head_dim: int, num_rows: int, pages: str = "") -> int:
    """Dynamic shared memory: for `part_finder`, the queries, then for each warp two tiles of keys and two of values,
    later its results."""
    warps = num_warps(head_dim, pages)
    tiles = warps * 4 * _tile_bytes(dtype, head_dim, pages)
    results = warps * (_result_bytes(dtype, head_dim, num_rows) + num_rows * 4)
    return scratch_bytes(warps * 32) + num_rows * tile_shape(dtype, head_dim).pitch + max(tiles, results)


def _result_bytes(dtype: str, head_dim: int, num_rows: int) -> int:
    """A warp's results: sums [num_rows, columns], rows such that 8 columns of 4 rows fall into different banks, then
    the rows' statistics."""
    return num_rows * (tile_shape(dtype, head_dim).columns + 4) * 4 + num_rows * 8


@functools.cache
def decode_tensor_core(
    dtype: str, head_dim: int, block_size: int, num_rows: int, variant: Variant, heads: HeadForm | None = None
) -> Specialisation:
    """Grid: (parts of all sequences, as `parts` bounds them; KV heads). With `heads`, sequences have one token, at most
    `num_rows` query heads share a KV head, and q is qkv; `OF_HEADS` and eps follow the other arguments."""
    check_pages(head_dim, block_size, dtype)
    warps = num_warps(head_dim, variant.pages)
    threads = warps * 32
    shape = tile_shape(dtype, head_dim)
    columns, pitch = shape.columns, shape.pitch
    steps, groups = columns // 16, num_rows // 8  # of the tensor core along the head dim, and along the queries
    keeps_queries = columns * groups <= 256  # in registers; else they are read again for each tile of keys
    query_registers = steps if keeps_queries else 1
    add_product, pack = product_adder(dtype), pack_bf16 if dtype == "bf16" else pack_f16
    pieces_of_tile = 1 if columns <= 128 else 2  # each of which a lane finds in one page
    pages, has_scales = variant.pages, variant.pages != ""
    key_pitch = tile_shape(pages or dtype, head_dim).pitch
    column_of, scales_of, locate_tile, copy_tile = run_copier(
        pages or dtype, head_dim, block_size, NUM_KEYS, pieces_of_tile, 32, variant.has_window
    )
    scales_offset = NUM_KEYS * key_pitch
    step_pairs = -(-steps // 2) if has_scales else 0  # steps of bytes, which are loaded two at a time
    single_steps = 0 if has_scales else steps
    unpack = fragment_unpacker(pages or "s8", dtype, 4)
    exchange = column_exchanger(num_rows, columns, pitch, threads)
    factor = float32(page_factor(pages, dtype) if pages else 1)
    copy_queries = query_tile_copier(dtype, head_dim, num_rows, threads)
    has_window, has_sinks, hidden = variant.has_window, variant.has_sinks, is_hidden(variant.has_window)
    scaled = score_scaler(variant.softcap)
    store = elements_storer(dtype, 1)
    tile_bytes = _tile_bytes(dtype, head_dim, pages)
    keys_a_turn = warps * NUM_KEYS
    q_offset = scratch_bytes(threads)
    stages_offset = q_offset + num_rows * pitch
    find = row_finder(num_rows, keys_a_turn, threads, True, has_window)
    bound = key_bounds(keys_a_turn, True, has_window)
    place_of, combine = record_place(head_dim, num_rows), parts_combiner(dtype, head_dim, num_rows, threads, has_sinks)
    result_pitch = (columns + 4) * 4
    statistics_offset = num_rows * result_pitch
    result_bytes = _result_bytes(dtype, head_dim, num_rows)
    factors_offset = warps * result_bytes
    row_threads = threads // num_rows
    row_turns = -(-(columns // 4) // row_threads)
    is_whole = columns // 4 % row_threads == 0
    has_pairs = head_dim % 4 == 0
    prepares = heads is not None
    prepare = decode_preparer(heads, block_size, pages, num_rows, pitch, threads)

    @device_function
    def ask_for_tiles(own_stages, first_tiles, seen, stop, lane):
        """A warp's first keys, their values, and the keys after them."""
        k_column, k_scale, v_column, v_scale, pages, key, next_pages, next_key = first_tiles
        copy_tile(own_stages, k_column, k_scale, pages, key, seen, stop, lane)
        copy_async_commit()
        copy_tile(uint32(own_stages + uint32(2 * tile_bytes)), v_column, v_scale, pages, key, seen, stop, lane)
        copy_async_commit()
        other = uint32(own_stages + uint32(tile_bytes))
        copy_tile(other, k_column, k_scale, next_pages, next_key, seen, stop, lane)
        copy_async_commit()

    @device_function
    def attend(
        scratch, found, q, k_cache, v_cache, out, workspace, arrivals, sinks, k_scales, v_scales, block_tables,
        num_q_heads, num_kv_heads, share, table_width, window, scale, positions, cos, sin, q_scales, norm_scales,
        q_norm, k_norm, slot_mapping, eps,
    ):  # fmt: skip
        _, seq, first_token, query_len, seq_len, rows, first_row, part, num_parts, first_key, part_keys = found
        thread = uint32(cuda.threadIdx.x)
        lane = lane_index()
        warp = uint32(thread >> uint32(5))
        kv_head = uint32(cuda.blockIdx.y)
        block = uint32(cuda.blockIdx.x)
        last_row = uint32(minimum_u32(uint32(first_row + uint32(num_rows)), rows) - uint32(1))
        shortest_end = visible_end(seq_len, query_len, divide_u32(first_row, share))
        longest_end = visible_end(seq_len, query_len, divide_u32(last_row, share))
        seen, turn, stop = bound(seq_len, query_len, share, window, first_row, longest_end, first_key, part, part_keys)
        table = uint64(seq) * uint64(table_width)

        own_barrier = uint32(warp + uint32(1))  # bar.warp.sync costs 60 registers and more on sm_80
        q_tile = uint32(scratch + uint32(q_offset))
        stages = uint32(scratch + uint32(stages_offset))
        own_stages = uint32(stages + warp * uint32(4 * tile_bytes))
        # A lane's ldmatrix addresses: keys by rows of 16, values by rows of 8 and halves.
        key_place = uint32((lane & uint32(15)) * uint32(key_pitch) + (lane >> uint32(4)) * uint32(16))
        value_place = uint32(
            ((lane & uint32(7)) + (lane >> uint32(4)) * uint32(8)) * uint32(pitch)
            + ((lane >> uint32(3)) & uint32(1)) * uint32(16)
        )
        if has_scales:  # both by rows of 16, and two steps
            value_place = key_place
        # A lane's accumulators belong to two neighbouring queries of each group of 8, and to two keys or columns.
        query = uint32((lane & uint32(3)) * uint32(2))
        below = uint32(lane >> uint32(2))

        pages = cuda.local.array(pieces_of_tile, uint64)
        next_pages = cuda.local.array(pieces_of_tile, uint64)
        later_pages = cuda.local.array(pieces_of_tile, uint64)
        queries = cuda.local.array((query_registers, groups, 2), uint32)
        ends = cuda.local.array((groups, 2), uint32)
        maxima = cuda.local.array((groups, 2), float32)
        totals = cuda.local.array((groups, 2), float32)
        factors = cuda.local.array((groups, 2), float32)
        scores = cuda.local.array((groups, 4), float32)
        weights = cuda.local.array((groups, 2), uint32)
        sums = cuda.local.array((steps, groups, 4), float32)
        if has_scales:
            words = cuda.local.array(4, uint32)
            pairs = cuda.local.array(8, uint32)
            room = cuda.local.array(1, uint32)
        shares = cuda.local.array(warps, float32)
        values = cuda.local.array(4, float32)
        value = cuda.local.array(1, float32)
        for n in range(groups):
            for j in range(2):
                row = uint32(first_row + query + uint32(8 * n + j))
                ends[n, j] = visible_end(seq_len, query_len, divide_u32(row, share))
                maxima[n, j] = MINUS_INFINITY
                totals[n, j] = float32(0)
        for i in range(steps):
            for n in range(groups):
                for j in range(4):
                    sums[i, n, j] = float32(0)

        # The tile at `key` of K lies at one of two places, that of V after them.
        k_column = column_of(k_cache, kv_head, num_kv_heads, lane)
        v_column = column_of(v_cache, kv_head, num_kv_heads, lane)
        k_scale = scales_of(k_scales, kv_head)
        v_scale = scales_of(v_scales, kv_head)
        key = uint32(turn + warp * uint32(NUM_KEYS))
        next_key = uint32(key + uint32(keys_a_turn))
        later_key = uint32(next_key + uint32(keys_a_turn))
        locate_tile(pages, block_tables, table, key, seen, stop, num_kv_heads, lane)
        locate_tile(next_pages, block_tables, table, next_key, seen, stop, num_kv_heads, lane)
        locate_tile(later_pages, block_tables, table, later_key, seen, stop, num_kv_heads, lane)
        odd = uint32(0)  # where the tiles of this turn lie in their pairs
        is_newest, is_late = False, False
        if prepares:
            is_newest = uint32(part + uint32(1)) == num_parts
            newest = uint32(seq_len - uint32(1))
            distance = minimum_u32(uint32(newest - key), uint32(newest - next_key))
            is_late = is_newest and distance < uint32(NUM_KEYS)
        else:
            copy_queries(q_tile, q, first_row, rows, share, kv_head, num_q_heads, first_token, thread)
            copy_async_commit()
        first_tiles = k_column, k_scale, v_column, v_scale, pages, key, next_pages, next_key
        if not is_late:
            ask_for_tiles(own_stages, first_tiles, seen, stop, lane)
        if prepares:
            prepare(
                q_tile, q, first_token, share, kv_head, num_q_heads, num_kv_heads, is_newest, positions, cos, sin,
                q_scales, norm_scales, q_norm, k_norm, slot_mapping, k_cache, v_cache, k_scales, v_scales, eps, thread,
            )  # fmt: skip
        else:
            _wait_for_queries()
        sync_block()
        if is_late:  # what the block has stored is there now
            ask_for_tiles(own_stages, first_tiles, seen, stop, lane)
        if has_scales:
            exchange(q_tile, thread)
            sync_block()
        # Queries are the right operand: rows of 8, halves of a step.
        query_place = uint32(
            q_tile + (lane & uint32(7)) * uint32(pitch) + ((lane >> uint32(3)) & uint32(1)) * uint32(16)
        )
        if keeps_queries:
            for step in range(steps):
                for n in range(groups):
                    a, b = load_matrix_x2(uint32(query_place + uint32(n * 8 * pitch + step * 32)))
                    queries[step, n, 0] = a
                    queries[step, n, 1] = b

        # The loop's bounds are the same in all warps, or ptxas could not prove that a warp's lanes stay together.
        while turn < stop:
            following = uint32(turn + uint32(keys_a_turn))
            k_tile = uint32(own_stages + odd)
            v_tile = uint32(k_tile + uint32(2 * tile_bytes))
            _wait_for_tile()
            sync_named(own_barrier, uint32(32))  # the keys are there, and all lanes have read the values before
            if following < stop:
                other = uint32(own_stages + uint32(3 * tile_bytes) - odd)
                at_next = uint32(key + uint32(keys_a_turn))
                copy_tile(other, v_column, v_scale, next_pages, at_next, seen, stop, lane)
            copy_async_commit()

            for n in range(groups):
                for j in range(4):
                    scores[n, j] = float32(0)
            if has_scales:
                for two in range(step_pairs):
                    put_4(words, load_matrix_x4(uint32(k_tile + key_place + uint32(two * 32))))
                    unpack(pairs, words, room)
                    for side in range(2):
                        step = 2 * two + side  # of an odd number of steps the last one's other half is none
                        if step < steps:
                            keys = pairs[4 * side], pairs[4 * side + 2], pairs[4 * side + 1], pairs[4 * side + 3]
                            for n in range(groups):
                                if keeps_queries:
                                    pair = (queries[step, n, 0], queries[step, n, 1])
                                else:
                                    pair = load_matrix_x2(uint32(query_place + uint32(n * 8 * pitch + step * 32)))
                                add_product(scores[n], keys, pair)
            for step in range(single_steps):
                keys = load_matrix_x4(uint32(k_tile + key_place + uint32(step * 32)))
                for n in range(groups):
                    if keeps_queries:
                        pair = (queries[step, n, 0], queries[step, n, 1])
                    else:
                        pair = load_matrix_x2(uint32(query_place + uint32(n * 8 * pitch + step * 32)))
                    add_product(scores[n], keys, pair)
            if has_scales:
                for side in range(2):
                    place = uint32(k_tile + uint32(scales_offset + 32 * side) + below * uint32(4))
                    key_scale = shared_load_f32(place) * factor * scale
                    for n in range(groups):
                        for j in range(2):
                            scores[n, 2 * side + j] = scaled(scores[n, 2 * side + j], key_scale)
            else:
                for n in range(groups):
                    for j in range(4):
                        scores[n, j] = scaled(scores[n, j], scale)
            if uint32(key + uint32(NUM_KEYS)) > shortest_end or (has_window and uint32(key + window) < longest_end):
                for n in range(groups):
                    for j in range(2):
                        if hidden(uint32(key + below), ends[n, j], window):
                            scores[n, j] = MINUS_INFINITY
                        if hidden(uint32(key + below + uint32(8)), ends[n, j], window):
                            scores[n, 2 + j] = MINUS_INFINITY
            is_larger = uint32(0)
            for n in range(groups):
                for j in range(2):
                    largest = maximum_f32(maxima[n, j], maximum_f32(scores[n, j], scores[n, 2 + j]))
                    largest = maximum_f32(largest, shuffle_xor_f32(largest, uint32(4)))
                    largest = maximum_f32(largest, shuffle_xor_f32(largest, uint32(8)))
                    largest = maximum_f32(largest, shuffle_xor_f32(largest, uint32(16)))
                    origin = origin_of(largest)
                    factors[n, j] = exp2(subtract(maxima[n, j], origin))
                    if largest > maxima[n, j]:
                        is_larger = uint32(1)
                    maxima[n, j] = largest
                    scores[n, j] = exp2(subtract(scores[n, j], origin))
                    scores[n, 2 + j] = exp2(subtract(scores[n, 2 + j], origin))
                    totals[n, j] = totals[n, j] * factors[n, j] + (scores[n, j] + scores[n, 2 + j])
                if not has_scales:
                    weights[n, 0] = transpose_matrix(pack(scores[n, 0], scores[n, 1]))
                    weights[n, 1] = transpose_matrix(pack(scores[n, 2], scores[n, 3]))
            if or_b32(is_larger) != uint32(0):
                for i in range(steps):
                    for n in range(groups):
                        for j in range(4):
                            sums[i, n, j] = sums[i, n, j] * factors[n, j % 2]

            _wait_for_tile()
            sync_named(own_barrier, uint32(32))  # the values are there, and all lanes have read the keys
            if uint32(following + uint32(keys_a_turn)) < stop:
                copy_tile(k_tile, k_column, k_scale, later_pages, later_key, seen, stop, lane)
            copy_async_commit()
            for i in range(pieces_of_tile):
                next_pages[i] = later_pages[i]
            later_key = uint32(later_key + uint32(keys_a_turn))
            locate_tile(later_pages, block_tables, table, later_key, seen, stop, num_kv_heads, lane)
            if has_scales:
                place = uint32(v_tile + uint32(scales_offset) + below * uint32(4))
                upper = shared_load_f32(place) * factor
                lower = shared_load_f32(uint32(place + uint32(32))) * factor
                for n in range(groups):
                    weights[n, 0] = transpose_matrix(pack(scores[n, 0] * upper, scores[n, 1] * upper))
                    weights[n, 1] = transpose_matrix(pack(scores[n, 2] * lower, scores[n, 3] * lower))
            if has_scales:
                for two in range(step_pairs):
                    put_4(words, load_matrix_x4_transposed(uint32(v_tile + value_place + uint32(two * 32))))
                    unpack(pairs, words, room)
                    for side in range(2):
                        i = 2 * two + side
                        if i < steps:
                            v = pairs[4 * side], pairs[4 * side + 1], pairs[4 * side + 2], pairs[4 * side + 3]
                            for n in range(groups):
                                add_product(sums[i, n], v, (weights[n, 0], weights[n, 1]))
            for i in range(single_steps):
                v = load_matrix_x4_transposed(uint32(v_tile + value_place + uint32(i * 32)))
                for n in range(groups):
                    add_product(sums[i, n], v, (weights[n, 0], weights[n, 1]))
            odd = uint32(uint32(tile_bytes) - odd)
            key = uint32(key + uint32(keys_a_turn))
            turn = following

        # The warps' results, where their tiles were: sums, then largest scores and totals of the rows.
        _wait_for_copies()
        for n in range(groups):
            for j in range(2):
                total = totals[n, j] + shuffle_xor_f32(totals[n, j], uint32(4))
                total = total + shuffle_xor_f32(total, uint32(8))
                totals[n, j] = total + shuffle_xor_f32(total, uint32(16))
        sync_block()
        own_results = uint32(stages + warp * uint32(result_bytes))
        place = uint32(own_results + query * uint32(result_pitch) + below * uint32(8 if has_scales else 4))
        for i in range(steps):
            for n in range(groups):
                for j in range(2):
                    at = uint32(place + uint32((8 * n + j) * result_pitch + 64 * i))
                    if has_scales:  # columns 2 g and 2 g + 1
                        shared_store_2xf32(at, (sums[i, n, j], sums[i, n, 2 + j]))
                    else:
                        shared_store_f32(at, sums[i, n, j])
                        shared_store_f32(uint32(at + uint32(32)), sums[i, n, 2 + j])
        if below == uint32(0):
            for n in range(groups):
                for j in range(2):
                    at = uint32(own_results + uint32(statistics_offset) + (query + uint32(8 * n + j)) * uint32(8))
                    shared_store_2xf32(at, (maxima[n, j], totals[n, j]))
        sync_block()
        if thread < uint32(num_rows) and uint32(first_row + thread) < rows:
            row = uint32(first_row + thread)
            statistics = uint32(stages + uint32(statistics_offset) + thread * uint32(8))
            largest = MINUS_INFINITY
            for i in range(warps):
                largest = maximum_f32(largest, shared_load_f32(uint32(statistics + uint32(i * result_bytes))))
            origin = origin_of(largest)
            total = float32(0)
            for i in range(warps):
                at = uint32(statistics + uint32(i * result_bytes))
                shares[i] = exp2(subtract(shared_load_f32(at), origin))
                total = total + shares[i] * shared_load_f32(uint32(at + uint32(4)))
            common = float32(1)
            if num_parts == uint32(1):
                common = reciprocal_of(total)
                if has_sinks:
                    common = share_of_keys(largest, total, load_sink(sinks, sink_head(row, share, kv_head)))
            else:
                target = place_of(workspace, block, kv_head, num_kv_heads, thread)
                store_2xf32(target + uint64(columns * 4), (largest, total))
            for i in range(warps):
                at = uint32(stages + uint32(factors_offset + 4 * i) + thread * uint32(4 * warps))
                shared_store_f32(at, shares[i] * common)
        sync_block()
        own_row = uint32(thread // uint32(row_threads))
        row = uint32(first_row + own_row)
        if own_row < uint32(num_rows) and row < rows:
            for i in range(warps):
                shares[i] = shared_load_f32(
                    uint32(stages + uint32(factors_offset + 4 * i) + own_row * uint32(4 * warps))
                )
            record = place_of(workspace, block, kv_head, num_kv_heads, own_row)
            at_row = head_row(row, share, kv_head, num_q_heads, first_token)
            target = out + at_row * uint64(head_dim * 2)
            for i in range(row_turns):
                column = uint32(uint32(thread % uint32(row_threads) + uint32(i * row_threads)) * uint32(4))
                if is_whole or column < uint32(columns):
                    for j in range(4):
                        values[j] = float32(0)
                    for other in range(warps):
                        at = uint32(stages + uint32(other * result_bytes) + own_row * uint32(result_pitch))
                        a, b, c, d = shared_load_4xf32(uint32(at + column * uint32(4)))
                        values[0] = values[0] + a * shares[other]
                        values[1] = values[1] + b * shares[other]
                        values[2] = values[2] + c * shares[other]
                        values[3] = values[3] + d * shares[other]
                    if num_parts > uint32(1):
                        store_4xf32(record + uint64(column) * uint64(4), (values[0], values[1], values[2], values[3]))
                    elif has_pairs:
                        if head_dim == columns or column < uint32(head_dim):
                            packed = (pack(values[0], values[1]), pack(values[2], values[3]))
                            store_2xb32(target + uint64(column) * uint64(2), packed)
                    else:
                        for j in range(4):
                            if uint32(column + uint32(j)) < uint32(head_dim):
                                value[0] = values[j]
                                store(target + uint64(uint32(column + uint32(j))) * uint64(2), value)
        if num_parts > uint32(1):
            combine(
                scratch, workspace, arrivals, out, sinks, block, part, num_parts, kv_head, num_kv_heads, num_q_heads,
                share, first_token, first_row, rows, thread,
            )  # fmt: skip

    @cuda.jit
    def kernel(
        q, k_cache, v_cache, out, workspace, arrivals, sinks, k_scales, v_scales, query_start, seq_lens, block_tables,
        bidirectional_until, num_q_heads, num_kv_heads, share, table_width, window, num_seqs, wanted, scale,
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        scratch, none = shared_address(cuda.shared.array(0, float32)), uint64(0)
        thread = uint32(cuda.threadIdx.x)
        found = find(scratch, query_start, seq_lens, num_seqs, share, window, wanted, thread)
        if found[0]:
            attend(
                scratch, found, q, k_cache, v_cache, out, workspace, arrivals, sinks, k_scales, v_scales, block_tables,
                num_q_heads, num_kv_heads, share, table_width, window, scale, none, none, none, none, none, none, none,
                none, float32(0),
            )  # fmt: skip

    @cuda.jit
    def preparing_kernel(
        qkv, k_cache, v_cache, out, workspace, arrivals, sinks, k_scales, v_scales, query_start, seq_lens, block_tables,
        bidirectional_until, num_q_heads, num_kv_heads, share, table_width, window, num_seqs, wanted, scale, positions,
        cos, sin, q_scales, norm_scales, q_norm, k_norm, slot_mapping, eps,
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        scratch = shared_address(cuda.shared.array(0, float32))
        thread = uint32(cuda.threadIdx.x)
        found = find(scratch, query_start, seq_lens, num_seqs, share, window, wanted, thread)
        if found[0]:
            attend(
                scratch, found, qkv, k_cache, v_cache, out, workspace, arrivals, sinks, k_scales, v_scales,
                block_tables, num_q_heads, num_kv_heads, share, table_width, window, scale, positions, cos, sin,
                q_scales, norm_scales, q_norm, k_norm, slot_mapping, eps,
            )  # fmt: skip

    name = f"attention_decode_{dtype}_d{head_dim}_b{block_size}_r{num_rows}{variant.suffix}"
    constants = {
        "dtype": dtype, "head_dim": head_dim, "block_size": block_size, "num_rows": num_rows,
    } | asdict(variant)  # fmt: skip
    min_blocks = 3 if columns <= 128 else 0  # as many as Hopper's shared memory holds
    if heads is None:
        return Specialisation(name, kernel, ARGUMENT_TYPES, threads, min_blocks, constants)
    name, constants, argument_types = f"{name}_heads{heads.suffix}", heads.constants | constants, _WITH_HEADS
    return Specialisation(name, preparing_kernel, argument_types, threads, min_blocks, constants)
