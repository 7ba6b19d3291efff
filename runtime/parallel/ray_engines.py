"""Engines on the nodes of a Ray cluster.

Ray places them (a placement group, packed) and starts an actor for each, which starts its process. All else is as on
one machine: frames over a socket, whose other side has proved that it knows a secret, and a supervisor that has Ray
start the next actor when one ends.

On GPUs each rank has a bundle and an actor of its own, on any node: rank 0's process is the engine, which connects to
the others' by addresses and secrets in its first message; they exchange results by NCCL. On the CPU ranks share memory,
so that an engine's bundle has room for all of them.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from runtime.engine.config import EngineConfig
from runtime.engine.messages import RequestTimes, StepView
from runtime.engine.process.child import EXIT_TIMEOUT_S, EngineConnection
from runtime.engine.process.handshake import SECRET_BYTES, TIMEOUT_S, Listener, watch_connection
from runtime.engine.process.spawning import ENGINE
from runtime.engine.process.wire import FromEngine, Outputs, Pulse, RemoteRank, Start, frame
from runtime.errors import XservError
from runtime.later import later
from runtime.own_packages import python_module
from runtime.parallel.division import cores_of
from runtime.parallel.ray_actor import EngineActor

ray = later("ray")  # optional
_strategies = later("ray.util.scheduling_strategies")

logger = logging.getLogger("xserv.engine")

RANK_COMMAND = python_module("runtime.engine.ranks.main")
"""The command line of the ranks' processes, for Python."""
PLACEMENT_TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0
"""Seconds for Ray to start an actor, which may have to import this package first."""
RANK_TIMEOUT_S = 3600.0
"""Seconds for an engine to connect to its ranks, before which it may have to compile; if it ends, so do they."""


class RayError(XservError):
    """Ray is not installed, there is no cluster, or it has no room for the engines."""


class RayEngines:
    """Places engines in a cluster. Thread-safe; Ray is not used before the first ``launch``.

    address  of the cluster: "auto" (that of this machine), HOST:PORT
    command  the command line of the engines' processes; for tests
    """

    def __init__(self, config: EngineConfig, address: str = "auto", command: tuple[str, ...] = ENGINE) -> None:
        self._config = config
        self._address = address
        self._command = command
        self._lock = threading.Lock()
        self._group: Any = None
        self._has_connected = False

    def launch(self, engine: int, start: Start) -> RayEngine:
        """See ``child.Launch``. Raises ``RayError``, ``HandshakeError``, ``OSError``."""
        group = self._placed()
        has_gpus = _has_gpus(self._config.device)
        bundle, num_parts = _bundle(self._config, has_gpus), _num_parts(self._config, has_gpus)
        options: dict[str, Any] = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
        secret = secrets.token_bytes(SECRET_BYTES)
        host = ray.util.get_node_ip_address()
        listener = Listener(host, secret)
        actors: list[Any] = []
        try:
            for part in range(num_parts):
                strategy = _strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=engine * num_parts + part
                )
                actors.append(ray.remote(EngineActor).options(**options, scheduling_strategy=strategy).remote())
            if num_parts > 1:
                start = _with_ranks(start, actors, has_gpus)
            started = actors[0].start.remote(host, listener.port, secret, list(self._command))
            pid, cores = ray.get(started, timeout=START_TIMEOUT_S)
            connection, offset_s = listener.wait(TIMEOUT_S)
        except BaseException as error:
            listener.close()
            _kill(actors)
            if isinstance(error, (ray.exceptions.RayError, TimeoutError)):
                raise RayError(f"Ray could not start engine {engine}: {_first_line(error)}") from error
            raise
        if start.transfer is not None:
            node, _ = ray.get(actors[0].place.remote(), timeout=START_TIMEOUT_S)
            start = msgspec.structs.replace(start, transfer=msgspec.structs.replace(start.transfer, host=node))
        if num_parts == 1:
            if has_gpus:  # Ray makes only its own visible to the process
                start = msgspec.structs.replace(start, config=replace(start.config, device="cuda"))
            else:
                place, count = self._place_on_node(engine, group)
                start = msgspec.structs.replace(start, cores=list(cores_of(place, count, cores)))
        return RayEngine(actors, connection, offset_s, pid, start)

    def close(self) -> None:
        """Remove the placement group. The engines have been closed. Idempotent."""
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        with suppress(Exception):  # the cluster has gone
            ray.util.remove_placement_group(group)
        if self._has_connected:
            ray.shutdown()
            self._has_connected = False

    def _placed(self) -> Any:
        """The placement group, made on first use."""
        with self._lock:
            if self._group is None:
                self._group = self._place()
            return self._group

    def _place(self) -> Any:
        try:
            is_initialized = ray.is_initialized()
        except ImportError:
            raise RayError("Ray is not installed: pip install '.[ray]' in xserv's checkout") from None
        if not is_initialized:
            try:
                ray.init(address=self._address, log_to_driver=False, logging_level=logging.WARNING)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise RayError(f"no Ray cluster is at {self._address!r}: {_first_line(error)}") from error
            self._has_connected = True
        has_gpus = _has_gpus(self._config.device)
        bundle, num_parts = _bundle(self._config, has_gpus), _num_parts(self._config, has_gpus)
        count = self._config.data_parallel_size
        group = ray.util.placement_group([dict(bundle) for _ in range(count * num_parts)], strategy="PACK")
        if not group.wait(PLACEMENT_TIMEOUT_S):
            nodes = [each["Resources"] for each in ray.nodes() if each["Alive"]]
            shown = [{name: each.get(name, 0) for name in bundle} for each in nodes]
            ray.util.remove_placement_group(group)
            each = f"{bundle} each, all of an engine's ranks on one node"
            if num_parts > 1:
                each = f"{num_parts} ranks of {bundle} each"
            raise RayError(f"Ray has no room for {count} engines of {each}; its nodes have {shown}")
        logger.info("Ray has placed %d engines of %d parts of %s", count, num_parts, bundle)
        return group

    def _place_on_node(self, engine: int, group: Any) -> tuple[int, int]:
        """This engine's index among those on its node, and their number."""
        nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
        together = sorted(number for number, node in nodes.items() if node == nodes[engine])
        return together.index(engine), len(together)


