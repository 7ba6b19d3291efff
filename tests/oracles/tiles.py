"""What the register tiles in force do to activations before a product, and the memory that a weight takes in their
layout, as `docs/cpu.md` says it."""

from __future__ import annotations

import platform

import ml_dtypes
import numpy as np

from numba_kernels.cpu.layout import PANEL_COLUMNS, ROUNDS_TO_BF16
from numba_kernels.cpu.target import compiled_for
from tests.oracles import int8

BF16 = np.dtype(ml_dtypes.bfloat16)
_IS_FUSED = compiled_for("fma") or platform.machine() not in ("x86_64", "AMD64")


def as_multiplied(x: np.ndarray, weight_type: np.dtype) -> np.ndarray:
    """Rows of x, float32, as they meet a weight stored in ``weight_type``: rounded where the tile rounds them."""
    return x.astype(BF16).astype(np.float32) if ROUNDS_TO_BF16 and weight_type == BF16 else x


def _add_product(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``total + a * b``, float32: rounded once where the processor fuses them, else twice."""
    product = a.astype(np.float64) * b.astype(np.float64)  # exact
    return (total + (product if _IS_FUSED else product.astype(np.float32))).astype(np.float32)


def product(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, residual: np.ndarray, kind: str) -> np.ndarray:
    """``x [T, K]`` times ``weight [N, K]``, to the bit: float32 in the order of K, in pairs of bfloat16 the upper one
    first; of int8 whole groups."""
    total = np.zeros((len(x), len(weight)), np.float32)
    if kind == "int8":
        integers, scales = int8.weight(weight)
        for values, group_scales, first in int8.groups(x):
            sums = values.astype(np.float64) @ integers[:, first : first + values.shape[1]].astype(np.float64).T
            total = _add_product(total, group_scales[:, None], sums.astype(np.float32))  # integers: exact
        return _add_product(np.broadcast_to(bias, total.shape), total, scales) + residual
    x = as_multiplied(x, weight.dtype)
    order = np.arange(x.shape[1])
    if ROUNDS_TO_BF16 and weight.dtype == BF16:
        order = np.concatenate([order[first : first + 2][::-1] for first in range(0, len(order), 2)])
    for k in order:
        total = _add_product(total, x[:, k : k + 1], weight[:, k].astype(np.float32))
    return total + bias + residual


def panel_bytes(width: int, depth: int, element_bytes: int) -> int:
    """Bytes of a weight ``[width, depth]``: whole panels of columns, each of whole 32-bit words and a float32 bias."""
    columns = -(-width // PANEL_COLUMNS) * PANEL_COLUMNS
    return columns * 4 * (-(-depth * element_bytes // 4) + 1)
