"""Few rows: the weight passes once, as fast as memory delivers it. What it teaches: when arithmetic is free.

A decode step multiplies 1 to 8 rows, so that each element of the weight is used as often as there are rows: no tile
can help, and only the bytes in flight count. So shared memory is left out. A team of warps owns 4 columns of the output
(2 where there are 8 rows), that is 4 rows of the weight; its lanes read them in turn, 16 bytes each, past the
first-level cache, and multiply them with the same places of x, which the caches hold. At the end the lanes' sums are
added by shuffles, in which each lane keeps half of what it holds until lane i has sum i, and the warps' sums in shared
memory, in their order.

The more warps a team has, the more the sum over K is split; few columns need it to fill the GPU. The split depends on
(N, K) alone and the order of additions on nothing else: a row has the same bits in any company of up to 8 rows. They
are not those of the other tiers.

Threads: x lanes, y the warps of a team, z the teams of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.epilogue import ARGUMENT_TYPES, DTYPE_PAIRS, element_loader, finisher
from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import ITEM_BYTES, VECTOR_WIDTH, vector_loader
from numba_kernels.cuda.intrinsics.sync import sync_block
from numba_kernels.cuda.intrinsics.warp import shuffle_xor_f32
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

MAX_ROWS = 8
COLUMNS = {1: 4, 2: 4, 4: 4, MAX_ROWS: 2}  # of a team, by the rows that a kernel is made for
BLOCK_WARPS = 8
WANTED_WARPS = 2048  # that many keep a large GPU's memory busy
MIN_VECTORS_A_LANE = 2  # below, a wider team has nothing to do


@functools.cache
def _weight_loader(dtype: str) -> Any:
    """A device function ``address -> VECTOR_WIDTH float32``, for what is read once."""
    if dtype == "f32":
        return memory.stream_4xf32
    unpack = {"f16": convert.unpack_f16, "bf16": convert.unpack_bf16}[dtype]
    load = memory.stream_4xb32

    @device_function
    def load_weights(address):
        a, b, c, d = load(address)
        a0, a1 = unpack(a)
        b0, b1 = unpack(b)
        c0, c1 = unpack(c)
        d0, d1 = unpack(d)
        return a0, a1, b0, b1, c0, c1, d0, d1

    return load_weights


@functools.cache
def _exchange(distance: int, num_sums: int) -> Any:
    """A device function ``(sums, lane) -> None``: adds the sums of lanes that far apart.

    Where there are more sums than lanes nearer than that, a lane keeps one half of its sums and gives away the other.
    """
    if distance >= num_sums:

        @device_function
        def add(sums, lane):
            for i in range(num_sums):
                sums[i] += shuffle_xor_f32(sums[i], uint32(distance))

        return add

    @device_function
    def halve(sums, lane):
        is_upper = (lane & uint32(distance)) != uint32(0)
        for i in range(distance):
            low, high = sums[i], sums[i + distance]
            sums[i] = (high if is_upper else low) + shuffle_xor_f32(low if is_upper else high, uint32(distance))

    return halve


@functools.cache
def _kernel(dtype: str, out_dtype: str, rows: int, is_aligned: bool) -> Specialisation:
    finish = finisher(dtype, out_dtype)
    width, item_bytes = (VECTOR_WIDTH[dtype] if is_aligned else 1), ITEM_BYTES[dtype]
    load_x, load_weight, load_element = vector_loader(dtype), _weight_loader(dtype), element_loader(dtype)
    columns = COLUMNS[rows]
    num_sums = rows * columns
    exchange_16, exchange_8, exchange_4, exchange_2, exchange_1 = (_exchange(d, num_sums) for d in (16, 8, 4, 2, 1))
    partial_floats = BLOCK_WARPS * num_sums

    def gemv(x, weight, bias, residual, out, m, n, k, bias_is_f32):
        partial = cuda.shared.array(partial_floats, float32)  # [warp, sum]
        lane, rank, team = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y), uint32(cuda.threadIdx.z)
        team_warps = uint32(cuda.blockDim.y)
        first_column = (uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.z) + team) * uint32(columns)
        row_bytes = uint64(k) * uint64(item_bytes)
        # Beyond the last row or column, the last one is computed again, and not stored.
        x_rows = cuda.local.array(rows, uint64)
        for r in range(rows):
            x_rows[r] = x + uint64(min(uint32(r), m - uint32(1))) * row_bytes
        weight_rows = cuda.local.array(columns, uint64)
        for c in range(columns):
            weight_rows[c] = weight + uint64(min(first_column + uint32(c), n - uint32(1))) * row_bytes
        sums = cuda.local.array(num_sums, float32)
        for i in range(num_sums):
            sums[i] = float32(0.0)
        weights = cuda.local.array((columns, width), float32)

        start = (rank * uint32(32) + lane) * uint32(width)
        while start < k:
            offset = uint64(start) * uint64(item_bytes)
            for c in range(columns):
                if is_aligned:
                    vector = load_weight(weight_rows[c] + offset)
                    for e in range(width):
                        weights[c, e] = vector[e]
                else:
                    weights[c, 0] = load_element(weight_rows[c] + offset)
            for r in range(rows):
                if is_aligned:
                    vector = load_x(x_rows[r] + offset)
                    for e in range(width):
                        for c in range(columns):
                            sums[r * columns + c] += vector[e] * weights[c, e]
                else:
                    element = load_element(x_rows[r] + offset)
                    for c in range(columns):
                        sums[r * columns + c] += element * weights[c, 0]
            start += team_warps * uint32(32 * width)

        exchange_16(sums, lane)
        exchange_8(sums, lane)
        exchange_4(sums, lane)
        exchange_2(sums, lane)
        exchange_1(sums, lane)
        total = sums[0]
        if team_warps > uint32(1):
            first = team * team_warps * uint32(num_sums) + lane
            if lane < uint32(num_sums):
                partial[first + rank * uint32(num_sums)] = total
            sync_block()
            if rank == uint32(0) and lane < uint32(num_sums):
                i = uint32(1)
                while i < team_warps:
                    total += partial[first + i * uint32(num_sums)]
                    i += uint32(1)
        row, column = lane // uint32(columns), first_column + lane % uint32(columns)
        if rank == uint32(0) and row < m and column < n:
            finish(bias, bias_is_f32, residual, out, n, row, column, total)

    alignment = "aligned" if is_aligned else "any"
    return Specialisation(
        name=f"gemv_{dtype}_{out_dtype}_{rows}_{alignment}",
        kernel=cuda.jit(gemv),
        argument_types=ARGUMENT_TYPES,
        max_threads=BLOCK_WARPS * 32,
        constants={"dtype": dtype, "out_dtype": out_dtype, "rows": rows, "is_aligned": is_aligned},
    )


def _team_warps(n: int, k: int, width: int) -> int:
    """Warps that share the sum over K, from the weight's shape alone."""
    warps = 1
    while (
        warps < BLOCK_WARPS
        and -(-n // COLUMNS[1]) * warps < WANTED_WARPS
        and k >= 2 * warps * 32 * width * MIN_VECTORS_A_LANE
    ):
        warps *= 2
    return warps


def plan(m: int, n: int, k: int, dtype: str, out_dtype: str, is_aligned: bool) -> Launch:
    """A launch for ``out [m, n]``, 1 <= m <= MAX_ROWS, n at least 1, and a weight [n, k]."""
    rows = next(rows for rows in COLUMNS if rows >= m) if is_aligned else MAX_ROWS
    warps = _team_warps(n, k, VECTOR_WIDTH[dtype] if is_aligned else 1)
    teams = BLOCK_WARPS // warps
    blocks = -(-n // (COLUMNS[rows] * teams))
    return Launch(_kernel(dtype, out_dtype, rows, is_aligned), (blocks, 1, 1), (32, warps, teams))


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for dtype, out_dtype in DTYPE_PAIRS:
        for rows in COLUMNS:
            yield _kernel(dtype, out_dtype, rows, True)
        yield _kernel(dtype, out_dtype, MAX_ROWS, False)
