"""Paged decode on the tensor cores, f16 and bf16: few queries against a long sequence, bound by the reading of K and V.

The tensor core multiplies 16 rows by 8 columns, and with few queries these are the columns: S^T = K Q^T and
O^T = V^T P^T, so that 8 rows of queries (rows as in `tiles`: with one query token, the query heads of a KV head
share its keys) cost half of what they would as rows (`decode_steps`). `num_rows` is 8 or 16.

A block takes a run of keys (`runs`): segments of tiles of rows, one after another. Its warps take tiles of 16 keys in
turn. Each warp has two tiles of keys and two of values of its own (`decode_block`), filled by cp.async, and its own
running softmax: there is no block barrier until a segment's end, when the warps' results are merged in the order of
warps (`decode_results`). A tile's place is filled again as soon as its warp has read it, so that three of the four are
always in flight: with 3 warps, 2 blocks a multiprocessor and head dim 128, 72 KiB in half of a multiprocessor. At a
segment's end these three are the next one's first tiles, and the results lie in the fourth place, if they fit. A
tile's page is looked up once, for K and V, and a turn ahead.

Sums are rescaled only where a warp has found a larger score: else the factor is 1, and the bits are the same.

**One token a sequence.** With a `HeadForm` the block prepares its queries itself, from the projection's rows
(`prepared_heads`), and the block whose run has the newest key stores that key and its value. Only the projection is the
previous grid's: lengths, tables and older keys were there before, so warps ask for their first tiles before they wait
for it. The warp whose tiles hold the newest key leaves it out, and copies it there from the prepared heads. (Scales of
bytes would pass through the first-level cache: such pages are asked for later, and that warp's tiles again after the
stores.)
"""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.attention.decode_block import (
    NUM_KEYS,
    RUN_AT,
    SCRATCH_BYTES,
    WIDE_SPILL_ON,
    DecodeBlock,
    decode_block,
)
from numba_kernels.cuda.attention.decode_results import cut_tiles, result_leaver, result_merger
from numba_kernels.cuda.attention.decode_steps import query_keeper, tile_scorer, tile_softmax, value_adder
from numba_kernels.cuda.attention.online_softmax import MINUS_INFINITY
from numba_kernels.cuda.attention.parts import key_bounds
from numba_kernels.cuda.attention.prepared_heads import ARGUMENT_TYPES as OF_HEADS
from numba_kernels.cuda.attention.prepared_heads import HeadForm, decode_preparer
from numba_kernels.cuda.attention.runs import (
    FIRST_SLOT,
    RUN_WORDS,
    SLOTS,
    STATE_BYTES,
    move,
    run_finder,
    segment_in,
    segment_reader,
    tile_in,
)
from numba_kernels.cuda.attention.tiles import (
    ARGUMENT_TYPES,
    Variant,
    query_tile_copier,
    run_copier,
    visible_end,
)
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.memory import (
    copy_async_commit,
    copy_async_wait,
    shared_address,
    shared_load_b32,
    shared_store_b32,
)
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, sync_named, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index
from numba_kernels.cuda.kv_cache import check_pages
from numba_kernels.cuda.quantised_pages import column_exchanger
from numba_kernels.cuda.specialisation import Specialisation

HALF_BLOCKS = 2  # of 16-bit pages and heads of up to 128, in half of a multiprocessor

_wait_for_tile = copy_async_wait(2)  # two tiles were requested after it
_wait_for_copies = copy_async_wait(0)


def _is_early(variant: Variant, heads: HeadForm | None) -> bool:
    """Whether keys are asked for before the previous grid has ended."""
    return heads is not None and not variant.pages


def _argument_types(is_early: bool) -> tuple[types.Type, ...]:
    """Types of a kernel's arguments that prepares heads: an early one takes its lists as addresses."""
    numbers = types.CPointer(types.int32)
    shared = (types.uint64 if is_early and each == numbers else each for each in ARGUMENT_TYPES)
    return *shared, *OF_HEADS, types.float32


