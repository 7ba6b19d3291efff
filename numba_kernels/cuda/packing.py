"""The packed layout of a quantised matrix ``[N, K]`` on a GPU: one block of bytes, arranged once, at loading.

    words         [ceil(N / 16), 2, slots, 32 lanes, 16 bytes]   the elements
    scales        [ceil(N / 16), slots, 8, ...]                  of groups of K, if it has them
    zeros         the same                                       zero points of these groups, if it has them
    row scales    [16 ceil(N / 16)] float32                      of whole rows

A *slot* is four lanes' 16 bytes: 128 elements of 4 bits, or 64 of 8, of one row. A tile of 8 rows
has 512 bytes for each slot, which a warp reads at once; lane 4 g + t has 8 elements of row g from 32 s + 8 t on, for
each step s of 32: this lane's factors for `mma.sync`, if the other factor comes in the same order (`gemm/skinny.py`).
`intrinsics/unpack.py` documents their order inside a word.

    element = (unpacked + offset) * group's scale * row's scale

where the offset is that of the zero point. The group's scales and offsets are 16-bit numbers of x's dtype (float32 for
float32), or a byte each; those of rows g and g + 8 lie beside each other, and a lane's, for all steps of a slot, in one
load. The row's scale, float32, is multiplied into a finished sum. It also extends the range of groups' scales: these
are at most 1, and a power of two of their row has the rest.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from numba_kernels.cuda.intrinsics.element_types import (
    BITS,
    E2M1_PLACES,
    E4M3_SCALE_SHIFT,
    EXPONENT_ROOM,
    INTEGERS,
    ITEM_BYTES,
    SHIFTS,
    offset_of,
)

Array = np.ndarray[Any, Any]

TILE_ROWS = 8
STEP = 32  # elements of K that the lanes of a row hold 8 of each
TILE_BYTES = 512  # of a slot
GROUPS = (0, 16, 32, 64, 128)
_MOST_EXPONENT = 127  # of a row's scale


@dataclass(frozen=True, slots=True)
class Packing:
    """The element type of a packed matrix, and its scales.

    Attributes:
        element: "u4", "u8" (integers from 0 on, minus a zero point), "e4m3" or "e2m1".
        group: how many elements of K share a scale; 0 if only the row has one.
        scale: the kind of the groups' scales: "value", "exponent" (powers of two), "e4m3", or "" without groups.
        has_zeros: whether groups have zero points; else it is the middle, 8 or 128.
    """

    element: str
    group: int = 0
    scale: str = ""
    has_zeros: bool = False

    def __post_init__(self) -> None:
        is_right = self.element in BITS and self.group in GROUPS and bool(self.group) == bool(self.scale)
        is_right = is_right and not (self.has_zeros and (self.element not in INTEGERS or self.scale != "value"))
        is_right = is_right and (self.scale in ("", "value") or self.element == "e2m1")
        is_byte = self.scale in ("exponent", "e4m3")  # a lane loads whole words of them
        if not is_right or (self.group == 16 and self.scale != "e4m3") or (is_byte and self.group == 128):
            raise ValueError(f"packing: there is none of {self}")

    @property
    def name(self) -> str:
        """Its name in products and kernels: "u4_g128_zeros"."""
        kind = {"": "", "value": "", "exponent": "_exponents", "e4m3": "_e4m3"}[self.scale]
        return f"{self.element}{f'_g{self.group}' if self.group else ''}{kind}{'_zeros' if self.has_zeros else ''}"

    @property
    def slot(self) -> int:
        """Elements of a row that its four lanes load at once."""
        return 8 * TILE_BYTES // TILE_ROWS // BITS[self.element]

    @property
    def steps(self) -> int:
        """Bytes of a slot."""
        return self.slot // STEP

    @property
    def lane_words(self) -> int:
        """Words of a lane's 8 elements of a step."""
        return BITS[self.element] // 4

    @property
    def kept_group(self) -> int:
        """How many elements share a scale as it is kept: a slot's at most."""
        return min(self.group, self.slot)

    @property
    def halves(self) -> int:
        """2 where lanes t of 0, 1 and of 2, 3 have scales of their own: of groups of 16. Else 1."""
        return 2 if self.group == 16 else 1

    @property
    def lane_scales(self) -> int:
        """Scales that a lane needs for a row and slot."""
        return self.slot // self.kept_group // self.halves if self.group else 0

    def scale_bytes(self, dtype: str) -> int:
        """Bytes of one scale."""
        return ITEM_BYTES[dtype] if self.scale == "value" else 1

    def chunk_bytes(self, dtype: str) -> int:
        """Bytes of a lane's scales for two rows and a slot: one load."""
        return 2 * self.lane_scales * self.scale_bytes(dtype)

    def zeros_bytes(self, dtype: str) -> int:
        """Bytes of a lane's offsets for two rows and a slot: one load."""
        return 2 * self.lane_scales * ITEM_BYTES[dtype] if self.has_zeros else 0

    def sections(self, rows: int, depth: int, dtype: str) -> tuple[int, int, int, int]:
        """Offsets of scales, zeros and row scales, and the size of all, in bytes."""
        tiles, slots = -(-rows // 16), -(-depth // self.slot)
        scales = tiles * slots * 2 * TILE_BYTES
        zeros = scales + tiles * slots * TILE_ROWS * self.halves * self.chunk_bytes(dtype)
        row_scales = zeros + tiles * slots * TILE_ROWS * self.halves * self.zeros_bytes(dtype)
        return scales, zeros, row_scales, row_scales + tiles * 16 * 4

    def size_bytes(self, rows: int, depth: int, dtype: str) -> int:
        """Bytes of the whole block."""
        return self.sections(rows, depth, dtype)[3]


PACKINGS = ("u8", "u4_g128", "u4_g32", "u4_g128_zeros", "e4m3", "e4m3_g128", "e2m1_g32_exponents", "e2m1_g16_e4m3")
"""Those of published models: kernels of others are compiled at their first launch."""

_NAME = re.compile(r"(u4|u8|e4m3|e2m1)(?:_g(\d+))?(_exponents|_e4m3)?(_zeros)?")


@functools.cache
def packing_of(name: str) -> Packing | None:
    """The packing of a product's weight, or None for a dtype."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    element, group, kind, zeros = found.groups()
    scale = {"_exponents": "exponent", "_e4m3": "e4m3", None: "value" if group else ""}[kind]
    return Packing(element, int(group or 0), scale, bool(zeros))


# Work of the host, done once


def arrange(
    packing: Packing, dtype: str, codes: Array, scales: Array | None, zeros: Array | None, row_scales: Array | None
) -> Array:
    """The block of a matrix, as uint8.

    Args:
        dtype: of the rows that it will multiply.
        codes: uint8 [N, K]: integers as they are stored, from 0 on; the bits of floats.
        scales: float32 [N, ceil(K / group)], finite; of "e4m3" kinds, numbers that it holds and not negative, of
            "exponent", powers of two. None without groups.
        zeros: numbers [N, ceil(K / group)], where the packing has them.
        row_scales: float32 [N], or None for 1.

    Raises:
        ValueError: for other shapes, and for a scale that is not finite, or negative where it cannot be.
    """
    rows, depth = codes.shape
    tiles, slots = -(-rows // 16), -(-depth // packing.slot)
    padded = np.zeros((tiles * 16, slots * packing.slot), np.uint8)
    padded[:rows, :depth] = codes
    ordered = padded.reshape(tiles * 2, TILE_ROWS, slots, packing.steps, 4, 8).transpose(0, 2, 1, 4, 3, 5)
    if packing.element == "e2m1":
        words = _e2m1_words(ordered)
    elif BITS[packing.element] == 4:
        words = ordered[..., [0, 4, 1, 5]] | ordered[..., [2, 6, 3, 7]] << 4
    else:
        words = ordered[..., [0, 2, 1, 3, 4, 6, 5, 7]]
    by_row = np.ones(tiles * 16, np.float32)
    if row_scales is not None:
        by_row[:rows] = row_scales
    parts = [words]
    if packing.group:
        wanted = rows, -(-depth // packing.group)
        if scales is None or scales.shape != wanted:
            raise ValueError(f"scales: shape {None if scales is None else scales.shape}, must be {wanted}")
        if not (np.isfinite(scales) & ((scales >= 0) | (packing.scale == "value"))).all():
            raise ValueError(f"scales: must be finite{' and not negative' * (packing.scale != 'value')}")
        kept, by_row[:rows] = _kept_scales(packing, dtype, scales, by_row[:rows])
        parts.append(_by_lane(packing, kept, rows, depth))
    if packing.has_zeros:
        assert zeros is not None
        used = dtype if dtype != "f32" else "f16"
        offsets = offset_of(packing.element, used, 0) - np.asarray(zeros, np.float32)
        parts.append(_by_lane(packing, _as_dtype(offsets, dtype), rows, depth))
    parts.append(by_row)
    return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])


def _e2m1_words(codes: Array) -> Array:
    """[..., 8] codes as the four bytes of their word."""
    halves = np.zeros((*codes.shape[:-1], 2), np.uint16)
    for i, (fields, sign) in enumerate(E2M1_PLACES):
        pair = codes[..., 2 * i : 2 * i + 2].astype(np.uint16)
        halves |= (pair & 7) << fields | pair >> 3 << sign
    return halves.view(np.uint8)


def _kept_scales(packing: Packing, dtype: str, scales: Array, by_row: Array) -> tuple[Array, Array]:
    """(the groups' scales as they are kept, the rows' scales)."""
    if packing.scale == "e4m3":
        return scales.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), by_row * np.float32(2.0**E4M3_SCALE_SHIFT)
    largest = np.abs(scales).max(axis=1, initial=0)
    exponents = np.where(largest > 0, np.frexp(largest)[1], 0)  # of the least power of two above
    if packing.scale == "exponent":
        exponents = np.minimum(exponents - 1 + EXPONENT_ROOM.get(dtype, 0), np.maximum(exponents - 1, _MOST_EXPONENT))
    shares = np.ldexp(scales, -exponents[:, None])
    by_row = np.ldexp(by_row, exponents).astype(np.float32)
    shift = SHIFTS.get((packing.element, dtype), 0)
    if packing.scale == "value":
        return _as_dtype(np.ldexp(shares, shift), dtype), by_row
    bias = 15 if dtype == "f16" else 127
    fields = np.where(shares > 0, np.frexp(shares)[1] - 1, -bias - shift) + bias + shift
    return np.maximum(fields, 0).astype(np.uint8), by_row


def _as_dtype(values: Array, dtype: str) -> Array:
    kinds = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
    return values.astype(np.float32).astype(kinds[dtype])


def _by_lane(packing: Packing, values: Array, rows: int, depth: int) -> Array:
    """[N, groups] as lanes load them: [ceil(N / 16), slots, 8, halves, steps or groups, 2]."""
    tiles, slots = -(-rows // 16), -(-depth // packing.slot)
    of_group = np.minimum(
        np.arange(slots * packing.slot // packing.kept_group) * packing.kept_group // packing.group,
        values.shape[1] - 1,
    )  # fmt: skip
    padded = np.zeros((tiles * 16, len(of_group)), values.dtype)
    padded[:rows] = values[:, of_group]
    split = padded.reshape(tiles, 2, TILE_ROWS, slots, packing.lane_scales, packing.halves)
    return split.transpose(0, 3, 2, 5, 4, 1)
