"""Modules that are imported when they are first used: heavy ones, optional ones, and those that must wait for
settings of the process. Each is named at the top of the module that uses it."""

from __future__ import annotations

import importlib
from typing import Any


class _Later:
    """See `later`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by pickle and copy, not by users
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def later(name: str) -> Any:
    """The module of that name, imported when one of its names is first used."""
    return _Later(name)
