"""The three register tiles of attention over paged keys and values, as LLVM IR.

A chunk is CHUNK_TOKENS consecutive tokens. Its keys lie transposed in their pages, eight tokens side by side at least, so
that a vector of scores is a chain of fused multiply-adds over head_dim; its values lie in rows of whole vectors, so
that a vector of the output is a chain over tokens. Neither needs a horizontal sum. Chains do not depend on how many
rows a tile has: an attention row is the same alone and in a batch.
"""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from numba_kernels.cpu import simd
from numba_kernels.cpu.simd import F32, I64
from numba_kernels.cpu.target import LANES, TILE_ROWS, TILE_VECTORS

CHUNK_TOKENS = 64
HALF_TOKENS = 8  # tokens that are sure to lie side by side: block sizes are multiples of it
_ACCUMULATORS = 16 if TILE_VECTORS > 1 else 4
HEIGHTS = tuple(height for height in (1, 2, 4, 8) if height <= TILE_ROWS)


def _constant(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def _for_each_height(builder, rows, emit):
    """Runs ``emit(height)`` for the height that ``rows`` names."""
    done = builder.append_basic_block("rows.done")
    switch = builder.switch(rows, done)
    for height in HEIGHTS:
        block = builder.append_basic_block(f"rows.{height}")
        switch.add_case(_constant(height), block)
        builder.position_at_end(block)
        emit(height)
        builder.branch(done)
    builder.position_at_end(done)


def _registers(builder, count):
    return [cgutils.alloca_once(builder, simd.vector(F32)) for _ in range(count)]


def _entry(builder, table, index):
    """Element ``index`` of the int64 table at an address."""
    return simd.load(builder, builder.add(table, builder.mul(index, _constant(8))), I64, 8)


@intrinsic
def score_tile(typingctx, stored, q, keys, key_stride, head_dim, scores, rows):
    """``scores[r, t] = sum_d q[d, r] * key[d, t]`` for ``rows`` (one of HEIGHTS) rows and the tokens of a chunk.

    ``q`` is ``[head_dim, rows]``; ``keys`` a table of addresses, one for each HALF_TOKENS tokens, of their first
    dimension, the next being ``key_stride`` bytes further; ``scores`` is ``[rows, CHUNK_TOKENS]``.
    """
    kind = stored.instance_type
    index = types.intp
    signature = types.void(stored, index, index, index, index, index, index)

    def codegen(context, builder, signature, args):
        _, q, keys, key_stride, head_dim, scores, rows = args
        join = ir.Constant(simd.vector(simd.I32), list(range(LANES)))

        def emit(height):
            units = max(1, min(CHUNK_TOKENS // LANES, _ACCUMULATORS // height))
            sums = [_registers(builder, units) for _ in range(height)]
            with cgutils.for_range(builder, _constant(CHUNK_TOKENS // LANES // units), intp=I64) as loop:
                first = builder.mul(loop.index, _constant(units))
                halves = [
                    _entry(builder, keys, builder.add(builder.mul(first, _constant(2)), _constant(h)))
                    for h in range(2 * units)
                ]
                for row in sums:
                    for register in row:
                        builder.store(simd.splat_constant(F32, 0.0), register)
                with cgutils.for_range(builder, head_dim, intp=I64) as inner:
                    at = builder.mul(inner.index, key_stride)
                    loaded = [simd.load_wide(builder, builder.add(h, at), kind, HALF_TOKENS) for h in halves]
                    vectors = [builder.shuffle_vector(loaded[2 * u], loaded[2 * u + 1], join) for u in range(units)]
                    q_row = builder.add(q, builder.mul(inner.index, _constant(4 * height)))
                    for r, row in enumerate(sums):
                        value = simd.splat(builder, simd.load(builder, simd.offset(builder, q_row, 4 * r), F32, 4))
                        for vector, register in zip(vectors, row):
                            builder.store(simd.fma(builder, value, vector, builder.load(register)), register)
                out = builder.add(scores, builder.mul(first, _constant(LANES * 4)))
                for r, row in enumerate(sums):
                    for u, register in enumerate(row):
                        place = simd.offset(builder, out, (r * CHUNK_TOKENS + u * LANES) * 4)
                        simd.store(builder, builder.load(register), place)

        _for_each_height(builder, rows, emit)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def softmax_row(typingctx, scores, first, last, state):
    """One row's step of the online softmax (https://arxiv.org/abs/1805.02867) over a chunk, in place.

    Tokens outside [first, last) are masked. ``state`` is the address of two floats, the row's largest score so far and
    its sum of exponentials; both are brought up to date. ``scores`` become e^(score - largest), 0 where masked. Returns
    the factor that what was summed before has to be multiplied with. A row without any token keeps its sum 0.
    """
    signature = types.float32(types.intp, types.intp, types.intp, types.intp)

    def codegen(context, builder, signature, args):
        scores, first, last, state = args
        minus_infinity = simd.splat_constant(F32, float("-inf"))
        places = [simd.offset(builder, scores, v * LANES * 4) for v in range(CHUNK_TOKENS // LANES)]
        masked = []
        for v, place in enumerate(places):
            inside = builder.and_(
                simd.lanes_below(builder, v * LANES, last),
                builder.not_(simd.lanes_below(builder, v * LANES, first)),
            )
            masked.append(builder.select(inside, simd.load(builder, place, simd.vector(F32), 4), minus_infinity))
        peak = masked[0]
        for vector in masked[1:]:
            peak = simd.larger(builder, vector, peak)
        before = simd.load(builder, state, F32, 4)
        largest = simd.larger(builder, simd.reduce_max(builder, peak), before)
        simd.store(builder, largest, state)
        none = builder.fcmp_ordered("==", largest, ir.Constant(F32, float("-inf")))
        origin = builder.select(none, ir.Constant(F32, 0.0), largest)
        origins = simd.splat(builder, origin)
        total = None
        for vector, place in zip(masked, places):
            weight = simd.exp(builder, builder.fsub(vector, origins))
            simd.store(builder, weight, place)
            total = weight if total is None else builder.fadd(total, weight)
        factor = simd.exp(builder, builder.fsub(before, origin))
        sum_place = simd.offset(builder, state, 4)
        total = simd.fma(builder, simd.load(builder, sum_place, F32, 4), factor, simd.reduce_sum(builder, total))
        simd.store(builder, total, sum_place)
        return factor

    return signature, codegen


@intrinsic
def value_tile(typingctx, stored, weights, values, value_stride, first, last, factors, out, out_vectors, rows):
    """``out[r, c] = out[r, c] * factors[r] + sum_t weights[r, t] * value[t, c]`` over tokens [first, last) of a chunk.

    ``weights`` is ``[rows, CHUNK_TOKENS]``; ``values`` a table of addresses, one for each HALF_TOKENS tokens, of their
    first row, the next being ``value_stride`` bytes further; ``out`` is ``[rows, out_vectors]`` vectors of float32.
    """
    kind = stored.instance_type
    index = types.intp
    signature = types.void(stored, index, index, index, index, index, index, index, index, index)

    def codegen(context, builder, signature, args):
        _, weights, values, value_stride, first, last, factors, out, out_vectors, rows = args
        vector_bytes = LANES * kind.bitwidth // 8

        def columns(height, width, start):
            """``width`` vectors of the output from vector ``start`` on."""
            sums = [_registers(builder, width) for _ in range(height)]
            row_bytes = builder.mul(out_vectors, _constant(LANES * 4))
            out_rows = [
                builder.add(builder.add(out, builder.mul(row_bytes, _constant(r))), builder.mul(start, _constant(LANES * 4)))
                for r in range(height)
            ]
            for r, row in enumerate(sums):
                factor = simd.splat(builder, simd.load(builder, simd.offset(builder, factors, 4 * r), F32, 4))
                for c, register in enumerate(row):
                    old = simd.load(builder, simd.offset(builder, out_rows[r], c * LANES * 4), simd.vector(F32), 4)
                    builder.store(builder.fmul(old, factor), register)
            start_bytes = builder.mul(start, _constant(vector_bytes))
            with cgutils.for_range_slice(builder, first, last, _constant(1), intp=I64) as (token, _):
                half = _entry(builder, values, builder.lshr(token, _constant(3)))
                row = builder.mul(builder.and_(token, _constant(HALF_TOKENS - 1)), value_stride)
                at = builder.add(builder.add(half, row), start_bytes)
                vectors = [
                    simd.load_wide(builder, simd.offset(builder, at, c * vector_bytes), kind) for c in range(width)
                ]
                weight_at = builder.add(weights, builder.mul(token, _constant(4)))
                for r, registers in enumerate(sums):
                    place = simd.offset(builder, weight_at, r * CHUNK_TOKENS * 4)
                    weight = simd.splat(builder, simd.load(builder, place, F32, 4))
                    for vector, register in zip(vectors, registers):
                        builder.store(simd.fma(builder, weight, vector, builder.load(register)), register)
            for r, registers in enumerate(sums):
                for c, register in enumerate(registers):
                    place = simd.offset(builder, out_rows[r], c * LANES * 4)
                    simd.store(builder, builder.load(register), place)

        def emit(height):
            width = max(1, min(4, _ACCUMULATORS // height))
            whole = builder.sdiv(out_vectors, _constant(width))
            with cgutils.for_range(builder, whole, intp=I64) as loop:
                columns(height, width, builder.mul(loop.index, _constant(width)))
            if width > 1:
                done = builder.mul(whole, _constant(width))
                with cgutils.for_range_slice(builder, done, out_vectors, _constant(1), intp=I64) as (start, _):
                    columns(height, 1, start)

        _for_each_height(builder, rows, emit)
        return context.get_dummy_value()

    return signature, codegen
