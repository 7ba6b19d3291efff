"""`quant_method: awq`: integers of 4 bits in groups, eight to a word along N in the order 0, 2, 4, 6, 1, 3, 5, 7.

X.qweight  int32 [K, N / 8]
X.qzeros   int32 [groups, N / 8]
X.scales   [groups, N]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from models.configuration.json_fields import Fields
from models.quantized.fp8 import SCALES
from models.quantized.gptq import FROM_TRAINING
from models.quantized.parts import FLOATS, Array, MatrixParts, ModuleTensors, Part, refusal
from runtime.linear.quantized import QuantizedLayout, pack_halves, unpack_halves

_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # of a word's elements, in its halves of bytes
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class AwqScheme:
    """See the module.

    Attributes:
        group_size: 0 means all of K.
        unconverted: parts of names of modules that are stored in floats.
    """

    group_size: int
    unconverted: tuple[str, ...]

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """From `quantization_config`. Raises `ConfigError`."""
        for name in (*FROM_TRAINING, "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "zero_point", "desc_act", "sym"):
            fields.raw(name)
        for name in ("version", "format", "checkpoint_format"):
            fields.expect(name, "gemm", "GEMM")
        fields.expect("bits", 4)
        fields.expect("pack_dtype", "int32", "torch.int32")
        fields.expect("method", "awq")
        fields.expect("w_bit", 4)  # as AWQ's first tools call them
        older = fields.integer("q_group_size", 128, least=-1, most=1 << 20)
        group_size = fields.integer("group_size", older, least=-1, most=1 << 20)
        if group_size == 0:
            raise fields.error("group_size", "is 0, must be -1 (all of a row) or more than 0")
        return cls(max(0, group_size), tuple(fields.strings("modules_to_not_convert") or ()))

    def matrix(self, module: ModuleTensors) -> MatrixParts | None:
        """See `QuantizationScheme`."""
        if not module.has("qweight"):
            return None
        qweight = module.take("qweight", ("I32",), (None, None))
        if any(name in module.name for name in self.unconverted):
            raise refusal(qweight, "is stored, but modules_to_not_convert names the module")
        depth, width = qweight.shape[0], qweight.shape[1] * 8
        size = self.group_size or depth
        groups = -(-depth // size)
        scales = module.take("scales", FLOATS, (groups, width))
        qzeros = module.take("qzeros", ("I32",), (groups, qweight.shape[1]))
        layout = QuantizedLayout(
            "int4", (width, depth), (1, size if groups > 1 else 0), SCALES[scales.type_name], has_zeros=True
        )
        return MatrixParts(
            layout,
            Part(qweight, _codes),
            Part(scales, lambda array: np.ascontiguousarray(array.T)),
            zeros=Part(qzeros, lambda array: np.ascontiguousarray(_unpacked(array).T)),
        )


def _unpacked(words: Array) -> Array:
    """Words ``[rows, N / 8]`` to integers ``[rows, N]`` uint8."""
    halves = unpack_halves(np.ascontiguousarray(words).view(np.uint8)).reshape(len(words), -1, 8)
    return halves[:, :, _PLACES].reshape(len(words), -1)


def _codes(words: Array) -> Array:
    """Words ``[K, N / 8]`` to codes ``[N, ceil(K / 2)]``."""
    depth, width = words.shape[0], words.shape[1] * 8
    codes = np.empty((width, -(-depth // 2)), np.uint8)
    for first in range(0, depth, _ROWS_AT_ONCE):  # an even number
        some = _unpacked(words[first : first + _ROWS_AT_ONCE])
        codes[:, first // 2 : (first + _ROWS_AT_ONCE) // 2] = pack_halves(np.ascontiguousarray(some.T))
    return codes
