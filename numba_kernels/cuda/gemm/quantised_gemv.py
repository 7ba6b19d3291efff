"""Quantised GEMV, one to eight rows times a packed weight: `skinny` for very few rows, by `packed_stream`.

A block takes up to 64 columns at a time, 16 a team; a team's warps share K (a gated unit has teams of the gate's rows
and of up's). A block's teams share x, which it brings to shared memory once, so that a block has as many columns as
leave enough blocks, and where there are more of these than multiprocessors, each takes columns in turns.

From sm_90 on the weight comes through `packed_ring`, and a block of 8 warps leaves half of a multiprocessor to its
neighbour. Otherwise it comes through registers, of 16 warps. (The kernel for one turn is its own, which is shorter, by
some 0.4 µs on an H200.) The weight's first loads start before the previous grid has ended either way. Sums of a team
meet in shared memory, and are added in the order of K. How K is split depends on (N, K) alone, and a row has
the same bits alone and beside others.

Every block can apply the RMSNorm before the product itself: x's rows are staged times the norm's weights, their squares
are added up on the way, and the finished sums are scaled. `norm` is the address of these weights, or 0.

Low-rank sums of adapters may ride on the launch (`riding`).

Threads: x lanes, y the streams of K, z the teams.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.adapters import riding
from numba_kernels.cuda.gemm.epilogue import GATED, finisher, norm_scale, scale_element, squares_leaver
from numba_kernels.cuda.gemm.packed_factors import ROW_GAP, row_counts
from numba_kernels.cuda.gemm.packed_stream import (
    DTYPE,
    NUM_WORDS,
    ROWS,
    can_read,
    largest,
    largest_normed,
    packed_reader,
    row_bytes,
)
from numba_kernels.cuda.gemm.product import LATENCY_S, Machine, Product, unpacking_s
from numba_kernels.cuda.gemm.rings.packed_ring import SLOTS, STATE, packed_ring
from numba_kernels.cuda.gemm.rings.warp_ring import MOST_STAGES, dynamic_shared_bytes, stages_that_fit, start_ring
from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import maximum_u32_of_warp, warp_sum
from numba_kernels.cuda.packing import PACKINGS, Packing, packing_of
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

BLOCK_WARPS = 16
RING_WARPS = 8
_UNDER_WAY_BYTES = BLOCK_WARPS * 4096  # of a block
_START_S = 0.7e-6
_NEXT_ROW_S = 0.2e-6, 1.2e-10  # that preparing each further row takes, and each of its numbers: by counts, not measured
_INSTRUCTIONS: dict[str, dict[int, tuple[int, ...]]] = {
    "u4_g128": {0: (254, 270, 322, 322), 4: (327, 343, 392, 392), 2: (404, 422, 488, 488)},
    "u4_g32": {0: (324, 396, 552, 552), 4: (387, 451, 601, 601), 2: (474, 530, 686, 686)},
    "u8": {0: (96, 96, 104, 104), 4: (149, 149, 161, 161), 2: (214, 214, 226, 226)},
    "e4m3": {0: (308, 308, 308, 308), 4: (345, 345, 345, 345), 2: (410, 410, 410, 410)},
    "e4m3_g128": {0: (338, 344, 343, 343), 4: (395, 403, 403, 403), 2: (474, 482, 482, 482)},
    "e2m1_g32_exponents": {0: (474, 506, 506, 506), 4: (545, 581, 581, 581), 2: (630, 666, 666, 666)},
}
"""Machine instructions of a warp for 4 KB of a weight, by the slots of a ring's stage and `row_counts`; 0: without a
ring. They are those of the loop, without a tile's end."""
_COUNTED = {"u4": "u4_g32", "u8": "u8", "e4m3": "e4m3_g128", "e2m1": "e2m1_g32_exponents"}  # for others, by element
_ENOUGH_BLOCKS = 96  # that fill a large GPU
_SHARED_BYTES = {"sm_80": 162 << 10, "sm_90a": 225 << 10, "sm_100a": 225 << 10}  # of a block, less what ptxas rounds up
_LEAST_SHARED_BYTES = 98 << 10  # on other architectures
_SUMS_BYTES = 2 * BLOCK_WARPS * ROWS * 4 + 2 * BLOCK_WARPS * 4 + 4  # of a row, in static shared memory
NUMBERS_A_LINE = 32  # of the norm's weights, in a line of a cache


