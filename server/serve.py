"""Starts a server for a model, and shuts it down.

`xserv serve` calls `serve`. The port is open while the model is loaded: probes and the page answer, and requests get
503 with Retry-After until it is ready. SIGINT and SIGTERM drain: `/ready` answers 503, as do new requests, and open
ones may finish within `drain_timeout_s`; then the port is closed. A second signal ends the open ones at once. SIGHUP
reloads the files of API keys; without any, it ends no request."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from models.checkpoints.hub import local_model, model_name
from models.checkpoints.model_files import open_model
from runtime import collector
from runtime.device.device import Device
from runtime.engine.make_client import StartingClient
from runtime.errors import XservError
from runtime.text.load import read_chat_template
from server.adapters import parse_modules
from server.app import Application
from server.config import ServerConfig, ServerConfigError
from server.loading import LoadedModel, ServerStartError, load
from server.observing.logs import close_log, open_log
from server.observing.tracing import open_tracing
from server.transport.auth import ApiKeys
from server.transport.origins import hosts_for, origins_for
from server.transport.protocol import BACKLOG, RESERVED_CONNECTIONS, uvicorn_config
from tokenizer import warm_up as tokenizer_warm_up

logger = logging.getLogger("xserv.server")


SWITCH_INTERVAL_S = 0.001
"""After which a thread that prepares a large request gives Python's lock to one that waits for it. The event loop waits
after each call of the system: by default for 5 ms each time."""

GRACE_S = 3
"""For what is left when all requests are over or were told to end: last bytes, streams that only watch."""


def serve(
    model: str | Path | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | Sequence[str] | None = None,
    config: ServerConfig | None = None,
    in_process: bool = False,
    chat_template: str | None = None,
    **engine_options: Any,
) -> None:
    """Serve a model until SIGINT or SIGTERM; then returns.

    model              a folder, a GGUF file, a hub id, or None for the bundled one
    port               0 for any free one, which the log and the line printed at the end name
    served_model_name  the name in the API, or several, in a list or between commas; the folder's or the hub id by
                       default
    config             limits, keys, log; if only this machine can connect, the Host header must name it, or be among
                       `allowed_hosts`, and its own pages are allowed
    in_process         the engine in a thread of this process, not in one of its own; for debugging
    chat_template      a Jinja template, or a file that holds one, instead of the model's own
    engine_options     `start_client`'s, so `build_engine`'s: device, dtype, max_model_len, max_num_seqs, …

    Raises `ServerStartError`, `ServerConfigError`, and the errors of `start_client` and `Tokenizer.from_pretrained`:
    for the address, wrong options and a missing model before the port is open, for the model's content after it.
    """
    config = config or ServerConfig()
    config = replace(
        config,
        allowed_hosts=hosts_for(host, config.allowed_hosts or ()),
        allowed_origins=origins_for(host, config.allowed_origins),
    )
    names = served_names(served_model_name)
    with ExitStack() as stack:
        writer = open_log(config)
        stack.callback(close_log, writer)
        check_files(config, engine_options.get("prefix_cache_dir", ""))
        check_adapters(config, is_enabled=bool(engine_options.get("enable_lora")))
        listener = stack.enter_context(closing(listen(host, port)))
        local_model(model)
        allow_connections(config.max_connections)
        template = read_chat_template(chat_template)
        is_textless = model is not None and Path(model).exists() and not open_model(model).has_tokenizer()
        engine = stack.enter_context(closing(StartingClient(model, in_process=in_process, **engine_options)))
        if not in_process and not is_textless:  # while the engine's process starts, this one is idle
            device = engine_options.get("device", "auto")
            threading.Thread(target=_warm_up_tokenizer, args=(device,), name="tokenizer", daemon=True).start()
        names = names or [model_name(model)]
        tracing = None
        if config.otlp_endpoint is not None:
            tracing = open_tracing(config.otlp_endpoint, names[0])
            stack.callback(tracing.close)
        app = Application(names, config, log_writer=writer, tracing=tracing)
        _Server(app, engine, template).run(sockets=[listener])


def check_adapters(config: ServerConfig, *, is_enabled: bool) -> None:
    """Raises `ServerConfigError` for adapters of an engine that takes none, and what `parse_modules` does."""
    parse_modules(config.lora_modules)
    if (config.lora_modules or config.lora_root is not None) and not is_enabled:
        raise ServerConfigError("--lora-modules and --lora-root need --enable-lora")
    if config.lora_root is not None and not Path(config.lora_root).expanduser().is_dir():
        raise ServerConfigError(f"--lora-root {config.lora_root}: there is no such folder")


def served_names(given: str | Sequence[str] | None) -> list[str]:
    """The model's names in the API, each once. Raises `ServerConfigError` for one that no request can contain."""
    parts = [given] if isinstance(given, str) else list(given or ())
    names = list(dict.fromkeys(name.strip() for part in parts for name in part.split(",")))
    for name in names:
        if not name or any(c.isspace() or not c.isprintable() for c in name):
            how = "for several names repeat the option, or separate them by commas: --served-model-name a,b"
            raise ServerConfigError(f"--served-model-name has {name!r}, must be a name without white space; {how}")
    return names


