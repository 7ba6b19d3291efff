"""The registry knows every kernel, each by a name of its own."""

from __future__ import annotations

import importlib
import pkgutil

import numba_kernels.cuda
from numba_kernels.cuda.registry import specialisations
from numba_kernels.cuda.specialisation import Specialisation


def test_every_family_is_registered() -> None:
    known = {specialisation.name for specialisation in specialisations()}
    for module in pkgutil.walk_packages(numba_kernels.cuda.__path__, "numba_kernels.cuda."):
        if module.name == "numba_kernels.cuda.registry":
            continue
        family = getattr(importlib.import_module(module.name), "specialisations", None)
        if family is not None:
            missing = {specialisation.name for specialisation in family()} - known
            assert not missing, f"{module.name}: not in numba_kernels.cuda.registry: {sorted(missing)[:5]}"


def test_names_are_unique_and_tell_constants_apart() -> None:
    found = list(specialisations())
    assert len(found) > 100
    assert all(isinstance(each, Specialisation) for each in found)
    assert len({each.name for each in found}) == len(found)
    for each in found:
        assert each.name.replace("_", "").isalnum(), each.name
        assert 32 <= each.max_threads <= 1024
        assert each.min_capability >= 80
