"""Sums of int8 products, for the register tile: exact in int32 within a group of GROUP elements of K, then scaled.

Weights are unsigned bytes, with ZERO_POINT added, since vpdpbusd, the one instruction that multiplies four pairs of
bytes and adds them up, takes one side unsigned. The excess, ZERO_POINT times the sum of a group of x, does not depend
on the column: the integer sums begin at minus this. Scales are powers of two (`arranged_rows`), so that a sum is scaled
without a product, which would share its units with vpdpbusd.

Layouts for processors without that instruction multiply pairs of int16 (vpmaddwd, exact, unlike vpmaddubsw, which
saturates): a word of four bytes is split into bytes 0 and 2 and bytes 1 and 3, and so are the activations when they are
quantised.
"""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils

from numba_kernels.cpu.gemm.arranged_rows import DOT_WORDS, GROUP_ROW_WORDS
from numba_kernels.cpu.gemm.packed_words import GROUP_WORDS
from numba_kernels.cpu.intrinsics import dots, simd
from numba_kernels.cpu.intrinsics.simd import F32, I16, I32, I64
from numba_kernels.cpu.layout import DOT
from numba_kernels.cpu.target import LANES

_WORDS = simd.vector(I32)


class Int8Sums:
    """The accumulators of a tile and how words of four elements add to them; as `float_tile.Sums`."""

    is_scaled = True

    def __init__(self, height, vectors):
        self.height = height
        self.vectors = vectors
        self.places = [(r, v) for r in range(height) for v in range(vectors)]

    def open(self, builder):
        self.registers = {rv: cgutils.alloca_once(builder, simd.vector(F32)) for rv in self.places}
        self.whole = {rv: cgutils.alloca_once(builder, _WORDS) for rv in self.places}

    def accumulate(self, builder, tile):
        group_words = ir.Constant(I64, GROUP_WORDS)
        groups = builder.sdiv(builder.add(tile.words, ir.Constant(I64, GROUP_WORDS - 1)), group_words)
        with cgutils.for_range(builder, groups, intp=I64) as loop:
            first = builder.mul(loop.index, group_words)
            at = builder.add(tile.x, builder.mul(loop.index, ir.Constant(I64, GROUP_ROW_WORDS * self.height * 4)))
            left = builder.sub(tile.words, first)
            count = builder.select(builder.icmp_signed("<", left, group_words), left, group_words)
            self._add_group(builder, first, count, at, tile)

    def _add_group(self, builder, first, count, x_at, tile):
        def after_words(r, row_words):
            return simd.offset(builder, x_at, (row_words * self.height + r) * 4)

        for r in range(self.height):
            start = simd.splat(builder, simd.load(builder, after_words(r, DOT_WORDS + 1), I32, 4))
            for v in range(self.vectors):
                builder.store(start, self.whole[r, v])
        with cgutils.for_range(builder, count, intp=I64) as loop:
            at = builder.add(x_at, builder.mul(loop.index, ir.Constant(I64, 4)))
            self._add_word(builder, at, tile.weight_places(builder, builder.add(first, loop.index)))
        for r in range(self.height):
            scale = simd.splat(builder, simd.load(builder, after_words(r, DOT_WORDS), F32, 4))
            for v in range(self.vectors):
                register = self.registers[r, v]
                total = builder.load(register)
                builder.store(add_scaled(builder, total, builder.load(self.whole[r, v]), scale), register)

    def _add_word(self, builder, x_at, weight_places):
        def weight(v):
            return _parts_of_weights(builder, simd.load(builder, weight_places[v], _WORDS, 4))

        def value(r, index):
            at = simd.offset(builder, x_at, (r * DOT_WORDS + index * GROUP_WORDS) * 4)
            return _parts_of_x(builder, simd.load(builder, at, I32, 4))

        def add(r, v, weight, value, index):
            total = builder.load(self.whole[r, v])
            builder.store(_dot(builder, total, weight, value, index), self.whole[r, v])

        indices = range(DOT_WORDS // GROUP_WORDS)
        if self.vectors <= self.height:  # registers are scarce: see float_tile.Sums
            weights = [weight(v) for v in range(self.vectors)]
            for r in range(self.height):
                for index in indices:
                    row = value(r, index)
                    for v in range(self.vectors):
                        add(r, v, weights[v], row, index)
        else:
            values = {(r, index): value(r, index) for r in range(self.height) for index in indices}
            for v in range(self.vectors):
                column = weight(v)
                for (r, index), row in values.items():
                    add(r, v, column, row, index)


def add_scaled(builder, total, whole, scale):
    """``total`` and the integer sums, scaled and rounded once."""
    if DOT != "bytes":
        return simd.fma(builder, scale, builder.sitofp(whole, simd.vector(F32)), total)
    product = builder.fsub(builder.bitcast(whole, simd.vector(F32)), scale)  # exact
    return builder.fadd(product, total)


def _parts_of_weights(builder, words):
    """A word of four unsigned bytes in each lane, as `_dot` takes it."""
    if DOT == "bytes":
        return dots.bytes_of_weights(builder, words)
    shorts = simd.vector(I16, 2 * LANES)
    pairs = builder.bitcast(words, shorts)
    evens = builder.and_(pairs, simd.splat_constant(I16, 0xFF, 2 * LANES))
    return [evens, builder.lshr(pairs, simd.splat_constant(I16, 8, 2 * LANES))]


def _parts_of_x(builder, word):
    """A word of x, in every lane."""
    return dots.bytes_of_rows(builder, word) if DOT == "bytes" else [simd.splat(builder, word)]


def _dot(builder, total, weights, values, index):
    """``total`` and the products of four bytes (word 0), or, for pairs, of the two in word ``index``, in each lane."""
    if DOT == "bytes":
        return dots.add_four(builder, total, weights, values, in_register=True)
    return builder.add(total, dots.multiply_pairs(builder, weights[index], values[0]))
