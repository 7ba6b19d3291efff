"""The sum of a token's experts: ``out = sum of weight y + sigmoid(gate) shared + residual``.

A block takes a token. Each element is added up in the order of the token's choices, so that it depends on no other
token. A place of -1 adds nothing. Beside the row the block leaves the sums of squares of its warps' elements, as the
product after the next norm takes them (`gemm.epilogue`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.epilogue import scale_element
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_loader, elements_loader, elements_storer
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.math import sigmoid
from numba_kernels.cuda.intrinsics.memory import load_b32, load_f32, store_f32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index, warp_sum
from numba_kernels.cuda.specialisation import Launch, Specialisation, access_width

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

THREADS = 256
SQUARE_PARTS = THREADS // 32


@functools.cache
def adder(dtype: str, width: int) -> Any:
    """A device function ``(values, shared, gate, residual, row, place) -> None``: adds the shared expert's elements, at
    byte `place` of theirs, and the residual's to `width` sums. Addresses may be 0."""
    load, load_gate = elements_loader(dtype, width), element_loader(dtype)
    item_bytes = ITEM_BYTES[dtype]

    @device_function
    def add(values, shared, gate, residual, row, place):
        if shared != uint64(0):
            factor = float32(1.0)
            if gate != uint64(0):
                factor = sigmoid(load_gate(gate + uint64(row) * uint64(item_bytes)))
            added = load(shared + place)
            for e in range(width):
                values[e] += scale_element(added[e], factor)
        if residual != uint64(0):
            added = load(residual + place)
            for e in range(width):
                values[e] += added[e]

    return add


@functools.cache
def _kernel(dtype: str, width: int) -> Specialisation:
    """Arguments: y [R, H], weights [T, k] float32 (0: all are 1), places [T, k] int32, shared, gate, residual (0
    without), out [T, H], squares [T, SQUARE_PARTS] float32 addresses; k, H."""
    load, store, add = elements_loader(dtype, width), elements_storer(dtype, width), adder(dtype, width)
    item_bytes = ITEM_BYTES[dtype]

    def combine(y, weights, places, shared, gate, residual, out, squares, top_k, size):
        values = cuda.local.array(width, float32)
        row, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        wait_for_previous_grid()
        launch_dependents()
        draws = uint64(row) * uint64(top_k) * uint64(4)
        places += draws
        squared = float32(0.0)
        index = uint32(thread * uint32(width))
        while index < size:
            for e in range(width):
                values[e] = float32(0.0)
            rank = uint32(0)
            while rank < top_k:
                weight = float32(1.0)
                if weights != uint64(0):
                    weight = load_f32(weights + draws + uint64(rank) * uint64(4))
                row_of = load_b32(places + uint64(rank) * uint64(4))
                if row_of != uint32(0xFFFFFFFF):
                    place = uint64(row_of) * uint64(size) + uint64(index)
                    loaded = load(y + place * uint64(item_bytes))
                    for e in range(width):
                        values[e] += scale_element(loaded[e], weight)
                rank = uint32(rank + uint32(1))
            at = (uint64(row) * uint64(size) + uint64(index)) * uint64(item_bytes)
            add(values, shared, gate, residual, row, at)
            store(out + at, values)
            for e in range(width):
                squared += values[e] * values[e]
            index = uint32(index + uint32(THREADS * width))
        squared = warp_sum(squared)
        if lane_index() == uint32(0):
            part = uint64(row) * uint64(SQUARE_PARTS) + uint64(thread >> uint32(5))
            store_f32(squares + part * uint64(4), squared)

    return Specialisation(
        name=f"experts_combine_{dtype}_x{width}",
        kernel=cuda.jit(combine),
        argument_types=(types.uint64,) * 8 + (types.uint32,) * 2,
        max_threads=THREADS,
        constants={"dtype": dtype, "width": width},
    )


def plan(num_rows: int, size: int, dtype: str, *, alignment: int = 16) -> Launch:
    """The launch for at least one token and column."""
    return Launch(_kernel(dtype, access_width(dtype, size, alignment)), (num_rows, 1, 1), (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for dtype in DTYPES:
        for width in (1, VECTOR_WIDTH[dtype]):
            yield _kernel(dtype, width)
