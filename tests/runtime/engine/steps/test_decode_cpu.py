"""Decode steps recorded on the cpu: the eager engine's answers to the bit, and errors that come out of a replay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.engine.engine import Engine
from runtime.engine.steps.forwards import ForwardRecordings
from runtime.engine.steps.recorder_cpu import CpuRecorder
from runtime.tensor.tensor import Tensor
from tests.models.folders import change_config, load_golden, write_model
from tests.runtime.engine.fakes import request, run_to_end, said_by_engine
from tests.runtime.engine.graph_cases import check_equal, check_replay_equals_eager, new_engine

DEMO = Path(__file__).parents[4] / "models" / "demo"


@pytest.mark.parametrize(
    ("golden", "stored_as", "settings"),
    [
        ("qwen3_tied_gqa4", "F32", {"num_blocks": 10, "preemption": "recompute"}),
        ("gpt2_gelu_new", "BF16", {"num_blocks": 10, "preemption": "swap", "overlap": "on"}),
        pytest.param("deepseek_v2_odd", "F32", {"num_blocks": 10, "preemption": "swap"}, marks=pytest.mark.exhaustive),
    ],
)
def test_replay_equals_eager(tmp_path: Path, golden: str, stored_as: str, settings: dict[str, Any]) -> None:
    """Every step is recorded in the one engine, and done operation by operation in the other."""
    folder = write_model(tmp_path, load_golden(golden), stored_as)
    check_replay_equals_eager(folder, "cpu", fewest_steps=5, fewest_bytes=1 << 16, **settings)


@pytest.mark.exhaustive
def test_replay_equals_eager_where_columns_are_reordered() -> None:
    folder = Path(__file__).parents[3] / "models" / "quantized" / "fixtures" / "gptq_w4_reordered"
    check_replay_equals_eager(folder, "cpu", fewest_steps=5, fewest_bytes=1 << 12, num_blocks=10)


def test_batches_of_1_to_9_across_every_boundary() -> None:
    """The demo model: sequences that cross a block, the short ones' limit and attention's segments, each at another
    moment, while one after another ends."""
    answers = {}
    for mode in ("on", "off"):
        engine = new_engine(
            DEMO, "cpu", decode_graphs=mode, max_model_len=1100, max_num_seqs=9, num_blocks=200, block_size=16,
            max_num_batched_tokens=2048, enable_prefix_caching=False,
        )  # fmt: skip
        for i, length in enumerate((3, 14, 15, 16, 122, 125, 127, 1012, 1020)):
            prompt = [(7 * i + 5 * batch_slot) % 600 for batch_slot in range(length)]
            params = {"temperature": 0.8, "seed": i} if i % 2 else {"logprobs": 1}
            engine.add(request(f"r{i}", prompt, max_tokens=6 + 2 * i, ignore_eos=True, **params))
        answers[mode] = run_to_end(engine)
        stats = engine.stats()
        assert (stats.num_graph_steps > 10) == (mode == "on")
        assert (stats.num_decode_graphs >= 9) == (mode == "on")
        engine.close()
    check_equal(answers["on"], answers["off"])


def one_graph(folder: Path, **settings: Any) -> Engine:
    """An engine that has run its only sequence, "x", by a graph."""
    engine = new_engine(folder, "cpu", **settings)
    engine.add(request("x", range(3, 9), max_tokens=30, ignore_eos=True))
    for _ in range(4):
        engine.step()
    assert engine.stats().num_graph_steps > 0
    return engine


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_what_a_kernel_finds_wrong_is_raised_by_the_replay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, overlap: str
) -> None:
    """A block outside the pages, as if the bookkeeping were broken; the next request finds all in order."""
    engine = one_graph(write_model(tmp_path, load_golden("llama_default")), overlap=overlap)
    engine.executor.synchronize()
    assert engine.executor.graphs is not None
    arrays = engine.executor.graphs._arrays
    assert arrays is not None
    arrays._tables.array[:] = 1 << 20
    with caplog.at_level(logging.ERROR, "xserv.engine"):
        results = run_to_end(engine)
    assert results["x"].finish_reason() == "error"
    assert "block_tables names a block outside the cache's 64" in caplog.text
    arrays._tables.array[:] = 0
    engine.add(request("y", range(3, 9), max_tokens=8, ignore_eos=True))
    assert run_to_end(engine)["y"].finish_reason() == "length"
    assert engine.pool.num_free == engine.pool.num_blocks
    engine.close()


_kept = Tensor.from_numpy(np.zeros((64, 97), np.float32))


def written_to_a_kept_array(logits: Tensor) -> Tensor:
    _kept.array[: logits.shape[0]] = -logits.array
    return _kept[: logits.shape[0]]


@pytest.mark.parametrize(
    "change",
    [lambda logits: logits * -1.0, lambda logits: Tensor.from_numpy(-logits.array), written_to_a_kept_array],
    ids=["arithmetic", "numpy", "a kept array"],
)
def test_what_no_kernel_does_is_not_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Tensor], Tensor]
) -> None:
    """A model that scales its logits by numpy: no graph, no recording, the right tokens, and one line that says so."""
    folder = write_model(tmp_path, load_golden("llama_default"))
    answers = {}
    for mode in ("auto", "off"):
        engine = new_engine(folder, "cpu", decode_graphs=mode)
        model: Any = engine.executor.model
        plain = model.compute_logits
        model.compute_logits = lambda hidden, plain=plain: change(plain(hidden))
        for i in range(3):
            engine.add(request(f"x{i}", range(3, 9 + i), max_tokens=20 + i, ignore_eos=True))
        with caplog.at_level(logging.WARNING, "xserv.engine"):
            answers[mode] = run_to_end(engine)
        assert engine.stats().num_decode_graphs == 0
        engine.close()
    check_equal(answers["auto"], answers["off"])
    (said,) = said_by_engine(caplog)
    assert "the model's operations cannot be recorded, each is done at once from now on: cpu: " in said


def test_graphs_share_their_memory(tmp_path: Path) -> None:
    """A graph for each number of sequences needs hardly more than the largest."""
    engine = new_engine(write_model(tmp_path, load_golden("qwen3_tied_gqa4")), "cpu", max_num_seqs=6)
    for count in range(6, 0, -1):
        for i in range(count):
            engine.add(request(f"r{i}", range(3, 9), max_tokens=5, ignore_eos=True))
        run_to_end(engine)
        if count == 6:
            held = engine.stats().decode_graph_bytes
    assert engine.stats().num_decode_graphs == 6
    assert engine.stats().decode_graph_bytes < held + (200 << 10)
    engine.close()
    assert engine.stats().decode_graph_bytes == 0


def test_steps_of_one_shape_are_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks beside decodes: one recording for all of its chunks whose sequences are as long, and the
    answers of the engine that records nothing; of many shapes the latest are kept."""
    monkeypatch.setattr(CpuRecorder, "most_kept", 4)
    folder = write_model(tmp_path, load_golden("qwen3_tied_gqa4"))
    change_config(folder, max_position_embeddings=300)
    made: list[Any] = []
    record = ForwardRecordings._record

    def count(self: Any, shape: Any, *rest: Any) -> Any:
        if shape.num_tokens > shape.num_seqs:  # no step of decodes that lacked its graph
            made.append(shape)
        return record(self, shape, *rest)

    answers = {}
    for mode in ("on", "off"):
        settings = {"max_num_batched_tokens": 6, "max_model_len": 300, "num_blocks": 90}
        engine = new_engine(folder, "cpu", decode_graphs=mode, **settings)
        for i in range(2):
            engine.add(request(f"r{i}", range(3 + i, 9), max_tokens=60, ignore_eos=True))
        for _ in range(6):
            engine.step()
        monkeypatch.setattr(ForwardRecordings, "_record", count)
        engine.add(request("long", [3 + batch_slot % 40 for batch_slot in range(200)], max_tokens=2))
        answers[mode] = run_to_end(engine)
        if mode == "on":
            assert len(made) == 3, "up to 128 tokens; from there on; the last chunk, which draws"
            for length in range(2, 7):
                engine.add(request(f"p{length}", [20 + length] * length, max_tokens=1))
                run_to_end(engine)
            assert len(made) == 3 + 5
            assert engine.executor.graphs is not None
            assert len(engine.executor.graphs.forwards.recordings.kept) == 4
        engine.close()
    check_equal(answers["on"], answers["off"])


