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
from typing import Any

import numpy as np

from models.checkpoints.checkpoint import TensorLayout
from runtime.dtype import DType
from runtime.linear.quantized import QuantizedLayout, QuantizedMatrix
from runtime.tensor.cast import cast_array

_STD = 0.02
_STD_OF_INT16 = 2.0**16 / 12**0.5  # of uniform 16-bit integers


class DummyCheckpoint:
    """Reads like a `Checkpoint` that fits the layout and stores every tensor as `dtype`, but for those that are
    `quantized`."""

    def __init__(
        self, layout: TensorLayout, seed: int, dtype: DType, quantized: Mapping[str, QuantizedLayout] | None = None
    ) -> None:
        self.shapes: Mapping[str, tuple[int, ...]] = layout.shapes
        self._quantized = quantized or {}
        self._seed = seed
        self._dtype = dtype

    def main_dtype(self) -> DType:
        return self._dtype

    def dtype(self, name: str) -> DType:
        return self._dtype

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """The tensor, made anew at each call."""
        shape = self.shapes[name]
        if len(shape) == 1:
            fill = 0 if name.endswith(".bias") else 1
            return np.full(shape, fill, self._dtype.numpy)
        generator = np.random.SFC64([self._seed, zlib.crc32(name.encode())])
        count = math.prod(shape)
        steps = generator.random_raw(-(-count // 4)).view(np.int16)[:count]  # four of 16 bits a draw
        array = np.multiply(steps, np.float32(_STD / _STD_OF_INT16), dtype=np.float32)
        return cast_array(array.reshape(shape), self._dtype)

    def block_format(self, name: str) -> str | None:
        """Elements are stored one by one."""
        return None

    def blocks(self, name: str) -> np.ndarray[Any, Any]:
        """There are none."""
        raise AssertionError(f"{name} is not stored in blocks")

    def quantized(self, name: str) -> QuantizedLayout | None:
        """How a matrix is quantised, or None if its elements are floats."""
        return self._quantized.get(name)

    def order(self, name: str) -> np.ndarray[Any, Any] | None:
        """As `matrix` has it."""
        layout = self._quantized[name]
        return np.arange(layout.shape[1], dtype=np.int32) if layout.has_order else None

    def matrix(self, name: str) -> QuantizedMatrix:
        """A matrix of zeros, whose columns are in order."""
        layout = self._quantized[name]
        nothing = 0 if layout.has_zeros or layout.kind in ("fp8", "fp4") else 0x88 if layout.kind == "int4" else 0x80
        codes = np.full(layout.code_shape, nothing, np.uint8)
        zeros = np.zeros(layout.scale_shape, np.uint8) if layout.has_zeros else None
        order = self.order(name)
        scales = np.ones(layout.scale_shape, np.float32).astype(layout.scale)
        return QuantizedMatrix(layout, codes, scales, zeros, order)

    def release(self, name: str) -> None:
        """Nothing is held."""
