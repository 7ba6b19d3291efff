"""``Fleet``: several engines with the interface of one, each in a process of its own.

    fleet = Fleet(model, data_parallel_size=2)   # else ``ProcessEngineClient``'s arguments

Each engine has its own supervisor. A request goes to the engine that the router chooses, and stays there: if that
engine dies, the request ends with ``engine_died``, while new ones go to the others.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.engine.admission import RETRY_AFTER_S, check_room, prepare
from runtime.engine.config import EngineConfig
from runtime.engine.errors import EngineDeadError, QueueFullError, RequestError
from runtime.engine.messages import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineState,
    EngineStats,
    PoolingRequest,
    RoutingStats,
    StepView,
)
from runtime.engine.process.child import Membership, Supervision
from runtime.engine.process.client import EngineClient, Origin, OutputSink
from runtime.engine.process.process_client import ProcessEngineClient
from runtime.engine.scheduling.block_events import SECRET_BYTES, BlockChanges
from runtime.engine.scheduling.sequence import Request
from runtime.engine.transfer.settings import transfer_settings
from runtime.engine.weights.commands import (
    Command,
    DropWeights,
    EngineCondition,
    GivenArrays,
    LoadWeights,
    TellState,
    UseWeights,
)
from runtime.errors import XservError
from runtime.parallel.division import cores_of, device_of, total_stats
from runtime.parallel.prefix_index import PromptDigests
from runtime.parallel.ray_engines import RayEngines
from runtime.parallel.roles import Roles
from runtime.parallel.routing import Route, Router

logger = logging.getLogger("xserv.engine")

START_CHECK_S = 0.05
"""How often an engine that is started anew is looked at."""


class Fleet(EngineClient):
    """See ``EngineClient``. A request's sink is called on the thread of its engine's supervisor.

    places    starts the engines' processes; None for this machine, whose processors and GPUs are divided
    waits     False: ``wait_until_started`` raises the engines' errors, and before it there is no ``info``

    Raises as ``ProcessEngineClient`` does.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        supervision: Supervision | None = None,
        places: RayEngines | None = None,
        waits: bool = True,
        **settings: Any,
    ) -> None:
        config = EngineConfig(**settings)
        self._config = config
        self._roles: Roles | None = None  # once the engines have started
        self._seeds = random.Random(config.seed)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._origin, self._lock, self.update_lock = Origin(), threading.Lock(), threading.Lock()
        self._is_closing = False
        # Guarded by the lock:
        self._router: Router | None = None
        self._routes: dict[str, Route] = {}
        self._is_restarting = False

        count = config.data_parallel_size
        self._places = places
        memberships = _memberships(config, places)
        transfer_secret = secrets.token_bytes(32)
        for engine, each in enumerate(memberships):
            each["name"] = f"engine {engine}"
            each["transfer"] = transfer_settings(config, transfer_secret, engine)
            if config.routing_policy == "prefix-aware":
                each["routing_secret"] = self._secret
                each["on_blocks"] = partial(self._change, engine)
        self._clients: list[ProcessEngineClient] = []
        try:
            for engine in range(count):
                values: Any = dict(settings)
                if places is None:
                    values["device"] = device_of(engine, count, config.device, config.num_ranks)
                membership = Membership(**memberships[engine])
                self._clients.append(
                    ProcessEngineClient(model, supervision=supervision, membership=membership, waits=False, **values)
                )
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)
        if waits:
            self.wait_until_started()

    def roles_of(self, config: EngineConfig, info: EngineInfo) -> Roles | None:
        """The engines' roles; None: each keeps its requests."""
        return None

    def wait_until_started(self) -> None:
        """Returns when all engines first accept requests. Raises as the constructor does."""
        try:
            for client in self._clients:
                client.wait_until_started()
        except BaseException:
            self.close()
            raise
        with self._lock:
            digests = PromptDigests.of_info(self.info, self._secret)
            self._roles = self.roles_of(self._config, self.info)
            self._router = Router(self._config.routing_policy, len(self._clients), digests, roles=self._roles)

    @property
    def info(self) -> EngineInfo:
        """The first engine's, with limits of lengths that all engines have. ``max_waiting`` and ``max_waiting_tokens``
        are totals."""
        infos = [client.info for client in self._clients]
        smallest = min(infos, key=lambda info: info.num_blocks)
        return msgspec.structs.replace(
            infos[0],
            max_model_len=min(info.max_model_len for info in infos),
            num_blocks=smallest.num_blocks,
            pools=smallest.pools,
        )

    @property
    def engines(self) -> Sequence[ProcessEngineClient]:
        return self._clients

    @property
    def state(self) -> EngineState:
        """See ``EngineClient.state``: the best of the engines'."""
        if self._is_closing:
            return "closing"
        states = {client.state for client in self._clients}
        order: tuple[EngineState, ...] = ("ready", "starting", "draining", "unloaded", "down")
        return next((state for state in order if state in states), "closing")

    @property
    def routing(self) -> RoutingStats:
        return self.router.stats()

    @property
    def router(self) -> Router:
        """For observers: its numbers may be read on any thread."""
        assert self._router is not None, "the engines have not been started"
        return self._router

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        self._origin.check()
        prepared = prepare(request, self.info)
        digests = self.router.digests_of(prepared)
        while True:
            with self._lock:
                is_ready = self._are_ready()
                if self._is_closing or not any(is_ready):
                    raise self._dead()
                if request.request_id in self._routes:
                    raise RequestError(f"request_id {request.request_id!r} is in use", param="request_id")
                waiting = [sum(counts) for counts in zip(self._held, *(client.waiting for client in self._clients))]
                check_room(self.info, waiting[0], waiting[1], prepared.num_prompt_tokens)
                route = self.router.choose(prepared, digests, is_ready)
                self._routes[request.request_id] = route
                if request.params.seed is None:
                    request = self._seeded(request)
            try:
                return self._begin(route, request, prepared, sink)
            except BaseException as error:
                with self._lock:
                    del self._routes[request.request_id]
                    self.router.withdrawn(route)
                if not isinstance(error, EngineDeadError):
                    raise  # otherwise it has just died: another one takes the request

    @property
    def _held(self) -> tuple[int, int]:
        """Requests that wait here, and their prompts' tokens."""
        return (0, 0)

    def _begin(self, route: Route, request: EngineRequest, prepared: Request, sink: OutputSink) -> None:
        """Give a routed request to its engine. Raises as ``ProcessEngineClient.admit`` does."""
        self._clients[route.engine].admit(request, prepared, self._routed(route, sink))

    def cancel(self, request_id: str, index: int | None = None) -> None:
        if (client := self._client_of(request_id)) is not None:
            client.cancel(request_id, index)

    def pause(self, request_id: str) -> None:
        if (client := self._client_of(request_id)) is not None:
            client.pause(request_id)

    def resume(self, request_id: str) -> None:
        if (client := self._client_of(request_id)) is not None:
            client.resume(request_id)

    def stats(self) -> EngineStats:
        """See ``EngineClient.stats``: totals of all engines that answer. Raises ``EngineDeadError`` if none does."""
        found: list[EngineStats] = []
        for client in self._clients:
            try:
                found.append(client.stats())
            except EngineDeadError:
                continue
        if not found:
            raise self._dead()
        return total_stats(found)

    def watch(self, sink: Callable[[StepView], None]) -> Callable[[], None]:
        """See ``EngineClient.watch``: the steps of all engines, each with its engine's number, on several threads."""

        def see(engine: int, view: StepView) -> None:
            sink(msgspec.structs.replace(view, engine=engine))

        stops = [client.watch(partial(see, engine)) for engine, client in enumerate(self._clients)]

        def stop() -> None:
            for each in stops:
                each()

        return stop

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return self._idlest().logits(token_ids)

    def embed(self, request: PoolingRequest) -> Future[NDArray[np.float32]]:
        return self._idlest().embed(request)

    def load_adapter(self, name: str, path: str) -> Future[NDArray[np.float32]]:
        """See ``EngineClient.load_adapter``: an engine reads it; the others will, when a request asks for it."""
        return self._idlest().load_adapter(name, path)

    def reset_prefix_cache(self) -> Future[NDArray[np.float32]]:
        """See ``EngineClient.reset_prefix_cache``: of all engines that are ready, and the sums."""
        ready = [client for client in self._clients if client.state == "ready"]
        if not ready:
            raise self._dead()
        return _sum([client.reset_prefix_cache() for client in ready])

    def order(self, command: Command | GivenArrays) -> Future[NDArray[np.float32]]:
        """See ``EngineClient.order``: all engines obey. If one cannot load weights, all forget them; if the engines
        differ, the answer is the least that all have."""
        if isinstance(command, DropWeights):
            return _joined([client.order(command) for client in self._clients if client.state == "ready"])
        self._check_all_ready()
        if isinstance(command, UseWeights):
            self._check_read()
            return self._aside(partial(self._use_weights, command))
        joined = _joined([client.order(command) for client in self._clients])
        if isinstance(command, LoadWeights):
            joined.add_done_callback(self._drop_failed)
        return joined

    def _check_all_ready(self) -> None:
        if not all(client.state == "ready" for client in self._clients):
            raise EngineDeadError("not all engines are there, and all must obey: try again", 1.0)

    def _check_read(self) -> None:
        if not all(client.has_read for client in self._clients):
            raise EngineDeadError("an engine has died since it read the weights: nothing is changed; try again", 1.0)

    def _drop_failed(self, loaded: Future[NDArray[np.float32]]) -> None:
        if loaded.exception() is not None:
            with suppress(XservError):
                self.order(DropWeights())

    def _aside(self, work: Callable[[], EngineCondition]) -> Future[NDArray[np.float32]]:
        """The result of work that is done on a thread of its own."""
        future: Future[NDArray[np.float32]] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(work().numbers)
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="xserv-fleet-change", daemon=True).start()
        return future

    def _use_weights(self, command: UseWeights) -> EngineCondition:
        """All engines serve what they have read last. From then on there is no way back: one that dies meanwhile comes
        back with the new weights, and is waited for."""
        self._check_read()
        for client in self._clients:
            client.start_with_read(command.version, lasts=True)
        found: list[EngineCondition] = []
        errors: list[XservError] = []
        try:
            futures: list[Future[NDArray[np.float32]]] = []
            for client in self._clients:
                try:
                    futures.append(client.order(command))
                except XservError as error:
                    errors.append(error)
            for each in futures:
                try:
                    found.append(EngineCondition.of(each.result()))
                except XservError as error:
                    errors.append(error)
            for number, client in enumerate(self._clients):
                self._await_version(number, client, command.version)
        finally:
            for client in self._clients:
                client.start_with_read(command.version, lasts=False)
        if not found:
            found.append(EngineCondition.of(_joined([client.order(TellState()) for client in self._clients]).result()))
        if errors:
            logger.warning("engines were started anew while they took weights: %s", errors[0])
        return join_conditions(found)

    def _await_version(self, number: int, client: ProcessEngineClient, version: str) -> None:
        """Wait until an engine serves these weights, or will serve nothing any more."""
        while client.state != "ready" or client.weight_version != version:
            if self._is_closing or client.ready_in_s is None:
                raise EngineDeadError(f"engine {number} is gone, while others serve the weights {version!r}")
            if client.state == "ready":
                client.start_with_read(version, lasts=True)
                with suppress(XservError):
                    client.renew(0.0)
            else:
                time.sleep(START_CHECK_S)

    @property
    def weight_version(self) -> str:
        return ",".join(dict.fromkeys(client.weight_version for client in self._clients))

    @property
    def is_restarting(self) -> bool:
        """Whether ``restart`` is in progress."""
        return self._is_restarting

    def restart(self, drain_timeout_s: float) -> None:
        """Rolling restart: drain and restart one engine after another, while the others serve; returns when all have
        restarted. The first failure ends it: the others run on as they are.

        Raises ``RequestError`` if one is in progress, ``EngineDeadError`` for an engine that is not ready when its turn
        comes, and the errors of an engine's start.
        """
        self.begin_restart()
        self.finish_restart(drain_timeout_s)

    def begin_restart(self) -> None:
        """The part of ``restart`` that does not wait: ``finish_restart`` must follow."""
        with self._lock:
            if self._is_restarting:
                raise RequestError("the engines are being restarted", param="restart")
            if self._is_closing:
                raise self._dead()
            self._is_restarting = True

    def finish_restart(self, drain_timeout_s: float) -> None:
        """The part of ``restart`` that waits."""
        try:
            for engine, client in enumerate(self._clients):
                logger.info("engine %d is drained, to be started again", engine)
                client.renew(drain_timeout_s)
        finally:
            with self._lock:
                self._is_restarting = False

    def unload(self, drain_timeout_s: float) -> None:
        """See ``EngineClient.unload``: all that are ready."""
        ready = [client for client in self._clients if client.state == "ready"]
        if not ready:
            raise self._dead()
        _at_once([partial(client.unload, drain_timeout_s) for client in ready])

    def reload(self) -> None:
        """See ``EngineClient.reload``. The first error is raised when all have started or failed."""
        _at_once([client.reload for client in self._clients if client.state == "unloaded"])

    def close(self, drain: bool = False) -> None:
        if not self._origin.is_here:
            return
        with self._lock:
            self._is_closing = True
        atexit.unregister(self.close)
        _at_once([partial(client.close, drain) for client in self._clients])
        if self._places is not None:
            self._places.close()

    def _seeded(self, request: EngineRequest) -> EngineRequest:
        """The request with a random seed, as an engine alone would choose one."""
        bits, params = self._seeds.getrandbits(64), copy(request.params)  # not checked again
        msgspec.structs.force_setattr(params, "seed", bits - (1 << 64) if bits >> 63 else bits)
        return msgspec.structs.replace(request, params=params)

    def _routed(self, route: Route, sink: OutputSink) -> OutputSink:
        """A sink that updates the router first."""

        def put(output: EngineOutput) -> None:
            if output.new_token_ids or output.finish_reason is not None:
                with self._lock:
                    self._note(route, output)
            sink(output)

        return put

    def _note(self, route: Route, output: EngineOutput) -> None:
        if output.new_token_ids:
            self.router.drawn(route, len(output.new_token_ids))
        if output.finish_reason is not None:
            self.router.ended(route, has_failed=output.finish_reason in ("abort", "error"))
            if route.num_open == 0:
                self._routes.pop(output.request_id, None)

    def _change(self, engine: int, changes: BlockChanges | None) -> None:
        with self._lock:
            if self._router is not None:
                self._router.change(engine, changes)

    def _are_ready(self) -> list[bool]:
        return [client.state == "ready" for client in self._clients]

    def _client_of(self, request_id: str) -> ProcessEngineClient | None:
        if not self._origin.is_here:
            return None
        with self._lock:
            route = self._routes.get(request_id)
        return None if route is None else self._clients[route.engine]

    def _idlest(self) -> ProcessEngineClient:
        """The ready engine with the least work, for calls that are not requests; it has room for one, or none has."""
        self._origin.check()
        with self._lock:
            loads = self.router.loads()
        ready = [(client.num_calls, load, engine) for engine, (client, load) in enumerate(zip(self._clients, loads))
                 if client.state == "ready"]  # fmt: skip
        if not ready:
            raise self._dead()
        if sum(num_calls for num_calls, _, _ in ready) >= self.info.max_waiting:
            raise QueueFullError(self.info.max_waiting, RETRY_AFTER_S)
        return self._clients[min(ready)[2]]

    def _dead(self) -> EngineDeadError:
        """The error if no engine accepts requests, with the time to retry."""
        if self._is_closing:
            return EngineDeadError("the engine is closed or closing")
        if all(client.state == "unloaded" for client in self._clients):
            return EngineDeadError("the model is unloaded")
        waits = [client.ready_in_s for client in self._clients]
        known = [seconds for seconds in waits if seconds is not None]
        if not known:
            return EngineDeadError("all engines have died; see the log")
        return EngineDeadError(f"no engine is there; one is started again, in about {min(known):.0f} s", min(known))


