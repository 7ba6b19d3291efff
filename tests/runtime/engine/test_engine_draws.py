"""What the engine draws and reports: stop ids, biases, log probabilities, choices, seeds."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.runtime.engine.fakes import (
    VOCAB_SIZE,
    Collected,
    FakeModel,
    collect,
    each_loop,
    fake_logits,
    greedy,
    make_engine,
    one,
    prefix_hashes,
    random_prompt,
    request,
    run_to_end,
)

__all__ = ["each_loop"]

pytestmark = pytest.mark.usefixtures("each_loop")


def test_stop_ids_and_eos() -> None:
    expected = greedy([5, 6], 12)
    stop = expected[4]
    first = expected.index(stop)
    result = one(make_engine(), [5, 6], max_tokens=12, stop_token_ids=[stop])
    assert result.token_ids() == expected[: first + 1]
    assert (result.finish_reason(), result.outputs[-1].stop_reason) == ("stop", stop)
    result = one(make_engine(), [5, 6], max_tokens=12, eos=(stop,))
    assert result.token_ids() == expected[: first + 1]
    assert (result.finish_reason(), result.outputs[-1].stop_reason) == ("stop", None)
    result = one(make_engine(), [5, 6], max_tokens=12, eos=(stop,), ignore_eos=True)
    assert result.token_ids() == expected


@pytest.mark.parametrize("way", ["stop_token_ids", "eos"])
def test_min_tokens_keeps_stop_ids_away_for_just_as_long(way: str) -> None:
    wanted = {"max_tokens": 12, "logit_bias": {42: 100.0}, way: (42,)}
    result = one(make_engine(), [5, 6], min_tokens=5, **wanted)
    assert 42 not in result.token_ids()[:5]
    assert result.token_ids()[5:] == [42]
    assert result.finish_reason() == "stop"
    assert one(make_engine(), [5, 6], **wanted).token_ids() == [42]


def test_logit_bias_allowed_ids_and_penalties_reach_the_sampler() -> None:
    assert one(make_engine(), [1], max_tokens=5, logit_bias={42: 100.0}).token_ids() == [42] * 5
    allowed = one(make_engine(), [1], max_tokens=30, temperature=2.0, seed=1, allowed_token_ids=[3, 40, 96])
    assert set(allowed.token_ids()) <= {3, 40, 96}
    assert len(set(allowed.token_ids())) > 1
    # A heavy bias draws 42 until the penalties outweigh it; then every id comes at most once.
    result = one(make_engine(), [1], max_tokens=30, logit_bias={42: 1.5}, frequency_penalty=2.0, presence_penalty=2.0)
    free = one(make_engine(), [1], max_tokens=30, logit_bias={42: 1.5})
    assert max(map(result.token_ids().count, result.token_ids())) < max(map(free.token_ids().count, free.token_ids()))
    prompt = list(range(60))
    repeated = one(make_engine(), prompt, max_tokens=20, repetition_penalty=1e4)
    assert not set(repeated.token_ids()) & set(prompt)
    assert len(set(repeated.token_ids())) == 20


def test_logprobs_are_those_of_the_raw_logits() -> None:
    prompt = [9, 8, 7]
    result = one(make_engine(), prompt, max_tokens=6, logprobs=3, temperature=0.7, seed=4, logit_bias={5: 3.0})
    tokens = list(prompt)
    for output in result.outputs:
        (entry,) = output.logprobs or []
        assert entry.token_id == output.new_token_ids[0]
        check_logprobs(entry, tokens, 3)
        tokens += output.new_token_ids


def check_logprobs(entry: object, context: list[int], num_top: int) -> None:
    logits = fake_logits(np.array(prefix_hashes(np.array(context))[-1:]))[0].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    order = np.argsort(-expected, kind="stable")
    assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-5)
    assert entry.rank == 1 + int((expected > expected[entry.token_id]).sum())
    assert entry.top_ids == order[:num_top].tolist()
    assert entry.top_logprobs == pytest.approx(expected[order[:num_top]].tolist(), abs=1e-5)


@pytest.mark.parametrize("prompt_len", [1, 2, 8, 50])
@pytest.mark.parametrize("budget", [3, 8, 64])
def test_prompt_logprobs_whatever_the_chunks(prompt_len: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "runtime.engine.steps.pooling_pass.LOGITS_SLICE_ELEMENTS", 5 * VOCAB_SIZE
    )  # five rows at a time
    prompt = random_prompt(random.Random(3), prompt_len)
    engine = make_engine(max_num_batched_tokens=budget)
    result = one(engine, prompt, max_tokens=2, prompt_logprobs=2, n=2)
    assert [output.prompt_logprobs is not None for output in result.of(0)] == [True, False]
    assert all(output.prompt_logprobs is None for output in result.of(1))
    entries = result.of(0)[0].prompt_logprobs or []
    assert len(entries) == prompt_len
    assert entries[0] is None
    for position, entry in enumerate(entries[1:], 1):
        assert entry is not None
        assert entry.token_id == prompt[position]
        check_logprobs(entry, prompt[:position], 2)


def test_prompt_logprobs_survive_preemption_in_the_middle_of_the_prompt() -> None:
    """The older request takes a block away while the younger's prompt is half done."""
    prompt = random_prompt(random.Random(5), 60)
    engine = make_engine(num_blocks=16, block_size=8, max_num_batched_tokens=4, max_num_seqs=4)
    results: dict[str, Collected] = {}
    engine.add(request("old", [1] * 7, max_tokens=80))
    while engine.stats().generation_tokens < 48:  # 55 tokens in 7 of 16 blocks; the young one takes 8
        collect(engine.step(), results)
    engine.add(request("young", prompt, max_tokens=4, prompt_logprobs=1))
    was_preempted_midway = False
    for _ in range(1000):
        before = engine.scheduler.num_preemptions
        young = engine.requests["young"].sequences[0] if "young" in engine.requests else None
        computed = young.num_computed if young is not None else 0
        collect(engine.step(), results)
        engine.check_invariants()
        was_preempted_midway |= engine.scheduler.num_preemptions > before and 0 < computed < 60
        if not engine.has_work:
            break
    entries = results["young"].outputs[0].prompt_logprobs or []
    assert results["young"].token_ids() == greedy(prompt, 4)
    assert results["old"].token_ids() == greedy([1] * 7, 80)
    assert len(entries) == 60
    for position, entry in enumerate(entries[1:], 1):
        check_logprobs(entry, prompt[:position], 1)
    assert was_preempted_midway


