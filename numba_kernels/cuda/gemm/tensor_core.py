"""Tier 4: tensor cores. What it teaches: feeding `mma.sync`, by copies that run ahead of the arithmetic.

Against the register tier it changes

- the arithmetic: a warp multiplies 16x16 by 16x8 tiles in one instruction: 16-bit factors, float32 sums;
- the way in: `cp.async` writes global memory to shared memory past the registers, `num_stages` K tiles ahead, so that a
  block waits for a copy that was begun several tiles ago, with one barrier a tile;
- the layout: shared memory keeps the 16-bit elements in chunks of 16 bytes, and chunk c of row r lies at c ^ (r mod 8)
  (rows of 64 bytes: c ^ (r / 2 mod 4)). Both the copies' writes and `ldmatrix`, which reads 8 rows of one chunk, then
  touch all 32 banks once: no conflicts, and no padding;
- the way out: sums pass through shared memory, each warp by itself, so that bias, residual and output are read and
  written along rows, four elements a lane; there, too, a swizzle (`mma.accumulator_flip`) keeps lanes out of each
  other's banks;
- the order of blocks: groups of 8 row tiles share a column tile's weights while these are in the second-level cache.

The weight [N, K] is the "col" operand of `mma.sync` as it lies; a plain B [K, N] is transposed by `ldmatrix.trans`.

Where rows do not lie on 16-byte bounds (`is_aligned` false) a chunk is read element by element and stored at once:
correct, and slow. Each sum runs over K in steps of 16 from first to last whatever the tile, so all tiles of one dtype
give the same bits: rows alone or batched are identical.

Source of the instructions' layouts: PTX ISA, "mma.sync", "ldmatrix", "cp.async".
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.epilogue import ARGUMENT_TYPES, DTYPE_PAIRS, can_finish_quads, finisher, quad_finisher
from numba_kernels.cuda.intrinsics import memory, mma
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.sync import sync_block
from numba_kernels.cuda.intrinsics.warp import sync_warp
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

GROUP_ROWS = 8  # row tiles that pass over a column tile together


@dataclass(frozen=True, slots=True)
class Tile:
    """A block's tile of the output, its depth in K, and the warps' share of it; all in elements.

    `warp_m` is a multiple of 16, `warp_n` 16 or a greater power of two, `block_k` 32 or 64.
    """

    block_m: int
    block_n: int
    block_k: int
    warp_m: int
    warp_n: int
    num_stages: int

    @property
    def num_warps(self) -> int:
        return (self.block_m // self.warp_m) * (self.block_n // self.warp_n)

    @property
    def stage_bytes(self) -> int:
        return (self.block_m + self.block_n) * self.block_k * 2

    @property
    def shared_bytes(self) -> int:
        staged = self.block_m * self.block_n * 4  # the sums, on their way out
        return max(self.num_stages * self.stage_bytes, staged)

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}_s{self.num_stages}"


SKINNY = Tile(16, 64, 64, 16, 16, 5)  # few rows: the weight streams, 40 KB of it on its way
SMALL = Tile(64, 64, 64, 32, 32, 3)
LARGE = Tile(128, 128, 32, 64, 32, 5)
TILES = (SKINNY, SMALL, LARGE)


@functools.cache
def _chunk_copier(is_aligned: bool) -> Any:
    """A device function that brings 8 neighbours to shared memory, as many of them as there are, the rest zero.

    Of those that are missing nothing is read, but a `cp.async` names an address all the same: one that exists.
    """
    if is_aligned:
        copy = memory.copy_async_16

        @device_function
        def copy_chunk(target, row, offset, count):
            is_there = count > uint32(0)
            copy(target, row + (uint64(offset) if is_there else uint64(0)), uint32(16) if is_there else uint32(0))

        return copy_chunk
    load, store = memory.load_b16, memory.shared_store_b16

    @device_function
    def copy_elements(target, row, offset, count):
        index = uint32(0)
        while index < uint32(8):
            element = types.uint16(0)
            if index < count:
                element = load(row + uint64(offset) + uint64(index) * uint64(2))
            store(target + index * uint32(2), element)
            index += uint32(1)

    return copy_elements


@functools.cache
def _tile_copier(tile: Tile, is_weight_layout: bool, is_aligned: bool) -> Any:
    """A device function that brings one K tile of x and weight to a stage, a part of it by each thread."""
    copy_chunk, commit = _chunk_copier(is_aligned), memory.copy_async_commit
    a_chunks, a_passes, a_step = _passes(tile, tile.block_m, tile.block_k)
    b_chunks, b_passes, b_step = _passes(tile, *_weight_tile(tile, is_weight_layout))
    block_k = tile.block_k

    @device_function
    def copy_tile(index, stage, a_target, a_rows, b_target, b_rows, weight, column, b_row, b_column, n, k):
        """`column`: this thread's first k in a tile of x or a weight; `b_row`, `b_column`: its k, n of plain B."""
        start = index * uint32(block_k)
        if start < k:
            first = start + column
            count = k - first if first < k else uint32(0)
            for i in range(a_passes):
                copy_chunk(stage + a_target + uint32(i * a_step * a_chunks * 16), a_rows[i], first * uint32(2), count)
            for i in range(b_passes):
                target = stage + b_target + uint32(i * b_step * b_chunks * 16)
                if is_weight_layout:
                    copy_chunk(target, b_rows[i], first * uint32(2), count)
                else:
                    row = start + b_row + uint32(i * b_step)
                    row_start = weight + uint64(min(row, k - uint32(1))) * uint64(n) * uint64(2)
                    there = n - b_column if row < k and b_column < n else uint32(0)
                    copy_chunk(target, row_start, b_column * uint32(2), there)
        commit()

    return copy_tile


