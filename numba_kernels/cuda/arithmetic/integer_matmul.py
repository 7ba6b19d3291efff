"""Matrix product of integers, exact in int64 and wrapped into the result's type: out[M, N] = a[M, K] b[K, N].

For Tensor's ``@``: quantised layers have kernels of their own. One thread an element; a and b have any strides.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, int64, types, uint32, uint64

from numba_kernels.cuda.intrinsics.storage import CODES, LOADERS, STORED_BYTES, STORERS
from numba_kernels.cuda.specialisation import Launch, Specialisation

BLOCK = 16
RESULTS = {"s8": "s32", "u8": "s32", "s32": "s32", "s64": "s64"}
"""The result's type by the operands'."""


@functools.cache
def _kernel() -> Specialisation:
    """Arguments: see `plan`."""
    load, store = LOADERS["s64"], STORERS["s64"]

    @cuda.jit
    def integer_matmul(a, b, out, m, n, k, code, code_out, item_bytes, a_row, a_column, b_row, b_column):
        row = uint32(cuda.blockIdx.y) * uint32(BLOCK) + uint32(cuda.threadIdx.y)
        column = uint32(cuda.blockIdx.x) * uint32(BLOCK) + uint32(cuda.threadIdx.x)
        if column < n:
            while row < m:
                at_a = a + uint64(row) * a_row
                at_b = b + uint64(column) * b_column
                total = int64(0)
                index = uint32(0)
                while index < k:
                    total += load(code, at_a) * load(code, at_b)
                    at_a += a_column
                    at_b += b_row
                    index += uint32(1)
                store(code_out, out + (uint64(row) * uint64(n) + uint64(column)) * item_bytes, total)
                row += uint32(cuda.gridDim.y) * uint32(BLOCK)

    arguments = (types.uint64,) * 3 + (types.uint32,) * 5 + (types.uint64,) * 5
    return Specialisation("integer_matmul", integer_matmul, arguments, BLOCK * BLOCK)


def plan(m: int, n: int, dtype: str) -> tuple[Launch, tuple[int, int, int]]:
    """(launch, the arguments for the dtypes) for out [m, n] of `RESULTS[dtype]`, C-contiguous; both at least 1.

    Arguments: a, b, out addresses; m, n, k; those three; bytes from one row and from one column to the next in a, then
    in b (two's complement where negative).
    """
    grid = (-(-n // BLOCK), min(65535, -(-m // BLOCK)), 1)
    result = RESULTS[dtype]
    return Launch(_kernel(), grid, (BLOCK, BLOCK, 1)), (CODES[dtype], CODES[result], STORED_BYTES[result])


def specialisations() -> Iterator[Specialisation]:
    """The one kernel of this family."""
    yield _kernel()
