"""`PictureDecoder`: a few processes that decode, each started when it is first needed and replaced when it ends."""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import sys

import msgspec

from runtime.engine.process.wire import FrameReader, WireError, frame
from runtime.engine.prompt_images import PreparedImage
from runtime.images.decoding import DecodingLimits
from runtime.images.errors import ImageError
from runtime.images.patches import PatchRule
from runtime.own_packages import python_module
from server.pictures.worker import Job, Refused

logger = logging.getLogger("xserv.server")

COMMAND = ("-P", *python_module("server.pictures.worker"))

START_TIMEOUT_S = 30.0
"""Beside a picture's own time, for a process that has to import its libraries."""

_MAX_ANSWER_BYTES = 1 << 20
_ANSWER: msgspec.msgpack.Decoder[PreparedImage | Refused] = msgspec.msgpack.Decoder(PreparedImage | Refused)
_CLOSED = "the server is shutting down"


class _Process:
    """A process and the socket to it. `is_new`: it has answered nothing yet."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, *COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        self.is_new = True

    def ask(self, job: Job, timeout_s: float) -> PreparedImage:
        """Raises ImageError, TimeoutError, and EOFError, OSError, WireError or DecodeError where the
        process has ended or does not do as it should."""
        self.connection.settimeout(timeout_s + (START_TIMEOUT_S if self.is_new else 0.0))
        self.connection.sendall(frame(job))
        most_bytes = 4 * max(job.rule.max_pixels, job.rule.min_pixels) + _MAX_ANSWER_BYTES
        frames = FrameReader(self.connection, most_bytes).read()
        if not frames:
            raise EOFError
        self.is_new = False
        answer = _ANSWER.decode(frames[0])
        if isinstance(answer, Refused):
            raise ImageError(answer.message)
        return answer

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.connection.close()


class PictureDecoder:
    """Its methods may be called by any thread; a call waits until one of the processes is free.

    num_processes  at most so many
    timeout_s      that one picture may take; beyond it its process is ended
    """

    def __init__(self, num_processes: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._free: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        self._num_processes = num_processes
        for _ in range(num_processes):
            self._free.put(None)
        self._running: list[_Process] = []  # of those, the ones that decode
        self._is_closed = False

    def decode(self, data: bytes, limits: DecodingLimits, rule: PatchRule) -> PreparedImage:
        """A file's bytes as the model reads them. Raises ImageError."""
        process = self._free.get()
        try:
            for is_last in (False, True):
                if self._is_closed:
                    raise ImageError(_CLOSED)
                if process is None:
                    process = _Process()
                was_new = process.is_new
                self._running.append(process)
                try:
                    return process.ask(Job(data, limits, rule), self._timeout_s)
                except TimeoutError:
                    self._end(process)
                    process = None
                    logger.warning("a picture of %d bytes took more than %g s", len(data), self._timeout_s)
                    raise ImageError(f"the image takes longer than {self._timeout_s:g} s to decode") from None
                except (EOFError, OSError, WireError, msgspec.DecodeError):
                    self._end(process)
                    process = None
                    if self._is_closed:
                        continue
                    if was_new or is_last:  # else it may have ended since its last picture
                        logger.warning("a picture of %d bytes ended the process that decodes", len(data))
                        raise ImageError("the image ended the process that decodes it") from None
            raise ImageError(_CLOSED)
        finally:
            if process in self._running:
                self._running.remove(process)
            self._free.put(process)

    def _end(self, process: _Process) -> None:
        self._running.remove(process)
        process.end()

    def close(self) -> None:
        """Ends the processes; pictures that wait, and those that are decoded, are refused."""
        self._is_closed = True
        for running in list(self._running):
            running.popen.kill()
        for process in [self._free.get() for _ in range(self._num_processes)]:
            if process is not None:
                process.end()
        for _ in range(self._num_processes):
            self._free.put(None)
