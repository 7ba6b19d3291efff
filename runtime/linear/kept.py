"""How a device keeps a quantised matrix that it multiplies without dequantising it: a row for each, a column a device.

| matrix | on a cpu: a `WeightFormat`, in panels | on a GPU: a `Packing` |
|---|---|---|
| int8, no zeros, a scale a row or one | `INT8`: these integers and scales | a scale a row |
| int4, int8 with groups of K | `Q4_0`, `int4_bfloat` …: groups of 32 n | a scale, an offset a row and group |
| MXFP4: e8m0 scales of 32 | `MXFP4` | a byte a scale, an exponent |
| NVFP4: e4m3 scales of 16 | `nvfp4`: scales by the number for all | a byte a scale; that number in the rows' |
| fp8 | `fp8`: groups of 128 n, float32 | as integers, rows or groups |

A GPU's groups are of 16 to 128. Larger groups' scales are repeated.
Columns may be stored in another order (`desc_act`): products take x's columns in that order. Tables that are read row
by row have no such products, nor have experts on a cpu (`models.makers.kept_formats`). No number is rounded again. Any
other matrix is dequantised while it is loaded.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from numba_kernels.blocks import BLOCKS
from numba_kernels.cuda.packing import GROUPS, Packing
from runtime.dtype import NDArray
from runtime.linear.format import GGML_FORMATS, GROUP_FORMATS, INT8, WeightFormat, packed_format
from runtime.linear.options import LoadOptions
from runtime.linear.quantized import QuantizedLayout, QuantizedMatrix

_GROUP = 32  # of ggml's blocks
_FP4_GROUP = 16
_FP8_GROUP = 128
_NAN = 0x7F  # of e4m3, without the sign
_INTEGERS_A_WORD = 4
_SCALES = {np.dtype(np.float16): "half", np.dtype(ml_dtypes.bfloat16): "bfloat", np.dtype(np.float32): "float"}
_ROWS_AT_ONCE = 256
_ELEMENTS = {"int4": "u4", "int8": "u8", "fp8": "e4m3", "fp4": "e2m1"}  # of a GPU's packings
_EXPONENTS, _E4M3 = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(ml_dtypes.float8_e4m3fn)


def kept_format(layout: QuantizedLayout, options: LoadOptions) -> WeightFormat | None:
    """A device's format for a quantised matrix; None if it is dequantised, as all are if another format is requested.
    On the cpu all are if only a type is requested, and those whose products round x if none may."""
    if options.format:
        return None
    if options.device.kind != "cpu":
        packing = _packing_of(layout) if options.gemm != "cublas" else None
        return None if packing is None else packed_format(packing)
    if options.dtype is not None and not options.rounding:
        return None
    format = _stored_format(layout)
    return None if format is None or (options.has_float_activations and options.rounds_x(format)) else format


def _packing_of(layout: QuantizedLayout) -> Packing | None:
    element, size = _ELEMENTS[layout.kind], layout.block[1]
    if size not in GROUPS and size % GROUPS[-1]:
        return None
    if not size:
        return Packing(element, GROUPS[-1], "value", True) if layout.has_zeros else Packing(element)
    kind = "exponent" if layout.scale == _EXPONENTS else "e4m3" if layout.scale == _E4M3 else ""
    kind = kind if element == "e2m1" else ""
    if (size == 16 and kind != "e4m3") or (kind and size >= GROUPS[-1]):
        return None
    return Packing(element, min(size, GROUPS[-1]), kind or "value", layout.has_zeros)


def _stored_format(layout: QuantizedLayout) -> WeightFormat | None:
    if layout.kind == "int8" and layout.block in ((1, 0), (0, 0)) and not layout.has_zeros:
        return None if layout.shape[1] % _INTEGERS_A_WORD else INT8
    if layout.kind == "fp8":
        return None if layout.block[1] % _FP8_GROUP else GROUP_FORMATS["fp8"]
    format = _block_format(layout)
    return None if format is None or layout.shape[1] % format.multiple else format


def _block_format(layout: QuantizedLayout) -> WeightFormat | None:
    rows, elements = layout.block
    if layout.kind == "fp4" and elements == _FP4_GROUP and layout.scale == _E4M3:
        return GROUP_FORMATS["nvfp4"] if rows == 1 else None
    if rows != 1 or elements % _GROUP or layout.shape[1] % _GROUP:
        return None
    if layout.kind == "fp4":
        return GGML_FORMATS["MXFP4"] if layout.scale == _EXPONENTS and elements == _GROUP else None
    if layout.scale not in _SCALES:
        return None
    if layout.scale == np.float16 and not layout.has_zeros:
        return GGML_FORMATS["Q4_0" if layout.kind == "int4" else "Q8_0"]
    return GROUP_FORMATS[f"{layout.kind}_{_SCALES[layout.scale]}" + "_zeros" * layout.has_zeros]


def row_scales(matrix: QuantizedMatrix) -> NDArray:
    """Scales of a matrix that is kept as `INT8`: float32 ``[N]``."""
    scales: NDArray = np.broadcast_to(matrix.scales.astype(np.float32)[:, 0], matrix.shape[:1])
    return scales


def block_bytes(matrix: QuantizedMatrix, format: WeightFormat) -> NDArray:
    """The rows of a matrix in blocks, ``[N, row bytes]`` uint8: ggml's, or like them (`BLOCKS`)."""
    if format.name == "fp8":
        return _fp8_bytes(matrix)
    width, depth = matrix.shape
    block = BLOCKS[format.name]
    size = block.elements // block.pairs
    blocks = np.zeros((width, depth // size), block.fields)
    repeats = (matrix.layout.block[1] or depth) // block.group

    def of_groups(values: NDArray, field: str) -> NDArray:
        """A value for each group, ``[N, blocks, groups of a block]`` as the field has it."""
        values = np.repeat(values, repeats, axis=1)[:, : depth // block.group]
        return values.reshape(blocks[field].shape)

    if format.name == "nvfp4":
        blocks["d"] = of_groups(matrix.scaled(matrix.scales.astype(np.float32)) / np.float32(2), "d")
    elif block.scale == "e8m0":
        blocks["exponent"] = of_groups(matrix.scales.view(np.uint8), "exponent")
    else:
        scales = np.ascontiguousarray(matrix.scales)
        blocks["d"] = of_groups(scales.view(np.uint16) if block.fields["d"] == np.uint16 else scales, "d")
    if block.minimum == "z":
        assert matrix.zeros is not None
        blocks["z"] = of_groups(matrix.zeros, "z")
    run = block.planes[0].run
    for first in range(0, width, _ROWS_AT_ONCE):
        some = slice(first, min(first + _ROWS_AT_ONCE, width))
        numbers = matrix.numbers(some)
        if block.is_bytes:
            numbers = numbers ^ np.uint8(128)
        else:
            halves = numbers.reshape(len(numbers), -1, 2, run)
            numbers = halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)
        blocks["q"][some] = numbers.reshape(blocks["q"][some].shape).view(blocks["q"].dtype)
    return blocks.view(np.uint8).reshape(width, -1)


def _fp8_bytes(matrix: QuantizedMatrix) -> NDArray:
    """The same for e4m3, with the last group padded. A group with NaN gets a NaN scale; its products are NaN either
    way."""
    (width, depth), (rows, elements) = matrix.shape, matrix.layout.block
    groups = -(-depth // _FP8_GROUP)
    blocks = np.zeros((width, groups), BLOCKS["fp8"].fields)
    scales = np.repeat(matrix.scales.astype(np.float32), elements // _FP8_GROUP or groups, axis=1)[:, :groups]
    blocks["d"] = np.repeat(scales, rows or width, axis=0)[:width]
    codes = np.zeros((width, groups * _FP8_GROUP), np.uint8)
    codes[:, :depth] = matrix.codes
    blocks["q"] = codes.reshape(blocks["q"].shape)
    blocks["d"][(blocks["q"] & _NAN == _NAN).any(axis=2)] = np.nan
    return blocks.view(np.uint8).reshape(width, -1)
