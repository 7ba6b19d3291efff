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
from collections import namedtuple
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.attention.hopper_softmax import GROUP_THREADS, sum_rescaler
from numba_kernels.cuda.attention.hopper_tiles import ALIGNMENT, PANEL_COLUMNS, ROW_BYTES, page_layout, row_storer
from numba_kernels.cuda.attention.hopper_walk import release
from numba_kernels.cuda.attention.online_softmax import (
    MINUS_INFINITY,
    group_sum,
    reciprocal_of,
)
from numba_kernels.cuda.attention.parts import part_finder, parts_combiner, record_place
from numba_kernels.cuda.attention.tiles import rows_of_tile, tile_shape, visible_end
from numba_kernels.cuda.intrinsics import mbarrier, tma, wgmma
from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.memory import (
    address_of,
    shared_address,
    shared_load_4xb32,
    shared_load_b32,
    shared_store_4xb32,
    shared_store_b32,
    store_2xf32,
)
from numba_kernels.cuda.intrinsics.sync import (
    launch_dependents,
    set_registers,
    sync_block,
    sync_named,
    wait_for_previous_grid,
)
from numba_kernels.cuda.intrinsics.warp import lane_index, shuffle_index_b32, sync_warp
from numba_kernels.cuda.latent.hopper_bytes import BRINGERS, byte_bringer, has_bytes
from numba_kernels.cuda.latent.hopper_steps import (
    NUM_KEYS,
    NUM_ROWS,
    PANEL_BYTES,
    PARTS,
    THREADS,
    Held,
    LatentPanels,
    Spot,
    empty_of,
    init_barriers,
    publish,
    read_statistics,
    scale_and_hide,
    tile_bringer,
    tile_multiplier,
    weight_sharers,
)
from numba_kernels.cuda.specialisation import TENSOR_MAP, Specialisation, TensorMapLayout

ARCH = "sm_90a"
ROTATED = PANEL_COLUMNS  # numbers of a row before its value
_NO_PAGE = 0xFFFFFFFF
_BOTH = 5  # a named barrier
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


Given = namedtuple("Given", "q pages out workspace arrivals block_tables num_heads table_width scale")
"""The kernel's arguments that roles need."""


Part = namedtuple("Part", "seq first_token seq_len rows first_row shortest_end first_key stop num_tiles")
"""A block's part of a sequence: its first token and length, its rows, the tile's first one and one past the last key
that this one sees, the part's first key, one past its last, and its tiles of keys."""