@functools.cache
def _walker(block: DecodeBlock, block_size: int, variant: Variant, is_early: bool) -> tuple[Any, Any, Any, Any]:
    """Four functions of a warp: ``columns_of`` (where a lane's pieces of keys, values and scales lie in a page),
    ``locate`` (the pages of the first three tiles), ``ask`` (for the first keys, their values, and the keys after them)
    and ``walk`` (all turns of a segment). `keys` is (the warp's first key, the block's, the first that rows see, one
    past the segment's last)."""
    dtype, head_dim, tile_bytes, turn_keys = block.dtype, block.head_dim, block.tile_bytes, block.turn_keys
    pieces_of_tile = 1 if block.columns <= 128 else 2  # each of which a lane finds in one page
    groups, has_window = block.groups, variant.has_window
    column_of, scales_of, locate_tile, copy_tile = run_copier(
        variant.pages or dtype, head_dim, block_size, NUM_KEYS, pieces_of_tile, 32, has_window, is_early
    )
    score, soften, add_values = tile_scorer(block, variant), tile_softmax(block, has_window), value_adder(block)

    @device_function
    def columns_of(caches, kv_head, num_kv_heads, lane):
        k_cache, v_cache, k_scales, v_scales = caches
        k_column = column_of(k_cache, kv_head, num_kv_heads, lane)
        v_column = column_of(v_cache, kv_head, num_kv_heads, lane)
        return k_column, scales_of(k_scales, kv_head), v_column, scales_of(v_scales, kv_head)

    @device_function
    def ask(own_stages, columns, pages, keys, lane):
        k_column, k_scale, v_column, v_scale = columns
        key, _, seen, stop = keys
        first, second, _ = pages
        copy_tile(own_stages, k_column, k_scale, first, key, seen, stop, lane)
        copy_async_commit()
        copy_tile(uint32(own_stages + uint32(2 * tile_bytes)), v_column, v_scale, first, key, seen, stop, lane)
        copy_async_commit()
        other, next_key = uint32(own_stages + uint32(tile_bytes)), uint32(key + uint32(turn_keys))
        copy_tile(other, k_column, k_scale, second, next_key, seen, stop, lane)
        copy_async_commit()

    @device_function
    def locate(pages, block_tables, table, keys, num_kv_heads, lane):
        key, _, seen, stop = keys
        first, second, later = pages
        next_key = uint32(key + uint32(turn_keys))
        locate_tile(first, block_tables, table, key, seen, stop, num_kv_heads, lane)
        locate_tile(second, block_tables, table, next_key, seen, stop, num_kv_heads, lane)
        locate_tile(
            later, block_tables, table, uint32(next_key + uint32(turn_keys)), seen, stop, num_kv_heads, lane
        )  # fmt: skip

    @device_function
    def walk(results, queries, tiles, places, keys, ends, tables, sizes):
        (pages, own_stages, columns), (block_tables, table) = tiles, tables
        k_column, k_scale, v_column, v_scale = columns
        query_place, key_place, value_place, below, own_barrier = places
        key, turn, seen, stop = keys
        num_kv_heads, window, scale, lane = sizes
        _, next_pages, later_pages = pages
        scores = cuda.local.array((groups, 4), float32)
        later_key = uint32(key + uint32(2 * turn_keys))
        odd = uint32(0)  # where the tiles of this turn lie in their pairs
        # The loop's bounds are the same in all warps, or ptxas could not prove that a warp's lanes stay together.
        while turn < stop:
            following = uint32(turn + uint32(turn_keys))
            k_tile = uint32(own_stages + odd)
            v_tile = uint32(k_tile + uint32(2 * tile_bytes))
            _wait_for_tile()
            sync_named(own_barrier, uint32(32))  # the keys are there, and all lanes have read the values before
            if following < stop:
                other = uint32(own_stages + uint32(3 * tile_bytes) - odd)
                at_next = uint32(key + uint32(turn_keys))
                copy_tile(other, v_column, v_scale, next_pages, at_next, seen, stop, lane)
            copy_async_commit()
            score(scores, queries, query_place, k_tile, key_place, below, scale)
            soften(scores, results, ends, key, below, window)
            _wait_for_tile()
            sync_named(own_barrier, uint32(32))  # the values are there, and all lanes have read the keys
            if uint32(following + uint32(turn_keys)) < stop:
                copy_tile(k_tile, k_column, k_scale, later_pages, later_key, seen, stop, lane)
            copy_async_commit()
            for i in range(pieces_of_tile):
                next_pages[i] = later_pages[i]
            later_key = uint32(later_key + uint32(turn_keys))
            locate_tile(later_pages, block_tables, table, later_key, seen, stop, num_kv_heads, lane)
            add_values(results[0], scores, v_tile, value_place, below)
            odd = uint32(uint32(tile_bytes) - odd)
            key = uint32(key + uint32(turn_keys))
            turn = following

    return columns_of, locate, ask, walk


