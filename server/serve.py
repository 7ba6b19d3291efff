"""Starts a server for a model, and shuts it down.

`xserv serve` calls `serve`. The port is open while the model is loaded: probes and the page answer, and requests get
503 with Retry-After until it is ready. SIGINT and SIGTERM drain: `/ready` answers 503, as do new requests, and open
ones may finish within `drain_timeout_s`; then the port is closed. A second signal ends the open ones at once. SIGHUP
reloads the files of API keys; without any, it ends no request."""

from __future__ import annotations

import errno
import logging
import resource
import socket
import ssl
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.checkpoints.hub import local_model, model_name
from runtime import collector
from runtime.engine.make_client import StartingClient
from runtime.engine.process.spawning import WaitingProcess
from runtime.later import later
from runtime.text.load import read_chat_template
from server.adapters import parse_modules
from server.config import MODELS, OPTIONS, ServerConfig, ServerConfigError
from server.loading import ServerStartError, TokenizerAhead
from server.names import served_names
from server.observing.logs import close_log, open_log
from server.observing.tracing import open_tracing
from server.transport.auth import ApiKeys
from server.transport.origins import hosts_for, origins_for
from server.transport.protocol import BACKLOG, RESERVED_CONNECTIONS

_app = later("server.app")
_http_server = later("server.http_server")
_hosting = later("server.hosting.application")
_hosting_server = later("server.hosting.host_server")
_settings = later("server.hosting.settings")
"""The engine's process starts before these are imported, and imports its own modules meanwhile."""

logger = logging.getLogger("xserv.server")


def serve(
    model: str | Path | Sequence[str] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | Sequence[str] | None = None,
    config: ServerConfig | None = None,
    in_process: bool = False,
    chat_template: str | None = None,
    waiting: WaitingProcess | None = None,
    **engine_options: Any,
) -> None:
    """Serve a model, or several, until SIGINT or SIGTERM; then returns.

    model              a folder, a GGUF file, a hub id, or None for the bundled one; or a list of them, each perhaps
                       with its name before it (`name=model`); `config.models_config` names more
    port               0 for any free one, which the log and the line printed at the end name
    served_model_name  the name in the API, or several, in a list or between commas; the folder's or the hub id by
                       default
    config             limits, keys, log; if only this machine can connect, the Host header must name it, or be among
                       `allowed_hosts`, and its own pages are allowed
    in_process         the engine in a thread of this process, not in one of its own; for debugging
    chat_template      a Jinja template, or a file that holds one, instead of the model's own
    waiting            a process for the engine, which the caller closes; ended at once if several engines are needed.
                       None starts one
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
        only, several = told_apart(model, config, names, chat_template, engine_options, in_process=in_process)
        for own, options in [(each.config, each.engine_options) for each in several] or [(config, engine_options)]:
            check_files(own, options.get("prefix_cache_dir", ""))
            check_adapters(own, is_enabled=bool(options.get("enable_lora")))
        listener = stack.enter_context(closing(listen(host, port)))
        first = several[0].model if several else only
        path = local_model(first)
        allow_connections(config.max_connections)
        names = [name for each in several for name in each.names] or names or [model_name(only)]
        tracing = None
        if config.otlp_endpoint is not None:
            tracing = open_tracing(config.otlp_endpoint, names[0])
            stack.callback(tracing.close)
        template = read_chat_template(chat_template)
        server: Any
        if several:
            if waiting is not None:
                waiting.close()
            hosting = _hosting.HostApplication(several, config, log_writer=writer, tracing=tracing)
            stack.enter_context(closing(hosting.hosted.pool))
            server = _hosting_server.HostServer(hosting)
        else:
            engine = stack.enter_context(
                closing(StartingClient(only, in_process=in_process, waiting=waiting, **engine_options))
            )
            app = _app.Application(names, config, log_writer=writer, tracing=tracing)
            ahead = None if in_process else TokenizerAhead(path, template, engine_options.get("device", "auto"))
            server = _http_server.ModelServer(app, engine, template, ahead)
        collector.keep()
        server.run(sockets=[listener])


def told_apart(
    model: str | Path | Sequence[str] | None, config: ServerConfig, names: Sequence[str], chat_template: str | None,
    engine_options: dict[str, Any], *, in_process: bool,
) -> tuple[str | Path | None, Sequence[Any]]:  # fmt: skip
    """The one model, or the settings of several. Raises `ServerConfigError`."""
    given: list[Any] = [] if model is None else [model] if isinstance(model, str | Path) else [*model]
    is_named = any("=" in str(each) and not Path(each).expanduser().exists() for each in given)
    if len(given) < 2 and not is_named and not config.models_config:
        usual = ServerConfig()
        for each in OPTIONS:
            if each.name == "model_wait_s" and config.admin_key_files:
                continue  # the engine may be told to sleep
            if each.option.heading == MODELS and getattr(config, each.name) != getattr(usual, each.name):
                flag = each.flag_name.replace("_", "-")
                raise ServerConfigError(f"--{flag} has no effect on one model: name it (NAME=MODEL), or several")
        return (given[0] if given else None), ()
    for name, is_given in (("--served-model-name", bool(names)), ("--in-process", in_process)):
        if is_given:
            raise ServerConfigError(f"{name} is for one model; name each of several as NAME=MODEL, or in a file")
    return None, _settings.models_of(given, engine_options, config, chat_template)


def check_adapters(config: ServerConfig, *, is_enabled: bool) -> None:
    """Raises `ServerConfigError` for adapters of an engine that takes none, and what `parse_modules` does."""
    parse_modules(config.lora_modules)
    if (config.lora_modules or config.lora_root is not None) and not is_enabled:
        raise ServerConfigError("--lora-modules and --lora-root need --enable-lora")
    if config.lora_root is not None and not Path(config.lora_root).expanduser().is_dir():
        raise ServerConfigError(f"--lora-root {config.lora_root}: there is no such folder")


def check_files(config: ServerConfig, prefix_cache_dir: str = "") -> None:
    """Reads API keys and certificates once, to fail before the model is loaded. Raises `ServerConfigError`; also for a
    folder of prefixes where keys separate tenants, since it holds their prompts in clear text."""
    keys = ApiKeys.of(config)
    ApiKeys((), config.admin_key_files)
    if config.weights_root is not None and not Path(config.weights_root).expanduser().is_dir():
        raise ServerConfigError(f"--weights-root {config.weights_root}: there is no such folder")
    for name in ("max_requests_per_key", "tokens_per_minute_per_key"):
        if getattr(config, name) is not None and not keys.is_required:
            raise ServerConfigError(f"--{name.replace('_', '-')} has no effect without --api-key-file FILE")
    if config.weights_root is not None and not config.admin_key_files:
        raise ServerConfigError("--weights-root has no effect without --admin-key-file FILE")
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
