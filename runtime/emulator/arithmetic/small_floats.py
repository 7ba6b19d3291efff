"""The small floating-point formats: conversion of float32 to a format's code and back, and arithmetic of f16 and bf16.

One description serves f16, bf16, tf32 and both formats of fp8, rounded in any direction, in integer arithmetic on
vectors of lanes, exact for normal and subnormal numbers alike. add, sub, mul and fma of f16 and bf16, alone and in
pairs (PTX ISA, "Half Precision Floating-Point Instructions"), are computed in float64, rounded to odd, and then once to
nearest even. A NaN result is the canonical 0x7fff.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.emulator.arithmetic.floats import narrow_to_odd, saturate, sum_to_odd
from runtime.emulator.translation.forms import Modifiers
from runtime.emulator.translation.vectors import (
    F16,
    F32,
    F64,
    I1,
    I16,
    I32,
    Builder,
    Value,
    binary,
    like,
    shared,
    splat,
)

ROUNDINGS = ("rn", "rna", "rz", "rm", "rp")


@dataclass(frozen=True, slots=True)
class Format:
    """A sign, an exponent of `bias` and `mantissa` stored bits, `bits` in all; `largest` is the greatest finite code.

    `nan` is the code that NaN gives. The code after `largest` is infinity, in e4m3 NaN.
    """

    name: str
    bits: int
    mantissa: int
    bias: int
    largest: int
    nan: int


FORMATS = {
    format_.name: format_
    for format_ in (
        Format("f16", 16, 10, 15, 0x7BFF, 0x7FFF),
        Format("bf16", 16, 7, 127, 0x7F7F, 0x7FFF),
        Format("tf32", 19, 10, 127, 0x3FBFF, 0x3FFFF),
        Format("e4m3", 8, 3, 7, 0x7E, 0x7F),
        Format("e5m2", 8, 2, 15, 0x7B, 0x7F),
    )
}


def narrow(
    builder: Builder, x: Value, name: str, mode: str = "rn", satfinite: bool = False, relu: bool = False
) -> Value:
    """float32 → the code of a format in an i32; `relu` makes negative values and −0 a +0."""
    if (name, mode, satfinite) == ("f16", "rn", False):
        half = builder.bitcast(builder.fptrunc(x, F16), I16)
        result = builder.select(builder.fcmp_unordered("uno", x, x), splat(I16, 0x7FFF), half)
        result = builder.zext(result, I32)
    else:
        format_ = FORMATS[name]
        full_name = f"xserv.narrow.{name}.{mode}{'.satfinite' * satfinite}"
        result = shared(builder, full_name, I32, [x], lambda b, x: _narrow(b, x, format_, mode, satfinite))
    if relu:
        negative = builder.fcmp_ordered("<=", x, like(x, 0.0))
        result = builder.select(negative, like(result, 0), result)
    return result


def _narrow(b: Builder, x: Value, to: Format, mode: str, satfinite: bool) -> Value:
    def at(value: int) -> Value:
        return splat(I32, value)

    word = b.bitcast(x, I32)
    magnitude = b.and_(word, at(0x7FFFFFFF))
    is_negative = b.icmp_signed("<", word, at(0))
    exponent = b.lshr(magnitude, at(23))
    is_normal = b.icmp_unsigned("!=", exponent, at(0))
    mantissa = b.or_(b.and_(magnitude, at(0x7FFFFF)), b.select(is_normal, at(1 << 23), at(0)))
    exponent = binary(b, "umax", exponent, at(1))
    lowest = 128 - to.bias  # the float32 exponent of the format's least normal number
    kept = binary(b, "umax", exponent, at(lowest))
    # Bits below the format's unit: more of them for what becomes subnormal. With 25 only the rounding is left.
    shift = binary(b, "umin", b.add(at(23 - to.mantissa), b.sub(kept, exponent)), at(25))
    units = b.lshr(mantissa, shift)
    rest = b.sub(mantissa, b.shl(units, shift))
    half = b.lshr(b.shl(at(1), shift), at(1))
    inexact = b.icmp_unsigned("!=", rest, at(0))
    if mode == "rn":
        is_odd = b.and_(units, at(1))
        up = b.icmp_unsigned(">", b.add(rest, is_odd), half)  # a tie goes up from an odd number
        up = b.and_(up, inexact)
    elif mode == "rna":
        up = b.and_(b.icmp_unsigned(">=", rest, half), inexact)
    elif mode == "rz":
        up = b.icmp_unsigned("!=", at(0), at(0))
    else:
        up = b.and_(inexact, is_negative if mode == "rm" else b.not_(is_negative))
    units = b.add(units, b.zext(up, I32))
    # A unit count with its leading one at place `mantissa` carries into the exponent field by itself.
    code = b.add(units, b.shl(b.sub(kept, at(lowest)), at(to.mantissa)))
    is_infinite = b.icmp_unsigned("==", magnitude, at(0x7F800000))
    over = b.or_(b.icmp_unsigned(">", code, at(to.largest)), is_infinite)
    beyond = at(to.largest if satfinite else to.largest + 1)
    if not satfinite and mode in ("rz", "rm", "rp"):
        toward = {"rz": b.not_(is_infinite), "rm": b.and_(b.not_(is_infinite), b.not_(is_negative)),
                  "rp": b.and_(b.not_(is_infinite), is_negative)}[mode]  # fmt: skip
        beyond = b.select(toward, at(to.largest), beyond)
    code = b.select(over, beyond, code)
    code = b.or_(code, b.select(is_negative, at(1 << (to.bits - 1)), at(0)))
    return b.select(b.icmp_unsigned(">", magnitude, at(0x7F800000)), at(to.nan), code)


def widen(builder: Builder, code: Value, name: str) -> Value:
    """The codes of a format, in any integer vector, → float32, exact. Bits above the format's are not looked at."""
    b = builder
    if name == "f16":
        return b.fpext(b.bitcast(code if code.type == I16 else b.trunc(code, I16), F16), F32)
    if code.type != I32:
        code = b.zext(code, I32)
    if name == "bf16":
        return b.bitcast(b.shl(code, splat(I32, 16)), F32)
    of = FORMATS[name]
    return shared(b, f"xserv.widen.{name}", F32, [code], lambda b, code: _widen(b, code, of))


