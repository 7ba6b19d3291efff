"""Compiled kernels on disk, found by their content, so that only the first start of a program compiles.

    <XDG_CACHE_HOME or ~/.cache>/xserv/kernels/<digest of the sources>/<kernel>-<arch>-<key>.kernel
                                                                       <kernel>-<key>.ir

The sources are all files under `numba_kernels/cuda`. The key is a digest of those, the specialisation (name,
constants, types, bounds, flags, the function's own byte code), the architecture, and the versions of Python, numba,
numba-cuda, llvmlite, NVVM and nvJitLink. A `.kernel` holds an image: cubin for a real device, PTX for an emulated one.
An `.ir` holds the kernel as LLVM IR, compressed, which takes Numba most of the time and serves every architecture.
`cache_files` says how files are written. Of the processes that want the same kernel at once, one compiles it.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numba_kernels.cache_files import (
    LOCK,
    PARTIAL,
    cache_root,
    locked,
    mark_used,
    read_entry,
    refuse_foreign,
    write_entry,
)
from runtime.device.errors import CompileError
from runtime.errors import InvalidArgumentError

if TYPE_CHECKING:
    from numba_kernels.cuda.specialisation import Specialisation

SUFFIX = ".kernel"
IR_SUFFIX = ".ir"
_FORMAT = 3
_SOURCES = Path(__file__).resolve().parents[2] / "numba_kernels" / "cuda"
_TOOLS = ("numba", "numba-cuda", "llvmlite", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-nvjitlink", "cuda-bindings")
_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\(")

# How `struct` packs an argument, by the name of its numba type. A pointer is an address.
_PACKED = {
    "bool": "?", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I",
    "int64": "q", "uint64": "Q", "float32": "f", "float64": "d", "tensor_map": "128s",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """A kernel's image and what a launch must know.

    Attributes:
        name: its entry in the image, the specialisation's name as an identifier.
        arch: "sm_90a".
        is_ptx: whether the image is a PTX text that ends in NUL (for an emulated device), not a cubin.
        argument_format: the code of `struct` for each argument, with spaces between them.
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
    """A folder of compiled kernels. Counts what it did in this process: `num_compiled`, `num_read`, and how often Numba
    itself had to run for that, `num_front_ends`."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: None for the user's own."""
        self.folder = folder or default_folder()
        self.num_compiled = 0
        self.num_read = 0
        self.num_front_ends = 0
        self._marked: set[Path] = set()

    def get(self, specialisation: Specialisation, arch: str, *, is_ptx: bool) -> CompiledKernel:
        """The kernel for an architecture, from disk, or compiled now and written there.

        Raises CompileError where it does not compile.
        """
        path = self.path_of(specialisation, arch, is_ptx=is_ptx)
        kernel = self._read_kernel(path)
        if kernel is None:
            with locked(path):
                kernel = self._read_kernel(path)  # by another process, which held the lock
                if kernel is None:
                    modules = self.llvm_ir(specialisation)
                    kernel = compile_kernel(specialisation, arch, modules, is_ptx=is_ptx)
                    self.num_compiled += 1
                    self._write(path, kernel)
                    return kernel
        self.num_read += 1
        return kernel

    def llvm_ir(self, specialisation: Specialisation) -> tuple[str, ...]:
        """The kernel's modules of LLVM IR, the same for all architectures, from disk, or by Numba and written there.

        Raises CompileError where it does not compile.
        """
        path = self._ir_path(specialisation)
        modules = self._read_ir(path)
        if modules is None:
            with locked(path):
                modules = self._read_ir(path)
                if modules is None:
                    modules = _front_end(specialisation)
                    self.num_front_ends += 1
                    content = zlib.compress("\0".join(modules).encode(), 1)
                    write_entry(path, {"format": _FORMAT, "name": specialisation.name}, content)
        return modules

    def path_of(self, specialisation: Specialisation, arch: str, *, is_ptx: bool) -> Path:
        """Where a kernel's file is, or will be."""
        image = "ptx" if is_ptx else "cubin"
        return self._path(specialisation, f"{arch}-{image}-", SUFFIX, arch, image)

    def entries(self) -> Iterator[CacheEntry]:
        """Every kernel's file, in the order of its name."""
        current = {digest_of(source)[:16] for source in _SOURCES.rglob("*.py")} | {used.name for used in self._marked}
        for path in sorted(self.folder.glob(f"*/*{SUFFIX}")):
            yield CacheEntry(path, path.stat().st_size, path.parent.name in current, _read(path))

    def ir_bytes(self) -> int:
        """Bytes on disk of all kernels' LLVM IR."""
        return sum(path.stat().st_size for path in self.folder.glob(f"*/*{IR_SUFFIX}"))

    def clear(self) -> int:
        """Removes every file; how many kernels there were."""
        removed = 0
        for suffix in (SUFFIX, IR_SUFFIX, PARTIAL, LOCK):
            for path in self.folder.glob(f"*/*{suffix}"):
                path.unlink(missing_ok=True)
                removed += suffix == SUFFIX
        for folder in self.folder.glob("*/"):
            if not any(folder.iterdir()):
                folder.rmdir()
        return removed

    def _ir_path(self, specialisation: Specialisation) -> Path:
        return self._path(specialisation, "", IR_SUFFIX, "ir")

    def _path(self, specialisation: Specialisation, kind: str, suffix: str, *parts: str) -> Path:
        """The file of what depends on a specialisation and on `parts`."""
        parts = (
            str(_FORMAT), _source_digest(specialisation), specialisation.name,
            repr(sorted(specialisation.constants.items())),
            ",".join(str(each) for each in specialisation.argument_types),
            f"{specialisation.max_threads},{specialisation.min_blocks},{specialisation.fastmath}",
            function_digest(specialisation.kernel.py_func), *parts, tool_versions(),
        )  # fmt: skip
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
        name = f"{identifier(specialisation.name)[:80]}-{kind}{key}{suffix}"
        return self.folder / _source_digest(specialisation)[:16] / name

    def _read_kernel(self, path: Path) -> CompiledKernel | None:
        self._check(path.parent)
        return _read(path)

    def _read_ir(self, path: Path) -> tuple[str, ...] | None:
        self._check(path.parent)
        entry = read_entry(path)
        if entry is None or entry[0].get("format") != _FORMAT:
            return None
        return tuple(zlib.decompress(entry[1]).decode().split("\0"))

    def _check(self, folder: Path) -> None:
        """Raises DeviceError where others could have written into the cache; notes that it is used."""
        refuse_foreign(self.folder)
        if folder not in self._marked:
            mark_used(folder)
            self._marked.add(folder)

    def _write(self, path: Path, kernel: CompiledKernel) -> None:
        facts = {name: value for name, value in asdict(kernel).items() if name != "image"}
        write_entry(path, facts | {"format": _FORMAT}, kernel.image)


