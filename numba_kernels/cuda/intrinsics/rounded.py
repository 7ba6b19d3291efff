"""Float32 arithmetic that no compiler may fuse or reorder, and functions built of it: pairs of floats, exp, log.

`a * b + c` may become one fused operation; these instructions round separately. So `exp` gives the bits of the cpu
kernels' exp, and a pair (high, low), whose value is the sum of both, holds about 45 bits.

Pairs: T. J. Dekker, "A floating-point technique for extending the available precision" (1971), with fused operations.
"""

from __future__ import annotations

from numba import types

from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.convert import f32_from_bits
from numba_kernels.cuda.intrinsics.device import device_function

float32, uint32, uint64, int32 = types.float32, types.uint32, types.uint64, types.int32

add = instruction("add.rn.f32 $0, $1, $2;", "f", "f f", is_pure=True)
subtract = instruction("sub.rn.f32 $0, $1, $2;", "f", "f f", is_pure=True)
multiply = instruction("mul.rn.f32 $0, $1, $2;", "f", "f f", is_pure=True)
divide = instruction("div.rn.f32 $0, $1, $2;", "f", "f f", is_pure=True)
fused = instruction("fma.rn.f32 $0, $1, $2, $3;", "f", "f f f", is_pure=True)  # a * b + c
nearest_integer = instruction("cvt.rni.f32.f32 $0, $1;", "f", "f", is_pure=True)
nearest_u64 = instruction("cvt.rni.u64.f32 $0, $1;", "l", "f", is_pure=True)
count_leading_zeros = instruction("clz.b32 $0, $1;", "r", "r", is_pure=True)
f32_from_u32 = instruction("cvt.rn.f32.u32 $0, $1;", "f", "r", is_pure=True)
_integer_bits = instruction("cvt.rni.s32.f32 $0, $1;", "r", "f", is_pure=True)

_EXP_LOWEST = -87.33654  # ln of the smallest normal float32: below, exp is 0
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4


@device_function
def exp(x):
    """e^x for x <= 0, bit by bit `numba_kernels.cpu.intrinsics.simd.exp`: the expf of the Cephes library, fused."""
    bounded = x if x > float32(_EXP_LOWEST) else float32(_EXP_LOWEST)
    n = nearest_integer(multiply(bounded, float32(1.44269504088896341)))
    r = fused(n, float32(-_LN2_HIGH), x)
    r = fused(n, float32(-_LN2_LOW), r)
    tail = float32(1.9875691500e-4)
    tail = fused(tail, r, float32(1.3981999507e-3))
    tail = fused(tail, r, float32(8.3334519073e-3))
    tail = fused(tail, r, float32(4.1665795894e-2))
    tail = fused(tail, r, float32(1.6666665459e-1))
    tail = fused(tail, r, float32(5.0000001201e-1))
    result = fused(multiply(r, r), tail, add(r, float32(1.0)))
    result = multiply(result, f32_from_bits((_integer_bits(n) + uint32(127)) << uint32(23)))
    return float32(0.0) if x < float32(_EXP_LOWEST) else result


@device_function
def pair(high, low):
    """A pair of the same value whose low part is below the high one's last bit; ``|low| <= |high|``."""
    total = add(high, low)
    return total, subtract(low, subtract(total, high))


@device_function
def pair_product(a, b):
    """The product of two pairs."""
    product = multiply(a[0], b[0])
    rest = fused(a[0], b[0], -product)
    return pair(product, fused(a[0], b[1], fused(a[1], b[0], rest)))


@device_function
def pair_sum(a, b):
    """The sum of two pairs, the first not the smaller."""
    total = add(a[0], b[0])
    rest = subtract(b[0], subtract(total, a[0]))
    return pair(total, add(rest, add(a[1], b[1])))


@device_function
def pair_quotient(a, b):
    """The quotient of two pairs."""
    quotient = divide(a[0], b[0])
    rest = fused(-quotient, b[0], a[0])
    rest = add(rest, fused(-quotient, b[1], a[1]))
    return pair(quotient, divide(rest, b[0]))


@device_function
def exponential_of_word(word):
    """``-ln(1 - u)`` as a pair, u = (word + 0.5) / 2^32: an exponentially distributed number from 32 random bits.

    With 1 - u = (1 - v) / 2^s, 0 < v <= 1/2, it is s ln 2 + 2 artanh(z), where z = v / (2 - v) <= 1/3.
    """
    flipped = word ^ uint32(0xFFFFFFFF)
    remaining = (uint64(flipped) << uint64(1)) | uint64(1)  # of 2^33: 1 - u
    shift = count_leading_zeros(flipped)
    missing = (uint64(1) << uint64(uint32(33) - shift)) - remaining  # of 2^(33 - s): v
    scale = f32_from_bits((uint32(127 - 33) + shift) << uint32(23))  # 2^(s - 33)
    v = pair(
        multiply(f32_from_u32(uint32(missing >> uint64(9))), multiply(float32(512.0), scale)),
        multiply(f32_from_u32(uint32(missing & uint64(511))), scale),
    )
    z = pair_quotient(v, pair_sum((float32(2.0), float32(0.0)), (-v[0], -v[1])))
    square = pair_product(z, z)
    series = (float32(0.0), float32(0.0))
    odd = float32(31.0)  # artanh z = z (1 + z^2 / 3 + ... + z^30 / 31 ...): the next term is below 2^-52
    while odd > float32(0.0):
        series = pair_sum(
            pair_quotient((float32(1.0), float32(0.0)), (odd, float32(0.0))), pair_product(series, square)
        )
        odd = subtract(odd, float32(2.0))
    series = pair_product((add(z[0], z[0]), add(z[1], z[1])), series)
    powers = pair_product(
        (f32_from_u32(shift), float32(0.0)), (float32(0.6931471824645996), float32(-1.9046542121259336e-09))
    )
    return pair_sum(powers, series) if shift > uint32(0) else series
