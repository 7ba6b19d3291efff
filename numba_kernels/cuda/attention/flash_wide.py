"""Flash attention for heads wider than 256, f16 and bf16, with mma.sync: prefill, and decode of parts of a sequence.

The mathematics of `flash_tensor_core`. 16 rows of 512 columns are more accumulators than a warp has registers, so that
warps divide a strip's columns (`wide_tiles`). Keys and values come by cp.async a stage ahead: with one stage (prompts),
values while scores are formed and the next keys while values are multiplied; with two (decode), three of the four tiles
are always in flight. There are two barriers of the block a tile, two of a strip.

Where not split, a row's bits depend on its query and its keys alone: tiles of keys begin at multiples of their size,
and a strip's sums are added in the order of its warps.
"""

from __future__ import annotations

import functools
from dataclasses import asdict

from numba import cuda, float32, uint32, uint64

from numba_kernels.cuda.attention.flash_parts import (
    Held,
    row_packer,
    rows_starter,
    scores_masker,
    scores_scaler,
    weights_scaler,
)
from numba_kernels.cuda.attention.online_softmax import (
    load_sink,
    reciprocal_of,
    share_of_keys,
)
from numba_kernels.cuda.attention.parts import key_bounds, parts_combiner, record_place, row_finder
from numba_kernels.cuda.attention.tiles import (
    ARGUMENT_TYPES,
    Variant,
    end_finder,
    output_tile_copier,
    query_tile_copier,
    sink_head,
)
from numba_kernels.cuda.attention.wide_tiles import (
    WideTiles,
    result_recorder,
    total_adder,
    weight_storer,
    wide_form,
    wide_scorer,
    wide_summer,
    wide_tile_copier,
    wide_weigher,
)
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.memory import (
    copy_async_commit,
    copy_async_wait,
    shared_address,
    store_2xf32,
)
from numba_kernels.cuda.intrinsics.shared_memory import without_room
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, sync_named, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index
from numba_kernels.cuda.kv_cache import check_pages
from numba_kernels.cuda.quantised_pages import column_exchanger
from numba_kernels.cuda.specialisation import Specialisation

_wait_for_copies = copy_async_wait(0)


