"""A hundred mixed requests over a pool that is too small for them, on real kernels: each equals its lone
run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from runtime.engine.engine import Engine
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineRequest
from tests.models.folders import load_golden, write_model
from tests.runtime.engine.fakes import Collected, collect, request, run_to_end

STORIES = Path(__file__).parents[4] / "shared" / "data" / "models" / "stories260K"
NEAR_TIE = 1e-3
"""Batches of another shape add in another order; a token may differ where the two best logits lie this
close."""


@pytest.fixture(scope="module", params=["golden", "stories260K"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "golden":
        return write_model(tmp_path_factory.mktemp("models"), load_golden("qwen3_tied_gqa4"))
    if not STORIES.exists():
        pytest.skip("needs ../shared/data/models/stories260K")
    return STORIES


def build(folder: Path, max_model_len: int, **settings: Any) -> Engine:
    return build_engine(folder, dtype="float32", max_model_len=max_model_len, block_size=8, seed=0, **settings)


def hundred_requests(rng: random.Random, max_model_len: int, vocab_size: int) -> list[EngineRequest]:
    requests = []
    for i in range(100):
        prompt_len = rng.randrange(1, max_model_len // 2)
        prompt = [rng.randrange(3, vocab_size) for _ in range(prompt_len)]
        params: dict[str, object] = {"max_tokens": rng.randrange(1, max_model_len // 2), "logprobs": 1}
        if i % 2:
            params |= {
                "temperature": rng.uniform(0.5, 1.2),
                "seed": rng.randrange(2**40),
                "n": rng.choice([1, 1, 2]),
            }
            params |= rng.choice([{}, {"top_k": 8}, {"top_p": 0.9}, {"min_p": 0.05}])
        params |= rng.choice(
            [
                {},
                {},
                {"frequency_penalty": 0.4, "presence_penalty": 0.2},
                {"repetition_penalty": 1.2},
                {"logit_bias": {4: 2.0, 5: -3.0}},
                {"stop_token_ids": [7, 8, 9], "min_tokens": 1},
                {"ignore_eos": True},
                {"prompt_logprobs": 1},
            ]
        )
        requests.append(request(f"r{i}", prompt, eos=(2,), **params))
    return requests


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.exhaustive_cases("golden-on", "off")
def test_a_hundred_requests_equal_their_lone_runs(folder: Path, overlap: Literal["off", "on"]) -> None:
    if folder == STORIES and overlap == "off":
        pytest.skip("the golden model shows it, too")
    rng = random.Random(1)
    max_model_len, num_blocks = (160, 40) if folder == STORIES else (64, 16)
    engine = build(
        folder, max_model_len, num_blocks=num_blocks, max_num_seqs=16, max_num_batched_tokens=64, overlap=overlap
    )
    requests = hundred_requests(rng, max_model_len, engine.info.vocab_size)
    results: dict[str, Collected] = {}
    arriving = list(requests)
    while arriving or engine.has_work:
        for _ in range(min(len(arriving), rng.choice([0, 1, 3]))):
            engine.add(arriving.pop(0))
        collect(engine.step(), results)
        engine.check_invariants()
    run_to_end(engine)
    assert engine.scheduler.num_preemptions > 10
    lone = build(folder, max_model_len, num_blocks=max_model_len // 4, max_num_seqs=2)
    num_near_ties = 0
    for each in requests:
        lone.add(each)
        expected = run_to_end(lone)[each.request_id]
        for index in range(each.params.n):
            ours, theirs = results[each.request_id], expected
            num_near_ties += check_same(lone, each, ours.token_ids(index), theirs.token_ids(index))
            if ours.token_ids(index) == theirs.token_ids(index):
                assert ours.finish_reason(index) == theirs.finish_reason(index)
                check_logprobs(ours, theirs, index)
    assert num_near_ties <= 3


def check_same(engine: Engine, each: EngineRequest, ours: list[int], theirs: list[int]) -> int:
    """1 when the tokens part at a near tie, 0 when they are equal; anything else fails."""
    if ours == theirs:
        return 0
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b)
    logits = engine.logits([*each.prompt_token_ids, *theirs[:at]])[-1]
    second, best = np.sort(logits)[-2:]
    assert best - second <= NEAR_TIE, f"{each.request_id} parts at token {at}"
    return 1


def check_logprobs(ours: Collected, theirs: Collected, index: int) -> None:
    for mine, other in zip(ours.of(index), theirs.of(index), strict=True):
        assert [e.logprob for e in mine.logprobs or ()] == pytest.approx(
            [e.logprob for e in other.logprobs or ()], abs=1e-4
        )
        assert (mine.prompt_logprobs is None) == (other.prompt_logprobs is None)
        for a, b in zip(mine.prompt_logprobs or (), other.prompt_logprobs or (), strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert (a.token_id, a.logprob) == (b.token_id, pytest.approx(b.logprob, abs=1e-4))


def test_chunked_prefill_gives_the_same_logits(folder: Path) -> None:
    whole = build(folder, 64, num_blocks=16, max_num_seqs=1)
    chunked = build(folder, 64, num_blocks=16, max_num_seqs=1, max_num_batched_tokens=7)
    prompt = [3 + i % 40 for i in range(64)]
    ours, theirs = chunked.logits(prompt), whole.logits(prompt)
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
