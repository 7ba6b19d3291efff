"""The three register tiles of attention over paged keys and values, as LLVM IR.

A chunk is CHUNK_TOKENS consecutive tokens. Its keys lie transposed in their pages, eight tokens side by side at least,
so that a vector of scores is a chain of fused multiply-adds over head_dim; its values lie in rows of whole vectors, so
that a vector of the output is a chain over tokens. Neither needs a horizontal sum. Chains do not depend on how many
rows a tile has: an attention row is the same alone and in a batch.
"""

from __future__ import annotations

import functools

import llvmlite.ir as ir
from numba.core import cgutils, types

from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.emitted import KIND, LITERAL, emitted
from numba_kernels.cpu.intrinsics.simd import F32, I64
from numba_kernels.cpu.layout import AMX_ROWS, TILE_ROWS, TILE_VECTORS
from numba_kernels.cpu.quantised_rows import load_page
from numba_kernels.cpu.target import LANES

CHUNK_TOKENS = 64
HALF_TOKENS = 8  # tokens that are sure to lie side by side: block sizes are multiples of it
HALVES = CHUNK_TOKENS // HALF_TOKENS
FETCHING_ROWS = 4  # the highest tile that waits for memory more than it computes
FULL_WIDTH = 4  # vectors of the output that are summed together
_LINE_BYTES = 64
ACCUMULATORS = 16 if TILE_VECTORS > 1 else 4
STATE_ROWS = TILE_ROWS  # rows whose maxima and sums are updated as one vector
IN_ORDER, BY_STEPS = range(2)
"""The order of a chain's elements: one after the other; as tdpbf16ps, for 32 elements two chains from zero, of every
other one, whose sum is added (`intrinsics.amx`)."""
PAIR_ORDER = BY_STEPS if AMX_ROWS else IN_ORDER
_STEP_PAIRS = 16
HEIGHTS = tuple(height for height in (1, 2, 4, 8) if height <= TILE_ROWS)


def _if_fetching(builder, table, height, emit):
    """Runs ``emit(fetches)``: True for a low tile with a table (an address, not 0) of addresses to prefetch."""
    if height > FETCHING_ROWS:
        emit(False)
        return
    with builder.if_else(builder.icmp_signed("!=", table, constant(0))) as (fetching, quiet):
        with fetching:
            emit(True)
        with quiet:
            emit(False)


def _fetch(builder, start, turn, kind):
    """Prefetches as many cache lines as an element has bytes, those with number ``turn`` from an address on. After
    head_dim turns over its pages or halves a whole chunk is prefetched."""
    size = kind.bitwidth // 8
    at = builder.add(start, builder.mul(turn, constant(size * _LINE_BYTES)))
    for line in range(size):
        simd.prefetch(builder, simd.offset(builder, at, line * _LINE_BYTES))


def constant(value: int) -> ir.Constant:
    """An i64."""
    return ir.Constant(I64, value)


def for_each_height(builder, rows, emit):
    """Runs ``emit(height)`` for the height ``rows``."""
    simd.for_each_of(builder, rows, HEIGHTS, emit)


def registers(builder, count):
    """So many variables for vectors of floats."""
    return [cgutils.alloca_once(builder, simd.vector(F32)) for _ in range(count)]


def entry(builder, table, index):
    """Element ``index`` of the int64 table at an address."""
    return simd.load(builder, builder.add(table, builder.mul(index, constant(8))), I64, 8)


def _add_chains(builder, order, first, last, sums, multiply):
    """``multiply(index, sums)`` for the indices [first, last), in order; with steps ``first`` may be the one before, if
    that is even. ``sums``: variables by row and vector."""
    one = constant(1)
    if order == IN_ORDER:
        with cgutils.for_range_slice(builder, first, last, one, intp=I64) as (index, _):
            multiply(index, sums)
        return
    begin, end = builder.lshr(first, one), builder.lshr(last, one)
    is_odd = builder.trunc(last, ir.IntType(1))
    chains = [[registers(builder, len(row)) for row in sums] for _ in range(2)]
    last_step = builder.udiv(builder.sub(last, one), constant(2 * _STEP_PAIRS))
    first_step, end_step = builder.udiv(begin, constant(_STEP_PAIRS)), builder.add(last_step, one)
    with cgutils.for_range_slice(builder, first_step, end_step, one, intp=I64) as (step, _):
        for register in (each for chain in chains for row in chain for each in row):
            builder.store(simd.splat_constant(F32, 0.0), register)
        start = builder.mul(step, constant(_STEP_PAIRS))
        stop = builder.add(start, constant(_STEP_PAIRS))
        start = builder.select(builder.icmp_signed("<", start, begin), begin, start)
        stop = builder.select(builder.icmp_signed("<", end, stop), end, stop)
        with cgutils.for_range_slice(builder, start, stop, one, intp=I64) as (pair, _):
            for number, chain in enumerate(chains):
                multiply(builder.or_(builder.shl(pair, one), constant(number)), chain)
        with builder.if_then(builder.and_(is_odd, builder.icmp_signed("==", step, last_step)), likely=False):
            multiply(builder.sub(last, one), chains[0])
        for row, *parts in zip(sums, *chains):
            for register, *added in zip(row, *parts):
                added = builder.fadd(*map(builder.load, added))
                builder.store(builder.fadd(builder.load(register), added), register)


