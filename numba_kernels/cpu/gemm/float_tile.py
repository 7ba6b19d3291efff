"""The register tile of a matrix product: rows of x times one panel of a packed weight, as LLVM IR.

    out[r, c] = sum_k x[r, k] * panel[k, c] + bias[c] + residual[r, c]        r < rows, c < columns

A row's result does not depend on how many rows were computed with it: every output is one chain of operations in the
order of k, whatever the tile's height. It teaches: the accumulators of an outer product stay in registers, so that
each loaded vector of the weight serves ``rows`` multiply-adds and each broadcast serves TILE_VECTORS.

Panels and operands (`operands`) come in words of 32 bits, neighbours in K. The stored type defines a word's contents:

    float32     one element
    bfloat16    two: a shift and a mask make them floats; or a pair for one vdpbf16ps, where the processor has it
    float16     two, widened by conversion
    int8        four, summed up in integers (`int8_tile`)
    blocks      of ggml's formats and ours: many words, scales among them (`block_tile`, `e4m3_tile`)

A low tile waits for memory. It then takes several neighbouring panels at once: memory delivers several streams a little
faster than one (4 streams: 7 to 10 % on a Xeon).
"""

from __future__ import annotations

import llvmlite.ir as ir
import numpy as np
from numba import from_dtype
from numba.core import cgutils, types
from numba.extending import intrinsic

from numba_kernels.blocks import BLOCKS
from numba_kernels.cpu.gemm.block_tile import BlockSums
from numba_kernels.cpu.gemm.e4m3_tile import UNPACKED, E4m3Sums
from numba_kernels.cpu.gemm.int8_tile import Int8Sums
from numba_kernels.cpu.gemm.unpacked_blocks import PREFIX, UNPACKED_ROWS, UnpackedSums, WideSums
from numba_kernels.cpu.intrinsics import dots, simd
from numba_kernels.cpu.intrinsics.simd import F32, I32, I64
from numba_kernels.cpu.layout import DOT, GEMM_ROWS, PANEL_COLUMNS, ROUNDS_TO_BF16, TILE_VECTORS
from numba_kernels.cpu.target import LANES, compiled_for

_MAX_PANELS = 4
_WORDS = simd.vector(I32)


