"""Memory of pages before their first use, on a CPU.

The system gives memory at its first write, cleared: in a virtual machine that took a tenth of a prompt's time until the
cache was full. So an idle engine lets it do so before, a piece at a time, for the empty pages that are taken next,
where they take no more than a quarter of the memory that is free: idle models of a small machine leave it to others.
"""

from __future__ import annotations

import time

from runtime.engine.limits import available_memory_bytes
from runtime.engine.scheduling.block_pool import BlockPool
from runtime.kv.page_bytes import PageBytes

AHEAD_BYTES = 256 << 20
"""So many of each pool, so that memory in use grows with use, not to the whole cache at once."""
PIECE_BYTES, MOST_S = 2 << 20, 0.01
"""At most about so much of a plane at a time, and for so long: a request that comes has to wait for it."""


class FreshPages:
    """The order in which an engine's pages get memory."""

    def __init__(self, pages: PageBytes, pool: BlockPool) -> None:
        self._pages, self._pool = pages, pool
        self._ahead = [max(1, AHEAD_BYTES // sum(sizes)) for sizes in pages.page_bytes]
        self.begin()

    def begin(self) -> None:
        """No page has memory: the cache was allocated."""
        self._ends = [0] * len(self._ahead)  # by pool: pages before have memory
        self._pieces: list[tuple[int, int, int, int]] = []  # pool, plane, first page, end

    @property
    def is_wanted(self) -> bool:
        """Whether pages that are taken next have no memory yet, and memory is free."""
        if not self._pieces:
            for pool, (ahead, (used, size)) in enumerate(zip(self._ahead, self._pool.used_counts)):
                count = min(size, used + ahead) - self._ends[pool]
                if count > 0 and 4 * count * sum(self._pages.page_bytes[pool]) <= available_memory_bytes():
                    self._split(pool, self._ends[pool] + count)
        return bool(self._pieces)

    def _split(self, pool: int, end: int) -> None:
        for plane, size in enumerate(self._pages.page_bytes[pool]):
            step = max(1, PIECE_BYTES // size)
            for first in range(self._ends[pool], end, step):
                self._pieces.append((pool, plane, first, min(end, first + step)))
        self._pieces.sort(key=lambda piece: -piece[2])
        self._ends[pool] = end

    def allocate_some(self) -> None:
        """Pieces, the first pages first, for MOST_S or little longer."""
        end = time.monotonic() + MOST_S
        while self.is_wanted and time.monotonic() < end:
            self._pages.enter(*self._pieces.pop())
