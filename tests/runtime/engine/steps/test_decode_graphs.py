"""Decode steps as graphs on emulated GPUs: the eager engine's answers, one launch a step, and what goes without."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from numba_kernels.numba_patches.patching import without_collection
from runtime.device import gpu as gpu_module
from runtime.device.gpu import Gpu
from runtime.device.kernel_cache import KernelList
from runtime.emulator.driver.emulated_driver import DryDriver
from runtime.emulator.execution.fault import FaultKind
from runtime.engine.engine import Engine
from runtime.engine.errors import RequestError
from runtime.engine.messages import EngineOutput, EngineRequest
from runtime.engine.steps import decode_graphs
from runtime.engine.steps.recorder_gpu import GpuRecorder
from runtime.errors import DeviceError, OutOfMemoryError
from runtime.kv.cache import KVCache
from tests.models.folders import WITH_EXPERTS, change_config, load_golden, write_model
from tests.runtime.device.emulated import new_gpu
from tests.runtime.engine.counted_gpu import counted_gpu
from tests.runtime.engine.fakes import Collected, collect, make_engine, request, run_to_end, said_by_engine
from tests.runtime.engine.graph_cases import check_equal, check_replay_equals_eager, new_engine, serve

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize(
    ("golden", "stored_as", "device", "settings"),
    [
        ("llama_default", "BF16", "emulated:sm_90a", {"num_blocks": 10, "preemption": "swap"}),
        pytest.param(
            "qwen3_tied_gqa4", "F32", "emulated:sm_80", {"num_blocks": 10, "preemption": "recompute"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("gpt2_gelu_new", "F32", "emulated:sm_80", {"overlap": "off"}, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe_odd", "BF16", "emulated:sm_90a", {"num_blocks": 10}, marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v2_odd", "BF16", "emulated:sm_90a", {"num_blocks": 10}, marks=pytest.mark.exhaustive),
        pytest.param(
            "qwen2_moe_shared", "F32", "emulated:sm_80", {"num_blocks": 10, "preemption": "swap"},
            marks=pytest.mark.exhaustive,
        ),
    ],
)  # fmt: skip
@pytest.mark.exhaustive
def test_replay_equals_eager(
    tmp_path: Path, golden: str, stored_as: str, device: str, settings: dict[str, Any]
) -> None:
    """In exact mode."""
    folder = write_model(tmp_path, load_golden(golden), stored_as)
    check_replay_equals_eager(folder, device, fewest_steps=15, fewest_bytes=1 << 20, **settings)
    Gpu.of(device).allocator.check_integrity()


OTHERS = [
    ("emulated:sm_90a", "qwen3_tied_gqa4"),
    ("emulated:sm_90a", "cohere_norms"),  # norms without a bias
    *((device, case) for device in ("emulated:sm_80", "emulated:sm_90a") for case in WITH_EXPERTS),
]


@pytest.mark.parametrize(
    ("device", "golden"),
    OTHERS,
)
@pytest.mark.exhaustive
def test_replay_gives_the_golden_tokens(tmp_path: Path, device: str, golden: str) -> None:
    """Without exactness, in a batch that has empty places: the tokens of Hugging Face transformers."""
    case = load_golden(golden)
    engine = new_engine(write_model(tmp_path, case), device, dtype="float32", max_num_batched_tokens=128)
    expected = case.greedy_ids["float32"][:12]
    for i in range(3):
        engine.add(request(f"r{i}", case.prompt_ids, eos=(), max_tokens=len(expected), ignore_eos=True))
    results = run_to_end(engine)
    assert engine.stats().num_graph_steps >= len(expected) - 4
    for i in range(3):
        assert results[f"r{i}"].token_ids() == expected
    engine.close()


@pytest.mark.exhaustive  # parts are compared in tests/numba_kernels/cuda/test_attention.py, graphs above
def test_sequences_that_are_cut_into_parts(tmp_path: Path) -> None:
    """Without exactness too: a full graph computes what the same batch computes eagerly, to the bit."""
    folder = write_model(tmp_path, load_golden("llama_default"), "BF16")
    change_config(folder, max_position_embeddings=256)
    answers = {}
    for mode in ("on", "off"):
        engine = new_engine(
            folder, "emulated:sm_90a", decode_graphs=mode, max_model_len=256, num_blocks=130, max_num_batched_tokens=640
        )
        for i, length in enumerate((5, 20, 130, 160)):
            prompt = [3 + (7 * i + 5 * batch_slot) % 40 for batch_slot in range(length)]
            engine.add(request(f"r{i}", prompt, max_tokens=8, ignore_eos=True, logprobs=1))
        answers[mode] = run_to_end(engine)
        assert engine.stats().num_graph_steps == (6 if mode == "on" else 0)
        engine.close()
    check_equal(answers["on"], answers["off"])


# One launch, one copy up, one copy down


PER_STEP = {
    "cuMemcpyHtoDAsync": 1, "cuGraphLaunch": 1, "cuMemcpyDtoHAsync": 1, "cuEventRecord": 1, "cuEventSynchronize": 1,
}  # fmt: skip


def calls_of_steps(engine: Engine, gpu: Gpu, calls: Counter[str], num_steps: int) -> list[dict[str, int]]:
    """What the driver is asked in each of the next steps; nothing is allocated in any. What earlier tests left is
    freed before them."""
    found = []
    gc.collect()
    before = gpu.allocator.statistics
    pinned = gpu.pinned.reserved_bytes
    with without_collection():
        for _ in range(num_steps):
            calls.clear()
            engine.step()
            found.append(dict(calls))
    assert gpu.allocator.statistics == before, "a step allocates"
    assert gpu.pinned.reserved_bytes == pinned
    return found


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_step_is_one_launch_one_copy_up_one_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: str
) -> None:
    """Also in steps in which sequences get blocks, with penalties, and with every other draw that graphs hold."""
    gpu, calls = counted_gpu()
    monkeypatch.setitem(gpu_module._opened, gpu.device.type, gpu)
    engine = new_engine(write_model(tmp_path, load_golden("llama_default")), gpu.device.type, overlap=overlap)
    for i, params in enumerate([{}, {"temperature": 0.7, "top_k": 5, "seed": 1}, {"frequency_penalty": 0.2}]):
        engine.add(request(f"r{i}", range(3, 9 + i), max_tokens=40, ignore_eos=True, **params))
    for _ in range(5):
        engine.step()
    assert calls_of_steps(engine, gpu, calls, 20) == [PER_STEP] * 20
    run_to_end(engine)
    engine.close()


def test_a_closed_engine_is_freed_with_its_last_reference(tmp_path: Path) -> None:
    """No collection of cycles is needed for its pages and its weights."""
    engine = new_engine(write_model(tmp_path, load_golden("llama_default")), "emulated:sm_90a")
    engine.add(request("r0", range(3, 9), max_tokens=12, ignore_eos=True))
    run_to_end(engine)
    engine.close()
    executor = weakref.ref(engine.executor)
    gc.collect()
    with without_collection():
        assert executor() is not None
        del engine
        assert executor() is None


def dry_gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[Gpu, Counter[str]]:
    """A device that does nothing, whose draws are all token 0: only the host's part runs. And its calls."""
    gpu, calls = counted_gpu(api=DryDriver("sm_90a"), index=0)
    gpu.kernel_cache = KernelList()
    monkeypatch.setitem(gpu_module._opened, gpu.device.type, gpu)
    return gpu, calls


