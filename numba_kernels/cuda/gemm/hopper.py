"""Tier 5, Hopper alone: `wgmma` fed by the TMA. Lesson: warps with different work.

Against the tensor_core tier it changes

- the arithmetic: four warps together multiply 64 rows of x by 256 columns, both from shared memory, in one asynchronous
  instruction; only the sums are in registers;
- the way in: one thread loads whole tiles by the TMA, which arrive swizzled as `wgmma` reads them and zero beyond the
  matrices. No other thread computes an address;
- the roles: a group of warps that only loads (the producer, which gives its registers away) runs as far ahead as
  shared memory has stages; the groups that multiply (consumers) take these registers. They meet only at two barriers a
  stage, "full" and "empty";
- the cluster: two blocks, one below the other, need the same tile of the weight. Each loads half of it for both;
- the blocks: as many as there are multiprocessors, each with one tile after another, so that the loads of the next
  tile are under way while the sums of the last one are written. For fewer tiles see hopper_split.py.

The order in which `wgmma` adds is its own: a row has other last bits than in the other tiers, the same in any batch.

Source of the instructions' meaning: PTX ISA, "wgmma.mma_async", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from numba import cuda, types

from numba_kernels.cuda.gemm import hopper_split, skinny_shape
from numba_kernels.cuda.gemm.epilogue import ARGUMENT_TYPES, DTYPE_PAIRS, GATED, product_kernel
from numba_kernels.cuda.gemm.hopper_out import SQUARE_PIECES, load_scales, residual_loader, row_finisher, tile_storer
from numba_kernels.cuda.gemm.hopper_ring import (
    BLOCK_K,
    GROUP_ROWS,
    Ring,
    Tile,
    ring_starter,
    tile_loader,
    tile_multiplier,
    tile_order,
)
from numba_kernels.cuda.gemm.hopper_unpack import column_scaler, dense_unpacker
from numba_kernels.cuda.gemm.product import Machine, Product, tile_named
from numba_kernels.cuda.intrinsics import cluster, mbarrier, memory, tma
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.sync import launch_dependents, set_registers, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import shuffle_index_b32
from numba_kernels.cuda.specialisation import TENSOR_MAP, Launch, Specialisation, TensorMapLayout

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

LARGE = Tile(256, 2, 4, cluster=2)
MIDDLE = Tile(192, 2, 5)
SMALL = Tile(128, 2, 5)
THIN = Tile(192, 1, 6)
NARROW = Tile(128, 1, 8)
TILES, SPLIT_TILES = (SMALL, THIN, MIDDLE, LARGE), (NARROW, SMALL)


ARCH = "sm_90a"
MEASURED_ROWS, _MEASURED_ENDS_S = 128, 10e-6
CLOCK_HZ = 1.755e9  # of an H200 under load

# A model of a block's time on one multiprocessor, in cycles: a step is a stage's products or its way from the
# second-level cache, the ends are the first stage's way and the sums'. Fitted to an H200's times of 32 to 1,024 rows of
# Qwen3-8B's matrices by each tile, alone and in parts (docs/measurements, 2026-11-26): off by a ninth, and its choice
# takes 1.02 times the fastest's time. Ends that the next tile's loads hide count 0.
STEP_CYCLES = {LARGE: 1140, MIDDLE: 866, SMALL: 634, THIN: 440, NARROW: 446}
ENDS_CYCLES = {LARGE: 2400, MIDDLE: 2400, SMALL: 0, THIN: 4700}
SPLIT_ENDS_CYCLES = {2: 10_300, 4: 8_700, 8: 12_900}
FIRST_CYCLES = 4200  # until what memory brings is used
MEMORY_SHARE = 0.83  # of its bandwidth, that a weight comes with
WAYS_OUT = ("rows", "tiles", "tiles_residual")
"""Ways to store sums: along rows, whatever their bounds; by the TMA, which also brings the residual or there is none.
One more for each of `GATES`, of a weight whose first half is the gate's: by the TMA, too."""
GATES = tuple(GATED)


