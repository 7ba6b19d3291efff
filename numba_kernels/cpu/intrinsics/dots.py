"""Sums of products of bytes, of int16 and of pairs of bfloat16: by the instruction for it, or emulated.

A layout (`layout`) decides which of them a tile needs, the processor whether it has the instruction. The emulation
rounds and saturates as the instruction does, so that results are the same to the bit. Vectors are of any number of
32-bit lanes; AVX2's instructions take a vector of LANES in two halves.
"""

from __future__ import annotations

import functools

import llvmlite.binding as llvm
import llvmlite.ir as ir

from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.simd import I8, I16, I32
from numba_kernels.cpu.target import HAS_BF16_DOT, HAS_BYTE_DOT, LANES, compiled_for

_HAS_AVX2, _HAS_AVX512 = compiled_for("avx2"), compiled_for("avx512bw")
_NARROW_LANES = 8  # 32-bit lanes of an AVX2 register


def bytes_of_weights(builder, words):
    """A word of four unsigned bytes in each lane, as `add_four` takes it: whole, or as four integers."""
    if HAS_BYTE_DOT:
        return [words]
    lanes = words.type.count
    shifted = [builder.lshr(words, simd.splat_constant(I32, 8 * byte, lanes)) for byte in range(4)]
    return [builder.and_(word, simd.splat_constant(I32, 0xFF, lanes)) for word in shifted]


def bytes_of_rows(builder, word, lanes=LANES):
    """The same of one word of four signed bytes, in every lane."""
    if HAS_BYTE_DOT:
        return [simd.splat(builder, word, lanes)]
    up = [builder.shl(word, ir.Constant(I32, 24 - 8 * byte)) for byte in range(4)]
    return [simd.splat(builder, builder.ashr(value, ir.Constant(I32, 24)), lanes) for value in up]


def add_four(builder, total, weights, values, *, in_register=False, in_order=False):
    """``total``, i32, and the products of four bytes in each lane, as vpdpbusd adds them. ``in_register``: no operand
    of the instruction may stay in memory. ``in_order``: nor may LLVM change the order of such instructions."""
    if not HAS_BYTE_DOT:
        for weight, value in zip(weights, values, strict=True):
            total = builder.add(total, builder.mul(weight, value))
        return total
    operands = [total, weights[0], values[0]]
    if not in_register:
        return simd.call(builder, "llvm.x86.avx512.vpdpbusd.512", total.type, operands)
    llvm.initialize_native_asmparser()
    kind = ir.FunctionType(total.type, [total.type] * 3)
    return builder.call(ir.InlineAsm(kind, "vpdpbusd $3, $2, $0", "=v,0,v,v", side_effect=in_order), operands)


def multiply_pairs(builder, a, b):
    """The sum of the products of two int16 in each lane, i32, as vpmaddwd adds them. ``a`` and ``b``: of any type."""
    lanes = _lanes(a)
    words = simd.vector(I32, lanes)
    if _HAS_AVX2:
        operands = [builder.bitcast(each, simd.vector(I16, 2 * lanes)) for each in (a, b)]
        return _by_registers(builder, "pmadd.wd", "pmaddw.d.512", words, operands)
    sixteen, total = simd.splat_constant(I32, 16, lanes), None
    for up in (lambda word: builder.shl(word, sixteen), lambda word: word):
        low, high = (builder.ashr(up(builder.bitcast(each, words)), sixteen) for each in (a, b))
        product = builder.mul(low, high)
        total = product if total is None else builder.add(total, product)
    return total


def multiply_bytes(builder, weights, values):
    """The sum of two products of an unsigned and a signed byte in each half lane, i16, as vpmaddubsw adds them."""
    lanes = _lanes(weights)
    shorts = simd.vector(I16, 2 * lanes)
    if _HAS_AVX2:
        bytes_ = simd.vector(I8, 4 * lanes)
        operands = [builder.bitcast(each, bytes_) for each in (weights, values)]
        return _by_registers(builder, "pmadd.ub.sw", "pmaddubs.w.512", shorts, operands)
    eight = simd.splat_constant(I16, 8, 2 * lanes)
    weights, values = (builder.bitcast(each, shorts) for each in (weights, values))
    lower = builder.and_(weights, simd.splat_constant(I16, 0xFF, 2 * lanes))
    low = builder.mul(lower, builder.ashr(builder.shl(values, eight), eight))
    high = builder.mul(builder.lshr(weights, eight), builder.ashr(values, eight))
    return simd.call(builder, f"llvm.sadd.sat.v{2 * lanes}i16", shorts, [low, high])


def with_sign(builder, values, signs):
    """Bytes with the sign of ``signs``, and 0 where those are 0."""
    if _HAS_AVX2:
        return _by_registers(builder, "psign.b", None, values.type, [values, signs])
    zero = ir.Constant(values.type, [0] * values.type.count)
    found = builder.select(builder.icmp_signed("<", signs, zero), builder.neg(values), values)
    return builder.select(builder.icmp_signed("==", signs, zero), zero, found)


