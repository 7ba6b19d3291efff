"""Temporary replacement of attributes of Numba's classes and modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


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
