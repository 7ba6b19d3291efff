"""Compiled kernels on disk, found by their content, so that only the first start of a program compiles.

    <XDG_CACHE_HOME or ~/.cache>/xserv/kernels/<digest of the sources>/<kernel>-<arch>-<key>.kernel

The sources are all files under `numba_kernels/cuda`. The key is a digest of those, the specialisation (name,
constants, types, bounds, flags, the function's own byte code), the architecture, and the versions of Python, numba,
numba-cuda, llvmlite, NVVM and nvJitLink. A file is one line of JSON and the image, with the image's digest: cubin for
a real device, PTX for an emulated one. Folders are the user's alone (0700), files too (0600); they are written beside
and renamed, so that any number of processes may do so at once; a file that does not agree with itself is compiled
anew.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.device.errors import CompileError
from runtime.errors import DeviceError, InvalidArgumentError

if TYPE_CHECKING:
    from numba_kernels.cuda.specialisation import Specialisation

SUFFIX = ".kernel"
_FORMAT = 1
_SOURCES = Path(__file__).resolve().parents[2] / "numba_kernels" / "cuda"
_TOOLS = ("numba", "numba-cuda", "llvmlite", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-nvjitlink", "cuda-bindings")
_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\(")

# How `struct` packs an argument, by the name of its numba type. A pointer is an address.
_PACKED = {
    "bool": "?", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I",
    "int64": "q", "uint64": "Q", "float32": "f", "float64": "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """A kernel's image and what a launch must know.

    Attributes:
        name: its entry in the image, the specialisation's name as an identifier.
        arch: "sm_90a".
        is_ptx: whether the image is a PTX text that ends in NUL (for an emulated device), not a cubin.
        argument_format: one letter of `struct` for each argument.
        waits_for_dependency: whether it executes ``griddepcontrol.wait``, as a dependent launch must.
        num_registers, spill_bytes, static_shared_bytes: by ptxas; 0 in a PTX.
        image: the bytes to load.
    """

    name: str
    arch: str
    is_ptx: bool
    argument_format: str
    waits_for_dependency: bool
    num_registers: int
    spill_bytes: int
    static_shared_bytes: int
    image: bytes


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A file of the cache. `kernel` is None where the file is corrupt; `is_current`: of the present sources."""

    path: Path
    size_bytes: int
    is_current: bool
    kernel: CompiledKernel | None


