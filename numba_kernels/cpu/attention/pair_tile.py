"""Attention's tiles by pairs of bfloat16: products by vdpbf16ps or AMX (`amx_pairs`), sums in float32.

A chunk's keys and values become words of two neighbours once for all rows of a group: keys of two dimensions
``[head_dim / 2, CHUNK_TOKENS]``, values of two tokens ``[CHUNK_TOKENS / 2, width]``. Pages of bfloat16 are
copied, those of float32 rounded; queries and weights are rounded row by row. Chains do not depend on how many rows a
tile has. Beside pages of bfloat16 the first neighbour is a word's upper half, which vdpbf16ps adds first: chains are in
order, as those of `tile` are.
"""

from __future__ import annotations

import itertools

import llvmlite.ir as ir
from numba.core import cgutils, types

from numba_kernels.cpu.attention.amx_pairs import STEP_WORDS, tile_scores, tile_values
from numba_kernels.cpu.attention.tile import (
    ACCUMULATORS,
    CHUNK_TOKENS,
    HALF_TOKENS,
    HEIGHTS,
    constant,
    entry,
    for_each_columns,
    for_each_height,
    registers,
    softmax,
)
from numba_kernels.cpu.intrinsics import dots, simd
from numba_kernels.cpu.intrinsics.emitted import KIND, LITERAL, emitted
from numba_kernels.cpu.intrinsics.simd import F32, I16, I32, I64
from numba_kernels.cpu.layout import AMX_ROWS, TILE_ROWS
from numba_kernels.cpu.target import LANES

PRODUCT_ROWS = min(AMX_ROWS, STEP_WORDS) or TILE_ROWS
"""Rows that are multiplied at once."""
_WORDS = simd.vector(I32)
_FLOATS = simd.vector(F32)
_ZEROS = ir.Constant(_WORDS, [0] * LANES)


def _joined(builder, first, second, order):
    """Two vectors of floats as words: half words in this order, of both rounded one after the other."""
    shorts = simd.vector(I16, 2 * LANES)
    rounded = builder.bitcast(dots.round_to_pairs(builder, first, second), shorts)
    order = ir.Constant(simd.vector(I32, 2 * LANES), order)
    return builder.bitcast(builder.shuffle_vector(rounded, rounded, order), _WORDS)


_AS_THEY_ARE = list(range(2 * LANES))


def _in_turn(stored):
    """Half words of a first and a second vector."""
    return [vector * LANES + lane for lane in range(LANES) for vector in ((1, 0) if _is_turned(stored) else (0, 1))]


def _is_turned(stored):
    return stored == types.uint16


def _neighbours_of(stored):
    """Half words of neighbours."""
    return [lane ^ 1 for lane in _AS_THEY_ARE] if _is_turned(stored) else _AS_THEY_ARE


def _load(builder, address, kind=_FLOATS):
    return simd.load(builder, address, kind, 4)


@emitted(types.void, KIND, *[types.intp] * 4, types.float32, *[types.intp] * 2)
def pair_rows(builder, stored, source, stride, rows, count, factor, target, row_bytes):
    """Rows of ``count`` floats, ``stride`` bytes apart, times a factor, as words of two neighbours in rows
    ``row_bytes`` apart, for pages of ``stored``; zeros fill the last vector of words."""
    factors = simd.splat(builder, factor)

    def pair(at, place, load):
        halves = [load(simd.offset(builder, at, first * 4), first) for first in (0, LANES)]
        words = _joined(builder, *(builder.fmul(half, factors) for half in halves), _neighbours_of(stored))
        simd.store(builder, words, place)

    whole = builder.sdiv(count, constant(2 * LANES))
    done = builder.mul(whole, constant(2 * LANES))
    with cgutils.for_range(builder, rows, intp=I64) as outer:
        at = builder.add(source, builder.mul(outer.index, stride))
        place = builder.add(target, builder.mul(outer.index, row_bytes))
        with cgutils.for_range(builder, whole, intp=I64) as loop:
            moved = builder.mul(loop.index, constant(2 * LANES * 4)), builder.mul(loop.index, constant(LANES * 4))
            pair(builder.add(at, moved[0]), builder.add(place, moved[1]), lambda at, _: _load(builder, at))
        with builder.if_then(builder.icmp_signed("<", done, count)):
            left = builder.sub(count, done)
            pair(
                builder.add(at, builder.mul(done, constant(4))), builder.add(place, builder.mul(done, constant(2))),
                lambda at, first: simd.masked_load(builder, at, simd.lanes_below(builder, first, left)),
            )  # fmt: skip


