"""Sums of products with ggml's blocks (`blocks`), for the register tile: integers within a group, then scaled.

x is rounded to int8 by groups of 32 (`arranged_rows.arrange_blocks`). Weights are unsigned bytes in registers: nibbles
and pairs of bits are unpacked there, Q8_0's have 128 added. The integer sum of a group of weights is exact; it begins
at the weights' zero times the sum of x, below zero. Then

    total += (scale of x * scale of the group) * integer sum - (scale of x * sum of x) * minimum of the group

in float32 and in the order of K. vpdpbusd multiplies and adds four pairs of bytes; vpmaddubsw's sums of two products
have 16 bits, which those of nibbles and of six bits fit. Q8_0's would not: without vpdpbusd its magnitudes are
multiplied, and x has the weights' signs.
"""

from __future__ import annotations

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numpy as np
from numba.core import cgutils, types

from numba_kernels.cpu.gemm.blocks import BLOCKS, X_GROUP
from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.simd import F32, I8, I16, I32, I64
from numba_kernels.cpu.target import DOT, LANES

X_WORDS = X_GROUP // 4  # of bytes
X_ROW_WORDS = X_WORDS + 3  # with the scale, and the sums of both halves

_WORDS = simd.vector(I32)
_BY_NUMBA_TYPE = {types.int8: np.int8, types.uint32: np.uint32, types.int32: np.int32, types.int64: np.int64}


def is_block(kind):
    """Whether a numba type stands for a format of blocks."""
    return kind in _BY_NUMBA_TYPE


