"""Starts processes of ours with a socket to them; what such a process does first, and how it ends with its parent."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from runtime.own_packages import python_module

ENGINE = python_module("runtime.engine.process.main")
"""Python's command line of an engine's process."""

SOCKET_BUFFER_BYTES = 1 << 20
"""Bytes that the kernel is asked to buffer for a slow reader; then the writer waits."""


def connected_process(command: Sequence[str], *inherited: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """`spawn` a process with a new socket; returns our end of it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        for each in (ours, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        try:
            return ours, spawn(command, theirs.fileno(), *inherited)
        except BaseException:
            ours.close()
            raise


def spawn(command: Sequence[str], descriptor: int, *inherited: int) -> subprocess.Popen[bytes]:
    """Start Python, without the current folder on its module path. It inherits the socket's descriptor, and others."""
    # Blocked until the process ignores them itself. Python does not handle signals on this thread.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen(
            [sys.executable, "-P", *command, "--fd", str(descriptor)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # stray prints must not reach the server's output
            pass_fds=(descriptor, *inherited),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class WaitingProcess:
    """An engine's process that imports its modules while its parent imports its own, and waits for its first message.
    Made on a thread that lives as long as the process. Raises ``OSError`` if it cannot be started."""

    def __init__(self, command: Sequence[str] = ENGINE) -> None:
        self._command = command
        self._begun: tuple[socket.socket, subprocess.Popen[bytes]] | None = connected_process(command)
        self._lock = threading.Lock()

    def take(self, command: Sequence[str]) -> tuple[socket.socket, subprocess.Popen[bytes]] | None:
        """Our end of its socket, and itself, for the first caller; then None. It ends if another command is wanted."""
        if command != self._command:
            self.close()
        with self._lock:
            begun, self._begun = self._begun, None
        return begun

    def close(self) -> None:
        """End it unless it was taken."""
        if (begun := self.take(self._command)) is not None:
            begun[0].close()
            begun[1].kill()
            begun[1].wait()

    def __enter__(self) -> WaitingProcess:
        return self

    def __exit__(self, *of_error: object) -> None:
        self.close()


def begin(description: str, *more: str) -> argparse.Namespace:
    """Called first in a process that was spawned. Signals from the terminal are for its parent. Returns the descriptors
    on its command line, "fd" and ``more``, which it does not pass on."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # blocked until here by `spawn`
    faulthandler.enable()
    parser = argparse.ArgumentParser(description=description)
    for name in ("fd", *more):
        parser.add_argument(f"--{name}", type=int, required=name == "fd", help="inherited")
    given = parser.parse_args()
    for descriptor in vars(given).values():
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    return given


def how_it_ended(status: int) -> str:
    """A process's exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def die_with_parent() -> None:
    """Have Linux kill this process with the thread that started it. A closed socket is noticed only by a Python that
    still runs."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def end_with_parent() -> None:
    """From now on the process ends when its stdin is closed, a pipe that the parent holds."""
    threading.Thread(target=_wait_for_the_end, daemon=True).start()


def _wait_for_the_end() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
