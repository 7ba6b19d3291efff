"""Compiled kernels: an image with the facts that a launch needs, and many of them in one file, for a machine without a
compiler, or a program with `cuda.bindings` but without this project.

A bundle is a zip of one image a kernel and `manifest.json`, all of one architecture. The manifest lists for each kernel
its file, its index (`kernel_key`), by which `KernelCache` finds it in any bundle that lies in the cache's folder, and
the facts that a launch needs. A plan's numbers (grid, dynamic shared memory) are the caller's.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from numba_kernels.cuda.specialisation import Specialisation
from runtime.device.errors import CompileError
from runtime.device.kernel_key import all_sources, kernel_index, tool_versions
from runtime.errors import DeviceError

# How `struct` packs an argument, by the name of its numba type. A pointer is an address.
_PACKED = {
    "bool": "?", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I",
    "int64": "q", "uint64": "Q", "float32": "f", "float64": "d", "tensor_map": "128s",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """A kernel's image and the facts that a launch needs.

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


def facts_of(kernel: CompiledKernel) -> dict[str, Any]:
    """All fields but the image, for JSON."""
    return {name: value for name, value in asdict(kernel).items() if name != "image"}


def kernel_of(facts: Mapping[str, Any], image: bytes) -> CompiledKernel | None:
    """The kernel of `facts_of` and an image; None where a field is missing, unknown or of another type."""
    try:
        kernel = CompiledKernel(image=image, **facts)
    except TypeError:
        return None
    types = {"str": str, "bool": bool, "int": int, "bytes": bytes}
    is_whole = all(type(getattr(kernel, field.name)) is types[str(field.type)] for field in fields(kernel))
    return kernel if is_whole else None


def image_kind(is_ptx: bool) -> str:
    """ "ptx" or "cubin"."""
    return "ptx" if is_ptx else "cubin"


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


def identifier(name: str) -> str:
    """A name with everything but letters, digits and _ replaced."""
    return re.sub(r"\W", "_", name, flags=re.ASCII)


BUNDLE_SUFFIX = ".bundle"
FORMAT = 2
_MANIFEST = "manifest.json"
_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the same kernels make the same bytes
_OF_A_LAUNCH = frozenset(("constants", "file", "index", "max_threads", "sha256"))
"""A kernel's fields in the manifest, beside `facts_of`."""


def write_bundle(path: Path, kernels: Sequence[tuple[Specialisation, CompiledKernel]]) -> None:
    """Writes the bundle of at least one kernel, all of one architecture and kind of image. Raises OSError."""
    described = []
    for specialisation, kernel in kernels:
        kind = image_kind(kernel.is_ptx)
        index = kernel_index(specialisation, kernel.arch, kind)
        facts = facts_of(kernel) | {
            "constants": {name: str(value) for name, value in specialisation.constants.items()},
            "file": f"{kernel.name[:80]}-{index}.{kind}",
            "index": index,
            "max_threads": specialisation.max_threads,
            "sha256": hashlib.sha256(kernel.image).hexdigest(),
        }
        described.append((facts, kernel.image))
    _write(path, described)


def merge_bundles(path: Path, parts: Iterable[Path]) -> None:
    """Merges bundles of one architecture and kind of image, each kernel once.

    Raises OSError, and DeviceError where a part is damaged.
    """
    _write(path, [each for part in parts for each in Bundle(part).described()])


def _write(path: Path, kernels: Sequence[tuple[dict[str, Any], bytes]]) -> None:
    """Writes the manifest's lines with their images, each kernel once, in the order of their files."""
    unique = {facts["file"]: (facts, image) for facts, image in kernels}
    (arch,) = {facts["arch"] for facts, _ in kernels}
    (is_ptx,) = {facts["is_ptx"] for facts, _ in kernels}
    manifest = {
        "format": FORMAT,
        "arch": arch,
        "image": image_kind(is_ptx),
        "sources": all_sources(),
        "made_by": tool_versions(),
        "kernels": [unique[file][0] for file in sorted(unique)],
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        for file in sorted(unique):
            _add(bundle, file, unique[file][1])
        _add(bundle, _MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())


def _add(bundle: zipfile.ZipFile, name: str, content: bytes) -> None:
    bundle.writestr(zipfile.ZipInfo(name, _LONG_AGO), content, zipfile.ZIP_DEFLATED, 9)


class Bundle:
    """A bundle that is read. `len` is the number of its kernels; threads may read at once."""

    def __init__(self, path: Path) -> None:
        """Reads the manifest. Raises DeviceError where the file is not whole, or of another format."""
        self.path = path
        self._lock = threading.Lock()
        try:
            self._zip = zipfile.ZipFile(path)
            manifest = json.loads(self._zip.read(_MANIFEST))
            if manifest["format"] != FORMAT:
                raise self._damaged(f"format {manifest['format']}, not {FORMAT}")
            self.arch, self.image_kind = str(manifest["arch"]), str(manifest["image"])
            self.is_current = manifest["sources"] == all_sources()
            self._kernels = {str(facts["index"]): facts for facts in manifest["kernels"]}
        except (OSError, zipfile.BadZipFile, ValueError, KeyError, TypeError) as error:
            raise self._damaged(f"{type(error).__name__}: {error}") from error

    def __len__(self) -> int:
        return len(self._kernels)

    def get(self, index: str) -> CompiledKernel | None:
        """The kernel of an index, or None. Raises DeviceError where its image is damaged."""
        facts = self._kernels.get(index)
        return None if facts is None else self._read(facts)

    def kernels(self) -> Iterator[CompiledKernel]:
        """All of them. Raises DeviceError where an image is damaged."""
        return map(self._read, self._kernels.values())

    def described(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The manifest's lines with their images. Raises DeviceError where one is damaged."""
        return ((facts, self._read(facts).image) for facts in self._kernels.values())

    def _read(self, facts: dict[str, Any]) -> CompiledKernel:
        try:
            with self._lock:
                image = self._zip.read(facts["file"])
        except (OSError, zipfile.BadZipFile, KeyError) as error:
            raise self._damaged(f"{facts.get('file')}: {error}") from error
        kernel = kernel_of({name: value for name, value in facts.items() if name not in _OF_A_LAUNCH}, image)
        if kernel is None or hashlib.sha256(image).hexdigest() != facts["sha256"]:
            raise self._damaged(f"{facts['file']} is not what the manifest says")
        return kernel

    def _damaged(self, why: str) -> DeviceError:
        return DeviceError(f"kernel bundle {self.path}: {why}: make it anew, or remove it")
