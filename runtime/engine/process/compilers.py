"""Compiler processes that run side by side, report progress line by line, and end."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO

from runtime.device.errors import CompileError
from runtime.engine.limits import available_memory_bytes

PROCESS_BYTES = 1 << 30
"""Free memory for each process: Numba and LLVM, or NVVM, take several hundred MB."""
MOST_PROCESSES = 16


def num_processes() -> int:
    """One for each processor, if memory allows."""
    cores, room = len(os.sched_getaffinity(0)), available_memory_bytes() // PROCESS_BYTES
    return max(1, min(cores, room, MOST_PROCESSES))


def lines_of(commands: Sequence[Sequence[str]], pass_fds: Sequence[int] = ()) -> Generator[bytes, None, None]:
    """Starts Python with each command's arguments and yields every line that a process writes, until all have ended.
    Closing the iterator ends them.

    Raises CompileError, with a process's stderr, if its exit status is not 0.
    """
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for words in commands:
            worker = stack.enter_context(_started([sys.executable, "-P", *words], pass_fds))
            selector.register(worker.lines, selectors.EVENT_READ, worker)
        while selector.get_map():
            for key, _ in selector.select():
                worker = key.data
                if line := worker.lines.readline():
                    yield line
                else:
                    selector.unregister(worker.lines)
                    worker.check_end()


@dataclass(frozen=True, slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    lines: IO[bytes]
    said: IO[bytes]  # the process's stderr

    def check_end(self) -> None:
        status = self.process.wait()
        if status:
            self.said.seek(0)
            words = self.said.read().decode(errors="replace").strip()[-2000:]
            raise CompileError(f"a process that compiles kernels ended with status {status}: {words}")


@contextmanager
def _started(command: list[str], pass_fds: Sequence[int]) -> Iterator[_Worker]:
    """A worker, which ends with the block."""
    with tempfile.TemporaryFile() as said:
        # Unbuffered, so that the selector sees all pending output.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, bufsize=0, pass_fds=pass_fds
        )
        assert process.stdout is not None
        try:
            yield _Worker(process, process.stdout, said)
        finally:
            process.kill()
            process.communicate()
