"""Products with ggml's blocks: x rounded to int8 by 32 elements, the weights as they are, in float64."""

from __future__ import annotations

import numpy as np

GROUP = 32


def rounded(x: np.ndarray) -> np.ndarray:
    """``x [T, K]`` as a product takes it: each group's largest magnitude stands for 127."""
    groups = x.reshape(len(x), x.shape[1] // GROUP, GROUP)
    largest = np.abs(groups).max(2, keepdims=True)
    with np.errstate(all="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, 0).astype(np.float32)
    return (np.rint(groups * inverse).astype(np.float64) * (largest / np.float32(127))).reshape(x.shape)


def linear(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, residual: np.ndarray | None = None
) -> np.ndarray:
    """``weight [N, K]`` are the floats that the blocks stand for."""
    out = rounded(x) @ weight.astype(np.float64).T
    return out + (0 if bias is None else bias) + (0 if residual is None else residual)
