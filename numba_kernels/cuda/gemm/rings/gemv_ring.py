"""`gemv` from sm_90 on, for aligned rows of 16 bits: the same sums in the same order, the weight by `warp_ring`.

A block stays on its multiprocessor and takes one tile of columns after another, so that its warps' rings never run
empty between tiles: while a tile's sums are added and stored, the next one's weights arrive. A stage holds 512 elements
of K of two of a team's four columns. x is brought to shared memory once, by bulk copies, too. Low-rank sums of adapters
may ride on the launch (`riding`).

Threads: x lanes, y the warps of a team, z the teams of a block.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.adapters import riding
from numba_kernels.cuda.gemm.epilogue import GATED, finisher, norm_scale, scale_element, squares_leaver
from numba_kernels.cuda.gemm.product import Machine
from numba_kernels.cuda.gemm.rings.warp_ring import (
    MOST_STAGES,
    copy_in,
    dynamic_shared_bytes,
    next_stage,
    stages_that_fit,
    start_ring,
)
from numba_kernels.cuda.intrinsics import convert, mbarrier, memory
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import divide_u32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import exchange, shuffle_xor_f32, sync_warp, warp_sum
from numba_kernels.cuda.specialisation import Dim3, Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

COLUMNS = 4  # of a team
BLOCK_WARPS = 8
TURNS, TURN = 2, 256  # parts of a step of a warp along K, and their elements: 8 of a lane
STEP = TURNS * TURN
PIECE_BYTES = 2 * STEP  # of a column in a stage
STAGE_BYTES = 2 * PIECE_BYTES  # of a warp
RING_BYTES = BLOCK_WARPS * STAGE_BYTES  # a stage of all warps


@functools.cache
def _asker(is_gated: bool) -> Any:
    @device_function
    def ask(weight, n, k, first_column, position, pair, target, barrier):
        """One lane: 512 elements, from a position of K on, of a pair of columns."""
        num_bytes = uint32(min(uint32(STEP), uint32(k - position)) * uint32(2))
        mbarrier.arrive_expecting(barrier, uint32(num_bytes * uint32(2)))
        for e in range(2):
            # Beyond the last row or column, the last one is computed again, and not stored.
            if is_gated:  # the gate's two rows are a pair, and up's
                row = uint32(min(uint32(first_column + uint32(e)), uint32(n - uint32(1))) + pair * n)
            else:
                row = min(uint32(first_column + pair * uint32(2) + uint32(e)), uint32(n - uint32(1)))
            source = weight + (uint64(row) * uint64(k) + uint64(position)) * uint64(2)
            copy_in(uint32(target + uint32(e * PIECE_BYTES)), source, num_bytes, barrier)

    return ask


@functools.cache
def _pair_adder(dtype: str, rows: int) -> Any:
    """A device function ``(sums, pair, x_words, stage_at, position, k, lane)``: a stage's products."""
    unpack = {"f16": convert.unpack_f16, "bf16": convert.unpack_bf16}[dtype]

    def adder(first: int) -> Any:
        @device_function
        def add(sums, x_words, stage_at, position, k, lane):
            for i in range(TURNS):
                if uint32(position + uint32(i * TURN) + lane * uint32(8)) < k:
                    for e in range(2):
                        words = memory.shared_load_4xb32(uint32(stage_at + uint32(e * PIECE_BYTES + i * TURN * 2)))
                        for w in range(4):
                            low, high = unpack(words[w])
                            for r in range(rows):
                                x_low, x_high = unpack(x_words[(r * TURNS + i) * 4 + w])
                                sums[r * COLUMNS + first + e] += x_low * low
                                sums[r * COLUMNS + first + e] += x_high * high

        return add

    add_first, add_second = adder(0), adder(2)

    @device_function
    def add_pair(sums, pair, x_words, stage_at, position, k, lane):
        if pair == 0:
            add_first(sums, x_words, stage_at, position, k, lane)
        else:
            add_second(sums, x_words, stage_at, position, k, lane)

    return add_pair


