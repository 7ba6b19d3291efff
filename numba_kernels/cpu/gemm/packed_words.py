"""Words of 32 bits, the unit of every packed layout: one float32, two 16-bit elements or four bytes, neighbours in K.

`transpose_words` turns rows of words into columns in registers; `quantize_words` makes words of four int8 each.
"""

from __future__ import annotations

import functools

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils

from numba_kernels.cpu.intrinsics import dots, simd
from numba_kernels.cpu.intrinsics.emitted import KIND, emitted
from numba_kernels.cpu.intrinsics.simd import F32, I8, I32, I64, i64
from numba_kernels.cpu.target import LANES

GROUP = 64  # neighbours in K that share a scale where activations are quantised
GROUP_WORDS = GROUP // 4
ZERO_POINT = 128  # int8 weights are stored with this added, as unsigned bytes
_SMALLEST = 1e-30  # a group, or a row of a weight, with no larger magnitude counts as zeros
_SMALLEST_OF_POWERS = 2.0**-94  # the same where scales are powers of two: products of scales stay normal numbers
_MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to the nearest even integer, which is left in the low bits
_MAGIC_BITS = 0x4B400000
_LARGEST_ROUNDED_BITS = 0x76FE0000  # 127 * 2^104: 1.5 * 2^23 times its power of two is the last finite one
_NAN_BITS = 0x7FC00000
_WORDS = simd.vector(I32)


def _shuffle(builder, a, b, order):
    return builder.shuffle_vector(a, b, ir.Constant(_WORDS, order))


def _unpack(builder, a, b, width, upper):
    """The lower (or upper) halves of each four lanes of two vectors, ``width`` words in turn."""
    order = []
    for first in range(0, LANES, 4):
        for word in range(2 * upper, 2 * upper + 2, width):
            words = [first + word + each for each in range(width)]
            order += words + [LANES + each for each in words]
    return _shuffle(builder, a, b, order)


def _transposed_fours(builder, rows):
    """Each four lanes of each four vectors, transposed."""
    found = []
    for first in range(0, len(rows), 4):
        a, b, c, d = rows[first : first + 4]
        ab, cd = ([_unpack(builder, *pair, 1, upper) for upper in (0, 1)] for pair in ((a, b), (c, d)))
        found += [_unpack(builder, ab[half], cd[half], 2, upper) for half in (0, 1) for upper in (0, 1)]
    return found


def transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """LANES vectors of LANES words, the columns of ``rows``.

    Fours within fours by the instructions that processors have for it; then two rounds, of which that of distance d
    swaps, between rows r and r + d, the blocks of d lanes off the diagonal.
    """
    rows = _transposed_fours(builder, rows)
    distance = 4
    while distance < LANES:
        lower, upper = [], []
        for lane in range(LANES):
            inside = lane % (2 * distance) < distance
            lower.append(lane if inside else LANES + lane - distance)
            upper.append(lane + distance if inside else LANES + lane)
        for r in range(LANES):
            if r % (2 * distance) < distance:
                a, b = rows[r], rows[r + distance]
                rows[r], rows[r + distance] = _shuffle(builder, a, b, lower), _shuffle(builder, a, b, upper)
        distance *= 2
    return rows