def test_batches_of_1_to_256_are_one_launch_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, calls = dry_gpu(monkeypatch)
    engine = new_engine(
        write_model(tmp_path, load_golden("qwen3_tied_gqa4")), gpu.device.type, num_blocks=256 * 8, max_num_seqs=256,
        max_num_batched_tokens=2048,
    )  # fmt: skip
    for count in (1, 2, 3, 5, 8, 9, 16, 31, 64, 100, 256):
        for i in range(count):
            engine.add(request(f"r{i}", range(3, 5 + i % 9), max_tokens=20, ignore_eos=True))
        for _ in range(5):
            engine.step()
        assert calls_of_steps(engine, gpu, calls, 12) == [PER_STEP] * 12, count
        run_to_end(engine)
    assert engine.stats().num_decode_graphs >= 9
    engine.close()


def test_an_engine_at_rest_records_what_the_last_step_was_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, _ = dry_gpu(monkeypatch)
    engine = new_engine(write_model(tmp_path, load_golden("llama_default")), gpu.device.type)
    for count in (1, 2):
        for i in range(count):
            engine.add(request(f"r{i}", range(3, 9), max_tokens=2, ignore_eos=True))
        while engine.has_work:
            assert engine.stats().num_decode_graphs == count - 1
            engine.rest()  # not yet
            engine.step()
        engine.rest()
        assert engine.stats().num_decode_graphs == count
    assert engine.stats().num_graph_steps == 0
    engine.close()


