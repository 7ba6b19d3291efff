"""The register tiles of attention over latent pages, as LLVM IR.

Rows (queries: the heads of one token, then those of the next) come in fours, for scores in eights:

- **queries** ``[eights, steps, 8 rows, 2 words]``: a step of the chain over a row's width is two words, one float32 or
  two bfloat16 each. The same words of a latent row, 8 bytes as they lie in the page, meet all eight rows at once. (On
  Zen 5 a load that repeats 8 bytes costs no vector unit's time, one that repeats 16 does.) If the last four has no
  partner, it lies in both halves of its eight, and these meet two tokens at once.
- **scores** ``[fours, CHUNK_TOKENS / 4, 4 rows, 4 tokens]``: the two partial sums of a row are added across four
  tokens' vectors, so that the softmax has maxima and sums without horizontal work.
- **weights**, as scores; rounded to bfloat16, two neighbouring tokens are a word, as vdpbf16ps takes them beside a word
  of the same column of both tokens.

Every number is one chain in an order that neither the height of a tile nor the number of rows changes.
"""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils, types

from numba_kernels.cpu.intrinsics import dots, simd
from numba_kernels.cpu.intrinsics.emitted import KIND, LITERAL, emitted
from numba_kernels.cpu.intrinsics.simd import F32, I16, I32, I64
from numba_kernels.cpu.layout import TILE_VECTORS
from numba_kernels.cpu.quantised_rows import load_page
from numba_kernels.cpu.target import LANES

FOUR, EIGHT = 4, 8
STEP_BYTES = 8  # of a latent row that a step multiplies
CHUNK_TOKENS = 128  # keys whose scores are computed before their values are summed
HALF_TOKENS = 8  # tokens that are sure to lie side by side: block sizes are multiples of it
BLOCK_FOURS = 16  # most fours of rows whose scores wait at once
VECTOR_BYTES = LANES * 4
SCORE_BYTES = CHUNK_TOKENS // FOUR * VECTOR_BYTES  # of a four's scores
_IS_WIDE = TILE_VECTORS > 1  # 32 registers of LANES
_SCORE_EIGHTS = 3 if _IS_WIDE else 1  # most eights of a tile of scores
_SCORE_TOKENS = HALF_TOKENS if _IS_WIDE else FOUR  # beside which it has so many tokens
_VALUE_FOURS = 3 if _IS_WIDE else 1  # most fours of a tile of values
_HALVES_OF_EIGHT = range(FOUR), range(FOUR, EIGHT)
_VALUE_VECTORS = 2  # of a tile of values: with pairs, the words of 32 columns
_HALVES_A_CHUNK = CHUNK_TOKENS // HALF_TOKENS
_LINE_BYTES = 64


def _constant(value):
    return ir.Constant(I64, value)


def _entry(builder, table, index):
    """Element ``index`` of the int64 table at an address."""
    return simd.load(builder, builder.add(table, builder.mul(index, _constant(8))), I64, 8)


def _order(*lanes):
    return ir.Constant(simd.vector(I32, len(lanes)), list(lanes))


def _for_each_height(builder, fours, most, emit):
    """``emit(first, height)`` for tiles of at most ``most`` of ``fours`` (i64) fours, whose heights differ by one at
    most."""
    tiles = builder.udiv(builder.add(fours, _constant(most - 1)), _constant(most))
    with cgutils.for_range(builder, tiles, intp=I64) as loop:
        first = builder.udiv(builder.mul(loop.index, fours), tiles)
        following = builder.udiv(builder.mul(builder.add(loop.index, _constant(1)), fours), tiles)
        done = builder.append_basic_block("fours.done")
        switch = builder.switch(builder.sub(following, first), done)
        for height in range(1, most + 1):
            block = builder.append_basic_block(f"fours.{height}")
            switch.add_case(_constant(height), block)
            builder.position_at_end(block)
            emit(first, height)
            builder.branch(done)
        builder.position_at_end(done)


