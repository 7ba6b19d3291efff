"""The three register tiles of attention over paged keys and values, as LLVM IR.

A chunk is CHUNK_TOKENS consecutive tokens. Its keys lie transposed in their pages, eight tokens side by side at least,
so that a vector of scores is a chain of fused multiply-adds over head_dim; its values lie in rows of whole vectors, so
that a vector of the output is a chain over tokens. Neither needs a horizontal sum. Chains do not depend on how many
rows a tile has: an attention row is the same alone and in a batch.
"""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils, types

from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.emitted import KIND, LITERAL, emitted
from numba_kernels.cpu.intrinsics.simd import F32, I64
from numba_kernels.cpu.layout import TILE_ROWS, TILE_VECTORS
from numba_kernels.cpu.quantised_rows import load_page
from numba_kernels.cpu.target import LANES

CHUNK_TOKENS = 64
HALF_TOKENS = 8  # tokens that are sure to lie side by side: block sizes are multiples of it
_HALVES = CHUNK_TOKENS // HALF_TOKENS
_FETCHING_ROWS = 4  # the highest tile that waits for memory more than it computes
_FULL_WIDTH = 4  # vectors of the output that are summed together
_LINE_BYTES = 64
_ACCUMULATORS = 16 if TILE_VECTORS > 1 else 4
STATE_ROWS = TILE_ROWS  # rows whose maxima and sums are updated as one vector
HEIGHTS = tuple(height for height in (1, 2, 4, 8) if height <= TILE_ROWS)


def _if_fetching(builder, table, height, emit):
    """Runs ``emit(fetches)``: True for a low tile with a table (an address, not 0) of addresses to prefetch."""
    if height > _FETCHING_ROWS:
        emit(False)
        return
    with builder.if_else(builder.icmp_signed("!=", table, _constant(0))) as (fetching, quiet):
        with fetching:
            emit(True)
        with quiet:
            emit(False)


def _fetch(builder, start, turn, kind):
    """Prefetches as many cache lines as an element has bytes, those with number ``turn`` from an address on. After
    head_dim turns over its pages or halves a whole chunk is prefetched."""
    size = kind.bitwidth // 8
    at = builder.add(start, builder.mul(turn, _constant(size * _LINE_BYTES)))
    for line in range(size):
        simd.prefetch(builder, simd.offset(builder, at, line * _LINE_BYTES))


