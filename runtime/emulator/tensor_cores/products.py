"""The tensor core's arithmetic for one warp: a 16 x K tile of A times a K x 8 tile of B, added to a 16 x 8 tile.

Fragments (PTX ISA 9.x, "Matrix fragments for mma.m16n8k…"), with g = lane // 4 and t = lane % 4, in 32-bit words of
1 (tf32), 2 (f16, bf16), 4 (e4m3, e5m2, s8, u8) or 8 (s4, u4) neighbours along K:

* register r of A holds word ``t + 4 (r // 2)`` of row ``g + 8 (r % 2)``;
* register r of B holds word ``t + 4 r`` of column g;
* accumulator 2 h + e holds row ``g + 8 h``, column ``2 t + e``; f16 accumulators hold both e in one word.

Here A is spread to floats in that very order (``a[(r * per_word + e) * 32 + lane]``), B to rows of eight columns
(``b[k * 8 + j]``) ordered 0 2 4 6 1 3 5 7, so that the two halves of a row of the result are four neighbouring lanes
of two accumulators. Products of the 8- and 16-bit types and of tf32 are exact in float32; the K products are summed in
float32 and the accumulator is added last. Integers are exact, modulo 2^32 or saturated once.

These are LLVM IR generators for compiled operations; `code` and `accumulator` must be compile-time numbers.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

F16, BF16, TF32, E4M3, E5M2, S8, U8, S4, U4 = range(9)
ELEMENT_CODES = {
    name: code for code, name in enumerate(("f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8", "s4", "u4"))
}
PER_WORD = (2, 2, 1, 4, 4, 4, 4, 8, 8)  # elements of a 32-bit word, by code
IS_INTEGER = (False, False, False, False, False, True, True, True, True)

ACC_F32, ACC_F16, ACC_S32, ACC_S32_SATURATED = range(4)
_ACCUMULATORS = {"f32": ACC_F32, "f16": ACC_F16, "s32": ACC_S32}

_F32, _F16, _I16, _I32 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32)
_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the order of a row of B and of the result
_WORDS = types.CPointer(types.uint32)
_FLOATS = types.CPointer(types.float32)
_HALVES = types.CPointer(types.uint16)


def types_of(d_type: str, a_type: str, b_type: str, is_saturated: bool) -> tuple[int, int, int] | None:
    """(code of A, of B, accumulator) of a product of these PTX types; None where there is none."""
    code_a, code_b, accumulator = ELEMENT_CODES.get(a_type), ELEMENT_CODES.get(b_type), _ACCUMULATORS.get(d_type)
    if code_a is None or code_b is None or accumulator is None:
        return None
    is_integer = IS_INTEGER[code_a]
    mixable = PER_WORD[code_a] == PER_WORD[code_b] >= 4 and is_integer == IS_INTEGER[code_b]
    if not (code_a == code_b or mixable) or is_integer != (accumulator == ACC_S32) or (is_saturated and not is_integer):
        return None
    if accumulator == ACC_F16 and a_type not in ("f16", "e4m3", "e5m2"):
        return None
    return code_a, code_b, ACC_S32_SATURATED if is_saturated else accumulator


def _literal(value: Any) -> int:
    if not isinstance(value, types.IntegerLiteral):
        raise TypingError("this argument must be a compile-time integer")
    return int(value.literal_value)


def _all(type_: ir.VectorType, value: float | int) -> ir.Constant:
    return ir.Constant(type_, [value] * type_.count)


def _element(builder: ir.IRBuilder, words: ir.Value, code: int, index: int) -> ir.Value:
    """Element `index` of each 32-bit word: floats, or int32 for the integer types."""
    count = words.type.count
    ints = words.type
    floats = ir.VectorType(_F32, count)

    def bits(mask: int) -> ir.Value:
        """The element's bits, brought to bit 0, under a mask."""
        return builder.and_(builder.lshr(words, _all(ints, index * 32 // PER_WORD[code])), _all(ints, mask))

    if code == TF32:  # the low 13 bits are not part of the number
        return builder.bitcast(builder.and_(words, _all(ints, -8192)), floats)
    if code == BF16:
        wide = builder.and_(words, _all(ints, -65536)) if index else builder.shl(words, _all(ints, 16))
        return builder.bitcast(wide, floats)
    if code in (F16, E5M2):
        half = bits(0xFFFF) if code == F16 else builder.shl(bits(0xFF), _all(ints, 8))
        half = builder.bitcast(builder.trunc(half, ir.VectorType(_I16, count)), ir.VectorType(_F16, count))
        return builder.fpext(half, floats)
    if code == E4M3:  # exponent and mantissa in a float's places, then 2^120 for the other bias: exact, subnormals too
        value = bits(0xFF)
        magnitude = builder.shl(builder.and_(value, _all(ints, 0x7F)), _all(ints, 20))
        number = builder.fmul(builder.bitcast(magnitude, floats), _all(floats, 2.0**120))
        is_nan = builder.icmp_unsigned("==", magnitude, _all(ints, 0x7F << 20))
        number = builder.bitcast(builder.select(is_nan, _all(floats, float("nan")), number), ints)
        sign = builder.shl(builder.and_(value, _all(ints, 0x80)), _all(ints, 24))
        return builder.bitcast(builder.or_(number, sign), floats)
    width = 32 // PER_WORD[code]
    top = builder.shl(words, _all(ints, 32 - width * (index + 1)))
    return (builder.ashr if code in (S8, S4) else builder.lshr)(top, _all(ints, 32 - width))


def _at(builder: ir.IRBuilder, pointer: ir.Value, index: int, type_: ir.Type) -> ir.Value:
    return builder.bitcast(builder.gep(pointer, [ir.Constant(_I32, index)]), type_.as_pointer())


def _load(builder: ir.IRBuilder, pointer: ir.Value, index: int, type_: ir.Type) -> ir.Value:
    value = builder.load(_at(builder, pointer, index, type_))
    value.align = 2 if type_.element == _I16 else 4
    return value


def _store(builder: ir.IRBuilder, value: ir.Value, pointer: ir.Value, index: int) -> None:
    builder.store(value, _at(builder, pointer, index, value.type)).align = 4


def _scratch(element: ir.Type, pointer: Any) -> Any:
    """``f(count)``: that many elements on the stack, a literal number, aligned to 64 bytes, as a pointer."""

    @intrinsic
    def scratch(typing_context, count):
        size = _literal(count)

        def generate(context, builder, signature, arguments):
            place = cgutils.alloca_once(builder, ir.ArrayType(element, size))
            place.align = 64
            return builder.bitcast(place, element.as_pointer())

        return pointer(count), generate

    return scratch


scratch_floats, scratch_words = _scratch(_F32, _FLOATS), _scratch(_I32, _WORDS)


@intrinsic
def spread_a(typing_context, code, register, words, a):
    """Register `register` (any integer) of A's fragment, 32 words, to floats in `a`."""
    element = _literal(code)
    per_word = PER_WORD[element]

    def generate(context, builder, signature, arguments):
        _, register, words, a = arguments
        register = builder.trunc(register, _I32) if register.type.width > 32 else register
        place = builder.gep(a, [builder.mul(register, ir.Constant(_I32, per_word * 32))])
        loaded = _load(builder, words, 0, ir.VectorType(_I32, 32))
        for index in range(per_word):
            _store(builder, _element(builder, loaded, element, index), place, index * 32)
        return context.get_dummy_value()

    return types.void(code, register, _WORDS, _FLOATS), generate


@intrinsic
def spread_b(typing_context, code, register, words, b):
    """Register `register` of B's fragment, 32 words, to rows of eight floats in `b`."""
    element = _literal(code)
    per_word = PER_WORD[element]

    def generate(context, builder, signature, arguments):
        _, register, words, b = arguments
        register = builder.trunc(register, _I32) if register.type.width > 32 else register
        place = builder.gep(b, [builder.mul(register, ir.Constant(_I32, 4 * per_word * 8))])
        vector = ir.VectorType(_I32, 32)
        loaded = _load(builder, words, 0, vector)
        for t in range(4):
            order = ir.Constant(ir.VectorType(_I32, 8), [4 * column + t for column in _COLUMNS])
            column_words = builder.shuffle_vector(loaded, ir.Constant(vector, ir.Undefined), order)
            for index in range(per_word):
                row = _element(builder, column_words, element, index)
                _store(builder, row, place, (t * per_word + index) * 8)
        return context.get_dummy_value()

    return types.void(code, register, _WORDS, _FLOATS), generate


@intrinsic
def spread_b_row(typing_context, code, halves, b):
    """Eight neighbouring columns of one k, 16-bit elements (``CPointer(uint16)``), to a row of `b`."""
    element = _literal(code)

    def generate(context, builder, signature, arguments):
        _, halves, b = arguments
        loaded = _load(builder, halves, 0, ir.VectorType(_I16, 8))
        undefined = ir.Constant(loaded.type, ir.Undefined)
        loaded = builder.shuffle_vector(loaded, undefined, ir.Constant(ir.VectorType(_I32, 8), list(_COLUMNS)))
        words = builder.zext(loaded, ir.VectorType(_I32, 8))
        _store(builder, _element(builder, words, element, 0), b, 0)
        return context.get_dummy_value()

    return types.void(code, _HALVES, _FLOATS), generate


def _halves_of(builder: ir.IRBuilder, row: ir.Value) -> tuple[ir.Value, ir.Value]:
    undefined = ir.Constant(row.type, ir.Undefined)
    index = ir.VectorType(_I32, 4)
    low, high = ir.Constant(index, [0, 1, 2, 3]), ir.Constant(index, [4, 5, 6, 7])
    return builder.shuffle_vector(row, undefined, low), builder.shuffle_vector(row, undefined, high)


def _joined(builder: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, 8), list(range(8))))


def _load_accumulator(builder: ir.IRBuilder, accumulator: int, c: list[ir.Value], half: int, g: int) -> ir.Value:
    words = ir.VectorType(_I32, 4)
    if accumulator == ACC_F16:
        pair = _load(builder, c[half], 4 * g, words)
        parts = [builder.trunc(value, ir.VectorType(_I16, 4)) for value in (pair, builder.lshr(pair, _all(words, 16)))]
        halves = [builder.bitcast(part, ir.VectorType(_F16, 4)) for part in parts]
        return builder.fpext(_joined(builder, *halves), ir.VectorType(_F32, 8))
    row = _joined(builder, *(_load(builder, c[2 * half + e], 4 * g, words) for e in (0, 1)))
    return builder.bitcast(row, ir.VectorType(_F32, 8)) if accumulator == ACC_F32 else row


def _store_accumulator(
    builder: ir.IRBuilder, accumulator: int, row: ir.Value, d: list[ir.Value], half: int, g: int
) -> None:
    if accumulator == ACC_F16:
        bits = builder.bitcast(builder.fptrunc(row, ir.VectorType(_F16, 8)), ir.VectorType(_I16, 8))
        words = ir.VectorType(_I32, 4)
        low, high = (builder.zext(part, words) for part in _halves_of(builder, bits))
        _store(builder, builder.or_(low, builder.shl(high, _all(words, 16))), d[half], 4 * g)
        return
    for e, part in enumerate(_halves_of(builder, row)):
        _store(builder, part, d[2 * half + e], 4 * g)


@intrinsic
def multiply_accumulate(typing_context, code, accumulator, k, a, b, negate, keep, c0, c1, c2, c3, d0, d1, d2, d3):
    """``d = [keep] c ± a b`` for a 16 x `k` and a `k` x 8 tile that were spread.

    `code` is A's (B's may be another of the same width). `negate` (the product's sign) and `keep` (whether c is read)
    are runtime booleans (int32). f16 accumulators use c0, c1, d0, d1. c and d may be the same registers.
    """
    element, kind, depth = _literal(code), _literal(accumulator), _literal(k)
    per_word, integer = PER_WORD[element], IS_INTEGER[element]

    def generate(context, builder, signature, arguments):
        _, _, _, a, b, negate, keep, *rest = arguments
        c, d = rest[:4], rest[4:]
        row_type = ir.VectorType(_I32 if integer else _F32, 8)
        if integer:
            a, b = (builder.bitcast(pointer, _I32.as_pointer()) for pointer in (a, b))
        zero = ir.Constant(negate.type, 0)
        is_negated = builder.icmp_unsigned("!=", negate, zero)
        is_kept = builder.icmp_unsigned("!=", keep, ir.Constant(keep.type, 0))
        suffix = "v8i32" if integer else "v8f32"
        operands = 2 if integer else 3
        vector_op = "llvm.sadd.sat" if integer else "llvm.fma"
        function_type = ir.FunctionType(row_type, [row_type] * operands)
        function = cgutils.get_or_insert_function(builder.module, function_type, f"{vector_op}.{suffix}")
        lanes = ir.Constant(ir.VectorType(_I32, 8), [0] * 8)

        def broadcast(index: int) -> ir.Value:
            value = builder.load(builder.gep(a, [ir.Constant(_I32, index)]))
            undefined = ir.Constant(row_type, ir.Undefined)
            return builder.shuffle_vector(
                builder.insert_element(undefined, value, ir.Constant(_I32, 0)), undefined, lanes
            )

        for half in (0, 1):
            sums = [_all(row_type, 0 if integer else 0.0)] * 8
            for index in range(depth):
                word, e = divmod(index, per_word)
                register = half + 2 * (word // 4)
                row = _load(builder, b, index * 8, row_type)
                for g in range(8):
                    value = broadcast((register * per_word + e) * 32 + 4 * g + word % 4)
                    if integer:
                        sums[g] = builder.add(sums[g], builder.mul(value, row))
                    else:
                        sums[g] = builder.call(function, [value, row, sums[g]])
            for g in range(8):
                negative = builder.neg(sums[g]) if integer else builder.fneg(sums[g])
                product = builder.select(is_negated, negative, sums[g])
                old = _load_accumulator(builder, kind, c, half, g)
                old = builder.select(is_kept, old, _all(row_type, 0 if integer else 0.0))
                if kind == ACC_S32_SATURATED:
                    total = builder.call(function, [product, old])
                elif integer:
                    total = builder.add(product, old)
                else:
                    total = builder.fadd(product, old)
                _store_accumulator(builder, kind, total, d, half, g)
        return context.get_dummy_value()

    signature = types.void(code, accumulator, k, _FLOATS, _FLOATS, negate, keep, *[_WORDS] * 8)
    return signature, generate
