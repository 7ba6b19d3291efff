"""Oracles in numpy float64: matrix product, norms, softmax, activations, rotation. Straight from the equations."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

UNIT_ROUNDOFF = {np.dtype(np.float32): 2.0**-24, np.dtype(np.float16): 2.0**-11, np.dtype(ml_dtypes.bfloat16): 2.0**-8}
_SMALLEST = {np.dtype(np.float32): 2.0**-149, np.dtype(np.float16): 2.0**-24, np.dtype(ml_dtypes.bfloat16): 2.0**-133}
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """max |actual - expected| / max |expected|; infinite where shapes differ or either has NaN or infinity."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape or not np.isfinite(actual).all() or not np.isfinite(expected).all():
        return math.inf
    if expected.size == 0:
        return 0.0
    largest = float(np.abs(expected).max())
    return float(np.abs(actual - expected).max()) / (largest if largest > 0 else 1.0)


def linear(x, weight, bias=None, residual=None, *, is_weight_layout=True):
    """``x [T, K] . weight [N, K]^T`` (or ``. weight [K, N]``) ``+ bias [N] + residual [T, N]``."""
    matrix = np.asarray(weight, np.float64).T if is_weight_layout else np.asarray(weight, np.float64)
    out = np.asarray(x, np.float64) @ matrix
    for term in (bias, residual):
        if term is not None:
            out += np.asarray(term, np.float64)
    return out


def error_bound(x, weight, bias, residual, out_dtype, *, is_weight_layout=True):
    """The most that an element may be off: ``(K + 2) u sum |x w|`` for any order of float32 additions (Higham, Accuracy
    and Stability of Numerical Algorithms, 3.1), twice that, as tensor cores cut off instead of rounding, and the
    rounding of the result."""
    absolute = [None if term is None else np.abs(np.asarray(term, np.float64)) for term in (x, weight, bias, residual)]
    largest = linear(*absolute, is_weight_layout=is_weight_layout)
    exact = np.abs(linear(x, weight, bias, residual, is_weight_layout=is_weight_layout))
    sums = 2 * (np.shape(x)[1] + 2) * UNIT_ROUNDOFF[np.dtype(np.float32)] * largest
    return sums + UNIT_ROUNDOFF[np.dtype(out_dtype)] * (exact + sums) + _SMALLEST[np.dtype(out_dtype)]


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis; a row of -inf gives zeros."""
    x = x.astype(np.float64)
    largest = x.max(-1, keepdims=True)
    exponentials = np.exp(x - np.where(np.isfinite(largest), largest, 0.0))
    total = exponentials.sum(-1, keepdims=True)
    return np.divide(exponentials, total, out=np.zeros_like(x), where=total > 0)


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, for rows with a finite element."""
    x = x.astype(np.float64)
    largest = x.max(-1, keepdims=True)
    return x - largest - np.log(np.exp(x - largest).sum(-1, keepdims=True))


def rms_norm(x, weight, eps):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


def layer_norm(x, weight, bias, eps):
    x = np.asarray(x, np.float64)
    centred = x - x.mean(-1, keepdims=True)
    out = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)
    return out if bias is None else out + np.asarray(bias, np.float64)


def prepared_heads(x, weight, eps, norm, cos, sin, interleaved):
    """Heads ``x [T, H, D]`` normalised as `ops.qkv_prepare` has it ("" for not at all; "head", "centred", "after") and
    rotated by ``cos``, ``sin [T, R / 2]``."""
    heads = np.asarray(x, np.float64)
    if norm == "head":
        heads = rms_norm(heads, weight, eps)
    elif norm == "centred":
        heads = layer_norm(heads, np.reshape(weight, heads.shape[1:]), None, eps)
    if cos.shape[-1]:
        heads = rotate(heads, cos[:, None], sin[:, None], interleaved)
    return rms_norm(heads, weight, eps) if norm == "after" else heads


def clamp(x, limit):
    return np.clip(np.asarray(x, np.float64), -limit, limit)


def xielu(x, positive, negative, beta, eps):
    x = np.asarray(x, np.float64)
    low = np.minimum(x, eps)
    return np.where(x > 0, positive * x * x, (np.expm1(low) - x) * negative) + beta * x


def sigmoid(x):
    x = np.asarray(x, np.float64)
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def silu(x):
    return np.asarray(x, np.float64) * sigmoid(x)


def squared_relu(x):
    return np.square(np.maximum(np.asarray(x, np.float64), 0.0))


def gelu(x, kind):
    x = np.asarray(x, np.float64)
    if kind == "erf":
        return 0.5 * x * _erfc(-x / math.sqrt(2))
    if kind == "sigmoid":
        return x * sigmoid(1.702 * x)
    # (1 + tanh u) / 2 = sigmoid(2 u), which does not cancel for negative u
    return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def glu(gate_up, activation):
    gate, up = np.split(np.asarray(gate_up, np.float64), 2, axis=-1)
    if activation == "clamped_silu":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    return (silu(gate) if activation == "silu" else gelu(gate, activation.removeprefix("gelu_"))) * up


def rotate(x, cos, sin, interleaved):
    """RoPE of ``x [..., D]`` by ``cos``, ``sin [..., R / 2]`` on the first R dimensions."""
    x = np.array(x, np.float64)
    half = cos.shape[-1]
    low = (slice(None),) * (x.ndim - 1) + (slice(0, 2 * half, 2) if interleaved else slice(0, half),)
    high = (slice(None),) * (x.ndim - 1) + (slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half),)
    a, b = x[low].copy(), x[high].copy()
    x[low], x[high] = a * cos - b * sin, b * cos + a * sin
    return x
