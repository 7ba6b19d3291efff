"""Tier 4: tensor cores. Lesson: feeding `mma.sync`, by copies that run ahead of the arithmetic.

Against the register tier it changes

- the arithmetic: a warp multiplies 16x16 by 16x8 tiles in one instruction: 16-bit factors, float32 sums. A warp's tile
  of 64x64 takes a quarter of an `ldmatrix` an instruction;
- the way in: `cp.async` writes global memory to shared memory past the registers, `num_stages` K tiles ahead, so that a
  block waits for a copy that was begun several tiles ago, with one barrier a tile;
- the layout: shared memory keeps the 16-bit elements in chunks of 16 bytes, and chunk c of row r lies at c ^ (r mod 8)
  (rows of 64 bytes: c ^ (r / 2 mod 4)). Both the copies' writes and `ldmatrix`, which reads 8 rows of one chunk, then
  touch all 32 banks once: no conflicts, and no padding;
- the way out: sums pass through shared memory, so that bias, residual and output are read and written along rows
  (`tile_out.py`);
- in a gated unit half of a warp's columns are of the gate's half of the weight, the others those of up's that belong to
  them;
- the order of blocks: groups of 8 row tiles share a column tile's weights while these are in the second-level cache.

The weight [N, K] is the "col" operand of `mma.sync` as it lies; a plain B [K, N] is transposed by `ldmatrix.trans`.

Where rows do not lie on 16-byte bounds (`is_aligned` false) a chunk is read element by element and stored at once:
correct, and slow. Each sum runs over K in steps of 16 from first to last whatever the tile, so all tiles of one dtype
give the same bits: rows alone or batched are identical.

Source of the instructions' layouts: PTX ISA, "mma.sync", "ldmatrix", "cp.async".
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.epilogue import ARGUMENT_TYPES, DTYPE_PAIRS, GATED, product_kernel, scales_leaver
from numba_kernels.cuda.gemm.product import LATENCY_S, Machine, Product, tile_named
from numba_kernels.cuda.gemm.split_k import in_segment, segment_of
from numba_kernels.cuda.gemm.tile_out import sums_leaver
from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.device import device_function, in_turn
from numba_kernels.cuda.intrinsics.fragments import copy_rows, load_all, multiply_all
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

_BYTES_UNDER_WAY = 16 << 10  # of the weight, that a small tile's block has in flight: two stages
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
    def scales_bytes(self) -> int:
        """Bytes of the scales of rows, before the stages."""
        return max(128, 4 * self.block_m)

    @property
    def shared_bytes(self) -> int:
        staged = self.num_warps * 16 * self.warp_n * 4  # sums on their way out
        return self.scales_bytes + max(self.num_stages * self.stage_bytes, staged)

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}_s{self.num_stages}"


SKINNY = Tile(16, 64, 64, 16, 16, 5)  # few rows that must have the bits of many: the weight streams
SMALL = Tile(64, 64, 64, 32, 32, 3)
MEDIUM = Tile(128, 128, 32, 64, 64, 3)
LARGE = Tile(128, 256, 64, 64, 64, 2)
TILES = (SKINNY, SMALL, MEDIUM, LARGE)
EFFICIENCY = {SMALL: 0.6, MEDIUM: 0.95, LARGE: 1.0}
"""Work of a multiprocessor's tensor cores, one against the other; estimated."""
_LARGE_SPILLS_ON = ("sm_86", "sm_89")  # where ptxas finds it four registers short; with MEDIUM it has enough


@functools.cache
def _chunk_copier(is_aligned: bool) -> Any:
    """A device function ``(target, source, count)`` that brings 8 neighbours to shared memory, as many of them as there
    are, the rest zero. Missing ones are not read."""
    if is_aligned:
        copy = memory.copy_async_16
        return device_function(
            lambda target, source, count: copy(target, source, uint32(16) if count > uint32(0) else uint32(0))
        )
    load, store = memory.load_b16, memory.shared_store_b16

    @device_function
    def copy_elements(target, source, count):
        index = uint32(0)
        while index < uint32(8):
            element = types.uint16(0)
            if index < count:
                element = load(source + uint64(index) * uint64(2))
            store(target + index * uint32(2), element)
            index += uint32(1)

    return copy_elements


