"""Integer arithmetic, logic, shifts and bit fields (PTX ISA, "Integer Arithmetic" and "Logic and Shift").

Exact and wrapping in every lane; a division by zero gives all ones and its remainder the
dividend, as hardware does. Divisions of up to 32 bits go through float64, whose quotient is never off by a whole.
Shift amounts are unsigned 32-bit values and clamp at the width; start and length of bit fields are taken modulo 256.
"""

from __future__ import annotations

from llvmlite import ir

from runtime.emulator.translation.forms import Modifiers
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


def is_signed(kind: str) -> bool:
    return kind[0] == "s"


def extend(builder: Builder, x: Value, bits: int, signed: bool) -> Value:
    return builder.sext(x, INTEGERS[bits]) if signed else builder.zext(x, INTEGERS[bits])


def absolute(builder: Builder, x: Value) -> Value:
    """|x|, wrapping."""
    return binary(builder, "smax", x, builder.neg(x))


# --- sums ---


def add(form: Modifiers, x: Value, y: Value) -> Value:
    """add, sub, addc, subc."""
    if "cc" in form or form.ins.reads_carry:
        return _with_carry(form, x, y)
    return form.b.add(x, y) if form.name == "add" else form.b.sub(x, y)


def _with_carry(form: Modifiers, x: Value, y: Value) -> Value:
    """x + y, or x - y of sub and subc, whose flag is a borrow. `addc`, `subc` and `madc` add the flag, .cc sets it."""
    b, subtracts = form.b, form.name.startswith("sub")

    def step(x: Value, y: Value) -> tuple[Value, Value]:
        result = b.sub(x, y) if subtracts else b.add(x, y)
        return result, b.icmp_unsigned("<", x, y) if subtracts else b.icmp_unsigned("<", result, x)

    result, carries = step(x, y)
    if form.ins.reads_carry:
        result, again = step(result, b.zext(truths_of(b, form.low.predicate(CARRY)), x.type))
        carries = b.or_(carries, again)
    if "cc" in form:
        form.low.write_predicate(CARRY, mask_of(b, carries))
    return result


def extremum(form: Modifiers, x: Value, y: Value) -> Value:
    return binary(form.b, ("s" if is_signed(form.kind) else "u") + form.name, x, y)


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


def multiply(form: Modifiers, x: Value, y: Value) -> Value:
    b, signed = form.b, is_signed(form.kind)
    if "lo" in form:
        return b.mul(x, y)
    if "hi" in form:
        return high_product(b, x, y, signed)
    return b.mul(extend(b, x, 2 * width(x), signed), extend(b, y, 2 * width(y), signed))


def multiply_add(form: Modifiers, x: Value, y: Value, addend: Value) -> Value:
    product = multiply(form, x, y)
    has_carry = "cc" in form or form.ins.reads_carry
    return _with_carry(form, product, addend) if has_carry else form.b.add(product, addend)


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


def divide(form: Modifiers, x: Value, y: Value) -> Value:
    signed, is_remainder = is_signed(form.kind), form.name == "rem"
    name = f"xserv.{form.name}.{form.kind}"
    return shared(form.b, name, x.type, [x, y], lambda b, x, y: _divide(b, x, y, signed, is_remainder))


def sign(form: Modifiers, x: Value) -> Value:
    return absolute(form.b, x) if form.name == "abs" else form.b.neg(x)


FALSE = ir.Constant(BIT, 0)


def resized(builder: Builder, x: Value, bits: int) -> Value:
    """Zero-extended or cut."""
    if width(x) == bits:
        return x
    return builder.zext(x, INTEGERS[bits]) if width(x) < bits else builder.trunc(x, INTEGERS[bits])


# --- logic ---


def logic(form: Modifiers, x: Value, y: Value) -> Value:
    return {"and": form.b.and_, "or": form.b.or_, "xor": form.b.xor}[form.name](x, y)


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


def shift(form: Modifiers, x: Value, amount: Value) -> Value:
    """A 32-bit amount is brought to x's width; amounts that do not fit stay beyond it."""
    if width(x) < 32:
        amount = binary(form.b, "umin", amount, like(amount, width(x)))
    amount = resized(form.b, amount, width(x))
    if form.name == "shl":
        return shift_left(form.b, x, amount)
    return shift_right(form.b, x, amount, is_signed(form.kind))


def funnel_shift(form: Modifiers, lower: Value, upper: Value, amount: Value) -> Value:
    b, left = form.b, "l" in form
    result = intrinsic(b, "fshl" if left else "fshr", I32, [upper, lower, amount])  # takes the amount modulo 32
    if "clamp" in form:
        beyond = b.icmp_unsigned(">=", amount, splat(I32, 32))
        result = b.select(beyond, lower if left else upper, result)
    return result


# --- counts and searches ---


def count_bits(form: Modifiers, x: Value) -> Value:
    return resized(form.b, unary(form.b, "ctpop", x) if form.name == "popc" else leading_zeros(form.b, x), 32)


def leading_zeros(b: Builder, x: Value) -> Value:
    return intrinsic(b, "ctlz", x.type, [x, FALSE])


def find_leading(form: Modifiers, x: Value) -> Value:
    """The place of the first bit that differs from the sign (0 if unsigned), or its distance from the top; −1 if there
    is none."""
    b = form.b
    if is_signed(form.kind):
        x = b.xor(x, b.ashr(x, like(x, width(x) - 1)))
    distance = leading_zeros(b, x)
    place = distance if "shiftamt" in form else b.sub(like(x, width(x) - 1), distance)
    return resized(b, b.select(b.icmp_unsigned("==", x, like(x, 0)), like(x, -1), place), 32)


def reverse(form: Modifiers, x: Value) -> Value:
    return unary(form.b, "bitreverse", x)


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


def extract(form: Modifiers, x: Value, start: Value, length: Value) -> Value:
    signed = is_signed(form.kind)

    def body(b: Builder, x: Value, start: Value, length: Value) -> Value:
        return _extract(b, x, start, length, signed)

    return shared(form.b, f"xserv.bfe.{form.kind}", x.type, [x, start, length], body)


def _insert(b: Builder, source: Value, target: Value, start: Value, length: Value) -> Value:
    byte, bits = splat(I32, 255), width(source)
    start, length = (resized(b, b.and_(value, byte), bits) for value in (start, length))
    one = like(source, 1)
    ones = b.sub(shift_left(b, one, length), one)  # all ones where the length reaches the width: 0 − 1
    ones = shift_left(b, ones, start)
    return b.or_(b.and_(target, b.not_(ones)), b.and_(shift_left(b, source, start), ones))


def insert(form: Modifiers, source: Value, target: Value, start: Value, length: Value) -> Value:
    return shared(form.b, f"xserv.bfi.{form.kind}", source.type, [source, target, start, length], _insert)


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


def permute(form: Modifiers, x: Value, y: Value, selector: Operand) -> Value:
    if isinstance(selector, Integer):
        return permuted(form.b, x, y, selector.value)
    return shared(form.b, "xserv.prmt", I32, [x, y, form.low.value(selector, "b32")], _choose_bytes)
