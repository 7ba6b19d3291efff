"""Tools over HTTP on the bundled model, whose chat template knows none: forced calls in every notation, allowed tools,
strict schemas, calls beside a format. OpenAI's own accumulators put streams together."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema
import openai
import pytest

from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.text.load import load_tokenizer
from server.app import create_app
from server.config import ServerConfig
from tests.runtime.text.response_template.cases import TEMPLATES
from tests.runtime.text.tools.families import FAMILIES
from tests.server.running import running

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
CLOSED = {**PARAMETERS, "additionalProperties": False}
MODEL: Any = {"model": "xserv-demo", "seed": 3, "temperature": 1.0}
MESSAGES: Any = [{"role": "user", "content": "Hello!"}]


def tool(name: str, **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": CLOSED, **fields}}


def flat(name: str, **fields: Any) -> Any:
    return {"type": "function", "name": name, "parameters": CLOSED, **fields}


_FIELDS = {name: field for name, field in TEMPLATES["objects"]["fields"].items() if name != "reasoning_content"}
RESPONSES = {**TEMPLATES["objects"], "fields": _FIELDS}
TOOLS = [tool("get_weather"), tool("get_time")]
FLAT = [flat("get_weather"), flat("get_time")]


SEED = re.sub(r"{% if m.reasoning_content %}.*?{% endif %}", "", FAMILIES["seed"][0], flags=re.DOTALL)


@contextmanager
def serving(
    engine: ThreadEngineClient, chat_template: str | None = None, response_template: Any = None, **config: Any
) -> Iterator[openai.OpenAI]:
    tokenizer = load_tokenizer(engine.info.model_path, chat_template)
    assert tokenizer is not None
    tokenizer.response_template = response_template
    app = create_app(engine, tokenizer, config=ServerConfig(**config))
    with running(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client(engine: ThreadEngineClient) -> Iterator[openai.OpenAI]:
    with serving(engine) as client:
        yield client


def calls_of(answer: Any) -> list[tuple[str, Any]]:
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    asked: Any = {**MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 400, "parallel_tool_calls": False}
    return client.chat.completions.create(**{**asked, **fields})


@pytest.mark.parametrize(
    "notation",
    ["auto", "hermes", "qwen3_coder", "glm45", "glm4", "mistral", "mistral_v11", "llama3_json", "granite",
     "phi4_mini_json", "deepseek_v3", "deepseek_v31", "pythonic", "gemma4", "json"],
)  # fmt: skip
@pytest.mark.exhaustive_cases("deepseek", "glm", "granite", "mistral", "phi4_mini_json")
def test_a_forced_call_in_every_notation(engine: ThreadEngineClient, notation: str) -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    with serving(engine, tool_call_parser=notation) as client:
        ((name, arguments),) = calls_of(whole := ask(client, tool_choice="required"))
        assert whole.choices[0].finish_reason == "tool_calls"
        assert whole.choices[0].message.content is None
        assert name in ("get_weather", "get_time")
        jsonschema.validate(arguments, CLOSED)
        with client.chat.completions.stream(
            **MODEL, messages=MESSAGES, tools=TOOLS, max_tokens=400, tool_choice=named
        ) as stream:
            put_together = stream.get_final_completion()
        ((name, arguments),) = calls_of(put_together)
        assert name == "get_time"
        jsonschema.validate(arguments, CLOSED)
        assert calls_of(ask(client, tool_choice=named)) == [(name, arguments)]
        with client.responses.stream(
            model="xserv-demo", input="Hello!", tools=FLAT, tool_choice="required", parallel_tool_calls=False
        ) as events:
            (call,) = events.get_final_response().output
        assert call.type == "function_call"
        jsonschema.validate(json.loads(call.arguments), CLOSED)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.exhaustive_cases(*(family for family in FAMILIES if family not in ("seed", "kimi")))
def test_a_forced_call_in_the_notation_that_the_template_shows(engine: ThreadEngineClient, family: str) -> None:
    with serving(engine, FAMILIES[family][0], reasoning_parser="none") as client:  # else it thinks without end
        ((name, arguments),) = calls_of(ask(client, tool_choice="required"))
        assert name in ("get_weather", "get_time")
        jsonschema.validate(arguments, CLOSED)
        with client.chat.completions.stream(
            **MODEL, messages=MESSAGES, tools=TOOLS, max_tokens=400, tool_choice="required", parallel_tool_calls=False
        ) as stream:
            assert calls_of(stream.get_final_completion()) == [(name, arguments)]


def test_a_forced_call_of_a_model_with_a_response_template(
    engine: ThreadEngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The grammar follows the chat template, and so does the parser of that answer."""
    with caplog.at_level(logging.INFO, "xserv.server"), serving(engine, SEED, RESPONSES) as client:
        ((_, arguments),) = calls_of(ask(client, tool_choice="required"))
        jsonschema.validate(arguments, CLOSED)
        free = ask(client, max_tokens=20)
        assert free.choices[0].message.content
    (line,) = [record.message for record in caplog.records if record.message.startswith("answers are read by")]
    assert line.startswith("answers are read by response_template of tokenizer_config.json; for forced calls")
    assert "as the chat template writes them: <seed:tool_call>" in line


