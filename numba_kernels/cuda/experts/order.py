"""Groups the tokens' choices by expert, so that products may take an expert's rows tile by tile.

A row is one choice of one token; an expert's rows are neighbours, in the order of tokens. Each expert has a block,
which counts all choices, to find how many rows and tiles come before its own; no block waits for another.
The results are lists of fixed sizes:

    starts [E + 1]      where each expert's rows begin
    tiles [limit, 4]    each tile's expert, first row and number of rows; `num_tiles` counts them
    tokens [T k]        each row's token
    places [T, k]       each choice's row; -1 for a choice of -1, which has none

A product is launched for the most tiles possible (`most_tiles`), whatever the routing, so that the launch can be
recorded; surplus blocks exit at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, types

from numba_kernels.cuda.experts.routing import MAX_EXPERTS
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.memory import (
    load_b32,
    shared_address,
    shared_load_b32,
    shared_store_b32,
    store_4xb32,
    store_b32,
)
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import ballot, count_b32, lane_index
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64 = types.uint32, types.uint64

THREADS = 512
_WARPS = THREADS // 32
_SUMS = MAX_EXPERTS  # where, among the counters, rows and tiles before the block's own are added up
_WARP_COUNTS = MAX_EXPERTS + 2
_COUNTERS = _WARP_COUNTS + _WARPS

_add = instruction("red.shared.add.u32 [$0], $1;", "", "r r")


def most_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles for any routing."""
    return num_rows // tile_rows + min(num_experts, num_rows)


@functools.cache
def _kernel() -> Specialisation:
    """Arguments: ids [T, k] int32, starts, tiles, num_tiles, tokens, places addresses; T k, k, E, rows of a tile."""

    def put_together(ids, starts, tiles, num_tiles, tokens, places, num_choices, top_k, num_experts, tile_rows):
        counters = shared_address(cuda.shared.array(_COUNTERS, uint32))
        thread, lane, expert = uint32(cuda.threadIdx.x), lane_index(), uint32(cuda.blockIdx.x)
        warp = uint32(thread >> uint32(5))
        index = thread
        while index < uint32(MAX_EXPERTS + 2):
            shared_store_b32(uint32(counters + index * uint32(4)), uint32(0))
            index = uint32(index + uint32(THREADS))
        sync_block()
        wait_for_previous_grid()
        launch_dependents()
        index = thread
        while index < num_choices:
            chosen = load_b32(ids + uint64(index) * uint64(4))
            if chosen < num_experts:
                _add(uint32(counters + chosen * uint32(4)), uint32(1))
            elif expert == uint32(0):
                store_b32(places + uint64(index) * uint64(4), uint32(0xFFFFFFFF))
            index = uint32(index + uint32(THREADS))
        sync_block()
        sums = uint32(counters + uint32(4 * _SUMS))
        index = thread
        while index < expert:
            count = shared_load_b32(uint32(counters + index * uint32(4)))
            if count > uint32(0):
                _add(sums, count)
                _add(uint32(sums + uint32(4)), divide_u32(uint32(count + tile_rows - uint32(1)), tile_rows))
            index = uint32(index + uint32(THREADS))
        sync_block()
        first, first_tile = shared_load_b32(sums), shared_load_b32(uint32(sums + uint32(4)))
        count = shared_load_b32(uint32(counters + expert * uint32(4)))
        own_tiles = divide_u32(uint32(count + tile_rows - uint32(1)), tile_rows)
        if thread == uint32(0):
            store_b32(starts + uint64(expert) * uint64(4), first)
            if uint32(expert + uint32(1)) == num_experts:
                store_b32(starts + uint64(num_experts) * uint64(4), uint32(first + count))
                store_b32(num_tiles, uint32(first_tile + own_tiles))
        index = thread
        while index < own_tiles:
            before = uint32(index * tile_rows)
            rows = minimum_u32(tile_rows, uint32(count - before))
            store_4xb32(
                tiles + uint64(uint32(first_tile + index)) * uint64(16),
                (expert, uint32(first + before), rows, uint32(0)),
            )
            index = uint32(index + uint32(THREADS))
        warp_counts = uint32(counters + uint32(4 * _WARP_COUNTS))
        start = uint32(0)
        left = count
        while left > uint32(0):
            index = uint32(start + thread)
            is_own = uint32(0)
            if index < num_choices:
                is_own = uint32(load_b32(ids + uint64(index) * uint64(4)) == expert)
            lanes = ballot(is_own)
            if lane == uint32(0):
                shared_store_b32(uint32(warp_counts + warp * uint32(4)), count_b32(lanes))
            sync_block()
            row = uint32(first + count_b32(uint32(lanes & uint32(uint32(uint32(1) << lane) - uint32(1)))))
            together = uint32(0)
            for other in range(_WARPS):
                of_warp = shared_load_b32(uint32(warp_counts + uint32(4 * other)))
                together = uint32(together + of_warp)
                if uint32(other) < warp:
                    row = uint32(row + of_warp)
            if is_own != uint32(0):
                store_b32(tokens + uint64(row) * uint64(4), divide_u32(index, top_k))
                store_b32(places + uint64(index) * uint64(4), row)
            first = uint32(first + together)
            left = uint32(left - together)
            start = uint32(start + uint32(THREADS))
            sync_block()

    return Specialisation(
        name="experts_order",
        kernel=cuda.jit(put_together),
        argument_types=(types.uint64,) * 6 + (types.uint32,) * 4,
        max_threads=THREADS,
    )


def plan(num_experts: int) -> Launch:
    """The launch for at least one choice, of so many experts."""
    return Launch(_kernel(), (num_experts, 1, 1), (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    yield _kernel()
