"""Weights in ggml's blocks, as products on the cpu read them: the file's integers and scales, none rounded anew.

Panels hold words of 32 bits as those of float32 do (`panels`): the words of a block follow each other, its scales
first. Blocks of 32 come in pairs, so that two scales of 16 bits share a word:

    Q8_0   64 elements, 17 words   two scales; then bytes
    Q4_0   64 elements,  9 words   two scales; then nibbles: low ones are elements 0 to 15 of 32, high ones the others
    Q4_K  256 elements, 36 words   scale and minimum; 8 scales and 8 minima of 6 bits; nibbles, low ones 32 elements
    Q6_K  256 elements, 53 words   scale; 16 scales of 8 bits; low nibbles; high pairs of bits

A group of elements has one scale (and minimum): 32 elements, or 16 of Q6_K. An element is `scale * (integer - zero) -
minimum`. numba tells formats apart by a numpy class that stands for each, as uint16 does for bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from numba_kernels.closure_cache import name_by_content
from numba_kernels.cpu.intrinsics.scalars import load_f32
from numba_kernels.cpu.running.launch import int32_at
from numba_kernels.cpu.target import PANEL_COLUMNS

X_GROUP = 32  # elements of x that share a scale


@dataclass(frozen=True, slots=True)
class Block:
    """One format.

    Attributes:
        name: ggml's.
        elements: of a row in a block of panels.
        words: that these take.
        group: elements that share a scale.
        zero: what is stored for 0.
        has_minima: whether groups have minima.
        fields: ggml's block, of which `pairs` make one here.
        pairs: 2 where two of ggml's blocks are joined, else 1.
    """

    name: str
    elements: int
    words: int
    group: int
    zero: int
    has_minima: bool
    fields: np.dtype[Any]
    pairs: int

    def words_of(self, depth: int) -> int:
        """Words of a row of so many elements, a multiple of `elements`."""
        return depth // self.elements * self.words

    def arranged(self, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """ggml's rows of bytes ``[n, row bytes]`` as words ``[n, words]``, which float32 carries."""
        blocks = raw.view(self.fields).reshape(len(raw), -1, self.pairs)
        out = np.zeros((*blocks.shape[:2], self.words * 4), np.uint8)
        at = 0
        for field in _ORDER:
            if field in (self.fields.names or ()):
                part = np.ascontiguousarray(blocks[field]).view(np.uint8).reshape(*blocks.shape[:2], -1)
                out[..., at : at + part.shape[-1]] = part
                at = -(-(at + part.shape[-1]) // 4) * 4
        return out.reshape(len(raw), -1).view(np.float32)


_ORDER = ("d", "k", "scales", "q", "high")
_D = ("d", "<f2")

BLOCKS: dict[Any, Block] = {
    np.int8: Block("Q8_0", 64, 17, 32, 128, False, np.dtype([_D, ("q", "i1", 32)]), 2),
    np.uint32: Block("Q4_0", 64, 9, 32, 8, False, np.dtype([_D, ("q", "u1", 16)]), 2),
    np.int32: Block("Q4_K", 256, 36, 32, 0, True, np.dtype([("k", "u1", 144)]), 1),
    np.int64: Block(
        "Q6_K", 256, 53, 16, 32, False, np.dtype([("q", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), _D]), 1
    ),
}
"""By the class that stands for the format."""


def row_reader(stored: Any) -> Any:
    """A compiled function that writes a row of a table, times a multiplier, to float32:
    ``(address of the row's first word, number of elements, multiplier, out)``, added where out is not zero."""
    block = BLOCKS[stored]
    name, elements, block_words = block.name, block.elements, block.words
    per_group, zero = block.group, block.zero
    row_bytes = PANEL_COLUMNS * 4

    @njit(nogil=True)
    @name_by_content
    def word(at, index):
        return int32_at(at + index * row_bytes, 1)[0]

    @njit(nogil=True)
    @name_by_content
    def byte(at, first, index):
        return (word(at, first + index // 4) >> (8 * (index % 4))) & 255

    @njit(nogil=True)
    @name_by_content
    def half(at, index):
        return load_f32(np.int16, at, index)

    @njit(nogil=True)
    @name_by_content
    def scale_of_group(at, group):
        if name == "Q4_K":
            bits = byte(at, 1, group) & 63
            if group >= 4:
                bits = (byte(at, 1, group + 4) & 15) | ((byte(at, 1, group - 4) >> 6) << 4)
            return half(at, 0) * np.float32(bits)
        if name == "Q6_K":
            bits = byte(at, 1, group)
            return half(at, 0) * np.float32(bits - 256 if bits > 127 else bits)
        return half(at, group)

    @njit(nogil=True)
    @name_by_content
    def minimum_of_group(at, group):
        bits = byte(at, 1, group + 4) & 63
        if group >= 4:
            bits = (byte(at, 1, group + 4) >> 4) | ((byte(at, 1, group) >> 6) << 4)
        return half(at, 1) * np.float32(bits)

    @njit(nogil=True)
    @name_by_content
    def integer(at, i):
        if name == "Q8_0":
            bits = byte(at, 1, i)
            return bits - 256 if bits > 127 else bits
        if name == "Q4_0":
            within = i % 32
            return ((byte(at, 1, i // 32 * 16 + within % 16) >> (within // 16 * 4)) & 15) - zero
        if name == "Q4_K":
            return (byte(at, 4, i // 64 * 32 + i % 32) >> (i // 32 % 2 * 4)) & 15
        within = i % 128
        low = (byte(at, 5, i // 128 * 64 + within % 64) >> (within // 64 * 4)) & 15
        high = (byte(at, 37, i // 128 * 32 + within % 32) >> (within // 32 * 2)) & 3
        return (low | (high << 4)) - zero

    @njit(nogil=True)
    @name_by_content
    def read_row(at, width, multiplier, out):
        for first in range(0, width, elements):
            for group in range(elements // per_group):
                scale = scale_of_group(at, group)
                minimum = minimum_of_group(at, group) if name == "Q4_K" else np.float32(0)
                for i in range(group * per_group, (group + 1) * per_group):
                    out[first + i] += (scale * np.float32(integer(at, i)) - minimum) * np.float32(multiplier)
            at += block_words * row_bytes

    return read_row
