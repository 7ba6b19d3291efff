"""Operations: the parts of instructions beyond plain vector arithmetic, as C functions compiled by Numba.

An operation is a Python function of ``(warp, mask, site, *arguments) -> int`` registered with its argument kinds::

    @operation("ld_shared_u32", "ppl")
    def ld_shared_u32(warp, mask, site, target, addresses, offset): ...

Kinds: ``p`` a 32-bit slot (``CPointer(uint32)``, 32 lanes), ``q`` a 64-bit slot (``CPointer(int64)``), ``l`` an int64.
`warp` is a record (execution/state.py), `mask` has the active lanes, `site` is the instruction's index: int64 as all
numbers are, so that a function that operations call is compiled for one combination of types. An operation returns
DONE, FAILED, RETRY or DONE_BUT_YIELD, touches only the lanes of `mask` of a target, and must allow a target that is
also a source. It is compiled when a kernel that uses it is loaded, and kept on disk.

A function marked `compiled_once` is compiled into none of its callers: they call it by its symbol, and it is compiled
before the first of them.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from numba_kernels.cache import cache_folder, compile_c_function
from numba_kernels.cache_files import locked
from numba_kernels.pointers import intrinsic
from runtime.emulator.execution.state import Warp
from runtime.emulator.records import pointer_to

_pointer: Any = types.CPointer
_KINDS = {
    "p": _pointer(types.uint32),
    "q": _pointer(types.int64),
    "l": types.int64,
}
PREFIX = "xserv_operation_"


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    kinds: str  # of its arguments after warp, mask and site
    signature: Any
    function: Callable[..., Any]

    @property
    def symbol(self) -> str:
        return PREFIX + self.name


OPERATIONS: dict[str, Operation] = {}
_MAKERS: dict[str, Callable[..., str]] = {}
_COMPILED: dict[str, Any] = {}  # keeps the compiled code alive, as _ENTRIES does
_ENTRIES: list[Any] = []


def operation(name: str, kinds: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as an operation; it is returned as it is."""
    unknown = set(kinds) - set(_KINDS)
    if unknown:
        raise ValueError(f"operation {name}: argument kinds {sorted(unknown)} are not among p, q, l")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if name in OPERATIONS:
            raise ValueError(f"operation {name} is registered twice")
        OPERATIONS[name] = Operation(name, kinds, signature_of("ll" + kinds, types.int32), function)
        return function

    return register


def compiled_once(kinds: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes ``f(warp, …) -> int64``, of arguments of these kinds, a function that compiled code calls by its symbol."""

    def register(function: Callable[..., Any]) -> Any:
        found = Operation(function.__name__, "", signature_of(kinds, types.int64), function)
        assert found.name not in OPERATIONS, found.name
        OPERATIONS[found.name] = found
        return types.ExternalFunction(found.symbol, found.signature)

    return register


@intrinsic
def call_operation(typing_context, function, warp, site, argument):  # type: ignore[no-untyped-def]
    """Calls an operation of one int64 by its address in memory: it is compiled only for kernels that need it."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        word, long = ir.IntType(32), ir.IntType(64)
        type_ = ir.FunctionType(word, [long.as_pointer(), long, long, long])
        operation, warp, *rest = arguments
        return builder.call(builder.inttoptr(operation, type_.as_pointer()), [warp, long(0), *rest])

    return types.int32(types.int64, pointer_to(Warp), types.int64, types.int64), generate


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


def signature_of(kinds: str, result: Any) -> Any:
    """Numba's signature of a function of a warp and arguments of these kinds."""
    return result(pointer_to(Warp), *(_KINDS[kind] for kind in kinds))


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


def compile_called(function: Callable[..., Any]) -> None:
    """Compiles what a function calls by symbols, before its own code is compiled or read from disk."""
    for name in sorted(called_by_symbol(function)):
        compile_operation(name)


def compile_operation(name: str) -> int:
    """The address of an operation's C function, compiled at most once; LLVM finds it by its symbol from then on."""
    if name not in _COMPILED:
        found = _find(name)
        compile_called(found.function)
        compiled = compile_c_function(found.function, found.signature)
        llvm.add_symbol(found.symbol, compiled.address)
        _COMPILED[name] = compiled
    return int(_COMPILED[name].address)


@functools.cache
def compiled(function: Callable[..., Any]) -> Any:
    """A function of int64 arguments and result, compiled: callable from the host, without the interpreter's lock."""
    compile_called(function)
    count = function.__code__.co_argcount
    _ENTRIES.append(compile_c_function(function, types.int64(*[types.int64] * count)))
    return ctypes.CFUNCTYPE(*[ctypes.c_int64] * (1 + count))(_ENTRIES[-1].address)
