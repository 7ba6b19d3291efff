"""Gathering rows and columns: token embeddings, learned positions, the rows whose logits are needed.

    embedding       out[t] = table[ids[t]] multiplier, rounded once              ids int32 [T], table [V, H]
    add_embedding   x[t] = x[t] + table[ids[t]], rounded once                    x [T, H]

table, x and out are f32, f16 or bf16, of one dtype. Rows are moved 16 bytes at a time where H and the addresses allow
it. An id outside the table sets the flag (int32, 0 before) and is read as row 0, so that the caller can raise.

    reordered       out[r, j] = x[r, order[j]]

gathers columns: x for a matrix whose columns are stored in the order of their groups, as quantisers leave it that take
columns by importance (GPTQ's `desc_act`). Elements are moved as they are, of 2 or 4 bytes. A thread collects 16 bytes
of a row, so that rows are written whole and read from the caches; else, where sizes and addresses require it, one
element.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.element import elements_loader, elements_storer
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.memory import load_b32, store_b32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.specialisation import THREADS, Launch, Specialisation, access_width, row_grid


@functools.cache
def _gather(dtype: str, width: int, is_added: bool) -> Specialisation:
    """Arguments: ids, table, out, flag addresses; rows of out; rows of the table; accesses a row; multiplier."""
    access_bytes = uint64(ITEM_BYTES[dtype] * width)
    load, store = elements_loader(dtype, width), elements_storer(dtype, width)

    @cuda.jit
    def gather(ids, table, out, flag, num_rows, table_rows, accesses_a_row, multiplier):
        wait_for_previous_grid()
        launch_dependents()
        values = cuda.local.array(width, float32)
        column = uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x)
        row = uint32(cuda.blockIdx.y)
        if column < accesses_a_row:
            while row < num_rows:
                source = load_b32(ids + uint64(row) * uint64(4))
                if source >= table_rows:  # negative ids are large ones
                    store_b32(flag, uint32(1))
                    source = uint32(0)
                at = (uint64(row) * uint64(accesses_a_row) + uint64(column)) * access_bytes
                found = load(table + (uint64(source) * uint64(accesses_a_row) + uint64(column)) * access_bytes)
                if is_added:
                    present = load(out + at)
                    for lane in range(width):
                        values[lane] = present[lane] + found[lane]
                else:
                    for lane in range(width):
                        values[lane] = found[lane] * multiplier
                store(out + at, values)
                row += uint32(cuda.gridDim.y)

    name = f"{'add_embedding' if is_added else 'embedding'}_{dtype}_x{width}"
    arguments = (types.uint64,) * 4 + (types.uint32,) * 3 + (types.float32,)
    return Specialisation(name, gather, arguments, THREADS, constants={"dtype": dtype, "width": width})


def plan_embedding(
    num_rows: int, size: int, dtype: str, *, is_added: bool = False, alignment: int = 16
) -> tuple[Launch, int]:
    """(launch, accesses a row) for out [num_rows, size], both at least 1.

    Arguments: ids, table, out (x for `is_added`), flag, num_rows, rows of the table, accesses a row, multiplier.
    """
    width = access_width(dtype, size, alignment)
    accesses = size // width
    return Launch(_gather(dtype, width, is_added), *row_grid(num_rows, accesses)), accesses


@functools.cache
def _reordered(item_bytes: int, width: int) -> Specialisation:
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


def plan_reordered(num_rows: int, size: int, dtype: str, *, alignment: int = 16) -> tuple[Launch, int]:
    """(launch, accesses a row) for x [num_rows, size], both at least 1; `alignment` divides all addresses.

    Arguments: x, order (int32 [size], each from 0 to size - 1), out, num_rows, size, accesses a row.
    """
    width = access_width(dtype, size, alignment)
    accesses = size // width
    return Launch(_reordered(ITEM_BYTES[dtype], width), *row_grid(num_rows, accesses)), accesses


def specialisations() -> Iterator[Specialisation]:
    """Every kernel of this family."""
    for dtype in DTYPES:
        for width in (1, VECTOR_WIDTH[dtype]):
            for is_added in (False, True):
                yield _gather(dtype, width, is_added)
    for item_bytes, width in sorted(
        {(ITEM_BYTES[dtype], width) for dtype in DTYPES for width in (1, VECTOR_WIDTH[dtype])}
    ):
        yield _reordered(item_bytes, width)
