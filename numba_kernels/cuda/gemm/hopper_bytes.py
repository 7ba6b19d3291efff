"""Hopper's own products of e4m3: rows rounded to bytes times a weight of bytes, by `wgmma` fed by the TMA.

Lesson: a layout made for one instruction serves another. Packed weights and rounded rows lie in blocks of 8
rows by 64 bytes (`packing.py`). That is the unit of the TMA's and wgmma's swizzle over 64 bytes: the TMA swizzles it on
its way in, and `wgmma` multiplies 32 of K in an order that both factors share. The weight is packed only once.

Against `hopper` a stage holds 128 of K in the same bytes. Hopper's tensor cores drop bits of long sums of e4m3, so a
group has two sets of sums: one of the stage's products, which CUDA cores then scale and add to float32 sums, while the
other group multiplies. There are two kinds:

- rows: a scale a row of the weight and a row of x, both multiplied into the finished sum;
- groups: a scale for 128 of K of a row, of either factor (blocks of 128 x 128 are the same numbers in 128 rows). Those
  of x are float32 [ceil(k / 128), 8 ceil(m / 8)] (`dynamic_quantisation.py`). The TMA brings both to the stage, so that
  a group issues its products as soon as the stage is full, and reads the scales from shared memory meanwhile.

Few tiles leave multiprocessors idle. Then a tile is a cluster's, as in `hopper_split.py`: each of its 2 to 8 blocks has
a part of K, leaves its sums where its stages were, and finishes the rows of some of its warps, with the sums of all
blocks in their order. A lane reads the sums that the same lane of each other block has left.

Arguments are those of all products, but for x, the codes' address; x_squares, that of x's scales; and squares, the
weight's address once more, since its rows' scales are not loaded by the TMA. A last argument is that address again, for
the map of the groups' scales.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.epilogue import ARGUMENT_TYPES, Output, scale_element
from numba_kernels.cuda.gemm.hopper_out import row_finisher, tile_storer
from numba_kernels.cuda.gemm.hopper_ring import (
    GROUP_ROWS,
    PIECE_BYTES,
    PIECE_COLUMNS,
    Ring,
    Tile,
    ring_starter,
    stage_advancer,
    tile_order,
)
from numba_kernels.cuda.gemm.product import Machine, Product
from numba_kernels.cuda.intrinsics import cluster, convert, mbarrier, memory, tma, wgmma
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element_types import SHIFTS
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.sync import (
    launch_dependents,
    set_registers,
    sync_block,
    sync_named,
    wait_for_previous_grid,
)
from numba_kernels.cuda.intrinsics.warp import shuffle_index_b32, sync_warp
from numba_kernels.cuda.packed_sections import sections_of
from numba_kernels.cuda.packing import TILE_BYTES, TILE_ROWS, packing_of
from numba_kernels.cuda.specialisation import TENSOR_MAP, Launch, Specialisation, TensorMapLayout

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

ARCH = "sm_90a"
WEIGHTS = ("e4m3", "e4m3_g128")
TILE, GROUPED_TILE = Tile(128, 2, 6), Tile(128, 2, 5)
BLOCK_K = 128
STAGE_SLOTS = 2  # of 64 of K
ROW_TILES = TILE.block_m // TILE_ROWS
TILE_COLUMNS = 16
_X_SCALES_BYTES, _PAIR_BYTES = 4 * TILE.block_m, 2 * TILE_COLUMNS  # of a stage; of 16 rows of the weight
_SCALES_BYTES = _X_SCALES_BYTES + TILE.block_n // TILE_COLUMNS * _PAIR_BYTES
_SCALES_AT = -(-GROUPED_TILE.scales_at // 128) * 128
_RATE = 2.0  # products of bytes, against those of 16 bits
_EFFICIENCY = {False: 0.67, True: 0.55}
"""With scales of rows 770 to 820 TFLOP/s were measured on an H200 at 2,048 rows. That of groups was never measured: 460
to 490 (0.4) were, while consumers loaded the scales themselves before each stage."""
_ENDS_S = 1.5e-6
_FEW_STEP_S, _FEW_ENDS_S = {False: 1.14e-6, True: 1.4e-6}, 8e-6
"""A stage, and the ends of each round, where rows are one tile: measured there at 128 rows, within a tenth; with groups
never measured (2.0 us with loads by consumers)."""
_LEAST_STEPS = 4  # of K, least of a block: below, filling the ring takes longer than using it


def _tile(*, is_grouped: bool) -> Tile:
    return GROUPED_TILE if is_grouped else TILE


def shared_bytes_of(weight: str) -> int:
    """Shared memory of a block that multiplies this packing."""
    return TILE.shared_bytes if weight == "e4m3" else 1024 + _SCALES_AT + GROUPED_TILE.num_stages * _SCALES_BYTES


@functools.cache
def _loader(activation: str, *, is_grouped: bool) -> Any:
    """A device function for the producer: has the TMA bring one tile's stages, and returns the next stage and phase."""
    tile = _tile(is_grouped=is_grouped)
    load, num_stages, stage_bytes, x_bytes = tma.load(4), tile.num_stages, tile.stage_bytes, tile.x_bytes
    is_gated, zero, next_stage = activation != "", uint32(0), stage_advancer(num_stages)
    expected = stage_bytes + _SCALES_BYTES * is_grouped
    load_x_scales, load_scales, half = tma.load(2), tma.load(3), (_SCALES_BYTES - _X_SCALES_BYTES) // 2

    @device_function
    def load_tile(maps, ring, at, place, slot, last_slot):
        (x, weight, x_scales, scales), (stage, phase), (row_tile, column_tile, up) = maps, at, place
        while slot < last_slot:
            mbarrier.wait(uint32(ring.empty + stage * uint32(8)), phase)
            barrier = uint32(ring.full + stage * uint32(8))
            mbarrier.arrive_expecting(barrier, uint32(expected))
            target = uint32(ring.shared + stage * uint32(stage_bytes))
            load(target, x, barrier, zero, zero, slot, row_tile)
            target = uint32(target + uint32(x_bytes))
            load(target, weight, barrier, zero, zero, slot, column_tile)
            if is_gated:
                load(uint32(target + uint32(x_bytes // 2)), weight, barrier, zero, zero, slot, uint32(column_tile + up))
            if is_grouped:
                target = uint32(ring.shared + uint32(_SCALES_AT) + stage * uint32(_SCALES_BYTES))
                load_x_scales(target, x_scales, barrier, uint32(row_tile * uint32(TILE_ROWS)), slot >> uint32(1))
                target = uint32(target + uint32(_X_SCALES_BYTES))
                load_scales(target, scales, barrier, zero, slot, column_tile >> uint32(1))
                if is_gated:
                    tile_up = uint32(column_tile + up) >> uint32(1)
                    load_scales(uint32(target + uint32(half)), scales, barrier, zero, slot, tile_up)
            stage, phase = next_stage(stage, phase)
            slot = uint32(slot + uint32(STAGE_SLOTS))
        return stage, phase

    return load_tile


@functools.cache
def _kernel(weight_name: str, dtype: str, out_dtype: str, activation: str = "") -> Specialisation:
    packing = packing_of(weight_name)
    assert packing is not None
    is_grouped, is_gated = packing.group > 0, activation != ""
    tile = _tile(is_grouped=is_grouped)
    num_stages, stage_bytes, block_m, block_n = tile.num_stages, tile.stage_bytes, tile.block_m, tile.block_n
    columns, num_sums, n_tiles, num_pairs = block_n // (2 if is_gated else 1), block_n // 2, block_n // 8, block_n // 16
    num_words = 2 * num_pairs
    pieces_at, barriers_at, x_bytes = tile.pieces_at, tile.barriers_at, tile.x_bytes
    steps = (32, TILE_BYTES - 32, 32)  # bytes from one product's 32 of K to the next
    multiply = wgmma.group_multiply("e4m3", block_n, 4, steps, steps, is_fresh=True)
    describe = wgmma.descriptor(64, STAGE_SLOTS * TILE_BYTES)
    wait_for_all, start_ring, place_of = wgmma.group_wait(0, num_sums), ring_starter(tile), tile_order(GROUP_ROWS)
    find, load_tile = sections_of(packing, dtype), _loader(activation, is_grouped=is_grouped)
    finish_rows = row_finisher(dtype, out_dtype, block_n)
    store_tile = tile_storer(dtype, block_n // 2, activation=activation or "silu")
    wait_until_read, next_stage = tma.store_wait_read(0), stage_advancer(num_stages)
    unpack = {"f16": convert.unpack_f16, "bf16": convert.unpack_bf16}[dtype]
    unshifted = float32(2.0 ** -SHIFTS.get(("e4m3", dtype), 0))
    fewer_registers, more_registers = set_registers(24, is_more=False), set_registers(240, is_more=True)
    store_four, num_consumer_threads = memory.shared_store_4xf32, 128 * tile.num_consumers
    load_f32, load_pair = memory.load_f32, memory.load_2xf32
    staged_f32, staged_words = memory.shared_load_f32, memory.shared_load_2xb32

    @device_function
    def add_blocks(sums, mine, blocks):
        """This lane's sums, of all blocks."""
        for e in range(num_sums):
            sums[e] = float32(0.0)
        block = uint32(0)
        while block < blocks:
            theirs = cluster.address_in(mine, block)
            for q in range(num_sums // 4):
                more = cluster.load_4xf32(uint32(theirs + uint32(512 * q)))
                for i in range(4):
                    sums[4 * q + i] += more[i]
            block = uint32(block + uint32(1))

    def gemm(x, weight, bias, residual, out, m, n, k, bias_is_f32, x_scales, _, eps, packed, scales):
        given = Output(bias, residual, out, m, n, bias_is_f32, uint64(0))
        shared = uint32((memory.shared_address(cuda.shared.array(0, uint32)) + uint32(1023)) & uint32(0xFFFFFC00))
        full = uint32(shared + uint32(barriers_at))
        empty = uint32(full + uint32(8 * num_stages))
        thread = uint32(cuda.threadIdx.x)
        lane, warp = thread & uint32(31), shuffle_index_b32(thread >> uint32(5), uint32(0))
        if thread == uint32(0):
            tma.prefetch_map(x)
            tma.prefetch_map(weight)
            if is_grouped:
                tma.prefetch_map(x_scales)
                tma.prefetch_map(scales)
            start_ring(full, empty)
        sync_block()
        wait_for_previous_grid()

        _, _, _, row_scales, slots = find(packed, uint32(n * uint32(2 if is_gated else 1)), k)
        tiles_m = uint32((m + uint32(block_m - 1)) // uint32(block_m))
        tiles_n = uint32((n + uint32(columns - 1)) // uint32(columns))
        num_tiles = uint32(tiles_m * tiles_n)
        rank, blocks = cluster.rank(), cluster.size()
        index, step = divide_u32(uint32(cuda.blockIdx.x), blocks), divide_u32(uint32(cuda.gridDim.x), blocks)
        steps = uint32((slots + uint32(STAGE_SLOTS - 1)) // uint32(STAGE_SLOTS))  # of K, this block's of them
        first_slot = uint32(divide_u32(uint32(steps * rank), blocks) * uint32(STAGE_SLOTS))
        last_slot = uint32(divide_u32(uint32(steps * (rank + uint32(1))), blocks) * uint32(STAGE_SLOTS))
        last_slot = minimum_u32(last_slot, slots)
        stage = uint32(0)
        if warp < uint32(4):
            fewer_registers()
            if thread == uint32(0):
                phase = uint32(1)
                while index < num_tiles:
                    row_tile, column_tile = place_of(index, tiles_m, tiles_n)
                    place = (
                        uint32(row_tile * uint32(ROW_TILES)), uint32(column_tile * uint32(columns // TILE_ROWS)),
                        uint32(n // uint32(TILE_ROWS)),
                    )  # fmt: skip
                    maps, ring, at = (x, weight, x_scales, scales), Ring(shared, full, empty), (stage, phase)
                    stage, phase = load_tile(maps, ring, at, place, first_slot, last_slot)
                    index = uint32(index + step)
                launch_dependents()
            if blocks > uint32(1):
                for _ in range(2):  # sums are there; they have been read
                    sync_warp()
                    cluster.arrive_relaxed()
                    cluster.wait()
        else:
            more_registers()
            warp = uint32(warp - uint32(4))
            x_part = describe(uint32(shared + (warp >> uint32(2)) * uint32(x_bytes // 2)))
            weight_part = describe(uint32(shared + uint32(x_bytes)))
            piece = uint32(shared + uint32(pieces_at) + warp * uint32(PIECE_BYTES))
            last_tile = uint32((n + uint32(TILE_COLUMNS - 1)) // uint32(TILE_COLUMNS) - uint32(1))
            upper_at = uint32(shared + uint32(_SCALES_AT) + (warp * uint32(16) + (lane >> uint32(2))) * uint32(4))
            words_at = uint32(
                shared + uint32(_SCALES_AT + _X_SCALES_BYTES) + (lane & uint32(3)) * uint32(_PAIR_BYTES // 4)
            )
            phase = uint32(0)
            sums, parts = cuda.local.array(num_sums, float32), cuda.local.array(num_sums, float32)
            words = cuda.local.array(num_words, uint32)
            while index < num_tiles:
                row_tile, column_tile = place_of(index, tiles_m, tiles_n)
                row = uint32(row_tile * uint32(block_m) + warp * uint32(16))
                column = uint32(column_tile * uint32(columns))
                upper_row = minimum_u32(uint32(row + (lane >> uint32(2))), uint32(m - uint32(1)))
                lower_row = minimum_u32(uint32(row + (lane >> uint32(2)) + uint32(8)), uint32(m - uint32(1)))
                for e in range(num_sums):
                    sums[e] = float32(0.0)
                slot, upper, lower, is_mine = first_slot, float32(1.0), float32(1.0), True
                while slot < last_slot:
                    mbarrier.wait(uint32(full + stage * uint32(8)), phase)
                    at_stage = uint32(stage * uint32(stage_bytes // 16))
                    multiply(parts, wgmma.advance(x_part, at_stage), wgmma.advance(weight_part, at_stage))
                    if is_grouped:
                        of_stage = uint32(stage * uint32(_SCALES_BYTES))
                        upper = staged_f32(uint32(upper_at + of_stage))
                        lower = staged_f32(uint32(upper_at + of_stage + uint32(8 * 4)))
                        for p in range(num_pairs):
                            words[2 * p], words[2 * p + 1] = staged_words(
                                uint32(words_at + of_stage + uint32(_PAIR_BYTES * p))
                            )
                        sync_warp()  # all lanes have read them before the stage is given back
                    wait_for_all(parts)
                    if lane == uint32(0):
                        mbarrier.arrive(uint32(empty + stage * uint32(8)))
                    if is_grouped:
                        for p in range(num_pairs):
                            a, b = unpack(words[2 * p])
                            c, d = unpack(words[2 * p + 1])
                            e = 8 * p
                            a, b, c, d = a * unshifted, b * unshifted, c * unshifted, d * unshifted
                            sums[e] += parts[e] * (a * upper)
                            sums[e + 1] += parts[e + 1] * (c * upper)
                            sums[e + 2] += parts[e + 2] * (a * lower)
                            sums[e + 3] += parts[e + 3] * (c * lower)
                            sums[e + 4] += parts[e + 4] * (b * upper)
                            sums[e + 5] += parts[e + 5] * (d * upper)
                            sums[e + 6] += parts[e + 6] * (b * lower)
                            sums[e + 7] += parts[e + 7] * (d * lower)
                    else:
                        for e in range(num_sums):
                            sums[e] += parts[e]
                    stage, phase = next_stage(stage, phase)
                    slot = uint32(slot + uint32(STAGE_SLOTS))
                if blocks > uint32(1):
                    sync_named(uint32(1), uint32(num_consumer_threads))  # all have multiplied the last stage
                    mine = uint32(shared + warp * uint32(128 * num_sums) + lane * uint32(16))
                    for q in range(num_sums // 4):
                        four = sums[4 * q], sums[4 * q + 1], sums[4 * q + 2], sums[4 * q + 3]
                        store_four(uint32(mine + uint32(512 * q)), four)
                    cluster.release_shared()
                    cluster.arrive_relaxed()
                    cluster.wait()
                    is_mine = (warp & uint32(blocks - uint32(1))) == rank
                    if is_mine:
                        add_blocks(sums, mine, blocks)
                if is_grouped:
                    upper, lower = float32(1.0), float32(1.0)
                else:
                    upper = load_f32(x_scales + uint64(upper_row) * uint64(4))
                    lower = load_f32(x_scales + uint64(lower_row) * uint64(4))
                last_pair = uint32(last_tile * uint32(TILE_COLUMNS) + uint32(TILE_COLUMNS - 2))
                for j in range(n_tiles):  # the weight's rows' scales; its last tile of 16 rows is whole
                    at = uint32(uint32(8 * j % columns) + column + (lane & uint32(3)) * uint32(2))
                    at = minimum_u32(at, last_pair)
                    if 8 * j >= columns:
                        at = uint32(at + n)  # up's
                    low, high = load_pair(row_scales + uint64(at) * uint64(4))
                    for h in range(2):
                        sums[4 * j + 2 * h] = scale_element(sums[4 * j + 2 * h], low)
                        sums[4 * j + 2 * h + 1] = scale_element(sums[4 * j + 2 * h + 1], high)
                if is_mine:
                    if is_gated:
                        store_tile((given, sums, (upper, lower), piece, uint32(0), uint32(0), row, column, lane))
                    else:
                        finish_rows(given, sums, (upper, lower), piece, row, column, lane)
                index = uint32(index + step)
            if is_gated and lane == uint32(0):
                wait_until_read()
            if blocks > uint32(1):  # no block exits while others read its sums
                sync_warp()
                cluster.arrive_relaxed()
                cluster.wait()

    return Specialisation(
        name=f"gemm_hopper_bytes_{weight_name}_{dtype}_{out_dtype}{'_' if is_gated else ''}{activation}",
        kernel=cuda.jit(gemm),
        argument_types=(
            TENSOR_MAP, TENSOR_MAP, uint64, uint64, TENSOR_MAP if is_gated else uint64, *ARGUMENT_TYPES[5:9],
            TENSOR_MAP if is_grouped else uint64, *ARGUMENT_TYPES[10:], TENSOR_MAP if is_grouped else uint64,
        ),
        max_threads=tile.num_threads,
        min_blocks=1,
        min_capability=90,
        needs_arch_features=True,
        constants={"dtype": dtype, "weight": weight_name, "out_dtype": out_dtype, "activation": activation},
    )  # fmt: skip


def why_not(product: Product, machine: Machine) -> str:
    """Why it cannot compute a product whose rows may be rounded; "" if it can."""
    if machine.arch != ARCH:
        return f"needs {ARCH}, the device is {machine.arch}"
    if product.weight not in WEIGHTS or product.x == "f32" or not product.is_weight_layout or not product.is_aligned:
        return "multiplies e4m3 with a scale a row or 128 of K by 16-bit rows on 16-byte bounds"
    if product.exact or product.num_segments or product.k == 0:
        return "is not exact, and cuts no K into segments"
    is_whole = not product.epilogue.activation or (product.n % TILE_COLUMNS == 0 and product.out == product.x)
    return "" if is_whole else f"gates packed weights in tiles of {TILE_COLUMNS} columns, to x's type"


def _tiles(product: Product) -> tuple[int, int]:
    """Tiles of rows, and of the weight's rows."""
    return -(-product.m // TILE.block_m), -(-product.weight_rows // TILE.block_n)


def _work_s(product: Product, machine: Machine, blocks: int) -> float:
    """Seconds of a tile's multiplications by so many blocks of a cluster, over all rounds, with their ends."""
    row_tiles, column_tiles = _tiles(product)
    at_once = machine.clusters_at_once(blocks) if blocks > 1 else machine.num_multiprocessors
    rounds, is_grouped = -(-row_tiles * column_tiles // max(1, at_once)), product.weight != "e4m3"
    num_steps = -(-product.k // BLOCK_K)
    steps = -(-num_steps // blocks)
    if blocks > 1 or rounds == 1:  # a block's ends are not hidden
        return rounds * (steps * _FEW_STEP_S[is_grouped] + _FEW_ENDS_S)
    rate = machine.tensor_flops * _RATE * _EFFICIENCY[is_grouped] / machine.num_multiprocessors
    return rounds * (2 * steps * BLOCK_K * TILE.block_m * TILE.block_n / rate) + _ENDS_S


def _blocks_of_a_tile(product: Product, machine: Machine) -> int:
    """Blocks that share K."""
    most = min(8, -(-product.k // BLOCK_K) // _LEAST_STEPS)
    return min((count for count in (1, 2, 4, 8) if count <= max(1, most)),
               key=lambda count: _work_s(product, machine, count))  # fmt: skip


def seconds(product: Product, machine: Machine) -> float:
    """Seconds by work in whole tiles, by their reads, and by filling the ring; without the rounding of x."""
    row_tiles, column_tiles = _tiles(product)
    work = _work_s(product, machine, _blocks_of_a_tile(product, machine))
    cache_reads = row_tiles * product.weight_bytes + column_tiles * product.m * product.k
    return max(work, cache_reads / machine.cache_bytes, product.weight_bytes / machine.memory_bytes)


def plan(product: Product, machine: Machine) -> Launch:
    """A launch for a product that it can compute and that is not empty."""
    m, n, activation = product.m, product.n, product.epilogue.activation
    slots, rows = -(-product.k // 64), product.weight_rows
    tiles, blocks = math.prod(_tiles(product)), _blocks_of_a_tile(product, machine)
    strides, num_parts = (64, TILE_BYTES, slots * TILE_BYTES), 2 if activation else 1
    x_map = TensorMapLayout("bf16", (32, 8, slots, -(-m // 8)), strides, (32, 8, STAGE_SLOTS, ROW_TILES), 64)
    weight_map = TensorMapLayout(
        "bf16", (32, 8, slots, 2 * -(-rows // 16)), strides, (32, 8, STAGE_SLOTS, ROW_TILES // num_parts), 64
    )
    maps: tuple[tuple[int, TensorMapLayout], ...] = ((0, x_map), (1, weight_map))
    if activation:
        maps = (*maps, (4, TensorMapLayout(product.out, (n, m), (n * 2,), (PIECE_COLUMNS, 16), 128)))
    packing = packing_of(product.weight)
    assert packing is not None
    if packing.group:
        x_rows, pairs = -(-m // TILE_ROWS) * TILE_ROWS, -(-rows // TILE_COLUMNS)
        box = (TILE_COLUMNS, 1, TILE.block_n // TILE_COLUMNS // num_parts)
        scales_map = TensorMapLayout(
            product.x, (TILE_COLUMNS, slots, pairs), (_PAIR_BYTES, slots * _PAIR_BYTES), box,
            offset=packing.sections(rows, product.k, product.x)[0],
        )  # fmt: skip
        x_scales = TensorMapLayout("f32", (x_rows, -(-slots // STAGE_SLOTS)), (4 * x_rows,), (TILE.block_m, 1))
        maps = (*maps, (9, x_scales), (13, scales_map))
    return Launch(
        _kernel(product.weight, product.x, product.out, activation),
        (tiles * blocks if blocks > 1 else min(tiles, machine.num_multiprocessors), 1, 1), (TILE.num_threads, 1, 1),
        shared_bytes_of(product.weight), cluster=(blocks, 1, 1), maps=maps,
    )  # fmt: skip


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation of bf16."""
    for weight in WEIGHTS:
        for activation in ("", "silu"):
            yield _kernel(weight, "bf16", "bf16", activation)
