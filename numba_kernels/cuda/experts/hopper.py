"""Products of rows with experts, tier 3, Hopper alone: `wgmma`, as `gemm.hopper`, of 16-bit rows on 16-byte bounds.

The loads and stores differ from the dense tier's:

- a row of x is found by the list of rows, which the TMA cannot follow on Hopper. The producer's four warps copy it by
  `cp.async`, 16 bytes a lane, where the TMA would have put them; two stages later, when they have arrived, a fence
  hands them to `wgmma`;
- an expert's weight comes by the TMA. Each expert has a tensor map of its own, in device memory, which the thread that
  loads a tile acquires first;
- an expert's last tile is not whole, and the rows after it belong to another one: so a warp writes its rows itself,
  16 bytes a lane, after they have changed places in shared memory. Biases and the gate come before that.

Many rows an expert take the cluster of two blocks, which share a tile of the weight; fewer take a block alone, of 128
rows or 64. Tiles give the same bits, but not those of the other tiers: exact products do not come here.

Quantised experts that many rows go to are dequantised as 16-bit rows first, one expert's after the other's
(`dequantize`), with one map over all: a tile that ends past its expert's columns reads the next one's, and drops the
results.

Or they are unpacked into the stages (`gemm.hopper_unpack`), by warps that copy x beside it: tiles of 64 rows or 128.

Arguments: those of all tiers (`tiled`), and the address of the experts' maps, `MAP_BYTES` each (`map_layout`), or the
map of all. Where weights are unpacked, those of all tiers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.experts import tensor_core
from numba_kernels.cuda.experts.tiled import ARGUMENT_TYPES
from numba_kernels.cuda.gemm import hopper_packed
from numba_kernels.cuda.gemm.epilogue import GATES
from numba_kernels.cuda.gemm.hopper import ARCH, CLOCK_HZ
from numba_kernels.cuda.gemm.hopper_ring import (
    BLOCK_K,
    GROUP_ROWS,
    PIECE_BYTES,
    PIECE_COLUMNS,
    Ring,
    Tile,
    ring_starter,
    stage_advancer,
    tile_multiplier,
    tile_order,
)
from numba_kernels.cuda.gemm.hopper_unpack import column_scaler, tile_unpacker
from numba_kernels.cuda.gemm.product import Machine
from numba_kernels.cuda.gemm.tensor_core import EFFICIENCY, MEDIUM
from numba_kernels.cuda.gemm.weight_stream import TILE_COLUMNS
from numba_kernels.cuda.intrinsics import cluster, convert, mbarrier, memory, mma, tma
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function, in_turn
from numba_kernels.cuda.intrinsics.element_types import VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.math import minimum_u32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, set_registers, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import shuffle_index_b32, sync_warp
from numba_kernels.cuda.packing import PACKINGS, Packing
from numba_kernels.cuda.specialisation import TENSOR_MAP, Launch, Specialisation, TensorMapLayout

uint16, uint32, uint64, float32 = types.uint16, types.uint32, types.uint64, types.float32

PAIR = Tile(256, 2, 4, cluster=2)
ALONE = Tile(256, 2, 4)
LOW = Tile(256, 1, 5)
TILES = (LOW, ALONE, PAIR)
UNPACKING_TILES = hopper_packed.TILES
LEAST_UNPACKED_ROWS, MOST_UNPACKED_ROWS = 17, 380
"""Rows of each expert for which quantised experts are unpacked for `wgmma`. On an H200 gpt-oss-20b's in MXFP4 take 311
µs with 32 rows each (`packed` 358, with 8 rows 188), 501 with 128 (881), 978 with 256 (dequantised 1,155), and 1,906
with 512 (dequantised 1,716)."""
MAP_BYTES = 128
MAP_ROWS = 64  # of the weight, that one copy moves
_LAG = 2  # stages that x is in flight; one less than possible, as the last one is free only when the next is multiplied
# Cycles of a stage, and of a tile's ends. That of the pair is measured on an H200 (512 rows of each expert); the others
# are estimates: the same for as many rows, and more for half as many.
STEP_CYCLES = {PAIR: 1300, ALONE: 1350, LOW: 900}
ENDS_CYCLES = 4200
_MEDIUM_FLOPS = 281e12  # of `tensor_core`'s tile of 128 rows, measured there with 128 rows of each expert

_acquire_map = instruction("fence.proxy.tensormap::generic.acquire.gpu [$0], 128;", "", "l")


def map_layout(dtype: str, rows: int, depth: int) -> TensorMapLayout:
    """The map of an expert's weight [rows, depth], or of all of them, one after the other."""
    return TensorMapLayout(dtype, (depth, rows), (depth * 2,), (BLOCK_K, MAP_ROWS), 128)


