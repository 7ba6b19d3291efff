"""Loads of a warp's 32 rows of the weight into registers for `skinny`, as pairs of 16 bits, by format.

A *slot* is a load of 16 bytes a lane of each of its four tiles of 8 rows; a *step* is what two `mma.sync` take of it,
32 elements of K. A slot of 16-bit elements is a step, and they are multiplied as they come. A packed slot
(`packing.py`) is 2 or 4 steps, which are unpacked one at a time, just before they are multiplied: so loads in flight
take no extra registers. Scales and offsets of groups come with their slot.

Rows lie in tiles of 16: a gated unit's warp has one of the gate's and one of up's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import types

from numba_kernels.cuda.gemm.epilogue import scale_element
from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element_types import INTEGERS, ITEM_BYTES, SHIFTS
from numba_kernels.cuda.intrinsics.fragments import load_all
from numba_kernels.cuda.intrinsics.math import minimum_u32
from numba_kernels.cuda.intrinsics.unpack import half_pair, spread_all, unpack_all
from numba_kernels.cuda.packed_sections import sections_of
from numba_kernels.cuda.packing import TILE_BYTES, TILE_ROWS, Packing, packing_of

uint32, uint64 = types.uint32, types.uint64

STEP = 32  # elements of K
NOTHING = 8  # after the lane's scales and offsets: an element of `factors` that is 0
TILE_COLUMNS = 16  # of the output
PLAIN_SLOTS, PACKED_SLOTS = 4, 2
SETTLED_TILES = 2  # of 16 rows of x
MANY_SCALE_WORDS = 2  # of a lane, for 16 columns and a slot: with more of them registers become few


@dataclass(frozen=True, slots=True)
class WeightStream:
    """The device functions of a format, and the registers of a lane.

    Attributes:
        unit: K is split at multiples of so many elements.
        num_slots: loaded ahead, each again as soon as it is used.
        steps_a_slot: steps of a slot.
        num_words: of all slots. num_scale_words, num_zero_words: of their scales and offsets, at least 1.
        place: ``(places, weight, n, k, first_column, position, lane)``: this lane's addresses, in arrays ``(rows,
            scale_rows, zero_rows)``.
        advance: ``places``: to the next slots.
        load: a slot's ``(kept, places, column, end, is_whole)``, a tuple (`in_turn`), into ``kept``, arrays ``(words,
            scales, zeros)``.
        load_early: the same before `wait_for_previous_grid`.
        unpack: a slot's and step's ``(pairs, factors, words, scales, zeros)``; None if words are pairs.
        spread, unpack_words: the two halves of it, ``(factors, scales, zeros)`` and ``(pairs, factors, words)``, of a
            slot, a step, and the first of 8 elements of `factors`.
        is_spread_alike: whether steps 2 i and 2 i + 1 of a slot have the same factors.
        is_settled: whether groups' scales multiply a slot's sums, not its numbers.
        row_scales: ``(weight, n, k)``: the address of the rows' scales.
        scale_columns, scale_column: ``(values of 4 columns or one, weight, n, k, column)``: times their rows' scales.
    """

    unit: int
    num_slots: int
    steps_a_slot: int
    num_words: int
    num_scale_words: int
    num_zero_words: int
    place: Any
    advance: Any
    load: Callable[[int], Any]
    load_early: Callable[[int], Any]
    unpack: Callable[[int, int], Any] | None
    scale_columns: Any
    scale_column: Any
    spread: Callable[..., Any] | None = None
    unpack_words: Callable[..., Any] | None = None
    is_spread_alike: bool = True
    is_settled: bool = False
    row_scales: Any = None

    @property
    def num_steps(self) -> int:
        """Words of all slots."""
        return self.num_slots * self.steps_a_slot


@functools.cache
def weight_stream(weight: str, dtype: str, row_tiles: int, is_gated: bool, has_parts: bool = False) -> WeightStream:
    """The stream of a product's weight and x's dtype, for some tiles of 16 rows of x, or, with `has_parts`, for
    each."""
    packing = packing_of(weight)
    if packing is None:
        return _plain(is_gated)
    has_few_registers = packing.steps == 4 and (packing.has_zeros or not has_parts)
    is_tight = row_tiles == 4 and (has_few_registers or scale_words_of(packing, dtype) > MANY_SCALE_WORDS)
    return packed_stream(
        packing, dtype, is_gated, 1 if is_tight else PACKED_SLOTS, is_settled=settles(packing, row_tiles),
        nothing=NOTHING,
    )  # fmt: skip


def settles(packing: Packing, row_tiles: int) -> bool:
    """Whether groups' scales multiply sums, not numbers: where a lane's slot has one for a row and four steps, numbers
    need no factor of their own, and registers suffice for a slot's own sums."""
    has_one = packing.steps == 4 and packing.lane_scales == 1
    return has_one and packing.element in INTEGERS and row_tiles <= SETTLED_TILES


