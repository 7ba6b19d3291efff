"""The real device. Where there is none, every test here says why it is skipped.

XSERV_TEST_DEVICE=emulated:sm_90a python -m pytest tests/gpu    # tries the tests themselves, without a GPU
XSERV_TEST_CASES=first ...                                      # only the first case of each test
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from numba_kernels.cuda.gemm.hopper import ARCH as HOPPER
from runtime.device.device import Device
from runtime.device.errors import DriverTooOldError, InvalidDeviceError, NoDriverError
from runtime.device.gpu import Gpu

DEVICE = os.environ.get("XSERV_TEST_DEVICE", "cuda:0")
IS_FIRST_ONLY = os.environ.get("XSERV_TEST_CASES", "all") == "first"
FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what `XSERV_TEST_CASES` says, of this folder's tests alone."""
    if not IS_FIRST_ONLY:
        return
    seen: set[str] = set()
    kept, left_out = [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        (left_out if FOLDER in item.path.parents and name in seen else kept).append(item)
        seen.add(name)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


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


@pytest.fixture
def on_hopper(gpu: Gpu) -> None:
    if gpu.arch != HOPPER:
        pytest.skip(f"needs {HOPPER}; {gpu.device} is {gpu.arch}")
