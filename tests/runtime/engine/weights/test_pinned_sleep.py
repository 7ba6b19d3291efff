"""Weights that sleep in pinned memory: a GPU that wakes has the same numbers, and does not read the files for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.device.gpu import Gpu
from runtime.device.host_copies import HostCopies
from runtime.device.pinned import FileMapping
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.engine.weights.commands import FolderWeights, Sleep, WakeUp
from runtime.errors import OutOfMemoryError
from tests.runtime.engine.weights.two_models import TIMEOUT_S, Asked, opened, prompt_of, write_pair

CASE = "qwen3_odd"
DEVICE = "emulated:sm_90a"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return write_pair(tmp_path, CASE, "BF16")


@pytest.fixture
def client(folders: tuple[Path, Path]) -> Iterator[ThreadEngineClient]:
    made = opened(folders[0], device=DEVICE, exact=True, decode_graphs="off")
    yield made
    made.close()


@pytest.mark.exhaustive
@pytest.mark.emulator
def test_it_wakes_with_the_same_bits(
    client: ThreadEngineClient, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu.of(DEVICE)
    executor = client._engine.executor

    def answer(name: str) -> list[tuple[int, float]]:
        return Asked(client, name, prompt_of(CASE), max_tokens=4).answer().tokens

    def order(command: Sleep | WakeUp) -> None:
        client.order(command).result(TIMEOUT_S)

    before = answer("before")
    copies, weight_bytes = executor.model.host_copies, executor.model.weight_bytes
    assert copies is not None
    assert copies.size_bytes == 0
    gpu.allocate(64 << 20).release()
    before_sleep = gpu.allocator.statistics
    assert before_sleep.reserved_bytes >= 64 << 20

    order(Sleep(1))
    asleep = gpu.allocator.statistics
    assert asleep.allocated_bytes < before_sleep.allocated_bytes - weight_bytes
    assert asleep.reserved_bytes <= before_sleep.reserved_bytes - (64 << 20)  # other processes may have it
    kept = copies.size_bytes
    assert 0.9 * weight_bytes < kept <= weight_bytes
    with monkeypatch.context() as patch:
        patch.setattr(FileMapping, "read_into", lambda *_: pytest.fail("a file was read"))
        order(WakeUp())
    assert answer("woken") == before

    reserved = gpu.pinned.reserved_bytes
    for turn in range(2):  # what was copied is not copied again
        order(Sleep(1))
        order(WakeUp())
        assert answer(f"again {turn}") == before
    assert (copies.size_bytes, gpu.pinned.reserved_bytes) == (kept, reserved)

    order(Sleep(2))
    assert copies.size_bytes == 0
    order(WakeUp())
    assert answer("from the files") == before

    with monkeypatch.context() as patch:

        def make(self: HostCopies) -> None:
            raise OutOfMemoryError("no more can be pinned")

        patch.setattr(HostCopies, "make", make)
        order(Sleep(1))
        order(WakeUp())
    assert copies.size_bytes == 0
    assert answer("without copies") == before

    client.update_weights(FolderWeights(str(folders[1])), "new", "wait")
    new = answer("new")
    assert new != before
    order(Sleep(1))
    order(WakeUp())
    assert answer("new, woken") == new
    gpu.pinned.check_integrity()
