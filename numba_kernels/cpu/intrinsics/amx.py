"""AMX tiles: eight registers of up to 16 rows of 64 bytes, and the product of two of them, as LLVM IR.

`Tiles` emits ``ldtilecfg``, ``tileloadd``, ``tdpbf16ps`` and their kin. Where a kind of tile is emulated it emits the
same on memory, with the rounding of the instructions, so that results are the same to the bit.

    tdpbf16ps  C[m, n] += sum over k of A[m, k] . B[k, n]: words of K are pairs of bfloat16. The products of a pair's
               lower elements and those of its upper ones are two chains of fused multiply-adds from zero, in the order
               of k; their sum is added to C. Numbers below the smallest normal float32 are zero everywhere.
    tdpbsud    the same with words of four bytes, signed in A and unsigned in B, exact in int32

Source: Intel's Architecture Instruction Set Extensions Programming Reference (319433), chapters 3 and 5. A processor
that has tiles gives them to a process only after it has asked Linux (`target`).
"""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils

from numba_kernels.cpu.intrinsics import dots, simd
from numba_kernels.cpu.intrinsics.simd import F32, I8, I16, I32, I64
from numba_kernels.cpu.target import HAS_AMX, LANES

TILE_ROWS = 16
"""Rows of a tile register; of C, and words of K in B."""

_NUM_TILES = 8
_ROW_BYTES = LANES * 4
_TILE_BYTES = TILE_ROWS * _ROW_BYTES
_WORDS, _FLOATS = simd.vector(I32), simd.vector(F32)


