"""Attributes of Numba's classes and modules that are others for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(parts: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Each of ``parts``, an owner, a name of it and what stands under it, inside alone. What the owner only inherited,
    or did not have, it has no more behind."""
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
