"""Activations: GELU in three forms, SiLU, gated units, multipliers and soft caps, over whole vectors as LLVM IR.

    gelu erf      x Phi(x)                                    Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415
    gelu rough    erf's within 3e-5 in half the time, or a third, for a product that rounds it to bfloat16 or int8
    gelu tanh     x (1 + tanh u) / 2 = x sigmoid(2 u),  u = sqrt(2 / pi) (x + 0.044715 x^3)
    gelu sigmoid  x sigmoid(1.702 x)
    silu          x sigmoid(x)
    sigmoid gate  sigmoid(gate) up                            gated attention, https://arxiv.org/abs/2505.06708
    squared relu  max(x, 0)^2                                 https://arxiv.org/abs/2109.08668
    glu           f(gate) up                                  Shazeer, https://arxiv.org/abs/2002.05202
    clamped glu   g sigmoid(1.702 g) (u + 1),  g = min(gate, 7),  u = max(-7, min(up, 7))     gpt-oss
    clamp         max(-c, min(x, c))
    xielu         x > 0: p x^2 + b x,  else: n (e^min(x, eps) - 1 - x) + b x        https://arxiv.org/abs/2411.13010
    add_scaled    x + scale y                                 multipliers, as in Granite
    logits        scale x, or cap tanh(scale x / cap)         Gemma 2, https://arxiv.org/abs/2408.00118

All are about 25 instructions a vector, in float32, NaN in and NaN out.
"""

from __future__ import annotations

import functools
import math

import llvmlite.ir as ir
import numpy as np
from numba import carray
from numba.core import cgutils, types

from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.emitted import LITERAL, emitted
from numba_kernels.cpu.intrinsics.simd import F32, I64, constant_like, fma
from numba_kernels.cpu.layout import TILE_VECTORS
from numba_kernels.cpu.rows import for_each_vector
from numba_kernels.cpu.running.launch import Fields, Kernel, float32_at, int32_at
from numba_kernels.cpu.target import LANES

FIELDS = Fields("*x *up *out num_rows width x_stride up_stride rows_a_work_item", "first second third fourth")

CLAMP = 7.0  # of gpt-oss's gates and factors

# e^(s^2 / 2) Phi(-s) / u as a polynomial in u - 0.5, where u = 1 / (1 + 0.35 s) and 0 <= s <= 13: a minimax fit,
# relative error 3.2e-8.
_TAIL_FAR, _TAIL_SLOPE, _TAIL_MIDDLE = 13.0, 0.35, 0.5
_TAIL = (
    -0.029095102101564407, 0.02733916975557804, 0.04417048767209053, -0.056132473051548004, -0.08174143731594086,
    0.08187060058116913, 0.28439584374427795, 0.3429916203022003, 0.2532442808151245,
)  # fmt: skip

# (Phi(y) - 1/2) / y as a polynomial in y^2 - 9.68, where y <= 4.4: a minimax fit, whose error times y^2 is 2.5e-5.
_ROUGH_FAR, _ROUGH_MIDDLE = 4.4, 9.68
_ROUGH = (
    3.5694315558831846e-11, -9.898833974730792e-10, 1.3360311079679832e-08, -1.8799549650339031e-07,
    3.0523726763931336e-06, -4.419748074724339e-05, 0.0005896413931623101, -0.008121110498905182, 0.16040441393852234,
)  # fmt: skip

# Pieces of s, each around a multiple of _PIECE, and as many parabolas c0 + c1 s + c2 s^2.
_PIECE, _NUM_PIECES = 0.14, 2 * LANES
_FAR = (_NUM_PIECES - 0.6) * _PIECE