class Tiles:
    """The tile registers of one piece of code. Numbers of tiles are Python's; rows, addresses and strides, in bytes,
    are IR values (i64)."""

    def __init__(self, builder, *, is_emulated=not HAS_AMX):
        self.builder = builder
        self.is_emulated = is_emulated
        config = cgutils.alloca_once(builder, ir.ArrayType(I8, 64))
        config.align = 64
        self.config = builder.ptrtoint(config, I64)
        if is_emulated:
            memory = cgutils.alloca_once(builder, ir.ArrayType(ir.ArrayType(_WORDS, TILE_ROWS), _NUM_TILES))
            memory.align = 64
            self.memory = builder.ptrtoint(memory, I64)

    def configure(self, rows, sums, left, right, words):
        """Gives the tiles ``sums`` (C) and ``left`` (A) so many ``rows``, and those of ``left`` and ``right`` (B) so
        many ``words`` of K (Python's, at most TILE_ROWS). All tiles become zero."""
        builder = self.builder
        self.resume(rows, words)
        if self.is_emulated:
            return
        byte = builder.trunc(rows, I8)
        builder.store(ir.Constant(simd.vector(I8, 64), [0] * 64), self._pointer(self.config, simd.vector(I8, 64)))
        self._set(0, ir.Constant(I8, 1))  # the palette
        for tile in (*sums, *left, *right):
            self._set(48 + tile, ir.Constant(I8, words) if tile in right else byte)
            self._set(16 + 2 * tile, ir.Constant(I16, words * 4 if tile in left else _ROW_BYTES))
        self._call("ldtilecfg", self._pointer(self.config, I8))

    def resume(self, rows, words):
        """Takes up tiles that other code has configured for at least so many ``rows``, and ``words``."""
        self.rows, self.words = rows, words

    def release(self):
        """Gives the tiles back: a thread without them is cheaper to switch."""
        if not self.is_emulated:
            self._call("tilerelease")

    def zero(self, tile):
        """Makes a tile of sums zero."""
        if not self.is_emulated:
            self._call("tilezero", ir.Constant(I8, tile))
            return
        with cgutils.for_range(self.builder, self.rows, intp=I64) as row:
            simd.store(self.builder, ir.Constant(_WORDS, [0] * LANES), self._row(tile, row.index))

    def load_left(self, tile, address, stride):
        """A tile of A, whose rows lie ``stride`` bytes apart: no more than their words is read."""
        if not self.is_emulated:
            self._move("tileloadd64", tile, address, stride)
            return
        mask = simd.lanes_below(self.builder, 0, _i64(self.words))
        with cgutils.for_range(self.builder, self.rows, intp=I64) as row:
            at = self.builder.add(address, self.builder.mul(row.index, stride))
            simd.store(self.builder, simd.masked_load(self.builder, at, mask, I32), self._row(tile, row.index))

    def load_right(self, tile, address, stride):
        """A tile of B: rows are words of K."""
        self._load(tile, address, stride, _i64(self.words))

    def load_sums(self, tile, address, stride):
        """A tile of C."""
        self._load(tile, address, stride, self.rows)

    def store_sums(self, tile, address, stride):
        """Writes a tile of C."""
        if not self.is_emulated:
            self._move("tilestored64", tile, address, stride)
            return
        with cgutils.for_range(self.builder, self.rows, intp=I64) as row:
            at = self.builder.add(address, self.builder.mul(row.index, stride))
            simd.store(self.builder, simd.load(self.builder, self._row(tile, row.index), _WORDS, 4), at)

    def add_pairs(self, sums, left, right):
        """``tdpbf16ps``."""
        if not self.is_emulated:
            self._call("tdpbf16ps", *(ir.Constant(I8, tile) for tile in (sums, left, right)))
            return
        builder = self.builder

        def add(place):
            chains = [cgutils.alloca_once(builder, _FLOATS) for _ in range(2)]
            for chain in chains:
                builder.store(simd.splat_constant(F32, 0.0), chain)
            with self._words(place, left, right) as (a, b):
                for chain, half in zip(chains, dots.halves_of_pairs(builder, simd.splat(builder, a), b), strict=True):
                    builder.store(dots.flushed_fma(builder, *half, builder.load(chain)), chain)
            added = dots.flushed_sum(builder, *map(builder.load, chains))
            at = self._row(sums, place)
            total = dots.flushed_sum(builder, simd.load(builder, at, _FLOATS, 4), added)
            simd.store(builder, total, at)

        with cgutils.for_range(builder, self.rows, intp=I64) as row:
            add(row.index)

    def add_bytes(self, sums, left, right):
        """``tdpbsud``: A signed, B unsigned."""
        if not self.is_emulated:
            self._call("tdpbsud", *(ir.Constant(I8, tile) for tile in (sums, left, right)))
            return
        builder = self.builder
        with cgutils.for_range(builder, self.rows, intp=I64) as row:
            at = self._row(sums, row.index)
            total = cgutils.alloca_once(builder, _WORDS)
            builder.store(simd.load(builder, at, _WORDS, 4), total)
            with self._words(row.index, left, right) as (a, b):
                weights, values = dots.bytes_of_weights(builder, b), dots.bytes_of_rows(builder, a)
                builder.store(dots.add_four(builder, builder.load(total), weights, values), total)
            simd.store(builder, builder.load(total), at)

    def _words(self, row, left, right):
        """A loop over K: a word of A's row and the words of all of B's columns."""
        return _Words(self, row, left, right)

    def _load(self, tile, address, stride, rows):
        if not self.is_emulated:
            self._move("tileloadd64", tile, address, stride)
            return
        with cgutils.for_range(self.builder, rows, intp=I64) as row:
            at = self.builder.add(address, self.builder.mul(row.index, stride))
            simd.store(self.builder, simd.load(self.builder, at, _WORDS, 4), self._row(tile, row.index))

    def _row(self, tile, row):
        start = simd.offset(self.builder, self.memory, tile * _TILE_BYTES)
        return self.builder.add(start, self.builder.mul(row, _i64(_ROW_BYTES)))

    def _set(self, at, value):
        simd.store(self.builder, value, simd.offset(self.builder, self.config, at), 1)

    def _pointer(self, address, kind):
        return self.builder.inttoptr(address, kind.as_pointer())

    def _move(self, name, tile, address, stride):
        self._call(name, ir.Constant(I8, tile), self._pointer(address, I8), stride)

    def _call(self, name, *arguments):
        simd.call(self.builder, f"llvm.x86.{name}", ir.VoidType(), list(arguments))


class _Words:
    """The context of `Tiles._words`."""

    def __init__(self, tiles, row, left, right):
        self.tiles, self.row, self.left, self.right = tiles, row, left, right

    def __enter__(self):
        builder = self.tiles.builder
        self.loop = cgutils.for_range(builder, _i64(self.tiles.words), intp=I64)
        word = self.loop.__enter__().index
        at = builder.add(self.tiles._row(self.left, self.row), builder.mul(word, _i64(4)))
        a = simd.load(builder, at, I32, 4)
        return a, simd.load(builder, self.tiles._row(self.right, word), _WORDS, 4)

    def __exit__(self, *error):
        return self.loop.__exit__(*error)


def _i64(value):
    return ir.Constant(I64, value)
