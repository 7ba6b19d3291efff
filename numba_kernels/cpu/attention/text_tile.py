"""The parts of attention within whole texts: all rows of a tile see the same tokens, and keys lie in rows."""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils, types

from numba_kernels.cpu.attention.pair_tile import kept_words, score_words
from numba_kernels.cpu.attention.tile import CHUNK_TOKENS, constant, for_each_height, softmax_rows
from numba_kernels.cpu.gemm.packed_words import transposed
from numba_kernels.cpu.intrinsics import dots, simd
from numba_kernels.cpu.intrinsics.emitted import LITERAL, emitted
from numba_kernels.cpu.intrinsics.simd import F32, I32, I64
from numba_kernels.cpu.target import LANES


def _scale_each(builder, rows, head_dim, source, source_stride, target, target_stride, factor_of):
    """Rows times ``factor_of(row)``, whole vectors; strides in bytes."""
    vectors = builder.sdiv(head_dim, constant(LANES))
    with cgutils.for_range(builder, rows, intp=I64) as loop:
        factor = simd.splat(builder, factor_of(loop.index))
        origin = builder.add(source, builder.mul(loop.index, source_stride))
        place = builder.add(target, builder.mul(loop.index, target_stride))
        with cgutils.for_range(builder, vectors, intp=I64) as each:
            moved = builder.mul(each.index, constant(LANES * 4))
            value = simd.load(builder, builder.add(origin, moved), simd.vector(F32), 4)
            simd.store(builder, builder.fmul(value, factor), builder.add(place, moved))


@emitted(types.void, *[types.intp] * 4, types.float32, types.intp, types.intp)
def scale_queries(builder, queries, stride, rows, head_dim, factor, target, row_bytes):
    """``target[r] = queries[r] * factor``. ``head_dim`` is a multiple of LANES."""
    _scale_each(builder, rows, head_dim, queries, stride, target, row_bytes, lambda row: factor)


@emitted(types.void, *[types.intp] * 6)
def write_texts(builder, values, sums, rows, head_dim, target, stride):
    """``target[r] = values[r] / sums[r]``, 0 where the sum is 0. ``head_dim`` is a multiple of LANES."""

    def inverse(row):
        total = simd.load(builder, builder.add(sums, builder.mul(row, constant(4))), F32, 4)
        zero = ir.Constant(F32, 0.0)
        return builder.select(builder.fcmp_ordered("==", total, zero), zero, builder.fdiv(ir.Constant(F32, 1.0), total))

    row_bytes = builder.mul(head_dim, constant(4))
    _scale_each(builder, rows, head_dim, values, row_bytes, target, stride, inverse)


@emitted(types.void, *[types.intp] * 7)
def score_floats(builder, q, row_bytes, keys, head_dim, scores, tokens, rows):
    """As `pair_tile.score_pairs`, of floats; ``keys [head_dim, CHUNK_TOKENS]``."""
    score_words(builder, q, row_bytes, keys, head_dim, scores, tokens, rows, simd.vector(F32))


@emitted(types.void, LITERAL, *[types.intp] * 6)
def softmax_text(builder, as_pairs, scores, tokens, maxima, sums, factors, rows):
    """`tile.softmax` of rows that see the first ``tokens`` of the chunk and no others. ``as_pairs``, a literal:
    weights become words of two neighbours, which fill the first half of their row."""
    half, whole = max(1, CHUNK_TOKENS // LANES // 2), CHUNK_TOKENS // LANES

    def emit(units, is_masked):
        masks = [simd.lanes_below(builder, v * LANES, tokens) for v in range(units)] if is_masked else None
        kept = kept_words(builder, types.float32) if as_pairs else None
        for_each_height(
            builder, rows,
            lambda height: softmax_rows(builder, range(units), scores, maxima, sums, factors, height, masks, kept),
        )  # fmt: skip

    with builder.if_else(builder.icmp_signed("==", tokens, constant(CHUNK_TOKENS)), likely=True) as (full, part):
        with full:
            emit(whole, False)
        with part, builder.if_else(builder.icmp_signed("<=", tokens, constant(half * LANES))) as (few, many):
            with few:
                emit(half, True)
            with many:
                emit(whole, True)


@emitted(types.void, LITERAL, *[types.intp] * 5)
def turn_keys(builder, as_pairs, keys, stride, head_dim, tokens, target):
    """Keys, rows ``stride`` bytes apart, as columns of a chunk: ``[head_dim, CHUNK_TOKENS]`` floats, or words as
    `pair_tile.pair_keys` makes them. ``head_dim`` is a multiple of LANES."""
    dims = 2 * LANES if as_pairs else LANES  # of a vector of words
    turns = builder.sdiv(builder.add(tokens, constant(LANES - 1)), constant(LANES))
    whole = builder.sdiv(head_dim, constant(dims))
    with cgutils.for_range(builder, turns, intp=I64) as outer:
        first = builder.mul(outer.index, constant(LANES))
        last = builder.sub(tokens, constant(1))
        rows = []
        for r in range(LANES):
            token = builder.add(first, constant(r))
            token = builder.select(builder.icmp_signed("<", token, last), token, last)  # which is never seen
            rows.append(builder.add(keys, builder.mul(token, stride)))
        out = builder.add(target, builder.mul(first, constant(4)))

        def turn(block, vectors, out=out, rows=rows):
            at = builder.mul(block, constant(dims * 4))
            place = builder.add(out, builder.mul(block, constant(LANES * CHUNK_TOKENS * 4)))
            words = []
            for row in rows:
                start = builder.add(row, at)
                parts = [
                    simd.load(builder, simd.offset(builder, start, v * LANES * 4), simd.vector(F32), 4)
                    for v in range(vectors)
                ]
                pairs = dots.round_to_pairs(builder, parts[0], parts[-1]) if as_pairs else parts[0]
                words.append(builder.bitcast(pairs, simd.vector(I32)))
            count = LANES if vectors * LANES == dims else LANES // 2
            for w, column in enumerate(transposed(builder, words)[:count]):
                simd.store(builder, column, simd.offset(builder, place, w * CHUNK_TOKENS * 4))

        with cgutils.for_range(builder, whole, intp=I64) as loop:
            turn(loop.index, dims // LANES)
        if as_pairs:
            is_odd = builder.icmp_signed("!=", builder.and_(head_dim, constant(LANES)), constant(0))
            with builder.if_then(is_odd):
                turn(whole, 1)
