"""Whose shapes an answer has, whichever layer it comes from, and that the gates are the same for all."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from server.config import ServerConfig
from server.errors import ApiError, dialect_of, draining
from tests.server.conftest import Served, faked
from tokenizer import Tokenizer

ANTHROPIC = [(b"anthropic-version", b"2023-06-01")]


@pytest.mark.parametrize(
    ("path", "headers", "dialect"),
    [
        ("/v1/chat/completions", ANTHROPIC, "openai"),
        ("/v1/messages", [], "anthropic"),
        ("/v1/messages/batches", [], "anthropic"),
        ("/v1/messagesx", [], "openai"),
        ("/v1/models", [], "openai"),
        ("/v1/models", ANTHROPIC, "anthropic"),
        ("/v1/models/a/b", ANTHROPIC, "anthropic"),
        ("/api/chat", [], "ollama"),
        ("/api", [], "openai"),
    ],
)
def test_whose_shapes(path: str, headers: list[tuple[bytes, bytes]], dialect: str) -> None:
    assert dialect_of({"path": path, "headers": headers}) == dialect


@pytest.mark.parametrize(
    ("status", "kind", "own"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "invalid_request_error"),
        (403, "permission_error", "invalid_request_error"),
        (404, "not_found_error", "invalid_request_error"),
        (413, "request_too_large", "invalid_request_error"),
        (415, "invalid_request_error", "invalid_request_error"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "api_error", "server_error"),
        (503, "overloaded_error", "server_error"),
    ],
)
def test_an_errors_shapes(status: int, kind: str, own: str) -> None:
    error = ApiError(status, "No.", param="n", code="no")
    details = {"error_code": "no", "param": "n"}
    assert error.body("anthropic") == {"type": "error", "error": {"type": kind, "message": "No.", "details": details}}
    assert error.body("ollama") == {"error": "No."}
    assert error.body()["error"] == {"message": "No.", "type": own, "param": "n", "code": "no"}


def message_of(body: dict[str, Any]) -> str:
    error = body["error"]
    message = error if isinstance(error, str) else error["message"]
    assert isinstance(message, str)
    return message


def test_the_gates_are_the_same(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of another site, a wrong type of body, a wrong method; and when the server is about to end."""
    paths = ("/v1/chat/completions", "/v1/messages", "/api/chat")
    shapes = ({"error"}, {"type", "error"}, {"error"})
    for headers, status in (({"origin": "https://evil.example"}, 403), ({"content-type": "text/plain"}, 415)):
        answers = [served.http.post(path, content=b"{}", headers=headers) for path in paths]
        assert [answer.status_code for answer in answers] == [status] * 3
        assert [set(answer.json()) for answer in answers] == list(shapes)
        assert len({message_of(answer.json()) for answer in answers}) == 1
    assert [served.http.put(path).status_code for path in paths] == [405] * 3
    monkeypatch.setattr("server.transport.gate.Gate._refusal", lambda self, scope, path: draining())
    answers = [served.http.post(path, json={}) for path in paths]
    assert [answer.status_code for answer in answers] == [503] * 3
    assert {message_of(answer.json()) for answer in answers} == {draining().message}


@pytest.mark.parametrize("media_type", ["", "application/x-www-form-urlencoded", "text/plain"])
def test_curl_and_litellm_name_no_type(served: Served, media_type: str) -> None:
    """To Ollama they need not; a page of another site that does the same is refused by its Origin."""
    body = b'{"model": "fake-model", "messages": [{"role": "user", "content": "Hello"}], "stream": false}'
    headers = {"content-type": media_type} if media_type else {}
    expected = 415 if media_type == "text/plain" else 200
    assert served.http.post("/api/chat", content=body, headers=headers).status_code == expected
    assert served.http.post("/v1/chat/completions", content=body, headers=headers).status_code == 415
    headers["origin"] = "https://evil.example"
    assert served.http.post("/api/chat", content=body, headers=headers).status_code == 403