class KernelCache:
    """A folder of compiled kernels. Counts what it did in this process: `num_compiled`, `num_read`."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: None for the user's own."""
        self.folder = folder or default_folder()
        self.num_compiled = 0
        self.num_read = 0

    def get(self, specialisation: Specialisation, arch: str, *, is_ptx: bool) -> CompiledKernel:
        """The kernel for an architecture, from disk, or compiled now and written there.

        Raises CompileError where it does not compile.
        """
        path = self.path_of(specialisation, arch, is_ptx=is_ptx)
        kernel = _read(path) if self._is_ours() else None
        if kernel is not None:
            self.num_read += 1
            return kernel
        kernel = compile_kernel(specialisation, arch, is_ptx=is_ptx)
        self.num_compiled += 1
        self._write(path, kernel)
        return kernel

    def path_of(self, specialisation: Specialisation, arch: str, *, is_ptx: bool) -> Path:
        """Where a kernel's file is, or will be."""
        parts = (
            str(_FORMAT), sources_digest(), specialisation.name, repr(sorted(specialisation.constants.items())),
            ",".join(str(kind) for kind in specialisation.argument_types),
            f"{specialisation.max_threads},{specialisation.min_blocks},{specialisation.fastmath}",
            function_digest(specialisation.kernel.py_func), arch, "ptx" if is_ptx else "cubin", tool_versions(),
        )  # fmt: skip
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
        name = f"{identifier(specialisation.name)[:80]}-{arch}-{'ptx' if is_ptx else 'cubin'}-{key}{SUFFIX}"
        return self.folder / sources_digest()[:16] / name

    def entries(self) -> Iterator[CacheEntry]:
        """Every file, in the order of its name."""
        for path in sorted(self.folder.glob(f"*/*{SUFFIX}")):
            yield CacheEntry(path, path.stat().st_size, path.parent.name == sources_digest()[:16], _read(path))

    def clear(self) -> int:
        """Removes every file; how many there were."""
        removed = 0
        for path in [*self.folder.glob(f"*/*{SUFFIX}"), *self.folder.glob("*/*.partial")]:
            path.unlink(missing_ok=True)
            removed += path.suffix == SUFFIX
        for folder in self.folder.glob("*/"):
            if not any(folder.iterdir()):
                folder.rmdir()
        return removed

    def _is_ours(self) -> bool:
        """Whether the folder is there. Raises DeviceError where others could have written into it."""
        try:
            status = self.folder.stat()
        except FileNotFoundError:
            return False
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise DeviceError(
                f"kernel cache {self.folder}: others may write into it (owner {status.st_uid}, mode "
                f"{status.st_mode & 0o777:o}), and what lies there is executed: chmod 700 it, or name another by "
                "XDG_CACHE_HOME"
            )
        return True

    def _write(self, path: Path, kernel: CompiledKernel) -> None:
        """Puts a kernel in its place. Where the disk refuses, it is only not there the next time."""
        facts = {name: value for name, value in asdict(kernel).items() if name != "image"}
        facts |= {"format": _FORMAT, "sha256": hashlib.sha256(kernel.image).hexdigest()}
        partial = None
        try:
            for folder in (self.folder, path.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            number, partial = tempfile.mkstemp(suffix=".partial", dir=path.parent)  # mode 0600
            with os.fdopen(number, "wb") as file:
                file.write(json.dumps(facts).encode() + b"\n" + kernel.image)
            os.replace(partial, path)
        except OSError:
            if partial is not None:
                Path(partial).unlink(missing_ok=True)


def _read(path: Path) -> CompiledKernel | None:
    """A file's kernel; None where there is no such file, or it is not whole."""
    try:
        line, _, image = path.read_bytes().partition(b"\n")
        facts = json.loads(line)
        if facts.pop("format") != _FORMAT or facts.pop("sha256") != hashlib.sha256(image).hexdigest():
            return None
        kernel = CompiledKernel(image=image, **facts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    types = {"str": str, "bool": bool, "int": int, "bytes": bytes}
    is_whole = all(type(getattr(kernel, field.name)) is types[str(field.type)] for field in fields(kernel))
    return kernel if is_whole else None


def compile_kernel(specialisation: Specialisation, arch: str, *, is_ptx: bool) -> CompiledKernel:
    """Compiles by NVVM, and assembles by nvJitLink unless `is_ptx`. The entry gets the specialisation's name.

    Raises CompileError.
    """
    from numba_kernels.cuda.compile import compile_ptx

    letters = argument_format(specialisation)
    try:
        text = compile_ptx(specialisation, arch)
    except Exception as error:  # numba raises its own kinds from each of its passes
        raise CompileError(f"kernel {specialisation.name} does not compile for {arch}: {error}") from error
    entries = _ENTRY.findall(text)
    if len(entries) != 1:
        raise CompileError(f"kernel {specialisation.name}: its PTX has {len(entries)} entries, not one")
    name = identifier(specialisation.name)
    text = text.replace(entries[0], name)  # numba's own name counts the functions that were compiled before
    registers = spills = shared = 0
    image = text.encode() + b"\0"
    if not is_ptx:
        from runtime.device.assemble import assemble

        code = assemble(text, arch)
        image, registers, shared = code.cubin, code.num_registers, code.static_shared_bytes
        spills = code.spill_store_bytes + code.spill_load_bytes
    return CompiledKernel(
        name=name,
        arch=arch,
        is_ptx=is_ptx,
        argument_format=letters,
        waits_for_dependency="griddepcontrol.wait" in text,
        num_registers=registers,
        spill_bytes=spills,
        static_shared_bytes=shared,
        image=image,
    )


def argument_format(specialisation: Specialisation) -> str:
    """One letter of `struct` for each argument. Raises CompileError for a type that a launch cannot pass."""
    letters = []
    for number, kind in enumerate(map(str, specialisation.argument_types)):
        letter = "Q" if kind.endswith("*") else _PACKED.get(kind)
        if letter is None:
            raise CompileError(
                f"kernel {specialisation.name}: argument {number} is a {kind}, neither a number nor a pointer"
            )
        letters.append(letter)
    return "".join(letters)


def is_meant_for(specialisation: Specialisation, arch: str) -> bool:
    """Whether an architecture has a kernel's instructions. Raises InvalidArgumentError for a name that is no arch."""
    match = re.fullmatch(r"sm_(\d{2,3})([af]?)", arch)
    if match is None:
        raise InvalidArgumentError(f"arch {arch!r} is not one such as 'sm_80' or 'sm_90a'", param="arch")
    if specialisation.needs_arch_features:
        return arch == needs_of(specialisation)
    return int(match[1]) >= specialisation.min_capability


def needs_of(specialisation: Specialisation) -> str:
    """The architecture that a kernel needs at least; where it needs one architecture's own features, that one."""
    return f"sm_{specialisation.min_capability}{'a' if specialisation.needs_arch_features else ''}"


def identifier(name: str) -> str:
    """A name with everything but letters, digits and _ replaced."""
    return re.sub(r"\W", "_", name, flags=re.ASCII)


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/xserv/kernels``, or the same below ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "xserv" / "kernels"


@functools.cache
def sources_digest() -> str:
    """Of every Python file under `numba_kernels/cuda`, names and contents."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.rglob("*.py")):
        digest.update(str(path.relative_to(_SOURCES)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def tool_versions() -> str:
    """What compiles kernels, each with its version."""
    found = [f"python {platform.python_version()}"]
    for package in _TOOLS:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} -")
    return ", ".join(found)


def function_digest(function: Any) -> str:
    """Of a function's byte code and constants, its closure, and the functions that those reach."""
    digest = hashlib.sha256()
    seen: set[int] = set()

    def add(value: Any) -> None:
        value = getattr(value, "py_func", getattr(value, "_defn", value))  # of a kernel; of an intrinsic
        if (code := getattr(value, "__code__", None)) is not None:
            if id(value) in seen:
                return
            seen.add(id(value))
            add(code)
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            held += [value.__globals__.get(name) for name in code.co_names] + [*(value.__defaults__ or ())]
            for each in held:
                add(each)
        elif hasattr(value, "co_code"):
            digest.update(value.co_code + repr(value.co_names).encode())
            for constant in value.co_consts:
                add(constant)
        elif isinstance(value, tuple | list):
            for each in value:
                add(each)
            digest.update(f"{len(value)}\0".encode())
        else:
            text = str(value)
            digest.update(f"{type(value).__qualname__} {'' if ' at 0x' in text else text}\0".encode())

    add(function)
    return digest.hexdigest()
