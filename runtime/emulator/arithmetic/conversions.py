"""cvt (PTX ISA, "Data Movement and Conversion Instructions"), between all numbers that registers hold.

A float beyond an integer's range clamps; NaN gives zero, or the top bit alone where the source is float64 or the
integer has 64 bits. Conversions into small floats pass through float32 rounded to odd, so that each rounds once.
"""

from __future__ import annotations

from runtime.emulator.arithmetic.floats import (
    ROUNDINGS,
    canonical,
    flush,
    is_nan,
    narrow_to_odd,
    rounded,
    saturate,
    sum_to_odd,
)
from runtime.emulator.arithmetic.integers import is_signed
from runtime.emulator.arithmetic.small_floats import FORMATS, narrow, widen
from runtime.emulator.translation.forms import Modifiers
from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.ptx import Instruction, Operand
from runtime.emulator.translation.vectors import (
    F32,
    F64,
    I16,
    I32,
    I64,
    INTEGERS,
    Builder,
    Value,
    binary,
    intrinsic,
    like,
    shared,
    splat,
    unary,
    width,
)

WHOLE = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
_TO_WHOLE = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
_SMALL = ("e4m3x2", "e5m2x2")
_PAIRS = ("f16x2", "bf16x2")
_KINDS = (*WHOLE, *FLOATS, *_SMALL, *_PAIRS, "tf32")


def cvt(low: Lowering, ins: Instruction) -> None:
    mods = Modifiers(ins)
    of, to = mods.type(_KINDS), mods.type(_KINDS)
    if to in WHOLE:
        _to_integer(low, mods, to, of)
    elif to in ("f32", "f64"):
        _to_wide(low, mods, to, of)
    elif to in ("f16", "bf16", "tf32"):
        _to_small(low, mods, to, of)
    else:
        _to_pair(low, mods, to, of)
    mods.done()


# --- integers ---


def _write_integer(low: Lowering, to: Operand, x: Value, signed: bool) -> None:
    """A signed result is extended by its sign to the whole register."""
    b, bits = low.builder, low.bits_of(to)
    if signed and width(x) < bits:
        x = b.sext(x, INTEGERS[bits])
    low.write(to, x)


def _limits(kind: str) -> tuple[int, int]:
    bits = int(kind[1:])
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed(kind) else (0, (1 << bits) - 1)


def clamp_integer(b: Builder, x: Value, of: str, to: str) -> Value:
    """x, of integer type `of`, brought into the range of `to`; the width stays."""
    (low, high), (least, most) = _limits(to), _limits(of)
    sign = "s" if is_signed(of) else "u"
    if high < most:
        x = binary(b, f"{sign}min", x, like(x, high))
    if low > least:
        x = binary(b, f"{sign}max", x, like(x, low))
    return x


def _to_integer(low: Lowering, mods: Modifiers, to: str, of: str) -> None:
    b = low.builder
    target, source = mods.operands(2)
    if of in WHOLE:
        x = low.value(source, of)
        if mods.take("sat"):
            x = clamp_integer(b, x, of, to)
        bits = int(to[1:])
        if width(x) > bits:
            x = b.trunc(x, INTEGERS[bits])
        elif width(x) < bits:
            x = b.sext(x, INTEGERS[bits]) if is_signed(of) else b.zext(x, INTEGERS[bits])
        _write_integer(low, target, x, is_signed(to))
        return
    if of not in FLOATS:
        raise mods.refuse(f"from .{of} to .{to}")
    way = _TO_WHOLE[mods.one_of(_TO_WHOLE)]
    mods.take("sat")  # already holds
    x = _float_source(low, source, of, of == "f32" and mods.take("ftz"))
    name = f"xserv.cvt.{to}.{of}.{way}"
    result = shared(b, name, INTEGERS[int(to[1:])], [x], lambda b, x: _whole(b, x, to, of, way))
    _write_integer(low, target, result, is_signed(to))


