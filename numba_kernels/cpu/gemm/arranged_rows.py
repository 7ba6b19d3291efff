"""The left side of a product in the order in which its tiles read it, made once a launch from the rows of x.

Rows come in tiles of at most GEMM_ROWS. A tile of h rows holds words of 32 bits, word by word and within a word row by
row, ``[words, h]``, so that a tile reads one stream however far apart rows lie:

    float32 and widened weights   the elements themselves, with zeros up to a whole word of the weight
    bfloat16 by vdpbf16ps         pairs of elements rounded to bfloat16; so for e4m3, which otherwise takes floats
    int8                          groups of GROUP elements: words of four int8 (see DOT_WORDS), but row by row, then
                                  ``[h]`` scales and ``[h]`` sums of a group times -ZERO_POINT: where integer sums begin
    blocks of integers            groups of X_GROUP elements: words of four int8 (of pairs of int16 in some cases, see
                                  `unpacked_blocks`), then ``[h]`` scales and two ``[h]`` of `quantize_block`

AMX's tiles (`amx_tile`) read rows: words of blocks lie row by row within a group, too, and pairs row by row for all of
K, `pair_row_words` apart.

int8: the scale of a group is the least power of two by which its largest magnitude is at most 127
(https://arxiv.org/abs/2208.07339, by groups instead of rows). With words of bytes, integer sums begin as the bits of
1.5 * 2^23 times the scale, and that number stands in the scale's place: the sum of integers is then a float with the
scaled sum in its low bits, and a difference scales it. One with NaN, infinity or a number that float32 cannot round so
has a scale that is not finite, and such products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from numba_kernels.blocks import BLOCKS, X_GROUP
from numba_kernels.cpu.gemm.block_numbers import is_signed
from numba_kernels.cpu.gemm.block_tile import X_ROW_WORDS, X_WORDS, x_words
from numba_kernels.cpu.gemm.packed_words import (
    GROUP,
    GROUP_WORDS,
    ZERO_POINT,
    arrange_group,
    arrange_words,
    block_on_stack,
    find_adders,
    groups_on_stack,
    largest_bits,
    power_of,
    quantize_block,
    quantize_blocks,
    quantize_words,
    round_pairs,
    split_pairs,
)
from numba_kernels.cpu.gemm.unpacked_blocks import unpacked_x_words
from numba_kernels.cpu.layout import AMX_ROWS, DOT, ROUNDS_TO_BF16
from numba_kernels.cpu.running.launch import float32_at, int32_at
from numba_kernels.cpu.target import LANES

ELEMENTS_A_WORD = {"float32": 1, "uint16": 2, "int16": 2, "uint8": 4}
"""The layout of x for a weight, by the name of the numpy class that carries it."""

DOT_WORDS = GROUP_WORDS * (2 if DOT == "pairs" else 1)
"""Words of a group of quantised activations: bytes for vpdpbusd, pairs of int16 for vpmaddwd."""
GROUP_ROW_WORDS = DOT_WORDS + 2  # with scale and start of the sum

_TAIL_WORDS = X_ROW_WORDS - X_WORDS  # scale and starts of sums
_HAS_PAIRS = DOT == "pairs"


def operand_words(stored: Any, depth: int) -> int:
    """Words that one row of x takes."""
    if stored is np.uint8:
        return -(-depth // GROUP) * GROUP_ROW_WORDS
    if stored in BLOCKS:
        block = BLOCKS[stored]
        words = unpacked_x_words(block) if is_signed(block) else x_words(block)  # the most
        return -(-depth // block.elements) * words
    elements = ELEMENTS_A_WORD[np.dtype(stored).name]
    words = -(-depth // elements)
    if are_pair_rows(stored):
        return pair_row_words(words)
    return words if are_pairs(stored) else words * elements


def is_own_operand(stored: Any, depth: int) -> bool:
    """True if a lone row of x, as it lies in memory, is what its tile reads."""
    return not rounds_x(stored) and operand_words(stored, depth) == depth


def rounds_x(stored: Any) -> bool:
    """True if a product rounds x to int8 or bfloat16."""
    return stored is np.uint8 or are_integers(stored) or are_pairs(stored) or are_pair_rows(stored)


def are_integers(stored: Any) -> bool:
    """True if weights are blocks of integers, for which x is rounded by groups of X_GROUP."""
    return stored in BLOCKS and not BLOCKS[stored].is_e4m3


def are_pairs(stored: Any) -> bool:
    """True if a word of x holds two elements, rounded to bfloat16."""
    return ROUNDS_TO_BF16 and (stored is np.uint16 or (stored in BLOCKS and BLOCKS[stored].is_e4m3))


def are_pair_rows(stored: Any) -> bool:
    """True if rows of x are pairs of bfloat16, a row after the other, for AMX."""
    return bool(AMX_ROWS) and stored is np.uint16


@njit(nogil=True)
def pair_row_words(words: int) -> int:
    """Words from one row of ``words`` pairs to the next: whole steps, and a line, since rows whose distance is a power
    of two would share a few sets of the caches."""
    return -(-words // LANES) * LANES + LANES


@njit(nogil=True)
def arrange_pair_rows(x, x_stride, depth, rows, words, row_words, target):
    """A tile's rows of pairs, ``row_words`` apart, with zeros up to a whole step."""
    for row in range(rows):
        for word in range(0, words, LANES):
            element = word * 2
            source = x + (row * x_stride + element) * 4
            round_pairs(source, min(2 * LANES, depth - element), target + (row * row_words + word) * 4)


