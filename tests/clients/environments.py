"""Locked environments of client libraries, made on demand in a cache folder outside of the repository.

An environment is found by its lock's digest, and never changed: another lock, or another Python, is another folder
under `<cache>/xserv/clients`. `locks/NAME.in` says what is wanted; `locks/NAME.txt` is the whole, pinned:

    uv pip compile --universal --python-version 3.11 --no-annotate --no-header locks/NAME.in -o locks/NAME.txt
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uv

from numba_kernels.cache_files import cache_root

HERE = Path(__file__).parent
LOCKS = HERE / "locks"
NODE = HERE / "node"
INSTALL_TIMEOUT_S = 900


def python_of(name: str) -> Path:
    """The Python of the environment that `locks/NAME.txt` describes."""
    lock = LOCKS / f"{name}.txt"
    version = f"{sys.implementation.cache_tag}-{sys.platform}"
    with _made(f"{name}-{_digest(version.encode(), lock.read_bytes())}") as (folder, is_made):
        python = folder / "bin" / "python"
        if not is_made:
            _run([uv.find_uv_bin(), "venv", "--quiet", "--no-project", "--python", sys.executable, str(folder)])
            install = ["pip", "install", "--quiet", "--no-deps", "--python", str(python), "--requirements", str(lock)]
            _run([uv.find_uv_bin(), *install])
    return python


def node_modules(described: Path = NODE) -> Path:
    """The folder with the node_modules of `described`'s package-lock.json."""
    files = [described / "package.json", described / "package-lock.json"]
    with _made(f"{described.name}-{_digest(*(each.read_bytes() for each in files))}") as (folder, is_made):
        if not is_made:
            folder.mkdir()
            for each in files:
                shutil.copy(each, folder)
            _run(["npm", "ci", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts"])
    return folder


@contextmanager
def _made(name: str) -> Iterator[tuple[Path, bool]]:
    """The folder, and whether it is whole; the caller makes it if not, while others who want it wait."""
    root = cache_root("clients")
    root.mkdir(parents=True, exist_ok=True)
    folder, whole = root / name, root / f"{name}.made"
    with (root / f"{name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if whole.exists():
            yield folder, True
            return
        shutil.rmtree(folder, ignore_errors=True)
        yield folder, False
        whole.touch()


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _run(command: list[str]) -> None:
    """uv is told where pip was told to find wheels."""
    environment = dict(os.environ)
    if found := os.environ.get("PIP_FIND_LINKS"):
        environment.setdefault("UV_FIND_LINKS", found)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        env=environment,
        check=False,
        encoding="utf-8",
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-3000:]}"
