"""Each kind of device's implementation of `runtime.ops` and of Tensor's operators, in one table.

A module is loaded when a device of its kind is first used: a GPU's kernels need numba-cuda, which is optional. On a cpu
numpy computes Tensor's operators.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from runtime.device.device import Device

BACKENDS = {"cpu": "runtime.backends.cpu", "cuda": "runtime.backends.cuda", "emulated": "runtime.backends.cuda"}
"""By the kind of a device. Each module has the same functions, the ones that `runtime.ops` calls after its checks."""


def backend_of(device: Device) -> Any:
    """The implementation for a device."""
    return _loaded(device.kind)


@functools.cache
def _loaded(kind: str) -> Any:
    return import_module(BACKENDS[kind])
