"""Engines on the nodes of a Ray cluster.

Ray places them (a placement group, packed, with a bundle for each engine and all of its ranks, so that these are on one
node), and starts an actor for each that starts its process. All else is as on one machine: frames over a socket, whose
other side has proven to know a secret, and a supervisor that has Ray start the next actor when one ends.
"""

from __future__ import annotations

import logging
import secrets
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from runtime.engine.config import EngineConfig
from runtime.engine.messages import RequestTimes, StepView
from runtime.engine.process.child import COMMAND, EXIT_TIMEOUT_S, EngineConnection
from runtime.engine.process.wire import FromEngine, Outputs, Pulse, Start, frame
from runtime.errors import XservError
from runtime.parallel.handshake import SECRET_BYTES, TIMEOUT_S, Listener
from runtime.parallel.ray_actor import EngineActor, watch_connection
from runtime.parallel.shares import cores_of

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger("xserv.engine")

PLACEMENT_TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0
"""For Ray to start an actor, which may have to import this package first."""


class RayError(XservError):
    """Ray is not installed, no cluster is there, or it has no room for the engines."""


class RayEngines:
    """The engines' places in a cluster. Thread-safe; nothing is asked of Ray before the first ``launch``.

    address  of the cluster: "auto" (that of this machine), HOST:PORT
    command  what Python runs in the engines' processes; for tests
    """

    def __init__(self, config: EngineConfig, address: str = "auto", command: tuple[str, ...] = COMMAND) -> None:
        self._config = config
        self._address = address
        self._command = command
        self._lock = threading.Lock()
        self._group: PlacementGroup | None = None
        self._has_connected = False

    def launch(self, engine: int, start: Start) -> RayEngine:
        """See ``supervision.Launch``. Raises ``RayError``, ``HandshakeError``, ``OSError``."""
        group = self._placed()
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = _bundle(self._config, _has_gpus(self._config.device))
        options: dict[str, Any] = {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=engine),
        }
        secret = secrets.token_bytes(SECRET_BYTES)
        host = ray.util.get_node_ip_address()
        listener = Listener(host, secret)
        actor: Any = None
        try:
            actor = ray.remote(EngineActor).options(**options).remote()
            started = actor.start.remote(host, listener.port, secret, list(self._command))
            pid, cores = ray.get(started, timeout=START_TIMEOUT_S)
            connection, offset_s = listener.wait(TIMEOUT_S)
        except BaseException as error:
            listener.close()
            if actor is not None:
                with suppress(Exception):
                    ray.kill(actor)
            if isinstance(error, (ray.exceptions.RayError, TimeoutError)):
                raise RayError(f"Ray could not start engine {engine}: {_first_line(error)}") from error
            raise
        place, count = self._place_on_node(engine, group)
        if "GPU" in bundle:  # Ray shows the process its own alone
            start = msgspec.structs.replace(start, config=replace(start.config, device="cuda"))
        else:
            start = msgspec.structs.replace(start, cores=list(cores_of(place, count, cores)))
        return RayEngine(actor, connection, offset_s, pid, start)

    def close(self) -> None:
        """Give the places back. The engines have been closed. May be called again."""
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        import ray

        with suppress(Exception):  # the cluster has gone
            ray.util.remove_placement_group(group)
        if self._has_connected:
            ray.shutdown()
            self._has_connected = False

    def _placed(self) -> PlacementGroup:
        """The placement group, made by whoever comes first."""
        with self._lock:
            if self._group is None:
                self._group = self._place()
            return self._group

    def _place(self) -> PlacementGroup:
        try:
            import ray
        except ImportError:
            raise RayError("Ray is not installed: pip install 'xserv[ray]'") from None
        if not ray.is_initialized():
            try:
                ray.init(address=self._address, log_to_driver=False, logging_level=logging.WARNING)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise RayError(f"no Ray cluster is at {self._address!r}: {_first_line(error)}") from error
            self._has_connected = True
        bundle = _bundle(self._config, _has_gpus(self._config.device))
        count = self._config.data_parallel_size
        group = ray.util.placement_group([dict(bundle) for _ in range(count)], strategy="PACK")
        if not group.wait(PLACEMENT_TIMEOUT_S):
            nodes = [each["Resources"] for each in ray.nodes() if each["Alive"]]
            shown = [{name: each.get(name, 0) for name in bundle} for each in nodes]
            ray.util.remove_placement_group(group)
            raise RayError(
                f"Ray has no room for {count} engines of {bundle} each, all of an engine's ranks on one node; its "
                f"nodes have {shown}"
            )
        logger.info("Ray has placed %d engines of %s", count, bundle)
        return group

    def _place_on_node(self, engine: int, group: PlacementGroup) -> tuple[int, int]:
        """Which of the engines of its node this one is, and how many there are."""
        import ray

        nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
        together = sorted(number for number, node in nodes.items() if node == nodes[engine])
        return together.index(engine), len(together)


class RayEngine(EngineConnection):
    """See ``RunningEngine``: an actor's process. Its times are told in this machine's."""

    def __init__(self, actor: Any, connection: Any, clock_offset_s: float, pid: int, start: Start) -> None:
        watch_connection(connection)
        super().__init__(connection)
        self._actor = actor
        self.clock_offset_s = clock_offset_s
        self.pid = pid
        self.send(frame(start))

    def receive(self) -> list[FromEngine] | None:
        """See ``EngineConnection.receive``."""
        messages = super().receive()
        return None if messages is None else [self._in_our_time(message) for message in messages]

    def kill(self) -> None:
        """See ``RunningEngine.kill``."""
        import ray

        with suppress(Exception):  # it has gone, or Ray has
            ray.kill(self._actor)

    def end(self) -> str:
        """See ``RunningEngine.end``."""
        import ray

        self.close()
        try:
            how: str = ray.get(self._actor.wait.remote(EXIT_TIMEOUT_S), timeout=2 * EXIT_TIMEOUT_S)
        except Exception as error:  # whatever Ray has to say: it ends now
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


def _bundle(config: EngineConfig, has_gpus: bool) -> dict[str, float]:
    """What an engine with all of its ranks asks a node for."""
    num_ranks = config.num_ranks
    return {"CPU": 1, "GPU": num_ranks} if has_gpus else {"CPU": num_ranks}


def _has_gpus(device: str) -> bool:
    """Whether engines run on GPUs: "auto" means where the cluster has any."""
    import ray

    return device.startswith("cuda") or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
