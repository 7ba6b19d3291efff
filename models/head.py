"""Heads over the pooled row of a prompt, or over the rows of its tokens: a few small maps, computed on the host, a
prompt at a time, so that a result depends on no other prompt."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.makers.maker import Maker
from runtime.dtype import float32
from runtime.tensor.tensor import Tensor

Array = np.ndarray[Any, Any]
Stage = Callable[[Array], Array]
"""A row `[inputs]`, or rows `[n, inputs]`, to as many of `[outputs]`, float32."""

_ERF = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "silu": lambda x: x / (1.0 + np.exp(-x)),
    "erf": lambda x: 0.5 * x * (1.0 + _ERF(x / math.sqrt(2.0))),
    "gelu_sigmoid": lambda x: x / (1.0 + np.exp(-1.702 * x)),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
}
"""By our names, of float64 rows."""


def host_array(tensor: Tensor) -> Array:
    """A tensor's numbers as float32 on the host."""
    return tensor.to("cpu", float32).array


@dataclass(slots=True)
class Dense:
    """`activation(weight x + bias)`, plus x if `adds_input`, or plus `residual x`; `weight [outputs, inputs]`."""

    weight: Tensor | Array
    bias: Tensor | Array | None = None
    activation: str = "identity"
    residual: Array | None = None
    adds_input: bool = False
    _arrays: tuple[Array, Array | None] | None = None

    @classmethod
    def of(
        cls, maker: Maker, outputs: int, inputs: int, activation: str = "identity", *, has_bias: bool = True
    ) -> Dense:
        """The map that a maker's tensors "weight" and "bias" are."""
        bias = maker.vector("bias", outputs) if has_bias else None
        return cls(maker.table("weight", outputs, inputs), bias, activation)

    def __call__(self, row: Array) -> Array:
        if self._arrays is None:  # a declared model has no numbers yet
            weight, bias = (each if isinstance(each, np.ndarray | None) else host_array(each) for each in
                            (self.weight, self.bias))  # fmt: skip
            assert weight is not None
            self._arrays = weight.astype(np.float64), bias
        weight, bias = self._arrays
        x = (weight @ row.astype(np.float64).T).T
        if bias is not None:
            x = x + bias
        x = ACTIVATIONS[self.activation](x)
        if self.adds_input:
            x = x + row
        elif self.residual is not None:
            x = x + (self.residual.astype(np.float64) @ row.astype(np.float64).T).T
        return np.asarray(x, np.float32)


@dataclass(slots=True)
class RowNorm:
    """A LayerNorm of each row."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, row: Array) -> Array:
        x = row.astype(np.float64)
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + self.eps) * host_array(self.weight)
        if self.bias is not None:
            x = x + host_array(self.bias)
        return np.asarray(x, np.float32)