@njit(nogil=True)
def arrange_block_rows(x, x_stride, length, rows, start, is_halved, has_power, target):
    """`arrange_blocks` for AMX: each group's rows of words, then their scales and both starts."""
    group = block_on_stack()
    for element in range(0, length, X_GROUP):
        after = target + X_WORDS * rows * 4
        for row in range(rows):
            quantize_block(x + (row * x_stride + element) * 4, group, start, is_halved, has_power)
            words = int32_at(target + row * X_WORDS * 4, X_WORDS)
            made = int32_at(group, X_ROW_WORDS)
            for word in range(X_WORDS):
                words[word] = made[word]
            for word in range(_TAIL_WORDS):
                int32_at(after + (word * rows + row) * 4, 1)[0] = made[X_WORDS + word]
        target += X_ROW_WORDS * rows * 4


@njit(nogil=True)
def arrange_floats(x, stride, depth, rows, words, target):
    """A tile's ``words`` elements, of rows ``stride`` apart; those past ``depth`` are zeros."""
    end = target + words * rows * 4
    for word in range(0, depth, LANES):
        arrange_words(x + word * 4, stride * 4, rows, min(LANES, depth - word), target + word * rows * 4, end)
    for i in range(depth * rows, words * rows):
        float32_at(target, words * rows)[i] = 0.0


@njit(nogil=True)
def arrange_pairs(x, stride, depth, rows, words, target):
    """A tile's pairs of bfloat16, in so many words."""
    pairs = block_on_stack()
    end = target + words * rows * 4
    for word in range(0, words, LANES):
        for row in range(rows):
            element = word * 2
            round_pairs(x + (row * stride + element) * 4, min(2 * LANES, depth - element), pairs + row * LANES * 4)
        arrange_words(pairs, LANES * 4, rows, min(LANES, words - word), target + word * rows * 4, end)


@njit(nogil=True)
def _arrange_groups_of_pairs(x, stride, depth, rows, target):
    """`arrange_groups` as pairs of int16: a row's even ones, then the odd ones."""
    quads = block_on_stack()
    for element in range(0, depth, GROUP):
        count = min(GROUP, depth - element)
        after = target + DOT_WORDS * rows * 4
        scales, starts = float32_at(after, rows), int32_at(after + rows * 4, rows)
        for row in range(rows):
            source = x + (row * stride + element) * 4
            scale = power_of(largest_bits(np.float32, source, count))
            total = quantize_words(np.float32, source, count, np.float32(1) / scale, np.int32(0), quads)
            starts[row], scales[row] = np.int32(-ZERO_POINT) * total, scale
            evens = target + row * DOT_WORDS * 4
            split_pairs(quads, evens, evens + GROUP_WORDS * 4)
        target += GROUP_ROW_WORDS * rows * 4


@njit(nogil=True)
def _arrange_groups_of_bytes(x, stride, depth, rows, target):
    """`arrange_groups` as words of four bytes. The numbers that round LANES groups are found before the first one is
    rounded, so that no rounding waits for its own."""
    rest = groups_on_stack()
    group_bytes, row_stride = GROUP_ROW_WORDS * rows * 4, stride * 4
    whole = depth // GROUP
    for first in range(0, rows, LANES // 2):
        some, source = min(LANES // 2, rows - first), x + first * row_stride
        words, adders = target + first * GROUP_WORDS * 4, target + (GROUP_WORDS * rows + first) * 4
        for begin in range(0, whole, LANES):
            end = min(whole, begin + LANES)
            for group in range(begin, end):
                find_adders(source + group * GROUP * 4, row_stride, some, adders + group * group_bytes)
            for group in range(begin, end):
                at, moved = source + group * GROUP * 4, group * group_bytes
                arrange_group(at, row_stride, some, words + moved, adders + moved, adders + rows * 4 + moved)
        count = depth - whole * GROUP
        if count:
            for row in range(some):
                values = float32_at(rest + row * GROUP * 4, GROUP)
                values[:] = np.float32(0)
                values[:count] = float32_at(source + row * row_stride + whole * GROUP * 4, count)
            moved = whole * group_bytes
            find_adders(rest, GROUP * 4, some, adders + moved)
            arrange_group(rest, GROUP * 4, some, words + moved, adders + moved, adders + rows * 4 + moved)


arrange_groups = _arrange_groups_of_pairs if _HAS_PAIRS else _arrange_groups_of_bytes
"""A tile's quantised groups."""


@njit(nogil=True)
def arrange_blocks(x, stride, length, rows, start, is_halved, has_power, as_pairs, target):
    """A tile's quantised groups for weights in blocks, whose integer sums begin at ``start`` times the sum of x: the
    first ``length`` elements of rows ``stride`` apart; ``as_pairs`` of int16."""
    if not as_pairs:
        for element in range(0, length, X_GROUP):
            source = x + element * 4
            if rows == 1:
                quantize_block(source, target, start, is_halved, has_power)
            else:
                quantize_blocks(source, stride * 4, rows, start, target, is_halved, has_power)
            target += X_ROW_WORDS * rows * 4
        return
    groups = block_on_stack()
    evens = block_on_stack()
    odds = block_on_stack()
    line = LANES * 4
    words = 2 * X_WORDS + _TAIL_WORDS
    end = target + length // X_GROUP * words * rows * 4
    for element in range(0, length, X_GROUP):
        for row in range(rows):
            place = groups + row * line
            quantize_block(x + (row * stride + element) * 4, place, start, is_halved, has_power)
            split_pairs(place, evens + row * line, odds + row * line)
        half = X_WORDS * rows * 4
        arrange_words(evens, line, rows, X_WORDS, target, end)
        arrange_words(odds, line, rows, X_WORDS, target + half, end)
        arrange_words(groups + X_WORDS * 4, line, rows, _TAIL_WORDS, target + 2 * half, end)
        target += words * rows * 4