def _parabola(number):
    """The one through s Phi(-s) at a piece's Chebyshev nodes; the first one is 0 at 0, the last one at its end."""
    low, high = max(0.0, (number - 0.5) * _PIECE), min((number + 0.5) * _PIECE, _FAR)
    a, b, c = ((low + high) / 2 + (high - low) / 2 * cosine for cosine in (-math.sqrt(0.75), 0.0, math.sqrt(0.75)))
    a, c = a if number else 0.0, c if number < _NUM_PIECES - 1 else high
    at = [s * math.erfc(s / math.sqrt(2)) / 2 if s < _FAR else 0.0 for s in (a, b, c)]
    slope, next_slope = (at[1] - at[0]) / (b - a), (at[2] - at[1]) / (c - b)
    second = (next_slope - slope) / (c - a)
    return at[0] - a * slope + a * b * second, slope - (a + b) * second, second


_TAILS = [_parabola(number) for number in range(_NUM_PIECES)]


def _silu(builder, x):
    return builder.fmul(x, simd.sigmoid(builder, x))


def _gelu_sigmoid(builder, x):
    return builder.fmul(x, simd.sigmoid(builder, builder.fmul(x, constant_like(x, 1.702))))


def _gelu_tanh(builder, x):
    twice = 2.0 * 0.7978845608028654
    cubic = fma(
        builder, builder.fmul(x, x), constant_like(x, twice * 0.044715), constant_like(x, twice)
    )  # 2 u = x (twice + twice 0.044715 x^2)
    return builder.fmul(x, simd.sigmoid(builder, builder.fmul(x, cubic)))


def _gelu_erf(builder, x):
    """max(x, 0) - s Phi(-s) with s = |x|, which keeps its relative accuracy far out: Phi(-s) is e^(-s^2 / 2) times a
    polynomial in 1 / (1 + 0.35 s). Past 13 the tail is less than 1e-37."""
    zero, one, far = (constant_like(x, number) for number in (0.0, 1.0, _TAIL_FAR))
    size = simd.call(builder, f"llvm.fabs.v{LANES}f32", x.type, [x])
    size = builder.select(builder.fcmp_ordered("<", far, size), far, size)
    u = builder.fdiv(one, fma(builder, size, constant_like(x, _TAIL_SLOPE), one))
    v = builder.fsub(u, constant_like(x, _TAIL_MIDDLE))
    curve = constant_like(x, _TAIL[0])
    for coefficient in _TAIL[1:]:
        curve = fma(builder, curve, v, constant_like(x, coefficient))
    gauss = simd.exp2(builder, builder.fmul(builder.fmul(size, size), constant_like(x, -simd.LOG2_E / 2)))
    tail = builder.fmul(curve, builder.fmul(builder.fmul(size, u), gauss))
    positive = builder.select(builder.fcmp_ordered(">", x, zero), x, zero)
    return builder.fsub(positive, tail)


def _gelu_erf_pieces(builder, x):
    """max(x, 0) - s Phi(-s) with s = |x| up to `_FAR`, where it is 0: the tail by the parabola of s's piece, which a
    register of AVX-512 holds for LANES pieces."""
    size = _at_most(builder, simd.call(builder, f"llvm.fabs.v{LANES}f32", x.type, [x]), _FAR)
    # The piece's number is left in the low bits.
    piece = fma(builder, size, constant_like(x, 1 / _PIECE), constant_like(x, 1.5 * 2**23))
    tail, first, second = (simd.look_up(builder, piece, each) for each in zip(*_TAILS))
    tail = fma(builder, fma(builder, second, size, first), size, tail)
    zero = constant_like(x, 0.0)
    return builder.fsub(builder.select(builder.fcmp_ordered(">", x, zero), x, zero), tail)


def _gelu_erf_polynomial(builder, x):
    """max(x, -c) (1/2 + y P(y^2)) with y = x between -c and c: at c the factor is 1, at -c it is 0."""
    low = simd.larger(builder, constant_like(x, -_ROUGH_FAR), x)
    y = _at_most(builder, low, _ROUGH_FAR)
    v = fma(builder, y, y, constant_like(x, -_ROUGH_MIDDLE))
    curve = constant_like(x, _ROUGH[0])
    for coefficient in _ROUGH[1:]:
        curve = fma(builder, curve, v, constant_like(x, coefficient))
    return builder.fmul(low, fma(builder, curve, y, constant_like(x, 0.5)))


