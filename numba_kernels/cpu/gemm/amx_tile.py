"""The tile of a product on AMX's registers: up to 32 rows of x times one panel of 48 columns.

Two registers of rows times three of columns are six registers of sums; one of x and one of the weight pass by. Heights
are data: the second register's rows end with the last one, so that both have ceil(h / 2), and a row in the middle may
be computed twice, to the same bits. A row's bits do not depend on the rows beside it.

    bfloat16    x rounded to bfloat16 (`arranged_rows.arrange_pair_rows`), 32 elements of K a step: sums stay in their
                registers for all K of a block. Steps begin at each block's and each segment's first element.
    int8        groups of 64 elements of K, a step each: exact integers, which leave their registers to be scaled in
                float32 (`int8_tile`: the same bits)
    blocks      of integers, unpacked (`unpacked_blocks`: the same bits), groups of 32 or 16 elements

Words that do not fill a step are copied, with zeros after them: nothing is read past a panel.
"""

from __future__ import annotations

import contextlib

import llvmlite.ir as ir
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from numba_kernels.blocks import X_GROUP
from numba_kernels.cpu.gemm.block_tile import X_WORDS, add_terms, number_of, start_word_of
from numba_kernels.cpu.gemm.int8_tile import add_scaled
from numba_kernels.cpu.gemm.packed_words import GROUP_WORDS
from numba_kernels.cpu.gemm.unpacked_blocks import block_of, table_of, unpacked_words, words_of_group
from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.amx import TILE_ROWS, Tiles
from numba_kernels.cpu.intrinsics.emitted import emitted
from numba_kernels.cpu.intrinsics.simd import F32, I32, I64, i64
from numba_kernels.cpu.layout import AMX_ROWS, PANEL_COLUMNS, TILE_VECTORS
from numba_kernels.cpu.target import LANES

_PANEL_ROW_BYTES = PANEL_COLUMNS * 4
_VECTOR_BYTES = LANES * 4
_LEFT, _RIGHT = 6, 7
_FLOATS, _WORDS = simd.vector(F32), simd.vector(I32)
_VECTORS = range(TILE_VECTORS)


def amx_tile_of(stored):
    """The intrinsic for panels of ``stored``, or for unpacked blocks, with `float_tile.gemm_tile`'s arguments."""

    @intrinsic
    def amx_tile(
        typingctx, x, words, panel, panel_stride, scales, bias, residual, residual_stride, out,
        out_stride, columns, partial, is_first, is_last, ahead, step, panels, rows, x_step, tiles,
    ):  # fmt: skip
        """Computes ``rows`` (1 to AMX_ROWS) rows of one panel: `float_tile.gemm_tile` with one tile."""
        index, flag = types.intp, types.boolean
        signature = types.void(*[index] * 12, flag, flag, *[index] * 6)

        def codegen(context, builder, signature, args):
            names = "x words panel panel_stride scales bias residual residual_stride out out_stride columns partial"
            operands = dict(zip(f"{names} is_first is_last ahead step panels rows".split(), args))
            if stored is np.uint16:
                make = _PairTile
            else:
                make = _Int8Tile if stored is np.uint8 else _BlockTile
            make(stored, builder, **operands).emit()
            return context.get_dummy_value()

        return signature, codegen

    return amx_tile


@emitted(types.void)
def release_tiles(builder):
    """After the last tile of a piece of work."""
    if AMX_ROWS:
        Tiles(builder).release()


