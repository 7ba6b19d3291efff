"""Between float32 and the 16-bit formats, alone and in pairs (the first of a pair in the low half).

Rounding is to nearest, ties to even; float16 overflows to infinity. PTX ISA, "cvt", "prmt".
"""

from __future__ import annotations

from numba import types

from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function

# The first operand becomes the high half.
_pack_bf16 = instruction("cvt.rn.bf16x2.f32 $0, $1, $2;", "r", "f f", is_pure=True)
_pack_f16 = instruction("cvt.rn.f16x2.f32 $0, $1, $2;", "r", "f f", is_pure=True)
bf16_from_f32 = instruction("cvt.rn.bf16.f32 $0, $1;", "h", "f", is_pure=True)
f16_from_f32 = instruction("cvt.rn.f16.f32 $0, $1;", "h", "f", is_pure=True)
f32_from_f16 = instruction("cvt.f32.f16 $0, $1;", "f", "h", is_pure=True)
f32_from_bits = instruction("mov.b32 $0, $1;", "f", "r", is_pure=True)
bits_from_f32 = instruction("mov.b32 $0, $1;", "r", "f", is_pure=True)
_halves = instruction("mov.b32 {$0, $1}, $2;", "hh", "r", is_pure=True)


@device_function
def f32_from_bf16(code):
    """bfloat16 is the upper half of float32."""
    return f32_from_bits(types.uint32(code) << types.uint32(16))


@device_function
def pack_bf16(low, high):
    """Two float32 → a pair of bfloat16."""
    return _pack_bf16(high, low)


@device_function
def pack_f16(low, high):
    """Two float32 → a pair of float16."""
    return _pack_f16(high, low)


@device_function
def unpack_bf16(pair):
    """A pair of bfloat16 → two float32."""
    return f32_from_bits(pair << types.uint32(16)), f32_from_bits(pair & types.uint32(0xFFFF0000))


@device_function
def unpack_f16(pair):
    """A pair of float16 → two float32."""
    halves = _halves(pair)
    return f32_from_f16(halves[0]), f32_from_f16(halves[1])


@device_function
def split_tf32(value):
    """A float32 → two codes of tf32, whose sum has 22 of its 24 bits."""
    high = bits_from_f32(value) & types.uint32(0xFFFFE000)
    return high, bits_from_f32(value - f32_from_bits(high)) & types.uint32(0xFFFFE000)
