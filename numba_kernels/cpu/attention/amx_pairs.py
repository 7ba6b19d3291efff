"""Attention's products on AMX's registers, of words as `pair_tile` makes them: 16 rows, 64 columns at once.

    scores  queries [rows, words] . keys [words, CHUNK_TOKENS]      sums stay in their registers for all words
    values  weights [rows, words] . values [words, width]           sums come from memory and return to it once a chunk

A step is 16 words of either factor: those that fill up the last one are zeros on the left and finite on the right, so
that a row's bits depend on no other row, and on no token that it does not see. A work item configures the registers
once, for all rows of its tiles; rows past the last one get anything.
"""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils, types

from numba_kernels.cpu.attention.tile import CHUNK_TOKENS, constant
from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.amx import TILE_ROWS, Tiles
from numba_kernels.cpu.intrinsics.emitted import emitted
from numba_kernels.cpu.intrinsics.simd import F32, I64
from numba_kernels.cpu.layout import AMX_ROWS
from numba_kernels.cpu.target import LANES

STEP_WORDS = TILE_ROWS
"""Words of both factors that an instruction multiplies."""
_SUMS, _LEFT, _RIGHT = range(4), 4, (5, 6)
_VECTOR_BYTES = LANES * 4
_ROW_BYTES = CHUNK_TOKENS * 4
_FLOATS = simd.vector(F32)


@emitted(types.void, types.intp)
def begin_tiles(builder, rows):
    """Before a work item's first product: of so many rows, at most a register's."""
    if AMX_ROWS:
        is_more = builder.icmp_signed(">", rows, constant(TILE_ROWS))
        Tiles(builder).configure(builder.select(is_more, constant(TILE_ROWS), rows), _SUMS, [_LEFT], _RIGHT, STEP_WORDS)


def _add_step(builder, tiles, left, left_stride, right, right_stride, vectors):
    """Adds the products of a step to the first ``vectors`` registers of sums; addresses, and strides in bytes."""
    tiles.load_left(_LEFT, left, left_stride)
    for v in range(vectors):
        tiles.load_right(_RIGHT[v % 2], simd.offset(builder, right, v * _VECTOR_BYTES), right_stride)
        tiles.add_pairs(_SUMS[v], _LEFT, _RIGHT[v % 2])


def tile_scores(builder, q, row_bytes, keys, depth, scores, tokens, rows):
    """As `pair_tile.score_words` of pairs."""
    tiles, stride = Tiles(builder), constant(_ROW_BYTES)
    tiles.resume(rows, STEP_WORDS)
    steps = builder.sdiv(builder.add(depth, constant(STEP_WORDS - 1)), constant(STEP_WORDS))

    def emit(vectors):
        for v in range(vectors):
            tiles.zero(_SUMS[v])
        with cgutils.for_range(builder, steps, intp=I64) as loop:
            left = builder.add(q, builder.mul(loop.index, constant(STEP_WORDS * 4)))
            right = builder.add(keys, builder.mul(loop.index, constant(STEP_WORDS * _ROW_BYTES)))
            _add_step(builder, tiles, left, row_bytes, right, stride, vectors)
        for v in range(vectors):
            tiles.store_sums(_SUMS[v], simd.offset(builder, scores, v * _VECTOR_BYTES), stride)

    half = CHUNK_TOKENS // 2
    with builder.if_else(builder.icmp_signed("<=", tokens, constant(half))) as (few, many):
        with few:
            emit(half // LANES)
        with many:
            emit(CHUNK_TOKENS // LANES)


def tile_values(builder, weights, values, first, last, factors, out, out_vectors, rows):
    """As `pair_tile.value_pairs`. Words of tokens outside [first, last) in its steps have weights of zero."""
    tiles, tokens = Tiles(builder), 2 * STEP_WORDS
    tiles.resume(rows, STEP_WORDS)
    row_bytes = builder.mul(out_vectors, constant(_VECTOR_BYTES))
    _scale_rows(builder, factors, out, out_vectors, row_bytes, rows)
    begin = builder.sdiv(first, constant(tokens))
    end = builder.sdiv(builder.add(last, constant(tokens - 1)), constant(tokens))

    def columns(start, vectors):
        moved = builder.mul(start, constant(_VECTOR_BYTES))
        places = [simd.offset(builder, builder.add(out, moved), v * _VECTOR_BYTES) for v in range(vectors)]
        for v, place in enumerate(places):
            tiles.load_sums(_SUMS[v], place, row_bytes)
        with cgutils.for_range_slice(builder, begin, end, constant(1), intp=I64) as (step, _):
            left = builder.add(weights, builder.mul(step, constant(STEP_WORDS * 4)))
            right = builder.add(values, builder.mul(builder.mul(step, constant(STEP_WORDS)), row_bytes))
            _add_step(builder, tiles, left, constant(_ROW_BYTES), builder.add(right, moved), row_bytes, vectors)
        for v, place in enumerate(places):
            tiles.store_sums(_SUMS[v], place, row_bytes)

    whole = builder.sdiv(out_vectors, constant(len(_SUMS)))
    with cgutils.for_range(builder, whole, intp=I64) as loop:
        columns(builder.mul(loop.index, constant(len(_SUMS))), len(_SUMS))
    done = builder.mul(whole, constant(len(_SUMS)))
    with cgutils.for_range_slice(builder, done, out_vectors, constant(1), intp=I64) as (start, _):
        columns(start, 1)


def _scale_rows(builder, factors, out, out_vectors, row_bytes, rows):
    """Multiplies rows of ``out`` by their factors; most are 1, since a row's largest score is rarely a new one."""
    with cgutils.for_range(builder, rows, intp=I64) as outer:
        factor = simd.load(builder, builder.add(factors, builder.mul(outer.index, constant(4))), F32, 4)
        with builder.if_then(builder.fcmp_unordered("!=", factor, ir.Constant(F32, 1.0))):
            splat = simd.splat(builder, factor)
            start = builder.add(out, builder.mul(outer.index, row_bytes))
            with cgutils.for_range(builder, out_vectors, intp=I64) as loop:
                place = builder.add(start, builder.mul(loop.index, constant(_VECTOR_BYTES)))
                value = builder.fmul(simd.load(builder, place, _FLOATS, 4), splat)
                simd.store(builder, value, place)
