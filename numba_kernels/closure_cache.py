"""Compiled host code on disk: C functions, and numba's files of dispatchers.

A C function is one file (`cache_files`): its machine code and the name of its entry. Numba would keep the code's LLVM
module beside it, for inlining, which never happens to a function that is called through its address, and would read
that module at each start, which is most of the time and memory of loading a kernel.

A dispatcher's code is numba's to write and to read, each signature in a file of its own: with numba's numbered files
and their index, two processes that compile two signatures of one function at the same moment can leave one's code under
the other's name.

Numba finds a factory's function by a hash of its pickled closure, and in a closure that holds another compiled function
or an intrinsic the pickle has a number drawn anew in every process: the code is saved, and never found again. Here the
key has a closure's names and contents, but not the code of the named functions: sources have a folder of their own for
each content (`cache`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import llvmlite.binding as llvm
import numba
import numpy as np
from numba.core import sigutils
from numba.core.caching import IndexDataCacheFile, NullCache
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys
from numba.core.types import Type

from numba_kernels.cache_files import read_entry, warn_of_no_cache, write_entry
from numba_kernels.numba_patches.host_passes import host_passes
from numba_kernels.numba_patches.linked_parts import is_part, known_parts, linked_parts

_PLAIN = (int, float, str, bytes, type(None), type, np.dtype, np.generic, Type)
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")


def describe(value: Any) -> str:
    """Text for the contents of a closure, the same in every process and different for different code.

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
    """Makes a factory's functions distinct by name, which becomes the linker's symbol.

    Numba distinguishes them by a counter of the process, so that two functions from the disk, which two processes
    compiled, may have one symbol: the second to be loaded would then run the first one's code.
    """
    words = hashlib.sha256(describe(function).encode()).hexdigest()[:16]
    function.__qualname__ = f"{function.__qualname__}_{words}"
    return function


def _ready(context: Any) -> Any:
    """Numba's target, able to run compiled code. To compile it needs its registries too, which take a quarter of a
    second to load: a process that finds all its code in the cache skips them."""
    rtsys.initialize(context)
    return context


def _file_name(function: Callable[..., Any], signature: Any, codegen: Any, suffix: str) -> str:
    """The key of a function's code for argument types and a processor."""
    words = f"{signature} {codegen.magic_tuple()} {describe(function)}"
    if _ADDRESS.search(words):
        raise TypeError(f"{words}: an address, by which code cannot be found again")
    name = re.sub(r"\W", "_", function.__qualname__, flags=re.ASCII)[-80:]
    return f"{name}.{hashlib.sha256(words.encode()).hexdigest()[:32]}.{suffix}"


class CFunction:
    """A function that C can call, compiled or read from disk when it is made.

    address    its entry, valid as long as the process lives
    was_kept   whether it came from the disk
    """

    @global_compiler_lock
    def __init__(self, signature: Any, function: Callable[..., Any], folder: Path, **options: Any) -> None:
        name_by_content(function)
        codegen = _ready(cpu_target.target_context).codegen()
        path = folder / _file_name(function, sigutils.normalize_signature(signature), codegen, "o")
        found = read_entry(path)
        self.was_kept = found is not None
        if found is not None:
            facts, code = found
            symbol = facts["symbol"]
            library = codegen.unserialize_library((facts["name"], "object", (code, _defining(facts["symbols"]))))
        else:
            with linked_parts(), host_passes():
                compiled = numba.cfunc(signature, **options)(function)
            library, symbol = cast(Any, compiled)._library, compiled.native_name
            facts = {"name": library.name, "symbol": symbol, "symbols": _symbols(library)}
            write_entry(path, facts, library._get_compiled_object())
        self.address: int = library.get_pointer_to_function(symbol)
        assert self.address, f"{path} has no {symbol}"


def _symbols(library: Any) -> list[str]:
    """The symbols that a compiled library defines. Raises TypeError for code that only this process can run."""
    if library.has_dynamic_globals:
        raise TypeError(f"{library.name} holds an address of this process: its code cannot be kept")
    return [function.name for function in library.get_defined_functions()]


def _defining(symbols: list[str]) -> bytes:
    """The LLVM module that declares the symbols of machine code to numba."""
    bodies = [f'define void @"{symbol}"() {{ unreachable }}' for symbol in symbols]
    return llvm.parse_assembly("\n".join(bodies)).as_bitcode()


class _DispatcherCache(NullCache):
    """The cache that a dispatcher searches before it compiles."""

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        self._function, self._folder = function, folder
        self._files = IndexDataCacheFile(str(folder), "", None)  # of which only how data is written and read

    def load_overload(self, signature: Any, context: Any) -> Any:
        try:
            data = self._files._load_data(_file_name(self._function, signature, _ready(context).codegen(), "nbc"))
        except OSError:
            context.refresh()  # as numba expects before it compiles
            return None
        return CompileResult._rebuild(context, *data)

    def save_overload(self, signature: Any, result: Any) -> None:
        if is_part(result):
            return
        _symbols(result.library)
        try:
            name = _file_name(self._function, signature, result.codegen, "nbc")
            self._files._save_data(name, result._reduce())
        except OSError as error:
            warn_of_no_cache(self._folder, error)


def kept_njit(function: Callable[..., Any], folder: Path, **options: Any) -> Any:
    """``numba.njit(**options)(function)``, its code kept in a folder and found again in the next process."""
    if function.__closure__:
        name_by_content(function)
    dispatcher = numba.njit(**options)(function)
    dispatcher._cache = _DispatcherCache(function, folder)
    compiler = dispatcher._compiler
    compiler.compile = _compile_quickly(compiler.compile)
    return dispatcher


def _compile_quickly(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """A dispatcher's way to compile a signature, which numba calls with its global compiler lock held. Functions that
    another dispatcher's code calls become parts of that code."""

    def compile_quickly(arguments: Any, return_type: Any) -> Any:
        with host_passes(), known_parts() as is_first, nullcontext() if is_first else linked_parts():
            return compile_(arguments, return_type)

    return compile_quickly
