"""Comparisons, selections and moves of integers and floats, and the exchange between the lanes of a warp.

(PTX ISA, "Comparison and Selection Instructions"; mov; shfl, vote and redux with .sync and a member mask.) Lanes wait
for the others of their member mask (`Lowering.converge`). Masks may differ from lane to lane, as those of tiles do;
each lane sees its own. A shuffle from a lane that does not take part reads POISON, a NaN.
"""

from __future__ import annotations

from llvmlite import ir

from runtime.emulator.arithmetic.floats import flush, is_nan
from runtime.emulator.arithmetic.integers import is_signed
from runtime.emulator.translation.lowering import Lowering, lowers
from runtime.emulator.translation.modifiers import Modifiers, by_type
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


@by_type("setp", kinds=_KINDS)
def setp(low: Lowering, mods: Modifiers, kind: str) -> None:
    to = mods.ins.operands[0] if mods.ins.operands else Sink()
    truth, opposite = _compared(low, mods, kind)
    if isinstance(to, Pair):
        low.write_predicate(to.first, truth)
        low.write_predicate(to.second, opposite)
    else:
        low.write_predicate(to, truth)


@by_type("selp", kinds=_KINDS)
def selp(low: Lowering, mods: Modifiers, kind: str) -> None:
    to, x, y, which = mods.operands(4)
    chosen = truths_of(low.builder, low.predicate(which))
    low.write(to, low.builder.select(chosen, low.value(x, kind), low.value(y, kind)))


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


POISON = 0x7FEDBEEF
_LANE = ir.Constant(I32, [ir.Constant(WORD, lane) for lane in range(LANES)])


def _members(low: Lowering, mods: Modifiers, operand: Operand) -> Value:
    """The lanes that take part, as each lane sees them; they are together from here on."""
    if not mods.take("sync"):
        raise mods.refuse("only with .sync")
    low.converge(operand)
    return low.builder.and_(low.value(operand, "b32"), low.splat(low.mask))


# --- shfl ---


@lowers("shfl")
def shfl(low: Lowering, ins: Instruction) -> None:
    mods, b = Modifiers(ins), low.builder
    mods.type(("b32",))
    mode = mods.one_of(("up", "down", "bfly", "idx"))
    to, source, distance, clamp, members = mods.operands(5)
    _members(low, mods, members)
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


@lowers("vote")
def vote(low: Lowering, ins: Instruction) -> None:
    mods, b = Modifiers(ins), low.builder
    kind = mods.type(("pred", "b32"))
    mode = mods.one_of(("ballot",) if kind == "b32" else ("all", "any", "uni"))
    to, source, operand = mods.operands(3)
    members = _members(low, mods, operand)
    mods.done()
    ballot = b.and_(low.splat(low.predicate(source)), members)
    if mode == "ballot":
        low.write(to, ballot)
        return
    everyone, nobody = b.icmp_unsigned("==", ballot, members), b.icmp_unsigned("==", ballot, splat(I32, 0))
    truth = {"all": lambda: everyone, "any": lambda: b.not_(nobody), "uni": lambda: b.or_(everyone, nobody)}[mode]()
    low.write_predicate(to, mask_of(b, truth))


def _broadcast(b: Builder, x: Value, lane: int) -> Value:
    index = ir.Constant(I32, [ir.Constant(WORD, lane)] * LANES)
    return b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), index)


# --- redux ---


@by_type("redux", kinds=("u32", "s32", "b32"))
def redux(low: Lowering, mods: Modifiers, kind: str) -> None:
    b = low.builder
    name = mods.one_of(("and", "or", "xor") if kind == "b32" else ("add", "min", "max"))
    to, source, operand = mods.operands(3)
    members = _members(low, mods, operand)
    x = low.value(source, kind)

    def combine(b: Builder, x: Value, y: Value) -> Value:
        if name in ("min", "max"):
            return binary(b, ("s" if kind == "s32" else "u") + name, x, y)
        return {"add": b.add, "and": b.and_, "or": b.or_, "xor": b.xor}[name](x, y)

    text = f"xserv.redux.{name}.{kind}"
    low.write(to, shared(b, text, x.type, [x, members], lambda b, x, m: _reduced(b, x, m, kind, name, combine)))


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
