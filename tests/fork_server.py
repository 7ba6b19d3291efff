"""Engines and ranks of tests are forked from a process that has imported what they need.

An engine's process imports for half a second, and tests start hundreds. In the processes of pytest `spawn` replaces
`spawning.spawn`: it has this program fork a process, which gets the caller's environment, folder, processors and
descriptors, runs the module, and is a child of the caller. Programs that tests start themselves, such as `xserv serve`,
start their engines as anywhere else. So does pytest if a variable differs that imports have read, or without Linux.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

from runtime.engine.process import spawning
from runtime.own_packages import python_module

PRELOADED = ("numba", "runtime.engine.process.main", "runtime.engine.ranks.main")
"""What every engine imports before it counts processors."""
ALSO_PRELOADED = (
    "runtime.engine.process.compile_ahead", "runtime.engine.process.thread_client", "runtime.engine.make_engine",
    "runtime.engine.ranks.rank_process", "runtime.engine.transfer.joining", "runtime.backends.cpu",
    "models.families.llama",
)  # fmt: skip
"""The rest, where the environment gives every process one thread (`ONE_THREAD` in conftest.py)."""
READ_BY_IMPORTS = ("NUMBA_", "XSERV_", "XDG_", "HOME", "PYTHON", "OPENBLAS_", "OMP_", "LD_", "CUDA_")
"""Beginnings of variables that interpreters, libraries and modules of ours read once."""
THREADS = "NUMBA_NUM_THREADS"
COUNTS_PROCESSORS = "numba_kernels.cpu.running.pool"
OWN = python_module("tests.fork_server")
SUBREAPER = 36  # of prctl
MOST_BYTES = 1 << 20
HIGH = 500  # descriptors that no process has by itself

_start = spawning.spawn
_servers: dict[str | None, tuple[socket.socket, dict[str, str]]] = {}
"""This process's, by `THREADS`, and the variables that each was made with."""
_lock = threading.Lock()


class ForkedProcess(subprocess.Popen[bytes]):
    """A child of this process that somebody else has made."""

    def __init__(self, args: Sequence[str], pid: int) -> None:
        self.args, self.pid, self.returncode = args, pid, None  # type: ignore[assignment]
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()


def spawn(command: Sequence[str], descriptor: int, *inherited: int) -> subprocess.Popen[bytes]:
    """See `spawning.spawn`."""
    if sys.platform != "linux" or command[0] != OWN[0]:
        return _start(command, descriptor, *inherited)
    with _lock:
        connection, variables = _running_server()
        if variables != _read_by_imports():
            return _start(command, descriptor, *inherited)
        arguments = [*command[1:], "--fd", str(descriptor)]
        descriptors = [2, descriptor, *inherited]
        asked = (arguments, dict(os.environ), os.getcwd(), sorted(os.sched_getaffinity(0)), descriptors)
        libc = ctypes.CDLL(None)
        libc.prctl(SUBREAPER, 1, 0, 0, 0)  # the fork server's child ends, and the child of that becomes ours
        pid = b""
        try:
            socket.send_fds(connection, [json.dumps(asked).encode()], descriptors)
            pid = connection.recv(MOST_BYTES)
        finally:
            libc.prctl(SUBREAPER, 0, 0, 0, 0)
            if not pid:  # other tests get another server
                del _servers[os.environ.get(THREADS)]
                connection.close()
        if not pid:
            raise OSError(f"the tests' fork server has made no process of {command}; stderr tells why")
    return ForkedProcess(command, int(pid))


def _running_server() -> tuple[socket.socket, dict[str, str]]:
    if (threads := os.environ.get(THREADS)) not in _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for each in (ours, theirs):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
            process = _start(OWN, theirs.fileno())
        process.returncode = 0  # nobody waits for it: it ends when the socket is closed
        _servers[threads] = ours, _read_by_imports()
    return _servers[threads]


def _read_by_imports() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ_BY_IMPORTS)}


class _Counting:
    """Has Numba's number of threads counted when the first module of ours asks for it."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == COUNTS_PROCESSORS:
            config: Any = importlib.import_module("numba.core.config")
            config.NUMBA_NUM_THREADS = int(os.environ.get(THREADS) or len(os.sched_getaffinity(0)))


def serve(connection: socket.socket) -> list[str]:
    """Fork until the socket is closed. Returns in each forked process, with the arguments to run."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 16)
        if not data:
            sys.exit()
        (pid_read, pid_write), (go_read, go_write) = os.pipe(), os.pipe()
        if (middle := os.fork()) == 0:
            if (pid := os.fork()) != 0:
                os.write(pid_write, str(pid).encode())
                os._exit(0)
            os.close(go_write)
            os.read(go_read, 1)  # returns when the parent has changed
            for each in (pid_read, pid_write, go_read, connection.detach()):
                os.close(each)
            return _become(descriptors, *json.loads(data))
        os.waitpid(middle, 0)
        os.close(pid_write)  # else a process that could not be forked would be waited for
        connection.send(os.read(pid_read, 20))
        for each in (pid_read, go_read, go_write, *descriptors):
            os.close(each)


def _become(
    given: list[int], arguments: list[str], environ: dict[str, str], folder: str, cores: list[int], numbers: list[int]
) -> list[str]:
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, HIGH) for each in given]
    for each in given:
        os.close(each)
    for each, number in zip(moved, numbers):
        os.dup2(each, number)
        os.close(each)
    os.dup2(2, 1)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    os.sched_setaffinity(0, cores)
    return arguments


if __name__ == "__main__":
    for module in (*PRELOADED, *(ALSO_PRELOADED if os.environ.get(THREADS) == "1" else ())):
        importlib.import_module(module)
    sys.meta_path.insert(0, _Counting)
    warnings.filterwarnings("ignore", "'runtime.*' found in sys.modules", RuntimeWarning)
    gc.collect()
    gc.freeze()  # no collection touches, and so copies, what all share
    sys.argv = serve(socket.socket(fileno=int(sys.argv[-1])))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
