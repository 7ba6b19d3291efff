"""Float64 arithmetic that no compiler may fuse, and the natural logarithm made of it, as on the CPU."""

from __future__ import annotations

import math

from numba import types

from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function

float64, int32, uint32, uint64 = types.float64, types.int32, types.uint32, types.uint64

add = instruction("add.rn.f64 $0, $1, $2;", "d", "d d", is_pure=True)
subtract = instruction("sub.rn.f64 $0, $1, $2;", "d", "d d", is_pure=True)
multiply = instruction("mul.rn.f64 $0, $1, $2;", "d", "d d", is_pure=True)
divide = instruction("div.rn.f64 $0, $1, $2;", "d", "d d", is_pure=True)
square_root = instruction("sqrt.rn.f64 $0, $1;", "d", "d", is_pure=True)
f64_from_f32 = instruction("cvt.f64.f32 $0, $1;", "d", "f", is_pure=True)
f64_from_u64 = instruction("cvt.rn.f64.u64 $0, $1;", "d", "l", is_pure=True)
f64_from_s32 = instruction("cvt.rn.f64.s32 $0, $1;", "d", "r", is_pure=True)
f32_from_f64 = instruction("cvt.rn.f32.f64 $0, $1;", "f", "d", is_pure=True)
bits_from_f64 = instruction("mov.b64 $0, $1;", "l", "d", is_pure=True)
f64_from_bits = instruction("mov.b64 $0, $1;", "d", "l", is_pure=True)

_LN2, _SQRT2 = math.log(2.0), math.sqrt(2.0)


@device_function
def natural_log(x):
    """ln x of a finite float64 from 1 on: `numba_kernels.cpu.sampler_chain.natural_log`."""
    bits = bits_from_f64(x)
    exponent = int32(uint32(bits >> uint64(52))) - int32(1023)
    mantissa = f64_from_bits((bits & uint64(0xFFFFFFFFFFFFF)) | uint64(0x3FF0000000000000))
    if mantissa > float64(_SQRT2):
        mantissa, exponent = multiply(mantissa, float64(0.5)), exponent + int32(1)
    z = divide(subtract(mantissa, float64(1.0)), add(mantissa, float64(1.0)))
    square, series, odd = multiply(z, z), float64(1.0 / 25.0), float64(23.0)
    while odd > float64(0.0):
        series = add(multiply(series, square), divide(float64(1.0), odd))
        odd = subtract(odd, float64(2.0))
    whole = multiply(f64_from_s32(uint32(exponent)), float64(_LN2))
    return add(whole, multiply(multiply(float64(2.0), z), series))
