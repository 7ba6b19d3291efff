"""A linear map as a model calls it."""

from __future__ import annotations

from runtime import ops
from runtime.linear.format import WeightFormat
from runtime.linear.weight import LinearWeight
from runtime.tensor.tensor import Tensor


class Linear:
    """``x [T, K] . weight [N, K]^T + bias``.

    Attributes:
        weight: the matrix with its bias, as the device's product reads them.
    """

    __slots__ = ("weight",)

    def __init__(self, weight: LinearWeight) -> None:
        self.weight = weight

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.weight.shape

    @property
    def format(self) -> WeightFormat:
        """How the matrix is kept."""
        return self.weight.format

    def __call__(self, x: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """``x [T, K]`` -> ``[T, N]``, plus the residual; see `ops.linear`."""
        return ops.linear(x, self.weight, residual=residual, out=out)

    def glu(self, x: Tensor, activation: ops.GluActivation) -> Tensor:
        """``f(gate) * up`` of the map's halves, gate first: ``[T, K]`` -> ``[T, N / 2]``; see `ops.linear_glu`."""
        return ops.linear_glu(x, self.weight, activation)

    def logits(self, x: Tensor) -> Tensor:
        """``[T, K]`` -> ``[T, N]`` float32; see `ops.logits_linear`."""
        return ops.logits_linear(x, self.weight)
