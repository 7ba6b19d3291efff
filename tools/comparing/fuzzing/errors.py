"""Errors between our numbers and theirs."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def relative_error(ours: Array, theirs: Array) -> float:
    """max|a - b| / max|b|; infinite if anything is not finite."""
    if ours.shape != theirs.shape or not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return float("inf")
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def median_error(ours: Array, theirs: Array) -> float:
    """The median of the rows' relative errors; infinite if anything is not finite."""
    if not np.isfinite(relative_error(ours, theirs)):
        return float("inf")
    return float(np.median(np.abs(ours - theirs).max(-1)) / np.abs(theirs).max())
