"""Structured output over HTTP: each way to ask for it, what is refused and how, what is streamed; on the bundled
model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from runtime.engine.errors import RequestError
from runtime.engine.grammar.compiling import GrammarChecker
from runtime.engine.grammar.grammar import Grammar
from runtime.engine.grammar.matcher import LazyVocabulary
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.text.load import load_tokenizer
from server.app import create_app
from server.config import ServerConfig
from server.requests.structured import RequestSchemas, schema_grammar
from tests.server.running import running
from tests.waiting import TIMEOUT_S

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["colour", "count", "ok"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"}, "days": {"enum": [1, 2, 3]}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("get_weather", "get_time")
]
MESSAGES = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def http(engine: ThreadEngineClient) -> Iterator[httpx.Client]:
    config = ServerConfig(tool_call_parser="hermes")
    app = create_app(engine, load_tokenizer(engine.info.model_path), config=config)
    with running(app) as url, httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
        yield http


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": "xserv-demo", "messages": MESSAGES, "max_tokens": 200, "seed": 1, "temperature": 1.0, **fields}
    return http.post("/v1/chat/completions", json=body)


def content(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    text = choice["message"]["content"]
    assert isinstance(text, str)
    return text


def refusal(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return dict(error)


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_json_schema(http: httpx.Client, strict: bool | None) -> None:
    answer = content(chat(http, response_format=json_schema(SCHEMA, strict=strict)))
    jsonschema.validate(json.loads(answer), SCHEMA)


def test_any_json_object(http: httpx.Client) -> None:
    answer = chat(http, response_format={"type": "json_object"}, max_tokens=30).json()["choices"][0]
    assert answer["message"]["content"].startswith("{")


def test_plain_text_is_no_constraint(http: httpx.Client) -> None:
    assert not content(chat(http, response_format={"type": "text"}, temperature=0)).startswith("{")


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"json": SCHEMA}, r"\{.*\}"),
        ({"json": json.dumps(SCHEMA)}, r"\{.*\}"),
        ({"regex": r"[a-f]{3}-\d{2}"}, r"[a-f]{3}-\d{2}"),
        ({"choice": ["Zürich", "New York"]}, "Zürich|New York"),
        ({"grammar": 'start: "a" | "b" start "b"'}, "b{0,}ab{0,}"),
    ],
)
def test_structured_outputs(http: httpx.Client, wanted: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, content(chat(http, structured_outputs=wanted)))


def test_completions_and_several_prompts_and_choices(http: httpx.Client) -> None:
    body = {
        "model": "xserv-demo", "prompt": ["a", "b", "c"], "n": 2, "max_tokens": 100, "seed": 3,
        "response_format": json_schema(SCHEMA),
    }  # fmt: skip
    answer = http.post("/v1/completions", json=body).json()
    assert len(answer["choices"]) == 6
    for choice in answer["choices"]:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)


def test_a_stream_says_what_the_whole_answer_says(http: httpx.Client) -> None:
    fields = {"response_format": json_schema(SCHEMA), "seed": 11}
    whole = content(chat(http, **fields))
    pieces = []
    for line in chat(http, stream=True, **fields).text.splitlines():
        if line.startswith("data: {"):
            pieces += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
    assert "".join(pieces) == whole
    assert len(pieces) > 4


def test_an_answer_that_is_cut_is_the_beginning_of_the_whole_one(http: httpx.Client) -> None:
    fields = {"response_format": json_schema(SCHEMA), "seed": 12}
    whole = content(chat(http, **fields))
    for max_tokens in (1, 4, 9):
        (choice,) = chat(http, **fields, max_tokens=max_tokens).json()["choices"]
        assert choice["finish_reason"] == "length"
        assert whole.startswith(choice["message"]["content"])


def test_openais_client_parses_what_comes(http: httpx.Client) -> None:
    url = str(http.base_url).rstrip("/")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(  # type: ignore[call-overload]
            model="xserv-demo", messages=MESSAGES, response_format=json_schema(SCHEMA), max_tokens=200, temperature=1
        )
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"get_weather", "get_time"}), ({"type": "function", "function": {"name": "get_time"}}, {"get_time"})],
)
def test_a_forced_tool_call(http: httpx.Client, choice: Any, names: set[str]) -> None:
    for seed in range(2):
        response = chat(http, tools=TOOLS, tool_choice=choice, seed=seed, parallel_tool_calls=False)
        assert response.status_code == 200, response.text
        (answer,) = response.json()["choices"]
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] in names
        jsonschema.validate(json.loads(call["function"]["arguments"]), TOOLS[0]["function"]["parameters"])


PLACE = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": json_schema({"not": {}})}, PLACE, "no value"),
        ({"response_format": json_schema({"items": {"uniqueItems": True}})}, f"{PLACE}.items.uniqueItems", "unique"),
        ({"response_format": json_schema({"$ref": "http://localhost/x"})}, f"{PLACE}.$ref", "http://localhost/x"),
        ({"structured_outputs": {"json": {"type": "banana"}}}, "structured_outputs.json.type", "array, object"),
        (
            {"guided_json": {"properties": {"a": {"anyOf": [{"type": "null"}, {"pattern": "(a"}]}}}},
            "guided_json.properties.a.anyOf[1].pattern", "unclosed group",
        ),
        ({"response_format": {"type": "json_object", "schema": {"type": 3}}}, "response_format.schema.type", "3"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"grammar": "begin: x"}}, "structured_outputs", "start"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "outputs.json: a json_schema is not JSON"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs", "empty"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", "true"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "response_format", "contradict",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(http: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    for stream in (False, True):
        error = refusal(chat(http, **fields, stream=stream))
        assert error["param"] == param
        assert words.lower() in error["message"].lower()


def test_a_bad_grammar_disturbs_nobody(http: httpx.Client) -> None:
    """Expensive ones are checked beside the event loop, which answers meanwhile."""
    rules = ["start: R0", *(f"R{i}: R{i + 1} R{i + 1}" for i in range(60)), 'R60: "a"']
    expensive = {"structured_outputs": {"grammar": "\n".join(rules)}}
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(chat(http, **expensive).status_code)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for seed in range(2):
        jsonschema.validate(json.loads(content(chat(http, response_format=json_schema(SCHEMA), seed=seed))), SCHEMA)
    for thread in threads:
        thread.join()
    assert results == [400] * 2


def test_a_contradiction_with_other_fields_fails_one_request_only(http: httpx.Client) -> None:
    response = chat(http, structured_outputs={"regex": "[0-9]+"}, allowed_token_ids=[1])
    assert refusal(response)["code"] == "unsatisfiable_request"
    content(chat(http, response_format=json_schema(SCHEMA)))


def test_a_complete_text_without_an_end_of_sequence_has_all_its_log_probabilities(http: httpx.Client) -> None:
    fields = {"structured_outputs": {"choice": ["abcdef"]}, "ignore_eos": True, "logprobs": True}
    (choice,) = chat(http, **fields).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "abcdef"
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "abcdef"


def test_headers_name_what_became_of_a_schema(http: httpx.Client) -> None:
    """On every way in, streamed or not; with the names that the field has there."""
    schema = {"properties": {"p": {"enum": ["a"], "format": "file-path"}}, "required": ["p"]}
    fields: Any
    for path, fields, place in (
        ("/v1/chat/completions", {"response_format": json_schema(schema), "stream": True}, PLACE),
        ("/v1/chat/completions", {"guided_json": schema}, "guided_json"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_object", "schema": schema}},
            "response_format.schema",
        ),
        ("/v1/completions", {"prompt": "a", "response_format": json_schema(schema)}, PLACE),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": schema}}, "stream": True},
            "text.format.schema",
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
            "output_config.format.schema",
        ),
        ("/api/chat", {"format": schema, "stream": False}, "format"),
        (
            "/v1/responses",
            {
                "input": "a",
                "tools": [{"type": "function", "name": "f", "parameters": schema}],
                "tool_choice": "required",
            },
            "tools[0].parameters",
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, "tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}},
            "tools[0].input_schema",
        ),
    ):
        chats = {} if "prompt" in fields or "input" in fields else {"messages": [{"role": "user", "content": "a"}]}
        response = http.post(path, json={"model": "xserv-demo", **chats, **fields})
        assert response.status_code == 200, response.text
        assert response.headers["x-xserv-ignored"].split(", ")[-1] == f"{place}.properties.p.format=file-path"
        assert response.headers["x-xserv-closed-schemas"] == place
    strict = {"type": "json_schema", "json_schema": {"schema": schema, "strict": False}}
    assert "x-xserv-closed-schemas" not in chat(http, response_format=strict, max_tokens=5).headers


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "json_object"}}])
def test_a_tools_schema_is_no_grammar_where_nobody_forces_a_call(http: httpx.Client, fields: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "banana", "pattern": "("}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert chat(http, tools=tools, max_tokens=5, **fields).status_code == 200
    error = refusal(chat(http, tools=tools, tool_choice="required"))
    assert error["param"] == "tools[2].function.parameters.properties.a.type"
    assert re.search("'banana'.*integer", error["message"])


def test_a_schema_that_is_the_whole_grammar_is_not_compiled_again_for_its_place() -> None:
    class Compiled(GrammarChecker):
        def check(self, grammar: Grammar | None) -> None:
            raise AssertionError("it was refused already")

    schemas = RequestSchemas(closes=False)
    grammar = schema_grammar(schemas.take("format", {"type": "string", "pattern": "a"}))
    error = RequestError("grammar.pattern: too much", param="grammar.pattern")
    told = schemas.at_fault(Compiled(LazyVocabulary(lambda: None, 1, ())), grammar, error)
    assert told is not None
    assert (told.param, told.message) == ("format.pattern", "format.pattern: too much")
