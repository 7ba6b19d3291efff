"""A server as users start one, for measurements: its process, a connection, the processor time of its threads."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from runtime.own_packages import python_module


def processor_s(pids: Sequence[int]) -> list[float]:
    """Processor time of each process so far, to a hundredth of a second."""
    lines = [Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13] for pid in pids]
    return [sum(map(int, each)) / os.sysconf("SC_CLK_TCK") for each in lines]


def threads_s(pids: Sequence[int]) -> float:
    """Processor time of the threads of processes so far, exactly; those that have ended do not count."""
    files = (file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(file.read_text(encoding="utf-8").split()[0]) for file in files) / 1e9


class Served:
    """`xserv serve FOLDER` with these arguments on a free port, and one connection to it; ends with the block."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.begun_s = time.perf_counter()
        command = [sys.executable, "-P", *python_module("runtime.cli"), "serve", str(folder), "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
        )
        assert self.process.stdout is not None
        self.wire: socket.socket | None = None
        line = self.process.stdout.readline()
        assert "http://" in line, f"the server said {line!r}"
        self.connection = http.client.HTTPConnection(line.partition("http://")[2].partition("/")[0])

    def ask(self, method: str, path: str, body: str | None = None) -> bytes:
        """The body of an answer, which has to be a 200."""
        self.connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        answer = self.connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        return content

    def exchange(self, request: bytes) -> None:
        """Sends a request as it is, over a connection of its own, and waits for the last byte of its answer."""
        if self.wire is None:
            self.wire = socket.create_connection((self.connection.host, self.connection.port))
        self.wire.sendall(request)
        answer = self.wire.recv(1 << 16)
        while b"\r\n\r\n" not in answer:
            answer += self.wire.recv(1 << 16)
        head, _, content = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), answer
        left = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]) - len(content)
        while left:
            left -= len(self.wire.recv(left))

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *of_error: object) -> None:
        self.connection.close()
        if self.wire is not None:
            self.wire.close()
        self.process.terminate()
        self.process.communicate()  # waits, and closes the pipe


def wake_before_the_engine(pid: int) -> None:
    """Raises a real-time priority of a server's threads by one. The engine's threads spin after a pass: without such
    priorities Linux runs the server first, which has slept."""
    policy, given = os.sched_getscheduler(0), os.sched_getparam(0)
    if policy in (os.SCHED_FIFO, os.SCHED_RR):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setscheduler(int(thread), policy, os.sched_param(given.sched_priority + 1))


@contextmanager
def above_the_server(by: int = 1) -> Iterator[None]:
    """Raises a real-time priority, as if this process had a processor beside the server's, whose threads spin after a
    pass."""
    policy, given = os.sched_getscheduler(0), os.sched_getparam(0)
    if policy not in (os.SCHED_FIFO, os.SCHED_RR):
        yield
        return
    os.sched_setscheduler(0, policy, os.sched_param(given.sched_priority + by))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, given)
