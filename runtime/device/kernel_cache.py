"""Compiled kernels on disk, found by their content, so that only the first start of a program compiles.

    <XDG_CACHE_HOME or ~/.cache>/xserv/kernels/<digest of the sources>/<kernel>-<arch>-<key>.kernel
                                                                       <kernel>-<key>.ir
                                                               <key>.ahead
                                               <any name>.bundle

The sources are the kernel's own file and its imports from this project. The key is a digest of the kernel's index
(`kernel_key`: sources, specialisation, architecture) and of the compilers' versions. A `.kernel` holds an
image: cubin for a real device, PTX for an emulated one. An `.ir` holds the kernel as LLVM IR, compressed, which takes
Numba most of the time and serves every architecture. A `.bundle` (`compiled_kernel`) holds many images by their index
alone, which another machine compiled with its own tools. An `.ahead`, empty, marks that all kernels of a model and a
config have been compiled. `cache_files` writes the files. If several processes need the same kernel at once, one
compiles it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

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
from numba_kernels.cuda.specialisation import Specialisation
from runtime.device.assemble import assemble, require_compiler
from runtime.device.compiled_kernel import (
    BUNDLE_SUFFIX,
    Bundle,
    CompiledKernel,
    argument_format,
    facts_of,
    identifier,
    image_kind,
    kernel_of,
)
from runtime.device.errors import CompileError
from runtime.device.kernel_key import SOURCES, all_sources, digest_of, kernel_index, sources_of, tool_versions
from runtime.errors import DeviceError, InvalidArgumentError
from runtime.later import later

_compile = later("numba_kernels.cuda.compile")  # brings numba's compiler for GPUs

SUFFIX = ".kernel"
IR_SUFFIX = ".ir"
MARKER_SUFFIX = ".ahead"
_FORMAT = 4
_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\(")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A file of the cache. `kernel` is None where the file is corrupt; `is_current`: of the present sources."""

    path: Path
    size_bytes: int
    is_current: bool
    kernel: CompiledKernel | None


class KernelCache:
    """A folder of compiled kernels. Counts this process's `num_compiled`, `num_read`, and `num_front_ends`
    (Numba's)."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` is the user's cache if None."""
        self.folder = folder or default_folder()
        self.num_compiled = 0
        self.num_read = 0
        self.num_front_ends = 0
        self._marked: set[Path] = set()

    def get(self, specialisation: Specialisation, arch: str, *, is_ptx: bool) -> CompiledKernel:
        """The kernel for an architecture, from disk, or compiled now and written there.

        Raises CompileError where it does not compile, DeviceError where a bundle is damaged.
        """
        path = self.path_of(specialisation, arch, is_ptx=is_ptx)
        kernel = self._read_kernel(path) or self._read_bundled(specialisation, arch, is_ptx=is_ptx)
        if kernel is None:
            with locked(path):
                kernel = self._read_kernel(path)  # by another process, which held the lock
                if kernel is None:
                    kernel = self._compiled(specialisation, arch, is_ptx=is_ptx)
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
        """The path of a kernel's file, present or not."""
        image = image_kind(is_ptx)
        return self._path(specialisation, f"{arch}-{image}-", SUFFIX, arch, image)

    def marker(self, key: str) -> Path:
        """The path of a marker file; once it exists, the kernels of `key` are in the cache."""
        folder = self.folder / all_sources()[:16]
        self._check(folder)
        return folder / f"{key}{MARKER_SUFFIX}"

    @functools.cached_property
    def bundles(self) -> list[Bundle]:
        """The bundles that lie in the folder. Raises DeviceError for one that is damaged."""
        refuse_foreign(self.folder)
        return [Bundle(path) for path in sorted(self.folder.glob(f"*{BUNDLE_SUFFIX}"))]

    def entries(self) -> Iterator[CacheEntry]:
        """Every kernel's file, in the order of its name."""
        current = {digest_of(source)[:16] for source in SOURCES.rglob("*.py")} | {used.name for used in self._marked}
        for path in sorted(self.folder.glob(f"*/*{SUFFIX}")):
            yield CacheEntry(path, path.stat().st_size, path.parent.name in current, _read(path))

    def ir_bytes(self) -> int:
        """Bytes on disk of all kernels' LLVM IR."""
        return sum(path.stat().st_size for path in self.folder.glob(f"*/*{IR_SUFFIX}"))

    def clear(self) -> int:
        """Removes every file, bundles among them; returns how many kernels there were, except in damaged bundles."""
        removed = 0
        self.__dict__.pop("bundles", None)
        for path in self.folder.glob(f"*{BUNDLE_SUFFIX}"):
            with contextlib.suppress(DeviceError):
                removed += len(Bundle(path))
            path.unlink(missing_ok=True)
        for suffix in (SUFFIX, IR_SUFFIX, MARKER_SUFFIX, PARTIAL, LOCK):
            for path in self.folder.glob(f"*/*{suffix}"):
                path.unlink(missing_ok=True)
                removed += suffix == SUFFIX
        for folder in self.folder.glob("*/"):
            if not any(folder.iterdir()):
                folder.rmdir()
        return removed

    def _compiled(self, specialisation: Specialisation, arch: str, *, is_ptx: bool) -> CompiledKernel:
        """Compiles a kernel; assembles an emulated device's PTX into a cubin if there is one: the text is the same."""
        if not is_ptx:
            kept = self._read_kernel(self.path_of(specialisation, arch, is_ptx=True))
            if kept is not None:
                return assembled(kept)
        return compile_kernel(specialisation, arch, self.llvm_ir(specialisation), is_ptx=is_ptx)

    def _ir_path(self, specialisation: Specialisation) -> Path:
        return self._path(specialisation, "", IR_SUFFIX, "ir")

    def _path(self, specialisation: Specialisation, kind: str, suffix: str, *parts: str) -> Path:
        """The path of a file that depends on a specialisation and on `parts`."""
        words = f"{_FORMAT}\0{kernel_index(specialisation, *parts)}\0{tool_versions()}"
        key = hashlib.sha256(words.encode()).hexdigest()[:24]
        name = f"{identifier(specialisation.name)[:80]}-{kind}{key}{suffix}"
        return self.folder / sources_of(specialisation.kernel.py_func)[:16] / name

    def _read_kernel(self, path: Path) -> CompiledKernel | None:
        self._check(path.parent)
        return _read(path)

    def _read_bundled(self, specialisation: Specialisation, arch: str, *, is_ptx: bool) -> CompiledKernel | None:
        if not self.bundles:
            return None
        index = kernel_index(specialisation, arch, image_kind(is_ptx))
        found = (bundle.get(index) for bundle in self.bundles)
        return next((kernel for kernel in found if kernel is not None), None)

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
        write_entry(path, facts_of(kernel) | {"format": _FORMAT}, kernel.image)


