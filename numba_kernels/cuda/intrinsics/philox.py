"""Philox4x32-10, as `numba_kernels.cpu.intrinsics.scalars`: the same words from the same counter and key."""

from __future__ import annotations

from numba import types

from numba_kernels.cuda.intrinsics.device import device_function

uint32, uint64 = types.uint32, types.uint64


@device_function
def philox(c0, c1, c2, c3, k0, k1):
    """Four words of 32 random bits for a counter of four and a key of two uint32 words."""
    rounds = uint32(0)
    while rounds < uint32(10):
        product0 = uint64(0xD2511F53) * uint64(c0)
        product1 = uint64(0xCD9E8D57) * uint64(c2)
        c0 = uint32(uint32(product1 >> uint64(32)) ^ c1 ^ k0)
        c2 = uint32(uint32(product0 >> uint64(32)) ^ c3 ^ k1)
        c1 = uint32(product1)
        c3 = uint32(product0)
        k0 = uint32(k0 + uint32(0x9E3779B9))
        k1 = uint32(k1 + uint32(0xBB67AE85))
        rounds = uint32(rounds + uint32(1))
    return c0, c1, c2, c3
