"""Many rows times a packed weight (`packing.py`): the tensor-core tier's tiles, where the weight's stay packed until
they are in registers. Lesson: unpacking is free where tensor cores are the bottleneck.

Against `tensor_core` it changes

- the weight's tile: it comes to shared memory as it is packed, followed by its groups' scales and offsets. A lane's 16
  bytes are its own factors, 4 or 2 steps of 32 of K, so that it is read without `ldmatrix` or a swizzle;
- the order of K: lane t has elements 8t to 8t + 7 of a step (`skinny.py`), and reads x so, 16 bytes at a time. Chunks
  of odd rows are exchanged by fours, which keeps lanes out of each other's banks;
- between: a warp unpacks 16 columns of a step into 8 registers, and multiplies them by its 64 rows:
  some 14 instructions beside 8 `mma.sync`;
- the way out: the weight's rows have scales.

Against `skinny`, whose blocks have 64 rows and 32 or 64 columns, half of x and of the weight is read; against a
matrix that is dequantised first, it saves 4 bytes an element, and that memory.

Each sum runs over K from first to last. All of K is one block's.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.epilogue import ARGUMENT_TYPES, product_kernel, scale_element, scales_leaver
from numba_kernels.cuda.gemm.product import LATENCY_S, Machine, Product
from numba_kernels.cuda.gemm.tensor_core import tile_finder
from numba_kernels.cuda.gemm.tile_out import sums_leaver
from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.device import device_function, in_turn
from numba_kernels.cuda.intrinsics.element_types import INTEGERS, ITEM_BYTES, SHIFTS
from numba_kernels.cuda.intrinsics.fragments import copy_all, copy_rows, load_all, multiply_all
from numba_kernels.cuda.intrinsics.math import minimum_u32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.unpack import half_pair, spread_all, unpack_all
from numba_kernels.cuda.packed_sections import sections_of
from numba_kernels.cuda.packing import PACKINGS, TILE_BYTES, TILE_ROWS, Packing, packing_of
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

BLOCK_M, BLOCK_N, WARP_N = 128, 128, 32
FEW_ROWS = 16  # of a tile that streams the weight: experts' products alone take it
WARPS_N = BLOCK_N // WARP_N
TILE_COLUMNS = 16  # of the output, that share a load of scales
_EFFICIENCY = 0.85  # of the tensor cores' rate; estimated, but for
_HOPPER_EFFICIENCY, _HOPPER_ENDS_S = 0.39, 12e-6
"""195 to 237 TFLOP/s are what a H200 had of mixtures' prompts in these tiles; the ends are those of `w8a8`."""
_MIN_ROWS = 65  # fewer stream (`skinny`)


def _group_bytes(packing: Packing, dtype: str) -> tuple[int, int]:
    """Bytes of the scales, and of the offsets, of 16 columns and a slot."""
    columns = TILE_ROWS * packing.halves
    return columns * packing.chunk_bytes(dtype), columns * packing.zeros_bytes(dtype)


def _num_stages(packing: Packing, block_m: int = BLOCK_M) -> int:
    """Slots in flight: of 128 elements of K, 99 KB hold only two."""
    if block_m == FEW_ROWS:
        return 4
    return 2 if packing.slot == 128 else 3


def num_threads(block_m: int = BLOCK_M) -> int:
    """Rows of a block's warps: 64, or all."""
    return 32 * WARPS_N * block_m // _warp_rows(block_m)


def _warp_rows(block_m: int) -> int:
    return min(block_m, 64)


def _scales_bytes(block_m: int) -> int:
    """Bytes of the scales of x's rows, before the stages."""
    return max(128, 4 * block_m)


def _stage_bytes(packing: Packing, dtype: str, block_m: int) -> int:
    words = block_m * packing.slot * 2 + BLOCK_N // TILE_ROWS * TILE_BYTES
    return words + BLOCK_N // TILE_COLUMNS * sum(_group_bytes(packing, dtype))


