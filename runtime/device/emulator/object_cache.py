"""Translated kernels on disk: one file a kernel and translator, in ``<XDG_CACHE_HOME or ~/.cache>/xserv/emulator``.

A file is a checksum, a header in JSON, and an object file's bytes. It is written under another name and renamed, so
that a reader sees all of it or nothing; one that does not match its checksum is as good as absent. The folder and files
are the user's alone. Where the folder cannot be written nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAGIC = b"xsrvemu1"
_CHECKSUM_BYTES = 32


@dataclass(frozen=True, slots=True)
class Entry:
    """A header of plain JSON values, and machine code."""

    header: dict[str, Any]
    code: bytes


def default_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "xserv" / "emulator"


@functools.cache
def sources_digest() -> str:
    """Of everything that decides what a kernel is translated to: this folder's sources."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).resolve().parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def key_of(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()


def load(key: str, folder: Path | None = None) -> Entry | None:
    """What is kept under a key; None where there is nothing, or nothing sound."""
    try:
        data = ((folder or default_folder()) / key).read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + _CHECKSUM_BYTES
    body = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        return None
    size = int.from_bytes(body[:4], "little")
    return Entry(json.loads(body[4 : 4 + size]), body[4 + size :])


def store(key: str, entry: Entry, folder: Path | None = None) -> None:
    """Keeps an entry, if the folder lets us."""
    folder = folder or default_folder()
    header = json.dumps(entry.header).encode()
    body = len(header).to_bytes(4, "little") + header + entry.code
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(body).digest() + body)
            os.replace(name, folder / key)
        except OSError:
            os.unlink(name)
            raise
