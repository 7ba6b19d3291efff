"""Comparisons and selections (PTX ISA, "Comparison and Selection Instructions"), of integers, floats and pairs."""

from __future__ import annotations

from runtime.device.emulator.arithmetic.by_type import by_type
from runtime.device.emulator.arithmetic.floats import flush, is_nan
from runtime.device.emulator.arithmetic.halves import KINDS as HALVES
from runtime.device.emulator.arithmetic.halves import widened
from runtime.device.emulator.arithmetic.integers import is_signed
from runtime.device.emulator.translation.lowering import Lowering, lowers
from runtime.device.emulator.translation.modifiers import Modifiers
from runtime.device.emulator.translation.ptx import Instruction, Operand, Pair, Sink
from runtime.device.emulator.translation.vectors import I16, I32, Builder, Value, like, mask_of, splat, truths_of

_INTEGERS = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")
_FLOATS = ("f32", "f64", *HALVES)
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


def _sources(low: Lowering, operand: Operand, kind: str, ftz: bool) -> list[Value]:
    if kind in HALVES:
        return widened(low, operand, kind, ftz)
    x = low.value(operand, kind)
    return [flush(low.builder, x) if ftz else x]


def _compared(low: Lowering, mods: Modifiers, kind: str) -> list[tuple[Value, Value | None]]:
    """For each element of the type: the i32 mask of the comparison, and of its negation where a predicate combines.

    Both are combined with the predicate operand already, if there is one.
    """
    b = low.builder
    name = mods.one_of((*_SIGNS, *_UNSIGNED, *_UNORDERED, "num", "nan"))
    combine = mods.one_of(("and", "or", "xor"), "")
    ftz = kind in ("f32", "f16", "f16x2") and mods.take("ftz")
    sources = mods.operands(4 if combine else 3)[1:]
    pairs = zip(_sources(low, sources[0], kind, ftz), _sources(low, sources[1], kind, ftz))
    found = []
    for x, y in pairs:
        truth = mask_of(b, comparison(b, mods, name, kind, x, y))
        opposite = b.not_(truth)
        if combine:
            given = low.predicate(sources[2])
            make = {"and": b.and_, "or": b.or_, "xor": b.xor}[combine]
            truth, opposite = make(truth, given), make(opposite, given)
        found.append((truth, opposite))
    return found


@by_type("setp", kinds=(*_INTEGERS, *_FLOATS))
def setp(low: Lowering, mods: Modifiers, kind: str) -> None:
    to = mods.ins.operands[0] if mods.ins.operands else Sink()
    found = _compared(low, mods, kind)
    if kind.endswith("x2"):
        if not isinstance(to, Pair):
            raise mods.refuse("needs p|q")
        low.write_predicate(to.first, found[0][0])
        low.write_predicate(to.second, found[1][0])
    elif isinstance(to, Pair):
        low.write_predicate(to.first, found[0][0])
        low.write_predicate(to.second, found[0][1])
    else:
        low.write_predicate(to, found[0][0])


_ONES = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}


@by_type("set", kinds=(*_INTEGERS, *_FLOATS))
def set_(low: Lowering, mods: Modifiers, kind: str) -> None:
    """All ones, or 1.0, where the comparison holds; zero elsewhere."""
    b = low.builder
    to = mods.type(("u32", "s32", "f32", "u16", "s16", "f16", "bf16", "f16x2", "bf16x2"))
    is_pair = kind.endswith("x2")
    known: tuple[str, ...] = ("u32", "s32", "f16x2", "bf16x2") if is_pair else ("u32", "s32", "f16", "bf16")
    if kind in ("f16", "bf16"):
        known += ("u16", "s16")
    elif not is_pair:
        known += ("f32",)
    if to not in known:
        raise mods.refuse(f"from .{kind} to .{to}")
    parts = [truths_of(b, truth) for truth, _ in _compared(low, mods, kind)]
    target = mods.ins.operands[0]
    if is_pair:
        one = _ONES.get(to.removesuffix("x2"), 0xFFFF)
        lower, upper = (b.select(part, splat(I32, one), splat(I32, 0)) for part in parts)
        low.write(target, b.or_(lower, b.shl(upper, splat(I32, 16))))
        return
    kind_of_result = I16 if to.endswith("16") else I32
    low.write(target, b.select(parts[0], splat(kind_of_result, _ONES.get(to, -1)), splat(kind_of_result, 0)))


_ANY = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")


@by_type("selp", kinds=_ANY)
def selp(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, x, y, which = mods.operands(4)
    chosen = truths_of(low.builder, low.predicate(which))
    low.write(to, low.builder.select(chosen, low.value(x, kind), low.value(y, kind)))


@lowers("slct")
def slct(low: Lowering, ins: Instruction) -> None:
    """`a` where c is not negative, else `b`; NaN counts as negative, −0 does not."""
    mods, b = Modifiers(ins), low.builder
    of, kind = mods.type(("s32", "f32")), mods.type(_ANY)
    ftz = of == "f32" and mods.take("ftz")
    to, x, y, which = mods.operands(4)
    value = low.value(which, of)
    if of == "f32":
        value = flush(b, value) if ftz else value
        chosen = b.fcmp_ordered(">=", value, like(value, 0.0))
    else:
        chosen = b.icmp_signed(">=", value, like(value, 0))
    low.write(to, b.select(chosen, low.value(x, kind), low.value(y, kind)))
    mods.done()
