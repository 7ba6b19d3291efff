"""The parts that all patches share: versions, replaced attributes, and a pause of Python's garbage collector."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

logger = logging.getLogger("xserv.cache")

VERSIONS = {"numba": "0.68", "numba-cuda": "0.30.4"}
"""The version of each package that the patches were written for: all of its numbers, or the first ones."""


@functools.cache
def _found(package: str) -> str:
    return version(package)


@functools.cache
def _is_known(package: str, found: str, known: str) -> bool:
    if f"{found}.".startswith(f"{known}."):
        return True
    logger.warning(
        "%s is %s: the patches that halve the time of compiling are for %s, and are off", package, found, known
    )
    return False


def is_known(package: str) -> bool:
    """Whether the installed version of a package is the one that its patches were written for; logs once if not."""
    return _is_known(package, _found(package), VERSIONS[package])


@contextmanager
def replaced(parts: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Sets each of ``parts``, an owner, an attribute's name and its value, inside the block. Attributes that the owner
    inherited or lacked are deleted after it."""
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in parts]
    try:
        for owner, name, part in parts:
            setattr(owner, name, part)
        yield
    finally:
        for owner, name, part in before:
            if part is None:
                delattr(owner, name)
            else:
                setattr(owner, name, part)


@contextmanager
def without_collection() -> Iterator[None]:
    """Python collects no garbage inside: a compilation makes millions of objects that all live until it is done."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()
