"""The rows of each text's tokens as one row (`runtime.pooling`): sums of float64, in the order of the tokens."""

from __future__ import annotations

import functools

import numpy as np
from numba import carray

from numba_kernels.cpu.running.launch import Fields, Kernel, copy_bytes, float32_at, int32_at

FIELDS = Fields("*rows *query_start *out num_texts width pooling")
POOLINGS = ("cls", "last", "mean", "max", "weighted_mean", "mean_sqrt_len")
"""Their places here are the field's numbers."""
_CLS, _LAST, _MEAN, _MAX, _WEIGHTED = range(5)


@functools.cache
def pooled_texts_kernel() -> Kernel:
    """Writes ``out [n, W]`` for the rows ``[T, W]`` of n texts, whose tokens begin at ``query_start [n + 1]``. A work
    item is a text. A NaN makes the largest number a NaN."""

    def pooled_texts(arguments, work_item):
        a = carray(arguments, 1)[0]
        width, starts = a.width, int32_at(a.query_start, a.num_texts + 1)
        first, end = np.int64(starts[work_item]), np.int64(starts[work_item + 1])
        target = a.out + work_item * width * 4
        if a.pooling == _CLS or a.pooling == _LAST or a.pooling == _MAX:
            copy_bytes(target, a.rows + (end - 1 if a.pooling == _LAST else first) * width * 4, width * 4)
        out = float32_at(target, width)
        if a.pooling == _MAX:
            for row in range(first + 1, end):
                x = float32_at(a.rows + row * width * 4, width)
                for i in range(width):
                    out[i] = x[i] if x[i] > out[i] or x[i] != x[i] else out[i]
        elif a.pooling >= _MEAN:
            count, totals = np.float64(end - first), np.zeros(width, np.float64)
            for row in range(first, end):
                x = float32_at(a.rows + row * width * 4, width)
                weight = np.float64(row - first + 1) if a.pooling == _WEIGHTED else 1.0
                for i in range(width):
                    totals[i] += np.float64(x[i]) * weight
            divisor = count if a.pooling == _MEAN else np.sqrt(count)
            if a.pooling == _WEIGHTED:
                divisor = count * (count + 1.0) / 2.0
            for i in range(width):
                out[i] = np.float32(totals[i] / divisor)

    return Kernel(pooled_texts, FIELDS)
