"""Conversion of numpy arrays between element types, with every hard case specified.

- float to a narrower float: rounded once, to nearest, ties to even. Overflow gives infinity, or NaN in
  float8_e4m3, which has no infinity; ml_dtypes does the same. PyTorch 2.13 and PTX's `satfinite` give +-448
  there instead; clip first for that.
- integer to float: as from float32, into which it is rounded first.
- float to integer: towards zero; out-of-range values become the nearest end of the range, and NaN 0, as
  PTX's `cvt.rzi` has it.
- integer to a narrower integer: the low bits stay (two's complement).
- anything to bool: whether it differs from zero, so NaN is True. bool to anything: 0 or 1.
"""

from __future__ import annotations

import numpy as np

from runtime.dtype import DType, NDArray, bool_, dtype_of_array


def cast_array(array: NDArray, target: DType) -> NDArray:
    """The array itself where it has the type already, else a converted copy of the same shape."""
    source = dtype_of_array(array)
    if source is target:
        return array
    with np.errstate(all="ignore"):  # the cases that numpy warns of are defined above
        if target is bool_:
            is_set: NDArray = np.not_equal(array, 0)
            return is_set
        if source.is_floating and not target.is_floating:
            return _float_to_integer(array, target)
        if target.is_floating and not source.is_floating:
            array = array.astype(np.float32)
        return array.astype(target.numpy, copy=False)


def _float_to_integer(array: NDArray, target: DType) -> NDArray:
    limits = np.iinfo(target.numpy)
    wide = array.astype(np.float64)
    # Ends of int32 and narrower are exact in float64. int64's upper end rounds to 2**63, one past the range.
    top = float(limits.max)
    is_top = wide >= top
    safe = np.where(is_top | np.isnan(wide), 0.0, np.maximum(wide, float(limits.min)))
    result: NDArray = np.where(is_top, target.numpy.type(limits.max), safe.astype(target.numpy))
    return result
