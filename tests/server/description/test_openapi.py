"""/openapi.json: every route is in it, its schemas are sound, and it allows what it should; and a thousand requests
that follow it, right, wrong and spoilt (tools/serving/fuzz_api.py sends more): no 5xx, no hang, no answer of another
shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from starlette.routing import Route

from server.app import create_app
from tests.server.conftest import Served
from tests.server.fake_engine import FakeEngineClient
from tests.server.real_server import serving_real
from tests.waiting import wait_until
from tokenizer import Tokenizer
from tools.serving.fuzz_api import Fuzzer

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def document(served: Served) -> Any:
    return served.http.get("/openapi.json").json()


def test_every_route_is_described(served: Served, fake_engine: FakeEngineClient, tokenizer: Tokenizer) -> None:
    routes = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in create_app(fake_engine, tokenizer).routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    described = {(path, method) for path, item in document(served)["paths"].items() for method in item}
    assert described == routes


def test_streams_are_described(served: Served) -> None:
    found = {
        path: kind
        for path, item in document(served)["paths"].items()
        for operation in item.values()
        for kind in operation["responses"]["200"]["content"]
        if kind in ("text/event-stream", "application/x-ndjson")
    }
    assert found == {
        **dict.fromkeys(
            (
                "/v1/chat/completions",
                "/v1/completions",
                "/inference/v1/generate",
                "/infill",
                "/v1/responses",
                "/v1/messages",
            ),
            "text/event-stream",
        ),
        **dict.fromkeys(("/api/chat", "/api/generate"), "application/x-ndjson"),
        "/live": "text/event-stream",
    }


def test_every_schema_is_one(served: Served) -> None:
    found = document(served)
    assert found["openapi"] == "3.1.0"
    for name, schema in found["components"]["schemas"].items():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}), name
        jsonschema_rs.validator_for({**schema, "components": found["components"]})


@pytest.mark.parametrize(
    ("path", "fields", "is_allowed"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, True),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "user": "me", "best_of": 1}, True),
        ("/v1/chat/completions", {"messages": []}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "mm_processor_kwargs": {}}, True),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "mm_processor_kwargs": {"max_pixels": 999}},
            False,
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 0}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "functions": []}, False),
        ("/v1/completions", {"prompt": ["a", "b"], "suffix": None, "max_tokens": 0}, True),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, False),
        ("/v1/completions", {"prompt": "a", "temprature": 1}, False),
        ("/v1/completions", {"prompt": [10**6]}, False),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}, True),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 3}, False),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, False),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}, True),
        ("/api/chat", {"messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 3}}, True),
        ("/api/chat", {"model": "fake-model:latest", "messages": [], "keep_alive": "5m"}, True),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, False),
        ("/api/generate", {"prompt": "x", "options": {"mirostat": 0, "num_ctx": 5}}, True),
        ("/api/generate", {"prompt": "x", "options": {"warmth": 1}}, True),
        ("/api/generate", {"prompt": "x", "format": "xml"}, False),
        ("/v1/responses", {"input": [{"role": "user", "content": "x"}]}, True),
        ("/v1/responses", {"input": "x", "background": True}, False),
        ("/v1/embeddings", {"input": ["a"], "dimensions": 3}, True),
        ("/v1/embeddings", {"input": "a", "model": "other"}, False),
    ],
)
def test_it_allows_what_is_taken(served: Served, path: str, fields: dict[str, Any], is_allowed: bool) -> None:
    """And what it forbids is refused."""
    found = document(served)
    schema = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = {"model": "fake-model", **fields}
    assert jsonschema_rs.is_valid({**schema, "components": found["components"]}, body) == is_allowed
    if path != "/v1/embeddings" or not is_allowed:
        assert (served.http.post(path, json=body).status_code == 200) == is_allowed


@pytest.mark.filterwarnings("ignore::DeprecationWarning:schemathesis")
@pytest.mark.parametrize("num_cases", [360, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_cases_of_every_kind(tiny_folder: Path, num_cases: int) -> None:
    with serving_real(tiny_folder, load_format="dummy", max_model_len=64, num_blocks=512) as real:
        fuzzer = Fuzzer(real.url, seed=20_261_127)
        fuzzer.run(num_cases)
        fuzzer.check_rest()
        wait_until(lambda: real.num_used_blocks == 0)  # of those that have left, too
    record = fuzzer.record
    assert record.failures == []
    assert record.num_cases >= num_cases
    kinds = {route.rpartition("(")[2] for route in record.statuses}
    assert kinds == {"positive)", "negative)", "spoilt)", "raw)"}
    accepted = {route for route, counts in record.statuses.items() if counts["200"]}
    paths = ("/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/api/chat", "/api/generate",
             "/pooling")  # fmt: skip
    assert {f"POST {path} (positive)" for path in paths} <= accepted
