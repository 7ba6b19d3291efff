"""MXFP4 as gpt-oss stores its experts: e2m1 in blocks of 32 with e8m0 scales.

X_blocks  uint8 [experts, N, K / 32, 16]: element 2j of a block in the low half of its byte j
X_scales  uint8 [experts, N, K / 32]: exponents, 127 above their value
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from models.checkpoint import StoredTensor
from models.quantized.parts import refusal
from runtime.linear.quantized import QuantizedLayout, QuantizedMatrix

_BLOCK = 32


def expert_matrices(blocks: StoredTensor, scales: StoredTensor) -> list[QuantizedMatrix]:
    """One matrix ``[N, K]`` for each expert, as views of the mapped files. Raises `WeightsError`."""
    for stored in (blocks, scales):
        if stored.type_name != "U8":
            raise refusal(stored, f"is {stored.type_name}, must be U8")
    if len(blocks.shape) != 4 or blocks.shape[3] != _BLOCK // 2 or 0 in blocks.shape:
        raise refusal(blocks, f"is {list(blocks.shape)}, must be [experts, N, K / {_BLOCK}, {_BLOCK // 2}]")
    if scales.shape != blocks.shape[:3]:
        raise refusal(scales, f"is {list(scales.shape)}, must be {list(blocks.shape[:3])}")
    num_experts, width, num_blocks, _ = blocks.shape
    exponents = scales.array().view(ml_dtypes.float8_e8m0fnu)
    if (exponents.view(np.uint8) == 255).any():
        place = np.argwhere(exponents.view(np.uint8) == 255)[0].tolist()
        raise refusal(scales, f"has the scale nan at {place}; scales must be finite")
    layout = QuantizedLayout("fp4", (width, num_blocks * _BLOCK), (1, _BLOCK), exponents.dtype)
    codes = blocks.array().reshape(num_experts, width, -1)
    return [QuantizedMatrix(layout, codes[i], exponents[i]) for i in range(num_experts)]
