"""Cuts arrays into accesses, and accesses into blocks, for elementwise kernels.

An access is 16 bytes wide where sizes and addresses allow it, else one element. Blocks beyond the largest grid are
looped over.
"""

from __future__ import annotations

from numba_kernels.cuda.intrinsics.element_types import VECTOR_WIDTH
from numba_kernels.cuda.specialisation import Dim3

THREADS = 256  # of a block, at most
MAX_BLOCKS = 8192  # of a flat grid: enough to fill any GPU several times
MAX_GRID_ROWS = 65535  # the y axis of a grid


def access_width(dtype: str, size: int, alignment: int = 16) -> int:
    """Elements an access: the vector width where rows of `size` and addresses of `alignment` bytes allow it, or 1."""
    return VECTOR_WIDTH[dtype] if size % VECTOR_WIDTH[dtype] == 0 and alignment % 16 == 0 else 1


def flat_grid(num_accesses: int) -> Dim3:
    """The grid of blocks of `THREADS` that goes over `num_accesses` in a loop."""
    return (min(MAX_BLOCKS, max(1, -(-num_accesses // THREADS))), 1, 1)


def row_grid(num_rows: int, accesses_a_row: int) -> tuple[Dim3, Dim3]:
    """(grid, block): x goes over the accesses of a row, y over the rows, in a loop."""
    threads = min(THREADS, max(32, -(-accesses_a_row // 32) * 32))
    return (max(1, -(-accesses_a_row // threads)), min(num_rows, MAX_GRID_ROWS), 1), (threads, 1, 1)
