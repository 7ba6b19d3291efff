"""Tier 2: tiles in shared memory. Lesson: reuse.

Against the naive tier it changes one thing. A block of 16x16 threads brings a 16x16 tile of x and one of the weight to
shared memory, each element fetched once, and then each is used 16 times: a sixteenth of the traffic to global memory,
and that in whole rows of 16 neighbours. Both tiles lie so that a warp, two rows of 16 threads, reads and writes them
without two lanes meeting in a bank: a weight [N, K] is stored across its rows, whose elements lie 18 floats apart.

The order of each sum is the naive tier's: k from first to last.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, types

from numba_kernels.cuda.gemm.epilogue import finisher, scale_element, scale_of_row
from numba_kernels.cuda.gemm.naive import SIDE, plan_with, seconds, specialisations_of, specialise, why_not
from numba_kernels.cuda.gemm.product import Machine, Product
from numba_kernels.cuda.gemm.split_k import in_segment, segment_of
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_loader
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.sync import sync_block
from numba_kernels.cuda.specialisation import Launch, Specialisation

__all__ = ["plan", "seconds", "specialisations", "why_not"]

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

ACROSS_STRIDE = SIDE + 2  # floats between neighbours of a column: 16 of these and the next 16 fill all banks


@functools.cache
def _kernel(dtype: str, out_dtype: str, is_weight_layout: bool, is_cut: bool) -> Specialisation:
    load, finish = element_loader(dtype), finisher(dtype, out_dtype)
    item_bytes = ITEM_BYTES[dtype]
    weight_stride = ACROSS_STRIDE if is_weight_layout else SIDE

    @device_function
    def multiply(given):
        x, weight, m, n, k = given.x, given.weight, given.m, given.n, given.k
        x_tile = cuda.shared.array((SIDE, SIDE), float32)  # [row, k]
        weight_tile = cuda.shared.array((SIDE, weight_stride), float32)  # [k, column]
        tx, ty = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        tiles_m = (m + uint32(SIDE - 1)) // uint32(SIDE)
        column_tile = uint32(cuda.blockIdx.x) // tiles_m
        row = (uint32(cuda.blockIdx.x) - column_tile * tiles_m) * uint32(SIDE) + ty
        first_column = column_tile * uint32(SIDE)
        column = first_column + tx

        start, end = uint32(0), k
        if is_cut:
            start, length = segment_of(k)
            end = uint32(start + length)
            given = in_segment(given)
        total = float32(0.0)
        while start < end:
            # Beyond the matrices: zeros.
            element = float32(0.0)
            if row < m and start + tx < end:
                element = load(x + (uint64(row) * uint64(k) + uint64(start + tx)) * uint64(item_bytes))
            x_tile[ty, tx] = element
            element = float32(0.0)
            if is_weight_layout:
                if first_column + ty < n and start + tx < end:
                    place = uint64(first_column + ty) * uint64(k) + uint64(start + tx)
                    element = load(weight + place * uint64(item_bytes))
                weight_tile[tx, ty] = element
            else:
                if column < n and start + ty < end:
                    place = uint64(start + ty) * uint64(n) + uint64(column)
                    element = load(weight + place * uint64(item_bytes))
                weight_tile[ty, tx] = element
            sync_block()
            for i in range(SIDE):
                total += x_tile[ty, i] * weight_tile[i, tx]
            sync_block()
            start += uint32(SIDE)
        if row < m and column < n:
            total = scale_element(total, scale_of_row(given, row))
            finish(given, row, column, total)

    return specialise("tiled", multiply, dtype, out_dtype, is_weight_layout, is_cut)


def plan(product: Product, machine: Machine) -> Launch:
    """A launch for a product that it can compute and that is not empty."""
    return plan_with(_kernel, product)


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    return specialisations_of(_kernel)
