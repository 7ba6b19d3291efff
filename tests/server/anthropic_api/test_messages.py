"""`/v1/messages` with Anthropic's SDK: answers, streams, tools, thinking, errors; sync and async."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.later import later
from server.config import ServerConfig
from tests.server.conftest import ANSWER, Served, as_new, faked, prompt_of, say, saying
from tests.waiting import wait_until
from tokenizer import Tokenizer

anthropic = later("anthropic")  # takes a second to import

MODEL = "fake-model"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [{"name": name, "description": "It looks.", "input_schema": SCHEMA} for name in ("weather", "time")]
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Röm 😀"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nThey ask for it.\n</think>\n\n"
USAGE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def ask(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(**{"model": MODEL, "max_tokens": 1000, "messages": HELLO, **fields})


def events_of(served: Served, **fields: Any) -> list[tuple[str, Any]]:
    """A stream's events as they came: name and data."""
    asked = {"model": MODEL, "max_tokens": 1000, "messages": HELLO, "stream": True, **fields}
    response = served.http.post("/v1/messages", json=asked)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for frame in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_a_message(served: Served, client: anthropic.Anthropic) -> None:
    answer = ask(client, system="Be kind.", metadata={"user_id": "me"}, cache_control={"type": "ephemeral"})
    assert prompt_of(served) == "<s>system:Be kind.</s><s>user:Hello</s><s>assistant:"
    assert answer.type == "message"
    assert answer.role == "assistant"
    assert answer.id.startswith("msg_")
    assert answer._request_id == answer.id
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": ANSWER}]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.input_tokens == len(served.engine.requests[-1].prompt_token_ids)
    assert answer.usage.output_tokens == len(ANSWER.encode()) + 1
    assert answer.usage.cache_read_input_tokens == 0


def test_every_kind_of_block(served: Served, client: anthropic.Anthropic) -> None:
    """As a client sends an answer back: thinking, text, calls; then their results, and a text."""
    mark = {"cache_control": {"type": "ephemeral"}}
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", **mark}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "y"},
                {"type": "text", "text": "I look.", "citations": None},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rom"}, **mark},
                {"type": "tool_use", "id": "t2", "name": "time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "warm"}], **mark},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no clock", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    ask(client, system=[{"type": "text", "text": "S1", **mark}, {"type": "text", "text": "S2"}], messages=turns)
    assert prompt_of(served) == (
        "<s>system:S1\nS2</s><s>user:a\nb</s>"
        '<s>assistant:THOUGHThmI look.CALL{"city": "Rom"}CALL{}</s>'
        "<s>tool:warm</s><s>tool:Error: no clock</s><s>user:And?</s><s>assistant:"
    )


NOISE = "x-anthropic-billing-header: cc_version=2.1.197.a1b; cc_entrypoint=cli; cch={};"
VERSION = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=sdk-cli;"
"""As `claude -p` sends it: the last digits are another conversation's."""


def test_the_billing_line_of_claude_code_is_not_rendered(served: Served, client: anthropic.Anthropic) -> None:
    """The first system block of Claude Code is such a line, with other digits in each request."""

    def header_and_prompt(system: Any, **fields: Any) -> tuple[str | None, str]:
        asked = {"model": MODEL, "max_tokens": 9, "messages": HELLO, "system": system, **fields}
        answer = served.http.post("/v1/messages", json=asked)
        assert answer.status_code == 200, answer.text
        return answer.headers.get("x-xserv-normalized"), prompt_of(served)

    rest = "<s>user:Hello</s><s>assistant:"
    kept: list[Any] = [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}]
    for digits in ("00000", "a1f09"):
        line = {"type": "text", "text": NOISE.format(digits)}
        found = ("x-anthropic-billing-header", f"<s>system:Be kind.\nBe brief.</s>{rest}")
        assert header_and_prompt([line, *kept]) == found
        assert header_and_prompt([{"type": "text", "text": VERSION.format(digits[:3])}, *kept]) == found
        for end in ("\n", "\r\n"):
            assert header_and_prompt([{"type": "text", "text": f"{line['text']}{end}Be kind."}, kept[1]]) == found
        assert header_and_prompt([line]) == ("x-anthropic-billing-header", rest)
        asked = {"model": MODEL, "messages": HELLO, "system": [line, *kept]}
        counted = served.http.post("/v1/messages/count_tokens", json=asked).json()
        assert counted["input_tokens"] == len(served.engine.requests[-3].prompt_token_ids)
    for text in (NOISE.format("a1f0"), NOISE.format("A1F09"), NOISE.format("a1f09") + " Be kind.", "cch=a1f09;"):
        assert header_and_prompt([{"type": "text", "text": text}]) == (None, f"<s>system:{text}</s>{rest}")
    later = [kept[0], {"type": "text", "text": NOISE.format("a1f09")}]
    assert header_and_prompt(later) == (None, f"<s>system:Be kind.\n{NOISE.format('a1f09')}</s>{rest}")
    user = [{"role": "user", "content": NOISE.format("a1f09")}]
    assert NOISE.format("a1f09") in header_and_prompt(kept, messages=user)[1]