def panels_at_once(stored, rows: int) -> int:
    """Panels that a lone tile of ``rows`` rows takes together, as far as its accumulators go round: one of blocks."""
    if isinstance(stored, str):
        return 1
    return max(1, min(_MAX_PANELS, GEMM_ROWS // rows))


def gemm_tile_of(stored):
    """The intrinsic for panels of ``stored``: a class, a block's name, or `UNPACKED`."""

    @intrinsic
    def gemm_tile(
        typingctx, x, words, panel, panel_stride, scales, bias, residual, residual_stride, out,
        out_stride, columns, partial, is_first, is_last, ahead, step, panels, rows, x_step, tiles,
    ):  # fmt: skip
        """Computes ``tiles`` tiles of ``rows`` (1..GEMM_ROWS, of blocks in the buffer 1..UNPACKED_ROWS) rows and
        ``panels`` panels (1 or panels_at_once).

        ``x`` (the operands of the first tile's rows, ``x_step`` bytes before the next one's), ``panel``, ``scales`` (of
        int8), ``bias``, ``residual`` (0 = none), ``out`` and ``partial`` are addresses; strides are bytes from row to
        row (from panel to panel). Only ``columns`` columns of ``out`` and ``residual`` are touched. The sum runs over
        ``words`` of K; where K comes in several blocks, all but the last leave their sums in ``partial`` (rows of
        PANEL_COLUMNS) and all but the first take them up. Meanwhile the tile prefetches ``ahead + word * step`` for the
        tile that comes next, of floats and int8 only where it has a single panel.
        """
        index, flag = types.intp, types.boolean
        signature = types.void(*[index] * 12, flag, flag, *[index] * 6)

        def codegen(context, builder, signature, args):
            *given, panels, rows, x_step, tiles = args
            given += x_step, tiles
            done = builder.append_basic_block("tile.done")
            is_integer = isinstance(stored, str) and stored.startswith(PREFIX) and stored != UNPACKED
            most = UNPACKED_ROWS if is_integer else GEMM_ROWS
            shapes = {(height, count) for height in range(1, most + 1) for count in {1, panels_at_once(stored, height)}}
            if is_integer and DOT == "bytes":  # of one panel: as many vectors as have columns
                shapes = {(height, vectors) for height, _ in shapes for vectors in range(1, TILE_VECTORS + 1)}
                columns = given[_OPERANDS.index("columns")]
                panels = builder.sdiv(builder.add(columns, ir.Constant(I64, LANES - 1)), ir.Constant(I64, LANES))
            else:
                shapes = {(height, count * TILE_VECTORS) for height, count in shapes}
                panels = builder.mul(panels, ir.Constant(I64, TILE_VECTORS))
            most_vectors = _MAX_PANELS * TILE_VECTORS
            which = builder.add(builder.mul(rows, ir.Constant(I64, most_vectors + 1)), panels)
            switch = builder.switch(which, done)
            for height, vectors in sorted(shapes):
                block = builder.append_basic_block(f"tile.{height}.{vectors}")
                switch.add_case(ir.Constant(I64, height * (most_vectors + 1) + vectors), block)
                builder.position_at_end(block)
                builder.call(_tiles_of(builder.module, stored, height, vectors, [each.type for each in given]), given)
                builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return signature, codegen

    return gemm_tile


_OPERANDS = (
    "x", "words", "panel", "panel_stride", "scales", "bias", "residual", "residual_stride", "out", "out_stride",
    "columns", "partial", "is_first", "is_last", "ahead", "step",
)  # fmt: skip


def _tiles_of(module, stored, height, vectors, kinds):
    """A function of _OPERANDS, the bytes from one tile's operands to the next one's, and the number of tiles: apart, so
    that each shape has the registers to itself, and no tile waits for what goes on around it."""
    kind = ir.FunctionType(ir.VoidType(), kinds)
    function = ir.Function(module, kind, module.get_unique_name(f"tiles.{height}.{vectors}"))
    function.linkage = "internal"
    function.attributes.add("noinline")
    *given, x_step, tiles = function.args
    first = dict(zip(_OPERANDS, given))
    builder = ir.IRBuilder(function.append_basic_block("entry"))

    with cgutils.for_range(builder, tiles, intp=I64) as loop:

        def moved(name, size_bytes):
            return builder.add(first[name], builder.mul(loop.index, size_bytes))

        row = builder.mul(loop.index, ir.Constant(I64, height))
        residual = builder.add(first["residual"], builder.mul(row, first["residual_stride"]))
        has_residual = builder.icmp_signed("!=", first["residual"], ir.Constant(I64, 0))
        operands = {
            **first,
            "x": moved("x", x_step),
            "residual": builder.select(has_residual, residual, ir.Constant(I64, 0)),
            "out": builder.add(first["out"], builder.mul(row, first["out_stride"])),
            "partial": moved("partial", ir.Constant(I64, height * PANEL_COLUMNS * 4)),
            "ahead": moved("ahead", builder.mul(first["words"], first["step"])),
        }
        _Tile(_new_sums(stored, height, vectors), -(-vectors // TILE_VECTORS), **operands).emit(builder)
    builder.ret_void()
    return function


def _new_sums(stored, height, vectors):
    if stored in ("fp8", UNPACKED):
        sums = _new_sums(np.uint16 if ROUNDS_TO_BF16 else np.float32, height, vectors)
        return E4m3Sums(sums, is_unpacked=stored == UNPACKED)
    if isinstance(stored, str) and stored.startswith(PREFIX):
        return (WideSums if DOT == "bytes" else UnpackedSums)(stored, height, vectors)
    if stored in BLOCKS:
        return BlockSums(stored, height, vectors)
    if stored is np.uint8:
        return Int8Sums(height, vectors)
    make = BF16Sums if stored is np.uint16 and ROUNDS_TO_BF16 else Sums
    return make(from_dtype(np.dtype(stored)), height, vectors)


class Sums:
    """The accumulators of ``height`` rows and ``vectors`` vectors, and how a word of K adds to them: here as the
    products of its elements, one after another, in float32."""

    is_scaled = False

    def __init__(self, stored, height, vectors):
        self.stored = stored
        self.height = height
        self.vectors = vectors
        self.places = [(r, v) for r in range(height) for v in range(vectors)]
        self.elements = 32 // stored.bitwidth

    def open(self, builder):
        self.registers = {rv: cgutils.alloca_once(builder, simd.vector(F32)) for rv in self.places}

    def accumulate(self, builder, tile):
        """Adds the tile's words of K."""
        row_bytes = self.height * self.elements * 4
        with cgutils.for_range(builder, tile.words, intp=I64) as loop:
            at = builder.add(tile.x, builder.mul(loop.index, ir.Constant(I64, row_bytes)))
            self.add_word(builder, at, tile.weight_places(builder, loop.index))

    def add_word(self, builder, x_at, weight_places):
        """Registers are scarce: the accumulators take most of them. So only one element of each word is at hand, and
        either all rows' values or all vectors, whichever are fewer."""
        for element in range(self.elements):
            if element:
                simd.forget_loads(builder)

            def value(r, element=element):
                place = simd.offset(builder, x_at, (element * self.height + r) * 4)
                return simd.splat(builder, simd.load(builder, place, F32, 4))

            def weight(v, element=element):
                return self._widened(builder, weight_places[v], element)

            def add(r, v, value, weight):
                register = self.registers[r, v]
                builder.store(simd.fma(builder, value, weight, builder.load(register)), register)

            if self.vectors <= self.height:
                weights = [weight(v) for v in range(self.vectors)]
                for r in range(self.height):
                    row = value(r)
                    for v in range(self.vectors):
                        add(r, v, row, weights[v])
            else:
                values = [value(r) for r in range(self.height)]
                for v in range(self.vectors):
                    column = weight(v)
                    for r in range(self.height):
                        add(r, v, values[r], column)

    def _widened(self, builder, place, element):
        """An element of each lane's word, as a vector of floats."""
        if self.stored == types.float32:
            return simd.load(builder, place, simd.vector(F32), 4)
        if self.stored == types.uint16 and element and compiled_for("avx512bw"):  # a load that leaves the rest out
            upper = ir.Constant(simd.vector(simd.I1, 2 * LANES), [0, 1] * LANES)
            return builder.bitcast(simd.masked_load(builder, place, upper, simd.I16), simd.vector(F32))
        words = simd.load(builder, place, _WORDS, 4)
        sixteen = simd.splat_constant(I32, 16)
        if self.stored == types.uint16:
            mask = simd.splat_constant(I32, 0xFFFF0000)
            return builder.bitcast(
                builder.and_(words, mask) if element else builder.shl(words, sixteen), simd.vector(F32)
            )
        half = builder.lshr(words, sixteen) if element else words
        return simd.widen(builder, builder.trunc(half, simd.vector(simd.I16)), self.stored)


class BF16Sums(Sums):
    """Pairs of bfloat16 on both sides; an instruction adds both products of a pair."""

    def __init__(self, stored, height, vectors):
        super().__init__(stored, height, vectors)
        self.elements = 1  # words of x a word of the weight

    def add_word(self, builder, x_at, weight_places):
        weights = [simd.load(builder, place, _WORDS, 4) for place in weight_places]
        for r in range(self.height):
            place = simd.offset(builder, x_at, r * 4)
            pair = simd.splat(builder, simd.load(builder, place, I32, 4))
            for v in range(self.vectors):
                register = self.registers[r, v]
                builder.store(dots.add_bf16_pairs(builder, builder.load(register), pair, weights[v]), register)


class _Tile:
    """The operands of a tile, as IR values; `emit` writes its code."""

    def __init__(self, sums, panels, **operands):
        self.sums = sums
        self.panels = panels
        self.__dict__.update(operands)

    def emit(self, builder):
        sums = self.sums
        sums.open(builder)
        partials = {rv: simd.offset(builder, self.partial, i * LANES * 4) for i, rv in enumerate(sums.places)}
        with builder.if_else(self.is_first) as (begins, resumes):
            with begins:
                for rv in sums.places:
                    builder.store(simd.splat_constant(F32, 0.0), sums.registers[rv])
            with resumes:
                for rv in sums.places:
                    builder.store(simd.load(builder, partials[rv], simd.vector(F32), 4), sums.registers[rv])

        with builder.if_then(self.is_last):
            self._fetch_results(builder)
        sums.accumulate(builder, self)

        with builder.if_else(self.is_last) as (ends, goes_on):
            with ends:
                self._finish(builder)
            with goes_on:
                for rv in sums.places:
                    simd.store(builder, builder.load(sums.registers[rv]), partials[rv])

    def _fetch_results(self, builder):
        """Prefetches the lines of results and residuals, which lie in as many places as there are rows. Residuals go no
        nearer than panels do: rows whose distance is a power of two share a few sets of the first-level cache."""

        def fetch(base, stride, prefetch):
            for r in range(self.sums.height):
                row = builder.add(base, builder.mul(stride, ir.Constant(I64, r)))
                for v in range(self.sums.vectors):
                    prefetch(builder, simd.offset(builder, row, v * LANES * 4))

        fetch(self.out, self.out_stride, simd.prefetch_to_write)
        for v in range(self.sums.vectors):
            simd.prefetch(builder, simd.offset(builder, self.bias, v * LANES * 4), is_near=True)
            if self.sums.is_scaled:
                simd.prefetch(builder, simd.offset(builder, self.scales, v * LANES * 4), is_near=True)
        with builder.if_then(builder.icmp_signed("!=", self.residual, ir.Constant(I64, 0))):
            fetch(self.residual, self.residual_stride, simd.prefetch)

    def weight_places(self, builder, word):
        """Addresses of a word's vectors in all panels; prefetches."""
        row_bytes = builder.mul(word, ir.Constant(I64, PANEL_COLUMNS * 4))
        places = []
        for panel in range(self.panels):
            start = builder.add(self.panel, builder.mul(self.panel_stride, ir.Constant(I64, panel)))
            at = builder.add(start, row_bytes)
            places += [simd.offset(builder, at, v * LANES * 4) for v in range(TILE_VECTORS)]
        if self.panels == 1:
            simd.prefetch(builder, builder.add(self.ahead, builder.mul(word, self.step)))
        return places

    def _finish(self, builder):
        """Scales, adds bias and residual, and writes the columns that exist."""
        sums = self.sums
        masks = [simd.lanes_below(builder, v * LANES, self.columns) for v in range(sums.vectors)]

        def of_columns(base):
            places = [simd.offset(builder, base, v * LANES * 4) for v in range(sums.vectors)]
            return [simd.load(builder, place, simd.vector(F32), 4) for place in places]

        def place(base, stride, r, v):
            row = builder.add(base, builder.mul(stride, ir.Constant(I64, r)))
            return simd.offset(builder, row, v * LANES * 4)

        biases = of_columns(self.bias)
        scales = of_columns(self.scales) if sums.is_scaled else None
        for (_, v), register in sums.registers.items():
            total = builder.load(register)
            if scales is not None:
                builder.store(simd.fma(builder, total, scales[v], biases[v]), register)
            else:
                builder.store(builder.fadd(total, biases[v]), register)
        with builder.if_then(builder.icmp_signed("!=", self.residual, ir.Constant(I64, 0))):
            for (r, v), register in sums.registers.items():
                added = simd.masked_load(builder, place(self.residual, self.residual_stride, r, v), masks[v])
                builder.store(builder.fadd(builder.load(register), added), register)
        for (r, v), register in sums.registers.items():
            simd.masked_store(builder, builder.load(register), place(self.out, self.out_stride, r, v), masks[v])
