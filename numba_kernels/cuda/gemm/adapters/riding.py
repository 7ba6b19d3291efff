"""Low-rank sums of adapters that ride on a product's launch: ``y[t] += up[a] (down[a] x[t]) + bias[a]``.

The launch gets more blocks, in front, which *shrink*: each computes numbers of ``between [m, R]``, float32, and then
counts itself. The other blocks multiply, and *expand* when all of these have counted: an output's low-rank sum is added
to its sum before a gate, a bias or a residual. A GPU starts blocks in the order of the grid, so all that shrink have
started before one waits for them, and they wait for the previous grid alone.

One warp of a block waits for them, and counts the block out at once (`wait_for_shrinking`); the others have met it
before they expand. The answer of this atomic addition is read at the block's end (`reset_counters`), so its latency
overlaps with the work between. The last block sets the counters back to zero for the next launch.

A block that shrinks takes up to `rows` rows of one adapter and RANKS ranks at a time, so that it reads x and ``down``
once for several numbers; its warps share K. Where more rows and ranks are wanted than blocks, it takes several in turn.
Slots' addresses come before the previous grid has ended.

Kernels with rings, of one row and two, have one warp more, the last, which expands while the others multiply
(`kept_tiles`). These keep the sums of a few tiles, and finish them together: so the weight's stream stands still
only if all of these tiles take less time than shrinking. In other kernels the lane that has an output's sum
expands.

A number of ``between`` is added up in an order of K alone, an output's sum in that of ranks: a kernel's rows have their
bits beside any others. Slots are those of `experts.low_rank`. Products of more rows shrink and expand by `tiles`.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.gemm import epilogue
from numba_kernels.cuda.gemm.epilogue import GATED, Arguments, finisher, norm_scale, scale_element, squares_leaver
from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import floats_loader, vector_loader
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, sync_named, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import (
    ballot,
    count_b32,
    exchange,
    shuffle_index_b32,
    sync_warp,
    warp_sum,
)

COLUMNS = 1024  # of one entry of ``ranges``
MAX_ROWS = 32  # a lane each
RINGS_ON = "sm_90a"  # where kernels with rings take adapters; elsewhere they have too few registers
_KEPT_TILES = 8  # of one row
RANKS = 4  # of a block at a time: a divisor of `experts.low_rank.RANKS_MULTIPLE`
_MOST_ROWS_AT_ONCE = 4
_MOST_BLOCKS, _MOST_TURNS = 64, 4
_WIDTH = 8

ARGUMENT_TYPES = (types.uint64,) * 8 + (types.uint32,) * 5
"""After those of the product: the rows [m, K] before any rounding or reordering; adapters int32 [m]; the addresses of
each slot's down [R, K], and in ``ups [2, S]`` of its up [N, R] and bias float32 [N] or 0; ``ranges [S, blocks + 1, 2]``
uint32, of which a slot's last entry begins with 1 if it has a bias; the weights of the norm float32 [K], or 0; between,
float32 [m, R + 1]; two counters, which are 0 before a launch and after it; R, S, entries of a slot's ranges, and blocks
that shrink."""


Riding = namedtuple(
    "Riding",
    "x adapters downs ups ranges norm between counters ranks num_slots num_ranges num_shrinking team_warps",
)
"""Those arguments, as device functions get them, and the warps of a team (`Launch.team_warps`)."""


NOT_COUNTED = uint32(0xFFFFFFFF)  # of a lane that has not counted its block out
count_up = instruction("red.release.gpu.global.add.u32 [$0], $1;", "", "l r")
# Relaxed: an acquiring one would wait for its number at once. It depends on what the thread has read.
_count_out = instruction("atom.relaxed.gpu.global.add.u32 $0, [$1], $2;", "r", "l r")
_load_count = instruction("ld.acquire.gpu.global.u32 $0, [$1];", "r", "l")
_reset_count = instruction("st.relaxed.gpu.global.u32 [$0], $1;", "", "l r")


def rows_at_once(rows: int) -> int:
    """The rows of one adapter that a block shrinks together, where a product has so many rows."""
    return next(count for count in (1, 2, _MOST_ROWS_AT_ONCE) if count >= min(rows, _MOST_ROWS_AT_ONCE))


def shared_bytes(warps: int, rows: int, sums: int = 0) -> int:
    """Static shared memory of `shrinker`, and of kept tiles of so many sums (`kept_tiles`)."""
    return (warps * rows * (RANKS + 1) + 2 * most_kept(rows) * sums) * 4


def shrinking_blocks(rows: int, ranks: int, idle: int = _MOST_BLOCKS) -> int:
    """The blocks that shrink so many rows, for all ranks of a slot: no more than are `idle`, unless each would take
    more than a few rows and ranks in turn."""
    most = min(rows * -(-ranks // RANKS), _MOST_BLOCKS)
    return min(most, max(idle, -(-most // _MOST_TURNS)))


def shared_blocks(tiles: int, at_once: int, rows: int, ranks: int) -> tuple[int, int]:
    """(blocks that multiply so many tiles in turn, blocks that shrink): together `at_once`, so that neighbours in the
    stream fit beside them, if the tiles take no more turns then."""
    least = -(-tiles // -(-tiles // at_once))
    shrinking = shrinking_blocks(rows, ranks, at_once - least)
    return max(least, min(tiles, at_once - shrinking)), shrinking


@device_function
def is_adapted(slot, rank, past, ranges, num_ranges):
    """Whether an adapter has some of these ranks."""
    entry, index, found = ranges + uint64(slot) * uint64(num_ranges) * uint64(8), uint32(0), uint32(0)
    while index < num_ranges:
        if memory.load_b32(entry) < past and rank < memory.load_b32(entry + uint64(4)):
            found = uint32(1)
        entry += uint64(8)
        index = uint32(index + uint32(1))
    return found


@device_function
def ranks_of(slot, item, parts, width, row_bytes, riding):
    """Whether a slot has the ranks of an item of `shrinker`, of so many parts of `width` ranks, and the two halves of
    their address in ``down``."""
    downs, ranges, num_slots, num_ranges = riding.downs, riding.ranges, riding.num_slots, riding.num_ranges
    found, down = uint32(0), uint64(0)
    if slot < num_slots:
        rank = uint32(uint32(item - divide_u32(item, parts) * parts) * uint32(width))
        down = memory.load_b64(downs + uint64(slot) * uint64(8)) + uint64(rank) * row_bytes
        found = is_adapted(slot, rank, uint32(rank + uint32(width)), ranges, num_ranges)
    return found, uint32(down), uint32(down >> uint64(32))


@device_function
def leader_of(leads, number, wanted):
    """The lane that leads the group of this number."""
    chosen = uint32(0)
    if leads != uint32(0) and number == wanted:
        chosen = uint32(1)
    return count_b32(ballot(chosen) - uint32(1))


@functools.cache
def shrinker(dtype: str, warps: int, rows: int) -> Any:
    """A device function of one of these blocks, whose rows of 16 bits lie on 16-byte bounds. It takes ``rows`` rows at
    a time (`rows_at_once`)."""
    load, load_weights = vector_loader(dtype), floats_loader(_WIDTH)
    turns = 2 if rows == 1 else 1  # of loads in flight
    num_sums, span = rows * RANKS, uint32(warps * 32 * _WIDTH)  # elements of K that a block reads in a turn
    exchange_sums = exchange(num_sums)

    @device_function
    def add_products(sums, squares, places, down, position, k, row_bytes, norm):
        """This lane's elements of K."""
        values = cuda.local.array((rows, _WIDTH), float32)
        while position < k:
            for t in range(turns):
                at = uint32(position + uint32(t) * span)
                if at < k:
                    for r in range(rows):
                        vector = load(places[r] + uint64(at) * uint64(2))
                        for e in range(_WIDTH):
                            values[r, e] = vector[e]
                    if norm != uint64(0):
                        weights = load_weights(norm + uint64(at) * uint64(4))
                        for r in range(rows):
                            for e in range(_WIDTH):
                                squares[r] += values[r, e] * values[r, e]
                                values[r, e] *= weights[e]
                    for i in range(RANKS):
                        factors = load(down + uint64(i) * row_bytes + uint64(at) * uint64(2))
                        for r in range(rows):
                            for e in range(_WIDTH):
                                sums[r * RANKS + i] += values[r, e] * factors[e]
            position = uint32(position + uint32(turns) * span)

    @device_function
    def shrink(block, warp, lane, m, k, eps, riding):
        x, adapters, norm, ranks, num_slots = riding.x, riding.adapters, riding.norm, riding.ranks, riding.num_slots
        partial = cuda.shared.array((warps, num_sums), float32)
        partial_squares = cuda.shared.array((warps, rows), float32)
        places, members = cuda.local.array(rows, uint64), cuda.local.array(rows, uint32)
        sums, squares = cuda.local.array(num_sums, float32), cuda.local.array(rows, float32)
        quads, row_bytes = ranks // uint32(RANKS), uint64(k) * uint64(2)
        is_there, low, high = ranks_of(lane, block, quads, RANKS, row_bytes, riding)  # a lane's of a slot
        wait_for_previous_grid()
        launch_dependents()
        own, before, index = num_slots, uint32(0), uint32(0)
        if lane < m:
            own = memory.load_b32(adapters + uint64(lane) * uint64(4))
        while index < m:  # earlier rows of the same adapter
            if shuffle_index_b32(own, index) == own and index < lane:
                before = uint32(before + uint32(1))
            index = uint32(index + uint32(1))
        leads = uint32(0)
        if own < num_slots and before % uint32(rows) == uint32(0):  # -1 is large
            leads = uint32(1)
        leaders = ballot(leads)
        number = count_b32(leaders & uint32((uint32(1) << lane) - uint32(1)))
        item = block
        while item < count_b32(leaders) * quads:
            group = divide_u32(item, quads)
            rank = uint32(uint32(item - group * quads) * uint32(RANKS))
            leader = leader_of(leads, number, group)
            slot, first = shuffle_index_b32(own, leader), shuffle_index_b32(before, leader)
            for r in range(rows):
                chosen = uint32(0)
                if own == slot and before == uint32(first + uint32(r)):
                    chosen = uint32(1)
                found = ballot(chosen)
                members[r] = m  # no row
                row = leader
                if found != uint32(0):
                    row = count_b32(found - uint32(1))
                    members[r] = row
                places[r] = x + uint64(row) * row_bytes
                squares[r] = float32(0)
                for i in range(RANKS):
                    sums[r * RANKS + i] = float32(0)
            if slot >= uint32(32):
                is_there, low, high = ranks_of(slot, item, quads, RANKS, row_bytes, riding)
            is_there, low = shuffle_index_b32(is_there, slot), shuffle_index_b32(low, slot)
            down = (uint64(shuffle_index_b32(high, slot)) << uint64(32)) | uint64(low)
            if is_there != uint32(0):
                position = uint32((warp * uint32(32) + lane) * uint32(_WIDTH))
                add_products(sums, squares, places, down, position, k, row_bytes, norm)
                exchange_sums(sums, lane)
                if lane < uint32(num_sums):
                    partial[warp, lane] = sums[0]
                if norm != uint64(0):
                    for r in range(rows):
                        total = warp_sum(squares[r])
                        if lane == uint32(0):
                            partial_squares[warp, r] = total
                sync_block()
                if warp == uint32(0) and lane < uint32(num_sums):
                    inside, row, total, scale = lane // uint32(RANKS), uint32(0), float32(0), float32(1)
                    for r in range(rows):
                        if inside == uint32(r):
                            row = members[r]
                    for w in range(warps):
                        total += partial[w, lane]
                    if norm != uint64(0):
                        squared = float32(0)
                        for w in range(warps):
                            squared += partial_squares[w, inside]
                        scale = norm_scale(squared, k, eps)
                    if row < m:
                        at = uint64(row) * uint64(ranks) + uint64(rank + lane % uint32(RANKS))
                        memory.store_f32(riding.between + at * uint64(4), scale_element(total, scale))
                sync_block()
            item = uint32(item + riding.num_shrinking)
            is_there, low, high = ranks_of(lane, item, quads, RANKS, row_bytes, riding)
        sync_block()
        if warp == uint32(0) and lane == uint32(0):
            count_up(riding.counters, uint32(1))

    return shrink