Source = namedtuple("Source", "a_target a_rows b_target b_rows weight column b_row b_column n")
"""A thread's copies: places in a stage and addresses, which move on, of x and of the weight; its first k in a tile of x
or of a weight, and its k and n of plain B."""


@functools.cache
def _tile_copier(tile: Tile, is_weight_layout: bool, is_aligned: bool) -> Any:
    """A device function ``(index, stage, source, k)`` that brings one K tile of x and weight to a stage, a part of it
    by each thread. For a segment `k` is the length."""
    copy_chunk, commit = _chunk_copier(is_aligned), memory.copy_async_commit
    a_chunks, a_passes, a_step = _passes(tile, tile.block_m, tile.block_k)
    b_chunks, b_passes, b_step = _passes(tile, *_weight_tile(tile, is_weight_layout))
    block_k, tile_bytes = tile.block_k, tile.block_k * 2
    if is_weight_layout and is_aligned:
        copy_a, copy_b = copy_rows(a_passes, a_step * a_chunks * 16), copy_rows(b_passes, b_step * b_chunks * 16)

        @device_function
        def copy_rows_on(index, stage, source, k):
            first = uint32(index * uint32(block_k) + source.column)
            num_bytes = uint32(16) if first < k else uint32(0)
            copy_a(uint32(stage + source.a_target), source.a_rows, num_bytes)
            copy_b(uint32(stage + source.b_target), source.b_rows, num_bytes)
            for i in range(a_passes):
                source.a_rows[i] += uint64(tile_bytes)
            for i in range(b_passes):
                source.b_rows[i] += uint64(tile_bytes)
            commit()

        return copy_rows_on

    @device_function
    def copy_tile(index, stage, source, k):
        a_target, a_rows, b_target, b_rows, weight, column, b_row, b_column, n = source
        start = uint32(index * uint32(block_k))
        if start < k:
            first = uint32(start + column)
            count = uint32(k - first) if first < k else uint32(0)
            for i in range(a_passes):
                copy_chunk(uint32(stage + a_target + uint32(i * a_step * a_chunks * 16)), a_rows[i], count)
                a_rows[i] += uint64(tile_bytes)
            for i in range(b_passes):
                target = uint32(stage + b_target + uint32(i * b_step * b_chunks * 16))
                if is_weight_layout:
                    copy_chunk(target, b_rows[i], count)
                    b_rows[i] += uint64(tile_bytes)
                else:
                    row = uint32(start + b_row + uint32(i * b_step))
                    at = weight + (uint64(row) * uint64(n) + uint64(b_column)) * uint64(2)
                    copy_chunk(target, at, uint32(n - b_column) if row < k and b_column < n else uint32(0))
        commit()

    return copy_tile


def _weight_tile(tile: Tile, is_weight_layout: bool) -> tuple[int, int]:
    """Rows of the weight's tile in shared memory, and elements a row."""
    return (tile.block_n, tile.block_k) if is_weight_layout else (tile.block_k, tile.block_n)


def _passes(tile: Tile, rows: int, columns: int) -> tuple[int, int, int]:
    """The block's copy of ``[rows, columns]``: chunks of 8 elements a row, passes, and rows a pass."""
    chunks = columns // 8
    step = tile.num_warps * 32 // chunks
    if step % 8 or rows % step:  # the swizzle repeats after 8 rows
        raise ValueError(f"tile {tile}: {tile.num_warps * 32} threads do not copy [{rows}, {columns}] in whole passes")
    return chunks, rows // step, step


