"""A request reaches the model that it names, whatever its API; those that name none, the first that is for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest

from runtime.later import later
from tests.server.hosting.hosts import ENCODER, RANKER, Fake, Served, hosting

anthropic = later("anthropic")  # takes a second to import


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    fakes = [
        Fake("embed", pooling=ENCODER, settings={"names": ("embed", "text-embedding-3-small")}),
        Fake("one", settings={"names": ("one", "gpt-4o"), "config": {"lora_modules": ("poet=/a/poet",)},
                              "engine_options": {"enable_lora": True}}),
        Fake("two"),
        Fake("rank", pooling=RANKER),
    ]  # fmt: skip
    with hosting(tmp_path_factory.mktemp("models"), fakes) as found:
        yield found


def test_each_name_has_its_model(served: Served) -> None:
    assert [served.says(name) for name in ("one", "two", "gpt-4o", "poet")] == ["one", "two", "one", "one"]
    assert served.chat("poet").json()["model"] == "poet"
    assert served.says(None) == "one"  # the first one that generates


def test_other_names_are_told_what_there_is(served: Served) -> None:
    answer = served.chat("nobody")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    for name in ("one", "gpt-4o", "poet", "two", "embed", "rank"):
        assert repr(name) in answer.json()["error"]["message"]
    assert served.http.get("/v1/models/nobody").status_code == 404
    assert served.http.post("/api/show", json={"model": "nobody"}).status_code == 404
    assert served.http.post("/models/load", json={"model": "nobody"}).status_code == 404


def test_every_api_by_its_client(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        assert {each.id for each in client.models.list()} >= {"one", "two", "poet", "embed", "gpt-4o"}
        answer = client.responses.create(model="two", input="Hi", temperature=0)
        assert (answer.model, answer.output_text) == ("two", "two")
        on = client.responses.create(model="one", input="And?", temperature=0, previous_response_id=answer.id)
        assert on.output_text == "one"
        assert client.responses.retrieve(answer.id).output_text == "two"
        client.responses.delete(on.id)
        pieces = client.chat.completions.create(
            model="two", messages=[{"role": "user", "content": "Hi"}], stream=True, temperature=0
        )
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "two"
        assert client.models.retrieve("two:latest").id == "two:latest"
        assert client.completions.create(model="two:latest", prompt="Hi", temperature=0).choices[0].text == "two"
        vectors = client.embeddings.create(model="text-embedding-3-small", input=["a", "b"], encoding_format="float")
        assert [len(each.embedding) for each in vectors.data] == [4, 4]
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client_of_messages:
        message: Any = client_of_messages.messages.create(
            model="two", messages=[{"role": "user", "content": "Hi"}], max_tokens=10
        )
        assert (message.model, message.content[0].text) == ("two", "two")
        assert {each.id for each in client_of_messages.models.list()} >= {"one", "two"}
    client_of_ollama = ollama.Client(host=served.url)
    with closing(client_of_ollama._client):
        _ask_as_ollama(client_of_ollama)


def _ask_as_ollama(client_of_ollama: ollama.Client) -> None:
    assert client_of_ollama.chat("two:latest", [{"role": "user", "content": "Hi"}]).message.content == "two"
    assert client_of_ollama.generate("one", "Hi").response == "one"
    assert len(client_of_ollama.embed("embed", ["a", "b"]).embeddings) == 2
    assert {each.model for each in client_of_ollama.list().models} >= {"one:latest", "two:latest", "embed:latest"}
    assert client_of_ollama.show("two").modelinfo is not None


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("/v1/embeddings", {"input": "a"}, "data"),
        ("/pooling", {"input": "a"}, "data"),
        ("/embed", {"inputs": "a"}, None),
        ("/", {"inputs": "a"}, None),
        ("/similarity", {"sentences": {"source_sentence": "a", "sentences": ["b"]}}, None),
        ("/score", {"text_1": "a", "text_2": "b"}, "data"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "results"),
        ("/classify", {"input": "a"}, "data"),
        ("/predict", {"inputs": "a"}, None),
    ],
)
def test_without_a_name_by_the_purpose(served: Served, path: str, body: dict[str, Any], key: str | None) -> None:
    for name in ("embed", "rank"):  # their purpose is known once they were loaded
        served.http.post("/models/load", json={"model": name})
    answer = served.http.post(path, json=body)
    if path == "/similarity" and answer.status_code == 400:
        answer = served.http.post(path, json={"text_1": "a", "text_2": "b"})
    assert answer.status_code == 200, answer.text
    assert key is None or answer.json()[key]


def test_the_query_names_a_model_where_no_body_does(served: Served) -> None:
    assert served.http.post("/tokenize?model=two", json={"prompt": "Hi"}).json()["count"] == 2
    assert served.http.get("/tokenizer_info?model=nobody").status_code == 404
    assert served.http.get("/engines?model=two").json()["engines"][0]["state"] == "ready"
    assert served.http.post("/v1/embeddings?model=two", json={"input": "a", "model": "embed"}).status_code == 200


def test_wrong_bodies_load_no_model(tmp_path: Path) -> None:
    with hosting(tmp_path, [Fake("one"), Fake("two")]) as served:
        for content in (b"{", b"[1]", b'{"model": 7}', b'{"model": "one\xff"}', b'"' + b"[" * 100_000):
            answer = served.http.post(
                "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400, content[:20]
            assert answer.json()["error"]["message"]
        assert served.http.post("/v1/chat/completions", content=b"{}").status_code == 415
        assert [served.fakes[name].num_starts for name in ("one", "two")] == [0, 0]


def test_adapters_come_to_their_model(tmp_path: Path) -> None:
    (tmp_path / "root" / "poet").mkdir(parents=True)
    takes = {"engine_options": {"enable_lora": True}, "config": {"lora_root": str(tmp_path / "root")}}
    with hosting(tmp_path, [Fake("one"), Fake("two", settings=takes)]) as served:
        load = {"lora_name": "poet", "lora_path": "poet"}
        answer = served.http.post("/v1/load_lora_adapter", json=load)
        assert answer.status_code == 200, answer.text
        assert served.says("poet") == "two"
        listed = {each["id"]: each for each in served.http.get("/v1/models").json()["data"]}
        assert (listed["poet"]["parent"], listed["poet"]["root"]) == ("two", "poet")
        wrong = served.http.post("/v1/load_lora_adapter", json={**load, "lora_name": "one"})
        assert wrong.status_code in (400, 403), wrong.text
        answer = served.http.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})
        assert answer.status_code == 200, answer.text
        assert served.chat("poet").status_code == 404
    with hosting(tmp_path, [Fake("one", settings=takes), Fake("two", settings=takes)]) as served:
        answer = served.http.post("/v1/load_lora_adapter", json=load)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert served.http.post("/v1/load_lora_adapter?model=two", json=load).status_code == 200
        assert served.says("poet") == "two"
        assert served.http.post("/v1/load_lora_adapter?model=one", json=load).status_code == 400


def test_admin_keys_are_the_servers_and_read_again_with_its_own(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("sk-old\n")
    with hosting(tmp_path, [Fake("one"), Fake("two")], admin_key_files=(str(file),)) as served:
        key = {"Authorization": "Bearer sk-new"}
        assert served.http.post("/sleep?level=3", headers=key).status_code == 403
        file.write_text("sk-new\n")
        served.app.admin_keys.reload()
        assert served.http.post("/sleep?level=3", headers=key).status_code == 400  # admitted: only the level is wrong


def test_a_generation_is_cancelled_by_its_name_whoever_runs_it(served: Served) -> None:
    served.says("two")
    engine = served.fakes["two"].engine
    engine.step_gate.clear()
    try:
        body = {"model": "two", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "temperature": 0}
        with served.http.stream("POST", "/v1/chat/completions", json=body, headers={"X-Request-Id": "mine"}) as stream:
            assert served.http.post("/v1/requests/mine/cancel").json()["cancelled"] == 1
            engine.step_gate.set()
            assert "request_cancelled" in "".join(stream.iter_lines())
    finally:
        engine.step_gate.set()
    assert served.http.post("/v1/requests/mine/cancel").status_code == 404
