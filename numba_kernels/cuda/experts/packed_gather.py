"""Few tokens and experts that stay quantised: `gather`'s two launches, straight over the bytes of the chosen experts.

A warp takes 16 rows of a packed weight and a part of K, with x staged, as in `gemm.packed_stream`.

    gate and up   a block takes 16 columns of one choice of a token: a tile of the gate's rows, one of up's, K in
                  `STREAMS` parts. Where there are many such tiles, it takes one after another, for which x is prepared
                  once; the next one's first loads start as the last ones of a tile are used
    down          a block takes 16 columns of a token, its warps the token's choices and parts of K. They meet in shared
                  memory, as in `gather`: the row is complete. The weight's first loads start before gate and up have
                  ended, since the experts were chosen before these began

From sm_90 on the weight comes through `packed_ring`, and a block, one a multiprocessor, leaves half of it to its
neighbour. The sums are the same.

A token's sum depends on no other token; it differs from the other tiers' sums. Rows are bfloat16; groups of 16 and
packings with zero points of their own have no such kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, types

from numba_kernels.cuda.experts.gather import choices_adder
from numba_kernels.cuda.gemm.epilogue import GATES, scale_element
from numba_kernels.cuda.gemm.packed_stream import (
    DTYPE,
    NUM_WORDS,
    ROWS,
    can_read,
    largest,
    packed_reader,
    row_bytes,
)
from numba_kernels.cuda.gemm.product import machine_of
from numba_kernels.cuda.gemm.rings.packed_ring import SLOTS, STATE, packed_ring
from numba_kernels.cuda.gemm.rings.warp_ring import MOST_STAGES, dynamic_shared_bytes, stages_that_fit, start_ring
from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.element import element_storer
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.memory import load_b32, load_b64, load_f32, load_written_b32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index
from numba_kernels.cuda.packing import PACKINGS, Packing, packing_of
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

WARPS = 8
STREAMS = WARPS // 2  # parts of K of a block that multiplies gate and up
MAX_CHOICES = 16  # of a token
MOST_SHARED_BYTES = 96 << 10  # of x
BLOCKS = 2  # that multiply gate and up, of a multiprocessor
_STATIC_BYTES = 2048  # of kernels with a ring, at most
_LEAST_ROUNDS = 2  # of as many blocks as run at once; with less, a new block for each tile spreads them better


@functools.cache
def _gate_up(weight_name: str, activation: str, ring_slots: int = 0) -> Specialisation:
    """Arguments: x [T, K], table [2, E], ids [T, k], out [T k, I] addresses; I, K, E, k."""
    ring, has_ring = packed_ring(weight_name, 1, ring_slots or SLOTS[0]), ring_slots > 0
    fill, multiply_ring, stage_bytes, num_barriers = ring.fill, ring.multiply, ring.stage_bytes, WARPS * MOST_STAGES
    reader, gated, store = packed_reader(weight_name), GATES[activation], element_storer(DTYPE)
    row_width = reader.factors.planes * reader.factors.plane_bytes  # bytes of a number
    aim, begin, multiply = reader.aim, reader.begin, reader.multiply
    row_scale, slots_of = reader.row_scale, reader.slots
    num_scale_words, shift = reader.num_scale_words, float(2.0**reader.factors.shift)
    scale_by, stage, place = reader.factors.scale_by, reader.factors.stage, reader.factors.place
    leave = reader.factors.leave
    packing = packing_of(weight_name)
    assert packing is not None
    slot_elements = packing.slot

    def experts(x, table, ids, out, n, k, num_experts, top_k):
        shared = memory.shared_address(cuda.shared.array(0, uint32))
        greatest = cuda.shared.array(WARPS, uint32)
        partial = cuda.shared.array((2, 2, STREAMS, ROWS), float32)  # of one tile and the next
        partials = memory.shared_address(partial)
        if has_ring:
            state = cuda.local.array(STATE, uint32)
            barriers = memory.shared_address(cuda.shared.array(num_barriers, uint64))
        else:
            words, scales = cuda.local.array(NUM_WORDS, uint32), cuda.local.array(num_scale_words, uint32)
        rows, scale_rows, sums = cuda.local.array(2, uint64), cuda.local.array(1, uint64), cuda.local.array(2, float32)
        next_rows, next_scale_rows = cuda.local.array(2, uint64), cuda.local.array(1, uint64)
        thread, lane, draw = uint32(cuda.threadIdx.x), lane_index(), uint32(cuda.blockIdx.y)
        warp, tile = uint32(thread >> uint32(5)), uint32(cuda.blockIdx.x)
        half, stream = uint32(warp // uint32(STREAMS)), uint32(warp % uint32(STREAMS))
        wait_for_previous_grid()
        launch_dependents()
        expert = load_b32(ids + uint64(draw) * uint64(4))
        weight = load_b64(table + uint64(expert) * uint64(8))
        bias = load_b64(table + uint64(uint32(num_experts + expert)) * uint64(8))
        both, slots = uint32(n * uint32(2)), slots_of(k)
        length = uint32(slots + uint32(STREAMS - 1)) // uint32(STREAMS)
        first = minimum_u32(uint32(stream * length), slots)
        last = minimum_u32(uint32(first + length), slots)
        tiles = n >> uint32(4)
        own_tiles = uint32(half * tiles)  # in front of this warp's: the gate's, for up
        padded = uint32(slots * uint32(slot_elements))
        if has_ring:
            x_bytes = uint32(padded * uint32(row_width))
            count = uint32(uint32(dynamic_shared_bytes() - x_bytes) // uint32(WARPS * stage_bytes))
            stages = uint32(shared + x_bytes + warp * count * uint32(stage_bytes))
            barriers = uint32(barriers + warp * count * uint32(8))
            start_ring(barriers, count, lane)
            state[0], state[1], state[2], state[3], state[4] = uint32(0), uint32(0), count, tile, first
            state[5] = uint32(1) if first < last else uint32(0)
            ring_places = uint32(0), uint32(cuda.gridDim.x), uint32(tiles - uint32(1)), own_tiles, both, k
            aim(rows, scale_rows, weight, uint32(own_tiles + tile), both, k, first, uint32(0))
            own_ring, source = (stages, barriers), (weight, ring_places, first, last, lane)
            fill(state, rows, scale_rows, own_ring, source)
        else:
            aim(rows, scale_rows, weight, uint32(own_tiles + tile), both, k, first, lane)
            begin(words, scales, rows, scale_rows, first, last)
        x_row = x + uint64(divide_u32(draw, top_k)) * uint64(k) * uint64(2)
        most = largest(x_row, warp, uint32(WARPS), k, lane)
        if lane == uint32(0):
            greatest[warp] = most
        sync_block()
        for other in range(WARPS):
            most = max(most, greatest[other])
        factor, unfactor = scale_by(most)
        stage(x_row, uint64(0), shared, (warp, uint32(WARPS), lane), k, padded, factor)
        sync_block()
        at = place(shared, padded, lane)
        turn = uint32(0)
        while tile < tiles:
            following = uint32(tile + uint32(cuda.gridDim.x))
            goes_on = uint32(1) if following < tiles else uint32(0)
            if has_ring:
                multiply_ring(sums, state, rows, scale_rows, own_ring, source, (at, uint32(0)))
            else:
                aim(next_rows, next_scale_rows, weight, uint32(own_tiles + following), both, k, first, lane)
                own, to_come = (rows, scale_rows), (next_rows, next_scale_rows)
                multiply(sums, (words, scales), own, to_come, goes_on, (at, uint32(0)), (first, last))
            leave(sums, uint32(partials + uint32(turn * uint32(WARPS) + warp) * uint32(ROWS * 4)), lane)
            column = uint32(tile * uint32(ROWS) + thread)
            tile = following
            sync_block()
            if thread < uint32(ROWS):
                gate, up = float32(0.0), float32(0.0)
                for i in range(STREAMS):
                    gate += partial[turn, 0, i, thread]
                    up += partial[turn, 1, i, thread]
                whole = unfactor * float32(shift)
                gate = scale_element(scale_element(gate, whole), row_scale(weight, both, k, column))
                up = scale_element(scale_element(up, whole), row_scale(weight, both, k, uint32(column + n)))
                if bias != uint64(0):
                    gate += load_f32(bias + uint64(column) * uint64(4))
                    up += load_f32(bias + uint64(uint32(column + n)) * uint64(4))
                store(out + (uint64(draw) * uint64(n) + uint64(column)) * uint64(2), gated(gate, up))
            turn ^= uint32(1)

    return Specialisation(
        name=f"experts_packed_gather_{weight_name}_{activation}" + f"_ring_{ring_slots}" * has_ring,
        kernel=cuda.jit(experts),
        argument_types=(types.uint64,) * 4 + (types.uint32,) * 4,
        max_threads=WARPS * 32,
        min_blocks=BLOCKS,
        min_capability=90 if has_ring else 80,
        constants={"dtype": DTYPE, "weight": weight_name, "activation": activation, "ring_slots": ring_slots},
    )


@functools.cache
def _down(weight_name: str, ring_slots: int = 0) -> Specialisation:
    """Arguments: h [T k, I], table [2, E], ids [T, k], weights [T, k] float32, shared, gate, residual (0 without), out
    [T, H], squares [T, H / 4] float32 or 0; H, I, E, k."""
    ring, has_ring = packed_ring(weight_name, 1, ring_slots or SLOTS[0]), ring_slots > 0
    fill, multiply_ring, stage_bytes, num_barriers = ring.fill, ring.multiply, ring.stage_bytes, WARPS * MOST_STAGES
    most_warps = WARPS if has_ring else MAX_CHOICES
    reader, at_end = packed_reader(weight_name), choices_adder(DTYPE, ROWS)
    aim, begin, multiply = reader.aim, reader.begin_early, reader.multiply
    row_scale, slots_of = reader.row_scale, reader.slots
    num_scale_words, shift = reader.num_scale_words, float(2.0**reader.factors.shift)
    scale_by, stage, place = reader.factors.scale_by, reader.factors.stage, reader.factors.place
    leave = reader.factors.leave
    row_width = reader.factors.planes * reader.factors.plane_bytes  # bytes of a number
    packing = packing_of(weight_name)
    assert packing is not None
    slot_elements = packing.slot

    def experts(h, table, ids, weights, shared, gate, residual, out, squares, n, k, num_experts, top_k):
        staged = memory.shared_address(cuda.shared.array(0, uint32))
        greatest = cuda.shared.array(most_warps, uint32)
        partial = cuda.shared.array((most_warps, ROWS), float32)
        partials = memory.shared_address(partial)
        finished = cuda.shared.array((most_warps, ROWS), float32)
        if has_ring:
            state = cuda.local.array(STATE, uint32)
            barriers = memory.shared_address(cuda.shared.array(num_barriers, uint64))
        else:
            words, scales = cuda.local.array(NUM_WORDS, uint32), cuda.local.array(num_scale_words, uint32)
        rows, scale_rows, sums = cuda.local.array(2, uint64), cuda.local.array(1, uint64), cuda.local.array(2, float32)
        thread, lane, row = uint32(cuda.threadIdx.x), lane_index(), uint32(cuda.blockIdx.y)
        warp, tile = uint32(thread >> uint32(5)), uint32(cuda.blockIdx.x)
        streams = divide_u32(uint32(cuda.blockDim.x) >> uint32(5), top_k)
        rank = divide_u32(warp, streams)
        stream = uint32(warp - rank * streams)
        draw = uint32(row * top_k + rank)
        expert = load_written_b32(ids + uint64(draw) * uint64(4))  # by the routing, whose end the previous grid awaited
        weight = load_b64(table + uint64(expert) * uint64(8))
        bias = load_b64(table + uint64(uint32(num_experts + expert)) * uint64(8))
        slots = slots_of(k)
        length = divide_u32(uint32(slots + streams - uint32(1)), streams)
        first = minimum_u32(uint32(stream * length), slots)
        last = minimum_u32(uint32(first + length), slots)
        padded = uint32(slots * uint32(slot_elements))
        tiles = uint32(uint32(n + uint32(ROWS - 1)) // uint32(ROWS))
        if has_ring:
            x_bytes = uint32(top_k * padded * uint32(row_width))
            warps = uint32(uint32(cuda.blockDim.x) >> uint32(5))
            count = divide_u32(uint32(dynamic_shared_bytes() - x_bytes), uint32(warps * uint32(stage_bytes)))
            stages = uint32(staged + x_bytes + warp * count * uint32(stage_bytes))
            barriers = uint32(barriers + warp * count * uint32(8))
            start_ring(barriers, count, lane)
            state[0], state[1], state[2], state[3], state[4] = uint32(0), uint32(0), count, tile, first
            state[5] = uint32(1) if first < last else uint32(0)
            places = uint32(0), uint32(cuda.gridDim.x), uint32(tiles - uint32(1)), uint32(0), n, k
            aim(rows, scale_rows, weight, tile, n, k, first, uint32(0))
            own_ring, source = (stages, barriers), (weight, places, first, last, lane)
            fill(state, rows, scale_rows, own_ring, source)
        else:
            aim(rows, scale_rows, weight, tile, n, k, first, lane)
            begin(words, scales, rows, scale_rows, first, last)
        wait_for_previous_grid()  # it waited itself for the routing, and weights are immutable: only h is new
        launch_dependents()
        h_row = h + uint64(draw) * uint64(k) * uint64(2)
        most = largest(h_row, stream, streams, k, lane)
        if lane == uint32(0):
            greatest[warp] = most
        sync_block()
        other = uint32(rank * streams)
        while other < uint32(rank + uint32(1)) * streams:
            most = max(most, greatest[other])
            other = uint32(other + uint32(1))
        factor, unfactor = scale_by(most)
        staged = uint32(staged + rank * padded * uint32(row_width))
        stage(h_row, uint64(0), staged, (stream, streams, lane), k, padded, factor)
        sync_block()
        at = place(staged, padded, lane)
        goes_on = uint32(1)
        while goes_on != uint32(0):
            if has_ring:
                multiply_ring(sums, state, rows, scale_rows, own_ring, source, (at, uint32(0)))
            else:
                own = rows, scale_rows
                multiply(sums, (words, scales), own, own, uint32(0), (at, uint32(0)), (first, last))
            leave(sums, uint32(partials + warp * uint32(ROWS * 4)), lane)
            sync_block()
            column = uint32(tile * uint32(ROWS) + lane)
            if stream == uint32(0) and lane < uint32(ROWS):
                total = float32(0.0)
                other = warp
                while other < warp + streams:
                    total += partial[other, lane]
                    other = uint32(other + uint32(1))
                total = scale_element(scale_element(total, unfactor * float32(shift)), row_scale(weight, n, k, column))
                if bias != uint64(0) and column < n:
                    total += load_f32(bias + uint64(column) * uint64(4))
                finished[rank, lane] = scale_element(total, load_f32(weights + uint64(draw) * uint64(4)))
            sync_block()
            if warp == uint32(0):
                at_end(finished, top_k, (shared, gate, residual, out, squares), row, column, n, lane)
            tile = uint32(tile + uint32(cuda.gridDim.x))
            if not has_ring or tile >= tiles:
                goes_on = uint32(0)

    return Specialisation(
        name=f"experts_packed_gather_{weight_name}" + f"_ring_{ring_slots}" * has_ring,
        kernel=cuda.jit(experts),
        argument_types=(types.uint64,) * 9 + (types.uint32,) * 4,
        max_threads=most_warps * 32,
        min_blocks=2 if has_ring else 1,
        min_capability=90 if has_ring else 80,
        constants={"dtype": DTYPE, "weight": weight_name, "activation": "", "ring_slots": ring_slots},
    )


def can_plan(packing: Packing, dtype: str, inner: int, hidden: int, top_k: int) -> bool:
    """Whether it multiplies rows on 16-byte bounds by experts of these sizes."""
    is_whole = inner % ROWS == 0 and hidden % 8 == 0 and can_read(packing)
    most = max(row_bytes(packing, hidden), top_k * row_bytes(packing, inner))
    return dtype == DTYPE and is_whole and top_k <= MAX_CHOICES and most <= MOST_SHARED_BYTES


def plan_gate_up(
    num_choices: int, columns: int, depth: int, packing: Packing, activation: str, num_multiprocessors: int,
    arch: str,
) -> Launch:  # fmt: skip
    """The launch for at least one choice, if `can_plan`."""
    ring_slots, shared_bytes = _ring_of(packing, depth, 1, WARPS, arch)
    blocks, at_once = columns // ROWS, (1 if ring_slots else BLOCKS) * num_multiprocessors
    if blocks * num_choices >= (1 if ring_slots else _LEAST_ROUNDS) * at_once:
        blocks = max(1, at_once // num_choices)
    return Launch(
        _gate_up(packing.name, activation, ring_slots), (blocks, num_choices, 1), (WARPS * 32, 1, 1), shared_bytes
    )


def plan_down(
    num_tokens: int, top_k: int, columns: int, depth: int, packing: Packing, num_multiprocessors: int,
    arch: str,
) -> Launch:  # fmt: skip
    """The launch for at least one token, if `can_plan`."""
    num_warps = top_k * max(1, WARPS // top_k)
    ring_slots, shared_bytes = _ring_of(packing, depth, top_k, num_warps, arch)
    blocks = -(-columns // ROWS)
    if ring_slots:
        blocks = min(blocks, max(1, num_multiprocessors // num_tokens))
    return Launch(
        _down(packing.name, ring_slots), (blocks, num_tokens, 1), (num_warps * 32, 1, 1), shared_bytes
    )  # fmt: skip


def _ring_of(packing: Packing, depth: int, rows: int, num_warps: int, arch: str) -> tuple[int, int]:
    """The slots of a stage of the ring that fits beside so many rows of x, 0 if none fits, and the shared memory."""
    x_bytes = rows * row_bytes(packing, depth)
    for slots in SLOTS if num_warps <= WARPS else ():
        stage_bytes = num_warps * packed_ring(packing.name, 1, slots).stage_bytes
        stages = stages_that_fit(machine_of(arch), stage_bytes, x_bytes, _STATIC_BYTES)
        if stages:
            return slots, x_bytes + stages * stage_bytes
    return 0, x_bytes


def specialisations() -> Iterator[Specialisation]:
    """Specialisations that published models use."""
    for weight in PACKINGS:
        packing = packing_of(weight)
        if packing is not None and can_plan(packing, DTYPE, ROWS, 8, 1):
            for slots in (0, *SLOTS):
                for activation in ("silu", *(("clamped_silu",) if weight == "e2m1_g32_exponents" else ())):
                    yield _gate_up(weight, activation, slots)
                yield _down(weight, slots)