@functools.cache
def _weight_loader(tile: Tile, is_gated: bool) -> Any:
    """A device function for one thread: loads a stage of the weight by the TMA, of which each block of the cluster
    loads a part, for all of them. Half of a gated unit's rows are `up` rows further on."""
    blocks, x_bytes = tile.cluster, tile.x_bytes
    weight_bytes = tile.block_n * BLOCK_K * 2
    copies, half = tile.block_n // MAP_ROWS // blocks, tile.block_n // 2
    map_row_bytes = MAP_ROWS * BLOCK_K * 2
    load, load_for_all = tma.load(2), tma.load(2, is_multicast=True)

    @device_function
    def load_weight(weight, target, barrier, rank, first, up, start):
        mbarrier.arrive_expecting(barrier, uint32(weight_bytes))
        target = uint32(target + uint32(x_bytes))
        for i in range(copies):
            part = uint32(rank * uint32(copies) + uint32(i))
            row = uint32(first + part * uint32(MAP_ROWS))
            if is_gated and part >= uint32(half // MAP_ROWS):
                row = uint32(row - uint32(half) + up)
            at = uint32(target + part * uint32(map_row_bytes))
            if blocks > 1:
                load_for_all(at, weight, barrier, uint16((1 << blocks) - 1), start, row)
            else:
                load(at, weight, barrier, start, row)

    return load_weight


@functools.cache
def _piece_storer(dtype: str, num_columns: int, number: int, activation: str) -> Any:
    """A device function that finishes and stores a warp's piece of that number: 16 rows of `PIECE_COLUMNS`."""
    pack = {"f16": convert.pack_f16, "bf16": convert.pack_bf16}[dtype]
    half_bytes, first_sum, pairs = PIECE_BYTES // 2, number * (PIECE_COLUMNS // 2), PIECE_COLUMNS // 16
    is_gated, gated = activation != "", GATES.get(activation)
    load_pair, store_matrices = memory.load_2xf32, mma.store_matrix_x4

    @device_function
    def biases(bias, column, n):
        """Biases of the pair of columns from `column` on and 8 further."""
        a, b, c, d = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
        if bias != uint64(0):
            if column < n:
                a, b = load_pair(bias + uint64(column) * uint64(4))
            if column + uint32(8) < n:
                c, d = load_pair(bias + uint64(column + uint32(8)) * uint64(4))
        return a, b, c, d

    @device_function
    def store_piece(state):
        sums, piece, lane, bias, out, end, n, row, first_column = state
        column = uint32(first_column + uint32(number * PIECE_COLUMNS))
        place = uint32((lane & uint32(15)) * uint32(128) + (((lane >> uint32(4)) ^ (lane & uint32(7))) << uint32(4)))
        target = uint32(piece + uint32(number % 2 * half_bytes))
        for i in range(pairs):
            e = first_sum + 8 * i
            pair_column = uint32(column + uint32(16 * i) + (lane & uint32(3)) * uint32(2))
            a, b, c, d = biases(bias, pair_column, n)
            upper_left, lower_left = (sums[e] + a, sums[e + 1] + b), (sums[e + 2] + a, sums[e + 3] + b)
            upper_right, lower_right = (sums[e + 4] + c, sums[e + 5] + d), (sums[e + 6] + c, sums[e + 7] + d)
            if is_gated:
                u = e + num_columns // 2
                up_bias = uint64(0)
                if bias != uint64(0):
                    up_bias = bias + uint64(n) * uint64(4)
                a, b, c, d = biases(up_bias, pair_column, n)
                upper_left = gated(upper_left[0], sums[u] + a), gated(upper_left[1], sums[u + 1] + b)
                lower_left = gated(lower_left[0], sums[u + 2] + a), gated(lower_left[1], sums[u + 3] + b)
                upper_right = gated(upper_right[0], sums[u + 4] + c), gated(upper_right[1], sums[u + 5] + d)
                lower_right = gated(lower_right[0], sums[u + 6] + c), gated(lower_right[1], sums[u + 7] + d)
            store_matrices(
                uint32(target + (place ^ uint32(32 * i))),
                (
                    pack(upper_left[0], upper_left[1]), pack(lower_left[0], lower_left[1]),
                    pack(upper_right[0], upper_right[1]), pack(lower_right[0], lower_right[1]),
                ),
            )  # fmt: skip
        sync_warp()
        chunk = lane & uint32(7)
        at_column = uint32(column + chunk * uint32(8))
        for i in range(4):
            inside = uint32((lane >> uint32(3)) + uint32(4 * i))
            words = memory.shared_load_4xb32(
                uint32(target + inside * uint32(128) + ((chunk ^ (inside & uint32(7))) << uint32(4)))
            )
            if row + inside < end and at_column < n:
                at = uint64(uint32(row + inside)) * uint64(n) + uint64(at_column)
                memory.store_4xb32(out + at * uint64(2), words)

    return store_piece


@functools.cache
def _rows_storer(dtype: str, num_columns: int, activation: str) -> Any:
    """A device function that finishes a warp's sums, 16 rows of `num_columns`, and stores those before `end`."""
    num_pieces = num_columns // PIECE_COLUMNS
    # Each piece's sums by constant places: LLVM does not unroll a loop so long, and registers cannot be indexed.
    return in_turn([_piece_storer(dtype, num_columns, number, activation) for number in range(num_pieces)])


@functools.cache
def _kernel(dtype: str, tile: Tile, activation: str, is_joined: bool = False, weight_name: str = "") -> Specialisation:
    """With `is_joined` one map covers all experts' rows. `weight_name` is a packing's that some warps unpack."""
    block_m, block_n, num_stages, blocks = tile.block_m, tile.block_n, tile.num_stages, tile.cluster
    pieces_at, barriers_at, x_bytes, stage_bytes = tile.pieces_at, tile.barriers_at, tile.x_bytes, tile.stage_bytes
    num_sums, is_gated = block_n // 2, activation != ""
    columns = block_n // 2 if is_gated else block_n  # of the output, a tile
    # A stage is full after each producer's warp has arrived, whose copies are there, and the thread that posted the
    # TMA's bytes, unless the warps unpack the weight.
    start_ring = ring_starter(tile, tile.num_unpackers or tile.producers + 1)
    multiply_tile, next_stage = tile_multiplier(dtype, tile), stage_advancer(num_stages)
    load_weight, place_of = _weight_loader(tile, is_gated), tile_order(GROUP_ROWS // blocks)
    store_rows = _rows_storer(dtype, columns, activation)
    producers, rows_at_once = tile.producers, 4 * tile.producers  # a lane copies 16 bytes of x at a time
    copies = block_m // rows_at_once
    moves_registers = tile.num_consumers > 1 and not weight_name  # else each thread has more than it needs
    fewer_registers, more_registers = set_registers(40, is_more=False), set_registers(232, is_more=True)
    wait_for_older, wait_for_all = memory.copy_async_wait(_LAG), memory.copy_async_wait(0)

    @device_function
    def copy_rows(sources, x, target, chunk, start, k):
        """A lane's part of a stage of x: a chunk of 8 elements of each of its rows, zeros beyond k."""
        size = uint32(16) if uint32(start + chunk * uint32(8)) < k else uint32(0)
        at = x + (uint64(start) * uint64(2) if size != uint32(0) else uint64(0))
        for i in range(copies):
            place = uint32(target + uint32(128 * rows_at_once * i))
            memory.copy_async_16(place, at + uint64(sources[i]) * uint64(16), size)
        memory.copy_async_commit()

    @device_function
    def hand_over(full, lane, late):
        """Hands the oldest pending stage, whose copies have arrived, to `wgmma`."""
        behind, num_behind = late
        tma.fence_shared()
        sync_warp()
        if lane == uint32(0):
            mbarrier.arrive(uint32(full + behind * uint32(8)))
        behind, _ = next_stage(behind, uint32(0))
        return behind, uint32(num_behind - uint32(1))

    @device_function
    def hand_over_older(full, stage, lane, late):
        """Marks this stage's copies as under way, too."""
        behind, num_behind = late
        late = behind, uint32(num_behind + uint32(1))
        if num_behind == uint32(_LAG):
            wait_for_older()
            late = hand_over(full, lane, late)
        return late

    @device_function
    def fetch(x, at, barrier, sources, start, k, warp, lane):
        chunk, own_row = lane & uint32(7), uint32(uint32(warp * uint32(32) + lane) >> uint32(3))
        place = uint32(at + own_row * uint32(128) + ((chunk ^ (own_row & uint32(7))) << uint32(4)))
        copy_rows(sources, x, place, chunk, start, k)

    unpack_tile = load_columns = scale_columns = None
    is_packed, num_held = weight_name != "", block_n // 32
    if is_packed:
        unpack_tile = tile_unpacker(tile, weight_name, dtype, is_gated, fetch, hand_over_older)
        load_columns, scale_columns = column_scaler(tile, weight_name, dtype, is_gated)

    def experts(x, table, tiles, num_tiles, tokens, out, n, k, num_experts, maps):
        shared = uint32((memory.shared_address(cuda.shared.array(0, uint32)) + uint32(1023)) & uint32(0xFFFFFC00))
        full = uint32(shared + uint32(barriers_at))
        empty = uint32(full + uint32(8 * num_stages))
        thread = uint32(cuda.threadIdx.x)
        lane, warp = thread & uint32(31), shuffle_index_b32(thread >> uint32(5), uint32(0))  # ptxas sees: one a warp
        if thread == uint32(0):
            start_ring(full, empty)
        if blocks > 1:
            cluster.arrive_relaxed()
            cluster.wait()
            rank = cluster.rank()
        else:
            sync_block()
            rank = uint32(0)
        wait_for_previous_grid()
        count = memory.load_b32(num_tiles)
        index = uint32(uint32(cuda.blockIdx.x) // uint32(blocks))
        step = uint32(uint32(cuda.gridDim.x) // uint32(blocks))
        tiles_n = uint32((n + uint32(columns - 1)) // uint32(columns))
        num_all = uint32(count * tiles_n)
        stage, ring = uint32(0), Ring(shared, full, empty)
        if warp < uint32(producers):
            if moves_registers:
                fewer_registers()
            phase, late = uint32(1), (uint32(0), uint32(0))
            chunk, own_row = thread & uint32(7), thread >> uint32(3)
            chunks_a_row = k >> uint32(3)
            sources = cuda.local.array(copies, uint32)
            while index < num_all:
                row_tile, column_tile = place_of(index, count, tiles_n)
                column = uint32(column_tile * uint32(columns))
                expert, first_row, rows, _ = memory.load_4xb32(tiles + uint64(row_tile) * uint64(16))
                last = uint32(first_row + rows - uint32(1))
                first_row = uint32(first_row + rank * uint32(block_m) + own_row)
                for i in range(copies):
                    row = minimum_u32(uint32(first_row + uint32(rows_at_once * i)), last)  # the last one is repeated
                    if tokens != uint64(0):
                        row = memory.load_b32(tokens + uint64(row) * uint64(4))
                    sources[i] = uint32(row * chunks_a_row + chunk)
                if is_packed:
                    weight = memory.load_b64(table + uint64(expert) * uint64(8))
                    at, place, span = (stage, phase, late), (sources, column, n, k), (uint32(0), k)
                    stage, phase, late = unpack_tile(x, weight, ring, at, warp, lane, place, span)
                else:
                    weight = maps
                    if is_joined:
                        column = uint32(column + expert * (n * uint32(2) if is_gated else n))
                    else:
                        weight = maps + uint64(expert) * uint64(MAP_BYTES)
                        if thread == uint32(0):
                            _acquire_map(weight)
                    start = uint32(0)
                    while start < k:
                        mbarrier.wait(uint32(empty + stage * uint32(8)), phase)
                        at, barrier = uint32(shared + stage * uint32(stage_bytes)), uint32(full + stage * uint32(8))
                        if thread == uint32(0):
                            load_weight(weight, at, barrier, rank, column, n, start)
                        fetch(x, at, barrier, sources, start, k, warp, lane)
                        late = hand_over_older(full, stage, lane, late)
                        stage, phase = next_stage(stage, phase)
                        start = uint32(start + uint32(BLOCK_K))
                index = uint32(index + step)
            wait_for_all()
            while late[1] > uint32(0):
                late = hand_over(full, lane, late)
            launch_dependents()
            if blocks > 1:
                left = uint32(0)
                while left < uint32(num_stages):  # others arrive at this block's barriers until then
                    mbarrier.wait(uint32(empty + stage * uint32(8)), phase)
                    stage, phase = next_stage(stage, phase)
                    left = uint32(left + uint32(1))
        else:
            if moves_registers:
                more_registers()
            warp = uint32(warp - uint32(producers))
            x_part = uint32(shared + (warp >> uint32(2)) * uint32(64 * BLOCK_K * 2))
            weight_part = uint32(shared + uint32(x_bytes))
            piece = uint32(shared + uint32(pieces_at) + warp * uint32(PIECE_BYTES))
            if blocks > 1:
                ring = Ring(shared, full, cluster.address_in(empty, lane & uint32(blocks - 1)))
            num_steps = uint32((k + uint32(BLOCK_K - 1)) // uint32(BLOCK_K))
            phase = uint32(0)
            sums, column_scales = cuda.local.array(num_sums, float32), cuda.local.array(num_held, float32)
            while index < num_all:
                row_tile, column_tile = place_of(index, count, tiles_n)
                column = uint32(column_tile * uint32(columns))
                expert, first_row, rows, _ = memory.load_4xb32(tiles + uint64(row_tile) * uint64(16))
                bias = memory.load_b64(table + uint64(uint32(num_experts + expert)) * uint64(8))
                if is_packed:
                    weight = memory.load_b64(table + uint64(expert) * uint64(8))
                    load_columns(column_scales, weight, n, k, column, lane)
                stage, phase = multiply_tile(sums, (x_part, weight_part), ring, (stage, phase), lane, num_steps)
                if is_packed:
                    scale_columns((sums, column_scales, lane))
                row = uint32(first_row + rank * uint32(block_m) + warp * uint32(16))
                store_rows((sums, piece, lane, bias, out, uint32(first_row + rows), n, row, column))
                index = uint32(index + step)

    inner = device_function(experts)

    def packed_experts(x, table, tiles, num_tiles, tokens, out, n, k, num_experts):
        inner(x, table, tiles, num_tiles, tokens, out, n, k, num_experts, uint64(0))

    way, by = f"_{weight_name}" if is_packed else "_joined" if is_joined else "", f"_{activation}" if activation else ""
    return Specialisation(
        name=f"experts_hopper{way}_{dtype}_{tile}{by}",
        kernel=cuda.jit(packed_experts if is_packed else experts),
        argument_types=ARGUMENT_TYPES if is_packed else (*ARGUMENT_TYPES, TENSOR_MAP if is_joined else uint64),
        max_threads=tile.num_threads,
        min_blocks=1,
        min_capability=90,
        needs_arch_features=True,
        constants={"dtype": dtype, "tile": str(tile), "activation": activation, "weight": weight_name or dtype},
    )


def can_plan(arch: str, dtype: str, columns: int, depth: int) -> bool:
    """Whether it multiplies rows of this type and length by so many columns; all begins on 16-byte bounds."""
    width = VECTOR_WIDTH[dtype]
    return arch == ARCH and dtype != "f32" and columns % width == 0 and depth % width == 0 and depth > 0


def can_unpack(arch: str, packing: Packing, dtype: str, columns: int, depth: int, *, is_gated: bool) -> bool:
    """Whether it multiplies 16-bit rows of this length by packed experts of so many columns; a gated one has as many
    twice."""
    is_whole = columns % TILE_COLUMNS == 0 or not is_gated
    return is_whole and can_plan(arch, dtype, columns, depth) and hopper_packed.can_unpack(packing, dtype)


def unpacking_tile(num_rows: int, num_experts: int) -> Tile | None:
    """The tile for so many rows of that many packed experts, spread evenly: as low as the rows; None if there are too
    few or too many. The choice changes no bit."""
    rows = num_rows / min(num_experts, num_rows)
    if not LEAST_UNPACKED_ROWS <= rows <= MOST_UNPACKED_ROWS:
        return None
    return hopper_packed.LOW if rows <= hopper_packed.LOW.block_m else hopper_packed.HIGH


def tile_rows(tile: Tile) -> int:
    """Rows of a tile in the list: of the whole cluster."""
    return tile.block_m * tile.cluster


def seconds(tile: Tile, num_rows: int, num_experts: int, columns: int, depth: int, machine: Machine) -> float:
    """Seconds of a product with weights of `columns` rows, by the model above, for rows spread evenly."""
    touched = min(num_experts, num_rows)
    rows = -(-num_rows // touched)  # of an expert
    clusters = touched * -(-rows // tile_rows(tile)) * -(-columns // tile.block_n)
    rounds = -(-clusters // machine.clusters_at_once(tile.cluster))
    return rounds * (-(-depth // BLOCK_K) * STEP_CYCLES[tile] + ENDS_CYCLES) / CLOCK_HZ


def weights_seconds(num_rows: int, num_experts: int, columns: int, depth: int, machine: Machine) -> float:
    """Least seconds for reading the weights of the experts that have rows."""
    return min(num_experts, num_rows) * columns * depth * 2 / machine.memory_bytes


def best_tile(num_rows: int, num_experts: int, columns: int, depth: int, machine: Machine) -> Tile:
    """The tile for so many rows of that many experts."""
    return min(TILES, key=lambda each: seconds(each, num_rows, num_experts, columns, depth, machine))


def choose_tile(num_rows: int, num_experts: int, columns: int, depth: int, machine: Machine) -> Tile | None:
    """`best_tile`; None where `tensor_core`'s take no longer."""
    tile = best_tile(num_rows, num_experts, columns, depth, machine)
    other = tensor_core.choose_tile(num_rows, num_experts, columns, machine.num_multiprocessors)
    if other not in EFFICIENCY:
        return None  # few rows, whose weights stream
    touched = min(num_experts, num_rows)
    rows = -(-num_rows // touched)  # of an expert
    blocks = touched * -(-rows // other.block_m) * -(-columns // other.block_n)
    rate = _MEDIUM_FLOPS * EFFICIENCY[other] / EFFICIENCY[MEDIUM] / machine.num_multiprocessors
    work = 2.0 * depth * -(-blocks // machine.num_multiprocessors) * other.block_m * other.block_n / rate
    least = weights_seconds(num_rows, num_experts, columns, depth, machine)
    ours = seconds(tile, num_rows, num_experts, columns, depth, machine)
    return tile if (max(least, ours), ours) < (max(least, work), work) else None


def plan(
    tiles: int, columns: int, dtype: str, activation: str, tile: Tile, machine: Machine,
    joined: tuple[int, int] | None = None, packing: Packing | None = None,
) -> Launch:  # fmt: skip
    """The launch for at most so many tiles of rows, at least one, if `can_plan`. With `joined` the weights lie one
    after the other, so many rows of that length in all, and their address is the last argument. With `packing` they are
    packed, and the tile is one of `UNPACKING_TILES`, if `can_unpack`."""
    width = tile.block_n // 2 if activation else tile.block_n
    clusters = min(tiles * -(-columns // width), machine.clusters_at_once(tile.cluster))
    maps = () if joined is None else ((len(ARGUMENT_TYPES), map_layout(dtype, *joined)),)
    return Launch(
        _kernel(dtype, tile, activation, joined is not None, packing.name if packing else ""),
        (clusters * tile.cluster, 1, 1), (tile.num_threads, 1, 1), tile.shared_bytes, cluster=(tile.cluster, 1, 1),
        maps=maps,
    )  # fmt: skip


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for dtype in ("f16", "bf16"):
        for tile in TILES:
            for activation in ("", *GATES):
                for is_joined in (False, True):
                    yield _kernel(dtype, tile, activation, is_joined)
    for weight in PACKINGS:
        for tile in UNPACKING_TILES:
            for activation in ("", "silu", *(("clamped_silu",) if weight == "e2m1_g32_exponents" else ())):
                yield _kernel("bf16", tile, activation, weight_name=weight)
