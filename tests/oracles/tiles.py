"""What the register tiles in force do to activations before a product, and the memory that a weight takes in their
layout, as `docs/cpu.md` says it."""

from __future__ import annotations

import platform

import ml_dtypes
import numpy as np

from numba_kernels.cpu.layout import AMX_ROWS, PANEL_COLUMNS, ROUNDS_TO_BF16
from numba_kernels.cpu.target import compiled_for
from tests.oracles import int8

BF16 = np.dtype(ml_dtypes.bfloat16)
ROUNDS_ROWS = ROUNDS_TO_BF16 or AMX_ROWS > 0  # of x, before they meet bfloat16
_IS_FUSED = compiled_for("fma") or platform.machine() not in ("x86_64", "AMD64")


def as_multiplied(x: np.ndarray, weight_type: np.dtype) -> np.ndarray:
    """Rows of x, float32, as they meet a weight stored in ``weight_type``: rounded where the tile rounds them."""
    return x.astype(BF16).astype(np.float32) if ROUNDS_ROWS and weight_type == BF16 else x


def as_multiplied_by_fp8(x: np.ndarray) -> np.ndarray:
    """The same for a weight of e4m3, which AMX does not multiply."""
    return x.astype(BF16).astype(np.float32) if ROUNDS_TO_BF16 else x


def _add_product(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``total + a * b``, float32: rounded once where the processor fuses them, else twice."""
    product = a.astype(np.float64) * b.astype(np.float64)  # exact
    return (total + (product if _IS_FUSED else product.astype(np.float32))).astype(np.float32)


def product(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, residual: np.ndarray, kind: str) -> np.ndarray:
    """``x [T, K]`` times ``weight [N, K]``, to the bit: float32 in the order of K, in pairs of bfloat16 the upper one
    first, or by AMX; of int8 whole groups."""
    total = np.zeros((len(x), len(weight)), np.float32)
    if kind == "int8":
        integers, scales = int8.weight(weight)
        for values, group_scales, first in int8.groups(x):
            sums = values.astype(np.float64) @ integers[:, first : first + values.shape[1]].astype(np.float64).T
            total = _add_product(total, group_scales[:, None], sums.astype(np.float32))  # integers: exact
        return _add_product(np.broadcast_to(bias, total.shape), total, scales) + residual
    x = as_multiplied(x, weight.dtype)
    if AMX_ROWS and weight.dtype == BF16:
        return _by_amx(x, weight.astype(np.float32)) + bias + residual
    order = np.arange(x.shape[1])
    if ROUNDS_TO_BF16 and weight.dtype == BF16:
        order = np.concatenate([order[first : first + 2][::-1] for first in range(0, len(order), 2)])
    for k in order:
        total = _add_product(total, x[:, k : k + 1], weight[:, k].astype(np.float32))
    return total + bias + residual


def _by_amx(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Sums of pairs by tdpbf16ps: for 32 elements of K the lower elements' chain and the upper ones' begin at zero, and
    their sum is added to the total."""
    total = np.zeros((len(x), len(weight)), np.float32)
    for first in range(0, x.shape[1], 32):
        chains = [np.zeros_like(total) for _ in range(2)]
        for k in range(first, min(first + 32, x.shape[1])):
            chains[k % 2] = _add_product(chains[k % 2], x[:, k : k + 1], weight[:, k])
        total = total + (chains[0] + chains[1])
    return total


def panel_bytes(width: int, depth: int, element_bytes: int) -> int:
    """Bytes of a weight ``[width, depth]``: whole panels of columns, each of whole 32-bit words and a float32 bias."""
    columns = -(-width // PANEL_COLUMNS) * PANEL_COLUMNS
    return columns * 4 * (-(-depth * element_bytes // 4) + 1)
