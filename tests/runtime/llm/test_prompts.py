"""An argument of one value a prompt, or one for all; and what is no prompt, no conversation and no tool."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.engine.errors import RequestError
from runtime.engine.sampling_params import SamplingParams
from runtime.llm.prompts import as_list, check_tools, conversations_of, ids_of, one_each


@pytest.mark.parametrize("given", ["a0", 5, {"x": 1}])
def test_what_is_neither_a_value_nor_a_list_is_refused_by_name(given: Any) -> None:
    with pytest.raises(RequestError, match=f"lora_request must be a SamplingParams, .* got {type(given).__name__}"):
        one_each("lora_request", ["x", "y"], given, SamplingParams)


def test_lists_of_another_length_are_refused() -> None:
    with pytest.raises(RequestError, match="2 prompts, but 1 sampling_params"):
        one_each("sampling_params", ["x", "y"], [SamplingParams()], SamplingParams)


@pytest.mark.parametrize(
    "given", [b"a", bytearray(b"a"), memoryview(b"a"), {1, 2}, frozenset((1,)), np.array(1), 3, None]
)
def test_bytes_and_sets_are_no_token_ids(given: Any) -> None:
    """Each would give integers."""
    with pytest.raises(RequestError, match="prompts must be a text, token ids, or a list of them"):
        as_list(given)
    with pytest.raises(RequestError, match="a prompt is a text or a list of token ids"):
        as_list([given, "a"])
    with pytest.raises(RequestError, match=f"must be a list of token ids, got {type(given).__name__}"):
        ids_of("prompt_token_ids", given)


def test_token_ids() -> None:
    for given in ([1, 2], (1, 2), range(1, 3), np.array([1, 2]), [np.int64(1), 2]):
        assert ids_of("prompt", given) == [1, 2]
    for wrong, kind in (([1, "a"], "str"), ([1.5], "float"), ([None], "NoneType"), ([True], "bool"), ([[1]], "list")):
        with pytest.raises(RequestError, match=f"prompt must hold integers, got {kind}"):
            ids_of("prompt", wrong)
    with pytest.raises(RequestError, match="must be a list of token ids, got str"):
        ids_of("prompt", "a")


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("a", "messages must be a conversation, .* got 'a'"), (None, "got None"), (3, "got 3"), (b"a", "got b'a'"),
        (USER, "messages must be"), ([3], r"messages\[0\] must be a list of messages, got \[3\]"),
        (["a"], r"messages\[0\] must be .* got 'a'"), ([[USER], 3], r"messages\[1\] must be"),
        ([[USER], []], r"messages\[1\] has no messages"), ([[[USER]]], r"messages\[0\] must be"),
    ],
)  # fmt: skip
def test_no_conversation(given: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        conversations_of("messages", given)


def test_conversations() -> None:
    assert conversations_of("messages", [USER]) == conversations_of("messages", ((USER,),)) == [[USER]]
    assert conversations_of("messages", [[USER], [USER]]) == [[USER]] * 2
    assert conversations_of("messages", []) == []
    assert conversations_of("inputs", ["a", [USER]], takes_texts=True) == [[USER]] * 2


@pytest.mark.parametrize(
    "given", [3, "a", [3], [{}], [{"function": {}}], [{"function": {"name": 3}}], {"function": {}}]
)
def test_no_tools(given: Any) -> None:
    with pytest.raises(RequestError, match=r"tools(\[0\])? must be"):
        check_tools(given)