def words_of_rows(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Four vectors of LANES words, the columns of LANES vectors of four words."""
    joined = []
    for first in range(4):
        parts = rows[first::4]
        while len(parts) > 1:
            order = ir.Constant(simd.vector(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
            parts = [builder.shuffle_vector(a, b, order) for a, b in zip(parts[::2], parts[1::2])]
        joined += parts
    return _transposed_fours(builder, joined)


@emitted(types.void, *[types.intp] * 6)
def transpose_words(builder, source, source_stride, num_rows, num_words, target, target_stride):
    """``target[w, r] = source[r, w]`` for at most LANES rows and LANES words.

    Strides are bytes from row to row of the source, and from word to word of the target. No other memory is read or
    written.
    """

    def place(base, stride, index):
        return builder.add(base, builder.mul(stride, i64(index)))

    def at_most(index, count):
        return builder.icmp_signed("<", i64(index), count)

    whole = builder.and_(
        builder.icmp_signed("==", num_rows, i64(LANES)), builder.icmp_signed("==", num_words, i64(LANES))
    )
    with builder.if_else(whole) as (full, part):
        with full:
            rows = [simd.load(builder, place(source, source_stride, r), _WORDS, 1) for r in range(LANES)]
            for w, column in enumerate(transposed(builder, rows)):
                simd.store(builder, column, place(target, target_stride, w))
        with part:
            last = builder.sub(num_rows, i64(1))
            mask = simd.lanes_below(builder, 0, num_words)
            rows = []
            for r in range(LANES):
                row = builder.select(at_most(r, num_rows), i64(r), last)
                at = builder.add(source, builder.mul(source_stride, row))
                rows.append(simd.masked_load(builder, at, mask, I32, 1))
            mask = simd.lanes_below(builder, 0, num_rows)
            for w, column in enumerate(transposed(builder, rows)):
                with builder.if_then(at_most(w, num_words)):
                    simd.masked_store(builder, column, place(target, target_stride, w), mask)


@emitted(types.void, *[types.intp] * 6)
def arrange_words(builder, source, source_stride, num_rows, num_words, target, end):
    """``target[w, r] = source[r, w]`` for at most LANES rows and LANES words, columns one after the other.

    ``source_stride`` is bytes from row to row. Columns are written in whole vectors, in their order, so that bytes
    after the last one are written, too, but none at ``end`` (an address) or after it.
    """
    few = LANES // 2
    of_words = simd.lanes_below(builder, 0, num_words)
    last, stride = builder.sub(num_rows, i64(1)), builder.mul(num_rows, i64(4))
    undefined = ir.Constant(_WORDS, ir.Undefined)
    has_all_words = builder.icmp_signed("==", num_words, i64(LANES))

    def arrange(most_rows):
        """Vectors of so many lanes, a power of two."""
        lanes = ir.Constant(simd.vector(I32, most_rows), list(range(most_rows)))
        after = builder.add(target, builder.mul(stride, i64(LANES - 1)))
        is_inside = builder.icmp_signed("<=", simd.offset(builder, after, most_rows * 4), end)
        with builder.if_else(builder.and_(has_all_words, is_inside), likely=True) as (whole, part):
            with whole:
                for column, place in columns(most_rows, lanes, is_whole=True):
                    simd.store(builder, column, place)
            with part:
                of_rows = simd.lanes_below(builder, 0, num_rows, most_rows)
                for w, (column, place) in enumerate(columns(most_rows, lanes, is_whole=False)):
                    is_inside = builder.icmp_signed("<=", simd.offset(builder, place, most_rows * 4), end)
                    exists = builder.icmp_signed("<", i64(w), num_words)
                    with builder.if_then(exists), builder.if_else(is_inside, likely=True) as (fits, ends):
                        with fits:
                            simd.store(builder, column, place)
                        with ends:
                            simd.masked_store(builder, column, place, of_rows)

    def columns(most_rows, lanes, *, is_whole):
        """Each column of the words, with its place."""
        rows = [undefined] * LANES
        for r in range(most_rows):
            row = builder.select(builder.icmp_signed("<", i64(r), num_rows), i64(r), last)
            at = builder.add(source, builder.mul(source_stride, row))
            rows[r] = simd.load(builder, at, _WORDS, 1) if is_whole else simd.masked_load(builder, at, of_words, I32, 1)
        return [
            (builder.shuffle_vector(column, undefined, lanes), builder.add(target, builder.mul(stride, i64(w))))
            for w, column in enumerate(transposed(builder, rows))
        ]

    with builder.if_else(builder.icmp_signed("<=", num_rows, i64(few))) as (are_few, are_many):
        with are_few:
            arrange(few)
        with are_many:
            arrange(LANES)


def _group(builder, source, stored, count):
    """GROUP elements at ``source`` as vectors of floats, 0 from ``count`` on, where memory is not touched."""
    item_bytes = stored.bitwidth // 8
    element = F32 if stored == types.float32 else simd.I16
    starts = range(0, GROUP, LANES)
    places = [simd.offset(builder, source, first * item_bytes) for first in starts]
    vectors = [cgutils.alloca_once(builder, simd.vector(F32)) for _ in starts]
    with builder.if_else(builder.icmp_signed("==", count, i64(GROUP))) as (full, part):
        with full:
            for place, variable in zip(places, vectors):
                builder.store(simd.load_wide(builder, place, stored), variable)
        with part:
            for first, place, variable in zip(starts, places, vectors):
                mask = simd.lanes_below(builder, first, count)
                bits = simd.masked_load(builder, place, mask, element, item_bytes)
                builder.store(simd.widen(builder, bits, stored), variable)
    return [builder.load(variable) for variable in vectors]


def _magnitude_bits(builder, values):
    """The bits of the floats' magnitudes, which are ordered as they are; those of NaN are above all."""
    return builder.and_(builder.bitcast(values, _WORDS), simd.splat_constant(I32, 0x7FFFFFFF))


def _larger(builder, a, b):
    return builder.select(builder.icmp_signed(">", a, b), a, b)


def _largest_of_lanes(builder, vectors):
    """The bits of the largest magnitude in each lane of these vectors of floats."""
    return functools.reduce(functools.partial(_larger, builder), [_magnitude_bits(builder, each) for each in vectors])


@emitted(types.int32, KIND, types.intp, types.intp)
def largest_bits(builder, stored, source, count):
    """The bits of the largest magnitude among at most GROUP elements at ``source``; those of NaN are above all."""
    found = _largest_of_lanes(builder, _group(builder, source, stored, count))
    return simd.fold(builder, found, functools.partial(_larger, builder))


@emitted(types.float32, types.int32)
def scale_of(builder, bits):
    """The float32 that 1 stands for where 127 stands for the magnitude with these bits. NaN or infinity stay so."""
    return builder.fdiv(builder.bitcast(bits, F32), ir.Constant(F32, 127.0))


@emitted(types.float32, types.int32)
def inverse_of(builder, bits):
    """The factor before rounding to int8: 127 over the magnitude with these bits.

    0 where that is too small, or is NaN or infinity: the scale then carries it into every product.
    """
    return _inverse(builder, builder.bitcast(bits, F32))


def _inverse(builder, magnitude):
    smallest, infinite, most, zero = (simd.constant_like(magnitude, n) for n in (_SMALLEST, float("inf"), 127.0, 0.0))
    usable = builder.and_(
        builder.fcmp_ordered(">=", magnitude, smallest), builder.fcmp_ordered("<", magnitude, infinite)
    )  # fmt: skip
    return builder.select(usable, builder.fdiv(most, magnitude), zero)


def rounded(builder: ir.IRBuilder, values: ir.Value, inverse: ir.Value) -> ir.Value:
    """``values * inverse`` to the nearest even integer, i32, where the product lies within 2^22; 0 where it is NaN."""
    product = builder.fmul(values, inverse)
    number = builder.fcmp_ordered("ord", product, product)
    product = builder.select(number, product, simd.splat_constant(F32, 0.0))
    shifted = builder.bitcast(builder.fadd(product, simd.splat_constant(F32, _MAGIC)), _WORDS)
    return builder.sub(shifted, simd.splat_constant(I32, _MAGIC_BITS))


@emitted(types.int32, KIND, types.intp, types.intp, types.float32, types.int32, types.intp)
def quantize_words(builder, stored, source, count, inverse, added, target):
    """GROUP_WORDS words of ``rint(element * inverse) + added`` as bytes, of the ``count`` (at most GROUP) elements at
    ``source`` and zeros after them. Returns the sum of the rounded elements."""
    total = simd.splat_constant(I32, 0)
    inverses, addends = simd.splat(builder, inverse), simd.splat(builder, added)
    parts = []
    for values in _group(builder, source, stored, count):
        whole = rounded(builder, values, inverses)
        total = builder.add(total, whole)
        parts.append(builder.trunc(builder.add(whole, addends), simd.vector(I8)))
    while len(parts) > 1:  # one store: a load of several stores would wait for them
        lanes = list(range(2 * parts[0].type.count))
        order = ir.Constant(simd.vector(I32, len(lanes)), lanes)
        parts = [builder.shuffle_vector(a, b, order) for a, b in zip(parts[::2], parts[1::2])]
    simd.store(builder, parts[0], target, 1)
    return simd.fold(builder, total, builder.add)


def _powers(builder, largest):
    """By largest magnitudes, a float or a vector: the bits of the least power of two by which they are at most 127, the
    bits of 1.5 * 2^23 times it, which rounds to its multiples when it is added, and whether float32 can round so; the
    latter bits are NaN's if not."""
    is_vector = isinstance(largest.type, ir.VectorType)
    bits = builder.bitcast(largest, simd.vector(I32, largest.type.count) if is_vector else I32)
    number = functools.partial(simd.constant_like, bits)
    above = builder.add(bits, number(0x7FFFFF - 0x7E0000))  # the next power of two, above 127 / 64
    power = builder.sub(builder.and_(above, number(0x7F800000)), number(6 << 23))
    power = _larger(builder, power, number(1 << 23))  # a normal number
    adder = builder.add(power, number(_MAGIC_BITS - (127 << 23)))
    fits = builder.icmp_signed("<=", bits, number(_LARGEST_ROUNDED_BITS))
    return power, builder.select(fits, adder, number(_NAN_BITS)), fits


@emitted(types.float32, types.int32)
def power_of(builder, bits):
    """The power of two that 1 stands for in a group whose largest magnitude has these bits; NaN if that is too
    large."""
    power, _, fits = _powers(builder, builder.bitcast(bits, F32))
    return builder.bitcast(builder.select(fits, power, ir.Constant(I32, _NAN_BITS)), F32)


@emitted(types.void, *[types.intp] * 4)
def find_adders(builder, source, source_stride, num_rows, adders):
    """The numbers that round GROUP floats of each of at most LANES / 2 rows, ``source_stride`` bytes apart, to
    multiples of their power of two (`_powers`)."""

    def emit(height):
        rows, lanes = _rows(builder, source, source_stride, height, GROUP), _lanes_of(height)
        _store_each(builder, _powers(builder, _largest_of_rows(builder, rows, lanes))[1], height, adders)

    simd.for_each_of(builder, num_rows, range(1, LANES // 2 + 1), emit)


@emitted(types.void, *[types.intp] * 6)
def arrange_group(builder, source, source_stride, num_rows, words, adders, starts):
    """The same floats as int8 by those numbers: a row's GROUP_WORDS words after the other's, and the bits where integer
    sums begin: that number's, and -ZERO_POINT times the row's sum."""

    def emit(height):
        sums, lanes = [], _lanes_of(height)
        for r, row in enumerate(_rows(builder, source, source_stride, height, GROUP)):
            adder = simd.splat(builder, simd.load(builder, simd.offset(builder, adders, r * 4), F32, 4))
            # The multiple is left in the low bits. NaN leaves anything: the number is NaN, too.
            bits = [builder.bitcast(builder.fadd(values, adder), _WORDS) for values in row]
            sums.append(functools.reduce(builder.add, bits))
            simd.store(builder, _low_bytes(builder, bits), simd.offset(builder, words, r * GROUP_WORDS * 4))
        total = simd.first_lanes(builder, simd.fold_rows(builder, sums, builder.add), lanes)
        adder = _load_each(builder, height, adders)
        total = builder.sub(total, builder.mul(adder, simd.splat_constant(I32, GROUP, lanes)))
        start = builder.mul(total, simd.splat_constant(I32, -ZERO_POINT, lanes))
        _store_each(builder, builder.add(start, adder), height, starts)

    simd.for_each_of(builder, num_rows, range(1, LANES // 2 + 1), emit)


def _rows(builder, source, stride, height, elements):
    """The vectors of so many floats of each row."""
    for r in range(height):
        row = builder.add(source, builder.mul(stride, i64(r)))
        places = [simd.offset(builder, row, first * 4) for first in range(0, elements, LANES)]
        yield [simd.load(builder, place, simd.vector(F32), 4) for place in places]


def _largest_of_rows(builder, rows, lanes):
    """The largest magnitude of each row, in so many lanes."""
    found = [_largest_of_lanes(builder, row) for row in rows]
    folded = simd.fold_rows(builder, found, functools.partial(_larger, builder))
    return builder.bitcast(simd.first_lanes(builder, folded, lanes), simd.vector(F32, lanes))


def _lanes_of(height):
    """The power of two of lanes that hold a number of each row."""
    return 1 << (height - 1).bit_length()


def _store_each(builder, value, height, address):
    """Stores the first ``height`` lanes."""
    lanes = value.type.count
    if lanes == height:
        simd.store(builder, value, address)
    else:
        is_row = ir.Constant(simd.vector(simd.I1, lanes), [lane < height for lane in range(lanes)])
        simd.masked_store(builder, value, address, is_row)


def _load_each(builder, height, address):
    """The words of so many rows, in `_lanes_of` them."""
    lanes = _lanes_of(height)
    if lanes == height:
        return simd.load(builder, address, simd.vector(I32, lanes), 4)
    is_row = ir.Constant(simd.vector(simd.I1, lanes), [lane < height for lane in range(lanes)])
    return simd.masked_load(builder, address, is_row, I32)


def _low_bytes(builder, vectors):
    """The low bytes of four vectors of words, in their order, as one."""
    lowest = ir.Constant(simd.vector(I32, 2 * LANES), [4 * word for word in range(2 * LANES)])
    every = ir.Constant(simd.vector(I32, 4 * LANES), list(range(4 * LANES)))
    parts = [builder.bitcast(words, simd.vector(I8, 4 * LANES)) for words in vectors]
    halves = [builder.shuffle_vector(a, b, lowest) for a, b in zip(parts[::2], parts[1::2])]
    return builder.bitcast(builder.shuffle_vector(*halves, every), _WORDS)


def _block_scale(builder, largest, has_power):
    """A block's scale by largest magnitudes (a float or a vector), the factor before rounding to int8, the bits where
    integer sums begin, and the factor of the sum of integers.

    The largest stands for 127; NaN and infinity are their scale. ``has_power``, it stands for 64 to 127 and the scale
    is a power of two, which the tiles need as 1.5 * 2^23 times it: that number is given instead, NaN if it is not
    finite. Too small a magnitude counts as zeros."""
    is_vector = isinstance(largest.type, ir.VectorType)
    bits = builder.bitcast(largest, simd.vector(I32, largest.type.count) if is_vector else I32)
    number = functools.partial(simd.constant_like, bits)
    tiny, zero, one = (simd.constant_like(largest, each) for each in (_SMALLEST_OF_POWERS, 0.0, 1.0))
    above = builder.add(bits, number(0x7FFFFF - 0x7E0000))  # the next power of two, above 127 / 64
    power = builder.sub(builder.and_(above, number(0x7F800000)), number(6 << 23))
    inverse_power = builder.bitcast(builder.sub(number(254 << 23), power), largest.type)
    is_small = builder.fcmp_ordered("<", largest, tiny)
    fits = builder.icmp_signed("<=", bits, number(_LARGEST_ROUNDED_BITS))
    inverse_power = builder.select(builder.and_(fits, builder.not_(is_small)), inverse_power, zero)
    adder = builder.select(is_small, number(0), builder.add(power, number(_MAGIC_BITS - (127 << 23))))
    adder = builder.select(fits, adder, number(_NAN_BITS))
    scale = builder.fdiv(largest, simd.constant_like(largest, 127.0))
    return (
        builder.select(has_power, builder.bitcast(adder, largest.type), scale),
        builder.select(has_power, inverse_power, _inverse(builder, largest)),
        builder.select(has_power, adder, number(0)),
        builder.select(has_power, builder.bitcast(power, largest.type), one),
    )


@emitted(types.void, *[types.intp] * 3, types.boolean, types.boolean)
def quantize_block(builder, source, target, start, is_halved, has_power):
    """32 floats at ``source`` as int8 to ``target``, with the scale of `_block_scale`.

    Three words follow them: the scale, and where sums of products begin: ``start`` times the sums of both halves where
    ``is_halved``, else ``start`` times the whole sum, and that sum below zero, as a float. Beside a power of two they
    begin at the scale's bits, and the float is scaled. A group with NaN or infinity has such a scale, and zeros.
    """
    behind = [simd.offset(builder, target, 2 * LANES + 4 * word) for word in range(3)]
    places = [simd.offset(builder, source, first * 4) for first in (0, LANES)]
    halves = [simd.load(builder, place, simd.vector(F32), 4) for place in places]
    found = simd.fold(builder, _largest_of_lanes(builder, halves), functools.partial(_larger, builder))
    largest = builder.bitcast(found, F32)
    scale, inverse, begin, factor = _block_scale(builder, largest, has_power)
    simd.store(builder, scale, behind[0])
    inverse = simd.splat(builder, inverse)
    sums = []
    for number, half in enumerate(halves):
        whole = rounded(builder, half, inverse)
        simd.store(builder, builder.trunc(whole, simd.vector(I8)), simd.offset(builder, target, number * LANES), 1)
        sums.append(whole)
    start = builder.trunc(start, I32)
    with builder.if_else(is_halved) as (by_halves, at_once):
        with by_halves:
            for half, at in zip(sums, behind[1:]):
                simd.store(builder, builder.add(builder.mul(simd.fold(builder, half, builder.add), start), begin), at)
        with at_once:
            total = simd.fold(builder, builder.add(*sums), builder.add)
            simd.store(builder, builder.add(builder.mul(total, start), begin), behind[1])
            simd.store(builder, builder.fmul(builder.fneg(builder.sitofp(total, F32)), factor), behind[2])


@emitted(types.void, *[types.intp] * 5, types.boolean, types.boolean)
def quantize_blocks(builder, source, source_stride, num_rows, start, target, is_halved, has_power):
    """`quantize_block` of 2 to LANES / 2 rows, ``source_stride`` bytes apart: their words in turn, then their scales
    and both other words."""

    def emit(height):
        rows = list(_rows(builder, source, source_stride, height, 2 * LANES))
        _quantize_blocks(builder, rows, start, target, is_halved, has_power)

    simd.for_each_of(builder, num_rows, range(2, LANES // 2 + 1), emit)


def _quantize_blocks(builder, rows, start, target, is_halved, has_power):
    height, lanes = len(rows), _lanes_of(len(rows))
    behind = [simd.offset(builder, target, (8 + word) * height * 4) for word in range(3)]

    def sums(values):
        return simd.first_lanes(builder, simd.fold_rows(builder, values, builder.add), lanes)

    scales, inverses, begin, factor = _block_scale(builder, _largest_of_rows(builder, rows, lanes), has_power)
    _store_each(builder, builder.bitcast(scales, simd.vector(I32, lanes)), height, behind[0])
    whole = []
    for r, halves in enumerate(rows):
        inverse = builder.shuffle_vector(inverses, inverses, ir.Constant(_WORDS, [r] * LANES))
        whole.append([rounded(builder, half, inverse) for half in halves])
    _store_in_turn(builder, [_low_bytes(builder, [*a, *b]) for a, b in _pairs(whole)], height, target)
    start = simd.splat(builder, builder.trunc(start, I32), lanes)
    with builder.if_else(is_halved) as (by_halves, at_once):
        with by_halves:
            for half, place in enumerate(behind[1:]):
                total = sums([each[half] for each in whole])
                _store_each(builder, builder.add(builder.mul(total, start), begin), height, place)
        with at_once:
            total = sums([builder.add(*each) for each in whole])
            _store_each(builder, builder.add(builder.mul(total, start), begin), height, behind[1])
            below = builder.fmul(builder.fneg(builder.sitofp(total, simd.vector(F32, lanes))), factor)
            _store_each(builder, builder.bitcast(below, total.type), height, behind[2])


def _pairs(values):
    """Neighbours; the last one beside itself if it has none."""
    return [(values[first], values[min(first + 1, len(values) - 1)]) for first in range(0, len(values), 2)]


def _store_in_turn(builder, vectors, height, address):
    """Stores ``[word, row]`` of 8 words of each of ``height`` rows, of which each vector has two."""
    while len(vectors) > 2:
        every = ir.Constant(simd.vector(I32, 2 * vectors[0].type.count), list(range(2 * vectors[0].type.count)))
        vectors = [builder.shuffle_vector(a, b, every) for a, b in _pairs(vectors)]
    order = [8 * row + word for word in range(8) for row in range(height)]
    joined = builder.shuffle_vector(vectors[0], vectors[-1], ir.Constant(simd.vector(I32, len(order)), order))
    simd.store(builder, joined, address)


@emitted(types.void, KIND, *[types.intp] * 5)
def largest_bits_of_columns(builder, stored, source, source_stride, depth, columns, target):
    """The bits of the largest magnitude in each of at most LANES columns of ``depth`` rows; i32, to ``target``."""
    found = cgutils.alloca_once(builder, _WORDS)
    builder.store(simd.splat_constant(I32, 0), found)
    with cgutils.for_range(builder, depth, intp=I64) as loop:
        at = builder.add(source, builder.mul(loop.index, source_stride))
        values = simd.widen(builder, _columns(builder, at, stored, columns), stored)
        builder.store(_larger(builder, _magnitude_bits(builder, values), builder.load(found)), found)
    simd.store(builder, builder.load(found), target)


def _columns(builder, address, stored, columns):
    """LANES stored elements at ``address``, zeros from ``columns`` on."""
    element = F32 if stored == types.float32 else simd.I16
    item_bytes = stored.bitwidth // 8
    found = cgutils.alloca_once(builder, simd.vector(element))
    with builder.if_else(builder.icmp_signed("==", columns, i64(LANES))) as (full, part):
        with full:
            builder.store(simd.load(builder, address, simd.vector(element), item_bytes), found)
        with part:
            mask = simd.lanes_below(builder, 0, columns)
            builder.store(simd.masked_load(builder, address, mask, element, item_bytes), found)
    return builder.load(found)


@emitted(types.void, KIND, KIND, *[types.intp] * 7)
def join_rows(builder, stored, packed, source, source_stride, depth, columns, inverses, target, target_stride):
    """Words of LANES columns each from rows of the source: ``depth`` elements of K in each of ``columns`` columns.

    A word holds one row's float32, two rows' 16-bit elements, or four rows' elements rounded to int8 after they were
    multiplied with ``inverses`` (the address of LANES float32), ZERO_POINT added; rows from ``depth`` on count as
    zeros. Columns from ``columns`` on are not written.
    """
    elements = 32 // packed.bitwidth
    mask = simd.lanes_below(builder, 0, columns)
    factor = simd.load(builder, inverses, simd.vector(F32), 4) if packed == types.uint8 else None
    count = builder.sdiv(builder.add(depth, i64(elements - 1)), i64(elements))
    last = builder.sub(depth, i64(1))
    with cgutils.for_range(builder, count, intp=I64) as loop:
        joined = None
        for index in range(elements):
            row = builder.add(builder.mul(loop.index, i64(elements)), i64(index))
            exists = builder.icmp_signed("<", row, depth)
            row = builder.select(exists, row, last)
            at = builder.add(source, builder.mul(row, source_stride))
            word = _part_of_word(builder, _columns(builder, at, stored, columns), stored, factor)
            nothing = ZERO_POINT if packed == types.uint8 else 0
            if elements > 1:
                word = builder.select(exists, word, simd.splat_constant(I32, nothing))
                word = builder.shl(word, simd.splat_constant(I32, index * packed.bitwidth))
            joined = word if joined is None else builder.or_(joined, word)
        place = builder.add(target, builder.mul(loop.index, target_stride))
        simd.masked_store(builder, joined, place, mask)


def _part_of_word(builder, values, stored, factor):
    """Stored elements as the low bits of words."""
    if factor is not None:
        whole = rounded(builder, simd.widen(builder, values, stored), factor)
        return builder.add(whole, simd.splat_constant(I32, ZERO_POINT))
    if stored == types.float32:
        return builder.bitcast(values, _WORDS)
    return builder.zext(values, _WORDS)


@emitted(types.void, *[types.intp] * 3)
def round_pairs(builder, source, count, target):
    """LANES words of two bfloat16 each: the ``count`` (at most 2 * LANES) floats at ``source``, rounded by
    `round_to_pairs`, and zeros after them."""

    def emit(load):
        halves = [load(simd.offset(builder, source, first * 4), first) for first in (0, LANES)]
        simd.store(builder, dots.round_to_pairs(builder, *halves), target)

    with builder.if_else(builder.icmp_signed(">=", count, i64(2 * LANES)), likely=True) as (whole, part):
        with whole:
            emit(lambda at, first: simd.load(builder, at, simd.vector(F32), 4))
        with part:
            emit(lambda at, first: simd.masked_load(builder, at, simd.lanes_below(builder, first, count)))


@emitted(types.void, *[types.intp] * 3)
def split_pairs(builder, source, evens, odds):
    """LANES words of four int8 each as words of two int16: of bytes 0 and 2, and of bytes 1 and 3."""
    shorts = simd.vector(simd.I16, 2 * LANES)
    eight = simd.splat_constant(simd.I16, 8, 2 * LANES)
    words = simd.load(builder, source, shorts, 4)
    simd.store(builder, builder.ashr(builder.shl(words, eight), eight), evens)
    simd.store(builder, builder.ashr(words, eight), odds)


@emitted(types.uint32, types.intp)
def half_word(builder, address):
    """The 16 bits at ``address``."""
    return builder.zext(simd.load(builder, address, simd.I16, 2), I32)


@emitted(types.intp)
def block_on_stack(builder):
    """The address of LANES rows of LANES words on the stack of the function that calls it."""
    return _on_stack(builder, LANES)


@emitted(types.intp)
def groups_on_stack(builder):
    """The address of LANES / 2 rows of GROUP words on the stack of the function that calls it."""
    return _on_stack(builder, GROUP // 2)


def _on_stack(builder, vectors):
    memory = cgutils.alloca_once(builder, ir.ArrayType(_WORDS, vectors))
    memory.align = 64
    return builder.ptrtoint(memory, I64)
