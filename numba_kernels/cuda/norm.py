"""RMSNorm and LayerNorm over the rows of x [T, H].

    rms_norm    (x / sqrt(mean(x^2) + eps) * weight + residual) * factor           https://arxiv.org/abs/1910.07467
    layer_norm  (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias        https://arxiv.org/abs/1607.06450

x, out and the optional residual are f32, f16 or bf16; weight and bias [H] are float32, and so is the
arithmetic; the result is rounded once.

A block takes a row. Its threads keep `RESIDENT` vectors each in registers between the sums and the scaling, with the
weights, which are read before the previous kernel has ended; the rest of a longer row is read twice, the second time
from the first-level cache. Device memory is read and written once, and that bounds the time. LayerNorm's mean and
variance come from one pass by Welford's update (https://doi.org/10.1080/00401706.1962.10490022) and Chan, Golub and
LeVeque's combination of partial results, which cancel no large numbers. A row's result does not depend on the other
rows.

Where H and the addresses allow it, accesses are 16 bytes wide; else one element.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.intrinsics.block import block_sum
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import elements_loader, elements_storer, floats_loader
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.math import divide, reciprocal_sqrt
from numba_kernels.cuda.intrinsics.memory import store_f32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index, shuffle_xor_f32, warp_sum
from numba_kernels.cuda.specialisation import Launch, Specialisation, access_width

MAX_THREADS = {"rms_norm": 1024, "layer_norm": 512}  # of a block: a thread has 64 registers, or 128
RESIDENT = {"rms_norm": 2, "layer_norm": 1}
"""Vectors of a row that a thread keeps in registers."""
SQUARE_PARTS = 4  # in which `plan_deferred_norm` adds up a row: warps of a block


@functools.cache
def weights_keeper(width: int) -> Any:
    """A device function ``(weights, weight, first, step, size)``: RMSNorm's weights for a thread's part of a row."""
    resident, load_weight = RESIDENT["rms_norm"], floats_loader(width)

    @device_function
    def keep_weights(weights, weight, first, step, size):
        for i in range(resident):
            index = first + uint32(i) * step
            if index < size:
                loaded = load_weight(weight + uint64(index) * uint64(4))
                for lane in range(width):
                    weights[i, lane] = loaded[lane]

    return keep_weights


@functools.cache
def squares_adder(dtype: str, width: int) -> Any:
    """A device function ``(row, x, first, step, size) -> sum of squares`` of a thread's numbers of a row for RMSNorm;
    it leaves the kept part in `row`."""
    item_bytes, resident, load = uint64(ITEM_BYTES[dtype]), RESIDENT["rms_norm"], elements_loader(dtype, width)

    @device_function
    def add_squares(row, x, first, step, size):
        squares = float32(0)
        for i in range(resident):
            index = first + uint32(i) * step
            if index < size:
                loaded = load(x + uint64(index) * item_bytes)
                for lane in range(width):
                    row[i, lane] = loaded[lane]
                    squares += loaded[lane] * loaded[lane]
        index = first + uint32(resident) * step
        while index < size:
            loaded = load(x + uint64(index) * item_bytes)
            for lane in range(width):
                squares += loaded[lane] * loaded[lane]
            index += step
        return squares

    return add_squares


@functools.cache
def _rms_norm(dtype: str, width: int, has_residual: bool) -> Specialisation:
    """Arguments: x, residual (0 without), weight, out addresses; H; 1 / H; eps; factor."""
    item_bytes, resident = uint64(ITEM_BYTES[dtype]), RESIDENT["rms_norm"]
    load, store, load_weight = elements_loader(dtype, width), elements_storer(dtype, width), floats_loader(width)
    keep_weights, add_squares = weights_keeper(width), squares_adder(dtype, width)

    @device_function
    def finish(residual, out, at, loaded, weights, scale, factor, values):
        for lane in range(width):
            values[lane] = loaded[lane] * scale * weights[lane]
        if has_residual:
            added = load(residual + at)
            for lane in range(width):
                values[lane] += added[lane]
        for lane in range(width):
            values[lane] = values[lane] * factor
        store(out + at, values)

    @cuda.jit
    def rms_norm(x, residual, weight, out, size, reciprocal_size, eps, factor):
        partials = cuda.shared.array(32, float32)
        values = cuda.local.array(width, float32)
        row = cuda.local.array((resident, width), float32)
        weights = cuda.local.array((resident, width), float32)
        row_bytes = uint64(cuda.blockIdx.x) * uint64(size) * item_bytes
        x += row_bytes
        out += row_bytes
        step = uint32(cuda.blockDim.x) * uint32(width)
        first = uint32(cuda.threadIdx.x) * uint32(width)
        rest = first + uint32(resident) * step
        if has_residual:
            residual += row_bytes
        keep_weights(weights, weight, first, step, size)
        wait_for_previous_grid()  # the weight is immutable; x may be the previous grid's output
        launch_dependents()
        squares = block_sum(add_squares(row, x, first, step, size), partials)
        scale = reciprocal_sqrt(squares * reciprocal_size + eps)
        for i in range(resident):
            index = first + uint32(i) * step
            if index < size:
                finish(residual, out, uint64(index) * item_bytes, row[i], weights[i], scale, factor, values)
        index = rest
        while index < size:
            at = uint64(index) * item_bytes
            loaded_weights = load_weight(weight + uint64(index) * uint64(4))
            finish(residual, out, at, load(x + at), loaded_weights, scale, factor, values)
            index += step

    variant = "_residual" if has_residual else ""
    return _specialisation("rms_norm", variant, rms_norm, dtype, width)


@functools.cache
def _deferred_norm(dtype: str, width: int) -> Specialisation:
    """Arguments: x, squares addresses; H. Each warp leaves the sum of its part of a row."""
    item_bytes, load = uint64(ITEM_BYTES[dtype]), elements_loader(dtype, width)

    @cuda.jit
    def deferred_norm(x, squares, size):
        wait_for_previous_grid()
        launch_dependents()
        row, thread = uint64(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        x += row * uint64(size) * item_bytes
        total = float32(0)
        index = thread * uint32(width)
        while index < size:
            loaded = load(x + uint64(index) * item_bytes)
            for lane in range(width):
                total += loaded[lane] * loaded[lane]
            index += uint32(32 * SQUARE_PARTS * width)
        total = warp_sum(total)
        if lane_index() == uint32(0):
            place = row * uint64(SQUARE_PARTS) + uint64(thread >> uint32(5))
            store_f32(squares + place * uint64(4), total)

    name, constants = f"deferred_norm_{dtype}_x{width}", {"dtype": dtype, "width": width}
    argument_types = types.uint64, types.uint64, types.uint32
    return Specialisation(name, deferred_norm, argument_types, 32 * SQUARE_PARTS, constants=constants)


@device_function
def _combine(count, mean, squares, other_count, other_mean, other_squares):
    """(count, mean, sum of squared deviations) of two sets of numbers together."""
    total = count + other_count
    share = float32(0)
    if total > float32(0):
        share = divide(other_count, total)
    difference = other_mean - mean
    return total, mean + difference * share, squares + other_squares + difference * difference * count * share


@device_function
def _combine_warp(count, mean, squares):
    distance = uint32(16)
    while distance > uint32(0):
        other_count = shuffle_xor_f32(count, distance)
        other_mean = shuffle_xor_f32(mean, distance)
        other_squares = shuffle_xor_f32(squares, distance)
        count, mean, squares = _combine(count, mean, squares, other_count, other_mean, other_squares)
        distance >>= uint32(1)
    return count, mean, squares


@functools.cache
def _layer_norm(dtype: str, width: int) -> Specialisation:
    """Arguments: x, weight, bias, out addresses; H; 1 / H; eps."""
    item_bytes, resident = uint64(ITEM_BYTES[dtype]), RESIDENT["layer_norm"]
    load, store, load_weight = elements_loader(dtype, width), elements_storer(dtype, width), floats_loader(width)

    @device_function
    def add(loaded, count, mean, squares):
        for lane in range(width):
            count += float32(1)
            difference = loaded[lane] - mean
            mean += divide(difference, count)
            squares += difference * (loaded[lane] - mean)
        return count, mean, squares

    @device_function
    def finish(out, at, loaded, weights, shifts, mean, scale, values):
        for lane in range(width):
            values[lane] = (loaded[lane] - mean) * scale * weights[lane] + shifts[lane]
        store(out + at, values)

    @cuda.jit
    def layer_norm(x, weight, bias, out, size, reciprocal_size, eps):
        partials = cuda.shared.array((3, 32), float32)
        values = cuda.local.array(width, float32)
        row = cuda.local.array((resident, width), float32)
        weights = cuda.local.array((resident, width), float32)
        shifts = cuda.local.array((resident, width), float32)
        row_bytes = uint64(cuda.blockIdx.x) * uint64(size) * item_bytes
        x += row_bytes
        out += row_bytes
        step = uint32(cuda.blockDim.x) * uint32(width)
        first = uint32(cuda.threadIdx.x) * uint32(width)
        rest = first + uint32(resident) * step
        for i in range(resident):
            index = first + uint32(i) * step
            if index < size:
                loaded_weights = load_weight(weight + uint64(index) * uint64(4))
                loaded_shifts = load_weight(bias + uint64(index) * uint64(4))
                for lane in range(width):
                    weights[i, lane] = loaded_weights[lane]
                    shifts[i, lane] = loaded_shifts[lane]
        wait_for_previous_grid()  # weight and bias are immutable; x may be the previous grid's output
        launch_dependents()
        count = float32(0)
        mean = float32(0)
        squares = float32(0)
        for i in range(resident):
            index = first + uint32(i) * step
            if index < size:
                loaded = load(x + uint64(index) * item_bytes)
                for lane in range(width):
                    row[i, lane] = loaded[lane]
                count, mean, squares = add(loaded, count, mean, squares)
        index = rest
        while index < size:
            count, mean, squares = add(load(x + uint64(index) * item_bytes), count, mean, squares)
            index += step
        count, mean, squares = _combine_warp(count, mean, squares)
        lane_of_warp = lane_index()
        warp = uint32(cuda.threadIdx.x) >> uint32(5)
        if lane_of_warp == uint32(0):
            partials[uint32(0), warp] = count
            partials[uint32(1), warp] = mean
            partials[uint32(2), warp] = squares
        sync_block()
        count = float32(0)
        mean = float32(0)
        squares = float32(0)
        if lane_of_warp < uint32(cuda.blockDim.x) >> uint32(5):
            count = partials[uint32(0), lane_of_warp]
            mean = partials[uint32(1), lane_of_warp]
            squares = partials[uint32(2), lane_of_warp]
        count, mean, squares = _combine_warp(count, mean, squares)
        scale = reciprocal_sqrt(squares * reciprocal_size + eps)
        for i in range(resident):
            index = first + uint32(i) * step
            if index < size:
                finish(out, uint64(index) * item_bytes, row[i], weights[i], shifts[i], mean, scale, values)
        index = rest
        while index < size:
            at = uint64(index) * item_bytes
            loaded_weights = load_weight(weight + uint64(index) * uint64(4))
            loaded_shifts = load_weight(bias + uint64(index) * uint64(4))
            finish(out, at, load(x + at), loaded_weights, loaded_shifts, mean, scale, values)
            index += step

    return _specialisation("layer_norm", "", layer_norm, dtype, width)


def _specialisation(family: str, variant: str, kernel: object, dtype: str, width: int) -> Specialisation:
    name, constants = f"{family}{variant}_{dtype}_x{width}", {"dtype": dtype, "width": width}
    argument_types = (types.uint64,) * 4 + (types.uint32,) + (types.float32,) * (3 if family == "rms_norm" else 2)
    return Specialisation(name, kernel, argument_types, MAX_THREADS[family], constants=constants)


def row_threads(family: str, size: int, width: int) -> int:
    """Threads of a block. Up to 256 have a vector each; beyond, threads hold more, for fewer barriers."""
    vectors = -(-size // width)
    threads = min(MAX_THREADS[family], max(min(vectors, 256), -(-vectors // RESIDENT[family])))
    return -(-threads // 32) * 32


def _row_launch(family: str, specialisation: Specialisation, num_rows: int, size: int, width: int) -> Launch:
    return Launch(specialisation, (num_rows, 1, 1), (row_threads(family, size, width), 1, 1))


def plan_rms_norm(num_rows: int, size: int, dtype: str, *, has_residual: bool = False, alignment: int = 16) -> Launch:
    """x [num_rows, size], both at least 1. Arguments: x, residual (0 without), weight, out, size, 1 / size, eps,
    factor.

    `alignment` in bytes divides all addresses.
    """
    width = access_width(dtype, size, alignment)
    return _row_launch("rms_norm", _rms_norm(dtype, width, has_residual), num_rows, size, width)


def plan_layer_norm(num_rows: int, size: int, dtype: str, *, alignment: int = 16) -> Launch:
    """As `plan_rms_norm`. Arguments: x, weight, bias, out, size, 1 / size, eps."""
    width = access_width(dtype, size, alignment)
    return _row_launch("layer_norm", _layer_norm(dtype, width), num_rows, size, width)


def plan_deferred_norm(num_rows: int, size: int, dtype: str, *, alignment: int = 16) -> Launch:
    """The squares of x [num_rows, size] for a product that normalises it (`gemm.epilogue`), float32 [num_rows,
    `SQUARE_PARTS`]. Arguments: x, squares, size."""
    kernel = _deferred_norm(dtype, access_width(dtype, size, alignment))
    return Launch(kernel, (num_rows, 1, 1), (32 * SQUARE_PARTS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Every kernel of this family."""
    for dtype in DTYPES:
        for width in (1, VECTOR_WIDTH[dtype]):
            for has_residual in (False, True):
                yield _rms_norm(dtype, width, has_residual)
            yield _layer_norm(dtype, width)
            yield _deferred_norm(dtype, width)
