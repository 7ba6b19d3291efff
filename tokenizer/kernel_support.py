"""What the compiled loops share: eight bytes at once from any place, a hash of bytes, a hash of a pair.

Everything is unsigned and of 64 bits; numba would make a float of a signed and an unsigned number together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic as _intrinsic

from numba_kernels.cache import njit

intrinsic: Any = _intrinsic  # numba's stub takes the typing context for an argument of the call

PADDING = 8  # bytes that must lie behind a text whose ends are read eight at a time

ZERO = np.uint64(0)
NOTHING = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)  # 2**64 divided by the golden ratio
_SHIFT = np.uint64(29)
_BITS = np.uint64(64)
_EIGHT = np.uint64(8)
_PAIR_SHIFT = np.uint64(32)


@intrinsic
def load_u64(typing_context, array, offset):
    """``load_u64(array, offset)``: the eight bytes at byte `offset` of a contiguous array; no bounds are checked."""

    def generate(context, builder, signature, arguments):
        [array_type, _] = signature.args
        held = context.make_array(array_type)(context, builder, arguments[0])
        start = builder.bitcast(held.data, ir.IntType(8).as_pointer())
        place = builder.gep(start, [arguments[1]])
        word = builder.load(builder.bitcast(place, ir.IntType(64).as_pointer()), align=1)
        return word

    return types.uint64(array, types.int64), generate


@njit
def chunk_at(text, start, size):
    """The first `size` (1 to 8) of the eight bytes at `start`; zeros for the others."""
    return load_u64(text, start) & (NOTHING >> (_EIGHT * np.uint64(8 - size)))


@njit
def mix(state, value):
    """A hash's next state."""
    state = (state ^ value) * _MULTIPLIER
    return state ^ (state >> _SHIFT)


@njit
def hash_bytes(text, start, end):
    """A hash of `text[start:end]`; `PADDING` bytes lie behind `end`."""
    state = np.uint64(end - start)
    while end - start > 8:
        state = mix(state, load_u64(text, start))
        start += 8
    return mix(mix(state, chunk_at(text, start, end - start)), _MULTIPLIER) if end > start else state


@njit
def are_equal(text, start, other, other_start, size):
    """Whether two runs of `size` bytes are equal; `PADDING` bytes lie behind both."""
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
    return (np.uint64(left) << _PAIR_SHIFT) | np.uint64(right)


@njit
def pair_slot(key, shift):
    """Where to look for a pair in a table of 2**(64 - shift) entries."""
    return np.int64((key * _MULTIPLIER) >> np.uint64(shift))
