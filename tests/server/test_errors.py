"""What is refused, and how: the status, OpenAI's error object, the SDK's own error class; and the server
goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from server.config import ServerConfig
from tests.server.byte_tokenizer import make_byte_tokenizer, write_byte_tokenizer
from tests.server.conftest import ANSWER, Served, answer_of, faked, serving
from tests.server.fake_engine import FakeEngineClient
from tests.server.openapi import DESCRIPTION, check_answer
from tests.waiting import wait_until
from tokenizer import Tokenizer

MODEL = "fake-model"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def _goes_on(served: Served) -> Iterator[None]:
    """After each test the server still answers."""
    yield
    served.engine.reset(answer_of)
    answer = served.openai.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == ANSWER


def refused(served: Served, status: int, content: bytes | str, path: str = CHAT, **headers: str) -> dict[str, Any]:
    """The error object of a request that is refused before it reaches the engine."""
    headers = {"content-type": "application/json", **headers}
    response = served.http.post(path, content=content, headers=headers)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    if DESCRIPTION.is_file():
        check_answer("ErrorResponse", body)
    assert served.engine.requests == []
    error: dict[str, Any] = body["error"]
    return error


def chat_body(**fields: Any) -> str:
    return json.dumps({"model": MODEL, "messages": HELLO, **fields})


def completion_body(**fields: Any) -> str:
    return json.dumps({"model": MODEL, "prompt": "Hi", **fields})


def test_an_engine_that_dies_breaks_answers_off(served: Served) -> None:
    """Whoever waits for a whole answer is told when to ask again; a stream's last event is the error."""
    served.engine.script = lambda request, index: [65] * 1000
    headers = {"content-type": "application/json"}
    for retry_after_s, told in ((2.5, "3"), (None, None)):
        served.engine.step_gate.clear()
        with ThreadPoolExecutor(2) as pool:
            bodies = [chat_body(stream=is_stream) for is_stream in (False, True)]
            whole, stream = (pool.submit(served.http.post, CHAT, content=body, headers=headers) for body in bodies)
            wait_until(lambda: served.engine.num_open == 2)
            served.engine.die(retry_after_s=retry_after_s)
            answer, events = whole.result(), stream.result().text.strip().split("\n\n")
        assert (answer.status_code, answer.headers.get("Retry-After")) == (503, told)
        error = answer.json()["error"]
        assert (error["message"], error["code"]) == (
            "The engine ended before the answer was complete.", "engine_unavailable",
        )  # fmt: skip
        assert json.loads(events[-1].removeprefix("data: "))["error"] == error
        served.engine.revive()
        served.engine.step_gate.set()


def test_an_unknown_model_is_not_found(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        served.openai.chat.completions.create(model="gpt-9", messages=HELLO)
    assert raised.value.code == "model_not_found"
    assert raised.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        served.openai.completions.create(model="gpt-9", prompt="Hi")
    with pytest.raises(openai.NotFoundError):
        served.openai.models.retrieve("gpt-9")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 1000}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"user": 3}, "user"),
        ({"store": "yes"}, "store"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"temprature": 1}, "temprature"),
        ({"model": 1}, "model"),
    ],
)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_an_invalid_field_is_named(served: Served, route: str, fields: dict[str, Any], param: str) -> None:
    body = chat_body(**fields) if route == CHAT else completion_body(**fields)
    error = refused(served, 400, body, route)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.partition("[")[0].partition(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {}}]}]}, None),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {}}]}, None),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"reasoning_effort": "deep"}, "reasoning_effort"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_an_invalid_field_of_a_chat_is_named(served: Served, fields: dict[str, Any], param: str | None) -> None:
    error = refused(served, 400, chat_body(**fields))
    assert param is None or error["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [100000]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 128}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": HELLO}, "messages"),
    ],
)
def test_an_invalid_field_of_a_completion_is_named(served: Served, fields: dict[str, Any], param: str) -> None:
    assert refused(served, 400, completion_body(**fields), COMPLETIONS)["param"] == param


def test_what_the_template_says_is_told(served: Served) -> None:
    error = refused(served, 400, chat_body(messages=[{"role": "tool", "content": ""}]))
    assert "a tool must answer" in error["message"]


def test_a_model_without_template_cannot_chat(fake_engine: FakeEngineClient, tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer(tmp_path, has_template=False)
    with serving(fake_engine, tokenizer) as served:
        error = refused(served, 400, chat_body())
        assert error["param"] == "messages"
        assert "/v1/completions" in error["message"]
        assert served.openai.completions.create(model=MODEL, prompt="Hi", max_tokens=100).choices[0].text == ANSWER


def test_a_fault_within_the_template_stays_within(fake_engine: FakeEngineClient, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "chat_template": "{{ messages[0].content + 1 }}"}))
    with serving(fake_engine, Tokenizer.from_pretrained(tmp_path)) as served:
        error = refused(served, 400, chat_body())
        assert error["param"] == "messages"
        assert error["message"] == "The chat template cannot render this conversation."


