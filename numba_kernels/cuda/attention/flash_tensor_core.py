"""Flash attention on the tensor cores, f16 and bf16: tiles of queries against tiles of keys, nothing materialised.

    S = Q K^T;  m' = max(m, rowmax S);  P = exp(S - m');  l = l exp(m - m') + rowsum P;  O = O exp(m - m') + P V

https://arxiv.org/abs/2205.14135 and, for warps that own rows so that no row is ever shared,
https://arxiv.org/abs/2307.08691. A block has 4 warps of 16 rows each (`tiles` says what a row is) and walks over the
sequence's keys, `NUM_KEYS` at a time, from the first that any of its rows sees to the last; tiles that no row sees
are never loaded. Scores stay in registers: the accumulators of S, packed to 16 bits, are already laid out as the left
operand of P V. Only tiles on the edge of the causal triangle or of the window are masked.

V is copied while S is computed, and the next K while P V is: two barriers and no second buffer.

A row's bits depend on its query and its keys alone, not on the chunk, nor on the batch: tiles of keys begin at
multiples of their size, and a tile in which a row sees nothing leaves it as it is. Exponentials are of float32, and
P is rounded to the dtype for its product with V while l sums it unrounded.
"""

from __future__ import annotations

import functools
from dataclasses import asdict

from numba import cuda, float32, uint32, uint64

from numba_kernels.cuda.attention.online_softmax import (
    group_max,
    group_sum,
    load_sink,
    origin_of,
    reciprocal_of,
    share_of_keys,
    subtract,
)
from numba_kernels.cuda.attention.tiles import (
    ARGUMENT_TYPES,
    Variant,
    copy_batch,
    is_hidden,
    key_tile_copier,
    output_tile_copier,
    query_tile_copier,
    sink_head,
    tile_shape,
    visible_end,
    visible_first,
)
from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.integer import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.math import exp2
from numba_kernels.cuda.intrinsics.memory import copy_async_commit, copy_async_wait, shared_address, shared_store_b32
from numba_kernels.cuda.intrinsics.mma import load_matrix_x4, load_matrix_x4_transposed, mma_bf16, mma_f16
from numba_kernels.cuda.intrinsics.sync import sync_block, sync_named
from numba_kernels.cuda.intrinsics.warp import lane_index, maximum_f32
from numba_kernels.cuda.kv_cache import check_pages
from numba_kernels.cuda.specialisation import Specialisation

NUM_WARPS = 4
THREADS = NUM_WARPS * 32
NUM_ROWS = NUM_WARPS * 16

_wait_for_copies = copy_async_wait(0)


def num_keys(head_dim: int) -> int:
    """Keys of a tile."""
    return 64 if head_dim <= 128 else 32


def shared_bytes(dtype: str, head_dim: int) -> int:
    """Dynamic shared memory: a tile of queries, one of keys and one of values."""
    return (NUM_ROWS + 2 * num_keys(head_dim)) * tile_shape(dtype, head_dim).pitch


