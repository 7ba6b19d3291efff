"""Few tokens: each chosen expert's weight passes once, at memory bandwidth, without grouping.

Two launches, both without shared tiles, as `gemm.gemv`; lanes lie along K, 16 bytes each, and have `TURNS` such loads
of each of 4 rows of a weight in flight.

    gate and up   a warp takes two columns of one choice of a token: two rows of the gate's part of the chosen expert's
                  weight and the two of up's that belong to them; of experts without a gate four columns. A choice's
                  columns lie in neighbouring blocks.
    down          a block takes 4 columns of a token, each of its warps one of the token's choices. They meet in shared
                  memory, where they are added up in the order of choices, then the shared expert's part and the
                  residual: the row is complete, and no later launch adds to it.

A weight that several tokens chose is read for each of them, out of the second-level cache. The sum of a token depends
on no other token. It differs from the other tiers' sums.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.activation import FUNCTIONS
from numba_kernels.cuda.experts.combine import adder
from numba_kernels.cuda.gemm.epilogue import GATES, scale_element
from numba_kernels.cuda.gemm.gemv import weight_loader
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_storer, vector_loader
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.memory import load_b32, load_b64, load_f32, store_f32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import exchange, lane_index, shuffle_xor_f32
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

ROWS = 4  # of a weight, that a warp multiplies
TURNS = 2
WARPS = 4  # of a block that multiplies gate and up
MAX_CHOICES = 32  # of a token: warps of a block that multiplies down
SQUARE_COLUMNS = ROWS
UNGATED = ("squared_relu",)
"""Functions of experts that have no gate."""


@functools.cache
def multiplier(dtype: str) -> Any:
    """A device function ``(weight_rows, x_row, k, lane) -> number``: lane i < 4 gets the sum of ``weight_rows[i]``, an
    address, times x's row. All lanes call it; the others' results are undefined."""
    width, item_bytes = VECTOR_WIDTH[dtype], ITEM_BYTES[dtype]
    _, load_weights, widen = weight_loader(dtype)
    load_x = vector_loader(dtype)
    word = float32 if dtype == "f32" else uint32
    turn = 32 * width  # elements that a warp's load brings
    exchange_sums = exchange(ROWS)

    @device_function
    def multiply(weight_rows, x_row, k, lane):
        loaded = cuda.local.array((TURNS, ROWS, 4), word)
        sums = cuda.local.array(ROWS, float32)
        first = uint32(lane * uint32(width))
        for c in range(ROWS):
            sums[c] = float32(0.0)
            weight_rows[c] += uint64(first) * uint64(item_bytes)
        x_row += uint64(first) * uint64(item_bytes)
        position = first
        while position < k:
            for i in range(TURNS):
                for c in range(ROWS):
                    for e in range(4):
                        loaded[i, c, e] = word(0)
                if uint32(position + uint32(i * turn)) < k:
                    for c in range(ROWS):
                        vector = load_weights(weight_rows[c] + uint64(i * turn * item_bytes))
                        for e in range(4):
                            loaded[i, c, e] = vector[e]
            for i in range(TURNS):
                if uint32(position + uint32(i * turn)) < k:
                    values = load_x(x_row + uint64(i * turn * item_bytes))
                    for c in range(ROWS):
                        wide = widen(loaded[i, c, 0], loaded[i, c, 1], loaded[i, c, 2], loaded[i, c, 3])
                        for e in range(width):
                            sums[c] += values[e] * wide[e]
            for c in range(ROWS):
                weight_rows[c] += uint64(TURNS * turn * item_bytes)
            x_row += uint64(TURNS * turn * item_bytes)
            position = uint32(position + uint32(TURNS * turn))
        exchange_sums(sums, lane)
        return sums[0]

    return multiply


@functools.cache
def _gate_up(dtype: str, activation: str) -> Specialisation:
    """Arguments: x [T, K], table [2, E], ids [T, k], out [T k, I] addresses; I, K, E, k."""
    is_gated = activation in GATES
    multiply, store, item_bytes = multiplier(dtype), element_storer(dtype), ITEM_BYTES[dtype]
    columns, activate = (ROWS // 2, GATES[activation]) if is_gated else (ROWS, FUNCTIONS[activation])

    def experts(x, table, ids, out, n, k, num_experts, top_k):
        weight_rows = cuda.local.array(ROWS, uint64)
        lane, draw = lane_index(), uint32(cuda.blockIdx.y)
        warp = uint32(uint32(cuda.blockIdx.x) * uint32(WARPS) + (uint32(cuda.threadIdx.x) >> uint32(5)))
        first_column = uint32(warp * uint32(columns))
        wait_for_previous_grid()
        launch_dependents()
        if first_column < n:
            expert = load_b32(ids + uint64(draw) * uint64(4))
            weight = load_b64(table + uint64(expert) * uint64(8))
            bias = load_b64(table + uint64(uint32(num_experts + expert)) * uint64(8))
            row_bytes = uint64(k) * uint64(item_bytes)
            for c in range(ROWS):
                # Beyond the last column, the last one is computed again, and not stored.
                row = minimum_u32(uint32(first_column + uint32(c % columns)), uint32(n - uint32(1)))
                if c >= columns:
                    row = uint32(row + n)  # up's
                weight_rows[c] = weight + uint64(row) * row_bytes
            total = multiply(weight_rows, x + uint64(divide_u32(draw, top_k)) * row_bytes, k, lane)
            column = uint32(first_column + (lane & uint32(columns - 1)))
            if lane < uint32(ROWS) and bias != uint64(0) and column < n:
                place = column
                if lane >= uint32(columns):
                    place = uint32(place + n)
                total += load_f32(bias + uint64(place) * uint64(4))
            if is_gated:
                value = activate(total, shuffle_xor_f32(total, uint32(columns)))
            else:
                value = activate(total)
            if lane < uint32(columns) and column < n:
                store(out + (uint64(draw) * uint64(n) + uint64(column)) * uint64(item_bytes), value)

    return Specialisation(
        name=f"experts_gather_{dtype}_{activation}",
        kernel=cuda.jit(experts),
        argument_types=(types.uint64,) * 4 + (types.uint32,) * 4,
        max_threads=WARPS * 32,
        constants={"dtype": dtype, "activation": activation},
    )


@functools.cache
def choices_adder(dtype: str, columns: int) -> Any:
    """A device function for a warp ``(finished, top_k, (shared, gate, residual, out, squares), row, column, n, lane)``:
    adds up ``finished [top_k, columns]``, the choices of a token, and completes these columns of its row; lane i has
    `column`, the i-th of them. Squares are of `SQUARE_COLUMNS`; addresses may be 0."""
    add, store, item_bytes = adder(dtype, 1), element_storer(dtype), ITEM_BYTES[dtype]

    @device_function
    def at_end(finished, top_k, addresses, row, column, n, lane):
        shared, gate, residual, out, squares = addresses
        values = cuda.local.array(1, float32)
        values[0] = float32(0.0)
        if lane < uint32(columns) and column < n:
            index = uint32(0)
            while index < top_k:
                values[0] += finished[index, lane]
                index = uint32(index + uint32(1))
            at = (uint64(row) * uint64(n) + uint64(column)) * uint64(item_bytes)
            add(values, shared, gate, residual, row, at)
            store(out + at, values[0])
        if squares != uint64(0):
            squared = values[0] * values[0]
            squared += shuffle_xor_f32(squared, uint32(1))
            squared += shuffle_xor_f32(squared, uint32(2))
            if (lane & uint32(SQUARE_COLUMNS - 1)) == uint32(0) and lane < uint32(columns):
                part = uint64(row) * uint64(n >> uint32(2)) + uint64(column >> uint32(2))
                store_f32(squares + part * uint64(4), squared)

    return at_end


@functools.cache
def _down(dtype: str) -> Specialisation:
    """Arguments: h [T k, I], table [2, E], ids [T, k], weights [T, k] float32, shared, gate, residual (0 without), out
    [T, H], squares [T, H / 4] float32 or 0; H, I, E, k."""
    multiply, at_end, item_bytes = multiplier(dtype), choices_adder(dtype, ROWS), ITEM_BYTES[dtype]

    def experts(h, table, ids, weights, shared, gate, residual, out, squares, n, k, num_experts, top_k):
        partial = cuda.shared.array((MAX_CHOICES, ROWS), float32)
        weight_rows = cuda.local.array(ROWS, uint64)
        lane, rank, row = lane_index(), uint32(uint32(cuda.threadIdx.x) >> uint32(5)), uint32(cuda.blockIdx.y)
        first_column = uint32(uint32(cuda.blockIdx.x) * uint32(ROWS))
        wait_for_previous_grid()
        launch_dependents()
        draw = uint32(row * top_k + rank)
        expert = load_b32(ids + uint64(draw) * uint64(4))
        weight = load_b64(table + uint64(expert) * uint64(8))
        bias = load_b64(table + uint64(uint32(num_experts + expert)) * uint64(8))
        row_bytes = uint64(k) * uint64(item_bytes)
        for c in range(ROWS):
            weight_row = minimum_u32(uint32(first_column + uint32(c)), uint32(n - uint32(1)))
            weight_rows[c] = weight + uint64(weight_row) * row_bytes
        total = multiply(weight_rows, h + uint64(draw) * row_bytes, k, lane)
        column = uint32(first_column + lane)
        if lane < uint32(ROWS):
            if bias != uint64(0) and column < n:
                total += load_f32(bias + uint64(column) * uint64(4))
            partial[rank, lane] = scale_element(total, load_f32(weights + uint64(draw) * uint64(4)))
        sync_block()
        if rank == uint32(0):
            at_end(partial, top_k, (shared, gate, residual, out, squares), row, column, n, lane)

    return Specialisation(
        name=f"experts_gather_{dtype}",
        kernel=cuda.jit(experts),
        argument_types=(types.uint64,) * 9 + (types.uint32,) * 4,
        max_threads=MAX_CHOICES * 32,
        constants={"dtype": dtype, "activation": ""},
    )


def plan_gate_up(num_choices: int, columns: int, dtype: str, activation: str) -> Launch:
    """The launch for at least one choice, and rows on 16-byte bounds."""
    rows = 2 * columns if activation in GATES else columns
    blocks = -(-rows // (ROWS * WARPS))
    return Launch(_gate_up(dtype, activation), (blocks, num_choices, 1), (WARPS * 32, 1, 1))


def plan_down(num_tokens: int, top_k: int, columns: int, dtype: str) -> Launch:
    """The launch for at least one token, at most `MAX_CHOICES` choices of each, and rows on 16-byte bounds."""
    return Launch(_down(dtype), (-(-columns // ROWS), num_tokens, 1), (top_k * 32, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that the plans can return."""
    for dtype in DTYPES:
        for activation in (*GATES, *UNGATED):
            yield _gate_up(dtype, activation)
        yield _down(dtype)
