"""Reductions of an asynchronous copy: ``target[i] = op(target[i], source[i])`` for runs of elements.

Element types are those of tensor_map.py. 16-bit floats are added, compared and rounded once (to nearest even), as
``.noftz`` requires; f32 keeps subnormals.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic as _intrinsic

from numba_kernels.cache import njit
from numba_kernels.pointers import f32_at, f64_at, i32_at, i64_at, u16_at, u32_at, u64_at
from runtime.emulator.async_copies.tensor_map import BF16, F16, F32, F64, S32, S64, U32, U64
from runtime.emulator.memory.pointers import address_of, stack_longs
from runtime.emulator.translation.operations import call_operation, operation

intrinsic: Any = _intrinsic  # numba's stub takes the typing context for an argument of the call

ADD, MIN, MAX, INC, DEC, AND, OR, XOR = range(8)
REDUCTIONS = {"add": ADD, "min": MIN, "max": MAX, "inc": INC, "dec": DEC, "and": AND, "or": OR, "xor": XOR}
REDUCTION_TYPES = {
    "u32": U32, "s32": S32, "u64": U64, "s64": S64, "f16": F16, "bf16": BF16, "f32": F32, "f64": F64,
    "b32": U32, "b64": U64,
}  # fmt: skip


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
def _float(operation, a, b):
    if operation == ADD:
        return a + b
    if a != a:
        return b
    if b != b:
        return a
    return min(a, b) if operation == MIN else max(a, b)


@njit
def _integer(operation, a, b):
    """For u32 (in int64), s32 and s64."""
    if operation == ADD:
        return a + b
    if operation == MIN:
        return min(a, b)
    if operation == MAX:
        return max(a, b)
    if operation == INC:
        return 0 if a >= b else a + 1
    if operation == DEC:
        return b if a == 0 or a > b else a - 1
    if operation == AND:
        return a & b
    if operation == OR:
        return a | b
    return a ^ b


@operation("reduce_run", "l")
def reduce_run(warp, mask, site, arguments):
    """`arguments` is the address of int64[5]: operation, element type, addresses of target and source, elements."""
    given = i64_at(arguments)
    operation, element_type, target, source, count = given[0], given[1], given[2], given[3], given[4]
    if element_type == U32:
        for index in range(count):
            a, b = types.int64(u32_at(target)[index]), types.int64(u32_at(source)[index])
            u32_at(target)[index] = types.uint32(_integer(operation, a, b))
    elif element_type == S32:
        for index in range(count):
            a, b = types.int64(i32_at(target)[index]), types.int64(i32_at(source)[index])
            i32_at(target)[index] = types.int32(_integer(operation, a, b))
    elif element_type == S64:
        for index in range(count):
            i64_at(target)[index] = _integer(operation, i64_at(target)[index], i64_at(source)[index])
    elif element_type == U64:
        for index in range(count):
            x, y = u64_at(target)[index], u64_at(source)[index]
            if operation == MIN:
                u64_at(target)[index] = min(x, y)
            elif operation == MAX:
                u64_at(target)[index] = max(x, y)
            else:
                i64_at(target)[index] = _integer(operation, i64_at(target)[index], i64_at(source)[index])
    elif element_type == F32:
        for index in range(count):
            f32_at(target)[index] = _float(operation, f32_at(target)[index], f32_at(source)[index])
    elif element_type == F64:
        for index in range(count):
            f64_at(target)[index] = _float(operation, f64_at(target)[index], f64_at(source)[index])
    elif element_type == F16:
        for index in range(count):
            p, q = u16_at(target)[index], u16_at(source)[index]
            if operation <= MAX:
                u16_at(target)[index] = half_of_float(_float(operation, float_of_half(p), float_of_half(q)))
            else:
                u16_at(target)[index] = types.uint16(_integer(operation, types.int64(p), types.int64(q)))
    elif element_type == BF16:
        for index in range(count):
            p, q = types.int64(u16_at(target)[index]), types.int64(u16_at(source)[index])
            if operation <= MAX:
                u16_at(target)[index] = types.uint16(
                    bf16_of_float(_float(operation, float_of_bf16(p), float_of_bf16(q)))
                )
            else:
                u16_at(target)[index] = types.uint16(_integer(operation, p, q))
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
    element_types = [REDUCTION_TYPES[part] for part in parts if part in REDUCTION_TYPES]
    if len(operations) != 1 or len(element_types) != 1:
        return None
    operation, element_type = operations[0], element_types[0]
    floating = element_type in (F16, BF16, F32, F64)
    if (floating and operation > MAX) or (element_type in (F32, F64) and operation != ADD):
        return None
    return operation, element_type
