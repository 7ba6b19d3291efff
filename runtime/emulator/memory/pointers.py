"""Intrinsics at addresses, for the compiled operations: atomics, copies, calls, and sixteen shadow entries at once.

LLVM's own vectorised loops only begin to pay beyond what a warp touches at a time: the race checker's ranges
(`races/rules.py`) go by chunks. Pointers are `numba_kernels.pointers`'.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from numba_kernels.cache import njit
from numba_kernels.pointers import intrinsic, u8_at

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic
def address_of(typing_context, pointer):
    """A ``CPointer`` → its address as int64."""

    def generate(context, builder, signature, arguments):
        return builder.ptrtoint(arguments[0], _I64)

    return types.int64(pointer), generate


@intrinsic
def addresses_of(typing_context, pointers):
    """The addresses of a tuple of at most 8 ``CPointer``s as int64, and zeros up to the eighth."""
    count, result = len(pointers), types.UniTuple(types.int64, 8)

    def generate(context, builder, signature, arguments):
        found = [builder.ptrtoint(each, _I64) for each in cgutils.unpack_tuple(builder, arguments[0], count)]
        return context.make_tuple(builder, result, [*found, *[ir.Constant(_I64, 0)] * (8 - count)])

    return result(pointers), generate


def _atomic(kind: str, element: Any) -> Any:
    """``f(address, value) -> old``: one read-modify-write, sequentially consistent."""

    @intrinsic
    def update(typing_context, address, value):
        def generate(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], context.get_value_type(element).as_pointer())
            return builder.atomic_rmw(kind, pointer, arguments[1], "seq_cst")

        return element(types.int64, element), generate

    return update


atomic_add_u64 = _atomic("add", types.uint64)


@intrinsic
def popcount(typing_context, value):
    """The number of set bits of an integer, as int32."""

    def generate(context, builder, signature, arguments):
        bits = builder.ctpop(arguments[0])
        width = bits.type.width
        return bits if width == 32 else builder.trunc(bits, _I32) if width > 32 else builder.zext(bits, _I32)

    return types.int32(value), generate


@intrinsic
def trailing_zeros(typing_context, value):
    """The index of the lowest set bit of an integer, as int32; its width for 0."""

    def generate(context, builder, signature, arguments):
        bits = builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))
        width = bits.type.width
        return bits if width == 32 else builder.trunc(bits, _I32) if width > 32 else builder.zext(bits, _I32)

    return types.int32(value), generate


def _memory_intrinsic(name: str) -> Any:
    @intrinsic
    def move(typing_context, target, source, count):
        def generate(context, builder, signature, arguments):
            byte = ir.IntType(8).as_pointer()
            function = builder.module.declare_intrinsic(name, [byte, byte, _I64])
            to, of = (builder.inttoptr(argument, byte) for argument in arguments[:2])
            builder.call(function, [to, of, arguments[2], ir.Constant(ir.IntType(1), 0)])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    return move


copy_bytes = _memory_intrinsic("llvm.memcpy")  # copy_bytes(target, source, count): no overlap


@intrinsic
def fill_bytes(typing_context, target, value, count):
    """``memset(target, value, count)``; `value` is a uint8."""

    def generate(context, builder, signature, arguments):
        byte = ir.IntType(8).as_pointer()
        function = builder.module.declare_intrinsic("llvm.memset", [byte, _I64])
        to = builder.inttoptr(arguments[0], byte)
        builder.call(function, [to, arguments[1], arguments[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.uint8, types.int64), generate


@intrinsic
def call_run(typing_context, function, warp):
    """Calls a translated kernel, ``int32 run(warp)``, by its address."""

    def generate(context, builder, signature, arguments):
        type_ = ir.FunctionType(_I32, [_I64.as_pointer()])
        run = builder.inttoptr(arguments[0], type_.as_pointer())
        return builder.call(run, arguments[1:])

    return types.int32(types.int64, warp), generate


@intrinsic(prefer_literal=True)
def stack_longs(typing_context, count):
    """Room for a literal number of int64 in the function's frame, as ``CPointer(int64)``; not cleared."""
    if not isinstance(count, types.IntegerLiteral):
        raise TypeError("stack_longs wants a literal")
    number = count.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(64), number))
        return builder.bitcast(room, ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(count), generate


@njit
def bytes_equal(first, second, size):
    """Whether `size` bytes at two addresses are the same."""
    count = 0
    while count < size and u8_at(first)[count] == u8_at(second)[count]:
        count += 1
    return count == size


CHUNK = 16
_WORD, _LONG = ir.IntType(32), ir.IntType(64)
_WORDS, _LONGS = ir.VectorType(_WORD, CHUNK), ir.VectorType(_LONG, CHUNK)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = kind.element.width // 8
    return value


def _store(builder: Any, value: Any, address: Any) -> None:
    pointer = builder.inttoptr(address, value.type.as_pointer())
    builder.store(value, pointer).align = value.type.element.width // 8


def _splat(builder: Any, scalar: Any, kind: Any) -> Any:
    scalar = builder.trunc(scalar, kind.element) if kind.element.width < scalar.type.width else scalar
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_WORD, 0))
    zeros = ir.Constant(ir.VectorType(_WORD, CHUNK), None)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _intrinsic(count: int, result: Any, body: Any) -> Any:
    """An intrinsic of `count` int64 arguments."""
    signature = result(*(types.int64,) * count)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = body(builder, *arguments)
        return context.get_dummy_value() if made is None else made

    if count == 1:

        @intrinsic
        def one(typing_context, a):
            return signature, generate

        return one
    if count == 2:

        @intrinsic
        def two(typing_context, a, b):
            return signature, generate

        return two

    @intrinsic
    def three(typing_context, a, b, c):
        return signature, generate

    return three


def _highest_long(builder: Any, address: Any) -> Any:
    return _call(builder, f"llvm.vector.reduce.umax.v{CHUNK}i64", _LONG, [_load(builder, address, _LONGS)])


def _highest_word(builder: Any, address: Any) -> Any:
    found = _call(builder, f"llvm.vector.reduce.umax.v{CHUNK}i32", _WORD, [_load(builder, address, _WORDS)])
    return builder.zext(found, _LONG)


def _fill_words(builder: Any, address: Any, value: Any) -> None:
    _store(builder, _splat(builder, value, _WORDS), address)


def _fill_longs(builder: Any, address: Any, value: Any) -> None:
    _store(builder, _splat(builder, value, _LONGS), address)


def _raise_words(builder: Any, address: Any, value: Any) -> None:
    old, new = _load(builder, address, _WORDS), _splat(builder, value, _WORDS)
    _store(builder, _call(builder, f"llvm.umax.v{CHUNK}i32", _WORDS, [old, new]), address)


def _count_longs(builder: Any, address: Any, first: Any, shift: Any) -> None:
    """first + (index >> shift) in each entry."""
    steps = ir.Constant(_LONGS, [ir.Constant(_LONG, index) for index in range(CHUNK)])
    steps = builder.lshr(steps, _splat(builder, shift, _LONGS))
    _store(builder, builder.add(_splat(builder, first, _LONGS), steps), address)


highest_16_longs = _intrinsic(1, types.uint64, _highest_long)
highest_16_words = _intrinsic(1, types.int64, _highest_word)
fill_16_words = _intrinsic(2, types.void, _fill_words)
fill_16_longs = _intrinsic(2, types.void, _fill_longs)
raise_16_words = _intrinsic(2, types.void, _raise_words)
count_16_longs = _intrinsic(3, types.void, _count_longs)