class _AmxTile:
    """The operands of a tile, as IR values. A subclass adds to ``sums``, ``[AMX_ROWS, PANEL_COLUMNS]`` floats in
    memory, or keeps them in registers."""

    is_scaled = False

    def __init__(self, stored, builder, **operands):
        self.stored, self.builder = stored, builder
        self.__dict__.update(operands)
        self.tiles = Tiles(builder)
        self.sums = self._buffer(AMX_ROWS * TILE_VECTORS, F32)
        self.is_tall = builder.icmp_signed(">", self.rows, i64(TILE_ROWS))
        half = builder.sdiv(builder.add(self.rows, i64(1)), i64(2))
        self.tile_rows = builder.select(self.is_tall, half, self.rows)
        self.second_row = builder.sub(self.rows, self.tile_rows)

    def _buffer(self, vectors, element):
        memory = cgutils.alloca_once(self.builder, ir.ArrayType(simd.vector(element), vectors))
        memory.align = 64
        return self.builder.ptrtoint(memory, I64)

    def configure(self, words):
        sums = [half * TILE_VECTORS + v for half in range(2) for v in _VECTORS]
        self.tiles.configure(self.tile_rows, sums, [_LEFT], [_RIGHT], words)

    @contextlib.contextmanager
    def halves(self, half):
        """Code for the first register of rows, or for the second one, where there is one; gives its first row."""
        if not half:
            yield i64(0)
            return
        with self.builder.if_then(self.is_tall):
            yield self.second_row

    def each_row(self):
        return cgutils.for_range(self.builder, self.rows, intp=I64)

    def each_place(self, rows_at, stride):
        """Tiles of sums with the addresses of their first elements: ``stride`` bytes from row to row."""
        for half in range(2):
            with self.halves(half) as row:
                for v in _VECTORS:
                    at = self.builder.add(rows_at, self.builder.mul(row, stride))
                    yield half * TILE_VECTORS + v, simd.offset(self.builder, at, v * _VECTOR_BYTES)

    def each_product(self, x_at, x_stride, weight_at, weight_stride, vector_stride):
        """Tiles of sums, each when its factors are in ``_LEFT`` and ``_RIGHT``: the second rows begin with the vector
        of the weight that the first ones ended with, which is not loaded again."""
        builder, held = self.builder, None
        for half, vectors in enumerate((_VECTORS, reversed(_VECTORS))):
            with self.halves(half) as row:
                self.tiles.load_left(_LEFT, builder.add(x_at, builder.mul(row, x_stride)), x_stride)
                for v in vectors:
                    if v != held:
                        at = simd.offset(builder, weight_at, v * vector_stride)
                        self.tiles.load_right(_RIGHT, at, i64(weight_stride))
                    held = v
                    yield half * TILE_VECTORS + v

    def copied(self, source, stride, count, words, target):
        """Copies ``count`` rows of ``words`` words (at most LANES; an IR value) to ``target``, rows of LANES, with
        zeros after them."""
        builder, mask = self.builder, simd.lanes_below(self.builder, 0, words)
        with cgutils.for_range(builder, count, intp=I64) as row:
            at = builder.add(source, builder.mul(row.index, stride))
            to = builder.add(target, builder.mul(row.index, i64(_VECTOR_BYTES)))
            simd.store(builder, simd.masked_load(builder, at, mask, I32), to)

    def copied_panel(self, source, words):
        """A part of a panel that has fewer ``words`` of K than a register, with zeros after them: a copy's address."""
        builder, target = self.builder, self._buffer(TILE_ROWS * TILE_VECTORS, I32)
        zero = ir.Constant(_WORDS, [0] * LANES)
        for place in range(TILE_ROWS * TILE_VECTORS):
            simd.store(builder, zero, simd.offset(builder, target, place * _VECTOR_BYTES))
        with cgutils.for_range(builder, words, intp=I64) as word:
            moved = builder.mul(word.index, i64(_PANEL_ROW_BYTES))
            for v in _VECTORS:
                at = simd.offset(builder, builder.add(source, moved), v * _VECTOR_BYTES)
                to = simd.offset(builder, builder.add(target, moved), v * _VECTOR_BYTES)
                simd.store(builder, simd.load(builder, at, _WORDS, 4), to)
        return target

    def prefetch(self, word, count):
        """Prefetches for ``count`` words of K from ``word`` on, as `float_tile.gemm_tile` says."""
        builder = self.builder
        with cgutils.for_range(builder, i64(count), intp=I64) as each:
            moved = builder.mul(builder.add(word, each.index), self.step)
            simd.prefetch(builder, builder.add(self.ahead, moved))

    def take_up(self):
        """The sums' first values, in memory."""
        builder = self.builder
        with self.each_row() as row:
            moved = builder.mul(row.index, i64(_PANEL_ROW_BYTES))
            for v in _VECTORS:
                to = simd.offset(builder, builder.add(self.sums, moved), v * _VECTOR_BYTES)
                with builder.if_else(self.is_first) as (begins, resumes):
                    with begins:
                        simd.store(builder, simd.splat_constant(F32, 0.0), to)
                    with resumes:
                        at = simd.offset(builder, builder.add(self.partial, moved), v * _VECTOR_BYTES)
                        simd.store(builder, simd.load(builder, at, _FLOATS, 4), to)

    def hand_over(self):
        """Leaves the sums in ``partial``, or finishes them: scales, bias, residual, the columns that exist."""
        builder = self.builder
        with builder.if_else(self.is_last) as (ends, goes_on):
            with ends:
                self._finish()
            with goes_on, self.each_row() as row:
                moved = builder.mul(row.index, i64(_PANEL_ROW_BYTES))
                for v in _VECTORS:
                    at = simd.offset(builder, builder.add(self.sums, moved), v * _VECTOR_BYTES)
                    to = simd.offset(builder, builder.add(self.partial, moved), v * _VECTOR_BYTES)
                    simd.store(builder, simd.load(builder, at, _FLOATS, 4), to)

    def _finish(self):
        builder = self.builder

        def of_columns(base):
            places = [simd.offset(builder, base, v * _VECTOR_BYTES) for v in _VECTORS]
            return [simd.load(builder, place, _FLOATS, 4) for place in places]

        masks = [simd.lanes_below(builder, v * LANES, self.columns) for v in _VECTORS]
        biases = of_columns(self.bias)
        scales = of_columns(self.scales) if self.is_scaled else None
        has_residual = builder.icmp_signed("!=", self.residual, i64(0))
        # without a residual its place is the result's, of which no column is read
        base = builder.select(has_residual, self.residual, self.out)
        stride = builder.select(has_residual, self.residual_stride, self.out_stride)
        with self.each_row() as row:
            moved = builder.mul(row.index, self.out_stride)
            sums_at = builder.add(self.sums, builder.mul(row.index, i64(_PANEL_ROW_BYTES)))
            for v in _VECTORS:
                total = simd.load(builder, simd.offset(builder, sums_at, v * _VECTOR_BYTES), _FLOATS, 4)
                if scales is None:
                    total = builder.fadd(total, biases[v])
                else:
                    total = simd.fma(builder, total, scales[v], biases[v])
                at = simd.offset(builder, builder.add(base, builder.mul(row.index, stride)), v * _VECTOR_BYTES)
                none = ir.Constant(masks[v].type, [0] * LANES)
                mask = builder.select(has_residual, masks[v], none)
                added = builder.fadd(total, simd.masked_load(builder, at, mask))
                total = builder.select(has_residual, added, total)
                at = simd.offset(builder, builder.add(self.out, moved), v * _VECTOR_BYTES)
                simd.masked_store(builder, total, at, masks[v])


