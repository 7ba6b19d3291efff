"""Quantised GEMV, one row times a packed weight: `skinny` for a single row, by `packed_stream`.

A block takes up to 64 columns at a time, 16 a team; a team's warps share K (a gated unit has teams of the gate's rows
and of up's). A block's teams share x, which it brings to shared memory once, so that a block has as many columns as
leave enough blocks, and where there are more of these than multiprocessors, each takes columns in turns. (A block's
registers fill a multiprocessor: the next one could not bring its x meanwhile. The kernel for one turn is its own, which
is shorter, by some 0.4 µs on an H200.) The weight's first loads start before the previous grid has ended. Sums
of a team meet in shared memory, and are added in the order of K. How K is split depends on (N, K) alone.

Threads: x lanes, y the streams of K, z the teams.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, types

from numba_kernels.cuda.gemm.epilogue import ARGUMENT_TYPES, GATED, finisher, scale_element, scale_of_row
from numba_kernels.cuda.gemm.packed_stream import (
    DTYPE,
    MOST_SHARED_BYTES,
    NUM_WORDS,
    ROWS,
    can_read,
    largest,
    packed_reader,
    row_bytes,
)
from numba_kernels.cuda.gemm.product import LATENCY_S, Machine, Product, unpacking_s
from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import shuffle_xor_f32
from numba_kernels.cuda.packing import PACKINGS, packing_of
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

BLOCK_WARPS = 16
_UNDER_WAY_BYTES = BLOCK_WARPS * 4096  # of a block
_START_S = 0.7e-6
UNPACKING = {"u4": 254, "u8": 95, "e4m3": 334, "e2m1": 498}
"""Machine instructions of a warp for 4 KB of a weight, by its elements."""
_ENOUGH_BLOCKS = 96  # that fill a large GPU


@functools.cache
def _kernel(weight_name: str, out_dtype: str, activation: str = "", *, has_turns: bool = False) -> Specialisation:
    reader, finish = packed_reader(weight_name), finisher(DTYPE, out_dtype)
    aim, begin, multiply = reader.aim, reader.begin_early, reader.multiply
    row_scale, slots_of = reader.row_scale, reader.slots
    num_scale_words, shift = reader.num_scale_words, float(2.0**reader.factors.shift)
    scale_by, stage, place = reader.factors.scale_by, reader.factors.stage, reader.factors.place
    packing = packing_of(weight_name)
    assert packing is not None
    slot_elements, is_gated = packing.slot, activation != ""
    gated = GATED[activation] if is_gated else None

    def gemm(x, weight, bias, residual, out, m, n, k, bias_is_f32, x_squares, x_parts, eps, squares):
        shared = memory.shared_address(cuda.shared.array(0, uint32))
        greatest = cuda.shared.array(BLOCK_WARPS, uint32)
        partial = cuda.shared.array((2, BLOCK_WARPS, ROWS), float32)  # of these columns, and of the next
        words, scales = cuda.local.array(NUM_WORDS, uint32), cuda.local.array(num_scale_words, uint32)
        rows, scale_rows, sums = cuda.local.array(2, uint64), cuda.local.array(1, uint64), cuda.local.array(2, float32)
        next_rows, next_scale_rows = cuda.local.array(2, uint64), cuda.local.array(1, uint64)
        lane, stream, team = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y), uint32(cuda.threadIdx.z)
        streams, teams = uint32(cuda.blockDim.y), uint32(cuda.blockDim.z)
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
        tile = uint32(uint32(cuda.blockIdx.x) * columns_teams + inside)
        stride = uint32(uint32(cuda.gridDim.x) * columns_teams)
        aim(rows, scale_rows, weight, uint32(minimum_u32(tile, last_tile) + beside), both, k, first, lane)
        begin(words, scales, rows, scale_rows, first, last)
        wait_for_previous_grid()  # the weight is immutable; x may be the previous grid's output
        launch_dependents()
        most = largest(x, warp, uint32(BLOCK_WARPS), k, lane)
        if lane == uint32(0):
            greatest[warp] = most
        sync_block()
        for other in range(BLOCK_WARPS):
            most = max(most, greatest[other])
        factor, unfactor = scale_by(most)
        padded = uint32(slots * uint32(slot_elements))
        stage(x, shared, warp, uint32(BLOCK_WARPS), k, padded, factor, lane)
        whole = scale_element(unfactor * float32(shift), scale_of_row(x_squares, uint32(0), x_parts, k, eps))
        sync_block()
        x_place, turn, goes_on = place(shared, padded, lane), uint32(0), uint32(1)
        while goes_on != uint32(0):
            following, goes_on = uint32(tile + stride), uint32(0)
            if has_turns:
                if uint32(following - inside) <= last_tile:  # the same in all teams
                    goes_on = uint32(1)
                at = uint32(minimum_u32(following, last_tile) + beside)
                aim(next_rows, next_scale_rows, weight, at, both, k, first, lane)
                multiply(
                    sums, words, scales, rows, scale_rows, next_rows, next_scale_rows, goes_on, x_place, first, last,
                    lane,
                )  # fmt: skip
            else:
                multiply(sums, words, scales, rows, scale_rows, rows, scale_rows, uint32(0), x_place, first, last, lane)
            if (lane & uint32(3)) == uint32(0):
                partial[turn, warp, lane >> uint32(2)] = sums[0]
                partial[turn, warp, uint32((lane >> uint32(2)) + uint32(8))] = sums[1]
            sync_block()
            if stream == uint32(0) and team < columns_teams and lane < uint32(ROWS):
                column = uint32(tile * uint32(ROWS) + lane)
                total, up = float32(0.0), float32(0.0)
                index = uint32(0)
                while index < streams:
                    total += partial[turn, uint32(warp + index), lane]
                    if is_gated:
                        up += partial[turn, uint32(warp + columns_teams * streams + index), lane]
                    index = uint32(index + uint32(1))
                value = float32(0.0)
                if column < n:
                    value = scale_element(scale_element(total, whole), row_scale(weight, both, k, column))
                    if is_gated:
                        up = scale_element(scale_element(up, whole), row_scale(weight, both, k, uint32(column + n)))
                        value = gated(value, up)
                    value = finish(bias, bias_is_f32, residual, out, n, uint32(0), column, value)
                if not is_gated and squares != uint64(0):
                    squared = value * value
                    for i in range(4):
                        squared += shuffle_xor_f32(squared, uint32(1 << i))
                    if lane == uint32(0) and column < n:
                        memory.store_f32(squares + uint64(column >> uint32(4)) * uint64(4), squared)
            tile = following
            turn ^= uint32(1)

    return Specialisation(
        name="_".join(["gemm_quantised_gemv", weight_name, out_dtype + ("_" if is_gated else "") + activation])
        + "_turns" * has_turns,
        kernel=cuda.jit(gemm),
        argument_types=ARGUMENT_TYPES,
        max_threads=BLOCK_WARPS * 32,
        min_blocks=1,
        constants={
            "dtype": DTYPE, "weight": weight_name, "out_dtype": out_dtype, "activation": activation,
            "has_turns": has_turns,
            "square_columns": 0 if is_gated else ROWS,
        },
    )  # fmt: skip


def why_not(product: Product, machine: Machine) -> str:
    """Why it cannot compute a product; "" if it can."""
    packing = packing_of(product.weight)
    if packing is None or not can_read(packing) or product.x != DTYPE:
        return "reads packed weights, with groups of 32 or more and no zero points, for bfloat16 rows"
    is_plain = product.is_weight_layout and product.is_aligned and not product.num_segments
    if product.m != 1 or product.exact or not is_plain:
        return "takes one row on a 16-byte bound, not exactly, and cuts no K into segments"
    if product.k == 0 or row_bytes(packing, product.k) > MOST_SHARED_BYTES:
        return f"keeps a row in {MOST_SHARED_BYTES} bytes of shared memory"
    is_whole = not product.epilogue.activation or product.n % ROWS == 0
    return "" if is_whole else f"gates packed weights in tiles of {ROWS} columns"


def teams(columns: int, *, is_gated: bool) -> int:
    """Teams of a block, those of the gate's rows and of up's each counted: 4 where that leaves enough blocks."""
    tiles = -(-columns // ROWS) * (2 if is_gated else 1)
    most, least = 4, 2 if is_gated else 1
    while most > least and -(-tiles // most) < _ENOUGH_BLOCKS:
        most //= 2
    return most


def seconds(product: Product, machine: Machine) -> float:
    """Seconds by the weight's bytes, by unpacking, by its blocks' reads from the second-level cache, and latency.
    Before it x is read twice, with two barriers."""
    packing, blocks = packing_of(product.weight), plan(product, machine).grid[0]
    assert packing is not None
    num_bytes, at_once = product.weight_bytes, min(blocks, machine.num_multiprocessors)
    return _START_S + max(
        num_bytes / machine.memory_bytes,
        unpacking_s(num_bytes, UNPACKING[packing.element], machine.num_multiprocessors),
        (num_bytes + blocks * 4 * product.k) / machine.cache_bytes,
        LATENCY_S * num_bytes / (at_once * _UNDER_WAY_BYTES),
    )


def plan(product: Product, machine: Machine) -> Launch:
    """A launch for a product that it can compute and that is not empty."""
    activation, packing = product.epilogue.activation, packing_of(product.weight)
    assert packing is not None
    num_teams = teams(product.n, is_gated=activation != "")
    columns = ROWS * (num_teams // 2 if activation else num_teams)
    blocks = -(-product.n // columns)
    turns = -(-blocks // machine.num_multiprocessors)
    return Launch(
        _kernel(product.weight, product.out, activation, has_turns=turns > 1), (-(-blocks // turns), 1, 1),
        (32, BLOCK_WARPS // num_teams, num_teams), row_bytes(packing, product.k),
    )  # fmt: skip


def specialisations() -> Iterator[Specialisation]:
    """Specialisations of bf16 that published models use; others are compiled at their first launch."""
    for weight in PACKINGS:
        if can_read(packing_of(weight)):
            for activation in ("", "silu"):
                yield _kernel(weight, DTYPE, activation)
                yield _kernel(weight, DTYPE, activation, has_turns=True)
