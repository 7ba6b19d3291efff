"""Comparisons, selections and moves (PTX ISA, "Comparison and Selection Instructions"; mov), of integers and floats."""

from __future__ import annotations

from runtime.emulator.arithmetic.floats import flush, is_nan
from runtime.emulator.arithmetic.integers import is_signed
from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.modifiers import Modifiers, by_type
from runtime.emulator.translation.ptx import TYPE_BYTES, Operand, Pair, Register, Sink, Vector
from runtime.emulator.translation.vectors import I64, INTEGERS, Builder, Value, like, mask_of, truths_of

_INTEGERS = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")
_FLOATS = ("f32", "f64")
_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_UNORDERED = {f"{name}u": sign for name, sign in _SIGNS.items()}


def comparison(b: Builder, mods: Modifiers, name: str, kind: str, x: Value, y: Value) -> Value:
    """``<32 x i1>`` of one comparison, by its PTX name."""
    if kind in _FLOATS:
        if name in _SIGNS:
            return b.fcmp_ordered(_SIGNS[name], x, y)
        if name in _UNORDERED:
            return b.fcmp_unordered(_UNORDERED[name], x, y)
        if name in ("num", "nan"):
            either = b.or_(is_nan(b, x), is_nan(b, y))
            return either if name == "nan" else b.not_(either)
    elif name in ("eq", "ne") or (kind[0] != "b" and name in _SIGNS):
        return (b.icmp_signed if is_signed(kind) else b.icmp_unsigned)(_SIGNS[name], x, y)
    elif kind[0] == "u" and name in _UNSIGNED:
        return b.icmp_unsigned(_UNSIGNED[name], x, y)
    raise mods.refuse(f".{name} of type .{kind}")


def _compared(low: Lowering, mods: Modifiers, kind: str) -> tuple[Value, Value]:
    """The i32 masks of the comparison and of its negation, both combined with the predicate operand if there is one."""
    b = low.builder
    name = mods.one_of((*_SIGNS, *_UNSIGNED, *_UNORDERED, "num", "nan"))
    combine = mods.one_of(("and", "or", "xor"), "")
    ftz = kind == "f32" and mods.take("ftz")
    sources = mods.operands(4 if combine else 3)[1:]
    x, y = (low.value(source, kind) for source in sources[:2])
    if ftz:
        x, y = flush(b, x), flush(b, y)
    truth = mask_of(b, comparison(b, mods, name, kind, x, y))
    opposite = b.not_(truth)
    if combine:
        given = low.predicate(sources[2])
        make = {"and": b.and_, "or": b.or_, "xor": b.xor}[combine]
        truth, opposite = make(truth, given), make(opposite, given)
    return truth, opposite


@by_type("setp", kinds=(*_INTEGERS, *_FLOATS))
def setp(low: Lowering, mods: Modifiers, kind: str) -> None:
    to = mods.ins.operands[0] if mods.ins.operands else Sink()
    truth, opposite = _compared(low, mods, kind)
    if isinstance(to, Pair):
        low.write_predicate(to.first, truth)
        low.write_predicate(to.second, opposite)
    else:
        low.write_predicate(to, truth)


_ANY = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")


@by_type("selp", kinds=_ANY)
def selp(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, x, y, which = mods.operands(4)
    chosen = truths_of(low.builder, low.predicate(which))
    low.write(to, low.builder.select(chosen, low.value(x, kind), low.value(y, kind)))


_KINDS = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")


@by_type("mov", kinds=("pred",))
def move_predicate(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, source = mods.operands(2)
    low.write_predicate(to, low.predicate(source))


@by_type("mov", kinds=_KINDS)
def move(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, source = mods.operands(2)
    if isinstance(source, Vector):
        low.write(to, _packed(low, mods, source, 8 * TYPE_BYTES[kind]))
    elif isinstance(to, Vector):
        _unpack(low, mods, to, low.value(source, f"b{kind[1:]}"))
    else:
        low.write(to, low.value(source, kind))


def _element_bits(mods: Modifiers, items: tuple[Operand, ...], bits: int) -> int:
    element, left = divmod(bits, len(items))
    if left or element not in INTEGERS:
        raise mods.refuse(f"{len(items)} elements")
    return element


def _packed(low: Lowering, mods: Modifiers, source: Vector, bits: int) -> Value:
    """The first item in the lowest bits."""
    b, element = low.builder, _element_bits(mods, source.items, bits)
    result = None
    for index, item in enumerate(source.items):
        part = b.zext(low.value(item, f"b{element}"), INTEGERS[bits])
        part = b.shl(part, like(part, index * element)) if index else part
        result = part if result is None else b.or_(result, part)
    return result


def _unpack(low: Lowering, mods: Modifiers, to: Vector, whole: Value) -> None:
    b = low.builder
    element = _element_bits(mods, to.items, whole.type.element.width)
    for index, item in enumerate(to.items):
        part = b.lshr(whole, like(whole, index * element)) if index else whole
        low.write(item, b.trunc(part, INTEGERS[element]))


@by_type("mov", kinds=("b128",))
def move_wide(low: Lowering, mods: Modifiers, kind: str) -> None:
    """Two 64-bit halves, the lower first; either side may be a register of .b128."""
    to, source = mods.operands(2)
    if isinstance(source, Vector) and len(source.items) == 2:
        parts = [low.value(item, "b64") for item in source.items]
    else:
        pointer = low.slot(source, 128)
        parts = [low.builder.load(_half(low, pointer, index)) for index in range(2)]
    if isinstance(to, Vector) and len(to.items) == 2:
        for item, part in zip(to.items, parts):
            low.write(item, part)
    elif isinstance(to, Register | Sink):
        pointer = low.destination(to, 128)
        for index, part in enumerate(parts):
            place = _half(low, pointer, index)
            low.builder.store(low.builder.select(low.truths, part, low.builder.load(place)), place)
    else:
        raise mods.refuse(f"destination {to}")


def _half(low: Lowering, pointer: Value, index: int) -> Value:
    return low.builder.bitcast(low.builder.gep(pointer, [low.i64(32 * index)]), I64.as_pointer())
