"""The server's side of an engine process: messages in both directions, and its end."""

from __future__ import annotations

import logging
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from runtime.engine.process.wire import (
    SOCKET_BUFFER_BYTES,
    FrameReader,
    FromEngine,
    PatientWriter,
    Start,
    frame,
)
from runtime.own_packages import python_module

logger = logging.getLogger("xserv.engine")

COMMAND = python_module("runtime.engine.process.main")
"""The command line of the process, for Python."""

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

    The thread that makes it must live as long as the process: on Linux that dies with its thread. Raises ``OSError`` if
    the process cannot be started.
    """

    def __init__(self, start: Start, command: Sequence[str] = COMMAND) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            for each in (ours, theirs):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            try:
                self._process = spawn(command, theirs.fileno())
            except BaseException:
                ours.close()
                raise
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


def spawn(command: Sequence[str], descriptor: int) -> subprocess.Popen[bytes]:
    """Start Python, without the current folder on its module path. It inherits the socket's descriptor."""
    # Blocked until the process ignores them itself. Python does not handle signals on this thread.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen(
            [sys.executable, "-P", *command, "--fd", str(descriptor)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # stray prints must not reach the server's output
            pass_fds=(descriptor,),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def how_it_ended(status: int) -> str:
    """A process's exit status in words."""
    return f"was ended by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
