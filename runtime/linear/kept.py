"""Quantised matrices that the cpu multiplies as they are stored: which, and their numbers as its panels take them.

| matrix | is kept as |
|---|---|
| int8 without zeros, a scale a row or one for all | `INT8`: these integers, these scales |
| int4 or int8 without zeros, float16 scales for groups of 32 or a multiple | `Q4_0`, `Q8_0`; scales are repeated |
| fp4 with e8m0 scales for groups of 32 (MXFP4) | `MXFP4` |

No number is rounded anew. What else there is becomes floats while it is loaded.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from runtime.linear.format import GGML_FORMATS, INT8, WeightFormat
from runtime.linear.options import LoadOptions
from runtime.linear.quantized import QuantizedLayout, QuantizedMatrix
from runtime.tensor.storage import NDArray

_GROUP = 32  # of ggml's blocks
_INTEGERS_A_WORD = 4
_ROWS_AT_ONCE = 256


def kept_format(layout: QuantizedLayout, options: LoadOptions) -> WeightFormat | None:
    """The format of the cpu in which a matrix is kept; None: it becomes floats, as all do if a type is asked for."""
    if options.device.kind != "cpu" or options.dtype or options.format or options.num_ranks > 1:
        return None
    if layout.has_zeros or layout.has_order:
        return None
    if layout.kind == "int8" and layout.block in ((1, 0), (0, 0)):
        return None if layout.shape[1] % _INTEGERS_A_WORD else INT8
    format = _block_format(layout)
    return None if format is None or layout.shape[1] % format.split else format


def _block_format(layout: QuantizedLayout) -> WeightFormat | None:
    rows, elements = layout.block
    if rows != 1 or elements % _GROUP or layout.shape[1] % _GROUP:
        return None
    name = {
        ("int4", np.dtype(np.float16)): "Q4_0",
        ("int8", np.dtype(np.float16)): "Q8_0",
        ("fp4", np.dtype(ml_dtypes.float8_e8m0fnu)): "MXFP4",
    }.get((layout.kind, layout.scale))
    return GGML_FORMATS.get(name or "")


def row_scales(matrix: QuantizedMatrix) -> NDArray:
    """Float32 ``[N]``, of a matrix that is kept as `INT8`."""
    scales: NDArray = np.broadcast_to(matrix.scales.astype(np.float32)[:, 0], matrix.shape[:1])
    return scales


def block_bytes(matrix: QuantizedMatrix, format: WeightFormat) -> NDArray:
    """The rows of a matrix in ggml's blocks of 32, ``[N, row bytes]`` uint8."""
    width, depth = matrix.shape
    scales = np.repeat(matrix.scales, (matrix.layout.block[1] or depth) // _GROUP, axis=1)[:, : depth // _GROUP]
    scale_bytes, number_bytes = scales.dtype.itemsize, _GROUP // (1 if format.name == "Q8_0" else 2)
    blocks = np.empty((width, depth // _GROUP, scale_bytes + number_bytes), np.uint8)
    blocks[..., :scale_bytes] = np.ascontiguousarray(scales).view(np.uint8).reshape(width, -1, scale_bytes)
    for first in range(0, width, _ROWS_AT_ONCE):
        some = slice(first, min(first + _ROWS_AT_ONCE, width))
        numbers = matrix.numbers(some).reshape(some.stop - first, -1, _GROUP)
        if format.name == "Q8_0":
            blocks[some, :, scale_bytes:] = numbers ^ np.uint8(128)
        else:
            half = _GROUP // 2
            blocks[some, :, scale_bytes:] = numbers[..., :half] | numbers[..., half:] << np.uint8(4)
    return blocks.reshape(width, -1)
