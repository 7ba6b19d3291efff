"""Integer arithmetic (PTX ISA, "Integer Arithmetic", "Extended-Precision Integer Arithmetic").

Exact in every lane: wrapping unless .sat says otherwise; a division by zero gives all ones and its remainder the
dividend, as hardware does. Divisions of up to 32 bits go through float64, whose quotient is never off by a whole.
"""

from __future__ import annotations

from runtime.device.emulator.arithmetic.by_type import by_type
from runtime.device.emulator.translation.basic_blocks import CARRY
from runtime.device.emulator.translation.lowering import Lowering
from runtime.device.emulator.translation.modifiers import Modifiers
from runtime.device.emulator.translation.ptx import Operand
from runtime.device.emulator.translation.vectors import (
    F64,
    HALF,
    I32,
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

from llvmlite import ir  # isort: skip

WHOLE = ("u16", "s16", "u32", "s32", "u64", "s64")
PAIRS = ("u16x2", "s16x2")
_PAIR = ir.VectorType(HALF, 64)


def is_signed(kind: str) -> bool:
    return kind[0] == "s"


def extend(builder: Builder, x: Value, bits: int, signed: bool) -> Value:
    return builder.sext(x, INTEGERS[bits]) if signed else builder.zext(x, INTEGERS[bits])


def absolute(builder: Builder, x: Value) -> Value:
    """|x|, wrapping."""
    return binary(builder, "smax", x, builder.neg(x))


# --- add, sub, min, max, with and without carry ---


def _paired(low: Lowering, operand: Operand) -> Value:
    return low.builder.bitcast(low.value(operand, "b32"), _PAIR)


@by_type("add", "sub", "min", "max", kinds=(*WHOLE, *PAIRS))
def two_operands(low: Lowering, mods: Modifiers, kind: str) -> None:
    b, name = low.builder, mods.name
    to, *sources = mods.operands(3)
    if kind in PAIRS:
        x, y = (_paired(low, source) for source in sources)
    else:
        x, y = (low.value(source, kind) for source in sources)
    if name in ("add", "sub"):
        if mods.take("cc"):
            _carrying(low, mods, kind, to, x, y, None)
            return
        if mods.take("sat"):
            if kind != "s32":
                raise mods.refuse(f".sat of type .{kind}")
            result = binary(b, "sadd.sat" if name == "add" else "ssub.sat", x, y)
        else:
            result = b.add(x, y) if name == "add" else b.sub(x, y)
    else:
        result = binary(b, ("s" if is_signed(kind) else "u") + name, x, y)
        if mods.take("relu"):
            if kind not in ("s32", "s16x2"):
                raise mods.refuse(f".relu of type .{kind}")
            result = binary(b, "smax", result, like(result, 0))
    low.write(to, b.bitcast(result, I32) if kind in PAIRS else result)


@by_type("addc", "subc", kinds=("u32", "s32", "u64", "s64"))
def with_carry(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, *sources = mods.operands(3)
    x, y = (low.value(source, kind) for source in sources)
    _carrying(low, mods, kind, to, x, y, low.predicate(CARRY))


def _carrying(low: Lowering, mods: Modifiers, kind: str, to: Operand, x: Value, y: Value, carry: Value | None) -> None:
    """x ± (y + carry), the carry flag written where .cc stands (the caller of plain add and sub has taken it)."""
    b = low.builder
    if kind not in ("u32", "s32", "u64", "s64"):
        raise mods.refuse(f".cc of type .{kind}")
    subtracts = mods.name in ("sub", "subc")
    writes = carry is None or mods.take("cc")
    result = b.sub(x, y) if subtracts else b.add(x, y)
    over = b.icmp_unsigned("<", x, y) if subtracts else b.icmp_unsigned("<", result, x)
    if carry is not None:
        one = b.zext(truths_of(b, carry), result.type)
        before = result
        result = b.sub(before, one) if subtracts else b.add(before, one)
        over = b.or_(over, b.icmp_unsigned("<", before, one) if subtracts else b.icmp_unsigned("<", result, one))
    low.write(to, result)
    if writes:
        low.write_predicate(CARRY, mask_of(b, over))


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
    """By halves of 32 bits."""
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


@by_type("mad", kinds=WHOLE)
def multiply_add(low: Lowering, mods: Modifiers, kind: str) -> None:
    b, part = low.builder, next((word for word in mods.words if word in ("lo", "hi", "wide")), "")
    to, *sources = mods.operands(4)
    product = _product(low, mods, kind, *(low.value(source, kind) for source in sources[:2]))
    addend = low.value(sources[2], kind[0] + str(2 * int(kind[1:])) if part == "wide" else kind)
    if mods.take("sat"):
        if (kind, part) != ("s32", "hi"):
            raise mods.refuse(f".sat of .{part}.{kind}")
        low.write(to, binary(b, "sadd.sat", product, addend))
    elif mods.take("cc"):
        if part == "wide":
            raise mods.refuse(".wide with .cc")
        _carrying(low, mods, kind, to, product, addend, None)
    else:
        low.write(to, b.add(product, addend))


@by_type("madc", kinds=("u32", "s32", "u64", "s64"))
def multiply_add_with_carry(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, *sources = mods.operands(4)
    x, y, addend = (low.value(source, kind) for source in sources)
    if "wide" in mods.words:
        raise mods.refuse(".wide with a carry")
    _carrying(low, mods, kind, to, _product(low, mods, kind, x, y), addend, low.predicate(CARRY))


@by_type("mul24", "mad24", kinds=("u32", "s32"))
def multiply_24(low: Lowering, mods: Modifiers, kind: str) -> None:
    """The product of the low 24 bits of each operand: its bits 0 to 31 or 16 to 47."""
    b = low.builder
    to, *sources = mods.operands(3 if mods.name == "mul24" else 4)
    eight = splat(I32, 8)
    factors = []
    for source in sources[:2]:
        raised = b.shl(low.value(source, kind), eight)
        factors.append(b.ashr(raised, eight) if is_signed(kind) else b.lshr(raised, eight))
    is_high = mods.one_of(("lo", "hi")) == "hi"
    if is_high:
        product = b.mul(*(extend(b, factor, 64, is_signed(kind)) for factor in factors))
        result = b.trunc(b.lshr(product, like(product, 16)), I32)
    else:
        result = b.mul(*factors)
    if mods.name == "mad24":
        addend = low.value(sources[2], kind)
        if mods.take("sat"):
            if not is_high or kind != "s32":
                raise mods.refuse(".sat is for .hi.s32")
            result = binary(b, "sadd.sat", result, addend)
        else:
            result = b.add(result, addend)
    low.write(to, result)


@by_type("sad", kinds=WHOLE)
def sum_of_difference(low: Lowering, mods: Modifiers, kind: str) -> None:
    b = low.builder
    to, *sources = mods.operands(4)
    x, y, z = (low.value(source, kind) for source in sources)
    sign = "s" if is_signed(kind) else "u"
    low.write(to, b.add(z, b.sub(binary(b, sign + "max", x, y), binary(b, sign + "min", x, y))))


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


# --- one operand; dot products ---


@by_type("abs", "neg", kinds=("s16", "s32", "s64"))
def sign(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, source = mods.operands(2)
    x = low.value(source, kind)
    low.write(to, absolute(low.builder, x) if mods.name == "abs" else low.builder.neg(x))


def _field(b: Builder, x: Value, start: int, bits: int, signed: bool) -> Value:
    """Bits start … start + bits − 1, extended to 32."""
    raised = b.shl(x, splat(I32, 32 - bits - start))
    down = splat(I32, 32 - bits)
    return b.ashr(raised, down) if signed else b.lshr(raised, down)


@by_type("dp4a", "dp2a", kinds=("u32", "s32"))
def dot_product(low: Lowering, mods: Modifiers, b_kind: str) -> None:
    b = low.builder
    a_kind = mods.one_of(("u32", "s32"))
    to, *sources = mods.operands(4)
    x, y, result = (low.value(source, "u32") for source in sources)
    bits, count, first = 8, 4, 0
    if mods.name == "dp2a":
        bits, count, first = 16, 2, 0 if mods.one_of(("lo", "hi")) == "lo" else 2
    for index in range(count):
        left = _field(b, x, bits * index, bits, is_signed(a_kind))
        right = _field(b, y, 8 * (first + index), 8, is_signed(b_kind))
        result = b.add(result, b.mul(left, right))
    low.write(to, result)
