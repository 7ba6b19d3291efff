"""Forward passes with prompts as graphs on emulated GPUs: the eager engine's answers to the bit, how many are kept, and
what goes without."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.device import gpu as gpu_module
from runtime.device.gpu import Gpu
from runtime.engine.engine import Engine
from runtime.engine.messages import EngineStats
from runtime.engine.steps import forwards
from runtime.engine.steps.forwards import ForwardRecordings
from runtime.engine.steps.recorder_gpu import GpuRecorder
from runtime.errors import OutOfMemoryError
from runtime.kv.cache import KVCache
from tests.models.folders import change_config, load_golden, write_model
from tests.runtime.engine.counted_gpu import counted_gpu
from tests.runtime.engine.fakes import Collected, collect, request, run_to_end, said_by_engine
from tests.runtime.engine.graph_cases import KINDS, check_equal, mixed_requests, new_engine, serve

pytestmark = pytest.mark.emulator


def forwards_of(engine: Engine) -> ForwardRecordings:
    graphs = engine.executor.graphs  # type: ignore[attr-defined]
    found = graphs.forwards
    assert isinstance(found, ForwardRecordings)
    return found


@pytest.mark.parametrize(
    ("golden", "stored_as", "device", "max_tokens", "settings"),
    [
        pytest.param(  # the next test holds replays against eager passes each time
            "llama_default", "BF16", "emulated:sm_90a", 13, {"num_blocks": 10, "preemption": "swap"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(  # windows
            "gemma2_odd", "F32", "emulated:sm_90a", 18, {"num_blocks": 24, "preemption": "recompute"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "qwen3_tied_gqa4", "F32", "emulated:sm_80", 8, {"overlap": "off", "exact": False},
            marks=pytest.mark.exhaustive,
        ),
    ],
)  # fmt: skip
def test_replay_equals_eager(
    tmp_path: Path, golden: str, stored_as: str, device: str, max_tokens: int, settings: dict[str, Any]
) -> None:
    """To the bit, with every kind of draw, log probabilities of prompts, preemption, and other passes in between."""
    folder = write_model(tmp_path, load_golden(golden), stored_as)
    answers: dict[str, dict[str, Collected]] = {}
    for mode in ("on", "off"):
        engine = new_engine(
            folder, device, decode_graphs=mode, **{"swap_space_bytes": 1 << 16, "exact": True, **settings}
        )
        requests = [
            request(f"{each.request_id}.{turn}", each.prompt_token_ids, eos=(), max_tokens=max_tokens, **KINDS[i])
            for turn in range(2)
            for i, each in enumerate(mixed_requests(len(KINDS), engine.info.vocab_size))
        ]
        results = serve(engine, requests[: len(requests) // 2])
        logits = engine.logits([3, 5, 8])
        answers[mode] = results | serve(engine, requests[len(requests) // 2 :])
        assert (engine.logits([3, 5, 8]) == logits).all(), "a pass aside is disturbed by recordings"
        stats = engine.stats()
        assert (stats.num_forward_steps > 10) == (mode == "on")
        assert stats.num_recorded_forwards <= stats.num_forward_steps
        assert stats.num_failed_graphs == 0
        if mode == "on" and "preemption" in settings:
            assert stats.num_preemptions > 0
        engine.close()
    check_equal(answers["on"], answers["off"])
    Gpu.of(device).allocator.check_integrity()


@pytest.mark.exhaustive
def test_a_shape_is_recorded_when_it_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks beside decodes; of many shapes the latest are kept, and all memory is given back."""
    monkeypatch.setattr(GpuRecorder, "most_kept", 3)
    folder = write_model(tmp_path, load_golden("llama_default"))
    change_config(folder, max_position_embeddings=300)
    answers = {}
    for mode in ("on", "off"):
        engine = new_engine(
            folder, "emulated:sm_80", decode_graphs=mode, max_num_batched_tokens=6, max_model_len=300, num_blocks=90,
            enable_prefix_caching=False,
        )  # fmt: skip
        for i in range(2):
            engine.add(request(f"r{i}", range(3 + i, 9), max_tokens=60, ignore_eos=True))
        for _ in range(6):
            engine.step()
        before = engine.stats()
        engine.add(request("long", [3 + batch_slot % 40 for batch_slot in range(200)], max_tokens=2))
        answers[mode] = run_to_end(engine)
        if mode == "on":
            chunks = (200 // 4) - 1  # beside two decodes; the last one draws
            assert replayed(before, engine.stats()) == chunks - 2, "the first up to 128 tokens, and beyond"
            assert engine.stats().num_recorded_forwards == 2
            held = engine.stats().decode_graph_bytes
            for length in (2, 3, 4, 5, 6) * 2:
                engine.add(request(f"p{length}", [20 + length] * length, max_tokens=1))
                run_to_end(engine)
            assert engine.stats().num_recorded_forwards == 3
            assert engine.stats().decode_graph_bytes == held, "recordings share their memory"
        engine.close()
        assert engine.stats().decode_graph_bytes == 0
    check_equal(answers["on"], answers["off"])


def replayed(before: EngineStats, after: EngineStats) -> int:
    return after.num_forward_steps - before.num_forward_steps


def prompts_of_one_shape(engine: Engine, count: int, length: int = 6) -> dict[str, Collected]:
    """One after another, a token each."""
    results: dict[str, Collected] = {}
    for i in range(count):
        engine.add(request(f"p{i}", [3 + (i + 5 * batch_slot) % 40 for batch_slot in range(length)], max_tokens=1))
        while engine.has_work:
            collect(engine.step(), results)
    return results


@pytest.mark.parametrize(("most", "count"), [(0.0, 0), (1e9, 1)])
def test_a_shape_that_keeps_the_gpu_busy_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: float, count: int
) -> None:
    """What a GPU took for the pass that was launched from Python decides; an emulated one has to be told to look."""
    monkeypatch.setattr(forwards, "WAITING", most)
    engine = new_engine(
        write_model(tmp_path, load_golden("llama_default")), "emulated:sm_80", enable_prefix_caching=False
    )
    forwards_of(engine).looks_at_times = True
    answers = prompts_of_one_shape(engine, 4)
    assert (engine.stats().num_recorded_forwards, engine.stats().num_forward_steps) == (count, 3 * count)
    assert all(len(answer.token_ids()) == 1 for answer in answers.values())
    engine.close()