def _neighbours(builder, stored, load):
    """Words of ``load(0)`` and ``load(1)``, vectors as they are stored."""
    if stored == types.float32:
        return _joined(builder, load(0), load(1), _in_turn(stored))
    both = builder.shuffle_vector(load(0), load(1), ir.Constant(simd.vector(I32, 2 * LANES), _in_turn(stored)))
    return builder.bitcast(both, _WORDS)


@emitted(types.void, KIND, LITERAL, *[types.intp] * 5)
def pair_keys(builder, stored, span, keys, key_stride, head_dim, tokens, target):
    """Words of the keys of at least the first ``tokens`` of a chunk; ``keys`` and ``span`` as in `tile.score_tile`."""
    lanes = min(span, LANES)
    kind = simd.vector(F32 if stored == types.float32 else I16, lanes)
    turns = builder.sdiv(builder.add(tokens, constant(LANES - 1)), constant(LANES))
    join = ir.Constant(simd.vector(I32), list(range(LANES)))
    with cgutils.for_range(builder, turns, intp=I64) as outer:
        first = builder.mul(outer.index, constant(2))
        pieces = [entry(builder, keys, builder.add(first, constant(h))) for h in range(LANES // lanes)]
        out = builder.add(target, builder.mul(outer.index, constant(LANES * 4)))
        with cgutils.for_range(builder, builder.sdiv(head_dim, constant(2)), intp=I64) as loop:
            moved = builder.mul(loop.index, builder.mul(key_stride, constant(2)))

            def load(which):
                at = builder.add(moved, builder.mul(key_stride, constant(which)))
                parts = [simd.load(builder, builder.add(piece, at), kind, 2) for piece in pieces]
                return parts[0] if len(parts) == 1 else builder.shuffle_vector(*parts, join)

            words = _neighbours(builder, stored, load)
            simd.store(builder, words, builder.add(out, builder.mul(loop.index, constant(CHUNK_TOKENS * 4))))


@emitted(types.void, KIND, *[types.intp] * 6)
def pair_values(builder, stored, values, value_stride, vectors, first, last, target):
    """Words of the values of a chunk's tokens [first, last), in rows of ``vectors`` vectors; the last of an odd number
    of tokens has zeros as its neighbour. `tile.value_tile` tells of ``values``. For AMX other words are zeros up to a
    step's ends."""
    element, size = (F32, 4) if stored == types.float32 else (I16, 2)
    kind = simd.vector(element)
    begin, end = builder.sdiv(first, constant(2)), builder.sdiv(builder.add(last, constant(1)), constant(2))
    row_bytes = builder.mul(vectors, constant(LANES * 4))
    with cgutils.for_range_slice(builder, begin, end, constant(1), intp=I64) as (pair, _):
        token = builder.mul(pair, constant(2))
        half = entry(builder, values, builder.lshr(token, constant(3)))
        row = builder.add(half, builder.mul(builder.and_(token, constant(HALF_TOKENS - 1)), value_stride))
        exists = builder.icmp_signed("<", builder.add(token, constant(1)), last)
        out = builder.add(target, builder.mul(pair, row_bytes))
        with cgutils.for_range(builder, vectors, intp=I64) as loop:
            at = builder.add(row, builder.mul(loop.index, constant(LANES * size)))

            def load(which):
                if not which:
                    return simd.load(builder, at, kind, 2)
                next_at = builder.select(exists, builder.add(at, value_stride), at)
                zeros = ir.Constant(kind, [0.0 if element == F32 else 0] * LANES)
                return builder.select(exists, simd.load(builder, next_at, kind, 2), zeros)

            words = _neighbours(builder, stored, load)
            simd.store(builder, words, builder.add(out, builder.mul(loop.index, constant(LANES * 4))))
    if AMX_ROWS:
        step = constant(STEP_WORDS)
        _clear(builder, target, row_bytes, builder.mul(builder.sdiv(begin, step), step), begin)
        more = builder.add(end, constant(STEP_WORDS - 1))
        _clear(builder, target, row_bytes, end, builder.mul(builder.sdiv(more, step), step))


def _clear(builder, target, row_bytes, first, last):
    """Makes rows [first, last) of words zero."""
    begin, end = (builder.add(target, builder.mul(row, row_bytes)) for row in (first, last))
    with cgutils.for_range_slice(builder, begin, end, constant(LANES * 4), intp=I64) as (at, _):
        simd.store(builder, _ZEROS, at)


@emitted(types.void, types.intp, types.intp)
def clear_last_keys(builder, keys, depth):
    """Makes the words zero that fill up the last step of a chunk's keys, for all its chunks."""
    if AMX_ROWS:
        more, step = builder.add(depth, constant(STEP_WORDS - 1)), constant(STEP_WORDS)
        _clear(builder, keys, constant(CHUNK_TOKENS * 4), depth, builder.mul(builder.sdiv(more, step), step))


@emitted(types.void, *[types.intp] * 7)
def score_pairs(builder, q, row_bytes, keys, head_dim, scores, tokens, rows):
    """As `tile.score_tile`, of words by `pair_rows`, whose rows are ``row_bytes`` apart, and by `pair_keys`."""
    depth = builder.sdiv(head_dim, constant(2))
    if AMX_ROWS:
        tile_scores(builder, q, row_bytes, keys, depth, scores, tokens, rows)
    else:
        score_words(builder, q, row_bytes, keys, depth, scores, tokens, rows, _WORDS)


def score_words(builder, q, row_bytes, keys, depth, scores, tokens, rows, kind):
    """``scores[r, t] = sum_d q[r, d] * keys[d, t]`` of ``depth`` words, pairs or floats by their vectors' ``kind``;
    ``keys [depth, CHUNK_TOKENS]``."""

    def emit(height):
        units = max(1, min(CHUNK_TOKENS // LANES, ACCUMULATORS // height))
        sums = [registers(builder, units) for _ in range(height)]
        turns = builder.sdiv(builder.add(tokens, constant(units * LANES - 1)), constant(units * LANES))
        starts = [builder.add(q, builder.mul(row_bytes, constant(r))) for r in range(height)]
        with cgutils.for_range(builder, turns, intp=I64) as loop:
            moved = builder.mul(loop.index, constant(units * LANES * 4))
            first, out = builder.add(keys, moved), builder.add(scores, moved)
            for register in (each for row in sums for each in row):
                builder.store(simd.splat_constant(F32, 0.0), register)
            with cgutils.for_range(builder, depth, intp=I64) as inner:
                at = builder.add(first, builder.mul(inner.index, constant(CHUNK_TOKENS * 4)))
                words = [_load(builder, simd.offset(builder, at, u * LANES * 4), kind) for u in range(units)]
                moved = builder.mul(inner.index, constant(4))
                _add_rows(builder, sums, [builder.add(start, moved) for start in starts], words)
            for r, row in enumerate(sums):
                for u, register in enumerate(row):
                    place = simd.offset(builder, out, (r * CHUNK_TOKENS + u * LANES) * 4)
                    simd.store(builder, builder.load(register), place)

    for_each_height(builder, rows, emit)


def _add_rows(builder, sums, places, words):
    """Adds the products of each row's word, at its place, with all of these words to its sums."""
    is_pairs = words[0].type == _WORDS
    for row, place in zip(sums, places):
        value = simd.splat(builder, _load(builder, place, words[0].type.element))
        for word, register in zip(words, row):
            total = builder.load(register)
            if is_pairs:
                total = dots.add_bf16_pairs(builder, total, value, word)
            else:
                total = simd.fma(builder, value, word, total)
            builder.store(total, register)


def _rounded(builder, first, second):
    """Two vectors of floats rounded to bfloat16."""
    words = builder.bitcast(dots.round_to_pairs(builder, first, second), simd.vector(I16, 2 * LANES))
    for start in (0, LANES):
        half = builder.shuffle_vector(words, words, ir.Constant(simd.vector(I32), list(range(start, start + LANES))))
        yield builder.bitcast(builder.shl(builder.zext(half, _WORDS), simd.splat_constant(I32, 16)), _FLOATS)


@emitted(types.void, *[types.intp] * 2)
def round_floats(builder, numbers, count):
    """Rounds ``count`` floats to bfloat16 in place, in whole twos of vectors."""
    twos = builder.sdiv(builder.add(count, constant(2 * LANES - 1)), constant(2 * LANES))
    with cgutils.for_range(builder, twos, intp=I64) as loop:
        at = builder.add(numbers, builder.mul(loop.index, constant(2 * LANES * 4)))
        places = at, simd.offset(builder, at, LANES * 4)
        for place, rounded in zip(places, _rounded(builder, *(_load(builder, place) for place in places))):
            simd.store(builder, rounded, place)


def kept_words(builder, stored):
    """For `tile.softmax_rows`: keeps a row's weights as words of two neighbours, which fill its first half."""

    def keep(places, weights):
        for place, *two in zip(places, weights[::2], weights[1::2]):
            simd.store(builder, _joined(builder, *two, _neighbours_of(stored)), place)

    return keep


@emitted(types.void, KIND, LITERAL, types.boolean, *[types.intp] * 9)
def softmax_rows_of(
    builder, stored, rounds, in_words, scores, tokens, ends, firsts, chunk, maxima, sums, factors, rows
):  # fmt: skip
    """`tile.softmax` of ``rows``, TILE_ROWS after TILE_ROWS. If it ``rounds`` (a literal), weights are rounded,
    and ``in_words`` kept as `kept_words` says."""

    def keep_floats(places, weights):
        for start in range(0, len(places), 2):
            for place, rounded in zip(places[start:], _rounded(builder, *weights[start : start + 2])):
                simd.store(builder, rounded, place)

    with cgutils.for_range_slice(builder, constant(0), rows, constant(TILE_ROWS), intp=I64) as (row, _):
        left, height = builder.sub(rows, row), constant(1)
        for least, each in itertools.pairwise(HEIGHTS):
            height = builder.select(builder.icmp_signed(">", left, constant(least)), constant(each), height)
        count = builder.select(builder.icmp_signed("<", left, height), left, height)

        def of_rows(base, size, row=row):
            return builder.add(base, builder.mul(row, constant(size)))

        operands = (
            of_rows(scores, CHUNK_TOKENS * 4), tokens, of_rows(ends, 8), of_rows(firsts, 8), chunk,
            of_rows(maxima, 4), of_rows(sums, 4), of_rows(factors, 4), count, height,
        )  # fmt: skip
        if not rounds:
            softmax(builder, *operands)
        else:
            with builder.if_else(in_words) as (words, floats):
                with words:
                    softmax(builder, *operands, kept_words(builder, stored))
                with floats:
                    softmax(builder, *operands, keep_floats)


@emitted(types.void, *[types.intp] * 8)
def value_pairs(builder, weights, values, first, last, factors, out, out_vectors, rows):
    """As `tile.value_tile`, of words by `softmax_rows_of` and `pair_values`; the tokens are those of whole words."""
    if AMX_ROWS:
        tile_values(builder, weights, values, first, last, factors, out, out_vectors, rows)
        return
    first, end = builder.sdiv(first, constant(2)), builder.sdiv(builder.add(last, constant(1)), constant(2))
    row_bytes = builder.mul(out_vectors, constant(LANES * 4))

    def add_columns(sums, start):
        source = builder.add(values, builder.mul(start, constant(LANES * 4)))
        with cgutils.for_range_slice(builder, first, end, constant(1), intp=I64) as (pair, _):
            at = builder.add(source, builder.mul(pair, row_bytes))
            words = [_load(builder, simd.offset(builder, at, c * LANES * 4), _WORDS) for c in range(len(sums[0]))]
            start = builder.add(weights, builder.mul(pair, constant(4)))
            places = [simd.offset(builder, start, r * CHUNK_TOKENS * 4) for r in range(len(sums))]
            _add_rows(builder, sums, places, words)

    for_each_columns(builder, factors, out, out_vectors, rows, add_columns)
