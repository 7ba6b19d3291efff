"""GEMV, a row or two: the weight passes once, at memory bandwidth. Lesson: when arithmetic is free.

A decode step of one sequence uses each element of the weight once: no tile can help, and only the bytes in flight
count. So shared memory is left out. A team of warps owns 4 columns of the output (2 where there are 8 rows), that is 4
rows of the weight; its lanes read them in turn, 16 bytes each, past the first-level cache. Each lane has two such loads
of each column in flight, and starts the next as soon as it has used one; x, which all teams share, comes from the
caches. At the end the lanes' sums are added by shuffles, in which each lane keeps half of its sums until lane i has sum
i, and the warps' sums in shared memory, in their order.

The more warps a team has, the more the sum over K is split; few columns need it to fill the GPU. The split depends on
(N, K) alone and so does the order of additions: a row has the same bits in any batch. They differ from those of the
other tiers. Float32 goes up to 8 rows; from 3 rows on, 16-bit factors cost tensor cores fewer instructions
(`skinny`).

In a gated unit half of a team's rows are of the gate's half of the weight, the others those of up's that belong to
them, whose sums a shuffle brings to the gate's lanes. Squares of x's row are added up by the whole block.

Low-rank sums of adapters may ride on the launch of 16-bit rows (`riding`).

Threads: x lanes, y the warps of a team, z the teams of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.adapters import riding
from numba_kernels.cuda.gemm.epilogue import (
    DTYPE_PAIRS,
    GATED,
    finisher,
    norm_scale,
    scale_element,
    squares_leaver,
)
from numba_kernels.cuda.gemm.product import Machine, Product
from numba_kernels.cuda.gemm.rings.gemv_ring import ring_kernel, ring_launch, ring_stages
from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_loader, vector_loader
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import exchange, shuffle_xor_f32, warp_sum
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

MAX_ROWS = {"f32": 8, "f16": 2, "bf16": 2}
COLUMNS = {1: 4, 2: 4, 4: 4, 8: 2}  # of a team, by the rows that a kernel is made for
TURNS = 2  # loads of each of its columns that a lane has in flight
BLOCK_WARPS = 8
WANTED_WARPS = 4096  # that many keep a large GPU's memory busy
ONE_ROW_BLOCKS = 3  # of a multiprocessor: 96 KB of loads in flight; more rows would spill
MIN_ROUNDS = 2  # of a lane with all its loads; below, a wider team has idle lanes
LOADS = {"early plain": (0, 1), "plain": (0, 0), "nc": (1, 1)}
"""The kinds of `weight_loader`'s loads that a kernel has before `wait_for_previous_grid`, and after it. Plans take the
first; the others show their machine code (`tests/tools/test_kernel_report.py`)."""


@functools.cache
def weight_loader(dtype: str) -> tuple[Any, Any, Any]:
    """Device functions ``address -> 4 words``, for data that is read once, before `wait_for_previous_grid` and after
    it, and ``words -> VECTOR_WIDTH float32``."""
    if dtype == "f32":
        return memory.stream_early_4xf32, memory.stream_4xf32, device_function(lambda a, b, c, d: (a, b, c, d))
    unpack = {"f16": convert.unpack_f16, "bf16": convert.unpack_bf16}[dtype]

    @device_function
    def widen(a, b, c, d):
        a0, a1 = unpack(a)
        b0, b1 = unpack(b)
        c0, c1 = unpack(c)
        d0, d1 = unpack(d)
        return a0, a1, b0, b1, c0, c1, d0, d1

    return memory.stream_early_4xb32, memory.stream_4xb32, widen


@functools.cache
def _kernel(
    dtype: str, out_dtype: str, rows: int, is_aligned: bool, loads: str = next(iter(LOADS)), activation: str = "",
    takes_adapters: bool = False,
) -> Specialisation:  # fmt: skip
    finish, leave_squares = finisher(dtype, out_dtype), squares_leaver(COLUMNS[rows])
    width, item_bytes = (VECTOR_WIDTH[dtype] if is_aligned else 1), ITEM_BYTES[dtype]
    load_x, load_element, load_parts = vector_loader(dtype), element_loader(dtype), memory.load_4xf32
    *loaders, widen = weight_loader(dtype)
    load_early, load_later = (loaders[which] for which in LOADS[loads])
    columns, is_gated, gated = COLUMNS[rows], activation != "", GATED.get(activation)
    out_columns = columns // 2 if is_gated else columns
    leaves_squares = dtype != "f32" and not is_gated
    turn, words = 32 * width, 4 if is_aligned else 1  # elements that a warp's load brings; registers of a lane's
    word = uint32 if is_aligned and dtype != "f32" else float32
    num_sums = rows * columns
    exchange_sums = exchange(num_sums)
    partial_floats, partial_rows = BLOCK_WARPS * num_sums, BLOCK_WARPS * rows

    def turn_loader(load_weights):
        @device_function
        def load_turn(weight_rows, i, loaded):
            for c in range(columns):
                address = weight_rows[c] + uint64(i * turn * item_bytes)
                if is_aligned:
                    vector = load_weights(address)
                    for e in range(4):
                        loaded[i, c, e] = vector[e]
                else:
                    loaded[i, c, 0] = load_element(address)

        return load_turn

    load_first_turn, load_turn = turn_loader(load_early), turn_loader(load_later)
    shrink = riding.shrinker(dtype, BLOCK_WARPS, rows) if takes_adapters else None
    aim, expand = riding.expander(dtype) if takes_adapters else (None, None)

    @device_function
    def multiply(block, num_blocks, given, added):
        x, weight, m, n, k, x_squares, x_parts = (
            given.x, given.weight, given.m, given.n, given.k, given.x_squares, given.x_parts
        )  # fmt: skip
        partial = cuda.shared.array(partial_floats, float32)  # [warp, sum]
        partial_squares = cuda.shared.array(partial_rows, float32)  # [warp, row]
        lane, rank, team = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y), uint32(cuda.threadIdx.z)
        team_warps = uint32(cuda.blockDim.y)
        first_column = (block * uint32(cuda.blockDim.z) + team) * uint32(out_columns)
        row_bytes = uint64(k) * uint64(item_bytes)
        position = rank * uint32(TURNS * turn) + lane * uint32(width)
        step = team_warps * uint32(TURNS * turn)
        start_bytes, step_bytes = uint64(position) * uint64(item_bytes), uint64(step) * uint64(item_bytes)
        # Beyond the last row or column, the last one is computed again, and not stored.
        weight_rows = cuda.local.array(columns, uint64)
        for c in range(columns):
            row = min(first_column + uint32(c % out_columns), n - uint32(1))
            if c >= out_columns:
                row = uint32(row + n)  # up's
            weight_rows[c] = weight + uint64(row) * row_bytes + start_bytes
        loaded = cuda.local.array((TURNS, columns, words), word)
        for i in range(TURNS):
            for c in range(columns):
                for e in range(words):
                    loaded[i, c, e] = word(0)
            if position + uint32(i * turn) < k:
                load_first_turn(weight_rows, i, loaded)

        wait_for_previous_grid()  # the weight is immutable; x may be the previous grid's output
        launch_dependents()
        x_rows = cuda.local.array(rows, uint64)
        for r in range(rows):
            x_rows[r] = x + uint64(min(uint32(r), m - uint32(1))) * row_bytes + start_bytes
        # The first of this thread's parts of the squares, added up after the loop.
        first_part = uint32(uint32(lane + rank * uint32(32) + team * team_warps * uint32(32)) * uint32(4))
        parts = cuda.local.array((rows, 4), float32)
        for r in range(rows):
            for e in range(4):
                parts[r, e] = float32(0.0)
            if x_squares != uint64(0) and first_part < x_parts and uint32(r) < m:
                loaded_parts = load_parts(x_squares + (uint64(r) * uint64(x_parts) + uint64(first_part)) * uint64(4))
                for e in range(4):
                    parts[r, e] = loaded_parts[e]
        sums = cuda.local.array(num_sums, float32)
        for i in range(num_sums):
            sums[i] = float32(0.0)
        weights = cuda.local.array((columns, width), float32)
        while position < k:
            for c in range(columns):
                weight_rows[c] += step_bytes
            for i in range(TURNS):
                if position + uint32(i * turn) < k:
                    for c in range(columns):
                        if is_aligned:
                            wide = widen(loaded[i, c, 0], loaded[i, c, 1], loaded[i, c, 2], loaded[i, c, 3])
                            for e in range(width):
                                weights[c, e] = wide[e]
                        else:
                            weights[c, 0] = loaded[i, c, 0]
                    for r in range(rows):
                        if is_aligned:
                            vector = load_x(x_rows[r] + uint64(i * turn * item_bytes))
                            for e in range(width):
                                for c in range(columns):
                                    sums[r * columns + c] += vector[e] * weights[c, e]
                        else:
                            element = load_element(x_rows[r] + uint64(i * turn * item_bytes))
                            for c in range(columns):
                                sums[r * columns + c] += element * weights[c, 0]
                if position + uint32(i * turn) + step < k:
                    load_turn(weight_rows, i, loaded)
            for r in range(rows):
                x_rows[r] += step_bytes
            position += step

        exchange_sums(sums, lane)
        total, scale = sums[0], float32(1.0)
        first = team * team_warps * uint32(num_sums) + lane
        if x_squares != uint64(0):
            for r in range(rows):
                squared = (parts[r, 0] + parts[r, 1]) + (parts[r, 2] + parts[r, 3])
                part = uint32(first_part + uint32(BLOCK_WARPS * 32 * 4))
                while part < x_parts and uint32(r) < m:
                    a, b, c, d = load_parts(x_squares + (uint64(r) * uint64(x_parts) + uint64(part)) * uint64(4))
                    squared += (a + b) + (c + d)
                    part += uint32(BLOCK_WARPS * 32 * 4)
                squared = warp_sum(squared)
                if lane == uint32(0):
                    partial_squares[(rank + team * team_warps) * uint32(rows) + uint32(r)] = squared
        if team_warps > uint32(1) and lane < uint32(num_sums):
            partial[first + rank * uint32(num_sums)] = total
        if takes_adapters:
            own, before = uint32(first_column + lane % uint32(out_columns)), riding.NOT_COUNTED
            aimed = uint32(0), uint32(0), uint64(0), uint64(0), uint64(0)
            if rank == uint32(0) and lane < uint32(num_sums) and lane // uint32(columns) < m and own < n:
                if lane % uint32(columns) >= uint32(out_columns):
                    own = uint32(own + n)  # up's
                aimed = aim(lane // uint32(columns), own, added)
            if rank == uint32(0) and team == uint32(0):
                before = riding.wait_for_shrinking(lane, added)
            sync_block()
        elif team_warps > uint32(1) or x_squares != uint64(0):
            sync_block()
        if rank == uint32(0):
            row = lane // uint32(columns)
            if lane < uint32(num_sums):
                i = uint32(1)
                while i < team_warps:
                    total += partial[first + i * uint32(num_sums)]
                    i += uint32(1)
                if x_squares != uint64(0):
                    squared = partial_squares[row]
                    for warp in range(1, BLOCK_WARPS):
                        squared += partial_squares[row + uint32(warp * rows)]
                    scale = norm_scale(squared, k, given.eps)
            total = scale_element(total, scale)
            inside = lane % uint32(columns)
            column = first_column + inside
            if takes_adapters:
                total += expand(aimed)
            if is_gated:
                total = gated(total, shuffle_xor_f32(total, uint32(out_columns)))
            value = float32(0.0)
            if row < m and column < n and inside < uint32(out_columns):
                value = finish(given, row, column, total)
            if leaves_squares:
                leave_squares(given, value * value, inside == uint32(0), row, column)
            if takes_adapters:
                riding.reset_counters(before, num_blocks, added)

    alignment = "aligned" if is_aligned else "any"
    suffix = "" if loads == next(iter(LOADS)) else f"_{loads}"
    return Specialisation(
        name=f"gemv_{dtype}_{out_dtype}_{rows}_{alignment}{'_' if is_gated else ''}{activation}{suffix}"
        + "_adapted" * takes_adapters,
        kernel=riding.product_kernel(multiply, shrink),
        argument_types=riding.argument_types(takes_adapters),
        max_threads=BLOCK_WARPS * 32,
        min_blocks=ONE_ROW_BLOCKS if rows == 1 and is_aligned else 0,
        constants={
            "dtype": dtype, "out_dtype": out_dtype, "rows": rows, "is_aligned": is_aligned, "activation": activation,
            "square_columns": columns if leaves_squares else 0,
        },
    )  # fmt: skip


def _team_warps(n: int, k: int, width: int) -> int:
    """Warps that share the sum over K, from the weight's shape alone."""
    warps = 1
    while (
        warps < BLOCK_WARPS
        and -(-n // COLUMNS[1]) * warps < WANTED_WARPS
        and k >= 2 * warps * TURNS * 32 * width * MIN_ROUNDS
    ):
        warps *= 2
    return warps


def why_not(product: Product, machine: Machine) -> str:
    """Why it cannot compute a product; "" if it can."""
    most = MAX_ROWS[product.x]
    can_gate = product.x != "f32" or not product.epilogue.activation
    can_read = product.weight == product.x and product.is_weight_layout and can_gate
    if can_read and not product.exact and product.m <= most:
        return ""
    return f"takes at most {most} rows of {product.x}, the weight layout, and is not exact; f32 is not gated"


def seconds(product: Product, machine: Machine) -> float:
    """Seconds by its multiply-adds, and as many instructions again that widen the weight."""
    return product.n * product.k * 2 * (product.m + 1) / machine.float_flops


def can_take_adapters(product: Product, machine: Machine) -> bool:
    """Whether low-rank sums (`riding`) can ride on a product's launch."""
    return product.x != "f32" and product.out == product.x and product.is_aligned and not why_not(product, machine)


def plan(product: Product, machine: Machine, ranks: int = 0) -> Launch:
    """A launch for a product that it can compute and that is not empty; with low-rank sums of so many ranks, if any."""
    dtype, is_aligned = product.x, product.is_aligned
    rows = next(rows for rows in COLUMNS if rows >= product.m) if is_aligned else MAX_ROWS[dtype]
    warps = _team_warps(product.weight_rows, product.k, VECTOR_WIDTH[dtype] if is_aligned else 1)
    teams = BLOCK_WARPS // warps
    blocks = -(-product.weight_rows // (COLUMNS[rows] * teams))
    activation, shrinking = product.epilogue.activation, riding.shrinking_blocks(product.m, ranks)
    if is_aligned and dtype != "f32" and ring_stages(machine, product.k, rows, takes_adapters=ranks > 0):
        kernel = ring_kernel(dtype, product.out, rows, activation, takes_adapters=ranks > 0)
        return ring_launch(kernel, machine, blocks, (32, warps, teams), product.k, product.m, ranks)
    kernel = _kernel(dtype, product.out, rows, is_aligned, activation=activation, takes_adapters=ranks > 0)
    return Launch(kernel, (blocks + shrinking, 1, 1), (32, warps, teams), num_shrinking=shrinking)


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for dtype, out_dtype in DTYPE_PAIRS:
        for activation in ("", *GATED) if out_dtype == dtype != "f32" else ("",):
            for rows in COLUMNS:
                if rows <= MAX_ROWS[dtype]:
                    yield _kernel(dtype, out_dtype, rows, True, activation=activation)
                    if dtype != "f32":
                        yield ring_kernel(dtype, out_dtype, rows, activation)
                        if out_dtype == dtype:
                            yield _kernel(dtype, out_dtype, rows, True, activation=activation, takes_adapters=True)
            yield _kernel(dtype, out_dtype, MAX_ROWS[dtype], False, activation=activation)
