"""`PictureDecoder`: a few processes that decode, each started when it is first needed and replaced when it ends."""

from __future__ import annotations

import logging
import mmap
import queue

import msgspec

from runtime.engine.process.wire import WireError
from runtime.engine.prompt_images import PreparedImage
from runtime.images.decoding import DecodingLimits
from runtime.images.errors import ImageError
from runtime.images.patches import Rule
from server.pictures.worker import Job, Prepared, Refused
from server.worker_process import WorkerProcess

logger = logging.getLogger("xserv.server")

KEPT_BYTES = 16 << 20
"""Shared memory that a process keeps; a larger picture's surplus is returned."""

_ANSWER: msgspec.msgpack.Decoder[Prepared | Refused] = msgspec.msgpack.Decoder(Prepared | Refused)
_CLOSED = "the server is shutting down"


class PictureDecoder:
    """Its methods may be called by any thread; a call waits until one of the processes is free.

    num_processes  at most so many
    timeout_s      limit of one picture; its process is killed after it
    max_pixels     of a resized picture, in any rule
    """

    def __init__(self, num_processes: int, timeout_s: float, max_pixels: int) -> None:
        self._timeout_s, self._shared_bytes = timeout_s, 4 * max_pixels + (1 << 20)
        self._free: queue.LifoQueue[WorkerProcess | None] = queue.LifoQueue()
        self._num_processes = num_processes
        for _ in range(num_processes):
            self._free.put(None)
        self._running: list[WorkerProcess] = []  # the decoding ones of those
        self._is_closed = False

    def decode(self, data: bytes, limits: DecodingLimits, rule: Rule) -> PreparedImage:
        """Decodes a file into the model's input. Raises ImageError."""
        process = self._free.get()
        try:
            for is_last in (False, True):
                if self._is_closed:
                    raise ImageError(_CLOSED)
                if process is None:
                    process = WorkerProcess("server.pictures.worker", shared_bytes=self._shared_bytes)
                was_new = process.is_new
                self._running.append(process)
                try:
                    return _ask(process, Job(data, limits, rule), self._timeout_s)
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

    def _end(self, process: WorkerProcess) -> None:
        self._running.remove(process)
        process.end()

    def close(self) -> None:
        """Ends the processes; waiting and running pictures are refused."""
        self._is_closed = True
        for running in list(self._running):
            running.popen.kill()
        for process in [self._free.get() for _ in range(self._num_processes)]:
            if process is not None:
                process.end()
        for _ in range(self._num_processes):
            self._free.put(None)


def _ask(process: WorkerProcess, job: Job, timeout_s: float) -> PreparedImage:
    """Sends a job. Raises ImageError, and the errors of `WorkerProcess.ask` and msgspec."""
    answer = _ANSWER.decode(process.ask(job, timeout_s))
    if isinstance(answer, Refused):
        raise ImageError(answer.message)
    assert process.memory is not None
    if answer.num_bytes != 3 * job.rule.patch_size**2 * answer.rows * answer.columns:
        raise WireError(f"{answer.num_bytes} bytes of patches are none of {answer.rows} x {answer.columns}")
    patches = process.memory[: answer.num_bytes]
    if answer.num_bytes > KEPT_BYTES:
        process.memory.madvise(mmap.MADV_REMOVE)
    return PreparedImage(answer.digest, answer.rows, answer.columns, patches)
