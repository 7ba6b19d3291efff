"""add, sub, mul and fma of f16 and bf16, alone and in pairs (PTX ISA, "Half Precision Floating-Point Instructions").

Each is computed in float64, rounded to odd, and then once to nearest even. A NaN result is the canonical 0x7fff.
"""

from __future__ import annotations

from runtime.emulator.arithmetic.by_type import by_type
from runtime.emulator.arithmetic.floats import saturate
from runtime.emulator.arithmetic.rounding import narrow_to_odd, sum_to_odd
from runtime.emulator.arithmetic.small_floats import narrow, widen
from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.modifiers import Modifiers
from runtime.emulator.translation.vectors import F32, F64, I32, Builder, Value, like, shared, splat

_OPERANDS = {"add": 3, "sub": 3, "mul": 3, "fma": 4}


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


@by_type("add", "sub", "mul", "fma", kinds=("f16", "bf16", "f16x2", "bf16x2"))
def half_arithmetic(low: Lowering, mods: Modifiers, kind: str) -> None:
    """fma.rn.bf16x2 d, a, b, c: each half by itself; fma.rn.bf16: one."""
    b, of = low.builder, kind.removesuffix("x2")
    mods.one_of(("rn",), "rn")
    sat, relu = mods.take("sat"), mods.name == "fma" and mods.take("relu")
    to, *sources = mods.operands(_OPERANDS[mods.name])
    words = [low.value(source, "b32" if kind != of else "b16") for source in sources]
    halves = []
    for shift in (0, 16) if kind != of else (0,):
        codes = [b.lshr(word, like(word, shift)) if shift else word for word in words]
        result = _compute(b, mods.name, [widen(b, code, of) for code in codes])
        halves.append(narrow(b, saturate(b, result) if sat else result, of, relu=relu))
    low.write(to, halves[0] if kind == of else b.or_(halves[0], b.shl(halves[1], splat(I32, 16))))
