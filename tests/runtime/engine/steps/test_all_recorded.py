"""The decode steps of every model with a golden are recorded on a GPU. The device does nothing, so no kernel is
compiled; what the host sends or frees in a recording is refused as on hardware."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.device import gpu as gpu_module
from runtime.device.kernel_cache import KernelList
from runtime.emulator.driver.emulated_driver import DryDriver
from tests.models.folders import CASES, load_golden, write_model
from tests.runtime.engine.counted_gpu import counted_gpu
from tests.runtime.engine.fakes import request, run_to_end
from tests.runtime.engine.graph_cases import new_engine

pytestmark = pytest.mark.emulator


@pytest.fixture
def driver() -> Iterator[DryDriver]:
    """A device's driver. Caches keep the device; the terabyte of addresses that its memory has is given back."""
    made = DryDriver("sm_90a")
    yield made
    for device in made.devices:
        device.machine.close()


@pytest.mark.parametrize("golden", CASES)
def test_decode_steps_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: DryDriver, golden: str
) -> None:  # fmt: skip
    gpu, _ = counted_gpu(api=driver, index=0)
    gpu.kernel_cache = KernelList()
    monkeypatch.setitem(gpu_module._opened, gpu.device.type, gpu)
    engine = new_engine(write_model(tmp_path, load_golden(golden)), gpu.device.type, max_num_batched_tokens=128)
    engine.add(request("r", range(3, 9), eos=(), max_tokens=8, ignore_eos=True))
    run_to_end(engine)
    stats = engine.stats()
    engine.close()
    assert stats.num_failed_graphs == 0, "refused: see the warning in the log"
    assert stats.num_graph_steps >= 4
