"""The commands of `xserv` / `python -m runtime.cli`, one module each; `runtime.cli` combines them.

Every start of the program imports them all, for their flags. What a command runs (numpy, numba, the engine, the server)
is named at the module's top by `later`, and imported when the command first uses it.
"""

from __future__ import annotations

import importlib
from typing import Any


class _Later:
    """See `later`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


def later(name: str) -> Any:
    """The module of that name, imported when one of its names is first used."""
    return _Later(name)
