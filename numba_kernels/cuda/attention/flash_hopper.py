"""Flash attention on Hopper's tensor cores (sm_90a), f16 and bf16: `wgmma` fed by the TMA, softmax beside products.

The mathematics of `flash_tensor_core`, arranged as in FlashAttention-3 (https://arxiv.org/abs/2407.08608). A block has
128 rows of queries, of wide heads 64, and three groups of four warps. The first brings tiles by TMA, its warp 0 queries
and keys, its warp 1 values, as far ahead as the rings have room (`hopper_tiles`), and leaves its registers to the other
two, which compute 64 rows each, or half of the columns of the same 64 (`hopper_walk`). A block goes on to other tiles
of queries and heads: their queries, keys and values come while results of the one before are still on their way out.

Scores stay unscaled: exp2(scale s - scale max) is one fused multiply-add and one exponential. Where the scale is
negative the queries change their sign once. Sums of a row come in another order than in `flash_tensor_core`, and
tiles begin at the first page that is seen: a row's last bits may depend on its chunk and its batch.
"""

from __future__ import annotations

import functools
from dataclasses import asdict

from numba import cuda, float32, uint32, uint64

from numba_kernels.cuda.attention import segments
from numba_kernels.cuda.attention.hopper_softmax import GROUP_THREADS, exchanger, score_weigher, weight_keeper
from numba_kernels.cuda.attention.hopper_tiles import (
    ALIGNMENT,
    GROUP_ROWS,
    PANEL_COLUMNS,
    ROW_BYTES,
    expanded_layout,
    find_tile,
    hopper_tiles,
    page_bringer,
    page_layout,
    query_bringer,
    query_layout,
    row_storer,
    row_zeroer,
    sign_flipper,
)
from numba_kernels.cuda.attention.hopper_walk import (
    key_walker,
    release,
    score_multiplier,
    value_multiplier,
)
from numba_kernels.cuda.attention.online_softmax import (
    MINUS_INFINITY,
    group_sum,
    load_sink,
    reciprocal_of,
    share_of_keys,
)
from numba_kernels.cuda.attention.tiles import (
    ARGUMENT_TYPES,
    Variant,
    sink_head,
    visible_first,
)
from numba_kernels.cuda.intrinsics import mbarrier, tma, wgmma
from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import absolute, divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.memory import shared_address, shared_store_b32
from numba_kernels.cuda.intrinsics.sync import (
    arrive_named,
    launch_dependents,
    set_registers,
    sync_block,
    sync_named,
    wait_for_previous_grid,
)
from numba_kernels.cuda.intrinsics.warp import lane_index, shuffle_index_b32, sync_warp
from numba_kernels.cuda.kv_cache import MAX_HEAD_DIM, check_pages
from numba_kernels.cuda.specialisation import TENSOR_MAP, Launch, Specialisation

ARCH = "sm_90a"
THREADS = 3 * GROUP_THREADS
_CONSUMER_WARPS = 8
_MOST_SHARED = 232_448  # bytes of a block
_SMALLEST_SCALE = float32(2.0**-126)  # below it -inf times the scale is no infinity; and all weights are equal

_give_registers = set_registers(56, is_more=False)
_take_registers = set_registers(224, is_more=True)


def has_kernel(dtype: str, qk_dim: int, v_dim: int, share: int, block_size: int) -> bool:
    """Whether the TMA can walk over heads of this type and size, `share` of them fit into a tile, a warp's lanes
    request all of a tile's pages, and results fit in a tile of their own or in the queries' place."""
    tiles = hopper_tiles(qk_dim, v_dim)
    return (
        dtype != "f32" and all(dim % 8 == 0 and 8 <= dim <= MAX_HEAD_DIM for dim in (qk_dim, v_dim))
        and share <= tiles.num_rows and tiles.num_keys // block_size * max(tiles.qk_panels, tiles.v_panels) <= 32
        and (tiles.has_own_out or tiles.v_panels <= tiles.qk_panels)
        and (qk_dim == v_dim or not tiles.shares_rows) and tiles.shared_bytes <= _MOST_SHARED
    )  # fmt: skip


