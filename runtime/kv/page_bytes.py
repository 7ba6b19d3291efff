"""Reads and writes the bytes of whole blocks of a KV cache from the host."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.device.context import Event, Stream
from runtime.device.gpu import Gpu
from runtime.device.pinned import PinnedBlock
from runtime.kv.cache import KVCache
from runtime.kv.page_store import Fill
from runtime.tensor.tensor import Tensor

_SYSTEM_PAGE = 4096
_POPULATE_WRITE = 23
"""madvise's advice, of Linux 5.14: allocate the memory as if it were written, and leave what is there."""

_MOST_KEPT_BYTES = 8 << 20
_MOST_QUEUED = 4
"""Planes that a GPU copies into pinned memory at once."""


@dataclass(frozen=True, slots=True)
class QueuedCopy:
    """Planes of these shapes that a GPU copies into pinned memory."""

    pinned: PinnedBlock
    event: Event
    shapes: list[tuple[int, int]]

    def take(self) -> list[NDArray[np.uint8]]:
        """Waits for the copy, and frees the pinned memory. Raises LaunchError if earlier work has failed."""
        self.event.synchronize()
        sizes = [rows * width for rows, width in self.shapes]
        ends = np.cumsum(sizes).tolist()
        found = [
            self.pinned.array[end - size : end].reshape(shape).copy()
            for end, size, shape in zip(ends, sizes, self.shapes)
        ]
        self.pinned.release()
        return found


class PageBytes:
    """Blocks are numbered through all pools, as everywhere. On a GPU both directions follow the device's earlier work,
    and wait for it.

    Attributes:
        page_bytes: by pool: bytes of each plane's page.
        is_ordered: writes follow the work of running steps; otherwise there must be none.
    """

    def __init__(self, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache
        self._gpu = None if kv_cache.device.kind == "cpu" else Gpu.of(kv_cache.device)
        self._firsts = [sum(kv_cache.pool_sizes[:pool]) for pool in range(len(kv_cache.pool_sizes))]
        spec = kv_cache.spec
        self.page_bytes = [
            [
                each.size_bytes
                for planes, own in zip(spec.planes, spec.pool_of_storage)
                if own == pool
                for each in planes
            ]
            for pool in range(len(kv_cache.pool_sizes))
        ]
        self.is_ordered = self._gpu is not None
        self._memory = bytearray()
        self._lent: weakref.ref[NDArray[np.uint8]] | None = None  # it is free again once this is dead

    def _planes(self, pool: int) -> list[tuple[Tensor, int]]:
        """The pages of each plane, and the bytes of one."""
        tensors = [
            each
            for planes, own in zip(self._kv_cache.storages, self._kv_cache.spec.pool_of_storage)
            if own == pool
            for each in planes
        ]
        return list(zip(tensors, self.page_bytes[pool]))

    def allocate(self, counts: Sequence[int]) -> None:
        """Let the system allocate the memory of the first blocks of each pool, so many of each, which would else happen
        when pages are first read back."""
        for pool, count in enumerate(counts):
            for plane in range(len(self.page_bytes[pool])):
                self.enter(pool, plane, 0, count)

    def enter(self, pool: int, plane: int, first: int, end: int) -> None:
        """Let the system allocate the memory of a plane's blocks, numbered within the pool. On a GPU it is allocated.
        Thread-safe; where the system cannot, nothing happens."""
        if self._gpu is not None:
            return
        tensor, size = self._planes(pool)[plane]
        begin = tensor.array.ctypes.data + first * size
        begin = -(-begin // _SYSTEM_PAGE) * _SYSTEM_PAGE
        stop = tensor.array.ctypes.data + min(end, tensor.shape[0]) * size
        if stop > begin:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(stop - begin), _POPULATE_WRITE)

    def copy_out(
        self, pool: int, block_ids: Sequence[int], first: int = 0, end: int | None = None
    ) -> list[NDArray[np.uint8]]:
        """By plane, of those from ``first`` to ``end``: ``[num_blocks, page_bytes]``."""
        planes = self._planes(pool)[first:end]
        if self._gpu is None:
            rows = np.array(block_ids, np.intp) - self._firsts[pool]
            sizes = [size * len(rows) for _, size in planes]
            room, copies = self._room(sum(sizes)), list[NDArray[np.uint8]]()
            for (tensor, size), stop in zip(planes, np.cumsum(sizes).tolist()):
                copied = room[stop - size * len(rows) : stop].reshape(len(rows), size)
                np.take(tensor.array.reshape(tensor.shape[0], -1).view(np.uint8), rows, 0, copied, "clip")
                copies.append(copied)
            return copies
        found: list[NDArray[np.uint8]] = []
        under_way: deque[QueuedCopy] = deque()
        for plane in range(first, first + len(planes)):
            under_way.append(self.queue_copy(pool, block_ids, plane, plane + 1, self._gpu.stream))
            if len(under_way) > _MOST_QUEUED:
                found += under_way.popleft().take()
        for each in under_way:
            found += each.take()
        return found

    def _room(self, num_bytes: int) -> NDArray[np.uint8]:
        """Memory for a copy: that of an earlier one, if its arrays are freed. New memory takes longer to be entered
        than pages to be copied."""
        if num_bytes > _MOST_KEPT_BYTES:
            return np.empty(num_bytes, np.uint8)
        if self._lent is None or self._lent() is not None or len(self._memory) < num_bytes:
            self._memory = bytearray(1 << (num_bytes - 1).bit_length())
        room = np.frombuffer(self._memory, np.uint8, num_bytes)
        self._lent = weakref.ref(room)
        return room

    def queue_copy(self, pool: int, block_ids: Sequence[int], first: int, end: int, stream: Stream) -> QueuedCopy:
        """The same on a GPU, after the stream's earlier work; returns at once."""
        assert self._gpu is not None, "a CPU copies at once"
        planes, firsts = self._planes(pool)[first:end], self._firsts[pool]
        pinned = self._gpu.pinned.allocate(sum(size for _, size in planes) * len(block_ids))
        targets: list[int] = []
        sources: list[int] = []
        sizes: list[int] = []
        at = pinned.address
        for tensor, size in planes:
            for block_id in block_ids:
                targets.append(at)
                sources.append(tensor.address + (block_id - firsts) * size)
                sizes.append(size)
                at += size
        self._gpu.copy_batch(targets, sources, sizes, stream=stream)
        return QueuedCopy(pinned, stream.record(), [(len(block_ids), size) for _, size in planes])

    def fill(self, pool: int, block_id: int, num_blocks: int, read: Fill) -> None:
        """Writes blocks from ``block_id`` on, plane by plane."""
        first = block_id - self._firsts[pool]
        for plane, (tensor, size) in enumerate(self._planes(pool)):
            if self._gpu is None:
                pages = tensor.array.reshape(tensor.shape[0], -1).view(np.uint8)
                read(plane, pages[first : first + num_blocks])
            else:
                copied = np.empty((num_blocks, size), np.uint8)
                read(plane, copied)
                self._gpu.write(tensor.address + first * size, copied)
