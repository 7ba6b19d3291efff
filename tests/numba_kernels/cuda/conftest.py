"""The device that GPU kernels are tested on: emulated, so that every machine runs them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import DEFAULT_DEVICE
from tests.runtime.device.emulated import new_gpu

_gpus: dict[str, Gpu] = {}  # one of each architecture, for all tests until one of them breaks it


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """A device whose memory is whole, and all returned, when the test ends. `harness.both_archs` chooses others.

    A kernel's fault ends the device, as a real one's context; the next test then gets another.
    """
    name = getattr(request, "param", DEFAULT_DEVICE)
    device = _gpus.get(name) or _gpus.setdefault(name, new_gpu(name.partition(":")[2]))
    gc.freeze()  # what there is stays: the collection below then looks at what the test has made
    before = device.allocator.statistics.requested_bytes
    yield device
    try:
        device.synchronize()
    finally:
        if device.driver.fault() is not None:
            del _gpus[name]
    gc.collect()
    device.allocator.check_integrity()
    assert device.allocator.statistics.requested_bytes <= before, "the test has left memory in use"


@pytest.fixture(scope="session", autouse=True)
def everything_is_collected_at_the_end() -> Iterator[None]:
    """What `gpu` froze is let go while the interpreter is whole."""
    yield
    gc.unfreeze()
    _gpus.clear()
    gc.collect()