# Steps that start before the one in front of them is over


def counted_overlaps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step that was planned while another ran, whether it started at once."""
    overlaps: list[bool] = []
    overlap = engine.steps.overlap

    def noted(*arguments: Any) -> bool:
        overlaps.append(overlap(*arguments))
        return overlaps[-1]

    monkeypatch.setattr(engine.steps, "overlap", noted)
    return overlaps


def plain_requests(count: int, vocab_size: int) -> list[EngineRequest]:
    """Greedy and drawn, most of which end at a stop id."""
    rng = random.Random(5)
    made = []
    for i in range(count):
        prompt = [rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, 12))]
        params: dict[str, Any] = {"max_tokens": rng.randrange(16, 34)}
        if i % 3:
            params |= {"temperature": 0.9, "seed": i, "stop_token_ids": list(range(3, vocab_size, 30))}
        made.append(request(f"r{i}", prompt, eos=(), **params))
    return made


@pytest.mark.exhaustive
def test_steps_that_lead_equal_steps_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences end at stop ids, are cancelled and preempted while the next step computes them already."""
    folder = write_model(tmp_path, load_golden("qwen3_tied_gqa4"))
    settings: dict[str, Any] = {"num_blocks": 11, "preemption": "swap", "swap_space_bytes": 1 << 16, "exact": True}
    engine = new_engine(folder, "emulated:sm_80", dtype="float32", **settings)
    overlaps = counted_overlaps(engine, monkeypatch)
    requests = plain_requests(12, engine.info.vocab_size)
    ours = serve(engine, requests, cancelled="r6")
    assert sum(overlaps) > 10
    assert not all(overlaps)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_swaps > 0
    engine.close()
    eager = new_engine(folder, "emulated:sm_80", dtype="float32", decode_graphs="off", overlap="off", **settings)
    theirs = serve(eager, requests, cancelled="r6")
    tokens, expected = ours.pop("r6").token_ids(), theirs.pop("r6").token_ids()
    shorter = min(len(tokens), len(expected))
    assert tokens[:shorter] == expected[:shorter]
    check_equal(ours, theirs)
    assert {each.finish_reason() for each in ours.values()} == {"stop", "length"}
    Gpu.of("emulated:sm_80").allocator.check_integrity()


@pytest.mark.exhaustive
def test_a_failed_draw_does_not_reach_the_step_that_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of one sequence is spoilt: its draw is no id, and the next step takes it as input."""
    engine = new_engine(write_model(tmp_path, load_golden("llama_default")), "emulated:sm_80", num_blocks=30)
    overlaps = counted_overlaps(engine, monkeypatch)
    for i in range(3):
        engine.add(request(f"r{i}", range(3 + i, 12 + i), max_tokens=12, ignore_eos=True))
    results: dict[str, Collected] = {}
    for _ in range(5):
        collect(engine.step(), results)
    assert overlaps[-1]
    block = engine.requests["r1"].sequences[0].blocks[0][0]
    keys, _ = engine.executor.kv_cache.layer(0)
    page_bytes = engine.executor.kv_cache.spec.planes[0][0].size_bytes
    Gpu.of("emulated:sm_80").fill(keys.address + block * page_bytes, 0xFF, page_bytes)
    run_to_end(engine, results)
    assert [results[f"r{i}"].finish_reason() for i in range(3)] == ["length", "error", "length"]
    assert "NaN" in (results["r1"].outputs[-1].error or "")
    assert engine.stats().num_graph_steps > 3
    engine.close()


@pytest.mark.exhaustive
def test_who_arrives_is_not_kept_waiting_by_a_step_that_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes while a step runs takes part in the next that starts."""
    engine = new_engine(write_model(tmp_path, load_golden("llama_default")), "emulated:sm_80")
    overlaps = counted_overlaps(engine, monkeypatch)
    engine.add(request("old", range(3, 9), max_tokens=30, ignore_eos=True))
    for _ in range(5):
        engine.step()
    assert overlaps[-1]

    def arrive() -> list[EngineOutput]:
        if "new" not in engine.requests:
            engine.add(request("new", range(5, 9), max_tokens=2, ignore_eos=True))
        return []

    engine.step(arrive)
    assert not overlaps[-1]
    assert [chunk.sequence.request.request_id for chunk in engine.steps.open[-1].step.chunks] == ["old", "new"]
    run_to_end(engine)
    engine.close()


