"""A server whose port is open and whose model is loaded when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec

from runtime.engine.errors import EngineDeadError
from runtime.engine.make_client import StartingClient
from runtime.engine.process.client import EngineClient
from server.app import Application
from server.config import ServerConfig
from server.http_server import ModelServer
from server.serve import listen
from tests.server.fake_engine import FakeEngineClient
from tests.server.real_server import write_tiny_model
from tests.waiting import TIMEOUT_S, wait_until


@dataclass
class SlowStart:
    """Stands in for `StartingClient`: `wait` returns when `loaded` is set, and raises `failure` if there is one."""

    engine: FakeEngineClient
    loaded: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None
    is_closed: bool = False

    def wait(self) -> EngineClient:
        assert self.loaded.wait(TIMEOUT_S)
        if self.failure is not None:
            raise self.failure
        return cast(EngineClient, self.engine)

    def close(self) -> None:
        self.is_closed, self.failure = True, EngineDeadError("closed")
        self.loaded.set()


@dataclass
class StartingServer:
    """`error` is what the server's `run` has raised."""

    url: str
    start: SlowStart
    server: ModelServer
    thread: threading.Thread
    error: list[BaseException]


@contextmanager
def starting_server(
    folder: Path, engine: FakeEngineClient, config: ServerConfig | None = None
) -> Iterator[StartingServer]:
    """A server of the fake engine with the bytes' tokenizer, both written to the folder; it ends with the block."""
    write_tiny_model(folder)
    engine.info = msgspec.structs.replace(engine.info, model_path=str(folder))
    start = SlowStart(engine)
    server = ModelServer(Application(["slow"], config), cast(StartingClient, start), None)
    errors: list[BaseException] = []
    with listen("127.0.0.1", 0) as listener:

        def run() -> None:
            try:
                server.run(sockets=[listener])
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            wait_until(lambda: server.started)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield StartingServer(url, start, server, thread, errors)
        finally:
            server.should_exit = True
            thread.join(TIMEOUT_S)
            start.close()
            assert not thread.is_alive(), "the server did not stop"
