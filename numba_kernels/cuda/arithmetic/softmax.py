"""Softmax and log-softmax over the rows of x [R, N].

    softmax      e^(x - m) / sum e^(x - m)          m = max x
    log_softmax  x - m - log sum e^(x - m)

A block takes a row and finds m and the sum in one pass: each thread keeps a running maximum and a sum scaled to it, and
rescales the sum when the maximum grows (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867); the threads' pairs
are combined likewise. A second pass writes the result. x and out are f32, f16 or bf16, arithmetic is float32. A row of
-inf alone gives zeros (log-softmax: -inf), a row with NaN or +inf gives NaN. A row's result does not depend on others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.intrinsics.block import block_max, block_sum
from numba_kernels.cuda.intrinsics.element import elements_loader, elements_storer
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.math import divide, exp, log, maximum_nan
from numba_kernels.cuda.specialisation import Launch, Specialisation, access_width

MAX_THREADS = 1024
_LOWEST = -3.4028234663852886e38


@functools.cache
def _softmax(dtype: str, width: int, is_log: bool) -> Specialisation:
    """Arguments: x, out addresses; N."""
    item_bytes = uint64(ITEM_BYTES[dtype])
    load, store = elements_loader(dtype, width), elements_storer(dtype, width)

    @cuda.jit
    def softmax(x, out, size):
        partials = cuda.shared.array(32, float32)
        values = cuda.local.array(width, float32)
        row_bytes = uint64(cuda.blockIdx.x) * uint64(size) * item_bytes
        x += row_bytes
        out += row_bytes
        step = uint32(cuda.blockDim.x) * uint32(width)
        first = uint32(cuda.threadIdx.x) * uint32(width)
        # The running maximum starts at the lowest finite number, not -inf, so that -inf - m is never NaN.
        largest = float32(_LOWEST)
        total = float32(0)
        index = first
        while index < size:
            loaded = load(x + uint64(index) * item_bytes)
            peak = largest
            for lane in range(width):
                peak = maximum_nan(peak, loaded[lane])
            total = total * exp(largest - peak)
            for lane in range(width):
                total += exp(loaded[lane] - peak)
            largest = peak
            index += step
        # block_max drops NaN; the sum, which has it, does not.
        row_largest = block_max(largest, partials)
        total = block_sum(total * exp(largest - row_largest), partials)
        index = first
        while index < size:
            at = uint64(index) * item_bytes
            loaded = load(x + at)
            for lane in range(width):
                if is_log:
                    values[lane] = loaded[lane] - row_largest - log(total)
                else:
                    exponential = exp(loaded[lane] - row_largest)
                    if total == float32(0):
                        values[lane] = float32(0)
                    else:
                        values[lane] = divide(exponential, total)
            store(out + at, values)
            index += step

    name = f"{'log_softmax' if is_log else 'softmax'}_{dtype}_x{width}"
    arguments = (types.uint64, types.uint64, types.uint32)
    return Specialisation(name, softmax, arguments, MAX_THREADS, constants={"dtype": dtype, "width": width})


def plan_softmax(num_rows: int, size: int, dtype: str, *, is_log: bool = False, alignment: int = 16) -> Launch:
    """x [num_rows, size], both at least 1. Arguments: x, out, size."""
    width = access_width(dtype, size, alignment)
    threads = min(MAX_THREADS, -(-size // width // 32) * 32)
    return Launch(_softmax(dtype, width, is_log), (num_rows, 1, 1), (max(32, threads), 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Every kernel of this family."""
    for dtype in DTYPES:
        for width in (1, VECTOR_WIDTH[dtype]):
            for is_log in (False, True):
                yield _softmax(dtype, width, is_log)
