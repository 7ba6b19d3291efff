"""add, sub, mul and fma on pairs of f16 or bf16 (PTX ISA, "Half Precision Floating-Point Instructions").

Each half is computed in float64, rounded to odd, and then once to nearest even. A NaN result is the canonical 0x7fff.
"""

from __future__ import annotations

from runtime.device.emulator.arithmetic.by_type import by_type
from runtime.device.emulator.arithmetic.rounding import narrow_to_odd, sum_to_odd
from runtime.device.emulator.arithmetic.small_floats import narrow, widen
from runtime.device.emulator.translation.lowering import Lowering
from runtime.device.emulator.translation.modifiers import Modifiers
from runtime.device.emulator.translation.vectors import F32, F64, I32, Builder, Value, shared, splat

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


@by_type("add", "sub", "mul", "fma", kinds=("f16x2", "bf16x2"))
def pair_arithmetic(low: Lowering, mods: Modifiers, kind: str) -> None:
    """fma.rn.bf16x2 d, a, b, c: each half by itself."""
    b, of = low.builder, kind.removesuffix("x2")
    mods.one_of(("rn",), "rn")
    to, *sources = mods.operands(_OPERANDS[mods.name])
    both = [low.value(source, "b32") for source in sources]
    halves = []
    for shift in (0, 16):
        codes = [b.lshr(word, splat(I32, shift)) if shift else b.and_(word, splat(I32, 0xFFFF)) for word in both]
        halves.append(narrow(b, _compute(b, mods.name, [widen(b, code, of) for code in codes]), of))
    low.write(to, b.or_(halves[0], b.shl(halves[1], splat(I32, 16))))
