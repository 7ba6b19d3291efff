"""An engine's process whose ranks fail: every open request ends soon, the engine comes back, nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from runtime.engine.process.child import Supervision
from runtime.engine.process.process_client import ProcessEngineClient
from runtime.own_packages import python_module
from tests.models.folders import load_golden, write_model
from tests.runtime.engine.process.test_process_faults import Sink, is_gone, request
from tests.waiting import wait_until

pytestmark = pytest.mark.exhaustive

MOST_S = 5.0
EMULATED = pytest.param("emulated:sm_90a", marks=pytest.mark.emulator)
HANG_S = {"cpu": 10.0, "emulated:sm_90a": 60.0}  # which is to be longer than compiling a kernel
SPLITS = {"two ranks": (2, 1), "two stages": (1, 2), "two stages of two ranks": (2, 2)}


def client_of(
    folder: Path, device: str, split: str, monkeypatch: pytest.MonkeyPatch, fault: str = ""
) -> ProcessEngineClient:
    """Its ranks have the fault, those of the engine that is started next have not."""
    monkeypatch.setenv("XSERV_TEST_FAULT_FILE", str(folder / "fault"))
    model = write_model(folder, load_golden("qwen2_tied"))
    if fault:
        (folder / "fault").write_text(fault)
    ranks, stages = SPLITS[split]
    return ProcessEngineClient(
        str(model), device=device, max_model_len=64, num_blocks=16, seed=0, tensor_parallel_size=ranks,
        pipeline_parallel_size=stages, decode_graphs="off" if fault else "auto",  # recorded steps call no layer
        supervision=Supervision(
            first_delay_s=0.05, healthy_s=0.0, hang_timeout_s=HANG_S[device],
            command=python_module("tests.runtime.engine.ranks.faulty_engine"),
        ),
    )  # fmt: skip


def processes_of(client: ProcessEngineClient) -> list[int]:
    """The engine's, and those of its ranks."""
    assert client.pid is not None
    return [client.pid, *(child.pid for child in psutil.Process(client.pid).children(recursive=True))]


def segments() -> set[str]:
    """Shared memory with a name, of everybody's."""
    return set(os.listdir("/dev/shm"))


def assert_whole(client: ProcessEngineClient) -> list[int]:
    sink = Sink()
    client.submit(request("alive", [5, 6, 7], max_tokens=4, temperature=0.0, ignore_eos=True), sink)
    assert sink.reasons() == ["length"]
    return sink.token_ids()


@pytest.mark.parametrize("device", ["cpu", EMULATED])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped(
    device: str, split: str, kind: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = segments()
    client = client_of(tmp_path, device, split, monkeypatch)
    try:
        expected = assert_whole(client)  # and its kernels are compiled
        pids = processes_of(client)
        assert len(pids) == SPLITS[split][0] * SPLITS[split][1]
        sinks = [Sink() for _ in range(3)]
        for number, sink in enumerate(sinks):
            client.submit(request(str(number), [5, 6, number], max_tokens=60, ignore_eos=True), sink)
        assert sinks[0].started.wait(60)
        os.kill(pids[-1], kind)
        begun = time.monotonic()
        reasons = {reason for sink in sinks for reason in sink.reasons()}
        assert time.monotonic() - begun < MOST_S + (HANG_S[device] if kind is signal.SIGSTOP else 0.0)
        assert reasons <= {"error", "length"}  # the last may have had all of its tokens
        wait_until(lambda: client.pid not in (None, pids[0]) and client.state == "ready")
        assert assert_whole(client) == expected
        assert all(is_gone(pid) for pid in pids)
    finally:
        client.close()
    assert segments() <= before


@pytest.mark.parametrize("device", ["cpu", EMULATED])
@pytest.mark.parametrize("split", ["two ranks", "two stages"])
@pytest.mark.parametrize("fault", ["raises", "memory", "exits"])
def test_a_rank_that_fails_in_a_layer(
    device: str, split: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    before = segments()
    client = client_of(tmp_path, device, split, monkeypatch, fault)
    try:
        pids = processes_of(client)
        sinks = [Sink() for _ in range(3)]
        for number, sink in enumerate(sinks):
            client.submit(request(str(number), [5, 6, number], max_tokens=60, ignore_eos=True), sink)
        assert {reason for sink in sinks for reason in sink.reasons()} == {"error"}
        assert all(sink.outputs[-1].engine_died for sink in sinks)
        named = {"raises": "no more paper", "memory": "no memory for 77 bytes", "exits": "rank 1"}
        assert named[fault] in caplog.text
        wait_until(lambda: client.pid not in (None, pids[0]) and client.state == "ready")
        assert len(assert_whole(client)) == 4
        assert all(is_gone(pid) for pid in pids)
    finally:
        client.close()
    assert segments() <= before