def test_steps_that_try_proposals_are_recorded_however_long_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwards, "WAITING", 0.0)
    engine = new_engine(
        write_model(tmp_path, load_golden("llama_default")), "emulated:sm_80", enable_prefix_caching=False
    )
    forwards_of(engine).looks_at_times = True
    assert engine.speculator is not None
    engine.speculator.tries_all()
    asked, answer = request("x", range(3, 9), max_tokens=40, ignore_eos=True), list[int]()
    for _ in range(2):
        engine.add(msgspec.structs.replace(asked, prediction=answer))
        answer = run_to_end(engine)["x"].token_ids()
    assert engine.stats().num_recorded_forwards > 0
    assert engine.stats().num_forward_steps > 1
    engine.close()


def test_a_replayed_step_is_one_launch_with_its_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, calls = counted_gpu()
    monkeypatch.setitem(gpu_module._opened, gpu.device.type, gpu)
    engine = new_engine(
        write_model(tmp_path, load_golden("llama_default")), gpu.device.type, enable_prefix_caching=False
    )
    prompts_of_one_shape(engine, 3)
    before = gpu.allocator.statistics.reserved_bytes
    calls.clear()
    prompts_of_one_shape(engine, 2)
    assert calls["cuGraphLaunch"] == 2
    assert calls["cuLaunchKernelEx"] == 0, "the draws are in the recordings"
    assert gpu.allocator.statistics.reserved_bytes == before
    engine.close()


def test_a_replaying_step_records_nothing(tmp_path: Path) -> None:
    engine = new_engine(
        write_model(tmp_path, load_golden("llama_default")), "emulated:sm_80", enable_prefix_caching=False
    )
    engine.assembler._mode = "replay"
    prompts_of_one_shape(engine, 3)
    assert engine.stats().num_recorded_forwards == 0
    engine.assembler._mode = "record"
    prompts_of_one_shape(engine, 2)
    engine.assembler._mode = "replay"
    prompts_of_one_shape(engine, 2)
    stats = engine.stats()
    assert (stats.num_recorded_forwards, stats.num_forward_steps) == (1, 3)
    engine.close()


@pytest.mark.parametrize(("failures", "steps"), [(1, 3), (99, 0)])
def test_a_recording_that_fails_twice_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, failures: int, steps: int
) -> None:
    """The step runs eagerly, and decodes keep their graphs."""
    engine = new_engine(
        write_model(tmp_path, load_golden("llama_default")), "emulated:sm_80", enable_prefix_caching=False
    )
    model: Any = engine.executor.model  # type: ignore[attr-defined]
    forward, left = model.forward, [failures]

    def waits(batch: Any, kv_cache: KVCache) -> Any:
        gpu = Gpu.of(model.device)
        if gpu.stream_is_captured and batch.num_tokens > batch.num_seqs and left[0]:
            left[0] -= 1
            gpu.stream.synchronize()
        return forward(batch, kv_cache)

    model.forward = waits
    with caplog.at_level(logging.WARNING, "xserv.engine"):
        results = prompts_of_one_shape(engine, 5)
    assert all(len(each.token_ids()) == 1 for each in results.values())
    stats = engine.stats()
    assert stats.num_forward_steps == steps
    assert stats.num_failed_graphs == min(failures, 2)
    assert len(said_by_engine(caplog)) == (failures > 1)
    engine.add(request("x", range(3, 9), max_tokens=6, ignore_eos=True))
    run_to_end(engine)
    assert engine.stats().num_graph_steps > 0
    engine.close()


def test_without_memory_steps_stay_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = new_engine(
        write_model(tmp_path, load_golden("llama_default")), "emulated:sm_80", enable_prefix_caching=False
    )

    def full(*_: Any, **__: Any) -> Any:
        raise OutOfMemoryError("no room")

    monkeypatch.setattr(GpuRecorder, "record", full)
    with caplog.at_level(logging.WARNING, "xserv.engine"):
        results = prompts_of_one_shape(engine, 4)
    assert all(len(each.token_ids()) == 1 for each in results.values())
    (said,) = said_by_engine(caplog)
    assert "the memory of recorded steps is not to be had" in said
    assert engine.stats().num_forward_steps == 0
    engine.close()
