"""Memory files through which a sender passes pages to the receiver of a connection. They are used again, since mapping
new memory takes longer than copying pages.

    sender     place(planes) ──▶ number (and the file, when it is new)
    receiver   take(number, file, size) ──▶ an array; when it is freed, `released` has its number
    sender     reuse(numbers)

The receiver's next request (`Wanted`) tells the sender what it has released.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.engine.transfer.identity import TransferError
from runtime.rank_notices import shared_memory

LEAST_BYTES = 1 << 16
"""The smallest segment that is used again."""
MOST_KEPT_BYTES = 32 << 20
"""A connection's segments together; pages that find no room get a file that is used once."""
ALONE = 0xFFFFFFFF
"""The number of every file that is used once."""
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


class SentSegments:
    """The sender's side. Belongs to the thread that sends."""

    def __init__(self) -> None:
        self._segments: list[NDArray[np.uint8]] = []
        self._free: set[int] = set()
        self._num_bytes = 0

    def place(self, planes: Sequence[NDArray[np.uint8]]) -> tuple[int, int | None]:
        """Copy planes into a segment. Returns its number, and the descriptor of a new one, which the caller sends and
        closes; None if the receiver has it already. Raises OSError."""
        size = sum(plane.nbytes for plane in planes)
        number = min(
            (each for each in self._free if len(self._segments[each]) >= size),
            key=lambda each: len(self._segments[each]),
            default=ALONE,
        )
        descriptor: int | None = None
        if number == ALONE:
            most = max(LEAST_BYTES, 1 << (size - 1).bit_length())
            is_kept = self._num_bytes + most <= MOST_KEPT_BYTES
            length = most if is_kept else size
            descriptor = shared_memory(length)
            try:
                segment = np.frombuffer(mmap.mmap(descriptor, length, mmap.MAP_SHARED | _POPULATE), np.uint8)
            except BaseException:
                os.close(descriptor)
                raise
            if is_kept:
                number, self._num_bytes = len(self._segments), self._num_bytes + most
                self._segments.append(segment)
        else:
            segment = self._segments[number]
            self._free.discard(number)
        at = 0
        for plane in planes:
            segment[at : at + plane.nbytes] = plane.reshape(-1)
            at += plane.nbytes
        return number, descriptor

    def reuse(self, numbers: Sequence[int]) -> None:
        """The receiver has released these segments. Raises `TransferError` for one that it does not hold."""
        if not all(0 <= each < len(self._segments) and each not in self._free for each in numbers):
            raise TransferError("the peer has released memory that it does not hold")
        self._free.update(numbers)


class TakenSegments:
    """The receiver's side. Belongs to the thread that receives; arrays may be freed on any thread."""

    def __init__(self) -> None:
        self._files: dict[int, mmap.mmap] = {}
        self._released: deque[int] = deque()

    def take(self, number: int, descriptor: int | None, num_bytes: int) -> NDArray[np.uint8]:
        """The first bytes of a segment. A new one comes with its descriptor. Raises OSError, `TransferError`."""
        file = self._files.get(number)
        if (file is None) != (descriptor is not None):
            raise TransferError(f"the peer's memory {number} did not come, or came twice")
        if file is None:
            assert descriptor is not None
            length = os.fstat(descriptor).st_size
            if length < num_bytes:
                raise TransferError("the peer's memory is smaller than its header says")
            # Pages are entered here, on the transport's thread, while the prompt is computed elsewhere.
            file = mmap.mmap(descriptor, length, mmap.MAP_SHARED | _POPULATE, mmap.PROT_READ)
            if number != ALONE:
                self._files[number] = file
        elif len(file) < num_bytes:
            raise TransferError("the peer's memory is smaller than its header says")
        found = np.frombuffer(file, np.uint8, num_bytes)
        if number != ALONE:
            weakref.finalize(found, self._released.append, number)
        return found

    def released(self) -> list[int]:
        """The numbers of segments whose arrays are freed, each once."""
        return [self._released.popleft() for _ in range(len(self._released))]