@functools.cache
def kernel(dtype: str, out_dtype: str, tile: Tile, way_out: str, weight_name: str = "") -> Specialisation:
    """`weight_name` is a packing's, whose weight some warps of the tile unpack."""
    block_m, block_n, num_stages, blocks = tile.block_m, tile.block_n, tile.num_stages, tile.cluster
    pieces_at, barriers_at, x_bytes = tile.pieces_at, tile.barriers_at, tile.x_bytes
    num_sums, num_held, num_pieces, producers = block_n // 2, block_n // 32, 8 * tile.num_consumers, tile.producers
    start_ring, multiply_tile = ring_starter(tile), tile_multiplier(dtype, tile)
    ask_ahead, load_tile, wait_until_read_by_all = tile_loader(tile, is_gated=way_out in GATES)
    is_packed, unpack_tile, load_columns, scale_columns = weight_name != "", None, None, None
    if is_packed:
        unpack_tile = dense_unpacker(tile, weight_name, dtype, way_out in GATES)
        load_columns, scale_columns = column_scaler(tile, weight_name, dtype, way_out in GATES)
    place_of = tile_order(max(1, GROUP_ROWS // blocks))
    # Else each thread has enough: those that unpack take as many as those that multiply.
    moves_registers = num_sums > 64 and tile.num_consumers > 1 and not is_packed
    fewer_registers, more_registers = set_registers(24, is_more=False), set_registers(240, is_more=True)
    stores_tiles, has_residual, is_gated = way_out != "rows", way_out == "tiles_residual", way_out in GATES
    columns = block_n // 2 if is_gated else block_n  # of the output, a tile
    piece_columns, piece_bytes = tile.piece_columns, tile.piece_bytes
    finish_rows, wait_until_read = row_finisher(dtype, out_dtype, block_n, piece_columns), tma.store_wait_read(0)
    load_residual, store_tile = (
        residual_loader(piece_columns),
        tile_storer(dtype, columns, piece_columns, has_residual=has_residual, activation=way_out if is_gated else ""),
    )
    is_phase_moved = block_n // piece_columns // 2 % 2  # of a residual's barriers, from one tile to the next

    @device_function
    def multiply(given):
        x, weight, m, n, k = given.x, given.weight, given.m, given.n, given.k
        shared = uint32((memory.shared_address(cuda.shared.array(0, uint32)) + uint32(1023)) & uint32(0xFFFFFC00))
        full = uint32(shared + uint32(barriers_at))
        empty = uint32(full + uint32(8 * num_stages))
        arrived = uint32(empty + uint32(8 * num_stages))  # pieces of the residual
        thread = uint32(cuda.threadIdx.x)
        lane, warp = thread & uint32(31), shuffle_index_b32(thread >> uint32(5), uint32(0))  # ptxas sees: one a warp
        if thread == uint32(0):
            tma.prefetch_map(x)
            if not is_packed:
                tma.prefetch_map(weight)
            if has_residual:
                for number in range(num_pieces):
                    mbarrier.init(uint32(arrived + uint32(8 * number)), uint32(1))
            start_ring(full, empty)
        if blocks > 1:
            cluster.arrive_relaxed()
            cluster.wait()
            rank = cluster.rank()
        else:
            sync_block()
            rank = uint32(0)

        tiles_m = uint32((m + uint32(block_m * blocks - 1)) // uint32(block_m * blocks))
        tiles_n = uint32((n + uint32(columns - 1)) // uint32(columns))
        num_tiles = uint32(tiles_m * tiles_n)
        index = uint32(uint32(cuda.blockIdx.x) // uint32(blocks))
        step = uint32(uint32(cuda.gridDim.x) // uint32(blocks))
        stage, ring = uint32(0), Ring(shared, full, empty)
        if warp < uint32(producers):
            if moves_registers:
                fewer_registers()
            if is_packed:
                at = stage, uint32(1), (uint32(0), uint32(0))
                while index < num_tiles:
                    row_tile, column_tile = place_of(index, tiles_m, tiles_n)
                    place = uint32(row_tile * uint32(block_m)), uint32(column_tile * uint32(columns)), n, k
                    at = unpack_tile(x, weight, ring, at, warp, lane, place, (uint32(0), k))
                    index = uint32(index + step)
                launch_dependents()
            elif thread == uint32(0):
                phase = uint32(1)
                row_tile, column_tile = place_of(index, tiles_m, tiles_n)
                column = uint32(column_tile * uint32(columns))
                num_asked = ask_ahead(weight, ring, rank, column, n, uint32(0), k)
                wait_for_previous_grid()
                while index < num_tiles:
                    row_tile, column_tile = place_of(index, tiles_m, tiles_n)
                    row = uint32((row_tile * uint32(blocks) + rank) * uint32(block_m))
                    column = uint32(column_tile * uint32(columns))
                    at, place = (stage, phase, num_asked), (rank, row, column, n)
                    stage, phase = load_tile(x, weight, ring, at, place, (uint32(0), k))
                    num_asked = uint32(0)
                    index = uint32(index + step)
                launch_dependents()
                if blocks > 1:
                    wait_until_read_by_all(empty, stage, phase)  # others arrive at this block's barriers until then
        else:
            if moves_registers:
                more_registers()
            wait_for_previous_grid()
            warp = uint32(warp - uint32(producers))
            x_part = uint32(shared + (warp >> uint32(2)) * uint32(64 * BLOCK_K * 2))
            weight_part = uint32(shared + uint32(x_bytes))
            piece = uint32(shared + uint32(pieces_at) + warp * uint32(piece_bytes))
            arrived = uint32(arrived + warp * uint32(16))
            if blocks > 1:
                ring = Ring(shared, full, cluster.address_in(empty, lane & uint32(blocks - 1)))
            num_steps = uint32((k + uint32(BLOCK_K - 1)) // uint32(BLOCK_K))
            phase, residual_phase = uint32(0), uint32(0)
            sums, column_scales = cuda.local.array(num_sums, float32), cuda.local.array(num_held, float32)
            while index < num_tiles:
                row_tile, column_tile = place_of(index, tiles_m, tiles_n)
                row = uint32((row_tile * uint32(blocks) + rank) * uint32(block_m) + warp * uint32(16))
                column = uint32(column_tile * uint32(columns))
                if has_residual and lane == uint32(0):
                    load_residual(piece, arrived, given.residual, row, column)
                scales = load_scales(given, row, lane)
                if is_packed:
                    load_columns(column_scales, weight, n, k, column, lane)
                stage, phase = multiply_tile(sums, (x_part, weight_part), ring, (stage, phase), lane, num_steps)
                if is_packed:
                    scale_columns((sums, column_scales, lane))
                if stores_tiles:
                    store_tile((given, sums, scales, piece, arrived, residual_phase, row, column, lane))
                    residual_phase ^= uint32(is_phase_moved)
                else:
                    finish_rows(given, sums, scales, piece, row, column, lane)
                index = uint32(index + step)
            if stores_tiles and lane == uint32(0):
                wait_until_read()

    return Specialisation(
        name=f"gemm_hopper_{f'{weight_name}_' if is_packed else ''}{dtype}_{out_dtype}_{tile}_{way_out}",
        kernel=product_kernel(multiply),
        argument_types=(
            TENSOR_MAP, uint64 if is_packed else TENSOR_MAP, uint64, TENSOR_MAP if has_residual else uint64,
            TENSOR_MAP if stores_tiles else uint64, *ARGUMENT_TYPES[5:],
        ),
        max_threads=tile.num_threads,
        min_blocks=1,
        min_capability=90,
        needs_arch_features=True,
        constants={
            "dtype": dtype, "out_dtype": out_dtype, "tile": str(tile), "way_out": way_out,
            "weight": weight_name or dtype, "square_columns": SQUARE_PIECES * piece_columns if has_residual else 0,
        },
    )  # fmt: skip


def _ends(tile: Tile, parts: int) -> int:
    return ENDS_CYCLES[tile] if parts == 1 else SPLIT_ENDS_CYCLES[parts]


def _rounds_cycles(tile: Tile, parts: int, m: int, n: int, k: int, machine: Machine) -> int:
    """Cycles of the multiprocessors' rounds by the model above."""
    clusters = -(-m // (tile.block_m * tile.cluster)) * -(-n // tile.block_n)
    num_steps, num_rounds = -(-k // BLOCK_K), -(-clusters // machine.clusters_at_once(tile.cluster * parts))
    return num_rounds * (-(-num_steps // parts) * STEP_CYCLES[tile] + _ends(tile, parts))


def cycles(tile: Tile, parts: int, m: int, n: int, k: int, machine: Machine) -> int:
    """Seconds of ``out [m, n]`` with a tile and K in so many parts: by the rounds, or the weight's load."""
    weight_s = 2 * n * k / (MEMORY_SHARE * machine.memory_bytes)
    return max(_rounds_cycles(tile, parts, m, n, k, machine), int(weight_s * CLOCK_HZ) + FIRST_CYCLES)


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, machine: Machine, *, exact: bool) -> tuple[Tile, int]:
    """The tile, and the number of parts of K, with the least time for ``out [m, n]`` by that model.

    Among equally memory-bound ones, the one with the shortest rounds. A cluster's blocks all have rows.

    With `exact` K is never split: then the choice changes no bit of the result.
    """
    options = [(tile, 1) for tile in TILES if tile.cluster == 1 or m > tile.block_m]
    if not exact:
        most = min(hopper_split.MAX_PARTS, -(-k // BLOCK_K) // hopper_split.LEAST_STEPS)
        options += [(tile, parts) for tile in SPLIT_TILES for parts in (2, 4, 8) if parts <= most]

    def key(option: tuple[Tile, int]) -> tuple[int, int]:
        sizes = *option, m, n, k, machine
        return cycles(*sizes), _rounds_cycles(*sizes)

    return min(options, key=key)


def why_not(product: Product, machine: Machine) -> str:
    """Why it cannot compute a product; "" if it can."""
    if machine.arch != ARCH:
        return f"needs {ARCH}, the device is {machine.arch}"
    can_walk = product.x != "f32" and product.is_weight_layout and product.is_aligned and product.k > 0
    if not can_walk or product.weight != product.x:
        return "reads 16-bit factors of one type in the weight layout, in rows on 16-byte bounds"
    if product.num_segments:
        return "takes K in steps that segments do not end at"
    if product.epilogue.activation and (product.exact or product.n % 8 or product.out != product.x):
        return "gates columns in eights, to x's type, and not exactly"
    return ""


def seconds(product: Product, machine: Machine) -> float:
    """Always the fastest, beyond the rows of `hopper_few`. Exact products do not choose it, since its bits are its
    own."""
    return math.inf if product.exact or product.m <= skinny_shape.MAX_ROWS else 0.0


def modelled_s(product: Product, machine: Machine) -> float:
    """As `seconds`, for comparisons outside the tiers: within an eighth of an H200's times for 65 to 128 rows
    (docs/measurements, 2026-11-26), except 56 instead of 44 µs for N = 4096 at 128 rows."""
    if product.exact or not skinny_shape.MAX_ROWS < product.m <= MEASURED_ROWS:
        return seconds(product, machine)
    m, n, k = product.m, product.n, product.k
    tile, parts = choose(m, n, k, machine, exact=False)
    read = max(cache_reads(product, tile) / machine.cache_bytes, product.weight_bytes / machine.sustained_bytes)
    return max(cycles(tile, parts, m, n, k, machine) / CLOCK_HZ, read) + _MEASURED_ENDS_S


def cache_reads(product: Product, tile: Tile) -> int:
    """Bytes read from the second-level cache, as the emulator counts them: the weight for each cluster's rows of x, x
    for each tile's columns. Splitting K does not change them."""
    x_bytes = ITEM_BYTES[product.x] * product.m * product.k
    clusters_m, tiles_n = -(-product.m // (tile.block_m * tile.cluster)), -(-product.n // tile.block_n)
    return clusters_m * product.weight_bytes + tiles_n * x_bytes


def tiles(product: Product, machine: Machine) -> tuple[str, ...]:
    """The tiles worth measuring for a product; "" may split K."""
    return ("", *map(str, TILES))


def plan(product: Product, machine: Machine, tile: str = "") -> Launch:
    """A launch for a product that it can compute and that is not empty. A tile that is named takes K whole."""
    named, parts = tile_named(TILES, tile), 1
    if named is None:
        named, parts = choose(product.m, product.weight_rows, product.k, machine, exact=product.exact)
    return plan_tile(product, machine, named, parts)


def plan_tile(product: Product, machine: Machine, tile: Tile, parts: int = 1) -> Launch:
    """As `plan`, by one of `TILES` or, with K in several parts, of `SPLIT_TILES`; a packed weight, by one of
    `hopper_packed`'s tiles."""
    m, n, k, dtype, out_dtype, epilogue = product.m, product.n, product.k, product.x, product.out, product.epilogue
    activation, width = epilogue.activation, product.weight_rows
    tiles = -(-m // (tile.block_m * tile.cluster)) * -(-width // tile.block_n)
    x_map = TensorMapLayout(dtype, (k, m), (k * 2,), (BLOCK_K, tile.block_m), 128)
    part_rows = tile.block_n // (2 if activation else tile.cluster)
    weight_map = TensorMapLayout(dtype, (k, width), (k * 2,), (BLOCK_K, part_rows), 128)
    packed = product.weight if tile.num_unpackers else ""
    maps: tuple[tuple[int, TensorMapLayout], ...] = ((0, x_map),) if packed else ((0, x_map), (1, weight_map))
    way_out = "rows"
    if parts > 1:
        launched = hopper_split.kernel(dtype, out_dtype, tile, activation, packed)
        blocks, cluster_blocks = tiles * parts, parts
    else:
        if activation or (out_dtype == dtype and epilogue.is_aligned and n % 8 == 0):
            out_map = TensorMapLayout(dtype, (n, m), (n * 2,), (tile.piece_columns, 16), 2 * tile.piece_columns)
            maps, way_out = (*maps, (4, out_map)), activation or "tiles"
            if epilogue.has_residual and not activation:
                maps, way_out = (*maps, (3, out_map)), "tiles_residual"
        launched, cluster_blocks = kernel(dtype, out_dtype, tile, way_out, packed), tile.cluster
        blocks = min(tiles, machine.clusters_at_once(tile.cluster)) * tile.cluster
    return Launch(
        launched, (blocks, 1, 1), (tile.num_threads, 1, 1), tile.shared_bytes, cluster=(cluster_blocks, 1, 1), maps=maps
    )


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for dtype, out_dtype in DTYPE_PAIRS:
        if dtype != "f32":
            activations = GATES if out_dtype == dtype else ()
            for tile in TILES:
                for way_out in (*WAYS_OUT, *activations) if out_dtype == dtype else WAYS_OUT[:1]:
                    yield kernel(dtype, out_dtype, tile, way_out)
            for tile in SPLIT_TILES:
                for activation in ("", *activations):
                    yield hopper_split.kernel(dtype, out_dtype, tile, activation)