class BlockSums:
    """The accumulators of a tile and how blocks add to them; as `float_tile.Sums`."""

    is_scaled = False

    def __init__(self, stored, height, vectors):
        self.block = BLOCKS[_BY_NUMBA_TYPE[stored]]
        self.height = height
        self.vectors = vectors
        self.places = [(r, v) for r in range(height) for v in range(vectors)]
        self.num_groups = self.block.elements // self.block.group
        self.has_signs = self.block.name == "Q8_0" and DOT == "madd"  # weights are signed bytes then
        self.zero = 0 if self.has_signs else self.block.zero
        self.short_words = {"Q8_0": 1, "Q6_K": 2}.get(self.block.name, 8)  # whose sums fit 16 bits: 2 * 127 * 15 * 8

    def open(self, builder):
        floats = simd.vector(F32)
        self.registers = {rv: cgutils.alloca_once(builder, floats) for rv in self.places}
        self.whole = {rv: cgutils.alloca_once(builder, _WORDS) for rv in self.places}
        table = ir.ArrayType(floats, self.num_groups * self.vectors)
        self.scales = cgutils.alloca_once(builder, table)
        self.minima = cgutils.alloca_once(builder, table) if self.block.has_minima else None

    def accumulate(self, builder, words, x, weights_at):
        block_words, row_words = self.block.words, self.block.elements // X_GROUP * X_ROW_WORDS
        with cgutils.for_range(builder, builder.sdiv(words, _i64(block_words)), intp=I64) as loop:
            at = builder.add(x, builder.mul(loop.index, _i64(row_words * self.height * 4)))
            first = builder.mul(loop.index, _i64(block_words))

            def load(word, first=first):
                word = word if isinstance(word, ir.Value) else _i64(word)
                return [simd.load(builder, place, _WORDS, 4) for place in weights_at(builder.add(first, word))]

            self._unpack_scales(builder, load)
            with cgutils.for_range(builder, _i64(self.num_groups), intp=I64) as groups:
                self._add_group(builder, groups.index, at, load)

    def _unpack_scales(self, builder, load):
        """The group's scales and minima as floats, on the stack."""
        heads = load(0)
        name = self.block.name
        packed = [load(word) for word in range(1, {"Q4_K": 4, "Q6_K": 5}.get(name, 1))]
        for v in range(self.vectors):
            low, high = _half(builder, heads[v], 0), _half(builder, heads[v], 16)
            if name == "Q4_K":
                first, second, third = (word[v] for word in packed)
                for group in range(8):
                    shift = group % 4 * 8
                    if group < 4:
                        bits = _bits(builder, first, shift, 63), _bits(builder, second, shift, 63)
                    else:
                        bits = tuple(
                            builder.or_(
                                _bits(builder, third, shift + nibble, 15),
                                builder.shl(_bits(builder, word, shift + 6, 3), simd.splat_constant(I32, 4)),
                            )
                            for nibble, word in ((0, first), (4, second))
                        )
                    for table, factor, value in zip((self.scales, self.minima), (low, high), bits, strict=True):
                        product = builder.fmul(factor, builder.sitofp(value, simd.vector(F32)))
                        builder.store(product, self._entry(builder, table, _i64(group), v))
                continue
            for group in range(self.num_groups):
                scale = (low, high)[group % 2]
                if name == "Q6_K":
                    up = builder.shl(packed[group // 4][v], simd.splat_constant(I32, 24 - group % 4 * 8))
                    signed = builder.ashr(up, simd.splat_constant(I32, 24))
                    scale = builder.fmul(low, builder.sitofp(signed, simd.vector(F32)))
                builder.store(scale, self._entry(builder, self.scales, _i64(group), v))

    def _entry(self, builder, table, group, v):
        index = builder.add(builder.mul(group, _i64(self.vectors)), _i64(v))
        return builder.gep(table, [_i64(0), index])

    def _add_group(self, builder, group, x_at, load):
        words = self.block.group // 4
        of_x = builder.sdiv(group, _i64(X_WORDS // words))  # the group of x
        half = builder.srem(group, _i64(2))
        x_at = builder.add(x_at, builder.mul(of_x, _i64(X_ROW_WORDS * self.height * 4)))

        def row(word, r):
            return simd.offset(builder, x_at, (word * self.height + r) * 4)

        scales = [simd.load(builder, row(X_WORDS, r), F32, 4) for r in range(self.height)]
        if words == X_WORDS:
            bytes_at = x_at
            halves = [[simd.load(builder, row(X_WORDS + 1 + i, r), I32, 4) for i in (0, 1)] for r in range(self.height)]
            sums = [builder.add(*both) for both in halves]
        else:
            moved = builder.mul(half, _i64(self.height * 4))
            bytes_at = builder.add(x_at, builder.mul(moved, _i64(words)))
            sums = [simd.load(builder, builder.add(row(X_WORDS + 1, r), moved), I32, 4) for r in range(self.height)]
        for r in range(self.height):
            start = builder.mul(sums[r], ir.Constant(I32, -self.zero))
            for v in range(self.vectors):
                builder.store(simd.splat(builder, start), self.whole[r, v])
        short = {}  # sums of 16 bits, by row and vector, until they might overflow
        for word in range(words):
            weights = [self._operand(builder, each) for each in self._bytes(builder, group, word, load)]
            for r in range(self.height):
                place = simd.offset(builder, bytes_at, (word * self.height + r) * 4)
                value = simd.splat(builder, simd.load(builder, place, I32, 4))
                for v in range(self.vectors):
                    if DOT == "madd":
                        short[r, v] = self._add_pairs(builder, short.get((r, v)), weights[v], value)
                    else:
                        total = builder.load(self.whole[r, v])
                        builder.store(self._dot(builder, total, weights[v], value), self.whole[r, v])
            if (word + 1) % self.short_words == 0:
                for place, pairs in short.items():
                    whole = builder.add(builder.load(self.whole[place]), _joined(builder, pairs))
                    builder.store(whole, self.whole[place])
                short.clear()
        for v in range(self.vectors):
            scale = builder.load(self._entry(builder, self.scales, group, v))
            minimum = builder.load(self._entry(builder, self.minima, group, v)) if self.minima is not None else None
            for r in range(self.height):
                register = self.registers[r, v]
                total = builder.sitofp(builder.load(self.whole[r, v]), simd.vector(F32))
                both = builder.fmul(simd.splat(builder, scales[r]), scale)
                result = simd.fma(builder, both, total, builder.load(register))
                if minimum is not None:
                    below = builder.fneg(builder.fmul(scales[r], builder.sitofp(sums[r], F32)))
                    result = simd.fma(builder, simd.splat(builder, below), minimum, result)
                builder.store(result, register)

    def _bytes(self, builder, group, word, load):
        """Word ``word`` of a group: four elements as unsigned bytes (signed ones of Q8_0 where x takes their signs)."""

        def nibbles(words, shift):
            shifted = [builder.lshr(each, _splat(builder, shift)) for each in words]
            return [builder.and_(each, simd.splat_constant(I32, 0x0F0F0F0F)) for each in shifted]

        name = self.block.name
        if name == "Q8_0":
            words = load(builder.add(builder.mul(group, _i64(8)), _i64(1 + word)))
            if self.has_signs:
                return words
            return [builder.xor(each, simd.splat_constant(I32, 0x80808080)) for each in words]
        if name == "Q4_0":
            words = load(builder.add(builder.mul(group, _i64(4)), _i64(1 + word % 4)))
            return nibbles(words, ir.Constant(I32, word // 4 * 4))
        if name == "Q4_K":
            chunk, which = builder.sdiv(group, _i64(2)), builder.srem(group, _i64(2))
            words = load(builder.add(builder.mul(chunk, _i64(8)), _i64(4 + word)))
            return nibbles(words, builder.trunc(builder.mul(which, _i64(4)), I32))
        half, quarter = builder.sdiv(group, _i64(8)), builder.srem(builder.sdiv(group, _i64(2)), _i64(4))
        place = builder.add(builder.mul(builder.srem(group, _i64(2)), _i64(4)), _i64(word))
        at = builder.add(builder.mul(half, _i64(16)), builder.mul(builder.srem(quarter, _i64(2)), _i64(8)))
        low = nibbles(
            load(builder.add(builder.add(at, place), _i64(5))),
            builder.trunc(builder.mul(builder.sdiv(quarter, _i64(2)), _i64(4)), I32),
        )
        shift = _splat(builder, builder.trunc(builder.mul(quarter, _i64(2)), I32))
        high = load(builder.add(builder.add(builder.mul(half, _i64(8)), place), _i64(37)))
        for v, each in enumerate(high):
            pairs = builder.and_(builder.lshr(each, shift), simd.splat_constant(I32, 0x03030303))
            low[v] = builder.or_(low[v], builder.shl(pairs, simd.splat_constant(I32, 4)))
        return low

    def _operand(self, builder, word):
        """What a word of weights is multiplied as: itself, its halves of registers, or four integers."""
        if DOT == "vnni":
            return [word]
        if DOT == "madd":
            halves = _halves(builder, word)
            if not self.has_signs:
                return [(each, None) for each in halves]
            return [(_sign(builder, each, each), each) for each in halves]
        shifted = [builder.lshr(word, simd.splat_constant(I32, 8 * byte)) for byte in range(4)]
        return [builder.and_(each, simd.splat_constant(I32, 0xFF)) for each in shifted]

    def _dot(self, builder, total, weights, values):
        """``total`` and the products of four bytes in each lane; by vpdpbusd or plainly."""
        if DOT == "vnni":
            llvm.initialize_native_asmparser()
            kind = ir.FunctionType(_WORDS, [_WORDS, _WORDS, _WORDS])
            return builder.call(ir.InlineAsm(kind, "vpdpbusd $3, $2, $0", "=v,0,v,v"), [total, weights[0], values])
        for byte, weight in enumerate(weights):
            up = builder.shl(values, simd.splat_constant(I32, 24 - 8 * byte))
            total = builder.add(total, builder.mul(weight, builder.ashr(up, simd.splat_constant(I32, 24))))
        return total

    @staticmethod
    def _add_pairs(builder, sums, weights, values):
        """The sums of 16 bits and the products of two bytes in each half lane, a vector for each half."""
        found = []
        for half, ((weight, signs), x) in enumerate(zip(weights, _halves(builder, values), strict=True)):
            x = x if signs is None else _sign(builder, x, signs)
            pairs = simd.call(builder, "llvm.x86.avx2.pmadd.ub.sw", simd.vector(I16), [weight, x])
            found.append(pairs if sums is None else builder.add(sums[half], pairs))
        return found


def _joined(builder, halves):
    """Neighbouring sums of 16 bits added up, one for each lane."""
    ones, kind = simd.splat_constant(I16, 1), simd.vector(I32, LANES // 2)
    sums = [simd.call(builder, "llvm.x86.avx2.pmadd.wd", kind, [half, ones]) for half in halves]
    return builder.shuffle_vector(*sums, ir.Constant(_WORDS, list(range(LANES))))


def _i64(value):
    return ir.Constant(I64, value)


def _splat(builder, value):
    return simd.splat(builder, value)


def _bits(builder, words, shift, mask):
    return builder.and_(builder.lshr(words, simd.splat_constant(I32, shift)), simd.splat_constant(I32, mask))


def _half(builder, words, shift):
    """The float16 at these bits of each word, as float32."""
    bits = builder.trunc(builder.lshr(words, simd.splat_constant(I32, shift)), simd.vector(I16))
    return simd.widen(builder, bits, types.int16)


def _halves(builder, words):
    """A vector of words as two of bytes that AVX2's registers hold."""
    parts = []
    for first in (0, LANES // 2):
        order = ir.Constant(simd.vector(I32, LANES // 2), list(range(first, first + LANES // 2)))
        parts.append(builder.bitcast(builder.shuffle_vector(words, words, order), simd.vector(I8, 2 * LANES)))
    return parts


def _sign(builder, values, signs):
    """The values with the sign of ``signs``, and 0 where those are."""
    return simd.call(builder, "llvm.x86.avx2.psign.b", simd.vector(I8, 2 * LANES), [values, signs])
