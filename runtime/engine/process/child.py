"""The server's side of an engine process: its settings, messages in both directions, and its end."""

from __future__ import annotations

import logging
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec

from runtime.engine.messages import TransferSettings
from runtime.engine.process.spawning import ENGINE, WaitingProcess, connected_process, how_it_ended
from runtime.engine.process.wire import (
    FrameReader,
    FromEngine,
    PatientWriter,
    Start,
    frame,
)
from runtime.engine.scheduling.block_events import BlockChanges

logger = logging.getLogger("xserv.engine")

READ_TIMEOUT_S = 1
EXIT_TIMEOUT_S = 5.0
"""How long a process may take to end after its socket was closed, before it is killed."""


class RunningEngine(Protocol):
    """A process that starts and runs an engine, on this machine or another, for its supervisor."""

    pid: int
    """The process id, on its machine."""
    clock_offset_s: float
    """Its machine's ``time.monotonic()`` minus this one's."""

    def send(self, data: bytearray) -> None:
        """See ``EngineConnection.send``."""

    def receive(self) -> list[FromEngine] | None:
        """See ``EngineConnection.receive``."""

    def kill(self) -> None:
        """Kill it at once. Thread-safe."""

    def end(self) -> str:
        """End the process if it still runs, and wait; returns how it ended, in words."""


class EngineConnection:
    """Messages to and from an engine's process over a connected socket, which it owns from now on."""

    clock_offset_s = 0.0

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        timeout = struct.pack("@ll", READ_TIMEOUT_S, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._reader = FrameReader(connection)
        self._writer = PatientWriter(connection)
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    def send(self, data: bytearray) -> None:
        """Queue a message's ``frame``; never waits. Frames for a process that has ended are dropped: ``receive``
        reports its end."""
        self._writer.send(data)

    def receive(self) -> list[FromEngine] | None:
        """The messages that have come, or none after a second without any. None means that the process has closed the
        socket: it has ended or is about to. Raises ``WireError`` and msgspec's errors for malformed messages."""
        try:
            frames = self._reader.read()
        except BlockingIOError:
            return []
        except OSError:  # reset: it ended with unread messages
            return None
        return [self._decoder.decode(data) for data in frames] or None

    def close(self) -> None:
        """Close the socket, which ends the process."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._writer.close()
        self._connection.close()


class EngineProcess(EngineConnection):
    """A process that starts and runs an engine, and the socket to it.

    The thread that makes it must live as long as the process: on Linux that dies with its thread. The one that is
    ``waiting`` is taken if it is still there and has this command. Raises ``OSError`` if the process cannot be started.
    """

    def __init__(self, start: Start, command: Sequence[str] = ENGINE, *, waiting: WaitingProcess | None = None) -> None:
        begun = None if waiting is None else waiting.take(command)
        ours, self._process = begun or connected_process(command)
        super().__init__(ours)
        self.pid = self._process.pid
        self.send(frame(start))

    def kill(self) -> None:
        """Send SIGKILL at once. Thread-safe."""
        self._process.kill()

    def end(self) -> str:
        """Close the socket, which ends the process, and wait; returns how it ended, in words."""
        self.close()
        try:
            status = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        return how_it_ended(status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """How an engine process is monitored and restarted.

    first_delay_s, most_delay_s  before the first restart after a death, and before any; each is twice the previous one
    healthy_s                    after serving so long, an engine is restarted after the first delay again
    hang_timeout_s               an engine with work is ended if it finishes no step for so long, and so is a silent
                                 process
    close_timeout_s              how long it may take to close without a drain; then the process is killed
    command                      Python's command line; for tests
    """

    first_delay_s: float = 1.0
    most_delay_s: float = 30.0
    healthy_s: float = 60.0
    hang_timeout_s: float = 600.0
    close_timeout_s: float = 15.0
    command: tuple[str, ...] = ENGINE


Launch = Callable[[Start], RunningEngine]
"""Starts an engine's process somewhere. Called on the supervisor's thread, which lives as long as the process. Raises
``OSError`` and ``XservError`` if it cannot be started."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Settings of an engine that is one of several.

    name            in the log
    launch          starts the process, or None for a new one on this machine
    cores           its processors; all if empty
    routing_secret  keys the digests of ``on_blocks``
    on_blocks       called with changes of its block contents, on the supervisor's thread, before the outputs of
                    the step that made them, and with None when it has ended and they are gone
    transfer        how it hands requests over, if it does
    """

    name: str = "the engine"
    launch: Launch | None = None
    cores: tuple[int, ...] = ()
    routing_secret: bytes | None = None
    on_blocks: Callable[[BlockChanges | None], None] | None = None
    transfer: TransferSettings | None = None
