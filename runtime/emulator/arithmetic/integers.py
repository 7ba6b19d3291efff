"""Integer arithmetic (PTX ISA, "Integer Arithmetic").

Exact and wrapping in every lane; a division by zero gives all ones and its remainder the
dividend, as hardware does. Divisions of up to 32 bits go through float64, whose quotient is never off by a whole.
"""

from __future__ import annotations

from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.modifiers import Modifiers, by_type
from runtime.emulator.translation.ptx import CARRY, Operand
from runtime.emulator.translation.vectors import (
    F64,
    I64,
    INTEGERS,
    Builder,
    Value,
    binary,
    like,
    mask_of,
    shared,
    splat,
    truths_of,
    width,
)

WHOLE = ("u16", "s16", "u32", "s32", "u64", "s64")


def is_signed(kind: str) -> bool:
    return kind[0] == "s"


def extend(builder: Builder, x: Value, bits: int, signed: bool) -> Value:
    return builder.sext(x, INTEGERS[bits]) if signed else builder.zext(x, INTEGERS[bits])


def absolute(builder: Builder, x: Value) -> Value:
    """|x|, wrapping."""
    return binary(builder, "smax", x, builder.neg(x))


# --- add, sub, min, max ---


@by_type("add", "sub", "min", "max", kinds=WHOLE)
def two_operands(low: Lowering, mods: Modifiers, kind: str) -> None:
    b, name = low.builder, mods.name
    to, *sources = mods.operands(3)
    x, y = (low.value(source, kind) for source in sources)
    if name in ("add", "sub") and mods.take("cc"):
        _with_carry(low, mods, to, x, y, sets=True)
    elif name in ("add", "sub"):
        low.write(to, b.add(x, y) if name == "add" else b.sub(x, y))
    else:
        low.write(to, binary(b, ("s" if is_signed(kind) else "u") + name, x, y))


# --- with the carry flag ---

EXTENDED = ("u32", "s32", "u64", "s64")


def _with_carry(low: Lowering, mods: Modifiers, to: Operand, x: Value, y: Value, *, sets: bool) -> None:
    """x + y, or x - y of sub and subc, whose flag is a borrow. `addc`, `subc` and `madc` add the flag."""
    b, subtracts = low.builder, mods.name.startswith("sub")
    if width(x) not in (32, 64):
        raise mods.refuse("a carry of 16 bits")

    def step(x: Value, y: Value) -> tuple[Value, Value]:
        result = b.sub(x, y) if subtracts else b.add(x, y)
        return result, b.icmp_unsigned("<", x, y) if subtracts else b.icmp_unsigned("<", result, x)

    result, carries = step(x, y)
    if mods.ins.reads_carry:
        result, again = step(result, b.zext(truths_of(b, low.predicate(CARRY)), x.type))
        carries = b.or_(carries, again)
    if sets:
        low.write_predicate(CARRY, mask_of(b, carries))
    low.write(to, result)


