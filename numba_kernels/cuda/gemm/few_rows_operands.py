"""The order of `few_rows`'s factors in `mma.sync`, and the layout of its sums.

The first factor's four registers are neighbours, and so are the second's two. A 16-bit weight comes as it is
multiplied, 16 bytes of a row a lane: two pairs of neighbours, which are the second factor's. x is the first, and some
of its registers move. A packed weight's pairs are made one by one, in any register: it is the first factor, 16 rows of
it, x the second, and no register moves.

    first factor    a lane's sums of tile j: 16 rows of x, 32 of the weight    elements of `sums`
    x               rows g, g + 8; columns 8 r + 2 t, + 1, of r = 0 to 3       16 j + 4 r + 2 (row) + (column)
    the weight      rows 8 i + 2 t, + 1, of i = 0, 1; columns 16 h + g, + 8    16 j + 8 i + 4 h + 2 (column) + (row)

with g = lane // 4, t = lane % 4. Both take the same elements of K at once, and add them in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import types

from numba_kernels.cuda.intrinsics import convert, memory, mma
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.fragments import add_scaled, load_all, multiply_all

uint32 = types.uint32

COLUMNS = 32  # of the weight's rows, a warp
TILE_BYTES = 8 * 32 * 2  # of 8 rows of x and a step: 16 bytes for each lane


@dataclass(frozen=True, slots=True)
class Operands:
    """Device functions of an order of factors.

    Attributes:
        multiplier: ``(bytes from a stage, first word, tiles) -> (sums, x_words, x_stages, pairs)``: some tiles of 16
            rows of x, from shared memory, times 16 words of the weight from there on.
        store_sums: ``(tile, sums, g, t)``: to shared memory, float32 [16 row tiles, COLUMNS] at `tile`.
        flip_of: ``row -> bits of the column that are exchanged`` there, so that there are no bank conflicts.
    """

    multiplier: Callable[[int, int, range], Any]
    store_sums: Any
    flip_of: Any


def _x_loader(at: int, tiles: range) -> Any:
    """``(x_words, x_stages)``: so many tiles of 16 rows of x, from `at` bytes after the stage on."""
    return load_all("shared", tuple((4 * j, 0, at + j * TILE_BYTES) for j in range(2 * len(tiles))))


@functools.cache
def x_first(dtype: str, row_tiles: int) -> Operands:
    """The operands of a 16-bit weight."""
    flip_of, store_pair = mma.accumulator_flip(COLUMNS), memory.shared_store_2xf32

    def multiplier(at: int, word: int, tiles: range) -> Any:
        load_x = _x_loader(at, tiles)
        multiply_tiles = multiply_all(
            dtype,
            tuple(
                (
                    4 * (4 * tile + r), tuple(8 * j + 2 * h + e for e in (0, 4, 1, 5)),
                    (word + 4 * r + 2 * h, word + 4 * r + 2 * h + 1),
                )
                for j, tile in enumerate(tiles) for h in range(2) for r in range(4)
            ),
        )  # fmt: skip

        @device_function
        def multiply(sums, x_words, x_stages, pairs):
            load_x(x_words, x_stages)
            multiply_tiles(sums, x_words, pairs)

        return multiply

    @device_function
    def store_sums(tile, sums, g, t):
        row = uint32(tile + g * uint32(COLUMNS * 4))
        for r in range(4):
            at = uint32(row + ((uint32(8 * r) + t * uint32(2)) ^ flip_of(g)) * uint32(4))
            for j in range(row_tiles):
                for e in range(2):
                    pair = sums[4 * (4 * j + r) + 2 * e], sums[4 * (4 * j + r) + 2 * e + 1]
                    store_pair(uint32(at + uint32((16 * j + 8 * e) * COLUMNS * 4)), pair)

    return Operands(multiplier, store_sums, flip_of)


@functools.cache
def weight_first(dtype: str, row_tiles: int) -> Operands:
    """The operands of a packed weight."""
    store_sum = memory.shared_store_f32
    # Lanes t store rows 2 t, of 8 neighbouring columns each.
    flip_of = device_function(lambda row: (row & uint32(6)) << uint32(2))

    def multiplier(at: int, word: int, tiles: range) -> Any:
        load_x = _x_loader(at, tiles)
        multiply_tiles = multiply_all(
            dtype,
            tuple(
                (
                    16 * tile + 8 * i + 4 * h, tuple(word + 8 * h + 2 * q + e for e in (0, 4, 1, 5)),
                    (8 * j + 4 * i + 2 * q, 8 * j + 4 * i + 2 * q + 1),
                )
                for j, tile in enumerate(tiles) for q in range(2) for i in range(2) for h in range(2)
            ),
        )  # fmt: skip

        @device_function
        def multiply(sums, x_words, x_stages, pairs):
            load_x(x_words, x_stages)
            multiply_tiles(sums, pairs, x_words)

        return multiply

    @device_function
    def store_sums(tile, sums, g, t):
        for e in range(2):
            row = uint32(tile + (t * uint32(2) + uint32(e)) * uint32(COLUMNS * 4))
            for column in range(4):
                at = uint32(row + ((uint32(8 * column) + g) ^ flip_of(t * uint32(2))) * uint32(4))
                for i in range(2 * row_tiles):
                    value = sums[8 * i + 4 * (column // 2) + 2 * (column % 2) + e]
                    store_sum(uint32(at + uint32(8 * i * COLUMNS * 4)), value)

    return Operands(multiplier, store_sums, flip_of)


@functools.cache
def settler(dtype: str, row_tiles: int, slot: int) -> Any:
    """A device function ``(sums, parts, scales, factors)``: a slot's sums, with the weight first, times their rows'
    scales, of which the lane has those of rows g and g + 8 of a tile in a word."""
    unpack = {"bf16": convert.unpack_bf16, "f16": convert.unpack_f16}[dtype]
    add = add_scaled(
        tuple(
            (8 * i + 4 * h + 2 * column + row, 2 * h + column)
            for i in range(2 * row_tiles) for h in range(2) for column in range(2) for row in range(2)
        )
    )  # fmt: skip

    @device_function
    def settle(sums, parts, scales, factors):
        factors[0], factors[1] = unpack(scales[2 * slot])
        factors[2], factors[3] = unpack(scales[2 * slot + 1])
        add(sums, parts, factors)

    return settle
