"""Helpers of the compiled loops: eight bytes at once, hashes.

Texts and tables are passed as addresses (`numba_kernels.pointers`). Hashes are unsigned: numba makes a float of a
signed and an unsigned number.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import intrinsic

PADDING = 8
"""Bytes after every text, since its end is read eight bytes at a time."""

ZERO = np.uint64(0)
NOTHING = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)  # 2**64 divided by the golden ratio
_EIGHT, _TWENTY_NINE, _THIRTY_TWO = np.uint64(8), np.uint64(29), np.uint64(32)


@intrinsic
def load_u64(typing_context, pointer, offset):
    """``load_u64(pointer, offset)``: the eight bytes at byte `offset`."""

    def generate(context, builder, signature, arguments):
        start = builder.bitcast(arguments[0], ir.IntType(8).as_pointer())
        place = builder.gep(start, [arguments[1]])
        return builder.load(builder.bitcast(place, ir.IntType(64).as_pointer()), align=1)

    return types.uint64(pointer, types.int64), generate


@njit
def chunk_at(text, start, size):
    """The first `size` (1 to 8) of the eight bytes at `start`; zeros for the others."""
    return load_u64(text, start) & (NOTHING >> (_EIGHT * np.uint64(8 - size)))


@njit
def _mix(state, value):
    state = (state ^ value) * _MULTIPLIER
    return state ^ (state >> _TWENTY_NINE)


@njit
def hash_bytes(text, start, end):
    """A hash of `text[start:end]`."""
    state = np.uint64(end - start)
    while end - start > 8:
        state = _mix(state, load_u64(text, start))
        start += 8
    if end > start:
        state = _mix(state, chunk_at(text, start, end - start))
    return _mix(state, _MULTIPLIER)


@njit
def are_equal(text, start, other, other_start, size):
    """Whether two runs of `size` bytes are equal."""
    while size > 8:
        if load_u64(text, start) != load_u64(other, other_start):
            return False
        start += 8
        other_start += 8
        size -= 8
    return size == 0 or chunk_at(text, start, size) == chunk_at(other, other_start, size)


@njit
def pair_key(left, right):
    """Two symbols as one number."""
    return np.uint64(left) << _THIRTY_TWO | np.uint64(right)


@njit
def pair_slot(key, shift):
    """The first slot of a pair in a table of 2**(64 - shift) entries."""
    return np.int64((key * _MULTIPLIER) >> np.uint64(shift))
