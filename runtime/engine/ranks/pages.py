"""``RankPages``: the bytes of blocks that are split over ranks, read and written from rank 0.

    copy_out   CopyPages ──▶ each rank ──PagesCopied──▶ rank 0
    fill       rank 0 ──FillPages──▶ each rank, which writes its part after the steps that it was told before

A page's planes are those of rank 0, then of rank 1, and so on, so that transports know nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from runtime.engine.ranks.executor import ParallelExecutor
from runtime.engine.ranks.messages import CopyPages, FillPages
from runtime.kv.page_bytes import PageBytes
from runtime.kv.page_store import Fill

MOST_BYTES = 64 << 20
"""The most bytes of a message, unless it has one block alone."""


class RankPages:
    """See `PageBytes`. Writes follow the work of running steps on each rank."""

    is_ordered = True

    def __init__(self, executor: ParallelExecutor) -> None:
        self._executor, self._own = executor, PageBytes(executor.local.kv_cache)
        others = executor.ranks.page_bytes
        self._of_ranks = [self._own.page_bytes, *others]
        self.page_bytes = [[size for sizes in of_pool for size in sizes] for of_pool in zip(*self._of_ranks)]

    def copy_out(
        self, pool: int, block_ids: Sequence[int], first: int = 0, end: int | None = None
    ) -> list[NDArray[np.uint8]]:
        """By plane of all ranks: ``[num_blocks, page_bytes]``."""
        assert (first, end) == (0, None), "planes of ranks go together"
        found = [np.empty((len(block_ids), size), np.uint8) for size in self.page_bytes[pool]]
        most = self._most_blocks(pool)
        for begin in range(0, len(block_ids), most):
            ids = list(block_ids[begin : begin + most])
            own, others = self._executor.copy_pages(CopyPages(pool, ids), partial(self._own.copy_out, pool, ids))
            parts = [own, *(_planes(data, sizes[pool], len(ids)) for data, sizes in zip(others, self._of_ranks[1:]))]
            for target, plane in zip(found, chain.from_iterable(parts), strict=True):
                target[begin : begin + len(ids)] = plane
        return found

    def fill(self, pool: int, block_id: int, num_blocks: int, read: Fill) -> None:
        """Writes blocks from ``block_id`` on, plane by plane."""
        planes = [np.empty((num_blocks, size), np.uint8) for size in self.page_bytes[pool]]
        for plane, pages in enumerate(planes):
            read(plane, pages)
        num_own, most = len(self._own.page_bytes[pool]), self._most_blocks(pool)
        for begin in range(0, num_blocks, most):
            part, at = [plane[begin : begin + most] for plane in planes], num_own
            count, frames = min(most, num_blocks - begin), list[FillPages]()
            for sizes in self._of_ranks[1:]:
                end = at + len(sizes[pool])
                data = b"".join(plane.tobytes() for plane in part[at:end])
                frames.append(FillPages(pool, block_id + begin, count, data))
                at = end
            self._executor.fill_pages(frames, partial(_write, self._own, pool, block_id + begin, part[:num_own]))

    def _most_blocks(self, pool: int) -> int:
        """The most blocks of a message to or from any rank."""
        return max(1, MOST_BYTES // max(1, max(sum(sizes[pool]) for sizes in self._of_ranks)))


def write_told(pages: PageBytes, message: FillPages) -> None:
    """Write what rank 0 has sent to a rank with these pages."""
    planes = _planes(message.data, pages.page_bytes[message.pool], message.num_blocks)
    _write(pages, message.pool, message.block_id, planes)


def _write(pages: PageBytes, pool: int, block_id: int, planes: Sequence[NDArray[np.uint8]]) -> None:
    """Write planes ``[num_blocks, page_bytes]`` of a rank into its blocks from ``block_id`` on."""
    if not planes:  # a stage may have no layer of a pool
        return
    pages.fill(pool, block_id, len(planes[0]), lambda plane, target: np.copyto(target, planes[plane]))


def _planes(data: bytes, sizes: Sequence[int], count: int) -> list[NDArray[np.uint8]]:
    """The planes ``[count, size]`` that lie one after another."""
    ends = np.cumsum([size * count for size in sizes]).tolist()
    flat = np.frombuffer(data, np.uint8)
    return [flat[end - size * count : end].reshape(count, size) for end, size in zip(ends, sizes, strict=True)]