def unit_of(weight: str) -> int:
    """K is split at multiples of so many elements, whatever the rows."""
    packing = packing_of(weight)
    return PLAIN_SLOTS * STEP if packing is None else PACKED_SLOTS * packing.slot


def scale_words_of(packing: Packing, dtype: str) -> int:
    """Words of scales and offsets that a lane has for 16 columns and a slot."""
    return (packing.chunk_bytes(dtype) + packing.zeros_bytes(dtype)) // 4


def _plain(is_gated: bool) -> WeightStream:
    columns = TILE_COLUMNS if is_gated else 2 * TILE_COLUMNS

    @device_function
    def place(places, weight, n, k, first_column, position, lane):
        rows = places[0]
        # Rows of the weight beyond the last repeat it: their sums are never stored.
        g, t = lane >> uint32(2), lane & uint32(3)
        for r in range(4):
            row = uint32(first_column + uint32(8 * r % columns) + g)
            row = minimum_u32(row, uint32(n - uint32(1)))
            if 8 * r >= columns:
                row = uint32(row + n)  # up's
            row_bytes = uint64(k) * uint64(2)
            rows[r] = weight + uint64(row) * row_bytes + uint64(position * uint32(2) + t * uint32(16))

    @device_function
    def advance(places):
        for r in range(4):
            places[0][r] += uint64(PLAIN_SLOTS * STEP * 2)

    def loader(how: str, slot: int) -> Any:
        first = 16 * slot
        load_whole = load_all(how, tuple((first + 4 * r, r, slot * STEP * 2) for r in range(4)))

        @device_function
        def load(state):
            (words, _, _), (rows, _, _), column, end, is_whole = state
            if is_whole:
                load_whole(words, rows)
            else:
                for e in range(16):
                    words[first + e] = uint32(0)
                if uint32(column + uint32(slot * STEP)) < end:
                    load_whole(words, rows)

        return load

    return WeightStream(
        unit_of(""), PLAIN_SLOTS, 1, 16 * PLAIN_SLOTS, 1, 1, place, advance, functools.partial(loader, "stream"),
        functools.partial(loader, "stream_early"), None,
        device_function(lambda values, weight, n, k, column: values),
        device_function(lambda value, weight, n, k, column: value),
    )  # fmt: skip


