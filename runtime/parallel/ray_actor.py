"""The Ray actor on a node: it holds a process, an engine's or one of its ranks', which ends with it.

The processes are those that a server, or an engine, starts on its own machine, with TCP sockets. The actor only
connects them and holds them: when the actor is killed, so is the process.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from runtime.engine.process.handshake import Listener, join, watch_connection
from runtime.engine.process.spawning import how_it_ended, spawn
from runtime.later import later

ray = later("ray")


class EngineActor:
    """One process on this node."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: Listener | None = None

    def place(self) -> tuple[str, list[str]]:
        """This node's address, and the GPUs that Ray gives the actor."""
        return ray.util.get_node_ip_address(), [str(number) for number in ray.get_gpu_ids()]

    def show_gpus(self, numbers: Sequence[str]) -> None:
        """Set the GPUs visible to the process: those of all of an engine's ranks on this node, as NCCL needs them."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(numbers)

    def start(self, host: str, port: int, secret: bytes, command: Sequence[str]) -> tuple[int, list[int]]:
        """Connect a new process to the server; returns its id, and the processors of this node that it may use. Raises
        ``HandshakeError``, ``OSError``."""
        connection = join(host, port, secret)
        watch_connection(connection)
        with connection:
            self._process = spawn(command, connection.fileno())
        return self._process.pid, sorted(os.sched_getaffinity(0))

    def listen(self, host: str, secret: bytes) -> int:
        """The port on which a rank waits for its engine. Raises ``OSError``."""
        self._listener = Listener(host, secret)
        return self._listener.port

    def start_rank(self, command: Sequence[str], timeout_s: float) -> int:
        """Accept the engine's connection and pass it to a new process; returns its id. Raises ``HandshakeError``,
        ``OSError``."""
        assert self._listener is not None, "nothing listens"
        connection, _ = self._listener.wait(timeout_s)
        watch_connection(connection)
        with connection:
            self._process = spawn(command, connection.fileno())
        return self._process.pid

    def wait(self, timeout_s: float) -> str:
        """Wait for the process to end, and kill it after the timeout; returns how it ended."""
        assert self._process is not None, "nothing was started"
        with suppress(subprocess.TimeoutExpired):
            return how_it_ended(self._process.wait(timeout_s))
        self._process.kill()
        return how_it_ended(self._process.wait())
