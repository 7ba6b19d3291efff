"""From a file into a GPU's memory: threads read pieces of it into pinned memory, each copied while the next is read.

A thread over a mapped file waits for each page of it; `preadv` waits once a piece, without the interpreter's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from runtime.device.file_mapping import FileMapping
from runtime.device.pinned import PinnedBlock, PinnedPool
from runtime.device.stream import Event, Stream

PIECE_BYTES = 4 << 20
NUM_READERS = 4
LEAST_BYTES = 2 * PIECE_BYTES
"""Less is not worth the threads."""


def upload_file(
    mapping: FileMapping,
    offset: int,
    size_bytes: int,
    copy: Callable[[int, PinnedBlock], None],
    pinned: PinnedPool,
    stream: Stream,
    num_readers: int = NUM_READERS,
) -> None:
    """Copies a part of a file to the device. All of it has been read when this returns.

    `copy` puts a piece that begins so many bytes after `offset` on its way, on the stream, from any thread. Each reader
    takes two pieces of pinned memory. Raises OSError where the file cannot be read.
    """
    pieces, lock = iter(range(0, size_bytes, PIECE_BYTES)), threading.Lock()

    def take() -> int | None:
        with lock:
            return next(pieces, None)

    def read() -> None:
        on_its_way: tuple[PinnedBlock, Event] | None = None
        try:
            while (start := take()) is not None:
                staging = pinned.allocate(min(PIECE_BYTES, size_bytes - start))
                mapping.read_into(staging.array, offset + start)
                copy(start, staging)
                before, on_its_way = on_its_way, (staging, stream.record())
                if before is not None:
                    before[1].synchronize()
                    before[0].release()
        finally:
            if on_its_way is not None:
                on_its_way[0].release_after(stream)

    with ThreadPoolExecutor(num_readers, "xserv-upload") as readers:
        for reader in [readers.submit(read) for _ in range(num_readers)]:
            reader.result()
