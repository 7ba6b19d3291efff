"""Paged decode on the tensor cores, f16 and bf16: few queries against a long sequence, bound by the reading of K and V.

16 rows fill one tile of the tensor core (`tiles` says what a row is: with one query token, the query heads of a KV
head share its keys; missing rows cost nothing, since bandwidth is what is scarce). A block takes one part of a
sequence (`parts`); its warps take tiles of 16 keys in turn. Each warp has a ring of two stages of its own, filled by
cp.async, and its own running softmax: nobody waits for a block's barrier until the end, when the warps' results are
merged in the order of warps. Several blocks a multiprocessor keep enough bytes in flight.

The parts are `plan`'s choice, which may depend on the batch; with one part the block writes out itself.
"""

from __future__ import annotations

import functools
from dataclasses import asdict

from numba import cuda, float32, uint32, uint64

from numba_kernels.cuda.attention.online_softmax import (
    MINUS_INFINITY,
    group_max,
    group_sum,
    load_sink,
    origin_of,
    reciprocal_of,
    share_of_keys,
    subtract,
)
from numba_kernels.cuda.attention.parts import part_of, record
from numba_kernels.cuda.attention.tiles import (
    ARGUMENT_TYPES,
    Variant,
    copy_batch,
    head_row,
    is_hidden,
    key_tile_copier,
    query_tile_copier,
    sink_head,
    tile_shape,
    visible_end,
    visible_first,
)
from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.element import elements_storer
from numba_kernels.cuda.intrinsics.integer import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.math import exp2
from numba_kernels.cuda.intrinsics.memory import (
    copy_async_commit,
    copy_async_wait,
    shared_address,
    shared_load_f32,
    shared_store_2xf32,
    shared_store_f32,
    store_f32,
)
from numba_kernels.cuda.intrinsics.mma import (
    accumulator_flip,
    load_matrix_x4,
    load_matrix_x4_transposed,
    mma_bf16,
    mma_f16,
)
from numba_kernels.cuda.intrinsics.sync import sync_block, sync_named
from numba_kernels.cuda.intrinsics.warp import lane_index, maximum_f32
from numba_kernels.cuda.kv_cache import check_pages
from numba_kernels.cuda.specialisation import Specialisation

NUM_ROWS = 16
NUM_KEYS = 16  # of a warp's tile

_wait_for_all_but_last = copy_async_wait(1)
_wait_for_copies = copy_async_wait(0)


def num_warps(head_dim: int) -> int:
    """Warps of a block."""
    return 4 if head_dim <= 128 else 2


def shared_bytes(dtype: str, head_dim: int) -> int:
    """Dynamic shared memory: the queries, then for each warp two stages of keys and values, later its results."""
    return (NUM_ROWS + num_warps(head_dim) * 4 * NUM_KEYS) * tile_shape(dtype, head_dim).pitch