def _constant(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def _for_each_height(builder, rows, emit):
    """Runs ``emit(height)`` for the height ``rows``."""
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


@emitted(types.void, KIND, LITERAL, *[types.intp] * 8)
def score_tile(builder, stored, span, q, keys, key_stride, head_dim, scores, tokens, values, rows):
    """``scores[r, t] = sum_d q[d, r] * key[d, t]`` for ``rows`` (one of HEIGHTS) rows and at least the first ``tokens``
    of a chunk (scores past them are undefined).

    ``q`` is ``[head_dim, rows]``; ``keys`` a table of addresses, one for each HALF_TOKENS tokens, of their first
    dimension, the next being ``key_stride`` bytes further; ``scores`` is ``[rows, CHUNK_TOKENS]``. ``span`` tokens,
    a literal, HALF_TOKENS or LANES, are sure to lie side by side. A low tile, which waits for memory, meanwhile
    prefetches the chunk's values at the addresses in the table ``values``, unless that is 0.
    """
    is_whole = span == LANES
    join = ir.Constant(simd.vector(simd.I32), list(range(LANES)))

    def emit(height):
        units = max(1, min(CHUNK_TOKENS // LANES, _ACCUMULATORS // height))
        sums = [_registers(builder, units) for _ in range(height)]
        span = units * LANES
        turns = builder.sdiv(builder.add(tokens, _constant(span - 1)), _constant(span))
        with cgutils.for_range(builder, turns, intp=I64) as loop:
            first = builder.mul(loop.index, _constant(units))
            pieces = [
                _entry(builder, keys, builder.add(builder.mul(first, _constant(2)), _constant(h)))
                for h in range(0, 2 * units, 2 if is_whole else 1)
            ]
            for row in sums:
                for register in row:
                    builder.store(simd.splat_constant(F32, 0.0), register)

            def add_up(fetches):
                with cgutils.for_range(builder, head_dim, intp=I64) as inner:
                    at = builder.mul(inner.index, key_stride)
                    if fetches:
                        half = _entry(builder, values, builder.and_(inner.index, _constant(_HALVES - 1)))
                        _fetch(builder, half, builder.udiv(inner.index, _constant(_HALVES)), stored)
                    lanes = LANES if is_whole else HALF_TOKENS
                    vectors = [load_page(builder, builder.add(piece, at), stored, lanes) for piece in pieces]
                    if not is_whole:
                        pairs = zip(vectors[::2], vectors[1::2])
                        vectors = [builder.shuffle_vector(low, high, join) for low, high in pairs]
                    q_row = builder.add(q, builder.mul(inner.index, _constant(4 * height)))
                    for r, row in enumerate(sums):
                        value = simd.splat(builder, simd.load(builder, simd.offset(builder, q_row, 4 * r), F32, 4))
                        for vector, register in zip(vectors, row):
                            builder.store(simd.fma(builder, value, vector, builder.load(register)), register)

            _if_fetching(builder, values, height, add_up)
            out = builder.add(scores, builder.mul(first, _constant(LANES * 4)))
            for r, row in enumerate(sums):
                for u, register in enumerate(row):
                    place = simd.offset(builder, out, (r * CHUNK_TOKENS + u * LANES) * 4)
                    simd.store(builder, builder.load(register), place)

    _for_each_height(builder, rows, emit)


@emitted(types.void, *[types.intp] * 9)
def softmax_tile(builder, scores, tokens, ends, firsts, chunk, maxima, sums, factors, rows):
    """A step of the online softmax (https://arxiv.org/abs/1805.02867) for ``rows`` rows and the first ``tokens`` of one
    chunk, in place; scores past them are not read, nor their weights written, but in whole vectors, or halves of the
    chunk.

    Row r sees the tokens from ``firsts[r]`` to ``ends[r]`` (int64, the last not included); ``chunk`` is the position of
    the chunk's first token. ``maxima`` and ``sums`` (float32, STATE_ROWS at least) hold
    each row's largest score so far and its sum of powers, and are brought up to date. ``scores`` become
    2^(score - largest), 0 where masked; ``factors`` get what the earlier sums have to be multiplied with.

    Three passes, so that rows overlap in the processor: largest scores; factors of all rows at once; exponentials.
    """
    half = max(1, CHUNK_TOKENS // LANES // 2)
    few = builder.icmp_signed("<=", tokens, _constant(half * LANES))
    with builder.if_else(few) as (is_half, is_whole):
        with is_half:
            _softmax(builder, range(half), scores, ends, firsts, chunk, maxima, sums, factors, rows)
        with is_whole:
            every = range(CHUNK_TOKENS // LANES)
            _softmax(builder, every, scores, ends, firsts, chunk, maxima, sums, factors, rows)


def _softmax(builder, units, scores, ends, firsts, chunk, maxima, sums, factors, rows):
    """`softmax_tile` over some first vectors of the chunk."""
    low = float("-inf")
    lowest = simd.splat_constant(F32, low)

    def places(row):
        base = builder.add(scores, builder.mul(row, _constant(CHUNK_TOKENS * 4)))
        return [simd.offset(builder, base, v * LANES * 4) for v in units]

    def float_at(base, row):
        return builder.add(base, builder.mul(row, _constant(4)))

    peak = cgutils.alloca_once(builder, simd.vector(F32))
    with cgutils.for_range(builder, rows, intp=I64) as loop:
        at = places(loop.index)
        last = builder.sub(_entry(builder, ends, loop.index), chunk)
        first = builder.sub(_entry(builder, firsts, loop.index), chunk)
        sees_all = builder.and_(
            builder.icmp_signed(">=", last, _constant(len(units) * LANES)),
            builder.icmp_signed("<=", first, _constant(0)),
        )
        with builder.if_else(sees_all) as (whole, masked):
            with whole:
                found = simd.load(builder, at[0], simd.vector(F32), 4)
                for place in at[1:]:
                    found = simd.larger(builder, simd.load(builder, place, simd.vector(F32), 4), found)
                builder.store(found, peak)
            with masked:
                found = lowest
                for v, place in enumerate(at):
                    inside = builder.and_(
                        simd.lanes_below(builder, v * LANES, last),
                        builder.not_(simd.lanes_below(builder, v * LANES, first)),
                    )
                    score = builder.select(inside, simd.load(builder, place, simd.vector(F32), 4), lowest)
                    simd.store(builder, score, place)
                    found = simd.larger(builder, score, found)
                builder.store(found, peak)
        simd.store(builder, simd.reduce_max(builder, builder.load(peak)), float_at(factors, loop.index))

    state = simd.vector(F32, STATE_ROWS)
    before = simd.load(builder, maxima, state, 4)
    largest = simd.larger(builder, simd.load(builder, factors, state, 4), before)
    factor = simd.exp2(builder, builder.fsub(before, _origin(builder, largest)))
    simd.store(builder, largest, maxima)
    simd.store(builder, factor, factors)
    simd.store(builder, builder.fmul(simd.load(builder, sums, state, 4), factor), sums)

    with cgutils.for_range(builder, rows, intp=I64) as loop:
        origin = _origin(builder, simd.load(builder, float_at(maxima, loop.index), F32, 4))
        origins = simd.splat(builder, origin)
        total = None
        for place in places(loop.index):
            score = builder.fsub(simd.load(builder, place, simd.vector(F32), 4), origins)
            weight = simd.exp2(builder, score)
            simd.store(builder, weight, place)
            total = weight if total is None else builder.fadd(total, weight)
        sum_at = float_at(sums, loop.index)
        total = builder.fadd(simd.load(builder, sum_at, F32, 4), simd.reduce_sum(builder, total))
        simd.store(builder, total, sum_at)


def _origin(builder, largest):
    """``largest``, or 0 where it is -inf: a row that has seen no key yet."""
    nothing = builder.fcmp_ordered("==", largest, simd.constant_like(largest, float("-inf")))
    return builder.select(nothing, simd.constant_like(largest, 0.0), largest)


@emitted(types.void, KIND, *[types.intp] * 10)
def value_tile(builder, stored, weights, values, value_stride, first, last, factors, out, out_vectors, next_keys, rows):
    """``out[r, c] = out[r, c] * factors[r] + sum_t weights[r, t] * value[t, c]`` over tokens [first, last) of a chunk.

    ``weights`` is ``[rows, CHUNK_TOKENS]``; ``values`` a table of addresses, one for each HALF_TOKENS tokens, of their
    first row, the next being ``value_stride`` bytes further; ``out`` is ``[rows, out_vectors]`` vectors of float32. A
    low tile meanwhile prefetches the keys of the next chunk, a page of LANES tokens for each second entry of the table
    ``next_keys``, unless that is 0.
    """
    vector_bytes = LANES * stored.bitwidth // 8

    def columns(height, width, start):
        """``width`` vectors of the output from vector ``start`` on."""
        sums = [_registers(builder, width) for _ in range(height)]
        row_bytes = builder.mul(out_vectors, _constant(LANES * 4))
        out_at = builder.add(out, builder.mul(start, _constant(LANES * 4)))
        out_rows = [builder.add(out_at, builder.mul(row_bytes, _constant(r))) for r in range(height)]
        for r, row in enumerate(sums):
            factor = simd.splat(builder, simd.load(builder, simd.offset(builder, factors, 4 * r), F32, 4))
            for c, register in enumerate(row):
                old = simd.load(builder, simd.offset(builder, out_rows[r], c * LANES * 4), simd.vector(F32), 4)
                builder.store(builder.fmul(old, factor), register)
        start_bytes = builder.mul(start, _constant(vector_bytes))

        def add_up(fetches):
            with cgutils.for_range_slice(builder, first, last, _constant(1), intp=I64) as (token, _):
                half = _entry(builder, values, builder.lshr(token, _constant(3)))
                row = builder.mul(builder.and_(token, _constant(HALF_TOKENS - 1)), value_stride)
                at = builder.add(builder.add(half, row), start_bytes)
                if fetches:
                    turn = builder.add(token, builder.mul(start, _constant(CHUNK_TOKENS // _FULL_WIDTH)))
                    page = builder.mul(builder.and_(turn, _constant(_HALVES // 2 - 1)), _constant(2))
                    line = builder.udiv(turn, _constant(_HALVES // 2))
                    _fetch(builder, _entry(builder, next_keys, page), line, stored)
                vectors = [
                    load_page(builder, simd.offset(builder, at, c * vector_bytes), stored, LANES) for c in range(width)
                ]
                weight_at = builder.add(weights, builder.mul(token, _constant(4)))
                for r, registers in enumerate(sums):
                    place = simd.offset(builder, weight_at, r * CHUNK_TOKENS * 4)
                    weight = simd.splat(builder, simd.load(builder, place, F32, 4))
                    for vector, register in zip(vectors, registers):
                        builder.store(simd.fma(builder, weight, vector, builder.load(register)), register)

        _if_fetching(builder, next_keys, height, add_up)
        for r, registers in enumerate(sums):
            for c, register in enumerate(registers):
                place = simd.offset(builder, out_rows[r], c * LANES * 4)
                simd.store(builder, builder.load(register), place)

    def emit(height):
        width = max(1, min(_FULL_WIDTH, _ACCUMULATORS // height))
        whole = builder.sdiv(out_vectors, _constant(width))
        with cgutils.for_range(builder, whole, intp=I64) as loop:
            columns(height, width, builder.mul(loop.index, _constant(width)))
        if width > 1:
            done = builder.mul(whole, _constant(width))
            with cgutils.for_range_slice(builder, done, out_vectors, _constant(1), intp=I64) as (start, _):
                columns(height, 1, start)

    _for_each_height(builder, rows, emit)
