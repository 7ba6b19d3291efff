"""The real device. Where there is none, every test here says why it is skipped."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from runtime.device.device import Device
from runtime.device.errors import DriverTooOldError, InvalidDeviceError, NoDriverError
from runtime.device.gpu import Gpu

DEVICE = "cuda:0"


@pytest.fixture(scope="session")
def hardware() -> str:
    """The device's name; skips where it is not to be had."""
    try:
        Device(DEVICE).require()
    except (NoDriverError, DriverTooOldError, InvalidDeviceError) as error:
        pytest.skip(f"needs a CUDA device: {' '.join(str(error).split())}")
    return DEVICE


@pytest.fixture
def gpu(hardware: str) -> Iterator[Gpu]:
    """The device, whose memory is whole and all returned when the test ends."""
    device = Gpu.of(hardware)
    gc.collect()
    before = device.allocator.statistics.requested_bytes
    yield device
    device.synchronize()
    gc.collect()
    device.allocator.check_integrity()
    assert device.allocator.statistics.requested_bytes <= before, "the test has left memory in use"