@by_type("addc", "subc", kinds=EXTENDED)
def add_carry(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, *sources = mods.operands(3)
    x, y = (low.value(source, kind) for source in sources)
    _with_carry(low, mods, to, x, y, sets=mods.take("cc"))


# --- products ---


def high_product(builder: Builder, x: Value, y: Value, signed: bool) -> Value:
    """The upper half of x · y."""
    bits = width(x)
    if bits < 64:
        product = builder.mul(extend(builder, x, 2 * bits, signed), extend(builder, y, 2 * bits, signed))
        return builder.trunc(builder.lshr(product, like(product, bits)), x.type)
    high = shared(builder, "xserv.mulhi.u64", I64, [x, y], _high_product_64)
    if not signed:
        return high
    ones = like(x, 63)
    high = builder.sub(high, builder.and_(builder.ashr(x, ones), y))
    return builder.sub(high, builder.and_(builder.ashr(y, ones), x))


def _high_product_64(b: Builder, x: Value, y: Value) -> Value:
    """The upper half of a 64-bit product, by halves of 32 bits."""
    half, ones = splat(I64, 32), splat(I64, 0xFFFFFFFF)
    xl, xh, yl, yh = b.and_(x, ones), b.lshr(x, half), b.and_(y, ones), b.lshr(y, half)
    first = b.add(b.mul(xh, yl), b.lshr(b.mul(xl, yl), half))
    second = b.add(b.mul(xl, yh), b.and_(first, ones))
    return b.add(b.add(b.mul(xh, yh), b.lshr(first, half)), b.lshr(second, half))


@by_type("mul", kinds=WHOLE)
def multiply(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, *sources = mods.operands(3)
    x, y = (low.value(source, kind) for source in sources)
    low.write(to, _product(low, mods, kind, x, y))


def _product(low: Lowering, mods: Modifiers, kind: str, x: Value, y: Value) -> Value:
    b, part = low.builder, mods.one_of(("lo", "hi", "wide"))
    if part == "lo":
        return b.mul(x, y)
    if part == "hi":
        return high_product(b, x, y, is_signed(kind))
    bits = width(x)
    if bits == 64:
        raise mods.refuse(f".wide of type .{kind}")
    return b.mul(extend(b, x, 2 * bits, is_signed(kind)), extend(b, y, 2 * bits, is_signed(kind)))


@by_type("mad", "madc", kinds=WHOLE)
def multiply_add(low: Lowering, mods: Modifiers, kind: str) -> None:
    b, part = low.builder, next((word for word in mods.words if word in ("lo", "hi", "wide")), "")
    to, *sources = mods.operands(4)
    product = _product(low, mods, kind, *(low.value(source, kind) for source in sources[:2]))
    if part != "wide" and (mods.ins.sets_carry or mods.ins.reads_carry):
        _with_carry(low, mods, to, product, low.value(sources[2], kind), sets=mods.take("cc"))
        return
    addend = low.value(sources[2], kind[0] + str(2 * int(kind[1:])) if part == "wide" else kind)
    low.write(to, b.add(product, addend))


# --- quotients ---


def _quotient(b: Builder, x: Value, y: Value) -> Value:
    """x // y of unsigned values; all ones where y is zero."""
    is_zero = b.icmp_unsigned("==", y, like(y, 0))
    divisor = b.select(is_zero, like(y, 1), y)
    if width(x) == 64:
        quotient = b.udiv(x, divisor)
    else:
        quotient = b.fptoui(b.fdiv(b.uitofp(x, F64), b.uitofp(divisor, F64)), x.type)
    return b.select(is_zero, like(x, -1), quotient)


def _divide(b: Builder, x: Value, y: Value, signed: bool, remainder: bool) -> Value:
    dividend, divisor = (absolute(b, x), absolute(b, y)) if signed else (x, y)
    quotient = _quotient(b, dividend, divisor)
    if signed:
        differs = b.icmp_signed("<", b.xor(x, y), like(x, 0))
        quotient = b.select(differs, b.neg(quotient), quotient)
        quotient = b.select(b.icmp_unsigned("==", y, like(y, 0)), like(x, -1), quotient)
    return b.sub(x, b.mul(quotient, y)) if remainder else quotient


@by_type("div", "rem", kinds=WHOLE)
def divide(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, *sources = mods.operands(3)
    x, y = (low.value(source, kind) for source in sources)
    name, signed = mods.name, is_signed(kind)
    result = shared(
        low.builder, f"xserv.{name}.{kind}", x.type, [x, y], lambda b, x, y: _divide(b, x, y, signed, name == "rem")
    )
    low.write(to, result)


# --- one operand ---


@by_type("abs", "neg", kinds=("s16", "s32", "s64"))
def sign(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, source = mods.operands(2)
    x = low.value(source, kind)
    low.write(to, absolute(low.builder, x) if mods.name == "abs" else low.builder.neg(x))