def plan(
    dtype: str,
    block_size: int,
    variant: Variant,
    *,
    num_tokens: int,
    num_seqs: int,
    max_query_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_blocks: int,
    num_sms: int,
) -> Launch:
    """The launch for a batch, as `planning.plan`; `num_blocks` is the cache's."""
    share, tiles = num_q_heads // num_kv_heads, hopper_tiles(head_dim, head_dim)
    pages = page_layout(dtype, head_dim, block_size, num_kv_heads, num_blocks)
    maps = (0, query_layout(dtype, tiles, num_q_heads, share, num_tokens)), (1, pages), (2, pages)
    tile_tokens = tiles.num_rows // share
    most_tiles = min(num_seqs * -(-max_query_len // tile_tokens), num_seqs + num_tokens // tile_tokens)
    grid = min(num_sms, num_kv_heads * most_tiles), 1, 1
    kernel = flash_hopper(dtype, head_dim, head_dim, block_size, variant)
    return Launch(kernel, grid, (THREADS, 1, 1), tiles.shared_bytes, maps=maps)


def plan_expanded(
    dtype: str, qk_dim: int, v_dim: int, *, num_tokens: int, query_len: int, num_heads: int, num_rows: int, num_sms: int
) -> tuple[Launch, int]:
    """The launch for one sequence's segment of `num_rows` expanded rows (`segments`), and bytes of its results."""
    tiles = hopper_tiles(qk_dim, v_dim)
    keys, values = (
        expanded_layout(dtype, columns, qk_dim + v_dim, segments.BLOCK_SIZE, num_heads, num_rows)
        for columns in (qk_dim, v_dim)
    )
    maps = (0, query_layout(dtype, tiles, num_heads, 1, num_tokens)), (1, keys), (2, values)
    kernel = flash_hopper(dtype, qk_dim, v_dim, segments.BLOCK_SIZE, Variant(is_expanded=True))
    items = -(-query_len // tiles.num_rows) * num_heads
    launch = Launch(kernel, (min(num_sms, items), 1, 1), (THREADS, 1, 1), tiles.shared_bytes, maps=maps)
    return launch, segments.state_bytes(items, tiles.own_panels * PANEL_COLUMNS // 2, 2, 2 * GROUP_THREADS)


@functools.cache
def flash_hopper(dtype: str, qk_dim: int, v_dim: int, block_size: int, variant: Variant) -> Specialisation:
    """The kernel for pages of `block_size` tokens. Grid: as many blocks as the device has multiprocessors, or fewer."""
    for head_dim in (qk_dim, v_dim):
        check_pages(head_dim, block_size, dtype)
    tiles = hopper_tiles(qk_dim, v_dim)
    keys, stages = tiles.num_keys, tiles.stages
    phase_shift = stages.bit_length() - 1
    own_panels, own_keys, shares_rows, tile_rows = tiles.own_panels, tiles.own_keys, tiles.shares_rows, tiles.num_rows
    score_count, sum_count, weight_count = own_keys // 2, own_panels * PANEL_COLUMNS // 2, own_keys // 4
    multiply_queries, multiply_values = score_multiplier(dtype, tiles), value_multiplier(dtype, tiles)
    wait_for_first = wgmma.group_wait(0, score_count)
    wait_for_sums = wgmma.group_wait(0, sum_count)
    describe = wgmma.descriptor(ROW_BYTES, 8 * ROW_BYTES)
    describe_values = wgmma.descriptor(ROW_BYTES, 8 * ROW_BYTES, tiles.panel_bytes)
    bring_queries, is_expanded = query_bringer(tiles), variant.is_expanded
    bring_keys = page_bringer(tiles, block_size, tiles.qk_panels, is_expanded)
    bring_values, is_even = page_bringer(tiles, block_size, tiles.v_panels, is_expanded), qk_dim == v_dim
    end_of, writes = segments.segment_end(is_expanded), segments.writes_out(is_expanded)
    carry = segments.results_carrier(2, sum_count // 2, "flat", 2 * GROUP_THREADS, is_expanded)
    zero_rows, flip_signs, store_rows = row_zeroer(tiles, THREADS), sign_flipper(tiles, GROUP_ROWS), row_storer(tiles)
    has_window, has_sinks, is_capped = variant.has_window, variant.has_sinks, variant.softcap > 0
    weigh, keep_weights, exchange = score_weigher(tiles, "edges", variant), weight_keeper(dtype, tiles), exchanger(5)
    walk_whole = key_walker(dtype, tiles, "none", variant)
    walk_edges = key_walker(dtype, tiles, "edges" if has_window else "all", variant)
    pack = pack_bf16 if dtype == "bf16" else pack_f16
    keys_at, values_at, barriers_at = tiles.keys_at, tiles.values_at, tiles.barriers_at
    key_tile_bytes, value_tile_bytes = tiles.key_tile_bytes, tiles.value_tile_bytes
    out_at, has_own_out, weights_at, panel_bytes = tiles.out_at, tiles.has_own_out, tiles.weights_at, tiles.panel_bytes
    own_pieces = 8 * own_panels if shares_rows else v_dim // 8
    ring_bytes, query_panel_bytes = 8 * stages, tiles.query_panel_bytes

    @device_function
    def item_of(round_):
        size = uint32(cuda.gridDim.x)
        place = uint32(cuda.blockIdx.x)
        if uint32(round_ & uint32(1)) == uint32(1):
            place = uint32(uint32(size - uint32(1)) - place)
        return uint32(round_ * size + place)

    @device_function
    def sight(query_len, seq_len, first, tile_tokens, window, most):
        """(first key, tiles of keys, first key that is seen, shortest and longest row's end) of a tile of queries."""
        num_tokens = minimum_u32(tile_tokens, uint32(query_len - first))
        shortest_end = end_of(seq_len, query_len, first, window, most)
        longest_end = end_of(seq_len, query_len, uint32(first + num_tokens - uint32(1)), window, most)
        first_seen = uint32(0)
        if has_window:
            first_seen = visible_first(shortest_end, window)
        first_key = uint32(first_seen // uint32(block_size) * uint32(block_size))
        num_tiles = uint32(0)
        if longest_end > first_key:
            num_tiles = uint32(uint32(longest_end - first_key + uint32(keys - 1)) // uint32(keys))
        return first_key, num_tiles, first_seen, shortest_end, longest_end

    @cuda.jit
    def kernel(
        q, k_cache, v_cache, out, workspace, arrivals, sinks, k_scales, v_scales, query_start, seq_lens, block_tables,
        bidirectional_until, num_q_heads, num_kv_heads, share, table_width, window, num_seqs, workspace_columns, scale,
    ):  # fmt: skip
        storage = cuda.shared.array(0, uint32)
        shared = uint32((shared_address(storage) + uint32(ALIGNMENT - 1)) & uint32(0xFFFFFFFF - ALIGNMENT + 1))
        out_tile = uint32(shared + uint32(out_at))
        queries_full = uint32(shared + uint32(barriers_at))
        queries_empty = uint32(queries_full + uint32(8))
        landed = uint32(queries_full + uint32(16))
        keys_full = uint32(queries_full + uint32(24))
        keys_empty = uint32(keys_full + uint32(ring_bytes))
        values_full = uint32(keys_full + uint32(2 * ring_bytes))
        values_empty = uint32(keys_full + uint32(3 * ring_bytes))
        thread = uint32(cuda.threadIdx.x)
        lane = lane_index()
        if thread == uint32(0):
            tma.prefetch_map(q)
            tma.prefetch_map(k_cache)
            tma.prefetch_map(v_cache)
            mbarrier.init(queries_full, uint32(1))
            mbarrier.init(queries_empty, uint32(_CONSUMER_WARPS))
            mbarrier.init(landed, uint32(1))
            for stage in range(stages):
                mbarrier.init(uint32(keys_full + uint32(8 * stage)), uint32(1))
                mbarrier.init(uint32(keys_empty + uint32(8 * stage)), uint32(_CONSUMER_WARPS))
                mbarrier.init(uint32(values_full + uint32(8 * stage)), uint32(1))
                mbarrier.init(uint32(values_empty + uint32(8 * stage)), uint32(_CONSUMER_WARPS))
            mbarrier.fence_init()
        tile_tokens = divide_u32(uint32(tile_rows), share)
        zero_rows(shared, uint32(tile_tokens * share), thread)
        tma.fence_shared()
        sync_block()
        wait_for_previous_grid()

        # Every block takes each gridDim-th tile and head, to and fro so that none has the longer of every pair.
        round_ = uint32(0)
        item = uint32(cuda.blockIdx.x)
        row_tile = divide_u32(item, num_kv_heads)
        seq, first_token, query_len, seq_len, first = find_tile(
            query_start, seq_lens, num_seqs, tile_tokens, row_tile, lane
        )
        turn = uint32(0)  # tiles of keys that went through the rings
        num_done = uint32(0)  # tiles of queries

        group = uint32(thread >> uint32(7))
        if group == uint32(0):
            _give_registers()
            warp = uint32(thread >> uint32(5))
            landed_phase = uint32(0)
            while warp < uint32(2) and seq < num_seqs:
                kv_head = uint32(item - row_tile * num_kv_heads)
                first_key, num_tiles, first_seen, shortest_end, longest_end = sight(
                    query_len, seq_len, first, tile_tokens, window, workspace_columns
                )
                if num_tiles > uint32(0):
                    source = k_cache
                    ring = uint32(shared + uint32(keys_at))
                    full = keys_full
                    empty = keys_empty
                    num_unwritten = uint32(0)
                    unwritten = uint32(0)
                    if warp == uint32(0):
                        rows = uint32(tile_tokens * share)
                        mbarrier.wait(queries_empty, uint32((num_done & uint32(1)) ^ uint32(1)))
                        bring_queries(
                            shared, q, queries_full, rows, uint32(kv_head * share), uint32(first_token + first), lane
                        )
                    else:
                        source = v_cache
                        ring = uint32(shared + uint32(values_at))
                        full = values_full
                        empty = values_empty
                        written = uint32(seq_len & uint32(block_size - 1))  # of the last page
                        if not is_expanded and written > uint32(0) and longest_end > uint32(seq_len - written):
                            num_unwritten = uint32(uint32(block_size) - written)
                            unwritten = uint32(seq_len - first_key - uint32(num_tiles - uint32(1)) * uint32(keys))
                    stop = uint32(turn + num_tiles)
                    if is_even or warp == uint32(0):
                        bring_keys(
                            ring, source, full, empty, landed, landed_phase, turn, stop, first_key, first_seen,
                            longest_end, num_unwritten, unwritten, block_tables, uint64(seq) * uint64(table_width),
                            kv_head, lane,
                        )  # fmt: skip
                    else:
                        bring_values(
                            ring, source, full, empty, landed, landed_phase, turn, stop, first_key, first_seen,
                            longest_end, num_unwritten, unwritten, block_tables, uint64(seq) * uint64(table_width),
                            kv_head, lane,
                        )  # fmt: skip
                    if num_unwritten > uint32(0):
                        landed_phase = uint32(landed_phase ^ uint32(1))
                    turn = stop
                    num_done = uint32(num_done + uint32(1))
                round_ = uint32(round_ + uint32(1))
                item = item_of(round_)
                row_tile = divide_u32(item, num_kv_heads)
                seq, first_token, query_len, seq_len, first = find_tile(
                    query_start, seq_lens, num_seqs, tile_tokens, row_tile, lane
                )
            launch_dependents()
        else:
            _take_registers()
            own = shuffle_index_b32(uint32(group - uint32(1)), uint32(0))  # so that ptxas knows it is uniform
            own_barrier = uint32(own + uint32(3))
            own_queries = shared
            place = uint32(uint32((thread >> uint32(5)) & uint32(3)) * uint32(16))
            own_keys_at = uint32(shared + uint32(keys_at))
            own_values_at = uint32(shared + uint32(values_at))
            column = uint32((lane & uint32(3)) * uint32(2))
            if shares_rows:
                own_keys_at = uint32(own_keys_at + own * uint32(own_keys * ROW_BYTES))
                own_values_at = uint32(own_values_at + own * uint32(own_panels * panel_bytes))
                column = uint32(column + own * uint32(own_keys))
            else:
                own_queries = uint32(shared + own * uint32(GROUP_ROWS * ROW_BYTES))
                place = uint32(uint32(own * uint32(GROUP_ROWS)) + place)
            # A lane's accumulators belong to two rows, `upper` and eight below it, and to two neighbouring columns.
            upper = uint32(place + (lane >> uint32(2)))
            upper_token = divide_u32(upper, share)
            lower_token = divide_u32(uint32(upper + uint32(8)), share)
            magnitude = absolute(scale)
            if magnitude < _SMALLEST_SCALE:
                magnitude = _SMALLEST_SCALE
            unit = magnitude  # of a row's largest score
            if is_capped:
                unit = float32(1)
            queries = describe(own_queries)
            key_tiles = describe(own_keys_at)
            value_tiles = describe_values(own_values_at)

            scores = cuda.local.array(score_count, float32)
            room = cuda.local.array(4, uint32)
            room[0] = uint32(shared + uint32(weights_at))
            room[1] = upper
            room[2] = own
            room[3] = lane
            if shares_rows:
                weights = describe(room[0])
            else:
                weights = cuda.local.array(weight_count, uint32)
            sums = cuda.local.array(sum_count, float32)
            largest = cuda.local.array(2, float32)
            totals = cuda.local.array(2, float32)
            factors = cuda.local.array(2, float32)
            if not shares_rows and own == uint32(1):
                arrive_named(uint32(1), uint32(2 * GROUP_THREADS))

            while seq < num_seqs:
                kv_head, own_item = uint32(item - row_tile * num_kv_heads), item
                round_ = uint32(round_ + uint32(1))
                first_row = uint32(first * share)
                num_rows = uint32(minimum_u32(tile_tokens, uint32(query_len - first)) * share)
                chunk_first = first_token
                first_key, num_tiles, first_seen, shortest_end, longest_end = sight(
                    query_len, seq_len, first, tile_tokens, window, workspace_columns
                )
                upper_end = end_of(seq_len, query_len, uint32(first + upper_token), window, workspace_columns)
                lower_end = end_of(seq_len, query_len, uint32(first + lower_token), window, workspace_columns)
                for i in range(sum_count):
                    sums[i] = float32(0)
                for row in range(2):
                    largest[row] = MINUS_INFINITY
                    totals[row] = float32(0)

                if num_tiles > uint32(0):
                    mbarrier.wait(queries_full, uint32(num_done & uint32(1)))
                    if scale < float32(0):
                        flip_signs(own_queries, uint32(thread & uint32(GROUP_THREADS - 1)))
                        tma.fence_shared()
                        sync_named(own_barrier, uint32(GROUP_THREADS))
                    origin = uint32(first_key - turn * uint32(keys))
                    last = uint32(turn + num_tiles)
                    stage = uint32(turn & uint32(stages - 1))
                    mbarrier.wait(
                        uint32(keys_full + stage * uint32(8)), uint32((turn >> uint32(phase_shift)) & uint32(1))
                    )
                    multiply_queries(scores, queries, wgmma.advance(key_tiles, stage * uint32(key_tile_bytes >> 4)))
                    wait_for_first(scores)
                    release(uint32(keys_empty + stage * uint32(8)), lane)
                    weigh(
                        scores, largest, totals, factors, upper_end, lower_end, first_key, column, window, magnitude,
                        shortest_end, longest_end, room,
                    )  # fmt: skip
                    keep_weights(weights, scores, room, turn)
                    turn = uint32(turn + uint32(1))
                    if turn < last:
                        stage = uint32(turn & uint32(stages - 1))
                        mbarrier.wait(
                            uint32(keys_full + stage * uint32(8)), uint32((turn >> uint32(phase_shift)) & uint32(1))
                        )
                    if not has_window and shortest_end > uint32(2 * keys):
                        # Tiles that all rows see: their keys begin at 0.
                        stop = uint32(uint32(turn - uint32(1)) + shortest_end // uint32(keys))
                        walk_whole(
                            turn, stop, last, origin, queries, key_tiles, value_tiles, keys_full, own, lane, column,
                            upper_end, lower_end, shortest_end, longest_end, window, magnitude, scores, weights, sums,
                            largest, totals, factors, room,
                        )  # fmt: skip
                        turn = stop
                    walk_edges(
                        turn, last, last, origin, queries, key_tiles, value_tiles, keys_full, own, lane, column,
                        upper_end, lower_end, shortest_end, longest_end, window, magnitude, scores, weights, sums,
                        largest, totals, factors, room,
                    )  # fmt: skip
                    if has_own_out:
                        release(queries_empty, lane)
                    turn = last
                    before = uint32(last - uint32(1))
                    stage = uint32(before & uint32(stages - 1))
                    mbarrier.wait(
                        uint32(values_full + stage * uint32(8)), uint32((before >> uint32(phase_shift)) & uint32(1))
                    )
                    if shares_rows:
                        sync_named(uint32(1), uint32(2 * GROUP_THREADS))  # the other's weights are there
                    multiply_values(
                        sums, weights, wgmma.advance(value_tiles, stage * uint32(value_tile_bytes >> 4)), before
                    )
                    following = item_of(round_)
                    following_tile = divide_u32(following, num_kv_heads)
                    # The next tile is looked up beside the last product.
                    seq, first_token, query_len, seq_len, first = find_tile(
                        query_start, seq_lens, num_seqs, tile_tokens, following_tile, lane
                    )
                    wait_for_sums(sums)
                    release(uint32(values_empty + stage * uint32(8)), lane)
                    if not has_own_out:
                        sync_named(own_barrier, uint32(GROUP_THREADS))
                else:
                    following = item_of(round_)
                    following_tile = divide_u32(following, num_kv_heads)
                    seq, first_token, query_len, seq_len, first = find_tile(
                        query_start, seq_lens, num_seqs, tile_tokens, following_tile, lane
                    )
                item = following
                row_tile = following_tile

                flip = uint32((lane >> uint32(2)) * uint32(16))
                below = uint32(out_tile + upper * uint32(ROW_BYTES) + (lane & uint32(3)) * uint32(4))
                for row in range(2):
                    totals[row] = group_sum(totals[row], 4)
                if shares_rows:
                    below = uint32(below + own * uint32(own_panels * query_panel_bytes))
                    upper_total, lower_total = exchange(room, totals[0], totals[1])
                    totals[0] = totals[0] + upper_total
                    totals[1] = totals[1] + lower_total
                consumer = uint32(thread - uint32(GROUP_THREADS))
                carry(workspace, own_item, consumer, window, table_width, unit, sums, largest, totals)
                if writes(table_width):
                    for row in range(2):
                        total = totals[row]
                        part = reciprocal_of(total)
                        if has_sinks:
                            sink = load_sink(sinks, sink_head(uint32(upper + uint32(8 * row)), share, kv_head))
                            part = share_of_keys(largest[row] * unit, total, sink)
                        for i in range(own_pieces):
                            at = uint32(below + uint32(row * 8 * ROW_BYTES + i // 8 * query_panel_bytes))
                            both = pack(sums[4 * i + 2 * row] * part, sums[4 * i + 2 * row + 1] * part)
                            shared_store_b32(uint32(at + uint32(uint32(i % 8 * 16) ^ flip)), both)
                    sync_warp()
                    store_rows(
                        out_tile, out, place, num_rows, first_row, share, kv_head, num_q_heads, chunk_first, lane, own
                    )  # fmt: skip
                    sync_warp()
                if num_tiles > uint32(0):
                    if not has_own_out:
                        tma.fence_shared()
                        release(queries_empty, lane)
                    num_done = uint32(num_done + uint32(1))
            if not shares_rows and own == uint32(0):
                sync_named(uint32(1), uint32(2 * GROUP_THREADS))  # the other group's last leave

    sizes = f"d{qk_dim}" if is_even else f"d{qk_dim}_v{v_dim}"
    name = f"attention_flash_hopper_{dtype}_{sizes}_b{block_size}{variant.suffix}"
    constants = {
        "dtype": dtype, "head_dim": qk_dim, "v_dim": v_dim, "block_size": block_size, "num_rows": tile_rows,
        "num_keys": keys,
    } | asdict(variant)  # fmt: skip
    arguments = (TENSOR_MAP, TENSOR_MAP, TENSOR_MAP, *ARGUMENT_TYPES[3:])
    return Specialisation(
        name, kernel, arguments, THREADS, min_blocks=1, constants=constants, min_capability=90,
        needs_arch_features=True,
    )  # fmt: skip
