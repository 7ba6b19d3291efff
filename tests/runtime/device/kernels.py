"""Small kernels for tests of what compiles and launches them."""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, float32, types, uint32

from numba_kernels.cuda.intrinsics.sync import wait_for_previous_grid
from numba_kernels.cuda.specialisation import Launch, Specialisation

FLOATS = types.CPointer(types.float32)


@functools.cache
def scale(factor: float = 1.0, name: str = "scale") -> Specialisation:
    """``y[i] = x[i] * a * factor`` for i < n; arguments x, y, n, a."""
    constant = float32(factor)

    @cuda.jit
    def kernel(x: Any, y: Any, n: Any, a: Any) -> None:
        i = uint32(cuda.grid(1))
        if i < n:
            y[i] = x[i] * a * constant

    return Specialisation(
        name, kernel, (FLOATS, FLOATS, types.uint32, types.float32), 256, constants={"factor": factor}
    )


@functools.cache
def scale_dependent() -> Specialisation:
    """The same, to be launched before the kernel in front of it has ended."""

    @cuda.jit
    def kernel(x: Any, y: Any, n: Any, a: Any) -> None:
        wait_for_previous_grid()
        i = uint32(cuda.grid(1))
        if i < n:
            y[i] = x[i] * a

    return Specialisation(
        "scale_dependent", kernel, (FLOATS, FLOATS, types.uint32, types.float32), 256, min_capability=90
    )


def launch_of(specialisation: Specialisation, n: int, **changes: Any) -> Launch:
    """A launch over n elements, 256 a block."""
    fields: dict[str, Any] = {"grid": (-(-n // 256), 1, 1), "block": (256, 1, 1), **changes}
    return Launch(specialisation, **fields)
