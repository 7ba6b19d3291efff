"""Streams byte for byte: the framing of OpenAI's recorded streams, and every cut says what the whole says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from server.app import create_app
from tests.server.conftest import ANSWER, Served, say
from tests.server.fake_engine import FakeEngineClient
from tokenizer import Tokenizer

RECORDED = Path(__file__).parents[4] / "shared" / "data" / "openai" / "recorded_streams"
HELLO = [{"role": "user", "content": "Hello"}]
BODY: dict[str, Any] = {"model": "fake-model", "messages": HELLO, "stream": True}


def events(data: bytes) -> list[bytes]:
    """The payloads; fails when anything but `data: …` and an empty line stands between them."""
    frames = data.rstrip(b"\n").split(b"\n\n")
    assert all(frame.startswith(b"data: ") and b"\n" not in frame for frame in frames)
    return [frame.removeprefix(b"data: ") for frame in frames]


def shape(chunk: dict[str, Any]) -> Any:
    """What a chunk has, without what it says: the keys of all objects, in order, of role and reason the
    values."""
    (choice,) = chunk["choices"] or [None]
    return (
        list(chunk),
        chunk["object"],
        choice and (list(choice), list(choice["delta"]), choice["delta"].get("role"), choice["finish_reason"]),
    )


@pytest.mark.parametrize("number", range(6))
def test_a_stream_is_framed_as_openai_frames_it(served: Served, number: int) -> None:
    """Chunk by chunk the same keys in the same order, as far as the recorded answer is text."""
    if not RECORDED.is_dir():
        pytest.skip("../shared/data/openai is not there")
    recorded = events(sorted(RECORDED.iterdir())[number].read_bytes())
    assert recorded[-1] == b"[DONE]"
    theirs = [json.loads(event) for event in recorded[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in theirs if chunk["choices"]]
    is_text = not any("tool_calls" in delta or delta.get("refusal") for delta in deltas)
    reason = [c["choices"][0]["finish_reason"] for c in theirs if c["choices"]][-1]
    if not is_text or theirs[0]["choices"][0]["delta"]["content"] is None:
        pytest.skip("a refusal, which our models do not make, or calls: see test_chat_parts")
    num_texts = sum(bool(delta.get("content")) for delta in deltas)
    served.engine.script = lambda request, index: [120] * num_texts + say("")
    limit = {"max_completion_tokens": num_texts} if reason == "length" else {}
    response = served.http.post(
        "/v1/chat/completions", json={**BODY, **limit, "stream_options": {"include_usage": True}}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.content.endswith(b"data: [DONE]\n\n")
    ours = events(response.content)
    assert ours[-1] == b"[DONE]"
    assert [shape(json.loads(event)) for event in ours[:-1]] == [shape(chunk) for chunk in theirs]


def test_without_usage_there_is_no_usage_chunk(served: Served) -> None:
    *chunks, done = events(served.http.post("/v1/chat/completions", json=BODY).content)
    assert done == b"[DONE]"
    assert all(b'"usage"' not in chunk for chunk in chunks)
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "stop"


def test_newlines_and_quotes_stay_within_their_event(served: Served) -> None:
    text = 'a\n\nb\r\n"c"\u2028data: [DONE]\n\n'
    served.engine.script = lambda request, index: say(text)
    *chunks, done = events(served.http.post("/v1/chat/completions", json=BODY).content)
    assert done == b"[DONE]"
    assert "".join(json.loads(c)["choices"][0]["delta"].get("content", "") for c in chunks) == text


@pytest.mark.parametrize("step_s", [0.0, 0.002])
@pytest.mark.parametrize("stop", [None, "世界", ["done.", "!"]])
def test_a_slow_stream_and_a_fast_one_say_the_same(served: Served, stop: Any, step_s: float) -> None:
    """However many tokens come at once."""
    served.engine.step_s = step_s
    body = {**BODY, "stop": stop}
    whole = served.http.post("/v1/chat/completions", json={**body, "stream": False}).json()["choices"][0]
    chunks = events(served.http.post("/v1/chat/completions", json=body).content)[:-1]
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert "".join(c["delta"].get("content", "") for c in choices) == whole["message"]["content"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "stop"
    if stop is None:
        assert whole["message"]["content"] == ANSWER


async def test_a_server_that_raises_on_a_lost_client_loses_nothing(
    fake_engine: FakeEngineClient, tokenizer: Tokenizer
) -> None:
    """Servers of ASGI 2.4 raise OSError from `send`; the request ends, quietly."""
    fake_engine.step_s = 0.002
    app = create_app(fake_engine, tokenizer)
    body = json.dumps(BODY).encode()
    received: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]
    num_sent = 0

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 4:
            raise BrokenPipeError

    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": headers,
        "http_version": "1.1",
    }
    async with app.router.lifespan_context(app):
        await app(scope, receive, send)
        assert num_sent == 4
        assert fake_engine.cancelled == [fake_engine.requests[0].request_id]