@functools.cache
def _tile_finisher(dtype: str, out_dtype: str, activation: str) -> Any:
    """A device function ``(given, total, row, inside, first_column)`` of a warp whose lanes have a tile's sums."""
    finish, leave_squares = finisher(dtype, out_dtype), squares_leaver(COLUMNS)
    is_gated, gated = activation != "", GATED.get(activation)
    out_columns = COLUMNS // 2 if is_gated else COLUMNS

    @device_function
    def finish_tile(given, total, row, inside, first_column):
        column = uint32(first_column + inside)
        if is_gated:
            total = gated(total, shuffle_xor_f32(total, uint32(out_columns)))
        value = float32(0.0)
        if row < given.m and column < given.n and inside < uint32(out_columns):
            value = finish(given, row, column, total)
        if not is_gated:
            leave_squares(given, value * value, inside == uint32(0), row, column)

    return finish_tile


@functools.cache
def ring_kernel(
    dtype: str, out_dtype: str, rows: int, activation: str = "", *, takes_adapters: bool = False
) -> Specialisation:
    """The kernel for one row of x, or for two."""
    is_gated, load_parts = activation != "", memory.load_4xf32
    ask, add_pair = _asker(is_gated), _pair_adder(dtype, rows)
    finish_tile = _tile_finisher(dtype, out_dtype, activation)
    out_columns = COLUMNS // 2 if is_gated else COLUMNS
    num_sums, num_x_words = rows * COLUMNS, rows * TURNS * 4
    num_barriers = BLOCK_WARPS * MOST_STAGES + 1
    partial_floats, partial_rows = BLOCK_WARPS * num_sums, BLOCK_WARPS * rows
    exchange_sums = exchange(num_sums)
    shrink = riding.shrinker(dtype, BLOCK_WARPS + 1, rows) if takes_adapters else None
    square_columns, threads = 0 if is_gated else COLUMNS, BLOCK_WARPS * 32
    tiles = riding.kept_tiles(dtype, out_dtype, rows, activation, BLOCK_WARPS * num_sums, square_columns, threads)
    place_of, expand_tiles, finish_tiles, num_floats = tiles.place, tiles.expand, tiles.finish, tiles.num_floats
    most_kept = tiles.most
    meet = riding.multiplying_barrier(threads) if takes_adapters else sync_block

    @device_function
    def multiply_tiles(block, num_blocks, given, kept, expanded, added):
        x, weight, m, n, k, x_squares, x_parts = (
            given.x, given.weight, given.m, given.n, given.k, given.x_squares, given.x_parts
        )  # fmt: skip
        shared = memory.shared_address(cuda.shared.array(0, uint32))
        barriers = memory.shared_address(cuda.shared.array(num_barriers, uint64))
        partial = cuda.shared.array((2, partial_floats), float32)  # of this tile and the next: [warp, sum]
        partial_squares = cuda.shared.array(partial_rows, float32)  # [warp, row]
        lane, rank, team = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y), uint32(cuda.threadIdx.z)
        team_warps, teams = uint32(cuda.blockDim.y), uint32(cuda.blockDim.z)
        if takes_adapters:
            team_warps = added.team_warps
            team, teams = divide_u32(rank, team_warps), divide_u32(uint32(BLOCK_WARPS), team_warps)
            rank = uint32(rank - team * team_warps)
        warp = uint32(rank + team * team_warps)
        x_bytes = uint32(uint32(k * uint32(2)) * uint32(rows))
        num_stages = uint32(uint32(dynamic_shared_bytes() - x_bytes) // uint32(RING_BYTES))
        x_barrier, own = uint32(barriers + uint32(BLOCK_WARPS * MOST_STAGES * 8)), uint32(warp * num_stages)
        ring = uint32(shared + own * uint32(STAGE_BYTES))
        barriers = uint32(barriers + own * uint32(8))
        x_shared = uint32(shared + num_stages * uint32(RING_BYTES))
        step = uint32(team_warps * uint32(STEP))
        first = uint32(block * teams + team)  # of this team's groups of columns
        stride, first_position = uint32(num_blocks * teams), uint32(rank * uint32(STEP))
        groups = uint32((n + uint32(out_columns - 1)) // uint32(out_columns))

        start_ring(barriers, num_stages, lane)
        if warp == uint32(0) and lane == uint32(0):
            mbarrier.init(x_barrier, uint32(1))
            mbarrier.fence_init()
        # What lane 0 asks for next; the same in all lanes. A warp beyond K asks for nothing.
        asked, position, pair, stage = first, first_position, uint32(0), uint32(0)
        # The block's first team decides how many tiles all of its teams have.
        if first_position >= k:
            asked = uint32(groups + team)
        while stage < num_stages and uint32(asked - team) < groups:
            if lane == uint32(0):
                at, full = uint32(ring + stage * uint32(STAGE_BYTES)), uint32(barriers + stage * uint32(8))
                ask(weight, n, k, uint32(asked * uint32(out_columns)), position, pair, at, full)
            stage = uint32(stage + uint32(1))
            pair ^= uint32(1)
            if pair == uint32(0):
                position = uint32(position + step)
                if position >= k:
                    asked, position = uint32(asked + stride), first_position

        wait_for_previous_grid()  # the weight is immutable; x may be the previous grid's output
        launch_dependents()
        if warp == uint32(0) and lane == uint32(0):
            mbarrier.arrive_expecting(x_barrier, uint32(k * uint32(2) * m))
            for r in range(rows):
                if uint32(r) < m:
                    at = uint32(x_shared + uint32(r) * k * uint32(2))
                    copy_in(at, x + uint64(uint32(r)) * uint64(k) * uint64(2), uint32(k * uint32(2)), x_barrier)
        if x_squares != uint64(0):
            for r in range(rows):
                squared = float32(0.0)
                part = uint32(uint32(lane + warp * uint32(32)) * uint32(4))
                while part < x_parts and uint32(r) < m:
                    a, b, c, d = load_parts(x_squares + (uint64(r) * uint64(x_parts) + uint64(part)) * uint64(4))
                    squared += (a + b) + (c + d)
                    part = uint32(part + uint32(BLOCK_WARPS * 32 * 4))
                squared = warp_sum(squared)
                if lane == uint32(0):
                    partial_squares[warp * uint32(rows) + uint32(r)] = squared
        meet()
        row, inside, scale = lane // uint32(COLUMNS), lane % uint32(COLUMNS), float32(1.0)
        if x_squares != uint64(0) and row < uint32(rows):
            squared = partial_squares[row]
            for other in range(1, BLOCK_WARPS):
                squared += partial_squares[row + uint32(other * rows)]
            scale = norm_scale(squared, k, given.eps)
        mbarrier.wait(x_barrier, uint32(0))

        sums = cuda.local.array(num_sums, float32)
        x_words = cuda.local.array(num_x_words, uint32)
        stage, phase, turn, group, num_kept = uint32(0), uint32(0), uint32(0), first, uint32(0)
        columns = uint32(teams * uint32(out_columns))  # of the block
        first_column = uint32(block * columns)
        while uint32(group - team) < groups:
            for i in range(num_sums):
                sums[i] = float32(0.0)
            at_k = first_position
            while at_k < k:
                for r in range(rows):
                    for i in range(TURNS):
                        inside_k = uint32(at_k + uint32(i * TURN) + lane * uint32(8))
                        if inside_k < k and uint32(r) < m:
                            address = uint32(x_shared + (uint32(r) * k + inside_k) * uint32(2))
                            words = memory.shared_load_4xb32(address)
                            for w in range(4):
                                x_words[(r * TURNS + i) * 4 + w] = words[w]
                        else:
                            for w in range(4):
                                x_words[(r * TURNS + i) * 4 + w] = uint32(0)
                for p in range(2):
                    mbarrier.wait(uint32(barriers + stage * uint32(8)), phase)
                    at = uint32(ring + stage * uint32(STAGE_BYTES))
                    add_pair(sums, p, x_words, uint32(at + lane * uint32(16)), at_k, k, lane)
                    sync_warp()  # all lanes have read the stage
                    if uint32(asked - team) < groups:
                        if lane == uint32(0):
                            full = uint32(barriers + stage * uint32(8))
                            ask(weight, n, k, uint32(asked * uint32(out_columns)), position, pair, at, full)
                        pair ^= uint32(1)
                        if pair == uint32(0):
                            position = uint32(position + step)
                            if position >= k:
                                asked, position = uint32(asked + stride), first_position
                    stage, phase = next_stage(stage, phase, num_stages)
                at_k = uint32(at_k + step)

            exchange_sums(sums, lane)
            total = sums[0]
            if team_warps > uint32(1) and lane < uint32(num_sums):
                partial[turn, warp * uint32(num_sums) + lane] = total
            if takes_adapters or team_warps > uint32(1):
                meet()
            if rank == uint32(0):
                if lane < uint32(num_sums):
                    for i in range(1, BLOCK_WARPS):
                        if uint32(i) < team_warps:
                            total += partial[turn, uint32(warp + uint32(i)) * uint32(num_sums) + lane]
                total = scale_element(total, scale)
                if takes_adapters:
                    part, own = inside // uint32(out_columns), uint32(team * uint32(out_columns))
                    own = uint32(own + inside % uint32(out_columns))
                    if lane < uint32(num_sums):
                        memory.shared_store_f32(place_of(kept, num_kept, part, row, own, columns), total)
                else:
                    finish_tile(given, total, row, inside, uint32(group * uint32(out_columns)))
            turn ^= uint32(1)
            group = uint32(group + stride)
            if takes_adapters:
                num_kept, is_last = uint32(num_kept + uint32(1)), uint32(group - team) >= groups
                if is_last or num_kept == uint32(most_kept):
                    place = first_column, uint32(num_blocks * columns), columns
                    finish_tiles(given, (kept, expanded), place, num_kept, is_last, uint32(warp * uint32(32) + lane))
                    first_column, num_kept = uint32(first_column + num_kept * num_blocks * columns), uint32(0)

    @device_function
    def work(block, num_blocks, given, added):
        kept, expanded = uint32(0), uint32(0)
        if takes_adapters:
            kept = memory.shared_address(cuda.shared.array(num_floats, float32))
            expanded = memory.shared_address(cuda.shared.array(num_floats, float32))
        if takes_adapters and uint32(cuda.threadIdx.y) == uint32(BLOCK_WARPS):
            columns = uint32(divide_u32(uint32(BLOCK_WARPS), added.team_warps) * uint32(out_columns))
            first_column, stride = uint32(block * columns), uint32(num_blocks * columns)
            expand_tiles(expanded, (first_column, stride, columns), given.m, given.n, num_blocks, added)
        else:
            multiply_tiles(block, num_blocks, given, kept, expanded, added)

    return Specialisation(
        name=f"gemv_ring_{dtype}_{out_dtype}_{rows}{'_' if is_gated else ''}{activation}"
        + "_adapted" * takes_adapters,
        kernel=riding.product_kernel(work, shrink),
        argument_types=riding.argument_types(takes_adapters),
        max_threads=(BLOCK_WARPS + takes_adapters) * 32,
        min_blocks=2,
        min_capability=90,
        replaced_from=100 if takes_adapters else 0,
        constants={
            "dtype": dtype, "out_dtype": out_dtype, "rows": rows, "activation": activation,
            "square_columns": 0 if is_gated else COLUMNS,
        },
    )  # fmt: skip


def ring_stages(machine: Machine, k: int, rows: int, *, takes_adapters: bool = False) -> int:
    """The stages of a launch's rings; 0 where x leaves room for too few."""
    if not k or (takes_adapters and machine.arch != riding.RINGS_ON):
        return 0
    static_bytes = riding.shared_bytes(BLOCK_WARPS + 1, rows, BLOCK_WARPS * rows * COLUMNS) if takes_adapters else 0
    return stages_that_fit(machine, RING_BYTES, 2 * rows * k + static_bytes)


def ring_launch(
    kernel: Specialisation, machine: Machine, tiles: int, block: Dim3, k: int, m: int, ranks: int
) -> Launch:  # fmt: skip
    """A launch over tiles of columns, with a ring that fits (`ring_stages`), and low-rank sums of so many ranks."""
    rows, takes_adapters = int(kernel.constants["rows"]), ranks > 0
    shared_bytes = ring_stages(machine, k, rows, takes_adapters=takes_adapters) * RING_BYTES + 2 * rows * k
    if not takes_adapters:
        return Launch(kernel, (min(tiles, machine.num_multiprocessors), 1, 1), block, shared_bytes)
    multiplying, shrinking = riding.shared_blocks(tiles, machine.num_multiprocessors, m, ranks)
    return Launch(
        kernel, (multiplying + shrinking, 1, 1), (32, BLOCK_WARPS + 1, 1), shared_bytes, num_shrinking=shrinking,
        team_warps=block[1],
    )  # fmt: skip