def test_the_billing_line_can_be_kept(tokenizer: Tokenizer) -> None:
    with faked(tokenizer, config=ServerConfig(keep_client_noise=True)) as served:
        asked = {"model": MODEL, "max_tokens": 9, "messages": HELLO, "system": NOISE.format("a1f09")}
        answer = served.http.post("/v1/messages", json=asked)
        assert "x-xserv-normalized" not in answer.headers
        assert NOISE.format("a1f09") in prompt_of(served)


def test_what_was_answered_can_be_sent_back(served: Served, client: anthropic.Anthropic) -> None:
    saying(served, THOUGHT + "I look. " + ROME)
    answer = ask(client, tools=TOOLS)
    result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "warm"}
    ask(client, tools=TOOLS, messages=[*HELLO, answer.to_param(), {"role": "user", "content": [result]}])
    assert '<s>assistant:THOUGHTThey ask for it.I look.CALL{"city": "Röm 😀"}</s><s>tool:warm</s>' in prompt_of(served)


def test_the_last_turn_is_continued(served: Served, client: anthropic.Anthropic) -> None:
    ask(client, messages=[*HELLO, {"role": "assistant", "content": "The answer is ("}])
    assert prompt_of(served) == "<s>user:Hello</s><s>assistant:The answer is ("
    call = {"type": "tool_use", "id": "t", "name": "time", "input": {}}
    with pytest.raises(anthropic.BadRequestError, match="want a tool_result"):
        ask(client, messages=[*HELLO, {"role": "assistant", "content": [call]}])


def test_parameters_arrive(served: Served, client: anthropic.Anthropic) -> None:
    ask(
        client, max_tokens=7, stop_sequences=["x", "yz"],
        extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 9, "min_p": 0.125, "seed": 3, "priority": 2},
    )  # fmt: skip
    request = served.engine.requests[-1]
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.25, 9)
    assert (params.stop, params.min_p, params.seed, request.priority) == (["x", "yz"], 0.125, 3, 2)


