"""Elements of 4 and 8 bits out of words of a register, two to a word, in registers: no table, no conversion.

    unpack = unpack_all("u4", "bf16", ((0, 0, 0, -1),), has_zeros=False)
    unpack(pairs, words, scales, offsets)      # pairs[0:4]: 8 elements out of word 0, times the pair scales[0]

    element   what it is                    bits of a word             becomes
    u4        0 to 15, minus a zero point   four per half              2^7 + u (bf16) or 2^10 + u, then plus the offset
    u8        0 to 255, minus a zero point  two per half               the same; bf16 in two parts, as it keeps 8 bits
    s8        -128 to 127                   two per half               itself (bf16), or 2^-6 of it (f16)
    e4m3      1 sign, 4 exponent, 3         two per half               its fields moved, as they are: 2^-SHIFT too small
    e2m1      1 sign, 2 exponent, 1         four per half              the same

A float of few bits is one of 16 bits with its fields in other places, but for the exponents' bias: a factor of
``2 ** SHIFTS[element, dtype]``, exact for subnormals, too, which the caller multiplies into its scale.

Word w of 8 integers of 4 bits has elements 2i and 2i + 1 in nibbles i and i + 4; of e2m1 it has their bits at
`E2M1_PLACES` of its halves. A word of four elements of 8 bits has
elements 0 and 1 in bytes 0 and 2, elements 2 and 3 in bytes 1 and 3. Then a shift and one `lop3` make a pair.

Scales come as they are kept, two rows' beside each other, and become pairs of 16 bits with the same number twice
(`spread_all`).

Source: Y. J. Kim et al., "Who Says Elephants Can't Run" (2022), for integers by the exponent's unit.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import functools
import struct
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.cuda.extending import intrinsic

from numba_kernels.cuda.intrinsics.element_types import (
    BITS,
    E2M1_PLACES,
    INTEGERS,
    SHIFTS,
    offset_of,
    words_of,
)

_WORD = ir.IntType(32)
_UNIT_BITS = {"bf16": 0x43004300, "f16": 0x64006400}
_ONE = {"bf16": 0x3F803F80, "f16": 0x3C003C00}
_MINUS_ZERO = 0x80008000


def _constant(value: int) -> ir.Constant:
    return ir.Constant(_WORD, value)


def _fma(builder: Any, dtype: str, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_WORD, [_WORD] * 3)
    assembly = ir.InlineAsm(kind, f"fma.rn.{dtype}x2 $0, $1, $2, $3;", "=r,r,r,r", side_effect=False)
    return builder.call(assembly, [a, b, c])


def _u4(builder: Any, dtype: str, words: list[Any], offset: Any, kept: Any) -> list[Any]:
    pairs = []
    for i in range(4):
        nibbles = builder.and_(builder.lshr(words[0], _constant(4 * i)), kept(0x000F000F))
        raised = builder.or_(nibbles, _constant(_UNIT_BITS[dtype]))
        pairs.append(_fma(builder, dtype, raised, _constant(_ONE[dtype]), offset))
    return pairs


def _u8(builder: Any, dtype: str, words: list[Any], offset: Any, kept: Any) -> list[Any]:
    pairs = []
    for word in words:
        for shift in (0, 8):
            both = builder.lshr(word, _constant(shift)) if shift else word
            if dtype == "f16":
                raised = builder.or_(builder.and_(both, kept(0x00FF00FF)), _constant(_UNIT_BITS[dtype]))
                pairs.append(_fma(builder, dtype, raised, _constant(_ONE[dtype]), offset))
                continue
            # 128 + the low 7 bits, and -128 where the high bit is set, else -256: together u - 128, exactly.
            low = builder.or_(builder.and_(both, kept(0x007F007F)), _constant(_UNIT_BITS[dtype]))
            high = builder.xor(builder.and_(both, kept(0x00800080)), _constant(0xC380C380))
            value = _fma(builder, dtype, low, _constant(_ONE[dtype]), high)
            pairs.append(value if offset is None else _fma(builder, dtype, value, _constant(_ONE[dtype]), offset))
    return pairs


def _s8(builder: Any, dtype: str, words: list[Any], offset: Any, kept: Any) -> list[Any]:
    pairs = []
    for word in words:
        for shift in (0, 8):
            both = builder.lshr(word, _constant(shift)) if shift else word
            if dtype == "f16":  # 2^10 + 128 + the number
                raised = builder.xor(builder.and_(both, _constant(0x00FF00FF)), _constant(0x64806480))
                unit = 2.0 ** -SHIFTS["s8", "f16"]
                offset = _constant(half_pair(-1152 * unit, dtype))
                pairs.append(_fma(builder, dtype, raised, _constant(half_pair(unit, dtype)), offset))
                continue
            # 128 + the low 7 bits, less 128, or 256 where the sign is set: exactly.
            low = builder.or_(builder.and_(both, _constant(0x007F007F)), _constant(_UNIT_BITS[dtype]))
            high = builder.or_(builder.and_(both, _constant(0x00800080)), _constant(0xC300C300))
            pairs.append(_fma(builder, dtype, low, _constant(_ONE[dtype]), high))
    return pairs


def _e4m3(builder: Any, dtype: str, words: list[Any], offset: Any, kept: Any) -> list[Any]:
    down = {"bf16": 4, "f16": 1}[dtype]  # of a byte that lies at the top of its half
    pairs = []
    for word in words:
        for up in (8, 0):  # bytes 0 and 2, then 1 and 3
            top = builder.shl(word, _constant(up)) if up else word
            fields = builder.and_(builder.lshr(top, _constant(down)), _constant((0x7F00 >> down) * 0x10001))
            pairs.append(builder.or_(builder.and_(top, _constant(0x80008000)), fields))
    return pairs


def _e2m1(builder: Any, dtype: str, words: list[Any], offset: Any, kept: Any) -> list[Any]:
    to = {"bf16": 6, "f16": 9}[dtype]  # the fields' lowest bit; the sign is the highest one
    pairs = []
    for fields, sign in E2M1_PLACES:
        up, sign_up = to - fields, 15 - sign
        masks = (7 << to) * 0x10001, 0x80008000
        if up == sign_up:
            moved = builder.shl(words[0], _constant(up)) if up else words[0]
            pairs.append(builder.and_(moved, _constant(masks[0] | masks[1])))
        elif up > 0 and not _meet(fields, sign, up, sign_up):
            alone = builder.and_(words[0], _constant((7 << fields | 1 << sign) * 0x10001))
            moved = builder.mul(alone, _constant(1 << up | 1 << sign_up))
            pairs.append(builder.and_(moved, _constant(masks[0] | masks[1])))
        else:
            moved = builder.shl(words[0], _constant(up)) if up >= 0 else builder.lshr(words[0], _constant(-up))
            signs = builder.shl(words[0], _constant(sign_up)) if sign_up else words[0]
            moved = builder.and_(moved, _constant(masks[0]))
            pairs.append(builder.or_(moved, builder.and_(signs, _constant(masks[1]))))
    return pairs


def _meet(fields: int, sign: int, *shifts: int) -> bool:
    """Whether bits of a number's shifted copies would be added, in one half of a word or in the next."""
    places = [place + shift for place in (fields, fields + 1, fields + 2, sign) for shift in shifts]
    both = places + [place + 16 for place in places]
    return len(set(both)) < len(both)