@device_function
def wait_for_shrinking(lane, riding):
    """Waits until `shrinker`'s blocks have counted themselves. One whole warp of each block that multiplies calls it,
    once, and meets the block's other threads before they expand. It returns what `reset_counters` takes."""
    before = NOT_COUNTED
    while _load_count(riding.counters) < riding.num_shrinking:
        pass
    sync_warp()
    if lane == uint32(0):
        before = _count_out(riding.counters + uint64(4), uint32(1))
    return before


@device_function
def reset_counters(before, num_blocks, riding):
    """The end of the same warp's work, of so many blocks that multiply."""
    if before == uint32(num_blocks - uint32(1)):
        _reset_count(riding.counters, uint32(0))
        _reset_count(riding.counters + uint64(4), uint32(0))


@functools.cache
def expander(dtype: str) -> tuple[Any, Any]:
    """Device functions ``(row, column, riding) -> aimed``, which asks for the column's numbers, before
    `wait_for_shrinking`, and ``aimed -> the low-rank sum``, after it."""
    load = vector_loader(dtype)

    @device_function
    def aim(row, column, riding):
        ups, ranks, num_slots = riding.ups, riding.ranks, riding.num_slots
        rank, end, up, bias = uint32(0), uint32(0), uint64(0), uint64(0)
        slot = memory.load_b32(riding.adapters + uint64(row) * uint64(4))
        if slot < num_slots:
            block = uint64(slot) * uint64(riding.num_ranges) + uint64(column // uint32(COLUMNS))
            entry = riding.ranges + block * uint64(8)
            rank, end = memory.load_2xb32(entry)
            up = memory.load_b64(ups + uint64(slot) * uint64(8))
            bias = memory.load_b64(ups + uint64(slot + num_slots) * uint64(8))
            up += (uint64(column) * uint64(ranks) + uint64(rank)) * uint64(2)
            if rank < end:
                memory.prefetch(up)
            if bias != uint64(0):
                bias += uint64(column) * uint64(4)
                memory.prefetch(bias)
        place = riding.between + (uint64(row) * uint64(ranks) + uint64(rank)) * uint64(4)
        return rank, end, up, place, bias

    @device_function
    def expand(aimed):
        rank, end, up, place, bias = aimed
        total = float32(0)
        while rank < end:
            a, b = memory.load_4xf32(place), memory.load_4xf32(place + uint64(16))
            factors = load(up)
            for e in range(4):
                total += a[e] * factors[e]
            for e in range(4):
                total += b[e] * factors[e + 4]
            up += uint64(16)
            place += uint64(32)
            rank = uint32(rank + uint32(8))
        if bias != uint64(0):
            total += memory.load_f32(bias)
        return total

    return aim, expand


def most_kept(rows: int) -> int:
    """Tiles that a block of `kept_tiles` finishes together: those of two rows leave room for rings beside long rows."""
    return _KEPT_TILES // rows**2


@functools.cache
def multiplying_barrier(threads: int) -> Any:
    """A device function in which the warps that multiply meet, without the one that expands."""
    return device_function(lambda: sync_named(uint32(1), uint32(threads)))


@dataclass(frozen=True, slots=True)
class KeptTiles:
    """Device functions of a block that finishes several tiles together.

    Its sums are ``[tile, part, row, column of the tile]``, float32, in shared memory: the product's at ``kept``, the
    low-rank ones at ``expanded``. ``columns`` is a tuple: the first tile's first column, from one tile to the next,
    columns of a tile.

    Attributes:
        most: tiles that are kept.
        num_floats: of ``kept`` and ``expanded`` each.
        place: ``(kept, tile, part, row, column, columns) -> address`` of a sum.
        expand: ``(expanded, columns, m, n, num_blocks, riding)``, the work of the last warp.
        finish: ``(given, (kept, expanded), columns, num_tiles, is_last, thread)``: the other warps meet the last one,
            and finish so many tiles.
    """

    most: int
    num_floats: int
    place: Any
    expand: Any
    finish: Any


@functools.cache
def kept_tiles(
    dtype: str, out_dtype: str, rows: int, activation: str, most_sums: int, square_columns: int, threads: int
) -> KeptTiles:
    """The functions for tiles of up to `most_sums` sums, of a gated unit of its parts together, and so many threads
    that multiply. Squares are left for so many columns each (`epilogue`)."""
    aim, expand = expander(dtype)
    finish_one, gated = finisher(dtype, out_dtype), GATED.get(activation)
    is_gated, num_parts, leave_squares = activation != "", 2 if activation else 1, squares_leaver(square_columns)
    most = most_kept(rows)

    @device_function
    def place(kept, tile, part, row, column, columns):
        line = uint32(uint32(uint32(tile * uint32(num_parts)) + part) * uint32(rows) + row)
        return uint32(kept + uint32(line * columns + column) * uint32(4))

    @device_function
    def aim_at(index, first_column, columns, m, n, riding):
        _, stride, width = columns
        line = divide_u32(index, width)
        tile, up = line // uint32(num_parts * rows), (line // uint32(rows)) % uint32(num_parts)
        row, column = line % uint32(rows), uint32(first_column + tile * stride + index - line * width)
        aimed = uint32(0), uint32(0), uint64(0), uint64(0), uint64(0)
        if row < m and column < n:
            aimed = aim(row, uint32(column + up * n), riding)
        return aimed

    @device_function
    def expand_tiles(expanded, columns, m, n, num_blocks, riding):
        first_column, stride, width = columns
        column, lane, before = first_column, uint32(cuda.threadIdx.x), NOT_COUNTED
        wait_for_previous_grid()
        launch_dependents()
        while column < n:
            num_tiles = divide_u32(uint32(n - column + stride - uint32(1)), stride)
            count = uint32(minimum_u32(num_tiles, uint32(most)) * uint32(num_parts * rows) * width)
            index = uint32(lane + uint32(32))
            while index < count:  # ask for all numbers before waiting
                aim_at(index, column, columns, m, n, riding)
                index = uint32(index + uint32(32))
            index, aimed = lane, aim_at(lane, column, columns, m, n, riding)
            if column == first_column:
                before = wait_for_shrinking(lane, riding)
            while index < count:
                memory.shared_store_f32(uint32(expanded + index * uint32(4)), expand(aimed))
                index = uint32(index + uint32(32))
                if index < count:
                    aimed = aim_at(index, column, columns, m, n, riding)
            sync_block()
            column = uint32(column + uint32(most) * stride)
            if column < n:
                sync_block()
        reset_counters(before, num_blocks, riding)

    @device_function
    def finish_tiles(given, sums, tiles, num_tiles, is_last, thread):
        (kept, expanded), (first_column, stride, columns), m, n = sums, tiles, given.m, given.n
        index, lane = thread, thread & uint32(31)
        tile_sums = uint32(columns * uint32(rows))
        sync_block()
        while uint32(index - lane) < uint32(num_tiles * tile_sums):  # whole warps, which add squares
            tile = divide_u32(index, tile_sums)
            inside = uint32(index - tile * tile_sums)
            row = divide_u32(inside, columns)
            column = uint32(first_column + tile * stride + inside - row * columns)
            at, value = uint32(uint32(tile * uint32(num_parts) * tile_sums + inside) * uint32(4)), float32(0)
            is_there = tile < num_tiles and row < m and column < n
            if is_there:
                value = memory.shared_load_f32(uint32(kept + at)) + memory.shared_load_f32(uint32(expanded + at))
                if is_gated:
                    at = uint32(at + tile_sums * uint32(4))
                    up = memory.shared_load_f32(uint32(kept + at)) + memory.shared_load_f32(uint32(expanded + at))
                    value = gated(value, up)
                value = finish_one(given, row, column, value)
            if not is_gated:
                is_first = lane % uint32(square_columns) == uint32(0)
                leave_squares(given, value * value, is_first, row if tile < num_tiles else m, column)
            index = uint32(index + uint32(threads))
        if not is_last:
            sync_block()

    return KeptTiles(most, most * most_sums, place, expand_tiles, finish_tiles)


def product_kernel(multiply: Any, shrink: Any = None, *, in_columns: bool = False, has_maps: bool = False) -> Any:
    """The kernel of ``multiply(block, num_blocks, given, riding)``, a block that multiplies, and, with adapters, of
    `shrinker`'s function; else ``riding`` is empty. With `in_columns` the grid has a y axis, and blocks of whole
    columns shrink. With `has_maps` the kernel has three maps more, a last argument of ``multiply``, a tuple."""

    @device_function
    def divide(given, riding, maps):
        shrinking, m, k, eps = riding.num_shrinking, given.m, given.k, given.eps
        block, lane, columns = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x), shrinking
        if in_columns:
            columns = divide_u32(shrinking, uint32(cuda.gridDim.y))
        warp = uint32(uint32(cuda.threadIdx.y) + uint32(cuda.threadIdx.z) * uint32(cuda.blockDim.y))
        if block < columns:
            shrink(block, warp, lane, m, k, eps, riding)
        else:
            number, count = uint32(block - columns), uint32(uint32(cuda.gridDim.x) - columns)
            if has_maps:
                multiply(number, count, given, riding, maps)
            else:
                multiply(number, count, given, riding)

    def adapted(
        x, weight, bias, residual, out, m, n, k, bias_is_f32, norm, norm_parts, eps, squares, x_rows, adapters, downs,
        ups, ranges, norm_weights, between, counters, ranks, num_slots, num_ranges, shrinking, team_warps,
    ):  # fmt: skip
        riding = Riding(
            x_rows, adapters, downs, ups, ranges, norm_weights, between, counters, ranks, num_slots, num_ranges,
            shrinking, team_warps,
        )  # fmt: skip
        given = Arguments(x, weight, bias, residual, out, m, n, k, bias_is_f32, norm, norm_parts, eps, squares)
        divide(given, riding, ())

    def adapted_with_maps(
        x, weight, bias, residual, out, m, n, k, bias_is_f32, norm, norm_parts, eps, squares, x_rows, adapters, downs,
        ups, ranges, norm_weights, between, counters, ranks, num_slots, num_ranges, shrinking, team_warps, words,
        scales, zeros,
    ):  # fmt: skip
        riding = Riding(
            x_rows, adapters, downs, ups, ranges, norm_weights, between, counters, ranks, num_slots, num_ranges,
            shrinking, team_warps,
        )  # fmt: skip
        given = Arguments(x, weight, bias, residual, out, m, n, k, bias_is_f32, norm, norm_parts, eps, squares)
        divide(given, riding, (words, scales, zeros))

    def with_maps(
        x, weight, bias, residual, out, m, n, k, bias_is_f32, norm, norm_parts, eps, squares, words, scales, zeros
    ):
        given = Arguments(x, weight, bias, residual, out, m, n, k, bias_is_f32, norm, norm_parts, eps, squares)
        multiply(uint32(cuda.blockIdx.x), uint32(cuda.gridDim.x), given, (), (words, scales, zeros))

    @device_function
    def plain(given):
        multiply(uint32(cuda.blockIdx.x), uint32(cuda.gridDim.x), given, ())

    if has_maps:
        return cuda.jit(with_maps if shrink is None else adapted_with_maps)
    return epilogue.product_kernel(plain) if shrink is None else cuda.jit(adapted)


def argument_types(takes_adapters: bool) -> tuple[Any, ...]:
    """The types of that kernel's arguments."""
    return epilogue.ARGUMENT_TYPES + (ARGUMENT_TYPES if takes_adapters else ())