@functools.cache
def _newest_copier(block: DecodeBlock) -> Any:
    """``copy(own_stages, row, distance, lane)``: the newest key and its value go from the shared address `row` into a
    warp's first tiles, or the key into its second; `distance` is that from the warp's first key."""
    num_words, pitch, tile_bytes, turn_keys = block.head_dim // 2, block.pitch, block.tile_bytes, block.turn_keys

    @device_function
    def copy(own_stages, row, distance, lane):
        is_first = distance < uint32(NUM_KEYS)
        key_at = uint32(own_stages + distance * uint32(pitch))
        if not is_first:
            key_at = uint32(own_stages + uint32(tile_bytes) + uint32(distance - uint32(turn_keys)) * uint32(pitch))
        word = lane
        while word < uint32(num_words):
            at = uint32(word * uint32(4))
            shared_store_b32(uint32(key_at + at), shared_load_b32(uint32(row + at)))
            if is_first:
                value = shared_load_b32(uint32(row + uint32(pitch) + at))
                shared_store_b32(uint32(key_at + uint32(2 * tile_bytes) + at), value)
            word = uint32(word + uint32(32))

    return copy


@functools.cache
def _attender(block: DecodeBlock, block_size: int, variant: Variant, heads: HeadForm | None) -> Any:
    """``attend(scratch, addresses, caches, lists, counts, sizes, of_heads)``: a block's run."""
    num_rows, pitch, threads, turn_keys = block.num_rows, block.pitch, block.threads, block.turn_keys
    steps, groups, is_ahead, has_scales = block.steps, block.groups, block.is_ahead, variant.pages != ""
    query_registers = steps if block.keeps_queries else 1
    pieces_of_tile = 1 if block.columns <= 128 else 2
    key_pitch, q_offset, stages_offset = block.key_pitch, block.queries_at, block.stages_at
    stage_bytes, results_at = block.stage_bytes, block.results_at
    copy_newest = _newest_copier(block)
    prepares, is_early = heads is not None, _is_early(variant, heads)
    columns_of, locate, ask, walk = _walker(block, block_size, variant, is_early)
    keep_queries = query_keeper(block)[0]
    leave, merge = result_leaver(block), result_merger(block, variant.has_sinks)
    forget, count_in, add_cut = cut_tiles(block, variant.has_sinks)
    exchange = column_exchanger(num_rows, block.columns, pitch, threads)
    copy_queries = query_tile_copier(block.dtype, block.head_dim, num_rows, threads)
    find = run_finder(num_rows, turn_keys, variant.has_window, is_early)
    read_segment = segment_reader(num_rows, turn_keys, variant.has_window, is_early)
    bound = key_bounds(turn_keys, True, variant.has_window)
    prepare = None if heads is None else decode_preparer(heads, block_size, variant.pages, num_rows, pitch, threads)

    @device_function
    def begin(state, slot, share, table_width, window):
        """A warp's keys of a segment, those that were there before if a first tile has the key that the block stores,
        the sequence's row of the table, and whether the block stores one."""
        seq, query_len, seq_len, first_key, num_keys = segment_in(state, slot)
        _, _, _, _, first_row, rows = tile_in(state, slot)
        last_row = uint32(minimum_u32(uint32(first_row + uint32(num_rows)), rows) - uint32(1))
        end = visible_end(seq_len, query_len, divide_u32(last_row, share))
        seen, turn, stop = bound((seq_len, query_len, share), window, first_row, end, (first_key, uint32(0), num_keys))
        key = uint32(turn + uint32(uint32(cuda.threadIdx.x) >> uint32(5)) * uint32(NUM_KEYS))
        known, is_newest = stop, False
        if prepares:
            newest = uint32(seq_len - uint32(1))
            is_newest = uint32(newest - first_key) < num_keys  # a later part may have no keys
            distance = minimum_u32(uint32(newest - key), uint32(newest - key - uint32(turn_keys)))
            if is_newest and distance < uint32(NUM_KEYS):
                known = newest
        return (key, turn, seen, stop), (key, turn, seen, known), uint64(seq) * uint64(table_width), is_newest

    @device_function
    def attend(scratch, addresses, caches, lists, counts, sizes, of_heads):
        _, arrivals, q, _, _ = addresses
        (query_start, seq_lens, block_tables), (window, num_seqs, wanted, scale) = lists, sizes
        num_q_heads, num_kv_heads, share, table_width = counts
        thread, lane = uint32(cuda.threadIdx.x), lane_index()
        warp = uint32(thread >> uint32(5))
        kv_head, run = uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.x)
        own_barrier = uint32(warp + uint32(1))  # bar.warp.sync costs 60 registers and more on sm_80
        q_tile = uint32(scratch + uint32(q_offset))
        state = uint32(scratch + uint32(SCRATCH_BYTES) + warp * uint32(STATE_BYTES))
        own_stages = uint32(scratch + uint32(stages_offset) + warp * uint32(stage_bytes))
        if thread == uint32(0):
            forget(scratch)
        found = uint32(scratch + uint32(RUN_AT))
        if warp == uint32(0):
            find(found, query_start, seq_lens, num_seqs, share, window, wanted, run)
        sync_block()
        if lane < uint32(RUN_WORDS):
            shared_store_b32(uint32(state + lane * uint32(4)), shared_load_b32(uint32(found + lane * uint32(4))))
        sync_named(own_barrier, uint32(32))
        # A lane's ldmatrix addresses: keys by rows of 16, values by rows of 8 and halves; queries, the right operand,
        # by rows of 8 and halves of a step.
        key_place = uint32((lane & uint32(15)) * uint32(key_pitch) + (lane >> uint32(4)) * uint32(16))
        value_place = uint32(
            ((lane & uint32(7)) + (lane >> uint32(4)) * uint32(8)) * uint32(pitch)
            + ((lane >> uint32(3)) & uint32(1)) * uint32(16)
        )
        if has_scales:  # both by rows of 16, and two steps
            value_place = key_place
        query_place = uint32(
            q_tile + (lane & uint32(7)) * uint32(pitch) + ((lane >> uint32(3)) & uint32(1)) * uint32(16)
        )
        # A lane's accumulators belong to two neighbouring queries of each group of 8, and to two keys or columns.
        query = uint32((lane & uint32(3)) * uint32(2))
        below = uint32(lane >> uint32(2))

        first_pages = cuda.local.array(pieces_of_tile, uint64)
        next_pages = cuda.local.array(pieces_of_tile, uint64)
        later_pages = cuda.local.array(pieces_of_tile, uint64)
        queries = cuda.local.array((query_registers, groups, 2), uint32)
        ends = cuda.local.array((groups, 2), uint32)
        maxima = cuda.local.array((groups, 2), float32)
        totals = cuda.local.array((groups, 2), float32)
        sums = cuda.local.array((steps, groups, 4), float32)
        pages, results = (first_pages, next_pages, later_pages), (sums, maxima, totals)
        columns = columns_of(caches, kv_head, num_kv_heads, lane)
        places = query_place, key_place, value_place, below, own_barrier

        has_results, has_segment, slot = False, True, uint32(FIRST_SLOT)
        while has_segment:
            # The next segment's first tiles are asked for, then the last segment's results written.
            has_segment, moved = read_segment(state, slot, query_start, seq_lens, share, window, run)
            _wait_for_copies()
            sync_named(own_barrier, uint32(32))  # all lanes have read the last tiles
            move(state, moved)
            if is_ahead and has_segment:
                keys, known, table, _ = begin(state, slot, share, table_width, window)
                locate(pages, block_tables, table, keys, num_kv_heads, lane)
                ask(own_stages, columns, pages, known, lane)
            if is_early:  # each time, as the number of segments is not known here
                wait_for_previous_grid()
                launch_dependents()
            if has_results:
                leave(uint32(own_stages + uint32(results_at)), sums, maxima, totals)
                sync_block()
                merge(scratch, tile_in(state, uint32(SLOTS - slot)), addresses, counts, kv_head, thread)
                if not is_ahead:
                    sync_block()
            if has_segment:
                keys, known, table, is_newest = begin(state, slot, share, table_width, window)
                _, _, _, first_token, first_row, rows = tile_in(state, slot)
                locate(pages, block_tables, table, keys, num_kv_heads, lane)
                if not is_ahead:
                    ask(own_stages, columns, pages, known, lane)
                if prepares:
                    prepare(q_tile, q, first_token, kv_head, counts, is_newest, of_heads, caches)
                else:
                    copy_queries(q_tile, q, (first_row, rows, share, kv_head, num_q_heads, first_token), thread)
                    copy_async_commit()
                    _wait_for_copies()
                sync_block()
                if has_results and thread == uint32(0):
                    count_in(scratch, uint32(0), tile_in(state, uint32(SLOTS - slot)), arrivals, num_kv_heads, kv_head)
                if known[3] != keys[3]:
                    _wait_for_copies()
                    if has_scales:  # what the block has stored is there now
                        ask(own_stages, columns, pages, keys, lane)
                    else:
                        row = uint32(q_tile + uint32(num_rows * pitch))
                        copy_newest(own_stages, row, uint32(known[3] - keys[0]), lane)
                if has_scales:
                    exchange(q_tile, thread)
                    sync_block()
                keep_queries(queries, query_place)
                _, query_len, seq_len, _, _ = segment_in(state, slot)
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
                last_row = uint32(minimum_u32(uint32(first_row + uint32(num_rows)), rows) - uint32(1))
                shortest_end = visible_end(seq_len, query_len, divide_u32(first_row, share))
                longest_end = visible_end(seq_len, query_len, divide_u32(last_row, share))
                walk(
                    results, queries, (pages, own_stages, columns), places, keys, (ends, shortest_end, longest_end),
                    (block_tables, table), (num_kv_heads, window, scale, lane),
                )  # fmt: skip
                slot, has_results = uint32(SLOTS - slot), True
        if has_results:
            sync_block()
            if thread == uint32(0):
                count_in(scratch, uint32(1), tile_in(state, uint32(SLOTS - slot)), arrivals, num_kv_heads, kv_head)
            sync_block()
            add_cut(scratch, addresses, counts, kv_head, thread)

    return attend


