"""Steps that draw several tokens of a sequence: proposals change how many steps there are, and no token."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runtime.engine.engine import Engine
from runtime.engine.messages import EngineOutput
from tests.runtime.engine.fakes import Collected, collect, each_loop, make_engine, request, run_to_end

__all__ = ["each_loop"]

pytestmark = pytest.mark.usefixtures("each_loop")

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3, "logprobs": 2},
    {"temperature": 0.8, "seed": 4, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    {"bad_words_token_ids": [[4], [5, 6]], "logit_bias": {7: 2.0}, "stop_token_ids": [9, 11, 30], "min_tokens": 4},
    {"temperature": 1.0, "seed": 8, "n": 2},
    {"prompt_logprobs": 1, "temperature": 0.7, "seed": 1, "top_k": 5},
]


def serve(answers: dict[str, Collected] | None, **settings: Any) -> tuple[dict[str, Collected], Engine]:
    """With `answers`, running sequences are proposed what they will say, often with a mistake."""
    engine = make_engine(**settings)
    rng = random.Random(5)
    for i in range(12):
        prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 40))]
        engine.add(request(f"r{i}", prompt, max_tokens=rng.randrange(1, 40), **KINDS[i % len(KINDS)]))
    results: dict[str, Collected] = {}
    schedule = engine.scheduler.schedule

    def propose() -> Any:
        for sequence in engine.scheduler.running if answers is not None else []:
            known = answers[sequence.request.request_id].token_ids(sequence.index)  # type: ignore[index]
            drafts = known[sequence.num_output_tokens :][: rng.randrange(6)]
            if drafts and rng.random() < 0.5:
                drafts[rng.randrange(len(drafts))] = rng.randrange(90)
            engine.scheduler.drafts[sequence] = drafts
        return schedule()

    engine.scheduler.schedule = propose  # type: ignore[method-assign]
    while engine.has_work:
        collect(engine.step(), results)
        engine.check_invariants()
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not engine.scheduler.drafts
    return results, engine


def told(output: EngineOutput) -> tuple[Any, ...]:
    return (output.index, output.new_token_ids, output.prompt_logprobs, output.finish_reason, output.stop_reason)


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_blocks": 24, "swap_space_bytes": 1 << 12}, {"num_blocks": 24, "max_num_batched_tokens": 8}],
    ids=["room", "preemption", "a small budget"],
)
def test_proposals_change_no_token(settings: dict[str, Any]) -> None:
    plain, engine = serve(None, **settings)
    proposed, faster = serve(plain, **settings)
    for name, each in plain.items():
        for index in range(2):
            assert [told(o) for o in proposed[name].of(index)] == [told(o) for o in each.of(index)], name
            ours, theirs = ([o.logprobs for o in one[name].of(index)] for one in (proposed, plain))
            assert ours == theirs
    if not engine.overlaps:  # else a sequence with proposals is not in the step that is planned meanwhile
        assert faster.stats().num_steps < engine.stats().num_steps
    if "swap_space_bytes" in settings:
        assert faster.stats().num_preemptions > 0


def test_what_is_found_later_are_the_tokens_that_were_kept() -> None:
    """Pages that held rejected proposals are not found under them; those of accepted ones are found."""
    prompt = list(range(20))
    (plain,) = run_to_end(with_request(make_engine(), prompt, 40)).values()
    answer = plain.token_ids()
    engine = make_engine()
    schedule = engine.scheduler.schedule

    def propose() -> Any:
        for sequence in engine.scheduler.running:
            known = answer[sequence.num_output_tokens :][:7]
            engine.scheduler.drafts[sequence] = [*known[:5], *(90 for _ in known[5:])]
        return schedule()

    engine.scheduler.schedule = propose  # type: ignore[method-assign]
    assert run_to_end(with_request(engine, prompt, 40))["x"].token_ids() == answer
    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    again = run_to_end(with_request(engine, [*prompt, *answer, 5], 4))["x"]
    assert again.outputs[0].num_cached_tokens is not None
    assert again.outputs[0].num_cached_tokens >= 56 - 8
    lone = run_to_end(with_request(make_engine(), [*prompt, *answer, 5], 4))["x"]
    assert again.token_ids() == lone.token_ids()


def with_request(engine: Engine, prompt: list[int], max_tokens: int) -> Engine:
    engine.add(request("x", prompt, max_tokens=max_tokens))
    return engine
