"""Elementwise operations behind Tensor's operators: any strides, broadcasting, any pair of dtypes.

    out[i] = f(a[i])    out[i] = f(a[i], b[i])    out[i] = c[i] ? a[i] : b[i]

Operands are read as float32 (floating point) or int64 (integers, bool), computed in that, and rounded or wrapped once
into out's type: `intrinsics.storage` has the conversions. Where every operand is contiguous or a single element,
offsets are multiples of the index (flat); else a table in device memory gives up to `MAX_AXES` axes, each with a stride
in bytes for every operand, 0 where it is broadcast. One thread an element.

These are for glue: what carries a model's weight has kernels of its own. They are bound by bandwidth where the
innermost stride is that of neighbours, and else by the sectors that strides waste.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numba import cuda, types, uint32, uint64
from numba.cuda import libdevice

from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.integer import divide_u32
from numba_kernels.cuda.intrinsics.math import divide, maximum_nan, minimum_nan
from numba_kernels.cuda.intrinsics.memory import load_b32, load_b64
from numba_kernels.cuda.intrinsics.storage import (
    DTYPES,
    FLOATS,
    STORED_BYTES,
    as_float,
    computes_in,
    wide_loader,
    wide_storer,
)
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
def _kernel(op: str, compute: str, dtypes: tuple[str, ...], out: str, is_flat: bool) -> Specialisation:
    """Arguments: see `plan`. `dtypes` are the operands'; of "where" the condition comes first."""
    num_operands = len(dtypes)
    load_a, load_b, load_c = (wide_loader(dtype) for dtype in (*dtypes, "f32", "f32")[:3])
    lift_a, lift_b = (_lift(dtype, compute) for dtype in (*dtypes[-2:], "f32")[:2])
    is_where, is_unary = op == "where", num_operands == 1
    is_comparison = op in _COMPARISONS
    function = None if is_where else (UNARY if is_unary else BINARY)[compute][op]
    store = wide_storer(out, "s64" if is_comparison else compute)
    out_bytes = uint64(STORED_BYTES[out])

    @cuda.jit
    def elementwise(a, b, c, target, layout, count, step_a, step_b, step_c):
        index = uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x)
        step = uint32(cuda.gridDim.x) * uint32(cuda.blockDim.x)
        while index < count:
            at_a = uint64(index) * step_a
            at_b = uint64(index) * step_b
            at_c = uint64(index) * step_c
            at_target = uint64(index) * out_bytes
            if not is_flat:
                at_a, at_b, at_c, at_target = _place(index, layout)
            if is_where:
                if load_a(a + at_a) != types.int64(0):
                    store(target + at_target, lift_a(load_b(b + at_b)))
                else:
                    store(target + at_target, lift_b(load_c(c + at_c)))
            elif is_unary:
                store(target + at_target, function(lift_a(load_a(a + at_a))))
            else:
                store(target + at_target, function(lift_a(load_a(a + at_a)), lift_b(load_b(b + at_b))))
            if uint32(count - index) <= step:  # the next index might not fit
                break
            index += step

    name = f"{op}_{'_'.join(dtypes)}_to_{out}_{'flat' if is_flat else 'strided'}"
    arguments = (types.uint64,) * 5 + (types.uint32,) + (types.uint64,) * 3
    constants = {"op": op, "dtypes": dtypes, "out": out, "is_flat": is_flat}
    return Specialisation(name, elementwise, arguments, THREADS, constants=constants)


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


@functools.cache
def _lift(dtype: str, compute: str) -> Any:
    """A device function from what the dtype is read as to what is computed in."""
    return as_float(computes_in(dtype)) if compute == "f32" else device_function(lambda value: value)


def pack_layout(shape: tuple[int, ...], strides: Sequence[tuple[int, ...]]) -> np.ndarray:
    """What a strided launch takes as its layout: int64, for each of `MAX_AXES` axes its size, then its stride in bytes
    in a, b, c and the result (of those that there are, the result last)."""
    table = np.zeros((MAX_AXES, 5), np.int64)
    table[:, 0] = 1
    for axis, size in enumerate(shape, MAX_AXES - len(shape)):
        table[axis, 0] = size
    for number, steps in enumerate(strides):
        column = 4 if number == len(strides) - 1 else number + 1
        for axis, step in enumerate(steps, MAX_AXES - len(steps)):
            table[axis, column] = step
    return table


def plan(op: str, compute: str, dtypes: tuple[str, ...], out: str, count: int, *, is_flat: bool) -> Launch:
    """One of `UNARY`, `BINARY` (of `compute`, "f32" or "s64") or "where", for `count` elements, 1 to 2^32 - 1.

    Arguments: a, b, c (0 where there is none), target addresses; layout (the address of `pack_layout`'s table on the
    device; 0 if flat); count; and where it is flat, bytes from one element to the next in a, b and c: the item size, or
    0 for one element that is repeated. ValueError for more elements.
    """
    if not 1 <= count < 2**32:
        raise ValueError(f"elementwise: {count} elements, must be 1 to {2**32 - 1}")
    blocks = min(MAX_BLOCKS, -(-count // THREADS))
    return Launch(_kernel(op, compute, dtypes, out, is_flat), (blocks, 1, 1), (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Casts between all dtypes, and each operation on float32, bfloat16 and int64."""
    for source in DTYPES:
        for target in DTYPES:
            yield _kernel("copy", "f32" if target in FLOATS else computes_in(source), (source,), target, True)
    for dtype in ("f32", "bf16", "s64"):
        compute = computes_in(dtype)
        yield _kernel("where", compute, ("bool", dtype, dtype), dtype, False)
        for op in UNARY[compute]:
            yield _kernel(op, compute, (dtype,), dtype, False)
        for op in BINARY[compute]:
            yield _kernel(op, compute, (dtype, dtype), "bool" if op in _COMPARISONS else dtype, False)
