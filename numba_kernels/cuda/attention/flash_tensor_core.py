"""Flash attention on the tensor cores, f16 and bf16: tiles of queries against tiles of keys, nothing materialised.

    S = Q K^T;  m' = max(m, rowmax S);  P = exp(S - m');  l = l exp(m - m') + rowsum P;  O = O exp(m - m') + P V

https://arxiv.org/abs/2205.14135 and, for warps that own rows so that no row is ever shared,
https://arxiv.org/abs/2307.08691. A block has 4 warps of 16 or 32 rows each (rows as in `tiles`) and walks over
the sequence's keys, `num_keys` at a time, from the first that any of its rows sees to the last; tiles that no row sees
are never loaded. With 32 rows a warp reads shared memory half as often for each product. Scores stay in registers: the
accumulators of S, packed to 16 bits, are already laid out as the left operand of P V. Only tiles on the edge of the
causal triangle or of the window are masked.

Up to head dim 128 there are two tiles of K and of V: the next ones are copied while these are used, with one barrier a
turn. Beyond, where two would leave room for one block a multiprocessor, V is copied while S is computed, and the next K
while P V is: two barriers. Sums are rescaled only where a warp has found a larger score: else the factor is 1.

A row's bits depend on its query and its keys alone, not on the chunk, nor on the batch, nor on how many rows a warp
has: tiles of keys begin at multiples of their size, and a tile in which a row sees nothing leaves it as it is.
Exponentials are of float32, and P is rounded to the dtype for its product with V while l sums it unrounded.
"""

from __future__ import annotations

import functools
from dataclasses import asdict

from numba import cuda, float32, uint32, uint64

from numba_kernels.cuda.attention import segments
from numba_kernels.cuda.attention.flash_parts import (
    NUM_WARPS,
    Held,
    form_of,
    lane_places,
    row_stager,
    rows_starter,
    score_multiplier,
    score_weigher,
    scores_masker,
    scores_scaler,
    value_multiplier,
)
from numba_kernels.cuda.attention.online_softmax import (
    group_sum,
)
from numba_kernels.cuda.attention.parts import key_bounds, row_finder
from numba_kernels.cuda.attention.tiles import (
    ARGUMENT_TYPES,
    Variant,
    output_tile_copier,
    query_tile_copier,
    tile_shape,
)
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.memory import (
    copy_async_commit,
    copy_async_wait,
    shared_address,
)
from numba_kernels.cuda.intrinsics.mma import load_matrix_x4, put_4
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, sync_named, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index
from numba_kernels.cuda.kv_cache import check_pages
from numba_kernels.cuda.quantised_pages import column_exchanger
from numba_kernels.cuda.specialisation import Launch, Specialisation

THREADS = NUM_WARPS * 32

_wait_for_copies = copy_async_wait(0)


def num_keys(head_dim: int) -> int:
    """Keys of a tile."""
    return 64 if head_dim <= 96 else 32


def num_rows(head_dim: int, wanted: int) -> int:
    """Rows of a tile, for chunks of so many rows."""
    return 128 if wanted > 64 and head_dim <= 128 else 64


def num_stages(head_dim: int) -> int:
    """Tiles of keys, and of values, at once."""
    return 2 if head_dim <= 128 else 1


def _tile_bytes(dtype: str, head_dim: int, pages: str) -> int:
    """A tile of keys or values, with their scales."""
    return num_keys(head_dim) * (tile_shape(pages or dtype, head_dim).pitch + (4 if pages else 0))


def shared_bytes(dtype: str, qk_dim: int, v_dim: int, tile_rows: int, pages: str = "") -> int:
    """Dynamic shared memory: a tile of queries, those of keys and of values."""
    queries, head_dim = tile_rows * tile_shape(dtype, qk_dim).pitch, max(qk_dim, v_dim)
    return queries + 2 * num_stages(head_dim) * _tile_bytes(dtype, head_dim, pages)


