"""Multipliers (as in Granite) and soft caps (as in Gemma 2, https://arxiv.org/abs/2408.00118).

    add_scaled      out = x + scale y                        [T, H], f32, f16 or bf16, rounded once
    scale_logits    x = scale x, or cap tanh(scale x / cap)  float32, in place

tanh is (1 - e) / (1 + e) with e = exp(-2 |x|). Each element is read and written once, and bandwidth bounds the time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.access import THREADS, access_width, flat_grid
from numba_kernels.cuda.intrinsics.element import elements_loader, elements_storer
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.math import absolute, divide, exp
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.specialisation import Launch, Specialisation


@functools.cache
def _add_scaled(dtype: str, width: int) -> Specialisation:
    """Arguments: x, y, out addresses; accesses of `width` elements; scale."""
    access_bytes = uint64(ITEM_BYTES[dtype] * width)
    load, store = elements_loader(dtype, width), elements_storer(dtype, width)

    @cuda.jit
    def add_scaled(x, y, out, num_accesses, scale):
        wait_for_previous_grid()
        launch_dependents()
        values = cuda.local.array(width, float32)
        index = uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x)
        step = uint32(cuda.gridDim.x) * uint32(cuda.blockDim.x)
        while index < num_accesses:
            at = uint64(index) * access_bytes
            first = load(x + at)
            second = load(y + at)
            for lane in range(width):
                values[lane] = first[lane] + scale * second[lane]
            store(out + at, values)
            index += step

    arguments = (types.uint64,) * 3 + (types.uint32, types.float32)
    constants = {"dtype": dtype, "width": width}
    return Specialisation(f"add_scaled_{dtype}_x{width}", add_scaled, arguments, THREADS, constants=constants)


@functools.cache
def _scale_logits(width: int, is_capped: bool) -> Specialisation:
    """Arguments: the logits' address; accesses of `width` elements; scale; cap; -2 / cap."""
    access_bytes = uint64(4 * width)
    load, store = elements_loader("f32", width), elements_storer("f32", width)

    @cuda.jit
    def scale_logits(logits, num_accesses, scale, cap, exponent):
        wait_for_previous_grid()
        launch_dependents()
        values = cuda.local.array(width, float32)
        index = uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x)
        step = uint32(cuda.gridDim.x) * uint32(cuda.blockDim.x)
        while index < num_accesses:
            at = uint64(index) * access_bytes
            loaded = load(logits + at)
            for lane in range(width):
                value = loaded[lane] * scale
                if is_capped:
                    e = exp(absolute(value) * exponent)
                    capped = cap * divide(float32(1) - e, float32(1) + e)
                    if value < float32(0):
                        capped = -capped
                    value = capped
                values[lane] = value
            store(logits + at, values)
            index += step

    arguments = (types.uint64, types.uint32, types.float32, types.float32, types.float32)
    name = f"scale_logits{'_capped' if is_capped else ''}_x{width}"
    return Specialisation(name, scale_logits, arguments, THREADS, constants={"width": width, "is_capped": is_capped})


def plan_add_scaled(num_elements: int, dtype: str, *, alignment: int = 16) -> tuple[Launch, int]:
    """(launch, number of accesses). Arguments: x, y, out, number of accesses, scale; out may be x or y."""
    width = access_width(dtype, num_elements, alignment)
    accesses = num_elements // width
    return Launch(_add_scaled(dtype, width), flat_grid(accesses), (THREADS, 1, 1)), accesses


def plan_scale_logits(num_elements: int, *, is_capped: bool, alignment: int = 16) -> tuple[Launch, int]:
    """(launch, number of accesses). Arguments: logits, number of accesses, scale, cap, -2 / cap."""
    width = access_width("f32", num_elements, alignment)
    accesses = num_elements // width
    return Launch(_scale_logits(width, is_capped), flat_grid(accesses), (THREADS, 1, 1)), accesses


def specialisations() -> Iterator[Specialisation]:
    """Every kernel of this family."""
    for dtype in DTYPES:
        for width in (1, VECTOR_WIDTH[dtype]):
            yield _add_scaled(dtype, width)
    for width in (1, VECTOR_WIDTH["f32"]):
        for is_capped in (False, True):
            yield _scale_logits(width, is_capped)
