"""A process that decodes pictures, which are untrusted files read by third-party C code.

Its memory is limited, it cannot write files, and its parent kills it if a picture takes too long
(`server.worker_process`). A job is a `Job`; its answer is `Prepared`, with patches in shared memory, or `Refused`."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from runtime.engine.prompt_images import digest_of
from runtime.images.decoding import DecodingLimits, decoded_image
from runtime.images.errors import ImageError
from runtime.images.patches import Rule, make_patches
from server.worker_process import answer_jobs

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
        from runtime.images.cutting import prepare as prepare_cutting

        prepare_cutting()
    answer_jobs(prepare, max_memory_bytes=MAX_MEMORY_BYTES)


if __name__ == "__main__":
    main()