def _at_most(builder, x, limit):
    """The smaller one; NaN stays."""
    bound = constant_like(x, limit)
    return builder.select(builder.fcmp_ordered(">", x, bound), bound, x)


def _squared_relu(builder, x):
    zero = constant_like(x, 0.0)
    above = builder.select(builder.fcmp_ordered("<", x, zero), zero, x)
    return builder.fmul(above, above)


def _clamped_silu(builder, x):
    return _gelu_sigmoid(builder, _at_most(builder, x, CLAMP))


def _clamped_factor(builder, up):
    bounded = simd.larger(builder, constant_like(up, -CLAMP), _at_most(builder, up, CLAMP))
    return builder.fadd(bounded, constant_like(up, 1.0))


def _clamp(builder, x, limit, *_):
    x = builder.select(builder.fcmp_ordered(">", x, limit), limit, x)
    least = builder.fsub(constant_like(x, -0.0), limit)
    return builder.select(builder.fcmp_ordered("<", x, least), least, x)


# (e^x - 1 - x) / x^2 for -0.5 <= x <= 0, where the difference would cancel: 1 / n!
_EXP_REST = (1 / 40320, 1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2)


def _xielu(builder, x, positive, negative, beta, eps):
    low = builder.select(builder.fcmp_ordered("<", x, eps), x, eps)
    near = constant_like(x, _EXP_REST[0])
    for coefficient in _EXP_REST[1:]:
        near = fma(builder, near, low, constant_like(x, coefficient))
    near = builder.fmul(near, builder.fmul(low, low))
    far = builder.fsub(builder.fsub(simd.exp(builder, low), constant_like(x, 1.0)), low)
    curve = builder.select(builder.fcmp_ordered("<", low, constant_like(x, -0.5)), far, near)
    curve = builder.fmul(builder.fadd(curve, builder.fsub(low, x)), negative)
    parabola = builder.fmul(positive, builder.fmul(x, x))
    above = builder.fcmp_ordered(">", x, constant_like(x, 0.0))
    return fma(builder, beta, x, builder.select(above, parabola, curve))


_PLAIN = {
    "silu": _silu, "gelu_sigmoid": _gelu_sigmoid, "gelu_tanh": _gelu_tanh, "gelu_erf": _gelu_erf,
    "gelu_erf_rough": _gelu_erf_pieces if TILE_VECTORS > 1 else _gelu_erf_polynomial, "clamped_silu": _clamped_silu,
    "sigmoid": simd.sigmoid, "squared_relu": _squared_relu,
}  # fmt: skip
_SHAPED = {"clamp": _clamp, "xielu": _xielu}  # with numbers of their own
_FUNCTIONS = _PLAIN | _SHAPED
NAMES = tuple(_PLAIN)


@emitted(types.void, LITERAL, *[types.intp] * 4, *[types.float32] * 4)
def _apply(builder, which, x, up, out, count, first, second, third, fourth):
    """``out[i] = f(x[i])`` for ``count`` floats, times ``up[i]``, or a clamped function's factor of it, where that
    address is not 0; ``out`` may be ``x``. Some functions take the numbers.

    ``which`` is a literal index into _FUNCTIONS.
    """
    name, numbers = list(_FUNCTIONS)[which], []
    if name in _SHAPED:
        numbers = [simd.splat(builder, number) for number in (first, second, third, fourth)]

    def piece(offset, mask):
        value = _FUNCTIONS[name](builder, simd.masked_load(builder, builder.add(x, offset), mask), *numbers)
        register = cgutils.alloca_once(builder, simd.vector(F32))
        builder.store(value, register)
        with builder.if_then(builder.icmp_signed("!=", up, ir.Constant(I64, 0))):
            factor = simd.masked_load(builder, builder.add(up, offset), mask)
            if name == "clamped_silu":
                factor = _clamped_factor(builder, factor)
            builder.store(builder.fmul(value, factor), register)
        simd.masked_store(builder, builder.load(register), builder.add(out, offset), mask)

    for_each_vector(builder, count, piece)


