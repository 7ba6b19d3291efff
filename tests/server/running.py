"""A server that really runs: uvicorn in a thread on an ephemeral port of 127.0.0.1, with the settings of `serve`."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from server.app import Application
from server.protocol import uvicorn_config


@contextmanager
def running(app: Application) -> Iterator[str]:
    """The server's base URL, "http://127.0.0.1:PORT"; the server has ended when the block has."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        server = uvicorn.Server(uvicorn_config(app, app.config))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="test-server")
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            assert server.started, "the server did not start"
            scheme = "https" if app.config.ssl_certfile else "http"
            yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(15)
            assert not thread.is_alive(), "the server did not stop"


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Returns as soon as `condition` holds; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
        time.sleep(0.005)