def _whole(b: Builder, x: Value, to: str, of: str, way: str) -> Value:
    integers = INTEGERS[int(to[1:])]
    name = "fptosi.sat" if is_signed(to) else "fptoui.sat"
    result = intrinsic(b, name, integers, [unary(b, way, x)], types=[integers, x.type])  # NaN → 0
    if to.endswith("64") or of == "f64":
        result = b.select(is_nan(b, x), splat(integers, 1 << (width(result) - 1)), result)
    return result


# --- floats ---


def _float_source(low: Lowering, operand: Operand, kind: str, ftz: bool) -> Value:
    """float32 (of f16 and bf16 too) or float64."""
    if kind in ("f32", "f64"):
        x = low.value(operand, kind)
        return flush(low.builder, x) if ftz else x
    return widen(low.builder, low.value(operand, kind), kind)


def _integer_to_float(b: Builder, x: Value, signed: bool, to: str, mode: str) -> Value:
    """An integer → float64, or float32, or (to "odd") a float32 rounded to odd, rounded once.

    Conversions of the machine's own only where they are exact or round to nearest: elsewhere LLVM makes them of parts
    that each round in that direction.
    """
    if width(x) < 64:
        if to == "f32" and mode == "rn":
            return b.sitofp(x, F32) if signed else b.uitofp(x, F32)
        wide = b.sitofp(x, F64) if signed else b.uitofp(x, F64)  # exact
        if to == "f64":
            return wide
    else:
        upper, lower = b.lshr(x, splat(I64, 32)), b.trunc(x, I32)
        upper = b.trunc(upper, I32)
        upper = b.fmul(b.sitofp(upper, F64) if signed else b.uitofp(upper, F64), splat(F64, 2.0**32))
        parts = [upper, b.uitofp(lower, F64)]
        if to == "f64":
            return rounded(b, "fadd", F64, parts, mode)
        wide = sum_to_odd(b, *parts)
    return narrow_to_odd(b, wide) if to == "odd" else rounded(b, "fptrunc", F32, [wide], mode)


def _of_integer(low: Lowering, source: Operand, of: str, to: str, mode: str) -> Value:
    x, signed = low.value(source, of), is_signed(of)
    result = F64 if to == "f64" else F32
    name = f"xserv.cvt.{to}.{of}.{mode}"
    return shared(low.builder, name, result, [x], lambda b, x: _integer_to_float(b, x, signed, to, mode))


def _to_wide(low: Lowering, mods: Modifiers, to: str, of: str) -> None:
    """Conversion to float32 or float64."""
    b = low.builder
    target, source = mods.operands(2)
    ftz = "f32" in (to, of) and mods.take("ftz")
    if of in WHOLE:
        result = _of_integer(low, source, of, to, mods.one_of(ROUNDINGS))
    elif of in FLOATS:
        result = _float_source(low, source, of, ftz)
        if of == to:
            way = mods.one_of(_TO_WHOLE, "")
            if way:
                result = _keep_sign(b, unary(b, _TO_WHOLE[way], result), result)
        elif result.type == F64:
            result = rounded(b, "fptrunc", F32, [result], mods.one_of(ROUNDINGS))
        elif to == "f64":
            result = b.fpext(result, F64)
    else:
        raise mods.refuse(f"from .{of} to .{to}")
    if mods.take("sat"):
        result = saturate(b, result)
    result = canonical(b, result)
    low.write(target, flush(b, result) if ftz and to == "f32" else result)


def _keep_sign(b: Builder, x: Value, signed: Value) -> Value:
    """Values that round to zero keep their sign."""
    return binary(b, "copysign", x, signed)


