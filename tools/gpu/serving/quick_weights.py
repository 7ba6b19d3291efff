"""Dummy weights that load at the speed of device copies: matrices of one shape have the same random numbers, are made
and packed once, and copied for each, to memory of its own.

A step's time depends on the weights' placement and randomness, not on whether two are equal.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np

import models.checkpoints.dummy
import models.makers.loading_maker
from models.checkpoints.dummy import DummyTensor
from runtime import ops
from runtime.bench.kernels.case import MOST_DRAWN
from runtime.dtype import DType
from runtime.linear.packed_matrix import MatrixPart, prepare_packed
from runtime.linear.quantized import QuantizedLayout, QuantizedMatrix
from runtime.linear.weight import GpuWeight
from runtime.tensor.tensor import Tensor
from tools.kernel_cases.experts import copied
from tools.kernel_cases.quantised_layers import FORMATS, random_matrix

_STD = 0.02
Array = np.ndarray[Any, Any]


class QuickWeights(DummyTensor):
    """Attributes:
    stored: the quantised matrices: a part of their names, and one of `FORMATS`.
    """

    stored: Mapping[str, str]
    numbers: dict[np.dtype[Any], Array]
    matrices: dict[tuple[str, tuple[int, ...]], QuantizedMatrix]

    def __init__(self, name: str, shape: tuple[int, ...], seed: int, dtype: DType, _: QuantizedLayout | None) -> None:
        format = next((format for part, format in self.stored.items() if part in name), "")
        self.format = format if len(shape) == 2 else ""
        layout = FORMATS[format].layout(shape[0], shape[1]) if self.format else None
        super().__init__(name, shape, seed, dtype, layout)

    def array(self) -> Array:
        count, dtype = math.prod(self.shape), self._dtype.numpy
        if len(self.shape) == 1:
            return super().array()
        if self.numbers.get(dtype, np.empty(0)).size < count:  # others use the beginning
            drawn = np.random.default_rng(self._seed).standard_normal(min(count, MOST_DRAWN), np.float32)
            drawn *= np.float32(_STD)
            self.numbers[dtype] = np.resize(drawn.astype(dtype), count)
        return self.numbers[dtype][:count].reshape(self.shape)

    def matrix(self) -> QuantizedMatrix:
        key = self.format, self.shape
        if key not in self.matrices:
            self.matrices[key] = random_matrix(FORMATS[self.format], self.shape[0], self.shape[1], self._seed)
        return self.matrices[key]


@contextlib.contextmanager
def quick_weights(stored: Mapping[str, str]) -> Iterator[None]:
    """A context in which models load with these dummy weights. `stored`: as in `QuickWeights`."""
    attributes: dict[str, Any] = {"stored": stored, "numbers": {}, "matrices": {}}
    made: dict[Any, GpuWeight] = {}
    prepare_linear = ops.prepare_linear

    def packed(parts: Any, biases: Any, options: Any, *more: Any) -> Any:
        key = options, *((part.matrix.layout, str(part.rows), str(part.columns)) for part in parts), bool(biases), more
        if key in made:
            return copied(made[key])
        made[key] = prepare_packed(parts, biases, options, *more)
        return made[key]

    def rows(weights: Any, biases: Any = None, options: Any = None, **more: Any) -> Any:
        given = [weights] if isinstance(weights, Tensor) else weights
        kept = {name: value is not None if name == "norm" else value for name, value in more.items()}
        key = options, *((each.shape, each.dtype) for each in given), bool(biases), str(kept)
        if key in made:
            return copied(made[key])
        weight = prepare_linear(weights, biases, options, **more)
        if isinstance(weight, GpuWeight):
            made[key] = weight
        return weight

    with (
        patch.object(models.checkpoints.dummy, "DummyTensor", type("Weights", (QuickWeights,), attributes)),
        patch.object(models.makers.loading_maker, "prepare_packed", packed),
        patch.object(ops, "prepare_linear", rows),
        patch.object(MatrixPart, "has_nan", False),  # there is none, and the search is slow
    ):
        yield
