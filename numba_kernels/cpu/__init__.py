"""The cpu backend's kernels: numba ``@njit`` functions around a few register tiles written as LLVM IR.

Importing this package settles, before any kernel is decorated, where numba keeps compiled code:
``<XDG_CACHE_HOME or ~/.cache>/xserv/numba/<digest>``, one folder for each content of these sources, version of numba
and kind of tile (`target`), because numba's own cache does not notice a change in a callee's file. Threads are our own
(`pool`): numba's layers sleep between kernels, or spin without end, or must not be entered by two Python threads.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import llvmlite
import numba

from numba_kernels.cpu.target import TILES


def _digest() -> str:
    """Of the sources here, of the compiler that reads them and of what it may compile for."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {TILES}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    """The folder for this digest, made now; a folder of this process alone where the home cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "xserv" / "numba" / _digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="xserv-numba-"))
    return folder


numba.config.CACHE_DIR = str(_cache_folder())