@functools.cache
def decode_tensor_core(dtype: str, head_dim: int, block_size: int, is_split: bool, variant: Variant) -> Specialisation:
    """Grid: (tiles of the longest chunk's rows times parts, KV heads, sequences). Split, `combine` applies sinks."""
    if is_split and variant.has_sinks:
        raise ValueError("has_sinks is True, must be False where sequences are split: sinks are applied once")
    check_pages(head_dim, block_size, dtype)
    warps = num_warps(head_dim)
    threads = warps * 32
    shape = tile_shape(dtype, head_dim)
    columns, pitch = shape.columns, shape.pitch
    steps, value_tiles = columns // 16, columns // 8
    keeps_queries = columns <= 128  # in registers; else they are read again for each tile of keys
    query_registers = steps if keeps_queries else 1
    mma, pack = (mma_bf16, pack_bf16) if dtype == "bf16" else (mma_f16, pack_f16)
    copy_keys = key_tile_copier(dtype, head_dim, block_size, NUM_KEYS, 32)
    copy_queries = query_tile_copier(dtype, head_dim, NUM_ROWS, threads)
    batch = copy_batch(dtype, head_dim, NUM_KEYS, 32)
    store, flip_of = elements_storer(dtype, 1), accumulator_flip(columns)
    tile_bytes = NUM_KEYS * pitch
    stages_offset = NUM_ROWS * pitch
    result_bytes = 16 * (columns + 2) * 4  # of a warp: sums [16, columns], then maxima and totals [16]
    keys_a_turn = warps * NUM_KEYS
    has_window, has_sinks, hidden = variant.has_window, variant.has_sinks, is_hidden(variant.has_window)
    record_bytes = record(head_dim) * 4

    @cuda.jit
    def kernel(
        q, k_cache, v_cache, out, workspace, sinks, query_start, seq_lens, block_tables, num_q_heads, num_kv_heads,
        share, table_width, window, num_parts, part_keys, scale,
    ):  # fmt: skip
        seq = uint32(cuda.blockIdx.z)
        kv_head = uint32(cuda.blockIdx.y)
        first_token = uint32(query_start[seq])
        query_len = uint32(uint32(query_start[uint32(seq + uint32(1))]) - first_token)
        rows = uint32(query_len * share)
        num_tiles = uint32(uint32(rows + uint32(NUM_ROWS - 1)) // uint32(NUM_ROWS))
        tile = uint32(cuda.blockIdx.x)
        part = uint32(0)
        if is_split:
            tile = divide_u32(uint32(cuda.blockIdx.x), num_parts)
            part = uint32(uint32(cuda.blockIdx.x) - tile * num_parts)
        if tile >= num_tiles:
            return
        first_row = uint32(tile * uint32(NUM_ROWS))
        last_row = uint32(minimum_u32(uint32(first_row + uint32(NUM_ROWS)), rows) - uint32(1))
        seq_len = uint32(seq_lens[seq])
        shortest_end = visible_end(seq_len, query_len, divide_u32(first_row, share))
        longest_end = visible_end(seq_len, query_len, divide_u32(last_row, share))
        stop = longest_end
        turn = uint32(0)
        if has_window:
            turn = uint32(visible_first(shortest_end, window) // uint32(NUM_KEYS) * uint32(NUM_KEYS))
        if is_split:
            turn, stop = part_of(turn, stop, part, part_keys)
        table = uint64(seq) * uint64(table_width)

        storage = cuda.shared.array(0, float32)
        q_tile = shared_address(storage)
        thread = uint32(cuda.threadIdx.x)
        lane = lane_index()
        warp = uint32(thread >> uint32(5))
        own_barrier = uint32(warp + uint32(1))  # bar.warp.sync costs 60 registers and more on sm_80
        own = uint32(warp * uint32(NUM_KEYS))  # where this warp's keys begin in a turn of the block
        own_stages = uint32(q_tile + uint32(stages_offset) + warp * uint32(4 * tile_bytes))
        # Where a lane points ldmatrix: queries and values by rows of 16, keys by rows of 8 and halves.
        row_place = uint32((lane & uint32(15)) * uint32(pitch) + (lane >> uint32(4)) * uint32(16))
        key_place = uint32(
            ((lane & uint32(7)) + (lane >> uint32(4)) * uint32(8)) * uint32(pitch)
            + ((lane >> uint32(3)) & uint32(1)) * uint32(16)
        )
        q_place = uint32(q_tile + row_place)
        # A lane's accumulators belong to two rows, `upper` and eight below it, and to two neighbouring columns.
        upper = uint32(lane >> uint32(2))
        upper_end = visible_end(seq_len, query_len, divide_u32(uint32(first_row + upper), share))
        lower_end = visible_end(seq_len, query_len, divide_u32(uint32(first_row + upper + uint32(8)), share))
        column = uint32((lane & uint32(3)) * uint32(2))

        blocks = cuda.local.array(batch, uint32)
        queries = cuda.local.array((query_registers, 4), uint32)
        scores = cuda.local.array((2, 4), float32)
        sums = cuda.local.array((value_tiles, 4), float32)
        value = cuda.local.array(1, float32)
        copy_queries(q_tile, q, first_row, rows, share, kv_head, num_q_heads, first_token, thread)
        copy_async_commit()
        _wait_for_copies()
        sync_block()
        if keeps_queries:
            for step in range(steps):
                a, b, c, d = load_matrix_x4(uint32(q_place + uint32(step * 32)))
                queries[step, 0] = a
                queries[step, 1] = b
                queries[step, 2] = c
                queries[step, 3] = d
        for i in range(value_tiles):
            for j in range(4):
                sums[i, j] = float32(0)
        upper_max = MINUS_INFINITY
        lower_max = MINUS_INFINITY
        upper_total = float32(0)
        lower_total = float32(0)

        stage = own_stages
        other_stage = uint32(own_stages + uint32(2 * tile_bytes))
        # The loop's bounds are the same in all warps, or ptxas could not tell that a warp's lanes stay together.
        if turn < stop:
            key = uint32(turn + own)
            v_tile = uint32(stage + uint32(tile_bytes))
            copy_keys(stage, k_cache, block_tables, table, key, stop, kv_head, num_kv_heads, lane, blocks)
            copy_keys(v_tile, v_cache, block_tables, table, key, stop, kv_head, num_kv_heads, lane, blocks)
        copy_async_commit()
        while turn < stop:
            following = uint32(turn + uint32(keys_a_turn))
            if following < stop:
                key = uint32(following + own)
                v_tile = uint32(other_stage + uint32(tile_bytes))
                copy_keys(other_stage, k_cache, block_tables, table, key, stop, kv_head, num_kv_heads, lane, blocks)
                copy_keys(v_tile, v_cache, block_tables, table, key, stop, kv_head, num_kv_heads, lane, blocks)
            copy_async_commit()
            key = uint32(turn + own)
            _wait_for_all_but_last()
            sync_named(own_barrier, uint32(32))

            for i in range(2):
                for j in range(4):
                    scores[i, j] = float32(0)
            for step in range(steps):
                k0, k1, k2, k3 = load_matrix_x4(uint32(stage + key_place + uint32(step * 32)))
                if keeps_queries:
                    query = (queries[step, 0], queries[step, 1], queries[step, 2], queries[step, 3])
                else:
                    query = load_matrix_x4(uint32(q_place + uint32(step * 32)))
                s0, s1, s2, s3 = mma((scores[0, 0], scores[0, 1], scores[0, 2], scores[0, 3]), query, (k0, k1))
                scores[0, 0] = s0
                scores[0, 1] = s1
                scores[0, 2] = s2
                scores[0, 3] = s3
                s0, s1, s2, s3 = mma((scores[1, 0], scores[1, 1], scores[1, 2], scores[1, 3]), query, (k2, k3))
                scores[1, 0] = s0
                scores[1, 1] = s1
                scores[1, 2] = s2
                scores[1, 3] = s3

            upper_new = upper_max
            lower_new = lower_max
            for i in range(2):
                for j in range(2):
                    at = uint32(key + column + uint32(8 * i + j))
                    score = scores[i, j] * scale
                    if hidden(at, upper_end, window):
                        score = MINUS_INFINITY
                    scores[i, j] = score
                    upper_new = maximum_f32(upper_new, score)
                    score = scores[i, 2 + j] * scale
                    if hidden(at, lower_end, window):
                        score = MINUS_INFINITY
                    scores[i, 2 + j] = score
                    lower_new = maximum_f32(lower_new, score)
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
            for i in range(2):
                for j in range(2):
                    scores[i, j] = exp2(subtract(scores[i, j], upper_origin))
                    scores[i, 2 + j] = exp2(subtract(scores[i, 2 + j], lower_origin))
                    upper_total = upper_total + scores[i, j]
                    lower_total = lower_total + scores[i, 2 + j]
            weights = (
                pack(scores[0, 0], scores[0, 1]), pack(scores[0, 2], scores[0, 3]), pack(scores[1, 0], scores[1, 1]),
                pack(scores[1, 2], scores[1, 3]),
            )  # fmt: skip
            v_place = uint32(stage + uint32(tile_bytes) + row_place)
            for i in range(value_tiles):
                for j in range(2):
                    sums[i, j] = sums[i, j] * upper_factor
                    sums[i, 2 + j] = sums[i, 2 + j] * lower_factor
            for pair in range(value_tiles // 2):
                v0, v1, v2, v3 = load_matrix_x4_transposed(uint32(v_place + uint32(pair * 32)))
                left = 2 * pair
                s0, s1, s2, s3 = mma((sums[left, 0], sums[left, 1], sums[left, 2], sums[left, 3]), weights, (v0, v1))
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
            sync_named(own_barrier, uint32(32))  # all lanes have read the stage that the next turn fills
            finished = stage
            stage = other_stage
            other_stage = finished
            turn = following

        # The warps' results, where their stages were: sums, largest scores and totals of 16 rows each.
        _wait_for_copies()
        upper_total = group_sum(upper_total, 4)
        lower_total = group_sum(lower_total, 4)
        results = uint32(q_tile + uint32(stages_offset))
        sync_block()
        own_results = uint32(results + warp * uint32(result_bytes))
        place = uint32(own_results + (upper * uint32(columns) + column) * uint32(4))
        flip = uint32(flip_of(upper) * uint32(4))
        for i in range(value_tiles):
            pair = uint32(place + (uint32(32 * i) ^ flip))
            shared_store_2xf32(pair, (sums[i, 0], sums[i, 1]))
            shared_store_2xf32(uint32(pair + uint32(32 * columns)), (sums[i, 2], sums[i, 3]))
        statistics = uint32(own_results + uint32(16 * columns * 4) + upper * uint32(4))
        if column == uint32(0):
            shared_store_f32(statistics, upper_max)
            shared_store_f32(uint32(statistics + uint32(32)), lower_max)
            shared_store_f32(uint32(statistics + uint32(64)), upper_total)
            shared_store_f32(uint32(statistics + uint32(96)), lower_total)
        sync_block()
        index = thread
        while index < uint32(16 * columns):
            place_of_row = uint32(index // uint32(columns))
            at = uint32(index - place_of_row * uint32(columns))
            row = uint32(first_row + place_of_row)
            if row < rows and (is_split or at < uint32(head_dim)):
                statistics = uint32(results + uint32(16 * columns * 4) + place_of_row * uint32(4))
                largest = MINUS_INFINITY
                for i in range(warps):
                    largest = maximum_f32(largest, shared_load_f32(uint32(statistics + uint32(i * result_bytes))))
                origin = origin_of(largest)
                total = float32(0)
                result = float32(0)
                for i in range(warps):
                    own = uint32(statistics + uint32(i * result_bytes))
                    factor = exp2(subtract(shared_load_f32(own), origin))
                    total = total + factor * shared_load_f32(uint32(own + uint32(64)))
                    own = uint32(results + uint32(i * result_bytes) + (index ^ flip_of(place_of_row)) * uint32(4))
                    result = result + factor * shared_load_f32(own)
                at_row = head_row(row, share, kv_head, num_q_heads, first_token)
                if is_split:
                    target = workspace + (at_row * uint64(num_parts) + uint64(part)) * uint64(record_bytes)
                    if at == uint32(0):
                        store_f32(target + uint64(columns * 4), largest)
                        store_f32(target + uint64(columns * 4 + 4), total)
                    if total != float32(0):
                        store_f32(target + uint64(at) * uint64(4), result)
                else:
                    value[0] = result * reciprocal_of(total)
                    if has_sinks:
                        sink = load_sink(sinks, sink_head(row, share, kv_head))
                        value[0] = result * share_of_keys(largest, total, sink)
                    store(out + (at_row * uint64(head_dim) + uint64(at)) * uint64(2), value)
            index = uint32(index + uint32(threads))

    name = f"attention_decode_{dtype}_d{head_dim}_b{block_size}{'_split' if is_split else ''}{variant.suffix}"
    constants = {
        "dtype": dtype, "head_dim": head_dim, "block_size": block_size, "num_rows": NUM_ROWS, "is_split": is_split,
    } | asdict(variant)  # fmt: skip
    return Specialisation(name, kernel, ARGUMENT_TYPES, threads, constants=constants)
