"""The register tiles of attention over latent pages, as LLVM IR.

Rows (queries: the heads of one token, then those of the next) come in fours. A vector of LANES numbers has FOUR lanes
for each row of a four, so nothing is transposed:

- **queries** ``[fours, steps, 4 rows, 4 words]``: a step of the chain over a row's width is FOUR words, one float32 or
  two bfloat16 each. The same words of a latent row, 16 bytes as they lie in the page, meet all four rows at once.
- **scores** ``[fours, CHUNK_TOKENS / 4, 4 rows, 4 tokens]``: the four partial sums of a row are added across four
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

FOUR = 4
CHUNK_TOKENS = 128  # keys whose scores are computed before their values are summed
HALF_TOKENS = 8  # tokens that are sure to lie side by side: block sizes are multiples of it
BLOCK_FOURS = 16  # most fours of rows whose scores wait at once
VECTOR_BYTES = LANES * 4
SCORE_BYTES = CHUNK_TOKENS // FOUR * VECTOR_BYTES  # of a four's scores
_IS_WIDE = TILE_VECTORS > 1  # 32 registers of LANES
_SCORE_FOURS = 6 if _IS_WIDE else 1  # most fours of a tile of scores, beside four tokens
_VALUE_FOURS = 3 if _IS_WIDE else 1  # most fours of a tile of values
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


def _in_each_four(builder, value):
    """Four lanes as the lanes of each four."""
    return builder.shuffle_vector(value, value, _order(*(lane % FOUR for lane in range(LANES))))


def _rounded(builder, value):
    """Floats as bits of bfloat16, to the nearest, ties to even; NaN stays NaN."""
    lanes = value.type.count

    def number(bits):
        return simd.splat_constant(I32, bits, lanes)

    bits = builder.bitcast(value, simd.vector(I32, lanes))
    odd = builder.and_(builder.lshr(bits, number(16)), number(1))
    nearest = builder.add(builder.add(bits, number(0x7FFF)), odd)
    quiet = builder.or_(bits, number(0x400000))
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, nearest)
    return builder.trunc(builder.lshr(chosen, number(16)), simd.vector(I16, lanes))


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
    """A query of ``width`` floats times ``scale`` as ``steps`` times 16 bytes, VECTOR_BYTES apart: four floats, or with
    ``pairs`` eight numbers rounded to bfloat16; zeros after the last."""
    count = FOUR * 2 if pairs else FOUR
    scales = simd.splat(builder, scale, count)

    def write(numbers, at):
        numbers = builder.fmul(numbers, scales)
        simd.store(builder, _rounded(builder, numbers) if pairs else numbers, at)

    whole = builder.udiv(width, _constant(count))
    with cgutils.for_range(builder, whole, intp=I64) as loop:
        place = builder.add(source, builder.mul(loop.index, _constant(count * 4)))
        at = builder.add(target, builder.mul(loop.index, _constant(VECTOR_BYTES)))
        write(simd.load(builder, place, simd.vector(F32, count), 4), at)
    with builder.if_then(builder.icmp_unsigned("<", whole, steps)):
        done = builder.mul(whole, _constant(count))
        mask = simd.lanes_below(builder, 0, builder.sub(width, done), count)
        numbers = simd.masked_load(builder, builder.add(source, builder.mul(done, _constant(4))), mask)
        write(numbers, builder.add(target, builder.mul(whole, _constant(VECTOR_BYTES))))


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


@emitted(types.void, LITERAL, *[types.intp] * 8)
def latent_scores(builder, pairs, queries, steps, rows, row_bytes, tokens, scores, ahead, fours):
    """``scores`` of at least ``tokens`` tokens of a chunk (undefined after them) and ``fours`` fours of queries.

    ``rows``: a table of addresses, one for each HALF_TOKENS tokens, of their first row, the next being ``row_bytes``
    further. ``ahead``: such a table of rows to prefetch meanwhile, or 0.
    """
    kind = I32 if pairs else F32
    add = dots.add_bf16_pairs if pairs else lambda builder, total, a, b: simd.fma(builder, a, b, total)

    def row_of(table, turn, token):
        start = _entry(builder, table, builder.lshr(turn, _constant(1)))
        odd = builder.mul(builder.and_(turn, _constant(1)), _constant(FOUR))
        return builder.add(start, builder.mul(builder.add(odd, _constant(token)), row_bytes))

    def emit(first, height):
        tile_bytes = builder.mul(steps, _constant(VECTOR_BYTES))
        starts = [
            builder.add(queries, builder.mul(builder.add(first, _constant(four)), tile_bytes)) for four in range(height)
        ]
        out = builder.add(scores, builder.mul(first, _constant(SCORE_BYTES)))
        turns = builder.udiv(builder.add(tokens, _constant(FOUR - 1)), _constant(FOUR))
        with cgutils.for_range(builder, turns, intp=I64) as loop:
            places = [row_of(rows, loop.index, token) for token in range(FOUR)]
            sums = [[cgutils.alloca_once(builder, simd.vector(F32)) for token in range(FOUR)] for four in range(height)]
            for register in (register for each in sums for register in each):
                builder.store(simd.splat_constant(F32, 0.0), register)

            def add_up(next_rows):
                with cgutils.for_range(builder, steps, intp=I64) as inner:
                    if next_rows is not None:
                        place = builder.add(next_rows, builder.mul(inner.index, _constant(_LINE_BYTES)))
                        simd.prefetch(builder, place, is_near=bool(pairs))
                    moved = builder.mul(inner.index, _constant(FOUR * 4))
                    keys = [
                        simd.load(builder, builder.add(place, moved), simd.vector(kind, FOUR), 4) for place in places
                    ]
                    keys = [_in_each_four(builder, key) for key in keys]
                    moved = builder.mul(inner.index, _constant(VECTOR_BYTES))
                    for start, registers in zip(starts, sums):
                        query = simd.load(builder, builder.add(start, moved), simd.vector(kind), 4)
                        for key, register in zip(keys, registers):
                            builder.store(add(builder, builder.load(register), query, key), register)

            is_first = builder.icmp_signed("==", first, _constant(0))
            fetches = builder.and_(is_first, builder.icmp_signed("!=", ahead, _constant(0)))
            with builder.if_else(fetches) as (fetching, quiet):
                with fetching:
                    add_up(row_of(ahead, loop.index, 0))
                with quiet:
                    add_up(None)
            at = builder.add(out, builder.mul(loop.index, _constant(VECTOR_BYTES)))
            for four, registers in enumerate(sums):
                vector = _sums_of_fours(builder, [builder.load(register) for register in registers])
                simd.store(builder, vector, simd.offset(builder, at, four * SCORE_BYTES))

    _for_each_height(builder, fours, _SCORE_FOURS, emit)


def _sums_of_fours(builder, vectors):
    """Lane 4 r + t: the sum of lanes 4 r ... 4 r + 3 of vector t of four, as (0 + 2) + (1 + 3)."""

    def each_four(a, b, lanes):
        places = [
            (four + lane % FOUR) + (LANES if lane >= FOUR else 0) for four in range(0, LANES, FOUR) for lane in lanes
        ]
        return builder.shuffle_vector(a, b, _order(*places))

    def halves(a, b):
        low, high = each_four(a, b, (0, FOUR, 1, FOUR + 1)), each_four(a, b, (2, FOUR + 2, 3, FOUR + 3))
        return builder.fadd(low, high)

    first, second = halves(*vectors[:2]), halves(*vectors[2:])
    even, odd = each_four(first, second, (0, 1, FOUR, FOUR + 1)), each_four(first, second, (2, 3, FOUR + 2, FOUR + 3))
    return builder.fadd(even, odd)


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
    turns = builder.udiv(builder.add(tokens, _constant(FOUR - 1)), _constant(FOUR))
    lowest = simd.splat_constant(F32, float("-inf"))
    inside = _order(*(lane % FOUR for lane in range(LANES)))

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
        peak = cgutils.alloca_once_value(builder, lowest)
        with cgutils.for_range(builder, turns, intp=I64) as inner:
            place = builder.add(at, builder.mul(inner.index, _constant(VECTOR_BYTES)))
            token = builder.trunc(builder.mul(inner.index, _constant(FOUR)), I32)
            is_seen = builder.icmp_signed("<", builder.add(simd.splat(builder, token), inside), end)
            score = builder.select(is_seen, simd.load(builder, place, simd.vector(F32), 4), lowest)
            simd.store(builder, score, place)
            builder.store(simd.larger(builder, score, builder.load(peak)), peak)
        before = simd.load(builder, maxima_at, simd.vector(F32), 4)
        largest = _across_fours(builder, builder.load(peak), lambda a, b: simd.larger(builder, a, b))
        largest = simd.larger(builder, largest, before)
        lowered = origin(largest)
        factor = simd.exp2(builder, builder.fsub(before, lowered))
        simd.store(builder, largest, maxima_at)
        simd.store(builder, factor, factors_at)
        total = cgutils.alloca_once(builder, simd.vector(F32))
        builder.store(simd.splat_constant(F32, 0.0), total)
        with cgutils.for_range(builder, turns, intp=I64) as inner:
            place = builder.add(at, builder.mul(inner.index, _constant(VECTOR_BYTES)))
            score = builder.fsub(simd.load(builder, place, simd.vector(F32), 4), lowered)
            weight = simd.exp2(builder, score)
            builder.store(builder.fadd(builder.load(total), weight), total)
            if pairs:
                place = builder.add(weights_at, builder.mul(inner.index, _constant(VECTOR_BYTES // 2)))
                weight = _rounded(builder, weight)
            simd.store(builder, weight, place, 2 if pairs else 4)
        added = _across_fours(builder, builder.load(total), builder.fadd)
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

    row_bytes, half_bytes, four_bytes = FOUR * 4, 2 * VECTOR_BYTES, SCORE_BYTES
    add = staticmethod(lambda builder, total, weight, vector: simd.fma(builder, weight, vector, total))
    weight_type = F32


class _Pairs:
    """Values of two neighbouring tokens, bfloat16, times the pair of their weights."""

    tokens = 2
    units = 2

    def columns(self, builder, rows, mask):
        """As `_Floats.columns`, of words; all 2 LANES columns without a mask."""
        count = LANES if mask is not None else 2 * LANES
        if mask is None:
            loaded = [simd.load(builder, place, simd.vector(I16, count), 2) for place in rows]
        else:
            loaded = [simd.masked_load(builder, place, mask, I16, 2) for place in rows]
        words = []
        for first in range(0, count, LANES):
            order = [column + count * row for column in range(first, first + LANES) for row in range(2)]
            words.append(builder.bitcast(builder.shuffle_vector(*loaded, _order(*order)), simd.vector(I32)))
        return words

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
        factor_at = builder.add(factors, builder.mul(first, _constant(VECTOR_BYTES)))
        with builder.if_else(builder.icmp_signed("!=", is_first, _constant(0))) as (new, old):
            with new:
                for register in (register for each in sums for register in each):
                    builder.store(simd.splat_constant(F32, 0.0), register)
            with old:
                for line in lines:
                    factor = simd.load(builder, simd.offset(builder, factor_at, line * FOUR * 4), F32, 4)
                    factor = simd.splat(builder, factor)
                    for place, register in zip(places[line], sums[line]):
                        before = simd.load(builder, place, simd.vector(F32), 4)
                        builder.store(builder.fmul(before, factor), register)
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
        for line, registers in zip(places, sums):
            for place, register in zip(line, registers):
                simd.store(builder, builder.load(register), place)

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
