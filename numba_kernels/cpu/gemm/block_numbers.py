"""The integers and scales of a register of columns of a block (`blocks`), for the tiles that multiply them."""

from __future__ import annotations

import numpy as np
from numba.core import types

from numba_kernels.blocks import Block
from numba_kernels.cpu.intrinsics import dots, simd
from numba_kernels.cpu.intrinsics.simd import F32, I8, I16, I32, i64
from numba_kernels.cpu.layout import DOT
from numba_kernels.cpu.target import LANES

PART = LANES // 2 if DOT == "pairs" else LANES  # columns that a register holds

_WORDS, _FLOATS = simd.vector(I32, PART), simd.vector(F32, PART)


def is_signed(block: Block) -> bool:
    """Whether weights are signed bytes in registers, with x multiplied by their signs."""
    return DOT == "pairs" and block.zero == 128


def places_of_unit(builder, block, index):
    """For each plane: how many bytes, and bits, after the first unit this one lies."""
    unit, moved = block.unit, {}
    for plane in block.planes:
        is_within = unit % plane.period != 0
        amount = unit // plane.run * plane.bits if is_within else unit * plane.bits // 32 * LANES * 4
        amount = builder.mul(index, i64(amount))
        moved[plane] = (i64(0), amount) if is_within else (amount, None)
    return moved


def weights_of(builder, block, at, moved, element):
    """Four elements from ``element`` on, as bytes in each lane, signed where `is_signed`; of the registers at ``at``,
    whose planes are ``moved`` by `places_of_unit`."""
    found, above = None, 0
    for plane in block.planes:
        byte, shift = plane.place(element)
        place = simd.offset(builder, at, (block.places[plane.field] + byte) // 4 * LANES * 4)
        num_bytes, num_bits = moved[plane]
        part = simd.load(builder, builder.add(place, num_bytes), _WORDS, 4)
        if num_bits is not None:
            part = builder.lshr(part, simd.splat(builder, builder.trunc(num_bits, I32), PART))
        if shift != above:  # one shift brings the bits to their place
            amount = _number(abs(shift - above))
            part = builder.lshr(part, amount) if shift > above else builder.shl(part, amount)
        if plane.bits < 8:
            part = builder.and_(part, _number(((1 << plane.bits) - 1 << above) * 0x01010101))
        found = part if found is None else builder.or_(found, part)
        above += plane.bits
    if block.table is not None:
        values = [(value - block.zero) % 256 for value in block.table] if is_signed(block) else block.table
        return _look_up(builder, found, values)
    if block.is_bytes and not is_signed(block):
        return builder.xor(found, _number(0x80808080))
    return found


def scales_of(builder, block, load):
    """The groups' scales, and minima, as vectors of floats: ``load(word)`` gives a word of each lane."""

    def half(field, index):
        byte = block.places[field] + 2 * index
        words = load(byte // 4)
        bits = builder.lshr(words, _number(16)) if byte % 4 else words
        return simd.widen(builder, builder.trunc(bits, simd.vector(I16, PART)), types.int16, PART)

    def byte(field, index, mask=0xFF, shift=0):
        place = block.places[field] + index
        return builder.and_(builder.lshr(load(place // 4), _number(place % 4 * 8 + shift)), _number(mask))

    def whole(group):
        """The scale of a group that has a float of its own."""
        if block.scale == "half":
            return half("d", group)
        if block.fields["d"].base == np.float32:
            return builder.bitcast(load(block.places["d"] // 4 + group), _FLOATS)
        words = load((block.places["d"] + 2 * group) // 4)
        upper = builder.and_(words, _number(0xFFFF0000)) if group % 2 else builder.shl(words, _number(16))
        return builder.bitcast(upper, _FLOATS)

    groups = range(block.num_groups)
    if block.scale in ("half", "bfloat", "float"):
        scales = [whole(group) for group in groups]
        yield scales
        if block.minimum == "m":
            yield [builder.fneg(half("m", group)) for group in groups]
        elif block.minimum == "z":
            zeros = [builder.sub(byte("z", group), _number(block.zero)) for group in groups]
            yield [builder.fmul(scales[group], builder.sitofp(zeros[group], _FLOATS)) for group in groups]
    elif block.scale == "six_bits":
        for number, field in enumerate(("d", "dmin")):
            factor, own = half(field, 0), 4 * number
            bits = [byte("scales", own + group, 63) for group in range(4)]
            for group in range(4):
                high = builder.shl(byte("scales", own + group, 3, 6), _number(4))
                bits.append(builder.or_(byte("scales", 8 + group, 15, own), high))
            yield [builder.fmul(factor, builder.sitofp(value, _FLOATS)) for value in bits]
    elif block.scale == "byte":
        factor = half("d", 0)
        signed = []
        for group in groups:
            place = block.places["scales"] + group
            up = builder.shl(load(place // 4), _number(24 - place % 4 * 8))
            signed.append(builder.ashr(up, _number(24)))
        yield [builder.fmul(factor, builder.sitofp(value, _FLOATS)) for value in signed]
    elif block.scale == "planes":
        for number, field in enumerate(("d", "dmin") if block.minimum else ("d",)):
            factor = half(field, 0) if block.fields[field].itemsize == 2 else whole(0)
            numbers = [_scale_integer(builder, block, byte, number * len(groups) + group) for group in groups]
            yield [builder.fmul(factor, builder.sitofp(value, _FLOATS)) for value in numbers]
    else:
        yield [half_power_of_two(builder, byte("exponent", group)) for group in groups]


def _scale_integer(builder, block, byte, index):
    """The integer of a group's scale, or minimum, that lies in planes."""
    found, above, kind = None, 0, block.scale_planes
    for plane in kind.planes:
        place, shift = plane.place(index)
        part = byte(plane.field, place, (1 << plane.bits) - 1, shift)
        part = builder.shl(part, _number(above)) if above else part
        found = part if found is None else builder.or_(found, part)
        above += plane.bits
    return builder.add(builder.mul(found, _number(kind.step)), _number(kind.start))


def half_power_of_two(builder, exponent):
    """2^(exponent - 128) of e8m0's exponents, i32."""
    normal = builder.shl(builder.sub(exponent, _number(1)), _number(23))
    tiny = builder.shl(_number(0x00200000), exponent)
    is_tiny = builder.icmp_unsigned("<", exponent, _number(2))
    return builder.bitcast(builder.select(is_tiny, tiny, normal), _FLOATS)


def _look_up(builder, indices, values):
    """The bytes that four indices in each lane, below 16, stand for."""
    found = dots.look_up(builder, builder.bitcast(indices, simd.vector(I8, 4 * PART)), values)
    return builder.bitcast(found, _WORDS)


def _number(value):
    return simd.splat_constant(I32, value, PART)
