"""Pinned host memory, cut from large pieces and kept, for asynchronous copies; and uploads from pageable memory or a
file through it: threads read pieces, each copied while the next is read.

One thread copies some 9 GB a second within the host, a sixth of what the bus takes. A thread over a mapped file waits
for each page of it; `preadv` waits once a piece, without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from runtime.device.arena import Arena, Block, round_to_class
from runtime.device.context import Context, Event, Stream

SEGMENT_BYTES = 4 << 20


class PinnedBlock:
    """Pinned memory, returned to its pool with the object, or by `release_after` when a stream has come past a copy.

    Attributes:
        address: of its first byte, aligned to 256.
        size_bytes: how many there are.
        array: the bytes, as uint8; valid while the block lives.
    """

    __slots__ = ("_block", "_pool", "address", "array", "size_bytes")

    def __init__(self, pool: PinnedPool, block: Block, size_bytes: int) -> None:
        self._pool: PinnedPool | None = pool
        self._block = block
        self.address = block.address
        self.size_bytes = size_bytes
        self.array = pool.bytes_of(block, size_bytes)

    def release_after(self, stream: Stream) -> None:
        """Returns the memory as soon as the work now in the stream has run."""
        pool = self._pool
        if pool is not None:
            self._pool = None
            pool.returned.append((self._block, pool.record(stream)))

    def release(self) -> None:
        """Returns the memory now: no copy uses it any more."""
        pool = self._pool
        if pool is not None:
            self._pool = None
            pool.returned.append((self._block, None))

    __del__ = release


class PinnedPool:
    """The pinned memory of one device. All methods may be called from any thread."""

    def __init__(self, context: Context) -> None:
        self.returned: deque[tuple[Block, Event | None]] = deque()
        self.reserved_bytes = 0
        self._context = context
        self._arena = Arena()
        self._segments: dict[int, NDArray[np.uint8]] = {}  # by address; none is ever given back
        self._waiting: deque[tuple[Block, Event]] = deque()
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def allocate(self, size_bytes: int) -> PinnedBlock:
        """Uninitialised memory. Raises DeviceOutOfMemoryError where the system has no more to pin."""
        size = round_to_class(size_bytes)
        with self._lock:
            self._collect()
            block = self._arena.take(size)
            if block is None:
                self._reserve(max(SEGMENT_BYTES, size))
                block = self._arena.take(size)
                assert block is not None
        return PinnedBlock(self, block, size_bytes)

    def bytes_of(self, block: Block, size_bytes: int) -> NDArray[np.uint8]:
        """The first bytes of a block, in the host's memory."""
        first = block.address - block.segment
        return self._segments[block.segment][first : first + size_bytes]

    def record(self, stream: Stream) -> Event:
        """An event at the end of the stream, one used before where there is one."""
        try:
            event = self._events.pop()
        except IndexError:
            event = Event(self._context)
        return event.record(stream)

    def check_integrity(self) -> None:
        """Raises AssertionError for inconsistent bookkeeping."""
        with self._lock:
            taken, free = self._arena.check_integrity()
            assert taken + free == self.reserved_bytes

    def _collect(self) -> None:
        while self.returned:
            block, event = self.returned.popleft()
            if event is None:
                self._arena.give(block)
            else:
                self._waiting.append((block, event))
        while self._waiting and self._waiting[0][1].is_done():
            block, event = self._waiting.popleft()
            self._events.append(event)
            self._arena.give(block)

    def _reserve(self, size: int) -> None:
        address = int(self._context.call("cuMemHostAlloc", size, 0))
        self._segments[address] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        self._arena.add_segment(address, size)
        self.reserved_bytes += size


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


class FileMapping(mmap.mmap):
    """A whole file, mapped for reading, until the last array over it is freed.

    Attributes:
        descriptor: an open one of the file, its own.
        name: for errors.
    """

    descriptor: int
    name: str

    def __new__(cls, descriptor: int, name: str) -> Self:
        """Raises OSError where it cannot be mapped, ValueError for an empty file."""
        mapping = super().__new__(cls, descriptor, 0, access=mmap.ACCESS_READ)
        mapping.descriptor, mapping.name = os.dup(descriptor), name
        weakref.finalize(mapping, os.close, mapping.descriptor)
        return mapping

    def read_into(self, target: NDArray[np.uint8], offset: int) -> None:
        """Fills an array with the bytes from `offset` on. Raises OSError where the file has become shorter."""
        view = target.data
        while view.nbytes:
            count = os.preadv(self.descriptor, [view], offset)
            if not count:
                raise OSError(errno.EIO, f"the file ends at byte {offset}, shorter than it was", self.name)
            view, offset = view[count:], offset + count


def mapped_part(array: np.ndarray[Any, Any]) -> tuple[FileMapping, int] | None:
    """The mapping that a C-contiguous array lies in and the byte of the file at which it begins; None for any other."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    mapping = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapping, FileMapping) or not array.flags.c_contiguous or not array.size:
        return None
    return mapping, array.ctypes.data - np.frombuffer(mapping, np.uint8, 1).ctypes.data
