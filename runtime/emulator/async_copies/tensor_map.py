"""A tensor map: the 128 bytes that describe a tensor in global memory to TMA, in an encoding of our own; swizzles.

Hardware's encoding is not published; ours is 16 int64 words. The emulated driver's cuTensorMapEncodeTiled calls
`encode`, `tensormap.replace` writes single fields, the compiled copies read them.

Word 0 global address; 1 element type | rank - 1 << 8 | swizzle << 16 | interleave << 24 | fill << 32; 2-6 sizes in
elements, innermost first; 7-10 strides in bytes of dimensions 1-4; 11 box sizes minus 1 (8 bits a dimension);
12 element strides minus 1 (8 bits a dimension); 15 a mark of validity. "Minus 1" makes a zeroed map, which Triton
starts from, complete it with `tensormap.replace`.

A swizzle permutes the 16-byte chunks of a 128-byte line: the 32-, 64- and 128-byte modes exchange chunks by address
bits alone: bits 4 (… 5, … 6) are XORed with bits 7 (… 8, … 9). wgmma's descriptors count the modes the other way.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numba_kernels.cache import njit
from runtime.errors import InvalidArgumentError

MAP_BYTES = 128
MAP_WORDS = 16
MAP_ADDRESS, MAP_KINDS, MAP_SIZES, MAP_STRIDES, MAP_BOX, MAP_STEPS, MAP_MARK = 0, 1, 2, 7, 11, 12, 15
MARK = 0x7873_6572_7654_4D41

# Element types by the numbers of CUtensorMapDataType, which are those of tensormap.replace's elemtype (see the table
# there: both count u8, u16, u32, s32, u64, s64, f16, f32, f64, bf16 … but in another order from f32.ftz on).
U8, U16, U32, S32, U64, S64, F16, F32, F64, BF16 = range(10)
ELEMENT_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2)
ELEMENT_NAMES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16")
REPLACE_ELEMENT_TYPES = {0: U8, 1: U16, 2: U32, 3: S32, 4: U64, 5: S64, 6: F16, 7: F32, 9: F64, 10: BF16}
"""tensormap.replace's elemtype → ours; 8, 11, 12 (f32.ftz, tf32, tf32.ftz) round while copying and are not emulated."""

MAX_BOX = 256
MAX_STEP = 8


