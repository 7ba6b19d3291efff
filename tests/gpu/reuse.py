"""Tests that were written for emulated devices, run on the real one."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest


def on_hardware(test: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a test that takes the fixture `gpu` as it is here: its other parameters stay, its devices do not."""
    copy = types.FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    copy.__kwdefaults__, copy.__annotations__, copy.__doc__ = test.__kwdefaults__, test.__annotations__, test.__doc__
    marks = [mark for mark in getattr(test, "pytestmark", []) if not _chooses_devices(mark)]
    copy.pytestmark = [*marks, pytest.mark.gpu.mark]  # type: ignore[attr-defined]
    return copy


def _chooses_devices(mark: Any) -> bool:
    return mark.name == "parametrize" and mark.args[0] == "gpu"