def _read(path: Path) -> CompiledKernel | None:
    """A file's kernel; None where there is no such file, or it is not whole."""
    entry = read_entry(path)
    if entry is None or entry[0].pop("format", None) != _FORMAT:
        return None
    try:
        kernel = CompiledKernel(image=entry[1], **entry[0])
    except TypeError:
        return None
    types = {"str": str, "bool": bool, "int": int, "bytes": bytes}
    is_whole = all(type(getattr(kernel, field.name)) is types[str(field.type)] for field in fields(kernel))
    return kernel if is_whole else None


def _front_end(specialisation: Specialisation) -> tuple[str, ...]:
    """What Numba makes of a kernel. Raises CompileError."""
    from numba_kernels.cuda.compile import llvm_ir

    argument_format(specialisation)
    try:
        return llvm_ir(specialisation)
    except Exception as error:  # numba raises its own kinds from each of its passes
        raise CompileError(f"kernel {specialisation.name} does not compile: {error}") from error


def compile_kernel(
    specialisation: Specialisation, arch: str, modules: tuple[str, ...], *, is_ptx: bool
) -> CompiledKernel:
    """Compiles LLVM IR by NVVM, and assembles by nvJitLink unless `is_ptx`. The entry gets the specialisation's name.

    Raises CompileError.
    """
    from numba_kernels.cuda.compile import ptx_of

    letters = argument_format(specialisation)
    try:
        text = ptx_of(specialisation, modules, arch)
    except Exception as error:  # NVVM's own, with its own words
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
    """The code of `struct` for each argument, with spaces between them. Raises CompileError for a type that a launch
    cannot pass."""
    letters = []
    for number, kind in enumerate(map(str, specialisation.argument_types)):
        letter = "Q" if kind.endswith("*") else _PACKED.get(kind)
        if letter is None:
            raise CompileError(
                f"kernel {specialisation.name}: argument {number} is a {kind}, no number, pointer or tensor map"
            )
        letters.append(letter)
    return " ".join(letters)


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
    return cache_root("kernels")


def _source_digest(specialisation: Specialisation) -> str:
    return digest_of(Path(specialisation.kernel.py_func.__code__.co_filename))


@functools.cache
def digest_of(source: Path) -> str:
    """Of a kernel's file, of what it imports from this project, and of what compiles it: names and contents."""
    from numba_kernels.cache import sources_digest

    return sources_digest(source, _SOURCES / "compile.py")


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
