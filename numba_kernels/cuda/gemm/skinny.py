"""Few rows, up to 64, of 16-bit factors: the weight streams through tensor cores as memory delivers it. Lesson: the
tensor cores may see K in any order.

A decode step uses each element of the weight once for each sequence: no tile raises that; only the bytes in
flight count, and the number of instructions for them. So

- tiles of 16 rows are multiplied whole, however few there are: the tensor cores are not the bottleneck;
- a product's sum may run over K in any order, if both factors take the same one. `mma.sync` needs pairs 2t, 2t + 1 and
  2t + 8, 2t + 9 of 16 elements in lane t; here lane t's are elements 8t to 8t + 7 of 32: one load of 16 bytes. It
  serves two instructions, straight from device memory to the registers of the lane that multiplies, where it lies as
  their second operand does: no shared memory, no `ldmatrix`, no swizzle, no barrier, no move;
- x goes the same way, but through shared memory: `cp.async` brings it some steps ahead, 16 bytes for each lane that
  reads them;
- a warp has 32 rows of the weight, and four steps of 32 elements of K in registers, each loaded again as soon as it is
  used: 16 loads of 16 bytes a lane, 8 KB a warp, which with eight warps a multiprocessor is 64 KB in flight;
- few columns leave too few warps. The sum over K is split into 1 to 8 streams of whole groups of 128, a warp each;
  warps of one stream and other columns share its x. At the end the sums meet in shared memory, and are added in the
  order of the streams;
- of a gated unit a warp has 16 rows of the gate's half of the weight and the 16 of up's that belong to them.

How K is split depends on (N, K) alone, and rows of x never mix: a row's sums have the same bits in any batch of up to
64 rows. They differ from those of the other tiers.

Packed weights (`weight_stream.py`) differ in the use of a lane's 16 bytes and in the order of factors
(`skinny_shape.py`), and go on beyond 64 rows: the grid's y counts blocks of 64, each of which reads the weight's
few bits again. There K is split only as far as needed to fill the GPU, since more columns of a block save reads of x;
exact products keep the split of few rows.

A packed weight has so few bytes that x, which each block reads from the second-level cache, takes longer from some ten
rows on. Where blocks form clusters (sm_90 on), those of a cluster share K instead: each has the columns of all of them
and a part of the streams, reads that part of x alone, and finishes some of the elements, whose sums it adds over the
blocks. The streams and the order of their sums are the same, and so are the bits.

Low-rank sums of adapters may ride on the launch (`riding`, `adapters.tiles`), of up to `riding.MAX_ROWS` rows in a
block.

Threads: x lanes, y streams, z teams of columns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.adapters import riding, tiles
from numba_kernels.cuda.gemm.epilogue import DTYPE_PAIRS, GATED, Arguments, scales_leaver
from numba_kernels.cuda.gemm.product import Machine, Product
from numba_kernels.cuda.gemm.rings.sums_out import sums_finisher
from numba_kernels.cuda.gemm.skinny_shape import (
    BLOCK_WARPS,
    COLUMNS,
    MAX_ROWS,
    ROW_TILES,
    SCALES_BYTES,
    SPILLING,
    TILE_BYTES,
    Shape,
    choose,
    has_clusters,
    seconds_of,
    settler,
    shapes,
    shared_bytes,
    steps_together,
    weight_first,
    x_first,
)
from numba_kernels.cuda.gemm.skinny_shape import num_stages as num_stages_of
from numba_kernels.cuda.gemm.weight_stream import (
    NOTHING,
    STEP,
    TILE_COLUMNS,
    weight_stream,
)
from numba_kernels.cuda.intrinsics import cluster, memory
from numba_kernels.cuda.intrinsics.device import device_function, in_turn
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.fragments import copy_rows_of_tiles
from numba_kernels.cuda.intrinsics.math import divide_u32, maximum_u32, minimum_u32
from numba_kernels.cuda.intrinsics.sync import (
    launch_dependents,
    split_schedule,
    sync_block,
    sync_named,
    wait_for_previous_grid,
)
from numba_kernels.cuda.intrinsics.warp import count_b32, sync_warp
from numba_kernels.cuda.packing import PACKINGS, packing_of
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32


@dataclass(frozen=True, slots=True)
class _Group:
    """How a warp takes a group of K, steps of all slots that it has in registers.

    Attributes:
        stream: the weight.
        operands: the order of the factors.
        num_stages, stage_bytes: of x in shared memory.
        num_x_words, num_sums: registers of a lane.
        take: a group's steps.
        load_early: of the weight, before the previous grid has ended.
        copy_first: of x.
    """

    stream: Any
    operands: Any
    num_stages: int
    stage_bytes: int
    num_x_words: int
    num_sums: int
    take: Any
    load_early: Any
    copy_first: Any


@functools.cache
def _group_of(dtype: str, weight: str, row_tiles: int, is_gated: bool, has_clusters: bool) -> _Group:
    is_packed, packing = weight != dtype, packing_of(weight)
    num_parts = 4 if has_clusters and row_tiles == 4 else 1  # of x, which a warp has in registers one at a time
    stream = weight_stream(weight, dtype, row_tiles, is_gated, num_parts > 1)
    steps_a_slot, is_settled = stream.steps_a_slot, stream.is_settled
    operands = (weight_first if is_packed else x_first)(dtype, row_tiles)
    num_stages = num_stages_of(weight, row_tiles, has_clusters=has_clusters)
    together = steps_together(weight, row_tiles)  # steps of x that are waited for at once
    num_waits = num_stages // together
    commit, wait_for_next = memory.copy_async_commit, memory.copy_async_wait(num_waits - 2)
    stage_bytes, part_tiles = 2 * row_tiles * TILE_BYTES, row_tiles // num_parts
    # ptxas loads x of a slot's four steps early and multiplies late: of 64 rows it then runs out of registers.
    # Unpacking e2m1 takes most.
    steps_apart: tuple[int, ...] = ()
    if packing is not None and row_tiles == 4:
        steps_apart = (1, 2, 3) if packing.element == "e2m1" else (2,)
    copy_tiles = copy_rows_of_tiles(2 * row_tiles, TILE_BYTES)

    def copier(first_step: int) -> Any:
        """Copies x of steps that are waited for together, of the group or after it."""

        @device_function
        def copy_x(state):
            places, x_stages, column, end, m, chosen = state
            for step in range(first_step, first_step + together):
                num_bytes = uint32(16) if uint32(column + uint32(step * STEP)) < end else uint32(0)
                target = uint32(x_stages[0] + uint32(step % num_stages * stage_bytes))
                copy_tiles(target, places, uint64(step * STEP * 2), num_bytes, m, chosen)
            commit()

        return copy_x

    @device_function
    def wait_for_x(rank, num_teams):
        wait_for_next()
        if num_teams > uint32(1):
            sync_named(uint32(rank + uint32(1)), uint32(num_teams * uint32(32)))

    def step_of(step: int) -> Any:
        """A step of the group: x, once it has arrived, times the weight; prefetches other steps of x."""
        slot, inside = divmod(step, steps_a_slot)
        copy_x, stage = copier(step + num_stages - together), step % num_stages * stage_bytes
        is_waiting = step % together == 0
        is_apart = inside in steps_apart
        unpack = None if stream.unpack is None else stream.unpack(slot, inside)
        settle = None
        if is_settled and inside == steps_a_slot - 1:
            settle = settler(dtype, row_tiles, slot)
        ends_slot = settle is not None

        def multiplier(part: int) -> Any:
            tiles = range(part * part_tiles, (part + 1) * part_tiles)
            return operands.multiplier(stage + 2 * tiles.start * TILE_BYTES, 0 if is_packed else 16 * slot, tiles)

        multiply = in_turn([multiplier(part) for part in range(num_parts)])

        @device_function
        def take_step(state):
            arrays, (words, scales, zeros), _, (column, _, end, _), (m, chosen, rank, num_teams) = state
            sums, parts, pairs, factors, row_factors, x_words, x_stages, places = arrays
            if is_apart:
                split_schedule(uint32(column + uint32(step * STEP)))
            if is_waiting:
                wait_for_x(rank, num_teams)
                copy_x((places, x_stages, column, end, m, chosen))
            factor, added = words, sums
            if is_packed:
                unpack(pairs, factors, words, scales, zeros)
                factor = pairs
            if is_settled:
                added = parts
            multiply((added, x_words, x_stages, factor))
            if ends_slot:
                settle(sums, parts, scales, row_factors)

        return take_step

    def loader_of(slot: int) -> Any:
        """Loads a slot of the next group."""
        load = stream.load(slot)

        @device_function
        def load_slot(state):
            _, kept, places_of_weight, (_, next_column, end, is_whole), _ = state
            load((kept, places_of_weight, next_column, end, is_whole))

        return load_slot

    def slot_of(slot: int) -> list[Any]:
        return [step_of(slot * steps_a_slot + inside) for inside in range(steps_a_slot)] + [loader_of(slot)]

    slots = range(stream.num_slots)
    return _Group(
        stream, operands, num_stages, stage_bytes, num_x_words=8 * part_tiles, num_sums=16 * row_tiles,
        take=in_turn([each for slot in slots for each in slot_of(slot)]),
        load_early=in_turn([stream.load_early(slot) for slot in slots]),
        copy_first=in_turn([copier(together * i) for i in range(3 if num_waits > 2 else 1)]),
    )  # fmt: skip


@functools.cache
def _rows_taker(out_bytes: int, block_rows: int) -> Any:
    """A device function: the arguments for a block's rows from one on."""

    @device_function
    def of_rows(given, first_row):
        x, weight, bias, residual, out, m, n, k, bias_is_f32, x_squares, x_parts, eps, squares = given
        m = minimum_u32(uint32(m - first_row), uint32(block_rows))
        x += uint64(first_row) * uint64(k) * uint64(2)
        out += uint64(first_row) * uint64(n) * uint64(out_bytes)
        if residual != uint64(0):
            residual += uint64(first_row) * uint64(n) * uint64(out_bytes)
        if x_squares != uint64(0):
            x_squares += uint64(first_row) * uint64(x_parts) * uint64(4)
        if squares != uint64(0):
            squares += uint64(first_row) * uint64(n >> uint32(5)) * uint64(4)
        return Arguments(x, weight, bias, residual, out, m, n, k, bias_is_f32, x_squares, x_parts, eps, squares)

    return of_rows


