"""Rounding a matrix's rows to integers while it is loaded, for GPUs.

The cpu has a kernel for it (`numba_kernels.cpu.gemm.panels`). Both give the same integers and scales.
"""

from __future__ import annotations

import numpy as np

from numba_kernels.cpu.gemm.packed_words import ZERO_POINT
from runtime.tensor.storage import NDArray

_ROWS_AT_ONCE = 256
_SMALLEST = np.float32(1e-30)  # below, a row counts as zeros


def int8_rows(rows: NDArray, whole: NDArray) -> tuple[NDArray, NDArray]:
    """``rows [N, K]`` of floats -> integers ``[N, K]``, `ZERO_POINT` above their value, and scales float32 ``[N]``.

    A scale is the largest magnitude of the row in ``whole``, which has the same rows and perhaps more of K, over 127.
    It is not finite where the row is not.
    """
    codes, scales = np.empty(rows.shape, np.uint8), np.empty(len(rows), np.float32)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        largest = np.abs(whole[some].astype(np.float32)).max(axis=1, initial=np.float32(0))
        is_usable = (largest >= _SMALLEST) & (largest < np.inf)
        inverse = np.where(is_usable, np.float32(127) / np.where(is_usable, largest, np.float32(1)), np.float32(0))
        with np.errstate(invalid="ignore"):
            product = rows[some].astype(np.float32) * inverse[:, None]
        codes[some] = (np.rint(np.where(np.isnan(product), np.float32(0), product)) + ZERO_POINT).astype(np.uint8)
        scales[some] = largest / np.float32(127)
    return codes, scales
