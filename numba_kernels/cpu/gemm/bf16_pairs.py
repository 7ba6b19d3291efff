"""The product that adds two neighbours of bfloat16 at once: by vdpbf16ps, or spelled out."""

from __future__ import annotations

import llvmlite.binding as llvm
import llvmlite.ir as ir

from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.simd import F32, I32
from numba_kernels.cpu.target import HAS_BF16_DOT


def add_pairs(builder, total, pairs, weights):
    """``total`` and the products of two pairs in each lane."""
    return (by_instruction if HAS_BF16_DOT else spelled_out)(builder, total, pairs, weights)


def by_instruction(builder, total, pairs, weights):
    """The same on AVX512-BF16."""
    llvm.initialize_native_asmparser()
    kind = ir.FunctionType(total.type, [total.type, pairs.type, weights.type])
    return builder.call(ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v"), [total, pairs, weights])


def spelled_out(builder, total, pairs, weights):
    """The same without the instruction: the upper elements' product is added first, then the lower ones'.

    The instruction takes numbers below the smallest normal one for zero; here they count.
    """
    lanes = total.type.count
    mask, sixteen = simd.splat_constant(I32, 0xFFFF0000, lanes), simd.splat_constant(I32, 16, lanes)
    for half in (lambda words: builder.and_(words, mask), lambda words: builder.shl(words, sixteen)):
        a, b = (builder.bitcast(half(words), simd.vector(F32, lanes)) for words in (pairs, weights))
        total = simd.fma(builder, a, b, total)
    return total
