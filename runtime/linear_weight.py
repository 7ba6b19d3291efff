"""A weight matrix in the layout that the cpu's matrix product reads, made once when a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from numba_kernels.cpu.launch import address_of
from numba_kernels.cpu.linear import empty_panels, pack_rows
from numba_kernels.cpu.target import PANEL_COLUMNS
from runtime.device.device import Device
from runtime.dtype import DType, bfloat16, float16, float32
from runtime.errors import InvalidArgumentError
from runtime.tensor import Tensor

STORED: dict[DType, Any] = {float32: np.float32, bfloat16: np.uint16, float16: np.int16}
"""The numpy class whose bits carry each weight and cache type: a kernel's specialisation."""


class LinearWeight:
    """A weight matrix ``[N, K]`` and its bias, packed; made by `prepare_linear`, read by `linear` and `embedding`.

    Attributes:
        shape: (N, K).
        dtype: the stored type, float32, float16 or bfloat16; its product is float32.
        device: where it lies.
        size_bytes: of panels and bias, padding included.
        panels: ``[ceil(N / PANEL_COLUMNS), K, PANEL_COLUMNS]`` of the type that `STORED` names.
        bias: float32, one for each of the panels' columns; zeros where there is none.
    """

    __slots__ = ("bias", "bias_address", "device", "dtype", "panels", "panels_address", "shape", "size_bytes", "stored")

    def __init__(self, shape: tuple[int, int], dtype: DType, device: Device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.stored = STORED[dtype]
        self.panels = empty_panels(*shape, np.dtype(self.stored))
        self.bias = np.zeros(self.panels.shape[0] * PANEL_COLUMNS, np.float32)
        self.size_bytes = self.panels.nbytes + self.bias.nbytes
        self.panels_address = address_of(self.panels)
        self.bias_address = address_of(self.bias)

    def __repr__(self) -> str:
        return f"LinearWeight(shape={self.shape}, dtype={self.dtype.name}, device={self.device})"

    def rows(self, indices: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, np.dtype[Any]]:
        """Rows of the matrix, ``[n, K]``, as stored bits."""
        panel, column = np.divmod(indices, PANEL_COLUMNS)
        return np.asarray(self.panels[panel, :, column])


def prepare_linear(
    weight: Tensor | Sequence[Tensor], bias: Tensor | Sequence[Tensor | None] | None = None
) -> LinearWeight:
    """Packs ``weight [N, K]`` with an optional ``bias [N]``; several weights are joined over N without a copy between.

    Sources may have any strides (a transposed view, a mapped file) and can be released afterwards.

    Raises:
        InvalidArgumentError: for no weight, one that is not a matrix of float32, float16 or bfloat16, different K or
            types or devices, a bias of another size, or biases of another number than weights.
    """
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = [bias] * len(weights) if bias is None or isinstance(bias, Tensor) else list(bias)
    _check(weights, biases)
    joined = LinearWeight((sum(w.shape[0] for w in weights), weights[0].shape[1]), weights[0].dtype, weights[0].device)
    first = 0
    for part, part_bias in zip(weights, biases, strict=True):
        pack_rows(joined.panels, part.array.view(joined.stored), first)
        if part_bias is not None:
            joined.bias[first : first + part.shape[0]] = part_bias.array.astype(np.float32)
        first += part.shape[0]
    return joined


def _check(weights: list[Tensor], biases: list[Tensor | None]) -> None:
    if not weights:
        raise InvalidArgumentError("prepare_linear: weight is an empty sequence", param="weight")
    if len(biases) != len(weights) or (len(weights) > 1 and any(b is biases[0] and b is not None for b in biases[1:])):
        raise InvalidArgumentError(
            f"prepare_linear: bias must hold one entry for each of {len(weights)} weights", param="bias"
        )
    for number, (part, bias) in enumerate(zip(weights, biases, strict=True)):
        if part.ndim != 2 or part.dtype not in STORED:
            raise InvalidArgumentError(
                f"prepare_linear: weight {number} is {part.dtype.name} {part.shape}, "
                "must be [N, K] of float32, float16 or bfloat16",
                param="weight",
            )
        for name, ours, first in (
            ("K", part.shape[1], weights[0].shape[1]),
            ("dtype", part.dtype, weights[0].dtype),
            ("device", part.device, weights[0].device),
        ):
            if ours != first:
                raise InvalidArgumentError(
                    f"prepare_linear: weight {number} has {name} {ours}, the first has {first}", param="weight"
                )
        if bias is not None and (bias.shape != (part.shape[0],) or bias.dtype not in STORED):
            raise InvalidArgumentError(
                f"prepare_linear: bias {number} is {bias.dtype.name} {bias.shape}, must be [{part.shape[0]}] of "
                "float32, float16 or bfloat16",
                param="bias",
            )