def test_why_it_stopped(served: Served, client: anthropic.Anthropic) -> None:
    stopped = ask(client, stop_sequences=["世界"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "世界")
    assert stopped.content[0].text == "Grüße, "
    cut = ask(client, max_tokens=3)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    saying(served, "a" * 5000)
    full = ask(client, max_tokens=20_000)
    assert full.stop_reason == "model_context_window_exceeded"
    saying(served, "")
    assert ask(client).content == []


def test_tools(served: Served, client: anthropic.Anthropic) -> None:
    saying(served, THOUGHT + "Let me see.\n" + ROME + "\n" + TIME)
    answer = ask(client, tools=TOOLS, tool_choice={"type": "auto"})
    thought, text, weather, clock = answer.content
    assert (thought.type, thought.thinking, thought.signature) == ("thinking", "They ask for it.", "unsigned")
    assert (text.type, text.text) == ("text", "Let me see.")
    assert (weather.type, weather.name, weather.input) == ("tool_use", "weather", {"city": "Röm 😀"})
    assert (clock.type, clock.name, clock.input) == ("tool_use", "time", {})
    assert weather.id != clock.id
    assert answer.stop_reason == "tool_use"
    assert answer.usage.output_tokens_details.thinking_tokens == len("They ask for it.")
    shown = json.loads(prompt_of(served).partition("TOOLS")[2].partition("<s>")[0])
    assert [tool["function"]["name"] for tool in shown] == ["weather", "time"]
    assert shown[0]["function"] == {"name": "weather", "description": "It looks.", "parameters": SCHEMA}


def test_tool_choice(served: Served, client: anthropic.Anthropic) -> None:
    def grammar(**fields: Any) -> str | None:
        ask(client, tools=TOOLS, **fields)
        found = served.engine.requests[-1].params.grammar
        return None if found is None else found.text

    assert grammar(tool_choice={"type": "auto"}) is None
    both = grammar(tool_choice={"type": "any"})
    assert both is not None
    assert "weather" in both
    assert "time" in both
    named = grammar(tool_choice={"type": "tool", "name": "time"})
    assert named is not None
    assert "weather" not in named
    assert grammar(tool_choice={"type": "none"}) is None
    assert "TOOLS" not in prompt_of(served)
    saying(served, ROME + TIME)
    one = ask(client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.name for block in one.content] == ["weather"]
    for wrong in ({"type": "auto", "name": "time"}, {"type": "tool"}):
        with pytest.raises(anthropic.BadRequestError, match=r"tool_choice\.name"):
            ask(client, tools=TOOLS, tool_choice=wrong)
    with pytest.raises(anthropic.BadRequestError, match="not among the tools"):
        ask(client, tools=TOOLS, tool_choice={"type": "tool", "name": "nothing"})


def test_the_sdk_runs_tools(served: Served, client: anthropic.Anthropic) -> None:
    """Its loop: a call, the function's result, the answer; over the beta route's query and header."""
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """It looks."""
        asked.append(city)
        return "warm"

    def script(request: Any, index: int) -> list[int]:
        return say("It is warm." if b"tool:warm" in bytes(i for i in request.prompt_token_ids if i < 256) else ROME)

    served.engine.script = script
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=1000, messages=HELLO, tools=[weather], betas=["context-management-2025-06-27"]
    )
    last = list(runner)[-1]
    assert asked == ["Röm 😀"]
    assert [block.to_dict() for block in last.content] == [{"type": "text", "text": "It is warm."}]


def test_arguments_that_are_no_object(served: Served, client: anthropic.Anthropic) -> None:
    """Cut off by `max_tokens`: they are shown as they were written."""
    saying(served, ROME)
    answer = ask(client, tools=TOOLS, max_tokens=len('<tool_call>\n{"name": "weather", "arguments": {"city"'))
    assert answer.stop_reason == "max_tokens"
    assert answer.content[0].input == {"INVALID_JSON": '{"city"'}


