"""A process that decodes pictures, which are files of strangers read by code in C of other people.

It may use so much memory and no more, write no files, and is ended by whoever started it when a picture takes too long.
It is given the number of a socket. A frame is its length in eight bytes, little-endian, and its bytes; a job is a frame
of msgpack and one of the file's bytes, an answer a frame of msgpack and one of patches. It ends with its socket."""

from __future__ import annotations

import resource
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from runtime.engine.prompt_images import PreparedImage, prepare_image
from runtime.images.decoding import DecodingLimits, decode
from runtime.images.errors import ImageError
from runtime.images.patches import PatchRule

MAX_MEMORY_BYTES = 3 << 29
"""Of addresses: the libraries' 300 MiB, and a picture of the most pixels several times."""

_LENGTH_BYTES = 8


class Job(msgspec.Struct, array_like=True):
    """How one picture is decoded and cut."""

    limits: DecodingLimits
    rule: PatchRule


class Answer(msgspec.Struct, array_like=True):
    """What came of it: an error, or a picture whose patches are in the frame behind."""

    error: str | None = None
    digest: bytes = b""
    rows: int = 0
    columns: int = 0


def send_frames(connection: socket.socket, frames: Iterable[bytes]) -> None:
    for frame in frames:
        connection.sendall(len(frame).to_bytes(_LENGTH_BYTES, "little"))
        connection.sendall(frame)


def receive_frame(connection: socket.socket, most: int) -> bytes:
    """Raises EOFError where the other side has ended, ValueError for a frame longer than `most`."""
    length = int.from_bytes(_receive(connection, _LENGTH_BYTES), "little")
    if length > most:
        raise ValueError(f"a frame of {length} bytes, limit {most}")
    return _receive(connection, length)


def _receive(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return bytes(data)


def prepare(job: Job, data: bytes) -> PreparedImage:
    """The picture as the model reads it. Raises ImageError."""
    try:
        return prepare_image(decode(data, job.limits), job.rule)
    except MemoryError as error:
        raise ImageError("the image needs more memory than a picture may use") from error


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the terminal's, for the server
    connection = socket.socket(fileno=int(sys.argv[1]))
    with suppress(ImportError):  # before memory is limited; where it is missing, each picture's error says so
        import PIL.Image

        PIL.Image.MAX_IMAGE_PIXELS = None  # a job has its own limit
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    encode, most = msgspec.msgpack.encode, 2**62
    while True:
        try:
            job = msgspec.msgpack.decode(receive_frame(connection, most), type=Job)
            data = receive_frame(connection, most)
        except (EOFError, ConnectionError):
            return
        try:
            image = prepare(job, data)
        except ImageError as error:
            send_frames(connection, (encode(Answer(error=str(error))), b""))
            continue
        answer = Answer(digest=image.digest, rows=image.rows, columns=image.columns)
        send_frames(connection, (encode(answer), image.patches))


if __name__ == "__main__":
    main()
