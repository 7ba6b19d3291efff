"""Attention's tiles by pairs of bfloat16: products by vdpbf16ps, sums in float32.

A chunk's keys and values are rounded once for all rows of a group, into words of two neighbours: keys of two dimensions
``[head_dim / 2, CHUNK_TOKENS]``, values of two tokens ``[CHUNK_TOKENS / 2, width]``. Queries and weights are rounded
likewise, row by row. Chains do not depend on how many rows a tile has.
"""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils, types

from numba_kernels.cpu.attention.tile import (
    ACCUMULATORS,
    CHUNK_TOKENS,
    HALF_TOKENS,
    constant,
    entry,
    for_each_columns,
    for_each_height,
    registers,
)
from numba_kernels.cpu.intrinsics import dots, simd
from numba_kernels.cpu.intrinsics.emitted import emitted
from numba_kernels.cpu.intrinsics.simd import F32, I16, I32, I64
from numba_kernels.cpu.target import LANES

_WORDS = simd.vector(I32)
_FLOATS = simd.vector(F32)


def _joined(builder, first, second, order):
    """Two vectors of floats as words: half words in this order, of both rounded one after the other."""
    shorts = simd.vector(I16, 2 * LANES)
    rounded = builder.bitcast(dots.round_to_pairs(builder, first, second), shorts)
    order = ir.Constant(simd.vector(I32, 2 * LANES), order)
    return builder.bitcast(builder.shuffle_vector(rounded, rounded, order), _WORDS)


_IN_TURN = [vector * LANES + lane for lane in range(LANES) for vector in (0, 1)]


def _load(builder, address, kind=_FLOATS):
    return simd.load(builder, address, kind, 4)


@emitted(types.void, *[types.intp] * 4, types.float32, *[types.intp] * 2)
def pair_rows(builder, source, stride, rows, count, factor, target, row_bytes):
    """Rows of ``count`` floats, ``stride`` bytes apart, times a factor, as words of two neighbours in rows
    ``row_bytes`` apart; zeros fill the last vector of words."""
    factors = simd.splat(builder, factor)

    def pair(at, place, load):
        halves = [load(simd.offset(builder, at, first * 4), first) for first in (0, LANES)]
        words = dots.round_to_pairs(builder, *(builder.fmul(half, factors) for half in halves))
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


@emitted(types.void, *[types.intp] * 5)
def pair_keys(builder, keys, key_stride, head_dim, tokens, target):
    """Words of the keys of at least the first ``tokens`` of a chunk; `tile.score_tile` tells of ``keys``, pages of
    float32 whose tokens lie side by side by LANES."""
    turns = builder.sdiv(builder.add(tokens, constant(LANES - 1)), constant(LANES))
    with cgutils.for_range(builder, turns, intp=I64) as outer:
        piece = entry(builder, keys, builder.mul(outer.index, constant(2)))
        out = builder.add(target, builder.mul(outer.index, constant(LANES * 4)))
        with cgutils.for_range(builder, builder.sdiv(head_dim, constant(2)), intp=I64) as loop:
            at = builder.add(piece, builder.mul(loop.index, builder.mul(key_stride, constant(2))))
            words = _joined(builder, _load(builder, at), _load(builder, builder.add(at, key_stride)), _IN_TURN)
            simd.store(builder, words, builder.add(out, builder.mul(loop.index, constant(CHUNK_TOKENS * 4))))


@emitted(types.void, *[types.intp] * 5)
def pair_values(builder, values, value_stride, vectors, tokens, target):
    """Words of the values of the first ``tokens`` of a chunk, in rows of ``vectors`` vectors; the last of an odd number
    of tokens has zeros as its neighbour. `tile.value_tile` tells of ``values``, here of float32."""
    turns = builder.sdiv(builder.add(tokens, constant(1)), constant(2))
    with cgutils.for_range(builder, turns, intp=I64) as outer:
        token = builder.mul(outer.index, constant(2))
        half = entry(builder, values, builder.lshr(token, constant(3)))
        row = builder.add(half, builder.mul(builder.and_(token, constant(HALF_TOKENS - 1)), value_stride))
        exists = builder.icmp_signed("<", builder.add(token, constant(1)), tokens)
        out = builder.add(target, builder.mul(outer.index, builder.mul(vectors, constant(LANES * 4))))
        with cgutils.for_range(builder, vectors, intp=I64) as loop:
            place = builder.mul(loop.index, constant(LANES * 4))
            at = builder.add(row, place)
            next_at = builder.select(exists, builder.add(at, value_stride), at)
            second = builder.select(exists, _load(builder, next_at), simd.splat_constant(F32, 0.0))
            simd.store(builder, _joined(builder, _load(builder, at), second, _IN_TURN), builder.add(out, place))


@emitted(types.void, *[types.intp] * 7)
def score_pairs(builder, q, row_bytes, keys, head_dim, scores, tokens, rows):
    """As `tile.score_tile`, of words by `pair_rows`, whose rows are ``row_bytes`` apart, and by `pair_keys`."""
    score_words(builder, q, row_bytes, keys, builder.sdiv(head_dim, constant(2)), scores, tokens, rows, _WORDS)


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


@emitted(types.void, *[types.intp] * 2)
def pair_weights(builder, weights, rows):
    """Rows of weights ``[rows, CHUNK_TOKENS]`` as words of two neighbours, in place, each at its row's beginning."""
    in_order = list(range(2 * LANES))
    with cgutils.for_range(builder, rows, intp=I64) as loop:
        base = builder.add(weights, builder.mul(loop.index, constant(CHUNK_TOKENS * 4)))
        for pair in range(CHUNK_TOKENS // LANES // 2):
            at = simd.offset(builder, base, 2 * pair * LANES * 4)
            words = _joined(builder, _load(builder, at), _load(builder, simd.offset(builder, at, LANES * 4)), in_order)
            simd.store(builder, words, simd.offset(builder, base, pair * LANES * 4))


@emitted(types.void, *[types.intp] * 8)
def value_pairs(builder, weights, values, first, last, factors, out, out_vectors, rows):
    """As `tile.value_tile`, of words by `pair_weights` and `pair_values`; the tokens are those of whole words."""
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
