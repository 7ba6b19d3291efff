"""float32 and float64 arithmetic (PTX ISA, "Floating-Point Instructions"), rounded once, in every direction.

To nearest even is the machine's own mode: plain IR. The others change the machine's rounding direction around one
instruction, in a function of their own, so that they are exact for every operation and type on every host.

A NaN result of float32 is the canonical 0x7fffffff and one of float64 0x7ff8000000000000, so that results do not depend
on the host. .ftz flushes subnormal operands and results to a zero of their sign.

Instructions with a documented error give the exact value moved close to the edge of what the PTX ISA allows, so kernels
cannot rely on more accuracy. Each works in float64 on exact operands and rounds to float32 at the end; the move and
that last rounding together stay inside the bound. Powers of two, zeros, infinities and signs come out as in the
manual's tables; results move monotonically.

    rcp     1 ulp                     rounded away from zero
    sqrt    2**-23 relative           rsqrt   2**-22.9 relative
    ex2     2**-22.5 of the mantissa  lg2     2**-22.6
    div     2 ulp
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from llvmlite import ir

from runtime.emulator.translation.forms import Modifiers
from runtime.emulator.translation.vectors import (
    F32,
    F64,
    I32,
    I64,
    WORD,
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

ROUNDINGS = ("rn", "rz", "rm", "rp")
_DIRECTIONS = {"rz": 0, "rn": 1, "rp": 2, "rm": 3}  # as llvm.set.rounding counts them


def rounded(builder: Builder, name: str, result: object, arguments: Sequence[Value], mode: str) -> Value:
    """``name(*arguments)`` as `result`, rounded once; names: fadd fsub fmul fdiv fma sqrt fptrunc."""
    if mode == "rn":
        if name in ("fma", "sqrt"):
            return intrinsic(builder, name, result, arguments)
        if name == "fptrunc":
            return builder.fptrunc(arguments[0], result)
        return getattr(builder, name)(*arguments)
    types = [result, arguments[0].type] if name == "fptrunc" else [result]
    text = ".".join(str(type_) for type_ in types)

    def body(b: Builder, *parameters: Value) -> Value:
        module = b.module
        words = [ir.MetaDataString(module, word) for word in ("round.dynamic", "fpexcept.strict")]
        turn(b, mode)
        value = intrinsic(b, f"experimental.constrained.{name}", result, [*parameters, *words], types=types)
        turn(b, "rn")
        return value

    def turn(b: Builder, mode: str) -> None:
        function = b.module.globals.get("llvm.set.rounding")
        if function is None:
            function = ir.Function(b.module, ir.FunctionType(ir.VoidType(), [WORD]), "llvm.set.rounding")
        b.call(function, [ir.Constant(WORD, _DIRECTIONS[mode])])

    return shared(builder, f"xserv.{name}.{mode}.{text}", result, arguments, body, strict=True)


def _to_odd(b: Builder, narrow: Value, error: Value, bits: object) -> Value:
    """A result rounded to nearest → rounded to odd: inexact ones end in an odd bit.

    `error` is the exact result minus `narrow`; only its sign counts.
    """
    word = b.bitcast(narrow, bits)
    one, zero = like(word, 1), like(error, 0)
    is_even = b.icmp_unsigned("==", b.and_(word, one), like(word, 0))
    inexact = b.fcmp_ordered("!=", error, zero)
    grows = b.xor(b.fcmp_ordered(">", error, zero), b.icmp_signed("<", word, like(word, 0)))  # in magnitude
    moved = b.add(word, b.select(grows, one, like(word, -1)))
    return b.bitcast(b.select(b.and_(is_even, inexact), moved, word), narrow.type)


def narrow_to_odd(b: Builder, x: Value) -> Value:
    """float64 → float32 rounded to odd: a second rounding, to 22 bits or less, then gives what one alone would."""
    narrow = b.fptrunc(x, F32)
    return _to_odd(b, narrow, b.fsub(x, b.fpext(narrow, F64)), I32)


def sum_to_odd(b: Builder, x: Value, y: Value) -> Value:
    """x + y of float64 rounded to odd, by Knuth's two-sum. Values far from overflow."""
    total = b.fadd(x, y)
    part = b.fsub(total, x)
    error = b.fadd(b.fsub(x, b.fsub(total, part)), b.fsub(y, part))
    return _to_odd(b, total, error, I64)


