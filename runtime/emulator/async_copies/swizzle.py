"""Shared memory's swizzles: permutations of the 16-byte chunks of a 128-byte line.

The 32-, 64- and 128-byte modes exchange chunks within lines by address bits alone: bits 4 (… 5, … 6) are XORed with
bits 7 (… 8, … 9). The numbers of the modes are those of tensor maps; wgmma's descriptors count them the other way.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba_kernels.cache import njit

SWIZZLE_NONE, SWIZZLE_32, SWIZZLE_64, SWIZZLE_128 = range(4)
SWIZZLE_BYTES = (16, 32, 64, 128)  # the widest row of each mode; 16: chunks stay where they are


@njit
def swizzled(address, mode):
    """The shared address of the data under a mode (0 … 3)."""
    return address ^ ((address >> 7) & ((1 << mode) - 1)) << 4
