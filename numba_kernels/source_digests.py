"""Digests of source files with all their imports: the keys of compiled code.

Each start needs the digests of some 150 files. A file's digest and imports are cached on disk, with its size, inode and
time, so that a start only checks those.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from pathlib import Path

from numba_kernels.cache_files import cache_root, read_entry, write_entry

_ROOT = str(Path(__file__).resolve().parent.parent)
_IMPORT = re.compile(
    r"^\s*(?:from\s+((?:numba_kernels|runtime|tokenizer)[\w.]*)\s+import\s+(\([^)]*\)|[^\n(]+)"
    r"|import\s+((?:numba_kernels|runtime|tokenizer)[\w.]*))",
    re.M,
)

Note = tuple[list[int], str, list[str]]
"""Size, number and time of a file; the digest of its content; the project's modules that it may import, by name."""


def _read(path: str) -> tuple[str, list[str]]:
    """The digest of a file's content, and the modules that it may import: in ``from a import b``, a and a.b."""
    content = Path(path).read_bytes()
    modules: list[str] = []
    for module, names, plain in _IMPORT.findall(content.decode("utf-8")):
        modules += [plain] if plain else [module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))]
    return hashlib.sha256(content).hexdigest(), modules


@functools.cache
def _file_of(module: str) -> str | None:
    path = os.path.join(_ROOT, *module.split("."))
    return next((each for each in (f"{path}.py", os.path.join(path, "__init__.py")) if os.path.isfile(each)), None)


class _Notes:
    """Digests and imports of this checkout's files, kept on disk."""

    def __init__(self) -> None:
        words = hashlib.sha256(f"{_ROOT} {Path(__file__).read_text(encoding='utf-8')}".encode()).hexdigest()
        self._path = cache_root("sources") / words[:16] / "notes"
        found = read_entry(self._path)
        self._known: dict[str, Note] = {} if found is None else json.loads(found[1])
        self._is_new = False

    def of(self, path: str) -> tuple[str, list[str]] | None:
        """The result of `_read`; None if there is no such file."""
        try:
            status = os.stat(path)
        except OSError:
            return None
        if not path.startswith(_ROOT + os.sep):
            return _read(path)
        stamp = [status.st_size, status.st_ino, status.st_mtime_ns]
        note = self._known.get(path)
        if note is None or note[0] != stamp:
            note = self._known[path] = (stamp, *_read(path))
            self._is_new = True
        return note[1], note[2]

    def write(self) -> None:
        """Writes new entries to disk."""
        if self._is_new:
            self._is_new = False
            write_entry(self._path, {}, json.dumps(self._known).encode())


_notes: _Notes | None = None


def sources_digest(*sources: Path) -> str:
    """Digest of source files and of this project's files that they import, directly or not: names and contents."""
    global _notes
    if _notes is None:
        _notes = _Notes()
    found: dict[str, str] = {}
    pending = [os.path.realpath(source) for source in sources]
    while pending:
        path = pending.pop()
        if path not in found and (note := _notes.of(path)) is not None:
            found[path] = note[0]
            pending += [file for module in note[1] if (file := _file_of(module)) is not None]
    _notes.write()
    digest = hashlib.sha256()
    for path in sorted(found):
        name = os.path.relpath(path, _ROOT) if path.startswith(_ROOT + os.sep) else os.path.basename(path)
        digest.update(f"{name}\0{found[path]}\0".encode())
    return digest.hexdigest()
