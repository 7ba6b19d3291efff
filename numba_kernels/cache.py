"""Where compiled host code is kept, for any package here that has some.

A function's code depends on its file and on the files of what it calls. So each module's code goes to
``<XDG_CACHE_HOME or ~/.cache>/xserv/numba/<digest>``, where the digest is of the module's source, of every module of
this project that it imports, directly or not, and of the compiler's versions (`cache_files`, `closure_cache`).
"""

from __future__ import annotations

import functools
import hashlib
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba

from numba_kernels.cache_files import cache_root, mark_used, open_generation, refuse_foreign
from numba_kernels.closure_cache import CFunction, kept_njit

_ROOT = Path(__file__).resolve().parent.parent
_IMPORT = re.compile(
    r"^\s*(?:from\s+((?:numba_kernels|runtime|tokenizer)[\w.]*)\s+import\s+(\([^)]*\)|[^\n(]+)"
    r"|import\s+((?:numba_kernels|runtime|tokenizer)[\w.]*))",
    re.M,
)


def _file_of(module: str) -> Path | None:
    path = _ROOT.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


@functools.cache
def _imports(source: Path) -> tuple[Path, ...]:
    """The project's files that a file imports by name."""
    found = []
    for module, names, plain in _IMPORT.findall(source.read_text()):
        modules = [plain] if plain else [module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))]
        found += [path for path in map(_file_of, modules) if path is not None]
    return tuple(found)


def sources_digest(*sources: Path) -> str:
    """Of source files and of every file of this project that they import, directly or not: names and contents."""
    seen: set[Path] = set()
    pending = [source.resolve() for source in sources]
    while pending:
        path = pending.pop()
        if path not in seen and path.is_file():
            seen.add(path)
            pending += _imports(path)
    digest = hashlib.sha256()
    for path in sorted(seen):
        name = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path.name
        digest.update(str(name).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def folder_for(what: str) -> Path:
    """The folder for code that ``what`` (sources, settings) and the compiler's versions determine, made now.

    Where the home cannot be written it is one of this process alone. Raises DeviceError where others could have written
    into it.
    """
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {what}".encode())
    folder = cache_root("numba") / digest.hexdigest()[:16]
    try:
        open_generation(folder)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="xserv-numba-"))
    refuse_foreign(folder.parent)
    mark_used(folder)
    return folder


def is_kept(folder: Path) -> bool:
    """Whether other processes find what is in a folder of `folder_for`'s."""
    return folder.parent == cache_root("numba")


@functools.cache
def cache_folder(source: Path) -> Path:
    """The folder for a source file's code."""
    return folder_for(sources_digest(source))


def _folder_of(function: Callable[..., Any]) -> Path:
    return cache_folder(Path(function.__code__.co_filename))


def njit(function: Callable[..., Any]) -> Any:
    """``numba.njit`` for host code: cached, without the interpreter's lock, C's error model."""
    return kept_njit(function, _folder_of(function), nogil=True, error_model="numpy", boundscheck=False)


def compile_c_function(function: Callable[..., None], signature: Any) -> CFunction:
    """``numba.cfunc`` of the same kind, compiled (or read from disk) now; `.address` is its entry."""
    return CFunction(signature, function, _folder_of(function), error_model="numpy")
