"""Sums of products with blocks of small integers (`blocks`), for the register tile: integers in a group, then scaled.

x is rounded to int8 by groups of 32 (`arranged_rows.arrange_blocks`). Weights are unsigned bytes in registers, unpacked
or looked up there once for all rows of the tile. The integer sum of a group is exact; it begins at the weights' zero
times the sum of x, below zero. Then, in float32 and in the order of K,

    total += scale of x * (scale of the group * integer sum - minimum of the group * sum of x)

Where x's scale is a power of two (`Block.has_power_scales`), integer sums begin at the bits of 1.5 * 2^23 times it, so
that one subtraction converts and scales them, and a group's terms, if two, are added to the total one by one.

A register of columns goes through some blocks with all rows before the next one does: as many integer sums as rows are
under way, and rows' values are operands in memory. Signed bytes without vpdpbusd take both registers of a vector at
once from four rows on, so that broadcasts of x, and values carried around the loops, serve both.

vpdpbusd multiplies and adds four pairs of bytes; vpmaddubsw's sums of two products have 16 bits, which those of few
bits fit for some words. Bytes would not: without vpdpbusd their magnitudes are multiplied, and x has the weights'
signs. There, more rows than a tile's meet blocks that were unpacked for them (`unpacked_blocks`).
"""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils

from numba_kernels.blocks import BLOCKS, X_GROUP, Block
from numba_kernels.cpu.gemm.block_numbers import PART, is_signed, places_of_unit, scales_of, weights_of
from numba_kernels.cpu.intrinsics import dots, simd
from numba_kernels.cpu.intrinsics.simd import F32, I8, I16, I32, I64, i64
from numba_kernels.cpu.layout import DOT, PANEL_COLUMNS, ROUNDS_TO_BF16, TILE_VECTORS
from numba_kernels.cpu.target import LANES, PROCESSOR

X_WORDS = X_GROUP // 4  # of bytes
X_ROW_WORDS = X_WORDS + 3
"""With the scale, the starts of both halves' sums, or that of the whole sum, and the sum."""

_CHUNK = 256  # elements of K that a register goes through at once
_LINE_BYTES = 64
FEW_ROWS = 4  # fewer sums than an instruction takes cycles
_MOST_WIDE_ROWS = 4  # of signed bytes, whose sums for a whole vector of columns stay in registers
_MOST_SHORT = 32767
_MOST_CHAINED_TERMS = 2  # of a group: tiles of few rows would wait for longer chains
_WORDS, _FLOATS = simd.vector(I32, PART), simd.vector(F32, PART)
_PARTS_A_VECTOR = LANES // PART


def is_one_stream(block: Block) -> bool:
    """Whether a block's lines are read in order, so that hardware prefetching works.

    On Zen 4 a prefetch of each line would then occupy the loads' line fill buffers, so every fourth is, as on others
    with byte products, not measured. Zen 3, without them, and Zen 5 need each: Q4_0 went from 8.8 to 16.6 GB/s, Q8_0
    from 70 to 84 % of the read rate. Long blocks are read in turns: everywhere each line is prefetched, earlier."""
    return block.elements < 256


def start_of(block: Block) -> int:
    """The initial value of integer sums, to be multiplied by the sum of x."""
    return 0 if is_signed(block) else -block.zero


def start_in_rows(block: Block) -> int:
    """The factor of the sums beside rows of x: `start_of`, or -1 where each half has a minimum."""
    return -1 if block.minimum and block.group < X_GROUP else start_of(block)


def start_word_of(block: Block, half: int) -> int | None:
    """The number of the word, after those of a row of x, where a half's integer sum begins; None if at 0."""
    if start_of(block):
        return X_WORDS + 1 + half
    return X_WORDS if block.has_power_scales else None


def number_of(builder, block, whole, scale):
    """Integer sums as floats, where x's ``scale`` is a power of two times it."""
    kind = simd.vector(F32, whole.type.count)
    if block.has_power_scales:
        return builder.fsub(builder.bitcast(whole, kind), scale)
    return builder.sitofp(whole, kind)


