"""Low-rank sums of adapters that ride on a product's launch: ``y[t] += up[a] (down[a] x[t]) + bias[a]``.

The launch gets more blocks, in front, which *shrink*: each warp computes one number of ``between [m, R]``, float32, and
each block then counts itself. The other blocks multiply, wait until all of these have counted, and *expand*: the lane
that has an output's sum adds its low-rank sum, before a gate, a bias or a residual. A GPU starts blocks in the order of
the grid, so all that shrink have started before one waits for them, and they wait for the previous grid alone. The last
block of the grid sets the counters back to zero for the next launch. Rows whose adapter is -1 wait for nothing.

A number of ``between`` is one chain in the order of K, an output's sum one in the order of ranks: a row has the same
bits beside any others. Slots are those of `experts.low_rank`.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.gemm.epilogue import norm_scale, scale_element
from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import floats_loader, vector_loader
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import warp_sum

COLUMNS = 1024  # of one entry of ``ranges``
WARPS = 8  # of a block that shrinks
_TURNS = 2  # of a warp's loads in flight: more would spill beside three blocks a multiprocessor
_WIDTH = 8

ARGUMENT_TYPES = (types.uint64,) * 7 + (types.uint32,) * 4
"""After those of the product: adapters int32 [m]; the addresses of each slot's down [R, K], and in ``ups [2, S]`` of
its up [N, R] and bias float32 [N] or 0; ``ranges [S, blocks, 2]`` uint32; the weights of the norm float32 [K], or 0;
between; two counters, which are 0 before a launch and after it; R, S, blocks of ranges, and blocks that shrink."""

_count_up = instruction("red.release.gpu.global.add.u32 [$0], $1;", "", "l r")
_count_done = instruction("atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;", "r", "l r")
_load_count = instruction("ld.acquire.gpu.global.u32 $0, [$1];", "r", "l")


def shrinking_blocks(rows: int, ranks: int, warps: int = WARPS) -> int:
    """The blocks of so many warps that shrink so many rows, for all ranks of a slot."""
    return rows * -(-ranks // warps)


@functools.cache
def shrinker(dtype: str, warps: int = WARPS) -> Any:
    """A device function of one of these blocks, whose rows of 16 bits lie on 16-byte bounds."""
    load, load_weights = vector_loader(dtype), floats_loader(_WIDTH)

    @device_function
    def shrink(block, warp, lane, x, k, eps, riding):
        adapters, downs, _, ranges, norm, between, counters, ranks, num_slots, num_ranges, _ = riding
        values, factors = cuda.local.array((_TURNS, _WIDTH), float32), cuda.local.array((_TURNS, _WIDTH), float32)
        wait_for_previous_grid()
        launch_dependents()
        blocks_a_row = uint32((ranks + uint32(warps - 1)) // uint32(warps))
        row = uint32(block // blocks_a_row)
        rank = uint32((block - row * blocks_a_row) * uint32(warps) + warp)
        slot, is_needed = memory.load_b32(adapters + uint64(row) * uint64(4)), uint32(0)
        if slot < num_slots:  # -1 is large
            entry, index = ranges + uint64(slot) * uint64(num_ranges) * uint64(8), uint32(0)
            while index < num_ranges:
                if memory.load_b32(entry) <= rank and rank < memory.load_b32(entry + uint64(4)):
                    is_needed = uint32(1)
                entry += uint64(8)
                index = uint32(index + uint32(1))
        if is_needed != uint32(0):
            first = uint32(lane * uint32(_WIDTH))
            own = x + (uint64(row) * uint64(k) + uint64(first)) * uint64(2)
            start = memory.load_b64(downs + uint64(slot) * uint64(8))
            start += (uint64(rank) * uint64(k) + uint64(first)) * uint64(2)
            total, squares = float32(0), float32(0)
            while first < k:
                for t in range(_TURNS):
                    for e in range(_WIDTH):
                        values[t, e], factors[t, e] = float32(0), float32(0)
                    if first + uint32(t * 32 * _WIDTH) < k:
                        vector, others = load(own + uint64(t * 64 * _WIDTH)), load(start + uint64(t * 64 * _WIDTH))
                        for e in range(_WIDTH):
                            values[t, e], factors[t, e] = vector[e], others[e]
                for t in range(_TURNS):
                    at = uint32(first + uint32(t * 32 * _WIDTH))
                    if norm != uint64(0) and at < k:
                        weights = load_weights(norm + uint64(at) * uint64(4))
                        for e in range(_WIDTH):
                            squares += values[t, e] * values[t, e]
                            values[t, e] *= weights[e]
                    for e in range(_WIDTH):
                        total += values[t, e] * factors[t, e]
                first = uint32(first + uint32(_TURNS * 32 * _WIDTH))
                own += uint64(_TURNS * 64 * _WIDTH)
                start += uint64(_TURNS * 64 * _WIDTH)
            total = warp_sum(total)
            if norm != uint64(0):
                total = scale_element(total, norm_scale(warp_sum(squares), k, eps))
            if lane == uint32(0):
                memory.store_f32(between + (uint64(row) * uint64(ranks) + uint64(rank)) * uint64(4), total)
        sync_block()
        if warp == uint32(0) and lane == uint32(0):
            _count_up(counters, uint32(1))

    return shrink


@functools.cache
def expander(dtype: str) -> Any:
    """A device function ``(row, column, riding) -> the low-rank sum`` of one lane; it waits for `shrinker`'s blocks."""
    load = vector_loader(dtype)

    @device_function
    def expand(row, column, riding):
        adapters, _, ups, ranges, _, between, counters, ranks, num_slots, num_ranges, shrinking = riding
        slot, total = memory.load_b32(adapters + uint64(row) * uint64(4)), float32(0)
        if slot < num_slots:
            entry = ranges + (uint64(slot) * uint64(num_ranges) + uint64(column // uint32(COLUMNS))) * uint64(8)
            rank, end = memory.load_b32(entry), memory.load_b32(entry + uint64(4))
            up = memory.load_b64(ups + uint64(slot) * uint64(8))
            bias = memory.load_b64(ups + uint64(slot + num_slots) * uint64(8))
            up += (uint64(column) * uint64(ranks) + uint64(rank)) * uint64(2)
            place = between + (uint64(row) * uint64(ranks) + uint64(rank)) * uint64(4)
            while _load_count(counters) < shrinking:
                pass
            while rank < end:
                factors = load(up)
                a, b = memory.load_4xf32(place), memory.load_4xf32(place + uint64(16))
                for e in range(4):
                    total += a[e] * factors[e]
                for e in range(4):
                    total += b[e] * factors[e + 4]
                up += uint64(16)
                place += uint64(32)
                rank = uint32(rank + uint32(8))
            if bias != uint64(0):
                total += memory.load_f32(bias + uint64(column) * uint64(4))
        return total

    return expand


@device_function
def leave_counters(counters, is_first_thread, blocks):
    """The end of each block of the grid: the last one sets the counters back."""
    sync_block()
    if is_first_thread and _count_done(counters + uint64(4), uint32(1)) == blocks - uint32(1):
        memory.store_b32(counters, uint32(0))
        memory.store_b32(counters + uint64(4), uint32(0))
