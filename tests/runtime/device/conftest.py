"""A device over the fake driver, whose cache of kernels is the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda.bindings import driver as bindings

from runtime.device.device import Device
from runtime.device.driver import Driver
from runtime.device.gpu import Gpu
from runtime.device.kernel_cache import KernelCache
from tests.runtime.device.fake_driver import FakeDriver


@pytest.fixture
def fake() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def fake_gpu(fake: FakeDriver, tmp_path: Path) -> Gpu:
    return Gpu(Device("cuda:0"), Driver(fake, bindings), kernel_cache=KernelCache(tmp_path))