def test_fields_without_effect_are_accepted(served: Served) -> None:
    fields: dict[str, Any] = {
        "user": "u",
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "modalities": ["text"],
        "best_of": 1,
        "logit_bias": None,
        "stop": None,
    }
    response = served.http.post(CHAT, json={"model": MODEL, "messages": HELLO, **fields})
    assert response.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_overlong_prompt_is_refused_before_any_header(served: Served, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        served.openai.completions.create(model=MODEL, prompt="x" * 256, stream=stream)
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.param == "prompt"
    long: Any = [{"role": "user", "content": "x" * 10_000}]  # large enough for a thread
    with pytest.raises(openai.BadRequestError) as raised:
        served.openai.chat.completions.create(model=MODEL, messages=long, stream=stream)
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.param == "messages"
    assert served.engine.requests == []


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_in_json_is_named(served: Served, route: str, name: str) -> None:
    body = chat_body(temperature=7) if route == CHAT else completion_body(temperature=7)
    error = refused(served, 400, body.replace("7", name), route)
    assert error["param"] == "temperature"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b'"text"',
        b"{",
        b'{"model": "fake-model", "messages": [',
        b'{"model": "\xff"}',
        b'{"model": "fake-\x00model"}',
        b'{"model": "fake-model", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "fake-model", "messages": [{"role": "user", "content": "\\udc00 x"}]}',
        b'{"model": "fake-model", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b"[" * 100_000,
        b'{"messages":' * 100_000,
        b'{"model": "fake-model", "tools": [{"a":' + b"[" * 300 + b"]" * 300 + b"}]}",
        b'{"model": "fake-model", "temperature": 1e999}',
        b'{"model": "fake-model", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=range(16),
)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_bodies_that_cannot_be_read(served: Served, route: str, body: bytes) -> None:
    error = refused(served, 400, body, route)
    assert "Traceback" not in error["message"]
    assert "msgspec" not in error["message"]


def test_a_nul_character_is_text_like_any_other(served: Served) -> None:
    response = served.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "a\0b"})
    assert response.status_code == 200
    assert served.engine.requests[0].prompt_token_ids == [97, 0, 98]


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_media_types_are_refused(served: Served, media_type: str) -> None:
    """A page of another origin can post those without asking; so nothing but JSON is read."""
    error = refused(served, 415, chat_body(), **{"content-type": media_type})
    assert error["code"] == "unsupported_media_type"
    response = served.http.post(CHAT, content=chat_body(), headers={"content-type": "application/json; charset=utf-8"})
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


def test_routes_and_methods(served: Served) -> None:
    for method, path, status in [
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/nothing", 404),
        ("GET", "/v1/models//", 404),
        ("PUT", "/", 405),
    ]:
        response = served.http.request(method, path)
        assert response.status_code == status, (method, path)
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert served.http.get(CHAT).headers["allow"] == "POST"


def test_a_full_queue_asks_for_patience(tokenizer: Tokenizer) -> None:
    engine = FakeEngineClient(answer_of, max_waiting=2)
    with serving(engine, tokenizer) as served:
        engine.step_gate.clear()
        with (
            served.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True),
            served.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True) as other,
        ):
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError) as raised:
                    served.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
                assert raised.value.response.headers["retry-after"] == "2"
                assert raised.value.code == "queue_full"
                assert "--max-waiting is 2 requests" in raised.value.message
            engine.step_gate.set()
            assert "".join(chunk.choices[0].delta.content or "" for chunk in other) == ANSWER
        with pytest.raises(openai.RateLimitError):  # of three prompts none is admitted
            served.openai.completions.create(model=MODEL, prompt=["a", "b", "c"])
        assert engine.num_open == 0
    engine.close()


def test_a_fault_in_the_engine_ends_its_own_request(served: Served) -> None:
    served.engine.failing = {0, 1}
    with pytest.raises(openai.InternalServerError) as raised:
        served.openai.chat.completions.create(model=MODEL, messages=HELLO)
    assert "secret" not in raised.value.response.text
    with (
        served.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True) as stream,
        pytest.raises(openai.APIError, match="server had an error") as broken,
    ):
        list(stream)
    assert "secret" not in str(broken.value.body)


def test_a_dead_engine_is_unavailable(served: Served) -> None:
    assert served.http.get("/health").status_code == 200
    served.engine.is_dead = True
    assert served.http.get("/health").status_code == 503
    with pytest.raises(openai.InternalServerError) as raised:
        served.openai.chat.completions.create(model=MODEL, messages=HELLO)
    assert raised.value.status_code == 503
    served.engine.is_dead = False


def test_an_unforeseen_error_says_nothing(served: Served) -> None:
    def broken(request: Any, index: int) -> list[int]:
        raise RuntimeError("secret detail")

    served.engine.script = broken
    with pytest.raises(openai.InternalServerError) as raised:
        served.openai.chat.completions.create(model=MODEL, messages=HELLO)
    assert raised.value.status_code == 500
    assert "secret" not in raised.value.response.text


def test_models(served: Served) -> None:
    models = served.openai.models.list()
    assert [model.id for model in models.data] == [MODEL]
    check_answer("ListModelsResponse", {"object": models.object, "data": [m.model_dump() for m in models.data]})
    model = served.openai.models.retrieve(MODEL)
    check_answer("Model", model.model_dump(exclude_unset=True))


def test_a_models_name_may_have_slashes(tokenizer: Tokenizer) -> None:
    with faked(tokenizer, model_name="owner/model") as served:
        assert served.openai.models.retrieve("owner/model").id == "owner/model"
        assert served.http.get("/v1/models/owner/model").status_code == 200
        assert served.http.get("/v1/models/owner").status_code == 404


def test_limits_can_be_set(tokenizer: Tokenizer) -> None:
    with faked(tokenizer, config=ServerConfig(max_prompts=1, max_json_depth=3)) as served:
        refused(served, 400, completion_body(prompt=["a", "b"]), COMPLETIONS)
        refused(served, 400, completion_body(prompt=[[1]], metadata={"a": [[[]]]}), COMPLETIONS)
        assert served.http.post(COMPLETIONS, content=completion_body(), headers={"content-type": "application/json"})
