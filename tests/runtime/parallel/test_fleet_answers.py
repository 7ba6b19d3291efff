"""Two engines with the bundled model answer as one does, whichever gets a request; prefixes bring requests together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from runtime.engine.errors import RequestError
from runtime.engine.grammar.structured_outputs import StructuredOutputsParams
from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM
from runtime.parallel.fleet import Fleet
from tests.waiting import TIMEOUT_S, wait_until

SETTINGS: dict[str, Any] = {"device": "cpu", "num_blocks": 256, "max_model_len": 512}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(n=2, max_tokens=8, logprobs=2, prompt_logprobs=1),  # without a seed of its own
    SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}")),
    SamplingParams(seed=3, max_tokens=12, min_tokens=3, repetition_penalty=1.2),
]


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with LLM(data_parallel_size=2, **SETTINGS) as llm:
        yield llm


def answers(llm: LLM) -> list[Any]:
    prompts = [f"Question {i}: what is {i} plus {i + 2}?" for i in range(12)]
    outputs = llm.generate(prompts, [PARAMS[i % len(PARAMS)] for i in range(12)])
    return [[(each.text, each.token_ids, each.logprobs) for each in output.outputs] for output in outputs]


def test_the_answers_of_two_are_those_of_one(two: LLM) -> None:
    fleet = two.client
    assert isinstance(fleet, Fleet)
    with LLM(**SETTINGS) as one:
        assert answers(two) == answers(one)
        assert min(fleet.router.num_routed) > 0
        assert np.array_equal(fleet.logits([65, 66]), one.client.logits([65, 66]))
        vectors = [llm.embed("a text")[0].outputs.embedding for llm in (two, one)]
        assert vectors[0] == vectors[1]
    with pytest.raises(RequestError, match="tokenizer is given"):
        LLM(data_parallel_size=2, tokenizer=two.get_tokenizer())


def test_requests_go_where_their_prefix_is_until_it_is_forgotten(two: LLM) -> None:
    fleet = two.client
    assert isinstance(fleet, Fleet)
    fleet.reset_prefix_cache().result(TIMEOUT_S)
    wait_until(lambda: len(fleet.router.index) == 0)
    beginnings = [[70 + i] * 200 for i in range(4)]
    first = [two.generate(ids, SamplingParams(max_tokens=1))[0] for ids in beginnings]  # both idle each time: in turn
    assert [output.num_cached_tokens for output in first] == [0] * 4
    wait_until(lambda: len(fleet.router.index) == 4 * (200 // 16))
    before, found = list(fleet.router.num_routed), fleet.router.num_found_tokens
    again = [two.generate([*ids, 90 + i], SamplingParams(max_tokens=4))[0] for i in range(3) for ids in beginnings]
    assert all((output.num_cached_tokens or 0) >= 192 for output in again)
    assert fleet.router.num_found_tokens - found == 12 * 192
    assert [after - routed for after, routed in zip(fleet.router.num_routed, before)] == [6, 6]
    dropped, held = fleet.reset_prefix_cache().result(TIMEOUT_S)
    assert (dropped > 48, held) == (True, 0)
    wait_until(lambda: len(fleet.router.index) == 0)
