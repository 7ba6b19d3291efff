"""Past calls are rendered as the model wrote them, if the client sends them back with the same meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.config import ServerConfig
from server.requests.call_memory import CallMemory
from tests.server.conftest import Served, faked, prompt_of, saying
from tests.server.real_server import serving_real
from tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
DEMO = Path(__file__).parents[3] / "models" / "demo"
HELLO = {"role": "user", "content": "Hello"}
WRITTEN = '{"city":"R\\u00f6m </s>",  "days": 2.50, "tags":["a",\n"b"]}'
MEANT = json.loads(WRITTEN)
CALL = '<tool_call>\n{"name": "weather", "arguments": ' + WRITTEN + "}\n</tool_call>"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    keys = ("anna", "otto")
    config = ServerConfig(tool_call_parser="hermes", api_keys=keys)
    with faked(tokenizer, max_model_len=4096, config=config) as served:
        yield served


def ask(served: Served, messages: list[Any], key: str = "anna", **fields: Any) -> Any:
    asked = {"model": "fake-model", "messages": messages, "tools": TOOLS, "max_tokens": 900, **fields}
    answer = served.http.post(CHAT, json=asked, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer


def rendered(served: Served, call: Any, arguments: Any, key: str = "anna") -> tuple[str, str | None]:
    """The past call in the next turn's prompt, and the header."""
    back = {**call, "function": {"name": "weather", "arguments": arguments}}
    turns = [HELLO, {"role": "assistant", "content": "", "tool_calls": [back]}]
    answer = ask(served, [*turns, {"role": "tool", "tool_call_id": call["id"], "content": "warm"}], key)
    text = prompt_of(served)
    return text[text.index("CALL") : text.index("</s><s>tool")], answer.headers.get("x-xserv-replayed-calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_means_the_same_is_rendered_as_it_was_written(server: Served, stream: bool) -> None:
    saying(server, CALL)
    answer = ask(server, [HELLO], stream=stream)
    if stream:
        frames = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        call = next(call for frame in frames for call in frame["choices"][0]["delta"].get("tool_calls", ()))
        call = {"type": "function", "id": call["id"]}
    else:
        call = answer.json()["choices"][0]["message"]["tool_calls"][0]
    again = dict(reversed(MEANT.items()))
    for same in (WRITTEN, json.dumps(MEANT), json.dumps(again, indent=1, ensure_ascii=False), MEANT):
        assert rendered(server, call, same) == (f"CALL{WRITTEN}", "1")
    other = {**MEANT, "days": 3}
    assert rendered(server, call, json.dumps(other)) == (f"CALL{json.dumps(other, ensure_ascii=False)}", None)
    mine = (f"CALL{json.dumps(MEANT, ensure_ascii=False)}", None)
    assert rendered(server, call, WRITTEN, "otto") == mine, "another tenant's calls are not known"
    assert rendered(server, {**call, "id": "call_0"}, WRITTEN) == mine


def test_calls_are_counted_over_all_conversations_of_a_batch(server: Served) -> None:
    saying(server, CALL)
    call = ask(server, [HELLO]).json()["choices"][0]["message"]["tool_calls"][0]
    with_call = [HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, HELLO]
    asked = {"messages": [with_call, with_call, [HELLO]], "max_tokens": 9}
    answer = server.http.post(f"{CHAT}/batch", json=asked, headers={"authorization": "Bearer anna"})
    assert (answer.status_code, answer.headers["x-xserv-replayed-calls"]) == (200, "2"), answer.text


def test_a_special_token_in_a_call_stays_text(server: Served) -> None:
    saying(server, CALL)
    call = ask(server, [HELLO]).json()["choices"][0]["message"]["tool_calls"][0]
    rendered(server, call, json.dumps(MEANT))
    ids = server.engine.requests[-1].prompt_token_ids
    assert ids.count(258) == 3  # the ends of three messages, not the one in the call


def test_calls_are_rendered_by_the_template_without_memory(tokenizer: Tokenizer) -> None:
    config = ServerConfig(tool_call_parser="hermes", remembered_call_bytes=0)
    with faked(tokenizer, max_model_len=4096, config=config) as served:
        saying(served, CALL)
        call = ask(served, [HELLO]).json()["choices"][0]["message"]["tool_calls"][0]
        assert rendered(served, call, WRITTEN) == (f"CALL{json.dumps(MEANT, ensure_ascii=False)}", None)


def test_the_memory_is_bounded() -> None:
    memory = CallMemory(10_000)
    for number in range(1000):
        memory.put(None, f"call_{number}", json.dumps({"number": number}))
        memory.spelled(None, "call_0", '{"number":0}')
    assert memory.size_bytes <= 10_000
    assert len(memory) > 5
    assert memory.spelled(None, "call_0", '{"number":0}') == '{"number": 0}', "used ones stay"
    assert memory.spelled(None, "call_999", '{"number":999.0}') == '{"number": 999}'
    assert memory.spelled(None, "call_1", '{"number":1}') is None
    for wrong in ('{"number":true}', "{", "[999]", '{"number":"999"}', '{"number":null}', "[" * 10_000):
        assert memory.spelled(None, "call_999", wrong) is None
    memory.put(None, "call_\ud800", '{"number": 1}')
    assert memory.spelled(None, "call_\ud800", '{"number":1}') == '{"number": 1}', "an id need not be UTF-8"
    memory.put(None, "call_1", "no JSON")
    memory.put(None, "call_2", json.dumps({"text": "x" * 10_000}))
    assert memory.spelled(None, "call_1", "no JSON") is memory.spelled(None, "call_2", "{}") is None


NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
NUMBERS = {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 3}
FIELDS = {"a": NUMBER, "b": NUMBER, "more": NUMBERS}
SUM = {"name": "sum", "parameters": {"type": "object", "properties": FIELDS, "required": [*FIELDS]}}


@pytest.mark.parametrize("exact", [False, True])
def test_after_a_forced_call_the_next_turn_finds_all_of_it(exact: bool) -> None:
    """The grammar writes JSON as the template does, so with `exact`, too, though nothing is remembered then."""
    with serving_real(DEMO, max_model_len=1024, exact=exact) as real:
        turns: list[Any] = [{"role": "user", "content": "What is 7 plus 8?"}]
        asked: dict[str, Any] = {"model": real.model, "tools": [{"type": "function", "function": SUM}]}
        forced = {"tool_choice": "required", "seed": 3, "max_tokens": 200, "parallel_tool_calls": False}
        answer = real.http.post(CHAT, json={**asked, **forced, "messages": turns}).json()
        message, usage = answer["choices"][0]["message"], answer["usage"]
        call = message["tool_calls"][0]
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["arguments"] == json.dumps(arguments)
        call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
        turns += [message, {"role": "tool", "tool_call_id": call["id"], "content": "15"}]
        following = real.http.post(CHAT, json={**asked, "messages": turns, "max_tokens": 1, "temperature": 0})
        found = following.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found >= usage["total_tokens"] - 1  # the end of the turn is never computed
        assert following.headers.get("x-xserv-replayed-calls") == (None if exact else "1")
