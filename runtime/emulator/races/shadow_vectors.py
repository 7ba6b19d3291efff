"""Sixteen shadow entries at once, as LLVM vectors, for the ranges that a warp touches (`rules.py`).

LLVM's own vectorised loops only begin to pay beyond what a warp touches at a time.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

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
