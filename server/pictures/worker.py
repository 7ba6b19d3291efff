"""A process that decodes pictures, which are files of strangers read by code in C of other people.

It may use so much memory and no more, write no files, and is ended by whoever started it when a picture takes too long.
It is given the number of a socket, over which frames of `runtime.engine.process.wire` go: a `Job`, then its answer, a
`PreparedImage` or `Refused`. It ends with its socket."""

from __future__ import annotations

import resource
import signal
import socket
import sys
from contextlib import suppress

import msgspec

from runtime.engine.process.wire import FrameReader, frame
from runtime.engine.prompt_images import PreparedImage, prepare_image
from runtime.images.decoding import DecodingLimits, decode
from runtime.images.errors import ImageError
from runtime.images.patches import PatchRule

MAX_MEMORY_BYTES = 3 << 29
"""Of addresses: the libraries' 300 MiB, and a picture of the most pixels several times."""


class Job(msgspec.Struct, array_like=True):
    """One picture: a file's bytes, and how it is decoded and cut."""

    data: bytes
    limits: DecodingLimits
    rule: PatchRule


class Refused(msgspec.Struct, tag=True):
    """What is wrong with a picture."""

    message: str


def prepared(job: Job) -> PreparedImage | Refused:
    """The picture as the model reads it."""
    try:
        return prepare_image(decode(job.data, job.limits), job.rule)
    except ImageError as error:
        return Refused(str(error))
    except MemoryError:
        return Refused("the image needs more memory than a picture may use")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the terminal's, for the server
    connection = socket.socket(fileno=int(sys.argv[1]))
    with suppress(ImportError):  # before memory is limited; where it is missing, each picture's error says so
        import PIL.Image

        PIL.Image.MAX_IMAGE_PIXELS = None  # a job has its own limit
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    reader, decoder = FrameReader(connection), msgspec.msgpack.Decoder(Job)
    with suppress(ConnectionError):
        while frames := reader.read():
            for each in frames:
                connection.sendall(frame(prepared(decoder.decode(each))))


if __name__ == "__main__":
    main()
