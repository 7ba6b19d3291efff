"""A prediction layer in the engine: right where it must be, the same however its sequence was computed; no token
changes.

Its arithmetic is held in `tests/models/drafters/test_mtp.py`; its pages and pairs are an EAGLE-3 drafter's
(`test_eagle3`)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from models.errors import ModelLoadError
from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.errors import RequestError
from runtime.engine.make_engine import build_engine, describe_engine
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from tests.models.drafters.mtp_cases import CASES, write_bigrams, write_with_prediction
from tests.models.folders import load_golden, write_model
from tests.runtime.engine.speculation.noted import Proposals, note_proposals


def new_engine(folder: Path, **settings: Any) -> tuple[Engine, Proposals]:
    """An engine that tries all that its drafter says, and what it says."""
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 64, "seed": 0, "max_num_seqs": 4}
    engine = build_engine(folder, **{**defaults, **settings})
    return engine, note_proposals(engine)[1] if engine.speculator is not None else {}


def prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(min(61, vocab_size)) for _ in range(rng.randrange(1, 30))] for _ in range(5)]


def ask(engine: Engine, **params: Any) -> dict[str, list[int]]:
    answers = dict[str, list[int]]()
    for number, prompt in enumerate(prompts(engine.info.vocab_size)):
        chosen = SamplingParams(max_tokens=25, **{"temperature": 0.0, "ignore_eos": True, "seed": 5, **params})
        engine.add(EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=chosen))
        answers[str(number)] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            answers[output.request_id] += output.new_token_ids
    engine.check_invariants()
    engine.close()
    return answers


def check_all_right(folder: Path, speculation: str) -> None:
    """All that the drafter says comes."""
    plain = ask(new_engine(folder, speculation="off")[0])
    assert len({tuple(each) for each in plain.values()}) > 1
    engine, said = new_engine(folder, speculation=speculation, num_speculative_tokens=4)
    assert ask(engine) == plain
    assert engine.speculator is not None
    counters = engine.speculator.counters
    assert counters.num_draft_tokens > 60
    assert counters.num_accepted_tokens == counters.num_draft_tokens
    assert max(map(len, said.values())) == 4


@pytest.mark.parametrize("case", CASES)
def test_all_proposals_are_right_where_the_last_token_says_the_next(case: str, tmp_path: Path) -> None:
    folder = write_bigrams(tmp_path / "bigrams", case)
    check_all_right(folder, "mtp")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.exhaustive_cases("glm4")
def test_it_says_the_same_however_the_sequence_was_computed(case: str, tmp_path: Path) -> None:
    folder = write_with_prediction(tmp_path / "model", case)
    plain = ask(new_engine(folder, speculation="off")[0], temperature=1.0)
    found = []
    for settings in ({}, {"max_num_batched_tokens": 7}, {"decode_graphs": "off"}, {"overlap": "on"}):
        engine, said = new_engine(folder, speculation="mtp", **settings)
        assert ask(engine, temperature=1.0) == plain
        assert engine.speculator is not None
        assert engine.speculator.is_on
        found.append(said)
    for each in found[1:]:
        both = each.keys() & found[0].keys()
        assert len(both) > 20 or each is found[3]  # steps that overlap are seldom followed
        assert {key: each[key] for key in both} == {key: found[0][key] for key in both}


def test_its_pages_and_weights_are_counted(tmp_path: Path) -> None:
    folder = write_with_prediction(tmp_path / "model", CASES[0])
    settings: dict[str, Any] = {"max_model_len": 96, "device": "cpu", "kv_cache_bytes": 1 << 20}
    alone = describe_engine(folder, EngineConfig(**settings))
    both = describe_engine(folder, EngineConfig(**settings, speculation="mtp"))
    assert both.num_blocks == alone.num_blocks * 2 // 3  # a layer beside two
    assert both.weight_bytes > alone.weight_bytes


def test_what_does_not_go_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="split over 2 ranks"):
        EngineConfig(speculation="mtp", tensor_parallel_size=2)
    dense = write_model(tmp_path / "dense", load_golden("llama_default"))
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM has no layer that predicts further tokens"):
        build_engine(dense, device="cpu", speculation="mtp")
