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
from numba_kernels.cuda.attention.online_softmax import (
    MINUS_INFINITY,
    group_sum,
    load_sink,
    origin_of,
    reciprocal_of,
    score_scaler,
    share_of_keys,
    subtract,
)
from numba_kernels.cuda.attention.tiles import (
    ARGUMENT_TYPES,
    Variant,
    is_outside,
    key_tile_copier,
    output_tile_copier,
    query_tile_copier,
    scale_copier,
    sink_head,
    tile_shape,
    visible_end,
    visible_first,
)
from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import divide_u32, exp2, minimum_u32
from numba_kernels.cuda.intrinsics.memory import (
    copy_async_commit,
    copy_async_wait,
    shared_address,
    shared_load_2xf32,
    shared_store_2xb32,
    shared_store_b32,
)
from numba_kernels.cuda.intrinsics.mma import load_matrix_x4, load_matrix_x4_transposed, product_adder, put_4
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, sync_named, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index, maximum_f32, or_b32, shuffle_xor_f32
from numba_kernels.cuda.kv_cache import check_pages
from numba_kernels.cuda.quantised_pages import column_exchanger, fragment_unpacker, page_factor
from numba_kernels.cuda.specialisation import Launch, Specialisation

NUM_WARPS = 4
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
    shape = tile_shape(dtype, qk_dim)
    columns, pitch = shape.columns, shape.pitch
    value_columns, result_pitch = tile_shape(dtype, v_dim).columns, tile_shape(dtype, v_dim).pitch
    warp_rows = tile_rows // NUM_WARPS
    strips = warp_rows // 16  # of 16 rows: a warp's tiles along the rows
    steps = columns // 16  # of the tensor core along the head dim
    key_tiles, value_tiles = keys // 8, value_columns // 8
    # Tiles loaded at once: four tiles of bytes, or two of 16 bits.
    key_fours, value_fours = (key_tiles // 4, -(-value_tiles // 4)) if variant.pages else (0, 0)
    key_pairs, value_pairs = (0, 0) if variant.pages else (key_tiles // 2, value_tiles // 2)
    keeps_queries = columns * strips <= 128  # in registers; else they are read again for each tile of keys
    query_registers = steps if keeps_queries else 1
    add_product, pack = product_adder(dtype), pack_bf16 if dtype == "bf16" else pack_f16
    pages, has_scales = variant.pages, variant.pages != ""
    key_pitch, value_pitch = tile_shape(pages or dtype, qk_dim).pitch, tile_shape(pages or dtype, v_dim).pitch
    column_of, locate, copy_rows = key_tile_copier(
        pages or dtype, head_dim, block_size, keys, THREADS, variant.has_window
    )
    value_column_of, locate_values, copy_value_rows = column_of, locate, copy_rows
    if is_expanded:
        column_of, locate, copy_rows = segments.row_copier(dtype, qk_dim, qk_dim + v_dim, keys, THREADS)
        value_column_of, locate_values, copy_value_rows = segments.row_copier(
            dtype, v_dim, qk_dim + v_dim, keys, THREADS
        )
    scales_of, copy_scales = scale_copier(pages or dtype, head_dim, block_size, keys, THREADS, variant.has_window)
    scales_offset = keys * key_pitch
    unpack = fragment_unpacker(pages or "s8", dtype, 4)
    exchange = column_exchanger(tile_rows, columns, pitch, THREADS)
    factor = float32(page_factor(pages, dtype) if pages else 1)
    copy_queries = query_tile_copier(dtype, qk_dim, tile_rows, THREADS)
    copy_out = output_tile_copier(dtype, v_dim, warp_rows, 32)
    tile_bytes = _tile_bytes(dtype, head_dim, pages)
    is_double = num_stages(head_dim) == 2
    k_offset = tile_rows * pitch
    v_offset = k_offset + num_stages(head_dim) * tile_bytes
    has_window, has_sinks, has_spans = variant.has_window, variant.has_sinks, variant.has_spans
    end_of, outside = segments.end_finder_of(variant), is_outside(has_window)
    carry = segments.results_carrier(2, 2 * value_tiles, "paired", THREADS, is_expanded)
    writes, pair_bytes = segments.writes_out(is_expanded), uint32((qk_dim + v_dim) * 2)
    span_strips = strips if has_spans else 1
    scaled = score_scaler(variant.softcap)

    @device_function
    def copy_pages(tile, column, scales, offset, first_key, seen, end_key, thread):
        copy_rows(tile, column, offset, first_key, seen, end_key, thread)
        if has_scales:
            copy_scales(uint32(tile + uint32(scales_offset)), scales, offset, first_key, seen, end_key, thread)

    copy_keys, copy_values = (copy_rows, copy_value_rows) if is_expanded else (copy_pages, copy_pages)

    @cuda.jit
    def kernel(
        q, k_cache, v_cache, out, workspace, arrivals, sinks, k_scales, v_scales, query_start, seq_lens, block_tables,
        bidirectional_until, num_q_heads, num_kv_heads, share, table_width, window, num_seqs, workspace_columns, scale,
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        seq = uint32(cuda.blockIdx.z)
        kv_head = uint32(cuda.blockIdx.y)
        first_token = uint32(query_start[seq])
        query_len = uint32(uint32(query_start[uint32(seq + uint32(1))]) - first_token)
        rows = uint32(query_len * share)
        num_tiles = uint32(uint32(rows + uint32(tile_rows - 1)) // uint32(tile_rows))
        tile = uint32(cuda.blockIdx.x)
        if tile >= num_tiles:
            return
        # The longest rows first, so that the last blocks to run are short.
        first_row = uint32(uint32(uint32(num_tiles - uint32(1)) - tile) * uint32(tile_rows))
        last_row = uint32(minimum_u32(uint32(first_row + uint32(tile_rows)), rows) - uint32(1))
        seq_len = uint32(seq_lens[seq])
        shortest_end = end_of(
            bidirectional_until, first_token, seq_len, query_len, divide_u32(first_row, share), window,
            workspace_columns,
        )  # fmt: skip
        longest_end = end_of(
            bidirectional_until, first_token, seq_len, query_len, divide_u32(last_row, share), window,
            workspace_columns,
        )  # fmt: skip
        table = uint64(seq) * uint64(table_width)

        storage = cuda.shared.array(0, float32)
        q_tile = shared_address(storage)
        k_tile = uint32(q_tile + uint32(k_offset))
        v_tile = uint32(q_tile + uint32(v_offset))
        thread = uint32(cuda.threadIdx.x)
        lane = lane_index()
        warp = uint32(thread >> uint32(5))
        own_barrier = uint32(warp + uint32(1))  # bar.warp.sync costs 60 registers and more on sm_80
        own_row = uint32(first_row + warp * uint32(warp_rows))
        own_q_tile = uint32(q_tile + uint32(warp * uint32(warp_rows * pitch)))
        # A lane's ldmatrix addresses: queries and values by rows of 16, keys by rows of 8 and halves.
        row_place = uint32((lane & uint32(15)) * uint32(pitch) + (lane >> uint32(4)) * uint32(16))
        # Keys of bytes: by rows of 32, a step of the tensor core each.
        value_place = uint32((lane & uint32(15)) * uint32(value_pitch) + (lane >> uint32(4)) * uint32(16))
        key_place = uint32(
            ((lane & uint32(7)) + (lane >> uint32(4)) * uint32(8)) * uint32(pitch)
            + ((lane >> uint32(3)) & uint32(1)) * uint32(16)
        )
        if has_scales:
            key_place = uint32(lane * uint32(key_pitch))
        q_place = uint32(own_q_tile + row_place)
        k_place = uint32(k_tile + key_place)
        v_place = uint32(v_tile + value_place)
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
        if has_scales:
            words = cuda.local.array(4, uint32)
            pairs = cuda.local.array(8, uint32)
            room = cuda.local.array(1, uint32)
        for m in range(strips):
            for h in range(2):
                row = uint32(own_row + upper + uint32(16 * m + 8 * h))
                ends[m, h] = end_of(
                    bidirectional_until, first_token, seq_len, query_len, divide_u32(row, share), window,
                    workspace_columns,
                )  # fmt: skip
                if has_spans:
                    own_ends[m, h] = visible_end(seq_len, query_len, divide_u32(row, share))
                maxima[m, h] = MINUS_INFINITY
                totals[m, h] = float32(0)
            for i in range(value_tiles):
                for j in range(4):
                    sums[m, i, j] = float32(0)

        key = uint32(0)
        seen = uint32(0)
        if has_window:
            seen = shortest_end
            if has_spans:
                seen = visible_end(seq_len, query_len, divide_u32(first_row, share))
            seen = visible_first(seen, window)
            key = uint32(seen // uint32(keys) * uint32(keys))
        k_column = column_of(k_cache, kv_head, num_kv_heads, thread)
        v_column = value_column_of(v_cache, kv_head, num_kv_heads, thread)
        k_scale = scales_of(k_scales, kv_head)
        v_scale = scales_of(v_scales, kv_head)
        if is_expanded:
            k_scale = uint64(uint32(num_kv_heads * pair_bytes))
            v_scale = k_scale
        page = locate(block_tables, table, key, seen, longest_end, num_kv_heads, thread)
        value_page = page
        if not is_even:
            value_page = locate_values(block_tables, table, key, seen, longest_end, num_kv_heads, thread)
        following = uint32(key + uint32(keys))
        next_page = locate(block_tables, table, following, seen, longest_end, num_kv_heads, thread)
        next_value_page = next_page
        if not is_even:
            next_value_page = locate_values(block_tables, table, following, seen, longest_end, num_kv_heads, thread)
        copy_queries(q_tile, q, first_row, rows, share, kv_head, num_q_heads, first_token, thread)
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

            for m in range(strips):
                for i in range(key_tiles):
                    for j in range(4):
                        scores[m, i, j] = float32(0)
            for step in range(steps):
                if not keeps_queries:
                    for m in range(strips):
                        put_4(queries[m, 0], load_matrix_x4(uint32(q_place + uint32(m * 16 * pitch + step * 32))))
                at = step if keeps_queries else 0
                if has_scales:
                    for four in range(key_fours):
                        put_4(words, load_matrix_x4(uint32(k_place + odd + uint32(four * 32 * key_pitch + step * 16))))
                        unpack(pairs, words, room)
                        for m in range(strips):
                            query = (queries[m, at, 0], queries[m, at, 1], queries[m, at, 2], queries[m, at, 3])
                            for each in range(4):
                                i = 4 * four + each
                                add_product(scores[m, i], query, (pairs[2 * each], pairs[2 * each + 1]))
                for pair in range(key_pairs):
                    k0, k1, k2, k3 = load_matrix_x4(uint32(k_place + odd + uint32(pair * 16 * pitch + step * 32)))
                    for m in range(strips):
                        query = (queries[m, at, 0], queries[m, at, 1], queries[m, at, 2], queries[m, at, 3])
                        for side in range(2):
                            i = 2 * pair + side
                            half = (k0, k1) if side == 0 else (k2, k3)
                            add_product(scores[m, i], query, half)

            if has_scales:
                for i in range(key_tiles):
                    place = uint32(k_tile + odd + uint32(scales_offset + 32 * i) + column * uint32(4))
                    a, b = shared_load_2xf32(place)
                    even_scale, odd_scale = a * factor * scale, b * factor * scale
                    for m in range(strips):
                        scores[m, i, 0] = scaled(scores[m, i, 0], even_scale)
                        scores[m, i, 1] = scaled(scores[m, i, 1], odd_scale)
                        scores[m, i, 2] = scaled(scores[m, i, 2], even_scale)
                        scores[m, i, 3] = scaled(scores[m, i, 3], odd_scale)
            else:
                for m in range(strips):
                    for i in range(key_tiles):
                        for j in range(4):
                            scores[m, i, j] = scaled(scores[m, i, j], scale)
            if following > shortest_end or (has_window and uint32(key + window) < longest_end):
                for m in range(strips):
                    for i in range(key_tiles):
                        for j in range(4):
                            at_key = uint32(key + column + uint32(8 * i + j % 2))
                            own_end = ends[m, j // 2]
                            if has_spans:
                                own_end = own_ends[m, j // 2]
                            if outside(at_key, ends[m, j // 2], own_end, window):
                                scores[m, i, j] = MINUS_INFINITY

            is_larger = uint32(0)
            for m in range(strips):
                for h in range(2):
                    largest = maxima[m, h]
                    for i in range(key_tiles):
                        largest = maximum_f32(largest, maximum_f32(scores[m, i, 2 * h], scores[m, i, 2 * h + 1]))
                    largest = maximum_f32(largest, shuffle_xor_f32(largest, uint32(1)))
                    largest = maximum_f32(largest, shuffle_xor_f32(largest, uint32(2)))
                    origin = origin_of(largest)
                    factors[m, h] = exp2(subtract(maxima[m, h], origin))
                    if largest > maxima[m, h]:
                        is_larger = uint32(1)
                    maxima[m, h] = largest
                    total = totals[m, h] * factors[m, h]
                    for i in range(key_tiles):
                        for j in range(2):
                            scores[m, i, 2 * h + j] = exp2(subtract(scores[m, i, 2 * h + j], origin))
                            total = total + scores[m, i, 2 * h + j]
                    totals[m, h] = total
            if or_b32(is_larger) != uint32(0):
                for m in range(strips):
                    for i in range(value_tiles):
                        for j in range(4):
                            sums[m, i, j] = sums[m, i, j] * factors[m, j // 2]

            if not is_double:
                _wait_for_copies()
                sync_block()  # the values are there, and all warps have done with the keys
                if following < longest_end:
                    copy_keys(k_tile, k_column, k_scale, next_page, following, seen, longest_end, thread)
                copy_async_commit()
            page = next_page
            value_page = next_value_page
            later = uint32(following + uint32(keys))
            next_page = locate(block_tables, table, later, seen, longest_end, num_kv_heads, thread)
            next_value_page = next_page
            if not is_even:
                next_value_page = locate_values(block_tables, table, later, seen, longest_end, num_kv_heads, thread)
            for i in range(4 * key_fours):
                place = uint32(v_tile + odd + uint32(scales_offset + 32 * i) + column * uint32(4))
                a, b = shared_load_2xf32(place)
                even_scale, odd_scale = a * factor, b * factor
                for m in range(strips):
                    scores[m, i, 0] = scores[m, i, 0] * even_scale
                    scores[m, i, 1] = scores[m, i, 1] * odd_scale
                    scores[m, i, 2] = scores[m, i, 2] * even_scale
                    scores[m, i, 3] = scores[m, i, 3] * odd_scale
            for step in range(key_tiles // 2):
                for m in range(strips):
                    left = 2 * step
                    weights[m, 0] = pack(scores[m, left, 0], scores[m, left, 1])
                    weights[m, 1] = pack(scores[m, left, 2], scores[m, left, 3])
                    weights[m, 2] = pack(scores[m, left + 1, 0], scores[m, left + 1, 1])
                    weights[m, 3] = pack(scores[m, left + 1, 2], scores[m, left + 1, 3])
                if has_scales:
                    for two in range(value_fours):
                        put_4(
                            words,
                            load_matrix_x4_transposed(
                                uint32(v_place + odd + uint32(step * 16 * value_pitch + two * 32))
                            ),
                        )
                        unpack(pairs, words, room)
                        for m in range(strips):
                            weight = (weights[m, 0], weights[m, 1], weights[m, 2], weights[m, 3])
                            for each in range(4):
                                i = 4 * two + each  # the last one's other half may be none
                                if i < value_tiles:
                                    add_product(
                                        sums[m, i],
                                        weight,
                                        (pairs[each // 2 * 4 + each % 2], pairs[each // 2 * 4 + each % 2 + 2]),
                                    )
                for pair in range(value_pairs):
                    v0, v1, v2, v3 = load_matrix_x4_transposed(
                        uint32(v_place + odd + uint32(step * 16 * value_pitch + pair * 32))
                    )
                    for m in range(strips):
                        weight = (weights[m, 0], weights[m, 1], weights[m, 2], weights[m, 3])
                        for side in range(2):
                            i = 2 * pair + side
                            half = (v0, v1) if side == 0 else (v2, v3)
                            add_product(sums[m, i], weight, half)
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
        for m in range(strips):
            for h in range(2):
                total = totals[m, h]
                if not is_expanded:
                    total = group_sum(total, 4)
                reciprocal = reciprocal_of(total)
                if has_sinks:
                    row = uint32(own_row + upper + uint32(16 * m + 8 * h))
                    sink = load_sink(sinks, sink_head(row, share, kv_head))
                    reciprocal = share_of_keys(maxima[m, h], total, sink)
                place = uint32(
                    own_q_tile + (upper + uint32(16 * m + 8 * h)) * uint32(result_pitch) + column * uint32(2)
                )
                for i in range(value_tiles // 2 - value_pairs):  # even columns of 16, then the odd ones
                    a, b = sums[m, 2 * i, 2 * h] * reciprocal, sums[m, 2 * i + 1, 2 * h] * reciprocal
                    c, d = sums[m, 2 * i, 2 * h + 1] * reciprocal, sums[m, 2 * i + 1, 2 * h + 1] * reciprocal
                    target = uint32(place + column * uint32(2) + uint32(32 * i))
                    shared_store_2xb32(target, (pack(a, b), pack(c, d)))
                for i in range(2 * value_pairs):
                    pair_of_sums = pack(sums[m, i, 2 * h] * reciprocal, sums[m, i, 2 * h + 1] * reciprocal)
                    shared_store_b32(uint32(place + uint32(16 * i)), pair_of_sums)
        sync_named(own_barrier, uint32(32))
        copy_out(own_q_tile, out, own_row, rows, share, kv_head, num_q_heads, first_token, lane)

    sizes = f"d{qk_dim}" if is_even else f"d{qk_dim}_v{v_dim}"
    name = f"attention_flash_{dtype}_{sizes}_b{block_size}_r{tile_rows}{variant.suffix}"
    constants = {
        "dtype": dtype, "head_dim": qk_dim, "v_dim": v_dim, "block_size": block_size, "num_rows": tile_rows,
        "num_keys": keys,
    } | asdict(variant)  # fmt: skip
    return Specialisation(name, kernel, ARGUMENT_TYPES, THREADS, constants=constants)
