"""What a tool's result has beside text reaches a model that reads text as a note, on all four APIs; and what another
server has encrypted is taken and not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.text.test_left_out import ALTERNATING_CALLS
from tests.server.byte_tokenizer import make_byte_tokenizer
from tests.server.conftest import Served, answer_of, serving
from tests.server.fake_engine import FakeEngineClient

HEADER = "X-Xserv-Ignored"
NOTE = "[image omitted: this model reads no pictures]"
USER = {"role": "user", "content": "a"}
URI = "data:image/png;base64,AAAA"
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARTS = [{"type": "text", "text": "b"}, {"type": "image_url", "image_url": {"url": URI}}]
BLOCKS = [
    {"type": "text", "text": "b"},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}, "title": "t"},
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "c"}},
    {"type": "search_result", "source": "s", "title": "u", "content": [{"type": "text", "text": "d"}]},
    {"type": "tool_reference", "tool_name": "x"},
]
OUTPUT = [{"type": "input_text", "text": "b"}, {"type": "input_image", "image_url": URI}, {"type": "input_file"}]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            "/v1/chat/completions",
            {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": PARTS}]},
            f"b\n{NOTE}",
        ),
        (
            "/v1/messages",
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": BLOCKS}]},
                ],
                "max_tokens": 3,
            },
            f"b\n{NOTE}\nt\n[document omitted: this model reads no documents]\nc\nu\ns\nd\n"
            "[tool_reference omitted: this model reads no tool_reference]",
        ),
        (
            "/v1/responses",
            {
                "input": [
                    USER,
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": OUTPUT},
                ]
            },
            f"b\n{NOTE}\n[file omitted: this model reads no files]",
        ),
        (
            "/api/chat",
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
                    {"role": "tool", "content": "b", "images": ["AAAA"]},
                ]
            },
            f"{NOTE}\nb",
        ),
    ],
)
def test_a_note_stands_for_what_a_model_of_text_does_not_read(
    served: Served, path: str, body: dict[str, Any], expected: str
) -> None:
    response = served.http.post(path, json={"model": "fake-model", **body})
    assert response.status_code == 200, response.text
    prompt = bytes(i for i in served.engine.requests[-1].prompt_token_ids if i < 256).decode()
    assert prompt.endswith(f"CALL{{}}tool:{expected}assistant:")


def test_what_another_server_has_encrypted_is_taken_and_named(served: Served) -> None:
    items = [
        {"type": "compaction", "id": "c", "encrypted_content": "gAAA"},
        USER,
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAA"},
        {"role": "assistant", "content": "b"},
        USER,
    ]
    response = served.http.post("/v1/responses", json={"input": items})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "input[0], input[2].encrypted_content"
    blocks: list[dict[str, Any]] = [
        {"type": "redacted_thinking", "data": "gAAA"},
        {"type": "thinking", "thinking": "", "signature": "gAAA"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": [{"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "gAAA"}],
        },
        {"type": "text", "text": "b"},
    ]
    body = {"model": "fake-model", "max_tokens": 3, "messages": [USER, {"role": "assistant", "content": blocks}, USER]}
    response = served.http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "messages[1].content[2], messages[1].content[3]"


def test_a_document_of_text_is_read_and_another_is_refused_by_name(served: Served) -> None:
    def ask(source: dict[str, Any]) -> Any:
        blocks = [{"type": "document", "source": source, "title": "t"}, {"type": "text", "text": "b"}]
        body = {"model": "fake-model", "max_tokens": 3, "messages": [{"role": "user", "content": blocks}]}
        return served.http.post("/v1/messages", json=body)

    assert ask({"type": "text", "media_type": "text/plain", "data": "c"}).status_code == 200
    assert b"user:t\nc\nb" in bytes(i for i in served.engine.requests[-1].prompt_token_ids if i < 256)
    error = ask({"type": "base64", "media_type": "application/pdf", "data": "AAAA"}).json()["error"]
    assert error["details"]["param"] == "messages[0].content[0].source.type"
    assert 'got "base64"' in error["message"]


def test_what_the_template_leaves_out_is_named_in_each_apis_words(tmp_path: Path) -> None:
    engine, tokenizer = FakeEngineClient(answer_of, max_model_len=4096), make_byte_tokenizer(tmp_path)
    tokenizer.chat_templates = {"default": "{{ tools | tojson if tools }}" + ALTERNATING_CALLS}
    called = {"role": "assistant", "content": "c", "tool_calls": [CALL]}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "b"}
    spoken: list[Any] = [{"type": "text", "text": "c"}, use]
    function: list[Any] = [
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "b"},
    ]
    answers: list[tuple[str, dict[str, Any], str]] = [
        (
            "/v1/chat/completions",
            {
                "messages": [{**USER, "name": "Ann"}, called, {"role": "tool", "content": "b", "tool_call_id": "1"}],
                "chat_template_kwargs": {"tone": "dry"},
                "documents": [{"text": "b"}],
            },
            "messages[1].content, messages[0].name, chat_template_kwargs.tone, documents",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 3,
                "system": "s",
                "messages": [USER, {"role": "assistant", "content": spoken}, {"role": "user", "content": [result]}],
            },
            "messages[1].content",
        ),
        ("/v1/responses", {"input": [USER, {"role": "assistant", "content": "c"}, *function]}, "input[1].content"),
        (
            "/api/chat",
            {
                "messages": [
                    USER,
                    {**called, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
                    {"role": "tool", "content": "b"},
                ]
            },
            "messages[1].content",
        ),
    ]
    with serving(engine, tokenizer) as served:
        for path, body, expected in answers:
            response = served.http.post(path, json={"model": "fake-model", **body})
            assert response.status_code == 200, response.text
            assert response.headers[HEADER] == expected
            plain = bytes(i for i in engine.requests[-1].prompt_token_ids if i < 256).decode()
            assert "<assistant><call>{}<tool>b" in plain
        ((path, body, expected), *_) = answers
        conversations = {**body, "messages": [body["messages"]] * 2}
        assert served.http.post(f"{path}/batch", json=conversations).headers[HEADER] == expected
    engine.close()
