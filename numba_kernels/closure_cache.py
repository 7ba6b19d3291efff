"""Numba's cache on disk for functions that are made by factories.

Numba finds such a function's code by a hash of its pickled closure, and in a closure that holds another compiled
function or an intrinsic the pickle has a number drawn anew in every process: the code is saved, and never found again.
Here the key says what a closure holds by name and content. What the named functions contain is not in it: sources have
a folder of their own for each content (`cache`, `numba_kernels.cpu`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core import sigutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.types import Type

_PLAIN = (int, float, str, bytes, type(None), type, np.dtype, np.generic, Type)


def describe(value: Any) -> str:
    """Words for what a closure holds, the same in every process and different for what makes other code.

    Raises TypeError for anything but numbers, texts, types, functions (compiled or not, intrinsics) and tuples, lists
    and dicts of them.
    """
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(describe, value))})"
    if isinstance(value, dict):
        return describe([list(item) for item in value.items()])
    function = getattr(value, "py_func", None) or getattr(value, "_defn", None) or value
    code = getattr(function, "__code__", None)
    if code is None:
        raise TypeError(f"a compiled function's closure holds {value!r}, by which its code cannot be found again")
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    bytecode = hashlib.sha256(code.co_code).hexdigest()[:16]
    return f"function {function.__module__}.{function.__qualname__} {bytecode} {describe(cells)}"


def name_by_content(function: Callable[..., Any]) -> Callable[..., Any]:
    """Puts what tells a factory's functions apart into the name, which becomes the linker's symbol.

    Numba tells them apart by a counter of the process, so that two functions from the disk, which two processes
    compiled, may have one symbol: the second to be loaded would then run the first one's code.
    """
    words = hashlib.sha256(describe(function).encode()).hexdigest()[:16]
    function.__qualname__ = f"{function.__qualname__}_{words}"
    return function


class ClosureCache(FunctionCache):  # type: ignore[misc]
    """Numba's own, but for the key."""

    def _index_key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        words = hashlib.sha256(describe(self._py_func).encode()).hexdigest()
        return (signature, codegen.magic_tuple(), words)


class _KeptCFunc(CFunc):  # type: ignore[misc]
    def enable_caching(self) -> None:
        self._cache = ClosureCache(self._pyfunc)


def kept_cfunc(signature: Any, function: Callable[..., Any], **options: Any) -> Any:
    """``numba.cfunc(signature, nopython=True, cache=True, **options)(function)``, found again in the next process."""
    name_by_content(function)
    compiled = _KeptCFunc(function, sigutils.normalize_signature(signature), {}, {"nopython": True, **options})
    compiled.enable_caching()
    compiled.compile()
    return compiled


def kept_njit(function: Callable[..., Any], **options: Any) -> Any:
    """``numba.njit(cache=True, **options)(function)``, found again in the next process."""
    if function.__closure__:
        name_by_content(function)
    dispatcher = numba.njit(**options)(function)
    dispatcher._cache = ClosureCache(function)
    return dispatcher