def test_the_log_says_once_that_the_template_ignores_tools(
    engine: ThreadEngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "xserv.server"), serving(engine) as client:
        client.chat.completions.create(**MODEL, messages=MESSAGES, max_tokens=1)
        assert not [record for record in caplog.records if "ignores tools" in record.message]
        for _ in range(2):
            ask(client, max_tokens=1)
    assert len([record for record in caplog.records if "ignores tools" in record.message]) == 1


def test_an_agent_s_history_reaches_a_model_without_tools(client: openai.OpenAI) -> None:
    function = {"name": "get_time", "arguments": '{"city": "Rome", "days": 1}'}
    called = {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    history = [*MESSAGES, called, {"role": "tool", "tool_call_id": "c1", "content": "9"}]
    first, later = (ask(client, messages=messages, max_tokens=2) for messages in (MESSAGES, history))
    assert later.usage.prompt_tokens > first.usage.prompt_tokens
    assert calls_of(ask(client, messages=history, tool_choice="required"))


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools(client: openai.OpenAI) -> None:
    for seed in range(3):
        ((name, _),) = calls_of(ask(client, tool_choice=allowed("required", "get_time"), seed=seed))
        assert name == "get_time"
    one = ask(client, tool_choice=allowed("auto", "get_time"), max_tokens=1)
    both = ask(client, tool_choice="auto", max_tokens=1)
    assert one.usage.prompt_tokens < both.usage.prompt_tokens  # the other is not told
    with pytest.raises(openai.BadRequestError, match="'unknown', which is not among the tools"):
        ask(client, tool_choice=allowed("auto", "unknown"))
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    answer = client.responses.create(model="xserv-demo", input="Hello!", tools=FLAT, tool_choice=choice)
    assert {item.name for item in answer.output if item.type == "function_call"} == {"get_time"}
    assert answer.tool_choice.to_dict() == choice  # type: ignore[union-attr]
    choice["tools"][0]["name"] = "unknown"
    with pytest.raises(openai.BadRequestError, match="unknown"):
        client.responses.create(model="xserv-demo", input="Hello!", tools=FLAT, tool_choice=choice)


def namespace(name: str, *tools: Any) -> Any:
    return {"type": "namespace", "name": name, "description": f"Functions of {name}.", "tools": list(tools)}


def test_functions_in_namespaces(client: openai.OpenAI) -> None:
    """A call has the two names that its tool has, however OpenAI's SDK gets it, and goes back as it came."""
    tools = [namespace("sky", flat("get_weather")), namespace("clock", flat("get__time"))]
    asked: Any = {"model": "xserv-demo", "input": "Hello!", "tools": tools, "parallel_tool_calls": False}
    choice = {"type": "function", "name": "get__time", "namespace": "clock"}
    answer = client.responses.create(**asked, tool_choice=choice)
    (first,) = answer.output
    assert first.type == "function_call"
    assert (first.namespace, first.name) == ("clock", "get__time")
    jsonschema.validate(json.loads(first.arguments), CLOSED)
    assert [tool.to_dict() for tool in answer.tools] == [
        {**tool, "tools": [{**each, "strict": None, "description": None} for each in tool["tools"]]} for tool in tools
    ]
    with client.responses.stream(**asked, tool_choice="required") as events:
        (call,) = events.get_final_response().output
    assert call.type == "function_call"
    assert (call.namespace, call.name) in {("sky", "get_weather"), ("clock", "get__time")}

    def num_tokens(*items: Any, **fields: Any) -> int:
        usage = client.responses.create(**{**asked, **fields, "input": items}, max_output_tokens=1).usage
        assert usage is not None
        return usage.input_tokens

    hello = {"role": "user", "content": "Hello!"}
    output = {"type": "function_call_output", "call_id": first.call_id, "output": "9"}
    as_seen = {**first.to_dict(), "name": "clock__get__time", "namespace": None}
    expected = num_tokens(hello, as_seen, output)
    assert num_tokens(hello, first.to_dict(), output) == expected
    assert num_tokens(output, previous_response_id=answer.id) == expected


def test_the_names_of_namespaces_and_functions_together(client: openai.OpenAI) -> None:
    def refused(*tools: Any) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="xserv-demo", input="Hello!", tools=tools)
        return caught.value

    error = refused(flat("sky__look"), namespace("sky", flat("look")))
    assert error.param == "tools[1].tools[0].name"
    assert "two functions that the model sees as 'sky__look'" in error.message
    error = refused(namespace("n" * 100, flat("f" * 27)))
    assert error.param == "tools[0].tools[0].name"
    assert "at most 128" in error.message
    error = refused(*(namespace(f"n{i}", *(flat(f"f{j}") for j in range(65))) for i in range(2)))
    assert "at most 128 functions, got 130" in error.message
    assert refused({**namespace("sky", flat("look")), "tools": []}).param == "tools[0].tools"
    assert refused(namespace("sky", {"type": "custom", "name": "look"})).param == "tools[0].tools[0].type"


FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["yes", "no"]}}}


def test_a_forced_call_comes_before_a_format(client: openai.OpenAI) -> None:
    assert len(calls_of(ask(client, tool_choice="required", response_format=FORM))) == 1
    text: Any = {"format": {"type": "json_schema", "name": "answer", "schema": {"enum": ["yes", "no"]}}}
    answer = client.responses.create(
        model="xserv-demo", input="Hello!", text=text, tools=FLAT, tool_choice="required", parallel_tool_calls=False
    )
    assert [item.type for item in answer.output] == ["function_call"]
    with pytest.raises(openai.BadRequestError, match="contradict"):
        ask(client, tool_choice="required", extra_body={"structured_outputs": {"regex": "a"}})


def test_with_a_format_an_answer_is_that_or_calls(client: openai.OpenAI) -> None:
    found = set()
    for seed in range(8):
        (choice,) = ask(client, response_format=FORM, seed=seed, temperature=1.5).choices
        found.add("call" if choice.message.tool_calls else choice.message.content)
    assert found <= {"call", '"yes"', '"no"'}
    none = ask(client, response_format=FORM, tool_choice="none").choices[0].message
    assert none.content in ('"yes"', '"no"')


def test_strict_closes_what_does_not_say_that_it_is_open(engine: ThreadEngineClient, client: openai.OpenAI) -> None:
    def keys(client: openai.OpenAI, **fields: Any) -> set[str]:
        named = {"type": "function", "function": {"name": "f"}}
        tools = [tool("f", parameters=PARAMETERS, **fields)]
        found: set[str] = set()
        for seed in range(4):
            answer = ask(client, tools=tools, tool_choice=named, seed=seed, temperature=1.5, max_tokens=150)
            (call,) = answer.choices[0].message.tool_calls
            try:
                found.update(json.loads(call.function.arguments))
            except ValueError:  # it ran on into other keys, to max_tokens
                found.add("more")
        return found

    assert keys(client) == keys(client, strict=True) == {"city", "days"}
    assert keys(client, strict=False) != {"city", "days"}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}
    answer = ask(client, tools=None, parallel_tool_calls=None, response_format=form, temperature=1.5)
    jsonschema.validate(json.loads(answer.choices[0].message.content), CLOSED)
    with serving(engine, close_schemas=False) as opening:
        assert keys(opening, strict=True) == {"city", "days"}
        assert keys(opening) != {"city", "days"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_is_too_large_is_refused_with_the_reason(client: openai.OpenAI, stream: bool) -> None:
    objects = [
        {"type": "object", "properties": {f"p{i}_{j}": {"type": ["string", "null"]} for j in range(25)}}
        for i in range(60)
    ]
    schema = {"type": "object", "properties": {"a": {"anyOf": objects}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    short = {"truncate_prompt_tokens": 64}
    fields: Any
    for fields, param in (
        ({"tools": [tool("f", parameters=schema)], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": None, "parallel_tool_calls": None, "response_format": form}, "response_format.json_schema.schema"),
    ):
        with pytest.raises(openai.BadRequestError, match="items; max is") as refused:
            ask(client, stream=stream, extra_body=short, **fields)
        assert (refused.value.code, refused.value.param) == ("invalid_grammar", param)


def test_as_many_tools_as_may_be_are_forced(client: openai.OpenAI) -> None:
    schema = {**CLOSED, "properties": {f"p{i}": {"enum": ["a", "b"]} for i in range(20)}, "required": []}
    many = [tool(f"t{i}", parameters=schema) for i in range(128)]
    answer = ask(client, tools=many, tool_choice="required", extra_body={"truncate_prompt_tokens": 64})
    ((name, arguments),) = calls_of(answer)
    assert name in {f"t{i}" for i in range(128)}
    jsonschema.validate(arguments, schema)
