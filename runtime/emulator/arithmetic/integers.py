"""Integer arithmetic, logic, shifts and bit fields (PTX ISA, "Integer Arithmetic" and "Logic and Shift").

Exact and wrapping in every lane; a division by zero gives all ones and its remainder the
dividend, as hardware does. Divisions of up to 32 bits go through float64, whose quotient is never off by a whole.
Shift amounts are unsigned 32-bit values and clamp at the width; start and length of bit fields are taken modulo 256.
"""

from __future__ import annotations

from llvmlite import ir

from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.modifiers import Modifiers, by_type
from runtime.emulator.translation.ptx import CARRY, Integer, Operand
from runtime.emulator.translation.vectors import (
    BIT,
    BYTE,
    F64,
    I32,
    I64,
    INTEGERS,
    LANES,
    WORD,
    Builder,
    Value,
    binary,
    intrinsic,
    like,
    mask_of,
    shared,
    splat,
    truths_of,
    unary,
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


FALSE = ir.Constant(BIT, 0)
FULL = ir.Constant(WORD, 0xFFFFFFFF)


def resized(builder: Builder, x: Value, bits: int) -> Value:
    """Zero-extended or cut."""
    if width(x) == bits:
        return x
    return builder.zext(x, INTEGERS[bits]) if width(x) < bits else builder.trunc(x, INTEGERS[bits])


# --- logic ---


@by_type("and", "or", "xor", kinds=("pred", "b16", "b32", "b64"))
def logic(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, *sources = mods.operands(3)
    make = {"and": low.builder.and_, "or": low.builder.or_, "xor": low.builder.xor}[mods.name]
    if kind == "pred":
        low.write_predicate(to, make(*(low.predicate(source) for source in sources)))
    else:
        low.write(to, make(*(low.value(source, kind) for source in sources)))


@by_type("not", kinds=("pred", "b16", "b32", "b64"))
def negation(low: Lowering, mods: Modifiers, kind: str) -> None:
    b = low.builder
    to, source = mods.operands(2)
    if kind == "pred":
        low.write_predicate(to, b.xor(low.predicate(source), FULL))
    else:
        low.write(to, b.not_(low.value(source, kind)))


# --- shifts ---


def shift_left(b: Builder, x: Value, amount: Value) -> Value:
    """`amount`, of x's type, may be any unsigned value."""
    inside = b.icmp_unsigned("<", amount, like(amount, width(x)))
    return b.select(inside, b.shl(x, b.and_(amount, like(amount, width(x) - 1))), like(x, 0))


def shift_right(b: Builder, x: Value, amount: Value, signed: bool) -> Value:
    if signed:
        return b.ashr(x, binary(b, "umin", amount, like(amount, width(x) - 1)))
    inside = b.icmp_unsigned("<", amount, like(amount, width(x)))
    return b.select(inside, b.lshr(x, b.and_(amount, like(amount, width(x) - 1))), like(x, 0))


def _amount(low: Lowering, operand: Operand, bits: int) -> Value:
    """A 32-bit amount as a vector of `bits`; amounts that do not fit stay beyond the width."""
    amount = low.value(operand, "u32")
    if bits < 32:
        amount = binary(low.builder, "umin", amount, like(amount, bits))
    return resized(low.builder, amount, bits)


@by_type("shl", kinds=("b16", "b32", "b64"))
def shl(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, source, amount = mods.operands(3)
    low.write(to, shift_left(low.builder, low.value(source, kind), _amount(low, amount, int(kind[1:]))))


@by_type("shr", kinds=("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64"))
def shr(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, source, amount = mods.operands(3)
    x, count = low.value(source, kind), _amount(low, amount, int(kind[1:]))
    low.write(to, shift_right(low.builder, x, count, is_signed(kind)))


@by_type("shf", kinds=("b32",))
def funnel_shift(low: Lowering, mods: Modifiers, kind: str) -> None:
    b, left = low.builder, mods.one_of(("l", "r")) == "l"
    clamps = mods.one_of(("clamp", "wrap")) == "clamp"
    to, *sources = mods.operands(4)
    lower, upper, amount = (low.value(source, kind) for source in sources)
    result = intrinsic(b, "fshl" if left else "fshr", I32, [upper, lower, amount])  # takes the amount modulo 32
    if clamps:
        beyond = b.icmp_unsigned(">=", amount, splat(I32, 32))
        result = b.select(beyond, lower if left else upper, result)
    low.write(to, result)


# --- counts and searches ---


@by_type("popc", "clz", kinds=("b32", "b64"))
def count_bits(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, source = mods.operands(2)
    x = low.value(source, kind)
    count = unary(low.builder, "ctpop", x) if mods.name == "popc" else leading_zeros(low.builder, x)
    low.write(to, resized(low.builder, count, 32))


def leading_zeros(b: Builder, x: Value) -> Value:
    return intrinsic(b, "ctlz", x.type, [x, FALSE])


@by_type("bfind", kinds=("u32", "s32", "u64", "s64"))
def find_leading(low: Lowering, mods: Modifiers, kind: str) -> None:
    """The place of the first bit that differs from the sign (0 if unsigned), or its distance from the top; −1 if there
    is none."""
    b, from_top = low.builder, mods.take("shiftamt")
    to, source = mods.operands(2)
    x = low.value(source, kind)
    if is_signed(kind):
        x = b.xor(x, b.ashr(x, like(x, width(x) - 1)))
    distance = leading_zeros(b, x)
    place = distance if from_top else b.sub(like(x, width(x) - 1), distance)
    low.write(to, resized(b, b.select(b.icmp_unsigned("==", x, like(x, 0)), like(x, -1), place), 32))


@by_type("brev", kinds=("b32", "b64"))
def reverse(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, source = mods.operands(2)
    low.write(to, unary(low.builder, "bitreverse", low.value(source, kind)))


# --- fields ---


def _extract(b: Builder, x: Value, start: Value, length: Value, signed: bool) -> Value:
    """In 64 bits: shift the field down, then let its length alone remain."""
    byte = splat(I32, 255)
    start, length = resized(b, b.and_(start, byte), 64), resized(b, b.and_(length, byte), 64)
    is_narrow = width(x) == 32
    if is_narrow:
        x = b.sext(x, I64) if signed else b.zext(x, I64)
    x = shift_right(b, x, start, signed)
    surplus = b.select(b.icmp_unsigned("<", length, like(x, 64)), b.sub(like(x, 64), length), like(x, 0))
    surplus = binary(b, "umin", surplus, like(x, 63))
    x = b.shl(x, surplus)
    x = b.ashr(x, surplus) if signed else b.lshr(x, surplus)
    x = b.select(b.icmp_unsigned("==", length, like(x, 0)), like(x, 0), x)
    return b.trunc(x, I32) if is_narrow else x


@by_type("bfe", kinds=("u32", "s32", "u64", "s64"))
def extract(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, source, start, length = mods.operands(4)
    signed = is_signed(kind)
    arguments = [low.value(source, kind), low.value(start, "u32"), low.value(length, "u32")]

    def body(b: Builder, x: Value, start: Value, length: Value) -> Value:
        return _extract(b, x, start, length, signed)

    low.write(to, shared(low.builder, f"xserv.bfe.{kind}", arguments[0].type, arguments, body))


def _insert(b: Builder, source: Value, target: Value, start: Value, length: Value) -> Value:
    byte, bits = splat(I32, 255), width(source)
    start, length = (resized(b, b.and_(value, byte), bits) for value in (start, length))
    one = like(source, 1)
    ones = b.sub(shift_left(b, one, length), one)  # all ones where the length reaches the width: 0 − 1
    ones = shift_left(b, ones, start)
    return b.or_(b.and_(target, b.not_(ones)), b.and_(shift_left(b, source, start), ones))


@by_type("bfi", kinds=("b32", "b64"))
def insert(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, source, target, start, length = mods.operands(5)
    arguments = [low.value(source, kind), low.value(target, kind), low.value(start, "u32"), low.value(length, "u32")]
    low.write(to, shared(low.builder, f"xserv.bfi.{kind}", arguments[0].type, arguments, _insert))


# --- bytes ---


def _choose_bytes(b: Builder, x: Value, y: Value, selector: Value) -> Value:
    """prmt with a selector in a register."""
    both = b.or_(b.zext(x, I64), b.shl(b.zext(y, I64), splat(I64, 32)))
    result = splat(I32, 0)
    for index in range(4):
        nibble = b.lshr(selector, splat(I32, 4 * index))
        at = b.zext(b.shl(b.and_(nibble, splat(I32, 7)), splat(I32, 3)), I64)
        byte = b.shl(b.trunc(b.lshr(both, at), I32), splat(I32, 24))
        repeats = b.icmp_unsigned("!=", b.and_(nibble, splat(I32, 8)), splat(I32, 0))
        byte = b.select(repeats, b.ashr(byte, splat(I32, 31)), byte)
        result = b.or_(result, b.shl(b.lshr(byte, splat(I32, 24)), splat(I32, 8 * index)))
    return result


def permuted(b: Builder, x: Value, y: Value, selector: int) -> Value:
    """prmt with a literal selector: one shuffle of bytes."""
    bytes_ = ir.VectorType(BYTE, 4 * LANES)
    x, y = b.bitcast(x, bytes_), b.bitcast(y, bytes_)
    nibbles = [(selector >> (4 * index)) & 15 for index in range(4)]
    order = [(n & 3) + 4 * lane + (4 * LANES if n & 4 else 0) for lane in range(LANES) for n in nibbles]
    chosen = b.shuffle_vector(x, y, ir.Constant(ir.VectorType(WORD, 4 * LANES), order))
    if any(n & 8 for n in nibbles):
        repeated = b.ashr(chosen, like(chosen, 7))
        which = [ir.Constant(BIT, int(bool(n & 8))) for _ in range(LANES) for n in nibbles]
        chosen = b.select(ir.Constant(ir.VectorType(BIT, 4 * LANES), which), repeated, chosen)
    return b.bitcast(chosen, I32)


@by_type("prmt", kinds=("b32",))
def permute(low: Lowering, mods: Modifiers, kind: str) -> None:
    b = low.builder
    to, *sources = mods.operands(4)
    x, y, selector = low.value(sources[0], "b32"), low.value(sources[1], "b32"), sources[2]
    if isinstance(selector, Integer):
        result = permuted(b, x, y, selector.value)
    else:
        result = shared(b, "xserv.prmt", I32, [x, y, low.value(selector, "b32")], _choose_bytes)
    low.write(to, result)
