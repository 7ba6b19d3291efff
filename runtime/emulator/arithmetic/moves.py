"""Comparisons, selections and moves of integers and floats, and the exchange between the lanes of a warp.

(PTX ISA, "Comparison and Selection Instructions"; mov; shfl, vote and redux with .sync and a member mask.) Lanes wait
for the others of their member mask (`Lowering.converge`). Masks may differ from lane to lane, as those of tiles do;
each lane sees its own. A shuffle from a lane that does not take part reads POISON, a NaN.
"""

from __future__ import annotations

from llvmlite import ir

from runtime.emulator.arithmetic.floats import flush, is_nan
from runtime.emulator.arithmetic.integers import is_signed
from runtime.emulator.translation.forms import Modifiers
from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.ptx import TYPE_BYTES, Instruction, Integer, Operand, Pair, Register, Sink, Vector
from runtime.emulator.translation.vectors import (
    I1,
    I32,
    I64,
    INTEGERS,
    LANES,
    LONG,
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
)

_INTEGERS = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")
_FLOATS = ("f32", "f64")
_KINDS = (*_INTEGERS, *_FLOATS)
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


def setp(low: Lowering, ins: Instruction) -> None:
    mods = Modifiers(ins)
    kind = mods.type(_KINDS)
    to = ins.operands[0] if ins.operands else Sink()
    truth, opposite = _compared(low, mods, kind)
    mods.done()
    if isinstance(to, Pair):
        low.write_predicate(to.first, truth)
        low.write_predicate(to.second, opposite)
    else:
        low.write_predicate(to, truth)


def select(form: Modifiers, x: Value, y: Value, which: Value) -> Value:
    return form.b.select(truths_of(form.b, which), x, y)


def move(low: Lowering, ins: Instruction) -> None:
    mods = Modifiers(ins)
    kind = mods.type((*_KINDS, "b128"))
    to, source = mods.operands(2)
    mods.done()
    if kind == "b128":
        _move_wide(low, mods, to, source)
    elif isinstance(source, Vector):
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


def _move_wide(low: Lowering, mods: Modifiers, to: Operand, source: Operand) -> None:
    """Two 64-bit halves, the lower first; either side may be a register of .b128."""
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


POISON = 0x7FEDBEEF
_LANE = ir.Constant(I32, [ir.Constant(WORD, lane) for lane in range(LANES)])


# --- shfl ---


def shfl(low: Lowering, ins: Instruction) -> None:
    mods, b = Modifiers(ins), low.builder
    mods.type(("b32",))
    mode = mods.one_of(("up", "down", "bfly", "idx"))
    to, source, distance, clamp, members = mods.operands(5)
    if not mods.take("sync"):
        raise mods.refuse("only with .sync")
    low.converge(members)
    mods.done()
    given = b.select(low.truths, low.value(source, "b32"), splat(I32, POISON))
    if isinstance(distance, Integer) and isinstance(clamp, Integer):
        order = [_source_lane(mode, lane, distance.value, clamp.value) for lane in range(LANES)]
        index = ir.Constant(I32, [ir.Constant(WORD, lane) for lane, _ in order])
        result = b.shuffle_vector(given, ir.Constant(I32, ir.Undefined), index)
        inside = low.i32(sum(is_inside << lane for lane, (_, is_inside) in enumerate(order)))
    else:
        arguments = [low.value(distance, "b32"), low.value(clamp, "b32")]
        lanes = shared(b, f"xserv.shfl.{mode}", I32, arguments, lambda b, x, y: _source_lanes(b, mode, x, y))
        inside = mask_of(b, b.icmp_unsigned("<", lanes, splat(I32, LANES)))
        lanes = b.and_(lanes, splat(I32, LANES - 1))
        slot = low.splat(b.ptrtoint(low.spill(given), LONG))
        places = b.add(slot, b.zext(b.shl(lanes, splat(I32, 2)), I64))
        pointers = b.inttoptr(places, ir.VectorType(WORD.as_pointer(), LANES))
        everywhere = splat(I1, 1)
        result = intrinsic(b, "masked.gather", I32, [pointers, ir.Constant(WORD, 4), everywhere, given])
    if isinstance(to, Pair):
        low.write(to.first, result)
        low.write_predicate(to.second, inside)
    else:
        low.write(to, result)


