"""Reasoning is closed after so many tokens: in both loops, with drafts, after preemption, and as a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.engine.errors import RequestError
from runtime.engine.make_engine import build_engine
from runtime.engine.reasoning_budget import MOST_BEFORE, ReasoningBudget
from runtime.engine.sampling_params import SamplingParams
from tests.models.folders import write_tiny_qwen3
from tests.runtime.engine.fakes import (
    each_loop,
    greedy,
    make_engine,
    request,
    run_to_end,
)

__all__ = ["each_loop"]

PROMPT = [3, 1, 4]
CLOSING = (5, 9, 2, 6)


def budget(num_tokens: int, **fields: Any) -> ReasoningBudget:
    return ReasoningBudget(**{"num_tokens": num_tokens, "closing_id": 2, "closing_ids": CLOSING, **fields})


def continued(output: list[int], num_tokens: int) -> list[int]:
    """The output with the most probable ids after it."""
    return [*output, *greedy([*PROMPT, *output], num_tokens - len(output))]


@pytest.mark.usefixtures("each_loop")
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 29, 40])
def test_the_reasoning_is_closed_after_so_many_tokens(num_tokens: int) -> None:
    free = greedy(PROMPT, 30)
    engine = make_engine()
    bounded = budget(num_tokens, closing_id=CLOSING[2])
    closes_itself = CLOSING[2] in free[:num_tokens]
    engine.add(request("bounded", PROMPT, max_tokens=30, reasoning_budget=bounded))
    engine.add(request("free", PROMPT, max_tokens=30))
    biased: dict[str, Any] = (
        {"logit_bias": {free[num_tokens % 30]: 100.0, CLOSING[0]: -100.0}} if num_tokens == 29 else {}
    )
    engine.add(request("biased", PROMPT, max_tokens=num_tokens + 1, reasoning_budget=budget(num_tokens), **biased))
    collected = run_to_end(engine)
    assert collected["free"].token_ids() == free
    expected = free if closes_itself else continued([*free[:num_tokens], *CLOSING], 30)[:30]
    assert collected["bounded"].token_ids() == expected
    if not biased:
        return
    assert collected["biased"].token_ids()[-1] == CLOSING[0]


def test_where_an_id_is_forced() -> None:
    inside = budget(3)
    assert [inside.forced(np.array([8] * n, np.int32)) for n in range(9)] == [None] * 3 + [*CLOSING] + [None] * 2
    assert all(inside.forced(np.array([8, 2, 8, *[8] * n], np.int32)) is None for n in range(9)), "it closed by itself"
    opened = budget(2, opening_id=1, num_label=1)
    for before in range(MOST_BEFORE + 1):
        outputs = [*[7] * before, 1, 0, 8, 8, *CLOSING, 8]
        forced = [opened.forced(np.array(outputs[:n], np.int32)) for n in range(len(outputs))]
        assert forced == [None] * (before + 4) + [*CLOSING, None]
        may = [opened.may_force(n) for n in range(len(outputs))]
        assert all(can for can, token_id in zip(may, forced, strict=True) if token_id is not None)
    assert all(opened.forced(np.array([7] * n, np.int32)) is None for n in range(20)), "it never opened"
    wrong: dict[str, Any]
    for wrong in ({"num_tokens": -1}, {"num_tokens": 2**31}, {"num_tokens": True}, {"closing_ids": (5,)}):
        with pytest.raises(RequestError, match="reasoning_budget"):
            budget(**({"num_tokens": 3} | wrong))
    with pytest.raises(RequestError, match="reasoning_budget"):
        SamplingParams(reasoning_budget=3)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="reasoning_budget"):
        make_engine().add(request("x", PROMPT, reasoning_budget=budget(3, opening_id=10**6)))


@pytest.mark.parametrize(
    "options",
    [{}, {"speculation": "ngram"}, {"num_blocks": 9, "max_num_seqs": 4}, {"device": "emulated:sm_90a"}],
    ids=["cpu", "drafts", "preempted", "gpu"],
)
def test_on_a_model_it_is_as_if_the_forced_tokens_were_a_prompt(tmp_path: Path, options: dict[str, Any]) -> None:
    write_tiny_qwen3(tmp_path, vocab_size=259, eos_token_id=258, max_position_embeddings=256)
    closing = (100, 250, 101)

    def outputs_of(prompts: list[list[int]], **fields: Any) -> list[list[int]]:
        engine = build_engine(tmp_path, load_format="dummy", seed=0, exact=True, **options)
        try:
            for i, prompt in enumerate(prompts):
                engine.add(request(str(i), prompt, temperature=0.0, ignore_eos=True, **fields))
            collected = run_to_end(engine)
        finally:
            engine.close()
        return [collected[str(i)].token_ids() for i in range(len(prompts))]

    prompts = [[1 + i, 7, 9] * 4 for i in range(4)]
    bounded = ReasoningBudget(num_tokens=9, closing_id=250, closing_ids=closing)
    found = outputs_of(prompts, max_tokens=24, reasoning_budget=bounded)
    free = outputs_of(prompts, max_tokens=9)
    assert all(250 not in output for output in free)
    rest = outputs_of([[*p, *o, *closing] for p, o in zip(prompts, free, strict=True)], max_tokens=12)
    assert found == [[*first, *closing, *last] for first, last in zip(free, rest, strict=True)]
