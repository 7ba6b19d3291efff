"""Few rows, up to 64, of 16-bit factors: the weight streams through tensor cores as memory delivers it. What it
teaches: which order of K the tensor cores see is nobody's business.

A decode step uses each element of the weight as often as there are sequences: no tile makes that more, only the bytes
on their way count, and how few instructions bring them. So

- the weight is the A operand of `mma.sync` (16 of its rows), x the B operand (8 rows of x): eight rows cost no padding,
  and fewer rows cost nothing either, as nobody waits for the tensor cores;
- a product's sum may run over K in any order, if both factors take the same one. `mma.sync` wants pairs 2t, 2t + 1 and
  2t + 8, 2t + 9 of 16 elements in lane t; here lane t's are elements 8t to 8t + 7 of 32: one load of 16 bytes. It serves
  two instructions, straight from device memory to the registers of the lane that multiplies: no shared memory, no
  `ldmatrix`, no swizzle, no barrier;
- x goes the same way, but for a stop in shared memory: `cp.async` brings it some steps ahead, 16 bytes to each lane
  that will read them;
- a warp has 32 rows of the weight, and four steps of 32 elements of K in registers, each loaded again as soon as it is
  used: 16 loads of 16 bytes a lane, 8 KB a warp, which eight warps a multiprocessor make 64 KB on their way;
- few columns leave too few warps. The sum over K is split into 1 to 8 streams of whole groups of 128, a warp each; warps
  of one stream and other columns share its x. At the end the sums meet in shared memory, and are added in the order
  of the streams.

How K is split depends on (N, K) alone, and a row of x never meets another one: its sums have the same bits in any
company of up to 64 rows. They are not those of the other tiers.

Threads: x lanes, y streams, z teams of columns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.epilogue import ARGUMENT_TYPES, DTYPE_PAIRS, can_finish_quads, finisher, quad_finisher
from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.fragments import load_all, multiply_all
from numba_kernels.cuda.intrinsics.integer import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, sync_named, wait_for_previous_grid
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

MAX_ROWS = 64
ROW_TILES = (1, 2, 4, 8)  # of 8 rows of x: what kernels are made for
COLUMNS = 32  # of the output, a warp: so many rows of the weight
STEP = 32  # elements of K that a lane's 16 bytes are a quarter of
STEPS = 4  # in registers
GROUP = STEP * STEPS
BLOCK_WARPS = 8
MANY_COLUMNS = 8192  # from here on, two teams of columns fill a large GPU: x is read half as often


def _num_stages(row_tiles: int) -> int:
    """Steps of x in shared memory; a divisor of STEPS."""
    return 4 if row_tiles <= 4 else 2


def shared_bytes(row_tiles: int, num_streams: int) -> int:
    """Bytes of a block's shared memory: x on its way in, or all warps' sums on their way out."""
    staged_x = num_streams * _num_stages(row_tiles) * row_tiles * 8 * STEP * 2
    return max(staged_x, BLOCK_WARPS * row_tiles * 8 * COLUMNS * 4)


@functools.cache
def _kernel(dtype: str, out_dtype: str, row_tiles: int) -> Specialisation:
    finish, finish_quad = finisher(dtype, out_dtype), quad_finisher(dtype, out_dtype)
    copy, commit = memory.copy_async_16, memory.copy_async_commit
    load_sums, store_sum = memory.shared_load_4xf32, memory.shared_store_f32
    num_stages = _num_stages(row_tiles)
    wait_for_next, wait_for_all = memory.copy_async_wait(num_stages - 2), memory.copy_async_wait(0)
    tile_bytes = 8 * STEP * 2  # of x: a chunk of 16 bytes for each lane
    stage_bytes, sums_bytes = row_tiles * tile_bytes, row_tiles * 8 * COLUMNS * 4
    step_bytes, group_bytes = STEP * 2, GROUP * 2
    num_words, num_x_words, num_sums = 16 * STEPS, 4 * row_tiles, 8 * row_tiles  # registers of a lane

    def steps(step: int) -> tuple[Any, Any]:
        """Of a step: ``load(rows, column, end, weights)``, this lane's 16 bytes of each of its 4 rows of the weight,
        zeros from `end` on; and ``advance(...)``, which multiplies with them and then loads those of the next group."""
        first = 16 * step
        load_whole = load_all("stream", tuple((first + 4 * r, r, step * step_bytes) for r in range(4)))
        load_x = load_all(
            "shared", tuple((4 * j, 0, step % num_stages * stage_bytes + j * tile_bytes) for j in range(row_tiles))
        )
        multiply = multiply_all(
            dtype,
            tuple(
                (
                    8 * j + 4 * i,
                    tuple(first + 8 * i + e for e in (2 * h, 4 + 2 * h, 2 * h + 1, 4 + 2 * h + 1)),
                    (4 * j + 2 * h, 4 * j + 2 * h + 1),
                )
                for j in range(row_tiles) for h in range(2) for i in range(2)
            ),
        )  # fmt: skip

        @device_function
        def load(rows, column, end, weights):
            for e in range(16):
                weights[first + e] = uint32(0)
            if uint32(column + uint32(step * STEP)) < end:
                load_whole(weights, rows)

        @device_function
        def advance(sums, weights, rows, x_stages, x_words, is_whole, is_last, column, end):
            load_x(x_words, x_stages)
            multiply(sums, weights, x_words)
            if is_whole:
                load_whole(weights, rows)
            elif is_last:
                load(rows, column, end, weights)

        return load, advance

    def stages(step: int) -> Any:
        """Waits until x of a step is there for all, and has the step copied that will take the place of the last."""
        ahead = step + num_stages - 1

        @device_function
        def next_stage(place, x_stages, num_tiles, m, k, column, end, rank, team, num_teams):
            wait_for_next()
            if num_teams > uint32(1):
                sync_named(uint32(rank + uint32(1)), uint32(num_teams * uint32(32)))
            target = uint32(x_stages + uint32(ahead % num_stages * stage_bytes))
            copy_x(place, ahead, target, num_tiles, m, k, column, end, team, num_teams)

        return next_stage

    next_stage_0, next_stage_1, next_stage_2, next_stage_3 = map(stages, range(STEPS))
    (load_0, advance_0), (load_1, advance_1), (load_2, advance_2), (load_3, advance_3) = map(steps, range(STEPS))

    @device_function
    def copy_x(place, ahead, target, num_tiles, m, k, column, end, team, num_teams):
        """This warp's share of the step of x that is `ahead` of the group at `place`: tiles `team`, `team + num_teams`
        and so on. `num_tiles`: of x that have this lane's row; `column`: its first. Zeros where x ends, unread."""
        count = num_tiles if uint32(column + uint32(ahead * STEP)) < end else uint32(0)
        for i in range(row_tiles):
            if (uint32(i) & uint32(num_teams - uint32(1))) == team:
                source = place + uint64(ahead * step_bytes) + uint64(k) * uint64(i * 16)
                copy(uint32(target + uint32(i * tile_bytes)), source, uint32(16) if uint32(i) < count else uint32(0))
        commit()

    def gemm(x, weight, bias, residual, out, m, n, k, bias_is_f32):
        shared = memory.shared_address(cuda.shared.array(0, uint32))
        lane, rank, team = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y), uint32(cuda.threadIdx.z)
        num_streams, num_teams = uint32(cuda.blockDim.y), uint32(cuda.blockDim.z)
        g, t = lane >> uint32(2), lane & uint32(3)
        block_column = uint32(uint32(cuda.blockIdx.x) * uint32(num_teams * uint32(COLUMNS)))
        row_bytes = uint64(k) * uint64(2)

        # This stream's part of K: whole groups, but for the last one of all.
        num_groups = uint32(k + uint32(GROUP - 1)) // uint32(GROUP)
        length = uint32(divide_u32(uint32(num_groups + num_streams - uint32(1)), num_streams) * uint32(GROUP))
        position = uint32(rank * length)
        end = minimum_u32(uint32(position + length), k)

        # Rows of the weight beyond the last repeat it: their sums are never stored.
        rows = cuda.local.array(4, uint64)
        for r in range(4):
            row = minimum_u32(uint32(block_column + team * uint32(COLUMNS) + uint32(8 * r) + g), uint32(n - uint32(1)))
            rows[r] = weight + uint64(row) * row_bytes + uint64(position * uint32(2) + t * uint32(16))
        weights = cuda.local.array(num_words, uint32)
        column = uint32(position + t * uint32(8))
        load_0(rows, column, end, weights)
        load_1(rows, column, end, weights)
        load_2(rows, column, end, weights)
        load_3(rows, column, end, weights)

        wait_for_previous_grid()  # the weight is nobody's output; x may be
        x_place = x + uint64(g) * row_bytes + uint64(column) * uint64(2)
        x_stages = cuda.local.array(1, uint32)
        x_stages[0] = uint32(shared + rank * uint32(num_stages * stage_bytes) + lane * uint32(16))
        num_tiles = uint32(m - g + uint32(7)) >> uint32(3) if g < m else uint32(0)
        for step in range(num_stages - 1):
            copy_x(x_place, step, uint32(x_stages[0] + uint32(step * stage_bytes)), num_tiles, m, k, column, end, team, num_teams)
        launch_dependents()

        x_words = cuda.local.array(num_x_words, uint32)
        sums = cuda.local.array(num_sums, float32)
        for e in range(num_sums):
            sums[e] = float32(0.0)
        while position < end:
            position = uint32(position + uint32(GROUP))
            for r in range(4):
                rows[r] += uint64(group_bytes)
            is_whole, is_last = uint32(position + uint32(GROUP)) <= end, position < end
            next_column = uint32(column + uint32(GROUP))
            next_stage_0(x_place, x_stages[0], num_tiles, m, k, column, end, rank, team, num_teams)
            advance_0(sums, weights, rows, x_stages, x_words, is_whole, is_last, next_column, end)
            next_stage_1(x_place, x_stages[0], num_tiles, m, k, column, end, rank, team, num_teams)
            advance_1(sums, weights, rows, x_stages, x_words, is_whole, is_last, next_column, end)
            next_stage_2(x_place, x_stages[0], num_tiles, m, k, column, end, rank, team, num_teams)
            advance_2(sums, weights, rows, x_stages, x_words, is_whole, is_last, next_column, end)
            next_stage_3(x_place, x_stages[0], num_tiles, m, k, column, end, rank, team, num_teams)
            advance_3(sums, weights, rows, x_stages, x_words, is_whole, is_last, next_column, end)
            column = next_column
            x_place += uint64(group_bytes)

        # The sums [row of x, column], a tile a warp, columns in groups of 8 that rows 2t, 2t + 1 exchange by t: lanes
        # that store, and lanes that read along rows, meet in no bank.
        wait_for_all()
        sync_block()
        tile = shared + (team * num_streams + rank) * uint32(sums_bytes)
        for c in range(4):
            at = tile + t * uint32(2 * COLUMNS * 4) + g * uint32(4) + ((uint32(c) ^ t) << uint32(5))
            for j in range(row_tiles):
                for e in range(2):
                    store_sum(at + uint32((8 * j + e) * COLUMNS * 4), sums[8 * j + 2 * c + e])
        sync_block()
        thread = lane + (rank + num_streams * team) * uint32(32)
        quad, owner = (thread & uint32(7)) << uint32(2), thread >> uint32(3)
        team, row = owner & (num_teams - uint32(1)), divide_u32(owner, num_teams)
        first = block_column + team * uint32(COLUMNS) + quad
        in_quads = can_finish_quads(bias, residual, out, n)
        while row < m and first < n:
            at = shared + team * num_streams * uint32(sums_bytes) + row * uint32(COLUMNS * 4)
            at += (quad ^ (((row >> uint32(1)) & uint32(3)) << uint32(3))) << uint32(2)
            total = load_sums(at)
            a, b, c, d = total[0], total[1], total[2], total[3]
            index = uint32(1)
            while index < num_streams:
                at += uint32(sums_bytes)
                more = load_sums(at)
                a += more[0]
                b += more[1]
                c += more[2]
                d += more[3]
                index += uint32(1)
            if in_quads:
                finish_quad(bias, bias_is_f32, residual, out, n, row, first, (a, b, c, d))
            else:
                finish(bias, bias_is_f32, residual, out, n, row, first, a)
                if first + uint32(1) < n:
                    finish(bias, bias_is_f32, residual, out, n, row, first + uint32(1), b)
                if first + uint32(2) < n:
                    finish(bias, bias_is_f32, residual, out, n, row, first + uint32(2), c)
                if first + uint32(3) < n:
                    finish(bias, bias_is_f32, residual, out, n, row, first + uint32(3), d)
            row += num_streams * uint32(4)

    return Specialisation(
        name=f"gemm_few_rows_{dtype}_{out_dtype}_{8 * row_tiles}",
        kernel=cuda.jit(gemm),
        argument_types=ARGUMENT_TYPES,
        max_threads=BLOCK_WARPS * 32,
        min_blocks=2 if row_tiles <= 2 else 1,
        constants={"dtype": dtype, "out_dtype": out_dtype, "row_tiles": row_tiles},
    )


def split(n: int, k: int) -> int:
    """Streams that share a sum over K: a power of two, from the weight's shape alone."""
    num_streams = BLOCK_WARPS if n < MANY_COLUMNS else BLOCK_WARPS // 2
    while num_streams > 1 and num_streams * GROUP > k:
        num_streams //= 2
    return num_streams


def plan(m: int, n: int, k: int, dtype: str, out_dtype: str) -> Launch:
    """A launch for ``out [m, n]``, 1 <= m <= MAX_ROWS, n at least 1; rows of x and of a weight [n, k] lie on 16-byte
    bounds."""
    row_tiles = next(tiles for tiles in ROW_TILES if 8 * tiles >= m)
    num_streams = split(n, k)
    num_teams = BLOCK_WARPS // num_streams
    return Launch(
        _kernel(dtype, out_dtype, row_tiles),
        (-(-n // (COLUMNS * num_teams)), 1, 1),
        (32, num_streams, num_teams),
        shared_bytes=shared_bytes(row_tiles, num_streams),
    )


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for dtype, out_dtype in DTYPE_PAIRS:
        if dtype != "f32":
            for row_tiles in ROW_TILES:
                yield _kernel(dtype, out_dtype, row_tiles)