# What goes without


def test_there_is_no_other_mode() -> None:
    with pytest.raises(RequestError, match="decode_graphs"):
        make_engine(decode_graphs="perhaps")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "num_steps"),
    [
        ({}, 18),
        ({"min_tokens": 6, "stop_token_ids": [5]}, 13),  # as soon as they are drawn
        ({"logit_bias": {4: 1.0}}, 0),
        ({"allowed_token_ids": [0, 4]}, 0),
        ({"frequency_penalty": 0.5}, 18),
        ({"repetition_penalty": 1.2}, 6),  # until it counts too many
        ({"logprobs": 1}, 18),
    ],
)
def test_what_graphs_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], num_steps: int
) -> None:
    """Of 19 decodes of one request: the first that might is eager, as its graph is missing."""
    gpu, _ = dry_gpu(monkeypatch)
    monkeypatch.setattr(decode_graphs, "MOST_LISTED", 21 if "repetition_penalty" not in params else 13)
    engine = new_engine(write_model(tmp_path, load_golden("llama_default")), gpu.device.type)
    engine.add(request("x", range(3, 9), max_tokens=20, ignore_eos=True, **params))
    run_to_end(engine)
    assert engine.stats().num_graph_steps == num_steps
    engine.close()


def test_off_means_eager(tmp_path: Path) -> None:
    engine = new_engine(write_model(tmp_path, load_golden("llama_default")), "emulated:sm_80", decode_graphs="off")
    assert engine.executor.graphs is None
    assert engine.stats().num_decode_graphs == 0


def take_memory(gpu: Gpu) -> list[int]:
    """Allocations that leave room for kernels' variables, but for no segment."""
    taken: list[int] = []
    while (size_bytes := gpu.context.call("cuMemGetInfo")[0] - (1 << 20)) > 0:
        while True:
            try:
                taken.append(gpu.context.call("cuMemAlloc", size_bytes))
                break
            except OutOfMemoryError:  # free memory lies in pieces
                size_bytes //= 2
    return taken


@pytest.mark.exhaustive
def test_without_memory_for_a_graph_steps_stay_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = new_gpu(index=1, memory_bytes=256 << 20)
    monkeypatch.setitem(gpu_module._opened, gpu.device.type, gpu)
    engine = new_engine(write_model(tmp_path, load_golden("llama_default")), gpu.device.type, num_blocks=24)
    with monkeypatch.context() as without_recording:
        without_recording.setattr(engine.executor, "record", lambda: None)
        engine.add(request("warm-up", range(3, 9), max_tokens=2, ignore_eos=True))
        run_to_end(engine)
    gpu.allocator.trim()
    taken = take_memory(gpu)
    for i in range(3):
        engine.add(request(f"r{i}", range(3, 9 + i), max_tokens=5 + i, ignore_eos=True))
    with caplog.at_level(logging.WARNING, "xserv.engine"):
        results = run_to_end(engine)
    for address in taken:
        gpu.context.call("cuMemFree", address)
    warnings = [each for each in said_by_engine(caplog) if "recorded steps" not in each]  # those with prompts
    assert len(warnings) == 1
    assert "no more decode graphs: the bytes for one of 1 sequences are not to be had" in warnings[0]
    assert {name: len(each.token_ids()) for name, each in results.items()} == {"r0": 5, "r1": 6, "r2": 7}
    assert engine.stats().num_graph_steps == 0
    gpu.allocator.check_integrity()


