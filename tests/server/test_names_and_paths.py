"""What a client may call the model, a path and itself: several names or none, slashes at the end, HTTP/1.0, pages of
this machine; and in whose words a limit is told."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from tokenizers import Tokenizer as Library

from runtime.engine.sampling_params import MAX_N
from server.config import ServerConfig
from server.openai_api.logprobs import Echo
from server.transport.origins import LOCAL_ORIGINS, OriginRules, origins_for
from tests.server.conftest import ANSWER, Served, faked
from tests.tokenizer.support import real_tokenizer, shared
from tests.waiting import TIMEOUT_S
from tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "Hello"}]
NAMES = ("first", "org/second")


@pytest.fixture(scope="module")
def named(tokenizer: Tokenizer) -> Iterator[Served]:
    config = ServerConfig(api_keys=("sk-1",), allowed_origins=origins_for("127.0.0.1", ()))
    with faked(tokenizer, config=config, model_name=NAMES) as served:
        served.http.headers["Authorization"] = "Bearer sk-1"
        yield served


def test_several_names(named: Served) -> None:
    assert [model["id"] for model in named.http.get("/v1/models").json()["data"]] == list(NAMES)
    for name in NAMES:
        assert named.http.get(f"/v1/models/{name}").json()["id"] == name
        answer = named.http.post("/v1/chat/completions", json={"model": name, "messages": HELLO}).json()
        assert answer["model"] == "first"
    missing = named.http.post("/v1/chat/completions", json={"model": "third", "messages": HELLO})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    chat = named.http.get("/openapi.json").json()["components"]["schemas"]["ChatCompletionRequest"]
    assert chat["properties"]["model"]["enum"] == [*NAMES, None]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"), ("/v1/v1/completions", "/v1/completions"),
        ("//v1/embeddings", "/v1/embeddings"), ("/zork", None), (f"/{'z' * 500}", None),
    ],
)  # fmt: skip
def test_a_base_url_that_is_wrong_is_told(named: Served, path: str, meant: str | None) -> None:
    url = named.url + path
    error = named.http.post(url, json={}).json()["error"]
    assert error["code"] == "unknown_url"
    assert error["message"].startswith(f"Unknown request URL: POST {path[:80]}.")
    assert error["message"].endswith(f" There is {meant}: is the client's base URL right?" if meant else ".")
    assert len(error["message"]) < 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/responses", {"input": "Hello"}),
        ("/tokenize", {"prompt": "Hello"}),
    ],
)
def test_without_a_model_and_with_a_slash(named: Served, path: str, body: dict[str, Any]) -> None:
    for asked in (path, f"{path}/"):
        for name in ({}, {"model": None}):
            assert named.http.post(asked, json={**body, **name}).status_code == 200, asked


def test_slashes_lead_nowhere_else(named: Served) -> None:
    assert named.http.get("/v1/models/").status_code == 200
    assert named.http.get("/v1/models/org/second/").json()["id"] == "org/second"
    assert named.http.get("/v1/nothing/").status_code == 404
    assert named.http.get("/v1/models/", headers={"Authorization": ""}).status_code == 401


def test_ready_needs_no_key(named: Served) -> None:
    for path in ("/ready", "/ready/", "/health"):
        answer = named.http.get(path, headers={"Authorization": ""})
        assert answer.status_code == 200
        assert len(answer.content) < 60


def test_pages_of_this_machine(named: Served) -> None:
    for origin in ("http://localhost:3000", "http://127.0.0.1:8080", "https://localhost", "http://[::1]:5173"):
        answer = named.http.post("/tokenize", json={"prompt": "a"}, headers={"Origin": origin})
        assert answer.status_code == 200, origin
        assert answer.headers["access-control-allow-origin"] == origin
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        assert named.http.options("/tokenize", headers=asked).status_code == 200
    for origin in (
        "http://localhost.evil.example", "http://evil.example:3000", "http://localhost:3000.evil.example",
        "http://localhost:", "null", "http://xlocalhost:1", "http://127a0a0a1:1", "file://localhost",
    ):  # fmt: skip
        answer = named.http.post("/tokenize", json={"prompt": "a"}, headers={"Origin": origin})
        assert answer.status_code == 403, origin
        assert "access-control-allow-origin" not in answer.headers
    assert origins_for("0.0.0.0", ("https://a.example",)) == ("https://a.example",)
    assert origins_for("::1", ("https://a.example",)) == ("https://a.example", *LOCAL_ORIGINS)
    OriginRules(None, ("*",)).check("POST", "http", [(b"origin", b"https://any.example")])


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_no_chunks(named: Served, stream: bool) -> None:
    body = json.dumps({"messages": HELLO, "stream": stream}).encode()
    address = urlsplit(named.url)
    with socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S) as connection:
        head = f"POST /v1/chat/completions HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
        head += "Authorization: Bearer sk-1\r\nContent-Type: application/json\r\nConnection: keep-alive\r\n\r\n"
        connection.sendall(head.encode() + body)
        received = b""
        while data := connection.recv(65536):  # to the end of the connection
            received += data
    headers, _, rest = received.partition(b"\r\n\r\n")
    assert headers.split(b" ", 2)[1] == b"200"
    assert b"transfer-encoding" not in headers.lower()
    if stream:
        events = rest.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-2]]
        assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER
    else:
        assert json.loads(rest)["choices"][0]["message"]["content"] == ANSWER
        assert b"content-length: %d" % len(rest) in headers.lower()


def test_an_overflow_is_told_in_openais_words(served: Served) -> None:
    """litellm and LangChain fall back on longer models by these words, or by the code."""
    text = "x" * 1000
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/responses", {"input": text}),
        ("/v1/embeddings", {"input": text}),
    ]
    most = served.engine.info.max_model_len
    for path, body in bodies:
        error = served.http.post(path, json=body).json()["error"]
        assert error["code"] == "context_length_exceeded", path
        assert error["message"].startswith(f"This model's maximum context length is {most} tokens"), error
        assert str(error["message"]).count("100") or str(error["message"]).count("10"), "how long it is"
        assert (" input has " if path == "/v1/embeddings" else " The prompt has ") in error["message"], path
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is"):
        served.openai.chat.completions.create(model="fake-model", messages=[{"role": "user", "content": text}])


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/embeddings", "input"), ("/v1/completions", "prompt"), ("/embed", "inputs"), ("/api/embed", "input")],
)
def test_the_one_of_several_texts_that_is_wrong_is_named(served: Served, path: str, field: str) -> None:
    given: list[list[Any]] = [["a", "x" * 1000, "b"]]
    options: dict[str, Any] = {"model": "fake-model", "truncate": False}
    if path.startswith("/v1"):
        options = {}
        given.append([[1], [10**6], [2]])
    for texts in given:
        answer = served.http.post(path, json={field: texts, **options})
        assert answer.status_code in (400, 413, 422), answer.text
        assert f"{field}[1] has " in answer.text


def test_the_limit_that_is_told_is_the_one_that_holds(served: Served) -> None:
    for n in (MAX_N + 1, 1024, 1025, 10**6):
        error = served.http.post("/v1/completions", json={"prompt": "a", "n": n}).json()["error"]
        assert str(MAX_N) in error["message"]
        assert "1024" not in error["message"].replace("got 1024", "")
    assert served.http.post("/v1/completions", json={"prompt": "a", "n": MAX_N, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("name", ["models/stories260K", "tokenizers/qwen3", "tokenizers/gpt2"])
def test_text_offsets_are_the_librarys(name: str) -> None:
    """With byte fallback, and with bytes; the library tells from where in the text a token was made."""
    tokenizer = real_tokenizer(name)
    library = Library.from_file(str(shared(name) / "tokenizer.json"))
    for text in ("Hello, world", "Grüße 世界 😀 a", "a\n\nb\t世 c", "😀😀x", "once upon 世世 a time"):
        found = library.encode(text, add_special_tokens=False)
        starts = [start for start, _ in found.offsets]
        echo = Echo.of(found.ids, text, tokenizer, has_offsets=True)
        shown = [
            start + len(token) - len(token.lstrip(" \u2581Ġ")) if re.match("[\u2581Ġ]", token) else start
            for start, token in zip(starts, found.tokens, strict=True)
        ]
        assert len(echo.token_offsets) == len(starts)
        for offset, start, bare in zip(echo.token_offsets, starts, shown, strict=True):
            assert offset in (start, bare), (text, echo.token_offsets, starts)