GATED = ("silu", "gelu_tanh", "clamped_silu")
"""Functions of `gate_rows`, numbered from 1 on."""


@emitted(types.void, *[types.intp] * 8)
def gate_rows(builder, number, gate, up, stride, out, out_stride, rows, count):
    """``out = f(gate) * up`` of ``rows`` rows of at most PANEL_COLUMNS floats, ``count``; all addresses, strides in
    bytes. Results are those of `activation_kernel`. Lines of as many rows after them are fetched to be written."""
    ahead = builder.mul(rows, out_stride)
    vectors = builder.sdiv(builder.add(count, ir.Constant(I64, LANES - 1)), ir.Constant(I64, LANES))

    def emit_rows(name, size):
        masks = [simd.lanes_below(builder, v * LANES, count) for v in range(size)]
        with cgutils.for_range(builder, rows, intp=I64) as loop:
            inputs, to = builder.mul(loop.index, stride), builder.mul(loop.index, out_stride)
            for v, mask in enumerate(masks):

                def load(start, v=v, mask=mask, inputs=inputs):
                    return simd.masked_load(
                        builder, simd.offset(builder, builder.add(start, inputs), v * LANES * 4), mask
                    )

                value, factor = _FUNCTIONS[name](builder, load(gate)), load(up)
                factor = _clamped_factor(builder, factor) if name == "clamped_silu" else factor
                place = simd.offset(builder, builder.add(out, to), v * LANES * 4)
                simd.masked_store(builder, builder.fmul(value, factor), place, mask)
                simd.prefetch_to_write(builder, builder.add(place, ahead))

    def emit(which):
        simd.for_each_of(builder, vectors, range(1, TILE_VECTORS + 1), functools.partial(emit_rows, GATED[which - 1]))

    simd.for_each_of(builder, number, range(1, len(GATED) + 1), emit)


@functools.cache
def activation_kernel(name: str) -> Kernel:
    """``out [R, W] = f(x)``, times ``up`` unless its address is 0; a work item is some rows. Strides in elements. The
    numbers are those of functions that take some."""
    which = list(_FUNCTIONS).index(name)

    def activation(arguments, work_item):
        a = carray(arguments, 1)[0]
        one, two, three, four = np.float32(a.first), np.float32(a.second), np.float32(a.third), np.float32(a.fourth)
        first = work_item * a.rows_a_work_item
        for row in range(first, min(a.num_rows, first + a.rows_a_work_item)):
            up = a.up + row * a.up_stride * 4 if a.up != 0 else 0
            x, out = a.x + row * a.x_stride * 4, a.out + row * a.width * 4
            _apply(which, x, up, out, a.width, one, two, three, four)

    return Kernel(activation, FIELDS)


@emitted(types.void, types.intp, types.intp, types.float32, types.float32)
def cap_floats(builder, values, count, scale, cap):
    """``x = cap tanh(x scale / cap)`` for the ``count`` floats at the address ``values``; NaN stays.

    tanh is (1 - e) / (1 + e) with e = exp(-2 |x|): its error is 1e-7 of the cap.
    """
    factor, bound = simd.splat(builder, scale), simd.splat(builder, cap)
    exponent = builder.fdiv(constant_like(bound, -2.0 * simd.LOG2_E), bound)
    one = constant_like(bound, 1.0)

    def piece(offset, mask):
        place = builder.add(values, offset)
        x = builder.fmul(simd.masked_load(builder, place, mask), factor)
        is_negative = builder.fcmp_ordered("<", x, constant_like(x, 0.0))
        size = builder.select(is_negative, builder.fsub(constant_like(x, -0.0), x), x)
        e = simd.exp2(builder, builder.fmul(size, exponent))
        result = builder.fmul(bound, builder.fdiv(builder.fsub(one, e), builder.fadd(one, e)))
        negative = builder.fsub(constant_like(x, -0.0), result)
        simd.masked_store(builder, builder.select(is_negative, negative, result), place, mask)

    for_each_vector(builder, count, piece)