@functools.cache
def tile_multiplier(
    dtype: str, out_dtype: str, tile: Tile, is_weight_layout: bool, is_aligned: bool, is_cut: bool = False,
    activation: str = "", is_grouped: bool = False,
) -> Any:  # fmt: skip
    """A device function ``(given, first_row, first_column, tokens)`` that multiplies a block's tile and finishes it;
    `tokens` is a list of rows.

    In a grouped product (`is_grouped`) the previous grids have ended when it is called, weight and bias are an
    expert's, `m` is one past the tile's last row, row r of x is ``tokens[r]``, unless `tokens` is 0, and gate and up
    may have biases.
    """
    is_gated = activation != ""
    leave_sums = sums_leaver(
        dtype, out_dtype, tile.warp_m, tile.warp_n, activation, is_cut=is_cut, is_biased=is_grouped
    )  # fmt: skip
    leave_scales, scales_bytes, num_warps = scales_leaver(4), tile.scales_bytes, tile.num_warps
    copy_tile = _tile_copier(tile, is_weight_layout, is_aligned)
    wait_for_next, wait_for_all = memory.copy_async_wait(tile.num_stages - 2), memory.copy_async_wait(0)

    block_m, block_k = tile.block_m, tile.block_k
    warp_m, warp_n, warps_n = tile.warp_m, tile.warp_n, tile.block_n // tile.warp_n
    m_tiles, n_pairs = warp_m // 16, warp_n // 16  # 16x16 of the output: two mma
    a_chunks, a_passes, a_step = _passes(tile, block_m, block_k)
    b_chunks, b_passes, b_step = _passes(tile, *_weight_tile(tile, is_weight_layout))
    a_row_bytes, b_row_bytes = a_chunks * 16, b_chunks * 16
    a_bytes, stage_bytes, all_stages_bytes = block_m * block_k * 2, tile.stage_bytes, tile.num_stages * tile.stage_bytes
    ahead = tile.num_stages - 1
    columns_out = warp_n // 2 if is_gated else warp_n
    num_sums, num_a_words, num_b_words = m_tiles * n_pairs * 8, m_tiles * 4, n_pairs * 4  # registers of a lane
    multiply = multiply_all(
        dtype,
        tuple(
            (8 * (i * n_pairs + j) + 4 * h, tuple(range(4 * i, 4 * i + 4)), (4 * j + 2 * h, 4 * j + 2 * h + 1))
            for i in range(m_tiles) for j in range(n_pairs) for h in range(2)
        ),
    )  # fmt: skip
    load_a = load_all("matrix", tuple((4 * i, 0, i * 16 * a_row_bytes) for i in range(m_tiles)))
    # From a first 16x16 tile of w to those after it along N: rows down, or chunks across (flipped bits).
    b_places = 1 if is_weight_layout else n_pairs
    load_b = load_all(
        "matrix" if is_weight_layout else "matrix_transposed",
        tuple((4 * j, min(j, b_places - 1), j * 16 * b_row_bytes if is_weight_layout else 0) for j in range(n_pairs)),
    )

    def step_of(step: int) -> Any:
        """16 of K: both factors' tiles of this warp, and their products."""
        b_flip, b_offset = (step * 32, 0) if is_weight_layout else (0, step * 16 * b_row_bytes)

        @device_function
        def multiply_step(state):
            a_stage, b_stage, a_place, b_place, a_at, b_at, a, b, sums = state
            a_at[0] = uint32(a_stage + (a_place ^ uint32(step * 32)))
            for j in range(b_places):
                b_at[j] = uint32(b_stage + (b_place ^ uint32(b_flip + j * 32)) + uint32(b_offset))
            load_a(a, a_at)
            load_b(b, b_at)
            multiply(sums, a, b)

        return multiply_step

    multiply_steps = in_turn([step_of(step) for step in range(block_k // 16)])

    @device_function
    def place(row, chunk, chunks):
        """The offset of a chunk in a tile of that many chunks a row."""
        flip = row & uint32(7) if chunks >= uint32(8) else (row >> uint32(1)) & uint32(3)
        return (row * chunks + (chunk ^ flip)) << uint32(4)

    @device_function
    def multiply_tile(given, first_row, first_column, tokens):
        x, weight, m, n, k = given.x, given.weight, given.m, given.n, given.k
        scales = memory.shared_address(cuda.shared.array(0, uint32))
        shared = uint32(scales + uint32(scales_bytes))
        thread = uint32(cuda.threadIdx.x)
        lane, warp = thread & uint32(31), thread >> uint32(5)

        length = k
        if is_cut:
            first, length = segment_of(k)
            x += uint64(first) * uint64(2)
            weight += uint64(first) * uint64(2)

        # This thread's copies. Rows beyond the last repeat it: their sums are never stored.
        a_row, a_chunk = thread // uint32(a_chunks), thread % uint32(a_chunks)
        a_target = shared + place(a_row, a_chunk, uint32(a_chunks))
        a_rows = cuda.local.array(a_passes, uint64)
        for i in range(a_passes):
            row = min(first_row + a_row + uint32(i * a_step), m - uint32(1))
            if is_grouped and tokens != uint64(0):
                row = memory.load_b32(tokens + uint64(row) * uint64(4))
            a_rows[i] = x + uint64(row) * uint64(k) * uint64(2) + uint64(a_chunk) * uint64(16)
        b_row, b_chunk = thread // uint32(b_chunks), thread % uint32(b_chunks)
        b_target = shared + uint32(a_bytes) + place(b_row, b_chunk, uint32(b_chunks))
        b_rows = cuda.local.array(b_passes, uint64)
        if is_weight_layout:
            for i in range(b_passes):
                inside = b_row + uint32(i * b_step)
                if is_gated:
                    column = inside % uint32(warp_n)
                    row = first_column + inside // uint32(warp_n) * uint32(columns_out) + column % uint32(columns_out)
                    row = min(row, n - uint32(1))
                    if column >= uint32(columns_out):
                        row += n  # up's
                else:
                    row = min(first_column + inside, n - uint32(1))
                b_rows[i] = weight + uint64(row) * uint64(k) * uint64(2) + uint64(b_chunk) * uint64(16)
        k_column, n_column = a_chunk * uint32(8), first_column + b_chunk * uint32(8)

        # This warp's factors: this lane's place in a stage for `ldmatrix`.
        warp_row, warp_column = warp // uint32(warps_n) * uint32(warp_m), warp % uint32(warps_n) * uint32(warp_n)
        a_place = place(warp_row + (lane & uint32(15)), lane >> uint32(4), uint32(a_chunks))
        if is_weight_layout:
            row = warp_column + (lane & uint32(7)) + ((lane >> uint32(4)) << uint32(3))
            b_place = place(row, (lane >> uint32(3)) & uint32(1), uint32(b_chunks))
        else:
            b_place = place(lane & uint32(15), (warp_column >> uint32(3)) + (lane >> uint32(4)), uint32(b_chunks))

        sums = cuda.local.array(num_sums, float32)
        for e in range(num_sums):
            sums[e] = float32(0.0)
        a, b = cuda.local.array(num_a_words, uint32), cuda.local.array(num_b_words, uint32)
        a_at, b_at = cuda.local.array(1, uint32), cuda.local.array(b_places, uint32)

        if not is_grouped:
            wait_for_previous_grid()
        source = Source(a_target, a_rows, b_target, b_rows, weight, k_column, b_row, n_column, n)
        write_stage, read_stage = uint32(0), uint32(0)
        index = uint32(0)
        while index < uint32(ahead):
            copy_tile(index, write_stage, source, length)
            write_stage = uint32(write_stage + uint32(stage_bytes))
            index = uint32(index + uint32(1))
        if not is_cut:
            leave_scales(given, scales, first_row, uint32(block_m), warp, uint32(num_warps), lane)
        start = uint32(0)
        while start < length:
            wait_for_next()
            sync_block()  # tile `index - ahead` has arrived for all; the stage of the one before it is free
            copy_tile(index, write_stage, source, length)
            write_stage = uint32(write_stage + uint32(stage_bytes))
            if write_stage == uint32(all_stages_bytes):
                write_stage = uint32(0)
            index = uint32(index + uint32(1))

            a_stage = uint32(shared + read_stage)
            b_stage = uint32(a_stage + uint32(a_bytes))
            multiply_steps((a_stage, b_stage, a_place, b_place, a_at, b_at, a, b, sums))
            read_stage = uint32(read_stage + uint32(stage_bytes))
            if read_stage == uint32(all_stages_bytes):
                read_stage = uint32(0)
            start = uint32(start + uint32(block_k))

        launch_dependents()
        # Through shared memory, which no copy uses any more.
        wait_for_all()
        sync_block()
        staged = shared + warp * uint32(16 * warp_n * 4)
        first_row += warp_row
        first_column += warp_column // uint32(warp_n) * uint32(columns_out)
        scales = uint32(scales + warp_row * uint32(4))
        if is_cut:  # not sooner: the sums need all registers
            given = in_segment(given)
        leave_sums(given, sums, staged, scales, first_row, first_column, lane)

    return multiply_tile


@functools.cache
def tile_finder(block_m: int, block_columns: int) -> Any:
    """A device function ``(number of row tiles, n) -> (this block's row tile, its first column)``: blocks go down
    `GROUP_ROWS` row tiles, then on to the next column tile. Surplus blocks get one of the two beyond the last."""

    @device_function
    def find_tile(tiles_m, n):
        tiles_n = (n + uint32(block_columns - 1)) // uint32(block_columns)
        block = uint32(cuda.blockIdx.x)
        group = block // (uint32(GROUP_ROWS) * tiles_n)
        inside = block - group * (uint32(GROUP_ROWS) * tiles_n)
        first = group * uint32(GROUP_ROWS)
        group_rows = uint32(1)
        if first < tiles_m:
            group_rows = min(uint32(GROUP_ROWS), tiles_m - first)
        column_tile = inside // group_rows
        return uint32(first + inside - column_tile * group_rows), uint32(column_tile * uint32(block_columns))

    return find_tile


@functools.cache
def _kernel(
    dtype: str, out_dtype: str, tile: Tile, is_weight_layout: bool, is_aligned: bool, is_cut: bool = False,
    activation: str = "",
) -> Specialisation:  # fmt: skip
    is_gated, warp_n, block_m = activation != "", tile.warp_n, tile.block_m
    multiply_tile = tile_multiplier(dtype, out_dtype, tile, is_weight_layout, is_aligned, is_cut, activation)
    find_tile = tile_finder(block_m, tile.block_n // 2 if is_gated else tile.block_n)

    @device_function
    def multiply(given):
        row_tile, first_column = find_tile((given.m + uint32(block_m - 1)) // uint32(block_m), given.n)
        multiply_tile(given, uint32(row_tile * uint32(block_m)), first_column, uint64(0))

    layout, alignment = "nk" if is_weight_layout else "kn", "aligned" if is_aligned else "any"
    variant = "_segments" if is_cut else f"_{activation}" if is_gated else ""
    return Specialisation(
        name=f"gemm_tensor_core_{dtype}_{out_dtype}_{tile}_{layout}_{alignment}{variant}",
        kernel=product_kernel(multiply),
        argument_types=ARGUMENT_TYPES,
        max_threads=tile.num_warps * 32,
        min_blocks=min_blocks(tile) if is_aligned else 0,
        spills_on=_LARGE_SPILLS_ON if tile is LARGE else (),
        constants={
            "dtype": dtype, "out_dtype": out_dtype, "tile": str(tile), "layout": layout, "is_aligned": is_aligned,
            "is_cut": is_cut, "activation": activation, "square_columns": 0 if is_cut or is_gated else warp_n,
        },
    )  # fmt: skip


def min_blocks(tile: Tile) -> int:
    """Blocks that share a multiprocessor's registers. A thread of a large warp tile needs them all for its sums."""
    most_registers = 128 if tile.warp_m * tile.warp_n <= 32 * 32 else 255
    return 65_536 // (tile.num_warps * 32 * most_registers)


def choose_tile(
    m: int, n: int, is_weight_layout: bool, is_aligned: bool, num_multiprocessors: int, num_segments: int = 1,
    arch: str = "",
) -> Tile:  # fmt: skip
    """The tile for ``out [m, n]``, or for that of each segment of K. The choice changes no bit of the result."""
    if not (is_weight_layout and is_aligned):
        return SMALL
    if m <= SKINNY.block_m:
        return SKINNY

    def cost(tile: Tile) -> float:
        blocks = -(-m // tile.block_m) * -(-n // tile.block_n) * num_segments
        rounds = -(-blocks // num_multiprocessors)
        return rounds * tile.block_m * tile.block_n / EFFICIENCY[tile]

    return min((tile for tile in EFFICIENCY if tile is not LARGE or arch not in _LARGE_SPILLS_ON), key=cost)


def why_not(product: Product, machine: Machine) -> str:
    """Why it cannot compute a product; "" if it can."""
    if product.weight != product.x or product.x == "f32":
        return "multiplies 16-bit factors of one type"
    return "gates in the weight layout" if product.epilogue.activation and not product.is_weight_layout else ""


def seconds(product: Product, machine: Machine) -> float:
    """Seconds by work, the second-level cache and latency, in tiles of 64."""
    row_tiles, column_tiles = -(-product.m // 64), -(-product.n // 64)
    return max(
        2 * product.n * product.k * row_tiles * 64 / machine.tensor_flops,
        product.weight_bytes * 2 / machine.cache_bytes,
        LATENCY_S * product.weight_bytes / (column_tiles * row_tiles * _BYTES_UNDER_WAY),
    )


def tiles(product: Product, machine: Machine) -> tuple[str, ...]:
    """The tiles worth measuring for a product."""
    fitting = TILES[:-1] if machine.arch in _LARGE_SPILLS_ON else TILES
    return tuple(str(tile) for tile in fitting if tile.block_m >= 64 or product.m <= 4 * tile.block_m)


def plan(product: Product, machine: Machine, tile: str = "") -> Launch:
    """A launch for a product that it can compute and that is not empty; `tile`, for the aligned weight layout, by its
    name, or "" to have it chosen."""
    is_weight_layout, is_aligned = product.is_weight_layout, product.is_aligned
    if tile and not (is_weight_layout and is_aligned):
        raise ValueError(f"gemm: tile is {tile!r}: tier tensor_core with these arrays has none to choose from")
    parts = max(1, product.num_segments)
    chosen = tile_named(TILES, tile) or choose_tile(
        product.m, product.weight_rows, is_weight_layout, is_aligned, machine.num_multiprocessors, parts, machine.arch
    )
    if product.epilogue.activation and chosen is LARGE:
        chosen = MEDIUM  # a thread of a large one has no registers left for the gate
    return Launch(
        _kernel(product.x, product.out, chosen, is_weight_layout, is_aligned, parts > 1, product.epilogue.activation),
        (-(-product.m // chosen.block_m) * -(-product.weight_rows // chosen.block_n), parts, 1),
        (chosen.num_warps * 32, 1, 1),
        shared_bytes=chosen.shared_bytes,
    )


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for dtype, out_dtype in DTYPE_PAIRS:
        if dtype != "f32":
            for activation in ("", *GATED) if out_dtype == dtype else ("",):
                for tile in TILES[:3] if activation else TILES:
                    yield _kernel(dtype, out_dtype, tile, True, True, activation=activation)
                if activation:
                    yield _kernel(dtype, out_dtype, SMALL, True, False, activation=activation)
            for is_weight_layout, is_aligned in ((True, False), (False, True), (False, False)):
                yield _kernel(dtype, out_dtype, SMALL, is_weight_layout, is_aligned)
    for dtype in ("f16", "bf16"):
        for tile, is_aligned in (*((tile, True) for tile in TILES), (SMALL, False)):
            yield _kernel(dtype, "f32", tile, True, is_aligned, is_cut=True)