_UNPACK = {"u4": _u4, "u8": _u8, "s8": _s8, "e4m3": _e4m3, "e2m1": _e2m1}


def _place(context, builder, kind, value, index):
    """A pointer to an element of a local array."""
    return builder.gep(context.make_array(kind)(context, builder, value).data, [ir.Constant(_WORD, index)])


@functools.cache
def unpack_all(
    element: str, dtype: str, plan: tuple[tuple[int, int, int, int], ...], has_zeros: bool, nothing: int = -1
) -> Any:
    """A function ``(pairs, words, scales, offsets) -> None`` on arrays ``cuda.local.array`` of uint32.

    Each entry of `plan` unpacks 8 elements: (first of 4 elements of `pairs`, first element of `words`, element of
    `scales`, element of `offsets`), and multiplies them by the pair of scales, rounded once. An element of -1 means
    none. Without `has_zeros` the zero point is the middle: 8 or 128.

    `nothing`: an element of `scales` that is 0, unknown to ptxas. Masks of integers are made of it once, and stay
    in registers: a `lop3` has room for one constant, and ptxas moves a second one to a register anew before each. -1
    means none.
    """
    is_integer = element in INTEGERS
    middle = None
    if is_integer and not has_zeros and (element, dtype) != ("u8", "bf16"):
        middle = _constant(half_pair(offset_of(element, dtype, 1 << (BITS[element] - 1)), dtype))

    def generate(context, builder, signature, arguments):
        def load(which: int, index: int) -> Any:
            return builder.load(_place(context, builder, signature.args[which], arguments[which], index))

        def kept(mask: int) -> Any:
            return _constant(mask) if nothing < 0 else builder.xor(load(2, nothing), _constant(mask))

        for first, word, scale, offset in plan:
            words = [load(1, word + index) for index in range(words_of(element))]
            added = load(3, offset) if has_zeros else middle
            pairs = _UNPACK[element](builder, dtype, words, added, kept)
            factor = load(2, scale) if scale >= 0 else None
            for index, pair in enumerate(pairs):
                if factor is not None:
                    pair = _fma(builder, dtype, pair, factor, _constant(_MINUS_ZERO))
                builder.store(pair, _place(context, builder, signature.args[0], arguments[0], first + index))
        return context.get_dummy_value()

    return intrinsic(
        lambda typing_context, pairs, words, scales, offsets: (types.void(pairs, words, scales, offsets), generate)
    )


