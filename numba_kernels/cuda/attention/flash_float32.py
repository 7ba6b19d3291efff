"""Flash attention in float32, by register tiles out of shared memory: the tier for f32, whose products no tensor core
forms.

The same walk over tiles as `flash_tensor_core`. 256 threads are a 16 x 16 grid over the tile of scores: a thread has
`num_rows` / 16 neighbouring rows and every 16th key, and in the second product the same rows and every 16th column,
so that a row's 16 threads are one half of a warp: they exchange maxima and sums by shuffles, and weights through
shared memory without a block's barrier. K rows are read 16 bytes at a time; their pitch puts 8 rows' pieces into
different banks.

With `is_split` a block takes 16 rows and one part of the keys (`parts`): decode in f32. Without it a row's bits depend
on its query and keys alone.
"""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

from numba import cuda, float32, uint32, uint64

from numba_kernels.cuda.attention import segments
from numba_kernels.cuda.attention.online_softmax import (
    MINUS_INFINITY,
    group_max,
    group_sum,
    load_sink,
    origin_of,
    reciprocal_of,
    score_scaler,
    share_of_keys,
    subtract,
)
from numba_kernels.cuda.attention.parts import key_bounds, parts_combiner, record_place, row_finder, scratch_bytes
from numba_kernels.cuda.attention.tiles import (
    ARGUMENT_TYPES,
    WIDE,
    Variant,
    head_row,
    is_outside,
    query_tile_copier,
    sink_head,
    tile_shape,
    visible_end,
)
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import divide_u32, exp2, minimum_u32
from numba_kernels.cuda.intrinsics.memory import (
    copy_async_commit,
    copy_async_wait,
    shared_address,
    shared_load_4xf32,
    shared_load_f32,
    shared_store_f32,
    store_2xf32,
    store_f32,
)
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import maximum_f32
from numba_kernels.cuda.kv_cache import check_pages
from numba_kernels.cuda.specialisation import Launch, Specialisation

THREADS = 256

_wait_for_copies = copy_async_wait(0)


def num_keys(head_dim: int) -> int:
    """Keys of a tile."""
    return 32 if head_dim <= 128 else 16


def num_rows(head_dim: int, is_split: bool) -> int:
    """Rows of a tile."""
    if is_split or head_dim > WIDE:  # 99 KB of tiles
        return 16
    return 64 if head_dim <= 128 else 32