def test_several_names(tokenizer: Tokenizer) -> None:
    """Each is listed, and Ollama's tag belongs to each, at all routes: Open WebUI asks Ollama's names at OpenAI's."""
    names, hello = ("first", "org/second"), [{"role": "user", "content": "Hello"}]
    with faked(tokenizer, model_name=names) as served:
        listed = served.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
        assert [model["id"] for model in listed["data"]] == [listed["first_id"], listed["last_id"]] == list(names)
        tags = [model["name"] for model in served.http.get("/api/tags").json()["models"]]
        assert tags == ["first:latest", "org/second:latest"]
        for name in (*names, *tags):
            asked = {"model": name, "messages": hello, "stream": False}
            assert served.http.post("/api/chat", json=asked).json()["model"] == name
        for name, status in ((names[1], 200), (tags[1], 200), ("first:other", 404), (f"{tags[1]}:latest", 404)):
            asked = {"model": name, "messages": hello, "max_tokens": 3}
            for path in ("/v1/messages/", "/v1/chat/completions"):
                answer = served.http.post(path, json=asked)
                assert answer.status_code == status
            asked = {"model": name, "input": "Hello", "max_output_tokens": 3}
            assert served.http.post("/v1/responses", json=asked).status_code == status
            assert served.http.get(f"/v1/models/{name}").status_code == status


def test_a_silent_stream(tokenizer: Tokenizer) -> None:
    """Anthropic's gets its own event of life; Ollama's lines leave no room for one."""
    config = ServerConfig(ping_interval_s=0.1)
    asked = {"model": "fake-model", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 2}
    with faked(tokenizer, config=config) as served:
        for path, num_least in (("/v1/messages", 3), ("/api/chat", 0)):
            served.engine.step_gate.clear()
            body = {name: value for name, value in asked.items() if path == "/v1/messages" or name != "max_tokens"}
            with served.http.stream("POST", path, json=body) as response:
                pieces, text = response.iter_text(), ""
                while text.count("event: ping") < num_least:
                    text += next(pieces)
                if not num_least:
                    time.sleep(0.5)  # of five pings
                served.engine.step_gate.set()
                text += "".join(pieces)
            assert text.count('event: ping\ndata: {"type":"ping"}\n\n') >= num_least
            assert (": ping" in text.replace("event: ping", "")) is False
            if path == "/api/chat":
                assert all(json.loads(line) for line in text.splitlines())


def test_metrics_know_the_routes(served: Served) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    asked = {"model": "fake-model", "max_tokens": 3, "messages": hello}
    assert served.http.post("/v1/messages", json=asked).status_code == 200
    assert served.http.post("/api/chat", json={"model": "fake-model", "messages": hello}).status_code == 200
    text = served.http.get("/metrics").text
    assert 'handler="/v1/messages"' in text
    assert 'handler="/api/chat"' in text


LIMITS = [
    ("/v1/chat/completions", "max_tokens", -1),
    ("/v1/chat/completions", "max_completion_tokens", -1),
    ("/v1/chat/completions", "n_predict", -2),
    ("/v1/completions", "max_tokens", -1),
    ("/v1/completions", "num_predict", -1),
    ("/v1/responses", "max_output_tokens", -1),
    ("/v1/messages", "max_tokens", -1),
    ("/api/chat", "options.num_predict", -1),
    ("/api/chat", "options.num_predict", -2),
    ("/api/chat", "options.num_predict", 0),
    ("/api/generate", "options.num_predict", 0),
    ("/api/generate", "options.num_predict", -2),
]
MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "Hello", "stream": False},
}


@pytest.mark.parametrize(("path", "name", "endless"), LIMITS)
def test_the_least_limits_of_an_answer(served: Served, path: str, name: str, endless: int) -> None:
    """-1 is no limit but the context, whatever the model recommends; what means nothing is told with its range."""

    def post(value: int) -> Any:
        outer, _, inner = name.rpartition(".")
        field = {outer: {inner: value}} if outer else {inner: value}
        return served.http.post(path, json={"model": "fake-model", **BODIES[path], **field})

    answer = post(endless)
    assert answer.status_code == 200, answer.text
    assert served.engine.requests[-1].params.max_tokens is None
    for value in (-3, 0):
        if value or path not in ("/v1/completions", "/api/chat", "/api/generate"):  # 0: the prompt alone, no limit
            refused = post(value)
            assert refused.status_code == 400
            message = message_of(refused.json())
            assert message.startswith(f"{name} must be ")
            assert "or -1 for no limit" in message
            assert message.rstrip(".").endswith(f"got {value}")
