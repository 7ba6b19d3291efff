"""`device_function`: a function that kernels call, inlined before compilation.

Numba's own device functions are compiled for the GPU of the current context, which need not exist, nor be the
architecture that the kernel is compiled for. An inlined one is part of its caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba import cuda


def device_function(function: Callable[..., Any]) -> Any:
    """A decorator. The function may loop and return tuples; it must return in one place."""
    return cuda.jit(function, device=True, inline="always")


def in_turn(functions: Sequence[Any]) -> Any:
    """A device function ``(state)`` that calls these with its argument, a tuple, one after another: how a loop is
    unrolled whose turns differ in constants."""
    first, *others = functions
    if not others:
        return first
    rest = in_turn(others)

    @device_function
    def call(state):
        first(state)
        rest(state)

    return call


def passed_on(functions: Sequence[Any]) -> Any:
    """The same for functions ``(moving, state) -> moving``: each gets what the one before it has returned."""
    first, *others = functions
    if not others:
        return first
    rest = passed_on(others)

    @device_function
    def call(moving, state):
        return rest(first(moving, state), state)

    return call