@emitted(types.void, LITERAL, *[types.intp] * 4, types.float32)
def pack_row(builder, pairs, source, width, target, steps, scale):
    """A query of ``width`` floats times ``scale`` as ``steps`` times 8 bytes, VECTOR_BYTES apart: two floats, or with
    ``pairs`` four numbers rounded to bfloat16; zeros after the last."""
    vectors = 2 if pairs else 1  # of floats, whose numbers fill one
    pieces = VECTOR_BYTES // STEP_BYTES

    def write(numbers, at, there):
        numbers = [builder.fmul(each, simd.splat(builder, scale)) for each in numbers]
        packed = dots.round_to_pairs(builder, *numbers) if pairs else numbers[0]
        packed = builder.bitcast(packed, simd.vector(I64, pieces))
        for piece in range(pieces):
            with builder.if_then(builder.icmp_signed("<", _constant(piece), there)):
                word = builder.extract_element(packed, ir.Constant(I32, piece))
                simd.store(builder, word, simd.offset(builder, at, piece * VECTOR_BYTES))

    whole = builder.udiv(width, _constant(vectors * LANES))
    with cgutils.for_range(builder, whole, intp=I64) as loop:
        place = builder.add(source, builder.mul(loop.index, _constant(vectors * VECTOR_BYTES)))
        places = [simd.offset(builder, place, vector * VECTOR_BYTES) for vector in range(vectors)]
        at = builder.add(target, builder.mul(loop.index, _constant(pieces * VECTOR_BYTES)))
        write([simd.load(builder, place, simd.vector(F32), 4) for place in places], at, _constant(pieces))
    done = builder.mul(whole, _constant(pieces))
    with builder.if_then(builder.icmp_unsigned("<", done, steps)):
        first = builder.mul(whole, _constant(vectors * LANES))
        place, rest = builder.add(source, builder.mul(first, _constant(4))), builder.sub(width, first)
        numbers = [
            simd.masked_load(
                builder, simd.offset(builder, place, vector * VECTOR_BYTES),
                simd.lanes_below(builder, vector * LANES, rest),
            )
            for vector in range(vectors)
        ]  # fmt: skip
        write(numbers, builder.add(target, builder.mul(done, _constant(VECTOR_BYTES))), builder.sub(steps, done))


@emitted(types.void, KIND, *[types.intp] * 3)
def widen_row(builder, stored, source, width, target):
    """``width`` stored numbers, a multiple of LANES, as floats."""
    itemsize = stored.bitwidth // 8
    with cgutils.for_range(builder, builder.udiv(width, _constant(LANES)), intp=I64) as loop:
        at = builder.add(source, builder.mul(loop.index, _constant(LANES * itemsize)))
        numbers = simd.load_wide(builder, at, stored)
        simd.store(builder, numbers, builder.add(target, builder.mul(loop.index, _constant(VECTOR_BYTES))))


@emitted(types.void, KIND, *[types.intp] * 3, types.float32)
def widen_group(builder, stored, source, count, target, scale):
    """``count`` numbers of a byte, of a group rounded up to whole vectors, times ``scale``, as floats."""
    scales = simd.splat(builder, scale)
    vectors = builder.udiv(builder.add(count, _constant(LANES - 1)), _constant(LANES))
    with cgutils.for_range(builder, vectors, intp=I64) as loop:
        numbers = load_page(builder, builder.add(source, builder.mul(loop.index, _constant(LANES))), stored, LANES)
        at = builder.add(target, builder.mul(loop.index, _constant(VECTOR_BYTES)))
        simd.store(builder, builder.fmul(numbers, scales), at, 4)


