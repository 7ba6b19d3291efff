"""Floating-point arithmetic in each of IEEE 754's rounding directions, one rounding each, on vectors of lanes.

To nearest even is the machine's own mode: plain IR. The others change the machine's rounding direction around one
instruction, in a function of their own, so that they are exact for every operation and type on every host.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from runtime.emulator.translation.vectors import (
    F32,
    F64,
    I32,
    I64,
    WORD,
    Builder,
    Value,
    intrinsic,
    like,
    shared,
)

ROUNDINGS = ("rn", "rz", "rm", "rp")
_DIRECTIONS = {"rz": 0, "rn": 1, "rp": 2, "rm": 3}  # as llvm.set.rounding counts them


def rounded(builder: Builder, name: str, result: object, arguments: Sequence[Value], mode: str) -> Value:
    """``name(*arguments)`` as `result`, rounded once; names: fadd fsub fmul fdiv fma sqrt fptrunc."""
    if mode == "rn":
        if name in ("fma", "sqrt"):
            return intrinsic(builder, name, result, arguments)
        if name == "fptrunc":
            return builder.fptrunc(arguments[0], result)
        return getattr(builder, name)(*arguments)
    types = [result, arguments[0].type] if name == "fptrunc" else [result]
    text = ".".join(str(type_) for type_ in types)

    def body(b: Builder, *parameters: Value) -> Value:
        module = b.module
        words = [ir.MetaDataString(module, word) for word in ("round.dynamic", "fpexcept.strict")]
        turn(b, mode)
        value = intrinsic(b, f"experimental.constrained.{name}", result, [*parameters, *words], types=types)
        turn(b, "rn")
        return value

    def turn(b: Builder, mode: str) -> None:
        function = b.module.globals.get("llvm.set.rounding")
        if function is None:
            function = ir.Function(b.module, ir.FunctionType(ir.VoidType(), [WORD]), "llvm.set.rounding")
        b.call(function, [ir.Constant(WORD, _DIRECTIONS[mode])])

    return shared(builder, f"xserv.{name}.{mode}.{text}", result, arguments, body, strict=True)


def _to_odd(b: Builder, narrow: Value, error: Value, bits: object) -> Value:
    """A result rounded to nearest → rounded to odd: inexact ones end in an odd bit.

    `error` is the exact result minus `narrow`; only its sign counts.
    """
    word = b.bitcast(narrow, bits)
    one, zero = like(word, 1), like(error, 0)
    is_even = b.icmp_unsigned("==", b.and_(word, one), like(word, 0))
    inexact = b.fcmp_ordered("!=", error, zero)
    grows = b.xor(b.fcmp_ordered(">", error, zero), b.icmp_signed("<", word, like(word, 0)))  # in magnitude
    moved = b.add(word, b.select(grows, one, like(word, -1)))
    return b.bitcast(b.select(b.and_(is_even, inexact), moved, word), narrow.type)


def narrow_to_odd(b: Builder, x: Value) -> Value:
    """float64 → float32 rounded to odd: a second rounding, to 22 bits or less, then gives what one alone would."""
    narrow = b.fptrunc(x, F32)
    return _to_odd(b, narrow, b.fsub(x, b.fpext(narrow, F64)), I32)


def sum_to_odd(b: Builder, x: Value, y: Value) -> Value:
    """x + y of float64 rounded to odd, by Knuth's two-sum. Values far from overflow."""
    total = b.fadd(x, y)
    part = b.fsub(total, x)
    error = b.fadd(b.fsub(x, b.fsub(total, part)), b.fsub(y, part))
    return _to_odd(b, total, error, I64)
