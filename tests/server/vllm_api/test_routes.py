"""vLLM's further routes: vectors, similarities, and what who runs a server learns; `test_scoring` has scores."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server.config import ServerConfig
from server.errors import NOT_BUILT
from tests.server.conftest import Served, serving
from tests.server.fake_engine import FakeEngineClient
from tests.server.real_server import Real, serving_real
from tokenizer import Tokenizer

TEXTS = ["an apple", "a pear and a plum", "an apple!", "x"]


@pytest.fixture(scope="module")
def real(tiny_folder: Path) -> Iterator[Real]:
    with serving_real(tiny_folder, load_format="dummy", max_model_len=128, num_blocks=64) as server:
        yield server


@pytest.fixture(scope="module")
def unit(real: Real) -> Any:
    """What `/v1/embeddings` says of the texts, at length one."""
    answer = real.openai.embeddings.create(model=real.model, input=TEXTS, encoding_format="float")
    return np.array([each.embedding for each in answer.data])


def test_pooling(real: Real, unit: Any) -> None:
    plain = real.http.post("/pooling", json={"input": TEXTS, "task": "embed"}).json()
    assert [(each["index"], each["object"]) for each in plain["data"]] == [(i, "pooling") for i in range(4)]
    np.testing.assert_array_equal(np.array([each["data"] for each in plain["data"]], np.float32), np.float32(unit))
    packed = real.http.post("/pooling", json={"input": TEXTS[0], "encoding_format": "base64"}).json()
    found = np.frombuffer(base64.b64decode(packed["data"][0]["data"]), "<f4")
    np.testing.assert_array_equal(found, np.float32(unit[0]))
    assert plain["usage"]["prompt_tokens"] > packed["usage"]["prompt_tokens"]


def test_similarities(real: Real, unit: Any) -> None:
    one = real.http.post("/similarity", json={"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
    np.testing.assert_allclose([each["score"] for each in one["data"]], unit[1:] @ unit[0], atol=1e-6)
    each_to_each = real.http.post("/similarity", json={"queries": TEXTS[:2], "documents": TEXTS[2:]}).json()
    expected = [unit[0] @ unit[2], unit[1] @ unit[3]]
    np.testing.assert_allclose([each["score"] for each in each_to_each["data"]], expected, atol=1e-6)
    same = real.http.post("/similarity", json={"text_1": "a", "text_2": "a"}).json()["data"]
    assert [round(each["score"], 6) for each in same] == [1.0]


def test_more_inputs_than_may_wait(tiny_folder: Path) -> None:
    with serving_real(tiny_folder, load_format="dummy", max_model_len=64, num_blocks=64, max_waiting=4) as server:
        texts = [f"text {number}" for number in range(40)]
        answer = server.openai.embeddings.create(model=server.model, input=texts, encoding_format="float")
        assert [each.index for each in answer.data] == list(range(40))
        (alone,) = server.openai.embeddings.create(model=server.model, input=texts[7], encoding_format="float").data
        assert alone.embedding == answer.data[7].embedding


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pooling", {"input": "a", "task": "classify"}, "task"),
        ("/pooling", {"input": "a", "task": "plugin"}, "task"),
        ("/pooling", {"input": []}, "input"),
        ("/pooling", {"input": "a" * 500}, "input"),
        ("/similarity", {"text_1": "a"}, "text_2"),
        ("/similarity", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
        ("/similarity", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ("/similarity", {"text_1": "a", "text_2": []}, "text_2"),
        ("/similarity", {"text_1": "a", "text_2": "", "model": None}, "text_2"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "model"),
        ("/v2/rerank", {"model": "MODEL", "query": "a", "documents": ["b"]}, "model"),
        ("/score", {"text_1": "a", "text_2": "b"}, "model"),
        ("/classify", {"input": "a"}, "model"),
        ("/v1/embeddings", {"input": "a", "model": "MODEL", "prompt_name": "query"}, "prompt_name"),
        ("/v1/embeddings", {"input": [1], "model": "MODEL", "prompt_name": "query"}, "prompt_name"),
        ("/v2/rerank", {"model": "MODEL", "query": "a", "documents": ["b"], "priority": 3}, "priority"),
        ("/v1/embeddings", {"input": ["a"] * 2049, "model": "MODEL"}, "input"),
        ("/rerank", {"query": "a", "documents": [{"text": "b", "image": "c"}]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "nobody_knows": 1}, "nobody_knows"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(real: Real, path: str, body: dict[str, Any], param: str) -> None:
    answer = real.http.post(path, json={**body, **({"model": real.model} if body.get("model") else {})})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param), answer.text


def test_the_prefix_cache_is_forgotten(real: Real) -> None:
    def cached() -> int:
        answer = real.openai.completions.create(model=real.model, prompt="prefix " * 8, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    cached()
    assert cached() > 0
    before = real.client.stats()
    reset = real.http.post("/reset_prefix_cache").json()
    assert reset == {"num_dropped_blocks": before.num_cached_blocks, "num_held_blocks": 0}
    after = real.client.stats()
    assert (after.num_cached_blocks, after.num_free_blocks) == (0, after.num_blocks)
    assert cached() == 0
    assert cached() > 0
    assert real.http.get("/reset_prefix_cache").status_code == 405


def test_what_the_tokenizer_is(served: Served, tokenizer: Tokenizer) -> None:
    info = served.http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<text>", "</s>", None)
    assert info["chat_template"] == tokenizer.chat_template()
    asked = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert served.http.post("/tokenize", json=asked).json()["tokens"] == [tokenizer.eos_token_id]


def test_load_ping_and_settings(fake_engine: FakeEngineClient, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "secret"
    config = ServerConfig(
        api_keys=("sk-secret",), api_key_files=(), log_file=None, responses_dir=str(folder), lora_root=str(folder)
    )
    with serving(fake_engine, tokenizer, config=config) as served:
        headers = {"Authorization": "Bearer sk-secret"}
        assert served.http.get("/load", headers=headers).json() == {"server_load": 0}
        for method in ("GET", "POST"):
            assert served.http.request(method, "/ping").json() == {"status": "ok"}
        assert served.http.get("/server_info").status_code == 401
        info = served.http.get("/server_info", headers=headers)
        assert info.json()["models"] == ["fake-model"]
        assert info.json()["engine"]["max_model_len"] == fake_engine.info.max_model_len
        (group,) = info.json()["engine"]["cache_groups"]
        assert group["window"] is None
        assert info.json()["server"]["max_body_bytes"] == config.max_body_bytes
        assert "secret" not in info.text
        told = {*info.json()["server"], *info.json()["engine"]}
        assert not {"api_keys", "log_file", "lora_modules", "model_path"} & told


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        given = dict(attrs)
        self.links.add(given.get("href") or "")
        self.anchors.add(f"#{given.get('id')}")


def test_the_page_of_the_description(served: Served) -> None:
    answer = served.http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "script" not in answer.headers["content-security-policy"]
    tags = _Tags()
    tags.feed(answer.text)
    assert not {"script", "img", "iframe", "link"} & tags.names
    assert {link for link in tags.links if link.startswith("#")} <= tags.anchors
    assert {link for link in tags.links if link and not link.startswith("#")} == {"/openapi.json"}
    description = served.http.get("/openapi.json").json()
    for path, methods in description["paths"].items():
        for method in methods:
            assert f"#{method.upper()}{path}" in tags.anchors
    assert "<code>temperature</code>" in answer.text


@pytest.mark.parametrize("path", [*NOT_BUILT, "/v1/audio/speech", "/v1/files/abc/"])
def test_what_is_not_there_says_so(served: Served, path: str) -> None:
    answer = served.http.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    if answer.json().get("type") != "error":
        assert error["code"] == "not_built"
    assert "is not built" in error["message"]
