"""Tensor-core products of bytes, on whole arrays of registers; see `fragments.multiply_all`.

    multiply = multiply_bytes("s8", ((0, (0, 1, 2, 3), (0, 1)),))
    multiply(sums, a, b)        # sums[0:4] += A, of words a[0] to a[3], times B, of words b[0], b[1]

16x8x32: int8 summed in int32, or e4m3 (sm_89 on) in float32, of which hardware may keep fewer bits. A word has 4
neighbours along K: with g = lane // 4 and t = lane % 4, A's words are rows g, g + 8, g, g + 8 at 4t, 4t, 4t + 16, 4t +
16; B's column g at 4t and 4t + 16. PTX ISA, "mma.sync".
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import functools
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.cuda.extending import intrinsic

from numba_kernels.cuda.intrinsics.asm import call, instruction

f32_from_s32 = instruction("cvt.rn.f32.s32 $0, $1;", "f", "r", is_pure=True)
nearest_s32 = instruction("cvt.rni.s32.f32 $0, $1;", "r", "f", is_pure=True)
"""NaN becomes 0."""
e4m3_pair = instruction(
    "{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $1, $2; cvt.u32.u16 $0, t; }", "r", "f f", is_pure=True
)
"""``(high, low)`` -> two bytes, to nearest even, 448 at most (sm_89 on)."""

_WORD = ir.IntType(32)
_SUMS = {"s8": ("s32", _WORD, "r"), "e4m3": ("f32", ir.FloatType(), "f")}


@functools.cache
def multiply_bytes(element: str, plan: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]) -> Any:
    """A function ``(sums, a, b) -> None``: each entry of `plan` is one product, in their order.

    Args:
        element: "s8", whose sums are an array of uint32, or "e4m3", float32; a and b are uint32.
    """
    kind, sum_type, letter = _SUMS[element]
    text = f"mma.sync.aligned.m16n8k32.row.col.{kind}.{element}.{element}.{kind} "
    text += "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$0,$1,$2,$3};"
    function_type = ir.FunctionType(ir.LiteralStructType([sum_type] * 4), [_WORD] * 6 + [sum_type] * 4)
    outputs = ",".join([f"={letter}"] * 4)
    assembly = ir.InlineAsm(function_type, text, f"{outputs},r,r,r,r,r,r,0,1,2,3", side_effect=False)

    def generate(context, builder, signature, arguments):
        def place(which: int, index: int) -> Any:
            data = context.make_array(signature.args[which])(context, builder, arguments[which]).data
            return builder.gep(data, [ir.Constant(_WORD, index)])

        for first, a, b in plan:
            places = [place(0, first + index) for index in range(4)]
            operands = [place(1, index) for index in a] + [place(2, index) for index in b] + places
            result = call(builder, assembly, [builder.load(each) for each in operands])
            for index, target in enumerate(places):
                builder.store(builder.extract_value(result, index), target)
        return context.get_dummy_value()

    return intrinsic(lambda typing_context, sums, a, b: (types.void(sums, a, b), generate))
