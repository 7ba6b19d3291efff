"""What Ray runs on a node: an actor that has an engine's process beside it, and ends with it.

The process is the one that a server starts on its own machine; its socket leads to the server, over TCP. The actor only
connects it and holds it: when the actor is killed, so is the process.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from runtime.engine.process.child import how_it_ended, spawn
from runtime.parallel.handshake import join

KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 4))
"""A machine that has gone is noticed after 13 s."""
SILENT_MS = 15_000


def watch_connection(connection: socket.socket) -> None:
    """Has the kernel end a connection whose other machine has gone without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)


class EngineActor:
    """One engine's process on this node."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, host: str, port: int, secret: bytes, command: Sequence[str]) -> tuple[int, list[int]]:
        """Connect a new process to the server; its id, and the processors of this node that it may use. Raises
        ``HandshakeError``, ``OSError``."""
        connection = join(host, port, secret)
        watch_connection(connection)
        with connection:
            self._process = spawn(command, connection.fileno())
        return self._process.pid, sorted(os.sched_getaffinity(0))

    def wait(self, timeout_s: float) -> str:
        """How the process ended; it is killed when that takes longer."""
        assert self._process is not None, "nothing was started"
        with suppress(subprocess.TimeoutExpired):
            return how_it_ended(self._process.wait(timeout_s))
        self._process.kill()
        return how_it_ended(self._process.wait())