def test_structured_output(served: Served, client: anthropic.Anthropic) -> None:
    saying(served, '{"city":"Rom"}')
    schema = {**SCHEMA, "required": ["city"], "additionalProperties": False}
    answer = ask(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(answer.content[0].text) == {"city": "Rom"}
    grammar = served.engine.requests[-1].params.grammar
    assert grammar is not None
    assert '"city"' in grammar.text
    wrong = {"type": "array", "items": {}, "uniqueItems": True}
    with pytest.raises(anthropic.BadRequestError, match="uniqueItems"):
        ask(client, output_config={"format": {"type": "json_schema", "schema": wrong}})


def test_thinking(served: Served, client: anthropic.Anthropic) -> None:
    saying(served, THOUGHT + "Yes.")
    for thinking, seen in (
        ({"type": "enabled", "budget_tokens": 2000}, "[thinking True][effort low]"),
        ({"type": "enabled", "budget_tokens": 31999}, "[thinking True][effort high]"),
        ({"type": "adaptive"}, "[thinking True]"),
        ({"type": "disabled"}, "[thinking False]"),
    ):
        ask(client, thinking=thinking)
        assert prompt_of(served).startswith(f"{seen}<s>")
    answer = ask(client)
    assert prompt_of(served).startswith("<s>")
    assert [block.type for block in answer.content] == ["thinking", "text"]
    omitted = ask(client, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in omitted.content] == ["thinking", "text"]
    assert omitted.content[0].thinking == ""
    ask(client, output_config={"effort": "high"})
    assert prompt_of(served).startswith("[effort high]<s>")


def test_what_has_no_effect_is_named(served: Served, tokenizer: Tokenizer) -> None:
    def ignored(served: Served, **fields: Any) -> str | None:
        answer = served.http.post("/v1/messages", json={"model": MODEL, "max_tokens": 9, "messages": HELLO, **fields})
        assert answer.status_code == 200, answer.text
        return answer.headers.get("x-xserv-ignored")

    enabled = {"type": "enabled", "budget_tokens": 2000}
    assert ignored(served, thinking={"type": "adaptive"}, output_config={"effort": "low"}) is None
    assert ignored(served, thinking=enabled, metadata={"user_id": "me"}) == "metadata, thinking.budget_tokens=low"
    whole = {"id": "msg_1", "type": "message", "role": "assistant", "content": "x", "usage": {}, "stop_sequence": None}
    assert ignored(served, messages=[*HELLO, whole]) == "messages[1].id, messages[1].type, messages[1].usage"
    assert ignored(served, tools=[{**TOOLS[0], "defer_loading": True}]) == "tools[0].defer_loading"
    with faked(tokenizer) as other:  # its template knows neither
        fields = {"thinking": enabled, "output_config": {"effort": "low"}}
        assert ignored(other, **fields) == "thinking, output_config.effort"


def test_the_order_of_events(served: Served) -> None:
    saying(served, THOUGHT + "See.\n" + ROME + "\n" + TIME)
    events = events_of(served, tools=TOOLS)
    assert all(name == data["type"] for name, data in events)
    start, ping, *blocks, delta, stop = events
    message = start[1]["message"]
    assert message["content"] == []
    assert message["stop_reason"] is None
    assert ping == ("ping", {"type": "ping"})
    assert delta[1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta[1]["usage"]["output_tokens"] > 0
    assert stop == ("message_stop", {"type": "message_stop"})
    kinds = []
    for index in range(4):
        of_block = [data for _, data in blocks if data["index"] == index]
        first, *deltas, last = of_block
        assert first["type"] == "content_block_start"
        assert last == {"type": "content_block_stop", "index": index}
        kinds.append((first["content_block"]["type"], *sorted({each["delta"]["type"] for each in deltas})))
        if index == 0:
            assert deltas[-1]["delta"] == {"type": "signature_delta", "signature": "unsigned"}
        if first["content_block"]["type"] == "tool_use":
            assert first["content_block"]["input"] == {}
    assert kinds == [
        ("thinking", "signature_delta", "thinking_delta"),
        ("text", "text_delta"),
        ("tool_use", "input_json_delta"),
        ("tool_use", "input_json_delta"),
    ]
    assert [data["index"] for _, data in blocks] == sorted(data["index"] for _, data in blocks)


@pytest.mark.parametrize(
    "text", [ANSWER, "", THOUGHT + "Let me see.\n" + ROME + "\n" + TIME, ROME, "<think>\nNever closed", ROME[:-15]]
)
def test_a_stream_says_the_same(served: Served, client: anthropic.Anthropic, text: str) -> None:
    """As the SDK puts it together."""
    saying(served, text)
    whole = ask(client, tools=TOOLS)
    with client.messages.stream(model=MODEL, max_tokens=1000, messages=HELLO, tools=TOOLS) as stream:
        texts = "".join(stream.text_stream)
        final = stream.get_final_message()

    def comparable(message: Any) -> Any:
        found = message.to_dict()
        found.pop("stop_details", None)
        for block in found["content"]:
            block.pop("id", None)
        return {**found, "id": ""}

    assert texts == "".join(block.text for block in whole.content if block.type == "text")
    if text == ROME[:-15]:  # arguments that are cut off: the SDK completes what came
        assert final.content[0].input == {"city": "Röm 😀"}
    else:
        assert comparable(final) == comparable(whole)


def test_counting(served: Served, client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"system": "Be kind.", "tools": TOOLS, "thinking": {"type": "adaptive"}}
    count = client.messages.count_tokens(model=MODEL, messages=HELLO, **fields)
    assert served.engine.requests == []
    assert count.input_tokens == ask(client, **fields).usage.input_tokens
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": TOOLS[0]["name"]}):
        counted = client.messages.count_tokens(model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=choice)
        assert counted.input_tokens == ask(client, tools=TOOLS, tool_choice=choice).usage.input_tokens, choice
    served.engine.requests.clear()
    whole = {"max_tokens": 3, "temperature": 1, "top_p": 0.5, "top_k": 2, "stop_sequences": ["a"], "stream": True}
    assert client.messages.count_tokens(model=MODEL, messages=HELLO, **fields, extra_body=whole) == count
    for wrong in ({"max_tokens": "3"}, {"min_tokens": 3}):
        with pytest.raises(anthropic.BadRequestError, match=next(iter(wrong))):
            client.messages.count_tokens(model=MODEL, messages=HELLO, extra_body=wrong)


def test_models(served: Served, client: anthropic.Anthropic) -> None:
    (listed,) = client.models.list().data
    assert listed == client.models.retrieve(MODEL)
    assert (listed.id, listed.type, listed.max_input_tokens) == (MODEL, "model", 4096)
    assert listed.created_at.tzinfo is not None
    with pytest.raises(anthropic.NotFoundError) as raised:
        client.models.retrieve("claude-9")
    assert raised.value.type == "not_found_error"
    assert served.http.get("/v1/models").json()["object"] == "list"


def test_async(served: Served) -> None:
    async def talk() -> tuple[str, str, int]:
        async with anthropic.AsyncAnthropic(base_url=served.url, auth_token="any", max_retries=0) as client:
            count = await client.messages.count_tokens(model=MODEL, messages=HELLO)
            answer = await client.messages.create(model=MODEL, max_tokens=1000, messages=HELLO)
            async with client.messages.stream(model=MODEL, max_tokens=1000, messages=HELLO) as stream:
                texts = [text async for text in stream.text_stream]
            (block,) = answer.content
            assert block.type == "text"
            return block.text, "".join(texts), count.input_tokens

    assert asyncio.run(talk()) == (ANSWER, ANSWER, len("<user:Hello<assistant:") + 1)


BLOCK = "messages[0].content[1]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": ""}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": [{"type": "text", "text": 1}]}, "system[0].text"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOLS[0], {"name": "x"}]}, "tools[1].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOLS[0], "allowed_callers": ["code_execution_20260120"]}]}, "tools[0].allowed_callers[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"n": 2}, "n"),
        ({"cache_control": 3}, "cache_control"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages"),
    ],
)
def test_a_wrong_field_is_named(served: Served, client: anthropic.Anthropic, fields: Any, param: str) -> None:
    asked = {"model": MODEL, "max_tokens": 10, "messages": HELLO, **fields}
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.post("/v1/messages", body=asked, cast_to=object)
    assert raised.value.type == "invalid_request_error"
    body: Any = raised.value.body
    assert body["error"]["details"]["param"] == param
    assert param in body["error"]["message"]
    assert served.engine.requests == []


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "image", "source": {"type": "url", "url": "http://x"}}, f"{BLOCK}.type"),
        ({"type": "document", "source": {}}, f"{BLOCK}.source.type"),
        ({"type": "tool_use", "id": "a", "name": "b", "input": {}}, f"{BLOCK}.type"),
        ({"type": "text"}, f"{BLOCK}.text"),
        ({"type": "text", "text": "x", "color": "red"}, f"{BLOCK}.color"),
        ({"type": "tool_result", "content": "x"}, f"{BLOCK}.tool_use_id"),
        ({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}, f"{BLOCK}.content[0].source"),
        ({"type": "tool_result", "tool_use_id": "x", "content": ""}, "messages"),
        ({"text": "x"}, f"{BLOCK}.type"),
    ],
)
def test_a_wrong_block_is_named(client: anthropic.Anthropic, block: Any, param: str) -> None:
    """The one before the last: the template refuses it."""
    with pytest.raises(anthropic.BadRequestError) as raised:
        ask(client, system="S", messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, block]}])
    body: Any = raised.value.body
    assert body["error"]["details"]["param"] == param


