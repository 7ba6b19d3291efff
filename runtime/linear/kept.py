"""Quantised matrices that the cpu multiplies as they are stored: which, and their numbers as its panels take them.

| matrix | is kept as |
|---|---|
| int8 without zeros, a scale a row or one for all | `INT8`: these integers, these scales |
| int4 or int8 without zeros, scales of 16 bits for groups of 32 or a multiple | `Q4_0`, `Q8_0`; scales are repeated |
| int4 with zeros, scales as above | `Q5_0`: integers less their zero have five bits |
| fp4 with e8m0 scales for groups of 32 (MXFP4) | `MXFP4` |

No number is rounded anew: bfloat16 scales must be float16 numbers, too, which those from 2^-17 on are. What else there
is becomes floats while it is loaded.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from runtime.linear.format import GGML_FORMATS, INT8, WeightFormat
from runtime.linear.options import LoadOptions
from runtime.linear.quantized import QuantizedLayout, QuantizedMatrix
from runtime.tensor.storage import NDArray

_BFLOAT16, _E8M0 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e8m0fnu)
_SCALES_OF_INTEGERS = (np.dtype(np.float16), _BFLOAT16)
_GROUP = 32  # of ggml's blocks
_INTEGERS_A_WORD = 4
_ROWS_AT_ONCE = 256


def kept_format(layout: QuantizedLayout, options: LoadOptions) -> WeightFormat | None:
    """The format of the cpu in which a matrix is kept; None: it becomes floats, as all do if only a type is asked
    for."""
    is_of_type = options.dtype is not None and not options.rounding
    if options.device.kind != "cpu" or is_of_type or options.format or options.num_ranks > 1:
        return None
    if layout.has_order:
        return None
    if layout.kind == "int8" and not layout.has_zeros and layout.block in ((1, 0), (0, 0)):
        return None if layout.shape[1] % _INTEGERS_A_WORD else INT8
    format = _block_format(layout)
    return None if format is None or layout.shape[1] % format.split else format


def _block_format(layout: QuantizedLayout) -> WeightFormat | None:
    rows, elements = layout.block
    if rows != 1 or elements % _GROUP or layout.shape[1] % _GROUP:
        return None
    if layout.scale in _SCALES_OF_INTEGERS:
        name = {("int4", False): "Q4_0", ("int4", True): "Q5_0", ("int8", False): "Q8_0"}.get(
            (layout.kind, layout.has_zeros)
        )
    else:
        name = "MXFP4" if (layout.kind, layout.scale) == ("fp4", _E8M0) else None
    return GGML_FORMATS.get(name or "")


def can_be_kept(matrix: QuantizedMatrix) -> bool:
    """Whether the scales of a matrix that has a `kept_format` are what that format can hold."""
    if matrix.layout.scale != _BFLOAT16 or kept_format(matrix.layout, LoadOptions()) is INT8:
        return True
    with np.errstate(over="ignore"):
        return bool((matrix.scales.astype(np.float16).astype(np.float32) == matrix.scales.astype(np.float32)).all())


def row_scales(matrix: QuantizedMatrix) -> NDArray:
    """Float32 ``[N]``, of a matrix that is kept as `INT8`."""
    scales: NDArray = np.broadcast_to(matrix.scales.astype(np.float32)[:, 0], matrix.shape[:1])
    return scales


def block_bytes(matrix: QuantizedMatrix, format: WeightFormat) -> NDArray:
    """The rows of a matrix in ggml's blocks of 32, ``[N, row bytes]`` uint8."""
    (width, depth), is_exponent = matrix.shape, matrix.layout.scale == _E8M0
    times = (matrix.layout.block[1] or depth) // _GROUP
    scales = _repeated(matrix.scales if is_exponent else matrix.scales.astype(np.float16), times, depth)
    zeros = None if matrix.zeros is None else _repeated(matrix.zeros, times, depth)[..., None]
    fields: list[Any] = [("d", "u1" if is_exponent else "<f2")]
    fields += [("high", "u1", 4)] if zeros is not None else []
    fields += [("q", "u1", _GROUP if format.name == "Q8_0" else _GROUP // 2)]
    blocks = np.empty((width, depth // _GROUP), np.dtype(fields))
    blocks["d"] = scales.view(np.uint8) if is_exponent else scales
    for first in range(0, width, _ROWS_AT_ONCE):
        some = slice(first, min(first + _ROWS_AT_ONCE, width))
        numbers = matrix.numbers(some).reshape(some.stop - first, -1, _GROUP)
        if format.name == "Q8_0":
            blocks["q"][some] = numbers ^ np.uint8(128)
            continue
        if zeros is not None:
            numbers = numbers + np.uint8(16) - zeros[some]
            blocks["high"][some] = np.packbits(numbers >> np.uint8(4), axis=2, bitorder="little")
            numbers &= np.uint8(15)
        half = _GROUP // 2
        blocks["q"][some] = numbers[..., :half] | numbers[..., half:] << np.uint8(4)
    return blocks.view(np.uint8).reshape(width, -1)


def _repeated(values: NDArray, times: int, depth: int) -> NDArray:
    """Numbers of groups as those of blocks of 32."""
    repeated: NDArray = np.repeat(values, times, axis=1)[:, : depth // _GROUP]
    return repeated