def shared_bytes(weight: str, dtype: str, block_m: int = BLOCK_M) -> int:
    """Bytes of a block's shared memory."""
    packing = packing_of(weight)
    assert packing is not None
    staged = num_threads(block_m) // 32 * 16 * WARP_N * 4  # sums on their way out
    stages = _num_stages(packing, block_m) * _stage_bytes(packing, dtype, block_m)
    return _scales_bytes(block_m) + max(stages, staged)


Stage = namedtuple(
    "Stage", "x_row_bytes words_at scales_at zeros_at num_bytes count x_chunks x_step x_passes words_passes threads"
)
"""A stage holds x's tile, the weight's, its scales, its offsets: bytes of a row of x; where the others begin; bytes of
one, and their number; chunks of 16 bytes of a row of x, rows that a pass of the block's threads copies (even), and
passes; passes of tiles of words; threads."""

Source = namedtuple(
    "Source", "x_target x_row x_row_step x_there words_target rows groups has_group group_targets column"
)
"""A thread's copies: places in a stage, addresses, which move on by a slot, and counts; its first k in a slot."""


@functools.cache
def _stage(packing: Packing, dtype: str, block_m: int) -> Stage:
    x_chunks, threads, words_at = packing.slot // 8, num_threads(block_m), block_m * packing.slot * 2
    scales_at, x_step = words_at + BLOCK_N // TILE_ROWS * TILE_BYTES, threads // x_chunks
    zeros_at = scales_at + BLOCK_N // TILE_COLUMNS * _group_bytes(packing, dtype)[0]
    return Stage(
        packing.slot * 2, words_at, scales_at, zeros_at, _stage_bytes(packing, dtype, block_m),
        _num_stages(packing, block_m), x_chunks, x_step, block_m // x_step, BLOCK_N // TILE_ROWS // (threads // 32),
        threads,
    )  # fmt: skip


