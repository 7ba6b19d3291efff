"""LLVM IR building blocks that the tiles share: vector loads with widening, broadcasts, fma, exp, masked stores.

A stored element type is named by the numba type whose bits carry it: float32 itself, uint16 for bfloat16, int16 for
float16 (numba has neither type). Addresses are integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import llvmlite.binding as llvm
import llvmlite.ir as ir
from numba.core import cgutils, types

from numba_kernels.cpu.target import HAS_HALF, LANES, compiled_for

F32 = ir.FloatType()
I1 = ir.IntType(1)
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)


def vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def splat_constant(element: ir.Type, value: float | int, lanes: int = LANES) -> ir.Constant:
    return ir.Constant(vector(element, lanes), [value] * lanes)


def splat(builder: ir.IRBuilder, scalar: ir.Value, lanes: int = LANES) -> ir.Value:
    """``scalar`` in every lane."""
    undefined = ir.Constant(vector(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(vector(I32, lanes), [0] * lanes))


def i64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def offset(builder: ir.IRBuilder, address: ir.Value, size_bytes: int) -> ir.Value:
    """``address`` (an integer) moved by ``size_bytes``."""
    return builder.add(address, ir.Constant(I64, size_bytes))


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int) -> ir.Value:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store(
    builder: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int = 4, *, is_read_soon: bool = True
) -> None:
    """Non-temporal stores bypass the caches, if ``align`` is the vector's size; `atomic.fence` then orders them."""
    stored = builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)
    if not is_read_soon:
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))


def widen(builder: ir.IRBuilder, bits: ir.Value, stored: types.Type, lanes: int = LANES) -> ir.Value:
    """Stored bits (a vector of i16, or of float) as a vector of float."""
    if stored == types.float32:
        return bits
    if stored == types.uint16:  # bfloat16: the upper half of a float32
        wide = builder.shl(builder.zext(bits, vector(I32, lanes)), splat_constant(I32, 16, lanes))
        return builder.bitcast(wide, vector(F32, lanes))
    if HAS_HALF:
        return builder.fpext(builder.bitcast(bits, vector(ir.HalfType(), lanes)), vector(F32, lanes))
    return _half_to_float(builder, bits, lanes)


def _half_to_float(builder: ir.IRBuilder, bits: ir.Value, lanes: int) -> ir.Value:
    """float16 without an instruction for it: the exponent's bias is mended by a product, exact for subnormals too."""

    def number(value: int) -> ir.Constant:
        return splat_constant(I32, value, lanes)

    wide = builder.zext(bits, vector(I32, lanes))
    magnitude = builder.shl(builder.and_(wide, number(0x7FFF)), number(13))
    scale = builder.bitcast(number((127 + 127 - 15) << 23), vector(F32, lanes))
    finite = builder.bitcast(builder.fmul(builder.bitcast(magnitude, vector(F32, lanes)), scale), vector(I32, lanes))
    is_finite = builder.icmp_unsigned("<", magnitude, number(0x7C00 << 13))
    result = builder.select(is_finite, finite, builder.or_(magnitude, number(0x7F800000)))
    sign = builder.shl(builder.and_(wide, number(0x8000)), number(16))
    return builder.bitcast(builder.or_(result, sign), vector(F32, lanes))


