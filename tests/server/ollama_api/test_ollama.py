"""Ollama's `/api` with its own Python client: chat, generate, streams, tools, structure, vectors, models, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import ollama
import pytest

from runtime.engine.messages import PoolingRequest
from server.config import ServerConfig
from server.ollama_api.request import _with_images
from tests.server.conftest import ANSWER, Served, answer_of, as_new, faked, prompt_of, saying, serving
from tests.server.fake_engine import FakeEngineClient
from tests.waiting import wait_until
from tokenizer import Tokenizer

MODEL = "fake-model"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Röm 😀"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nThey ask for it.\n</think>\n\n"


def weather(city: str) -> str:
    """Looks out of the window.

    Args:
      city: Where the window is.
    """
    return city


def clock() -> str:
    """Tells the time."""
    return "noon"


TOOLS: list[Any] = [weather, clock]


def test_chat(served: Served, client: ollama.Client) -> None:
    messages = [{"role": "system", "content": "Be kind."}, *HELLO]
    answer = client.chat(MODEL, messages, keep_alive="5m")
    assert prompt_of(served) == "<s>system:Be kind.</s><s>user:Hello</s><s>assistant:"
    assert answer.message.role == "assistant"
    assert answer.message.content == ANSWER
    assert (answer.model, answer.done, answer.done_reason) == (MODEL, True, "stop")
    assert answer.prompt_eval_count == len(served.engine.requests[-1].prompt_token_ids)
    assert answer.eval_count == len(ANSWER.encode()) + 1
    assert answer.total_duration is not None
    assert answer.prompt_eval_duration is not None
    assert answer.eval_duration is not None
    assert answer.load_duration == 0
    assert 0 < answer.eval_duration <= answer.total_duration < 60e9
    assert abs(answer.prompt_eval_duration + answer.eval_duration - answer.total_duration) <= 1
    assert answer.created_at is not None
    assert answer.created_at.endswith("Z")
    assert client.chat(f"{MODEL}:latest", HELLO).model == f"{MODEL}:latest"
    assert client.chat(MODEL, HELLO, options={"num_predict": 3}).done_reason == "length"


def test_a_last_text_of_the_assistant_is_continued(served: Served, client: ollama.Client) -> None:
    begun = {"role": "assistant", "content": "Well, I"}
    client.chat(MODEL, [*HELLO, begun])
    assert prompt_of(served) == "<s>user:Hello</s><s>assistant:Well, I"
    client.chat(MODEL, [*HELLO, {"role": "assistant", "content": ""}])
    assert prompt_of(served).endswith("<s>assistant:</s><s>assistant:")


def test_options_arrive(served: Served, client: ollama.Client) -> None:
    options = {
        "temperature": 0.5, "top_k": 9, "top_p": 0.25, "min_p": 0.125, "repeat_penalty": 1.25, "seed": 3,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "stop": ["x", "yz"], "num_predict": 7,
        "num_ctx": 4096, "num_gpu": 1, "use_mmap": True, "mirostat": 0, "repeat_last_n": -1,
    }  # fmt: skip
    client.generate(MODEL, "Hello", options=options)
    params = served.engine.requests[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 9, 0.25, 0.125)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.25, 0.5, -0.5)
    assert (params.seed, params.stop, params.max_tokens) == (3, ["x", "yz"], 7)
    client.chat(MODEL, HELLO, options=ollama.Options(num_predict=-1, seed=-1))
    params = served.engine.requests[-1].params
    assert (params.seed, params.max_tokens) == (None, None)


def test_what_has_no_effect_is_named(served: Served) -> None:
    def ignored(path: str, **fields: Any) -> str | None:
        answer = served.http.post(path, json={"model": MODEL, **fields})
        assert answer.status_code == 200, answer.text
        return answer.headers.get("x-xserv-ignored")

    options = {"num_ctx": 9, "tfs_z": 1, "num_predict": 2.0, "seed": None, "use_mmap": None}
    assert ignored("/api/chat", messages=HELLO, options=options, keep_alive=0) == (
        "keep_alive, options.num_ctx, options.tfs_z"
    )
    assert served.engine.requests[-1].params.max_tokens == 2
    assert ignored("/api/generate", prompt="x", options={"num_thread": 1}) == "options.num_thread"
    assert ignored("/api/chat", messages=HELLO, options={"warmth": 2, "top_k": 3}) == "options.warmth"
    assert ignored("/api/generate", prompt="x", raw=True, options={"top_k": 1}) is None
    noted = {"role": "user", "content": "x", "images": None, "created_at": "now"}
    assert ignored("/api/chat", messages=[noted]) == "messages[0].created_at"


def test_a_stream(served: Served, client: ollama.Client) -> None:
    *lines, last = client.chat(MODEL, HELLO, stream=True)
    assert "".join(line.message.content or "" for line in lines) == ANSWER
    assert not any(line.done for line in lines)
    assert (last.done, last.done_reason, last.message.content) == (True, "stop", "")
    assert last.eval_count == len(ANSWER.encode()) + 1
    response = served.http.post("/api/chat", json={"model": MODEL, "messages": HELLO})  # streams by default
    assert response.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["done"] for line in response.text.splitlines()] == [False] * len(lines) + [True]
    *parts, end = client.generate(MODEL, "Hello", stream=True)
    assert "".join(part.response or "" for part in parts) == ANSWER
    assert (end.done, end.response) == (True, "")


def test_generate(served: Served, client: ollama.Client) -> None:
    answer = client.generate(MODEL, "Hello", system="Be kind.")
    assert prompt_of(served) == "<s>system:Be kind.</s><s>user:Hello</s><s>assistant:"
    assert (answer.response, answer.done_reason) == (ANSWER, "stop")
    raw = client.generate(MODEL, "Hello", raw=True)
    assert prompt_of(served) == "Hello"
    assert raw.response == ANSWER
    assert served.engine.requests[-1].params.max_tokens is None
    assert client.generate(MODEL, "Hello", raw=True, options={"num_predict": 2}).eval_count == 2
    client.generate(MODEL, "Hello", raw=True, options={"num_predict": 0})
    assert served.engine.requests[-1].params.max_tokens is None


def test_a_model_without_a_template_continues(tmp_path_factory: pytest.TempPathFactory) -> None:
    from tests.server.byte_tokenizer import make_byte_tokenizer

    engine = FakeEngineClient(answer_of)
    with serving(engine, make_byte_tokenizer(tmp_path_factory.mktemp("bare"), has_template=False)) as served:
        client = ollama.Client(served.url, trust_env=False)
        assert client.generate(MODEL, "Hello").response == ANSWER
        assert prompt_of(served) == "Hello"
        with pytest.raises(ollama.ResponseError, match="no chat template"):
            client.generate(MODEL, "Hello", system="Be kind.")
        client.close()
    engine.close()


def test_loading(served: Served, client: ollama.Client) -> None:
    """A request without content asks for the model to be loaded."""
    assert client.generate(MODEL).done_reason == "load"
    assert client.chat(MODEL, [], keep_alive=0).done_reason == "load"
    assert client.embed(MODEL, "").embeddings == []
    assert served.engine.requests == []
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.generate("other")
    with pytest.raises(ollama.ResponseError, match=r"options\.top_p"):
        client.chat(MODEL, [], options={"top_p": 2})
    with pytest.raises(ollama.ResponseError, match=r"options\.top_p"):
        client.generate(MODEL, options={"top_p": 2})


def test_tools(served: Served, client: ollama.Client) -> None:
    saying(served, "Let me see.\n" + ROME + "\n" + TIME)
    answer = client.chat(MODEL, HELLO, tools=TOOLS)
    assert answer.message.content == "Let me see."
    calls = answer.message.tool_calls
    assert calls is not None
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", {"city": "Röm 😀"}),
        ("clock", {}),
    ]
    assert '"description": "Looks out of the window."' in prompt_of(served)
    lines = list(client.chat(MODEL, HELLO, tools=TOOLS, stream=True))
    assert [call for line in lines for call in line.message.tool_calls or ()] == calls
    assert "".join(line.message.content or "" for line in lines) == "Let me see."
    history = [*HELLO, answer.message, {"role": "tool", "content": "warm", "tool_name": "weather"}]
    client.chat(MODEL, history, tools=TOOLS)
    expected = '<s>assistant:Let me see.CALL{"city": "Röm 😀"}CALL{}</s><s>tool:warm</s><s>assistant:'
    assert prompt_of(served).endswith(expected)
    saying(served, ROME[:-18])
    cut = client.chat(MODEL, HELLO, tools=TOOLS).message.tool_calls
    assert cut is not None
    assert cut[0].function.arguments == {"INVALID_JSON": '{"city": "Röm'}


def test_thinking(served: Served, client: ollama.Client) -> None:
    saying(served, THOUGHT + "Yes.")
    answer = client.chat(MODEL, HELLO, think=True)
    assert prompt_of(served).startswith("[thinking True]<s>")
    assert (answer.message.thinking, answer.message.content) == ("They ask for it.", "Yes.")
    lines = list(client.generate(MODEL, "Hello", stream=True))
    assert prompt_of(served).startswith("<s>")
    assert "".join(line.thinking or "" for line in lines) == "They ask for it."
    assert "".join(line.response or "" for line in lines) == "Yes."
    client.chat(MODEL, HELLO, think="high")
    assert prompt_of(served).startswith("[thinking True][effort high]<s>")
    client.chat(MODEL, HELLO, think=False)
    assert prompt_of(served).startswith("[effort none]<s>")
    client.chat(MODEL, [*HELLO, answer.message, *HELLO])
    assert "<s>assistant:THOUGHTThey ask for it.Yes.</s>" in prompt_of(served)


def test_a_model_that_does_not_think(tokenizer: Tokenizer) -> None:
    with faked(tokenizer) as served, ollama.Client(served.url, trust_env=False) as client:
        with pytest.raises(ollama.ResponseError, match="think: 'fake-model' does not think"):
            client.chat(MODEL, HELLO, think=True)
        assert client.chat(MODEL, HELLO, think=False).message.content == ANSWER
        assert client.show(MODEL).capabilities == ["completion"]


def test_structured_output(served: Served, client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False}
    saying(served, '{"city":"Rom"}')
    for form, kind in ((schema, "city"), ("json", '"type": "object"')):
        answer = client.chat(MODEL, HELLO, format=form)  # type: ignore[arg-type]
        assert json.loads(answer.message.content or "") == {"city": "Rom"}
        grammar = served.engine.requests[-1].params.grammar
        assert grammar is not None
        assert kind in grammar.text
    client.generate(MODEL, "Hello", format="")
    assert served.engine.requests[-1].params.grammar is None
    with pytest.raises(ollama.ResponseError, match="uniqueItems"):
        client.chat(MODEL, HELLO, format={"type": "array", "items": {}, "uniqueItems": True})


def test_logprobs(served: Served, client: ollama.Client) -> None:
    saying(served, "ab")
    for answer in (
        client.chat(MODEL, HELLO, logprobs=True, top_logprobs=2),
        client.generate(MODEL, "x", raw=True, logprobs=True, top_logprobs=2),
    ):
        assert answer.logprobs is not None
        assert [(entry.token, entry.logprob) for entry in answer.logprobs] == [("a", -0.25), ("b", -0.25)]
        assert answer.logprobs[0].top_logprobs is not None
        assert [entry.token for entry in answer.logprobs[0].top_logprobs] == ["a", "b"]
    lines = list(client.chat(MODEL, HELLO, logprobs=True, stream=True))
    assert "".join(entry.token for line in lines for entry in line.logprobs or ()) == "ab"
    assert client.chat(MODEL, HELLO).logprobs is None


def test_vectors(served: Served, client: ollama.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Sequence[int], str | None]] = []

    def embed(request: PoolingRequest) -> Future[Any]:
        asked.append((request.token_ids, request.pooling))
        future: Future[Any] = Future()
        future.set_result(np.array([3.0, 4.0, 0.0], np.float32))
        return future

    monkeypatch.setattr(served.engine, "embed", embed, raising=False)
    answer = client.embed(MODEL, ["ab", "c"], keep_alive=-1)
    assert np.allclose(answer.embeddings, [[0.6, 0.8, 0.0]] * 2)
    assert answer.prompt_eval_count == 3
    assert [ids for ids, _ in asked] == [[97, 98], [99]]
    assert answer.total_duration is not None
    assert np.allclose(client.embed(MODEL, "ab", dimensions=1).embeddings, [[1.0]])
    assert list(client.embeddings(MODEL, "ab").embedding) == [3.0, 4.0, 0.0]
    client.embed(MODEL, "a" + "b" * 5000)
    assert asked[-1][0] == [97, *[98] * 4095]
    with pytest.raises(ollama.ResponseError, match="4096"):
        client.embed(MODEL, "b" * 5000, truncate=False)
    with pytest.raises(ollama.ResponseError, match="dimensions must be at most 3"):
        client.embed(MODEL, "b", dimensions=4)
    with pytest.raises(ollama.ResponseError, match="prompt must come to at least one token"):
        client.embeddings(MODEL, "")


def test_models(served: Served, client: ollama.Client) -> None:
    (listed,) = client.list().models
    assert listed.model == f"{MODEL}:latest"
    assert listed.digest is not None
    assert len(listed.digest) == 64
    assert listed.details is not None
    assert listed.details.family == "Fake"
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.digest, loaded.context_length) == (listed.model, listed.digest, 4096)
    shown = client.show(listed.model)
    assert shown.template is not None
    assert "enable_thinking" in shown.template
    assert shown.modelinfo is not None
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 4096
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert served.http.post("/api/show", json={"name": MODEL, "verbose": True}).status_code == 200
    version = served.http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) > (0, 6, 4)


def test_async(served: Served) -> None:
    async def talk() -> tuple[str, str]:
        client = ollama.AsyncClient(served.url, trust_env=False)
        answer = await client.chat(MODEL, HELLO)
        stream = await client.generate(MODEL, "Hello", stream=True)
        texts = [part.response or "" async for part in stream]
        await client.close()
        return answer.message.content or "", "".join(texts)

    assert asyncio.run(talk()) == (ANSWER, ANSWER)


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "color": 1}]}, "messages[0].color"),
        ("/api/chat", {"messages": [*HELLO, {"role": "tool", "content": ""}]}, "a tool must answer"),
        ("/api/chat", {"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function"),
        ("/api/chat", {"messages": HELLO, "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ("/api/chat", {"messages": HELLO, "n": 2}, "n"),
        ("/api/chat", {"messages": HELLO, "truncate": True}, "truncate"),
        ("/api/chat", {"messages": HELLO, "think": "deeply"}, "think"),
        ("/api/chat", {"messages": HELLO, "format": "xml"}, "format"),
        ("/api/chat", {"messages": HELLO, "top_logprobs": 3}, "top_logprobs"),
        ("/api/chat", {"messages": HELLO, "options": {"temperature": "hot"}}, "options.temperature"),
        ("/api/chat", {"messages": HELLO, "options": {"temperature": -1}}, "options.temperature"),
        ("/api/chat", {"messages": HELLO, "options": {"num_predict": -3}}, "options.num_predict"),
        ("/api/chat", {"messages": HELLO, "options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ("/api/chat", {"messages": HELLO, "options": {"stop": ["x"] * 65}}, "options.stop"),
        ("/api/chat", {"messages": HELLO, "options": {"stop": ""}}, "options.stop"),
        ("/api/chat", {"model": None, "messages": HELLO}, "model"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/api/generate", {"prompt": "x", "template": "y"}, "template"),
        ("/api/generate", {"prompt": "x", "context": [1]}, "context"),
        ("/api/generate", {"prompt": "x", "images": ["y"]}, "images"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "system"),
        ("/api/generate", {"prompt": "x" * 5000}, "4096"),
        ("/api/embed", {"input": 3}, "input"),
        ("/api/embed", {"input": "x", "dimensions": 0}, "dimensions"),
        ("/api/embeddings", {}, "prompt"),
        ("/api/show", {"model": None}, "model"),
    ],
)
def test_a_wrong_field_is_named(served: Served, path: str, fields: dict[str, Any], name: str) -> None:
    response = served.http.post(path, json={"model": MODEL, **fields})
    assert response.status_code == 400, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert name in body["error"]
    assert served.engine.requests == []


def test_errors(served: Served, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as raised:
        client.chat("other", HELLO)
    assert (raised.value.status_code, raised.value.error[:11]) == (404, "The model '")
    for manage in (
        lambda: client.pull("x"),
        lambda: client.push("x"),
        lambda: client.create("x", from_="y"),
        lambda: client.copy("x", "y"),
        lambda: client.delete("x"),
    ):
        with pytest.raises(ollama.ResponseError, match="the one model that it was started with") as missing:
            manage()
        assert missing.value.status_code == 404
    served.engine.failing.add(0)
    with pytest.raises(ollama.ResponseError, match="The server had an error") as broken:
        list(client.chat(MODEL, HELLO, stream=True))
    assert "secret" not in str(broken.value)
    served.engine.die()
    with pytest.raises(ollama.ResponseError) as dead:
        client.chat(MODEL, HELLO)
    assert dead.value.status_code == 503


def test_a_client_that_leaves_is_noticed(served: Served, client: ollama.Client) -> None:
    served.engine.script = lambda request, index: [97] * 10**6
    served.engine.step_s = 0.01
    stream = client.chat(MODEL, HELLO, stream=True)
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    wait_until(lambda: served.engine.num_open == 0)
    assert served.engine.cancelled


def test_keys(tokenizer: Tokenizer) -> None:
    with faked(tokenizer, config=ServerConfig(api_keys=("sk-one",))) as served:
        with ollama.Client(served.url, trust_env=False, headers={"Authorization": "Bearer sk-one"}) as client:
            assert client.chat(MODEL, HELLO).message.content == ANSWER
        with ollama.Client(served.url, trust_env=False) as client:
            with pytest.raises(ollama.ResponseError, match="API key") as raised:
                client.list()
            assert raised.value.status_code == 401


@pytest.mark.parametrize(
    ("text", "images", "first", "expected"),
    [
        ("a", "xy", 0, [0, 1, "a"]),
        (None, "x", 0, [0]),
        ("a[img]b", "x", 0, ["a", 0, "b"]),
        ("a[img]b", "xy", 0, [1, "a", 0, "b"]),
        ("[img]a[img]b[img]", "xy", 0, [0, "a", 1, "b[img]"]),
        ("a[img-1]b[img-0]c", "xy", 0, ["a", 1, "b", 0, "c"]),
        ("a[img-3]b", "xy", 2, [0, "a", 1, "b"]),
        ("a[img-0]b", "x", 2, [0, "a[img-0]b"]),
        ("[img-0][img-0]", "x", 0, [0, "[img-0]"]),
    ],
)
def test_images_stand_in_front_or_at_their_marks(text: str, images: str, first: int, expected: list[Any]) -> None:
    """As in Ollama's `chatPrompt`: an image without a mark stands in front, "[img-3]" is the fourth of all."""
    parts, numbers = _with_images(text, list(images), first)
    found = [part["text"] if "text" in part else images.index(part["base64"]) for part in parts]
    assert found == expected
    assert numbers == [each if isinstance(each, int) else -1 for each in expected]


@pytest.fixture
def served(thinking_server: Served) -> Iterator[Served]:
    yield from as_new(thinking_server)


@pytest.fixture
def client(served: Served) -> Iterator[ollama.Client]:
    with ollama.Client(served.url, trust_env=False) as client:
        yield client
