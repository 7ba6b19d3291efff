"""A decode step's way to its experts in one launch: a token's norm, its router's product, and the choice.

A block takes a token. It normalises the row, which experts read; its warps multiply it with four rows of the router at
a time; then one of them chooses, as `routing` does. The router comes out of the second-level cache for each token, so
there are `MOST_ROWS` at most: an estimate of where three launches in a row become faster. The sums are not those of
other products: exact steps take these. Rules with groups of experts are `routing`'s alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, types

from numba_kernels.cuda.experts.gather import ROWS, multiplier
from numba_kernels.cuda.experts.routing import PER_LANE, chooser, lane_experts
from numba_kernels.cuda.gemm.epilogue import norm_scale
from numba_kernels.cuda.intrinsics.block import block_sum
from numba_kernels.cuda.intrinsics.element import floats_loader, vector_loader, vector_storer
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.integer import minimum_u32
from numba_kernels.cuda.intrinsics.memory import load_f32, store_f32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

MOST_ROWS = 256
THREADS = 512
_WARPS = THREADS // 32
_MOST_PER_LANE = 8  # experts: 256 of them
DTYPES = ("f16", "bf16")


@functools.cache
def _kernel(dtype: str, per_lane: int, scores: str) -> Specialisation:
    """Arguments: x [T, H], norm [H] float32, normalised [T, H], router [E, H], bias [E] float32 or 0, logits [T, E]
    float32, what is added to scores [E] or 0, ids [T, k] int32, weights [T, k] float32 addresses; H, E, k; whether
    weights are normalised; eps, scale, what is added to the sum."""
    multiply, choose = multiplier(dtype), chooser(per_lane, scores, False)
    width, item_bytes = VECTOR_WIDTH[dtype], ITEM_BYTES[dtype]
    load, store, load_norm = vector_loader(dtype), vector_storer(dtype), floats_loader(width)

    def route(
        x, norm, normalised, router, bias, logits, added, ids, weights, size, num_experts, top_k, normalises, eps,
        scale, sum_eps,
    ):  # fmt: skip
        partials = cuda.shared.array(32, float32)
        values = cuda.local.array(width, float32)
        weight_rows = cuda.local.array(ROWS, uint64)
        row, thread, lane = uint64(cuda.blockIdx.x), uint32(cuda.threadIdx.x), lane_index()
        row_bytes = uint64(size) * uint64(item_bytes)
        x += row * row_bytes
        normalised += row * row_bytes
        logits += row * uint64(num_experts) * uint64(4)
        wait_for_previous_grid()
        launch_dependents()
        squares = float32(0.0)
        first = uint32(thread * uint32(width))
        index = first
        while index < size:
            loaded = load(x + uint64(index) * uint64(item_bytes))
            for e in range(width):
                squares += loaded[e] * loaded[e]
            index = uint32(index + uint32(THREADS * width))
        row_scale = norm_scale(block_sum(squares, partials), size, eps)
        index = first
        while index < size:
            at = uint64(index) * uint64(item_bytes)
            loaded, factors = load(x + at), load_norm(norm + uint64(index) * uint64(4))
            for e in range(width):
                values[e] = loaded[e] * row_scale * factors[e]
            store(normalised + at, values)
            index = uint32(index + uint32(THREADS * width))
        sync_block()
        expert = uint32(uint32(thread >> uint32(5)) * uint32(ROWS))
        while expert < num_experts:
            for c in range(ROWS):
                # Beyond the last one, the last one is computed again, and not stored.
                own = minimum_u32(uint32(expert + uint32(c)), uint32(num_experts - uint32(1)))
                weight_rows[c] = router + uint64(own) * row_bytes
            total = multiply(weight_rows, normalised, size, lane)
            own = uint32(expert + lane)
            if lane < uint32(ROWS) and own < num_experts:
                if bias != uint64(0):
                    total += load_f32(bias + uint64(own) * uint64(4))
                store_f32(logits + uint64(own) * uint64(4), total)
            expert = uint32(expert + uint32(_WARPS * ROWS))
        sync_block()
        if thread < uint32(32):
            at = row * uint64(top_k) * uint64(4)
            choose(
                logits, added, ids + at, weights + at, lane, num_experts, top_k, uint32(1), uint32(1), uint32(0),
                normalises, scale, sum_eps,
            )  # fmt: skip

    return Specialisation(
        name=f"route_normed_{dtype}_{scores}_x{per_lane}",
        kernel=cuda.jit(route),
        argument_types=(types.uint64,) * 9 + (types.uint32,) * 4 + (types.float32,) * 3,
        max_threads=THREADS,
        constants={"dtype": dtype, "per_lane": per_lane, "scores": scores},
    )


def can_plan(num_rows: int, size: int, num_experts: int, dtype: str, num_groups: int) -> bool:
    """Whether `plan` has a launch, for rows on 16-byte bounds."""
    is_there = dtype in DTYPES and num_experts <= 32 * _MOST_PER_LANE and num_groups <= 1
    return is_there and 0 < num_rows <= MOST_ROWS and size % VECTOR_WIDTH[dtype] == 0


def plan(num_rows: int, num_experts: int, dtype: str, scores: str) -> Launch:
    """For what `can_plan` allows."""
    return Launch(_kernel(dtype, lane_experts(num_experts), scores), (num_rows, 1, 1), (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for dtype in DTYPES:
        for per_lane in PER_LANE:
            if per_lane <= _MOST_PER_LANE:
                for scores in ("softmax", "sigmoid"):
                    yield _kernel(dtype, per_lane, scores)
