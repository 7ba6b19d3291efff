"""`device_function`: a function that kernels call, inlined before compilation.

Numba's own device functions are compiled for the GPU of the current context, which need not exist, nor be the
architecture that the kernel is compiled for. An inlined one is part of its caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda


def device_function(function: Callable[..., Any]) -> Any:
    """A decorator. The function may loop and return tuples; it must return in one place."""
    return cuda.jit(function, device=True, inline="always")