def encode(
    element_type: int,
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int],
    *,
    swizzle: int = 0,
    interleave: int = 0,
    fill: int = 0,
) -> bytes:
    """The 128 bytes of a map, after the checks that cuTensorMapEncodeTiled makes.

    Args:
        element_type: U8 … BF16 (CUtensorMapDataType 0 … 9).
        address: of the tensor, a multiple of 16.
        sizes: elements of each of 1 to 5 dimensions, innermost first, at most 2^32.
        strides: bytes from one to the next in dimensions 1 … (one fewer than sizes), multiples of 16, below 2^40.
        box: elements of a tile in each dimension, 1 … 256; the innermost a multiple of 16 bytes.
        element_strides: 1 … 8; every n-th element is copied.
        swizzle: 0 … 3 for none, 32, 64 and 128 bytes; the box's row must fit into it.
        interleave: 0.
        fill: 0 zeros, 1 NaN (floating point only) outside of the tensor.

    Raises:
        InvalidArgumentError: naming the field, its value and the limit.
    """

    def require(condition: bool, field: str, value: object, limit: str) -> None:
        if not condition:
            raise InvalidArgumentError(f"tensor map: {field} is {value}; {limit}", param=field)

    rank = len(sizes)
    require(0 <= element_type < len(ELEMENT_BYTES), "element_type", element_type, "types 0 … 9 are emulated")
    require(1 <= rank <= 5, "rank", rank, "it must be 1 … 5")
    require(len(strides) == rank - 1, "strides", list(strides), f"a rank of {rank} has {rank - 1}")
    require(len(box) == rank, "box", list(box), f"a rank of {rank} has {rank}")
    require(len(element_strides) == rank, "element_strides", list(element_strides), f"a rank of {rank} has {rank}")
    require(address > 0 and address % 16 == 0, "address", hex(address), "it must be a multiple of 16")
    require(all(0 < size <= 1 << 32 for size in sizes), "sizes", list(sizes), "each must be 1 … 2^32")
    require(
        all(0 < stride < 1 << 40 and stride % 16 == 0 for stride in strides),
        "strides", list(strides), "each must be a multiple of 16 below 2^40",
    )  # fmt: skip
    require(all(1 <= extent <= MAX_BOX for extent in box), "box", list(box), f"each must be 1 … {MAX_BOX}")
    require(
        all(1 <= step <= MAX_STEP for step in element_strides),
        "element_strides", list(element_strides), f"each must be 1 … {MAX_STEP}",
    )  # fmt: skip
    require(interleave == 0, "interleave", interleave, "only 0 (none) is emulated")
    require(0 <= swizzle <= 3, "swizzle", swizzle, "modes 0 … 3 are emulated")
    row_bytes = box[0] * ELEMENT_BYTES[element_type]
    require(row_bytes % 16 == 0, "box", list(box), f"a row of {row_bytes} bytes is no multiple of 16")
    limit = SWIZZLE_BYTES[swizzle]
    require(swizzle == 0 or row_bytes <= limit, "box", list(box), f"a row of {row_bytes} bytes, swizzle {limit}")
    floating = ELEMENT_NAMES[element_type] in ("f16", "f32", "f64", "bf16")
    require(fill == 0 or (fill == 1 and floating), "fill", fill, "0, or 1 for floating point")

    words = np.zeros(MAP_WORDS, np.int64)
    words[MAP_ADDRESS] = address
    words[MAP_KINDS] = element_type | (rank - 1) << 8 | swizzle << 16 | interleave << 24 | fill << 32
    words[MAP_SIZES : MAP_SIZES + rank] = sizes
    words[MAP_STRIDES : MAP_STRIDES + rank - 1] = strides
    words[MAP_BOX] = sum((extent - 1) << 8 * index for index, extent in enumerate(box))
    words[MAP_STEPS] = sum((step - 1) << 8 * index for index, step in enumerate(element_strides))
    words[MAP_MARK] = MARK
    return words.tobytes()


@njit
def map_type(words):
    return words[MAP_KINDS] & 0xFF


@njit
def map_rank(words):
    return ((words[MAP_KINDS] >> 8) & 0xFF) + 1


@njit
def map_swizzle(words):
    return (words[MAP_KINDS] >> 16) & 0xFF


@njit
def map_fill(words):
    return (words[MAP_KINDS] >> 32) & 0xFF


@njit
def map_box(words, dimension):
    """Elements of the box, before element strides."""
    return ((words[MAP_BOX] >> 8 * dimension) & 0xFF) + 1


@njit
def map_step(words, dimension):
    """The element stride."""
    return ((words[MAP_STEPS] >> 8 * dimension) & 0xFF) + 1


@njit
def map_extent(words, dimension):
    """Elements that a copy moves along a dimension."""
    step = map_step(words, dimension)
    return (map_box(words, dimension) + step - 1) // step


@njit
def element_bytes(element_type):
    """Bytes of an element, or 0 for a type that is not emulated."""
    if element_type == U8:
        return 1
    if element_type in (U16, F16, BF16):
        return 2
    if element_type in (U32, S32, F32):
        return 4
    if element_type in (U64, S64, F64):
        return 8
    return 0


@njit
def map_bytes(words):
    """Bytes of a whole tile in shared memory."""
    total = element_bytes(map_type(words))
    for dimension in range(map_rank(words)):
        total *= map_extent(words, dimension)
    return total


SWIZZLE_BYTES = (16, 32, 64, 128)  # the widest row of each mode; 16: chunks stay where they are


@njit
def swizzled(address, mode):
    """The shared address of the data under a mode (0 … 3)."""
    return address ^ ((address >> 7) & ((1 << mode) - 1)) << 4