@functools.cache
def unpackers(
    packing: Packing, dtype: str, tiles: int, *, is_settled: bool = False, nothing: int = -1
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`WeightStream.spread` and `unpack_words`, of slots of so many tiles of 8 rows, two or four."""
    scale_words, zero_words = packing.chunk_bytes(dtype) // 4, packing.zeros_bytes(dtype) // 4
    halves, has_scales, has_zeros = packing.halves, packing.group > 0, packing.has_zeros
    multiplies_scales = has_scales and not is_settled
    is_shifted = not has_scales and packing.element not in INTEGERS
    shift = half_pair(2.0 ** SHIFTS.get((packing.element, dtype), 0), dtype)

    def spreader(slot: int, step: int, base: int = 0) -> Any:
        lane_scale = (step if halves == 2 else step * packing.lane_scales // packing.steps) if has_scales else 0

        def spread(kind: str, words: int, numbers_a_word: int, first: int) -> Any:
            plan = []
            for r in range(tiles):
                number = 2 * lane_scale + r % 2
                word = (tiles // 2 * slot + r // 2) * words + number // numbers_a_word
                plan.append((first + r, word, number % numbers_a_word))
            return spread_all(kind, dtype, tuple(plan))

        spread_scales = spread_zeros = None
        if multiplies_scales:
            spread_scales = spread(packing.scale, scale_words, 4 // packing.scale_bytes(dtype), base)
        if has_zeros:
            spread_zeros = spread("value", zero_words, 4 // ITEM_BYTES[dtype], base + 4)

        @device_function
        def spread_all_factors(factors, scales, zeros):
            if multiplies_scales:
                spread_scales(factors, scales)
            if is_shifted:
                for r in range(tiles):
                    factors[base + r] = uint32(shift)
            if has_zeros:
                spread_zeros(factors, zeros)

        return spread_all_factors

    def words_unpacker(slot: int, step: int, base: int = 0) -> Any:
        has_factor = multiplies_scales or is_shifted
        unpack_words = unpack_all(
            packing.element, dtype,
            tuple(
                (4 * r, 4 * tiles * slot + 4 * r + packing.lane_words * step, base + r if has_factor else -1,
                 base + 4 + r if has_zeros else -1)
                for r in range(tiles)
            ), has_zeros, nothing,
        )  # fmt: skip

        @device_function
        def unpack(pairs, factors, words):
            unpack_words(pairs, words, factors, factors)

        return unpack

    return spreader, words_unpacker


@functools.cache
def packed_stream(
    packing: Packing, dtype: str, is_gated: bool, num_slots: int, *, is_settled: bool = False,
    nothing: int = -1,
) -> WeightStream:  # fmt: skip
    """The stream of a packed weight, with so many slots ahead. If settled, pairs are numbers without their groups'
    scales. `nothing` is an element of `factors` that is 0, or -1 (`unpack_all`)."""
    find, slot_elements = sections_of(packing, dtype), packing.slot
    scale_words, zero_words = packing.chunk_bytes(dtype) // 4, packing.zeros_bytes(dtype) // 4  # of a tile and slot
    scale_step = TILE_ROWS * packing.halves * packing.chunk_bytes(dtype)  # bytes from slot to slot
    zero_step = TILE_ROWS * packing.halves * packing.zeros_bytes(dtype)
    halves, has_scales, has_zeros = packing.halves, packing.group > 0, packing.has_zeros
    rows_a_column = 2 if is_gated else 1

    @device_function
    def place(places, weight, n, k, first_column, position, lane):
        rows, scale_rows, zero_rows = places
        words, all_scales, all_zeros, _, slots = find(weight, uint32(n * uint32(rows_a_column)), k)
        g, t = lane >> uint32(2), lane & uint32(3)
        last = uint32(uint32(n + uint32(TILE_COLUMNS - 1)) // uint32(TILE_COLUMNS) - uint32(1))
        slot = uint32(position // uint32(slot_elements))
        for h in range(2):
            tile = uint32(first_column // uint32(TILE_COLUMNS))
            if is_gated:
                tile = minimum_u32(tile, last)
                if h == 1:
                    tile = uint32(tile + n // uint32(TILE_COLUMNS))  # up's
            else:
                tile = minimum_u32(uint32(tile + uint32(h)), last)
            for r in range(2):
                at = (uint64(tile * uint32(2) + uint32(r)) * uint64(slots) + uint64(slot)) * uint64(TILE_BYTES)
                rows[2 * h + r] = words + at + uint64(lane * uint32(16))
            pair = (uint64(tile) * uint64(slots) + uint64(slot)) * uint64(TILE_ROWS) + uint64(g)
            if halves == 2:
                pair = pair * uint64(2) + uint64(t >> uint32(1))
            scale_rows[h] = all_scales + pair * uint64(4 * scale_words)
            zero_rows[h] = all_zeros + pair * uint64(4 * zero_words)

    @device_function
    def advance(places):
        rows, scale_rows, zero_rows = places
        for r in range(4):
            rows[r] += uint64(num_slots * TILE_BYTES)
        for h in range(2):
            scale_rows[h] += uint64(num_slots * scale_step)
            zero_rows[h] += uint64(num_slots * zero_step)

    def loader(how: str, slot: int) -> Any:
        first = 16 * slot
        load_words = load_all(how, tuple((first + 4 * r, r, slot * TILE_BYTES) for r in range(4)))
        load_scales = load_zeros = None
        if has_scales:
            places = tuple(((2 * slot + h) * scale_words, h, slot * scale_step) for h in range(2))
            load_scales = load_all(how, places, scale_words)
        if has_zeros:
            places = tuple(((2 * slot + h) * zero_words, h, slot * zero_step) for h in range(2))
            load_zeros = load_all(how, places, zero_words)

        @device_function
        def load_whole(kept, places):
            (words, scales, zeros), (rows, scale_rows, zero_rows) = kept, places
            if has_scales:
                load_scales(scales, scale_rows)
            if has_zeros:
                load_zeros(zeros, zero_rows)
            load_words(words, rows)

        @device_function
        def load(state):
            kept, places, column, end, is_whole = state
            if is_whole:
                load_whole(kept, places)
            else:
                words, scales, zeros = kept
                for e in range(16):
                    words[first + e] = uint32(0)
                for e in range(2 * scale_words):
                    scales[2 * slot * scale_words + e] = uint32(0)
                for e in range(2 * zero_words):
                    zeros[2 * slot * zero_words + e] = uint32(0)
                if uint32(column + uint32(slot * slot_elements)) < end:
                    load_whole(kept, places)
                elif is_settled:  # noqa: SIM102 - numba prunes; sums of other lanes' numbers are this lane's, too
                    if uint32((column & uint32(~(STEP - 1) & 0xFFFFFFFF)) + uint32(slot * slot_elements)) < end:
                        load_scales(scales, places[1])

        return load

    spreader, words_unpacker = unpackers(packing, dtype, 4, is_settled=is_settled, nothing=nothing)

    def unpacker(slot: int, step: int) -> Any:
        spread, unpack_words = spreader(slot, step), words_unpacker(slot, step)

        @device_function
        def unpack(pairs, factors, words, scales, zeros):
            spread(factors, scales, zeros)
            unpack_words(pairs, factors, words)

        return unpack

    load_quad, load_one = memory.load_4xf32, memory.load_f32

    @device_function
    def row_scales_of(weight, n, k):
        return find(weight, uint32(n * uint32(rows_a_column)), k)[3]

    @device_function
    def scale_columns(values, weight, n, k, column):
        a, b, c, d = load_quad(row_scales_of(weight, n, k) + uint64(column) * uint64(4))
        return (
            scale_element(values[0], a), scale_element(values[1], b), scale_element(values[2], c),
            scale_element(values[3], d),
        )  # fmt: skip

    @device_function
    def scale_column(value, weight, n, k, column):
        return scale_element(value, load_one(row_scales_of(weight, n, k) + uint64(column) * uint64(4)))

    return WeightStream(
        unit_of(packing.name), num_slots, packing.steps, 16 * num_slots, max(1, 2 * num_slots * scale_words),
        max(1, 2 * num_slots * zero_words), place, advance, functools.partial(loader, "stream"),
        functools.partial(loader, "stream_early"), unpacker, scale_columns, scale_column, spreader, words_unpacker,
        halves == 1 and 2 * packing.lane_scales <= packing.steps, is_settled, row_scales_of,
    )  # fmt: skip
