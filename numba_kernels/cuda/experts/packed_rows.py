"""A few rows of each expert, of experts that stay quantised: `gemm.packed_factors` on the tiles of `order`.

`packed` unpacks a weight for 16 rows of an expert, and most of its products are with none. Here a tile has the rows
that `packed_factors` has columns for, 8 or 5, at half of the instructions.

A unit is 16 columns of a tile of rows, for a warp, or of gate and up, for a team of two. A block takes a run of units,
each team a part of it; the rows of its tile come to shared memory once, a warp each, while the weight's rings
(`packed_ring`) fill. A warp adds up all of K, so its sums meet no others. Down asks for its first weights before gate
and up have ended: the list of tiles was complete before these began.

A row has the same bits in any company. Rows are bfloat16; groups of 16 and zero points have no such kernels. From
sm_90 on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, types

from numba_kernels.cuda.experts.tiled import ARGUMENT_TYPES
from numba_kernels.cuda.gemm.epilogue import GATES, scale_element
from numba_kernels.cuda.gemm.packed_factors import ROW_GAP, row_counts
from numba_kernels.cuda.gemm.packed_stream import DTYPE, ROWS, can_read, largest, packed_reader, row_bytes
from numba_kernels.cuda.gemm.product import machine_of
from numba_kernels.cuda.gemm.rings.packed_ring import STATE, packed_ring
from numba_kernels.cuda.gemm.rings.warp_ring import MOST_STAGES, dynamic_shared_bytes, stages_that_fit, start_ring
from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_storer
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.memory import load_b32, load_b64, load_f32, load_written_b32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, sync_named, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index, sync_warp
from numba_kernels.cuda.packing import PACKINGS, Packing, packing_of
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

MOST_ROWS = 8  # of a tile
SLOTS = (4, 3, 2)  # of a stage: fewer where x is long
_FULL = 0.75  # of a tile's rows that experts have on average, at most: with more of them, many need a second tile


def warps_of(packing: Packing) -> int:
    """As many as half of a multiprocessor's registers hold, with 80 a thread; INT4 needs 96."""
    return 10 if packing.element == "u4" else 12


