"""Tools that Codex sends to `/v1/responses` beside functions: custom ones, whose input is a text, and a web search."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from server.config import ServerConfig
from tests.server.conftest import Served, faked, prompt_of, saying
from tokenizer import Tokenizer

PATCH = '*** Begin Patch\n+"Röm"\n*** End Patch'
CALL = '<tool_call>\n{"name": "apply_patch", "arguments": ' + json.dumps({"input": PATCH}) + "}\n</tool_call>"
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch"}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}
SEARCH = {"type": "web_search", "external_web_access": True, "filters": {"allowed_domains": ["a.example"]}}
SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}, "strict": False}
HELLO = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    with faked(tokenizer, max_model_len=8192, config=ServerConfig(tool_call_parser="hermes")) as served:
        yield served


def ask(served: Served, items: Any, tools: Any, **fields: Any) -> Any:
    asked = {"model": "fake-model", "input": items, "tools": tools, "max_output_tokens": 900, **fields}
    answer = served.http.post("/v1/responses", json=asked)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_call_of_a_custom_tool_is_a_text(server: Served) -> None:
    saying(server, CALL)
    answer = ask(server, [HELLO], [SHELL, CUSTOM]).json()
    (call,) = answer["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert call["status"] == "completed"
    assert answer["tools"][1] == CUSTOM
    prompt = prompt_of(server)
    assert "Edits files.\\n\\nThe input is a text of this lark grammar:\\nstart: begin_patch" in prompt
    assert '"input": {"type": "string"}' in prompt
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done!"}
    again = ask(server, [HELLO, call, result], [SHELL, CUSTOM])
    assert again.headers["x-xserv-replayed-calls"] == "1"
    written = json.dumps({"input": PATCH})
    assert f"CALL{written}</s><s>tool:Done!</s>" in prompt_of(server)
    ask(server, [result], [SHELL, CUSTOM], previous_response_id=answer["id"])
    assert f"CALL{written}</s><s>tool:Done!</s>" in prompt_of(server)
    unknown = {**call, "call_id": "call_other"}
    ask(server, [HELLO, unknown, {**result, "call_id": "call_other"}], [CUSTOM])
    assert f"CALL{json.dumps({'input': PATCH}, ensure_ascii=False)}</s>" in prompt_of(server)


def test_its_events_are_openais(server: Served) -> None:
    saying(server, CALL)
    with server.openai.responses.stream(model="fake-model", input="Hello", tools=[CUSTOM]) as events:  # type: ignore[list-item]
        found = list(events)
    kinds = [event.type for event in found if "item" in event.type or "custom" in event.type]
    assert kinds == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    (call,) = found[-1].response.output  # type: ignore[union-attr]
    assert (call.type, call.input) == ("custom_tool_call", PATCH)


def test_arguments_of_another_form_stay_as_they_are(server: Served) -> None:
    saying(server, CALL.replace('"input"', '"patch"'))
    (call,) = ask(server, [HELLO], [CUSTOM]).json()["output"]
    assert call["input"] == json.dumps({"patch": PATCH})


def test_a_search_is_told_as_absent(server: Served) -> None:
    for instructions, begin in (("Be kind.", "Be kind.\n\n"), (None, "")):
        answer = ask(server, [HELLO], [SEARCH, SHELL], instructions=instructions)
        assert answer.headers["x-xserv-ignored"] == "tools[0].type=web_search"
        assert f"<s>system:{begin}These tools are not available here: web_search.</s>" in prompt_of(server)
        assert "TOOLS" in prompt_of(server)
    ask(server, [HELLO], [SEARCH])
    assert "TOOLS" not in prompt_of(server)


def test_other_tools_of_openai_are_refused_by_name(server: Served) -> None:
    for kind in ("file_search", "computer_use_preview", "mcp"):
        asked = {"model": "fake-model", "input": [HELLO], "tools": [SHELL, {"type": kind}]}
        answer = server.http.post("/v1/responses", json=asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[1].type")
