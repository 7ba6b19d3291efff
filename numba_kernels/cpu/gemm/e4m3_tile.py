"""Sums of products with blocks of e4m3, for the register tile; x stays as it is, or becomes pairs of bfloat16.

    total += scale of the block * sum over its elements, in the order of K, of x * number            in float32

A low tile multiplies numbers as it unpacks them. For more rows some blocks of a panel are unpacked once
(`unpack_blocks`) to a buffer in the first-level cache, where rows meet them as they meet a weight of floats
(`float_tile.Sums`): a block there is its scales and its words of all columns, one after another. Where the layout
has pairs of bfloat16, numbers become such pairs, exactly, and x is rounded to them.

A number's shifted bits are those of a float that is 2^120 times smaller, subnormals too; a multiplication restores it.
With AVX512-VBMI two tables of 128 bytes give bfloat16 at once, 64 numbers at a time.
"""

from __future__ import annotations

import llvmlite.ir as ir
import ml_dtypes
import numpy as np
from numba.core import cgutils, types

from numba_kernels.blocks import BLOCKS
from numba_kernels.cpu.intrinsics import dots, simd
from numba_kernels.cpu.intrinsics.emitted import emitted
from numba_kernels.cpu.intrinsics.simd import F32, I8, I32, I64, i64
from numba_kernels.cpu.layout import PANEL_COLUMNS, ROUNDS_TO_BF16, TILE_VECTORS
from numba_kernels.cpu.target import HAS_BF16_DOT, LANES, compiled_for

_SMALLER = 2.0**120  # by the exponents' biases, 127 and 7
BLOCK = BLOCKS["fp8"]
UNPACKED = "unpacked fp8"
"""The tile's name of blocks in the buffer."""

PARTS = 2 if ROUNDS_TO_BF16 else 4  # that a word of codes becomes
_FIRST_WORD = BLOCK.places["q"] // 4
_CODE_WORDS = BLOCK.words - _FIRST_WORD
UNPACKED_WORDS = 1 + _CODE_WORDS * PARTS  # of a block and a column, in the buffer
_LINES = PANEL_COLUMNS * 4 // 64  # of a word of all columns
_HAS_BYTE_TABLES = HAS_BF16_DOT and compiled_for("avx512vbmi")
_BYTES = LANES * 4  # of a vector
_WORDS, _FLOATS = simd.vector(I32), simd.vector(F32)


