"""Compiled kernels in one file, for a program that has `cuda.bindings` and nothing of this project.

A bundle is a zip of one cubin a kernel, ``<kernel>.cubin``, and ``manifest.json``: for each kernel, by its name, which
is also its entry's, what a launch must know. Numbers that a plan computes from shapes (grid, dynamic shared memory) are
the caller's.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.device.kernel_cache import CompiledKernel, sources_digest, tool_versions

if TYPE_CHECKING:
    from numba_kernels.cuda.specialisation import Specialisation

FORMAT = 1
_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the same kernels make the same bytes


def write_bundle(path: Path, kernels: Sequence[tuple[Specialisation, CompiledKernel]]) -> None:
    """Writes the bundle. `kernels` are cubins, all of one architecture. Raises OSError."""
    described: dict[str, dict[str, Any]] = {}
    manifest = {
        "format": FORMAT,
        "arch": kernels[0][1].arch,
        "sources": sources_digest(),
        "made_by": tool_versions(),
        "kernels": described,
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        for specialisation, kernel in kernels:
            file = f"{kernel.name}.cubin"
            described[kernel.name] = {
                "file": file,
                "sha256": hashlib.sha256(kernel.image).hexdigest(),
                "argument_format": kernel.argument_format,
                "max_threads": specialisation.max_threads,
                "waits_for_dependency": kernel.waits_for_dependency,
                "num_registers": kernel.num_registers,
                "static_shared_bytes": kernel.static_shared_bytes,
                "constants": {name: str(value) for name, value in specialisation.constants.items()},
            }
            _add(bundle, file, kernel.image)
        _add(bundle, "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())


def _add(bundle: zipfile.ZipFile, name: str, content: bytes) -> None:
    bundle.writestr(zipfile.ZipInfo(name, _LONG_AGO), content, zipfile.ZIP_DEFLATED)