def look_up(builder, indices, values):
    """The bytes that indices, bytes below 16, stand for."""
    kind = indices.type
    if _HAS_AVX2:
        table = ir.Constant(kind, list(values) * (kind.count // 16))
        return _by_registers(builder, "pshuf.b", "pshuf.b.512", kind, [table, indices])
    found = ir.Constant(kind, [values[0]] * kind.count)
    for index, value in enumerate(values[1:], 1):
        is_it = builder.icmp_unsigned("==", indices, ir.Constant(kind, [index] * kind.count))
        found = builder.select(is_it, ir.Constant(kind, [value] * kind.count), found)
    return found


def add_bf16_pairs(builder, total, pairs, weights):
    """``total`` and the products of two pairs of bfloat16 in each lane, as vdpbf16ps adds them."""
    return (bf16_pairs_by_instruction if HAS_BF16_DOT else bf16_pairs_spelled_out)(builder, total, pairs, weights)


def bf16_pairs_by_instruction(builder, total, pairs, weights):
    """The same on AVX512-BF16."""
    llvm.initialize_native_asmparser()
    kind = ir.FunctionType(total.type, [total.type, pairs.type, weights.type])
    return builder.call(ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v"), [total, pairs, weights])


def bf16_pairs_spelled_out(builder, total, pairs, weights):
    """The same without the instruction: the upper elements' product is added first, then the lower ones'. Numbers below
    the smallest normal one are zero, on both sides of each sum."""
    lower, upper = halves_of_pairs(builder, pairs, weights)
    for a, b in (upper, lower):
        total = flushed_fma(builder, a, b, total)
    return total


def rounded_halves(builder, bits):
    """A vector of floats' bits as bfloat16, i16: rounded to nearest even; NaN stays NaN."""
    number = functools.partial(simd.splat_constant, I32, lanes=bits.type.count)
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, number(0x7FFFFFFF)), number(0x7F800000))
    odd = builder.and_(builder.lshr(bits, number(16)), number(1))
    nearest = builder.add(builder.add(bits, number(0x7FFF)), odd)
    upper = builder.lshr(builder.select(is_nan, builder.or_(bits, number(0x400000)), nearest), number(16))
    return builder.trunc(upper, simd.vector(I16, bits.type.count))


def round_to_pairs(builder, lower, upper):
    """Two vectors of LANES floats as words of two neighbours, rounded to bfloat16 as vcvtne2ps2bf16 does: to nearest
    even, numbers below the smallest normal one to zero; NaN stays NaN."""
    return (rounded_by_instruction if HAS_BF16_DOT else rounded_spelled_out)(builder, lower, upper)


def rounded_by_instruction(builder, lower, upper):
    """The same on AVX512-BF16."""
    llvm.initialize_native_asmparser()
    kind = ir.FunctionType(simd.vector(I32), [lower.type, upper.type])
    return builder.call(ir.InlineAsm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v"), [lower, upper])


def rounded_spelled_out(builder, lower, upper):
    """The same without the instruction."""
    words = simd.vector(I32)
    halves = [rounded_halves(builder, builder.bitcast(_normal(builder, half), words)) for half in (lower, upper)]
    order = ir.Constant(simd.vector(I32, 2 * LANES), list(range(2 * LANES)))
    return builder.bitcast(builder.shuffle_vector(*halves, order), words)


def halves_of_pairs(builder, pairs, weights):
    """The lower elements of pairs of bfloat16 and the upper ones, each of both sides, as vectors of floats."""
    lanes = pairs.type.count
    mask, sixteen = simd.splat_constant(I32, 0xFFFF0000, lanes), simd.splat_constant(I32, 16, lanes)
    halves = (lambda words: builder.shl(words, sixteen), lambda words: builder.and_(words, mask))
    kind = simd.vector(simd.F32, lanes)
    return [[builder.bitcast(half(words), kind) for words in (pairs, weights)] for half in halves]


def flushed_fma(builder, a, b, total):
    """``a * b + total``, rounded once, with zeros for subnormal numbers before and after."""
    a, b, total = (_normal(builder, value) for value in (a, b, total))
    return _normal(builder, simd.fma(builder, a, b, total))


def flushed_sum(builder, a, b):
    """``a + b`` with zeros for subnormal numbers before and after."""
    return _normal(builder, builder.fadd(*(_normal(builder, value) for value in (a, b))))


def _normal(builder, value):
    """``value``, with subnormal numbers replaced by a zero of their sign."""
    lanes, bits = value.type.count, builder.bitcast(value, simd.vector(I32, value.type.count))
    exponent = builder.and_(bits, simd.splat_constant(I32, 0x7F800000, lanes))
    is_tiny = builder.icmp_unsigned("==", exponent, simd.splat_constant(I32, 0, lanes))
    zero = builder.and_(bits, simd.splat_constant(I32, 0x80000000, lanes))
    return builder.bitcast(builder.select(is_tiny, zero, bits), value.type)


def _lanes(value):
    return value.type.count * value.type.element.width // 32


def _by_registers(builder, narrow, wide, result, operands):
    """AVX2's instruction ``narrow`` on each register, or AVX-512's ``wide``, where there is one, on two at once."""
    parts = _lanes(operands[0]) // _NARROW_LANES
    if parts == 1:
        return simd.call(builder, f"llvm.x86.avx2.{narrow}", result, operands)
    if parts == 2 and wide and _HAS_AVX512:
        return simd.call(builder, f"llvm.x86.avx512.{wide}", result, operands)
    half = simd.vector(result.element, result.count // 2)
    halves = []
    for side in range(2):
        pieces = [_half(builder, operand, side) for operand in operands]
        halves.append(_by_registers(builder, narrow, wide, half, pieces))
    return builder.shuffle_vector(*halves, ir.Constant(simd.vector(I32, result.count), list(range(result.count))))


def _half(builder, value, side):
    count = value.type.count // 2
    order = ir.Constant(simd.vector(I32, count), list(range(side * count, (side + 1) * count)))
    return builder.shuffle_vector(value, value, order)
