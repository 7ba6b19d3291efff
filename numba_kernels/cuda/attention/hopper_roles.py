"""The roles of a block of `flash_hopper`: one group of warps brings tiles, two compute."""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

from numba import cuda, float32, uint32, uint64

from numba_kernels.cuda.attention import segments
from numba_kernels.cuda.attention.hopper_softmax import (
    GROUP_THREADS,
    Held,
    Sight,
    exchanger,
    score_weigher,
    weight_keeper,
)
from numba_kernels.cuda.attention.hopper_tiles import (
    GROUP_ROWS,
    PANEL_COLUMNS,
    ROW_BYTES,
    HopperTiles,
    find_tile,
    page_bringer,
    query_bringer,
    row_storer,
    sign_flipper,
)
from numba_kernels.cuda.attention.hopper_walk import Group, key_walker, release, score_multiplier, value_multiplier
from numba_kernels.cuda.attention.online_softmax import (
    MINUS_INFINITY,
    group_sum,
    load_sink,
    reciprocal_of,
    share_of_keys,
)
from numba_kernels.cuda.attention.tiles import Variant, sink_head, visible_first
from numba_kernels.cuda.intrinsics import mbarrier, tma, wgmma
from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import absolute, divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.memory import shared_store_b32
from numba_kernels.cuda.intrinsics.sync import arrive_named, sync_named
from numba_kernels.cuda.intrinsics.warp import shuffle_index_b32, sync_warp

_SMALLEST_SCALE = float32(2.0**-126)  # below it -inf times the scale is no infinity; and all weights are equal


Given = namedtuple(
    "Given",
    "q k_cache v_cache out workspace sinks query_start seq_lens block_tables num_q_heads num_kv_heads share "
    "table_width window num_seqs most_keys scale tile_tokens",
)
"""The kernel's arguments that roles need, and the tokens of a tile of queries."""


Barriers = namedtuple("Barriers", "queries_full queries_empty landed keys_full keys_empty values_full values_empty")
"""Shared addresses: the first of each ring's, and those of the queries and of a tile with zeros."""


Tile = namedtuple("Tile", "item kv_head seq first_token query_len seq_len first")
"""A tile of a sequence's queries and a head; the sequence is num_seqs after the last one. See `find_tile`."""


@device_function
def take_tile(given, round_, lane):
    """The `Tile` that the block computes in its n-th round, each gridDim-th, to and fro so that no block has the longer
    of every pair."""
    size, place = uint32(cuda.gridDim.x), uint32(cuda.blockIdx.x)
    if uint32(round_ & uint32(1)) == uint32(1):
        place = uint32(uint32(size - uint32(1)) - place)
    item = uint32(round_ * size + place)
    row_tile = divide_u32(item, given.num_kv_heads)
    group = minimum_u32(given.most_keys, uint32(32))
    seq, first_token, query_len, seq_len, first = find_tile(
        given.query_start, given.seq_lens, given.num_seqs, given.tile_tokens, group, row_tile, lane
    )
    return Tile(item, uint32(item - row_tile * given.num_kv_heads), seq, first_token, query_len, seq_len, first)


