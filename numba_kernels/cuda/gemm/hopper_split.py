"""Hopper, few tiles: the sum over K split among the blocks of a cluster. Lesson: distributed shared memory.

An output of few tiles leaves most multiprocessors idle. Here each tile is a cluster's: each of its 2 to 8 blocks
multiplies a run of K, all of them the same tile, and leaves its sums in its own shared memory, where its stages were.
Then each block finishes some of the tile's rows: it reads their parts from all blocks, adds them in the blocks' order,
and stores them. A thread has four columns of `ROWS_AT_ONCE` rows in flight, since other blocks' shared memory, and a
residual, are far. There is no workspace in device memory, no second launch, and no atomic: the same bits each time.

The producer's idle warps compute the scales of the rows that their block finishes. For a gated unit a tile has
as many columns of the gate as of up.

The split depends on (M, N, K) and on how many clusters the device runs at once.
"""

from __future__ import annotations

import functools

from numba import cuda, types

from numba_kernels.cuda.gemm.epilogue import (
    ARGUMENT_TYPES,
    can_finish_quads,
    finisher,
    product_kernel,
    quad_gater,
    scale_each,
    scale_quad,
    scales_leaver,
    squares_leaver,
)
from numba_kernels.cuda.gemm.hopper_ring import BLOCK_K, Ring, Tile, ring_starter, tile_loader, tile_multiplier
from numba_kernels.cuda.gemm.hopper_unpack import dense_unpacker, slots_ahead
from numba_kernels.cuda.gemm.weight_stream import packed_stream
from numba_kernels.cuda.intrinsics import cluster, memory, mma, tma
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import quad_loader, quad_storer
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.sync import (
    launch_dependents,
    sync_block,
    sync_named,
    wait_for_previous_grid,
)
from numba_kernels.cuda.intrinsics.warp import shuffle_index_b32, sync_warp
from numba_kernels.cuda.packing import packing_of
from numba_kernels.cuda.specialisation import TENSOR_MAP, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

MAX_PARTS = 8
ROWS_AT_ONCE = 4
LEAST_STEPS = 4  # stages least of a block: below, filling the ring takes longer than using it


@device_function
def _sum_parts(values, places, parts):
    """Sums of all blocks, 4 neighbours at each place."""
    loaded = cuda.local.array((ROWS_AT_ONCE, 4), float32)
    for i in range(ROWS_AT_ONCE):
        quad = cluster.load_4xf32(cluster.address_in(places[i], uint32(0)))
        for e in range(4):
            values[i, e] = quad[e]
    part = uint32(1)
    while part < parts:
        for i in range(ROWS_AT_ONCE):
            quad = cluster.load_4xf32(cluster.address_in(places[i], part))
            for e in range(4):
                loaded[i, e] = quad[e]
        for i in range(ROWS_AT_ONCE):
            for e in range(4):
                values[i, e] += loaded[i, e]
        part = uint32(part + uint32(1))