@functools.cache
def logits_kernel() -> Kernel:
    """Multiplies ``logits [R, V]`` by ``scale`` and caps them where ``softcap`` is above 0; a work item is some
    rows."""

    def scale_logits(arguments, work_item):
        a = carray(arguments, 1)[0]
        width, scale, softcap = a.width, np.float32(a.scale), np.float32(a.softcap)
        first = work_item * a.rows_a_work_item
        for row in range(first, min(a.num_rows, first + a.rows_a_work_item)):
            at = a.logits + row * width * 4
            if softcap > np.float32(0.0):
                cap_floats(at, width, scale, softcap)
            else:
                logits = float32_at(at, width)
                for i in range(width):
                    logits[i] *= scale

    return Kernel(scale_logits, Fields("*logits num_rows width rows_a_work_item", "scale softcap"))


@functools.cache
def forbid_kernel() -> Kernel:
    """Writes minus infinity at some columns of ``logits [R, V]``; a work item is some rows."""

    def forbid(arguments, work_item):
        a = carray(arguments, 1)[0]
        ids = int32_at(a.ids, a.num_ids)
        first = work_item * a.rows_a_work_item
        for row in range(first, min(a.num_rows, first + a.rows_a_work_item)):
            logits = float32_at(a.logits + row * a.width * 4, a.width)
            for i in range(a.num_ids):
                logits[ids[i]] = -np.inf

    return Kernel(forbid, Fields("*logits *ids num_ids num_rows width rows_a_work_item"))


@functools.cache
def keep_groups_kernel() -> Kernel:
    """Writes minus infinity at the columns of all but the ``num_best`` groups of ``logits [R, V]`` with the largest
    ``scores [R, G]``, of equal ones the first; ``columns [G, V / G]``. ``kept [R, G]`` is scratch memory. A work item
    is some rows."""

    def keep_groups(arguments, work_item):
        a = carray(arguments, 1)[0]
        count, size = a.num_groups, a.size
        columns = int32_at(a.columns, count * size)
        first = work_item * a.rows_a_work_item
        for row in range(first, min(a.num_rows, first + a.rows_a_work_item)):
            logits = float32_at(a.logits + row * count * size * 4, count * size)
            scores, kept = float32_at(a.scores + row * count * 4, count), int32_at(a.kept + row * count * 4, count)
            for group in range(count):
                kept[group] = 0
            for _ in range(a.num_best):
                best = -1
                for group in range(count):
                    if kept[group] == 0 and (best < 0 or scores[group] > scores[best]):
                        best = group
                kept[best] = 1
            for group in range(count):
                if kept[group] == 0:
                    for place in range(group * size, (group + 1) * size):
                        logits[columns[place]] = -np.inf

    fields = "*logits *scores *columns *kept num_groups size num_best num_rows rows_a_work_item"
    return Kernel(keep_groups, Fields(fields))


@functools.cache
def add_scaled_kernel() -> Kernel:
    """``out [R, W] = x + scale y``; a work item is some rows."""

    def add_scaled(arguments, work_item):
        a = carray(arguments, 1)[0]
        width, scale = a.width, np.float32(a.scale)
        first = work_item * a.rows_a_work_item
        count = (min(a.num_rows, first + a.rows_a_work_item) - first) * width
        at = first * width * 4
        x, y, out = float32_at(a.x + at, count), float32_at(a.y + at, count), float32_at(a.out + at, count)
        for i in range(count):
            out[i] = x[i] + scale * y[i]

    return Kernel(add_scaled, Fields("*x *y *out num_rows width rows_a_work_item", "scale"))