def _weight_tile(tile: Tile, is_weight_layout: bool) -> tuple[int, int]:
    """Rows of the weight's tile in shared memory, and elements a row."""
    return (tile.block_n, tile.block_k) if is_weight_layout else (tile.block_k, tile.block_n)


def _passes(tile: Tile, rows: int, columns: int) -> tuple[int, int, int]:
    """How the block's threads copy ``[rows, columns]``: chunks of 8 elements a row, passes, and rows a pass."""
    chunks = columns // 8
    step = tile.num_warps * 32 // chunks
    if step % 8 or rows % step:  # the swizzle repeats after 8 rows
        raise ValueError(f"tile {tile}: {tile.num_warps * 32} threads do not copy [{rows}, {columns}] in whole passes")
    return chunks, rows // step, step


@functools.cache
def _kernel(dtype: str, out_dtype: str, tile: Tile, is_weight_layout: bool, is_aligned: bool) -> Specialisation:
    multiply = {"bf16": mma.mma_bf16, "f16": mma.mma_f16}[dtype]
    load_a = mma.load_matrix_x4
    load_b = mma.load_matrix_x4 if is_weight_layout else mma.load_matrix_x4_transposed
    copy_tile = _tile_copier(tile, is_weight_layout, is_aligned)
    wait_for_next, wait_for_all = memory.copy_async_wait(tile.num_stages - 2), memory.copy_async_wait(0)
    finish, finish_quad = finisher(dtype, out_dtype), quad_finisher(dtype, out_dtype)
    store_pair, load_4, load_1 = memory.shared_store_2xf32, memory.shared_load_4xf32, memory.shared_load_f32

    block_m, block_n, block_k = tile.block_m, tile.block_n, tile.block_k
    warp_m, warp_n, warps_n = tile.warp_m, tile.warp_n, tile.block_n // tile.warp_n
    m_tiles, n_pairs = warp_m // 16, warp_n // 16  # 16x16 of the output: two mma
    a_chunks, a_passes, a_step = _passes(tile, block_m, block_k)
    b_chunks, b_passes, b_step = _passes(tile, *_weight_tile(tile, is_weight_layout))
    a_row_bytes, b_row_bytes = a_chunks * 16, b_chunks * 16
    a_bytes, stage_bytes, all_stages_bytes = block_m * block_k * 2, tile.stage_bytes, tile.num_stages * tile.stage_bytes
    ahead = tile.num_stages - 1
    quads, flip_of = warp_n // 4, mma.accumulator_flip(warp_n)
    # From a first 16x16 tile of w to those behind it, along K and along N: rows down, or chunks across (flipped bits).
    b_step_bytes, b_step_flip = (0, 32) if is_weight_layout else (16 * b_row_bytes, 0)
    b_pair_bytes, b_pair_flip = (16 * b_row_bytes, 0) if is_weight_layout else (0, 32)

    @device_function
    def place(row, chunk, chunks):
        """The offset of a chunk in a tile of that many chunks a row."""
        flip = row & uint32(7) if chunks >= uint32(8) else (row >> uint32(1)) & uint32(3)
        return (row * chunks + (chunk ^ flip)) << uint32(4)

    def gemm(x, weight, bias, residual, out, m, n, k, bias_is_f32):
        shared = memory.shared_address(cuda.shared.array(0, uint32))
        thread = uint32(cuda.threadIdx.x)
        lane, warp = thread & uint32(31), thread >> uint32(5)

        # Which tile: down GROUP_ROWS row tiles, then on to the next column tile.
        tiles_m = (m + uint32(block_m - 1)) // uint32(block_m)
        tiles_n = (n + uint32(block_n - 1)) // uint32(block_n)
        block = uint32(cuda.blockIdx.x)
        group = block // (uint32(GROUP_ROWS) * tiles_n)
        inside = block - group * (uint32(GROUP_ROWS) * tiles_n)
        group_rows = min(uint32(GROUP_ROWS), tiles_m - group * uint32(GROUP_ROWS))
        column_tile = inside // group_rows
        first_row = (group * uint32(GROUP_ROWS) + inside - column_tile * group_rows) * uint32(block_m)
        first_column = column_tile * uint32(block_n)

        # What this thread copies. Rows beyond the last repeat it: their sums are never stored.
        a_row, a_chunk = thread // uint32(a_chunks), thread % uint32(a_chunks)
        a_target = shared + place(a_row, a_chunk, uint32(a_chunks))
        a_rows = cuda.local.array(a_passes, uint64)
        for i in range(a_passes):
            a_rows[i] = x + uint64(min(first_row + a_row + uint32(i * a_step), m - uint32(1))) * uint64(k) * uint64(2)
        b_row, b_chunk = thread // uint32(b_chunks), thread % uint32(b_chunks)
        b_target = shared + uint32(a_bytes) + place(b_row, b_chunk, uint32(b_chunks))
        b_rows = cuda.local.array(b_passes, uint64)
        if is_weight_layout:
            for i in range(b_passes):
                row = min(first_column + b_row + uint32(i * b_step), n - uint32(1))
                b_rows[i] = weight + uint64(row) * uint64(k) * uint64(2)
        k_column, n_column = a_chunk * uint32(8), first_column + b_chunk * uint32(8)

        # What this warp multiplies: this lane's place in a stage for `ldmatrix`.
        warp_row, warp_column = warp // uint32(warps_n) * uint32(warp_m), warp % uint32(warps_n) * uint32(warp_n)
        a_place = place(warp_row + (lane & uint32(15)), lane >> uint32(4), uint32(a_chunks))
        if is_weight_layout:
            row = warp_column + (lane & uint32(7)) + ((lane >> uint32(4)) << uint32(3))
            b_place = place(row, (lane >> uint32(3)) & uint32(1), uint32(b_chunks))
        else:
            b_place = place(lane & uint32(15), (warp_column >> uint32(3)) + (lane >> uint32(4)), uint32(b_chunks))

        sums = cuda.local.array((m_tiles, n_pairs, 8), float32)
        for i in range(m_tiles):
            for j in range(n_pairs):
                for e in range(8):
                    sums[i, j, e] = float32(0.0)
        a = cuda.local.array((m_tiles, 4), uint32)

        write_stage, read_stage = uint32(0), uint32(0)
        index = uint32(0)
        while index < uint32(ahead):
            copy_tile(
                index, write_stage, a_target, a_rows, b_target, b_rows, weight, k_column, b_row, n_column, n, k
            )  # fmt: skip
            write_stage += uint32(stage_bytes)
            index += uint32(1)
        start = uint32(0)
        while start < k:
            wait_for_next()
            sync_block()  # tile `index - ahead` has arrived for all; the stage of the one before it is free
            copy_tile(
                index, write_stage, a_target, a_rows, b_target, b_rows, weight, k_column, b_row, n_column, n, k
            )  # fmt: skip
            write_stage += uint32(stage_bytes)
            if write_stage == uint32(all_stages_bytes):
                write_stage = uint32(0)
            index += uint32(1)

            a_stage = shared + read_stage
            b_stage = a_stage + uint32(a_bytes)
            for step in range(block_k // 16):
                for i in range(m_tiles):
                    fragment = load_a(a_stage + (a_place ^ uint32(step * 32)) + uint32(i * 16 * a_row_bytes))
                    for e in range(4):
                        a[i, e] = fragment[e]
                for j in range(n_pairs):
                    b = load_b(
                        b_stage + (b_place ^ uint32(step * b_step_flip + j * b_pair_flip))
                        + uint32(step * b_step_bytes + j * b_pair_bytes)
                    )  # fmt: skip
                    for i in range(m_tiles):
                        for h in range(2):
                            e = 4 * h
                            sums[i, j, e], sums[i, j, e + 1], sums[i, j, e + 2], sums[i, j, e + 3] = multiply(
                                (sums[i, j, e], sums[i, j, e + 1], sums[i, j, e + 2], sums[i, j, e + 3]),
                                (a[i, 0], a[i, 1], a[i, 2], a[i, 3]),
                                (b[0], b[1]) if h == 0 else (b[2], b[3]),
                            )
            read_stage += uint32(stage_bytes)
            if read_stage == uint32(all_stages_bytes):
                read_stage = uint32(0)
            start += uint32(block_k)

        # The sums, rows of this warp's tile, through shared memory, which no copy uses any more.
        wait_for_all()
        sync_block()
        staged = shared + warp * uint32(warp_m * warp_n * 4)
        pair = staged + ((lane >> uint32(2)) * uint32(warp_n) + (lane & uint32(3)) * uint32(2)) * uint32(4)
        flip = flip_of(lane >> uint32(2)) * uint32(4)
        for j in range(n_pairs):
            for h in range(2):
                at = pair + (uint32((j * 16 + h * 8) * 4) ^ flip)
                for i in range(m_tiles):
                    upper, lower = at + uint32(i * 16 * warp_n * 4), at + uint32((i * 16 + 8) * warp_n * 4)
                    store_pair(upper, (sums[i, j, 4 * h], sums[i, j, 4 * h + 1]))
                    store_pair(lower, (sums[i, j, 4 * h + 2], sums[i, j, 4 * h + 3]))
        sync_warp()
        first_row += warp_row
        first_column += warp_column
        if can_finish_quads(bias, residual, out, n):
            item = lane
            while item < uint32(warp_m * quads):
                row, column = item // uint32(quads), item % uint32(quads) * uint32(4)
                if first_row + row < m and first_column + column < n:
                    values = load_4(staged + (row * uint32(warp_n) + (column ^ flip_of(row))) * uint32(4))
                    finish_quad(bias, bias_is_f32, residual, out, n, first_row + row, first_column + column, values)
                item += uint32(32)
        else:
            item = lane
            while item < uint32(warp_m * warp_n):
                row, column = item // uint32(warp_n), item % uint32(warp_n)
                if first_row + row < m and first_column + column < n:
                    value = load_1(staged + (row * uint32(warp_n) + (column ^ flip_of(row))) * uint32(4))
                    finish(bias, bias_is_f32, residual, out, n, first_row + row, first_column + column, value)
                item += uint32(32)

    layout, alignment = "nk" if is_weight_layout else "kn", "aligned" if is_aligned else "any"
    return Specialisation(
        name=f"gemm_tensor_core_{dtype}_{out_dtype}_{tile}_{layout}_{alignment}",
        kernel=cuda.jit(gemm),
        argument_types=ARGUMENT_TYPES,
        max_threads=tile.num_warps * 32,
        min_blocks=512 // (tile.num_warps * 32) if is_aligned else 0,  # at most 128 registers
        constants={
            "dtype": dtype, "out_dtype": out_dtype, "tile": str(tile), "layout": layout, "is_aligned": is_aligned
        },
    )  # fmt: skip


def choose_tile(m: int, n: int, is_weight_layout: bool, is_aligned: bool, num_multiprocessors: int) -> Tile:
    """The tile for ``out [m, n]``. The choice changes no bit of the result."""
    if not (is_weight_layout and is_aligned):
        return SMALL
    if m <= SKINNY.block_m:
        return SKINNY
    return LARGE if -(-m // LARGE.block_m) * -(-n // LARGE.block_n) >= num_multiprocessors else SMALL


def plan(
    m: int,
    n: int,
    dtype: str,
    out_dtype: str,
    is_weight_layout: bool,
    is_aligned: bool,
    num_multiprocessors: int,
    tile: Tile | None = None,
) -> Launch:
    """A launch for ``out [m, n]``, both at least 1; `tile`, for the aligned weight layout, None to have it chosen."""
    tile = tile or choose_tile(m, n, is_weight_layout, is_aligned, num_multiprocessors)
    return Launch(
        _kernel(dtype, out_dtype, tile, is_weight_layout, is_aligned),
        (-(-m // tile.block_m) * -(-n // tile.block_n), 1, 1),
        (tile.num_warps * 32, 1, 1),
        shared_bytes=tile.shared_bytes,
    )


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for dtype, out_dtype in DTYPE_PAIRS:
        if dtype != "f32":
            for tile in TILES:
                yield _kernel(dtype, out_dtype, tile, True, True)
            for is_weight_layout, is_aligned in ((True, False), (False, True), (False, False)):
                yield _kernel(dtype, out_dtype, SMALL, is_weight_layout, is_aligned)
