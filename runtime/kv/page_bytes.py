"""Reads and writes the bytes of whole blocks of a KV cache from the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.device.gpu import Gpu
from runtime.kv.cache import KVCache
from runtime.kv.page_store import Fill
from runtime.tensor.tensor import Tensor

_SYSTEM_PAGE = 4096
_POPULATE_WRITE = 23
"""madvise's advice, of Linux 5.14: allocate the memory as if it were written, and leave what is there."""


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
        when pages are first read back. On a GPU it is allocated. Thread-safe; where the system cannot, nothing
        happens."""
        if self._gpu is not None:
            return
        madvise = ctypes.CDLL(None).madvise
        for pool, count in enumerate(counts):
            for tensor, size in self._planes(pool):
                first = -(-tensor.array.ctypes.data // _SYSTEM_PAGE) * _SYSTEM_PAGE
                end = tensor.array.ctypes.data + min(count, tensor.shape[0]) * size
                if end > first:
                    madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _POPULATE_WRITE)

    def copy_out(self, pool: int, block_ids: Sequence[int]) -> list[NDArray[np.uint8]]:
        """By plane: ``[num_blocks, page_bytes]``."""
        first = self._firsts[pool]
        found: list[NDArray[np.uint8]] = []
        for tensor, size in self._planes(pool):
            if self._gpu is None:
                pages = tensor.array.reshape(tensor.shape[0], -1).view(np.uint8)
                found.append(pages[np.array(block_ids, np.intp) - first])
            else:
                copied = np.empty((len(block_ids), size), np.uint8)
                for row, block_id in enumerate(block_ids):
                    self._gpu.read(tensor.address + (block_id - first) * size, copied[row])
                found.append(copied)
        return found

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