def add_terms(builder, block, total, terms, scale):
    """``total`` and a group's terms, each a number of `number_of` and its factor, a group's scale or minimum."""
    if block.has_power_scales and len(terms) <= _MOST_CHAINED_TERMS:
        for number, factor in terms:
            total = simd.fma(builder, number, factor, total)
        return total
    value = builder.fmul(*terms[0])
    for number, factor in terms[1:]:
        value = simd.fma(builder, number, factor, value)
    return builder.fadd(total, value) if block.has_power_scales else simd.fma(builder, value, scale, total)


def short_words_of(block: Block) -> int:
    """Words of products whose sums fit 16 bits."""
    largest = 127 if is_signed(block) else block.largest
    return max(1, _MOST_SHORT // (2 * 127 * largest))


def x_words(block: Block) -> int:
    """Words that a row of x takes beside a block."""
    if block.is_e4m3:
        return block.elements // 2 if ROUNDS_TO_BF16 else block.elements
    return block.elements // X_GROUP * X_ROW_WORDS


class BlockSums:
    """The accumulators of a tile and how blocks add to them; as `float_tile.Sums`."""

    is_scaled = False

    def __init__(self, stored, height, vectors):
        self.block = BLOCKS[stored]
        self.height = height
        self.vectors = vectors
        self.places = [(r, v) for r in range(height) for v in range(vectors)]
        self.x_words = x_words(self.block)
        streams = height < FEW_ROWS and is_one_stream(self.block)
        self.steps = 1 if streams else max(1, _CHUNK // self.block.elements)  # blocks at once
        self.lines_a_prefetch = 4 if streams and DOT == "bytes" and PROCESSOR != "znver5" else 1
        self.is_signed = is_signed(self.block)
        self.short_words = short_words_of(self.block)
        # Signed bytes: a broadcast of x meets all columns of a vector, so many rows at a time.
        is_wide = self.is_signed and height >= FEW_ROWS
        self.parts = range(_PARTS_A_VECTOR if is_wide else 1)
        turns = -(-height // _MOST_WIDE_ROWS) if is_wide else 1
        self.turns = [range(height * turn // turns, height * (turn + 1) // turns) for turn in range(turns)]

    def open(self, builder):
        memory = cgutils.alloca_once(builder, ir.ArrayType(simd.vector(F32), self.height * self.vectors))
        memory.align = 64
        self.memory = builder.ptrtoint(memory, I64)
        self.registers = {(r, v): builder.gep(memory, [i64(0), i64(v * self.height + r)]) for r, v in self.places}
        tables = 2 if self.block.minimum else 1
        self.tables = [
            [cgutils.alloca_once(builder, ir.ArrayType(_FLOATS, self.block.num_groups)) for _ in range(tables)]
            for _ in self.parts
        ]
        self.totals = {
            (r, part): cgutils.alloca_once(builder, _FLOATS) for r in range(self.height) for part in self.parts
        }

    def accumulate(self, builder, tile):
        """Adds the tile's words of K."""
        words = self.block.words
        num_blocks = builder.sdiv(tile.words, i64(words))
        block_bytes = words * PANEL_COLUMNS * 4
        x_bytes = self.x_words * self.height * 4
        chunks = builder.sdiv(builder.add(num_blocks, i64(self.steps - 1)), i64(self.steps))
        line_step = builder.sdiv(tile.step, i64(PANEL_COLUMNS * 4 // _LINE_BYTES))
        turns_a_vector = _PARTS_A_VECTOR // len(self.parts)
        with cgutils.for_range(builder, chunks, intp=I64) as chunk:
            first = builder.mul(chunk.index, i64(self.steps))
            left = builder.sub(num_blocks, first)
            count = builder.select(builder.icmp_signed("<", left, i64(self.steps)), left, i64(self.steps))
            x_at = builder.add(tile.x, builder.mul(first, i64(x_bytes)))
            with cgutils.for_range(
                builder, simd.not_unrolled(builder, turns_a_vector * TILE_VECTORS), intp=I64
            ) as part:
                vector, inside = part.index, i64(0)
                if turns_a_vector > 1:
                    vector = builder.sdiv(part.index, i64(turns_a_vector))
                    inside = builder.mul(builder.srem(part.index, i64(turns_a_vector)), i64(PART * 4))
                at = builder.add(tile.panel, builder.mul(first, i64(block_bytes)))
                at = builder.add(at, builder.mul(vector, i64(words * LANES * 4)))
                sums_at = builder.add(self.memory, builder.mul(vector, i64(self.height * LANES * 4)))
                line = builder.add(builder.mul(first, i64(words * PANEL_COLUMNS * 4 // _LINE_BYTES)), builder.mul(
                    part.index, i64(words * LANES * 4 // _LINE_BYTES // turns_a_vector)
                ))  # fmt: skip
                ahead = builder.add(tile.ahead, builder.mul(line, line_step))
                self._add_part(
                    builder, count, builder.add(at, inside), x_at, x_bytes, builder.add(sums_at, inside), ahead,
                    line_step,
                )  # fmt: skip

    def _add_part(self, builder, count, weights_at, x_at, x_bytes, sums_at, ahead, line_step):
        """``count`` blocks of one register of columns (or of `parts`, side by side), for all rows. As many lines are
        prefetched from ``ahead`` on, ``line_step`` bytes apart."""
        places = [simd.offset(builder, sums_at, r * LANES * 4 + part * PART * 4) for r, part in self.totals]
        for place, total in zip(places, self.totals.values(), strict=True):
            builder.store(simd.load(builder, place, _FLOATS, 4), total)
        with cgutils.for_range(builder, count, intp=I64) as loop:
            at = builder.add(weights_at, builder.mul(loop.index, i64(self.block.words * PANEL_COLUMNS * 4)))
            lines = builder.mul(loop.index, i64(self.block.words * PANEL_COLUMNS * 4 // _LINE_BYTES))
            lines_at = builder.add(ahead, builder.mul(lines, line_step))
            x_block = builder.add(x_at, builder.mul(loop.index, i64(x_bytes)))
            self._add_block(builder, at, x_block, lines_at, line_step)
        for place, total in zip(places, self.totals.values(), strict=True):
            simd.store(builder, builder.load(total), place)

    def _add_block(self, builder, at, x_at, ahead, line_step):
        block, unit = self.block, self.block.unit
        starts = [simd.offset(builder, at, part * PART * 4) for part in self.parts]
        for start, tables in zip(starts, self.tables, strict=True):

            def load(word, start=start):
                return simd.load(builder, simd.offset(builder, start, word * LANES * 4), _WORDS, 4)

            for table, values in zip(tables, scales_of(builder, block, load), strict=True):
                for group, value in enumerate(values):
                    builder.store(value, builder.gep(table, [i64(0), i64(group)]))
        groups_of_x = unit // X_GROUP
        with cgutils.for_range(builder, simd.not_unrolled(builder, block.elements // unit), intp=I64) as loop:
            moved = places_of_unit(builder, block, loop.index)
            x_unit = builder.add(x_at, builder.mul(loop.index, i64(groups_of_x * X_ROW_WORDS * self.height * 4)))
            first_group = builder.mul(loop.index, i64(unit // block.group))
            lines = -(-self.block.words * unit // self.block.elements // (_PARTS_A_VECTOR // len(self.parts)))
            line_at = builder.add(ahead, builder.mul(builder.mul(loop.index, i64(lines)), line_step))
            for line in range(0, lines, self.lines_a_prefetch):
                simd.prefetch(builder, builder.add(line_at, builder.mul(line_step, i64(line))))
            for index in range(groups_of_x):

                def weights(word, index=index, moved=moved):
                    return [weights_of(builder, block, start, moved, index * X_GROUP + word * 4) for start in starts]

                def entry(number, half, index=index, first_group=first_group):
                    group = builder.add(first_group, i64(index * X_GROUP // block.group + half))
                    return [builder.load(builder.gep(tables[number], [i64(0), group])) for tables in self.tables]

                of_x = simd.offset(builder, x_unit, index * X_ROW_WORDS * self.height * 4)
                for rows in self.turns:
                    self._add_group(builder, of_x, rows, weights, entry)

    def _add_group(self, builder, x_at, rows, weights, entry):
        """A group of x, these rows: ``weights(word)`` gives bytes by part, ``entry(table, half)`` scales or minima."""
        halves = X_GROUP // self.block.group
        words = X_WORDS // halves

        def row(word, r, kind):
            return simd.load(builder, simd.offset(builder, x_at, (word * self.height + r) * 4), kind, 4)

        def every(word, r, kind):
            return simd.splat(builder, row(word, r, kind), PART)

        keys = [(r, part) for r in rows for part in self.parts]
        terms = {key: [] for key in keys}
        for half in range(halves):
            start = start_word_of(self.block, half)
            wholes = {(r, part): _number(0) if start is None else every(start, r, I32) for r, part in keys}
            wholes = self._integers(builder, wholes, weights, row, range(half * words, (half + 1) * words))
            scales = entry(0, half)
            for (r, part), whole in wholes.items():
                number = number_of(builder, self.block, whole, every(X_WORDS, r, F32))
                terms[r, part].append((number, scales[part]))
        for half in range(halves if self.block.minimum else 0):
            minima = entry(1, half)
            for r, part in keys:
                if halves > 1:
                    below = number_of(builder, self.block, every(X_WORDS + 1 + half, r, I32), every(X_WORDS, r, F32))
                else:
                    below = every(X_WORDS + 2, r, F32)
                terms[r, part].append((below, minima[part]))
        for r, part in keys:
            scale, total = every(X_WORDS, r, F32), self.totals[r, part]
            builder.store(add_terms(builder, self.block, builder.load(total), terms[r, part], scale), total)

    def _integers(self, builder, wholes, weights, row, words):
        """The sums ``wholes``, by row and part, with the products of these words of x."""
        wholes, shorts = dict(wholes), dict.fromkeys(wholes)
        others = dict.fromkeys(wholes)  # a second chain of sums where there are few
        for number, word in enumerate(words, 1):
            operands = [self._operand(builder, weight) for weight in weights(word)]
            values = {}
            for key in wholes:
                r, part = key
                if r not in values:
                    of_x = row(word, r, I32)
                    values[r] = simd.splat(builder, of_x, PART) if DOT == "pairs" else dots.bytes_of_rows(builder, of_x)
                weight, value = operands[part], values[r]
                if DOT == "pairs":
                    shorts[key] = self._add_bytes(builder, shorts[key], weight, value)
                elif self.height < FEW_ROWS and number % 2 == 0:
                    others[key] = dots.add_four(builder, others[key] or _number(0), weight, value)
                else:
                    wholes[key] = dots.add_four(builder, wholes[key], weight, value)
                if len(self.parts) > 1:  # row by row
                    wholes[key] = simd.left_alone(builder, builder.add(wholes[key], joined(builder, shorts[key])))
                    shorts[key] = None
            if DOT == "pairs" and len(self.parts) == 1 and (number % self.short_words == 0 or number == len(words)):
                for key in wholes:
                    wholes[key] = builder.add(wholes[key], joined(builder, shorts[key]))
                    if self.is_signed:  # else LLVM goes row by row, and all words' magnitudes do not fit in registers
                        wholes[key] = simd.left_alone(builder, wholes[key])
                shorts = dict.fromkeys(wholes)
        return {key: one if others[key] is None else builder.add(one, others[key]) for key, one in wholes.items()}

    def _add_bytes(self, builder, sums, weight, value):
        magnitudes, signs = weight
        if signs is not None:
            value = dots.with_sign(builder, builder.bitcast(value, simd.vector(I8, 4 * PART)), signs)
        return add_bytes(builder, sums, magnitudes, value)

    def _operand(self, builder, word):
        """The factors that a word of weights becomes: its bytes, or its magnitudes and signs."""
        if DOT == "bytes":
            return dots.bytes_of_weights(builder, word)
        bytes_ = builder.bitcast(word, simd.vector(I8, 4 * PART))
        return (dots.with_sign(builder, bytes_, bytes_), bytes_) if self.is_signed else (bytes_, None)


def add_bytes(builder, sums, weight, value):
    """The sums of 16 bits, or None before the first, and the products of two bytes in each half lane."""
    pairs = dots.multiply_bytes(builder, weight, value)
    return pairs if sums is None else builder.add(sums, pairs)


def joined(builder, shorts):
    """Neighbouring sums of 16 bits added up, one for each lane."""
    return dots.multiply_pairs(builder, shorts, simd.splat_constant(I16, 1, 2 * PART))


def _number(value):
    return simd.splat_constant(I32, value, PART)
