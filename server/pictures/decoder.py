"""`PictureDecoder`: a few processes that decode pictures, which are untrusted files read by third-party C code. Each is
started when it is first needed and replaced when it ends.

A process's memory is limited, it cannot write files, and its parent kills it if a picture takes too long
(`server.worker_process`). A job is a `Job`; its answer is `Prepared`, with patches in shared memory, or `Refused`."""

from __future__ import annotations

import logging
import mmap
import queue
from contextlib import suppress

import msgspec

from runtime.engine.process.wire import WireError
from runtime.engine.prompt_images import PreparedImage, digest_of
from runtime.images.decoding import DecodingLimits, ImageError, decoded_image
from runtime.images.patches import Rule, make_patches
from runtime.later import later
from server.worker_process import WorkerProcess, answer_jobs

_cutting = later("runtime.images.cutting")  # brings Pillow

MAX_MEMORY_BYTES = 3 << 29
"""Address space: the libraries' 360 MiB, and the largest picture several times."""


class Job(msgspec.Struct, array_like=True):
    """One picture: a file's bytes, and how it is decoded and cut."""

    data: bytes
    limits: DecodingLimits
    rule: Rule


class Prepared(msgspec.Struct, tag=True):
    """See `PreparedImage`. `num_bytes`: of its patches, from the first of the shared memory on."""

    digest: bytes
    rows: int
    columns: int
    num_bytes: int


class Refused(msgspec.Struct, tag=True):
    """The error of a picture."""

    message: str


_JOB = msgspec.msgpack.Decoder(Job)


def prepare(data: memoryview, memory: memoryview) -> Prepared | Refused:
    """Decodes a picture into the model's input."""
    job = _JOB.decode(data)
    try:
        patches = make_patches(decoded_image(job.data, job.limits), job.rule, memory)
        return Prepared(digest_of(patches), patches.rows, patches.columns, patches.pixels.nbytes)
    except ImageError as error:
        return Refused(str(error))
    except MemoryError:
        return Refused("the image needs more memory than a picture may use")


def main() -> None:
    with suppress(ImportError):  # before memory is limited; if it is missing, each picture's error reports it
        import PIL.Image

        PIL.Image.MAX_IMAGE_PIXELS = None  # a job has its own limit
        import PIL.AvifImagePlugin

        PIL.AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # there are several processes, and each thread reserves addresses
        _cutting.prepare()
    answer_jobs(prepare, max_memory_bytes=MAX_MEMORY_BYTES)


if __name__ == "__main__":
    main()


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
                    process = WorkerProcess("server.pictures.decoder", shared_bytes=self._shared_bytes)
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
