"""From a model's name to a running server, and down again.

`serve` is what `xserv serve` calls. The port is taken before the model is loaded, so that a port in use
costs no wait; requests are accepted when all is ready. SIGINT and SIGTERM drain: no new requests, the
running ones may finish within `drain_timeout_s`; a second signal ends them at once."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
from contextlib import closing, suppress
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import uvicorn

from runtime.engine.build import build_engine
from runtime.engine.client import EngineClient, ThreadEngineClient
from runtime.engine.messages import EngineOutput, EngineRequest
from runtime.engine.recommended_sampling import recommended_sampling
from runtime.engine.sampling_params import SamplingParams
from runtime.errors import XservError
from runtime.text.load import load_tokenizer
from server.app import create_app
from server.config import ServerConfig


class ServerStartError(XservError):
    """The address cannot be listened on, or the model cannot run."""


def serve(
    model: str | Path | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    max_body_bytes: int = ServerConfig.max_body_bytes,
    drain_timeout_s: float = 10.0,
    log_level: str = "warning",
    **engine_options: Any,
) -> None:
    """Serve a model until SIGINT or SIGTERM; then returns.

    model              None: the bundled one; a folder; a hub id
    port               0: any free one; the line printed when ready names it
    served_model_name  the name in the API; None: the folder's or the hub id
    max_body_bytes     larger request bodies are answered with 413
    drain_timeout_s    how long running requests may go on after the signal
    engine_options     `build_engine`'s: device, dtype, max_model_len, max_num_seqs, …

    Raises `ServerStartError`, and what `build_engine` and `Tokenizer.from_pretrained` raise.
    """
    with closing(listen(host, port)) as listener:
        engine = build_engine(model, **engine_options)
        folder = Path(engine.info.model_path)
        tokenizer = load_tokenizer(folder)
        client = ThreadEngineClient(engine)
        try:
            warm_up(client)
            app = create_app(
                client,
                tokenizer,
                model_name=served_model_name,
                default_sampling=recommended_sampling(folder),
                config=ServerConfig(max_body_bytes=max_body_bytes),
            )
            settings = uvicorn.Config(
                app,
                log_level=log_level,
                access_log=False,
                server_header=False,
                lifespan="on",
                ws="none",
                timeout_graceful_shutdown=math.ceil(drain_timeout_s) + 2,
            )
            name = served_model_name or engine.info.model_name
            _Server(settings, client, name, drain_timeout_s).run(sockets=[listener])
        finally:
            client.close()


class _Server(uvicorn.Server):
    """uvicorn, with another end: when the time is up, or at a second signal, the engine is closed, so that
    every request that still runs is told so and ends by itself. Only then, or at a third signal, uvicorn
    cuts off."""

    def __init__(self, config: uvicorn.Config, client: EngineClient, model_name: str, drain_timeout_s: float) -> None:
        super().__init__(config)
        self.client = client
        self.model_name = model_name
        self.drain_timeout_s = drain_timeout_s
        self.hurry = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets is not None
        self.loop = asyncio.get_running_loop()
        host, port = sockets[0].getsockname()[:2]
        shown_host = f"[{host}]" if ":" in host else host
        print(f"Serving {self.model_name} at http://{shown_host}:{port}/v1", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_engine())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_engine(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.hurry.wait(), self.drain_timeout_s)
        await asyncio.to_thread(self.client.close)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called at each SIGINT and SIGTERM. (uvicorn's own raises them again at the end.)"""
        if self.hurry.is_set():
            self.force_exit = True
        elif self.should_exit and self.loop is not None:
            self.loop.call_soon_threadsafe(self.hurry.set)
        self.should_exit = True


def warm_up(client: EngineClient) -> None:
    """One short request, so that kernels are compiled before the first user waits, and a model that cannot
    run is known at once. Raises `ServerStartError`."""
    outputs: SimpleQueue[EngineOutput] = SimpleQueue()
    prompt_length = max(1, min(4, client.info.max_model_len - 2))
    request = EngineRequest(
        request_id="warm-up",
        prompt_token_ids=[0] * prompt_length,
        params=SamplingParams(max_tokens=2, seed=0, ignore_eos=True, detokenize=False),
    )
    client.submit(request, outputs.put)
    while (output := outputs.get()).finish_reason is None:
        pass
    if output.finish_reason != "length":
        raise ServerStartError("the model failed on its first request; see the log")


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Raises `ServerStartError`, which says what to do."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        raise ServerStartError(f"{host!r} is not an address of this machine") from None
    # "localhost" is two addresses; most clients try the older one.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
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
