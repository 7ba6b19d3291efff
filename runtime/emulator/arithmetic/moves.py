"""mov: between registers, from literals, predefined registers and addresses; packing and unpacking of vectors."""

from __future__ import annotations

from runtime.emulator.arithmetic.by_type import by_type
from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.modifiers import Modifiers
from runtime.emulator.translation.ptx import TYPE_BYTES, Operand, Register, Sink, Vector
from runtime.emulator.translation.vectors import I64, INTEGERS, Value, like

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
