"""What goes wrong in one rank ends all: open requests have an error soon, and no process is left."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from models.errors import ModelLoadError
from runtime.communicator import CommunicatorError
from runtime.device import device as device_module
from runtime.device import gpu as gpu_module
from runtime.device.driver import open_driver
from runtime.engine.engine import Engine
from runtime.engine.make_engine import build_engine
from runtime.engine.ranks import group
from runtime.engine.ranks.executor import ParallelExecutor
from runtime.engine.ranks.messages import EXIT_DRIVER_GONE, DropEncoded, Record, frame
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.steps.executor import ExecutorLostError
from runtime.own_packages import ROOT, python_module
from tests.models.folders import load_golden, write_model
from tests.runtime.engine.ranks.test_tensor_parallel import request_of, run

MOST_S = 30.0  # a second or two where the machine is not busy; whoever is not noticed is waited for longer
TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
STAGES = pytest.param(PIPELINE, marks=pytest.mark.exhaustive)
DEVICES = ["cpu", pytest.param("emulated:sm_90a", marks=[pytest.mark.emulator, pytest.mark.exhaustive])]


@pytest.fixture(autouse=True)
def own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is in this process: its driver, which a fault ends, is not the next test's."""
    opened = functools.cache(open_driver.__wrapped__)
    for module in (device_module, gpu_module):
        monkeypatch.setattr(module, "open_driver", opened)
    monkeypatch.setattr(gpu_module, "_opened", {})


def engine_with(
    fault: str, device: str, split: dict[str, int], folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Engine:
    """Two ranks, or stages, of which the second has the fault."""
    monkeypatch.setattr(group, "COMMAND", python_module("tests.runtime.engine.ranks.faulty_rank"))
    monkeypatch.setenv("XSERV_TEST_FAULT", fault)
    folder.mkdir(exist_ok=True)
    model = write_model(folder, load_golden("qwen2_tied"))
    return build_engine(
        model, device=device, max_model_len=64, num_blocks=16, seed=0, decode_graphs="off", **split, **settings,
    )  # fmt: skip


def pids_of(engine: Engine) -> list[int]:
    assert isinstance(engine.executor, ParallelExecutor)
    return engine.executor.ranks.pids


def assert_gone(pids: list[int]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("split", [TENSOR, STAGES], ids=str)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raises", "rank 1 failed: ArithmeticError: no more paper"),
        pytest.param("memory", "rank 1 failed: OutOfMemoryError: no memory for 77 bytes", marks=pytest.mark.exhaustive),
        pytest.param("exits", "rank 1 (has )?ended", marks=pytest.mark.exhaustive),
    ],
)
def test_a_fault_of_one_rank_is_everybodys_and_named(
    device: str, split: dict[str, int], fault: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(fault, device, split, tmp_path, monkeypatch)
    pids = pids_of(engine)
    try:
        engine.add(request_of("a", [5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True)))
        with pytest.raises(ExecutorLostError, match=words):  # noqa: PT012
            while True:
                begun = time.monotonic()  # of the step that fails: the first one compiles kernels
                engine.step()
        assert device != "cpu" or time.monotonic() - begun < MOST_S
    finally:
        engine.close()
    assert_gone(pids)


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", "emulated:sm_90a"])
@pytest.mark.parametrize("split", [TENSOR, PIPELINE], ids=str)
def test_a_rank_may_come_late_but_must_come(
    device: str, split: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with("late", device, split, tmp_path, monkeypatch)
    try:
        engine.add(request_of("a", [5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True)))
        assert sum(len(output.new_token_ids) for output in run(engine)) == 3
    finally:
        engine.close()
    with pytest.raises(CommunicatorError, match="rank 1 ended before it was ready"):
        engine_with("unloadable", device, split, tmp_path / "other", monkeypatch)
    with pytest.raises(ModelLoadError, match=r"tensor 'model\.norm\.weight' is spoilt"):
        engine_with("misread", device, split, tmp_path / "other", monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("split", [TENSOR, PIPELINE], ids=str)
def test_a_slow_rank_is_waited_for(split: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with("slow", "cpu", split, tmp_path, monkeypatch)
    try:
        engine.add(request_of("a", [5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True)))
        assert sum(len(output.new_token_ids) for output in run(engine)) == 8
    finally:
        engine.close()


@pytest.mark.parametrize("split", [TENSOR, STAGES], ids=str)
def test_a_shard_that_is_cut_short_is_named(split: dict[str, int], tmp_path: Path) -> None:
    """And nothing is left of what was started."""
    folder = write_model(tmp_path, load_golden("qwen2_tied"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    children = _children()
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        build_engine(folder, device="cpu", max_model_len=64, num_blocks=16, seed=0, **split)
    assert _children() <= children


def _children() -> set[str]:
    """Processes of this one."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", "emulated:sm_90a"])
@pytest.mark.parametrize("split", [TENSOR, PIPELINE], ids=str)
def test_a_stopped_rank_is_ended_with_the_others(
    device: str, split: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it is stopped an engine's process finds by its hang timeout; here nobody waits for it any more."""
    engine = engine_with("", device, split, tmp_path, monkeypatch)
    pids = pids_of(engine)
    engine.add(request_of("a", [5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True)))
    engine.step()
    os.kill(pids[0], signal.SIGSTOP)
    begun = time.monotonic()
    engine.close()
    assert time.monotonic() - begun < MOST_S + group.END_S
    assert_gone(pids)


RANK = """
import socket, sys, time
from runtime.engine.ranks.messages import DropEncoded, Inbox, Record
inbox = Inbox(socket.socket(fileno=int(sys.argv[1])))
assert inbox.get() == Record()
assert inbox.get() == DropEncoded(7)
assert inbox.is_empty and inbox.get(0.0) is None
print("waits", flush=True)
assert inbox.get(60.0) == DropEncoded(8)
print("computes", flush=True)
time.sleep(60)
"""


def test_messages_come_in_order_and_the_process_ends_with_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE,
            cwd=ROOT,
        )  # fmt: skip
    try:
        with ours:
            ours.sendall(frame(Record()) + frame(DropEncoded(7)))
            assert process.stdout is not None
            assert process.stdout.readline() == b"waits\n"
            ours.sendall(frame(DropEncoded(8)))
            assert process.stdout.readline() == b"computes\n"
        assert process.wait(30) == EXIT_DRIVER_GONE
    finally:
        process.kill()
        process.communicate()