def _read(path: Path) -> CompiledKernel | None:
    """A file's kernel; None where there is no such file, or it is not whole."""
    entry = read_entry(path)
    if entry is None or entry[0].pop("format", None) != _FORMAT:
        return None
    return kernel_of(entry[0], entry[1])


def _front_end(specialisation: Specialisation) -> tuple[str, ...]:
    """Numba's LLVM IR of a kernel. Raises CompileError."""
    argument_format(specialisation)
    require_compiler()
    # Inlining numbers blocks on from kernel to kernel, each time about twice as far: LLVM refuses the labels at last.
    importlib.import_module("numba.cuda.core.ir_utils")._the_max_label._value = 0
    try:
        return tuple(_compile.llvm_ir(specialisation))
    except Exception as error:  # numba raises its own kinds from each of its passes
        raise CompileError(f"kernel {specialisation.name} does not compile: {error}") from error


def compile_kernel(
    specialisation: Specialisation, arch: str, modules: tuple[str, ...], *, is_ptx: bool
) -> CompiledKernel:
    """Compiles LLVM IR by NVVM, and assembles by nvJitLink unless `is_ptx`. The entry gets the specialisation's name.

    Raises CompileError.
    """
    letters = argument_format(specialisation)
    require_compiler()
    try:
        text = _compile.ptx_of(specialisation, modules, arch)
    except Exception as error:  # NVVM's own, with its own words
        raise CompileError(f"kernel {specialisation.name} does not compile for {arch}: {error}") from error
    entries = _ENTRY.findall(text)
    if len(entries) != 1:
        raise CompileError(f"kernel {specialisation.name}: its PTX has {len(entries)} entries, not one")
    name = identifier(specialisation.name)
    text = text.replace(entries[0], name)  # numba's own name counts the functions that were compiled before
    kernel = CompiledKernel(
        name=name,
        arch=arch,
        is_ptx=True,
        argument_format=letters,
        waits_for_dependency="griddepcontrol.wait" in text,
        num_registers=0,
        spill_bytes=0,
        static_shared_bytes=0,
        image=text.encode() + b"\0",
    )
    return kernel if is_ptx else assembled(kernel)


def assembled(kernel: CompiledKernel) -> CompiledKernel:
    """A kernel that is PTX as a cubin, by nvJitLink. Raises CompileError."""
    require_compiler()
    code = assemble(kernel.image[:-1].decode(), kernel.arch)
    return replace(
        kernel,
        is_ptx=False,
        num_registers=code.num_registers,
        spill_bytes=code.spill_store_bytes + code.spill_load_bytes,
        static_shared_bytes=code.static_shared_bytes,
        image=code.cubin,
    )


def capability_of(arch: str) -> int:
    """The compute capability of an architecture's name: 90 for "sm_90a". InvalidArgumentError for an invalid name."""
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    if match is None:
        raise InvalidArgumentError(f"arch {arch!r} is not one such as 'sm_80' or 'sm_90a'", param="arch")
    return int(match[1])


def is_meant_for(specialisation: Specialisation, arch: str) -> bool:
    """Whether an architecture has the instructions and registers that a kernel needs. Raises InvalidArgumentError for
    an invalid name."""
    capability = capability_of(arch)
    if specialisation.needs_arch_features:
        return arch == needs_of(specialisation)
    if specialisation.replaced_from and capability >= specialisation.replaced_from:
        return False
    return capability >= specialisation.min_capability and arch not in specialisation.spills_on


def needs_of(specialisation: Specialisation) -> str:
    """The least architecture that a kernel needs; the exact one where it needs that one's own features."""
    return f"sm_{specialisation.min_capability}{'a' if specialisation.needs_arch_features else ''}"


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/xserv/kernels``, or the same below ``~/.cache``."""
    return cache_root("kernels")


class KernelList(KernelCache):
    """Records the kernels requested and compiles none; only a DryDriver can load its images."""

    def __init__(self) -> None:
        super().__init__()
        self.specialisations: list[Specialisation] = []

    def get(self, specialisation: Specialisation, arch: str, *, is_ptx: bool) -> CompiledKernel:
        self.specialisations.append(specialisation)
        return CompiledKernel(
            name=identifier(specialisation.name),
            arch=arch,
            is_ptx=is_ptx,
            argument_format=argument_format(specialisation),
            waits_for_dependency=True,
            num_registers=0,
            spill_bytes=0,
            static_shared_bytes=0,
            image=b"\0",
        )