@functools.cache
def _kernel(weight_name: str, activation: str, rows: int, ring_slots: int) -> Specialisation:
    """The arguments of all tiers (`tiled`)."""
    packing, gated = packing_of(weight_name), GATES.get(activation)
    assert packing is not None
    warps, parts = warps_of(packing), 1 if gated is None else 2
    reader, ring = packed_reader(weight_name, rows), packed_ring(weight_name, rows, ring_slots)
    factors, store, is_gated = reader.factors, element_storer(DTYPE), gated is not None
    aim, row_scale, slots_of, fill, multiply = reader.aim, reader.row_scale, reader.slots, ring.fill, ring.multiply
    scale_by, stage, place, apart, leave = factors.scale_by, factors.stage, factors.place, factors.apart, factors.leave
    place_of = factors.place_of
    number_bytes, num_sums, shift = factors.planes * factors.plane_bytes, factors.num_sums, float(2.0**factors.shift)
    stage_bytes, slot_elements = ring.stage_bytes, packing.slot
    num_barriers, row_sums, teams = warps * MOST_STAGES, rows * ROWS, warps // parts

    @device_function
    def stage_row(x_row, target, whole, k, padded, lane):
        """A warp's row of a tile goes to shared memory, zeros from k on."""
        factor, unfactor = scale_by(largest(x_row, uint32(0), uint32(1), k, lane))
        stage(x_row, uint64(0), target, (uint32(0), uint32(1), lane), k, padded, factor)
        if lane == uint32(0):
            memory.shared_store_f32(whole, unfactor * float32(shift))

    @device_function
    def finished(at, whole, weight, bias, sizes, column):
        """A sum, in shared memory, of the weight's row `column`, with its scales and bias."""
        rows_of_weight, k = sizes
        total = scale_element(memory.shared_load_f32(at), whole)
        total = scale_element(total, row_scale(weight, rows_of_weight, k, column))
        return total + load_f32(bias + uint64(column) * uint64(4)) if bias != uint64(0) else total

    def experts(x, table, tiles, num_tiles, tokens, out, n, k, num_experts):
        shared = memory.shared_address(cuda.shared.array(0, uint32))
        barriers = memory.shared_address(cuda.shared.array(num_barriers, uint64))
        wholes = cuda.shared.array(rows, float32)  # the factors of finished sums
        pieces = memory.shared_address(cuda.shared.array((2, warps, row_sums), float32))
        state, sums = cuda.local.array(STATE, uint32), cuda.local.array(num_sums, float32)
        weight_rows, scale_rows = cuda.local.array(2, uint64), cuda.local.array(1, uint64)
        thread, lane = uint32(cuda.threadIdx.x), lane_index()
        warp = uint32(thread >> uint32(5))
        team, part = uint32(warp // uint32(parts)), uint32(warp % uint32(parts))
        slots, columns = slots_of(k), uint32(uint32(n + uint32(ROWS - 1)) // uint32(ROWS))
        padded, both = uint32(slots * uint32(slot_elements)), uint32(n * uint32(parts))
        row_of_x = uint32(padded * uint32(number_bytes) + uint32(ROW_GAP))
        x_bytes = uint32(row_of_x * uint32(rows))
        count = uint32(uint32(dynamic_shared_bytes() - x_bytes) // uint32(warps * stage_bytes))
        stages = uint32(shared + x_bytes + warp * count * uint32(stage_bytes))
        barriers = uint32(barriers + warp * count * uint32(8))
        start_ring(barriers, count, lane)
        state[0], state[1], state[2] = uint32(0), uint32(0), count
        x_place, between = place(shared, padded, lane), apart(row_of_x, padded, lane)
        if tokens != uint64(0):
            wait_for_previous_grid()  # it made the list
        total = uint32(load_written_b32(num_tiles) * columns)
        unit = divide_u32(uint32(uint32(cuda.blockIdx.x) * total), uint32(cuda.gridDim.x))
        end = divide_u32(uint32(uint32(uint32(cuda.blockIdx.x) + uint32(1)) * total), uint32(cuda.gridDim.x))
        has_waited = tokens != uint64(0)
        if unit >= end:  # there are more blocks than units
            wait_for_previous_grid()
            launch_dependents()
        while unit < end:
            row_tile = divide_u32(unit, columns)
            column = uint32(unit - row_tile * columns)
            here = minimum_u32(uint32(end - unit), uint32(columns - column))  # units of this tile of rows
            at = tiles + uint64(row_tile) * uint64(16)
            expert, first_row = load_written_b32(at), load_written_b32(at + uint64(4))
            num_rows = load_written_b32(at + uint64(8))
            weight = load_b64(table + uint64(expert) * uint64(8))
            bias = load_b64(table + uint64(uint32(num_experts + expert)) * uint64(8))
            tile = uint32(column + uint32(here * team) // uint32(teams))
            after = uint32(column + uint32(here * uint32(team + uint32(1))) // uint32(teams))
            state[3], state[4] = tile, uint32(0)
            state[5] = uint32(1) if tile < after else uint32(0)
            before = uint32(part * columns)
            places = uint32(0), uint32(1), uint32(after - uint32(1)), before, both, k
            aim(weight_rows, scale_rows, weight, uint32(tile + before), both, k, uint32(0), uint32(0))
            own_ring, source = (stages, barriers), (weight, places, uint32(0), slots, lane)
            fill(state, weight_rows, scale_rows, own_ring, source)
            if not has_waited:
                wait_for_previous_grid()  # weights are immutable, and the list was made before: only x is new
                has_waited = True
            launch_dependents()
            sync_block()  # the tile before this one needs x no more
            if warp < uint32(rows):
                row, there = uint32(first_row + warp), k if warp < num_rows else uint32(0)
                if tokens != uint64(0) and there != uint32(0):
                    row = load_b32(tokens + uint64(row) * uint64(4))
                x_row, whole = x + uint64(row) * uint64(k) * uint64(2), memory.shared_address(wholes)
                target = uint32(shared + warp * row_of_x)
                stage_row(x_row, target, uint32(whole + warp * uint32(4)), there, padded, lane)
            sync_block()
            while tile < after:
                multiply(sums, state, weight_rows, scale_rows, own_ring, source, (x_place, between))
                # Sums of one tile and the next have a place each: one barrier a tile is enough.
                turn = uint32((tile & uint32(1)) * uint32(warps) + team * uint32(parts))
                piece = uint32(pieces + turn * uint32(row_sums * 4))
                leave(sums, uint32(piece + part * uint32(row_sums * 4)), lane)
                if is_gated:
                    sync_named(uint32(team + uint32(1)), uint32(64))
                else:
                    sync_warp()
                own = uint32(part * uint32(32) + lane)
                while own < uint32(row_sums):
                    row, inside = place_of(own)
                    at_column = uint32(tile * uint32(ROWS) + inside)
                    if row < num_rows and at_column < n:
                        at_sum, own_scale = uint32(piece + own * uint32(4)), wholes[row]
                        value = finished(at_sum, own_scale, weight, bias, (both, k), at_column)
                        if is_gated:
                            at_sum, above = uint32(at_sum + uint32(row_sums * 4)), uint32(at_column + n)
                            value = gated(value, finished(at_sum, own_scale, weight, bias, (both, k), above))
                        at_out = uint64(uint32(first_row + row)) * uint64(n) + uint64(at_column)
                        store(out + at_out * uint64(2), value)
                    own = uint32(own + uint32(cuda.blockDim.x) // uint32(teams))  # unrolled, it takes more registers
                tile = uint32(tile + uint32(1))
            unit = uint32(unit + here)

    return Specialisation(
        name=f"experts_packed_rows_{weight_name}_{rows}_ring_{ring_slots}" + f"_{activation}" * is_gated,
        kernel=cuda.jit(experts),
        argument_types=ARGUMENT_TYPES,
        max_threads=warps * 32,
        min_blocks=2,  # half of a multiprocessor, which such a launch leaves to its neighbours
        min_capability=90,
        constants={"dtype": DTYPE, "weight": weight_name, "activation": activation, "ring_slots": ring_slots},
    )


def tile_rows(packing: Packing, num_rows: int, num_experts: int) -> int:
    """Rows of a tile for rows spread evenly, or 0 where the other tiers are better."""
    if not can_read(packing):
        return 0
    most = row_counts(packing)[-1]
    return most if num_rows <= _FULL * most * min(num_experts, num_rows) else 0


def can_plan(packing: Packing, dtype: str, columns: int, depth: int, arch: str, *, is_gated: bool) -> bool:
    """Whether it multiplies rows on 16-byte bounds by experts of so many columns; a gated one has as many twice."""
    is_whole = depth % 8 == 0 and (not is_gated or columns % ROWS == 0)
    return dtype == DTYPE and is_whole and can_read(packing) and ring_of(packing, depth, arch)[0] > 0


def plan(tiles: int, columns: int, depth: int, packing: Packing, activation: str, arch: str, num_sms: int) -> Launch:
    """The launch for at most so many tiles of rows, at least one, if `can_plan`."""
    ring_slots, shared_bytes = ring_of(packing, depth, arch)
    units = tiles * -(-columns // ROWS)
    kernel = _kernel(packing.name, activation, row_counts(packing)[-1], ring_slots)
    return Launch(kernel, (min(units, num_sms), 1, 1), (kernel.max_threads, 1, 1), shared_bytes)


def ring_of(packing: Packing, depth: int, arch: str) -> tuple[int, int]:
    """The slots of a stage of the ring that fits beside a tile's rows, 0 if none fits, and the shared memory."""
    rows, warps = row_counts(packing)[-1], warps_of(packing)
    x_bytes, static_bytes = rows * (row_bytes(packing, depth) + ROW_GAP), 2 * warps * rows * ROWS * 4 + 1024
    for slots in SLOTS:
        stage_bytes = warps * packed_ring(packing.name, rows, slots).stage_bytes
        stages = stages_that_fit(machine_of(arch), stage_bytes, x_bytes, static_bytes)
        if stages:
            return slots, x_bytes + stages * stage_bytes
    return 0, 0


def specialisations() -> Iterator[Specialisation]:
    """Specialisations that published models use."""
    for weight in PACKINGS:
        packing = packing_of(weight)
        if packing is not None and can_read(packing):
            for slots in SLOTS:
                for activation in ("", "silu", *(("clamped_silu",) if weight == "e2m1_g32_exponents" else ())):
                    yield _kernel(weight, activation, row_counts(packing)[-1], slots)