@functools.cache
def _kernel(
    dtype: str, weight: str, out_dtype: str, row_tiles: int, activation: str = "", has_clusters: bool = False,
    takes_adapters: bool = False,
) -> Specialisation:  # fmt: skip
    leave_scales, leaves_early = scales_leaver(2 * row_tiles), row_tiles > 1  # else the weight needs all registers
    is_gated, is_packed, packing = activation != "", weight != dtype, packing_of(weight)
    columns = COLUMNS // 2 if is_gated else COLUMNS  # of the output, a warp
    of_k = _group_of(dtype, weight, row_tiles, is_gated, has_clusters)
    stream, operands, stage_bytes, num_stages = of_k.stream, of_k.operands, of_k.stage_bytes, of_k.num_stages
    take_group, load_early, copy_first = of_k.take, of_k.load_early, of_k.copy_first
    group, unit, is_settled = stream.num_steps * STEP, stream.unit, stream.is_settled
    place_stream, advance, store_sums = stream.place, stream.advance, operands.store_sums
    has_row_blocks = is_packed and (row_tiles > 1 or has_clusters)
    block_rows, sums_bytes = 16 * row_tiles, row_tiles * 16 * COLUMNS * 4
    of_rows, wait_for_all = _rows_taker(ITEM_BYTES[out_dtype], block_rows), memory.copy_async_wait(0)
    num_x_words, num_sums, num_tiles = of_k.num_x_words, of_k.num_sums, 2 * row_tiles  # tiles of 8 rows
    num_parts_sums, num_factors = num_sums if is_settled else 1, NOTHING + 1
    num_words, num_scale_words, num_zero_words = stream.num_words, stream.num_scale_words, stream.num_zero_words
    finish_sums = sums_finisher(
        dtype, out_dtype, operands.flip_of, sums_bytes, (stream.scale_columns, stream.scale_column), activation,
        has_clusters=has_clusters, takes_adapters=takes_adapters,
    )  # fmt: skip
    shrink = tiles.shrinker(dtype, BLOCK_WARPS, tiles.steps_in_flight(row_tiles)) if takes_adapters else None
    num_adapted_parts = 2 if is_gated else 1
    expand = tiles.expander(dtype) if takes_adapters else None
    prepare = tiles.preparer(num_adapted_parts) if takes_adapters else None

    @device_function
    def multiply_block(column_block, column_blocks, given, added):
        scales = memory.shared_address(cuda.shared.array(0, uint32))
        shared = uint32(scales + uint32(SCALES_BYTES))
        lane, rank, team = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y), uint32(cuda.threadIdx.z)
        num_streams, num_teams = uint32(cuda.blockDim.y), uint32(cuda.blockDim.z)
        block, num_blocks, of_all = uint32(0), uint32(1), rank
        if has_clusters:
            block, num_blocks = cluster.rank(), cluster.size()
            column_block = divide_u32(column_block, num_blocks)
            of_all = uint32(rank + block * num_streams)
        all_streams = uint32(num_streams * num_blocks)
        g, t = lane >> uint32(2), lane & uint32(3)
        if has_row_blocks:
            given = of_rows(given, uint32(uint32(cuda.blockIdx.y) * uint32(block_rows)))
        x, weight, m, n, k = given.x, given.weight, given.m, given.n, given.k
        first_column = uint32(column_block * uint32(num_teams * uint32(columns)))
        row_bytes = uint64(k) * uint64(2)

        # This stream's part of K: whole units, but for the last one of all.
        num_units = uint32(k + uint32(unit - 1)) // uint32(unit)
        length = uint32(divide_u32(uint32(num_units + all_streams - uint32(1)), all_streams) * uint32(unit))
        position = uint32(of_all * length)
        end = minimum_u32(uint32(position + length), k)

        rows = cuda.local.array(4, uint64)
        scale_rows = cuda.local.array(2, uint64)
        zero_rows = cuda.local.array(2, uint64)
        warp_column = uint32(first_column + team * uint32(columns))
        places_of_weight = rows, scale_rows, zero_rows
        place_stream(places_of_weight, weight, n, k, warp_column, position, lane)
        words = cuda.local.array(num_words, uint32)
        group_scales = cuda.local.array(num_scale_words, uint32)
        zeros = cuda.local.array(num_zero_words, uint32)
        pairs = cuda.local.array(16, uint32)
        factors, row_factors = cuda.local.array(num_factors, uint32), cuda.local.array(4, float32)
        factors[NOTHING] = n >> uint32(31)
        column = uint32(position + t * uint32(8))
        kept = words, group_scales, zeros
        load_early((kept, places_of_weight, column, end, False))

        wait_for_previous_grid()  # the weight is immutable; x may be the previous grid's output
        # This lane's row of each tile of x, and which tiles its warp copies. Rows beyond the last one repeat it, or are
        # zeros, where a tile has no others: their sums are never stored.
        places, chosen = cuda.local.array(num_tiles, uint64), uint32(0)
        for i in range(num_tiles):
            row = minimum_u32(uint32(g + uint32(8 * i)), uint32(m - uint32(1)))
            places[i] = x + uint64(row) * row_bytes + uint64(column) * uint64(2)
        for i in range(num_tiles):
            if uint32(uint32(i) & uint32(num_teams - uint32(1))) == team:
                chosen |= uint32(1 << i)
        x_stages = cuda.local.array(1, uint32)
        x_stages[0] = uint32(shared + rank * uint32(num_stages * stage_bytes) + lane * uint32(16))
        copy_first((places, x_stages, column, end, m, chosen))
        warp = uint32(rank + num_streams * team)
        if leaves_early:
            leave_scales(given, scales, uint32(0), m, warp, uint32(BLOCK_WARPS), lane)

        of_cluster = uint32(num_blocks - uint32(1))
        num_own_tiles = uint32(num_teams * uint32(columns // tiles.TILE) + of_cluster - block) >> count_b32(of_cluster)
        tiles_of_block = (
            uint32(first_column + block * uint32(tiles.TILE)), uint32(num_blocks * uint32(tiles.TILE)), num_own_tiles, n
        )  # fmt: skip
        if takes_adapters:  # a cluster's blocks take tiles of columns in turn
            prepare(warp, uint32(BLOCK_WARPS), lane, m, tiles_of_block, added)
        x_words = cuda.local.array(num_x_words, uint32)
        sums = cuda.local.array(num_sums, float32)
        parts = cuda.local.array(num_parts_sums, float32)  # of a slot, without its groups' scales
        for e in range(num_sums):
            sums[e] = float32(0.0)
        for e in range(num_parts_sums):
            parts[e] = float32(0.0)
        while position < end:
            next_column, is_whole = uint32(column + uint32(group)), uint32(position + uint32(2 * group)) <= end
            advance(places_of_weight)
            arrays = sums, parts, pairs, factors, row_factors, x_words, x_stages, places
            span = column, next_column, end, is_whole
            take_group((arrays, kept, places_of_weight, span, (m, chosen, rank, num_teams)))
            position, column = uint32(position + uint32(group)), next_column
            for i in range(num_tiles):
                places[i] += uint64(group * 2)

        launch_dependents()  # not earlier: the next grid's blocks would take room from this one's
        wait_for_all()
        if not leaves_early:
            leave_scales(given, scales, uint32(0), m, warp, uint32(BLOCK_WARPS), lane)
        before = riding.NOT_COUNTED
        if takes_adapters and warp == uint32(0):
            before = riding.wait_for_shrinking(lane, added)
        sync_block()
        store_sums(uint32(shared + (team * num_streams + rank) * uint32(sums_bytes)), sums, g, t)
        staged = uint32(num_streams * uint32(num_stages * stage_bytes))
        expanded = uint32(shared + maximum_u32(staged, uint32(BLOCK_WARPS * sums_bytes)))
        expanded_row = uint32(num_teams * uint32(COLUMNS) + uint32(tiles.PAD))
        if takes_adapters:
            part, parts = uint32(0), uint32(uint32(num_adapted_parts) + (n >> uint32(31)))  # a loop, not unrolled
            while part < parts:
                of_part = uint32(expanded + num_teams * part * uint32(columns * 4))
                expand(of_part, expanded_row, warp, uint32(BLOCK_WARPS), lane, m, tiles_of_block, part, added)
                part = uint32(part + uint32(1))
        if has_clusters:
            cluster.release_shared()
            cluster.arrive_relaxed()
            cluster.wait()
        else:
            sync_block()
        finish_sums(
            given, (shared, num_streams), scales, (m,), (warp, block, lane, (num_blocks,)), (first_column, num_teams),
            (expanded, expanded_row, of_cluster),
        )  # fmt: skip
        if has_clusters:  # no block exits while others read its sums
            sync_warp()
            cluster.arrive_relaxed()
            cluster.wait()
        if takes_adapters:
            riding.reset_counters(before, column_blocks, added)

    factors = dtype if packing is None else f"{weight}_{dtype}"
    # Registers of two blocks: those that were examined. Without clusters ptxas of sm_80 finds some short.
    has_few_registers = packing is None or (
        has_clusters and not packing.has_zeros and packing.halves == 1 and (packing.element != "u4" or is_settled)
    )
    return Specialisation(
        name=f"gemm_skinny_{factors}_{out_dtype}_{16 * row_tiles}{'_c' * has_clusters}"
        f"{'_' if is_gated else ''}{activation}{'_adapted' * takes_adapters}",
        kernel=riding.product_kernel(multiply_block, shrink),
        argument_types=riding.argument_types(takes_adapters),
        max_threads=BLOCK_WARPS * 32,
        min_blocks=2 if row_tiles == 1 and has_few_registers else 1,
        spills_on=tuple(arch for arch, *kind in SPILLING if kind == [weight, row_tiles]),
        min_capability=90 if has_clusters else 80,
        replaced_from=90 if packing is not None and not has_clusters else 0,
        constants={
            "dtype": dtype, "weight": weight, "out_dtype": out_dtype, "row_tiles": row_tiles, "activation": activation,
            "square_columns": 0 if is_gated else COLUMNS,
        },
    )  # fmt: skip


def why_not(product: Product, machine: Machine) -> str:
    """Why it cannot compute a product; "" if it can."""
    can_read = product.x != "f32" and product.is_weight_layout and product.is_aligned
    if packing_of(product.weight) is not None:
        if not can_read or product.num_segments:
            return "reads packed weights for 16-bit rows on 16-byte bounds, and cuts no K into segments"
        is_whole = not product.epilogue.activation or product.n % TILE_COLUMNS == 0
        return "" if is_whole else f"gates packed weights in tiles of {TILE_COLUMNS} columns"
    if can_read and product.weight == product.x and not product.exact and product.m <= MAX_ROWS:
        return ""
    return f"takes at most {MAX_ROWS} rows, 16-bit factors in the weight layout on 16-byte bounds, and is not exact"


def cache_reads(product: Product, machine: Machine) -> int:
    """Bytes read from the second-level cache, as the emulator counts them: by each block of rows the weight once, x by
    each block, or each cluster of them."""
    return choose(product, machine).cache_reads(product)


def seconds(product: Product, machine: Machine) -> float:
    """Seconds by `skinny_shape`'s model."""
    return seconds_of(product, machine, choose(product, machine))


def can_take_adapters(product: Product, machine: Machine) -> bool:
    """Whether low-rank sums (`riding`) can ride on a product's launch. Exact products take them apart, by the same
    kernel for any number of rows."""
    if why_not(product, machine) or product.exact or product.out != product.x or product.m > riding.MAX_ROWS:
        return False
    return _shape_with_adapters(product, machine) is not None


def _shape_with_adapters(product: Product, machine: Machine) -> Shape | None:
    """The fastest of which a block has all rows."""
    able = [shape for shape in shapes(product, machine) if shape.row_blocks(product) == 1]
    return min(able, key=functools.partial(seconds_of, product, machine), default=None)


def seconds_with_adapters(product: Product, machine: Machine) -> float:
    """Seconds by `skinny_shape`'s model of a product that can take adapters, without them."""
    shape = _shape_with_adapters(product, machine)
    assert shape is not None
    return seconds_of(product, machine, shape)


def plan(product: Product, machine: Machine, ranks: int = 0) -> Launch:
    """A launch for a product that it can compute and that is not empty; with low-rank sums of so many ranks, if any."""
    shape = _shape_with_adapters(product, machine) if ranks else choose(product, machine)
    assert shape is not None, "`can_take_adapters` does not hold"
    return plan_shape(product, machine, shape, ranks)


def plan_shape(product: Product, machine: Machine, shape: Shape, ranks: int = 0) -> Launch:
    """The same with blocks of such a shape.

    Two blocks of 16 rows fit on a multiprocessor. If they started before the previous kernel has ended, two would share
    a free one and leave others idle: a step of Qwen3-8B with 8 sequences took an H200 6.75 ms so, and 4.84 where no
    kernel starts before the previous one has ended (docs/measurements, 2026-11-26, the evening).
    """
    is_clustered = has_clusters(product, machine)
    num_streams = shape.num_streams // shape.num_blocks
    kernel = _kernel(
        product.x, product.weight, product.out, shape.row_tiles, product.epilogue.activation, is_clustered, ranks > 0
    )
    blocks, teams = shape.columns(product) * shape.num_blocks, BLOCK_WARPS // num_streams
    memory_bytes = shared_bytes(product.weight, shape.row_tiles, num_streams, has_clusters=is_clustered)
    shrinking = 0
    if ranks:
        assert tiles.shrinking_bytes(BLOCK_WARPS) <= memory_bytes
        memory_bytes += tiles.expanded_bytes(16 * shape.row_tiles, COLUMNS * teams)
        at_once = machine.num_multiprocessors * kernel.min_blocks
        shrinking = tiles.shrinking_blocks(product.m, ranks, -blocks % at_once, shape.num_blocks)
    return Launch(
        kernel, (blocks + shrinking, shape.row_blocks(product), 1), (32, num_streams, teams), memory_bytes,
        cluster=(shape.num_blocks, 1, 1), starts_late=shape.row_tiles == 1, num_shrinking=shrinking,
    )  # fmt: skip


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for dtype, out_dtype in DTYPE_PAIRS:
        if dtype != "f32":
            for row_tiles in ROW_TILES:
                for activation in ("", *GATED) if out_dtype == dtype else ("",):
                    yield _kernel(dtype, dtype, out_dtype, row_tiles, activation)
    for weight in PACKINGS:
        for row_tiles in ROW_TILES:
            for activation in ("", "silu"):
                for is_clustered in (False, True):
                    yield _kernel("bf16", weight, "bf16", row_tiles, activation, is_clustered)
