"""Seeded random weights from a config alone (`load_format="dummy"`), for benchmarks and tests of speed and
memory.

Matrices are uniform with a standard deviation of 0.02, which keeps logits finite at any depth; norms are
one and biases zero, as a freshly initialised model has them. Each tensor's numbers depend on the seed and
its name only.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from models.checkpoint import TensorLayout
from runtime.dtype import DType

_STD = 0.02


class DummyCheckpoint:
    """Reads like a `Checkpoint` that fits the layout and stores every tensor as `dtype`."""

    def __init__(self, layout: TensorLayout, seed: int, dtype: DType) -> None:
        self._shapes: Mapping[str, tuple[int, ...]] = layout.shapes
        self._seed = seed
        self._dtype = dtype

    def main_dtype(self) -> DType:
        return self._dtype

    def dtype(self, name: str) -> DType:
        return self._dtype

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """The tensor, made anew at each call."""
        shape = self._shapes[name]
        if len(shape) == 1:
            fill = 0 if name.endswith(".bias") else 1
            return np.full(shape, fill, self._dtype.numpy)
        generator = np.random.Generator(np.random.SFC64([self._seed, zlib.crc32(name.encode())]))
        array = generator.random(shape, np.float32)  # [0, 1), of variance 1/12
        array -= np.float32(0.5)
        array *= np.float32(_STD * 12**0.5)
        return array.astype(self._dtype.numpy, copy=False)

    def release(self, name: str) -> None:
        """Nothing is held."""
