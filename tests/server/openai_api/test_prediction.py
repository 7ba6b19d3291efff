"""`prediction` of OpenAI's chat, and our `speculation: false`, as they reach the engine, and what usage says."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.engine.messages import ProposalCounts
from tests.server.conftest import Served
from tests.server.openapi import check_answer

MODEL = "fake-model"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("content", ["a + b", [{"type": "text", "text": "a +"}, {"type": "text", "text": " b"}]])
def test_a_prediction_reaches_the_engine_and_is_counted(served: Served, content: Any) -> None:
    served.engine.proposals = ProposalCounts(9, 7, 8, 6)
    answer = served.openai.chat.completions.create(
        model=MODEL, messages=HELLO, prediction={"type": "content", "content": content}
    )
    assert bytes(served.engine.requests[-1].prediction) == b"a + b"
    assert served.engine.requests[-1].speculates
    check_answer("CreateChatCompletionResponse", answer.model_dump(exclude_unset=True))
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (6, 2)
    *_, last = served.openai.chat.completions.create(
        model=MODEL, messages=HELLO, prediction={"type": "content", "content": content}, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    assert last.usage is not None
    assert last.usage.completion_tokens_details == details


def test_without_one_usage_does_not_speak_of_it(served: Served) -> None:
    served.engine.proposals = ProposalCounts(9, 7, 0, 0)
    body = {"model": MODEL, "messages": HELLO, "speculation": False}
    answer = served.http.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert not served.engine.requests[-1].speculates
    assert served.engine.requests[-1].prediction == []


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        ("text", "prediction"),
        ({"type": "image", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": 3}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "content"}, "prediction"),
    ],
)
def test_others_are_refused(served: Served, prediction: Any, field: str) -> None:
    body = {"model": MODEL, "messages": HELLO, "prediction": prediction}
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)
