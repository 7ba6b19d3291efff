"""`quant_method: mxfp4`: experts as gpt-oss stores them, e2m1 in blocks of 32 with e8m0 scales.

X_blocks  uint8 [experts, N, K / 32, 16]: element 2j of a block in the low half of its byte j
X_scales  uint8 [experts, N, K / 32]: exponents, 127 above their value

X in floats would be [experts, K, N].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import ml_dtypes
import numpy as np

from models.configuration.json_fields import Fields
from models.quantized.parts import MatrixParts, ModuleTensors, Part, refusal
from runtime.linear.quantized import QuantizedLayout

STACKED_PARTS = ("blocks", "scales")
_BLOCK = 32
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class Mxfp4Scheme:
    """See the module."""

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """From `quantization_config`. Raises `ConfigError`."""
        fields.strings("modules_to_not_convert")  # a note: tensors in blocks are recognised by their names
        fields.raw("dequantize")  # makes transformers dequantise while loading
        return cls()

    def matrix(self, module: ModuleTensors) -> MatrixParts | None:
        """See `QuantizationScheme`."""
        if not module.has("blocks"):
            return None
        blocks = module.take("blocks", ("U8",), (None, None, None, _BLOCK // 2))
        if not module.has("scales"):
            raise refusal(blocks, f"has no scales: tensor '{module.name}_scales' is missing")
        scales = module.take("scales", ("U8",), blocks.shape[:3])
        num_experts, width, num_blocks, _ = blocks.shape
        shape = num_experts * width, num_blocks * _BLOCK
        layout = QuantizedLayout("fp4", shape, (1, _BLOCK), _E8M0)
        return MatrixParts(
            layout,
            Part(blocks, lambda array: array.reshape(layout.code_shape)),
            Part(scales, lambda array: array.view(_E8M0).reshape(layout.scale_shape)),
            stack_shape=(num_experts, shape[1], width),
        )
