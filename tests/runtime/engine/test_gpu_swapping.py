"""Sequences swapped out and in, and blocks copied on write, between the kernels of an engine on an emulated GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.device import gpu as gpu_module
from runtime.device.gpu import Gpu
from runtime.emulator.execution.fault import FaultKind
from runtime.engine.engine import Engine
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineRequest
from runtime.errors import DeviceError
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor
from tests.models.folders import load_golden, write_model
from tests.runtime.device.emulated import new_gpu
from tests.runtime.engine.fakes import Collected, collect, request, run_to_end
from tests.runtime.engine.test_real_models import check_same

pytestmark = pytest.mark.emulator


@pytest.fixture
def fragile_gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A device that the test may break: nobody else gets it."""
    gpu = new_gpu(index=1)
    monkeypatch.setitem(gpu_module._opened, gpu.device.type, gpu)
    return gpu


def new_engine(folder: Path, device: str, *, num_blocks: int, swap_slots: int = 0) -> Engine:
    engine = build_engine(
        folder,
        device=device,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        block_size=8,
        num_blocks=num_blocks,
        preemption="swap" if swap_slots else "recompute",
        swap_space_bytes=swap_slots * 6144,
    )
    assert engine.limits.num_host_blocks == swap_slots
    return engine


def requests() -> list[EngineRequest]:
    """Four that need twelve blocks and more in the end, where there are ten; the first in two choices."""
    return [
        request(
            f"r{index}", [5 + (3 * index + place) % 40 for place in range(10 + index)], max_tokens=16, ignore_eos=True,
            temperature=0.0, n=2 if index == 0 else 1,
        )
        for index in range(4)
    ]  # fmt: skip


def test_swapped_sequences_answer_as_alone_on_the_cpu(tmp_path: Path) -> None:
    folder = write_model(tmp_path, load_golden("llama_default"))
    engine = new_engine(folder, "emulated:sm_90a", num_blocks=10, swap_slots=20)
    results: dict[str, Collected] = {}
    for each in requests():
        engine.add(each)
    while engine.has_work:
        collect(engine.step(), results)
        engine.check_invariants()
    counters, block_bytes = engine.executor.transfer.counters, engine.executor.kv_cache.spec.block_bytes[0]
    assert engine.scheduler.num_swaps > 0
    assert counters.in_bytes >= 2 * block_bytes
    assert counters.copied_bytes > 0
    assert counters.swap_bytes > 0
    lone = new_engine(folder, "cpu", num_blocks=20)
    for each in requests():
        lone.add(each)
        expected = run_to_end(lone)[each.request_id]
        for index in range(each.params.n):
            check_same(lone, each, results[each.request_id].token_ids(index), expected.token_ids(index))


@pytest.mark.planted
def test_kernels_that_do_not_wait_for_the_blocks_are_found(
    tmp_path: Path, fragile_gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, load_golden("llama_default"))
    engine = new_engine(folder, fragile_gpu.device.type, num_blocks=10, swap_slots=20)

    def without_waiting(kv_cache: KVCache, index: int) -> tuple[Tensor, ...]:
        return kv_cache.storages[kv_cache._places[index][1]]

    monkeypatch.setattr(KVCache, "layer", without_waiting)
    for each in requests():
        engine.add(each)

    def run() -> None:
        while engine.has_work:
            engine.step()
        fragile_gpu.synchronize()

    with pytest.raises(DeviceError, match="missing event between streams"):
        run()
    assert getattr(fragile_gpu.driver.fault(), "kind", None) is FaultKind.MISSING_EVENT
