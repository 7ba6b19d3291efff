"""The int8 matrix product as it is defined: which integers, which scales; sums in float64. And that with ggml's blocks,
for which x alone is rounded, by 32 elements.

Rounding to integers is done in float32, as the kernels do it, so that ties fall the same way.
"""

from __future__ import annotations

import numpy as np

GROUP = 64
SMALLEST = np.float32(1e-30)


def _rounded(values, axis):
    """(integers, scales with the axis kept) of float32 values."""
    magnitude = np.abs(values).max(axis, keepdims=True, initial=np.float32(0))
    usable = (magnitude >= SMALLEST) & (magnitude < np.inf)
    inverse = np.where(usable, np.float32(127) / np.where(usable, magnitude, np.float32(1)), np.float32(0))
    with np.errstate(invalid="ignore"):
        product = values * inverse
    return np.rint(np.where(np.isnan(product), np.float32(0), product)), magnitude / np.float32(127)


def weight(rows):
    """(integers ``[N, K]``, scales ``[N]``) of a weight."""
    integers, scales = _rounded(np.asarray(rows).astype(np.float32), 1)
    return integers, scales[:, 0]


def power_scales(largest):
    """The least powers of two by which these magnitudes are at most 127; the least normal one below; NaN for numbers
    that float32 cannot round so."""
    with np.errstate(all="ignore"):
        powers = np.exp2(np.ceil(np.log2(np.asarray(largest, np.float64) / 127)))
    return np.where(largest <= 127 * 2.0**104, np.maximum(powers, 2.0**-126), np.nan)


def groups(x):
    """(integers ``[T, up to GROUP]``, scales ``[T]``, its first element of K) of each group of ``x [T, K]``."""
    for first in range(0, x.shape[1], GROUP):
        values = x[:, first : first + GROUP].astype(np.float64)
        scales = power_scales(np.abs(values).max(1, initial=0.0))
        with np.errstate(invalid="ignore"):
            integers = np.rint(values / scales[:, None])
        yield np.where(np.isnan(integers), 0.0, integers), scales, first


def linear(x, rows, bias=None, residual=None):
    """``x [T, K]`` times the int8 weight made from ``rows [N, K]``, float64."""
    integers, scales = weight(rows)
    out = np.zeros((len(x), len(rows)))
    for values, group_scales, first in groups(x):
        part = integers[:, first : first + values.shape[1]].astype(np.float64)
        out += values.astype(np.float64) @ part.T * group_scales[:, None].astype(np.float64)
    out *= scales.astype(np.float64)
    if bias is not None:
        out += bias
    if residual is not None:
        out += residual
    return out


BLOCK = 32


def rounded_by_blocks(x: np.ndarray, *, has_powers: bool) -> np.ndarray:
    """``x [T, K]`` as a product takes it: each group's largest magnitude stands for 127, or, where scales are powers of
    two, for 64 to 127."""
    groups = x.reshape(len(x), x.shape[1] // BLOCK, BLOCK)
    largest = np.abs(groups).max(2, keepdims=True)
    scale = largest / np.float32(127)
    with np.errstate(all="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, 0).astype(np.float32)
        if has_powers:
            scale = np.where(largest > 0, np.exp2(np.ceil(np.log2(largest.astype(np.float64) / 127))), 0)
            inverse = np.where(largest > 0, 1 / scale, 0)
    return (np.rint(groups * inverse).astype(np.float64) * scale).reshape(x.shape)


def linear_of_blocks(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, residual: np.ndarray | None = None, *,
    has_powers: bool,
) -> np.ndarray:  # fmt: skip
    """``weight [N, K]`` are the floats that the blocks stand for."""
    out = rounded_by_blocks(x, has_powers=has_powers) @ weight.astype(np.float64).T
    return out + (0 if bias is None else bias) + (0 if residual is None else residual)
