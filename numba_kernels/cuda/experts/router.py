"""A decode step's routing in one launch: a token's norm, its router's product, and the choice.

A cluster of blocks takes a token, each of them some of the experts; without clusters, or where there are many tokens,
one block does. Loads of the router's rows start before the previous grid has ended. Each block normalises the token's
row, which experts read, into its shared memory; its warps multiply it with four rows of the router at a time, or with
a part of them, so that all warps have work; then a warp of the first block chooses, as in `routing`. The router comes
from the second-level cache for each token, so there are `MOST_ROWS` at most: an estimate of where three launches in a
row become faster. The sums differ from those of other products, which exact steps take. Rules with groups of experts
are `routing`'s alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.experts.routing import PER_LANE, chooser, lane_experts
from numba_kernels.cuda.gemm.epilogue import norm_scale
from numba_kernels.cuda.gemm.gemv import weight_loader
from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.block import block_sum
from numba_kernels.cuda.intrinsics.convert import bits_from_f32, f32_from_bits, pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import floats_loader, vector_loader
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.memory import load_f32, store_f32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import exchange, lane_index
from numba_kernels.cuda.row_blocks import MAX_BLOCKS, THREADS, WARPS, row_blocks
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

MOST_ROWS = 256
ROWS = 4  # of the router, that a warp multiplies
_TURNS = {False: 2, True: 1}  # loads of each of them that a lane has in flight, by `is_cluster`: registers are few
_MOST_PER_LANE = 8  # experts: 256 of them
MOST_SIZE = 20480  # elements of a row, which a block has in shared memory
DTYPES = ("f16", "bf16")


@functools.cache
def _multiplier(dtype: str, turns: int) -> tuple[Any, Any]:
    """Device functions ``begin(loaded, rows, first, last, lane)``, which loads the first turns of four rows, before
    `wait_for_previous_grid`, and ``multiply(loaded, sums, rows, x, first, last, lane)``: lane i < 4 gets the sum of row
    i, an address, times x, in shared memory, from `first` to `last`."""
    width, item_bytes = VECTOR_WIDTH[dtype], ITEM_BYTES[dtype]
    load_early, load_late, widen = weight_loader(dtype)
    turn = 32 * width  # elements that a warp's load brings
    exchange_sums = exchange(ROWS)

    @device_function
    def begin(loaded, rows, first, last, lane):
        for i in range(turns):
            at = uint32(first + lane * uint32(width) + uint32(i * turn))
            if at < last:
                for c in range(ROWS):
                    vector = load_early(rows[c] + uint64(at) * uint64(item_bytes))
                    for e in range(4):
                        loaded[i, c, e] = vector[e]

    @device_function
    def multiply(loaded, sums, rows, x, first, last, lane):
        for c in range(ROWS):
            sums[c] = float32(0.0)
        position = uint32(first + lane * uint32(width))
        while position < last:
            for i in range(turns):
                at = uint32(position + uint32(i * turn))
                if at < last:
                    a, b, c, d = memory.shared_load_4xb32(uint32(x + at * uint32(item_bytes)))
                    values = widen(a, b, c, d)
                    for r in range(ROWS):
                        wide = widen(loaded[i, r, 0], loaded[i, r, 1], loaded[i, r, 2], loaded[i, r, 3])
                        for e in range(width):
                            sums[r] += values[e] * wide[e]
                    following = uint32(at + uint32(turns * turn))
                    if following < last:
                        for r in range(ROWS):
                            vector = load_late(rows[r] + uint64(following) * uint64(item_bytes))
                            for e in range(4):
                                loaded[i, r, e] = vector[e]
            position = uint32(position + uint32(turns * turn))
        exchange_sums(sums, lane)

    return begin, multiply


@device_function
def aim(rows, router, first, num_experts, row_bytes):
    """Addresses of the rows of experts from `first` on; beyond the last one that one is computed again, and dropped."""
    for c in range(ROWS):
        expert = minimum_u32(uint32(first + uint32(c)), uint32(num_experts - uint32(1)))
        rows[c] = router + uint64(expert) * row_bytes


@functools.cache
def _kernel(dtype: str, per_lane: int, scores: str, is_cluster: bool) -> Specialisation:
    """Arguments: x [T, H], norm [H] float32, normalised [T, H], router [E, H], bias [E] float32 or 0, logits [T, E]
    float32, the bias of scores [E] or 0, ids [T, k] int32, weights [T, k] float32 addresses; H, E, k; whether
    weights are normalised; eps, scale, the addend of the sum."""
    turns_ahead = _TURNS[is_cluster]
    begin, multiply = _multiplier(dtype, turns_ahead)
    choose = chooser(per_lane, scores, False)
    rank_in_row, num_blocks, meet, leave, _, read_2 = row_blocks(is_cluster)
    width, item_bytes = VECTOR_WIDTH[dtype], ITEM_BYTES[dtype]
    load, load_norm, pack = vector_loader(dtype), floats_loader(width), {"f16": pack_f16, "bf16": pack_bf16}[dtype]
    turn, most_experts = 32 * width, 32 * _MOST_PER_LANE

    def route(
        x, norm, normalised, router, bias, logits, added, ids, weights, size, num_experts, top_k, normalises, eps,
        scale, sum_eps,
    ):  # fmt: skip
        staged = memory.shared_address(cuda.shared.array(0, uint32))
        partials = cuda.shared.array(32, float32)
        parts = cuda.shared.array((WARPS, ROWS), float32)
        found = memory.shared_address(cuda.shared.array(most_experts, uint64))  # logits in the low words
        loaded = cuda.local.array((turns_ahead, ROWS, 4), uint32)
        values, sums = cuda.local.array(width, float32), cuda.local.array(ROWS, float32)
        rows = cuda.local.array(ROWS, uint64)
        thread, lane, rank, blocks = uint32(cuda.threadIdx.x), lane_index(), rank_in_row(), num_blocks()
        warp, row = uint32(thread >> uint32(5)), uint64(divide_u32(uint32(cuda.blockIdx.x), blocks))
        row_bytes = uint64(size) * uint64(item_bytes)
        # A block has `own` experts, of which its warps take four at a time, and a part of their rows each.
        own = uint32(divide_u32(uint32(num_experts + blocks - uint32(1)), blocks) + uint32(ROWS - 1))
        groups = uint32(own // uint32(ROWS))
        own = uint32(groups * uint32(ROWS))
        sharing = max(uint32(1), divide_u32(uint32(WARPS), groups))
        at_once = divide_u32(uint32(WARPS), sharing)
        turns = uint32(uint32(size + uint32(turn - 1)) // uint32(turn))
        length = uint32(divide_u32(uint32(turns + sharing - uint32(1)), sharing) * uint32(turn))
        slot = divide_u32(warp, sharing)
        first = minimum_u32(uint32(uint32(warp - slot * sharing) * length), size)
        last = minimum_u32(uint32(first + length), size)
        aim(rows, router, uint32(rank * own + slot * uint32(ROWS)), num_experts, row_bytes)
        if slot < at_once:
            begin(loaded, rows, first, last, lane)
        wait_for_previous_grid()
        launch_dependents()
        x += row * row_bytes
        normalised += row * row_bytes
        logits += row * uint64(num_experts) * uint64(4)
        squares = float32(0.0)
        index = uint32(thread * uint32(width))
        while index < size:
            vector = load(x + uint64(index) * uint64(item_bytes))
            for e in range(width):
                squares += vector[e] * vector[e]
            index = uint32(index + uint32(THREADS * width))
        row_scale = norm_scale(block_sum(squares, partials), size, eps)
        index = uint32(thread * uint32(width))
        while index < size:
            at = uint64(index) * uint64(item_bytes)
            vector, factors = load(x + at), load_norm(norm + uint64(index) * uint64(4))
            for e in range(width):
                values[e] = vector[e] * row_scale * factors[e]
            words = (
                pack(values[0], values[1]), pack(values[2], values[3]), pack(values[4], values[5]),
                pack(values[6], values[7]),
            )  # fmt: skip
            memory.shared_store_4xb32(uint32(staged + index * uint32(item_bytes)), words)
            number = uint32(index // uint32(width))
            if uint32(number - divide_u32(number, blocks) * blocks) == rank:
                memory.store_4xb32(normalised + at, words)
            index = uint32(index + uint32(THREADS * width))
        sync_block()
        base = uint32(0)  # of the groups that are multiplied now
        while base < groups:
            if slot < at_once:
                multiply(loaded, sums, rows, staged, first, last, lane)
                if lane < uint32(ROWS):
                    parts[warp, lane] = sums[0]
            base = uint32(base + at_once)
            if base < groups:
                aim(rows, router, uint32(rank * own + uint32(base + slot) * uint32(ROWS)), num_experts, row_bytes)
                if slot < at_once:
                    begin(loaded, rows, first, last, lane)
            sync_block()
            place = uint32(thread // uint32(ROWS))
            inside = uint32(uint32(base - at_once) * uint32(ROWS) + thread)
            expert = uint32(rank * own + inside)
            if place < at_once and inside < own and expert < num_experts:
                total = float32(0.0)
                index = uint32(0)
                while index < sharing:
                    total += parts[uint32(place * sharing + index), thread & uint32(ROWS - 1)]
                    index = uint32(index + uint32(1))
                if bias != uint64(0):
                    total += load_f32(bias + uint64(expert) * uint64(4))
                memory.shared_store_2xb32(uint32(found + inside * uint32(8)), (bits_from_f32(total), uint32(0)))
            sync_block()
        meet()
        if rank == uint32(0) and thread < uint32(32):
            for i in range(per_lane):
                expert = uint32(lane + uint32(32 * i))
                if expert < num_experts:
                    owner = divide_u32(expert, own)
                    value, _ = read_2(uint32(found + uint32(expert - owner * own) * uint32(8)), owner)
                    store_f32(logits + uint64(expert) * uint64(4), f32_from_bits(value))
            at = row * uint64(top_k) * uint64(4)
            of_row, groups = (logits, added, uint64(0), ids + at, weights + at), (uint32(1), uint32(1), uint32(0))
            choose(of_row, lane, num_experts, top_k, groups, (normalises, scale, sum_eps))
        leave()

    return Specialisation(
        name=f"route_normed_{'cluster_' if is_cluster else ''}{dtype}_{scores}_x{per_lane}",
        kernel=cuda.jit(route),
        argument_types=(types.uint64,) * 9 + (types.uint32,) * 4 + (types.float32,) * 3,
        max_threads=THREADS,
        min_blocks=2 if is_cluster else 0,  # half of a multiprocessor, which such a launch leaves to its neighbours
        min_capability=90 if is_cluster else 80,
        constants={"dtype": dtype, "per_lane": per_lane, "scores": scores, "is_cluster": is_cluster},
    )


def can_plan(num_rows: int, size: int, num_experts: int, dtype: str, num_groups: int) -> bool:
    """Whether `plan` has a launch, for rows on 16-byte bounds."""
    is_there = dtype in DTYPES and num_experts <= 32 * _MOST_PER_LANE and num_groups <= 1
    return is_there and 0 < num_rows <= MOST_ROWS and size % VECTOR_WIDTH[dtype] == 0 and size <= MOST_SIZE


def plan(
    num_rows: int, size: int, num_experts: int, dtype: str, scores: str, num_sms: int,
    max_clusters: tuple[tuple[int, int], ...],
) -> Launch:  # fmt: skip
    """The launch, if `can_plan`, on a device of so many multiprocessors.

    Args:
        max_clusters: as `Gpu.max_clusters`; none on a device without clusters.
    """
    most = min(MAX_BLOCKS, -(-num_experts // ROWS), num_sms // num_rows)  # one on each multiprocessor
    blocks = max((each for each, _ in max_clusters if each <= most), default=1)
    is_cluster = blocks > 1
    return Launch(
        _kernel(dtype, lane_experts(num_experts), scores, is_cluster), (num_rows * blocks, 1, 1), (THREADS, 1, 1),
        size * ITEM_BYTES[dtype], cluster=(blocks, 1, 1),
    )  # fmt: skip


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for dtype in DTYPES:
        for per_lane in PER_LANE:
            if per_lane <= _MOST_PER_LANE:
                for scores in ("softmax", "sigmoid"):
                    for is_cluster in (False, True):
                        yield _kernel(dtype, per_lane, scores, is_cluster)
