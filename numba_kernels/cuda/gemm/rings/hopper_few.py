"""Few rows, 3 to 64, on Hopper: the weight is the first factor of `wgmma`. Lesson: half of a multiprocessor suffices.

A product of few rows takes as long as its weight's bytes. `wgmma` multiplies 64 rows of its first factor by 8 columns
or more of the second: x as the first one would be padded to 64 rows, and would take shared memory for as many. So the
weight comes first, and the product is ``out^T = weight . x^T``:

- a block multiplies tiles of 128 rows of the weight, 64 a group of four warps, by all rows of x: 16, 32 or 64. One
  thread more has the TMA fill a ring of stages, 64 of K each. All takes half of a multiprocessor's registers and shared
  memory, so the next kernel's blocks fit beside it, and fill their rings with weights before `wait_for_previous_grid`;
- blocks go from tile to tile, and the ring goes on meanwhile;
- blocks of a cluster share rows of x, or K, or both: those of its x axis have tiles side by side, and each loads a part
  of x for all of them; those of its y axis have a part of K each. Their sums meet as in `sums_out.py`: each block
  leaves its own where the last stage of the tile was, and finishes some rows of all. Barriers in shared memory count
  the warps that have left and taken sums, so the thread that fills the ring waits for nothing of this;
- parts of K are equally many stages. Beyond K they are zeros, which no memory is read for.

Low-rank sums of adapters may ride on the launch (`riding`, `adapters.tiles`), of up to `riding.MAX_ROWS` rows: two
or three warps more expand a tile's sums while the others multiply it. They take the registers that those can spare.

A packed weight (`few_packed`) is unpacked by the warps that multiply it, which take registers of the others; another
warp more puts x into its order.

How K is cut depends on the weight and the device alone, and rows of x never mix: a row has the same bits in any batch
of 3 to 64 rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm import quantised_gemv, skinny
from numba_kernels.cuda.gemm.adapters import riding, tiles
from numba_kernels.cuda.gemm.epilogue import DTYPE_PAIRS, GATED, scales_leaver
from numba_kernels.cuda.gemm.hopper_ring import BLOCK_K
from numba_kernels.cuda.gemm.product import Machine, Product, unpacking_s
from numba_kernels.cuda.gemm.rings.few_packed import maps_of, packed_weight
from numba_kernels.cuda.gemm.rings.few_weights import ARCH, BLOCK_ROWS, WIDTHS, Block, plain_weight
from numba_kernels.cuda.gemm.rings.sums_out import sums_finisher
from numba_kernels.cuda.gemm.skinny_shape import COLUMNS, MAX_ROWS
from numba_kernels.cuda.gemm.weight_stream import TILE_COLUMNS, settles
from numba_kernels.cuda.intrinsics import cluster, mbarrier, memory, tma
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, set_registers, sync_named, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import count_b32, shuffle_index_b32, sync_warp
from numba_kernels.cuda.packing import PACKINGS, packing_of
from numba_kernels.cuda.specialisation import TENSOR_MAP, Launch, Specialisation, TensorMapLayout

uint16, uint32, uint64, float32 = types.uint16, types.uint32, types.uint64, types.float32

LEAST_ROWS = 3
NORMED_ROWS = 5  # that `quantised_gemv` normalises itself, which spares two launches a layer
MAX_PACKED_ROWS = 32  # for more rows half of a multiprocessor has too few registers, and `hopper_packed` takes them
WARPS = 8  # that multiply
BLOCK_WARPS = 12  # whole groups of four; of the last one a thread loads, and two or three warps expand
EXPANDING = 3
_INSTRUCTIONS = {
    "u4_g128": (748, 810), "u4_g128_zeros": (764, 826), "u4": (896, 934), "u8": (458, 473), "e4m3": (476, 491),
    "e2m1_g32_exponents": (924, 970), "e2m1": (988, 1034),
}  # fmt: skip
"""Machine instructions for 4 KB of a packed weight by its name, or else its elements, for 16 or 32 rows: counted."""
LEAST_STEPS = 4  # stages of a part of K
MAX_CLUSTER = 8
_SHARE_AT_MOST = 1.5  # times its share of the bandwidth, that a multiprocessor reads while others idle: an estimate
_SLACK = 0.125  # a round's clusters may be so many more than multiprocessors: two blocks fit on one
_MEETING_S, _ENDS_S = 1e-6, 4.5e-6  # of a cluster's blocks; of a launch: estimates


def steps_in_flight(width: int, *, is_packed: bool) -> int:
    """Steps of K of a warp that shrinks: more take too many registers."""
    return 2 if is_packed and width == riding.MAX_ROWS else 1


def _registers(block: Block, *, is_gated: bool) -> tuple[int, int] | None:
    """Registers of a thread that multiplies, and of the others, in half of a multiprocessor; zeros if all have equally
    many. None where half has too few: adapters on 32 rows of a gated unit of 4 bits, whose sums a group's scale
    multiplies."""
    packing = block.packing
    if not block.takes_adapters:
        return (0, 0) if packing is None else (88, 64)
    if block.width < riding.MAX_ROWS or (packing is None and not is_gated):
        return 64, 112
    if packing is None:
        return 80, 96
    if packing.steps == 4 and settles(packing, 2) and (is_gated or not packing.has_zeros):
        return None if is_gated else (0, 0)
    return (72, 112) if is_gated and packing.steps == 4 else (88, 80)


_flip_of = device_function(lambda row: (row & uint32(6)) << uint32(2))  # lanes t store rows 2 t, of 8 columns each


@functools.cache
def _sums_storer(width: int, *, is_gated: bool) -> Any:
    """A device function that leaves a warp's 16 rows of the weight, which are columns of the output, as `sums_out`
    reads them."""
    store = memory.shared_store_f32

    @device_function
    def store_sums(target, sums, warp, lane):
        team, column = warp >> uint32(1), (warp & uint32(1)) << uint32(4)
        if is_gated:
            team, column = warp & uint32(3), (warp >> uint32(2)) << uint32(4)
        t, column = lane & uint32(3), uint32(column + (lane >> uint32(2)))
        row = uint32(target + (team * uint32(width) + t * uint32(2)) * uint32(COLUMNS * 4))
        for h in range(2):
            at = uint32(row + ((column + uint32(8 * h)) ^ _flip_of(t * uint32(2))) * uint32(4))
            for i in range(width // 8):
                for e in range(2):
                    store(uint32(at + uint32((8 * i + e) * COLUMNS * 4)), sums[4 * i + 2 * h + e])

    return store_sums


@functools.cache
def kernel(
    dtype: str, out_dtype: str, width: int, activation: str = "", weight_name: str = "", takes_adapters: bool = False
) -> Specialisation:
    """For up to `width` rows, and a packed weight if it has a name. The cluster's x axis shares x, the y axis K, of
    which the grid has no more."""
    layout, is_gated, is_packed = Block(width, weight_name, takes_adapters), activation != "", weight_name != ""
    num_stages, size, holds, sums_at = layout.num_stages, layout.stage_bytes, layout.holds_stage, layout.sums_at
    barriers_at, scales_at, expanded_at, num_sums = layout.barriers_at, layout.scales_at, layout.expanded_at, width // 2
    columns = BLOCK_ROWS // 2 if is_gated else BLOCK_ROWS  # of the output, a tile
    num_teams = BLOCK_ROWS // COLUMNS
    weights = (packed_weight if is_packed else plain_weight)(dtype, layout, is_gated=is_gated)
    ask_ahead, load_tile, arrange, multiply_tile = (
        weights.ask_ahead, weights.load_tile, weights.arrange, weights.multiply_tile
    )  # fmt: skip
    store_sums, depth = _sums_storer(width, is_gated=is_gated), layout.depth
    finish_sums = sums_finisher(
        dtype, out_dtype, _flip_of, width * COLUMNS * 4, weights.scalers, activation, has_clusters=True,
        takes_adapters=takes_adapters, has_own_rows=True,
    )  # fmt: skip
    split = _registers(layout, is_gated=is_gated)
    leave_scales, expand = scales_leaver(4), tiles.expander(dtype) if takes_adapters else None
    of_multiplying, of_others = split or (0, 0)
    moves_registers, gets_more = of_multiplying > 0, of_multiplying > of_others
    set_multiplying = set_registers(of_multiplying, is_more=gets_more)
    set_others = set_registers(of_others, is_more=not gets_more)
    expanded_row, num_expanding = BLOCK_ROWS + tiles.PAD, 2 if is_gated or is_packed else EXPANDING
    first_expanding = WARPS + 1 + is_packed
    num_givers = WARPS + (num_expanding if takes_adapters else 0)

    @device_function
    def expand_tile(shared, first_column, part, parts, warp, lane, m, n, added):
        """The block's share of a tile's sums of adapters: its blocks of the y axis take groups of columns in turn."""
        inside = uint32(0)
        if first_column < n:
            inside = minimum_u32(uint32(n - first_column), uint32(columns))
        count = uint32(uint32(inside + uint32(tiles.TILE - 1)) // uint32(tiles.TILE) + parts - uint32(1) - part)
        own = (
            uint32(first_column + part * uint32(tiles.TILE)), uint32(parts * uint32(tiles.TILE)),
            count >> count_b32(uint32(parts - uint32(1))), n,
        )  # fmt: skip
        target = uint32(shared + uint32(expanded_at))
        if is_gated:  # a warp for the gate, one for up
            target = uint32(target + warp * uint32(columns * 4))
            expand(target, uint32(expanded_row), uint32(0), uint32(1), lane, m, own, warp, added)
        else:
            expand(target, uint32(expanded_row), warp, uint32(num_expanding), lane, m, own, uint32(0), added)

    @device_function
    def multiply_block(column_block, column_blocks, given, added, matrix):
        x, m, n, k = given.x, given.m, given.n, given.k
        shared = uint32((memory.shared_address(cuda.shared.array(0, uint32)) + uint32(1023)) & uint32(0xFFFFFC00))
        full = uint32(shared + uint32(barriers_at))
        empty = uint32(full + uint32(8 * num_stages))
        handed = uint32(empty + uint32(8 * num_stages))
        taken, scales = uint32(handed + uint32(8)), uint32(shared + uint32(scales_at))
        ready = uint32(taken + uint32(8))
        lane, warp = uint32(cuda.threadIdx.x), shuffle_index_b32(uint32(cuda.threadIdx.y), uint32(0))  # one a warp
        part, parts = uint32(cuda.blockIdx.y), uint32(cuda.gridDim.y)
        shares = divide_u32(cluster.size(), parts)
        share = uint32(cluster.rank() - part * shares)
        first, step = uint32((column_block - share) * uint32(columns)), uint32(column_blocks * uint32(columns))
        own = uint32(share * uint32(columns))  # the block's tile, from the cluster's first one on
        num_steps = uint32((k + uint32(depth - 1)) // uint32(depth))
        num_steps = divide_u32(uint32(num_steps + parts - uint32(1)), parts)
        start = uint32(part * num_steps * uint32(depth))
        end, num_asked = uint32(start + num_steps * uint32(depth)), uint32(0)
        loads = warp == uint32(WARPS) and lane == uint32(0)
        if loads:
            tma.prefetch_map(x)
            for stage in range(num_stages):
                mbarrier.init(uint32(full + uint32(8 * stage)), uint32(1))
                mbarrier.init(uint32(empty + uint32(8 * stage)), uint32(shares * uint32(WARPS)))
                mbarrier.init(uint32(ready + uint32(8 * stage)), uint32(1))
            mbarrier.init(handed, uint32(parts * uint32(num_givers)))
            mbarrier.init(taken, uint32(parts * uint32(WARPS)))
            mbarrier.fence_init()
            num_asked = ask_ahead(matrix, shared, full, uint32(first + own), n, start, end)
        sync_warp()
        cluster.arrive_relaxed()
        cluster.wait()

        peer = uint32(share + shares * (lane & uint32(parts - uint32(1))))
        given_there, taken_there = cluster.address_in(handed, peer), cluster.address_in(taken, peer)
        stage, turn = uint32(0), uint32(0)
        if warp < uint32(WARPS):
            if moves_registers:
                set_multiplying()
            wait_for_previous_grid()
            row, end_row = divide_u32(m * part, parts), divide_u32(m * (part + uint32(1)), parts)
            own_scales, num_rows = uint32(scales + row * uint32(4)), uint32(end_row - row)
            leave_scales(given, own_scales, row, num_rows, warp, uint32(WARPS), lane)
            empty = cluster.address_in(empty, uint32(part * shares + (lane & uint32(shares - uint32(1)))))
            sums, phase = cuda.local.array(num_sums, float32), uint32(0)
            while first < n:
                stage, phase, last = multiply_tile(
                    sums, (shared, full, ready, empty), stage, phase, (warp, lane), shares, num_steps, n >> uint32(31)
                )  # fmt: skip
                target = uint32(shared + uint32(sums_at))
                if holds:
                    target = uint32(shared + last * uint32(size))
                    sync_named(uint32(1), uint32(WARPS * 32))  # both groups have read the stage
                store_sums(target, sums, warp, lane)
                sync_warp()
                if lane < parts:
                    cluster.release_shared()
                    mbarrier.arrive_relaxed(given_there)
                mbarrier.wait_for_cluster(handed, turn)
                finish_sums(
                    given, (target, uint32(1)), scales, (row, end_row), (warp, uint32(0), lane, (share, shares, parts)),
                    (uint32(first + own), uint32(num_teams)),
                    (uint32(shared + uint32(expanded_at)), uint32(expanded_row), uint32(parts - uint32(1))),
                )  # fmt: skip
                sync_warp()
                if lane < parts:
                    mbarrier.arrive_read(taken_there)
                mbarrier.wait(taken, turn)
                if holds:
                    tma.fence_shared()
                    sync_warp()
                    if lane < shares:
                        mbarrier.arrive_read(uint32(empty + last * uint32(8)))
                first, turn = uint32(first + step), turn ^ uint32(1)
        else:
            if moves_registers:
                set_others()
            if loads:
                wait_for_previous_grid()
                launch_dependents()
                phase = uint32(1)
                while first < n:
                    stage, phase = load_tile(
                        x, matrix, (shared, full, empty), stage, phase, num_asked, (share, shares, part),
                        (uint32(first + own), n, start, end),
                    )  # fmt: skip
                    num_asked, first = uint32(0), uint32(first + step)
            elif is_packed and warp == uint32(WARPS + 1):
                wait_for_previous_grid()
                phase = uint32(0)
                while first < n:
                    stage, phase = arrange(shared, full, ready, stage, phase, num_steps, lane, n >> uint32(31))
                    first = uint32(first + step)
            elif takes_adapters and uint32(warp - uint32(first_expanding)) < uint32(num_expanding):
                wait_for_previous_grid()
                before = riding.NOT_COUNTED
                if warp == uint32(first_expanding):
                    before = riding.wait_for_shrinking(lane, added)
                sync_named(uint32(2), uint32(num_expanding * 32))
                while first < n:
                    number = uint32(warp - uint32(first_expanding))
                    expand_tile(shared, uint32(first + own), part, parts, number, lane, m, n, added)
                    sync_warp()
                    if lane < parts:
                        cluster.release_shared()
                        mbarrier.arrive_relaxed(given_there)
                    mbarrier.wait(taken, turn)
                    first, turn = uint32(first + step), turn ^ uint32(1)
                riding.reset_counters(before, uint32(column_blocks * parts), added)
        sync_warp()
        cluster.arrive_relaxed()  # no block exits while others read its sums or arrive at its barriers
        cluster.wait()

    @device_function
    def multiply_plain(column_block, column_blocks, given, added):
        multiply_block(column_block, column_blocks, given, added, (given.weight,))

    steps = steps_in_flight(width, is_packed=is_packed)
    shrink = tiles.shrinker(dtype, BLOCK_WARPS, steps, in_parts=True) if takes_adapters else None
    multiply = multiply_block if is_packed else multiply_plain
    return Specialisation(
        name=f"gemm_hopper_few_{weight_name}{'_' * is_packed}{dtype}_{out_dtype}_{width}{'_' if is_gated else ''}"
        f"{activation}{'_adapted' * takes_adapters}",
        kernel=riding.product_kernel(multiply, shrink, in_columns=True, has_maps=is_packed),
        argument_types=(
            TENSOR_MAP, uint64 if is_packed else TENSOR_MAP, *riding.argument_types(takes_adapters)[2:],
            *(TENSOR_MAP,) * (3 * is_packed),
        ),
        max_threads=BLOCK_WARPS * 32,
        min_blocks=1 if split is None else 2,
        min_capability=90,
        needs_arch_features=True,
        constants={
            "dtype": dtype, "out_dtype": out_dtype, "width": width, "activation": activation,
            "weight": weight_name or dtype, "square_columns": 0 if is_gated else COLUMNS,
        },
    )  # fmt: skip


def _rounds(clusters: int, size: int, machine: Machine) -> int:
    at_once = machine.num_multiprocessors if size == 1 else machine.clusters_at_once(size)
    return max(1, math.ceil(clusters / at_once - _SLACK))


def _tiles(product: Product) -> int:
    return -(-product.weight_rows // BLOCK_ROWS)


def _seconds_of(parts: int, tiles: int, k: int, block: Block, machine: Machine) -> float:
    """Seconds of all rounds: by the bandwidth, or by what a multiprocessor can read of it. It knows no rows of x."""
    rounds, steps = _rounds(tiles, parts, machine), math.ceil(k / block.depth / parts)
    tile_bytes, blocks = steps * (block.weight_bytes + block.scale_bytes), -(-tiles // rounds) * parts
    rate = machine.memory_bytes * min(1.0, blocks * _SHARE_AT_MOST / machine.num_multiprocessors)
    return rounds * blocks * tile_bytes / rate + (_MEETING_S if parts > 1 else 0.0)


@functools.lru_cache(maxsize=1 << 12)
def shape(m: int, weight_rows: int, k: int, machine: Machine, packed: str = "") -> tuple[int, int, int]:
    """(rows of x that the kernel has, blocks that share x, parts of K), of 16 bits or a packed weight."""
    width, tiles = next(each for each in WIDTHS if each >= m), -(-weight_rows // BLOCK_ROWS)
    block = Block(width, packed)
    able = [parts for parts in (1, 2, 4, 8) if parts == 1 or k > (parts * LEAST_STEPS - 1) * block.depth]
    parts = min(able, key=lambda parts: _seconds_of(parts, tiles, k, block, machine))
    rounds = {
        shares: _rounds(-(-tiles // shares), shares * parts, machine)
        for shares in (1, 2, 4, 8) if shares * parts <= MAX_CLUSTER and 8 * shares <= width and shares <= max(1, tiles)
    }  # fmt: skip
    return width, max(shares for shares, count in rounds.items() if count <= rounds[1]), parts


def _packed(product: Product) -> str:
    """The weight's name if it is packed, else ""."""
    return "" if product.weight == product.x else product.weight