class _PairTile(_AmxTile):
    """Pairs of bfloat16, in steps of TILE_ROWS words."""

    def emit(self):
        builder, tiles = self.builder, self.tiles
        self.configure(TILE_ROWS)
        stride = i64(_PANEL_ROW_BYTES)
        with builder.if_then(builder.not_(self.is_first)):
            for tile, at in self.each_place(self.partial, stride):
                tiles.load_sums(tile, at, stride)
        if tiles.is_emulated:  # configuring makes registers zero
            with builder.if_then(self.is_first):
                for tile, _ in self.each_place(self.partial, stride):
                    tiles.zero(tile)

        all_words = builder.sdiv(self.panel_stride, i64(_PANEL_ROW_BYTES))
        padded = builder.mul(builder.sdiv(builder.add(all_words, i64(LANES - 1)), i64(LANES)), i64(LANES))
        x_stride = builder.mul(builder.add(padded, i64(LANES)), i64(4))  # `arranged_rows.pair_row_words`
        steps = builder.sdiv(self.words, i64(TILE_ROWS))
        with cgutils.for_range(builder, steps, intp=I64) as loop:
            word = builder.mul(loop.index, i64(TILE_ROWS))
            x_at = builder.add(self.x, builder.mul(word, i64(4)))
            weight_at = builder.add(self.panel, builder.mul(word, stride))
            self.prefetch(word, TILE_ROWS)
            self._add(x_at, x_stride, weight_at)
        word = builder.mul(steps, i64(TILE_ROWS))
        left = builder.sub(self.words, word)
        with builder.if_then(builder.icmp_signed(">", left, i64(0)), likely=False):
            rows = self._buffer(AMX_ROWS, I32)
            self.copied(builder.add(self.x, builder.mul(word, i64(4))), x_stride, self.rows, left, rows)
            weight_at = self.copied_panel(builder.add(self.panel, builder.mul(word, stride)), left)
            self._add(rows, i64(_VECTOR_BYTES), weight_at)

        with builder.if_else(self.is_last) as (ends, goes_on):
            with ends:
                for tile, at in self.each_place(self.sums, stride):
                    tiles.store_sums(tile, at, stride)
                self._finish()
            with goes_on:
                for tile, at in self.each_place(self.partial, stride):
                    tiles.store_sums(tile, at, stride)

    def _add(self, x_at, x_stride, weight_at):
        for tile in self.each_product(x_at, x_stride, weight_at, _PANEL_ROW_BYTES, _VECTOR_BYTES):
            self.tiles.add_pairs(tile, _LEFT, _RIGHT)


