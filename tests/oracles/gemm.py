"""Matrix product in numpy float64, with what float32 sums and one rounding may differ from it."""

from __future__ import annotations

import ml_dtypes
import numpy as np

UNIT_ROUNDOFF = {np.dtype(np.float32): 2.0**-24, np.dtype(np.float16): 2.0**-11, np.dtype(ml_dtypes.bfloat16): 2.0**-8}
_SMALLEST = {np.dtype(np.float32): 2.0**-149, np.dtype(np.float16): 2.0**-24, np.dtype(ml_dtypes.bfloat16): 2.0**-133}


def product(x, weight, bias=None, residual=None, *, is_weight_layout=True):
    """``x [M, K] . weight [N, K]^T`` (or ``. weight [K, N]``) ``+ bias [N] + residual [M, N]`` in float64."""
    matrix = np.asarray(weight, np.float64).T if is_weight_layout else np.asarray(weight, np.float64)
    out = np.asarray(x, np.float64) @ matrix
    for term in (bias, residual):
        if term is not None:
            out = out + np.asarray(term, np.float64)
    return out


def error_bound(x, weight, bias, residual, out_dtype, *, is_weight_layout=True):
    """The most that an element may be off: ``(K + 2) u sum |x w|`` for any order of float32 additions (Higham, Accuracy
    and Stability of Numerical Algorithms, 3.1), twice that, as tensor cores cut off instead of rounding, and the
    rounding of the result."""
    absolute = [None if term is None else np.abs(np.asarray(term, np.float64)) for term in (x, weight, bias, residual)]
    largest = product(*absolute, is_weight_layout=is_weight_layout)
    exact = np.abs(product(x, weight, bias, residual, is_weight_layout=is_weight_layout))
    sums = 2 * (np.shape(x)[1] + 2) * UNIT_ROUNDOFF[np.dtype(np.float32)] * largest
    return sums + UNIT_ROUNDOFF[np.dtype(out_dtype)] * (exact + sums) + _SMALLEST[np.dtype(out_dtype)]