_WORDS = {str(F32): I32, str(F64): I64}
NAN = {str(F32): 0x7FFFFFFF, str(F64): 0x7FF8000000000000}
_NAMES = {
    "add": "fadd",
    "sub": "fsub",
    "mul": "fmul",
    "div": "fdiv",
    "rcp": "fdiv",
    "fma": "fma",
    "mad": "fma",
    "sqrt": "sqrt",
}


# --- on values ---


def bits_of(b: Builder, x: Value) -> Value:
    return b.bitcast(x, _WORDS[str(x.type)])


def is_nan(b: Builder, x: Value) -> Value:
    return b.fcmp_unordered("uno", x, x)


def canonical(b: Builder, x: Value) -> Value:
    """NaN → the one NaN."""
    nan = b.bitcast(splat(_WORDS[str(x.type)], NAN[str(x.type)]), x.type)
    return b.select(is_nan(b, x), nan, x)


def flush(b: Builder, x: Value) -> Value:
    """A subnormal float32 → a zero of its sign."""
    word = bits_of(b, x)
    is_small = b.icmp_unsigned("==", b.and_(word, splat(I32, 0x7F800000)), splat(I32, 0))
    return b.bitcast(b.select(is_small, b.and_(word, splat(I32, 0x80000000)), word), F32)


def saturate(b: Builder, x: Value) -> Value:
    """Clamps to [+0, 1]; NaN gives +0."""
    zero, one = like(x, 0.0), like(x, 1.0)
    x = b.select(b.fcmp_ordered(">", x, zero), x, zero)
    return b.select(b.fcmp_ordered("<", x, one), x, one)


def least_or_most(b: Builder, name: str, x: Value, y: Value, keeps_nan: bool) -> Value:
    """min or max with −0 < +0. A NaN and a number give the number, or with `keeps_nan` the NaN."""
    xs, ys = bits_of(b, x), bits_of(b, y)
    wins = b.fcmp_ordered("<" if name == "min" else ">", x, y)
    equal = b.fcmp_ordered("==", x, y)  # as zeros of two signs are
    tied = b.bitcast(b.or_(xs, ys) if name == "min" else b.and_(xs, ys), x.type)
    result = b.select(equal, tied, b.select(wins, x, y))
    x_nan, y_nan = is_nan(b, x), is_nan(b, y)
    if keeps_nan:
        result = b.select(x_nan, x, b.select(y_nan, y, result))
    else:
        result = b.select(y_nan, x, b.select(x_nan, y, result))
    return canonical(b, result)


# --- instructions ---


def arithmetic(form: Modifiers, *values: Value) -> Value:
    """Rounded once: add, sub, mul, fma, div, rcp, sqrt."""
    b, ftz = form.b, "ftz" in form
    mode = form.one_of(ROUNDINGS, "rn")
    given = _flushed(b, values, ftz)
    if form.name == "rcp":
        given.insert(0, like(given[0], 1.0))
    return finish(b, rounded(b, _NAMES[form.name], given[0].type, given, mode), ftz, "sat" in form)


def _flushed(b: Builder, arguments: tuple[Value, ...], ftz: bool) -> list[Value]:
    return [flush(b, argument) for argument in arguments] if ftz else list(arguments)


def finish(b: Builder, result: Value, ftz: bool, sat: bool) -> Value:
    if sat:  # NaN goes to zero and so does what .ftz would flush, but for subnormals
        return saturate(b, flush(b, result) if ftz else result)
    result = canonical(b, result)
    return flush(b, result) if ftz else result


def approximation(form: Modifiers, *values: Value) -> Value:
    """.approx, and .full of div; divisions always flush."""
    name = f"{form.name}.{'full' if 'full' in form else 'approx'}"
    ftz = "ftz" in form or form.name == "div"
    result = shared(form.b, f"xserv.{name}", values[0].type, _flushed(form.b, values, ftz), _FUNCTIONS[name])
    return finish(form.b, result, ftz, False)


def sign(form: Modifiers, x: Value) -> Value:
    if "ftz" in form:
        x = flush(form.b, x)
    return unary(form.b, "fabs", x) if form.name == "abs" else form.b.fneg(x)


def extremum(form: Modifiers, *values: Value) -> Value:
    x, y = _flushed(form.b, values, "ftz" in form)
    return least_or_most(form.b, form.name, x, y, "NaN" in form)