def load_wide(builder: ir.IRBuilder, address: ir.Value, stored: types.Type, lanes: int = LANES) -> ir.Value:
    """``lanes`` stored elements at ``address`` as floats."""
    element, size = (F32, 4) if stored == types.float32 else (I16, 2)
    return widen(builder, load(builder, address, vector(element, lanes), size), stored, lanes)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    function_type = ir.FunctionType(result, [value.type for value in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def _suffix(kind: ir.Type) -> str:
    return f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"


def constant_like(value: ir.Value, number: float) -> ir.Constant:
    """``number`` in the type of ``value``: a number, or a vector with it in every lane."""
    lanes = [number] * value.type.count if isinstance(value.type, ir.VectorType) else number
    return ir.Constant(value.type, lanes)


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """``a * b + c``, rounded once wherever the processor has an instruction for it."""
    return call(builder, f"llvm.fmuladd.{_suffix(a.type)}", a.type, [a, b, c])


def larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger of each pair; ``b`` where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def reduce_sum(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The sum of all lanes, in a fixed tree order."""
    return fold(builder, value, builder.fadd)


def reduce_max(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return fold(builder, value, lambda a, b: larger(builder, a, b))


def fold(builder: ir.IRBuilder, value: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """All lanes combined, in a fixed tree order."""
    lanes = value.type.count
    undefined = ir.Constant(value.type, ir.Undefined)
    while lanes > 1:
        lanes //= 2
        order = [(lane + lanes) % value.type.count for lane in range(value.type.count)]
        moved = builder.shuffle_vector(value, undefined, ir.Constant(vector(I32, value.type.count), order))
        value = combine(value, moved)
    return builder.extract_element(value, ir.Constant(I32, 0))


def for_each_of(
    builder: ir.IRBuilder, number: ir.Value, choices: Iterable[int], emit: Callable[[int], None]
) -> None:  # fmt: skip
    """Emits code for each of these numbers, and runs that of the i64 ``number``, or none."""
    done = builder.append_basic_block("done")
    switch = builder.switch(number, done)
    for choice in choices:
        block = builder.append_basic_block(f"for.{choice}")
        switch.add_case(ir.Constant(I64, choice), block)
        builder.position_at_end(block)
        emit(choice)
        builder.branch(done)
    builder.position_at_end(done)


def fold_rows(
    builder: ir.IRBuilder, rows: list[ir.Value], combine: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:  # fmt: skip
    """A vector whose lane r is what `fold` makes of row r, in the same order: of at most LANES / 2 rows, which share
    the instructions."""
    rows = rows + rows[-1:] * (LANES // 2 - len(rows))
    lanes = LANES  # of a row that a vector has
    while lanes > 1:
        half = lanes // 2
        firsts = [start + lane for start in range(0, LANES, lanes) for lane in range(half)]
        halves = []
        for moved in (0, half):
            places = [first + moved for first in firsts]
            halves.append(ir.Constant(vector(I32), places + [LANES + place for place in places]))
        pairs = list(zip(rows[::2], rows[1::2])) or [(rows[0], rows[0])]
        rows = [combine(*(builder.shuffle_vector(a, b, order) for order in halves)) for a, b in pairs]
        lanes = half
    return rows[0]


def first_lanes(builder: ir.IRBuilder, value: ir.Value, count: int) -> ir.Value:
    """The first ``count`` lanes as a vector."""
    order = ir.Constant(vector(I32, count), list(range(count)))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), order)


def look_up(builder: ir.IRBuilder, indices: ir.Value, values: Sequence[float]) -> ir.Value:
    """The one of 2 LANES floats that the low bits of each lane of ``indices``, of any type, number."""
    kind, words = vector(F32), builder.bitcast(indices, vector(I32))
    if compiled_for("avx512f"):
        low, high = (ir.Constant(kind, list(values[first : first + LANES])) for first in (0, LANES))
        return call(builder, "llvm.x86.avx512.vpermi2var.ps.512", kind, [low, words, high])
    words = builder.and_(words, splat_constant(I32, 2 * LANES - 1))
    found = splat_constant(F32, values[0])
    for index, value in enumerate(values[1:], 1):
        is_it = builder.icmp_unsigned("==", words, splat_constant(I32, index))
        found = builder.select(is_it, splat_constant(F32, value), found)
    return found


_EXP_LOWEST = -87.33654  # ln of the smallest normal float32: below, exp is 0
_EXP_HIGHEST = 88.37  # just below 127.5 ln 2: from here on, exp is infinite
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # ln 2 in two parts; the first has few enough bits for exact products
_EXP_TAIL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e^x for a float or a vector of floats, within 2e-7 relative (the expf of the Cephes library).

    x = n ln 2 + r with integer n; e^r is a polynomial on [-0.35, 0.35], 2^n is made in the exponent bits. NaN
    gives NaN.
    """

    def number(value: float) -> ir.Constant:
        return constant_like(x, value)

    bounded = larger(builder, x, number(_EXP_LOWEST))  # no NaN either: n is an integer that its bits can hold
    highest = number(_EXP_HIGHEST)
    bounded = builder.select(builder.fcmp_ordered("<", bounded, highest), bounded, highest)
    scaled = builder.fmul(bounded, number(1.44269504088896341))
    n = call(builder, f"llvm.rint.{_suffix(x.type)}", x.type, [scaled])
    r = fma(builder, n, number(-_LN2_HIGH), x)
    r = fma(builder, n, number(-_LN2_LOW), r)
    tail = number(_EXP_TAIL[0])
    for coefficient in _EXP_TAIL[1:]:
        tail = fma(builder, tail, r, number(coefficient))
    result = fma(builder, builder.fmul(r, r), tail, builder.fadd(r, number(1.0)))
    lanes = x.type.count if isinstance(x.type, ir.VectorType) else 0
    bits = vector(I32, lanes) if lanes else I32
    bias, mantissa_bits = (ir.Constant(bits, [value] * lanes if lanes else value) for value in (127, 23))
    exponent = builder.shl(builder.add(builder.fptosi(n, bits), bias), mantissa_bits)
    result = builder.fmul(result, builder.bitcast(exponent, x.type))
    result = builder.select(builder.fcmp_ordered("<", x, number(_EXP_LOWEST)), number(0.0), result)
    return builder.select(builder.fcmp_ordered(">=", x, number(_EXP_HIGHEST)), number(float("inf")), result)


# 2^x on [-0.5, 0.5], exact at 0, elsewhere within 1e-7 relative: a minimax fit
_EXP2 = (
    1.326472731307149e-3, 9.671512991189957e-3, 0.05550733581185341, 0.24022242426872253, 0.6931470036506653, 1.0,
)  # fmt: skip
_EXP2_LOWEST = -126.0  # below, 2^x is 0
LOG2_E = 1.4426950408889634


def exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2^x for a float or a vector of floats, at most 0, within 2e-7 relative; 1 at 0, NaN for NaN. Two thirds of the
    instructions of `exp`."""
    n = _whole(builder, x)
    return _power_of_two(builder, x, n, builder.fsub(x, n))


def sigmoid(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """1 / (1 + e^-x) for a float or a vector of floats, within 5e-7 relative; 0 below -87, NaN for NaN."""
    one, is_negative = constant_like(x, 1.0), builder.fcmp_ordered("<", x, constant_like(x, 0.0))
    low = builder.select(is_negative, x, builder.fsub(constant_like(x, -0.0), x))
    exponent = builder.fmul(low, constant_like(x, LOG2_E))
    n = _whole(builder, exponent)
    rest = fma(builder, low, constant_like(x, LOG2_E), builder.fsub(constant_like(x, -0.0), n))
    small = _power_of_two(builder, exponent, n, rest)
    return builder.fdiv(builder.select(is_negative, small, one), builder.fadd(small, one))


def _has_scales(x):
    """Whether the processor multiplies these by powers of two."""
    return isinstance(x.type, ir.VectorType) and x.type.count == LANES and compiled_for("avx512f")


def _whole(builder, x):
    """The nearest whole number, of which 2^n can be made."""
    n = x if _has_scales(x) else larger(builder, x, constant_like(x, _EXP2_LOWEST))  # which is never NaN
    return call(builder, f"llvm.rint.{_suffix(x.type)}", x.type, [n])


def _power_of_two(builder, x, n, rest):
    """2^x, given its nearest whole number and the rest."""
    lowest, lanes = constant_like(x, _EXP2_LOWEST), x.type.count if isinstance(x.type, ir.VectorType) else 0
    result = constant_like(x, _EXP2[0])
    for coefficient in _EXP2[1:]:
        result = fma(builder, result, rest, constant_like(x, coefficient))
    if _has_scales(x):
        mask = builder.bitcast(builder.fcmp_unordered(">=", x, lowest), ir.IntType(LANES))
        operands = [result, n, constant_like(x, 0.0), mask, ir.Constant(I32, 4)]  # 4: the current rounding
        return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", x.type, operands)
    bits = vector(I32, lanes) if lanes else I32
    bias, mantissa_bits = (ir.Constant(bits, [value] * lanes if lanes else value) for value in (127, 23))
    exponent = builder.shl(builder.add(builder.fptosi(n, bits), bias), mantissa_bits)
    result = builder.fmul(result, builder.bitcast(exponent, x.type))
    return builder.select(builder.fcmp_ordered("<", x, lowest), constant_like(x, 0.0), result)


def prefetch(builder: ir.IRBuilder, address: ir.Value, is_near: bool = False) -> None:
    """Prefetches the cache line at ``address`` for reading; any address is allowed. With AVX-512, whose panels are
    three times as wide, the second-level cache takes it unless ``is_near``, else the first."""
    is_far = compiled_for("avx512f") and not is_near
    read, keep, data = ir.Constant(I32, 0), ir.Constant(I32, 2 if is_far else 3), ir.Constant(I32, 1)
    pointer = builder.inttoptr(address, I8.as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, read, keep, data])


def prefetch_to_write(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Fetches the cache line at ``address`` into the first-level cache, to be written soon."""
    write, keep, data = (ir.Constant(I32, each) for each in (1, 3, 1))
    pointer = builder.inttoptr(address, I8.as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, write, keep, data])


def forget_loads(builder: ir.IRBuilder) -> None:
    """Makes values loaded before be loaded again where needed, instead of being kept in a register."""
    llvm.initialize_native_asmparser()
    nothing = ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", side_effect=True)
    builder.call(nothing, [])


def not_unrolled(builder: ir.IRBuilder, count: int) -> ir.Value:
    """``count`` (i64) as the end of a loop that LLVM must not unroll."""
    llvm.initialize_native_asmparser()
    same = ir.InlineAsm(ir.FunctionType(I64, [I64]), "", "=r,0")
    return builder.call(same, [ir.Constant(I64, count)])


def left_alone(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A vector's value, opaque to LLVM and computed here, not later or in another order. Without effect on processors
    whose registers are shorter than AVX2's."""
    if not compiled_for("avx2"):
        return value
    llvm.initialize_native_asmparser()
    kind = ir.FunctionType(value.type, [value.type])
    return builder.call(ir.InlineAsm(kind, "", "=v,0,~{memory}", side_effect=True), [value])


def lanes_below(builder: ir.IRBuilder, first: int, count: ir.Value, lanes: int = LANES) -> ir.Value:
    """The mask of the lanes whose column ``first + lane`` is below ``count`` (i64)."""
    columns = ir.Constant(vector(I64, lanes), [first + lane for lane in range(lanes)])
    return builder.icmp_signed("<", columns, splat(builder, count, lanes))


_NAMES = {F32: "f32", I32: "i32", I16: "i16"}


def masked_load(
    builder: ir.IRBuilder, address: ir.Value, mask: ir.Value, element: ir.Type = F32, align: int = 4
) -> ir.Value:
    """Zero where the mask is not set; memory is not touched there."""
    lanes = mask.type.count
    kind = vector(element, lanes)
    pointer = builder.inttoptr(address, kind.as_pointer())
    zero = ir.Constant(kind, [0.0 if element is F32 else 0] * lanes)
    name = f"llvm.masked.load.v{lanes}{_NAMES[element]}.p0"
    return call(builder, name, kind, [pointer, ir.Constant(I32, align), mask, zero])


def masked_store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, mask: ir.Value) -> None:
    """Writes the lanes whose mask is set; memory is not touched elsewhere. Before AVX-512 a mask with all lanes set is
    an ordinary store, which is faster on Zen 3: 48 x 64 times 64 x 3,072 in float32 took 0.30 and 0.34 ms, and 0.23."""
    lanes = mask.type.count
    pointer = builder.inttoptr(address, value.type.as_pointer())

    def store_some() -> None:
        name = f"llvm.masked.store.v{lanes}{_NAMES[value.type.element]}.p0"
        call(builder, name, ir.VoidType(), [value, pointer, ir.Constant(I32, 4), mask])

    if compiled_for("avx512f"):
        store_some()
        return
    bits = ir.IntType(lanes)
    is_whole = builder.icmp_unsigned("==", builder.bitcast(mask, bits), ir.Constant(bits, (1 << lanes) - 1))
    with builder.if_else(is_whole, likely=True) as (whole, part):
        with whole:
            store(builder, value, address)
        with part:
            store_some()