@functools.cache
def _bringer(value_dim: int, block_size: int, in_bytes: bool) -> Any:
    """A device function ``(given, part, shared, queries_full, thread, lane)`` of the group that brings queries and all
    tiles of a part."""
    panels = LatentPanels(value_dim)
    bring_bytes = byte_bringer(value_dim, block_size) if in_bytes else None
    bring_tile, pages_a_tile = tile_bringer(value_dim, block_size), NUM_KEYS // block_size
    count, tiles_at, tile_bytes = panels.panels, panels.tiles_at, panels.tile_bytes

    @device_function
    def bring(given, part, shared, queries_full, thread, lane):
        if thread < uint32(32) and part.num_tiles > uint32(0):
            if lane == uint32(0):
                mbarrier.arrive_expecting(queries_full, uint32(count * PANEL_BYTES))
            sync_warp()
            if lane < uint32(count):
                row = uint32(part.first_token * given.num_heads + part.first_row)
                target = uint32(shared + lane * uint32(PANEL_BYTES))
                _load_queries(target, given.q, queries_full, uint32(lane * uint32(PANEL_COLUMNS)), row)
        tiles, table = uint32(shared + uint32(tiles_at)), uint64(part.seq) * uint64(given.table_width)
        landed, full = uint32(queries_full + uint32(8)), uint32(queries_full + uint32(16))
        if in_bytes:
            entries = address_of(given.block_tables) + table * uint64(4)
            bring_bytes(given.pages, tiles, full, entries, part.first_key, part.stop, thread)
        elif thread < uint32(32):
            seq_len = part.seq_len
            written = uint32(seq_len & uint32(block_size - 1))  # of the last page
            index = uint32(0)
            while index < part.num_tiles:
                tile_key = uint32(part.first_key + index * uint32(NUM_KEYS))
                key = uint32(tile_key + lane % uint32(pages_a_tile) * uint32(block_size))
                page = uint32(_NO_PAGE)
                if key < part.stop:
                    page = uint32(given.block_tables[table + uint64(key // uint32(block_size))])
                num_unwritten = uint32(0)
                if written > uint32(0) and uint32(seq_len - written) < part.stop and (
                    uint32(tile_key + uint32(NUM_KEYS)) > seq_len
                ):  # fmt: skip
                    num_unwritten = uint32(uint32(block_size) - written)
                odd, phase = uint32(index & uint32(1)), uint32((index >> uint32(1)) & uint32(1))
                tile, is_full = uint32(tiles + odd * uint32(tile_bytes)), uint32(full + odd * uint32(8 * PARTS))
                unwritten = uint32(seq_len - tile_key), num_unwritten
                bring_tile(given.pages, (tile, is_full, landed, phase), page, unwritten, lane)
                index = uint32(index + uint32(1))

    return bring


@functools.cache
def _walkers(dtype: str, value_dim: int) -> tuple[Any, Any]:
    """Device functions ``(held, spot, part, shared, scale)`` of groups 0 and 1, which compute all tiles of a part."""
    panels = LatentPanels(value_dim)
    own_columns, tile_bytes, sum_count = panels.half * PANEL_COLUMNS, panels.tile_bytes, panels.sum_count
    add_own = wgmma.group_multiply(
        dtype, own_columns, 4, 0, 16 * ROW_BYTES, a_in_registers=True, b_is_transposed=True
    )  # fmt: skip
    add_other = wgmma.group_multiply(dtype, own_columns, 4, 32, 16 * ROW_BYTES, b_is_transposed=True)
    wait_for_sums = wgmma.group_wait(0, sum_count)
    describe = wgmma.descriptor(ROW_BYTES, 8 * ROW_BYTES)
    describe_values = wgmma.descriptor(ROW_BYTES, 8 * ROW_BYTES, PANEL_BYTES)
    multiply_tile, rescale = tile_multiplier(dtype, value_dim), sum_rescaler(sum_count)
    soften, hand_over, take_over = weight_sharers(dtype, sum_count)
    tiles_at, full_at, statistics_at = panels.tiles_at, panels.barriers_at + 16, panels.statistics_at
    first_of = (PANEL_BYTES, (1 + panels.half) * PANEL_BYTES)  # a group's columns in a tile

    @device_function
    def places(shared):
        """The tile, its first barrier and the largest scores, of even and of odd tiles."""
        tile, full = uint32(shared + uint32(tiles_at)), uint32(shared + uint32(full_at))
        statistics = uint32(shared + uint32(statistics_at))
        other = uint32(tile + uint32(tile_bytes)), uint32(full + uint32(8 * PARTS))
        return tile, full, statistics, *other, uint32(statistics + uint32(4 * NUM_ROWS))

    @device_function
    def walk_even(held, spot, part, shared, scale):
        sums, lane = held.sums, spot.lane
        even_tile, even_full, even_statistics, odd_tile, odd_full, odd_statistics = places(shared)
        index = uint32(0)
        while index < part.num_tiles:
            phase, key = uint32((index >> uint32(1)) & uint32(1)), uint32(part.first_key + index * uint32(NUM_KEYS))
            multiply_tile(held.scores, shared, even_tile, even_full, phase)
            scale_and_hide(held.scores, scale, key, part.shortest_end, held.ends, spot.column)
            soften(held)
            hand_over(held, 0, even_tile, even_statistics, spot)
            rescale(sums, held.factors)
            add_own(sums, held.weights, describe_values(uint32(even_tile + uint32(first_of[0]))), uint32(1))
            wait_for_sums(sums)
            release(uint32(empty_of(even_full) + uint32(8)), lane)
            if uint32(index + uint32(1)) < part.num_tiles:
                take_over(held, 1, odd_statistics, spot)
                mbarrier.wait(uint32(odd_full + uint32(8)), phase)
                add_other(sums, describe(odd_tile), describe_values(uint32(odd_tile + uint32(first_of[0]))), uint32(1))
                wait_for_sums(sums)
                release(empty_of(odd_full), lane)
                release(uint32(empty_of(odd_full) + uint32(8)), lane)
            index = uint32(index + uint32(2))

    @device_function
    def walk_odd(held, spot, part, shared, scale):
        sums, lane = held.sums, spot.lane
        even_tile, even_full, even_statistics, odd_tile, odd_full, odd_statistics = places(shared)
        index = uint32(1)
        while index <= part.num_tiles:  # without the last tile's pair there is no odd tile
            has_odd, key = index < part.num_tiles, uint32(part.first_key + index * uint32(NUM_KEYS))
            phase = uint32((index >> uint32(1)) & uint32(1))
            if has_odd:
                multiply_tile(held.scores, shared, odd_tile, odd_full, phase)
                scale_and_hide(held.scores, scale, key, part.shortest_end, held.ends, spot.column)
            take_over(held, 0, even_statistics, spot)
            mbarrier.wait(uint32(even_full + uint32(16)), phase)
            add_other(sums, describe(even_tile), describe_values(uint32(even_tile + uint32(first_of[1]))), uint32(1))
            if has_odd:
                soften(held)
                hand_over(held, 1, odd_tile, odd_statistics, spot)
            wait_for_sums(sums)
            release(empty_of(even_full), lane)
            release(uint32(empty_of(even_full) + uint32(16)), lane)
            if has_odd:
                rescale(sums, held.factors)
                add_own(sums, held.weights, describe_values(uint32(odd_tile + uint32(first_of[1]))), uint32(1))
                wait_for_sums(sums)
                release(uint32(empty_of(odd_full) + uint32(16)), lane)
            index = uint32(index + uint32(2))

    return walk_even, walk_odd


@functools.cache
def _result_leaver(dtype: str, value_dim: int) -> Any:
    """A device function ``(given, held, spot, shared, block)``: both groups write their results out, or records."""
    panels = LatentPanels(value_dim)
    own_columns, half, statistics_at = panels.half * PANEL_COLUMNS, panels.half, panels.statistics_at
    found_at, scratch_at, record_columns = panels.found_at, panels.scratch_at, tile_shape("f32", value_dim).columns
    place_of, pack = record_place(value_dim, NUM_ROWS), pack_bf16 if dtype == "bf16" else pack_f16
    combine = parts_combiner(dtype, value_dim, NUM_ROWS, 2 * GROUP_THREADS, False, _BOTH)
    store_rows = row_storer(value_dim, half, PANEL_BYTES, True)

    @device_function
    def leave(given, held, spot, shared, block):
        sums, largest, totals, own, num_heads = held.sums, held.largest, held.totals, spot.own, given.num_heads
        both, zero, one = uint32(2 * GROUP_THREADS), uint32(0), uint32(1)
        sync_named(uint32(_BOTH), both)  # both have read the last largest scores
        # Each group has its own part of a row's sum.
        for row in range(2):
            totals[row] = group_sum(totals[row], 4)
        publish(totals, uint32(shared + uint32(statistics_at) + own * uint32(4 * NUM_ROWS)), spot)
        sync_named(uint32(_BOTH), both)
        others = uint32(shared + uint32(statistics_at) + (own ^ one) * uint32(4 * NUM_ROWS))
        read_statistics(others, spot.upper, held.highest)
        found = uint32(shared + uint32(found_at))
        part, num_parts, first_token, first_row = shared_load_4xb32(found)
        rows = shared_load_b32(uint32(found + uint32(16)))
        first_column = uint32(own * uint32(own_columns) + spot.column)
        results = uint32(shared + uint32(PANEL_BYTES))  # which take the queries' place
        own_results = uint32(results + own * uint32(half * PANEL_BYTES))
        for row in range(2):
            own_row = uint32(spot.upper + uint32(8 * row))
            total = totals[row] + held.highest[row]
            if num_parts > one:
                if uint32(first_row + own_row) < rows:
                    record = place_of(given.workspace, block, zero, one, own_row)
                    if own == zero and spot.lane & uint32(3) == zero:
                        store_2xf32(record + uint64(4 * record_columns), (largest[row], total))
                    for i in range(own_columns // 8):
                        at = record + uint64(uint32(uint32(first_column + uint32(8 * i)) * uint32(4)))
                        store_2xf32(at, (sums[4 * i + 2 * row], sums[4 * i + 2 * row + 1]))
            else:
                share = reciprocal_of(total)
                below = uint32(own_results + own_row * uint32(ROW_BYTES) + spot.column * uint32(2))
                for i in range(own_columns // 8):
                    at = uint32(below + uint32(i // 8 * PANEL_BYTES))
                    swizzled = uint32((uint32(i % 8) ^ (own_row & uint32(7))) * uint32(16))
                    two = pack(sums[4 * i + 2 * row] * share, sums[4 * i + 2 * row + 1] * share)
                    shared_store_b32(uint32(at + swizzled), two)
        if num_parts > one:
            thread = uint32(uint32(cuda.threadIdx.x) - uint32(GROUP_THREADS))
            own_tile = block, part, num_parts, first_token, first_row, rows
            addresses = given.workspace, given.arrivals, uint64(0), given.out, uint64(0)
            counts = num_heads, one, num_heads, zero
            combine(uint32(shared + uint32(scratch_at)), own_tile, addresses, counts, zero, thread)
        else:
            sync_warp()
            whose = first_row, num_heads, zero, num_heads, first_token
            place = uint32(spot.warp * uint32(16))
            store_rows(results, given.out, place, uint32(rows - first_row), whose, spot.lane, own)

    return leave


@functools.cache
def latent_hopper(dtype: str, value_dim: int, block_size: int, pages: str = "") -> Specialisation:
    """Grid: the parts of all sequences, as `parts` bounds them. Arguments: see `planning.LatentPlan.arguments`."""
    panels, in_bytes = LatentPanels(value_dim), pages != ""
    score_count, sum_count, weight_count = NUM_KEYS // 2, panels.sum_count, NUM_KEYS // 4
    find = part_finder(NUM_ROWS, NUM_KEYS, THREADS, False)
    barriers_at, found_at, scratch_at = panels.barriers_at, panels.found_at, panels.scratch_at
    give_registers, take_registers = (_give_some, _take_some) if in_bytes else (_give_registers, _take_registers)
    bringers = BRINGERS if in_bytes else 1  # arrivals at a part that is full
    bring, leave = _bringer(value_dim, block_size, in_bytes), _result_leaver(dtype, value_dim)
    walk_even, walk_odd = _walkers(dtype, value_dim)

    @cuda.jit
    def kernel(
        q, pages, out, workspace, arrivals, query_start, seq_lens, block_tables, num_heads, table_width, num_seqs,
        wanted, scale,
    ):  # fmt: skip
        storage = cuda.shared.array(0, uint32)
        shared = uint32((shared_address(storage) + uint32(ALIGNMENT - 1)) & uint32(0xFFFFFFFF - ALIGNMENT + 1))
        thread = uint32(cuda.threadIdx.x)
        lane = lane_index()
        queries_full = uint32(shared + uint32(barriers_at))
        if thread == uint32(0):
            tma.prefetch_map(q)
            if not in_bytes:
                tma.prefetch_map(pages)
            init_barriers(queries_full, bringers)
        sync_block()
        wait_for_previous_grid()
        launch_dependents()
        block = uint32(cuda.blockIdx.x)
        seq, tile, part, num_parts, _first_key, part_keys, first_token, query_len, seq_len = find(
            uint32(shared + uint32(scratch_at)), (query_start, seq_lens, num_seqs), num_heads, uint32(0), wanted, block,
            thread,
        )  # fmt: skip
        if seq >= num_seqs:
            return
        rows, first_row, shortest_end, longest_end = rows_of_tile(tile, NUM_ROWS, seq_len, query_len, num_heads)
        first_key = uint32(part * part_keys)
        stop = minimum_u32(uint32(first_key + part_keys), longest_end)
        num_tiles = uint32(0)
        if stop > first_key:
            num_tiles = uint32(uint32(stop - first_key + uint32(NUM_KEYS - 1)) // uint32(NUM_KEYS))
        group = shuffle_index_b32(uint32(thread >> uint32(7)), uint32(0))
        given = Given(q, pages, out, workspace, arrivals, block_tables, num_heads, table_width, scale)
        own_part = Part(seq, first_token, seq_len, rows, first_row, shortest_end, first_key, stop, num_tiles)

        if group == uint32(0):
            give_registers()
            bring(given, own_part, shared, queries_full, thread, lane)
        else:
            take_registers()
            own, warp = uint32(group - uint32(1)), uint32((thread >> uint32(5)) & uint32(3))
            upper = uint32(warp * uint32(16) + (lane >> uint32(2)))
            spot = Spot(own, warp, lane, upper, uint32((lane & uint32(3)) * uint32(2)))
            scores = cuda.local.array(score_count, float32)
            weights = cuda.local.array(weight_count, uint32)
            sums = cuda.local.array(sum_count, float32)
            largest, highest = cuda.local.array(2, float32), cuda.local.array(2, float32)
            totals, factors = cuda.local.array(2, float32), cuda.local.array(2, float32)
            ends = cuda.local.array(2, uint32)
            held = Held(scores, weights, sums, largest, highest, totals, factors, ends)
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
            if num_tiles > uint32(0):
                mbarrier.wait(queries_full, uint32(0))
            if own == uint32(0):
                walk_even(held, spot, own_part, shared, scale)
            else:
                walk_odd(held, spot, own_part, shared, scale)
            leave(given, held, spot, shared, block)

    return _specialisation(kernel, dtype, value_dim, block_size, pages)