def _accumulators(order):
    """Vectors of sums of a tile: with `BY_STEPS` two chains have registers, too."""
    return ACCUMULATORS // 2 if order == BY_STEPS else ACCUMULATORS


@emitted(types.void, KIND, LITERAL, LITERAL, *[types.intp] * 8)
def score_tile(builder, stored, span, order, q, keys, key_stride, head_dim, scores, tokens, values, rows):
    """``scores[r, t] = sum_d q[d, r] * key[d, t]`` for ``rows`` (one of HEIGHTS) rows and at least the first ``tokens``
    of a chunk (scores past them are undefined).

    ``q`` is ``[head_dim, rows]``; ``keys`` a table of addresses, one for each HALF_TOKENS tokens, of their first
    dimension, the next being ``key_stride`` bytes further; ``scores`` is ``[rows, CHUNK_TOKENS]``. ``span`` tokens,
    a literal, HALF_TOKENS or LANES, are sure to lie side by side. A low tile, which waits for memory, meanwhile
    prefetches the chunk's values at the addresses in the table ``values``, unless that is 0. ``order`` (a literal) of
    dimensions.
    """
    is_whole = span == LANES
    join = ir.Constant(simd.vector(simd.I32), list(range(LANES)))

    def emit(height):
        units = max(1, min(CHUNK_TOKENS // LANES, _accumulators(order) // height))
        sums = [registers(builder, units) for _ in range(height)]
        span = units * LANES
        turns = builder.sdiv(builder.add(tokens, constant(span - 1)), constant(span))
        with cgutils.for_range(builder, turns, intp=I64) as loop:
            first = builder.mul(loop.index, constant(units))
            pieces = [
                entry(builder, keys, builder.add(builder.mul(first, constant(2)), constant(h)))
                for h in range(0, 2 * units, 2 if is_whole else 1)
            ]
            for row in sums:
                for register in row:
                    builder.store(simd.splat_constant(F32, 0.0), register)

            def add_up(fetches):
                def multiply(index, sums):
                    at = builder.mul(index, key_stride)
                    if fetches:
                        half = entry(builder, values, builder.and_(index, constant(HALVES - 1)))
                        _fetch(builder, half, builder.udiv(index, constant(HALVES)), stored)
                    lanes = LANES if is_whole else HALF_TOKENS
                    vectors = [load_page(builder, builder.add(piece, at), stored, lanes) for piece in pieces]
                    if not is_whole:
                        pairs = zip(vectors[::2], vectors[1::2])
                        vectors = [builder.shuffle_vector(low, high, join) for low, high in pairs]
                    q_row = builder.add(q, builder.mul(index, constant(4 * height)))
                    for r, row in enumerate(sums):
                        value = simd.splat(builder, simd.load(builder, simd.offset(builder, q_row, 4 * r), F32, 4))
                        for vector, register in zip(vectors, row):
                            builder.store(simd.fma(builder, value, vector, builder.load(register)), register)

                _add_chains(builder, order, constant(0), head_dim, sums, multiply)

            _if_fetching(builder, values, height, add_up)
            out = builder.add(scores, builder.mul(first, constant(LANES * 4)))
            for r, row in enumerate(sums):
                for u, register in enumerate(row):
                    place = simd.offset(builder, out, (r * CHUNK_TOKENS + u * LANES) * 4)
                    simd.store(builder, builder.load(register), place)

    for_each_height(builder, rows, emit)


def softmax(builder, scores, tokens, ends, firsts, chunk, maxima, sums, factors, rows, height, keep=None):
    """A step of the online softmax (https://arxiv.org/abs/1805.02867) for ``rows`` rows and the first ``tokens`` of one
    chunk, in place; scores past them are not read, nor their weights written, but in whole vectors, or halves of the
    chunk.

    Row r sees the tokens from ``firsts[r]`` to ``ends[r]`` (int64, the last not included; neither falls from row to
    row); ``chunk`` is the position of the chunk's first token. ``maxima`` and ``sums`` (float32, STATE_ROWS at least)
    hold each row's largest score so far and its sum of powers, and are brought up to date. ``scores`` become
    2^(score - largest), 0 where masked; ``factors`` get what the earlier sums have to be multiplied with. Rows from
    ``rows`` on to ``height`` (one of HEIGHTS), whose memory is there, get anything. ``keep`` as in
    `softmax_rows`.
    """
    half = max(1, CHUNK_TOKENS // LANES // 2)
    few = builder.icmp_signed("<=", tokens, constant(half * LANES))
    last_row = builder.sub(rows, constant(1))
    seen = builder.sub(entry(builder, ends, constant(0)), chunk)
    unseen = builder.sub(entry(builder, firsts, last_row), chunk)
    with builder.if_else(few) as (is_half, is_whole):
        for part, units in ((is_half, half), (is_whole, CHUNK_TOKENS // LANES)):
            with part:
                sees_all = builder.and_(
                    builder.icmp_signed(">=", seen, constant(units * LANES)),
                    builder.icmp_signed("<=", unseen, constant(0)),
                )
                with builder.if_then(builder.not_(sees_all)):
                    _mask(builder, range(units), scores, ends, firsts, chunk, rows)

                def emit(height, units=units):
                    softmax_rows(builder, range(units), scores, maxima, sums, factors, height, None, keep)

                for_each_height(builder, height, emit)


def _mask(builder, units, scores, ends, firsts, chunk, rows):
    """Scores of tokens that a row does not see become minus infinity."""
    lowest = simd.splat_constant(F32, float("-inf"))
    with cgutils.for_range(builder, rows, intp=I64) as loop:
        last = builder.sub(entry(builder, ends, loop.index), chunk)
        first = builder.sub(entry(builder, firsts, loop.index), chunk)
        base = builder.add(scores, builder.mul(loop.index, constant(CHUNK_TOKENS * 4)))
        for v in units:
            inside = builder.and_(
                simd.lanes_below(builder, v * LANES, last),
                builder.not_(simd.lanes_below(builder, v * LANES, first)),
            )
            place = simd.offset(builder, base, v * LANES * 4)
            score = builder.select(inside, simd.load(builder, place, simd.vector(F32), 4), lowest)
            simd.store(builder, score, place)


def softmax_rows(builder, units, scores, maxima, sums, factors, height, masks=None, keep=None):
    """`softmax` over some first vectors of the chunk: largest scores, factors of all rows at once, powers. A row's
    order of sums is its own.

    masks  of each vector, the tokens that all rows see; None if scores are masked
    keep   stores a row's weights, given its places and vectors; None for each vector at its place
    """
    places = [[simd.offset(builder, scores, (r * CHUNK_TOKENS + v * LANES) * 4) for v in units] for r in range(height)]
    lowest = simd.splat_constant(F32, float("-inf"))

    def load(place, lanes=LANES):
        return simd.load(builder, place, simd.vector(F32, lanes), 4)

    def seen(row):
        vectors = [load(place) for place in row]
        return vectors if masks is None else [builder.select(*each, lowest) for each in zip(masks, vectors)]

    def larger(a, b):
        return simd.larger(builder, a, b)

    peaks = [functools.reduce(lambda found, score: larger(score, found), seen(row)) for row in places]
    before = load(maxima, STATE_ROWS)
    largest = larger(simd.first_lanes(builder, simd.fold_rows(builder, peaks, larger), STATE_ROWS), before)
    origin = _origin(builder, largest)
    factor = simd.exp2(builder, builder.fsub(before, origin))
    simd.store(builder, largest, maxima)
    simd.store(builder, factor, factors)

    totals = []
    for r, row in enumerate(places):
        origins = builder.shuffle_vector(origin, origin, ir.Constant(simd.vector(simd.I32), [r] * LANES))
        weights = [simd.exp2(builder, builder.fsub(score, origins)) for score in seen(row)]
        if keep is None:
            for place, weight in zip(row, weights):
                simd.store(builder, weight, place)
        else:
            keep(row, weights)
        totals.append(functools.reduce(builder.fadd, weights))
    added = simd.first_lanes(builder, simd.fold_rows(builder, totals, builder.fadd), STATE_ROWS)
    simd.store(builder, builder.fadd(builder.fmul(load(sums, STATE_ROWS), factor), added), sums)


def _origin(builder, largest):
    """``largest``, or 0 where it is -inf: a row that has seen no key yet."""
    nothing = builder.fcmp_ordered("==", largest, simd.constant_like(largest, float("-inf")))
    return builder.select(nothing, simd.constant_like(largest, 0.0), largest)


def for_each_columns(builder, factors, out, out_vectors, rows, add_columns, accumulators=ACCUMULATORS):
    """Multiplies rows of ``out`` by their factors and adds to them, a few vectors at a time: ``add_columns(sums,
    start)`` adds to the variables ``sums[row][vector]``, at most ``accumulators``, from vector ``start`` of the rows
    on. `value_tile` tells of the other arguments."""
    row_bytes = builder.mul(out_vectors, constant(LANES * 4))

    def columns(height, width, start):
        sums = [registers(builder, width) for _ in range(height)]
        out_at = builder.add(out, builder.mul(start, constant(LANES * 4)))
        out_rows = [builder.add(out_at, builder.mul(row_bytes, constant(r))) for r in range(height)]
        for r, row in enumerate(sums):
            factor = simd.splat(builder, simd.load(builder, simd.offset(builder, factors, 4 * r), F32, 4))
            for c, register in enumerate(row):
                old = simd.load(builder, simd.offset(builder, out_rows[r], c * LANES * 4), simd.vector(F32), 4)
                builder.store(builder.fmul(old, factor), register)
        add_columns(sums, start)
        for r, row in enumerate(sums):
            for c, register in enumerate(row):
                place = simd.offset(builder, out_rows[r], c * LANES * 4)
                simd.store(builder, builder.load(register), place)

    def emit(height):
        width = max(1, min(FULL_WIDTH, accumulators // height))
        whole = builder.sdiv(out_vectors, constant(width))
        with cgutils.for_range(builder, whole, intp=I64) as loop:
            columns(height, width, builder.mul(loop.index, constant(width)))
        if width > 1:
            done = builder.mul(whole, constant(width))
            with cgutils.for_range_slice(builder, done, out_vectors, constant(1), intp=I64) as (start, _):
                columns(height, 1, start)

    for_each_height(builder, rows, emit)


@emitted(types.void, KIND, LITERAL, *[types.intp] * 10)
def value_tile(
    builder, stored, order, weights, values, value_stride, first, last, factors, out, out_vectors, next_keys, rows
):  # fmt: skip
    """``out[r, c] = out[r, c] * factors[r] + sum_t weights[r, t] * value[t, c]`` over tokens [first, last) of a chunk.

    ``weights`` is ``[rows, CHUNK_TOKENS]``; ``values`` a table of addresses, one for each HALF_TOKENS tokens, of their
    first row, the next being ``value_stride`` bytes further; ``out`` is ``[rows, out_vectors]`` vectors of float32. A
    low tile meanwhile prefetches the keys of the next chunk, a page of LANES tokens for each second entry of the table
    ``next_keys``, unless that is 0. ``order`` (a literal) of tokens; with steps the weight of ``first - 1``, if
    that is even, is 0.
    """
    vector_bytes = LANES * stored.bitwidth // 8

    def add_columns(sums, start):
        start_bytes = builder.mul(start, constant(vector_bytes))

        def add_up(fetches):
            def multiply(token, sums):
                half = entry(builder, values, builder.lshr(token, constant(3)))
                row = builder.mul(builder.and_(token, constant(HALF_TOKENS - 1)), value_stride)
                at = builder.add(builder.add(half, row), start_bytes)
                if fetches:
                    turn = builder.add(token, builder.mul(start, constant(CHUNK_TOKENS // FULL_WIDTH)))
                    page = builder.mul(builder.and_(turn, constant(HALVES // 2 - 1)), constant(2))
                    line = builder.udiv(turn, constant(HALVES // 2))
                    _fetch(builder, entry(builder, next_keys, page), line, stored)
                vectors = [
                    load_page(builder, simd.offset(builder, at, c * vector_bytes), stored, LANES)
                    for c in range(len(sums[0]))
                ]
                weight_at = builder.add(weights, builder.mul(token, constant(4)))
                for r, row in enumerate(sums):
                    place = simd.offset(builder, weight_at, r * CHUNK_TOKENS * 4)
                    weight = simd.splat(builder, simd.load(builder, place, F32, 4))
                    for vector, register in zip(vectors, row):
                        builder.store(simd.fma(builder, weight, vector, builder.load(register)), register)

            _add_chains(builder, order, first, last, sums, multiply)

        _if_fetching(builder, next_keys, len(sums), add_up)

    for_each_columns(builder, factors, out, out_vectors, rows, add_columns, _accumulators(order))
