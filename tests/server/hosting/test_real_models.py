"""A chat model, an encoder and a model that reads pictures in one server, each in an engine of its own: their answers
are those of servers that have them alone, and one's end is no other's."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

import models.demo
import models.demo_vision
from runtime.engine.make_engine import build_engine
from runtime.engine.process.process_client import ProcessEngineClient
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.progress import SILENT
from runtime.text.load import load_tokenizer
from server.app import create_app
from server.config import ServerConfig
from server.hosting.application import HostApplication
from server.hosting.settings import ModelSettings
from server.run_batch import run_batch
from tests.models.encoder_cases import write_encoder
from tests.server.running import running
from tests.waiting import TIMEOUT_S, wait_until

DEMO, VISION = (str(Path(str(each.__file__)).parent) for each in (models.demo, models.demo_vision))
CHART = base64.b64encode((Path(VISION) / "chart.png").read_bytes()).decode()
PICTURE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{CHART}"}}
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_bytes": 4 << 20, "max_model_len": 512, "max_num_seqs": 8}

ASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0,
                                      "logprobs": True, "top_logprobs": 3, "max_tokens": 12}),
    ("chat", "/v1/completions", {"prompt": "The", "temperature": 1.0, "seed": 5, "max_tokens": 20, "logprobs": 2}),
    ("embed", "/v1/embeddings", {"input": ["hello world", "a second text"]}),
    ("vision", "/v1/chat/completions", {"messages": [{"role": "user", "content": [PICTURE, {"type": "text",
                                        "text": "Which bar is the largest?"}]}], "temperature": 0, "logprobs": True}),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    encoder = tmp_path_factory.mktemp("encoder")
    write_encoder(encoder, "bert")
    return {"chat": DEMO, "embed": str(encoder), "vision": VISION}


def settings_of(folders: dict[str, str]) -> list[ModelSettings]:
    return [
        ModelSettings(names=(name,), model=path, engine_options=OPTIONS, keep_alive_s=float("inf"), at_start=False)
        if name != "embed"
        else ModelSettings(
            names=(name,), model=path, engine_options={"device": "cpu"}, keep_alive_s=float("inf"), at_start=False
        )
        for name, path in folders.items()
    ]


@pytest.fixture(scope="module")
def served(folders: dict[str, str]) -> Iterator[tuple[HostApplication, httpx.Client]]:
    app = HostApplication(settings_of(folders), ServerConfig(models_memory_bytes=1 << 30))
    try:
        with running(app) as url, httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
            yield app, http
    finally:
        app.hosted.pool.close()


def content(answer: httpx.Response) -> Any:
    """The answer without what differs each time."""
    assert answer.status_code == 200, answer.text
    told = answer.json()
    for name in ("id", "created", "usage"):
        told.pop(name, None)
    return told


def test_answers_are_those_of_a_server_with_the_model_alone(
    served: tuple[HostApplication, httpx.Client], folders: dict[str, str]
) -> None:
    _, http = served
    together = [content(http.post(path, json={"model": name, **body})) for name, path, body in ASKED]
    for name, folder in folders.items():
        client = ThreadEngineClient(build_engine(folder, **(OPTIONS if name != "embed" else {"device": "cpu"})))
        try:
            app = create_app(client, load_tokenizer(folder), model_name=name)
            with running(app) as url, httpx.Client(base_url=url, timeout=TIMEOUT_S) as alone:
                for (owner, path, body), expected in zip(ASKED, together, strict=True):
                    if owner == name:
                        assert content(alone.post(path, json={"model": name, **body})) == expected
        finally:
            client.close()
    listed = {each["id"]: each for each in http.get("/v1/models").json()["data"]}
    assert {name: each["max_model_len"] for name, each in listed.items()} == {"chat": 512, "embed": 64, "vision": 512}


def test_a_killed_engine_comes_back_alone(served: tuple[HostApplication, httpx.Client]) -> None:
    app, http = served
    for name, path, body in ASKED:
        assert http.post(path, json={"model": name, **body}).status_code == 200
    pids = {}
    for each in app.hosted.models:
        assert each.service is not None
        client = each.service.client
        assert isinstance(client, ProcessEngineClient)
        assert client.pid is not None
        pids[each.name] = client.pid
    os.kill(pids["chat"], signal.SIGKILL)
    name, path, body = ASKED[2]
    assert http.post(path, json={"model": name, **body}).status_code == 200
    name, path, body = ASKED[0]
    wait_until(lambda: http.post(path, json={"model": name, **body}).status_code == 200)
    now = {each.name: each.service.client.pid for each in app.hosted.models if each.service}  # type: ignore[attr-defined]
    assert now["chat"] != pids["chat"]
    assert {**now, "chat": 0} == {**pids, "chat": 0}


def test_a_batch_goes_to_several_models(folders: dict[str, str], tmp_path: Path) -> None:
    config = tmp_path / "models.json"
    tables = {name: {"model": folders[name]} for name in ("chat", "embed")}
    config.write_text(json.dumps({"models": tables}), encoding="utf-8")
    lines = [
        {"custom_id": str(number), "method": "POST", "url": path, "body": {"model": name, **body}}
        for number, (name, path, body) in enumerate([*ASKED[:3], ("nobody", "/v1/completions", {"prompt": "x"})])
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    counts = run_batch(
        tmp_path / "in.jsonl", tmp_path / "out.jsonl", reporter=SILENT, device="cpu",
        config=ServerConfig(models_config=str(config)),
    )  # fmt: skip
    assert counts == (4, 1)
    answers = [
        json.loads(line)["response"] for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [each["status_code"] for each in answers] == [200, 200, 200, 404]
    assert [each["body"].get("model") for each in answers[:3]] == ["chat", "chat", "embed"]


def test_answers_after_a_sleep_are_the_same(folders: dict[str, str]) -> None:
    """Two models of which one may be awake, under load by both: each is asleep while the other answers."""
    settings = [each for each in settings_of(folders) if each.names[0] != "embed"]
    app = HostApplication(settings, ServerConfig(models_memory_bytes=1 << 30, models_max=1))
    asked = [(name, path, body) for name, path, body in ASKED if name != "embed"]
    try:
        with (
            running(app) as url,
            httpx.Client(base_url=url, timeout=TIMEOUT_S) as http,
            ThreadPoolExecutor(6) as threads,
        ):
            first = [content(http.post(path, json={"model": name, **body})) for name, path, body in asked]
            futures = [
                threads.submit(http.post, path, json={"model": name, **body})
                for _ in range(4)
                for name, path, body in asked
            ]
            for future, expected in zip(futures, first * 4, strict=True):
                assert content(future.result()) == expected
            statuses = http.get("/health").json()["models"]
            assert sorted(statuses.values()) == ["loaded", "sleeping"]
            assert all(each.num_loads > 1 for each in app.hosted.models)
    finally:
        app.hosted.pool.close()
