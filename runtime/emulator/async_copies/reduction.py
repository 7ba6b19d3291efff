"""Read-modify-write arithmetic, of atomics (`memory/atomics.py`) and of an asynchronous copy's reductions.

Floating-point sums round once to nearest even. 16-bit floats are never flushed (``.noftz``); f32 is only where asked.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import f32_at, f64_at, i64_at, intrinsic, u32_at, u64_at
from runtime.emulator.async_copies.tensor_map import (
    BF16,
    ELEMENT_NAMES,
    F16,
    F32,
    F64,
    S32,
    S64,
    U32,
    U64,
    element_bytes,
)
from runtime.emulator.memory.careful_access import element, set_element
from runtime.emulator.memory.pointers import address_of, stack_longs
from runtime.emulator.translation.operations import call_operation, operation

ADD, MIN, MAX, INC, DEC, AND, OR, XOR, EXCH, CAS = range(10)
UNSIGNED, SIGNED, FLOAT, HALF, BRAIN, HALF_PAIR, BRAIN_PAIR = range(7)
REDUCTIONS = {"add": ADD, "min": MIN, "max": MAX, "inc": INC, "dec": DEC, "and": AND, "or": OR, "xor": XOR}


@intrinsic
def float_of_half(typing_context, bits):
    """The bits of an f16 → float32."""

    def generate(context, builder, signature, arguments):
        half = builder.bitcast(builder.trunc(arguments[0], ir.IntType(16)), ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.int64), generate


@intrinsic
def half_of_float(typing_context, value):
    """float32 → the bits of an f16, to nearest even."""

    def generate(context, builder, signature, arguments):
        half = builder.fptrunc(arguments[0], ir.HalfType())
        return builder.bitcast(half, ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def _float_of_bits(typing_context, bits):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.trunc(arguments[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.int64), generate


@intrinsic
def _bits_of_float(typing_context, value):
    def generate(context, builder, signature, arguments):
        return builder.zext(builder.bitcast(arguments[0], ir.IntType(32)), ir.IntType(64))

    return types.int64(types.float32), generate


@njit
def float_of_bf16(bits):
    """The bits of a bf16 → float32."""
    return _float_of_bits(bits << 16)


@njit
def bf16_of_float(value):
    """float32 → the bits of a bf16, to nearest even; NaN becomes the quiet one."""
    if value != value:
        return 0x7FFF
    bits = _bits_of_float(value)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@njit
def _flushed(value):
    """A float32 whose subnormals are zeros of their sign."""
    return math.copysign(_ZERO, value) if abs(value) < _SMALLEST_NORMAL else value


_ZERO, _SMALLEST_NORMAL = np.float32(0.0), np.float32(2.0**-126)


@njit
def add_float(place, operand, size, flush):
    """Adds in memory what lies at `operand`; NaN becomes the one that the hardware makes."""
    if size == 8:
        f64_at(place)[0] += f64_at(operand)[0]
        if f64_at(place)[0] != f64_at(place)[0]:
            u64_at(place)[0] = types.uint64(0x7FFFFFFFFFFFFFFF)
        return
    x, y = f32_at(place)[0], f32_at(operand)[0]
    total = _flushed(_flushed(x) + _flushed(y)) if flush else x + y
    f32_at(place)[0] = total
    if total != total:
        u32_at(place)[0] = types.uint32(0x7FFFFFFF)


@njit
def _half(code, kind, old, operand):
    """One 16-bit float."""
    x = float_of_half(types.int64(old)) if kind == HALF else float_of_bf16(types.int64(old))
    y = float_of_half(types.int64(operand)) if kind == HALF else float_of_bf16(types.int64(operand))
    if code == ADD:
        result = x + y
    elif x != x:
        result = y
    elif y != y:
        result = x
    elif x == y:  # zeros of both signs: -0 is below +0
        is_negative = types.int64(old) >> 15 != 0
        result = x if is_negative == (code == MIN) else y
    else:
        result = x if (x < y) == (code == MIN) else y
    if result != result:
        return types.uint64(0x7FFF)
    return types.uint64(half_of_float(result)) if kind == HALF else types.uint64(bf16_of_float(result))


@njit
def _integer(code, kind, old, operand, size):
    shift = types.int64(64 - 8 * size)
    if code == ADD:
        return old + operand
    if code == INC:
        return types.uint64(0) if old >= operand else old + types.uint64(1)
    if code == DEC:
        return operand if old == types.uint64(0) or old > operand else old - types.uint64(1)
    if code == AND:
        return old & operand
    if code == OR:
        return old | operand
    if code == XOR:
        return old ^ operand
    if kind == SIGNED:
        first, second = types.int64(old) << shift, types.int64(operand) << shift
        return old if (first < second) == (code == MIN) else operand
    return old if (old < operand) == (code == MIN) else operand


@njit
def result_of(code, kind, old, operand, other, size):
    """The value to store; `other` is the third operand of cas, which stores it where `old` equals `operand`."""
    if code == EXCH:
        return operand
    if code == CAS:
        return other if old == operand else old
    if kind in (HALF, BRAIN):
        return _half(code, kind, old, operand)
    if kind in (HALF_PAIR, BRAIN_PAIR):
        single, low = (HALF if kind == HALF_PAIR else BRAIN), types.uint64(0xFFFF)
        upper = _half(code, single, old >> types.uint64(16), operand >> types.uint64(16))
        return upper << types.uint64(16) | _half(code, single, old & low, operand & low)
    return _integer(code, kind, old, operand, size)


@njit
def may_reduce(code, element_type):
    """Whether PTX has a reduction of a tensor map's element type."""
    if element_type in (F32, F64):
        return code == ADD
    if element_type in (F16, BF16):
        return code <= MAX
    return element_type in (U32, S32, U64, S64)


@njit
def _kind_of(element_type):
    if element_type in (F32, F64):
        return FLOAT
    if element_type in (F16, BF16):
        return HALF if element_type == F16 else BRAIN
    return SIGNED if element_type in (S32, S64) else UNSIGNED


@operation("reduce_run", "l")
def reduce_run(warp, mask, site, arguments):
    """`arguments` is the address of int64[5]: operation, element type, addresses of target and source, elements."""
    given = i64_at(arguments)
    code, size, kind = given[0], element_bytes(given[1]), _kind_of(given[1])
    for index in range(given[4]):
        at, of = given[2] + index * size, given[3] + index * size
        if kind == FLOAT and code == ADD:
            add_float(at, of, size, False)
        else:
            old, operand = element(at, size), element(of, size)
            set_element(at, size, result_of(code, kind, old, operand, operand, size))
    return 0


@njit
def reduce(warp, site, reducer, operation, element_type, target, source, count):
    """Calls `reduce_run` by its address: a kernel without reductions does not compile it."""
    arguments = stack_longs(5)
    arguments[0], arguments[1], arguments[2] = operation, element_type, target
    arguments[3], arguments[4] = source, count
    return call_operation(reducer, warp, site, address_of(arguments))


def reduction_of(parts: tuple[str, ...]) -> tuple[int, int] | None:
    """(operation, element type) that an opcode's parts name, or None."""
    operations = [REDUCTIONS[part] for part in parts if part in REDUCTIONS]
    names = [part.replace("b", "u") if part in ("b32", "b64") else part for part in parts]
    element_types = [ELEMENT_NAMES.index(name) for name in names if name in ELEMENT_NAMES[2:]]
    if len(operations) != 1 or len(element_types) != 1:
        return None
    found = operations[0], element_types[0]
    return found if may_reduce.py_func(*found) else None