@functools.cache
def _rows_stager(weight_name: str, num_rows: int, warps: int, meet: Any) -> Any:
    """A device function ``(given, shared, row_of_x, padded, warp, lane)`` that brings x to shared memory as factors. It
    returns the array of the factors of the rows' finished sums. All warps have met then."""
    factors = packed_reader(weight_name, num_rows).factors
    scale_by, stage, shift = factors.scale_by, factors.stage, float(2.0**factors.shift)

    @device_function
    def stage_rows(given, shared, row_of_x, padded, warp, lane):
        greatest = cuda.shared.array((num_rows, warps), uint32)
        row_squares = cuda.shared.array((num_rows, warps), float32)
        wholes = cuda.shared.array(num_rows, float32)
        x, m, k, norm, eps = given.x, given.m, given.k, given.x_squares, given.eps
        row = uint32(0)
        while row < m:
            x_row, own_squares = x + uint64(row) * uint64(k) * uint64(2), float32(0.0)
            if norm == uint64(0):
                most = largest(x_row, warp, uint32(warps), k, lane)
            else:
                most, own_squares = largest_normed(x_row, norm, warp, uint32(warps), k, lane)
            if lane == uint32(0):
                greatest[row, warp] = most
                row_squares[row, warp] = own_squares
            row = uint32(row + uint32(1))
        meet()
        row = uint32(0)
        while row < uint32(num_rows):
            most, there = uint32(0), uint32(0)  # rows that are not there are zeros
            if row < m:
                there, most = k, maximum_u32_of_warp(greatest[row, lane & uint32(warps - 1)])
            factor, unfactor = scale_by(most)
            x_row, target = x + uint64(row) * uint64(k) * uint64(2), uint32(shared + row * row_of_x)
            stage(x_row, norm, target, (warp, uint32(warps), lane), there, padded, factor)
            if row < m and warp == row:
                whole = unfactor * float32(shift)
                if norm != uint64(0):
                    total = warp_sum(row_squares[row, lane] if lane < uint32(warps) else float32(0.0))
                    whole = scale_element(whole, norm_scale(total, k, eps))
                if lane == uint32(0):
                    wholes[row] = whole
            row = uint32(row + uint32(1))
        meet()
        return wholes

    return stage_rows


