"""What the register tiles in force do to activations before a product, as `docs/cpu.md` says it."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from numba_kernels.cpu.target import ROUNDS_TO_BF16

BF16 = np.dtype(ml_dtypes.bfloat16)


def as_multiplied(x: np.ndarray, weight_type: np.dtype) -> np.ndarray:
    """Rows of x, float32, as they meet a weight stored in ``weight_type``: rounded where the tile rounds them."""
    return x.astype(BF16).astype(np.float32) if ROUNDS_TO_BF16 and weight_type == BF16 else x
