"""Operations: the parts of instructions beyond plain vector arithmetic, as C functions compiled by Numba.

An operation is a Python function of ``(warp, mask, site, *arguments) -> int`` registered with its argument kinds::

    @operation("ld_shared_u32", "ppl")
    def ld_shared_u32(warp, mask, site, target, addresses, offset): ...

Kinds: ``p`` a 32-bit slot (``CPointer(uint32)``, 32 lanes), ``q`` a 64-bit slot (``CPointer(uint64)``), ``i`` an int32,
``l`` an int64. `warp` is ``CPointer(int64)`` (see warp_state.py), `mask` a uint32 of the active lanes, `site` the
instruction's index. It returns DONE, FAILED, RETRY or DONE_BUT_YIELD, touches only the lanes of `mask` of a target, and
must allow a target that is also a source. Compiled when a kernel that uses it is loaded, and kept on disk; before it,
those operations that it calls by their symbols, which are found in its code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite.binding as llvm
from numba import types

from numba_kernels.cache import cache_folder, compile_c_function
from numba_kernels.cache_files import locked

_pointer: Any = types.CPointer
_KINDS = {
    "p": _pointer(types.uint32),
    "q": _pointer(types.uint64),
    "i": types.int32,
    "l": types.int64,
}
PREFIX = "xserv_operation_"


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    kinds: str
    function: Callable[..., Any]

    @property
    def symbol(self) -> str:
        return PREFIX + self.name


OPERATIONS: dict[str, Operation] = {}
_MAKERS: dict[str, Callable[..., str]] = {}
_COMPILED: dict[str, Any] = {}  # keeps the compiled code alive


def operation(name: str, kinds: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as an operation; it is returned as it is."""
    unknown = set(kinds) - set(_KINDS)
    if unknown:
        raise ValueError(f"operation {name}: argument kinds {sorted(unknown)} are not among p, q, i, l")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if name in OPERATIONS:
            raise ValueError(f"operation {name} is registered twice")
        OPERATIONS[name] = Operation(name, kinds, function)
        return function

    return register


def made_from_name(prefix: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Registers a function that registers the operations ``prefix_1_2_...`` of those numbers, so that a kernel
    whose object code is read from disk, and which was not translated in this process, finds them too."""

    def register(make: Callable[..., str]) -> Callable[..., str]:
        _MAKERS[prefix] = make
        return make

    return register


def _find(name: str) -> Operation:
    if name not in OPERATIONS:
        for prefix, make in _MAKERS.items():
            if name.startswith(prefix + "_"):
                make(*map(int, name.removeprefix(prefix + "_").split("_")))
    return OPERATIONS[name]


def signature_of(kinds: str) -> Any:
    """Numba's signature of an operation."""
    return types.int32(_pointer(types.int64), types.uint32, types.int32, *(_KINDS[kind] for kind in kinds))


def called_by_symbol(function: Callable[..., Any]) -> set[str]:
    """The operations whose symbols a function, or a compiled function that it calls, has in its code."""
    names: set[str] = set()
    seen: set[FunctionType] = set()
    pending: list[Any] = [function]
    while pending:
        value = pending.pop()
        if isinstance(value, types.ExternalFunction):
            if value.symbol.startswith(PREFIX):
                names.add(value.symbol.removeprefix(PREFIX))
            continue
        python = getattr(value, "py_func", value)
        if isinstance(python, FunctionType) and python not in seen:
            seen.add(python)
            used = inspect.getclosurevars(python)
            pending += [*used.globals.values(), *used.nonlocals.values()]
    return names


def compile_operations(names: Iterable[str]) -> None:
    """Compiles operations; those that another process is compiling come last, so that two processes share the work."""
    pending = [name for name in dict.fromkeys(names) if name not in _COMPILED]
    while pending:
        busy = [name for name in pending if not _compile_alone(name, is_waiting=False)]
        if len(busy) == len(pending):
            _compile_alone(busy.pop(0), is_waiting=True)
        pending = busy


def _compile_alone(name: str, *, is_waiting: bool) -> bool:
    """Compiles an operation, unless another process does, for which it may wait. Returns whether it is compiled."""
    folder = cache_folder(Path(inspect.getfile(_find(name).function)))
    with locked(folder / name, is_waiting=is_waiting) as is_mine:
        if is_mine:
            compile_operation(name)
    return is_mine


def compile_operation(name: str) -> int:
    """The address of an operation's C function, compiled at most once; LLVM finds it by its symbol from then on."""
    if name not in _COMPILED:
        found = _find(name)
        for other in sorted(called_by_symbol(found.function) - {name}):
            compile_operation(other)
        compiled = compile_c_function(found.function, signature_of(found.kinds))
        llvm.add_symbol(found.symbol, compiled.address)
        _COMPILED[name] = compiled
    return int(_COMPILED[name].address)
