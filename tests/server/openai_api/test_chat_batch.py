"""`/v1/chat/completions/batch`: a choice for each conversation, as each would be answered alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import ANSWER, Served, say

BATCH = "/v1/chat/completions/batch"


def turns(*texts: str) -> list[Any]:
    return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, texts, strict=False)]


def test_each_conversation_has_a_choice(served: Served) -> None:
    served.engine.script = lambda request, index: say(bytes(i for i in request.prompt_token_ids if i < 256).decode())
    conversations = [turns("One"), turns("Two", "2", "and?"), turns("Drei 😀")]
    asked = {"messages": conversations, "max_tokens": 200, "temperature": 0, "return_token_ids": True}
    answer = served.http.post(BATCH, json=asked)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    alone = [
        served.http.post("/v1/chat/completions", json={**asked, "messages": each}).json() for each in conversations
    ]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    for choice, one in zip(body["choices"], alone, strict=True):
        assert {**choice, "index": 0} == one["choices"][0]
    for name in ("prompt_tokens", "completion_tokens"):
        assert body["usage"][name] == sum(one["usage"][name] for one in alone)
    assert "prompt_token_ids" not in body


def test_one_conversation_is_enough(served: Served) -> None:
    body = served.http.post(BATCH, json={"model": "fake-model", "messages": [turns("Hello")]}).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == [ANSWER]


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"tools": [TOOL]}, "tools"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages[0]"),
        ({"messages": turns("a")}, "messages[0]"),
        ({"messages": [turns("a"), [{"role": "user", "content": None}]]}, "messages[1][0].content"),
        ({"messages": [turns("a")] * 257}, "messages"),
        ({"messages": [turns("a"), turns("b" * 300)]}, "messages"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_is_refused(served: Served, fields: dict[str, Any], param: str) -> None:
    answer = served.http.post(BATCH, json={"messages": [turns("a")], **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