def test_passes_of_few_tokens_are_recorded_for_the_length_that_is_expected(tmp_path: Path) -> None:
    """The last chunk of a long prompt, of as many tokens as a short prompt before it, records nothing."""
    folder = write_model(tmp_path, load_golden("qwen3_tied_gqa4"))
    change_config(folder, max_position_embeddings=300)
    short = request("short", range(3, 9), max_tokens=1)
    long = request("long", [3 + place % 40 for place in range(206)], max_tokens=1)
    answers = {}
    for mode in ("on", "off"):
        engine = new_engine(
            folder, "cpu", decode_graphs=mode, max_num_batched_tokens=200, max_model_len=300, num_blocks=90
        )
        kept: list[int] = []
        for each in (short, long):
            engine.add(each)
            answers[mode, each.request_id] = run_to_end(engine)
            for _ in range(2):
                engine.executor.expect(206)
                kept.append(engine.stats().num_recorded_forwards)
        assert kept == ([2, 2, 3, 3] if mode == "on" else [0] * 4)
        engine.close()
    for each in (short, long):
        check_equal(answers["on", each.request_id], answers["off", each.request_id])


def test_a_replaying_step_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as a recording that is there, or at once; the answers are the same."""
    folder = write_model(tmp_path, load_golden("llama_default"))
    asked = [request(f"r{i}", range(3, 9 + i), max_tokens=4, ignore_eos=True) for i in range(2)]
    answers = {}
    for mode in ("record", "replay"):
        engine = new_engine(folder, "cpu", decode_graphs="on")
        monkeypatch.setattr(engine.assembler, "_mode", mode)
        for each in asked:
            engine.add(each)
        answers[mode] = run_to_end(engine)
        assert (engine.stats().decode_graph_bytes > 0) == (mode == "record")
        engine.close()
    check_equal(answers["record"], answers["replay"])


def test_sizes() -> None:
    decodes = CpuRecorder
    assert decodes.batch_sizes(1) == [1]
    assert decodes.batch_sizes(34) == [*range(1, 33), 34]
    assert decodes.batch_sizes(256)[31:] == [32, 36, 40, 44, 48, 52, 56, 60, *range(64, 129, 8), *range(144, 257, 16)]
    assert decodes.sequence_lengths(100, exact=True) == [100]
    assert decodes.sequence_lengths(1024, exact=False) == [128, 1024]
    assert decodes.sequence_lengths(5000, exact=True) == [128, 1024, 2048, 4096, 5000]
    for most in (1, 2, 31, 100, 1000):
        sizes = np.array(decodes.batch_sizes(most))
        assert sizes[-1] == most
        assert (np.diff(sizes) <= np.maximum(1, sizes[:-1] / 8)).all()
