"""Functions of float32 out of the special function unit's instructions and a few multiplications, and of uint32.

Numba's own `math` functions bring float64 or a library's slow paths with them; so does its arithmetic of uint32.
"""

from __future__ import annotations

from numba import float32

from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function

exp2 = instruction("ex2.approx.ftz.f32 $0, $1;", "f", "f", is_pure=True)  # relative error 2^-22; 0 below 2^-126
log2 = instruction("lg2.approx.ftz.f32 $0, $1;", "f", "f", is_pure=True)  # absolute error 2^-22 near 1
reciprocal = instruction("rcp.approx.ftz.f32 $0, $1;", "f", "f", is_pure=True)  # 1 unit in the last place
divide = instruction("div.rn.f32 $0, $1, $2;", "f", "f f", is_pure=True)
fma = instruction("fma.rn.f32 $0, $1, $2, $3;", "f", "f f f", is_pure=True)
reciprocal_sqrt = instruction("rsqrt.approx.f32 $0, $1;", "f", "f", is_pure=True)  # relative error 2^-22.9
absolute = instruction("abs.f32 $0, $1;", "f", "f", is_pure=True)

maximum_nan = instruction("max.NaN.f32 $0, $1, $2;", "f", "f f", is_pure=True)  # NaN where either is
minimum_nan = instruction("min.NaN.f32 $0, $1, $2;", "f", "f f", is_pure=True)

divide_u32 = instruction("div.u32 $0, $1, $2;", "r", "r r", is_pure=True)
maximum_u32 = instruction("max.u32 $0, $1, $2;", "r", "r r", is_pure=True)
minimum_u32 = instruction("min.u32 $0, $1, $2;", "r", "r r", is_pure=True)

_LOG2_E = 1.4426950408889634


@device_function
def exp(x):
    """e^x; 0 below -87.3, infinite above 88.7, NaN for NaN. The product with log2 e is split in two, since its error
    would be multiplied by x."""
    x = minimum_nan(maximum_nan(x, float32(-104)), float32(104))
    high = x * float32(_LOG2_E)
    low = fma(x, float32(_LOG2_E), -high)
    low = fma(x, float32(1.925963033500e-8), low)  # what float32 leaves of log2 e
    return exp2(high) * fma(low, float32(0.6931471805599453), float32(1))


@device_function
def sigmoid(x):
    """1 / (1 + e^-x); 0 and 1 far out, NaN for NaN."""
    return divide(float32(1), float32(1) + exp(-x))


@device_function
def log(x):
    """Natural logarithm of a positive normal number; -inf at 0, NaN below."""
    return log2(x) * float32(0.6931471805599453)
