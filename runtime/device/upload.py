"""Uploads from pageable host memory, or a file, to a GPU: threads read pieces into pinned memory,
each copied while the next is read.

One thread copies some 9 GB a second within the host, a sixth of what the bus takes. A thread over a mapped file waits
for each page of it; `preadv` waits once a piece, without the interpreter's lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from runtime.device.pinned import PinnedBlock, PinnedPool
from runtime.device.stream import Event, Stream

PIECE_BYTES = 4 << 20
NUM_THREADS = min(8, len(os.sched_getaffinity(0)))
LEAST_BYTES = 2 * PIECE_BYTES
"""Smaller copies are not worth the threads."""

Fill = Callable[[NDArray[np.uint8], int], None]
"""Fills an array with the source's bytes from a place on."""


def upload_pieces(
    size_bytes: int,
    fill: Fill,
    copy: Callable[[int, PinnedBlock], None],
    pinned: PinnedPool,
    stream: Stream,
    num_threads: int = NUM_THREADS,
) -> None:
    """Copies so many bytes to the device. The source has been read when this returns.

    `fill` reads the source, and `copy` queues the copy of the piece at a place, on the stream; both from any
    thread. Each thread takes two pieces of pinned memory. Raises what `fill` raises, as OSError of a file.
    """
    pieces, lock = iter(range(0, size_bytes, PIECE_BYTES)), threading.Lock()

    def take() -> int | None:
        with lock:
            return next(pieces, None)

    def bring() -> None:
        on_its_way: tuple[PinnedBlock, Event] | None = None
        try:
            while (start := take()) is not None:
                staging = pinned.allocate(min(PIECE_BYTES, size_bytes - start))
                fill(staging.array, start)
                copy(start, staging)
                before, on_its_way = on_its_way, (staging, stream.record())
                if before is not None:
                    before[1].synchronize()
                    before[0].release()
        finally:
            if on_its_way is not None:
                on_its_way[0].release_after(stream)

    with ThreadPoolExecutor(num_threads, "xserv-upload") as threads:
        for each in [threads.submit(bring) for _ in range(num_threads)]:
            each.result()