def weights_pitch(head_dim: int, is_split: bool) -> int:
    """Bytes from one row of weights to the next: such that the rows that a warp's halves write begin 16 banks apart."""
    own_rows, keys = num_rows(head_dim, is_split) // 16, num_keys(head_dim)
    return (keys if own_rows * keys % 32 == 16 else keys + 16 // own_rows) * 4


def shared_bytes(qk_dim: int, v_dim: int, is_split: bool) -> int:
    """Dynamic shared memory: tiles of queries, keys, values and weights."""
    head_dim = max(qk_dim, v_dim)
    rows, keys = num_rows(head_dim, is_split), num_keys(head_dim)
    scratch = scratch_bytes(THREADS) if is_split else 0
    tiles = (rows + keys) * tile_shape("f32", qk_dim).pitch + keys * tile_shape("f32", v_dim).pitch
    return scratch + tiles + rows * weights_pitch(head_dim, is_split)


def plan_expanded(qk_dim: int, v_dim: int, *, query_len: int, num_heads: int) -> tuple[Launch, int]:
    """The launch for one sequence's segment of expanded rows (`segments`), and bytes of its results."""
    tile_rows = num_rows(max(qk_dim, v_dim), False)
    kernel = flash_float32(qk_dim, v_dim, segments.BLOCK_SIZE, False, Variant(is_expanded=True))
    tiles, own_rows = -(-query_len // tile_rows), tile_rows // 16
    launch = Launch(kernel, (tiles, num_heads, 1), (THREADS, 1, 1), shared_bytes(qk_dim, v_dim, False))
    sums = own_rows * tile_shape("f32", v_dim).columns // 16
    return launch, segments.state_bytes(tiles * num_heads, sums, own_rows, THREADS)


@functools.cache
def _products(rows: int, keys: int, columns: int, pitches: tuple[int, int, int], steps: int) -> tuple[Any, Any]:
    """Device functions ``score(scores, q_place, k_place)``, a thread's scores of so many rows and keys over `steps`
    times 4 columns, and ``add_values(sums, p_place, v_place)``: weights of 16 `keys` times `columns` columns. Pitches
    are those of a row of queries and keys, of weights, and of values."""
    pitch, p_pitch, value_pitch = pitches

    @device_function
    def score(scores, q_place, k_place):
        operands = cuda.local.array((rows, 4), float32)
        for r in range(rows):
            for j in range(keys):
                scores[r, j] = float32(0)
        at = uint32(0)
        while at < uint32(steps * 16):
            for r in range(rows):
                four = shared_load_4xf32(uint32(q_place + at + uint32(r * pitch)))
                for i in range(4):
                    operands[r, i] = four[i]
            for j in range(keys):
                a, b, c, d = shared_load_4xf32(uint32(k_place + at + uint32(j * 16 * pitch)))
                for r in range(rows):
                    score = scores[r, j] + operands[r, 0] * a
                    score = score + operands[r, 1] * b
                    score = score + operands[r, 2] * c
                    scores[r, j] = score + operands[r, 3] * d
            at = uint32(at + uint32(16))

    @device_function
    def add_values(sums, p_place, v_place):
        operands = cuda.local.array((rows, 4), float32)
        four = uint32(0)
        while four < uint32(keys * 4):
            for r in range(rows):
                weights = shared_load_4xf32(uint32(p_place + four * uint32(16) + uint32(r * p_pitch)))
                for i in range(4):
                    operands[r, i] = weights[i]
            for i in range(4):
                for c in range(columns):
                    value = shared_load_f32(
                        uint32(v_place + four * uint32(4 * value_pitch) + uint32(i * value_pitch + 64 * c))
                    )
                    for r in range(rows):
                        sums[r, c] = sums[r, c] + operands[r, i] * value
            four = uint32(four + uint32(1))

    return score, add_values


@functools.cache
def flash_float32(qk_dim: int, v_dim: int, block_size: int, is_split: bool, variant: Variant) -> Specialisation:
    """Grid: (tiles of the longest chunk's rows, KV heads, sequences), or where split (parts of all sequences, as
    `parts` bounds them; KV heads). Two sizes are of expanded rows."""
    head_dim, is_even, is_expanded = max(qk_dim, v_dim), qk_dim == v_dim, variant.is_expanded
    check_pages(head_dim, block_size, "f32")
    tile_rows, keys = num_rows(head_dim, is_split), num_keys(head_dim)
    shape, value_shape = tile_shape("f32", qk_dim), tile_shape("f32", v_dim)
    columns, pitch, value_columns, value_pitch = shape.columns, shape.pitch, value_shape.columns, value_shape.pitch
    own_rows, own_keys, own_columns = tile_rows // 16, keys // 16, value_columns // 16
    locate, *sources = segments.tile_sources(variant, "f32", qk_dim, v_dim, block_size, keys, THREADS)
    (column_of, scales_of, copy_keys), (value_column_of, _, copy_values) = sources
    copy_queries = query_tile_copier("f32", qk_dim, tile_rows, THREADS)
    k_offset = tile_rows * pitch
    v_offset = k_offset + keys * pitch
    p_offset = v_offset + keys * value_pitch
    p_pitch = weights_pitch(head_dim, is_split)
    score, add_values = _products(own_rows, own_keys, own_columns, (pitch, p_pitch, value_pitch), columns // 4)
    find = row_finder(tile_rows, keys, THREADS, is_split, variant.has_window)
    bound = key_bounds(keys, is_split, variant.has_window)
    q_offset = scratch_bytes(THREADS) if is_split else 0
    has_window, has_sinks, has_spans = variant.has_window, variant.has_sinks, variant.has_spans
    end_of, outside = segments.end_finder_of(variant), is_outside(has_window)
    carry = segments.results_carrier(own_rows, own_columns, "rows", THREADS, is_expanded)
    writes = segments.writes_out(is_expanded)
    span_rows = own_rows if has_spans else 1
    place_of = record_place(v_dim, tile_rows)
    combine = parts_combiner("f32", v_dim, tile_rows, THREADS, has_sinks)
    scaled = score_scaler(variant.softcap)

    @cuda.jit
    def kernel(
        q, k_cache, v_cache, out, workspace, arrivals, sinks, k_scales, v_scales, query_start, seq_lens, block_tables,
        bidirectional_until, num_q_heads, num_kv_heads, share, table_width, window, num_seqs, wanted, scale,
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        storage = cuda.shared.array(0, float32)
        scratch = shared_address(storage)
        thread = uint32(cuda.threadIdx.x)
        block = uint32(cuda.blockIdx.x)
        kv_head = uint32(cuda.blockIdx.y)
        has_tile, seq, first_token, query_len, seq_len, rows, first_row, part, num_parts, first_key, part_keys = find(
            scratch, (query_start, seq_lens, num_seqs), share, window, wanted, thread
        )
        if not has_tile:
            return
        last_row = uint32(minimum_u32(uint32(first_row + uint32(tile_rows)), rows) - uint32(1))
        longest_end = end_of(
            bidirectional_until, first_token, seq_len, query_len, divide_u32(last_row, share), window, wanted
        )
        chunk = seq_len, query_len, share
        seen, key, stop = bound(chunk, window, first_row, longest_end, (first_key, part, part_keys))
        table = uint64(seq) * uint64(table_width)

        q_tile = uint32(scratch + uint32(q_offset))
        k_tile = uint32(q_tile + uint32(k_offset))
        v_tile = uint32(q_tile + uint32(v_offset))
        tx = uint32(thread & uint32(15))
        own_row = uint32((thread >> uint32(4)) * uint32(own_rows))  # the first of this thread's rows in the tile
        q_place = uint32(q_tile + own_row * uint32(pitch))
        k_place = uint32(k_tile + tx * uint32(pitch))
        v_place = uint32(v_tile + tx * uint32(4))
        p_place = uint32(uint32(q_tile + uint32(p_offset)) + own_row * uint32(p_pitch))

        ends = cuda.local.array(own_rows, uint32)
        own_ends = cuda.local.array(span_rows, uint32)  # after each row's own position, where it sees further
        maxima = cuda.local.array(own_rows, float32)
        totals = cuda.local.array(own_rows, float32)
        scores = cuda.local.array((own_rows, own_keys), float32)
        sums = cuda.local.array((own_rows, own_columns), float32)
        for r in range(own_rows):
            token = divide_u32(uint32(first_row + own_row + uint32(r)), share)
            ends[r] = end_of(bidirectional_until, first_token, seq_len, query_len, token, window, wanted)
            if has_spans:
                own_ends[r] = visible_end(seq_len, query_len, token)
            maxima[r] = MINUS_INFINITY
            totals[r] = float32(0)
            for c in range(own_columns):
                sums[r, c] = float32(0)

        k_column = column_of(k_cache, kv_head, num_kv_heads, thread)
        v_column = value_column_of(v_cache, kv_head, num_kv_heads, thread)
        k_scales = scales_of(k_scales, kv_head, num_kv_heads)
        v_scales = scales_of(v_scales, kv_head, num_kv_heads)
        page, value_page = locate(block_tables, table, key, seen, stop, num_kv_heads, thread)
        if key < stop:
            copy_queries(q_tile, q, (first_row, rows, share, kv_head, num_q_heads, first_token), thread)
            copy_keys(k_tile, k_column, k_scales, page, key, seen, stop, thread)
            copy_async_commit()
        while key < stop:
            _wait_for_copies()
            sync_block()  # the keys are there, and all threads have done with the values
            copy_values(v_tile, v_column, v_scales, value_page, key, seen, stop, thread)
            copy_async_commit()
            following = uint32(key + uint32(keys))
            page, value_page = locate(block_tables, table, following, seen, stop, num_kv_heads, thread)

            score(scores, q_place, k_place)
            for r in range(own_rows):
                largest = maxima[r]
                own_end = ends[r]
                if has_spans:
                    own_end = own_ends[r]
                for j in range(own_keys):
                    place = uint32(key + tx + uint32(16 * j))
                    scores[r, j] = scaled(scores[r, j], scale)
                    if outside(place, ends[r], own_end, window):
                        scores[r, j] = MINUS_INFINITY
                    largest = maximum_f32(largest, scores[r, j])
                largest = group_max(largest, 16)
                origin = origin_of(largest)
                factor = exp2(subtract(maxima[r], origin))
                maxima[r] = largest
                total = totals[r] * factor
                for j in range(own_keys):
                    weight = exp2(subtract(scores[r, j], origin))
                    total = total + weight
                    shared_store_f32(uint32(p_place + uint32(r * p_pitch + 64 * j) + tx * uint32(4)), weight)
                totals[r] = total
                for c in range(own_columns):
                    sums[r, c] = sums[r, c] * factor

            _wait_for_copies()
            sync_block()  # the values and weights are there, and all threads have done with the keys
            if following < stop:
                copy_keys(k_tile, k_column, k_scales, page, following, seen, stop, thread)
            copy_async_commit()
            add_values(sums, p_place, v_place)
            key = following

        if is_expanded:
            for r in range(own_rows):
                totals[r] = group_sum(totals[r], 16)
            item = uint32(block * num_kv_heads + kv_head)
            carry(workspace, item, thread, window, table_width, float32(1), sums, maxima, totals)
        if not writes(table_width):
            return
        for r in range(own_rows):
            total = totals[r]
            if not is_expanded:
                total = group_sum(total, 16)
            row = uint32(first_row + own_row + uint32(r))
            if row < rows:
                at_row = head_row(row, share, kv_head, num_q_heads, first_token)
                place = uint32(own_row + uint32(r))
                if is_split and num_parts > uint32(1):
                    target = place_of(workspace, block, kv_head, num_kv_heads, place)
                    if tx == uint32(0):
                        store_2xf32(target + uint64(value_columns * 4), (maxima[r], total))
                    for c in range(own_columns):
                        store_f32(target + uint64(uint32(tx + uint32(16 * c))) * uint64(4), sums[r, c])
                else:
                    target = out + at_row * uint64(v_dim * 4)
                    reciprocal = reciprocal_of(total)
                    if has_sinks:
                        reciprocal = share_of_keys(maxima[r], total, load_sink(sinks, sink_head(row, share, kv_head)))
                    for c in range(own_columns):
                        column = uint32(tx + uint32(16 * c))
                        if column < uint32(v_dim):
                            store_f32(target + uint64(column) * uint64(4), sums[r, c] * reciprocal)
        if is_split and num_parts > uint32(1):
            combine(
                scratch, (block, part, num_parts, first_token, first_row, rows), (workspace, arrivals, q, out, sinks),
                (num_q_heads, num_kv_heads, share, table_width), kv_head, thread,
            )  # fmt: skip

    tier = "decode" if is_split else "flash"
    constants = {
        "dtype": "f32", "head_dim": qk_dim, "v_dim": v_dim, "block_size": block_size, "num_rows": tile_rows,
        "num_keys": keys,
    } | asdict(variant)  # fmt: skip
    sizes = f"d{qk_dim}" if is_even else f"d{qk_dim}_v{v_dim}"
    name = f"attention_{tier}_f32_{sizes}_b{block_size}{variant.suffix}"
    return Specialisation(name, kernel, ARGUMENT_TYPES, THREADS, constants=constants)
