"""A server of several models on fake engines, which a test can make large, slow, broken or dead."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from models.errors import ModelLoadError
from runtime.engine.errors import EngineDeadError, RequestError
from runtime.engine.make_client import StartingClient
from runtime.engine.messages import EngineRequest, PoolingRequest
from runtime.engine.process.client import EngineClient
from runtime.engine.weights.commands import EngineCondition, Sleep
from runtime.pooling import PoolingInfo
from server.config import ServerConfig
from server.hosting.application import HostApplication
from server.hosting.host import Host
from server.hosting.hosted import HostedModel
from server.hosting.settings import ModelSettings
from tests.server.byte_tokenizer import END_OF_TURN
from tests.server.fake_engine import FakeEngineClient
from tests.server.real_server import write_tiny_model
from tests.server.running import running
from tests.waiting import TIMEOUT_S


class FakeModelEngine(FakeEngineClient):
    """Answers with its model's name; `unload` waits for open requests. `commands`: those that it got. It cannot
    sleep if it is `restless`, nor wake if it is `sleepy`."""

    def __init__(self, name: str, folder: Path, pooling: PoolingInfo, num_bytes: int, cache_bytes: int) -> None:
        def script(request: EngineRequest, index: int) -> list[int]:
            return [*name.encode(), END_OF_TURN, *[32] * 1000]

        super().__init__(script, model_name=name)
        self.info = msgspec.structs.replace(
            self.info, model_path=str(folder), pooling=pooling, weight_bytes=num_bytes - cache_bytes,
            kv_cache_bytes=cache_bytes, max_loras=1, max_lora_rank=8,
        )  # fmt: skip
        self.commands: list[str] = []
        self.weight_version = "0"
        self.is_asleep = self.is_restless = self.is_sleepy = False
        self.pooling = pooling

    def unload(self, drain_timeout_s: float) -> None:
        if self.state != "ready":
            raise EngineDeadError("it is not ready")
        end_s = time.monotonic() + drain_timeout_s
        while self.num_open and time.monotonic() < end_s:
            time.sleep(0.005)
        self.die("unloaded", None)

    def reload(self) -> None:
        assert self.state == "unloaded"
        self.is_asleep = False
        self.revive()

    def order(self, command: Any) -> Future[NDArray[np.float32]]:
        self.commands.append(type(command).__name__)
        future: Future[NDArray[np.float32]] = Future()
        if self.is_restless if isinstance(command, Sleep) else self.is_sleepy:
            future.set_exception(RequestError("it does not"))
            return future
        assert self.is_asleep != isinstance(command, Sleep)
        self.is_asleep = isinstance(command, Sleep)
        future.set_result(EngineCondition(False, int(self.is_asleep), True, True).numbers)
        return future

    def embed(self, request: PoolingRequest) -> Future[NDArray[np.float32]]:
        future: Future[NDArray[np.float32]] = Future()
        size = len(self.pooling.labels) or 4
        future.set_result(np.full(size, 0.5, np.float32))
        return future

    def load_adapter(self, name: str, path: str) -> Future[NDArray[np.float32]]:
        future: Future[NDArray[np.float32]] = Future()
        future.set_result(np.zeros(32, np.float32))
        return future


GENERATES = PoolingInfo()
ENCODER = PoolingInfo(generates=False, size=4)
RANKER = PoolingInfo(generates=False, labels=("relevant",))


@dataclass
class Fake:
    """A model of a test; `settings` are `ModelSettings`' fields. While `gate` is clear, its loading waits; it fails
    while there is a text in `broken`."""

    name: str
    num_bytes: int = 10
    cache_bytes: int = 0
    pooling: PoolingInfo = GENERATES
    settings: dict[str, Any] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    broken: str = ""
    engines: list[FakeModelEngine] = field(default_factory=list)
    num_starts: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def engine(self) -> FakeModelEngine:
        return self.engines[-1]


@dataclass
class Served:
    http: httpx.Client
    app: HostApplication
    host: Host
    url: str
    fakes: dict[str, Fake]

    def model(self, name: str) -> HostedModel:
        found = self.host.find(name)
        assert found is not None
        return found

    def status(self, name: str) -> str:
        return cast(str, self.http.get("/health").json()["models"][name])

    def chat(self, model: str | None, **more: Any) -> httpx.Response:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **more}
        return self.http.post("/v1/chat/completions", json=body if model is None else {"model": model, **body})

    def says(self, model: str | None, **more: Any) -> str:
        answer = self.chat(model, **more)
        assert answer.status_code == 200, answer.text
        return cast(str, answer.json()["choices"][0]["message"]["content"])


@contextmanager
def hosting(folder: Path, fakes: list[Fake], **config: Any) -> Iterator[Served]:
    """The server, with a `ServerConfig`; models are loaded on demand unless they say otherwise. What they hold is
    `num_bytes` each, and the budget 100 unless it is given."""
    by_name = {fake.name: fake for fake in fakes}
    server_config = ServerConfig(**{"models_memory_bytes": 100, "drain_timeout_s": 5.0, **config})
    settings = []
    for fake in fakes:
        given: dict[str, Any] = {
            "names": (fake.name,),
            "model": _write(folder / fake.name, fake.pooling),
            "at_start": False,
            "memory_bytes": fake.num_bytes,
            "keep_alive_s": float("inf"),
            **fake.settings,
        }
        own = replace(server_config, **given.pop("config", {}))
        options = {"device": "cpu", **given.pop("engine_options", {}), "name": fake.name}
        settings.append(ModelSettings(config=own, engine_options=options, **given))

    class Start:
        """Stands in for `StartingClient`."""

        def __init__(self, model: str | None, *, name: str, **options: Any) -> None:
            self.fake = by_name[name]
            self.fake.num_starts += 1
            self.client: FakeModelEngine | None = None

        def wait(self) -> EngineClient:
            assert self.fake.gate.wait(TIMEOUT_S)
            if self.fake.broken:
                raise ModelLoadError(self.fake.broken)
            self.client = FakeModelEngine(
                self.fake.name, folder / self.fake.name, self.fake.pooling, self.fake.num_bytes, self.fake.cache_bytes
            )
            self.fake.engines.append(self.client)
            return cast(EngineClient, self.client)

        def close(self) -> None:
            if self.client is not None:
                self.client.close()

    app = HostApplication(settings, server_config, start_engine=cast(type[StartingClient], Start))
    try:
        # httpx may close a connection that it has just given to another thread: it closes none here
        limits = httpx.Limits(max_keepalive_connections=200, max_connections=200, keepalive_expiry=None)
        with running(app) as url, httpx.Client(base_url=url, timeout=TIMEOUT_S, limits=limits) as http:
            yield Served(http, app, app.hosted, url, by_name)
    finally:
        for fake in fakes:
            fake.gate.set()
        app.hosted.pool.close()


def _write(folder: Path, pooling: PoolingInfo) -> str:
    """A model's folder, whose config tells what it is for."""
    folder.mkdir(exist_ok=True)
    write_tiny_model(folder)
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = "ForCausalLM" if pooling.generates else "ForSequenceClassification" if pooling.labels else "Model"
    (folder / "config.json").write_text(json.dumps({**fields, "architectures": [f"Qwen3{kind}"]}), encoding="utf-8")
    return str(folder)
