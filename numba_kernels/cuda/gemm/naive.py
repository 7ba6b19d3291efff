"""Tier 1: one thread an element of the output. Lesson: the equation, and why it is not enough.

Every thread reads a whole row of x and a whole row of the weight: 2 K elements for 2 K operations, so the same numbers
are fetched again and again, and neighbouring lanes read rows of the weight that lie K elements apart. The caches alone
keep it from being slower still.

Each sum runs over k from first to last, one fused multiply-add at a time, so that rows alone or batched are identical
(and equal to those of the tiled and register tiers, bit by bit).

Blocks of this tier and of `tiled` are 16 x 16 threads, one for each element of the output; they exist for comparison.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.epilogue import (
    ARGUMENT_TYPES,
    DTYPE_PAIRS,
    finisher,
    product_kernel,
    scale_element,
    scale_of_row,
)
from numba_kernels.cuda.gemm.product import NOT_PLAIN, Machine, Product
from numba_kernels.cuda.gemm.split_k import in_segment, segment_of
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_loader
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES
from numba_kernels.cuda.specialisation import Launch, Specialisation

SIDE = 16

KernelMaker = Callable[[str, str, bool, bool], Specialisation]
"""A tier's specialisation for (dtype, out_dtype, is_weight_layout, is_cut)."""


def specialise(
    tier: str, multiply: Any, dtype: str, out_dtype: str, is_weight_layout: bool, is_cut: bool
) -> Specialisation:
    layout = "nk" if is_weight_layout else "kn"
    return Specialisation(
        name=f"gemm_{tier}_{dtype}_{out_dtype}_{layout}{'_segments' if is_cut else ''}",
        kernel=product_kernel(multiply),
        argument_types=ARGUMENT_TYPES,
        max_threads=SIDE * SIDE,
        constants={"dtype": dtype, "out_dtype": out_dtype, "layout": layout, "is_cut": is_cut},
    )


def why_not(product: Product, machine: Machine) -> str:
    """Why such a tier cannot compute a product; "" if it can."""
    return "" if product.is_plain else NOT_PLAIN


def seconds(product: Product, machine: Machine) -> float:
    """Infinite: never chosen."""
    return math.inf


def plan_with(kernel: KernelMaker, product: Product) -> Launch:
    """A launch for a product that it can compute and that is not empty."""
    tiles = -(-product.m // SIDE) * -(-product.n // SIDE)
    parts = product.num_segments
    chosen = kernel(product.x, product.out, product.is_weight_layout, parts > 1)
    return Launch(chosen, (tiles, max(1, parts), 1), (SIDE, SIDE, 1))


def specialisations_of(kernel: KernelMaker) -> Iterator[Specialisation]:
    """Every specialisation that `plan_with` can return."""
    for (dtype, out_dtype), is_weight_layout in itertools.product(DTYPE_PAIRS, (True, False)):
        yield kernel(dtype, out_dtype, is_weight_layout, False)
    for dtype in DTYPES:
        yield kernel(dtype, "f32", True, True)


__all__ = ["plan", "seconds", "specialisations", "why_not"]

uint32, uint64, float32 = types.uint32, types.uint64, types.float32


@functools.cache
def _kernel(dtype: str, out_dtype: str, is_weight_layout: bool, is_cut: bool) -> Specialisation:
    load, finish = element_loader(dtype), finisher(dtype, out_dtype)
    item_bytes = ITEM_BYTES[dtype]

    @device_function
    def multiply(given):
        x, weight, m, n, k = given.x, given.weight, given.m, given.n, given.k
        row_tile = uint32(cuda.blockIdx.x) % ((m + uint32(SIDE - 1)) // uint32(SIDE))
        column_tile = uint32(cuda.blockIdx.x) // ((m + uint32(SIDE - 1)) // uint32(SIDE))
        row = row_tile * uint32(SIDE) + uint32(cuda.threadIdx.y)
        column = column_tile * uint32(SIDE) + uint32(cuda.threadIdx.x)
        length = k
        if is_cut:
            first, length = segment_of(k)
            x += uint64(first) * uint64(item_bytes)
            weight += uint64(first) * uint64(item_bytes)
            given = in_segment(given)
        if row < m and column < n:
            x_row = x + uint64(row) * uint64(k) * uint64(item_bytes)
            if is_weight_layout:
                weight_column = weight + uint64(column) * uint64(k) * uint64(item_bytes)
                step = uint64(item_bytes)
            else:
                weight_column = weight + uint64(column) * uint64(item_bytes)
                step = uint64(n) * uint64(item_bytes)
            total = float32(0.0)
            i = uint32(0)
            while i < length:
                total += load(x_row) * load(weight_column)
                x_row += uint64(item_bytes)
                weight_column += step
                i += uint32(1)
            total = scale_element(total, scale_of_row(given, row))
            finish(given, row, column, total)

    return specialise("naive", multiply, dtype, out_dtype, is_weight_layout, is_cut)


def plan(product: Product, machine: Machine) -> Launch:
    """A launch for a product that it can compute and that is not empty."""
    return plan_with(_kernel, product)


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    return specialisations_of(_kernel)