def _at_once(calls: Sequence[Callable[[], None]]) -> None:
    """Runs them on a thread each, and waits for all. Raises the first one's error."""
    with ThreadPoolExecutor(max(1, len(calls))) as threads:
        futures = [threads.submit(call) for call in calls]
    for future in futures:
        future.result()


def _memberships(config: EngineConfig, places: RayEngines | None) -> list[dict[str, Any]]:
    """The launcher of each engine, or its processors of this machine."""
    count = config.data_parallel_size
    if places is not None:
        return [{"launch": partial(places.launch, engine)} for engine in range(count)]
    if count == 1 or device_of(0, count, config.device, config.num_ranks).startswith("cuda"):
        return [{} for _ in range(count)]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [{"cores": cores_of(engine, count, cores)} if cores else {} for engine in range(count)]


def _sum(futures: Sequence[Future[NDArray[np.float32]]]) -> Future[NDArray[np.float32]]:
    """A future of the sum of these futures' results, or of an error of them, once all are done."""
    return _all(futures, lambda found: np.sum(found, axis=0))


def _joined(futures: Sequence[Future[NDArray[np.float32]]]) -> Future[NDArray[np.float32]]:
    """The same of what they say of their condition."""

    def join(found: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        return join_conditions([EngineCondition.of(numbers) for numbers in found]).numbers

    return _all(futures, join)


def join_conditions(each: Sequence[EngineCondition]) -> EngineCondition:
    """All engines' conditions as one."""
    return EngineCondition(
        is_paused=any(one.is_paused for one in each),
        sleep_level=max(one.sleep_level for one in each),
        has_weights=all(one.has_weights for one in each),
        has_pages=all(one.has_pages for one in each),
        num_ended=sum(one.num_ended for one in each),
        num_restarted=sum(one.num_restarted for one in each),
    )


def _all(
    futures: Sequence[Future[NDArray[np.float32]]], join: Callable[[list[NDArray[np.float32]]], NDArray[np.float32]]
) -> Future[NDArray[np.float32]]:
    total: Future[NDArray[np.float32]] = Future()
    total.set_running_or_notify_cancel()
    lock, left = threading.Lock(), list(futures)

    def settle(future: Future[NDArray[np.float32]]) -> None:
        with lock:
            left.remove(future)
            if left:
                return
        errors = [error for each in futures if (error := each.exception()) is not None]
        if errors:
            total.set_exception(errors[0])
        else:
            total.set_result(join([each.result() for each in futures]))

    for future in futures:
        future.add_done_callback(settle)
    return total
