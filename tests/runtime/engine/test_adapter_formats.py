"""Adapters of experts, tables and heads in an engine: memory that is made when it is first needed, the same bits in any
company, PEFT's log probabilities; stages and exact ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.registry import declare
from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.make_engine import engine_of
from runtime.linear.low_rank import LowRankMaps
from tests.models.adapter_cases import load_adapter_golden, write_adapter
from tests.models.folders import write_model
from tests.models.shared_families import write_shared
from tests.runtime.engine.test_adapters import asked, drained, loaded

CASES = ["qwen3_moe_experts", "many_tokens", "tables", "saved_tables"]


def opened(folder: Path, **settings: Any) -> Engine:
    given = {"dtype": "float32", "device": "cpu", "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    given |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "block_size": 8, "num_blocks": 64, "seed": 0}
    return engine_of(str(folder), EngineConfig(**{**given, **settings}))


def folders(tmp_path: Path, case: str) -> tuple[Path, Path, Path]:
    """A model, the case's adapter, and one with its plain pairs alone."""
    golden = load_adapter_golden(case)
    full = write_adapter(tmp_path / "full", case)
    off = {"target_parameters": None, "modules_to_save": None, "trainable_token_indices": None}
    plain = {name: shape for name, shape in golden.shapes.items() if "self_attn" in name}
    tensors = {name: np.full(shape, 0.1, np.float32) for name, shape in plain.items()}
    other = write_adapter(tmp_path / "plain", case, config=off, tensors=tensors, is_alone=True)
    return write_model(tmp_path / "model", golden.golden), full, other


def prompt_logprobs(engine: Engine, ids: list[int], adapter: Any) -> list[float]:
    engine.add(asked("prompt", ids, adapter, max_tokens=1, prompt_logprobs=0))
    found: list[float] = []
    while engine.has_work:
        for output in engine.step():
            found += [each.logprob for each in output.prompt_logprobs or [] if each is not None]
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("settings", [{}, {"decode_graphs": "off"}, {"speculation": "ngram"}])
def test_answers_are_those_alone_and_pefts(tmp_path: Path, case: str, settings: dict[str, Any]) -> None:
    model, full, plain = folders(tmp_path, case)
    golden = load_adapter_golden(case)
    ids = golden.golden.prompt_ids
    mixed = opened(model, **settings)
    order = [None, 1, 0, 1, None, 0]
    refs = [loaded(mixed, full), loaded(mixed, plain)]
    mixed.add(asked("first", ids[:9], refs[1]))
    drained(mixed)  # recorded before the other has memory
    for number, which in enumerate(order):
        mixed.add(asked(str(number), ids[: 7 + number], None if which is None else refs[which]))
    found, _ = drained(mixed)
    assert settings or mixed.executor.graph_stats().num_graphs, "steps with such adapters are recorded"
    alone = opened(model, enable_prefix_caching=False, decode_graphs="off")
    for number, which in enumerate(order):
        alone.add(asked(str(number), ids[: 7 + number], None if which is None else refs[which]))
        answers, _ = drained(alone)
        assert found[str(number)] == answers[str(number)], (number, which)
    rows = golden.logits[np.arange(len(ids) - 1)].astype(np.float64)
    wanted = rows[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(rows).sum(axis=1))
    for engine in (mixed, alone):
        np.testing.assert_allclose(prompt_logprobs(engine, ids, refs[0]), wanted, rtol=0, atol=2e-4)
        engine.check_invariants()
        engine.close()


def write_whole_adapter(folder: Path, model: Path) -> Path:
    """An adapter of rank 2 of every module that takes one."""
    maps, rng, tensors = LowRankMaps(1, 2), np.random.default_rng(3), dict[str, Any]()
    declare(model, load_format="dummy", addends=maps)
    for module, (outputs, inputs) in maps.modules.items():
        is_table = maps.table is not None and module == maps.table.name
        ends = ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A.weight", "lora_B.weight")
        for end, shape in zip(ends, ((2, inputs), (outputs, 2)), strict=True):
            tensors[f"base_model.model.{module}.{end}"] = rng.standard_normal(shape).astype(np.float32) / 4
    config = {"r": 2, "lora_alpha": 2, "target_parameters": None, "modules_to_save": None}
    return write_adapter(folder, "llama", config=config, tensors=tensors, is_alone=True)


def test_pairs_are_bfloat16_where_products_round_x_to_bytes(tmp_path: Path) -> None:
    model = write_shared(tmp_path / "model", "llama")
    engines = [opened(model, load_format="dummy", quantization=kind) for kind in ("none", "int8")]
    maps = [engine.executor.adapters for engine in engines]
    stored = [{each.slots.stored for each in found.maps.values()} for found in maps if found is not None]
    assert stored == [{np.float32}, {np.uint16}]
    for engine in engines:
        engine.close()


RARE = ("gpt_oss", "qwen3_5", "gemma3")


@pytest.mark.parametrize("family", [
    "llama", "qwen3_moe", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in RARE)
])  # fmt: skip
@pytest.mark.parametrize("split", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_exact_ranks_and_stages_answer_as_one(tmp_path: Path, family: str, split: dict[str, int]) -> None:
    model = write_shared(tmp_path / "model", family)
    folder, ids = write_whole_adapter(tmp_path / "adapter", model), [*range(2, 14)]
    answers = []
    for own in ({}, split):
        engine = opened(model, exact=True, load_format="dummy", **own)
        for number, ref in enumerate([loaded(engine, folder), None]):
            engine.add(asked(str(number), ids, ref, max_tokens=5))
        answers.append(drained(engine)[0])
        engine.close()
    assert answers[0] == answers[1]
    assert answers[0]["0"] != answers[0]["1"]


def test_stages_take_retrained_tables(tmp_path: Path) -> None:
    model, full, plain = folders(tmp_path, "saved_tables")
    ids, answers = load_adapter_golden("saved_tables").golden.prompt_ids, []
    for stages in (1, 2):
        engine = opened(model, pipeline_parallel_size=stages)
        for number, ref in enumerate([loaded(engine, full), loaded(engine, plain), None]):
            engine.add(asked(str(number), ids[:9], ref))
        answers.append(drained(engine)[0])
        engine.close()
    assert answers[0] == answers[1]