@emitted(types.void, LITERAL, LITERAL, *[types.intp] * 8)
def latent_scores(builder, pairs, near, queries, steps, rows, row_bytes, tokens, scores, ahead, fours):
    """``scores`` of at least ``tokens`` tokens of a chunk (undefined after them) and ``fours`` fours of queries.

    ``rows``: a table of addresses, one for each HALF_TOKENS tokens, of their first row, the next being ``row_bytes``
    further. ``ahead``: such a table of rows to prefetch meanwhile, or 0; with ``near`` into the first-level cache.
    """
    kind = simd.vector(I32 if pairs else F32)
    add = dots.add_bf16_pairs if pairs else lambda builder, total, a, b: simd.fma(builder, a, b, total)

    both = _order(*range(EIGHT), *range(LANES + EIGHT, 2 * LANES))

    def row_of(table, turn):
        first = builder.mul(turn, _constant(_SCORE_TOKENS))
        start = _entry(builder, table, builder.udiv(first, _constant(HALF_TOKENS)))
        return builder.add(start, builder.mul(builder.and_(first, _constant(HALF_TOKENS - 1)), row_bytes))

    def emit(first, height, is_half):
        """A tile of ``height`` eights from the eight ``first`` on; ``is_half``: the last one is a four."""
        whole, eight_bytes = height - is_half, builder.mul(steps, _constant(VECTOR_BYTES))
        starts = [
            builder.add(queries, builder.mul(builder.add(first, _constant(eight)), eight_bytes))
            for eight in range(height)
        ]
        out = builder.add(scores, builder.mul(first, _constant(2 * SCORE_BYTES)))
        turns = builder.udiv(builder.add(tokens, _constant(_SCORE_TOKENS - 1)), _constant(_SCORE_TOKENS))
        is_first = builder.icmp_signed("==", first, _constant(0))
        fetches = builder.and_(is_first, builder.icmp_signed("!=", ahead, _constant(0)))
        next_rows = builder.select(fetches, ahead, rows)
        with cgutils.for_range(builder, turns, intp=I64) as loop:
            place, next_place = row_of(rows, loop.index), row_of(next_rows, loop.index)
            places = [builder.add(place, builder.mul(row_bytes, _constant(token))) for token in range(_SCORE_TOKENS)]

            def zeros(count):
                found = [cgutils.alloca_once(builder, simd.vector(F32)) for _ in range(count)]
                for register in found:
                    builder.store(simd.splat_constant(F32, 0.0), register)
                return found

            def add_to(register, query, key):
                builder.store(add(builder, builder.load(register), query, key), register)

            sums = [zeros(_SCORE_TOKENS) for _ in range(whole)]
            sums_of_two = zeros(_SCORE_TOKENS // 2 if is_half else 0)
            with cgutils.for_range(builder, steps, intp=I64) as inner:
                fetched = builder.mul(inner.index, _constant(STEP_BYTES * _SCORE_TOKENS))
                simd.prefetch(builder, builder.add(next_place, fetched), is_near=bool(near))
                moved = builder.mul(inner.index, _constant(VECTOR_BYTES))
                columns = [simd.load(builder, builder.add(start, moved), kind, 4) for start in starts]
                moved = builder.mul(inner.index, _constant(STEP_BYTES))
                for token in range(0, _SCORE_TOKENS, 2):
                    keys = [
                        simd.splat(builder, simd.load(builder, builder.add(each, moved), I64, 4), LANES // 2)
                        for each in places[token : token + 2]
                    ]
                    keys = [builder.bitcast(key, kind) for key in keys]
                    for query, registers in zip(columns, sums):
                        for key, register in zip(keys, registers[token:]):
                            add_to(register, query, key)
                    if is_half:
                        if _IS_WIDE:  # or LLVM joins them by indices
                            keys = [simd.left_alone(builder, key) for key in keys]
                        add_to(sums_of_two[token // 2], columns[-1], builder.shuffle_vector(*keys, both))
            at = builder.add(out, builder.mul(loop.index, _constant(_SCORE_TOKENS // FOUR * VECTOR_BYTES)))
            for token in range(0, _SCORE_TOKENS, FOUR):
                found = []
                for registers in sums:
                    found += _sums_of_eight(builder, [builder.load(each) for each in registers[token : token + FOUR]])
                if is_half:
                    two = sums_of_two[token // 2 : token // 2 + 2]
                    found.append(_sums_of_four(builder, *[builder.load(each) for each in two]))
                for four, vector in enumerate(found):
                    place = simd.offset(builder, at, four * SCORE_BYTES + token // FOUR * VECTOR_BYTES)
                    simd.store(builder, vector, place)

    eights = builder.lshr(builder.add(fours, _constant(1)), _constant(1))

    def of_either_end(first, height):
        last = builder.mul(builder.add(first, _constant(height)), _constant(2))
        with builder.if_else(builder.icmp_signed(">", last, fours)) as (half, whole):
            with half:
                emit(first, height, 1)
            with whole:
                emit(first, height, 0)

    _for_each_height(builder, eights, _SCORE_EIGHTS, of_either_end)


def _pairs_added(builder, a, b):
    """The sum of each two neighbouring lanes: of each four lanes of ``a`` two, then those of ``b``'s four."""
    even, odd = (
        [four + lane + vector for four in range(0, LANES, FOUR) for vector in (0, LANES) for lane in (start, start + 2)]
        for start in (0, 1)
    )
    return builder.fadd(builder.shuffle_vector(a, b, _order(*even)), builder.shuffle_vector(a, b, _order(*odd)))


def _sums_of_eight(builder, vectors):
    """Two vectors: lane 4 r + t is the sum of lanes 2 r and 2 r + 1 of vector t of four, first for rows 0 to 3, then
    for rows 4 to 7."""
    first, second = _pairs_added(builder, *vectors[:2]), _pairs_added(builder, *vectors[2:])

    def rows(start):
        places = [
            row // 2 * FOUR + row % 2 + token % 2 * 2 + token // 2 * LANES
            for row in range(start, start + FOUR)
            for token in range(FOUR)
        ]
        return builder.shuffle_vector(first, second, _order(*places))

    return rows(0), rows(FOUR)


def _sums_of_four(builder, first, second):
    """Lane 4 r + t: the sum of lanes 8 h + 2 r and the next one; halves h of ``first`` are tokens 0 and 1, of
    ``second`` 2 and 3."""
    added = _pairs_added(builder, first, second)
    places = [
        token % 2 * EIGHT + row // 2 * FOUR + row % 2 + token // 2 * 2 for row in range(FOUR) for token in range(FOUR)
    ]
    return builder.shuffle_vector(added, added, _order(*places))


def _across_fours(builder, value, combine):
    """The lanes of each four combined, in every lane of it, in a fixed order."""
    for distance in (2, 1):
        moved = builder.shuffle_vector(value, value, _order(*(lane ^ distance for lane in range(LANES))))
        value = combine(value, moved)
    return value


@emitted(types.void, LITERAL, *[types.intp] * 9)
def latent_softmax(builder, pairs, scores, ends, chunk, tokens, maxima, sums, factors, weights, fours):
    """A step of the online softmax (https://arxiv.org/abs/1805.02867) for ``fours`` fours of rows and the first
    ``tokens`` tokens of a chunk.

    Lane l's row sees the tokens before the position ``ends[four, l]`` (int32 ``[fours, LANES]``); ``chunk`` is that of
    the chunk's first token. ``maxima`` and ``sums`` ``[fours, LANES]`` are brought up to date, ``factors`` are what
    earlier sums have to be multiplied with. Scores become ``weights`` 2^(score - largest), 0 where masked: at the same
    place, or with ``pairs`` in bfloat16, half as far apart.
    """
    turns = builder.lshr(builder.add(tokens, _constant(HALF_TOKENS - 1)), _constant(3))  # of two vectors of scores
    lowest = simd.splat_constant(F32, float("-inf"))
    vectors = HALF_TOKENS // FOUR
    inside = [_order(*(FOUR * vector + lane % FOUR for lane in range(LANES))) for vector in range(vectors)]

    def origin(largest):
        """``largest``, or 0 where it is -inf: a row that has seen no key yet."""
        return builder.select(builder.fcmp_ordered("==", largest, lowest), simd.splat_constant(F32, 0.0), largest)

    with cgutils.for_range(builder, fours, intp=I64) as loop:
        state = builder.mul(loop.index, _constant(VECTOR_BYTES))
        maxima_at, sums_at, factors_at = (builder.add(each, state) for each in (maxima, sums, factors))
        at = builder.add(scores, builder.mul(loop.index, _constant(SCORE_BYTES)))
        weights_at = builder.add(weights, builder.mul(loop.index, _constant(SCORE_BYTES // (2 if pairs else 1))))
        end = simd.load(builder, builder.add(ends, state), simd.vector(I32), 4)
        end = builder.sub(end, simd.splat(builder, builder.trunc(chunk, I32)))
        peaks = [cgutils.alloca_once_value(builder, lowest) for _ in range(vectors)]
        with cgutils.for_range(builder, turns, intp=I64) as inner:
            token = simd.splat(builder, builder.trunc(builder.mul(inner.index, _constant(HALF_TOKENS)), I32))
            place = builder.add(at, builder.mul(inner.index, _constant(vectors * VECTOR_BYTES)))
            for vector, peak in enumerate(peaks):
                there = simd.offset(builder, place, vector * VECTOR_BYTES)
                is_seen = builder.icmp_signed("<", builder.add(token, inside[vector]), end)
                score = builder.select(is_seen, simd.load(builder, there, simd.vector(F32), 4), lowest)
                simd.store(builder, score, there)
                builder.store(simd.larger(builder, score, builder.load(peak)), peak)
        before = simd.load(builder, maxima_at, simd.vector(F32), 4)
        largest = simd.larger(builder, *[builder.load(peak) for peak in peaks])
        largest = _across_fours(builder, largest, lambda a, b: simd.larger(builder, a, b))
        largest = simd.larger(builder, largest, before)
        lowered = origin(largest)
        factor = simd.exp2(builder, builder.fsub(before, lowered))
        simd.store(builder, largest, maxima_at)
        simd.store(builder, factor, factors_at)
        totals = [cgutils.alloca_once_value(builder, simd.splat_constant(F32, 0.0)) for _ in range(vectors)]
        with cgutils.for_range(builder, turns, intp=I64) as inner:
            place = builder.add(at, builder.mul(inner.index, _constant(vectors * VECTOR_BYTES)))
            found = []
            for vector, total in enumerate(totals):
                there = simd.offset(builder, place, vector * VECTOR_BYTES)
                score = builder.fsub(simd.load(builder, there, simd.vector(F32), 4), lowered)
                found.append(simd.exp2(builder, score))
                builder.store(builder.fadd(builder.load(total), found[-1]), total)
            if pairs:
                place = builder.add(weights_at, builder.mul(inner.index, _constant(VECTOR_BYTES)))
                simd.store(builder, dots.round_to_pairs(builder, *found), place)
            else:
                for vector, weight in enumerate(found):
                    simd.store(builder, weight, simd.offset(builder, place, vector * VECTOR_BYTES))
        added = _across_fours(builder, builder.fadd(*[builder.load(total) for total in totals]), builder.fadd)
        earlier = builder.fmul(simd.load(builder, sums_at, simd.vector(F32), 4), factor)
        simd.store(builder, builder.fadd(earlier, added), sums_at)


class _Floats:
    """Values of one token, float32, times its weights."""

    tokens = 1
    units = 1  # vectors that are loaded together

    def columns(self, builder, rows, mask):
        """The vectors of LANES columns at ``rows``; ``mask``: of the columns that there are."""
        (place,) = rows
        if mask is None:
            return [simd.load(builder, place, simd.vector(F32), 4)]
        return [simd.masked_load(builder, place, mask)]

    def weight_offset(self, token):
        """Bytes before the weights that belong to a token of a half."""
        return token // FOUR * VECTOR_BYTES + token % FOUR * 4

    in_order = staticmethod(lambda builder, vectors: vectors)
    row_bytes, half_bytes, four_bytes = FOUR * 4, 2 * VECTOR_BYTES, SCORE_BYTES
    add = staticmethod(lambda builder, total, weight, vector: simd.fma(builder, weight, vector, total))
    weight_type = F32


class _Pairs:
    """Values of two neighbouring tokens, bfloat16, times the pair of their weights."""

    tokens = 2
    units = 2

    def columns(self, builder, rows, mask):
        """As `_Floats.columns`, of words; without a mask all 2 LANES columns, of each eight the first four, then the
        others: such are interleaved by the cheapest instructions."""
        if mask is not None:
            loaded = [simd.masked_load(builder, place, mask, I16, 2) for place in rows]
            orders = [range(LANES)]
        else:
            loaded = [simd.load(builder, place, simd.vector(I16, 2 * LANES), 2) for place in rows]
            orders = [
                [eight + lane for eight in range(0, 2 * LANES, EIGHT) for lane in half] for half in _HALVES_OF_EIGHT
            ]
        words = []
        for order in orders:
            places = [column + loaded[0].type.count * row for column in order for row in range(2)]
            words.append(builder.bitcast(builder.shuffle_vector(*loaded, _order(*places)), simd.vector(I32)))
        return words

    def in_order(self, builder, vectors):
        """Sums of the vectors of `columns`, in the order of columns."""
        if len(vectors) == 1:
            return vectors
        places = [
            eight + vector * LANES + lane
            for eight in range(0, LANES, FOUR)
            for vector in (0, 1)
            for lane in range(FOUR)
        ]
        return [builder.shuffle_vector(*vectors, _order(*places[first : first + LANES])) for first in (0, LANES)]

    def weight_offset(self, token):
        """Bytes before the words that belong to a token of a half and the next."""
        return token // FOUR * VECTOR_BYTES // 2 + token % FOUR * 2

    row_bytes, half_bytes, four_bytes = FOUR * 2, VECTOR_BYTES, SCORE_BYTES // 2
    add = staticmethod(dots.add_bf16_pairs)
    weight_type = I32


@emitted(types.void, LITERAL, *[types.intp] * 10)
def latent_values(builder, pairs, weights, rows, row_bytes, tokens, factors, is_first, out, out_bytes, columns, fours):
    """``out[r, c] = out[r, c] * factors[r] + sum_t weights[r, t] * value[t, c]`` over the first ``tokens`` tokens of a
    chunk; without the first addend if ``is_first``.

    ``rows``: a table of addresses, one for each HALF_TOKENS tokens, of their first value, the next being ``row_bytes``
    further; float32, or with ``pairs`` bfloat16. ``out`` has rows of ``out_bytes``, whole vectors.
    """
    form = _Pairs() if pairs else _Floats()
    itemsize = 2 if pairs else 4
    halves = builder.lshr(tokens, _constant(3))

    def unit(first, height, start, count, mask):
        """``count`` vectors of columns from column ``start`` (i64) on."""
        lines = range(FOUR * height)
        sums = [[cgutils.alloca_once(builder, simd.vector(F32)) for _ in range(count)] for _ in lines]
        row = builder.mul(first, _constant(FOUR))
        out_at = builder.add(builder.add(out, builder.mul(row, out_bytes)), builder.mul(start, _constant(4)))
        places = [
            [simd.offset(builder, builder.add(out_at, builder.mul(out_bytes, _constant(line))), v * VECTOR_BYTES)
             for v in range(count)]
            for line in lines
        ]  # fmt: skip
        for register in (register for each in sums for register in each):
            builder.store(simd.splat_constant(F32, 0.0), register)
        weights_at = builder.add(weights, builder.mul(first, _constant(form.four_bytes)))
        start_bytes = builder.mul(start, _constant(itemsize))

        def add_up(row_places, at, moved):
            step = form.units if mask is None else 1
            vectors = []
            for v in range(0, count, step):
                shifted = [simd.offset(builder, place, v * LANES * itemsize) for place in row_places]
                vectors += form.columns(builder, shifted, mask)
            for line in lines:
                offset = moved + line // FOUR * form.four_bytes + line % FOUR * form.row_bytes
                weight = simd.load(builder, simd.offset(builder, at, offset), form.weight_type, 4)
                weight = simd.splat(builder, weight)
                for vector, register in zip(vectors, sums[line]):
                    builder.store(form.add(builder, builder.load(register), weight, vector), register)

        with cgutils.for_range(builder, halves, intp=I64) as loop:
            base = builder.add(_entry(builder, rows, loop.index), start_bytes)
            at = builder.add(weights_at, builder.mul(loop.index, _constant(form.half_bytes)))
            for token in range(0, HALF_TOKENS, form.tokens):
                row_places = [
                    builder.add(base, builder.mul(row_bytes, _constant(token + each))) for each in range(form.tokens)
                ]
                add_up(row_places, at, form.weight_offset(token))
        rest = builder.and_(tokens, _constant(HALF_TOKENS - 1))
        with builder.if_then(builder.icmp_signed("!=", rest, _constant(0))):
            base = builder.add(_entry(builder, rows, halves), start_bytes)
            at = builder.add(weights_at, builder.mul(halves, _constant(form.half_bytes)))
            last = builder.sub(rest, _constant(1))
            for token in range(0, HALF_TOKENS, form.tokens):
                with builder.if_then(builder.icmp_signed(">", rest, _constant(token))):
                    row_places = []
                    for each in range(form.tokens):  # a token past the last has the weight 0: any row serves
                        wanted = _constant(token + each)
                        line = builder.select(builder.icmp_signed("<", wanted, last), wanted, last)
                        row_places.append(builder.add(base, builder.mul(row_bytes, line)))
                    add_up(row_places, at, form.weight_offset(token))
        factor_at = builder.add(factors, builder.mul(first, _constant(VECTOR_BYTES)))
        found = [form.in_order(builder, [builder.load(register) for register in sums[line]]) for line in lines]
        with builder.if_else(builder.icmp_signed("!=", is_first, _constant(0))) as (new, old):
            with new:
                for line in lines:
                    for place, vector in zip(places[line], found[line]):
                        simd.store(builder, vector, place)
            with old:
                for line in lines:
                    factor = simd.load(builder, simd.offset(builder, factor_at, line * FOUR * 4), F32, 4)
                    factor = simd.splat(builder, factor)
                    for place, vector in zip(places[line], found[line]):
                        before = simd.load(builder, place, simd.vector(F32), 4)
                        simd.store(builder, simd.fma(builder, before, factor, vector), place)

    def all_fours(start, count, mask):
        """A unit of columns with all fours, which find it in the first-level cache."""
        _for_each_height(builder, fours, _VALUE_FOURS, lambda first, height: unit(first, height, start, count, mask))

    most = _VALUE_VECTORS if _IS_WIDE or pairs else 1
    whole = builder.udiv(columns, _constant(most * LANES))
    with cgutils.for_range(builder, whole, intp=I64) as loop:
        all_fours(builder.mul(loop.index, _constant(most * LANES)), most, None)
    done = builder.mul(whole, _constant(most * LANES))
    with cgutils.for_range_slice(builder, done, columns, _constant(LANES), intp=I64) as (start, _):
        all_fours(start, 1, simd.lanes_below(builder, 0, builder.sub(columns, start)))