@functools.cache
def _key_finder(tiles: HopperTiles, block_size: int, variant: Variant) -> Any:
    """A device function ``(given, tile)``: (first key, tiles of keys, first key that is seen, the shortest and the
    longest row's end) of a tile of queries."""
    end_of, has_window = segments.segment_end(variant.is_expanded), variant.has_window
    keys = tiles.num_keys

    @device_function
    def find_keys(given, tile):
        query_len, seq_len = tile.query_len, tile.seq_len
        num_tokens = minimum_u32(given.tile_tokens, uint32(query_len - tile.first))
        shortest_end = end_of(seq_len, query_len, tile.first, given.window, given.most_keys)
        last = uint32(tile.first + num_tokens - uint32(1))
        longest_end = end_of(seq_len, query_len, last, given.window, given.most_keys)
        first_seen = uint32(0)
        if has_window:
            first_seen = visible_first(shortest_end, given.window)
        first_key = uint32(first_seen // uint32(block_size) * uint32(block_size))
        num_tiles = uint32(0)
        if longest_end > first_key:
            num_tiles = uint32(uint32(longest_end - first_key + uint32(keys - 1)) // uint32(keys))
        return first_key, num_tiles, first_seen, shortest_end, longest_end

    return find_keys


@functools.cache
def tile_bringer(tiles: HopperTiles, block_size: int, variant: Variant) -> Any:
    """A device function ``(given, shared, barriers, tile, warp, lane)`` of the group that brings tiles, from this one
    on: warp 0 queries and keys, warp 1 values."""
    find_keys, is_expanded = _key_finder(tiles, block_size, variant), variant.is_expanded
    bring_queries, bring_keys = query_bringer(tiles), page_bringer(tiles, block_size, tiles.qk_panels, is_expanded)
    bring_values, is_even = page_bringer(tiles, block_size, tiles.v_panels, is_expanded), tiles.qk_dim == tiles.v_dim
    keys, keys_at, values_at = tiles.num_keys, tiles.keys_at, tiles.values_at

    @device_function
    def bring_tiles(given, shared, barriers, tile, warp, lane):
        round_, turn, num_done, landed_phase = uint32(0), uint32(0), uint32(0), uint32(0)
        while warp < uint32(2) and tile.seq < given.num_seqs:
            first_key, num_tiles, first_seen, _, longest_end = find_keys(given, tile)
            if num_tiles > uint32(0):
                source, ring = given.k_cache, uint32(shared + uint32(keys_at))
                full, empty = barriers.keys_full, barriers.keys_empty
                num_unwritten, unwritten = uint32(0), uint32(0)
                if warp == uint32(0):
                    rows = uint32(given.tile_tokens * given.share)
                    mbarrier.wait(barriers.queries_empty, uint32((num_done & uint32(1)) ^ uint32(1)))
                    first_head = uint32(tile.kv_head * given.share)
                    first_token = uint32(tile.first_token + tile.first)
                    bring_queries(shared, given.q, barriers.queries_full, rows, first_head, first_token, lane)
                else:
                    source, ring = given.v_cache, uint32(shared + uint32(values_at))
                    full, empty = barriers.values_full, barriers.values_empty
                    written = uint32(tile.seq_len & uint32(block_size - 1))  # of the last page
                    if not is_expanded and written > uint32(0) and longest_end > uint32(tile.seq_len - written):
                        num_unwritten = uint32(uint32(block_size) - written)
                        unwritten = uint32(tile.seq_len - first_key - uint32(num_tiles - uint32(1)) * uint32(keys))
                stop = uint32(turn + num_tiles)
                ring_of, seen = (ring, source, full, empty), (first_key, first_seen, longest_end)
                zeros = num_unwritten, unwritten, barriers.landed, landed_phase
                pages = given.block_tables, uint64(tile.seq) * uint64(given.table_width), tile.kv_head
                if is_even or warp == uint32(0):
                    bring_keys(ring_of, seen, zeros, pages, turn, stop, lane)
                else:
                    bring_values(ring_of, seen, zeros, pages, turn, stop, lane)
                if num_unwritten > uint32(0):
                    landed_phase = uint32(landed_phase ^ uint32(1))
                turn = stop
                num_done = uint32(num_done + uint32(1))
            round_ = uint32(round_ + uint32(1))
            tile = take_tile(given, round_, lane)

    return bring_tiles


@functools.cache
def _group_placer(tiles: HopperTiles) -> Any:
    """A device function ``(shared, keys_full, own, warp, lane)``: the lane's `Group`. Its accumulators belong to two
    rows, `upper` and eight below it, and to two neighbouring columns."""
    describe = wgmma.descriptor(ROW_BYTES, 8 * ROW_BYTES)
    describe_values = wgmma.descriptor(ROW_BYTES, 8 * ROW_BYTES, tiles.panel_bytes)
    keys_at, values_at, shares_rows, panel_bytes = tiles.keys_at, tiles.values_at, tiles.shares_rows, tiles.panel_bytes
    own_keys, own_panels = tiles.own_keys, tiles.own_panels

    @device_function
    def place_group(shared, keys_full, own, warp, lane):
        own_queries, place = shared, uint32((warp & uint32(3)) * uint32(16))
        keys_there, values_there = uint32(shared + uint32(keys_at)), uint32(shared + uint32(values_at))
        column = uint32((lane & uint32(3)) * uint32(2))
        if shares_rows:
            keys_there = uint32(keys_there + own * uint32(own_keys * ROW_BYTES))
            values_there = uint32(values_there + own * uint32(own_panels * panel_bytes))
            column = uint32(column + own * uint32(own_keys))
        else:
            own_queries = uint32(shared + own * uint32(GROUP_ROWS * ROW_BYTES))
            place = uint32(uint32(own * uint32(GROUP_ROWS)) + place)
        queries, key_tiles, value_tiles = describe(own_queries), describe(keys_there), describe_values(values_there)
        upper = uint32(place + (lane >> uint32(2)))
        return Group(own, lane, upper, column, place, own_queries, queries, key_tiles, value_tiles, keys_full)

    return place_group


@functools.cache
def _keys_walker(dtype: str, tiles: HopperTiles, variant: Variant) -> Any:
    """A device function ``(group, held, sight, barriers, turn, span, scale)`` that computes all of a tile's keys, but
    for the last tile's product with values, which it begins; `span` is (first key, tiles). It returns the turn after
    the last one."""
    stages, keys, shares_rows = tiles.stages, tiles.num_keys, tiles.shares_rows
    phase_shift, key_units, value_units = (
        stages.bit_length() - 1,
        tiles.key_tile_bytes >> 4,
        tiles.value_tile_bytes >> 4,
    )
    multiply_queries, multiply_values = score_multiplier(dtype, tiles), value_multiplier(dtype, tiles)
    wait_for_first, has_window, has_own_out = (
        wgmma.group_wait(0, tiles.own_keys // 2),
        variant.has_window,
        tiles.has_own_out,
    )
    weigh, keep_weights = score_weigher(tiles, "edges", variant), weight_keeper(dtype, tiles)
    walk_whole = key_walker(dtype, tiles, "none", variant)
    walk_edges = key_walker(dtype, tiles, "edges" if has_window else "all", variant)

    @device_function
    def walk_keys(group, held, sight, barriers, turn, span, scale):
        first_key, num_tiles = span
        origin, last = uint32(first_key - turn * uint32(keys)), uint32(turn + num_tiles)
        stage = uint32(turn & uint32(stages - 1))
        full = uint32(barriers.keys_full + stage * uint32(8))
        mbarrier.wait(full, uint32((turn >> uint32(phase_shift)) & uint32(1)))
        multiply_queries(held.scores, group.queries, wgmma.advance(group.key_tiles, stage * uint32(key_units)))
        wait_for_first(held.scores)
        release(uint32(barriers.keys_empty + stage * uint32(8)), group.lane)
        weigh(held, sight, first_key, group.column, scale)
        keep_weights(held.weights, held.scores, held.room, turn)
        turn = uint32(turn + uint32(1))
        if turn < last:
            full = uint32(barriers.keys_full + uint32(turn & uint32(stages - 1)) * uint32(8))
            mbarrier.wait(full, uint32((turn >> uint32(phase_shift)) & uint32(1)))
        if not has_window and sight.shortest_end > uint32(2 * keys):
            # Tiles that all rows see: their keys begin at 0.
            stop = uint32(uint32(turn - uint32(1)) + sight.shortest_end // uint32(keys))
            walk_whole(group, held, sight, turn, stop, last, origin, scale)
            turn = stop
        walk_edges(group, held, sight, turn, last, last, origin, scale)
        if has_own_out:
            release(barriers.queries_empty, group.lane)
        before = uint32(last - uint32(1))
        stage = uint32(before & uint32(stages - 1))
        full = uint32(barriers.values_full + stage * uint32(8))
        mbarrier.wait(full, uint32((before >> uint32(phase_shift)) & uint32(1)))
        if shares_rows:
            sync_named(uint32(1), uint32(2 * GROUP_THREADS))  # the other's weights are there
        values = wgmma.advance(group.value_tiles, stage * uint32(value_units))
        multiply_values(held.sums, held.weights, values, before)
        return last

    return walk_keys


@functools.cache
def _result_leaver(dtype: str, tiles: HopperTiles, variant: Variant) -> Any:
    """A device function ``(given, tile, group, held, out_tile, unit)`` that writes a tile's results, or carries them to
    the next segment; `unit` is that of a row's largest score."""
    shares_rows, has_sinks, is_expanded = tiles.shares_rows, variant.has_sinks, variant.is_expanded
    sum_count = tiles.own_panels * PANEL_COLUMNS // 2
    carry = segments.results_carrier(2, sum_count // 2, "flat", 2 * GROUP_THREADS, is_expanded)
    writes, exchange = segments.writes_out(is_expanded), exchanger(5)
    own_panels, panel_bytes = tiles.own_panels, tiles.query_panel_bytes
    store_rows = row_storer(tiles.v_dim, own_panels, panel_bytes, shares_rows)
    own_pieces, pack = 8 * own_panels if shares_rows else tiles.v_dim // 8, pack_bf16 if dtype == "bf16" else pack_f16

    @device_function
    def leave_results(given, tile, group, held, out_tile, unit):
        sums, totals, lane, own, share = held.sums, held.totals, group.lane, group.own, given.share
        flip = uint32((lane >> uint32(2)) * uint32(16))
        below = uint32(out_tile + group.upper * uint32(ROW_BYTES) + (lane & uint32(3)) * uint32(4))
        for row in range(2):
            totals[row] = group_sum(totals[row], 4)
        if shares_rows:
            below = uint32(below + own * uint32(own_panels * panel_bytes))
            upper_total, lower_total = exchange(held.room, totals[0], totals[1])
            totals[0] = totals[0] + upper_total
            totals[1] = totals[1] + lower_total
        thread = uint32(uint32(cuda.threadIdx.x) - uint32(GROUP_THREADS))
        carry(given.workspace, tile.item, thread, given.window, given.table_width, unit, sums, held.largest, totals)
        if writes(given.table_width):
            for row in range(2):
                part = reciprocal_of(totals[row])
                if has_sinks:
                    own_row = uint32(group.upper + uint32(8 * row))
                    sink = load_sink(given.sinks, sink_head(own_row, share, tile.kv_head))
                    part = share_of_keys(held.largest[row] * unit, totals[row], sink)
                for i in range(own_pieces):
                    at = uint32(below + uint32(row * 8 * ROW_BYTES + i // 8 * panel_bytes))
                    both = pack(sums[4 * i + 2 * row] * part, sums[4 * i + 2 * row + 1] * part)
                    shared_store_b32(uint32(at + uint32(uint32(i % 8 * 16) ^ flip)), both)
            sync_warp()
            num_rows = uint32(minimum_u32(given.tile_tokens, uint32(tile.query_len - tile.first)) * share)
            whose = uint32(tile.first * share), share, tile.kv_head, given.num_q_heads, tile.first_token
            store_rows(out_tile, given.out, group.place, num_rows, whose, lane, own)
            sync_warp()

    return leave_results


@functools.cache
def tile_computer(dtype: str, tiles: HopperTiles, block_size: int, variant: Variant) -> Any:
    """A device function ``(given, shared, barriers, tile, lane)`` of a group that computes tiles, from this one on."""
    stages, shares_rows, has_own_out, is_capped = (
        tiles.stages, tiles.shares_rows, tiles.has_own_out, variant.softcap > 0
    )  # fmt: skip
    score_count, sum_count = tiles.own_keys // 2, tiles.own_panels * PANEL_COLUMNS // 2
    weight_count, wait_for_sums = tiles.own_keys // 4, wgmma.group_wait(0, sum_count)
    describe, end_of = wgmma.descriptor(ROW_BYTES, 8 * ROW_BYTES), segments.segment_end(variant.is_expanded)
    find_keys, place_group = _key_finder(tiles, block_size, variant), _group_placer(tiles)
    walk_keys, leave_results = _keys_walker(dtype, tiles, variant), _result_leaver(dtype, tiles, variant)
    flip_signs, out_at, weights_at = sign_flipper(tiles, GROUP_ROWS), tiles.out_at, tiles.weights_at

    @device_function
    def compute_tiles(given, shared, barriers, tile, lane):
        thread = uint32(cuda.threadIdx.x)
        # So that ptxas knows it is uniform.
        own = shuffle_index_b32(uint32((thread >> uint32(7)) - uint32(1)), uint32(0))
        own_barrier, out_tile = uint32(own + uint32(3)), uint32(shared + uint32(out_at))
        group = place_group(shared, barriers.keys_full, own, thread >> uint32(5), lane)
        upper_token = divide_u32(group.upper, given.share)
        lower_token = divide_u32(uint32(group.upper + uint32(8)), given.share)
        magnitude = absolute(given.scale)
        if magnitude < _SMALLEST_SCALE:
            magnitude = _SMALLEST_SCALE
        unit = magnitude  # of a row's largest score
        if is_capped:
            unit = float32(1)
        scores, room = cuda.local.array(score_count, float32), cuda.local.array(4, uint32)
        room[0], room[1], room[2], room[3] = uint32(shared + uint32(weights_at)), group.upper, own, lane
        if shares_rows:
            weights = describe(room[0])
        else:
            weights = cuda.local.array(weight_count, uint32)
        sums = cuda.local.array(sum_count, float32)
        largest, totals = cuda.local.array(2, float32), cuda.local.array(2, float32)
        held = Held(scores, weights, sums, largest, totals, cuda.local.array(2, float32), room)
        if not shares_rows and own == uint32(1):
            arrive_named(uint32(1), uint32(2 * GROUP_THREADS))

        round_, turn, num_done = uint32(0), uint32(0), uint32(0)  # turns: tiles of keys that went through the rings
        while tile.seq < given.num_seqs:
            round_ = uint32(round_ + uint32(1))
            first_key, num_tiles, _, shortest_end, longest_end = find_keys(given, tile)
            upper, lower = uint32(tile.first + upper_token), uint32(tile.first + lower_token)
            upper_end = end_of(tile.seq_len, tile.query_len, upper, given.window, given.most_keys)
            lower_end = end_of(tile.seq_len, tile.query_len, lower, given.window, given.most_keys)
            sight = Sight(upper_end, lower_end, shortest_end, longest_end, given.window)
            for i in range(sum_count):
                sums[i] = float32(0)
            for row in range(2):
                largest[row] = MINUS_INFINITY
                totals[row] = float32(0)

            if num_tiles > uint32(0):
                mbarrier.wait(barriers.queries_full, uint32(num_done & uint32(1)))
                if given.scale < float32(0):
                    flip_signs(group.own_queries, uint32(thread & uint32(GROUP_THREADS - 1)))
                    tma.fence_shared()
                    sync_named(own_barrier, uint32(GROUP_THREADS))
                turn = walk_keys(group, held, sight, barriers, turn, (first_key, num_tiles), magnitude)
                following = take_tile(given, round_, lane)  # beside the last product
                wait_for_sums(sums)
                stage = uint32(uint32(turn - uint32(1)) & uint32(stages - 1))
                release(uint32(barriers.values_empty + stage * uint32(8)), lane)
                if not has_own_out:
                    sync_named(own_barrier, uint32(GROUP_THREADS))
            else:
                following = take_tile(given, round_, lane)
            leave_results(given, tile, group, held, out_tile, unit)
            tile = following
            if num_tiles > uint32(0):
                if not has_own_out:
                    tma.fence_shared()
                    release(barriers.queries_empty, lane)
                num_done = uint32(num_done + uint32(1))
        if not shares_rows and own == uint32(0):
            sync_named(uint32(1), uint32(2 * GROUP_THREADS))  # the other group's last leave

    return compute_tiles
