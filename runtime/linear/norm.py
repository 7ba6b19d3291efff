"""The norm in front of a linear map."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over rows.

    Attributes:
        weight: ``[H]`` float32.
        eps: what is added to the mean.
    """

    weight: Tensor
    eps: float