class _IntegerTile(_AmxTile):
    """Integer sums of a group of K, which leave their registers for ``whole``, ``[AMX_ROWS, PANEL_COLUMNS]``."""

    def __init__(self, stored, builder, **operands):
        super().__init__(stored, builder, **operands)
        self.whole = self._buffer(AMX_ROWS * TILE_VECTORS, I32)

    def integers(self, x_at, x_stride, weight_at, weight_stride, vector_stride):
        """Computes the sums of as many words as tiles are configured for."""
        tiles, stride = self.tiles, i64(_PANEL_ROW_BYTES)
        for tile in self.each_product(x_at, x_stride, weight_at, weight_stride, vector_stride):
            tiles.zero(tile)
            tiles.add_bytes(tile, _LEFT, _RIGHT)
        for tile, at in self.each_place(self.whole, stride):
            tiles.store_sums(tile, at, stride)

    def places(self, row):
        """The addresses of a row's integers and sums, by vector."""
        builder, moved = self.builder, self.builder.mul(row, i64(_PANEL_ROW_BYTES))
        for v in _VECTORS:
            yield tuple(
                simd.offset(builder, builder.add(base, moved), v * _VECTOR_BYTES) for base in (self.whole, self.sums)
            )

    def of_row(self, at, row, kind):
        """The number of a row, in every lane."""
        place = self.builder.add(at, self.builder.mul(row, i64(4)))
        return simd.splat(self.builder, simd.load(self.builder, place, kind, 4))


class _Int8Tile(_IntegerTile):
    """int8, in groups of GROUP_WORDS words: rows of x, then their scales and the starts of their sums."""

    is_scaled = True

    def emit(self):
        builder = self.builder
        self.take_up()
        self.configure(GROUP_WORDS)
        group_bytes = builder.mul(self.rows, i64((GROUP_WORDS + 2) * 4))
        groups = builder.sdiv(self.words, i64(GROUP_WORDS))
        with cgutils.for_range(builder, groups, intp=I64) as loop:
            word = builder.mul(loop.index, i64(GROUP_WORDS))
            self.prefetch(word, GROUP_WORDS)
            at = builder.add(self.panel, builder.mul(word, i64(_PANEL_ROW_BYTES)))
            self._add_group(builder.add(self.x, builder.mul(loop.index, group_bytes)), at)
        word = builder.mul(groups, i64(GROUP_WORDS))
        left = builder.sub(self.words, word)
        with builder.if_then(builder.icmp_signed(">", left, i64(0)), likely=False):
            at = self.copied_panel(builder.add(self.panel, builder.mul(word, i64(_PANEL_ROW_BYTES))), left)
            self._add_group(builder.add(self.x, builder.mul(groups, group_bytes)), at)
        self.hand_over()

    def _add_group(self, x_at, weight_at):
        builder = self.builder
        self.integers(x_at, i64(_VECTOR_BYTES), weight_at, _PANEL_ROW_BYTES, _VECTOR_BYTES)
        scales_at = builder.add(x_at, builder.mul(self.rows, i64(GROUP_WORDS * 4)))
        starts_at = builder.add(scales_at, builder.mul(self.rows, i64(4)))
        with self.each_row() as row:
            scale, start = self.of_row(scales_at, row.index, F32), self.of_row(starts_at, row.index, I32)
            for whole_at, sum_at in self.places(row.index):
                whole = builder.add(simd.load(builder, whole_at, _WORDS, 4), start)
                total = simd.load(builder, sum_at, _FLOATS, 4)
                simd.store(builder, add_scaled(builder, total, whole, scale), sum_at)


