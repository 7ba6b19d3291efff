"""Pages in cache groups that do not keep all tokens: allocated chunk by chunk, and released early."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from runtime.engine.scheduling.block_pool import BlockPool, by_page
from runtime.engine.scheduling.sequence import Sequence
from runtime.kv.groups import NO_BLOCK


class ChunkedPages:
    """The pages of running sequences in those groups of a pool whose kind is not whole (``CacheKind``).

    groups    those groups
    shortest  a group whose tables are never longer than those of others
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.groups = [group for group, kind in enumerate(pool.kinds) if not kind.is_whole]
        self.shortest = self.groups[0] if self.groups else 0

    def grow(self, sequence: Sequence, count: int) -> int:
        """Give a sequence the pages of its next ``count`` tokens, as far as there are blocks. Returns the number of
        tokens that have pages."""
        pool, shortest = self.pool, sequence.blocks[self.shortest]
        wanted = -(-(sequence.num_computed + count) // pool.block_size) - len(shortest)
        num_pages = max(0, min(wanted, pool.num_free // len(self.groups)))
        fresh = iter(pool.allocate(num_pages * len(self.groups)))
        for group in self.groups:
            sequence.blocks[group] += islice(fresh, num_pages)
        return min(count, len(shortest) * pool.block_size - sequence.num_computed)

    def give_up(self, sequence: Sequence) -> None:
        """Release the pages that are not needed after a sequence's committed tokens; later ones may be rejected. They
        stay cached."""
        pool, before = self.pool, sequence.first_pages
        num_tokens, size = sequence.num_committed, pool.block_size
        after = [max(first, kind.first_page(num_tokens, size)) for first, kind in zip(before, pool.kinds)]
        sequence.gives_up_at = min(kind.gives_up_at(page, size) for page, kind in zip(after, pool.kinds))
        if after == before:
            return
        pool.release(reversed(by_page([ids[:end] for ids, end in zip(sequence.blocks, after)], before)))
        for ids, first, end in zip(sequence.blocks, before, after):
            ids[first:end] = [NO_BLOCK] * (end - first)
        sequence.first_pages = after

    def num_reserved(self, remaining: int) -> int:
        """The blocks that the chunks of a prompt after the first need, while nothing is released."""
        size = self.pool.block_size
        return sum(-(-self.pool.kinds[group].reserved_tokens(remaining) // size) for group in self.groups)

    def blocks_of(self, running: Iterable[Sequence]) -> list[int]:
        """All blocks that these sequences hold in these groups."""
        return [
            block_id
            for sequence in running
            for group in self.groups
            for block_id in sequence.blocks[group][sequence.first_pages[group] :]
        ]
