"""Reductions over axes for Tensor's operators: sum, mean, max, min, argmax; any strides, any dtype.

    out[o] = combine over r of x[o, r]          argmax: the first r of the largest, int64

Floating point is summed in float32, and so are means; integers and bools are summed in int64. NaN
wins every maximum and minimum, and argmax finds the first one. A block reduces one element of the result: each thread
every 256th of its elements, then a tree over the threads. So the order depends on the count alone. Elements are found
by tables like that of `elementwise`, one of the kept axes and one of the others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numba import cuda, float32, int64, types, uint32, uint64

from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import divide, divide_u32, maximum_nan, minimum_nan
from numba_kernels.cuda.intrinsics.memory import load_b32, load_b64, store_b64
from numba_kernels.cuda.intrinsics.storage import LOADERS, STORERS, computes_in
from numba_kernels.cuda.intrinsics.sync import sync_block
from numba_kernels.cuda.specialisation import Launch, Specialisation

MAX_AXES = 8
THREADS = 256
MAX_BLOCKS = 65535  # the rest is looped over
OPERATIONS = ("sum", "mean", "max", "min", "argmax")
_AXIS_BYTES = 16  # a size and a stride, int64


@device_function
def _place(index, layout):
    """Byte offset of an element by a table of `MAX_AXES` axes."""
    at = uint64(0)
    axis = layout + uint64(MAX_AXES * _AXIS_BYTES)
    while axis != layout:
        axis -= uint64(_AXIS_BYTES)
        size = uint32(load_b32(axis))
        rest = divide_u32(index, size)
        at += uint64(uint32(index - rest * size)) * load_b64(axis + uint64(8))
        index = rest
    return at


@device_function
def _is_before(a, at_a, b, at_b):
    """Whether (a, at_a) is the better maximum: larger, or NaN, or as good and earlier."""
    is_nan_a = a != a
    is_nan_b = b != b
    is_better = (a > b) or (is_nan_a and not is_nan_b)
    is_same = (a == b) or (is_nan_a and is_nan_b)
    return is_better or (is_same and at_a < at_b)


_COMBINE = {
    ("sum", "f32"): device_function(lambda a, b: a + b),
    ("sum", "s64"): device_function(lambda a, b: a + b),
    ("max", "f32"): device_function(lambda a, b: maximum_nan(a, b)),
    ("max", "s64"): device_function(lambda a, b: max(a, b)),
    ("min", "f32"): device_function(lambda a, b: minimum_nan(a, b)),
    ("min", "s64"): device_function(lambda a, b: min(a, b)),
}
_START = {
    ("sum", "f32"): float("0"),
    ("sum", "s64"): 0,
    ("max", "f32"): float("-inf"),
    ("max", "s64"): -(2**63),
    ("min", "f32"): float("inf"),
    ("min", "s64"): 2**63 - 1,
}


@functools.cache
def _reduce(operation: str, compute: str) -> Specialisation:
    """Arguments: see `plan`."""
    is_mean = operation == "mean"
    load, store = LOADERS[compute], STORERS[compute]
    key = ("sum" if is_mean else operation, compute)
    combine: Any = _COMBINE[key]
    wide: Any = float32 if compute == "f32" else int64
    start = wide(_START[key])

    @cuda.jit
    def reduce(x, target, kept, reduced, num_kept, num_reduced, code, code_target, item_bytes, count):
        values = cuda.shared.array(THREADS, wide)
        thread = uint32(cuda.threadIdx.x)
        index = uint32(cuda.blockIdx.x)
        while index < num_kept:
            base = x + _place(index, kept)
            total = wide(start)
            element = thread
            while element < num_reduced:
                total = wide(combine(total, load(code, base + _place(element, reduced))))
                if uint32(num_reduced - element) <= uint32(THREADS):
                    break
                element += uint32(THREADS)
            values[thread] = total
            sync_block()
            half = uint32(THREADS // 2)
            while half > uint32(0):
                if thread < half:
                    values[thread] = combine(values[thread], values[thread + half])
                sync_block()
                half >>= uint32(1)
            if thread == uint32(0):
                at = target + uint64(index) * item_bytes
                total = values[uint32(0)]
                if is_mean:
                    store(code_target, at, divide(total, count))
                else:
                    store(code_target, at, total)
            sync_block()
            index += uint32(cuda.gridDim.x)

    return _specialisation(operation, reduce, compute)


@functools.cache
def _argmax(compute: str) -> Specialisation:
    """Arguments: see `plan`."""
    load, wide = LOADERS[compute], float32 if compute == "f32" else int64

    @cuda.jit
    def argmax(x, target, kept, reduced, num_kept, num_reduced, code, code_target, item_bytes, count):
        values = cuda.shared.array(THREADS, wide)
        places = cuda.shared.array(THREADS, uint32)
        thread = uint32(cuda.threadIdx.x)
        index = uint32(cuda.blockIdx.x)
        while index < num_kept:
            base = x + _place(index, kept)
            # A thread without elements repeats the first one: it is nowhere before itself.
            best_at = uint32(0)
            best = wide(load(code, base + _place(uint32(0), reduced)))
            element = thread
            while element < num_reduced:
                value = wide(load(code, base + _place(element, reduced)))
                if _is_before(value, element, best, best_at):
                    best = value
                    best_at = element
                if uint32(num_reduced - element) <= uint32(THREADS):
                    break
                element += uint32(THREADS)
            values[thread] = best
            places[thread] = best_at
            sync_block()
            half = uint32(THREADS // 2)
            while half > uint32(0):
                if thread < half:
                    other = uint32(thread + half)
                    if _is_before(values[other], places[other], values[thread], places[thread]):
                        values[thread] = values[other]
                        places[thread] = places[other]
                sync_block()
                half >>= uint32(1)
            if thread == uint32(0):
                store_b64(target + uint64(index) * uint64(8), uint64(places[uint32(0)]))
            sync_block()
            index += uint32(cuda.gridDim.x)

    return _specialisation("argmax", argmax, compute)


def _specialisation(operation: str, kernel: Any, compute: str) -> Specialisation:
    arguments = (types.uint64,) * 4 + (types.uint32,) * 4 + (types.uint64, types.float32)
    constants = {"operation": operation, "compute": compute}
    return Specialisation(f"reduce_{operation}_{compute}", kernel, arguments, THREADS, constants=constants)


def pack_axes(shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """The table of some axes: for each of `MAX_AXES` its size and its stride in bytes, int64."""
    table = np.zeros((MAX_AXES, 2), np.int64)
    table[:, 0] = 1
    if shape:
        table[MAX_AXES - len(shape) :, 0] = shape
        table[MAX_AXES - len(shape) :, 1] = strides
    return table


def result_dtype(operation: str, dtype: str) -> str:
    """The dtype of a reduction's result."""
    if operation == "argmax":
        return "s64"
    is_integer = computes_in(dtype) == "s64"
    if operation == "sum":
        return "s64" if is_integer else dtype
    if operation == "mean":
        return "f32" if is_integer else dtype
    return dtype


def plan(operation: str, dtype: str, num_kept: int, num_reduced: int) -> Launch:
    """One of `OPERATIONS`; both counts at most 2^32 - 1, num_kept at least 1, num_reduced too but for sum and mean.

    Arguments: x, target addresses; the addresses on the device of `pack_axes` tables, of the kept axes and of the
    reduced ones; num_kept, num_reduced; the `storage.CODES` of x and target; bytes of an element of target; num_reduced
    as a float. ValueError for other counts.
    """
    least = 0 if operation in ("sum", "mean") else 1
    if not 1 <= num_kept < 2**32 or not least <= num_reduced < 2**32:
        raise ValueError(f"reduce: {num_kept} results of {num_reduced} elements; limit {2**32 - 1} of either")
    compute = "f32" if operation == "mean" else computes_in(dtype)
    kernel = _argmax(compute) if operation == "argmax" else _reduce(operation, compute)
    return Launch(kernel, (min(MAX_BLOCKS, num_kept), 1, 1), (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Every kernel of this family."""
    for compute in ("f32", "s64"):
        yield _argmax(compute)
        for operation in ("sum", "max", "min"):
            yield _reduce(operation, compute)
    yield _reduce("mean", "f32")
