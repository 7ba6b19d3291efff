"""Oracles of softmax over rows, in float64."""

from __future__ import annotations

import numpy as np


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
