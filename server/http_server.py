"""The HTTP server around an application: it listens before models are loaded, and drains before it ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Protocol

import uvicorn

from runtime import collector
from runtime.engine.make_client import StartingClient
from server.app import Application, ServerApplication
from server.loading import LoadedModel, TokenizerAhead, load
from server.transport.protocol import uvicorn_config

logger = logging.getLogger("xserv.server")

SWITCH_INTERVAL_S = 0.001
"""After which a thread that prepares a large request gives Python's lock to one that waits for it. The event loop waits
after each call of the system: by default for 5 ms each time."""

GRACE_S = 3
"""For what is left when all requests are over or were told to end: last bytes, streams that only watch."""


class Closed(Protocol):
    """An engine, or all of several models."""

    def close(self) -> None:
        """Ends it, and its open requests. On any thread; idempotent."""


class HttpServer(uvicorn.Server):
    """uvicorn with another start: models are loaded while it already listens; and another end: it keeps listening while
    it drains. At the timeout, or at a second signal, the engines are closed, so that every running request ends with an
    error. After that, or at a third signal, uvicorn closes connections."""

    def __init__(self, app: ServerApplication, engines: Closed) -> None:
        super().__init__(uvicorn_config(app, app.config, graceful_timeout_s=GRACE_S))
        self.app = app
        self.engines = engines
        self.hurry = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.address = ""
        self.failure: BaseException | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Runs until it is stopped. Raises the errors of loading the model."""
        super().run(sockets)
        if self.failure is not None:
            raise self.failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets is not None
        self.loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():  # as uvicorn does for its own signals
            self.loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        host, port = sockets[0].getsockname()[:2]
        shown_host = f"[{host}]" if ":" in host else host
        scheme = "https" if self.app.config.ssl_certfile else "http"
        self.address = f"{scheme}://{shown_host}:{port}"
        logger.info("listening at %s, loading %s", self.address, self.served)
        self.begin_loading(self.loop)

    @property
    def served(self) -> str:
        """The models' names, to be shown."""
        return self.app.model_names[0]

    def begin_loading(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins to load models; calls `announce` once requests are taken, or `fail`, on the loop's thread."""
        raise NotImplementedError

    def announce(self) -> None:
        """Tells where it serves."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        collector.resume(collects=True)
        print(f"Serving {self.served} at {self.address}/v1\nThe page is at {self.address}", flush=True)

    def fail(self, error: BaseException) -> None:
        """Ends the server; `run` raises the error."""
        if not self.should_exit:  # else closing the engines may be the cause
            self.failure = error
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._drain()
        self.app.lifecycle.closing.set()
        await super().shutdown(sockets)

    async def _drain(self) -> None:
        """Waits until no request is open, the timeout, or a second signal."""
        lifecycle = self.app.lifecycle
        lifecycle.begin_drain()
        idle = asyncio.create_task(lifecycle.wait_idle())
        hurry = asyncio.create_task(self.hurry.wait())
        await asyncio.wait((idle, hurry), timeout=self.app.config.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        is_idle = idle.done()
        for task in (idle, hurry):
            task.cancel()
        if not is_idle:
            await asyncio.to_thread(self.engines.close)
            with suppress(TimeoutError):
                await asyncio.wait_for(lifecycle.wait_idle(), GRACE_S)

    def _hang_up(self) -> None:
        """On SIGHUP, reads the files of API keys and admin keys again. A server without such files stops as on SIGTERM
        if its stdin is a terminal, which was closed; elsewhere (`systemctl reload`) it only logs the signal."""
        if self.app.config.api_key_files or self.app.config.admin_key_files:
            self.app.keys.reload()
            self.app.admin_keys.reload()
        elif sys.stdin is not None and sys.stdin.isatty():
            self.handle_exit(signal.SIGTERM, None)
        else:
            flags = "--api-key-file, --admin-key-file"
            logger.info("SIGHUP changes nothing: there are no files of API keys to read again (%s)", flags)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called at each SIGINT and SIGTERM. (uvicorn's own raises them again at the end.)"""
        if self.hurry.is_set():
            self.force_exit = True
        elif self.loop is not None:
            self.loop.call_soon_threadsafe(self.hurry.set if self.should_exit else self.app.lifecycle.begin_drain)
        self.should_exit = True


class ModelServer(HttpServer):
    """Serves one model, which is loaded on a thread of its own."""

    app: Application

    def __init__(
        self, app: Application, engine: StartingClient, chat_template: str | None, ahead: TokenizerAhead | None = None
    ) -> None:
        super().__init__(app, engine)
        self._engine = engine
        self._chat_template, self._ahead = chat_template, ahead

    def begin_loading(self, loop: asyncio.AbstractEventLoop) -> None:
        # A daemon, so that an engine being built in this process does not block the exit.
        threading.Thread(target=self._load, args=(loop,), name="xserv-load", daemon=True).start()

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            model = load(self._engine, self.app.model_names, self.app.config, self._chat_template, self._ahead)
            next_call = partial(self._take_up, model)
        except BaseException as error:
            next_call = partial(self.fail, error)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(next_call)

    def _take_up(self, model: LoadedModel) -> None:
        if not self.should_exit:
            self.app.take_up(model)
            self.announce()