class _BlockTile(_IntegerTile):
    """Unpacked blocks of integers, in groups of X_GROUP elements: rows of x, then their scales, the starts of both
    halves' sums, or that of the whole one, and the sums below zero (`packed_words.quantize_block`)."""

    def __init__(self, stored, builder, **operands):
        super().__init__(stored, builder, **operands)
        self.block = block_of(stored)
        self.num_halves = X_GROUP // self.block.group

    def emit(self):
        builder, block = self.builder, self.block
        self.take_up()
        self.configure(X_WORDS // self.num_halves)
        groups = block.elements // X_GROUP
        num_groups = builder.mul(builder.sdiv(self.words, i64(block.words)), i64(groups))
        ahead_step = builder.sdiv(builder.mul(self.step, i64(block.words)), i64(groups))
        lines = builder.sdiv(builder.add(ahead_step, i64(_VECTOR_BYTES - 1)), i64(_VECTOR_BYTES))
        group_bytes = builder.mul(self.rows, i64((X_WORDS + 3) * 4))
        block_bytes = i64(TILE_VECTORS * unpacked_words(block) * _VECTOR_BYTES)
        with cgutils.for_range(builder, num_groups, intp=I64) as loop:
            ahead = builder.add(self.ahead, builder.mul(loop.index, ahead_step))
            with cgutils.for_range(builder, lines, intp=I64) as line:
                simd.prefetch(builder, builder.add(ahead, builder.mul(line.index, i64(_VECTOR_BYTES))))
            number, group = builder.sdiv(loop.index, i64(groups)), builder.srem(loop.index, i64(groups))
            block_at = builder.add(self.panel, builder.mul(number, block_bytes))
            self._add_group(block_at, group, builder.add(self.x, builder.mul(loop.index, group_bytes)))
        self.hand_over()

    def _add_group(self, block_at, group, x_at):
        builder, block, halves = self.builder, self.block, self.num_halves
        words, vector_stride = X_WORDS // halves, unpacked_words(block) * _VECTOR_BYTES
        row_bytes = builder.mul(self.rows, i64(4))
        behind = [builder.add(x_at, builder.mul(row_bytes, i64(X_WORDS + number))) for number in range(3)]
        kept = self._buffer(AMX_ROWS * TILE_VECTORS, F32) if halves > 1 else None
        for half in range(halves):
            first = words_of_group(builder, block, block_at, group, half * words)
            x_half = simd.offset(builder, x_at, half * words * 4)
            self.integers(x_half, i64(X_WORDS * 4), first, _VECTOR_BYTES, vector_stride)
            factors = []
            if half == halves - 1:
                tables = [(number, each) for number in range(2 if block.minimum else 1) for each in range(halves)]
                factors = [[table_of(builder, block, block_at, group, *each, v) for each in tables] for v in _VECTORS]
            with self.each_row() as row:
                self._scale_row(row.index, half, behind, factors, kept)

    def _scale_row(self, row, half, behind, factors, kept):
        """Scales a half's integers and keeps them; the last one's are added with the others, by their ``factors``, a
        vector's scales and minima."""
        builder, halves = self.builder, self.num_halves
        start = start_word_of(self.block, half)
        start = None if start is None else self.of_row(behind[start - X_WORDS], row, I32)
        x_scale = self.of_row(behind[0], row, F32)
        if self.block.minimum and halves > 1:
            wholes = [self.of_row(behind[1 + each], row, I32) for each in range(halves)]
            below = [number_of(builder, self.block, whole, x_scale) for whole in wholes]
        else:
            below = [self.of_row(behind[2], row, F32)]
        for v, (whole_at, sum_at) in enumerate(self.places(row)):
            whole = simd.load(builder, whole_at, _WORDS, 4)
            number = number_of(builder, self.block, whole if start is None else builder.add(whole, start), x_scale)
            if kept is not None:
                moved = builder.add(kept, builder.mul(row, i64(_PANEL_ROW_BYTES)))
                kept_at = simd.offset(builder, moved, v * _VECTOR_BYTES)
            if not factors:
                simd.store(builder, number, kept_at)
                continue
            numbers = [simd.load(builder, kept_at, _FLOATS, 4)] if half else []
            numbers += [number, *below] if self.block.minimum else [number]
            total = simd.load(builder, sum_at, _FLOATS, 4)
            terms = list(zip(numbers, factors[v], strict=True))
            simd.store(builder, add_terms(builder, self.block, total, terms, x_scale), sum_at)
