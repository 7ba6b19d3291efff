"""Pages in cache groups with a window: a running sequence gets them chunk by chunk, and gives up those behind it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from runtime.engine.scheduling.block_pool import BlockPool, by_page
from runtime.engine.scheduling.sequence import Sequence
from runtime.kv.groups import NO_BLOCK, first_page, num_tokens_past


class WindowedPages:
    """The pages of running sequences in those groups of a pool that have a window.

    groups    the groups with a window
    shortest  a group whose tables are never longer than those of others
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.groups = [group for group, window in enumerate(pool.windows) if window is not None]
        self.shortest = self.groups[0] if self.groups else 0

    def grow(self, sequence: Sequence, count: int) -> int:
        """Give a sequence the pages of its next ``count`` tokens, as far as there are blocks. Returns for how many
        tokens it has them."""
        pool, shortest = self.pool, sequence.blocks[self.shortest]
        wanted = -(-(sequence.num_computed + count) // pool.block_size) - len(shortest)
        num_pages = max(0, min(wanted, pool.num_free // len(self.groups)))
        fresh = iter(pool.allocate(num_pages * len(self.groups)))
        for group in self.groups:
            sequence.blocks[group] += islice(fresh, num_pages)
        return min(count, len(shortest) * pool.block_size - sequence.num_computed)

    def give_up(self, sequence: Sequence) -> None:
        """Release the pages behind the window of a sequence's committed tokens; what was drawn since may be taken back.
        They can still be found."""
        pool, before = self.pool, sequence.first_pages
        num_tokens, size = sequence.num_committed, pool.block_size
        after = [
            max(first, first_page(num_tokens, window, size)) for first, window in zip(before, pool.windows)
        ]
        sequence.gives_up_at = min(num_tokens_past(page, window, size) for page, window in zip(after, pool.windows))
        if after == before:
            return
        pool.release(reversed(by_page([ids[:end] for ids, end in zip(sequence.blocks, after)], before)))
        for ids, first, end in zip(sequence.blocks, before, after):
            ids[first:end] = [NO_BLOCK] * (end - first)
        sequence.first_pages = after

    def num_reserved(self, remaining: int) -> int:
        """The blocks that the next chunks of a prompt need beside the first, while nothing is given up."""
        size = self.pool.block_size
        return sum(-(-min(remaining, self.pool.windows[group] or 0) // size) for group in self.groups)

    def blocks_of(self, running: Iterable[Sequence]) -> list[int]:
        """All blocks that these sequences hold here."""
        return [
            block_id
            for sequence in running
            for group in self.groups
            for block_id in sequence.blocks[group][sequence.first_pages[group] :]
        ]
