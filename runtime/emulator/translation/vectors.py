"""Vectors of 32 lanes in LLVM IR: types, constants, intrinsics, and functions that a module holds once.

An instruction that takes more than a few IR instructions becomes a function of the module (`shared`), made when the
first instruction of its kind is translated and called from then on: the translated text stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

LANES = 32
BIT, BYTE, HALF, WORD, LONG = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))


def lanes(element: Any) -> Any:
    """``<32 x element>``."""
    return ir.VectorType(element, LANES)


I1, I8, I16, I32, I64 = (lanes(element) for element in (BIT, BYTE, HALF, WORD, LONG))
F16, F32, F64 = lanes(ir.HalfType()), lanes(ir.FloatType()), lanes(ir.DoubleType())
INTEGERS = {1: I1, 8: I8, 16: I16, 32: I32, 64: I64}

Builder = Any
Value = Any


_Constant: Any = ir.Constant


class _Splat(_Constant):  # type: ignore[misc]
    """A constant with the same value in each lane, in LLVM's short notation: the text is a third as long with it."""

    def __init__(self, type_: Any, value: float) -> None:
        element = ir.Constant(type_.element, value)
        self.type, self.constant = type_, [element] * type_.count
        self._text = f"splat ({element})"

    def get_reference(self) -> str:
        return self._text

    def _to_string(self) -> str:
        return f"{self.type} {self._text}"


def splat(type_: Any, value: float) -> Value:
    """The constant vector of `type_` with `value` in each lane; an integer is taken modulo the width."""
    if isinstance(type_.element, ir.IntType):
        value = int(value) % (1 << type_.element.width)
    return _Splat(type_, value)


def like(vector: Value, value: float) -> Value:
    return splat(vector.type, value)


def width(vector: Value) -> int:
    """Bits of an integer vector's element."""
    return int(vector.type.element.width)


def mask_of(builder: Builder, truths: Value) -> Value:
    """``<32 x i1>`` → the i32 mask, lane 0 in bit 0."""
    return builder.bitcast(truths, WORD)


def truths_of(builder: Builder, mask: Value) -> Value:
    return builder.bitcast(mask, I1)


def _suffix(type_: Any) -> str:
    if isinstance(type_, ir.VectorType):
        return f"v{type_.count}{_suffix(type_.element)}"
    if isinstance(type_, ir.IntType):
        return f"i{type_.width}"
    return {"half": "f16", "float": "f32", "double": "f64"}[str(type_)]


def intrinsic(
    builder: Builder, name: str, result: Any, arguments: Sequence[Value], *, types: Sequence[Any] = ()
) -> Value:
    """Calls ``llvm.<name>``, overloaded on `types` (on the result's type where none are given)."""
    full = ".".join(["llvm", name, *map(_suffix, types or (result,))])
    module = builder.module
    function = module.globals.get(full)
    if function is None:
        function = ir.Function(module, ir.FunctionType(result, [argument.type for argument in arguments]), full)
    return builder.call(function, list(arguments))


def unary(builder: Builder, name: str, x: Value) -> Value:
    """An intrinsic of one vector: ctpop, bitreverse, sqrt, floor, fabs …"""
    return intrinsic(builder, name, x.type, [x])


def binary(builder: Builder, name: str, x: Value, y: Value) -> Value:
    """An intrinsic of two vectors: umin, smax, sadd.sat …"""
    return intrinsic(builder, name, x.type, [x, y])


def shared(
    builder: Builder,
    name: str,
    result: Any,
    arguments: Sequence[Value],
    body: Callable[..., Value],
    strict: bool = False,
) -> Value:
    """Calls the module's function `name`; ``body(builder, *parameters)`` makes it where the module has none yet.

    `strict` keeps floating-point instructions in place: for functions that change the rounding mode.
    """
    module = builder.module
    function = module.globals.get(name)
    if function is None:
        function = ir.Function(module, ir.FunctionType(result, [argument.type for argument in arguments]), name)
        function.linkage = "internal"
        if strict:
            set.add(function.attributes, "strictfp")  # llvmlite has only some attributes by name
        inside = ir.IRBuilder(function.append_basic_block("entry"))
        inside.ret(body(inside, *function.args))
    return builder.call(function, list(arguments))
