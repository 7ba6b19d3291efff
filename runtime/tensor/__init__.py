"""The Tensor, its storage and views, and the arithmetic of its operators.

The arithmetic is loaded with the first operator that runs: it brings the backends and Numba, which a process that only
reads checkpoints does without.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

OPERATORS = {"arithmetic": "runtime.tensor.arithmetic"}
"""The module whose functions Tensor's operators call."""


@functools.cache
def operators() -> Any:
    """That module."""
    return import_module(OPERATORS["arithmetic"])