def _shape_of(product: Product, machine: Machine) -> tuple[int, int, int]:
    return shape(product.m, product.weight_rows, product.k, machine, _packed(product))


def cache_reads(product: Product, machine: Machine) -> int:
    """Bytes read from the second-level cache, as the emulator counts them: the weight, and x for each cluster's
    columns."""
    _, shares, _ = _shape_of(product, machine)
    return product.weight_bytes + -(-_tiles(product) // shares) * ITEM_BYTES[product.x] * product.m * product.k


def why_not(product: Product, machine: Machine) -> str:
    """Why it cannot compute a product; "" if it can."""
    if machine.arch != ARCH:
        return f"needs {ARCH}, the device is {machine.arch}"
    can_walk = product.x != "f32" and product.is_weight_layout and product.is_aligned and product.k > 0
    packing = packing_of(product.weight)
    if not can_walk or (packing is None and product.weight != product.x) or product.exact or product.num_segments:
        return "reads 16-bit rows on 16-byte bounds, and a weight of their type or packed, and is not exact"
    if packing is not None and product.epilogue.activation and product.n % TILE_COLUMNS:
        return f"gates packed weights in tiles of {TILE_COLUMNS} columns"
    most = MAX_ROWS if packing is None else MAX_PACKED_ROWS
    return "" if product.m <= most else f"takes at most {most} rows"


def seconds(product: Product, machine: Machine) -> float:
    """No other tier of these rows takes as few bytes of the cache, or leaves half of a multiprocessor, but for
    `quantised_gemv` with a ring, which takes few rows unless `skinny` would be faster still."""
    if product.m < LEAST_ROWS:
        return math.inf
    is_normed = product.m <= NORMED_ROWS and not quantised_gemv.why_not(product, machine)
    if is_normed and quantised_gemv.has_ring(product, machine):
        return min(quantised_gemv.seconds(product, machine), skinny.seconds(product, machine))
    return 0.0


def stream_s(product: Product, machine: Machine) -> float:
    """Seconds of the bytes, by the cache and by what the multiprocessors can read of the memory."""
    width, _, parts = _shape_of(product, machine)
    read, packed = cache_reads(product, machine) / machine.cache_bytes, _packed(product)
    unpacked = 0.0
    if packed:
        unpacked = unpacking_s(product.weight_bytes, instructions(packed, width), machine.num_multiprocessors)
    return max(read, unpacked, _seconds_of(parts, _tiles(product), product.k, Block(width, packed), machine))


def instructions(weight: str, width: int) -> int:
    """Machine instructions of all warps for 4 KB of a packed weight and a kernel of so many rows."""
    packing = packing_of(weight)
    assert packing is not None
    return _INSTRUCTIONS.get(weight, _INSTRUCTIONS[packing.element])[0 if width == WIDTHS[0] else 1]


def modelled_s(product: Product, machine: Machine) -> float:
    """Seconds, for comparisons outside the tiers."""
    return max(stream_s(product, machine), product.weight_bytes / machine.sustained_bytes) + _ENDS_S


def can_take_adapters(product: Product, machine: Machine) -> bool:
    """Whether low-rank sums (`riding`) can ride on a product's launch."""
    return not why_not(product, machine) and product.out == product.x and LEAST_ROWS <= product.m <= riding.MAX_ROWS


def plan(product: Product, machine: Machine, ranks: int = 0) -> Launch:
    """A launch for a product that it can compute and that is not empty; with low-rank sums of so many ranks, if any."""
    m, k, activation, weight_rows = product.m, product.k, product.epilogue.activation, product.weight_rows
    width, shares, parts = _shape_of(product, machine)
    packed = _packed(product)
    clusters = -(-_tiles(product) // shares)
    clusters = -(-clusters // _rounds(clusters, shares * parts, machine))
    maps = tuple(
        (index, TensorMapLayout(product.x, (k, rows), (k * 2,), (BLOCK_K, box), 128))
        for index, rows, box in ((0, m, width // shares), (1, weight_rows, BLOCK_ROWS // 2))
        if not index or not packed
    )
    shrinking, takes_adapters = 0, ranks > 0
    more_maps: tuple[tuple[int, TensorMapLayout], ...] = ()
    if packed:
        of_weight = maps_of(packed, weight_rows, k, product.x, is_gated=activation != "")
        more_maps = tuple((1, layout) for layout in of_weight)
    block = Block(width, packed, takes_adapters)
    if takes_adapters:
        assert tiles.shrinking_bytes(BLOCK_WARPS) <= block.shared_bytes
        # Some may run beside blocks that multiply: two fit on a multiprocessor.
        idle = max(machine.num_multiprocessors - clusters * shares * parts, machine.num_multiprocessors // 2)
        shrinking = tiles.shrinking_blocks(m, ranks, idle, shares * parts, parts)
    return Launch(
        kernel(product.x, product.out, width, activation, packed, takes_adapters),
        (clusters * shares + shrinking // parts, parts, 1), (32, BLOCK_WARPS, 1), block.shared_bytes,
        cluster=(shares, parts, 1), maps=maps, more_maps=more_maps, num_shrinking=shrinking,
    )  # fmt: skip


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return, without adapters."""
    for dtype, out_dtype in DTYPE_PAIRS:
        if dtype != "f32":
            for width in WIDTHS:
                for activation in ("", *GATED) if out_dtype == dtype else ("",):
                    yield kernel(dtype, out_dtype, width, activation)
    for weight in PACKINGS:
        for width in (16, MAX_PACKED_ROWS):
            for activation in ("", "silu"):
                yield kernel("bf16", "bf16", width, activation, weight)
