"""f16, bf16 and their pairs (PTX ISA, "Half Precision Floating-Point Instructions"), each result rounded once.

Sums and products of two 16-bit floats are computed in float32, whose 24 bits are enough for a second rounding to do no
harm; fma goes through float64 rounded to odd. A NaN result is 0x7fff.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from runtime.device.emulator.arithmetic.approximate import exp2, moved, scaled
from runtime.device.emulator.arithmetic.by_type import by_type
from runtime.device.emulator.arithmetic.floats import extremum_of, finish, relu, saturate
from runtime.device.emulator.arithmetic.rounding import ROUNDINGS, narrow_to_odd, rounded, sum_to_odd
from runtime.device.emulator.arithmetic.small_floats import narrow, widen
from runtime.device.emulator.translation.lowering import Lowering
from runtime.device.emulator.translation.modifiers import Modifiers
from runtime.device.emulator.translation.ptx import Operand
from runtime.device.emulator.translation.vectors import F32, F64, I16, I32, Builder, Value, like, shared, splat, unary

KINDS = ("f16", "bf16", "f16x2", "bf16x2")


# --- operands ---


def halves(low: Lowering, operand: Operand, kind: str) -> list[Value]:
    """The 16-bit floats of an operand as ``<32 x i16>``: one, or the lower and the upper of a pair."""
    if not kind.endswith("x2"):
        return [low.value(operand, kind)]
    b, both = low.builder, low.value(operand, "b32")
    return [b.trunc(both, I16), b.trunc(b.lshr(both, splat(I32, 16)), I16)]


def pack(b: Builder, parts: list[Value]) -> Value:
    """The inverse: ``<32 x i16>``, or two of them as ``<32 x i32>``."""
    if len(parts) == 1:
        return parts[0]
    return b.or_(b.zext(parts[0], I32), b.shl(b.zext(parts[1], I32), splat(I32, 16)))


def format_of(kind: str) -> str:
    return kind.removesuffix("x2")


def flush_half(b: Builder, x: Value) -> Value:
    """A subnormal f16 → a zero of its sign."""
    is_small = b.icmp_unsigned("==", b.and_(x, splat(I16, 0x7C00)), splat(I16, 0))
    return b.select(is_small, b.and_(x, splat(I16, 0x8000)), x)


def widened(low: Lowering, operand: Operand, kind: str, ftz: bool = False) -> list[Value]:
    b = low.builder
    parts = halves(low, operand, kind)
    return [widen(b, flush_half(b, part) if ftz else part, format_of(kind)) for part in parts]


def narrowed(b: Builder, x: Value, kind: str, ftz: bool = False) -> Value:
    result = b.trunc(narrow(b, x, format_of(kind)), I16)
    return flush_half(b, result) if ftz else result


def fused(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """x · y + z of 16-bit floats in float32, rounded to odd: float32 results that round once more as if exact."""

    def body(b: Builder, x: Value, y: Value, z: Value) -> Value:
        x, y, z = (b.fpext(value, F64) for value in (x, y, z))
        return narrow_to_odd(b, sum_to_odd(b, b.fmul(x, y), z))

    return shared(b, "xserv.fma.odd", F32, [x, y, z], body)


# --- instructions ---


@by_type("add", "sub", "mul", "fma", kinds=KINDS)
def arithmetic(low: Lowering, mods: Modifiers, kind: str) -> None:
    b, name = low.builder, mods.name
    if mods.take("f32"):
        _mixed(low, mods, kind)
        return
    mods.one_of(("rn",), None if name == "fma" else "rn")
    is_f16 = format_of(kind) == "f16"
    ftz, sat = is_f16 and mods.take("ftz"), is_f16 and mods.take("sat")
    rectifies = name == "fma" and mods.take("relu")
    to, *sources = mods.operands(4 if name == "fma" else 3)
    results = []
    for values in zip(*(widened(low, source, kind, ftz) for source in sources)):
        if name == "fma":
            result = fused(b, *values)
        else:
            result = {"add": b.fadd, "sub": b.fsub, "mul": b.fmul}[name](*values)
        if sat:
            result = saturate(b, result)
        if rectifies:
            result = relu(b, result)
        results.append(narrowed(b, result, kind, ftz))
    low.write(to, pack(b, results))


def _mixed(low: Lowering, mods: Modifiers, kind: str) -> None:
    """add, sub and fma with 16-bit factors and a float32 addend: ``add.f32.bf16 d, a, c``."""
    b, name = low.builder, mods.name
    if kind not in ("f16", "bf16") or name == "mul":
        raise mods.refuse(f".f32.{kind}")
    mode = mods.one_of(ROUNDINGS, None if name == "fma" else "rn")
    sat = mods.take("sat")
    to, *sources = mods.operands(4 if name == "fma" else 3)
    values = [widened(low, source, kind)[0] for source in sources[:-1]]
    values.append(low.value(sources[-1], "f32"))
    operation = {"add": "fadd", "sub": "fsub", "fma": "fma"}[name]
    low.write(to, finish(b, rounded(b, operation, F32, values, mode), False, sat))


@by_type("abs", "neg", kinds=KINDS)
def sign(low: Lowering, mods: Modifiers, kind: str) -> None:
    b = low.builder
    ftz = format_of(kind) == "f16" and mods.take("ftz")
    to, source = mods.operands(2)
    results = []
    for part in halves(low, source, kind):
        part = flush_half(b, part) if ftz else part
        top = splat(I16, 0x8000)
        results.append(b.and_(part, b.not_(top)) if mods.name == "abs" else b.xor(part, top))
    low.write(to, pack(b, results))


@by_type("min", "max", kinds=KINDS)
def extremum(low: Lowering, mods: Modifiers, kind: str) -> None:
    b = low.builder
    ftz, keeps_nan = format_of(kind) == "f16" and mods.take("ftz"), mods.take("NaN")
    xorsign = mods.take("xorsign")
    if xorsign != mods.take("abs"):
        raise mods.refuse(".xorsign goes with .abs")
    to, *sources = mods.operands(3)
    results = []
    for values in zip(*(widened(low, source, kind, ftz) for source in sources)):
        result = extremum_of(b, mods.name, list(values), keeps_nan, xorsign, xorsign)
        results.append(narrowed(b, result, kind))
    low.write(to, pack(b, results))


@by_type("ex2", "tanh", kinds=KINDS)
def function(low: Lowering, mods: Modifiers, kind: str) -> None:
    """ex2 to 2**-9.9 (f16) or 2**-7 (bf16) relative, tanh to 2**-10.987 or 2**-8 absolute: near the edge of it."""
    b, is_f16 = low.builder, format_of(kind) == "f16"
    if not mods.take("approx"):
        raise mods.refuse("only .approx")
    ftz = mods.name == "ex2" and mods.take("ftz")
    if mods.name == "ex2" and not is_f16 and not ftz:
        raise mods.refuse("of bf16 only with .ftz")
    to, source = mods.operands(2)
    results = []
    for value in widened(low, source, kind, ftz and is_f16):
        body = _power(_EX2[format_of(kind)]) if mods.name == "ex2" else _tangent(_TANH[format_of(kind)])
        result = shared(b, f"xserv.{mods.name}.{format_of(kind)}", F32, [value], body)
        result = narrowed(b, result, kind)
        results.append(_flushed(b, result, is_f16) if ftz else result)
    low.write(to, pack(b, results))


def _flushed(b: Builder, x: Value, is_f16: bool) -> Value:
    if is_f16:
        return flush_half(b, x)
    is_small = b.icmp_unsigned("==", b.and_(x, splat(I16, 0x7F80)), splat(I16, 0))
    return b.select(is_small, b.and_(x, splat(I16, 0x8000)), x)


# How far results are moved; rounding to the format adds 2**-11 or 2**-8 relative, of numbers below 1 at most half of it
# absolute.
_EX2 = {"f16": 2.0**-11, "bf16": 0.9 * 2.0**-8}
_TANH = {"f16": 2.0**-12, "bf16": 0.9 * 2.0**-9}


def _power(relative: float) -> Callable[..., Value]:
    def body(b: Builder, x: Value) -> Value:
        wide = b.fpext(x, F64)
        result = narrow_to_odd(b, scaled(b, exp2(b, wide), relative))
        return b.select(b.fcmp_unordered("uno", x, x), x, result)

    return body


def _tangent(distance: float) -> Callable[..., Value]:
    def body(b: Builder, x: Value) -> Value:
        exact = unary(b, "tanh", b.fpext(x, F64))
        result = moved(b, exact, -distance)
        is_infinite = b.fcmp_ordered("==", unary(b, "fabs", x), like(x, math.inf))
        return narrow_to_odd(b, b.select(is_infinite, exact, result))

    return body
