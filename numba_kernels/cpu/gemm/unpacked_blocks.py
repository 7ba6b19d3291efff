"""Blocks of integers (`blocks`) that are unpacked once for many rows, where tiles are AVX2's or AVX-512's.

For more rows than a tile has, some blocks of a panel are unpacked to a buffer in the first-level cache, and all
tiles of rows meet them there: scales and minima of groups as floats, integers as factors.
A block in the buffer is

    [vector of columns][scales of groups, minima of groups, words][column of the vector]

So a tile needs no instructions but those of its sums. With vpdpbusd it takes all columns of the panel at once
(`WideSums`), without it those of a vector (`UnpackedSums`), so that a broadcast of x serves several registers. Without
it bytes are pairs of int16 there, for vpmaddwd: those of even and those of odd places in a word,
and so is x beside them. Results are those of `block_tile.BlockSums`, to the bit.
"""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils, types

from numba_kernels.blocks import BLOCKS, X_GROUP, Block
from numba_kernels.cpu.gemm import e4m3_tile
from numba_kernels.cpu.gemm.block_numbers import PART, is_signed, places_of_unit, scales_of, weights_of
from numba_kernels.cpu.gemm.block_tile import (
    X_ROW_WORDS,
    X_WORDS,
    add_bytes,
    add_terms,
    joined,
    number_of,
    short_words_of,
    start_word_of,
)
from numba_kernels.cpu.intrinsics import dots, simd
from numba_kernels.cpu.intrinsics.emitted import emitted
from numba_kernels.cpu.intrinsics.simd import F32, I16, I32, I64, i64
from numba_kernels.cpu.layout import DOT, GEMM_ROWS, PANEL_COLUMNS, TILE_VECTORS
from numba_kernels.cpu.target import LANES

PREFIX = "unpacked "
"""The tile's name of blocks in the buffer, before their own name."""

UNPACKED_ROWS = min(4, GEMM_ROWS) if DOT == "bytes" else GEMM_ROWS
"""The most rows of a tile. With vpdpbusd the sums and totals of four stay in registers: eight rows were up to a sixth
slower (docs/measurements/2026-11-30-cpu-wide-tiles.json)."""

