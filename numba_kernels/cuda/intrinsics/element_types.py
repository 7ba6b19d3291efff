"""Element types of matrices, vectors and pages on a GPU: sizes, ranges, and corrections after unpacking.

Facts alone, for code that arranges memory: needs neither numba-cuda nor a GPU. Kernels use them in `element.py` (f32,
f16, bf16) and `unpack.py` (elements of 4 and 8 bits).
"""

from __future__ import annotations

DTYPES = ("f32", "f16", "bf16")
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
VECTOR_WIDTH = {"f32": 4, "f16": 8, "bf16": 8}
"""Elements of 16 bytes."""

BITS = {"u4": 4, "u8": 8, "s8": 8, "e4m3": 8, "e2m1": 4}
INTEGERS = ("u4", "u8")
SHIFTS = {
    ("e4m3", "bf16"): 120, ("e4m3", "f16"): 8, ("e2m1", "bf16"): 126, ("e2m1", "f16"): 14,
    ("s8", "bf16"): 0, ("s8", "f16"): 6,
}  # fmt: skip
"""Powers of two that unpacked numbers lack; unsigned integers lack none. s8 in f16 does, so that a small scale times a
softmax weight, which includes them, is not subnormal."""

E2M1_PLACES = ((0, 14), (3, 13), (6, 12), (9, 15))
"""The bits of a half of a word where e2m1's numbers lie, pair by pair: the lowest of exponent and fraction, and the
sign. A shift and a mask bring the last two pairs to float16's fields; a multiplication, which shifts both parts by
their own distance, the first two."""

EXPONENT_ROOM = {"bf16": 17}
"""Powers of two that kept exponents of scales stay below their type's largest, so that sums of float32 have room for
them."""

UNITS = {"bf16": 128, "f16": 1024}
"""The unit added to an unpacked integer, which the offset ``-(unit + zero point)`` removes; for u8 in bf16, whose two
parts remove the unit, the offset is 128 - zero point."""

E4M3_SCALE_SHIFT = 9
"""A scale in e4m3, its fields moved, becomes ``2 ** -E4M3_SCALE_SHIFT`` of an unpacked e2m1's scale: a scale goes up
to 448, and 2^126 times that is more than bf16 holds."""


def words_of(element: str) -> int:
    """Words that hold 8 elements."""
    return BITS[element] // 4


def offset_of(element: str, dtype: str, zero: float) -> float:
    """The offset that a kernel adds to an unpacked integer, for a zero point."""
    return 128 - zero if (element, dtype) == ("u8", "bf16") else -(UNITS[dtype] + zero)
