"""LLVM IR → machine code → a function's address; and translated kernels on disk.

Optimisation level 0 and no passes over the IR: a kernel's chunks are straight code that needs none, and level 1 takes
twice as long to compile for kernels that run no faster.

One file a kernel and translator, found by content, written by `cache_files`:

    <XDG_CACHE_HOME or ~/.cache>/xserv/emulator/<digest of the sources>/<key>

The key is of the text without its `.version` and `.target`, which do not affect a translation, so that architectures
with the same text share one.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from numba_kernels.cache_files import cache_root, locked, mark_used, read_entry, refuse_foreign, write_entry
from runtime.emulator.translation.operations import compile_operations

_OPTIMISATION = 0


@functools.cache
def _initialise() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def _target_machine() -> Any:
    _initialise()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=_features(), opt=_OPTIMISATION, jit=True
    )


@functools.cache
def _features() -> str:
    return str(llvm.get_host_cpu_features().flatten())


def describe() -> str:
    """Inputs of the machine code besides the IR."""
    return f"{llvmlite.__version__} {llvm.get_host_cpu_name()} {_features()} O{_OPTIMISATION}"


def emit_object(text: str) -> bytes:
    """The object file of a module of LLVM IR."""
    _initialise()
    module = llvm.parse_assembly(text)
    return bytes(_target_machine().emit_object(module))


class NativeCode:
    """An object file in memory, linked against the operations that it names."""

    def __init__(self, code: bytes, operations: Iterable[str]) -> None:
        compile_operations(operations)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self.address = int(self._engine.get_function_address("run"))
        assert self.address


_FOR_ARCH = re.compile(r"^[ \t]*\.(?:version|target)\b.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Entry:
    """A header of plain JSON values, and machine code."""

    header: dict[str, Any]
    code: bytes


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/xserv/emulator``, or the same below ``~/.cache``."""
    return cache_root("emulator")


@functools.cache
def sources_digest() -> str:
    """A digest of the emulator's sources, which determine a kernel's translation."""
    digest = hashlib.sha256()
    emulator = Path(__file__).resolve().parents[1]
    for path in sorted(emulator.rglob("*.py")):
        digest.update(str(path.relative_to(emulator)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def key_of(text: str, *parts: str) -> str:
    """The key of a translation of a PTX text with `parts`."""
    digest = hashlib.sha256()
    for part in (_FOR_ARCH.sub("", text), *parts):
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()


def load(key: str, folder: Path | None = None) -> Entry | None:
    """The entry of a key; None where there is none, or a damaged one.

    Raises DeviceError where others could have written it.
    """
    folder = folder or default_folder()
    refuse_foreign(folder)
    _mark_used(folder / _generation())
    found = read_entry(folder / _generation() / key)
    return None if found is None else Entry(*found)


def store(key: str, entry: Entry, folder: Path | None = None) -> None:
    """Keeps an entry, if the folder lets us."""
    write_entry((folder or default_folder()) / _generation() / key, entry.header, entry.code)


def making(key: str, folder: Path | None = None) -> AbstractContextManager[bool]:
    """While it lasts, other makers of the same entry wait, and then find it."""
    return locked((folder or default_folder()) / _generation() / key)


def _generation() -> str:
    return sources_digest()[:16]


_mark_used = functools.cache(mark_used)
