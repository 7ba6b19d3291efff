"""Budgets of reasoning, by each API's names, on a real engine whose model thinks aloud until it is stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from server.config import ServerConfig
from tests.models.folders import write_tiny_qwen3
from tests.server.byte_tokenizer import END_OF_TURN, TEMPLATE, write_byte_tokenizer
from tests.server.real_server import Real, serving_real

CHAT = "/v1/chat/completions"
WORDS = "Enough."
THINK, END = 259, 260
CLOSING = [*f"{WORDS}\n".encode(), END, *b"\n\n"]
THINKS = TEMPLATE.replace(
    "<s>assistant:", "<s>assistant:{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% else %}<think>{% endif %}",
)  # fmt: skip


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder = tmp_path_factory.mktemp("thinker")
    write_tiny_qwen3(folder, vocab_size=261, eos_token_id=END_OF_TURN, max_position_embeddings=4096)
    write_byte_tokenizer(folder, template=THINKS)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"] += [
        {"id": i, "content": tag, **flags} for i, tag in ((THINK, "<think>"), (END, "</think>"))
    ]
    path.write_text(json.dumps(content), encoding="utf-8")
    config = ServerConfig(reasoning_budget_message=WORDS)
    with serving_real(folder, config=config, load_format="dummy", num_blocks=600, max_num_seqs=8) as real:
        yield real


def asked(real: Real, path: str = CHAT, **fields: Any) -> Any:
    said = [{"role": "user", "content": "Hello"}]
    common = {"model": real.model, "temperature": 1.0, "seed": 5, "max_tokens": 60, "ignore_eos": True}
    body = {"messages": said, **common, "logit_bias": {str(END): -100}, "return_token_ids": True, **fields}
    if path != CHAT:
        body = {name: value for name, value in body.items() if name not in ("logit_bias", "return_token_ids")}
    answer = real.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_budget": 9},
        {"reasoning_budget": 9},
        {"thinking_token_budget": 9, "reasoning_effort": "high"},
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        {"reasoning": {"max_tokens": 9}},
        {"thinking_budget": 9, "seed": 3, "temperature": 0},
    ],
)
def test_a_chat_closes_its_reasoning(thinker: Real, fields: dict[str, Any]) -> None:
    answer = asked(thinker, **fields)
    choice, usage = answer.json()["choices"][0], answer.json()["usage"]
    ids = choice["token_ids"]
    assert ids[9 : 9 + len(CLOSING)] == CLOSING
    assert END not in ids[:9]
    assert END not in ids[9 + len(CLOSING) :]
    assert choice["message"]["reasoning_content"].endswith(WORDS)
    assert choice["message"]["content"] or fields.get("temperature") == 0
    assert 9 <= usage["completion_tokens_details"]["reasoning_tokens"] <= 9 + len(CLOSING)
    assert "budget" not in answer.headers.get("x-xserv-ignored", "")


def test_without_a_budget_nothing_is_closed(thinker: Real) -> None:
    for fields in ({}, {"thinking_budget": -1}, {"thinking_budget": 60}, {"reasoning_effort": "high"}):
        message = asked(thinker, **fields).json()["choices"][0]["message"]
        assert message["reasoning_content"]
        assert not message["content"]
    off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}, "thinking_budget": 9}
    answer = asked(thinker, **off).json()["choices"][0]
    assert WORDS.encode() not in bytes(i for i in answer["token_ids"] if i < 256)
    assert answer["message"]["content"]


def test_an_effort_has_a_budget_where_the_template_has_a_switch(thinker: Real) -> None:
    ids = asked(thinker, reasoning_effort="minimal", max_tokens=700).json()["choices"][0]["token_ids"]
    assert ids[512 : 512 + len(CLOSING)] == CLOSING


def test_json_follows_the_closed_reasoning(thinker: Real) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "minimum": 0, "maximum": 99}}}
    message = asked(thinker, thinking_budget=5, response_format=form).json()["choices"][0]["message"]
    assert 0 <= json.loads(message["content"]) <= 99
    assert message["reasoning_content"].endswith(WORDS)


def test_messages_have_a_budget(thinker: Real) -> None:
    answer = asked(thinker, "/v1/messages", thinking={"type": "enabled", "budget_tokens": 9})
    thinking, text = answer.json()["content"]
    assert thinking["thinking"].endswith(WORDS)
    assert text["text"]
    assert answer.json()["usage"]["output_tokens_details"]["thinking_tokens"] >= 9


def test_a_budget_that_cannot_be_kept_is_named(thinker: Real) -> None:
    for fields in ({"thinking_budget": -2}, {"thinking_budget": "9"}, {"thinking_budget": 2**31}):
        body = {"model": thinker.model, "messages": [{"role": "user", "content": "Hello"}], **fields}
        answer = thinker.http.post(CHAT, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_budget")