def _to_small(low: Lowering, mods: Modifiers, to: str, of: str) -> None:
    """Conversion to f16, bf16 or tf32."""
    b = low.builder
    target, source = mods.operands(2)
    ftz = of == "f32" and mods.take("ftz")
    roundings = ("rn", "rz", "rna") if to == "tf32" else ROUNDINGS
    if of in WHOLE:
        mode = mods.one_of(ROUNDINGS)
        x = _of_integer(low, source, of, "odd", "rn")
    elif of in FLOATS and (to != "tf32" or of == "f32"):
        x = _float_source(low, source, of, ftz)
        mode = "rn"
        if of == to:
            way = mods.one_of(_TO_WHOLE, "")
            x = _keep_sign(b, unary(b, _TO_WHOLE[way], x), x) if way else x
        else:
            mode = mods.one_of(roundings)
        if x.type == F64:
            x = shared(b, "xserv.narrow.odd", F32, [x], narrow_to_odd)
    else:
        raise mods.refuse(f"from .{of} to .{to}")
    satfinite = of == "f32" and mods.take("satfinite")
    rectifies = of == "f32" and mods.take("relu")
    if to == "f16" and mods.take("sat"):
        x = saturate(b, x)
    code = narrow(b, x, to, mode, satfinite, rectifies)
    if to == "tf32":
        code = b.or_(b.shl(code, splat(I32, 13)), b.select(is_nan(b, x), splat(I32, 0x1FFF), splat(I32, 0)))
        low.write(target, code)
    else:
        low.write(target, b.trunc(code, I16))


# --- pairs ---


def halves(low: Lowering, operand: Operand) -> list[Value]:
    """The lower and the upper 16-bit float of a pair, each as ``<32 x i16>``."""
    b, both = low.builder, low.value(operand, "b32")
    return [b.trunc(both, I16), b.trunc(b.lshr(both, splat(I32, 16)), I16)]


def _pair_sources(low: Lowering, mods: Modifiers, sources: tuple[Operand, ...], of: str) -> list[Value]:
    """Lower and upper value as float32: of two f32 operands the first is the upper."""
    if of == "f32" and len(sources) == 2:
        return [low.value(sources[1], "f32"), low.value(sources[0], "f32")]
    if of in _PAIRS and len(sources) == 1:
        return [widen(low.builder, part, of.removesuffix("x2")) for part in halves(low, sources[0])]
    raise mods.refuse(f"{len(sources)} sources of type .{of}")


def _to_pair(low: Lowering, mods: Modifiers, to: str, of: str) -> None:
    """Conversion to f16x2, bf16x2 and pairs of fp8."""
    b = low.builder
    target, *sources = mods.operands(2, 3)
    name = to.removesuffix("x2")
    if to in _PAIRS and of in _SMALL:
        _from_small(low, mods, to, of, target, tuple(sources))
        return
    values = _pair_sources(low, mods, tuple(sources), of)
    if to in _PAIRS:
        if of != "f32":
            raise mods.refuse(f"from .{of} to .{to}")
        mode, satfinite = mods.one_of(("rn", "rz")), mods.take("satfinite")
    else:
        mode, satfinite = mods.one_of(("rn",)), mods.take("satfinite")
        if not satfinite:
            raise mods.refuse("needs .satfinite")
    rectifies = mods.take("relu")
    lower, upper = (narrow(b, value, name, mode, satfinite, rectifies) for value in values)
    stride = FORMATS[name].bits
    both = b.or_(lower, b.shl(upper, splat(I32, stride)))
    low.write(target, both if stride == 16 else b.trunc(both, INTEGERS[2 * stride]))


def _from_small(
    low: Lowering, mods: Modifiers, to: str, of: str, target: Operand, sources: tuple[Operand, ...]
) -> None:
    b = low.builder
    if len(sources) != 1:
        raise mods.refuse(f"{len(sources)} sources")
    mods.one_of(("rn",))
    both = low.value(sources[0], "b16")
    codes = [both, b.lshr(both, like(both, 8))]
    rectifies = mods.take("relu")
    name = to.removesuffix("x2")
    floats = [widen(b, code, of.removesuffix("x2")) for code in codes]
    parts = [b.trunc(narrow(b, value, name, relu=rectifies), I16) for value in floats]
    lower, upper = (b.zext(part, I32) for part in parts)
    low.write(target, b.or_(lower, b.shl(upper, splat(I32, 16))))
