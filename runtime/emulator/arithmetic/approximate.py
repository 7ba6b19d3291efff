"""Instructions with a documented error: the exact value moved close to the edge of what the PTX ISA allows.

So kernels cannot rely on more accuracy than is documented. Each works in float64 on exact operands and rounds to
float32 at the end; the move and that last rounding together stay inside the bound. Powers of two, zeros, infinities and
signs come out as in the manual's tables; results move monotonically.

    rcp     1 ulp                     rounded away from zero
    sqrt    2**-23 relative           rsqrt   2**-22.9 relative
    ex2     2**-22.5 of the mantissa  lg2     2**-22.6
    div     2 ulp
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from runtime.emulator.translation.vectors import (
    F32,
    F64,
    I32,
    I64,
    Builder,
    Value,
    binary,
    intrinsic,
    like,
    shared,
    splat,
    unary,
)

HALF_ULP = 2.0**-24  # the largest relative error of rounding to float32


def approximate(builder: Builder, name: str, arguments: Sequence[Value]) -> Value | None:
    """``rcp.approx`` and so on of float32 vectors; None where there is none."""
    body = _FUNCTIONS.get(name)
    if body is None:
        return None
    return shared(builder, f"xserv.{name}", arguments[0].type, arguments, body)


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