@functools.cache
def flash_tensor_core(dtype: str, head_dim: int, block_size: int, variant: Variant) -> Specialisation:
    """For pages of `block_size` tokens. Grid: (tiles of the longest chunk's rows, KV heads, sequences)."""
    check_pages(head_dim, block_size, dtype)
    keys = num_keys(head_dim)
    shape = tile_shape(dtype, head_dim)
    columns, pitch = shape.columns, shape.pitch
    steps = columns // 16  # of the tensor core along the head dim
    key_tiles, value_tiles = keys // 8, columns // 8
    keeps_queries = columns <= 128  # in registers; else they are read again for each tile of keys
    query_registers = steps if keeps_queries else 1
    mma, pack = (mma_bf16, pack_bf16) if dtype == "bf16" else (mma_f16, pack_f16)
    copy_keys = key_tile_copier(dtype, head_dim, block_size, keys, THREADS)
    copy_queries = query_tile_copier(dtype, head_dim, NUM_ROWS, THREADS)
    copy_out = output_tile_copier(dtype, head_dim, 16, 32)
    batch = copy_batch(dtype, head_dim, keys, THREADS)
    k_offset = NUM_ROWS * pitch
    v_offset = k_offset + keys * pitch
    infinity = float32(float("inf"))
    has_window, has_sinks, hidden = variant.has_window, variant.has_sinks, is_hidden(variant.has_window)

    @cuda.jit
    def kernel(
        q, k_cache, v_cache, out, workspace, sinks, query_start, seq_lens, block_tables, num_q_heads, num_kv_heads,
        share, table_width, window, num_seqs, workspace_columns, scale,
    ):  # fmt: skip
        seq = uint32(cuda.blockIdx.z)
        kv_head = uint32(cuda.blockIdx.y)
        first_token = uint32(query_start[seq])
        query_len = uint32(uint32(query_start[uint32(seq + uint32(1))]) - first_token)
        rows = uint32(query_len * share)
        num_tiles = uint32(uint32(rows + uint32(NUM_ROWS - 1)) // uint32(NUM_ROWS))
        tile = uint32(cuda.blockIdx.x)
        if tile >= num_tiles:
            return
        # The longest rows first, so that the last blocks to run are short.
        first_row = uint32(uint32(uint32(num_tiles - uint32(1)) - tile) * uint32(NUM_ROWS))
        last_row = uint32(minimum_u32(uint32(first_row + uint32(NUM_ROWS)), rows) - uint32(1))
        seq_len = uint32(seq_lens[seq])
        shortest_end = visible_end(seq_len, query_len, divide_u32(first_row, share))
        longest_end = visible_end(seq_len, query_len, divide_u32(last_row, share))
        table = uint64(seq) * uint64(table_width)

        storage = cuda.shared.array(0, float32)
        q_tile = shared_address(storage)
        k_tile = uint32(q_tile + uint32(k_offset))
        v_tile = uint32(q_tile + uint32(v_offset))
        thread = uint32(cuda.threadIdx.x)
        lane = lane_index()
        warp = uint32(thread >> uint32(5))
        own_barrier = uint32(warp + uint32(1))  # bar.warp.sync costs 60 registers and more on sm_80
        own_q_tile = uint32(q_tile + uint32(warp * uint32(16 * pitch)))
        # Where a lane points ldmatrix: queries and values by rows of 16, keys by rows of 8 and halves.
        row_place = uint32((lane & uint32(15)) * uint32(pitch) + (lane >> uint32(4)) * uint32(16))
        key_place = uint32(
            ((lane & uint32(7)) + (lane >> uint32(4)) * uint32(8)) * uint32(pitch)
            + ((lane >> uint32(3)) & uint32(1)) * uint32(16)
        )
        q_place = uint32(own_q_tile + row_place)
        k_place = uint32(k_tile + key_place)
        v_place = uint32(v_tile + row_place)
        # A lane's accumulators belong to two rows, `upper` and eight below it, and to two neighbouring columns.
        upper = uint32(first_row + warp * uint32(16) + (lane >> uint32(2)))
        lower = uint32(upper + uint32(8))
        upper_end = visible_end(seq_len, query_len, divide_u32(upper, share))
        lower_end = visible_end(seq_len, query_len, divide_u32(lower, share))
        column = uint32((lane & uint32(3)) * uint32(2))

        blocks = cuda.local.array(batch, uint32)
        queries = cuda.local.array((query_registers, 4), uint32)
        scores = cuda.local.array((key_tiles, 4), float32)
        sums = cuda.local.array((value_tiles, 4), float32)
        for i in range(value_tiles):
            for j in range(4):
                sums[i, j] = float32(0)
        upper_max = -infinity
        lower_max = -infinity
        upper_total = float32(0)
        lower_total = float32(0)

        key = uint32(0)
        if has_window:
            key = uint32(visible_first(shortest_end, window) // uint32(keys) * uint32(keys))
        copy_queries(q_tile, q, first_row, rows, share, kv_head, num_q_heads, first_token, thread)
        copy_keys(k_tile, k_cache, block_tables, table, key, longest_end, kv_head, num_kv_heads, thread, blocks)
        copy_async_commit()
        if keeps_queries:
            _wait_for_copies()
            sync_block()
            for step in range(steps):
                a, b, c, d = load_matrix_x4(uint32(q_place + uint32(step * 32)))
                queries[step, 0] = a
                queries[step, 1] = b
                queries[step, 2] = c
                queries[step, 3] = d

        while key < longest_end:
            _wait_for_copies()
            sync_block()  # the keys are there, and all warps have done with the values
            copy_keys(v_tile, v_cache, block_tables, table, key, longest_end, kv_head, num_kv_heads, thread, blocks)
            copy_async_commit()

            for i in range(key_tiles):
                for j in range(4):
                    scores[i, j] = float32(0)
            for step in range(steps):
                if keeps_queries:
                    a = queries[step, 0]
                    b = queries[step, 1]
                    c = queries[step, 2]
                    d = queries[step, 3]
                else:
                    a, b, c, d = load_matrix_x4(uint32(q_place + uint32(step * 32)))
                for pair in range(key_tiles // 2):
                    k0, k1, k2, k3 = load_matrix_x4(uint32(k_place + uint32(pair * 16 * pitch + step * 32)))
                    left = 2 * pair
                    s0, s1, s2, s3 = mma(
                        (scores[left, 0], scores[left, 1], scores[left, 2], scores[left, 3]), (a, b, c, d), (k0, k1)
                    )
                    scores[left, 0] = s0
                    scores[left, 1] = s1
                    scores[left, 2] = s2
                    scores[left, 3] = s3
                    right = 2 * pair + 1
                    s0, s1, s2, s3 = mma(
                        (scores[right, 0], scores[right, 1], scores[right, 2], scores[right, 3]), (a, b, c, d), (k2, k3)
                    )
                    scores[right, 0] = s0
                    scores[right, 1] = s1
                    scores[right, 2] = s2
                    scores[right, 3] = s3

            for i in range(key_tiles):
                for j in range(4):
                    scores[i, j] = scores[i, j] * scale
            if uint32(key + uint32(keys)) > shortest_end or (has_window and uint32(key + window) < longest_end):
                for i in range(key_tiles):
                    for j in range(2):
                        at = uint32(key + column + uint32(8 * i + j))
                        if hidden(at, upper_end, window):
                            scores[i, j] = -infinity
                        if hidden(at, lower_end, window):
                            scores[i, 2 + j] = -infinity

            upper_new = upper_max
            lower_new = lower_max
            for i in range(key_tiles):
                upper_new = maximum_f32(upper_new, maximum_f32(scores[i, 0], scores[i, 1]))
                lower_new = maximum_f32(lower_new, maximum_f32(scores[i, 2], scores[i, 3]))
            upper_new = group_max(upper_new, 4)
            lower_new = group_max(lower_new, 4)
            upper_origin = origin_of(upper_new)
            lower_origin = origin_of(lower_new)
            upper_factor = exp2(subtract(upper_max, upper_origin))
            lower_factor = exp2(subtract(lower_max, lower_origin))
            upper_max = upper_new
            lower_max = lower_new
            upper_total = upper_total * upper_factor
            lower_total = lower_total * lower_factor
            for i in range(key_tiles):
                for j in range(2):
                    scores[i, j] = exp2(subtract(scores[i, j], upper_origin))
                    scores[i, 2 + j] = exp2(subtract(scores[i, 2 + j], lower_origin))
                    upper_total = upper_total + scores[i, j]
                    lower_total = lower_total + scores[i, 2 + j]
            for i in range(value_tiles):
                for j in range(2):
                    sums[i, j] = sums[i, j] * upper_factor
                    sums[i, 2 + j] = sums[i, 2 + j] * lower_factor

            _wait_for_copies()
            sync_block()  # the values are there, and all warps have done with the keys
            following = uint32(key + uint32(keys))
            if following < longest_end:
                copy_keys(
                    k_tile, k_cache, block_tables, table, following, longest_end, kv_head, num_kv_heads, thread, blocks
                )
            copy_async_commit()
            for step in range(key_tiles // 2):
                weights = (
                    pack(scores[2 * step, 0], scores[2 * step, 1]),
                    pack(scores[2 * step, 2], scores[2 * step, 3]),
                    pack(scores[2 * step + 1, 0], scores[2 * step + 1, 1]),
                    pack(scores[2 * step + 1, 2], scores[2 * step + 1, 3]),
                )
                for pair in range(value_tiles // 2):
                    v0, v1, v2, v3 = load_matrix_x4_transposed(uint32(v_place + uint32(step * 16 * pitch + pair * 32)))
                    left = 2 * pair
                    s0, s1, s2, s3 = mma(
                        (sums[left, 0], sums[left, 1], sums[left, 2], sums[left, 3]), weights, (v0, v1)
                    )
                    sums[left, 0] = s0
                    sums[left, 1] = s1
                    sums[left, 2] = s2
                    sums[left, 3] = s3
                    right = 2 * pair + 1
                    s0, s1, s2, s3 = mma(
                        (sums[right, 0], sums[right, 1], sums[right, 2], sums[right, 3]), weights, (v2, v3)
                    )
                    sums[right, 0] = s0
                    sums[right, 1] = s1
                    sums[right, 2] = s2
                    sums[right, 3] = s3
            key = following

        _wait_for_copies()
        upper_total = group_sum(upper_total, 4)
        lower_total = group_sum(lower_total, 4)
        upper_share = reciprocal_of(upper_total)
        lower_share = reciprocal_of(lower_total)
        if has_sinks:
            upper_share = share_of_keys(upper_max, upper_total, load_sink(sinks, sink_head(upper, share, kv_head)))
            lower_share = share_of_keys(lower_max, lower_total, load_sink(sinks, sink_head(lower, share, kv_head)))
        # The warp's queries are no longer needed: their place takes the results, to be stored in whole rows.
        place = uint32(own_q_tile + (lane >> uint32(2)) * uint32(pitch) + column * uint32(2))
        sync_named(own_barrier, uint32(32))
        for i in range(value_tiles):
            shared_store_b32(uint32(place + uint32(16 * i)), pack(sums[i, 0] * upper_share, sums[i, 1] * upper_share))
            shared_store_b32(
                uint32(place + uint32(8 * pitch + 16 * i)), pack(sums[i, 2] * lower_share, sums[i, 3] * lower_share)
            )
        sync_named(own_barrier, uint32(32))
        copy_out(
            own_q_tile, out, uint32(first_row + warp * uint32(16)), rows, share, kv_head, num_q_heads, first_token, lane
        )

    name = f"attention_flash_{dtype}_d{head_dim}_b{block_size}{variant.suffix}"
    constants = {
        "dtype": dtype, "head_dim": head_dim, "block_size": block_size, "num_rows": NUM_ROWS, "num_keys": keys,
    } | asdict(variant)  # fmt: skip
    return Specialisation(name, kernel, ARGUMENT_TYPES, THREADS, constants=constants)
