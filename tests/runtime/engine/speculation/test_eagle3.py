"""An EAGLE-3 drafter in the engine: what it proposes, however its sequence was computed, its pages, its refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
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
from runtime.engine.speculation.state_proposer import StateProposer
from runtime.text.load import read_tokenizer
from tests.models.folders import load_golden, write_model
from tests.oracles.tiles import panel_bytes
from tests.runtime.engine.speculation.noted import Proposals, note_proposals

DEMO = Path("models/demo").resolve()
QUESTIONS = ("Write a poem about the dog.", "Who are you?", "Translate apple into French.", "Count from 3 to 9")


def new_engine(**settings: Any) -> tuple[Engine, StateProposer, Proposals]:
    """An engine that tries all that its drafter says, the drafter, and what it says."""
    defaults: dict[str, Any] = {
        "max_model_len": 256, "device": "cpu", "num_blocks": 64, "max_num_seqs": 4, "speculation": "eagle3", "seed": 0,
    }  # fmt: skip
    engine = build_engine(DEMO, **{**defaults, **settings})
    assert engine.speculator is not None
    engine.speculator.wants_tokens = lambda: True  # type: ignore[method-assign]
    return engine, *note_proposals(engine)


def ask(engine: Engine, *prompts: str, **params: Any) -> dict[str, list[int]]:
    tokenizer, answers = read_tokenizer(DEMO), {}
    for prompt in prompts:
        ids = tokenizer.encode(prompt)
        chosen = SamplingParams(**{"max_tokens": 60, "temperature": 0.0, **params})
        eos = engine.info.eos_token_ids
        engine.add(EngineRequest(request_id=prompt, prompt_token_ids=ids, eos_token_ids=eos, params=chosen))
        answers[prompt] = list[int]()
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.new_token_ids
    return answers


def turn(question: str) -> str:
    return f"<|user|>{question}<|assistant|>"


def test_it_says_the_same_however_the_prompt_was_computed() -> None:
    """Whole, in chunks, in company, without graphs; and where the prompt's beginning was found in the cache."""
    first = turn(QUESTIONS[0])
    prompts = [turn(question) for question in QUESTIONS]
    found = []
    for settings in ({}, {"max_num_batched_tokens": 7}, {"decode_graphs": "off"}, {"overlap": "on"}):
        engine, drafter, said = new_engine(**settings)
        answers = ask(engine, *prompts)
        tokenizer = read_tokenizer(DEMO)
        longer = first + tokenizer.decode(answers[first]) + turn(QUESTIONS[1])
        ask(engine, longer)
        drafter.pool.check_invariants([])
        engine.close()
        found.append(said)
        assert any(said.values())
    for each in found[1:]:
        both = each.keys() & found[0].keys()
        assert len(both) > 10
        assert {key: each[key] for key in both} == {key: found[0][key] for key in both}
    engine, _, said = new_engine(enable_prefix_caching=False)
    ask(engine, longer)
    engine.close()
    assert {key: ids for key, ids in found[0].items() if key[0] == longer} == said != {}


def test_its_proposals_are_mostly_right() -> None:
    engine, _, _ = new_engine(max_num_seqs=1)
    answers = ask(engine, *(turn(question) for question in QUESTIONS))
    steps = engine.stats().num_steps
    assert sum(map(len, answers.values())) > 3 * steps
    engine.close()


class TwiceOfThree:
    """Calls a function two times of three."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call, self.count = call, 0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1
        if self.count % 3:
            self.call(*args, **kwargs)


def test_lost_pairs_cost_nothing_but_proposals() -> None:
    """Too few pages, steps that came by unread, pages of the prefix that are gone, preemption by both ways."""
    prompts = [turn(question) for question in QUESTIONS] + [turn(QUESTIONS[0]) * 3 + turn(QUESTIONS[3])]
    plain = ask(build_engine(DEMO, device="cpu", max_model_len=256, num_blocks=64, speculation="off"), *prompts)
    for settings in ({}, {"num_blocks": 17, "preemption": "swap", "swap_space_bytes": 1 << 22}, {"num_blocks": 17}):
        engine, drafter, _ = new_engine(**settings)
        drafter.follow = TwiceOfThree(drafter.follow)  # type: ignore[method-assign]
        assert ask(engine, *prompts) == plain
        drafter.pool.drop_prefixes()
        assert ask(engine, *prompts) == plain
        drafter.pool.check_invariants([])
        assert engine.speculator is not None
        assert engine.speculator.is_on
        assert engine.speculator.counters.num_accepted_tokens > 20
        engine.close()


COUNTED: dict[str, Any] = {"max_model_len": 96, "device": "cpu", "kv_cache_bytes": 1 << 22}


def test_its_pages_and_weights_are_counted() -> None:
    alone = describe_engine(DEMO, EngineConfig(**COUNTED))
    both = describe_engine(DEMO, EngineConfig(**COUNTED, speculation="eagle3"))
    assert both.num_blocks == alone.num_blocks * 8 // 9  # a layer of 2 heads beside 4 of 4
    maps = ((256, 768), (128 + 64 + 64, 512), (256, 128), (128 + 128, 256), (256, 128))  # fc, qkv, o, gate and up, down
    norms = 4 * 256 * 4
    drafter_bytes = sum(panel_bytes(*shape, element_bytes=2) for shape in maps) + norms
    assert both.weight_bytes == alone.weight_bytes + drafter_bytes
    assert both.kv_cache_bytes <= 1 << 22


def test_an_engine_takes_what_was_counted() -> None:
    both = describe_engine(DEMO, EngineConfig(**COUNTED, speculation="eagle3"))
    engine = build_engine(DEMO, **COUNTED, speculation=f"eagle3:{DEMO / 'drafter'}")
    assert engine.info.num_blocks == both.num_blocks
    assert engine.info.weight_bytes == both.weight_bytes
    assert engine.info.kv_cache_bytes == both.kv_cache_bytes
    engine.close()


def test_what_does_not_go_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="split over 2 ranks"):
        EngineConfig(speculation="eagle3", tensor_parallel_size=2)
    with pytest.raises(RequestError, match=r"eagle3:, .*need a folder"):
        EngineConfig(speculation="eagle3:")
    gpt2 = write_model(tmp_path, load_golden("gpt2_gelu_new"))
    with pytest.raises(RequestError, match="has no folder 'drafter'"):
        build_engine(gpt2, device="cpu", speculation="eagle3")
    shutil.copytree(DEMO / "drafter", gpt2 / "drafter")
    with pytest.raises(ModelLoadError, match="gives no hidden states of its layers"):
        build_engine(gpt2, device="cpu", speculation="eagle3")