@functools.cache
def _tile_finder(columns_out: int) -> Any:
    """A device function ``(inside, first_column, n)``: the weight's tile of 16 rows at a place in shared memory, where
    a warp has so many columns of the output; those beyond the last repeat it."""

    @device_function
    def tile_of(inside, first_column, n):
        column = inside * uint32(TILE_COLUMNS)
        within = column % uint32(WARP_N)
        first = column // uint32(WARP_N) * uint32(columns_out) + within % uint32(columns_out)
        tile, is_up = first // uint32(TILE_COLUMNS), within // uint32(columns_out)
        last = uint32(uint32(n + uint32(TILE_COLUMNS - 1)) // uint32(TILE_COLUMNS) - uint32(1))
        tile = minimum_u32(uint32(tile + first_column // uint32(TILE_COLUMNS)), last)
        return uint32(tile + is_up * uint32(n // uint32(TILE_COLUMNS)))

    return tile_of


@functools.cache
def _slot_copier(packing: Packing, dtype: str, block_m: int, is_gated: bool, is_grouped: bool) -> tuple[Any, Any]:
    """Device functions ``(given, sections, first_row, first_column, tokens, thread) -> Source``, and ``(index, stage,
    source, k)``, which copies a slot. Rows of x beyond the last are zeros, in a list of rows the last one."""
    stage = _stage(packing, dtype, block_m)
    x_row_bytes, x_chunks, x_step, x_passes = stage.x_row_bytes, stage.x_chunks, stage.x_step, stage.x_passes
    words_at, scales_at, zeros_at, words_passes = stage.words_at, stage.scales_at, stage.zeros_at, stage.words_passes
    has_scales, has_zeros, slot_elements = packing.group > 0, packing.has_zeros, packing.slot
    (scale_bytes, zero_bytes), num_warps = _group_bytes(packing, dtype), stage.threads // 32
    scale_pieces, zero_pieces = scale_bytes // 16, zero_bytes // 16  # of 16 columns, 16 bytes each
    all_scale_pieces, all_zero_pieces = scale_pieces * BLOCK_N // TILE_COLUMNS, zero_pieces * BLOCK_N // TILE_COLUMNS
    assert max(all_scale_pieces, all_zero_pieces) <= stage.threads
    copy_x, copy_words = copy_all(x_passes, x_step * x_row_bytes), copy_rows(words_passes, num_warps * TILE_BYTES)
    copy_listed, num_x_rows = copy_rows(x_passes, x_step * x_row_bytes), x_passes if is_grouped else 1
    copy_one, commit = copy_all(1, 0), memory.copy_async_commit
    tile_of = _tile_finder(WARP_N // 2 if is_gated else WARP_N)

    @device_function
    def place_copies(given, sections, first_row, first_column, tokens, thread):
        x, m, n, k = given.x, given.m, given.n, given.k
        all_words, all_scales, all_zeros, slots = sections
        lane, warp = thread & uint32(31), thread >> uint32(5)
        row, chunk = thread // uint32(x_chunks), thread % uint32(x_chunks)
        x_target = row * uint32(x_row_bytes) + ((chunk ^ ((row & uint32(1)) << uint32(2))) << uint32(4))
        x_row = cuda.local.array(num_x_rows, uint64)
        for i in range(num_x_rows):
            source_row = uint32(first_row + row + uint32(i * x_step))
            if is_grouped:
                source_row = minimum_u32(source_row, uint32(m - uint32(1)))
                if tokens != uint64(0):
                    source_row = memory.load_b32(tokens + uint64(source_row) * uint64(4))
            x_row[i] = x + uint64(source_row) * uint64(k) * uint64(2) + uint64(chunk) * uint64(16)
        x_row_step = uint64(x_step * 2) * uint64(k)
        x_there = uint32(1)
        if not is_grouped:
            x_there = uint32(0)
        if not is_grouped and first_row + row < m:
            x_there = uint32(m - first_row - row + uint32(x_step - 1)) // uint32(x_step)
        rows = cuda.local.array(words_passes, uint64)
        for i in range(words_passes):
            inside = warp + uint32(i * num_warps)  # of the tiles of 8 rows
            tile = tile_of(inside >> uint32(1), first_column, n) * uint32(2) + (inside & uint32(1))
            rows[i] = all_words + uint64(tile) * uint64(slots) * uint64(TILE_BYTES) + uint64(lane * uint32(16))
        words_target = uint32(words_at) + thread * uint32(16)
        groups, has_group = cuda.local.array(2, uint64), cuda.local.array(2, uint32)
        group_targets = cuda.local.array(2, uint32)
        if has_scales:
            piece = minimum_u32(thread, uint32(all_scale_pieces - 1))
            tile = tile_of(piece // uint32(scale_pieces), first_column, n)
            groups[0] = all_scales + uint64(tile) * uint64(slots) * uint64(scale_bytes)
            groups[0] += uint64(piece % uint32(scale_pieces)) * uint64(16)
            has_group[0] = uint32(1) if thread < uint32(all_scale_pieces) else uint32(0)
            group_targets[0] = uint32(scales_at) + piece * uint32(16)
        if has_zeros:
            piece = minimum_u32(thread, uint32(all_zero_pieces - 1))
            tile = tile_of(piece // uint32(zero_pieces), first_column, n)
            groups[1] = all_zeros + uint64(tile) * uint64(slots) * uint64(zero_bytes)
            groups[1] += uint64(piece % uint32(zero_pieces)) * uint64(16)
            has_group[1] = uint32(1) if thread < uint32(all_zero_pieces) else uint32(0)
            group_targets[1] = uint32(zeros_at) + piece * uint32(16)
        column = chunk * uint32(8)
        source = x_target, x_row, x_row_step, x_there, words_target, rows, groups, has_group, group_targets, column
        return Source(*source)

    @device_function
    def copy_slot(index, stage, source, k):
        start = uint32(index * uint32(slot_elements))
        if start < k:
            num_there = source.x_there if uint32(start + source.column) < k else uint32(0)
            target = uint32(stage + source.x_target)
            if is_grouped:
                copy_listed(target, source.x_row, uint32(16) if num_there > uint32(0) else uint32(0))
            else:
                copy_x(target, source.x_row[0], source.x_row_step, uint32(0xFFFFFFFF), num_there)
            for i in range(num_x_rows):
                source.x_row[i] += uint64(x_row_bytes)
            copy_words(uint32(stage + source.words_target), source.rows, uint32(16))
            for i in range(words_passes):
                source.rows[i] += uint64(TILE_BYTES)
            groups, targets, has_group = source.groups, source.group_targets, source.has_group
            if has_scales:
                copy_one(uint32(stage + targets[0]), groups[0], uint64(0), has_group[0], uint32(1))
                groups[0] += uint64(scale_bytes)
            if has_zeros:
                copy_one(uint32(stage + targets[1]), groups[1], uint64(0), has_group[1], uint32(1))
                groups[1] += uint64(zero_bytes)
        commit()

    return place_copies, copy_slot


@functools.cache
def _slot_multiplier(packing: Packing, dtype: str, warp_m: int) -> Any:
    """A device function of a tuple: (stage, x_place, x_at, sums, x_words, words, group_words, factors, pairs,
    group_at). A warp's products of a slot."""
    scale_bytes, zero_bytes = _group_bytes(packing, dtype)
    has_scales, has_zeros, halves = packing.group > 0, packing.has_zeros, packing.halves
    load_x = load_all("shared", tuple((4 * i, 0, i * 8 * packing.slot * 2) for i in range(warp_m // 8)))
    is_shifted = not has_scales and packing.element not in INTEGERS
    shift = half_pair(2.0 ** SHIFTS.get((packing.element, dtype), 0), dtype)

    def columns_of(step: int, pair: int) -> Any:
        """16 of a warp's columns, a step of K: unpacked and multiplied."""
        index = (step if halves == 2 else step * packing.lane_scales // packing.steps) if has_scales else 0
        per_word = 4 // packing.scale_bytes(dtype) if has_scales else 1
        load_scale = load_all("shared", ((0, 0, pair * scale_bytes + 2 * index // per_word * 4),), 1)
        load_zero = load_all("shared", ((1, 1, pair * zero_bytes + 2 * index // 2 * 4),), 1)
        spread_scales = spread_zeros = None
        if has_scales:
            spread_scales = spread_all(packing.scale, dtype, tuple((r, 0, (2 * index + r) % per_word) for r in (0, 1)))
        if has_zeros:
            spread_zeros = spread_all("value", dtype, tuple((2 + r, 1, r) for r in (0, 1)))
        unpack = unpack_all(
            packing.element, dtype,
            tuple(
                (4 * r, 4 * (2 * pair + r) + packing.lane_words * step, r if has_scales or is_shifted else -1,
                 2 + r if has_zeros else -1)
                for r in (0, 1)
            ), has_zeros,
        )  # fmt: skip
        multiply = multiply_all(
            dtype,
            tuple(
                (8 * (i * (WARP_N // 16) + pair) + 4 * r, tuple(8 * i + 2 * h + e for e in (0, 4, 1, 5)),
                 (4 * r + 2 * h, 4 * r + 2 * h + 1))
                for h in (0, 1) for i in range(warp_m // 16) for r in (0, 1)
            ),
        )  # fmt: skip

        @device_function
        def multiply_columns(state):
            _, _, _, sums, x_words, words, group_words, factors, pairs, group_at = state
            if has_scales:
                load_scale(group_words, group_at)
                spread_scales(factors, group_words)
            if is_shifted:
                factors[0], factors[1] = uint32(shift), uint32(shift)
            if has_zeros:
                load_zero(group_words, group_at)
                spread_zeros(factors, group_words)
            unpack(pairs, words, factors, factors)
            multiply(sums, x_words, pairs)

        return multiply_columns

    def x_loader(step: int) -> Any:
        @device_function
        def load_step(state):
            stage, x_place, x_at, _, x_words, _, _, _, _, _ = state
            x_at[0] = uint32(stage + (x_place ^ uint32(step * 64)))
            load_x(x_words, x_at)

        return load_step

    return in_turn(
        [
            part for step in range(packing.steps)
            for part in (x_loader(step), *(columns_of(step, pair) for pair in range(WARP_N // 16)))
        ]
    )  # fmt: skip


@functools.cache
def _sums_scaler(warp_m: int, columns_out: int) -> Any:
    """A device function ``(sums, row_scales, column, last_pair, n)`` of a tuple: a warp's sums times the scales of the
    weight's rows."""
    n_tiles, m_tiles, load_pair = WARP_N // 8, warp_m // 16, memory.load_2xf32

    def scaling_of(j: int) -> Any:
        """The sums of 8 columns, of which a lane has two."""
        first_sum, inside, is_up = 8 * (j // 2) + 4 * (j % 2), 8 * j % columns_out, 8 * j >= columns_out

        @device_function
        def scale_columns(state):
            sums, row_scales, column, last_pair, n = state
            column = minimum_u32(uint32(column + uint32(inside)), last_pair)
            if is_up:
                column = uint32(column + n)
            low, high = load_pair(row_scales + uint64(column) * uint64(4))
            for i in range(m_tiles):
                at = 8 * (n_tiles // 2) * i + first_sum  # a quad: two columns of two rows
                sums[at], sums[at + 1] = scale_element(sums[at], low), scale_element(sums[at + 1], high)
                sums[at + 2], sums[at + 3] = scale_element(sums[at + 2], low), scale_element(sums[at + 3], high)

        return scale_columns

    return in_turn([scaling_of(j) for j in range(n_tiles)])


@functools.cache
def tile_multiplier(
    dtype: str, weight_name: str, out_dtype: str, activation: str = "", block_m: int = BLOCK_M, is_grouped: bool = False
) -> Any:
    """A device function that multiplies a block's tile and finishes it, as `tensor_core.tile_multiplier`'s does."""
    packing = packing_of(weight_name)
    assert packing is not None
    rows_a_column, stage, warp_m = 2 if activation else 1, _stage(packing, dtype, block_m), _warp_rows(block_m)
    columns_out, slot_elements, scales_bytes = WARP_N // rows_a_column, packing.slot, _scales_bytes(block_m)
    find, num_warps = sections_of(packing, dtype), stage.threads // 32
    leave_scales = scales_leaver(4)
    leave_sums = sums_leaver(dtype, out_dtype, warp_m, WARP_N, activation, is_biased=is_grouped)
    place_copies, copy_slot = _slot_copier(packing, dtype, block_m, activation != "", is_grouped)
    multiply_slot, scale_sums = _slot_multiplier(packing, dtype, warp_m), _sums_scaler(warp_m, columns_out)
    (scale_bytes, zero_bytes), halves = _group_bytes(packing, dtype), packing.halves
    chunk_bytes, zeros_chunk_bytes = packing.chunk_bytes(dtype), packing.zeros_bytes(dtype)
    words_at, scales_at, zeros_at, x_row_bytes = stage.words_at, stage.scales_at, stage.zeros_at, stage.x_row_bytes
    stage_bytes, ahead, all_stages_bytes = stage.num_bytes, stage.count - 1, stage.count * stage.num_bytes
    wait_for_next, wait_for_all = memory.copy_async_wait(stage.count - 2), memory.copy_async_wait(0)
    load_words = load_all("shared", tuple((4 * r, 0, r * TILE_BYTES) for r in range(WARP_N // TILE_ROWS)))
    num_sums, num_x_words, num_words = warp_m * WARP_N // 32, warp_m // 2, WARP_N // 2  # registers of a lane

    @device_function
    def multiply_tile(given, first_row, first_column, tokens):
        weight, n, k = given.weight, given.n, given.k
        scales = memory.shared_address(cuda.shared.array(0, uint32))
        shared = uint32(scales + uint32(scales_bytes))
        thread = uint32(cuda.threadIdx.x)
        lane, warp = thread & uint32(31), thread >> uint32(5)
        g, t = lane >> uint32(2), lane & uint32(3)
        all_words, all_scales, all_zeros, row_scales, slots = find(weight, uint32(n * uint32(rows_a_column)), k)
        sections = all_words, all_scales, all_zeros, slots
        source = place_copies(given, sections, first_row, first_column, tokens, thread)

        # This warp's factors: this lane's places in a stage.
        warp_row, warp_column = warp // uint32(WARPS_N) * uint32(warp_m), warp % uint32(WARPS_N) * uint32(WARP_N)
        x_place = (warp_row + g) * uint32(x_row_bytes) + (t << uint32(4)) + ((g & uint32(1)) << uint32(6))
        words_place = uint32(words_at) + warp_column * uint32(TILE_BYTES // TILE_ROWS) + lane * uint32(16)
        scale_place = uint32(scales_at) + warp_column // uint32(TILE_COLUMNS) * uint32(scale_bytes)
        zero_place = uint32(zeros_at) + warp_column // uint32(TILE_COLUMNS) * uint32(zero_bytes)
        if halves == 2:
            scale_place += (g * uint32(2) + (t >> uint32(1))) * uint32(chunk_bytes)
        else:
            scale_place += g * uint32(chunk_bytes)
        zero_place += g * uint32(zeros_chunk_bytes)

        sums = cuda.local.array(num_sums, float32)
        for e in range(num_sums):
            sums[e] = float32(0.0)
        x_words, words = cuda.local.array(num_x_words, uint32), cuda.local.array(num_words, uint32)
        pairs, factors = cuda.local.array(8, uint32), cuda.local.array(4, uint32)
        group_words, group_at = cuda.local.array(2, uint32), cuda.local.array(2, uint32)
        x_at, words_from = cuda.local.array(1, uint32), cuda.local.array(1, uint32)

        if not is_grouped:
            wait_for_previous_grid()
        write_stage, read_stage, index = shared, shared, uint32(0)
        last_stage = uint32(shared + uint32(all_stages_bytes))
        while index < uint32(ahead):
            copy_slot(index, write_stage, source, k)
            write_stage = uint32(write_stage + uint32(stage_bytes))
            index = uint32(index + uint32(1))
        leave_scales(given, scales, first_row, uint32(block_m), warp, uint32(num_warps), lane)
        start = uint32(0)
        while start < k:
            wait_for_next()
            sync_block()  # slot `index - ahead` has arrived for all; the stage of the one before it is free
            copy_slot(index, write_stage, source, k)
            write_stage = uint32(write_stage + uint32(stage_bytes))
            if write_stage == last_stage:
                write_stage = shared
            index = uint32(index + uint32(1))

            words_from[0] = uint32(read_stage + words_place)
            load_words(words, words_from)
            group_at[0], group_at[1] = uint32(read_stage + scale_place), uint32(read_stage + zero_place)
            multiply_slot((read_stage, x_place, x_at, sums, x_words, words, group_words, factors, pairs, group_at))
            read_stage = uint32(read_stage + uint32(stage_bytes))
            if read_stage == last_stage:
                read_stage = shared
            start = uint32(start + uint32(slot_elements))

        launch_dependents()
        wait_for_all()
        sync_block()
        staged = shared + warp * uint32(16 * WARP_N * 4)
        scales = uint32(scales + warp_row * uint32(4))
        first_row += warp_row
        first_column += warp_column // uint32(WARP_N) * uint32(columns_out)
        # The weight's rows' scales. Its last tile of 16 rows is whole.
        last_pair = uint32((uint32(n + uint32(TILE_COLUMNS - 1)) & uint32(0xFFFFFFF0)) - uint32(2))
        column = uint32(first_column + t * uint32(2))
        scale_sums((sums, row_scales, column, last_pair, n))
        leave_sums(given, sums, staged, scales, first_row, first_column, lane)

    return multiply_tile


@functools.cache
def _kernel(dtype: str, weight_name: str, out_dtype: str, activation: str = "") -> Specialisation:
    is_gated, block_m = activation != "", BLOCK_M
    multiply_tile = tile_multiplier(dtype, weight_name, out_dtype, activation)
    find_tile = tile_finder(block_m, BLOCK_N // 2 if is_gated else BLOCK_N)

    @device_function
    def multiply(given):
        row_tile, first_column = find_tile((given.m + uint32(block_m - 1)) // uint32(block_m), given.n)
        multiply_tile(given, uint32(row_tile * uint32(block_m)), first_column, uint64(0))

    return Specialisation(
        name=f"gemm_mixed_input_{weight_name}_{dtype}_{out_dtype}{'_' if is_gated else ''}{activation}",
        kernel=product_kernel(multiply),
        argument_types=ARGUMENT_TYPES,
        max_threads=num_threads(),
        min_blocks=1,
        constants={
            "dtype": dtype, "weight": weight_name, "out_dtype": out_dtype, "activation": activation,
            "square_columns": 0 if is_gated else WARP_N,
        },
    )  # fmt: skip


def can_read(packing: Packing, dtype: str) -> bool:
    """Whether a packing's scales come in whole pieces."""
    return not _group_bytes(packing, dtype)[0] % 16 and not packing.chunk_bytes(dtype) % 4


def why_not(product: Product, machine: Machine) -> str:
    """Why it cannot compute a product; "" if it can."""
    packing = packing_of(product.weight)
    if packing is None:
        return "multiplies packed weights"
    if product.x == "f32" or not (product.is_weight_layout and product.is_aligned) or product.num_segments:
        return "reads packed weights for 16-bit rows on 16-byte bounds, and cuts no K into segments"
    if not can_read(packing, product.x):
        return "takes scales of 4 bytes or more a lane"
    is_whole = not product.epilogue.activation or product.n % TILE_COLUMNS == 0
    return "" if is_whole else f"gates packed weights in tiles of {TILE_COLUMNS} columns"


def cache_reads(product: Product) -> int:
    """Bytes read from the second-level cache: the weight for every 128 rows, x for every 128 columns."""
    row_tiles, column_tiles = -(-product.m // BLOCK_M), -(-product.weight_rows // BLOCK_N)
    return row_tiles * product.weight_bytes + column_tiles * product.m * product.k * ITEM_BYTES[product.x]


def seconds(product: Product, machine: Machine) -> float:
    """Seconds by work in whole tiles, by their reads, and by latency. Never for few rows, nor for exact products,
    whose tier may not depend on them."""
    if product.exact or product.m < _MIN_ROWS:
        return float("inf")
    blocks = -(-product.m // BLOCK_M) * -(-product.weight_rows // BLOCK_N)
    blocks = max(blocks, machine.num_multiprocessors)
    efficiency, ends = (_HOPPER_EFFICIENCY, _HOPPER_ENDS_S) if machine.arch == "sm_90a" else (_EFFICIENCY, 0.0)
    work = 2 * product.k * blocks * BLOCK_M * BLOCK_N / (machine.tensor_flops * efficiency)
    packing = packing_of(product.weight)
    assert packing is not None
    under_way = BLOCK_N // TILE_ROWS * TILE_BYTES * (_num_stages(packing) - 1)
    latency = LATENCY_S * product.weight_bytes / (-(-product.weight_rows // BLOCK_N) * under_way)
    return ends + max(work, cache_reads(product) / machine.cache_bytes, latency)


def plan(product: Product, machine: Machine) -> Launch:
    """A launch for a product that it can compute and that is not empty."""
    return Launch(
        _kernel(product.x, product.weight, product.out, product.epilogue.activation),
        (-(-product.m // BLOCK_M) * -(-product.weight_rows // BLOCK_N), 1, 1),
        (num_threads(), 1, 1),
        shared_bytes=shared_bytes(product.weight, product.x),
    )


def specialisations() -> Iterator[Specialisation]:
    """Specialisations of bf16 that published models use; others are compiled at their first launch."""
    for weight in PACKINGS:
        for activation in ("", "silu"):
            yield _kernel("bf16", weight, "bf16", activation)
