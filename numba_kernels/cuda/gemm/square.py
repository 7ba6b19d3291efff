"""Tiers whose blocks are 16 x 16 threads, one for each element of the output; they exist for comparison."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

from numba import cuda

from numba_kernels.cuda.gemm.epilogue import ARGUMENT_TYPES, DTYPE_PAIRS
from numba_kernels.cuda.gemm.product import NOT_PLAIN, Machine, Product
from numba_kernels.cuda.intrinsics.element_types import DTYPES
from numba_kernels.cuda.specialisation import Launch, Specialisation

SIDE = 16

KernelMaker = Callable[[str, str, bool, bool], Specialisation]
"""A tier's specialisation for (dtype, out_dtype, is_weight_layout, is_cut)."""


def specialise(
    tier: str, gemm: Callable[..., None], dtype: str, out_dtype: str, is_weight_layout: bool, is_cut: bool
) -> Specialisation:
    layout = "nk" if is_weight_layout else "kn"
    return Specialisation(
        name=f"gemm_{tier}_{dtype}_{out_dtype}_{layout}{'_segments' if is_cut else ''}",
        kernel=cuda.jit(gemm),
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