@functools.cache
def flash_wide(tiles: WideTiles, block_size: int, is_split: bool, variant: Variant) -> Specialisation:
    """Grid: (tiles of the longest chunk's rows, KV heads, sequences), or where split (parts of all sequences, as
    `parts` bounds them; KV heads)."""
    dtype, head_dim, keys, ahead = tiles.dtype, tiles.head_dim, tiles.num_keys, tiles.stages - 1
    check_pages(head_dim, block_size, dtype)
    tile_rows, threads, groups, pitch = tiles.num_rows, tiles.threads, tiles.groups, tiles.pitch
    key_tiles, value_tiles, team = tiles.own_keys // 8, tiles.own_columns // 8, 32 * tiles.groups
    has_window, has_sinks, has_scales = variant.has_window, variant.has_sinks, variant.pages != ""
    runs, column_of, scales_of, locate, copy_keys = wide_tile_copier(tiles, block_size, has_window)
    copy_queries = query_tile_copier(dtype, head_dim, tile_rows, threads)
    copy_out = output_tile_copier(dtype, head_dim, 16, team)
    exchange = column_exchanger(tile_rows, tiles.columns, pitch, threads)
    form = wide_form(tiles, variant)
    (key_place_of, score), weigh, add_totals = wide_scorer(form), wide_weigher(form, groups), total_adder(groups)
    store_weights, add_values = weight_storer(form, tiles.weights_pitch), wide_summer(form, keys)
    scale_keys, mask, scale_values = scores_scaler(form), scores_masker(form), weights_scaler(form)
    pack_row, record_result = row_packer(form), result_recorder(form)
    find = row_finder(tile_rows, keys, threads, is_split, has_window)
    bound = key_bounds(keys, is_split, has_window)
    place_of = record_place(head_dim, tile_rows)
    combine = parts_combiner(dtype, head_dim, tile_rows, threads, has_sinks)
    start_rows, end_of, wait_for_tile = rows_starter(form), end_finder(variant.has_spans), copy_async_wait(2 * ahead)
    tile_bytes, key_pitch, weights_pitch = tiles.tile_bytes, tiles.key_pitch, tiles.weights_pitch
    scales_at, columns, own_keys, own_columns = keys * key_pitch, tiles.columns, tiles.own_keys, tiles.own_columns
    queries_at, weights_at, maxima_at = tiles.queries_at, tiles.weights_at, tiles.maxima_at
    keys_at, values_at = tiles.keys_at, tiles.values_at
    page_bytes = 1 if has_scales else 2

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
        shortest_end = end_of(bidirectional_until, first_token, seq_len, query_len, divide_u32(first_row, share))
        longest_end = end_of(bidirectional_until, first_token, seq_len, query_len, divide_u32(last_row, share))
        chunk = seq_len, query_len, share
        seen, key, stop = bound(chunk, window, first_row, longest_end, (first_key, part, part_keys))
        table = uint64(seq) * uint64(table_width)

        q_tile = uint32(scratch + uint32(queries_at))
        k_tile = uint32(scratch + uint32(keys_at))
        v_tile = uint32(scratch + uint32(values_at))
        lane = lane_index()
        warp = uint32(thread >> uint32(5))
        strip = uint32(warp // uint32(groups))
        group = uint32(warp % uint32(groups))
        barrier = uint32(strip + uint32(1))
        upper = uint32(lane >> uint32(2))
        quarter = lane & uint32(3)
        own_row = uint32(first_row + strip * uint32(16))
        strip_queries = uint32(q_tile + strip * uint32(16 * pitch))
        # A lane's ldmatrix addresses: queries, weights and values by rows of 16.
        row, half = lane & uint32(15), uint32((lane >> uint32(4)) * uint32(16))
        q_place = uint32(strip_queries + row * uint32(pitch) + half)
        strip_weights = uint32(scratch + uint32(weights_at) + strip * uint32(16 * weights_pitch))
        weights_place = uint32(strip_weights + row * uint32(weights_pitch) + half)
        k_place = uint32(k_tile + group * uint32(own_keys * key_pitch) + key_place_of(lane))
        v_place = uint32(v_tile + row * uint32(key_pitch) + half + group * uint32(own_columns * page_bytes))
        own_key = uint32(group * uint32(own_keys) + quarter * uint32(2))  # the lane's first in a tile
        own_weights = uint32(strip_weights + upper * uint32(weights_pitch) + own_key * uint32(2))
        maxima_place = uint32(scratch + uint32(maxima_at) + (strip * uint32(16) + upper) * uint32(4 * groups))

        queries = cuda.local.array((1, 1, 4), uint32)
        weights = cuda.local.array((1, 4), uint32)
        scores = cuda.local.array((1, key_tiles, 4), float32)
        sums = cuda.local.array((1, value_tiles, 4), float32)
        ends = cuda.local.array((1, 2), uint32)
        own_ends = cuda.local.array((1, 2), uint32)  # after each row's own position, where it sees further
        maxima = cuda.local.array((1, 2), float32)
        totals = cuda.local.array((1, 2), float32)
        factors = cuda.local.array((1, 2), float32)
        words, pairs, room = cuda.local.array(4, uint32), cuda.local.array(8, uint32), cuda.local.array(1, uint32)
        held = Held(queries, weights, scores, sums, ends, own_ends, maxima, totals, factors, words, pairs, room)
        chunk = bidirectional_until, first_token, seq_len, query_len, window, wanted
        start_rows(held, chunk, uint32(own_row + upper), share)
        value_page = cuda.local.array(runs, uint64)
        key_page = cuda.local.array(runs, uint64)
        k_column = column_of(k_cache, kv_head, num_kv_heads, thread)
        v_column = column_of(v_cache, kv_head, num_kv_heads, thread)
        k_scale = scales_of(k_scales, kv_head)
        v_scale = scales_of(v_scales, kv_head)
        locate(value_page, block_tables, table, key, seen, stop, num_kv_heads, thread)
        copy_queries(q_tile, q, (first_row, rows, share, kv_head, num_q_heads, first_token), thread)
        copy_keys(k_tile, k_column, k_scale, value_page, key, seen, stop, thread)
        copy_async_commit()
        following = uint32(key + uint32(keys))
        locate(key_page, block_tables, table, following, seen, stop, num_kv_heads, thread)
        if ahead == 1:
            copy_keys(v_tile, v_column, v_scale, value_page, key, seen, stop, thread)
            copy_async_commit()
            copy_keys(uint32(k_tile + uint32(tile_bytes)), k_column, k_scale, key_page, following, seen, stop, thread)
            copy_async_commit()
            for i in range(runs):
                value_page[i] = key_page[i]
            later = uint32(following + uint32(keys))
            locate(key_page, block_tables, table, later, seen, stop, num_kv_heads, thread)
        if has_scales:
            _wait_for_copies()
            sync_block()
            exchange(q_tile, thread)

        odd = uint32(0)  # where the tiles of this turn lie
        while key < stop:
            following = uint32(key + uint32(keys))
            values_of = uint32(key + uint32(ahead * keys))  # the tile whose values are requested now
            keys_of = uint32(following + uint32(ahead * keys))
            wait_for_tile()
            sync_block()  # the keys are there, and all warps have done with the values before
            if values_of < stop:
                other = uint32(v_tile + uint32(ahead * tile_bytes) - odd) if ahead == 1 else v_tile
                copy_keys(other, v_column, v_scale, value_page, values_of, seen, stop, thread)
            copy_async_commit()
            score(scores[0], q_place, uint32(k_place + odd))
            scale_keys(held, uint32(k_tile + odd + uint32(scales_at) + own_key * uint32(4)), scale)
            if following > shortest_end or (has_window and uint32(key + window) < longest_end):
                mask(held, uint32(key + own_key), window)
            weigh(held, maxima_place, barrier, group, quarter == uint32(0))
            if not has_scales:
                store_weights(own_weights, scores[0])
            wait_for_tile()
            sync_block()  # the values are there and the weights, and all warps have done with the keys
            if keys_of < stop:
                copy_keys(uint32(k_tile + odd), k_column, k_scale, key_page, keys_of, seen, stop, thread)
            copy_async_commit()
            for i in range(runs):
                value_page[i] = key_page[i]
            locate(key_page, block_tables, table, uint32(keys_of + uint32(keys)), seen, stop, num_kv_heads, thread)
            if has_scales:
                scale_values(held, uint32(v_tile + odd + uint32(scales_at) + own_key * uint32(4)))
                store_weights(own_weights, scores[0])
                sync_named(barrier, uint32(team))
            add_values(held, weights_place, uint32(v_place + odd))
            if ahead == 1:
                odd = uint32(uint32(tile_bytes) - odd)
            key = following

        _wait_for_copies()
        # All have done with the queries then, whose place takes the results, to be stored in whole rows.
        add_totals(totals, maxima_place, group, quarter == uint32(0))
        for h in range(2):
            total = totals[0, h]
            row = uint32(own_row + upper + uint32(8 * h))
            if is_split and num_parts > uint32(1):
                if row < rows:
                    target = place_of(workspace, block, kv_head, num_kv_heads, uint32(row - first_row))
                    if group == uint32(0) and quarter == uint32(0):
                        store_2xf32(target + uint64(columns * 4), (maxima[0, h], total))
                    record_result(target + uint64(group) * uint64(own_columns * 4), sums[0], h, quarter)
            else:
                reciprocal = reciprocal_of(total)
                if has_sinks:
                    reciprocal = share_of_keys(maxima[0, h], total, load_sink(sinks, sink_head(row, share, kv_head)))
                place = uint32(strip_queries + (upper + uint32(8 * h)) * uint32(pitch))
                place = uint32(place + group * uint32(own_columns * 2))
                pack_row(sums[0], h, reciprocal, place, uint32(quarter * uint32(2)))
        if is_split and num_parts > uint32(1):
            combine(
                scratch, (block, part, num_parts, first_token, first_row, rows), (workspace, arrivals, q, out, sinks),
                (num_q_heads, num_kv_heads, share, table_width), kv_head, thread,
            )  # fmt: skip
        else:
            sync_named(barrier, uint32(team))
            own = uint32(group * uint32(32) + lane)
            copy_out(strip_queries, out, (own_row, rows, share, kv_head, num_q_heads, first_token), own)

    tier = "decode" if is_split else "flash"
    name = f"attention_{tier}_{dtype}_d{head_dim}_b{block_size}_r{tile_rows}_k{keys}{variant.suffix}"
    constants = {
        "dtype": dtype, "head_dim": head_dim, "block_size": block_size, "num_rows": tile_rows, "num_keys": keys,
    } | asdict(variant)  # fmt: skip
    lacking = without_room(tiles.shared_bytes)
    return Specialisation(name, kernel, ARGUMENT_TYPES, threads, 1, constants, spills_on=lacking)
