"""The register tile of a matrix product: rows of x times one panel of a packed weight, as LLVM IR.

    out[r, c] = sum_k x[r, k] * panel[k, c] + bias[c] + residual[r, c]        r < rows, c < columns

Every output is one chain of fused multiply-adds in the order of k, whatever the tile's height: a row's result does not
depend on how many rows were computed with it. What it teaches: the accumulators of an outer product stay in registers,
so that each loaded vector of the weight serves ``rows`` multiply-adds and each broadcast serves TILE_VECTORS.
"""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from numba_kernels.cpu import simd
from numba_kernels.cpu.simd import F32, I64
from numba_kernels.cpu.target import LANES, PANEL_COLUMNS, TILE_ROWS, TILE_VECTORS


@intrinsic
def gemm_tile(
    typingctx, stored, x, x_stride, depth, panel, bias, residual, out, out_stride, columns, partial, is_first, is_last,
    ahead, step, rows,
):  # fmt: skip
    """Computes one tile of ``rows`` (1..TILE_ROWS) rows over ``depth`` elements of K.

    ``x``, ``panel``, ``bias``, ``residual`` (0 = none), ``out`` and ``partial`` are addresses; strides are bytes
    from row to row, that of ``residual`` being ``out_stride``. Only ``columns`` columns of ``out`` and ``residual`` are
    touched. Where K comes in several blocks, all but the last leave their sums in ``partial`` (rows of PANEL_COLUMNS)
    and all but the first take them up. Meanwhile the tile prefetches ``ahead + k * step`` for the tile that comes next.
    """
    index, flag = types.intp, types.boolean
    signature = types.void(
        stored, index, index, index, index, index, index, index, index, index, index, flag, flag, index, index, index
    )

    def codegen(context, builder, signature, args):
        names = "x x_stride depth panel bias residual out out_stride columns partial is_first is_last ahead step"
        tile = _Tile(stored.instance_type, **dict(zip(names.split(), args[1:])))
        done = builder.append_basic_block("tile.done")
        heights = [builder.append_basic_block(f"tile.{height}") for height in range(1, TILE_ROWS + 1)]
        switch = builder.switch(args[-1], done)
        for height, block in enumerate(heights, start=1):
            switch.add_case(ir.Constant(I64, height), block)
            builder.position_at_end(block)
            tile.emit(builder, height)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return signature, codegen


class _Tile:
    """The operands of a tile, as IR values; `emit` writes the code for one height."""

    def __init__(self, stored, **operands):
        self.stored = stored
        self.__dict__.update(operands)

    def emit(self, builder, height):
        registers = [(r, v) for r in range(height) for v in range(TILE_VECTORS)]
        sums = {rv: cgutils.alloca_once(builder, simd.vector(F32)) for rv in registers}
        partials = {rv: simd.offset(builder, self.partial, i * LANES * 4) for i, rv in enumerate(registers)}

        with builder.if_else(self.is_first) as (begins, resumes):
            with begins:
                for rv in registers:
                    builder.store(simd.splat_constant(F32, 0.0), sums[rv])
            with resumes:
                for rv in registers:
                    builder.store(simd.load(builder, partials[rv], simd.vector(F32), 4), sums[rv])

        stored_bytes = self.stored.bitwidth // 8
        x_rows = [builder.add(self.x, builder.mul(self.x_stride, ir.Constant(I64, r))) for r in range(height)]
        with cgutils.for_range(builder, self.depth, intp=I64) as loop:
            at = builder.add(self.panel, builder.mul(loop.index, ir.Constant(I64, PANEL_COLUMNS * stored_bytes)))
            weights = [
                simd.load_wide(builder, simd.offset(builder, at, v * LANES * stored_bytes), self.stored)
                for v in range(TILE_VECTORS)
            ]
            simd.prefetch(builder, builder.add(self.ahead, builder.mul(loop.index, self.step)))
            k_bytes = builder.mul(loop.index, ir.Constant(I64, 4))
            values = [simd.splat(builder, simd.load(builder, builder.add(row, k_bytes), F32, 4)) for row in x_rows]
            for r, v in registers:
                total = simd.fma(builder, values[r], weights[v], builder.load(sums[r, v]))
                builder.store(total, sums[r, v])

        with builder.if_else(self.is_last) as (ends, goes_on):
            with ends:
                self._finish(builder, height, sums)
            with goes_on:
                for rv in registers:
                    simd.store(builder, builder.load(sums[rv]), partials[rv])

    def _finish(self, builder, height, sums):
        """Adds bias and residual and writes the columns that exist."""
        rows = [builder.mul(self.out_stride, ir.Constant(I64, r)) for r in range(height)]
        masks = [simd.lanes_below(builder, v * LANES, self.columns) for v in range(TILE_VECTORS)]
        biases = [
            simd.load(builder, simd.offset(builder, self.bias, v * LANES * 4), simd.vector(F32), 4)
            for v in range(TILE_VECTORS)
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
