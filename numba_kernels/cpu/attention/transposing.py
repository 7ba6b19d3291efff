"""Rows of latent pages, transposed into columns of float32, as `tile.score_tile` reads keys."""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from numba_kernels.cpu.attention.tile import CHUNK_TOKENS, HALF_TOKENS
from numba_kernels.cpu.gemm.packed_words import transposed
from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.simd import F32, I64
from numba_kernels.cpu.target import LANES


@intrinsic
def transpose_rows(typingctx, stored, source, width, target):
    """``target[d, t] = source[t, d]`` for HALF_TOKENS rows of ``width`` elements, a multiple of LANES.

    ``source`` has elements of ``stored``, rows one after the other; ``target`` float32 rows of CHUNK_TOKENS, of which
    the first HALF_TOKENS are written. Both are addresses.
    """
    kind = stored.instance_type
    signature = types.void(stored, *[types.intp] * 3)

    def codegen(context, builder, signature, args):
        _, source, width, target = args
        itemsize = kind.bitwidth // 8
        row_bytes = builder.mul(width, ir.Constant(I64, itemsize))
        low = ir.Constant(simd.vector(simd.I32, HALF_TOKENS), list(range(HALF_TOKENS)))
        nothing = simd.splat_constant(simd.I32, 0)
        turns = builder.sdiv(width, ir.Constant(I64, LANES))
        with cgutils.for_range(builder, turns, intp=I64) as loop:
            first = builder.mul(loop.index, ir.Constant(I64, LANES))
            at = builder.add(source, builder.mul(first, ir.Constant(I64, itemsize)))
            rows = []
            for row in range(HALF_TOKENS):
                place = builder.add(at, builder.mul(row_bytes, ir.Constant(I64, row)))
                floats = simd.load_wide(builder, place, kind, LANES)
                rows.append(builder.bitcast(floats, simd.vector(simd.I32)))
            out = builder.add(target, builder.mul(first, ir.Constant(I64, CHUNK_TOKENS * 4)))
            for number, column in enumerate(transposed(builder, rows + [nothing] * (LANES - HALF_TOKENS))):
                half = builder.bitcast(builder.shuffle_vector(column, column, low), simd.vector(F32, HALF_TOKENS))
                simd.store(builder, half, simd.offset(builder, out, number * CHUNK_TOKENS * 4))
        return context.get_dummy_value()

    return signature, codegen
