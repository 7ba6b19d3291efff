"""The families of architectures that the engine runs: one file each.

A file of this folder names its `ARCHITECTURES`; nothing else lists them. `docs/adding.md` shows how one is written.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from models.architecture import Architecture


@cache
def known_architectures() -> dict[str, Architecture]:
    """Every architecture of the files here, by its name in `config.json`."""
    found: dict[str, Architecture] = {}
    for module in iter_modules(__path__):
        for architecture in import_module(f"{__name__}.{module.name}").ARCHITECTURES:
            assert architecture.name not in found, f"two families name {architecture.name}"
            found[architecture.name] = architecture
    return dict(sorted(found.items()))