def test_errors_are_the_sdks(served: Served, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, model="claude-9")
    assert missing.value.type == "not_found_error"
    assert missing.value.error_code == "model_not_found"
    assert missing.value.request_id == missing.value.response.headers["x-request-id"]
    with pytest.raises(anthropic.NotFoundError, match="batches"):
        client.messages.batches.list()
    with pytest.raises(anthropic.BadRequestError, match="context") as long:
        ask(client, messages=[{"role": "user", "content": "x" * 5000}])
    assert long.value.error_code == "context_length_exceeded"
    with pytest.raises(anthropic.APIStatusError) as media:
        client.post("/v1/messages", body=None, cast_to=object, options={"headers": {"content-type": "text/plain"}})
    assert media.value.status_code == 415
    served.engine.die()
    with pytest.raises(anthropic.InternalServerError) as dead:
        ask(client)
    assert (dead.value.status_code, dead.value.type) == (503, "overloaded_error")


def test_a_fault_in_mid_stream(served: Served, client: anthropic.Anthropic) -> None:
    served.engine.failing.add(0)
    with pytest.raises(anthropic.APIStatusError) as raised:
        list(client.messages.create(model=MODEL, max_tokens=9, messages=HELLO, stream=True))
    assert raised.value.type == "api_error"
    assert "secret" not in str(raised.value)


def test_a_client_that_leaves_is_noticed(served: Served, client: anthropic.Anthropic) -> None:
    served.engine.script = lambda request, index: [97] * 10**6
    served.engine.step_s = 0.01
    with client.messages.stream(model=MODEL, max_tokens=4000, messages=HELLO) as stream:
        next(iter(stream.text_stream))
    wait_until(lambda: served.engine.num_open == 0)
    assert served.engine.cancelled


def test_keys(tokenizer: Tokenizer) -> None:
    """As `x-api-key` and as a bearer's; the refusal is Anthropic's error."""
    with faked(tokenizer, config=ServerConfig(api_keys=("sk-one",))) as served:
        for fields in ({"api_key": "sk-one"}, {"auth_token": "sk-one"}):
            with anthropic.Anthropic(base_url=served.url, max_retries=0, **fields) as client:
                assert ask(client).content[0].text == ANSWER
        with anthropic.Anthropic(base_url=served.url, max_retries=0, api_key="sk-two") as client:
            with pytest.raises(anthropic.AuthenticationError) as raised:
                ask(client)
            assert raised.value.type == "authentication_error"


@pytest.fixture
def served(thinking_server: Served) -> Iterator[Served]:
    yield from as_new(thinking_server)


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0) as client:
        yield client