def _warm_up_tokenizer(device: str) -> None:
    """Warms the tokenizer up. On the cpu the engine's process compiles missing loops first (`compile_ahead`)."""
    with suppress(XservError):  # a wrong device: the engine's start reports it
        if tokenizer_warm_up.is_compiled() or Device.parse(device).kind != "cpu":
            tokenizer_warm_up.warm_up()


def check_files(config: ServerConfig, prefix_cache_dir: str = "") -> None:
    """Reads API keys and certificates once, to fail before the model is loaded. Raises `ServerConfigError`; also for a
    folder of prefixes where keys separate tenants, since it holds their prompts in clear text."""
    keys = ApiKeys(config.api_keys, config.api_key_files)
    if prefix_cache_dir and keys.is_required and not config.share_prefix_cache:
        raise ServerConfigError(
            f"--prefix-cache-dir {prefix_cache_dir} would hold the prompts of all API keys in clear text: leave it "
            "out, or let the keys share prefixes (--share-prefix-cache)"
        )
    if config.ssl_certfile is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except (OSError, ssl.SSLError) as error:
            raise ServerConfigError(f"the certificate or its key cannot be used: {error}") from None


class _Server(uvicorn.Server):
    """uvicorn with another start: the model is loaded on a thread while it already listens; and another end: it keeps
    listening while it drains. At the timeout, or at a second signal, the engine is closed, so that every running
    request ends with an error. After that, or at a third signal, uvicorn closes connections."""

    def __init__(self, app: Application, engine: StartingClient, chat_template: str | None) -> None:
        super().__init__(uvicorn_config(app, app.config, graceful_timeout_s=GRACE_S))
        self.app = app
        self.engine = engine
        self.chat_template = chat_template
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
        logger.info("listening at %s, loading %s", self.address, self.app.model_names[0])
        # A daemon, so that an engine being built in this process does not block the exit.
        threading.Thread(target=self._load, args=(self.loop,), name="xserv-load", daemon=True).start()

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        """Loads the model, on a thread of its own."""
        try:
            model = load(self.engine, self.app.model_names, self.app.config, self.chat_template)
            next_call = partial(self._take_up, model)
        except BaseException as error:
            next_call = partial(self._fail, error)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(next_call)

    def _take_up(self, model: LoadedModel) -> None:
        if self.should_exit:
            return
        self.app.take_up(model)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        collector.resume(collects=True)
        name = self.app.model_names[0]
        print(f"Serving {name} at {self.address}/v1\nThe page is at {self.address}", flush=True)

    def _fail(self, error: BaseException) -> None:
        if not self.should_exit:  # else closing the engine may be the cause
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
            await asyncio.to_thread(self.engine.close)
            with suppress(TimeoutError):
                await asyncio.wait_for(lifecycle.wait_idle(), GRACE_S)

    def _hang_up(self) -> None:
        """On SIGHUP, reads the files of API keys again. A server without such files stops as on SIGTERM if its stdin is
        a terminal, which was closed; elsewhere (`systemctl reload`) it only logs the signal."""
        if self.app.config.api_key_files:
            self.app.keys.reload()
        elif sys.stdin is not None and sys.stdin.isatty():
            self.handle_exit(signal.SIGTERM, None)
        else:
            logger.info("SIGHUP changes nothing: there are no files of API keys to read again (--api-key-file)")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called at each SIGINT and SIGTERM. (uvicorn's own raises them again at the end.)"""
        if self.hurry.is_set():
            self.force_exit = True
        elif self.loop is not None:
            self.loop.call_soon_threadsafe(self.hurry.set if self.should_exit else self.app.lifecycle.begin_drain)
        self.should_exit = True


def allow_connections(max_connections: int) -> None:
    """Raises this process's limit of open files to the number of connections, as far as allowed. Raises
    `ServerStartError` if there are too few."""
    needed = max_connections + RESERVED_CONNECTIONS + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        if hard != unlimited and hard < needed:
            raise ServerStartError(
                f"{max_connections} connections need {needed} open files, and this process may have {hard}: lower "
                "max_connections or raise the limit (ulimit -n)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Raises `ServerStartError`, with advice."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        raise ServerStartError(f"{host!r} is not an address of this machine") from None
    # "localhost" has two addresses; most clients try the older one.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reasons = {
            errno.EADDRINUSE: f"port {port} of {host} is in use; choose another (0: any free one)",
            errno.EADDRNOTAVAIL: f"{host} is not an address of this machine",
            errno.EACCES: f"port {port} needs rights that this user does not have; choose one above 1023",
        }
        reason = reasons.get(error.errno or 0, f"cannot listen on port {port} of {host}")
        raise ServerStartError(reason) from None
    return listener
