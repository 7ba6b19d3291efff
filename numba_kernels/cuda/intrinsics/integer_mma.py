"""Tensor-core products of bytes as integers, on whole arrays of registers; see `fragments.multiply_all`.

    multiply = multiply_integers(((0, (0, 1, 2, 3), (0, 1)),))
    multiply(sums, a, b)        # sums[0:4] += A, of words a[0] to a[3], times B, of words b[0], b[1]

16x8x32, int8 by int8, summed in int32. A word has 4 neighbours along K: with g = lane // 4 and t = lane % 4, A's words
are rows g, g + 8, g, g + 8 at 4t, 4t, 4t + 16, 4t + 16; B's column g at 4t and 4t + 16. PTX ISA, "mma.sync".
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import functools
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.cuda.extending import intrinsic

from numba_kernels.cuda.intrinsics.asm import instruction

f32_from_s32 = instruction("cvt.rn.f32.s32 $0, $1;", "f", "r", is_pure=True)
nearest_s32 = instruction("cvt.rni.s32.f32 $0, $1;", "r", "f", is_pure=True)
"""NaN becomes 0."""

_WORD = ir.IntType(32)
_TEXT = (
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$0,$1,$2,$3};"
)  # fmt: skip


@functools.cache
def multiply_integers(plan: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]) -> Any:
    """A function ``(sums, a, b) -> None`` on arrays of uint32: each entry of `plan` is one product, in their order."""
    function_type = ir.FunctionType(ir.LiteralStructType([_WORD] * 4), [_WORD] * 10)
    assembly = ir.InlineAsm(function_type, _TEXT, "=r,=r,=r,=r,r,r,r,r,r,r,0,1,2,3", side_effect=False)

    def generate(context, builder, signature, arguments):
        def place(which: int, index: int) -> Any:
            data = context.make_array(signature.args[which])(context, builder, arguments[which]).data
            return builder.gep(data, [ir.Constant(_WORD, index)])

        for first, a, b in plan:
            places = [place(0, first + index) for index in range(4)]
            operands = [place(1, index) for index in a] + [place(2, index) for index in b] + places
            result = builder.call(assembly, [builder.load(each) for each in operands])
            for index, target in enumerate(places):
                builder.store(builder.extract_value(result, index), target)
        return context.get_dummy_value()

    return intrinsic(lambda typing_context, sums, a, b: (types.void(sums, a, b), generate))
