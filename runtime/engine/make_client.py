"""Starts the client of a model's engine, or of several: in processes of their own, or in this one."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

from runtime.engine.checks import check_seconds
from runtime.engine.config import EngineConfig
from runtime.engine.errors import EngineDeadError, RequestError
from runtime.engine.process.child import EngineProcess, Membership, Supervision
from runtime.engine.process.client import EngineClient
from runtime.engine.process.process_client import ProcessEngineClient
from runtime.engine.process.spawning import WaitingProcess
from runtime.engine.transfer.settings import transfer_settings
from runtime.later import later
from runtime.progress import ON_STDERR

_engines = later("runtime.engine.make_engine")  # numba
_clients = later("runtime.engine.process.thread_client")
_fleets = later("runtime.parallel.fleet")
_handing_fleets = later("runtime.parallel.handing_fleet")
_ray = later("runtime.parallel.ray_engines")


def is_fleet(config: EngineConfig) -> bool:
    """Whether the config means several engines, in processes of their own, with a router."""
    return config.data_parallel_size > 1 or config.distributed_executor_backend != "mp"


def start_client(
    model: str | Path | None = None,
    *,
    in_process: bool = False,
    hang_timeout_s: float | None = None,
    ray_address: str | None = None,
    **options: Any,
) -> EngineClient:
    """A client of a new engine.

    in_process      run in this process, for debugging: a crash of the engine ends the server as well
    hang_timeout_s  see ``Supervision``, whose default None means; positive
    ray_address     engines run on the nodes of this Ray cluster: "auto" (this machine's) or HOST:PORT.
                    The default None is "auto" if ``distributed_executor_backend`` is "ray"
    options         ``build_engine``'s

    Raises what ``build_engine`` raises, ``EngineDeadError``, and ``RequestError`` for a wrong ``hang_timeout_s``.
    """
    return StartingClient(
        model, in_process=in_process, hang_timeout_s=hang_timeout_s, ray_address=ray_address, **options
    ).wait()


class StartingClient:
    """An engine that is starting; the arguments are ``start_client``'s, and a process that is ``waiting`` to run it,
    which is ended if there are several. The constructor returns at once, and raises the errors of options. An engine in
    this process starts in ``wait``."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        in_process: bool = False,
        hang_timeout_s: float | None = None,
        ray_address: str | None = None,
        waiting: WaitingProcess | None = None,
        **options: Any,
    ) -> None:
        if hang_timeout_s is not None:
            check_seconds("hang_timeout_s", hang_timeout_s)
            if in_process:
                raise RequestError("hang_timeout_s needs an engine in a process of its own", param="hang_timeout_s")
        if ray_address is not None:
            options["distributed_executor_backend"] = "ray"
        self._model = model
        self._config = EngineConfig(**options)
        self._lock = threading.Lock()
        self._is_closed = False
        self._client: EngineClient | None = None
        if in_process:
            if self._config.kv_transfer_address:
                raise RequestError(
                    "kv_transfer_address needs an engine in a process of its own", param="kv_transfer_address"
                )
            if is_fleet(self._config):
                raise RequestError(
                    f"data_parallel_size is {self._config.data_parallel_size}: engines that share requests have "
                    "processes of their own",
                    param="data_parallel_size",
                )
            return
        supervision = Supervision() if hang_timeout_s is None else Supervision(hang_timeout_s=hang_timeout_s)
        if is_fleet(self._config):
            if waiting is not None:
                waiting.close()
            on_ray = self._config.distributed_executor_backend == "ray"
            places = _ray.RayEngines(self._config, ray_address or "auto") if on_ray else None
            kind = _handing_fleets.HandingFleet if self._config.hands_over else _fleets.Fleet
            self._client = kind(model, supervision=supervision, places=places, waits=False, **options)
        else:
            launch = None if waiting is None else partial(EngineProcess, command=supervision.command, waiting=waiting)
            membership = Membership(launch=launch, transfer=transfer_settings(self._config))
            self._client = ProcessEngineClient(
                model, supervision=supervision, membership=membership, waits=False, **options
            )

    def wait(self) -> EngineClient:
        """The client, once it takes requests. Raises as ``start_client`` does; ``EngineDeadError`` after ``close``."""
        if self._client is not None:
            self._client.wait_until_started()
            return self._client
        client: EngineClient = _clients.ThreadEngineClient(_engines.engine_of(self._model, self._config, ON_STDERR))
        with self._lock:
            self._client = client
            is_closed = self._is_closed
        if is_closed:
            client.close()
            raise EngineDeadError("the engine was closed before it was started")
        return client

    def close(self) -> None:
        """Stop the engine, even while it starts. Idempotent and thread-safe."""
        with self._lock:
            self._is_closed = True
            client = self._client
        if client is not None:
            client.close()
