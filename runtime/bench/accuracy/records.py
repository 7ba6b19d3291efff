"""What a run has found so far, a JSON line each, so that one that was broken off goes on where it ended.

The first line says what is measured; a file of something else is refused rather than continued.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtime.errors import InvalidArgumentError


class Records:
    """The lines of a file, by key; without a file they live as long as the run."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Raises `InvalidArgumentError` for a file that other settings wrote, or that is no such file."""
        self.found: dict[str, dict[str, Any]] = {}
        self._path = path
        if path is None:
            return
        if not path.exists() or not path.stat().st_size:
            path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
            return
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]  # the last may have been cut short
        try:
            first, *rest = (json.loads(line) for line in whole)
            before = first["settings"]
            self.found = {entry["key"]: entry for entry in rest}
        except (ValueError, KeyError, TypeError):
            raise InvalidArgumentError(f"--records {path} is not what an earlier run wrote") from None
        for name in sorted({*before, *settings}):
            if before.get(name) != settings.get(name):
                raise InvalidArgumentError(
                    f"--records {path} was made with {name} {before.get(name)!r}, now it is {settings.get(name)!r}:"
                    " name another file"
                )
        if len(whole) < len(lines):
            path.write_text("".join(whole), encoding="utf-8")

    def add(self, key: str, values: dict[str, Any]) -> None:
        """Keeps one more result, on disk before the next is asked for."""
        entry = {"key": key, **values}
        self.found[key] = entry
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