_MOST_ROWS, _MOST_JOINED_ROWS = 6, 3  # whose sums stay in registers; of those that are joined word by word
_LINE_BYTES = 64
_VECTOR_BYTES = LANES * 4
_PARTS = range(LANES // PART)
_WORDS, _FLOATS, _SHORTS = simd.vector(I32, PART), simd.vector(F32, PART), simd.vector(I16, 2 * PART)


def group_row_words(block: Block) -> int:
    """Words that a row of x takes beside X_GROUP elements of a block in the buffer: of pairs, the even ones and then
    the odd ones; after them the words of `X_ROW_WORDS`."""
    return X_ROW_WORDS + X_WORDS * is_signed(block)


def unpacked_x_words(block: Block) -> int:
    """Words that a row of x takes beside a block in the buffer."""
    return block.elements // X_GROUP * group_row_words(block)


def _words_a_word(block: Block) -> int:
    """Words that one of four elements becomes."""
    return 2 if is_signed(block) else 1


def _first_word(block: Block) -> int:
    """The first word of the integers in the buffer."""
    return block.num_groups * (2 if block.minimum else 1)


def unpacked_words(block: Block) -> int:
    """Words of a column of a block in the buffer."""
    return _first_word(block) + block.elements // 4 * _words_a_word(block)


def block_of(stored: str) -> Block:
    """The block of a tile's name."""
    return BLOCKS[stored.removeprefix(PREFIX)]


def table_of(builder, block, block_at, group, number, half, v):
    """Scales (``number`` 0) or minima (1) of a vector of columns, for a group of X_GROUP elements of the block in the
    buffer at ``block_at``, or for one of its halves."""
    index = builder.add(builder.mul(group, i64(X_GROUP // block.group)), i64(number * block.num_groups + half))
    at = builder.add(block_at, builder.mul(index, i64(_VECTOR_BYTES)))
    return simd.load(builder, simd.offset(builder, at, v * unpacked_words(block) * _VECTOR_BYTES), _FLOATS, 4)


def words_of_group(builder, block, block_at, group, word):
    """The address of a group's words from ``word`` on, of the first vector; others follow `unpacked_words` apart."""
    first = simd.offset(builder, block_at, (_first_word(block) + word) * _VECTOR_BYTES)
    return builder.add(first, builder.mul(group, i64(X_WORDS * _VECTOR_BYTES)))


class UnpackedSums:
    """The accumulators of a tile and how blocks in the buffer add to them; as `float_tile.Sums`. The tile's words are
    those of the panel."""

    is_scaled = False

    def __init__(self, stored, height, vectors):
        self.block = block_of(stored)
        self.height = height
        self.vectors = vectors
        self.places = [(r, v) for r in range(height) for v in range(vectors)]
        self.is_short = not is_signed(self.block) and self.block.group // 4 <= short_words_of(self.block)
        most = _MOST_ROWS if self.is_short or is_signed(self.block) else _MOST_JOINED_ROWS
        num_turns = -(-height // most)
        self.turns = [range(height * turn // num_turns, height * (turn + 1) // num_turns) for turn in range(num_turns)]

    def open(self, builder):
        memory = cgutils.alloca_once(builder, ir.ArrayType(simd.vector(F32), self.height * self.vectors))
        memory.align = 64
        self.memory = builder.ptrtoint(memory, I64)
        self.registers = {(r, v): builder.gep(memory, [i64(0), i64(v * self.height + r)]) for r, v in self.places}

    def accumulate(self, builder, tile):
        """Adds the tile's words of K."""
        block = self.block
        num_blocks = builder.sdiv(tile.words, i64(block.words))
        groups = block.elements // X_GROUP
        group_bytes = group_row_words(block) * self.height * 4
        vector_bytes = unpacked_words(block) * _VECTOR_BYTES
        ahead_step = builder.sdiv(builder.mul(tile.step, i64(block.words)), i64(groups * self.vectors))
        tile_bytes = block.words * PANEL_COLUMNS * 4 // 2  # that a tile prefetches at most, since there are two or more
        lines = -(-tile_bytes // (_LINE_BYTES * groups * self.vectors))
        with cgutils.for_range(builder, num_blocks, intp=I64) as loop:
            for v in range(self.vectors):
                vector_at = builder.add(tile.panel, builder.mul(loop.index, i64(self.vectors * vector_bytes)))
                vector_at = simd.offset(builder, vector_at, v * vector_bytes)
                with cgutils.for_range(builder, simd.not_unrolled(builder, groups), intp=I64) as each:
                    number = builder.add(builder.mul(loop.index, i64(groups)), each.index)
                    ahead = builder.add(builder.mul(number, i64(self.vectors)), i64(v))
                    ahead = builder.add(tile.ahead, builder.mul(ahead, ahead_step))
                    for line in range(lines):
                        moved = builder.sdiv(builder.mul(ahead_step, i64(line)), i64(lines))
                        simd.prefetch(builder, builder.add(ahead, moved))
                    x_at = builder.add(tile.x, builder.mul(number, i64(group_bytes)))
                    for rows in self.turns:
                        self._add_group(builder, vector_at, each.index, x_at, rows, v)

    def _add_group(self, builder, vector_at, group, x_at, rows, v):
        """A group of x: a vector of columns, these rows."""
        block = self.block
        halves = X_GROUP // block.group
        words = X_WORDS // halves
        behind = group_row_words(block) - 3

        def row(word, r, kind):
            place = simd.offset(builder, x_at, (word * self.height + r) * 4)
            return simd.splat(builder, simd.load(builder, place, kind, 4), PART)

        def table(number, half):
            """A scale or a minimum, of each part of the vector."""
            index = builder.add(builder.mul(group, i64(halves)), i64(number * block.num_groups + half))
            at = builder.add(vector_at, builder.mul(index, i64(_VECTOR_BYTES)))
            return [simd.load(builder, simd.offset(builder, at, part * PART * 4), _FLOATS, 4) for part in _PARTS]

        group_bytes = X_WORDS * _words_a_word(block) * _VECTOR_BYTES
        first = simd.offset(builder, vector_at, _first_word(block) * _VECTOR_BYTES)
        first = builder.add(first, builder.mul(group, i64(group_bytes)))
        terms = {(r, part): [] for r in rows for part in _PARTS}
        for half in range(halves):
            wholes = self._integers(builder, first, x_at, rows, half * words, words)
            scales, start = table(0, half), start_word_of(block, half)
            for (r, part), whole in wholes.items():
                if start is not None:
                    whole = builder.add(whole, row(behind - X_WORDS + start, r, I32))
                number = number_of(builder, block, whole, row(behind, r, F32))
                terms[r, part].append((number, scales[part]))
        for half in range(halves if block.minimum else 0):
            minima = table(1, half)
            for r, part in terms:
                if halves > 1:
                    below = number_of(builder, block, row(behind + 1 + half, r, I32), row(behind, r, F32))
                else:
                    below = row(behind + 2, r, F32)
                terms[r, part].append((below, minima[part]))
        for (r, part), each in terms.items():
            at = simd.offset(builder, self.memory, (v * self.height + r) * _VECTOR_BYTES + part * PART * 4)
            total = simd.load(builder, at, _FLOATS, 4)
            simd.store(builder, add_terms(builder, block, total, each, row(behind, r, F32)), at)

    def _integers(self, builder, first, x_at, rows, start, words):
        """The sums of products with so many words of x from ``start`` on, by row and part."""
        block = self.block
        is_short, step = self.is_short, 1
        if not is_signed(block):
            step = 2 if is_short else 1 << short_words_of(block).bit_length() - 1
        kind = _SHORTS if is_short else _WORDS
        sums = {(r, part): cgutils.alloca_once(builder, kind) for r in rows for part in _PARTS}
        for each in sums.values():
            builder.store(ir.Constant(kind, [0] * kind.count), each)
        with cgutils.for_range(builder, simd.not_unrolled(builder, words // step), intp=I64) as loop:
            at = builder.add(builder.mul(loop.index, i64(step)), i64(start))
            word_at = builder.add(first, builder.mul(at, i64(_words_a_word(block) * _VECTOR_BYTES)))
            x_word = builder.add(x_at, builder.mul(at, i64(self.height * 4)))
            shorts = {key: builder.load(each) if is_short else None for key, each in sums.items()}
            for word in range(step * _words_a_word(block)):
                weights = [
                    simd.load(builder, simd.offset(builder, word_at, word * _VECTOR_BYTES + part * PART * 4), _WORDS, 4)
                    for part in _PARTS
                ]
                x_first = word * X_WORDS if is_signed(block) else word
                for r in rows:
                    place = simd.offset(builder, x_word, (x_first * self.height + r) * 4)
                    value = simd.splat(builder, simd.load(builder, place, I32, 4), PART)
                    for part in _PARTS:
                        if is_signed(block):
                            added = dots.multiply_pairs(builder, weights[part], value)
                            builder.store(builder.add(builder.load(sums[r, part]), added), sums[r, part])
                        else:
                            shorts[r, part] = add_bytes(builder, shorts[r, part], weights[part], value)
            if not is_signed(block):
                for key, each in sums.items():
                    value = shorts[key] if is_short else builder.add(builder.load(each), joined(builder, shorts[key]))
                    builder.store(value, each)
        found = {key: simd.left_alone(builder, builder.load(each)) for key, each in sums.items()}
        return {key: joined(builder, value) for key, value in found.items()} if is_short else found


class WideSums(UnpackedSums):
    """The same by vpdpbusd: all rows at once, and a panel's vectors that have columns, with sums and totals in
    registers. The next tile's rows of x are prefetched: a tile's part of them is too short for hardware to do so."""

    def open(self, builder):
        self.registers = {place: cgutils.alloca_once(builder, _FLOATS) for place in self.places}

    def accumulate(self, builder, tile):
        block = self.block
        groups = block.elements // X_GROUP
        vector_bytes = unpacked_words(block) * _VECTOR_BYTES
        num_groups = builder.mul(builder.sdiv(tile.words, i64(block.words)), i64(groups))
        ahead_step = builder.sdiv(builder.mul(tile.step, i64(block.words)), i64(groups))
        lines = builder.sdiv(builder.add(ahead_step, i64(_LINE_BYTES - 1)), i64(_LINE_BYTES))
        words = builder.sdiv(tile.panel_stride, i64(PANEL_COLUMNS * 4))  # of all K
        next_tile = builder.mul(builder.sdiv(words, i64(block.words)), i64(groups * X_ROW_WORDS * self.height * 4))
        with cgutils.for_range(builder, num_groups, intp=I64) as loop:
            x_at = builder.add(tile.x, builder.mul(loop.index, i64(X_ROW_WORDS * self.height * 4)))
            ahead = builder.add(tile.ahead, builder.mul(loop.index, ahead_step))
            with cgutils.for_range(builder, lines, intp=I64) as line:
                simd.prefetch(builder, builder.add(ahead, builder.mul(line.index, i64(_LINE_BYTES))))
            for line in range(-(-X_ROW_WORDS * self.height * 4 // _LINE_BYTES)):
                simd.prefetch(builder, simd.offset(builder, builder.add(x_at, next_tile), line * _LINE_BYTES))
            number, group = builder.sdiv(loop.index, i64(groups)), builder.srem(loop.index, i64(groups))
            block_at = builder.add(tile.panel, builder.mul(number, i64(TILE_VECTORS * vector_bytes)))
            self._add_wide_group(builder, block_at, vector_bytes, group, x_at)

    def _add_wide_group(self, builder, block_at, vector_bytes, group, x_at):
        block, halves = self.block, X_GROUP // self.block.group

        def row(word, r, kind):
            place = simd.offset(builder, x_at, (word * self.height + r) * 4)
            return simd.splat(builder, simd.load(builder, place, kind, 4))

        def table(number, v):
            return [table_of(builder, block, block_at, group, number, half, v) for half in range(halves)]

        first = words_of_group(builder, block, block_at, group, 0)
        # As many rows at once as leave the integer sums of all halves in registers.
        turns = min(halves, self.height)
        for turn in range(turns):
            rows = range(self.height * turn // turns, self.height * (turn + 1) // turns)
            wholes = self._wide_integers(builder, first, vector_bytes, x_at, rows, halves)
            for v in range(self.vectors):
                scales, minima = table(0, v), table(1, v) if block.minimum else []
                for r in rows:
                    scale_of_x = row(X_WORDS, r, F32)
                    terms = [
                        (number_of(builder, block, wholes[half, r, v], scale_of_x), scale)
                        for half, scale in enumerate(scales)
                    ]
                    for half, minimum in enumerate(minima):
                        if halves > 1:
                            below = number_of(builder, block, row(X_WORDS + 1 + half, r, I32), scale_of_x)
                        else:
                            below = row(X_WORDS + 2, r, F32)
                        terms.append((below, minimum))
                    register = self.registers[r, v]
                    builder.store(add_terms(builder, block, builder.load(register), terms, scale_of_x), register)

    def _wide_integers(self, builder, first, vector_bytes, x_at, rows, halves):
        """The integer sums of a group of x, by half, row and vector: of these rows. Two halves take turns, so that an
        instruction never waits for the one before it; LLVM would change that order."""
        words, is_ordered, sums = X_WORDS // halves, halves > 1, {}
        for half in range(halves):
            for r in rows:
                start, word = ir.Constant(_WORDS, [0] * LANES), start_word_of(self.block, half)
                if word is not None:
                    place = simd.offset(builder, x_at, (word * self.height + r) * 4)
                    start = simd.splat(builder, simd.load(builder, place, I32, 4))
                sums |= {(half, r, v): start for v in range(self.vectors)}
        for half, word in [(half, half * words + word) for word in range(words) for half in range(halves)]:
            places = [simd.offset(builder, first, word * _VECTOR_BYTES + v * vector_bytes) for v in range(self.vectors)]
            weights = [dots.bytes_of_weights(builder, simd.load(builder, place, _WORDS, 4)) for place in places]
            for r in rows:
                place = simd.offset(builder, x_at, (word * self.height + r) * 4)
                value = dots.bytes_of_rows(builder, simd.load(builder, place, I32, 4))
                for v, weight in enumerate(weights):
                    sums[half, r, v] = dots.add_four(
                        builder, sums[half, r, v], weight, value, in_register=is_ordered, in_order=is_ordered
                    )
        return sums


def unpack_blocks_of(stored):
    """An intrinsic that writes ``words`` words of a panel, whole blocks, to the buffer at ``target``."""

    if BLOCKS[stored].is_e4m3:
        return e4m3_tile.unpack_blocks

    @emitted(types.void, *[types.intp] * 3)
    def unpack_blocks(builder, source, words, target):
        block = BLOCKS[stored]
        num_blocks = builder.sdiv(words, i64(block.words))
        with cgutils.for_range(builder, num_blocks, intp=I64) as loop:
            at = builder.add(source, builder.mul(loop.index, i64(block.words * PANEL_COLUMNS * 4)))
            to = builder.add(target, builder.mul(loop.index, i64(unpacked_words(block) * PANEL_COLUMNS * 4)))
            with cgutils.for_range(builder, simd.not_unrolled(builder, TILE_VECTORS * len(_PARTS)), intp=I64) as part:
                vector = builder.sdiv(part.index, i64(len(_PARTS)))
                inside = builder.mul(builder.srem(part.index, i64(len(_PARTS))), i64(PART * 4))
                source_at = builder.add(at, builder.mul(vector, i64(block.words * _VECTOR_BYTES)))
                target_at = builder.add(to, builder.mul(vector, i64(unpacked_words(block) * _VECTOR_BYTES)))
                _unpack(builder, block, builder.add(source_at, inside), builder.add(target_at, inside))

    return unpack_blocks


def _unpack(builder, block, at, target):
    """A register of columns of a block."""

    def load(word):
        return simd.load(builder, simd.offset(builder, at, word * _VECTOR_BYTES), _WORDS, 4)

    for number, values in enumerate(scales_of(builder, block, load)):
        for group, value in enumerate(values):
            place = simd.offset(builder, target, (number * block.num_groups + group) * _VECTOR_BYTES)
            simd.store(builder, value, place)
    words_a_unit = block.unit // 4
    with cgutils.for_range(builder, simd.not_unrolled(builder, block.elements // block.unit), intp=I64) as loop:
        moved = places_of_unit(builder, block, loop.index)
        unit_bytes = words_a_unit * _words_a_word(block) * _VECTOR_BYTES
        to = simd.offset(builder, target, _first_word(block) * _VECTOR_BYTES)
        to = builder.add(to, builder.mul(loop.index, i64(unit_bytes)))
        for word in range(words_a_unit):
            for operand in _operands(builder, block, weights_of(builder, block, at, moved, word * 4)):
                simd.store(builder, operand, to)
                to = simd.offset(builder, to, _VECTOR_BYTES)


def _operands(builder, block, word):
    """The factors of a word of four elements."""
    if not is_signed(block):
        return [word]
    pairs = builder.bitcast(word, _SHORTS)
    eight = simd.splat_constant(I16, 8, 2 * PART)
    return [builder.ashr(builder.shl(pairs, eight), eight), builder.ashr(pairs, eight)]