def copy_sign(form: Modifiers, of: Value, magnitude: Value) -> Value:
    b, top = form.b, like(of, 1 << (width(of) - 1))
    return b.or_(b.and_(of, top), b.and_(magnitude, b.not_(top)))


HALF_ULP = 2.0**-24  # the largest relative error of rounding to float32


def scaled(b: Builder, x: Value, relative: float) -> Value:
    """x (1 + relative)."""
    return b.fmul(x, like(x, 1.0 + relative))


def moved(b: Builder, x: Value, distance: float | Value) -> Value:
    """x moved by `distance`, away from zero if it is positive, by at most a quarter of x."""
    step = like(x, abs(distance)) if isinstance(distance, float) else distance
    step = binary(b, "minnum", step, b.fmul(unary(b, "fabs", x), like(x, 0.25)))
    step = binary(b, "copysign", step, x)
    result = b.fsub(x, step) if isinstance(distance, float) and distance < 0 else b.fadd(x, step)
    return binary(b, "copysign", result, x)  # −0 stays


def exp2(b: Builder, x: Value) -> Value:
    """2**x of float64 to about 1e-11: the whole part into the exponent, a Taylor polynomial of the rest."""
    x = binary(b, "minnum", binary(b, "maxnum", x, like(x, -1000.0)), like(x, 1000.0))
    whole = unary(b, "rint", x)
    rest = b.fsub(x, whole)
    degree = 11
    result = like(x, math.log(2) ** degree / math.factorial(degree))
    for power in range(degree - 1, -1, -1):
        result = intrinsic(b, "fma", F64, [result, rest, like(x, math.log(2) ** power / math.factorial(power))])
    exponent = b.shl(b.add(b.sext(b.fptosi(whole, I32), I64), splat(I64, 1023)), splat(I64, 52))
    return b.fmul(result, b.bitcast(exponent, F64))


def _float32(body: Callable[..., Value]) -> Callable[..., Value]:
    """A function of float64 vectors as one of float32 vectors."""
    return lambda b, *arguments: b.fptrunc(body(b, *(b.fpext(argument, F64) for argument in arguments)), F32)


def _reciprocal(b: Builder, x: Value) -> Value:
    """Rounds away from zero by less than 1 ulp; and a power of two's is exact."""
    exact = b.fdiv(splat(F64, 1.0), b.fpext(x, F64))
    near = b.fptrunc(exact, F32)
    short = b.fcmp_ordered("<", unary(b, "fabs", b.fpext(near, F64)), unary(b, "fabs", exact))
    return b.bitcast(b.add(b.bitcast(near, I32), b.zext(short, I32)), F32)


def _root(b: Builder, x: Value) -> Value:
    return scaled(b, unary(b, "sqrt", x), 0.9 * HALF_ULP)


def _reciprocal_root(b: Builder, x: Value) -> Value:
    return scaled(b, b.fdiv(like(x, 1.0), unary(b, "sqrt", x)), 1.1 * HALF_ULP)


def _power(b: Builder, x: Value) -> Value:
    result = scaled(b, exp2(b, x), 0.9 * HALF_ULP)
    return b.select(b.fcmp_unordered("uno", x, x), x, result)


def _logarithm(b: Builder, x: Value) -> Value:
    exact = unary(b, "log2", x)
    size = binary(b, "maxnum", unary(b, "fabs", exact), like(x, 1.0))
    return moved(b, exact, b.fmul(size, like(x, 1.6 * HALF_ULP)))


def _quotient(b: Builder, x: Value, y: Value) -> Value:
    return scaled(b, b.fdiv(x, y), 1.4 * HALF_ULP)


def _quick_quotient(b: Builder, x: Value, y: Value) -> Value:
    """div.approx: beyond 2**126 the divisor's reciprocal is a zero."""
    beyond = b.fcmp_ordered(">", unary(b, "fabs", y), like(y, 2.0**126))
    return b.select(beyond, b.fmul(x, binary(b, "copysign", like(y, 0.0), y)), _quotient(b, x, y))


_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "rcp.approx": _reciprocal,
    "sqrt.approx": _float32(_root),
    "rsqrt.approx": _float32(_reciprocal_root),
    "ex2.approx": _float32(_power),
    "lg2.approx": _float32(_logarithm),
    "div.approx": _float32(_quick_quotient),
    "div.full": _float32(_quotient),
}