class E4m3Sums:
    """The accumulators of a tile and how blocks of e4m3 add to them; as `float_tile.Sums`, of which ``sums`` adds up a
    block: of words of pairs of bfloat16 or of float32."""

    is_scaled = False

    def __init__(self, sums, *, is_unpacked):
        self.sums = sums
        self.is_unpacked = is_unpacked
        self.words = UNPACKED_WORDS if is_unpacked else BLOCK.words
        self.places = sums.places
        self.height, self.vectors = sums.height, sums.vectors

    def open(self, builder):
        self.sums.open(builder)
        memory = cgutils.alloca_once(builder, ir.ArrayType(_FLOATS, len(self.places)))
        memory.align = 64
        self.registers = {rv: builder.gep(memory, [i64(0), i64(i)]) for i, rv in enumerate(self.places)}
        self.totals_at = builder.ptrtoint(memory, I64)  # which keeps them in memory: blocks' sums need the registers

    def accumulate(self, builder, tile):
        """Adds the tile's words of K."""
        num_blocks = builder.sdiv(tile.words, i64(self.words))
        with cgutils.for_range(builder, num_blocks, intp=I64) as loop:
            at = builder.add(tile.panel, builder.mul(loop.index, i64(self.words * PANEL_COLUMNS * 4)))
            ahead = builder.add(tile.ahead, builder.mul(builder.mul(loop.index, i64(self.words)), tile.step))
            x_at = builder.add(tile.x, builder.mul(loop.index, i64(_CODE_WORDS * PARTS * self.height * 4)))
            for register in self.sums.registers.values():
                builder.store(simd.splat_constant(F32, 0.0), register)
            if self.is_unpacked:
                self._add_unpacked(builder, at, x_at, ahead, tile.step)
            else:
                self._add_words(builder, at, x_at, ahead, tile.step)
            for v in range(self.vectors):
                scale = simd.load(builder, simd.offset(builder, at, v * self._vector_bytes), _FLOATS, 4)
                for r in range(self.height):
                    place = simd.offset(builder, self.totals_at, self.places.index((r, v)) * _BYTES)
                    total = simd.load(builder, place, _FLOATS, 64)
                    total = simd.fma(builder, builder.load(self.sums.registers[r, v]), scale, total)
                    simd.store(builder, total, place, 64)

    @property
    def _vector_bytes(self):
        """Bytes from a scale to that of the next vector of columns."""
        return _BYTES if self.is_unpacked else BLOCK.words * _BYTES

    def _add_words(self, builder, at, x_at, ahead, step):
        """A block as it is stored, times rows from ``x_at`` on. As much is prefetched from ``ahead`` on, ``step`` bytes
        a word."""
        kind, add = (I32, dots.add_bf16_pairs) if ROUNDS_TO_BF16 else (F32, _add_product)
        with cgutils.for_range(builder, simd.not_unrolled(builder, _CODE_WORDS), intp=I64) as word:
            _prefetch(builder, builder.add(ahead, builder.mul(word.index, step)), step, _LINES)
            numbers = [_parts(builder, codes) for codes in _codes(builder, at, word.index, self.vectors)]
            x_word = builder.add(x_at, builder.mul(word.index, i64(PARTS * self.height * 4)))
            for index in range(PARTS):
                for r in range(self.height):
                    place = simd.offset(builder, x_word, (index * self.height + r) * 4)
                    value = simd.splat(builder, simd.load(builder, place, kind, 4))
                    for v in range(self.vectors):
                        register = self.sums.registers[r, v]
                        builder.store(add(builder, builder.load(register), value, numbers[v][index]), register)

    def _add_unpacked(self, builder, at, x_at, ahead, step):
        """The same for a block in the buffer."""
        with cgutils.for_range(builder, i64(_CODE_WORDS * PARTS), intp=I64) as part:
            words_at = builder.add(at, builder.mul(part.index, i64(PANEL_COLUMNS * 4)))
            places = [simd.offset(builder, words_at, (self.vectors + v) * _BYTES) for v in range(self.vectors)]
            _prefetch(builder, builder.add(ahead, builder.mul(part.index, step)), step, -(-_LINES // PARTS))
            self.sums.add_word(builder, builder.add(x_at, builder.mul(part.index, i64(self.height * 4))), places)


@emitted(types.void, *[types.intp] * 3)
def unpack_blocks(builder, source, words, target):
    """``words`` words of a panel, whole blocks, to the buffer."""
    num_blocks = builder.sdiv(words, i64(BLOCK.words))
    with cgutils.for_range(builder, num_blocks, intp=I64) as loop:
        at = builder.add(source, builder.mul(loop.index, i64(BLOCK.words * PANEL_COLUMNS * 4)))
        place = builder.add(target, builder.mul(loop.index, i64(UNPACKED_WORDS * PANEL_COLUMNS * 4)))
        for v in range(TILE_VECTORS):
            scale = simd.load(builder, simd.offset(builder, at, v * BLOCK.words * _BYTES), _FLOATS, 4)
            simd.store(builder, scale, simd.offset(builder, place, v * _BYTES))
        with cgutils.for_range(builder, simd.not_unrolled(builder, _CODE_WORDS), intp=I64) as word:
            words_at = builder.add(place, builder.mul(word.index, i64(PARTS * PANEL_COLUMNS * 4)))
            for v, codes in enumerate(_codes(builder, at, word.index, TILE_VECTORS)):
                for index, part in enumerate(_parts(builder, codes)):
                    inside = ((index + 1) * TILE_VECTORS + v) * _BYTES
                    simd.store(builder, part, simd.offset(builder, words_at, inside))


def _prefetch(builder, at, step, lines):
    """Prefetches so many lines, ``step`` bytes in all."""
    for _ in range(lines):
        simd.prefetch(builder, at)
        at = builder.add(at, builder.sdiv(step, i64(lines)))


def _codes(builder, at, word, vectors):
    """A word of the block at ``at``, in each vector of columns."""
    at = builder.add(at, builder.mul(word, i64(_BYTES)))
    return [
        simd.load(builder, simd.offset(builder, at, (v * BLOCK.words + _FIRST_WORD) * _BYTES), _WORDS, 4)
        for v in range(vectors)
    ]


def _add_product(builder, total, value, number):
    return simd.fma(builder, value, number, total)


def _parts(builder, codes):
    """A word of codes in each lane, converted to factors."""
    return _pairs(builder, codes) if ROUNDS_TO_BF16 else _floats(builder, codes)


def _floats(builder, codes):
    """The numbers, one vector for each byte of the words."""
    found = []
    for byte in range(4):
        upper = builder.shl(codes, simd.splat_constant(I32, 24 - 8 * byte))
        bits = builder.ashr(upper, simd.splat_constant(I32, 4))  # the sign five times, then the other bits
        bits = builder.and_(bits, simd.splat_constant(I32, 0x87F00000))
        found.append(builder.fmul(builder.bitcast(bits, _FLOATS), simd.splat_constant(F32, _SMALLER)))
    return found


def _pairs(builder, codes):
    """The same as words of two bfloat16, of bytes 0 and 1, and of 2 and 3."""
    if _HAS_BYTE_TABLES:
        return _pairs_by_tables(builder, codes)
    bits = [builder.bitcast(number, _WORDS) for number in _floats(builder, codes)]
    upper, sixteen = simd.splat_constant(I32, 0xFFFF0000), simd.splat_constant(I32, 16)
    return [
        builder.or_(builder.and_(bits[second], upper), builder.lshr(bits[second - 1], sixteen)) for second in (1, 3)
    ]


def _pairs_by_tables(builder, codes):
    count = 4 * LANES
    kind = simd.vector(I8, count)
    # Each quarter of a register: the first two bytes of its four words, then the other two, for the unpacking.
    order = [
        16 * quarter + 4 * word + 2 * pair + byte
        for quarter in range(count // 16) for pair in range(2) for word in range(4) for byte in range(2)
    ]  # fmt: skip
    codes = builder.bitcast(codes, kind)
    codes = builder.shuffle_vector(codes, codes, ir.Constant(simd.vector(I32, count), order))
    low, high = (_look_up(builder, codes, table) for table in _TABLES)
    high = builder.or_(high, builder.and_(codes, ir.Constant(kind, [0x80] * count)))
    found = []
    for start in (0, 8):
        order = [
            16 * quarter + start + byte + side * count
            for quarter in range(count // 16) for byte in range(8) for side in range(2)
        ]  # fmt: skip
        joined = builder.shuffle_vector(low, high, ir.Constant(simd.vector(I32, count), order))
        found.append(builder.bitcast(joined, _WORDS))
    return found


def _tables():
    """The lower and the upper byte of the bfloat16 of each of 128 codes without a sign."""
    numbers = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    numbers[127] = 480.0  # NaN, which panels have none of
    bits = numbers.astype(ml_dtypes.bfloat16).view(np.uint16)
    return (bits & 0xFF).tolist(), (bits >> 8).tolist()


_TABLES = _tables()


def _look_up(builder, codes, table):
    """The bytes of a table at the lower 7 bits of each code."""
    kind = codes.type
    lower, upper = (ir.Constant(kind, table[first : first + 64]) for first in (0, 64))
    return simd.call(builder, "llvm.x86.avx512.vpermi2var.qi.512", kind, [lower, codes, upper])
