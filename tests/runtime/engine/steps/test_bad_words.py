"""Sequences of ids that an output must not hold; and requests that forbid all that they could draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.engine.errors import RequestError
from runtime.engine.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from tests.runtime.engine.fakes import (
    EOS,
    FakeModel,
    each_loop,
    fake_logits,
    greedy,
    make_engine,
    prefix_hashes,
    request,
    run_to_end,
)

__all__ = ["each_loop"]

pytestmark = pytest.mark.usefixtures("each_loop")

PROMPT = [3, 1, 4]


def greedy_without(words: list[list[int]], num_tokens: int) -> list[int]:
    """The most probable id at each position that completes none of the words, by looking at the whole output."""
    output: list[int] = []
    for _ in range(num_tokens):
        hashes = prefix_hashes(np.array(PROMPT + output))
        for token in np.argsort(-fake_logits(np.array(hashes[-1:]))[0], kind="stable").tolist():
            if not any((output + [token])[-len(word) :] == word for word in words):
                output.append(token)
                break
    return output


def test_words_of_any_length_do_not_come() -> None:
    free = greedy(PROMPT, 20)
    words = [[free[0]], free[2:4], free[5:8], free[9:15], [*free[:3], 1]]
    engine = make_engine()
    engine.add(request("banned", PROMPT, max_tokens=20, bad_words_token_ids=words))
    engine.add(request("free", PROMPT, max_tokens=20))
    collected = run_to_end(engine)
    expected = greedy_without(words, 20)
    assert collected["banned"].token_ids() == expected
    assert expected != free
    assert collected["free"].token_ids() == free


def test_the_second_of_two_ids_only_after_the_first() -> None:
    first, second = greedy(PROMPT, 2)
    engine = make_engine()
    engine.add(request("x", PROMPT, max_tokens=8, bad_words_token_ids=[[first, second], [second, first]]))
    output = run_to_end(engine)["x"].token_ids()
    assert output == greedy_without([[first, second], [second, first]], 8)
    assert output[0] == first
    assert output[1] != second


def test_they_join_logit_bias_and_min_tokens() -> None:
    engine = make_engine()
    bias = {50: 100.0, 51: 99.0, EOS: 98.0, 52: 60.0}
    words = [[50], [52, 51], [51, 51]]
    engine.add(request("x", PROMPT, max_tokens=4, min_tokens=2, logit_bias=bias, bad_words_token_ids=words))
    assert run_to_end(engine)["x"].token_ids() == [51, 52, EOS]


@pytest.mark.parametrize(
    ("params", "num_tokens"),
    [
        ({"allowed_token_ids": [7], "bad_words_token_ids": [[7]]}, 0),
        ({"allowed_token_ids": [7], "bad_words_token_ids": [[7, 7, 7]]}, 2),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, 0),
        ({"allowed_token_ids": [EOS, 8], "min_tokens": 1, "stop_token_ids": [8]}, 0),
    ],
)
def test_a_request_that_forbids_everything_is_at_fault(params: dict[str, Any], num_tokens: int) -> None:
    engine = make_engine()
    engine.add(request("x", PROMPT, max_tokens=5, **params))
    engine.add(request("other", PROMPT, max_tokens=5))
    collected = run_to_end(engine)
    last = collected["x"].of()[-1]
    assert collected["x"].token_ids() == [7] * num_tokens
    assert (last.finish_reason, last.error_code) == ("error", "unsatisfiable_request")
    assert collected["other"].token_ids() == greedy(PROMPT, 5)


def test_logits_that_are_not_numbers_are_not_the_requests_fault() -> None:
    model = FakeModel()
    model.nan_after = PROMPT[-1]
    engine = make_engine(model)
    engine.add(request("x", PROMPT, max_tokens=5, allowed_token_ids=[7, 8], bad_words_token_ids=[[7]]))
    last = run_to_end(engine)["x"].of()[-1]
    assert (last.finish_reason, last.error_code) == ("error", None)


@pytest.mark.parametrize(
    "words",
    ["word", [1], [["a"]], [[True]], [[]], [[1] * (MAX_BAD_WORD_TOKENS + 1)], [[1]] * (MAX_BAD_WORDS + 1), {1: 2}],
)
def test_a_wrong_list_is_refused(words: Any) -> None:
    with pytest.raises(RequestError) as raised:
        SamplingParams(bad_words_token_ids=words)
    assert raised.value.param == "bad_words_token_ids"


def test_ids_lie_within_the_vocabulary() -> None:
    engine = make_engine()
    with pytest.raises(RequestError) as raised:
        engine.add(request("x", PROMPT, bad_words_token_ids=[[1, 97]]))
    assert raised.value.param == "bad_words_token_ids"