def test_choices_share_the_prompt_and_differ() -> None:
    model = FakeModel()
    engine = make_engine(model=model, num_blocks=64, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64)
    prompt = random_prompt(random.Random(1), 50)
    engine.add(request("x", prompt, n=4, max_tokens=8, temperature=1.0, seed=11))
    results: dict[str, Collected] = {}
    collect(engine.step(), results)
    collect(engine.step(), results)
    engine.check_invariants()
    tables = [sequence.blocks[0] for sequence in engine.requests["x"].sequences]
    assert len({tuple(table[:6]) for table in tables}) == 1, "six full blocks of the prompt are shared"
    assert len({table[6] for table in tables}) == 4
    assert model.num_computed_tokens == 50 + 1 + 3, "the partial last block was copied"
    run_to_end(engine, results)
    outputs = [results["x"].token_ids(index) for index in range(4)]
    assert len({tuple(tokens) for tokens in outputs}) == 4
    again = make_engine()
    again.add(request("y", prompt, n=4, max_tokens=8, temperature=1.0, seed=11))
    assert [run_to_end(again)["y"].token_ids(0)] == outputs[:1]


def test_seeded_draws_depend_on_seed_choice_and_position_alone() -> None:
    prompt = random_prompt(random.Random(1), 12)
    params = {"n": 2, "max_tokens": 16, "temperature": 1.0}
    alone = one(make_engine(seed=1), prompt, seed=5, **params)
    crowded = make_engine(seed=2, num_blocks=20, max_num_batched_tokens=8, max_num_seqs=6)
    rng = random.Random(0)
    for i in range(6):
        crowded.add(request(f"other{i}", random_prompt(rng, 30), max_tokens=40, temperature=1.0))
    crowded.add(request("one", prompt, seed=5, **params))
    batched = run_to_end(crowded)["one"]
    assert crowded.scheduler.num_preemptions > 0
    for index in (0, 1):
        assert batched.token_ids(index) == alone.token_ids(index)
    assert alone.token_ids(0) != alone.token_ids(1)
    assert one(make_engine(seed=1), prompt, seed=6, **params).token_ids(0) != alone.token_ids(0)


def test_without_a_seed_runs_differ_unless_the_engine_has_one() -> None:
    params = {"max_tokens": 30, "temperature": 1.5}
    first, second = (one(make_engine(seed=None), [1, 2], **params).token_ids() for _ in range(2))
    assert first != second
    first, second = (one(make_engine(seed=3), [1, 2], **params).token_ids() for _ in range(2))
    assert first == second
