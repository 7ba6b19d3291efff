"""Elementwise operations of Tensor's operators: any strides, broadcasting, any pair of dtypes.

    out[i] = f(a[i])    out[i] = f(a[i], b[i])    out[i] = c[i] ? a[i] : b[i]

Operands are read as float32 (floating point) or int64 (integers, bool), computed in that, and rounded or wrapped once
into out's type: `intrinsics.storage` has the conversions, and one kernel an operation serves all dtypes. Where every
operand is contiguous or a single element, offsets are multiples of the index (flat); else a table in device memory
gives up to `MAX_AXES` axes, each with a stride in bytes for every operand, 0 where it is broadcast. A thread has one
element.

These are for glue: a model's heavy operations have kernels of their own. They are bound by bandwidth if innermost
elements are neighbours, else by the sectors that strides waste.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numba import cuda, types, uint32, uint64
from numba.cuda import libdevice

from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import divide, divide_u32, maximum_nan, minimum_nan
from numba_kernels.cuda.intrinsics.memory import load_b32, load_b64
from numba_kernels.cuda.intrinsics.storage import BOOL, LOADERS, STORERS
from numba_kernels.cuda.specialisation import Launch, Specialisation

MAX_AXES = 6
THREADS = 256
MAX_BLOCKS = 16384  # the rest is looped over
AXIS_BYTES = 5 * 8  # a size and four strides, int64
LAYOUT_BYTES = MAX_AXES * AXIS_BYTES


@device_function
def _float_remainder(a, b):
    """numpy's: of the divisor's sign."""
    rest = libdevice.fmodf(a, b)
    if rest != types.float32(0):
        if (rest < types.float32(0)) != (b < types.float32(0)):
            rest = rest + b
    else:
        rest = libdevice.copysignf(rest, b)
    return rest


@device_function
def _float_floor_divide(a, b):
    quotient = divide(a, b)
    if b != types.float32(0):
        exact = divide(a - _float_remainder(a, b), b)
        whole = libdevice.floorf(exact)
        if exact - whole > types.float32(0.5):
            whole = whole + types.float32(1)
        if exact == types.float32(0):
            whole = libdevice.copysignf(types.float32(0), quotient)
        quotient = whole
    return quotient


@device_function
def _integer_floor_divide(a, b):
    quotient = types.int64(0)
    if b == types.int64(-1):
        quotient = types.int64(0) - a  # the lowest number has no negative: it wraps
    elif b != types.int64(0):
        quotient = a // b
    return quotient


@device_function
def _integer_remainder(a, b):
    return a - _integer_floor_divide(a, b) * b


@device_function
def _integer_power(a, b):
    result = types.int64(1)
    while b > types.int64(0):
        if b & types.int64(1):
            result = result * a
        a = a * a
        b = b >> types.int64(1)
    return result


_COMPARISONS = {
    "equal": device_function(lambda a, b: types.int64(a == b)),
    "not_equal": device_function(lambda a, b: types.int64(a != b)),
    "less": device_function(lambda a, b: types.int64(a < b)),
    "less_equal": device_function(lambda a, b: types.int64(a <= b)),
    "greater": device_function(lambda a, b: types.int64(a > b)),
    "greater_equal": device_function(lambda a, b: types.int64(a >= b)),
}
_ARITHMETIC = {
    "add": device_function(lambda a, b: a + b),
    "subtract": device_function(lambda a, b: a - b),
    "multiply": device_function(lambda a, b: a * b),
}

BINARY: dict[str, dict[str, Any]] = {
    "f32": {
        **_ARITHMETIC, **_COMPARISONS, "divide": device_function(lambda a, b: divide(a, b)),
        "floor_divide": _float_floor_divide, "remainder": _float_remainder,
        "power": device_function(lambda a, b: libdevice.powf(a, b)),
        "minimum": device_function(lambda a, b: minimum_nan(a, b)),
        "maximum": device_function(lambda a, b: maximum_nan(a, b)),
    },
    "s64": {
        **_ARITHMETIC, **_COMPARISONS, "floor_divide": _integer_floor_divide, "remainder": _integer_remainder,
        "power": _integer_power, "minimum": device_function(lambda a, b: min(a, b)),
        "maximum": device_function(lambda a, b: max(a, b)), "bitwise_and": device_function(lambda a, b: a & b),
        "bitwise_or": device_function(lambda a, b: a | b), "bitwise_xor": device_function(lambda a, b: a ^ b),
    },
}  # fmt: skip

UNARY: dict[str, dict[str, Any]] = {
    "f32": {
        "copy": device_function(lambda a: a), "negative": device_function(lambda a: -a),
        "absolute": device_function(lambda a: libdevice.fabsf(a)), "exp": device_function(lambda a: libdevice.expf(a)),
        "log": device_function(lambda a: libdevice.logf(a)), "sqrt": device_function(lambda a: libdevice.fsqrt_rn(a)),
        "tanh": device_function(lambda a: libdevice.tanhf(a)),
    },
    "s64": {
        "copy": device_function(lambda a: a), "negative": device_function(lambda a: types.int64(0) - a),
        "absolute": device_function(lambda a: abs(a)), "invert": device_function(lambda a: ~a),
        "invert_bool": device_function(lambda a: types.int64(a == types.int64(0))),
    },
}  # fmt: skip


@functools.cache
def _kernel(op: str, compute: str) -> Specialisation:
    """Arguments: see `plan`."""
    load, store = LOADERS[compute], STORERS["s64" if op in _COMPARISONS else compute]
    load_condition = LOADERS["s64"]
    is_where, is_unary = op == "where", op in UNARY[compute]
    function = None if is_where else (UNARY if is_unary else BINARY)[compute][op]

    @cuda.jit
    def elementwise(a, b, c, target, layout, count, code_a, code_b, code_target, step_a, step_b, step_c, step_target):
        index = uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x)
        step = uint32(cuda.gridDim.x) * uint32(cuda.blockDim.x)
        while index < count:
            at_a = uint64(index) * step_a
            at_b = uint64(index) * step_b
            at_c = uint64(index) * step_c
            at_target = uint64(index) * step_target
            if layout != uint64(0):
                at_a, at_b, at_c, at_target = _place(index, layout)
            if is_where:
                if load_condition(uint32(BOOL), c + at_c) != types.int64(0):
                    store(code_target, target + at_target, load(code_a, a + at_a))
                else:
                    store(code_target, target + at_target, load(code_b, b + at_b))
            elif is_unary:
                store(code_target, target + at_target, function(load(code_a, a + at_a)))
            else:
                store(code_target, target + at_target, function(load(code_a, a + at_a), load(code_b, b + at_b)))
            if uint32(count - index) <= step:  # the next index might not fit
                break
            index += step

    arguments = (types.uint64,) * 5 + (types.uint32,) * 4 + (types.uint64,) * 4
    constants = {"op": op, "compute": compute}
    return Specialisation(f"elementwise_{op}_{compute}", elementwise, arguments, THREADS, constants=constants)


@device_function
def _place(index, layout):
    """Byte offsets of an element in three operands and the result, by the layout that `pack_layout` made."""
    at_a = uint64(0)
    at_b = uint64(0)
    at_c = uint64(0)
    at_target = uint64(0)
    axis = layout + uint64(LAYOUT_BYTES)
    while axis != layout:
        axis -= uint64(AXIS_BYTES)
        size = uint32(load_b32(axis))
        rest = divide_u32(index, size)
        inner = uint64(uint32(index - rest * size))
        at_a += inner * load_b64(axis + uint64(8))
        at_b += inner * load_b64(axis + uint64(16))
        at_c += inner * load_b64(axis + uint64(24))
        at_target += inner * load_b64(axis + uint64(32))
        index = rest
    return at_a, at_b, at_c, at_target


def pack_layout(shape: tuple[int, ...], strides: Mapping[int, tuple[int, ...]]) -> np.ndarray:
    """The layout of a strided launch: int64, for each of `MAX_AXES` axes its size, then its stride in bytes
    in a (0), b (1), c (2) and target (3)."""
    table = np.zeros((MAX_AXES, 5), np.int64)
    table[:, 0] = 1
    first = MAX_AXES - len(shape)
    table[first:, 0] = shape
    for operand, steps in strides.items():
        table[first:, operand + 1] = steps
    return table


def plan(op: str, compute: str, count: int) -> Launch:
    """One of `UNARY`, `BINARY` (of `compute`, "f32" or "s64") or "where", for `count` elements, 1 to 2^32 - 1.

    Arguments: a, b, c (the condition of "where"; 0 where there is none), target addresses; layout: the address of
    `pack_layout`'s table on the device, or 0 where all is flat; count; the `storage.CODES` of a, b and target; and
    where all is flat, bytes from one element to the next in a, b, c and target: the item size, or 0 for one element
    that is repeated. ValueError for more elements.
    """
    if not 1 <= count < 2**32:
        raise ValueError(f"elementwise: {count} elements, must be 1 to {2**32 - 1}")
    return Launch(_kernel(op, compute), (min(MAX_BLOCKS, -(-count // THREADS)), 1, 1), (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Every kernel of this family."""
    for compute in ("f32", "s64"):
        for op in (*UNARY[compute], *BINARY[compute], "where"):
            yield _kernel(op, compute)
