"""Folders of compiled host code, for any package here.

A function's code depends on its file and on the files of what it calls. So each module's code goes to
``<XDG_CACHE_HOME or ~/.cache>/xserv/numba/<digest>``, where the digest is of the module's source, of every module of
this project that it imports, directly or not, and of the compiler's versions (`cache_files`, `closure_cache`).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite
import numba

from numba_kernels.cache_files import (
    cache_root,
    check_writable,
    mark_used,
    open_generation,
    refuse_foreign,
    temporary_folder,
)
from numba_kernels.closure_cache import CFunction, kept_njit
from numba_kernels.source_digests import sources_digest


def folder_for(what: str) -> Path:
    """Makes and returns the folder for code determined by ``what`` (sources, settings) and the compiler's versions.

    If the home cannot be written it is one of this process and those that it starts. Raises DeviceError where others
    could have written into it.
    """
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {what}".encode())
    folder = cache_root("numba") / digest.hexdigest()[:16]
    is_new = not folder.is_dir()
    try:
        open_generation(folder)
        if is_new:
            check_writable(folder)
    except OSError as error:
        if is_new:
            with suppress(OSError):
                folder.rmdir()  # so that the next process does not mistake it for a writable one
        return temporary_folder(folder, error)
    refuse_foreign(folder.parent)
    mark_used(folder)
    return folder


@functools.cache
def cache_folder(source: Path) -> Path:
    """The folder for a source file's code."""
    return folder_for(sources_digest(source))


def _folder_of(function: Callable[..., Any]) -> Path:
    return cache_folder(Path(function.__code__.co_filename))


def njit(function: Callable[..., Any]) -> Any:
    """``numba.njit`` for host code: cached, without the interpreter's lock, C's error model."""
    return kept_njit(function, _folder_of(function), nogil=True, error_model="numpy", boundscheck=False)


def njit_borrowing(function: Callable[..., Any]) -> Any:
    """`njit` for a function that makes no arrays: neither it nor what it calls counts as a holder of those it gets.
    The counting is atomic, and took most of the time of functions that pass many arrays on at each call."""
    return kept_njit(function, _folder_of(function), nogil=True, error_model="numpy", boundscheck=False, _nrt=False)


def compile_c_function(function: Callable[..., None], signature: Any) -> CFunction:
    """``numba.cfunc`` of the same kind, compiled (or read from disk) now; `.address` is its entry."""
    return CFunction(signature, function, _folder_of(function), error_model="numpy")
