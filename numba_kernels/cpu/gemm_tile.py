"""The register tile of a matrix product: rows of x times one panel of a packed weight, as LLVM IR.

    out[r, c] = sum_k x[r, k] * panel[k, c] + bias[c] + residual[r, c]        r < rows, c < columns

Every output is one chain of fused multiply-adds in the order of k, whatever the tile's height: a row's result does not
depend on how many rows were computed with it. What it teaches: the accumulators of an outer product stay in registers,
so that each loaded vector of the weight serves ``rows`` multiply-adds and each broadcast serves TILE_VECTORS.

A low tile waits for memory. It then takes several neighbouring panels at once: memory delivers several streams a little
faster than one (4 streams: 7 to 10 % on a Xeon).
"""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from numba_kernels.cpu import simd
from numba_kernels.cpu.simd import F32, I64
from numba_kernels.cpu.target import GEMM_ROWS, LANES, PANEL_COLUMNS, TILE_VECTORS

_MAX_PANELS = 4


def panels_at_once(rows: int) -> int:
    """Panels that a lone tile of ``rows`` rows takes together, as far as its accumulators go round."""
    return max(1, min(_MAX_PANELS, GEMM_ROWS // rows))


@intrinsic
def gemm_tile(
    typingctx, stored, x, x_stride, depth, panel, panel_stride, bias, residual, out, out_stride, columns, partial,
    is_first, is_last, ahead, step, panels, rows,
):  # fmt: skip
    """Computes one tile of ``rows`` (1..GEMM_ROWS) rows and ``panels`` panels (1 or panels_at_once(rows)).

    ``x``, ``panel``, ``bias``, ``residual`` (0 = none), ``out`` and ``partial`` are addresses; strides are bytes
    from row to row (from panel to panel), that of ``residual`` being ``out_stride``. Only ``columns`` columns of
    ``out`` and ``residual`` are touched. The sum runs over ``depth`` elements of K; where K comes in several blocks,
    all but the last leave their sums in ``partial`` (rows of PANEL_COLUMNS) and all but the first take them up.
    Meanwhile the tile of a single panel prefetches ``ahead + k * step`` for the tile that comes next.
    """
    index, flag = types.intp, types.boolean
    signature = types.void(
        stored, index, index, index, index, index, index, index, index, index, index, index, flag, flag, index, index,
        index, index,
    )  # fmt: skip

    def codegen(context, builder, signature, args):
        names = "x x_stride depth panel panel_stride bias residual out out_stride columns partial is_first is_last"
        operands = dict(zip(f"{names} ahead step".split(), args[1:]))
        done = builder.append_basic_block("tile.done")
        shapes = {(height, count) for height in range(1, GEMM_ROWS + 1) for count in (1, panels_at_once(height))}
        which = builder.add(builder.mul(args[-1], ir.Constant(I64, _MAX_PANELS + 1)), args[-2])
        switch = builder.switch(which, done)
        for height, count in sorted(shapes):
            block = builder.append_basic_block(f"tile.{height}.{count}")
            switch.add_case(ir.Constant(I64, height * (_MAX_PANELS + 1) + count), block)
            builder.position_at_end(block)
            _Tile(stored.instance_type, height, count, **operands).emit(builder)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return signature, codegen


class _Tile:
    """The operands of a tile, as IR values; `emit` writes its code."""

    def __init__(self, stored, height, panels, **operands):
        self.stored = stored
        self.height = height
        self.panels = panels
        self.vectors = panels * TILE_VECTORS
        self.registers = [(r, v) for r in range(height) for v in range(self.vectors)]
        self.__dict__.update(operands)

    def emit(self, builder):
        sums = {rv: cgutils.alloca_once(builder, simd.vector(F32)) for rv in self.registers}
        partials = {rv: simd.offset(builder, self.partial, i * LANES * 4) for i, rv in enumerate(self.registers)}

        with builder.if_else(self.is_first) as (begins, resumes):
            with begins:
                for rv in self.registers:
                    builder.store(simd.splat_constant(F32, 0.0), sums[rv])
            with resumes:
                for rv in self.registers:
                    builder.store(simd.load(builder, partials[rv], simd.vector(F32), 4), sums[rv])

        with cgutils.for_range(builder, self.depth, intp=I64) as loop:
            self._multiply(builder, sums, loop.index)

        with builder.if_else(self.is_last) as (ends, goes_on):
            with ends:
                self._finish(builder, sums)
            with goes_on:
                for rv in self.registers:
                    simd.store(builder, builder.load(sums[rv]), partials[rv])

    def _multiply(self, builder, sums, k):
        """Adds the products of element ``k`` of K."""
        item_bytes = self.stored.bitwidth // 8
        row_bytes = builder.mul(k, ir.Constant(I64, PANEL_COLUMNS * item_bytes))
        weights = []
        for panel in range(self.panels):
            start = builder.add(self.panel, builder.mul(self.panel_stride, ir.Constant(I64, panel)))
            at = builder.add(start, row_bytes)
            for v in range(TILE_VECTORS):
                place = simd.offset(builder, at, v * LANES * item_bytes)
                weights.append(simd.load_wide(builder, place, self.stored))
        if self.panels == 1:
            simd.prefetch(builder, builder.add(self.ahead, builder.mul(k, self.step)))
        x_at = builder.add(self.x, builder.mul(k, ir.Constant(I64, 4)))
        for r in range(self.height):
            place = builder.add(x_at, builder.mul(self.x_stride, ir.Constant(I64, r)))
            value = simd.splat(builder, simd.load(builder, place, F32, 4))
            for v in range(self.vectors):
                builder.store(simd.fma(builder, value, weights[v], builder.load(sums[r, v])), sums[r, v])

    def _finish(self, builder, sums):
        """Adds bias and residual and writes the columns that exist."""
        rows = [builder.mul(self.out_stride, ir.Constant(I64, r)) for r in range(self.height)]
        masks = [simd.lanes_below(builder, v * LANES, self.columns) for v in range(self.vectors)]
        biases = [
            simd.load(builder, simd.offset(builder, self.bias, v * LANES * 4), simd.vector(F32), 4)
            for v in range(self.vectors)
        ]

        def place(base, r, v):
            return simd.offset(builder, builder.add(base, rows[r]), v * LANES * 4)

        for (_, v), register in sums.items():
            builder.store(builder.fadd(builder.load(register), biases[v]), register)
        with builder.if_then(builder.icmp_signed("!=", self.residual, ir.Constant(I64, 0))):
            for (r, v), register in sums.items():
                added = simd.masked_load(builder, place(self.residual, r, v), masks[v])
                builder.store(builder.fadd(builder.load(register), added), register)
        for (r, v), register in sums.items():
            simd.masked_store(builder, builder.load(register), place(self.out, r, v), masks[v])
