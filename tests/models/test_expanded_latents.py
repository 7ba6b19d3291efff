"""Long prompts of a model with latent attention on emulated GPUs: chunks whose sequence's rows are expanded, beside
transformers' logits, alone and in one batch with chunks whose queries are absorbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.base import Model
from numba_kernels.cuda.attention import planning
from runtime.batch import Batch, LongChunks
from runtime.engine.make_engine import build_engine
from runtime.linear import latent
from tests.models.driver import ModelDriver, relative_error
from tests.models.folders import Golden, load_golden, write_model
from tests.models.test_goldens_gpu import load_on
from tests.runtime.engine.fakes import request, run_to_end

GOLDEN = load_golden("deepseek_v3_wide")
SCALED = load_golden("mistral4_wide")  # queries grow with their position
LEAST = 3  # tokens of a chunk that is expanded here


def expanding(model: Any) -> Any:
    """Names a batch's chunks of `LEAST` tokens or more, which the model's own rule never would."""

    def complete(batch: Batch, start: int) -> None:
        counts = np.diff(batch.query_start.to("cpu").numpy()).tolist()
        contexts = (batch.seq_lens.to("cpu").numpy() - counts).tolist()
        assert not model.long_chunks(contexts, counts).chunks
        found = model.maps.long_chunks(contexts, counts, least_gain_s=-1.0).chunks
        chunks = tuple(chunk for chunk in found if chunk.num_tokens >= LEAST)
        others = [count for count in counts if count < LEAST]
        batch.long_chunks = LongChunks(chunks, max(others, default=0))

    return complete


def drive(model: Model, num_sequences: int = 1) -> ModelDriver:
    return ModelDriver(model, num_sequences, seed=2, block_size=8, complete=expanding(model))


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Segments of 16 rows; the heads of each launch, and the tokens of its chunk at most."""
    found: list[tuple[int, int]] = []
    plan = planning.plan_expanded

    def recorded(*sizes: Any, **named: Any) -> planning.ExpandedPlan:
        found.append((named["num_rows"], named["query_len"]))
        return plan(*sizes, **named)

    monkeypatch.setattr(latent, "_SEGMENT_ROWS", 16)
    monkeypatch.setattr(latent, "_LEAST_ROWS", 16)
    from runtime.backends import cuda_latent

    monkeypatch.setattr(cuda_latent, "_plan_expanded", recorded)
    return found


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["emulated:sm_80", "emulated:sm_90a"])
@pytest.mark.parametrize(("stored", "name", "tolerance"), [("F32", "float32", 1e-4), ("BF16", "bfloat16", 2e-2)])
@pytest.mark.parametrize("case", [GOLDEN, SCALED], ids=lambda case: case.name)
def test_logits(
    tmp_path: Path, plans: list[tuple[int, int]], device: str, case: Golden, stored: str, name: str, tolerance: float
) -> None:
    model, ids, expected = load_on(tmp_path, case, device, stored), case.prompt_ids, case.logits[name]
    driver = drive(model)
    assert relative_error(driver.in_pieces(ids, [len(ids)]), expected) <= tolerance
    assert plans == [(16, len(ids))] * (-(-len(ids) // 16)) * 2  # two layers
    plans.clear()
    assert relative_error(drive(model).in_pieces(ids, [2, 9, 1, len(ids) - 12]), expected) <= tolerance
    assert {count for _, count in plans} == {9, len(ids) - 12}
    driver = drive(model, 4)
    driver.step({0: ids[:5], 1: ids[:7]})
    first = driver.step({0: ids[5:6], 1: ids[7:13], 2: ids[:2], 3: ids})
    second = driver.step({3: ids[:3], 0: ids[6:9], 2: ids[2:4]})
    assert relative_error(first[0], expected[5:6]) <= tolerance
    assert relative_error(first[1], expected[7:13]) <= tolerance
    assert relative_error(np.concatenate([first[2], second[2]]), expected[:4]) <= tolerance
    assert relative_error(first[3], expected) <= tolerance
    assert relative_error(second[0], expected[6:9]) <= tolerance


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["emulated:sm_80", "emulated:sm_90a"])
def test_engine(tmp_path: Path, plans: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Prompts beside decodes, in chunks and in recordings: the tokens are transformers', and chunks were expanded."""
    monkeypatch.setattr(latent, "_LAUNCH_S", -1.0)  # so that every chunk pays, and decodes are one of them
    write_model(tmp_path, GOLDEN, "F32")
    engine = build_engine(
        tmp_path, device=device, dtype="float32", max_model_len=64, max_num_seqs=4, max_num_batched_tokens=12,
        block_size=8, num_blocks=60, enable_prefix_caching=False,
    )  # fmt: skip
    ids, wanted = GOLDEN.prompt_ids, GOLDEN.greedy_ids["float32"]
    for index in range(3):
        engine.add(request(f"r{index}", ids, max_tokens=len(wanted), eos=()))
    collected = run_to_end(engine)
    assert [collected[f"r{index}"].token_ids() for index in range(3)] == [wanted] * 3
    graphs = engine.executor.graph_stats()
    assert graphs.num_forward_steps > 0 or graphs.num_steps > 0
    assert plans


def test_when_it_pays() -> None:
    """DeepSeek's sizes: some 270 tokens with a long context, and some hundreds more for few heads without one."""
    weight: Any = object()
    maps = latent.LatentMaps(16, weight, weight, weight, 128, 64, 512, 128)
    assert maps.gain_s(200_000, 255) < 0 < maps.gain_s(200_000, 280)
    assert maps.gain_s(0, 400) < 0 < maps.gain_s(0, 1000)
    found = maps.long_chunks([0, 5, 70_000, 9], [2000, 1, 300, 7])
    assert [(chunk.seq, chunk.first_token, chunk.num_tokens) for chunk in found.chunks] == [
        (0, 0, 2000),
        (2, 2001, 300),
    ]
    assert found.max_query_len == 7
    assert [chunk.length for chunk in found.chunks] == [2048, 73_728]
    assert maps.segment_rows(73_728, 2) == 8192
    assert not maps.long_chunks([900], [1]).chunks