@functools.cache
def decode_tensor_core(
    dtype: str, head_dim: int, block_size: int, num_rows: int, variant: Variant, heads: HeadForm | None = None
) -> Specialisation:
    """Grid: (runs, KV heads). With `heads`, sequences have one token, at most `num_rows` query heads share a KV head,
    and q is qkv; `OF_HEADS` and eps follow the other arguments."""
    check_pages(head_dim, block_size, dtype)
    block = decode_block(dtype, head_dim, num_rows, variant.pages, prepares=heads is not None)
    attend, is_early = _attender(block, block_size, variant, heads), _is_early(variant, heads)

    @cuda.jit
    def kernel(
        q, k_cache, v_cache, out, workspace, arrivals, sinks, k_scales, v_scales, query_start, seq_lens, block_tables,
        bidirectional_until, num_q_heads, num_kv_heads, share, table_width, window, num_seqs, wanted, scale,
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        scratch, none = shared_address(cuda.shared.array(0, float32)), uint64(0)
        attend(
            scratch, (workspace, arrivals, q, out, sinks), (k_cache, v_cache, k_scales, v_scales),
            (query_start, seq_lens, block_tables), (num_q_heads, num_kv_heads, share, table_width),
            (window, num_seqs, wanted, scale), none,
        )  # fmt: skip

    @cuda.jit
    def preparing_kernel(
        qkv, k_cache, v_cache, out, workspace, arrivals, sinks, k_scales, v_scales, query_start, seq_lens, block_tables,
        bidirectional_until, num_q_heads, num_kv_heads, share, table_width, window, num_seqs, wanted, scale, positions,
        cos, sin, q_scales, norm_scales, q_norm, k_norm, slot_mapping, eps,
    ):  # fmt: skip
        if not is_early:
            wait_for_previous_grid()
            launch_dependents()
        scratch = shared_address(cuda.shared.array(0, float32))
        attend(
            scratch, (workspace, arrivals, qkv, out, sinks), (k_cache, v_cache, k_scales, v_scales),
            (query_start, seq_lens, block_tables), (num_q_heads, num_kv_heads, share, table_width),
            (window, num_seqs, wanted, scale),
            (positions, cos, sin, q_scales, norm_scales, q_norm, k_norm, slot_mapping, eps),
        )  # fmt: skip

    name = f"attention_decode_{dtype}_d{head_dim}_b{block_size}_r{num_rows}{variant.suffix}"
    constants = {
        "dtype": dtype, "head_dim": head_dim, "block_size": block_size, "num_rows": num_rows,
    } | asdict(variant)  # fmt: skip
    min_blocks = 0  # as many as Hopper's shared memory, or twice what half of its registers holds
    if block.columns <= 128:
        min_blocks = 3 if variant.pages else 2 * HALF_BLOCKS
    if heads is None:
        lacking = WIDE_SPILL_ON if block.columns * num_rows > 2048 else ()
        return Specialisation(name, kernel, ARGUMENT_TYPES, block.threads, min_blocks, constants, spills_on=lacking)
    name, constants = f"{name}_heads{heads.suffix}", heads.constants | constants
    return Specialisation(name, preparing_kernel, _argument_types(is_early), block.threads, min_blocks, constants)