@functools.cache
def kernel(dtype: str, out_dtype: str, tile: Tile, activation: str = "", weight_name: str = "") -> Specialisation:
    """The shape of a tile without clusters; the launch's cluster is the number of parts, each of at least one stage,
    or, for a packed weight, `weight_name`, one slot."""
    block_m, block_n, num_stages, x_bytes = tile.block_m, tile.block_n, tile.num_stages, tile.x_bytes
    barriers_at, num_consumers, num_sums = tile.pieces_at, tile.num_consumers, tile.block_n // 2
    is_gated, gate_quad = activation != "", quad_gater(activation) if activation else None
    columns = block_n // 2 if is_gated else block_n  # of the output, a tile
    quads = columns // 4
    pass_rows = 128 * num_consumers // quads  # that all threads have four columns of
    assert is_gated or quads % 32 == 0  # so that a warp adds up squares of a row
    producers, is_packed, unpack_tile, row_scales_of = tile.producers, weight_name != "", None, None
    unit_steps = 1  # stages at whose multiples K is split
    if is_packed:
        packing = packing_of(weight_name)
        assert packing is not None
        unpack_tile = dense_unpacker(tile, weight_name, dtype, is_gated)
        row_scales_of = packed_stream(packing, dtype, is_gated, slots_ahead(tile, packing)).row_scales
        unit_steps = packing.slot // BLOCK_K
    scales_at, leave_scales, leave_squares = tile.scales_at, scales_leaver(8), squares_leaver(128, 32)
    start_ring, multiply_tile = ring_starter(tile), tile_multiplier(dtype, tile)
    ask_ahead, load_tile, _ = tile_loader(tile, is_gated=is_gated)
    finish, load_bias, load_residual = finisher(dtype, out_dtype), quad_loader(dtype), quad_loader(out_dtype)
    load_bias_f32, store_quad = memory.load_4xf32, quad_storer(out_dtype)
    bias_bytes, out_bytes = ITEM_BYTES[dtype], ITEM_BYTES[out_dtype]
    store_pair, flip_of = memory.shared_store_2xf32, mma.accumulator_flip(block_n)

    @device_function
    def multiply(given):
        x, weight, m, n, k = given.x, given.weight, given.m, given.n, given.k
        bias, residual, out = given.bias, given.residual, given.out
        shared = uint32((memory.shared_address(cuda.shared.array(0, uint32)) + uint32(1023)) & uint32(0xFFFFFC00))
        full = uint32(shared + uint32(barriers_at))
        empty = uint32(full + uint32(8 * num_stages))
        thread = uint32(cuda.threadIdx.x)
        lane, warp = thread & uint32(31), shuffle_index_b32(thread >> uint32(5), uint32(0))  # ptxas sees: one a warp
        if thread == uint32(0):
            tma.prefetch_map(x)
            if not is_packed:
                tma.prefetch_map(weight)
            start_ring(full, empty)
        sync_block()

        rank, parts = cluster.rank(), cluster.size()
        tiles_m = uint32((m + uint32(block_m - 1)) // uint32(block_m))
        index = divide_u32(uint32(cuda.blockIdx.x), parts)
        column_tile = divide_u32(index, tiles_m)
        first_row = uint32((index - column_tile * tiles_m) * uint32(block_m))
        first_column = uint32(column_tile * uint32(columns))
        row, last = divide_u32(uint32(block_m) * rank, parts), divide_u32(uint32(block_m) * (rank + 1), parts)
        scales = uint32(shared + uint32(scales_at))  # of the rows that this block finishes
        num_steps = uint32((k + uint32(BLOCK_K - 1)) // uint32(BLOCK_K))
        if is_packed:
            num_units = uint32((num_steps + uint32(unit_steps - 1)) // uint32(unit_steps))
            start = uint32(divide_u32(uint32(num_units * rank), parts) * uint32(unit_steps))
            end = uint32(divide_u32(uint32(num_units * (rank + 1)), parts) * uint32(unit_steps))
            end = minimum_u32(end, num_steps)
        else:
            start = divide_u32(uint32(num_steps * rank), parts)
            end = divide_u32(uint32(num_steps * (rank + 1)), parts)
        ring = Ring(shared, full, empty)
        if warp < uint32(producers):
            first, last_k = uint32(start * uint32(BLOCK_K)), uint32(end * uint32(BLOCK_K))
            if is_packed:
                at, place = (uint32(0), uint32(1), (uint32(0), uint32(0))), (first_row, first_column, n, k)
                unpack_tile(x, weight, ring, at, warp, lane, place, (first, minimum_u32(last_k, k)))
                launch_dependents()
                rows, first = uint32(last - row), uint32(first_row + row)
                leave_scales(given, scales, first, rows, warp, uint32(producers), lane)
                cluster.release_shared()
            elif thread == uint32(0):
                num_asked = ask_ahead(weight, ring, uint32(0), first_column, n, first, last_k)
                wait_for_previous_grid()
                at, place = (uint32(0), uint32(1), num_asked), (uint32(0), first_row, first_column, n)
                load_tile(x, weight, ring, at, place, (first, last_k))
                launch_dependents()
            elif warp > uint32(0):
                wait_for_previous_grid()
                rows, first = uint32(last - row), uint32(first_row + row)
                leave_scales(given, scales, first, rows, uint32(warp - uint32(1)), uint32(3), lane)
                cluster.release_shared()
            sync_warp()
            cluster.arrive_relaxed()
            cluster.wait()
        else:
            wait_for_previous_grid()
            warp = uint32(warp - uint32(producers))
            x_part = uint32(shared + (warp >> uint32(2)) * uint32(64 * BLOCK_K * 2))
            weight_part = uint32(shared + uint32(x_bytes))
            sums = cuda.local.array(num_sums, float32)
            at, num_steps = (uint32(0), uint32(0)), uint32(end - start)
            multiply_tile(sums, (x_part, weight_part), ring, at, lane, num_steps)
            sync_named(uint32(1), uint32(128 * num_consumers))  # all have read the stages
            own_row = uint32(warp * uint32(16) + (lane >> uint32(2)))
            pair = uint32(shared + (own_row * uint32(block_n) + (lane & uint32(3)) * uint32(2)) * uint32(4))
            flip = uint32(flip_of(own_row) * uint32(4))
            for i in range(block_n // 8):
                at = uint32(pair + (uint32(i * 32) ^ flip))
                store_pair(at, (sums[4 * i], sums[4 * i + 1]))
                store_pair(uint32(at + uint32(8 * block_n * 4)), (sums[4 * i + 2], sums[4 * i + 3]))
            cluster.release_shared()
            cluster.arrive_relaxed()
            cluster.wait()
            values, ups = cuda.local.array((ROWS_AT_ONCE, 4), float32), cuda.local.array((ROWS_AT_ONCE, 4), float32)
            places, before = cuda.local.array(ROWS_AT_ONCE, uint32), cuda.local.array((ROWS_AT_ONCE, 4), float32)
            added = (float32(0.0), float32(0.0), float32(0.0), float32(0.0))
            of_columns, of_ups = added, added
            number = uint32(warp * uint32(32) + lane)
            column = uint32(number % uint32(quads) * uint32(4))
            at_column = uint32(first_column + column)
            is_by_quads, is_inside = can_finish_quads(given), at_column < n
            if is_packed and is_inside:
                row_scales = row_scales_of(weight, n, k) + uint64(at_column) * uint64(4)
                of_columns = memory.load_4xf32(row_scales)
                if is_gated:
                    of_ups = memory.load_4xf32(row_scales + uint64(n) * uint64(4))
            if is_by_quads and is_inside and bias != uint64(0):
                if given.bias_is_f32 != uint32(0):
                    added = load_bias_f32(bias + uint64(at_column) * uint64(4))
                else:
                    added = load_bias(bias + uint64(at_column) * uint64(bias_bytes))
            first_finished, last = row, minimum_u32(last, uint32(m - first_row))
            row = uint32(row + number // uint32(quads))
            while row < last:
                for i in range(ROWS_AT_ONCE):
                    each = minimum_u32(uint32(row + uint32(i * pass_rows)), uint32(last - uint32(1)))
                    places[i] = uint32(shared + (each * uint32(block_n) + (column ^ flip_of(each))) * uint32(4))
                    for e in range(4):
                        before[i, e] = float32(0.0)
                    if is_by_quads and is_inside and residual != uint64(0) and row + uint32(i * pass_rows) < last:
                        place = uint64(first_row + each) * uint64(n) + uint64(at_column)
                        quad = load_residual(residual + place * uint64(out_bytes))
                        for e in range(4):
                            before[i, e] = quad[e]
                _sum_parts(values, places, parts)
                if is_gated:
                    for i in range(ROWS_AT_ONCE):
                        places[i] = uint32(places[i] + uint32(columns * 4))  # a flip moves no column over half a tile
                    _sum_parts(ups, places, parts)
                for i in range(ROWS_AT_ONCE):
                    each = uint32(row + uint32(i * pass_rows))
                    if each < last:
                        at_row, total = uint32(first_row + each), float32(0.0)
                        scale = memory.shared_load_f32(uint32(scales + (each - first_finished) * uint32(4)))
                        quad = (values[i, 0], values[i, 1], values[i, 2], values[i, 3])
                        if is_packed:
                            quad = scale_each(quad, of_columns)
                        if is_gated:
                            up_quad = (ups[i, 0], ups[i, 1], ups[i, 2], ups[i, 3])
                            if is_packed:
                                up_quad = scale_each(up_quad, of_ups)
                            quad = gate_quad(quad, up_quad, scale)
                        else:
                            quad = scale_quad(quad, scale)
                        a, b, c, d = quad
                        if is_inside and is_by_quads:
                            a, b = a + added[0] + before[i, 0], b + added[1] + before[i, 1]
                            c, d = c + added[2] + before[i, 2], d + added[3] + before[i, 3]
                            place = uint64(at_row) * uint64(n) + uint64(at_column)
                            store_quad(out + place * uint64(out_bytes), (a, b, c, d))
                            total = (a * a + b * b) + (c * c + d * d)
                        elif is_inside:
                            finish(given, at_row, at_column, a)
                            if at_column + uint32(1) < n:
                                finish(given, at_row, at_column + uint32(1), b)
                            if at_column + uint32(2) < n:
                                finish(given, at_row, at_column + uint32(2), c)
                            if at_column + uint32(3) < n:
                                finish(given, at_row, at_column + uint32(3), d)
                        if not is_gated:
                            leave_squares(given, total, lane == uint32(0), at_row, at_column)
                row = uint32(row + uint32(ROWS_AT_ONCE * pass_rows))
        sync_warp()
        cluster.arrive_relaxed()  # no block exits while others read its sums: they have been stored by now
        cluster.wait()

    return Specialisation(
        name=f"gemm_hopper_split_{f'{weight_name}_' if is_packed else ''}{dtype}_{out_dtype}_{tile}"
        f"{'_' if is_gated else ''}{activation}",
        kernel=product_kernel(multiply),
        argument_types=(TENSOR_MAP, uint64 if is_packed else TENSOR_MAP, *ARGUMENT_TYPES[2:]),
        max_threads=tile.num_threads,
        min_blocks=1,
        min_capability=90,
        needs_arch_features=True,
        constants={
            "dtype": dtype, "out_dtype": out_dtype, "tile": str(tile), "activation": activation,
            "weight": weight_name or dtype, "square_columns": 0 if is_gated else 128,
        },
    )  # fmt: skip