@pytest.mark.exhaustive
def test_a_model_that_cannot_be_recorded_runs_eagerly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = new_engine(write_model(tmp_path, load_golden("llama_default")), "emulated:sm_80")
    model: Any = engine.executor.model
    forward = model.forward

    def waits(batch: Any, kv_cache: KVCache) -> Any:
        Gpu.of(model.device).stream.synchronize()
        return forward(batch, kv_cache)

    model.forward = waits
    engine.add(request("x", range(3, 9), max_tokens=6, ignore_eos=True))
    with caplog.at_level(logging.WARNING, "xserv.engine"):
        results = run_to_end(engine)
    assert len(results["x"].token_ids()) == 6
    assert "cannot be recorded" in caplog.text
    assert (engine.stats().num_graph_steps, engine.stats().num_failed_graphs) == (0, 2)


def test_a_recording_that_failed_is_tried_once_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = new_engine(write_model(tmp_path, load_golden("llama_default")), "emulated:sm_80")
    model: Any = engine.executor.model
    forward, failures = model.forward, [True]

    def waits_once(batch: Any, kv_cache: KVCache) -> Any:
        gpu = Gpu.of(model.device)
        if gpu.stream_is_captured and failures:
            failures.pop()
            gpu.stream.synchronize()
        return forward(batch, kv_cache)

    model.forward = waits_once
    engine.add(request("x", range(3, 9), max_tokens=6, ignore_eos=True))
    with caplog.at_level(logging.WARNING, "xserv.engine"):
        results = run_to_end(engine)
    assert len(results["x"].token_ids()) == 6
    assert not failures
    assert not said_by_engine(caplog)
    stats = engine.stats()
    assert stats.num_failed_graphs == 1
    assert stats.num_graph_steps > 0


def test_nothing_is_collected_while_a_step_is_recorded(tmp_path: Path) -> None:
    engine = new_engine(write_model(tmp_path, load_golden("llama_default")), "emulated:sm_80")
    model: Any = engine.executor.model
    forward = model.forward

    def looks(batch: Any, kv_cache: KVCache) -> Any:
        assert gc.isenabled() != Gpu.of(model.device).stream_is_captured
        return forward(batch, kv_cache)

    model.forward = looks
    engine.add(request("x", range(3, 9), max_tokens=6, ignore_eos=True))
    run_to_end(engine)
    assert engine.stats().num_graph_steps > 0
    assert gc.isenabled()


@pytest.mark.planted
def test_a_replay_that_does_not_wait_for_the_blocks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = new_gpu(index=1)
    fault = gpu.driver.fault  # only emulated drivers find it
    monkeypatch.setitem(gpu_module._opened, gpu.device.type, gpu)
    engine = new_engine(
        write_model(tmp_path, load_golden("llama_default")), gpu.device.type, num_blocks=14, preemption="swap",
        swap_space_bytes=1 << 16,
    )  # fmt: skip
    monkeypatch.setattr(KVCache, "wait_for_arrivals", lambda kv_cache: None)
    for i in range(5):
        engine.add(request(f"r{i}", range(3 + i, 15 + i), max_tokens=30, ignore_eos=True))

    def run() -> None:
        while engine.has_work:
            engine.step()
        gpu.synchronize()

    with pytest.raises(DeviceError, match="missing event between streams"):
        run()
    assert getattr(fault(), "kind", None) is FaultKind.MISSING_EVENT


def test_sizes() -> None:
    batch_sizes, sequence_lengths = GpuRecorder.batch_sizes, GpuRecorder.sequence_lengths
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(8) == [1, 2, 4, 8]
    assert batch_sizes(28) == [1, 2, 4, 8, 16, 24, 28]
    assert batch_sizes(256)[-2:] == [248, 256]
    assert sequence_lengths(64, exact=False) == [64]
    assert sequence_lengths(5000, exact=False) == [128, 5000]
    assert sequence_lengths(5000, exact=True) == [5000]
