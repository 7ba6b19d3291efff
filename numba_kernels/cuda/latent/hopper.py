"""Latent attention by Hopper's `wgmma` (sm_90a), f16 and bf16: 64 rows of queries a block, for many heads or tokens.

Rows and parts as in `tensor_core`. One warp brings latent rows by TMA, two tiles of 64 at a time in panels of 64
columns; two groups of four warps take turns on them. The rows' sums are half of a multiprocessor's registers, so that
each group has half of the value's columns, and group 0 the scores of the even tiles, group 1 those of the odd ones:

    group 0:  Sa = Q Ka^T   Pa = exp2(Sa)             O0 += Pa Va0   O0 += Pb Vb0
    group 1:  Sb = Q Kb^T   O1 += Pa Va1   Pb = exp2(Sb) beside it   O1 += Pb Vb1

Weights go to the other group through shared memory, with the rows' largest scores: they take the place of the tile's
rotated numbers, which only scores need. Both groups add tile after tile, so that their sums are measured from the same
largest score. A part of a tile (rotated numbers, each group's columns) is given back as soon as its last product has
read it. https://github.com/deepseek-ai/FlashMLA describes such turns.

Rows of fp8 are read and widened by four warps (`hopper_bytes`).
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.attention.hopper_softmax import weight_packer
from numba_kernels.cuda.attention.hopper_tiles import ALIGNMENT, PANEL_COLUMNS, ROW_BYTES, page_layout
from numba_kernels.cuda.attention.online_softmax import (
    MINUS_INFINITY,
    group_sum,
    reciprocal_of,
)
from numba_kernels.cuda.attention.parts import part_finder, parts_combiner, record_place
from numba_kernels.cuda.attention.tiles import rows_of_tile, tile_shape, visible_end
from numba_kernels.cuda.intrinsics import mbarrier, tma, wgmma
from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.memory import (
    address_of,
    shared_address,
    shared_load_4xb32,
    shared_load_b32,
    shared_store_4xb32,
    shared_store_b32,
    shared_store_f32,
    store_2xf32,
)
from numba_kernels.cuda.intrinsics.sync import (
    arrive_named,
    launch_dependents,
    set_registers,
    sync_block,
    sync_named,
    wait_for_previous_grid,
)
from numba_kernels.cuda.intrinsics.warp import lane_index, shuffle_index_b32, sync_warp
from numba_kernels.cuda.latent.hopper_bytes import BRINGERS, byte_bringer, has_bytes
from numba_kernels.cuda.latent.hopper_steps import (
    GROUP_THREADS,
    NUM_KEYS,
    NUM_ROWS,
    PANEL_BYTES,
    PARTS,
    THREADS,
    LatentPanels,
    empty_of,
    find_highest,
    init_barriers,
    publish,
    raise_largest,
    read_statistics,
    release,
    result_copier,
    scale_and_hide,
    sum_rescaler,
    tile_bringer,
    tile_multiplier,
    weigh,
)
from numba_kernels.cuda.specialisation import TENSOR_MAP, Specialisation, TensorMapLayout

ARCH = "sm_90a"
ROTATED = PANEL_COLUMNS  # numbers of a row before its value
_NO_PAGE = 0xFFFFFFFF
_WEIGHTS_READY, _SCORED, _BOTH = 1, 3, 5  # named barriers, the first ones for each group
_give_registers, _take_registers = set_registers(40, is_more=False), set_registers(232, is_more=True)
_give_some, _take_some = set_registers(96, is_more=False), set_registers(208, is_more=True)
_load_queries = tma.load(2)


def has_kernel(dtype: str, width: int, value_dim: int, block_size: int, pages: str) -> bool:
    """Whether rows of these sizes are whole panels, shared out among two groups, which registers hold."""
    halves, rest = divmod(value_dim, 2 * PANEL_COLUMNS)
    if pages and not has_bytes(dtype, value_dim, block_size):
        return False
    return dtype != "f32" and width - value_dim == ROTATED and rest == 0 and halves in (1, 2, 4)


def map_layouts(
    dtype: str, width: int, num_rows: int, block_size: int, num_blocks: int, pages: str
) -> tuple[tuple[int, TensorMapLayout], ...]:
    """The maps of q, as rows of all tokens and heads, and of the pages unless they are of bytes."""
    queries = TensorMapLayout(dtype, (width, num_rows), (width * 2,), (PANEL_COLUMNS, NUM_ROWS), ROW_BYTES)
    if pages:
        return ((0, queries),)
    return (0, queries), (1, page_layout(dtype, width, block_size, 1, num_blocks))


def _specialisation(kernel: Any, dtype: str, value_dim: int, block_size: int, pages: str) -> Specialisation:
    name = f"latent_hopper_{dtype}_v{value_dim}_b{block_size}{f'_{pages}' if pages else ''}"
    constants = {
        "dtype": dtype, "width": ROTATED + value_dim, "value_dim": value_dim, "block_size": block_size,
        "shared_bytes": LatentPanels(value_dim).shared_bytes, "pages": pages,
    }  # fmt: skip
    pointer = types.CPointer(types.int32)
    arguments = (
        TENSOR_MAP, types.uint64 if pages else TENSOR_MAP, *(types.uint64,) * 3, *(pointer,) * 3, *(types.uint32,) * 4,
        types.float32,
    )  # fmt: skip
    return Specialisation(
        name, kernel, arguments, THREADS, min_blocks=1, constants=constants, min_capability=90,
        needs_arch_features=True,
    )  # fmt: skip


@functools.cache
def latent_hopper(dtype: str, value_dim: int, block_size: int, pages: str = "") -> Specialisation:
    """Grid: the parts of all sequences, as `parts` bounds them. Arguments: see `planning.LatentPlan.arguments`."""
    panels = LatentPanels(value_dim)
    half, count, tile_bytes = panels.half, panels.panels, panels.tile_bytes
    own_columns = half * PANEL_COLUMNS
    score_count, sum_count, weight_count = NUM_KEYS // 2, own_columns // 2, NUM_KEYS // 4
    add_own = wgmma.group_multiply(
        dtype, own_columns, 4, 0, 16 * ROW_BYTES, a_in_registers=True, b_is_transposed=True
    )  # fmt: skip
    add_other = wgmma.group_multiply(dtype, own_columns, 4, 32, 16 * ROW_BYTES, b_is_transposed=True)
    wait_for_sums = wgmma.group_wait(0, sum_count)
    describe = wgmma.descriptor(ROW_BYTES, 8 * ROW_BYTES)
    describe_values = wgmma.descriptor(ROW_BYTES, 8 * ROW_BYTES, PANEL_BYTES)
    find = part_finder(NUM_ROWS, NUM_KEYS, THREADS, False)
    place_of = record_place(value_dim, NUM_ROWS)
    combine = parts_combiner(dtype, value_dim, NUM_ROWS, 2 * GROUP_THREADS, False, _BOTH)
    record_columns = tile_shape("f32", value_dim).columns
    pack, pack_weights = pack_bf16 if dtype == "bf16" else pack_f16, weight_packer(dtype, NUM_KEYS)
    pages_a_tile = NUM_KEYS // block_size
    tiles_at, barriers_at, statistics_at, found_at, scratch_at = (
        panels.tiles_at, panels.barriers_at, panels.statistics_at, panels.found_at, panels.scratch_at
    )  # fmt: skip
    first_of = (PANEL_BYTES, (1 + half) * PANEL_BYTES)  # a group's columns in a tile
    statistics_of = (statistics_at, statistics_at + 4 * NUM_ROWS)

    in_bytes = pages != ""
    bring_bytes = byte_bringer(value_dim, block_size) if in_bytes else None
    bring_tile, multiply_tile = tile_bringer(value_dim, block_size), tile_multiplier(dtype, value_dim)
    give_registers, take_registers = (_give_some, _take_some) if in_bytes else (_give_registers, _take_registers)
    bringers = BRINGERS if in_bytes else 1  # arrivals at a part that is full
    rescale, copy_results = sum_rescaler(sum_count), result_copier(value_dim)

    @cuda.jit
    def kernel(
        q, pages, out, workspace, arrivals, query_start, seq_lens, block_tables, num_heads, table_width, num_seqs,
        wanted, scale,
    ):  # fmt: skip
        storage = cuda.shared.array(0, uint32)
        shared = uint32((shared_address(storage) + uint32(ALIGNMENT - 1)) & uint32(0xFFFFFFFF - ALIGNMENT + 1))
        thread = uint32(cuda.threadIdx.x)
        lane = lane_index()
        tiles = uint32(shared + uint32(tiles_at))
        queries_full = uint32(shared + uint32(barriers_at))
        landed = uint32(queries_full + uint32(8))
        full = uint32(queries_full + uint32(16))
        scratch = uint32(shared + uint32(scratch_at))
        if thread == uint32(0):
            tma.prefetch_map(q)
            if not in_bytes:
                tma.prefetch_map(pages)
            init_barriers(queries_full, landed, full, bringers)
        sync_block()
        wait_for_previous_grid()
        launch_dependents()
        block = uint32(cuda.blockIdx.x)
        seq, tile, part, num_parts, _first_key, part_keys, first_token, query_len, seq_len = find(
            scratch, query_start, seq_lens, num_seqs, num_heads, uint32(0), wanted, block, thread
        )
        if seq >= num_seqs:
            return
        rows, first_row, shortest_end, longest_end = rows_of_tile(tile, NUM_ROWS, seq_len, query_len, num_heads)
        first_key = uint32(part * part_keys)
        stop = minimum_u32(uint32(first_key + part_keys), longest_end)
        num_tiles = uint32(0)
        if stop > first_key:
            num_tiles = uint32(uint32(stop - first_key + uint32(NUM_KEYS - 1)) // uint32(NUM_KEYS))
        group = shuffle_index_b32(uint32(thread >> uint32(7)), uint32(0))

        if group == uint32(0):
            give_registers()
            if thread < uint32(32) and num_tiles > uint32(0):
                if lane == uint32(0):
                    mbarrier.arrive_expecting(queries_full, uint32(count * PANEL_BYTES))
                sync_warp()
                if lane < uint32(count):
                    _load_queries(
                        uint32(shared + lane * uint32(PANEL_BYTES)), q, queries_full,
                        uint32(lane * uint32(PANEL_COLUMNS)), uint32(first_token * num_heads + first_row),
                    )  # fmt: skip
            table = uint64(seq) * uint64(table_width)
            if in_bytes:
                entries = address_of(block_tables) + table * uint64(4)
                bring_bytes(pages, tiles, full, entries, first_key, stop, thread)
            elif thread < uint32(32):
                written = uint32(seq_len & uint32(block_size - 1))  # of the last page
                index = uint32(0)
                while index < num_tiles:
                    tile_key = uint32(first_key + index * uint32(NUM_KEYS))
                    key = uint32(tile_key + lane % uint32(pages_a_tile) * uint32(block_size))
                    page = uint32(_NO_PAGE)
                    if key < stop:
                        page = uint32(block_tables[table + uint64(key // uint32(block_size))])
                    num_unwritten = uint32(0)
                    if written > uint32(0) and uint32(seq_len - written) < stop and (
                        uint32(tile_key + uint32(NUM_KEYS)) > seq_len
                    ):  # fmt: skip
                        num_unwritten = uint32(uint32(block_size) - written)
                    odd = uint32(index & uint32(1))
                    bring_tile(
                        pages, uint32(tiles + odd * uint32(tile_bytes)), uint32(full + odd * uint32(8 * PARTS)),
                        landed, uint32((index >> uint32(1)) & uint32(1)), uint32(0), page, lane,
                        uint32(seq_len - tile_key), num_unwritten,
                    )  # fmt: skip
                    index = uint32(index + uint32(1))
        else:
            take_registers()
            own = uint32(group - uint32(1))
            warp = uint32((thread >> uint32(5)) & uint32(3))
            # A lane's accumulators belong to two rows, `upper` and eight below it, and to two neighbouring columns.
            upper = uint32(warp * uint32(16) + (lane >> uint32(2)))
            column = uint32((lane & uint32(3)) * uint32(2))
            scores = cuda.local.array(score_count, float32)
            weights = cuda.local.array(weight_count, uint32)
            sums = cuda.local.array(sum_count, float32)
            largest = cuda.local.array(2, float32)
            highest = cuda.local.array(2, float32)
            totals = cuda.local.array(2, float32)
            factors = cuda.local.array(2, float32)
            ends = cuda.local.array(2, uint32)
            for row in range(2):
                own_row = uint32(first_row + upper + uint32(8 * row))
                ends[row] = visible_end(seq_len, query_len, divide_u32(own_row, num_heads))
                largest[row] = MINUS_INFINITY
                totals[row] = float32(0)
            for i in range(sum_count):
                sums[i] = float32(0)
            if thread == uint32(GROUP_THREADS):
                found = uint32(shared + uint32(found_at))
                shared_store_4xb32(found, (part, num_parts, first_token, first_row))
                shared_store_b32(uint32(found + uint32(16)), rows)
            both = uint32(2 * GROUP_THREADS)
            if num_tiles > uint32(0):
                mbarrier.wait(queries_full, uint32(0))

            index = uint32(0)
            while index < num_tiles:
                phase = uint32((index >> uint32(1)) & uint32(1))
                even_full, odd_full = full, uint32(full + uint32(8 * PARTS))
                even_tile, odd_tile = tiles, uint32(tiles + uint32(tile_bytes))
                key = uint32(first_key + index * uint32(NUM_KEYS))
                has_odd = uint32(index + uint32(1)) < num_tiles
                if own == uint32(0):
                    multiply_tile(scores, shared, even_tile, even_full, phase)
                    scale_and_hide(scores, scale, key, shortest_end, ends, column)
                    find_highest(scores, largest, highest)
                    raise_largest(largest, totals, factors, highest)
                    weigh(scores, largest, totals)
                    pack_weights(weights, scores)
                    sync_named(uint32(_SCORED), uint32(GROUP_THREADS))
                    publish(weights, largest, even_tile, uint32(shared + uint32(statistics_of[0])), upper, lane)
                    arrive_named(uint32(_WEIGHTS_READY), both)
                    rescale(sums, factors)
                    add_own(sums, weights, describe_values(uint32(even_tile + uint32(first_of[0]))), uint32(1))
                    wait_for_sums(sums)
                    release(uint32(empty_of(even_full) + uint32(8)), lane)
                    if has_odd:
                        sync_named(uint32(_WEIGHTS_READY + 1), both)
                        read_statistics(uint32(shared + uint32(statistics_of[1])), upper, highest)
                        raise_largest(largest, totals, factors, highest)
                        rescale(sums, factors)
                        mbarrier.wait(uint32(odd_full + uint32(8)), phase)
                        values = describe_values(uint32(odd_tile + uint32(first_of[0])))
                        add_other(sums, describe(odd_tile), values, uint32(1))
                        wait_for_sums(sums)
                        release(empty_of(odd_full), lane)
                        release(uint32(empty_of(odd_full) + uint32(8)), lane)
                else:
                    if has_odd:
                        multiply_tile(scores, shared, odd_tile, odd_full, phase)
                        scale_and_hide(scores, scale, uint32(key + uint32(NUM_KEYS)), shortest_end, ends, column)
                    sync_named(uint32(_WEIGHTS_READY), both)
                    read_statistics(uint32(shared + uint32(statistics_of[0])), upper, highest)
                    raise_largest(largest, totals, factors, highest)
                    rescale(sums, factors)
                    mbarrier.wait(uint32(even_full + uint32(16)), phase)
                    values = describe_values(uint32(even_tile + uint32(first_of[1])))
                    add_other(sums, describe(even_tile), values, uint32(1))
                    if has_odd:
                        find_highest(scores, largest, highest)
                        raise_largest(largest, totals, factors, highest)
                        weigh(scores, largest, totals)
                        pack_weights(weights, scores)
                        sync_named(uint32(_SCORED + 1), uint32(GROUP_THREADS))
                        publish(weights, largest, odd_tile, uint32(shared + uint32(statistics_of[1])), upper, lane)
                        arrive_named(uint32(_WEIGHTS_READY + 1), both)
                    wait_for_sums(sums)
                    release(empty_of(even_full), lane)
                    release(uint32(empty_of(even_full) + uint32(16)), lane)
                    if has_odd:
                        rescale(sums, factors)
                        values = describe_values(uint32(odd_tile + uint32(first_of[1])))
                        add_own(sums, weights, values, uint32(1))
                        wait_for_sums(sums)
                        release(uint32(empty_of(odd_full) + uint32(16)), lane)
                index = uint32(index + uint32(2))
            sync_named(uint32(_BOTH), both)  # both have read the last largest scores

            # Each group has its own part of a row's sum.
            own_statistics = uint32(shared + uint32(statistics_at) + own * uint32(4 * NUM_ROWS))
            other_statistics = uint32(shared + uint32(statistics_at) + (own ^ uint32(1)) * uint32(4 * NUM_ROWS))
            own_first = uint32((uint32(1) + own * uint32(half)) * uint32(PANEL_BYTES))
            for row in range(2):
                total = group_sum(totals[row], 4)
                totals[row] = total
                if lane & uint32(3) == uint32(0):
                    shared_store_f32(uint32(own_statistics + uint32(upper + uint32(8 * row)) * uint32(4)), total)
            sync_named(uint32(_BOTH), both)
            read_statistics(other_statistics, upper, highest)
            found = uint32(shared + uint32(found_at))
            part, num_parts, first_token, first_row = shared_load_4xb32(found)
            rows = shared_load_b32(uint32(found + uint32(16)))
            first_column = uint32(own * uint32(own_columns) + column)
            own_queries = uint32(shared + own_first)
            for row in range(2):
                own_row = uint32(upper + uint32(8 * row))
                total = totals[row] + highest[row]
                if num_parts > uint32(1):
                    if uint32(first_row + own_row) < rows:
                        record = place_of(workspace, block, uint32(0), uint32(1), own_row)
                        if own == uint32(0) and lane & uint32(3) == uint32(0):
                            store_2xf32(record + uint64(4 * record_columns), (largest[row], total))
                        for i in range(own_columns // 8):
                            at = record + uint64(uint32(uint32(first_column + uint32(8 * i)) * uint32(4)))
                            store_2xf32(at, (sums[4 * i + 2 * row], sums[4 * i + 2 * row + 1]))
                else:  # results take the queries' place
                    share = reciprocal_of(total)
                    below = uint32(own_queries + own_row * uint32(ROW_BYTES) + column * uint32(2))
                    for i in range(own_columns // 8):
                        at = uint32(below + uint32(i // 8 * PANEL_BYTES))
                        swizzled = uint32((uint32(i % 8) ^ (own_row & uint32(7))) * uint32(16))
                        two = pack(sums[4 * i + 2 * row] * share, sums[4 * i + 2 * row + 1] * share)
                        shared_store_b32(uint32(at + swizzled), two)
            if num_parts > uint32(1):
                combine(
                    scratch, workspace, arrivals, out, uint64(0), block, part, num_parts, uint32(0), uint32(1),
                    num_heads, num_heads, first_token, first_row, rows, uint32(thread - uint32(GROUP_THREADS)),
                )  # fmt: skip
            else:
                sync_warp()
                copy_results(own_queries, out, uint32(first_token * num_heads), first_row, rows, own, warp, lane)

    return _specialisation(kernel, dtype, value_dim, block_size, pages)
