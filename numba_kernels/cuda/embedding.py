"""Gathering rows: token embeddings, learned positions, the rows whose logits are needed.

    embedding       out[t] = table[ids[t]] multiplier, rounded once              ids int32 [T], table [V, H]
    add_embedding   x[t] = x[t] + table[ids[t]], rounded once                    x [T, H]

table, x and out are f32, f16 or bf16, of one dtype. Rows are moved 16 bytes at a time where H and the addresses allow
it. An id outside the table sets the flag (int32, 0 before) and is read as row 0, so that the caller can raise.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.access import THREADS, access_width, row_grid
from numba_kernels.cuda.intrinsics.element import elements_loader, elements_storer
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.memory import load_b32, store_b32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.specialisation import Launch, Specialisation


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


def specialisations() -> Iterator[Specialisation]:
    """Every kernel of this family."""
    for dtype in DTYPES:
        for width in (1, VECTOR_WIDTH[dtype]):
            for is_added in (False, True):
                yield _gather(dtype, width, is_added)
