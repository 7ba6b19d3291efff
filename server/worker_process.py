"""Processes that run third-party code over untrusted input for the server, one job at a time.

The server's side is a `WorkerProcess`, which is killed when a job takes too long; the other side's `main` is one call
of `answer_jobs`. Jobs and answers are frames of `runtime.engine.process.wire` over a socket; the process ends when that
closes. Large data goes through shared memory.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from runtime.engine.process.wire import FrameReader, frame
from runtime.own_packages import python_module

START_TIMEOUT_S = 30.0
"""Beside a job's own time, for a process that has to import its libraries."""


_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    # memory of one job is kept for the next: allocating it again costs as much as decoding
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}


class WorkerProcess:
    """The server's side.

    module            its `main` answers jobs
    shared_bytes      of shared memory; its pages are allocated when they are written
    most_bytes        of an answer
    """

    def __init__(self, module: str, *, shared_bytes: int = 0, most_bytes: int = 1 << 20) -> None:
        self.connection, theirs = socket.socketpair()
        memory = os.memfd_create("xserv-job")
        try:
            with theirs:
                if shared_bytes:
                    os.ftruncate(memory, shared_bytes)
                self.memory = mmap.mmap(memory, shared_bytes) if shared_bytes else None
                self.popen = subprocess.Popen(
                    [sys.executable, *self.command(module), str(theirs.fileno()), str(memory)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), memory],
                    env={**os.environ, **_ENVIRONMENT},
                )
        finally:
            os.close(memory)
        self._reader = FrameReader(self.connection, most_bytes)
        self.is_new = True
        """It has answered nothing yet."""

    @staticmethod
    def command(module: str) -> tuple[str, ...]:
        """The arguments after Python's name."""
        return ("-P", *python_module(module))

    def ask(self, job: object, timeout_s: float) -> memoryview:
        """The answer to a job, encoded; valid until the next. Raises TimeoutError, and EOFError, OSError or WireError
        if the process has ended or misbehaves: the caller then kills it."""
        self.connection.settimeout(timeout_s + (START_TIMEOUT_S if self.is_new else 0.0))
        self.connection.sendall(frame(job))
        frames = self._reader.read()
        if not frames:
            raise EOFError
        self.is_new = False
        return frames[0]

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.connection.close()
        if self.memory is not None:
            self.memory.close()


def answer_jobs(answer: Callable[[memoryview, memoryview], object], *, max_memory_bytes: int) -> None:
    """The process's side: `answer(job, memory)` for each job, as it was encoded, until the server closes the socket.
    It limits this process's address space and forbids it to write files."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's SIGINT is for the server
    connection, memory_file = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    num_bytes = os.fstat(memory_file).st_size
    memory = memoryview(mmap.mmap(memory_file, num_bytes)) if num_bytes else memoryview(b"")
    os.close(memory_file)
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    reader = FrameReader(connection)
    with suppress(ConnectionError):
        while frames := reader.read():
            for each in frames:
                connection.sendall(frame(answer(each, memory)))
