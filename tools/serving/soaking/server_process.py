"""`xserv serve` in a process of its own, and its and its engine's resources: for soaks and for tests of faults."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[3]
START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Holdings:
    """The resources of the two processes. Sizes in bytes; blocks are those in use by requests."""

    server_rss: int
    server_fds: int
    server_threads: int
    engine_rss: int
    engine_fds: int
    engine_threads: int
    num_processes: int
    used_blocks: int
    num_running: int
    num_waiting: int

    @property
    def is_idle(self) -> bool:
        """Whether no request is open and no block is leaked."""
        return self.used_blocks == self.num_running == self.num_waiting == 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class ServerProcess:
    """Starts `python -m MODULE serve --port 0 ARGUMENTS`; a context manager that ends it. `log` has its stderr;
    `baseline` is for callers that watch growth. Raises `RuntimeError` with the log's end if it does not start."""

    def __init__(self, *arguments: str, module: str = "runtime.cli") -> None:
        self.baseline: Holdings | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        command = [sys.executable, "-m", module, "serve", "--port", "0", *arguments]
        self.child = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self._log, text=True, encoding="utf-8"
        )
        self.process = psutil.Process(self.child.pid)
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if " at http" not in line:
            self.child.kill()
            raise RuntimeError(f"the server did not start: {line!r} {self.log[-2000:]}")
        self.url = line.split(" at ")[1].strip().removesuffix("/v1")
        self.port = int(self.url.rpartition(":")[2])

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    @property
    def engine(self) -> psutil.Process:
        """The engine's process. Raises `psutil.NoSuchProcess` while there is none."""
        for child in self.process.children():
            if child.status() != psutil.STATUS_ZOMBIE:
                return child
        raise psutil.NoSuchProcess(self.process.pid, msg="no engine")

    def metrics(self) -> dict[str, float]:
        """The values of /metrics by name, summed over labels."""
        values: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if not line.startswith("#"):
                name, value = line.split("{")[0].split(" ")[0], line.rpartition(" ")[2]
                values[name] = values.get(name, 0.0) + float(value)
        return values

    def holdings(self) -> Holdings:
        """The present resources of the server and its engine; the engine's own numbers are at most a second old."""
        metrics, engine = self.metrics(), self.engine
        return Holdings(
            server_rss=self.process.memory_info().rss,
            server_fds=self.process.num_fds(),
            server_threads=self.process.num_threads(),
            engine_rss=engine.memory_info().rss,
            engine_fds=engine.num_fds(),
            engine_threads=engine.num_threads(),
            num_processes=len(self.process.children(recursive=True)),
            used_blocks=int(metrics["xserv:num_blocks"] - metrics["xserv:num_free_blocks"]),
            num_running=int(metrics["xserv:num_requests_running"]),
            num_waiting=int(metrics["xserv:num_requests_waiting"]),
        )

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/ready", timeout=20).status_code == 200
        return False

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = 120.0) -> None:
        """Waits until the condition holds; raises `TimeoutError` with the condition and the log's end."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {timeout_s:g} s; {self.log[-1000:]}")
            time.sleep(0.05)

    def settle(self, most_server_fds: int | None = None, timeout_s: float = 120.0) -> Holdings:
        """Waits until every request is over, and no more files are open than before; returns the resources. Raises
        `TimeoutError`."""
        latest: list[Holdings] = []

        def is_settled() -> bool:
            latest[:] = [self.holdings()]
            return latest[0].is_idle and (most_server_fds is None or latest[0].server_fds <= most_server_fds)

        try:
            self.wait(is_settled, "everything given back", timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; held: {latest}") from None
        return latest[0]

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.terminate()
            try:
                self.child.wait(60)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        assert self.child.stdout is not None
        self.child.stdout.close()
        self._log.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def growth(before: Holdings, after: Holdings, names: Sequence[str]) -> dict[str, int]:
    """The resources that grew, by how much."""
    return {name: grown for name in names if (grown := getattr(after, name) - getattr(before, name)) > 0}
