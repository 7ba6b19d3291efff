"""A server that really runs, on an ephemeral port of 127.0.0.1 and with the settings of `serve`: in a thread, or as a
process of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn

from server.app import ServerApplication
from server.transport.protocol import uvicorn_config
from tests.waiting import TIMEOUT_S, wait_until

_SERVE = """
import json, sys
from server.config import ServerConfig
from server.serve import serve
options, settings = json.loads(sys.argv[2])
options = {"load_format": "dummy", **options}
serve(sys.argv[1], port=0, served_model_name="tiny", config=ServerConfig(**settings), **options)
print("ended")
"""


@contextmanager
def serving_process(
    folder: Path, options: dict[str, object], **settings: object
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves the model of `folder`, with dummy weights unless told otherwise, with `serve`'s `options`
    and a `ServerConfig` of `settings`, and its URL; killed if it has not ended by itself."""
    arguments = [sys.executable, "-c", _SERVE, str(folder), json.dumps([options, settings])]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        arguments, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    ) as child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            assert line.startswith("Serving tiny at http://127.0.0.1:"), line
            url = line.split(" at ")[1].strip().removesuffix("/v1")
            assert child.stdout.readline() == f"The page is at {url}\n"
            yield child, url
        finally:
            if child.poll() is None:
                child.kill()


class _Server(uvicorn.Server):
    """Uvicorn's, which notices at once that it should end, not at its next look, ten times a second."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop, self._ends = asyncio.get_running_loop(), asyncio.Event()
        await super().startup(sockets)

    async def main_loop(self) -> None:
        for counter in itertools.count():
            if await self.on_tick(counter % 10):
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), 0.1)

    def end(self) -> None:
        self.should_exit = True
        if self.started:
            with suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._ends.set)


@contextmanager
def running(app: ServerApplication) -> Iterator[str]:
    """The server's base URL, "http://127.0.0.1:PORT"; the server has ended when the block has."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        server = _Server(uvicorn_config(app, app.config))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="test-server")
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            assert server.started, "the server did not start"
            scheme = "https" if app.config.ssl_certfile else "http"
            yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.end()
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "the server did not stop"


def raw_exchange(url: str, *parts: bytes) -> bytes:
    """All that the server sends until it closes the connection."""
    address = urlsplit(url)
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S) as connection:
        for part in parts:
            connection.sendall(part)
        received = b""
        while data := connection.recv(65536):
            received += data
        return received
