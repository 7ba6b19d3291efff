"""GGUF's number formats: blocks of neighbours in a row that share scales, their dequantisation, and how they are kept.

The layouts are those of llama.cpp's `ggml-common.h`. A block is read as products read it, by its declaration in
`numba_kernels.blocks`; a type without one there becomes such a block first. The products are taken in
float32 without fused multiply-adds: each block gives the same bits as the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from models.gguf.codebooks import CODEBOOK_TYPES
from numba_kernels.blocks import BLOCKS, Block, Plane
from runtime.dtype import DType, bfloat16, float16, float32

Array = np.ndarray[Any, Any]

_CHUNK_ELEMENTS = 1 << 16  # decoded at once, so that intermediate results stay in the cache


@dataclass(frozen=True, slots=True)
class GgmlFormat:
    """One of ggml's tensor types.

    Attributes:
        name: as ggml calls it, such as "Q4_K".
        block: elements of a row that lie together.
        layout: of such a block's bytes.
        dtype: of decoded elements: the stored float type, or float32.
        decode: blocks `[n]` of the layout to elements `[n, block]` float32; None for plain floats.
        kept: the name of the blocks that `keep` makes; the type's own name where they are the file's.
        keep: blocks `[n]` of the layout to those of the kept one's; None if they stay as they are.
    """

    name: str
    block: int
    layout: np.dtype[Any]
    dtype: DType = float32
    decode: Callable[[Array], Any] | None = None
    kept: str = ""
    keep: Callable[[Array], Array] | None = None

    def row_bytes(self, num_elements: int) -> int:
        """Bytes of a row, whose elements fill its blocks."""
        return num_elements // self.block * self.layout.itemsize

    def dequantise(self, raw: Array) -> Array:
        """Rows of bytes `[..., row_bytes]` to their elements `[..., num_elements]`, of `dtype`."""
        if self.decode is None:
            return raw.view(self.layout)
        return self._by_chunks(raw, self.decode, np.dtype(np.float32), self.block)

    def kept_blocks(self, raw: Array) -> Array:
        """Rows of bytes `[..., row_bytes]` to those of the kept blocks."""
        if self.keep is None:
            return raw
        kept = BLOCKS[self.kept]
        count = self.block * kept.pairs // kept.elements  # of kept blocks for each of the file's
        return self._by_chunks(raw, self.keep, kept.fields, count).view(np.uint8)

    @property
    def kept_layout(self) -> np.dtype[Any]:
        """The layout of the kept blocks."""
        return self.layout if self.keep is None else BLOCKS[self.kept].fields

    def _by_chunks(self, raw: Array, change: Callable[[Array], Any], dtype: np.dtype[Any], count: int) -> Array:
        """Rows of ``count`` elements for each block, which ``change`` makes."""
        blocks = raw.view(self.layout)
        flat, step = blocks.reshape(-1), max(1, _CHUNK_ELEMENTS // self.block)
        values = np.empty((flat.size, count), dtype)
        for first in range(0, flat.size, step):
            values[first : first + step] = change(flat[first : first + step]).reshape(-1, count)
        return values.reshape(*blocks.shape[:-1], -1)


def _cut(packed: Array, bits: int, run: int) -> Any:
    """Integers of 8, 4, 2 or 1 bits: every `run` bytes hold, low bits first, `8 / bits` runs of elements.

    `[n, size]` -> `[n, size * 8 / bits]`, uint8.
    """
    if bits == 8:
        return packed
    size = next(size for size in (8, 4, 1) if run % size == 0)  # bytes that are moved at once
    word = np.dtype(f"u{size}")
    shifts = np.arange(0, 8, bits, dtype=word)[:, None]
    mask = word.type(int.from_bytes(bytes([(1 << bits) - 1]) * size))
    fields = np.ascontiguousarray(packed).view(word).reshape(len(packed), -1, 1, run // size) >> shifts & mask
    return fields.view(np.uint8).reshape(len(packed), -1)


def _integers(planes: tuple[Plane, ...], blocks: Array) -> Any:
    """The integers in planes of bits, `[n, elements]` uint8."""
    found, above = None, 0
    for plane in planes:
        run = 1 if (plane.field, plane.run) == ("high", 4) else plane.run  # such bits follow one another in files
        part = _cut(blocks[plane.field].view(np.uint8), plane.bits, run)
        found = part if found is None else np.bitwise_or(found, np.left_shift(part, above, out=part), out=found)
        above += plane.bits
    return found


def _k_scales(packed: Array) -> tuple[Array, Array]:
    """Eight scales and eight minima of six bits, `[n, 8]` each, out of twelve bytes `[n, 12]`.

    The first four of each kind lie in the low six bits of bytes 0 to 7; the last four have their low four bits in bytes
    8 to 11 and their high two above the first ones.
    """
    first, low = packed[:, :8].reshape(-1, 2, 4), packed[:, 8:]
    last = np.stack([low & np.uint8(15), low >> np.uint8(4)], axis=1) | first >> np.uint8(6) << np.uint8(4)
    both = np.concatenate([first & np.uint8(63), last], axis=2)  # [n, scales or minima, 8]
    return both[:, 0], both[:, 1]


def _group_integers(block: Block, blocks: Array) -> tuple[Array, ...]:
    """The integers of scales, and of minima, `[n, groups]` each."""
    if block.scale == "six_bits":
        return _k_scales(blocks["scales"])
    if block.scale == "byte":
        return (blocks["scales"],)
    kind = block.scale_planes
    integers = _integers(kind.planes, blocks).reshape(len(blocks), -1, block.num_groups)
    return tuple((integers.astype(np.float32) * np.float32(kind.step) + np.float32(kind.start)).swapaxes(0, 1))


def _scales(block: Block, blocks: Array) -> list[Array]:
    """Scales, and minima, `[n, groups]` float32."""
    if block.scale == "e8m0":  # half of it, since the table has twice e2m1's values
        exponent = blocks["exponent"].astype(np.uint32)
        bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - np.uint32(1)) << np.uint32(23))
        return [bits.view(np.float32)[:, None]]
    fields = [field for field in ("d", "dmin", "m") if field in (blocks.dtype.names or ())]
    factors = [blocks[field].astype(np.float32).reshape(len(blocks), -1) for field in fields]
    if block.scale in ("half", "float"):
        return [factors[0], *(-factor for factor in factors[1:])]
    numbers = _group_integers(block, blocks)
    return [factor * each.astype(np.float32) for factor, each in zip(factors, numbers, strict=True)]


def block_values(block: Block, blocks: Array) -> Any:
    """The elements of blocks as files or `keep` have them, `[n, elements]` float32."""
    integers = _integers(block.planes, blocks)
    if block.table is not None:
        values = np.take(np.array(block.table, np.float32) - np.float32(block.zero), integers)
    elif block.is_bytes:
        values = integers.view(np.int8).astype(np.float32)
    else:
        values = integers.astype(np.float32)
        if block.zero:
            values -= np.float32(block.zero)
    scales, *minima = (each[:, :, None] for each in _scales(block, blocks))
    groups = values.reshape(*scales.shape[:2], -1)
    groups *= scales
    for minimum in minima:
        groups -= minimum
    return values


def _stored(name: str) -> GgmlFormat:
    """A type whose blocks are kept."""
    block = BLOCKS[name]
    size = block.elements // block.pairs
    return GgmlFormat(name, size, block.fields, decode=lambda raw: block_values(block, raw), kept=name)


def _becoming(
    name: str, size: int, fields: list[Any], kept: str, keep: Callable[[Array], Array],
    decode: Callable[[Array], Any] | None = None,
) -> GgmlFormat:  # fmt: skip
    """A type whose blocks become others, without loss."""
    decode = decode or (lambda raw: block_values(BLOCKS[kept], keep(raw)))
    return GgmlFormat(name, size, np.dtype(fields), decode=decode, kept=kept, keep=keep)


def _trits(blocks: Array) -> Any:
    """0, 1 or 2 of each of 256 elements: bytes hold five, or the last four bytes four, as digits of a fraction."""
    parts = []
    for field, run, digits in (("q", 32, 5), ("rest", 16, 5), ("high", 4, 4)):
        powers = np.array([3**each for each in range(digits)], np.uint8)[:, None]
        parts.append((blocks[field].reshape(len(blocks), -1, 1, run) * powers).reshape(len(blocks), -1))
    return (np.concatenate(parts, axis=1).astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8)


def _two_bits(blocks: Array) -> Any:
    return _cut(blocks["q"], 2, 32)


def _ternary(name: str, integers_of: Callable[[Array], Any], *fields: Any) -> GgmlFormat:
    """-1, 0 and 1 times a scale: Q2_K's, with scales and minima of 1."""

    def keep(blocks: Array) -> Array:
        kept = np.empty(len(blocks), BLOCKS["Q2_K"].fields)
        runs = integers_of(blocks).reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
        kept["q"] = np.bitwise_or.reduce(runs, axis=2).reshape(-1, 64)
        kept["d"], kept["dmin"], kept["scales"] = blocks["d"], blocks["d"], 0x11
        return kept

    def decode(blocks: Array) -> Any:
        return blocks["d"].astype(np.float32)[:, None] * (integers_of(blocks).astype(np.float32) - np.float32(1))

    return _becoming(name, 256, list(fields), "Q2_K", keep, decode)


