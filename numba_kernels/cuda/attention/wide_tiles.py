"""Tiles of heads wider than `WIDE`, and products with mma.sync whose strips of 16 rows have several warps, which divide
their columns: those of `flash_wide` and of latent attention.

A strip of 16 rows has `groups` warps. Each scores its share of a tile's keys over the whole head dim, and sums its
share of the columns over all of the tile's keys: a strip's largest scores and weights go through shared memory, and no
product is formed twice. A lane's accumulators belong to two rows of its strip, eight apart, and to two neighbouring
keys or columns; from bytes, of 16 columns the even ones are one tile of results, the odd ones the next
(`quantised_pages`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import cuda, float32, uint32, uint64

from numba_kernels.cuda.attention.flash_parts import Form, values_adder
from numba_kernels.cuda.attention.online_softmax import group_sum, next_origin, subtract
from numba_kernels.cuda.attention.parts import scratch_bytes
from numba_kernels.cuda.attention.tiles import Variant, run_copier, tile_shape
from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import exp2
from numba_kernels.cuda.intrinsics.memory import (
    shared_load_2xf32,
    shared_load_4xf32,
    shared_store_b32,
    shared_store_f32,
    store_2xf32,
    store_4xf32,
)
from numba_kernels.cuda.intrinsics.mma import (
    load_matrix_x4,
    product_adder,
    put_4,
)
from numba_kernels.cuda.intrinsics.shared_memory import SMALL
from numba_kernels.cuda.intrinsics.sync import sync_block, sync_named
from numba_kernels.cuda.intrinsics.warp import maximum_f32, or_b32, shuffle_xor_f32
from numba_kernels.cuda.quantised_pages import fragment_unpacker


@dataclass(frozen=True)
class WideTiles:
    """A block's tiles, in shared memory: scratch, queries, weights, largest scores, then keys and values.

    Attributes:
        dtype, pages: of the queries, and of pages of bytes, or "".
        strips: of 16 rows of queries.
        groups: warps of a strip.
        num_keys: of a tile of keys or values; a multiple of 8 a group.
        stages: tiles of keys, and of values.
    """

    dtype: str
    pages: str
    head_dim: int
    strips: int
    groups: int
    num_keys: int
    stages: int

    @property
    def num_rows(self) -> int:
        return 16 * self.strips

    @property
    def threads(self) -> int:
        return 32 * self.strips * self.groups

    @property
    def columns(self) -> int:
        return tile_shape(self.dtype, self.head_dim).columns

    @property
    def pitch(self) -> int:
        """Bytes from one row of queries to the next."""
        return tile_shape(self.dtype, self.head_dim).pitch

    @property
    def key_pitch(self) -> int:
        return tile_shape(self.pages or self.dtype, self.head_dim).pitch

    @property
    def weights_pitch(self) -> int:
        """An odd number of 16-byte pieces."""
        return 2 * self.num_keys + 16

    @property
    def own_keys(self) -> int:
        """Keys that a warp scores."""
        return self.num_keys // self.groups

    @property
    def own_columns(self) -> int:
        """Columns that a warp sums."""
        return self.columns // self.groups

    @property
    def queries_at(self) -> int:
        return scratch_bytes(self.threads)

    @property
    def weights_at(self) -> int:
        return self.queries_at + self.num_rows * self.pitch

    @property
    def maxima_at(self) -> int:
        return self.weights_at + self.num_rows * self.weights_pitch

    @property
    def keys_at(self) -> int:
        return self.maxima_at + self.groups * self.num_rows * 4

    @property
    def tile_bytes(self) -> int:
        """A tile of keys or values, with their scales."""
        return self.num_keys * (self.key_pitch + (4 if self.pages else 0))

    @property
    def values_at(self) -> int:
        return self.keys_at + self.stages * self.tile_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        return self.values_at + self.stages * self.tile_bytes


def wide_tiles(dtype: str, pages: str, head_dim: int, arch: str, is_split: bool) -> WideTiles:
    """The tiles of an architecture, for decode where split: two stages then, or larger tiles of rows."""
    if arch in SMALL:
        return WideTiles(dtype, pages, head_dim, 1 if is_split else 2, 2, 16, 2 if is_split else 1)
    return WideTiles(dtype, pages, head_dim, 1 if is_split else 4, 4 if is_split else 2, 32, 2 if is_split else 1)


def wide_form(tiles: WideTiles, variant: Variant) -> Form:
    """A warp's part, its own keys and columns, for `flash_parts`."""
    value_tiles, pitch, key_pitch = tiles.own_columns // 8, tiles.pitch, tiles.key_pitch
    value_fours, value_pairs = (-(-value_tiles // 4), 0) if tiles.pages else (0, value_tiles // 2)
    return Form(
        tiles.dtype, variant, tiles.own_keys, 1, tiles.columns // 16, tiles.own_keys // 8, value_tiles, 0, value_fours,
        0, value_pairs, False, pitch, pitch, key_pitch, key_pitch,
    )  # fmt: skip


@functools.cache
def wide_tile_copier(tiles: WideTiles, block_size: int, has_window: bool) -> tuple[int, Any, Any, Any, Any]:
    """How many runs of rows a thread has, then `run_copier`'s functions for all of them."""
    pieces = tile_shape(tiles.pages or tiles.dtype, tiles.head_dim).pieces
    runs = -(-tiles.num_keys * pieces // (8 * tiles.threads))
    found = run_copier(
        tiles.pages or tiles.dtype, tiles.head_dim, block_size, tiles.num_keys, runs, tiles.threads, has_window
    )
    return runs, *found


@functools.cache
def wide_scorer(form: Form) -> tuple[Any, Any]:
    """``place(lane)``: where a lane's rows of keys lie in its group's part of a tile, and ``score(scores, queries,
    keys)``: the products of the strip's rows at the shared address `queries`, of the lane, with those at `keys`.

    `scores` is an array [tiles of 8 keys, 4]. One such tile has two sums, of even and odd steps, so that no product
    waits for the one before."""
    key_tiles, steps, pages = form.key_tiles, form.steps, form.variant.pages
    has_scales, step_bytes = pages != "", 16 if pages else 32
    steps_a_load = (4 if has_scales else 2) // key_tiles
    chains = 2 if key_tiles == 1 else 1
    add_product, unpack = product_adder(form.dtype), fragment_unpacker(pages or "s8", form.dtype, 4)
    pitch, num_sums = form.key_pitch, chains * key_tiles

    @device_function
    def place(lane):
        row = lane & uint32(7)
        part = uint32(lane >> uint32(3))
        if key_tiles == 2 and has_scales:
            row = lane & uint32(15)
            part = uint32(lane >> uint32(4))
        elif key_tiles == 2:
            row = uint32(row + (lane >> uint32(4)) * uint32(8))
            part = part & uint32(1)
        return uint32(row * uint32(pitch) + part * uint32(16))

    @device_function
    def score(scores, queries, keys):
        words, room = cuda.local.array(4, uint32), cuda.local.array(1, uint32)
        pairs = cuda.local.array(8, uint32) if has_scales else words
        sums = cuda.local.array((num_sums, 4), float32)
        for i in range(num_sums):
            for j in range(4):
                sums[i, j] = float32(0)
        for load in range(steps // steps_a_load):
            put_4(words, load_matrix_x4(uint32(keys + uint32(load * steps_a_load * step_bytes))))
            if has_scales:
                unpack(pairs, words, room)
            for s in range(steps_a_load):
                step = load * steps_a_load + s
                query = load_matrix_x4(uint32(queries + uint32(step * 32)))
                for i in range(key_tiles):
                    which = 2 * (s * key_tiles + i)
                    add_product(sums[i + key_tiles * (s % chains)], query, (pairs[which], pairs[which + 1]))
        for i in range(key_tiles):
            for j in range(4):
                scores[i, j] = sums[i, j]
                if chains == 2:
                    scores[i, j] = sums[i, j] + sums[i + 1, j]

    return place, score


@functools.cache
def row_exchanger(groups: int) -> tuple[Any, Any]:
    """``leave(place, group, upper, lower)`` and ``read(place, h) -> groups numbers``: the groups' numbers of a lane's
    two rows, at the shared address of the upper row's."""
    load = {2: shared_load_2xf32, 4: shared_load_4xf32}[groups]

    @device_function
    def leave(place, group, upper, lower):
        at = uint32(place + group * uint32(4))
        shared_store_f32(at, upper)
        shared_store_f32(uint32(at + uint32(32 * groups)), lower)

    return leave, device_function(lambda place, h: load(uint32(place + uint32(32 * groups * h))))


@functools.cache
def wide_weigher(form: Form, groups: int) -> Any:
    """A device function: scores of a warp's own keys become weights, measured from the strip's largest so far.

    ``(held, place, barrier, group, is_first)``: `place` is the shared address of the lane's upper row in the block's
    largest scores, `is_first` whether the lane stores its quad's. Totals are of own keys. Sums are rescaled where a row
    has a larger score than before.
    """
    key_tiles, value_tiles, team, (leave, read) = form.key_tiles, form.value_tiles, 32 * groups, row_exchanger(groups)

    @device_function
    def weigh(held, place, barrier, group, is_first):
        scores, maxima, totals, factors, sums = held.scores, held.maxima, held.totals, held.factors, held.sums
        is_larger = uint32(0)
        own = cuda.local.array(2, float32)
        for h in range(2):
            largest = maxima[0, h]
            for i in range(key_tiles):
                largest = maximum_f32(largest, maximum_f32(scores[0, i, 2 * h], scores[0, i, 2 * h + 1]))
            largest = maximum_f32(largest, shuffle_xor_f32(largest, uint32(1)))
            largest = maximum_f32(largest, shuffle_xor_f32(largest, uint32(2)))
            own[h] = largest
        if is_first:  # one branch, after all shuffles, or LLVM makes two of them
            leave(place, group, own[0], own[1])
        sync_named(barrier, uint32(team))
        for h in range(2):
            largest, found = maxima[0, h], read(place, h)
            for other in range(groups):
                largest = maximum_f32(largest, found[other])
            origin, factors[0, h], is_larger = next_origin(largest, maxima[0, h], is_larger)
            maxima[0, h] = largest
            total = totals[0, h] * factors[0, h]
            for i in range(key_tiles):
                for j in range(2):
                    scores[0, i, 2 * h + j] = exp2(subtract(scores[0, i, 2 * h + j], origin))
                    total = total + scores[0, i, 2 * h + j]
            totals[0, h] = total
        if or_b32(is_larger) != uint32(0):
            for i in range(value_tiles):
                for j in range(4):
                    sums[0, i, j] = sums[0, i, j] * factors[0, j // 2]

    return weigh


@functools.cache
def total_adder(groups: int) -> Any:
    """A device function ``(totals, place, group, is_first)`` of all threads of a block: rows' totals of all keys."""
    leave, read = row_exchanger(groups)

    @device_function
    def add_totals(totals, place, group, is_first):
        for h in range(2):
            totals[0, h] = group_sum(totals[0, h], 4)
        if is_first:
            leave(place, group, totals[0, 0], totals[0, 1])
        sync_block()
        for h in range(2):
            found, total = read(place, h), float32(0)
            for other in range(groups):
                total = total + found[other]
            totals[0, h] = total

    return add_totals


@functools.cache
def weight_storer(form: Form, weights_pitch: int) -> Any:
    """A device function ``(place, scores)``: a warp's weights, rounded, go to the lane's place among the strip's."""
    key_tiles, pack = form.key_tiles, pack_bf16 if form.dtype == "bf16" else pack_f16

    @device_function
    def store(place, scores):
        for i in range(key_tiles):
            for h in range(2):
                pair = pack(scores[i, 2 * h], scores[i, 2 * h + 1])
                shared_store_b32(uint32(place + uint32(16 * i + 8 * h * weights_pitch)), pair)

    return store


@functools.cache
def wide_summer(form: Form, num_keys: int) -> Any:
    """A device function ``(held, weights, values)``: adds the products of the strip's weights, at the lane's shared
    address, with the group's columns of values, at the lane's."""
    add_values, key_steps, pitch = values_adder(form), num_keys // 16, form.value_pitch

    @device_function
    def add(held, weights, values):
        for step in range(key_steps):
            put_4(held.weights[0], load_matrix_x4(uint32(weights + uint32(32 * step))))
            add_values(held, uint32(values + uint32(step * 16 * pitch)))

    return add


@functools.cache
def result_recorder(form: Form) -> Any:
    """``record(target, sums, half, quarter)``: a lane's sums of its upper (0) or lower row, in float32 at an address of
    device memory."""
    fours, singles = form.value_tiles // 2 - form.value_pairs, 2 * form.value_pairs

    @device_function
    def record(target, sums, half, quarter):
        for i in range(fours):  # even columns of 16, then the odd ones
            a, b = sums[2 * i, 2 * half], sums[2 * i + 1, 2 * half]
            c, d = sums[2 * i, 2 * half + 1], sums[2 * i + 1, 2 * half + 1]
            store_4xf32(target + uint64(quarter) * uint64(16) + uint64(64 * i), (a, b, c, d))
        for i in range(singles):
            two = sums[i, 2 * half], sums[i, 2 * half + 1]
            store_2xf32(target + uint64(quarter) * uint64(8) + uint64(32 * i), two)

    return record
