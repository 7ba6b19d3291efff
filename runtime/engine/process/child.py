"""A started engine process as its server sees it: messages in both directions, and its end."""

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
"""What Python runs in the process."""

READ_TIMEOUT_S = 1
EXIT_TIMEOUT_S = 5.0
"""How long a process may take to end after its socket has been closed; then it is killed."""


class RunningEngine(Protocol):
    """A process that was told to start an engine, wherever it runs, as its supervisor sees it."""

    pid: int
    """On its machine."""
    clock_offset_s: float
    """What its machine's ``time.monotonic()`` is before this one's."""

    def send(self, data: bytearray) -> None:
        """See ``EngineConnection.send``."""

    def receive(self) -> list[FromEngine] | None:
        """See ``EngineConnection.receive``."""

    def kill(self) -> None:
        """At once. May be called on any thread."""

    def end(self) -> str:
        """Have it end, if it has not, and wait for that; returns how it ended, in words."""


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
        """A message's ``frame``. Never waits. A process that has ended gets nothing, and nobody is told: ``receive``
        tells."""
        self._writer.send(data)

    def receive(self) -> list[FromEngine] | None:
        """The messages that have come; none after a second in which none came. None: the process has closed the socket,
        so it has ended or is about to. Raises ``WireError`` and msgspec's errors when it sends nonsense."""
        try:
            frames = self._reader.read()
        except BlockingIOError:
            return []
        except OSError:  # reset: it ended with our messages unread
            return None
        return [self._decoder.decode(data) for data in frames] or None

    def close(self) -> None:
        """With it the process ends."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._writer.close()
        self._connection.close()


class EngineProcess(EngineConnection):
    """A process that has been told to start an engine, and the socket to it.

    The thread that makes it must live as long as the process: on Linux that dies with its thread. Raises ``OSError``
    when there is no process to be had.
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
        """At once, by SIGKILL. May be called on any thread."""
        self._process.kill()

    def end(self) -> str:
        """Close the socket, with which the process ends, and wait for that; returns how it ended, in words."""
        self.close()
        try:
            status = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        return how_it_ended(status)


def spawn(command: Sequence[str], descriptor: int) -> subprocess.Popen[bytes]:
    """Python, without the current folder among the places of modules. It inherits the socket's descriptor."""
    # Blocked until the process ignores them itself. This thread is not the one that Python hands signals to.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen(
            [sys.executable, "-P", *command, "--fd", str(descriptor)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what is printed there by mistake is no answer of the server's
            pass_fds=(descriptor,),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def how_it_ended(status: int) -> str:
    """A process's status in words."""
    return f"was ended by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
