"""A helper process driven by JSON lines, one request at a time: a peer engine, or our own server."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any

from runtime.bench.metrics import BenchmarkError


class PeerDiedError(BenchmarkError):
    """A peer's process has ended, or one of its programs failed; the other sides can go on without it."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer} {reason}")
        self.peer = peer


def how_it_ended(what: str, status: int, output: bytes) -> str:
    """In words: by which signal or status, and the last line that it wrote."""
    lines = output.decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "it wrote nothing"
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    return f"ended {how} at {what!r}: {last}"


class ChildProcess:
    """Starts `command` and speaks its protocol; a context manager that ends the process.

    One JSON object a line goes to its stdin, one comes back on its stdout; its stderr is kept, for error messages. A
    child exits when its stdin ends, hence also when this process dies. `name` is used in error messages; `environment`
    replaces this process' own.
    """

    def __init__(self, command: Sequence[str], name: str, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            self._log.close()
            raise BenchmarkError(f"cannot run {command[0]} for {name}: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """The process' number."""
        return self._process.pid

    def ask(self, op: str, timeout_s: float = 600.0, **fields: Any) -> dict[str, Any]:
        """One request, one answer. Raises `BenchmarkError` with the child's words if it fails, `PeerDiedError` with its
        output if it dies."""
        stdin, stdout = self._pipes()
        try:
            stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._died(op) from None
        if not select.select([stdout], [], [], timeout_s)[0]:
            raise BenchmarkError(f"{self.name} did not answer {op!r} within {timeout_s:g} s")
        line = stdout.readline()
        if not line:
            raise self._died(op)
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise BenchmarkError(f"{self.name} failed at {op!r}: {reply['error']}")
        return reply

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        return stdin, stdout

    def _died(self, op: str) -> PeerDiedError:
        status = self._process.wait()
        self._log.seek(0)
        return PeerDiedError(self.name, how_it_ended(op, status, self._log.read()))

    def close(self) -> None:
        """Ends the process: closes its stdin, and kills it if it has not exited ten seconds later."""
        stdin, stdout = self._pipes()
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        stdout.close()
        self._log.close()

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
