"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

A draw is a pure function of key and counter, so that it does not matter which thread, batch or device makes it.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


@njit(nogil=True)
def philox(c0, c1, c2, c3, k0, k1):
    """Four words of 32 random bits (as uint32) for a counter of four and a key of two uint32 words."""
    for _ in range(10):
        product0 = _MULTIPLIERS[0] * np.uint64(c0)
        product1 = _MULTIPLIERS[1] * np.uint64(c2)
        c0 = np.uint32(product1 >> _SHIFT) ^ c1 ^ k0
        c2 = np.uint32(product0 >> _SHIFT) ^ c3 ^ k1
        c1 = np.uint32(product1 & _LOW)
        c3 = np.uint32(product0 & _LOW)
        k0 = np.uint32(k0 + _KEY_STEPS[0])
        k1 = np.uint32(k1 + _KEY_STEPS[1])
    return c0, c1, c2, c3
