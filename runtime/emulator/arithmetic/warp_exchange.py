"""Exchange between the lanes of a warp: shfl, vote and redux, all with .sync and a member mask.

Lanes wait for the others of their member mask (`Lowering.converge`). Masks may differ from lane to lane, as those of
tiles do; each lane sees its own. A shuffle from a lane that does not take part reads POISON, a NaN.
"""

from __future__ import annotations

from llvmlite import ir

from runtime.emulator.translation.lowering import Lowering, lowers
from runtime.emulator.translation.modifiers import Modifiers, by_type
from runtime.emulator.translation.ptx import Instruction, Integer, Operand, Pair
from runtime.emulator.translation.vectors import (
    I1,
    I32,
    I64,
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
)

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
