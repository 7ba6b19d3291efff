"""Seeded random weights from a config alone (`load_format="dummy"`), for benchmarks and tests of speed and
memory.

Matrices are uniform with a standard deviation of 0.02, which keeps logits finite at any depth; norms are
one and biases zero, as a freshly initialised model has them. Each tensor's numbers depend on the seed and
its name only. Quantised matrices are zero.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from models.checkpoints.checkpoint import Checkpoint, TensorLayout
from models.checkpoints.stored_tensor import Array, StoredTensor
from runtime.dtype import DType
from runtime.linear.quantized import QuantizedLayout, QuantizedMatrix
from runtime.tensor.cast import cast_array

_STD = 0.02
_STD_OF_INT16 = 2.0**16 / 12**0.5  # of uniform 16-bit integers
_NO_LAYOUTS: Mapping[str, QuantizedLayout] = MappingProxyType({})


def dummy_checkpoint(
    layout: TensorLayout, seed: int, dtype: DType, quantized: Mapping[str, QuantizedLayout] = _NO_LAYOUTS
) -> Checkpoint:
    """A checkpoint that fits the layout and stores every tensor as `dtype`, but for those that are `quantized`."""
    tensors = {
        name: DummyTensor(name, shape, seed, dtype, quantized.get(name)) for name, shape in layout.shapes.items()
    }
    return Checkpoint(Path("dummy weights"), "dummy weights", tensors)


class DummyTensor(StoredTensor):
    """See the module."""

    file = type_name = "dummy weights"

    def __init__(
        self, name: str, shape: tuple[int, ...], seed: int, dtype: DType, quantized: QuantizedLayout | None
    ) -> None:
        self.name, self.shape, self.dtype, self.quantized = name, shape, dtype, quantized
        self.size_bytes = math.prod(shape) * dtype.itemsize
        self._seed, self._dtype = seed, dtype

    def array(self) -> Array:
        """The tensor, made anew at each call."""
        if len(self.shape) == 1:
            return np.full(self.shape, 0 if self.name.endswith(".bias") else 1, self._dtype.numpy)
        generator = np.random.SFC64([self._seed, zlib.crc32(self.name.encode())])
        count = math.prod(self.shape)
        steps = generator.random_raw(-(-count // 4)).view(np.int16)[:count]  # four of 16 bits a draw
        array = np.multiply(steps, np.float32(_STD / _STD_OF_INT16), dtype=np.float32)
        return cast_array(array.reshape(self.shape), self._dtype)

    def order(self) -> Array | None:
        """Columns are in order."""
        layout = self.quantized
        return np.arange(layout.shape[1], dtype=np.int32) if layout is not None and layout.has_order else None

    def matrix(self) -> QuantizedMatrix:
        """A matrix of zeros."""
        layout = self.quantized
        assert layout is not None, f"{self.name} is not quantised"
        nothing = 0 if layout.has_zeros or layout.kind in ("fp8", "fp4") else 0x88 if layout.kind == "int4" else 0x80
        codes = np.full(layout.code_shape, nothing, np.uint8)
        zeros = np.zeros(layout.scale_shape, np.uint8) if layout.has_zeros else None
        scales = np.ones(layout.scale_shape, np.float32).astype(layout.scale)
        return QuantizedMatrix(layout, codes, scales, zeros, self.order())