def _source_lane(mode: str, lane: int, distance: int, clamp: int) -> tuple[int, bool]:
    """The lane that `lane` reads, and whether that lies in its segment (else it reads itself)."""
    distance, segment, limit = distance & 31, (clamp >> 8) & 31, clamp & 31
    most = (lane & segment) | (limit & ~segment)
    if mode == "up":
        source = lane - distance
        inside = source >= most
    else:
        source = {
            "down": lane + distance,
            "bfly": lane ^ distance,
            "idx": (lane & segment) | (distance & ~segment & 31),
        }[mode]
        inside = source <= most
    return (source, True) if inside else (lane, False)


def _source_lanes(b: Builder, mode: str, distance: Value, clamp: Value) -> Value:
    """`_source_lane` in each lane; 32 is added where the lane reads itself because it has no source."""
    ones = splat(I32, 31)
    distance, limit = b.and_(distance, ones), b.and_(clamp, ones)
    segment = b.and_(b.lshr(clamp, splat(I32, 8)), ones)
    outside = b.xor(segment, ones)
    most = b.or_(b.and_(_LANE, segment), b.and_(limit, outside))
    if mode == "up":
        source = b.sub(_LANE, distance)
        inside = b.icmp_signed(">=", source, most)
    else:
        source = {
            "down": lambda: b.add(_LANE, distance),
            "bfly": lambda: b.xor(_LANE, distance),
            "idx": lambda: b.or_(b.and_(_LANE, segment), b.and_(distance, outside)),
        }[mode]()
        inside = b.icmp_signed("<=", source, most)
    return b.select(inside, source, b.or_(_LANE, splat(I32, LANES)))


# --- vote ---


def ballot(form: Modifiers, source: Value, members: Value) -> Value:
    return form.b.and_(form.low.splat(source), members)


def vote(form: Modifiers, source: Value, members: Value) -> Value:
    b, votes = form.b, ballot(form, source, members)
    everyone, nobody = b.icmp_unsigned("==", votes, members), b.icmp_unsigned("==", votes, splat(I32, 0))
    return mask_of(b, everyone if "all" in form else b.not_(nobody) if "any" in form else b.or_(everyone, nobody))


def _broadcast(b: Builder, x: Value, lane: int) -> Value:
    index = ir.Constant(I32, [ir.Constant(WORD, lane)] * LANES)
    return b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), index)


# --- redux ---


def redux(form: Modifiers, x: Value, members: Value) -> Value:
    kind, name = form.kind, form.one_of(("and", "or", "xor", "add", "min", "max"))

    def combine(b: Builder, x: Value, y: Value) -> Value:
        if name in ("min", "max"):
            return binary(b, ("s" if kind == "s32" else "u") + name, x, y)
        return {"add": b.add, "and": b.and_, "or": b.or_, "xor": b.xor}[name](x, y)

    text = f"xserv.redux.{name}.{kind}"
    return shared(form.b, text, x.type, [x, members], lambda b, x, m: _reduced(b, x, m, kind, name, combine))


def _reduced(b: Builder, x: Value, members: Value, kind: str, name: str, combine: object) -> Value:
    """A reduction over each lane's own members, in the order of the lanes."""
    sign = kind == "s32"
    identity = {"and": -1, "min": (1 << 31) - 1 if sign else -1, "max": 1 << 31 if sign else 0}.get(name, 0)
    result = like(x, identity)
    for lane in range(LANES):
        takes = b.icmp_unsigned("!=", b.and_(members, splat(I32, 1 << lane)), splat(I32, 0))
        value = _broadcast(b, x, lane)
        result = b.select(takes, combine(b, result, value), result)  # type: ignore[operator]
    return result
