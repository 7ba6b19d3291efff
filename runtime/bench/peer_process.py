"""A peer engine in its own Python process, asked by JSON lines, one request at a time."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from runtime.bench.metrics import BenchmarkError

SCRIPT = Path(__file__).with_name("peer_transformers.py")


class PeerProcess:
    """Starts `python script` and speaks its protocol; a context manager that ends the process.

    The peer also ends by itself when this process dies, because its stdin then ends.
    """

    def __init__(self, python: Path, script: Path = SCRIPT, arguments: Sequence[str] = ()) -> None:
        self.python = python
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        try:
            self._process = subprocess.Popen(
                [str(python), str(script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
        except OSError as error:
            self._log.close()
            raise BenchmarkError(f"cannot run the peer's Python {python}: {error.strerror}") from error

    def ask(self, op: str, timeout_s: float = 600.0, **fields: Any) -> dict[str, Any]:
        """One request, one answer. Raises `BenchmarkError` with the peer's words when it fails or dies."""
        stdin, stdout = self._pipes()
        try:
            stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._died(op) from None
        if not select.select([stdout], [], [], timeout_s)[0]:
            raise BenchmarkError(f"the peer did not answer {op!r} within {timeout_s:g} s")
        line = stdout.readline()
        if not line:
            raise self._died(op)
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise BenchmarkError(f"the peer failed at {op!r}: {reply['error']}")
        return reply

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        return stdin, stdout

    def _died(self, op: str) -> BenchmarkError:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "it wrote nothing"
        status = self._process.returncode
        return BenchmarkError(f"the peer ended with status {status} at {op!r}: {last}")

    def close(self) -> None:
        """Ends the process, killing it if it does not leave on its own."""
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

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
