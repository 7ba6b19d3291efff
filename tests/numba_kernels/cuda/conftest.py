"""The device that GPU kernels are tested on: emulated, so that every machine runs them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from runtime.device.device import Device
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import DEFAULT_DEVICE


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """A device whose memory is whole, and all returned, when the test ends. `harness.both_archs` chooses others."""
    device = Gpu.of(Device.parse(getattr(request, "param", DEFAULT_DEVICE)))
    yield device
    device.synchronize()
    gc.collect()
    device.allocator.check_integrity()
