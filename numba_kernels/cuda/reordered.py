"""Columns of rows in another order: x for a matrix whose columns are stored in the order of their groups.

    out[r, j] = x[r, order[j]]

Quantisers that take columns by importance (GPTQ's `desc_act`) leave such matrices. Elements are moved as they are, of
2 or 4 bytes. A thread collects 16 bytes of a row, so that rows are written whole and read from the caches; else, where
sizes and addresses require it, one element.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, types, uint32, uint64

from numba_kernels.cuda.access import THREADS, access_width, row_grid
from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.specialisation import Launch, Specialisation


@functools.cache
def _kernel(item_bytes: int, width: int) -> Specialisation:
    """Arguments: x, order, out addresses; rows; columns; accesses a row."""
    is_wide, is_half = width > 1, item_bytes == 2
    load, store = (memory.load_b16, memory.store_b16) if is_half else (memory.load_b32, memory.store_b32)
    load_order, load_orders, store_words = memory.load_b32, memory.load_4xb32, memory.store_4xb32

    def reorder(x, order, out, num_rows, size, accesses):
        places, words = cuda.local.array(width, uint32), cuda.local.array(4, uint32)
        column = uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x)
        row = uint32(cuda.blockIdx.y)
        if column < accesses:
            at_order = order + uint64(column) * uint64(4 * width)
            if is_wide:
                for q in range(width // 4):
                    four = load_orders(at_order + uint64(16 * q))
                    for e in range(4):
                        places[4 * q + e] = four[e]
            else:
                places[0] = load_order(at_order)
        wait_for_previous_grid()  # the order is immutable; x may be the previous grid's output
        launch_dependents()
        if column < accesses:
            while row < num_rows:
                source = x + uint64(row) * uint64(size) * uint64(item_bytes)
                target = out + (uint64(row) * uint64(accesses) + uint64(column)) * uint64(item_bytes * width)
                if is_wide:
                    for e in range(4):
                        if is_half:
                            low = uint32(load(source + uint64(places[2 * e]) * uint64(2)))
                            high = uint32(load(source + uint64(places[2 * e + 1]) * uint64(2)))
                            words[e] = low | (high << uint32(16))
                        else:
                            words[e] = load(source + uint64(places[e]) * uint64(4))
                    store_words(target, (words[0], words[1], words[2], words[3]))
                else:
                    store(target, load(source + uint64(places[0]) * uint64(item_bytes)))
                row += uint32(cuda.gridDim.y)

    return Specialisation(
        f"reordered_b{8 * item_bytes}_x{width}", cuda.jit(reorder), (types.uint64,) * 3 + (types.uint32,) * 3, THREADS,
        constants={"item_bytes": item_bytes, "width": width},
    )  # fmt: skip


def plan(num_rows: int, size: int, dtype: str, *, alignment: int = 16) -> tuple[Launch, int]:
    """(launch, accesses a row) for x [num_rows, size], both at least 1; `alignment` divides all addresses.

    Arguments: x, order (int32 [size], each from 0 to size - 1), out, num_rows, size, accesses a row.
    """
    width = access_width(dtype, size, alignment)
    accesses = size // width
    return Launch(_kernel(ITEM_BYTES[dtype], width), *row_grid(num_rows, accesses)), accesses


def specialisations() -> Iterator[Specialisation]:
    """Every kernel of this family."""
    seen = {(ITEM_BYTES[dtype], width) for dtype in DTYPES for width in (1, VECTOR_WIDTH[dtype])}
    for item_bytes, width in sorted(seen):
        yield _kernel(item_bytes, width)