_UE4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_UE4M3 = np.where(np.arange(256) == 0xFF, np.float32(480), np.abs(np.nan_to_num(_UE4M3)))
"""Without a sign: 127 is 0, and 255 a number, as in ggml."""


def _nvfp4(blocks: Array) -> Array:
    kept = np.empty(len(blocks), BLOCKS["nvfp4"].fields)
    kept["d"], kept["q"] = _UE4M3[blocks["scales"]] * np.float32(0.5), blocks["q"]
    return kept


def _f64(numbers: Array) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        return numbers.astype(np.float32)


def _q1_0(blocks: Array) -> Array:
    """-1 and 1 times a scale, as four blocks of Q4_0, which keeps them as 7 and 9."""
    kept = np.empty((len(blocks), 4), BLOCKS["Q4_0"].fields)
    numbers = np.uint8(7) + np.uint8(2) * np.unpackbits(blocks["q"], axis=1, bitorder="little").reshape(-1, 4, 2, 16)
    kept["d"], kept["q"] = blocks["d"][:, None], numbers[:, :, 0] | numbers[:, :, 1] << np.uint8(4)
    return kept.reshape(-1)


_D = ("d", "<f2")

FORMATS: dict[int, GgmlFormat] = {
    0: GgmlFormat("F32", 1, np.dtype("<f4")),
    1: GgmlFormat("F16", 1, np.dtype("<f2"), float16),
    28: GgmlFormat("F64", 1, np.dtype("<f8"), decode=_f64, kept="F64"),
    30: GgmlFormat("BF16", 1, np.dtype(ml_dtypes.bfloat16), bfloat16),
    2: _stored("Q4_0"),
    3: _stored("Q4_1"),
    6: _stored("Q5_0"),
    7: _stored("Q5_1"),
    8: _stored("Q8_0"),
    10: _stored("Q2_K"),
    11: _stored("Q3_K"),
    12: _stored("Q4_K"),
    13: _stored("Q5_K"),
    14: _stored("Q6_K"),
    16: _becoming("IQ2_XXS", 256, *CODEBOOK_TYPES["IQ2_XXS"]),
    17: _becoming("IQ2_XS", 256, *CODEBOOK_TYPES["IQ2_XS"]),
    18: _becoming("IQ3_XXS", 256, *CODEBOOK_TYPES["IQ3_XXS"]),
    19: _becoming("IQ1_S", 256, *CODEBOOK_TYPES["IQ1_S"]),
    20: _stored("IQ4_NL"),
    21: _becoming("IQ3_S", 256, *CODEBOOK_TYPES["IQ3_S"]),
    22: _becoming("IQ2_S", 256, *CODEBOOK_TYPES["IQ2_S"]),
    23: _stored("IQ4_XS"),
    29: _becoming("IQ1_M", 256, *CODEBOOK_TYPES["IQ1_M"]),
    34: _ternary("TQ1_0", _trits, ("q", "u1", 32), ("rest", "u1", 16), ("high", "u1", 4), _D),
    35: _ternary("TQ2_0", _two_bits, ("q", "u1", 64), _D),
    39: _stored("MXFP4"),
    40: _becoming("NVFP4", 64, [("scales", "u1", 4), ("q", "u1", 32)], "nvfp4", _nvfp4),
    41: _becoming("Q1_0", 128, [_D, ("q", "u1", 16)], "Q4_0", _q1_0),
}
"""By the number in the file."""

_ACTIVATIONS, _INTEGERS = "which holds activations within a product, no weights", "which holds integers, no weights"

OTHER_TYPES = {
    9: ("Q8_1", _ACTIVATIONS), 15: ("Q8_K", _ACTIVATIONS), 24: ("I8", _INTEGERS), 25: ("I16", _INTEGERS),
    26: ("I32", _INTEGERS), 27: ("I64", _INTEGERS),
}  # fmt: skip
"""Types that are refused, and why."""