@functools.cache
def moved_all(element: str, plan: tuple[tuple[int, int], ...]) -> Any:
    """A function ``(pairs, words) -> None``: as `unpack_all` for float16 and elements that are floats, but without
    scales: they are ``2 ** SHIFTS`` too small. Each entry of `plan` is (first of 4 elements of `pairs`, first element
    of `words`)."""

    def generate(context, builder, signature, arguments):
        for first, word in plan:
            words = [
                builder.load(_place(context, builder, signature.args[1], arguments[1], word + index))
                for index in range(words_of(element))
            ]
            for index, pair in enumerate(_UNPACK[element](builder, "f16", words, None, _constant)):
                builder.store(pair, _place(context, builder, signature.args[0], arguments[0], first + index))
        return context.get_dummy_value()

    return intrinsic(lambda typing_context, pairs, words: (types.void(pairs, words), generate))


SCALE_SHIFTS = {"bf16": (120, 117), "f16": (13,)}
"""Factors, as powers of two, that make a scale in e4m3, its fields moved, ``2 ** -E4M3_SCALE_SHIFT`` of an unpacked
e2m1's scale."""
SCALE_BYTES = {"e4m3": 1, "exponent": 1}
"""Bytes of a scale by its kind; the kind "value" has those of the dtype."""


@functools.cache
def spread_all(kind: str, dtype: str, plan: tuple[tuple[int, int, int], ...]) -> Any:
    """A function ``(pairs, words) -> None``: each entry of `plan` is (element of `pairs`, element of `words`, which
    number in the word), and puts the number into both halves.

    Args:
        kind: "value": 16 bits of the dtype. "exponent": a byte that is its exponent's field. "e4m3": such a byte, not
            negative, which becomes ``2 ** (SHIFTS["e2m1", dtype] - E4M3_SCALE_SHIFT)`` times as much.
    """
    up = {"exponent": {"bf16": 7, "f16": 10}, "e4m3": {"bf16": 4, "f16": 7}}

    def generate(context, builder, signature, arguments):
        for target, index, which in plan:
            word = builder.load(_place(context, builder, signature.args[1], arguments[1], index))
            if kind == "value":
                half = builder.lshr(word, _constant(16)) if which else builder.and_(word, _constant(0xFFFF))
                pair = builder.or_(half, builder.shl(half, _constant(16)))
            else:
                byte = builder.and_(builder.lshr(word, _constant(8 * which)), _constant(0xFF))
                pair = builder.mul(byte, _constant(0x10001 << up[kind][dtype]))
            if kind == "e4m3":
                for shift in SCALE_SHIFTS[dtype]:
                    factor = _constant(half_pair(2.0**shift, dtype))
                    pair = _fma(builder, dtype, pair, factor, _constant(_MINUS_ZERO))
            builder.store(pair, _place(context, builder, signature.args[0], arguments[0], target))
        return context.get_dummy_value()

    return intrinsic(lambda typing_context, pairs, words: (types.void(pairs, words), generate))


def half_pair(value: float, dtype: str) -> int:
    """A number that 16 bits hold exactly, in both halves of a word."""
    return _half_bits(value, dtype) * 0x10001


def _half_bits(value: float, dtype: str) -> int:
    """The bits of a number that 16 bits hold exactly."""
    if dtype == "f16":
        return struct.unpack("<H", struct.pack("<e", value))[0]
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16
