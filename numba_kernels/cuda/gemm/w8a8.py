"""Many rows times a weight of bytes, integers or e4m3, where the checkpoint rounds x so, too: `mma.sync` of bytes.

Lesson: when both factors lie as `mma.sync` reads them, a tile is only loads of 16 bytes. x comes
rounded and in a packed weight's order (`dynamic_quantisation.py`): there is no swizzle, no `ldmatrix` and no conversion
but a bit of each of the weight's bytes, which are stored 128 above their value.

Against `mixed_input` a product has twice as many elements of K an instruction, and x half the bytes. Sums of integers
are int32, exact, for K up to 2^17. Those of e4m3 are kept in two levels, since tensor cores drop bits of long sums:
128 of K in the accumulators, which are then added to float32 sums; where both factors have a scale for each 128 of K
(`e4m3_g128`), times these. They are loaded as those 128 begin, long before their use. Sums end as float32, times their
weight row's scale, then times their row's of x where it has one for all of K.

Arguments are those of all products, but for x, which is the codes' address, and x_squares, the scales' of x's rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, types

from numba_kernels.cuda.dynamic_quantisation import SLOT
from numba_kernels.cuda.gemm.epilogue import ARGUMENT_TYPES, product_kernel
from numba_kernels.cuda.gemm.product import LATENCY_S, Machine, Product
from numba_kernels.cuda.gemm.tile_out import sums_leaver
from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.byte_mma import f32_from_s32, multiply_bytes
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element_types import SHIFTS
from numba_kernels.cuda.intrinsics.fragments import copy_rows, load_all, scale_all, settle_all
from numba_kernels.cuda.intrinsics.math import minimum_u32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.packed_sections import sections_of
from numba_kernels.cuda.packing import TILE_BYTES, TILE_ROWS, packing_of
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

ELEMENTS = {"u8": "s8", "e4m3": "e4m3", "e4m3_g128": "e4m3"}
"""The type that x is rounded to, by the weight's packing."""
BLOCK_M, BLOCK_N, WARP_M, WARP_N = 128, 128, 64, 32
WARPS_N = BLOCK_N // WARP_N
NUM_WARPS = (BLOCK_M // WARP_M) * WARPS_N
THREADS = 32 * NUM_WARPS
NUM_STAGES = 4
GROUP_ROWS = 8  # row tiles that pass over a column tile together
TILE_COLUMNS = 16
MAX_K = 1 << 17  # 127 * 128 * K is less than 2^31
SCALES_BYTES = 4 * BLOCK_M
_X_BYTES, _STAGE_BYTES = BLOCK_M * SLOT, (BLOCK_M + BLOCK_N) * SLOT
SHARED_BYTES = SCALES_BYTES + NUM_STAGES * _STAGE_BYTES
_RATE = 2.0  # products of bytes, against those of 16 bits
_EFFICIENCY = 0.85  # an estimate, but for
_HOPPER_EFFICIENCY, _HOPPER_ENDS_S = 0.4, 12e-6
"""On an H200 INT8 had 460 to 483 TFLOP/s at 2,048 rows; with these ends 128 rows are modelled within a fifth."""
WITHOUT = {"s8": (), "e4m3": ("sm_80", "sm_86", "sm_90a", "sm_100a")}
"""Architectures without such products of `mma.sync`: either missing, or ptxas unpacks e4m3 for products of 16 bits."""
_SLOTS_A_SUM = 2  # of e4m3, before sums are added to those of the second level


@functools.cache
def _kernel(weight_name: str, dtype: str, out_dtype: str, activation: str = "") -> Specialisation:
    packing, element = packing_of(weight_name), ELEMENTS[weight_name]
    assert packing is not None
    is_grouped = packing.group > 0
    is_integer, sum_type = element == "s8", uint32 if element == "s8" else float32
    as_float = f32_from_s32 if is_integer else device_function(lambda value: value)
    find, leave_sums = sections_of(packing, dtype), sums_leaver(dtype, out_dtype, WARP_M, WARP_N, activation)
    is_gated, rows_a_column = activation != "", 2 if activation else 1
    columns_out, block_columns = WARP_N // rows_a_column, BLOCK_N // rows_a_column
    passes = BLOCK_N // TILE_ROWS // NUM_WARPS  # of a stage's tiles of 8 rows, for either factor
    copy, commit = copy_rows(passes, NUM_WARPS * TILE_BYTES), memory.copy_async_commit
    wait_for_next, wait_for_all = memory.copy_async_wait(NUM_STAGES - 2), memory.copy_async_wait(0)
    n_tiles, m_tiles, num_factors = WARP_N // 8, WARP_M // 16, WARP_N // 4
    num_sums, num_x_words, num_words = WARP_M * WARP_N // 32, WARP_M // 2, WARP_N // 2  # registers of a lane
    load_x = load_all("shared", tuple((4 * i, 0, i * TILE_BYTES) for i in range(WARP_M // TILE_ROWS)))
    load_weight = load_all("shared", tuple((4 * i, 0, i * TILE_BYTES) for i in range(WARP_N // TILE_ROWS)))
    multiply = multiply_bytes(
        element,
        tuple(
            (4 * (i * n_tiles + j), tuple(8 * i + 2 * step + e for e in (0, 4, 1, 5)),
             (4 * j + 2 * step, 4 * j + 2 * step + 1))
            for step in (0, 1) for i in range(m_tiles) for j in range(n_tiles)
        ),
    )  # fmt: skip
    scale_columns = scale_all(
        tuple(
            (4 * (i * n_tiles + j) + e, 2 * j + e % 2)
            for i in range(m_tiles) for j in range(n_tiles) for e in range(4)
        )
    )  # fmt: skip
    settle = settle_all(
        tuple(
            (4 * (i * n_tiles + j) + 2 * h + e, 2 * j + e, 2 * i + h)
            for i in range(m_tiles) for j in range(n_tiles) for h in range(2) for e in range(2)
        )
    )  # fmt: skip
    unpack = {"f16": convert.unpack_f16, "bf16": convert.unpack_bf16}[dtype]
    unshifted = float32(2.0 ** -SHIFTS.get(("e4m3", dtype), 0))
    scale_bytes, scale_tiles = TILE_ROWS * packing.chunk_bytes(dtype), columns_out // TILE_COLUMNS
    num_rows, num_pairs = WARP_M // 8, WARP_N // TILE_COLUMNS
    load_words = memory.load_2xb32
    load_pair, load_one, store_one = memory.load_2xf32, memory.load_f32, memory.shared_store_f32

    @device_function
    def copy_slot(index, slots, stage, target, x_rows, rows):
        if index < slots:
            copy(uint32(stage + target), x_rows, uint32(16))
            copy(uint32(stage + uint32(_X_BYTES) + target), rows, uint32(16))
            for i in range(passes):
                x_rows[i] += uint64(TILE_BYTES)
                rows[i] += uint64(TILE_BYTES)
        commit()

    @device_function
    def multiply_tile(given):
        x, weight, m, n, k, x_scales = given.x, given.weight, given.m, given.n, given.k, given.x_squares
        scales = memory.shared_address(cuda.shared.array(0, uint32))
        shared = uint32(scales + uint32(SCALES_BYTES))
        thread = uint32(cuda.threadIdx.x)
        lane, warp = thread & uint32(31), thread >> uint32(5)

        # The order of tiles: down GROUP_ROWS row tiles, then on to the next column tile.
        tiles_m = (m + uint32(BLOCK_M - 1)) // uint32(BLOCK_M)
        tiles_n = (n + uint32(block_columns - 1)) // uint32(block_columns)
        block = uint32(cuda.blockIdx.x)
        group = block // (uint32(GROUP_ROWS) * tiles_n)
        inside = block - group * (uint32(GROUP_ROWS) * tiles_n)
        group_rows = min(uint32(GROUP_ROWS), tiles_m - group * uint32(GROUP_ROWS))
        column_tile = inside // group_rows
        first_row = (group * uint32(GROUP_ROWS) + inside - column_tile * group_rows) * uint32(BLOCK_M)
        first_column = column_tile * uint32(block_columns)

        # This thread's copies. Tiles beyond the last repeat it: their sums are never stored.
        all_words, group_scales, _, row_scales, slots = find(weight, uint32(n * uint32(rows_a_column)), k)
        last_x = uint32((m + uint32(TILE_ROWS - 1)) // uint32(TILE_ROWS) - uint32(1))
        last = uint32((n + uint32(TILE_COLUMNS - 1)) // uint32(TILE_COLUMNS) - uint32(1))
        slots_bytes = uint64(slots) * uint64(TILE_BYTES)
        x_rows, rows = cuda.local.array(passes, uint64), cuda.local.array(passes, uint64)
        for i in range(passes):
            inside = warp + uint32(i * NUM_WARPS)  # of the tiles of 8 rows
            tile = minimum_u32(uint32(first_row // uint32(TILE_ROWS) + inside), last_x)
            x_rows[i] = x + uint64(tile) * slots_bytes + uint64(lane * uint32(16))
            column = (inside >> uint32(1)) * uint32(TILE_COLUMNS)
            within = column % uint32(WARP_N)
            column = column // uint32(WARP_N) * uint32(columns_out) + within % uint32(columns_out) + first_column
            tile = minimum_u32(uint32(column // uint32(TILE_COLUMNS)), last)
            if is_gated:
                tile = uint32(tile + within // uint32(columns_out) * (n // uint32(TILE_COLUMNS)))  # up's
            tile = uint32(tile * uint32(2) + (inside & uint32(1)))
            rows[i] = all_words + uint64(tile) * slots_bytes + uint64(lane * uint32(16))
        target = thread * uint32(16)

        warp_row, warp_column = warp // uint32(WARPS_N) * uint32(WARP_M), warp % uint32(WARPS_N) * uint32(WARP_N)
        x_place = warp_row * uint32(SLOT) + lane * uint32(16)
        words_place = uint32(_X_BYTES) + warp_column * uint32(SLOT) + lane * uint32(16)
        sums, parts = cuda.local.array(num_sums, float32), cuda.local.array(num_sums, sum_type)
        for e in range(num_sums):
            sums[e], parts[e] = float32(0.0), sum_type(0)
        x_words, words = cuda.local.array(num_x_words, uint32), cuda.local.array(num_words, uint32)
        factors, row_factors = cuda.local.array(num_factors, float32), cuda.local.array(num_rows, float32)
        x_at, words_at = cuda.local.array(1, uint32), cuda.local.array(1, uint32)

        wait_for_previous_grid()
        write_stage, read_stage, index = shared, shared, uint32(0)
        last_stage = uint32(shared + uint32(NUM_STAGES * _STAGE_BYTES))
        while index < uint32(NUM_STAGES - 1):
            copy_slot(index, slots, write_stage, target, x_rows, rows)
            write_stage = uint32(write_stage + uint32(_STAGE_BYTES))
            index = uint32(index + uint32(1))
        warp_tile = uint32((first_column + warp_column // uint32(WARP_N) * uint32(columns_out)) // uint32(TILE_COLUMNS))
        x_pitch = uint64(uint32(last_x + uint32(1)) * uint32(TILE_ROWS)) * uint64(4)
        if not is_grouped and thread < uint32(BLOCK_M):
            row = minimum_u32(uint32(first_row + thread), uint32(m - uint32(1)))
            store_one(uint32(scales + thread * uint32(4)), load_one(x_scales + uint64(row) * uint64(4)))
        if is_grouped and thread < uint32(BLOCK_M):
            store_one(uint32(scales + thread * uint32(4)), float32(1.0))
        done = uint32(0)
        while done < slots:
            if is_grouped and done % uint32(_SLOTS_A_SUM) == uint32(0):
                of_group = x_scales + uint64(done // uint32(_SLOTS_A_SUM)) * x_pitch
                for i in range(num_rows):
                    row = uint32(first_row + warp_row + uint32(i * 8) + (lane >> uint32(2)))
                    row = minimum_u32(row, uint32(m - uint32(1)))
                    row_factors[i] = load_one(of_group + uint64(row) * uint64(4))
                for p in range(num_pairs):
                    tile = minimum_u32(uint32(warp_tile + uint32(p % scale_tiles)), last)
                    if p >= scale_tiles:
                        tile = uint32(tile + n // uint32(TILE_COLUMNS))  # up's
                    at = uint64(uint32(tile * slots + done)) * uint64(scale_bytes)
                    low, high = load_words(group_scales + at + uint64((lane & uint32(3)) * uint32(8)))
                    a, b = unpack(low)
                    c, d = unpack(high)
                    factors[4 * p], factors[4 * p + 1] = a * unshifted, c * unshifted
                    factors[4 * p + 2], factors[4 * p + 3] = b * unshifted, d * unshifted
            wait_for_next()
            sync_block()  # slot `done` has arrived for all; the stage of the one before it is free
            copy_slot(index, slots, write_stage, target, x_rows, rows)
            write_stage = uint32(write_stage + uint32(_STAGE_BYTES))
            if write_stage == last_stage:
                write_stage = shared
            index = uint32(index + uint32(1))
            x_at[0], words_at[0] = uint32(read_stage + x_place), uint32(read_stage + words_place)
            load_x(x_words, x_at)
            load_weight(words, words_at)
            if is_integer:
                for e in range(num_words):
                    words[e] ^= uint32(0x80808080)
            multiply(parts, x_words, words)
            read_stage = uint32(read_stage + uint32(_STAGE_BYTES))
            if read_stage == last_stage:
                read_stage = shared
            done = uint32(done + uint32(1))
            if is_grouped:
                if done % uint32(_SLOTS_A_SUM) == uint32(0):
                    settle(sums, parts, factors, row_factors)
            elif not is_integer and done % uint32(_SLOTS_A_SUM) == uint32(0):
                for e in range(num_sums):
                    sums[e] += parts[e]
                    parts[e] = float32(0.0)

        launch_dependents()
        wait_for_all()
        sync_block()
        first_row += warp_row
        first_column += warp_column // uint32(WARP_N) * uint32(columns_out)
        # The weight's rows' scales. Its last tile of 16 rows is whole.
        last_pair = uint32((uint32(n + uint32(TILE_COLUMNS - 1)) & uint32(0xFFFFFFF0)) - uint32(2))
        if not is_grouped:
            for e in range(num_sums):
                sums[e] += as_float(parts[e])
        elif slots % uint32(_SLOTS_A_SUM) != uint32(0):
            settle(sums, parts, factors, row_factors)
        for j in range(n_tiles):  # of 8 columns, of which a lane has two
            column = uint32(8 * j % columns_out) + first_column + (lane & uint32(3)) * uint32(2)
            column = minimum_u32(column, last_pair)
            if 8 * j >= columns_out:
                column = uint32(column + n)  # up's
            factors[2 * j], factors[2 * j + 1] = load_pair(row_scales + uint64(column) * uint64(4))
        scale_columns(sums, factors)
        staged, scales = shared + warp * uint32(16 * WARP_N * 4), uint32(scales + warp_row * uint32(4))
        leave_sums(given, sums, staged, scales, first_row, first_column, lane)

    return Specialisation(
        name=f"gemm_w8a8_{weight_name}_{dtype}_{out_dtype}{'_' if is_gated else ''}{activation}",
        kernel=product_kernel(multiply_tile),
        argument_types=ARGUMENT_TYPES,
        max_threads=THREADS,
        min_blocks=1,
        min_capability=80 if is_integer else 89,
        spills_on=WITHOUT[element],
        constants={
            "dtype": dtype, "weight": weight_name, "out_dtype": out_dtype, "activation": activation,
            "square_columns": 0 if is_gated else WARP_N,
        },
    )  # fmt: skip


def why_not(product: Product, machine: Machine) -> str:
    """Why it cannot compute a product whose rows may be rounded; "" if it can."""
    if product.weight not in ELEMENTS or product.x == "f32" or not product.is_weight_layout or not product.is_aligned:
        return "multiplies bytes with a scale a row or 128 of K by 16-bit rows on 16-byte bounds"
    if machine.arch in WITHOUT[ELEMENTS[product.weight]]:
        return f"needs tensor cores whose mma.sync multiplies {product.weight}, which {machine.arch} has not"
    if product.exact or product.num_segments or product.k > MAX_K:
        return f"takes K of at most {MAX_K}, is not exact, and cuts no K into segments"
    is_whole = not product.epilogue.activation or product.n % TILE_COLUMNS == 0
    return "" if is_whole else f"gates packed weights in tiles of {TILE_COLUMNS} columns"


def seconds(product: Product, machine: Machine) -> float:
    """Seconds by work in whole tiles, by their reads, and by latency; without the rounding of x."""
    row_tiles, column_tiles = -(-product.m // BLOCK_M), -(-product.weight_rows // BLOCK_N)
    blocks = max(row_tiles * column_tiles, machine.num_multiprocessors)
    efficiency, ends = (_HOPPER_EFFICIENCY, _HOPPER_ENDS_S) if machine.arch == "sm_90a" else (_EFFICIENCY, 0.0)
    work = 2 * product.k * blocks * BLOCK_M * BLOCK_N / (machine.tensor_flops * _RATE * efficiency)
    cache_reads = row_tiles * product.weight_bytes + column_tiles * product.m * product.k
    under_way = BLOCK_N * SLOT * (NUM_STAGES - 1)
    latency = LATENCY_S * product.weight_bytes / (column_tiles * under_way)
    return ends + max(work, cache_reads / machine.cache_bytes, latency, product.weight_bytes / machine.memory_bytes)


def plan(product: Product) -> Launch:
    """A launch for a product that it can compute and that is not empty."""
    blocks = -(-product.m // BLOCK_M) * -(-product.weight_rows // BLOCK_N)
    return Launch(
        _kernel(product.weight, product.x, product.out, product.epilogue.activation), (blocks, 1, 1), (THREADS, 1, 1),
        shared_bytes=SHARED_BYTES,
    )  # fmt: skip


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation of bf16."""
    for weight in ELEMENTS:
        for activation in ("", "silu"):
            yield _kernel(weight, "bf16", "bf16", activation)