def plan_expanded(dtype: str, qk_dim: int, v_dim: int, *, query_len: int, num_heads: int) -> tuple[Launch, int]:
    """The launch for one sequence's segment of expanded rows (`segments`), and bytes of its results."""
    tile_rows = num_rows(max(qk_dim, v_dim), query_len)
    variant = Variant(is_expanded=True)
    kernel = flash_tensor_core(dtype, qk_dim, v_dim, segments.BLOCK_SIZE, tile_rows, variant)
    tiles, strips = -(-query_len // tile_rows), tile_rows // NUM_WARPS // 16
    launch = Launch(kernel, (tiles, num_heads, 1), (THREADS, 1, 1), shared_bytes(dtype, qk_dim, v_dim, tile_rows))
    sums = tile_shape(dtype, v_dim).columns // 2
    return launch, segments.state_bytes(tiles * num_heads * strips, sums, 2, THREADS)


@functools.cache
def flash_tensor_core(
    dtype: str, qk_dim: int, v_dim: int, block_size: int, tile_rows: int, variant: Variant
) -> Specialisation:
    """The kernel for pages of `block_size` tokens, tiles of 64 or 128 rows. Grid: (tiles of the longest chunk's rows,
    KV heads, sequences). Two sizes, of which values have the smaller one, are of expanded rows."""
    head_dim, is_even, is_expanded = max(qk_dim, v_dim), qk_dim == v_dim, variant.is_expanded
    check_pages(head_dim, block_size, dtype)
    keys = num_keys(head_dim)
    form = form_of(dtype, qk_dim, v_dim, tile_rows, keys, variant)
    strips, steps, key_tiles, value_tiles = form.strips, form.steps, form.key_tiles, form.value_tiles
    pitch, key_pitch, result_pitch = form.pitch, form.key_pitch, form.result_pitch
    keeps_queries, warp_rows = form.keeps_queries, 16 * strips
    query_registers = steps if keeps_queries else 1
    multiply_queries, scale_scores, mask_scores = score_multiplier(form), scores_scaler(form), scores_masker(form)
    weigh, multiply_values, stage_rows = score_weigher(form), value_multiplier(form), row_stager(form)
    pages, has_scales = variant.pages, variant.pages != ""
    locate, *sources = segments.tile_sources(variant, dtype, qk_dim, v_dim, block_size, keys, THREADS)
    (column_of, scales_of, copy_keys), (value_column_of, _, copy_values) = sources
    scales_offset = keys * key_pitch
    exchange = column_exchanger(tile_rows, 16 * steps, pitch, THREADS)
    copy_queries = query_tile_copier(dtype, qk_dim, tile_rows, THREADS)
    copy_out = output_tile_copier(dtype, v_dim, warp_rows, 32)
    tile_bytes = _tile_bytes(dtype, head_dim, pages)
    is_double = num_stages(head_dim) == 2
    k_offset = tile_rows * pitch
    v_offset = k_offset + num_stages(head_dim) * tile_bytes
    has_window, has_spans = variant.has_window, variant.has_spans
    find = row_finder(tile_rows, keys, THREADS, False, has_window)
    end_of, bound = segments.end_finder_of(variant), key_bounds(keys, False, has_window)
    carry = segments.results_carrier(2, 2 * value_tiles, "paired", THREADS, is_expanded)
    writes = segments.writes_out(is_expanded)
    span_strips = strips if has_spans else 1
    start_rows, places_of = rows_starter(form), lane_places(form)

    @cuda.jit
    def kernel(
        q, k_cache, v_cache, out, workspace, arrivals, sinks, k_scales, v_scales, query_start, seq_lens, block_tables,
        bidirectional_until, num_q_heads, num_kv_heads, share, table_width, window, num_seqs, workspace_columns, scale,
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        storage = cuda.shared.array(0, float32)
        q_tile = shared_address(storage)
        thread = uint32(cuda.threadIdx.x)
        kv_head = uint32(cuda.blockIdx.y)
        has_tile, seq, first_token, query_len, seq_len, rows, first_row, part, _, first_key, part_keys = find(
            q_tile, (query_start, seq_lens, num_seqs), share, window, workspace_columns, thread
        )
        if not has_tile:
            return
        last_row = uint32(minimum_u32(uint32(first_row + uint32(tile_rows)), rows) - uint32(1))
        shortest_end = end_of(
            bidirectional_until, first_token, seq_len, query_len, divide_u32(first_row, share), window,
            workspace_columns,
        )  # fmt: skip
        longest_end = end_of(
            bidirectional_until, first_token, seq_len, query_len, divide_u32(last_row, share), window,
            workspace_columns,
        )  # fmt: skip
        chunk = seq_len, query_len, share
        seen, key, _ = bound(chunk, window, first_row, longest_end, (first_key, part, part_keys))
        table = uint64(seq) * uint64(table_width)

        k_tile = uint32(q_tile + uint32(k_offset))
        v_tile = uint32(q_tile + uint32(v_offset))
        lane = lane_index()
        warp = uint32(thread >> uint32(5))
        own_barrier = uint32(warp + uint32(1))  # bar.warp.sync costs 60 registers and more on sm_80
        own_row = uint32(first_row + warp * uint32(warp_rows))
        own_q_tile = uint32(q_tile + uint32(warp * uint32(warp_rows * pitch)))
        q_place, k_place, v_place = places_of(own_q_tile, k_tile, v_tile, lane)
        # A lane's accumulators belong to two rows of each strip, eight apart, and to two neighbouring columns.
        upper = uint32(lane >> uint32(2))
        column = uint32((lane & uint32(3)) * uint32(2))

        queries = cuda.local.array((strips, query_registers, 4), uint32)
        weights = cuda.local.array((strips, 4), uint32)
        scores = cuda.local.array((strips, key_tiles, 4), float32)
        sums = cuda.local.array((strips, value_tiles, 4), float32)
        ends = cuda.local.array((strips, 2), uint32)
        own_ends = cuda.local.array((span_strips, 2), uint32)  # after each row's own position, where it sees further
        maxima = cuda.local.array((strips, 2), float32)
        totals = cuda.local.array((strips, 2), float32)
        factors = cuda.local.array((strips, 2), float32)
        words, pairs, room = cuda.local.array(4, uint32), cuda.local.array(8, uint32), cuda.local.array(1, uint32)
        held = Held(queries, weights, scores, sums, ends, own_ends, maxima, totals, factors, words, pairs, room)
        chunk = bidirectional_until, first_token, seq_len, query_len, window, workspace_columns
        start_rows(held, chunk, uint32(own_row + upper), share)

        k_column = column_of(k_cache, kv_head, num_kv_heads, thread)
        v_column = value_column_of(v_cache, kv_head, num_kv_heads, thread)
        k_scale = scales_of(k_scales, kv_head, num_kv_heads)
        v_scale = scales_of(v_scales, kv_head, num_kv_heads)
        page, value_page = locate(block_tables, table, key, seen, longest_end, num_kv_heads, thread)
        following = uint32(key + uint32(keys))
        next_page, next_value_page = locate(block_tables, table, following, seen, longest_end, num_kv_heads, thread)
        copy_queries(q_tile, q, (first_row, rows, share, kv_head, num_q_heads, first_token), thread)
        copy_keys(k_tile, k_column, k_scale, page, key, seen, longest_end, thread)
        if is_double:
            copy_values(v_tile, v_column, v_scale, value_page, key, seen, longest_end, thread)
        copy_async_commit()
        if keeps_queries or has_scales:
            _wait_for_copies()
            sync_block()
        if has_scales:
            exchange(q_tile, thread)
            sync_block()
        if keeps_queries:
            for m in range(strips):
                for step in range(steps):
                    put_4(queries[m, step], load_matrix_x4(uint32(q_place + uint32(m * 16 * pitch + step * 32))))

        odd = uint32(0)  # where the tiles of this turn lie
        while key < longest_end:
            following = uint32(key + uint32(keys))
            _wait_for_copies()
            sync_block()  # the keys are there, and all warps have done with the values
            if is_double:
                k_other = uint32(k_tile + uint32(tile_bytes) - odd)
                v_other = uint32(v_tile + uint32(tile_bytes) - odd)
                if following < longest_end:
                    copy_keys(k_other, k_column, k_scale, next_page, following, seen, longest_end, thread)
                    copy_values(v_other, v_column, v_scale, next_value_page, following, seen, longest_end, thread)
            else:
                copy_values(v_tile, v_column, v_scale, value_page, key, seen, longest_end, thread)
            copy_async_commit()

            multiply_queries(held, q_place, uint32(k_place + odd))
            scales_place = uint32(odd + uint32(scales_offset) + column * uint32(4))  # in a tile
            scale_scores(held, uint32(k_tile + scales_place), scale)
            if following > shortest_end or (has_window and uint32(key + window) < longest_end):
                mask_scores(held, uint32(key + column), window)
            weigh(held)

            if not is_double:
                _wait_for_copies()
                sync_block()  # the values are there, and all warps have done with the keys
                if following < longest_end:
                    copy_keys(k_tile, k_column, k_scale, next_page, following, seen, longest_end, thread)
                copy_async_commit()
            page = next_page
            value_page = next_value_page
            later = uint32(following + uint32(keys))
            next_page, next_value_page = locate(block_tables, table, later, seen, longest_end, num_kv_heads, thread)
            multiply_values(held, uint32(v_place + odd), uint32(v_tile + scales_place))
            if is_double:
                odd = uint32(uint32(tile_bytes) - odd)
            key = following

        _wait_for_copies()
        if not keeps_queries:
            sync_block()  # where no row sees a key, no barrier has ordered the other warps' copies of queries
        if is_expanded:
            item = uint32(uint32(cuda.blockIdx.x) * num_kv_heads + kv_head)
            for m in range(strips):
                for h in range(2):
                    totals[m, h] = group_sum(totals[m, h], 4)
                carry(
                    workspace, uint32(item * uint32(strips) + uint32(m)), thread, window, table_width, float32(1),
                    sums[m], maxima[m], totals[m],
                )  # fmt: skip
        if not writes(table_width):
            return
        # The warp's queries are no longer needed: their place takes the results, to be stored in whole rows.
        sync_named(own_barrier, uint32(32))
        place = uint32(own_q_tile + upper * uint32(result_pitch))
        stage_rows(held, sinks, uint32(own_row + upper), share, kv_head, place, column)
        sync_named(own_barrier, uint32(32))
        copy_out(own_q_tile, out, (own_row, rows, share, kv_head, num_q_heads, first_token), lane)

    sizes = f"d{qk_dim}" if is_even else f"d{qk_dim}_v{v_dim}"
    name = f"attention_flash_{dtype}_{sizes}_b{block_size}_r{tile_rows}{variant.suffix}"
    constants = {
        "dtype": dtype, "head_dim": qk_dim, "v_dim": v_dim, "block_size": block_size, "num_rows": tile_rows,
        "num_keys": keys,
    } | asdict(variant)  # fmt: skip
    return Specialisation(name, kernel, ARGUMENT_TYPES, THREADS, constants=constants)