def _widen(b: Builder, code: Value, of: Format) -> Value:
    """The fields in float32's places, then one exact product with a power of two, for subnormal codes too."""
    magnitude = b.and_(code, splat(I32, (1 << (of.bits - 1)) - 1))
    sign = b.and_(b.shl(code, splat(I32, 32 - of.bits)), splat(I32, 0x80000000))
    scaled = b.fmul(b.bitcast(b.shl(magnitude, splat(I32, 23 - of.mantissa)), F32), splat(F32, 2.0 ** (127 - of.bias)))
    word = b.bitcast(scaled, I32)
    above = b.icmp_unsigned(">", magnitude, splat(I32, of.largest))
    is_infinite = b.icmp_unsigned("==", magnitude, splat(I32, of.largest + 1))
    if of.name == "e4m3":  # has no infinity
        is_infinite = splat(I1, 0)
    word = b.select(above, b.select(is_infinite, splat(I32, 0x7F800000), splat(I32, 0x7FFFFFFF)), word)
    sign = b.select(b.and_(above, b.not_(is_infinite)), splat(I32, 0), sign)
    return b.bitcast(b.or_(word, sign), F32)


def _compute(b: Builder, name: str, values: list[Value]) -> Value:
    """float32 values of 16-bit floats → the result as float32, rounded to odd."""

    def body(b: Builder, *parameters: Value) -> Value:
        x, y, *rest = (b.fpext(parameter, F64) for parameter in parameters)
        if name == "mul":
            wide = b.fmul(x, y)  # exact
        elif name == "fma":
            wide = sum_to_odd(b, b.fmul(x, y), rest[0])
        else:
            wide = sum_to_odd(b, x, b.fneg(y) if name == "sub" else y)
        return narrow_to_odd(b, wide)

    return shared(b, f"xserv.pair.{name}", F32, values, body)


def arithmetic(form: Modifiers, *words: Value) -> Value:
    """fma.rn.bf16x2 d, a, b, c: each half by itself; fma.rn.bf16: one."""
    b, of = form.b, form.kind.removesuffix("x2")
    halves = []
    for shift in (0, 16) if form.kind != of else (0,):
        codes = [b.lshr(word, like(word, shift)) if shift else word for word in words]
        result = _compute(b, form.name, [widen(b, code, of) for code in codes])
        halves.append(narrow(b, saturate(b, result) if "sat" in form else result, of, relu="relu" in form))
    return halves[0] if form.kind == of else b.or_(halves[0], b.shl(halves[1], splat(I32, 16)))