@functools.cache
def _kernel(
    weight_name: str, out_dtype: str, activation: str = "", *, has_turns: bool = False, ring_slots: int = 0,
    rows: int = 1, takes_adapters: bool = False,
) -> Specialisation:  # fmt: skip
    reader, finish, leave_squares = packed_reader(weight_name, rows), finisher(DTYPE, out_dtype), squares_leaver(ROWS)
    ring, has_ring = packed_ring(weight_name, rows, ring_slots or SLOTS[0]), ring_slots > 0
    fill, multiply_ring, stage_bytes = ring.fill, ring.multiply, ring.stage_bytes
    warps = RING_WARPS if has_ring else BLOCK_WARPS
    num_barriers = warps * MOST_STAGES
    aim, begin, multiply = reader.aim, reader.begin_early, reader.multiply
    row_scale, slots_of = reader.row_scale, reader.slots
    num_scale_words, place, apart = reader.num_scale_words, reader.factors.place, reader.factors.apart
    leave, place_of = reader.factors.leave, reader.factors.place_of
    packing = packing_of(weight_name)
    assert packing is not None
    slot_elements, is_gated, num_rows = packing.slot, activation != "", rows
    num_sums, num_rows_sums = reader.factors.num_sums, rows * ROWS
    number_bytes = reader.factors.planes * reader.factors.plane_bytes  # of x, as it is staged
    gated = GATED[activation] if is_gated else None
    has_one_more = takes_adapters and _has_expanding_warp(rows, has_ring=has_ring)
    threads = (warps + has_one_more) * 32
    shrink = riding.shrinker(DTYPE, warps + has_one_more, rows) if takes_adapters else None
    aim_one, expand = riding.expander(DTYPE) if takes_adapters else (None, None)
    tiles = riding.kept_tiles(
        DTYPE, out_dtype, rows, activation, _most_sums(rows), 0 if is_gated else ROWS, warps * 32
    )  # fmt: skip
    num_parts = 2 if is_gated else 1
    place_kept, expand_tiles, finish_tiles, num_floats = tiles.place, tiles.expand, tiles.finish, tiles.num_floats
    most_kept = tiles.most
    meet = riding.multiplying_barrier(warps * 32) if has_one_more else sync_block
    stage_rows = _rows_stager(weight_name, rows, warps, meet)

    @device_function
    def multiply_blocks(block, num_blocks, given, kept, expanded, added):
        weight, m, n, k, norm = given.weight, given.m, given.n, given.k, given.x_squares
        shared = memory.shared_address(cuda.shared.array(0, uint32))
        partial = cuda.shared.array((2, warps, num_rows_sums), float32)  # of these columns, and of the next
        partials = memory.shared_address(partial)
        if has_ring:
            state = cuda.local.array(STATE, uint32)
            barriers = memory.shared_address(cuda.shared.array(num_barriers, uint64))
        else:
            words, scales = cuda.local.array(NUM_WORDS, uint32), cuda.local.array(num_scale_words, uint32)
        rows, scale_rows = cuda.local.array(2, uint64), cuda.local.array(1, uint64)
        sums = cuda.local.array(num_sums, float32)
        next_rows, next_scale_rows = cuda.local.array(2, uint64), cuda.local.array(1, uint64)
        lane, stream, team = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y), uint32(cuda.threadIdx.z)
        streams, teams = uint32(cuda.blockDim.y), uint32(cuda.blockDim.z)
        if has_one_more:
            streams = added.team_warps
            team, teams = divide_u32(stream, streams), divide_u32(uint32(warps), streams)
            stream = uint32(stream - team * streams)
        warp = uint32(team * streams + stream)
        # In a gated unit, the first half of the teams have the gate's rows, the others up's.
        columns_teams, inside, both, beside = teams, team, n, uint32(0)
        if is_gated:
            columns_teams, both = teams >> uint32(1), uint32(n * uint32(2))
            if inside >= columns_teams:
                inside, beside = uint32(inside - columns_teams), uint32(n >> uint32(4))
        last_tile = uint32((n + uint32(ROWS - 1)) // uint32(ROWS) - uint32(1))
        slots = slots_of(k)
        length = divide_u32(uint32(slots + streams - uint32(1)), streams)
        first = minimum_u32(uint32(stream * length), slots)
        last = minimum_u32(uint32(first + length), slots)
        tile = uint32(block * columns_teams + inside)
        stride = uint32(num_blocks * columns_teams)
        padded = uint32(slots * uint32(slot_elements))
        row_of_x = uint32(padded * uint32(number_bytes) + uint32(ROW_GAP))
        at_first = uint32(minimum_u32(tile, last_tile) + beside)
        if has_ring:
            rows_bytes = uint32(row_of_x * uint32(num_rows))
            count = uint32(uint32(dynamic_shared_bytes() - rows_bytes) // uint32(warps * stage_bytes))
            own_stages = uint32(warp * count)
            stages = uint32(shared + rows_bytes + own_stages * uint32(stage_bytes))
            barriers = uint32(barriers + own_stages * uint32(8))
            start_ring(barriers, count, lane)
            state[0], state[1], state[2], state[3], state[4] = uint32(0), uint32(0), count, tile, first
            state[5] = uint32(1) if first < last else uint32(0)
            places = inside, stride, last_tile, beside, both, k
            aim(rows, scale_rows, weight, at_first, both, k, first, uint32(0))
            own_ring, source = (stages, barriers), (weight, places, first, last, lane)
            fill(state, rows, scale_rows, own_ring, source)
        else:
            aim(rows, scale_rows, weight, at_first, both, k, first, lane)
            begin(words, scales, rows, scale_rows, first, last)
        line = uint32((warp * uint32(32) + lane) * uint32(NUMBERS_A_LINE))
        while norm != uint64(0) and line < k:
            memory.prefetch(norm + uint64(line) * uint64(4))
            line = uint32(line + uint32(warps * 32 * NUMBERS_A_LINE))
        wait_for_previous_grid()  # the weights are immutable; x may be the previous grid's output
        launch_dependents()
        wholes = stage_rows(given, shared, row_of_x, padded, warp, lane)
        x_place, between = place(shared, padded, lane), apart(row_of_x, padded, lane)
        own_rows = rows, scale_rows
        turn, goes_on, num_kept, before = uint32(0), uint32(1), uint32(0), riding.NOT_COUNTED
        columns = uint32(columns_teams * uint32(ROWS))  # of the block
        first_column = uint32(block * columns)
        while goes_on != uint32(0):
            following, goes_on = uint32(tile + stride), uint32(0)
            if (has_turns or has_ring) and uint32(following - inside) <= last_tile:  # the same in all teams
                goes_on = uint32(1)
            if has_ring:
                multiply_ring(sums, state, rows, scale_rows, own_ring, source, (x_place, between))
            elif has_turns:
                at = uint32(minimum_u32(following, last_tile) + beside)
                aim(next_rows, next_scale_rows, weight, at, both, k, first, lane)
                to_come = next_rows, next_scale_rows
                multiply(sums, (words, scales), own_rows, to_come, goes_on, (x_place, between), (first, last))
            else:
                multiply(sums, (words, scales), own_rows, own_rows, uint32(0), (x_place, between), (first, last))
            leave(sums, uint32(partials + uint32(turn * uint32(warps) + warp) * uint32(num_rows_sums * 4)), lane)
            if takes_adapters and not has_one_more and warp == uint32(0) and tile == block * columns_teams:
                before = riding.wait_for_shrinking(lane, added)
            meet()
            if stream == uint32(0) and team < columns_teams:  # whole warps, which add squares
                for each in range(num_rows):
                    total, up, own = float32(0.0), float32(0.0), uint32(uint32(each * ROWS) + (lane & uint32(ROWS - 1)))
                    r, inside_tile = place_of(own)
                    column = uint32(tile * uint32(ROWS) + inside_tile)
                    index = uint32(0)
                    while index < streams:
                        total += partial[turn, uint32(warp + index), own]
                        if is_gated:
                            up += partial[turn, uint32(warp + columns_teams * streams + index), own]
                        index = uint32(index + uint32(1))
                    value = float32(0.0)
                    if lane < uint32(ROWS) and column < n and r < m:
                        value = scale_element(scale_element(total, wholes[r]), row_scale(weight, both, k, column))
                        if takes_adapters and not has_one_more:
                            value += expand(aim_one(r, column, added))
                        if is_gated:
                            up = scale_element(scale_element(up, wholes[r]), row_scale(weight, both, k, column + n))
                            if takes_adapters and not has_one_more:
                                up += expand(aim_one(r, uint32(column + n), added))
                            if not has_one_more:
                                value = gated(value, up)
                        if has_one_more:
                            own = uint32(inside * uint32(ROWS) + inside_tile)
                            memory.shared_store_f32(place_kept(kept, num_kept, uint32(0), r, own, columns), value)
                            if is_gated:
                                memory.shared_store_f32(place_kept(kept, num_kept, uint32(1), r, own, columns), up)
                        else:
                            value = finish(given, r, column, value)
                    if not has_one_more and not is_gated:
                        leave_squares(given, value * value, lane == uint32(0), r, column)
            tile = following
            turn ^= uint32(1)
            if has_one_more:
                num_kept, is_last = uint32(num_kept + uint32(1)), goes_on == uint32(0)
                if is_last or num_kept == uint32(most_kept):
                    own = first_column, uint32(num_blocks * columns), columns
                    thread = uint32(warp * uint32(32) + lane)
                    finish_tiles(given, (kept, expanded), own, num_kept, is_last, thread)
                    first_column, num_kept = uint32(first_column + num_kept * num_blocks * columns), uint32(0)
        if takes_adapters and not has_one_more:
            riding.reset_counters(before, num_blocks, added)

    @device_function
    def work(block, num_blocks, given, added):
        kept, expanded = uint32(0), uint32(0)
        if has_one_more:
            kept = memory.shared_address(cuda.shared.array(num_floats, float32))
            expanded = memory.shared_address(cuda.shared.array(num_floats, float32))
        if has_one_more and uint32(cuda.threadIdx.y) == uint32(warps):
            columns = divide_u32(divide_u32(uint32(warps), added.team_warps) * uint32(ROWS), uint32(num_parts))
            first_column, stride = uint32(block * columns), uint32(num_blocks * columns)
            expand_tiles(expanded, (first_column, stride, columns), given.m, given.n, num_blocks, added)
        else:
            multiply_blocks(block, num_blocks, given, kept, expanded, added)

    return Specialisation(
        name="_".join(["gemm_quantised_gemv", weight_name, out_dtype + ("_" if is_gated else "") + activation])
        + f"_{rows}" * (rows > 1) + "_turns" * has_turns + f"_ring_{ring_slots}" * has_ring
        + "_adapted" * takes_adapters,
        kernel=riding.product_kernel(work, shrink),
        argument_types=riding.argument_types(takes_adapters),
        max_threads=threads,
        min_blocks=2 if has_ring else 1,
        min_capability=90 if has_ring else 80,
        replaced_from=100 if takes_adapters and has_ring else 0,
        spills_on=_spills_on(weight_name, rows),
        constants={
            "dtype": DTYPE, "weight": weight_name, "out_dtype": out_dtype, "activation": activation,
            "has_turns": has_turns, "ring_slots": ring_slots, "rows": rows,
            "square_columns": 0 if is_gated else ROWS, "takes_norm": True,
        },
    )  # fmt: skip


def why_not(product: Product, machine: Machine) -> str:
    """Why it cannot compute a product; "" if it can."""
    packing = packing_of(product.weight)
    if packing is None or not can_read(packing) or product.x != DTYPE:
        return "reads packed weights, with groups of 32 or more and no zero points, for bfloat16 rows"
    is_plain = product.is_weight_layout and product.is_aligned and not product.num_segments
    most_rows = row_counts(packing)[-1]
    if not 1 <= product.m <= most_rows or product.exact or not is_plain:
        return f"takes 1 to {most_rows} rows on 16-byte bounds, not exactly, and cuts no K into segments"
    if machine.arch in _spills_on(product.weight, _rows_of(product)):
        return f"has too few registers on {machine.arch} for {product.m} rows"
    most = _SHARED_BYTES.get(machine.arch, _LEAST_SHARED_BYTES) - _rows_of(product) * _SUMS_BYTES
    if product.k == 0 or rows_bytes(product) > most:
        return f"keeps its rows in {most} bytes of shared memory"
    is_whole = not product.epilogue.activation or product.n % ROWS == 0
    return "" if is_whole else f"gates packed weights in tiles of {ROWS} columns"


def _spills_on(weight_name: str, rows: int) -> tuple[str, ...]:
    """The architectures where a kernel spills."""
    packing = packing_of(weight_name)
    assert packing is not None
    return ("sm_80",) if rows >= (2 if packing.element == "e2m1" else 4) else ()


def _rows_of(product: Product) -> int:
    """The rows that the product's kernel is made for."""
    packing = packing_of(product.weight)
    assert packing is not None
    return next(rows for rows in row_counts(packing) if rows >= product.m)


def rows_bytes(product: Product) -> int:
    """Shared memory of x."""
    packing = packing_of(product.weight)
    assert packing is not None
    return _rows_of(product) * (row_bytes(packing, product.k) + ROW_GAP)


def _has_expanding_warp(rows: int, *, has_ring: bool) -> bool:
    """Whether another warp expands (`riding`); one more leaves each thread 96 registers: more rows need more."""
    return has_ring and rows <= 2


def _most_sums(rows: int) -> int:
    """Low-rank sums of the columns of a block with a ring, at most: of two teams."""
    return 2 * ROWS * rows


def teams(columns: int, *, is_gated: bool) -> int:
    """Teams of a block, those of the gate's rows and of up's each counted: 4 where that leaves enough blocks."""
    tiles = -(-columns // ROWS) * (2 if is_gated else 1)
    most, least = 4, 2 if is_gated else 1
    while most > least and -(-tiles // most) < _ENOUGH_BLOCKS:
        most //= 2
    return most


def instructions_of(kernel: Specialisation) -> int:
    """Machine instructions of a warp for 4 KB of the weight."""
    weight, rows = str(kernel.constants["weight"]), int(kernel.constants["rows"])
    packing = packing_of(weight)
    assert packing is not None
    counts = _INSTRUCTIONS.get(weight) or _INSTRUCTIONS[_COUNTED[packing.element]]
    return counts[int(kernel.constants["ring_slots"])][row_counts(packing).index(rows)]


def seconds(product: Product, machine: Machine) -> float:
    """Seconds by the weight's bytes, by unpacking, by its blocks' reads from the second-level cache, and latency.
    Before it x is read twice, with two barriers."""
    launch = plan(product, machine)
    blocks, instructions = launch.grid[0], instructions_of(launch.specialisation)
    num_bytes, at_once = product.weight_bytes, min(blocks, machine.num_multiprocessors)
    start = _START_S + (product.m - 1) * (_NEXT_ROW_S[0] + _NEXT_ROW_S[1] * product.k)
    return start + max(
        num_bytes / machine.memory_bytes,
        unpacking_s(num_bytes, instructions, machine.num_multiprocessors),
        (num_bytes + blocks * 4 * product.m * product.k) / machine.cache_bytes,
        LATENCY_S * num_bytes / (at_once * _UNDER_WAY_BYTES),
    )


def ring_of(
    packing: Packing, machine: Machine, k: int, rows: int, *, takes_adapters: bool = False
) -> tuple[int, int]:  # fmt: skip
    """The slots of a stage of the ring that fits beside so many rows of x, and the shared memory of both; zeros if none
    fits."""
    if takes_adapters and machine.arch != riding.RINGS_ON:
        return 0, 0
    static_bytes = 2 * RING_WARPS * rows * ROWS * 4 + RING_WARPS * MOST_STAGES * 8 + rows * (2 * RING_WARPS + 1) * 4
    static_bytes += riding.shared_bytes(RING_WARPS + 1, rows, _most_sums(rows)) if takes_adapters else 0
    x_bytes = rows * (row_bytes(packing, k) + ROW_GAP)
    for slots in SLOTS:
        stage_bytes = RING_WARPS * packed_ring(packing.name, rows, slots).stage_bytes
        stages = stages_that_fit(machine, stage_bytes, x_bytes, static_bytes)
        if stages:
            return slots, x_bytes + stages * stage_bytes
    return 0, 0


def has_ring(product: Product, machine: Machine) -> bool:
    """Whether a product that it can compute has a ring, which leaves half of a multiprocessor."""
    packing = packing_of(product.weight)
    assert packing is not None
    return ring_of(packing, machine, product.k, _rows_of(product))[0] > 0


def can_take_adapters(product: Product, machine: Machine) -> bool:
    """Whether low-rank sums (`riding`) can ride on a product's launch: where no kernel spills."""
    is_able = product.m == 1 or (product.m <= 4 and machine.arch == "sm_90a")
    if why_not(product, machine) or product.out != product.x or not is_able:
        return False
    static_bytes = riding.shared_bytes(BLOCK_WARPS, _rows_of(product)) + _rows_of(product) * _SUMS_BYTES
    return rows_bytes(product) + static_bytes <= _SHARED_BYTES.get(machine.arch, _LEAST_SHARED_BYTES)


def plan(product: Product, machine: Machine, ranks: int = 0) -> Launch:
    """A launch for a product that it can compute and that is not empty; with low-rank sums of so many ranks, if any."""
    activation, packing, takes_adapters = product.epilogue.activation, packing_of(product.weight), ranks > 0
    assert packing is not None
    num_teams, rows = teams(product.n, is_gated=activation != ""), _rows_of(product)
    ring_slots, shared_bytes = ring_of(packing, machine, product.k, rows, takes_adapters=takes_adapters)
    if ring_slots:
        num_teams = max(num_teams * RING_WARPS // BLOCK_WARPS, 2 if activation else 1)
    columns = ROWS * (num_teams // 2 if activation else num_teams)
    blocks = -(-product.n // columns)
    turns, warps = -(-blocks // machine.num_multiprocessors), RING_WARPS
    multiplying, shrinking = riding.shared_blocks(blocks, machine.num_multiprocessors, product.m, ranks)
    if not ring_slots:
        warps, shared_bytes, multiplying = BLOCK_WARPS, rows_bytes(product), -(-blocks // turns)
    kernel = _kernel(
        product.weight, product.out, activation, has_turns=turns > 1 and not ring_slots, ring_slots=ring_slots,
        rows=rows, takes_adapters=takes_adapters,
    )  # fmt: skip
    block, team_warps = (32, warps // num_teams, num_teams), 0
    if takes_adapters and _has_expanding_warp(rows, has_ring=ring_slots > 0):
        block, team_warps = (32, warps + 1, 1), warps // num_teams
    return Launch(
        kernel, (multiplying + shrinking, 1, 1), block, shared_bytes, num_shrinking=shrinking, team_warps=team_warps
    )


def specialisations() -> Iterator[Specialisation]:
    """Specialisations of bf16 that published models use; others are compiled at their first launch."""
    for weight in PACKINGS:
        packing = packing_of(weight)
        if packing is not None and can_read(packing):
            for activation in ("", "silu"):
                for rows in row_counts(packing):
                    yield _kernel(weight, DTYPE, activation, rows=rows)
                    yield _kernel(weight, DTYPE, activation, has_turns=True, rows=rows)
                    for slots in SLOTS:
                        yield _kernel(weight, DTYPE, activation, ring_slots=slots, rows=rows)
