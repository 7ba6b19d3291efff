"""Digests of the inputs that determine a kernel's machine code.

A kernel's index distinguishes specialisations and architectures under the present sources, and is the same under every
version of Python and of the tools, so that a machine finds kernels that another one compiled. It is made of texts and
numbers alone: the sources, the specialisation's fields, and its function's closure. `tool_versions` identifies the
compilers; the cache on disk combines both.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite.ir import InlineAsm
from numba.core.types import Type

from numba_kernels.cuda.specialisation import Specialisation
from numba_kernels.source_digests import sources_digest
from runtime.device.assemble import toolkit_version

SOURCES = Path(__file__).resolve().parents[2] / "numba_kernels" / "cuda"
_COMPILER = (SOURCES / "compile.py", Path(__file__).with_name("assemble.py"))
_TOOLS = ("numba", "numba-cuda", "llvmlite", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-nvjitlink", "cuda-bindings")


def kernel_index(specialisation: Specialisation, *parts: str) -> str:
    """A digest of 24 hex digits, of the kernel and of `parts`, such as architecture and kind of image."""
    function = specialisation.kernel.py_func
    words = (
        sources_of(function), specialisation.name, repr(sorted(specialisation.constants.items())),
        ",".join(str(each) for each in specialisation.argument_types),
        f"{specialisation.max_threads},{specialisation.min_blocks},{specialisation.fastmath}",
        *function_words(function), *parts,
    )  # fmt: skip
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:24]


def sources_of(function: Any) -> str:
    """A digest of the files of a kernel's function and of all that its closure reaches, of what these import from this
    project, and of the compilers' sources: names and contents."""
    return _digest_of_files(frozenset(each.__code__.co_filename for each in _reached(function)))


def function_words(function: Any) -> list[str]:
    """A function's name and the names, numbers and texts in its closure, as text, and the same of every function in
    there. Its code is part of the sources."""
    return [word for each in _reached(function) for word in _words_of(each)]


@functools.cache
def digest_of(source: Path) -> str:
    """`sources_of` of a function that reaches no file beside its own."""
    return _digest_of_files(frozenset([str(source)]))


@functools.cache
def all_sources() -> str:
    """A digest of every Python file under `numba_kernels/cuda`, names and contents."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.py")):
        digest.update(str(path.relative_to(SOURCES)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def tool_versions() -> str:
    """The tools that compile kernels, with their versions."""
    found = [f"python {platform.python_version()}"]
    for package in _TOOLS:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} -")
    found.append(f"toolkit {toolkit_version()}")
    return ", ".join(found)


@functools.cache
def _digest_of_files(names: frozenset[str]) -> str:
    return sources_digest(*(Path(name) for name in names), *_COMPILER)


def _unwrapped(value: Any) -> Any:
    """The Python function of a kernel or an intrinsic; any other value itself."""
    return getattr(value, "py_func", getattr(value, "_defn", value))


def _reached(function: Any) -> list[Any]:
    """A function and those that its closure and its defaults hold, each once, in an order that is always the same."""
    found: dict[int, Any] = {}
    pending = [_unwrapped(function)]
    while pending:
        value = pending.pop()
        if isinstance(value, tuple | list):
            pending += map(_unwrapped, reversed(value))
        elif hasattr(value, "__code__") and id(value) not in found:
            found[id(value)] = value
            pending += [_unwrapped(held) for _, held in reversed(_held_by(value))]
    return list(found.values())


def _held_by(function: Any) -> list[tuple[str, Any]]:
    """The names and values of a function's closure, and of its defaults."""
    names = function.__code__.co_freevars
    held = [(name, cell.cell_contents) for name, cell in zip(names, function.__closure__ or ())]
    return sorted(held, key=lambda each: each[0]) + [("default", value) for value in function.__defaults__ or ()]


def _words_of(function: Any) -> Iterator[str]:
    yield f"{function.__module__}.{function.__qualname__}"
    if not Path(function.__code__.co_filename).is_file():  # typed in: no source file has its code
        yield f"{function.__code__.co_code.hex()} {function.__code__.co_consts!r}"
    for name, value in _held_by(function):
        yield f"{name} {_word(value)}"


def _word(value: Any) -> str:
    """A value as text; only its type where the text may differ between versions of the tools."""
    value = _unwrapped(value)
    if value is None or (isinstance(value, bool | int | float | str | bytes) and not isinstance(value, np.generic)):
        return f"{value.name} {value.value!r}" if isinstance(value, enum.Enum) else repr(value)
    if isinstance(value, np.generic):
        return f"{value.dtype} {value.item()!r}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_word, value))})"
    if hasattr(value, "__code__"):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, InlineAsm):
        return f"{value.asm} {value.constraint} {value.side_effect}"
    return str(value) if isinstance(value, Type) else type(value).__qualname__