class RayEngine(EngineConnection):
    """See ``RunningEngine``: the process of the first of these actors; the others have its ranks. Its times are
    converted to this machine's."""

    def __init__(
        self, actors: Sequence[Any], connection: socket.socket, clock_offset_s: float, pid: int, start: Start
    ) -> None:
        watch_connection(connection)
        super().__init__(connection)
        self._actors = tuple(actors)
        self.clock_offset_s = clock_offset_s
        self.pid = pid
        self.send(frame(start))

    def receive(self) -> list[FromEngine] | None:
        messages = super().receive()
        return None if messages is None else [self._in_our_time(message) for message in messages]

    def kill(self) -> None:
        _kill(self._actors)

    def end(self) -> str:
        self.close()
        try:
            how: str = ray.get(self._actors[0].wait.remote(EXIT_TIMEOUT_S), timeout=2 * EXIT_TIMEOUT_S)
        except Exception as error:  # any error of Ray's: it ends now
            how = f"has lost its actor: {_first_line(error)}"
        self.kill()
        return how

    def _in_our_time(self, message: FromEngine) -> FromEngine:
        offset_s, changed = self.clock_offset_s, msgspec.structs.replace
        match message:
            case Outputs(outputs) if any(output.times is not None for output in outputs):
                return changed(
                    message,
                    outputs=[
                        output if output.times is None else changed(output, times=_shifted(output.times, offset_s))
                        for output in outputs
                    ],
                )
            case Pulse(stats):
                return changed(message, stats=changed(stats, last_step_s=stats.last_step_s - offset_s))
            case StepView():
                chunks = [replace(chunk, arrival_s=chunk.arrival_s - offset_s) for chunk in message.chunks]
                return changed(message, start_s=message.start_s - offset_s, chunks=chunks)
        return message


def _shifted(times: RequestTimes, offset_s: float) -> RequestTimes:
    def shifted(seconds: float | None) -> float | None:
        return None if seconds is None else seconds - offset_s

    return RequestTimes(
        arrival_s=times.arrival_s - offset_s,
        first_scheduled_s=shifted(times.first_scheduled_s),
        first_token_s=shifted(times.first_token_s),
        last_token_s=shifted(times.last_token_s),
    )


def _with_ranks(start: Start, actors: Sequence[Any], has_gpus: bool) -> Start:
    """The first message of an engine with its ranks in these actors: each one's address and device. Raises Ray's
    errors."""
    places = ray.get([actor.place.remote() for actor in actors], timeout=START_TIMEOUT_S)
    devices = [start.config.device] * len(actors)
    if has_gpus:
        seen = {host: [gpu for other, gpus in places if other == host for gpu in gpus] for host, _ in places}
        devices = [f"cuda:{seen[host].index(gpus[0])}" for host, gpus in places]
        ray.get([actor.show_gpus.remote(seen[host]) for actor, (host, _) in zip(actors, places)])
    known = [secrets.token_bytes(SECRET_BYTES) for _ in actors[1:]]
    listening = [actor.listen.remote(host, secret) for actor, (host, _), secret in zip(actors[1:], places[1:], known)]
    ports = ray.get(listening, timeout=START_TIMEOUT_S)
    for actor in actors[1:]:
        actor.start_rank.remote(list(RANK_COMMAND), RANK_TIMEOUT_S)  # which waits for the engine
    remote = [
        RemoteRank(host, port, secret, device)
        for (host, _), port, secret, device in zip(places[1:], ports, known, devices[1:])
    ]
    return msgspec.structs.replace(start, config=replace(start.config, device=devices[0]), remote_ranks=remote)


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        with suppress(Exception):  # it has gone, or Ray has
            ray.kill(actor)


def _num_parts(config: EngineConfig, has_gpus: bool) -> int:
    """Bundles of an engine: one for each rank, or one for all on the CPU, where they share memory."""
    return config.num_ranks if has_gpus or config.device.startswith("emulated") else 1


def _bundle(config: EngineConfig, has_gpus: bool) -> dict[str, float]:
    """The resources of a node for an engine with all of its ranks; on GPUs those for each rank."""
    if _num_parts(config, has_gpus) == config.num_ranks:
        return {"CPU": 1, "GPU": 1} if has_gpus else {"CPU": 1}
    return {"CPU": config.num_ranks}


def _has_gpus(device: str) -> bool:
    """Whether engines run on GPUs; for "auto", whether the cluster has any."""
    return device.startswith("cuda") or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
