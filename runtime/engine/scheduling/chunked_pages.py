"""Pages of running sequences: those in cache groups that do not keep all tokens, allocated chunk by chunk and released
early; and those of draft tokens. A decode computes draft tokens too, and samples after each."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import islice

from runtime.engine.scheduling.block_pool import BlockPool, by_page
from runtime.engine.scheduling.sequence import NO_STATE, Sequence
from runtime.engine.scheduling.step import Chunk, Step
from runtime.kv.groups import NO_BLOCK


class ChunkedPages:
    """The pages of running sequences in those groups of a pool whose kind is not whole (``CacheKind``).

    groups    those groups, without states
    shortest  a group whose tables are never longer than those of others
    page_tokens  tokens of a page of that group; without bound if all groups have states
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.groups = [group for group, kind in enumerate(pool.kinds) if not kind.is_whole and kind.follows_tokens]
        self.shortest = self.groups[0] if self.groups else 0
        assert pool.kinds[self.shortest].follows_tokens or len(pool.states) == len(pool.kinds), (
            "a group of states is the first, before one of whole pages (``groups.cut_layers`` has the order)"
        )
        self.page_tokens = pool.block_size if pool.kinds[self.shortest].follows_tokens else sys.maxsize
        self.page_counts = pool.by_pool([int(group in self.groups) for group in range(len(pool.kinds))])

    def grow(self, sequence: Sequence, count: int) -> int:
        """Give a sequence the pages of its next ``count`` tokens, as far as there are blocks. Returns the number of
        tokens that have pages."""
        pool, shortest = self.pool, sequence.blocks[self.shortest]
        wanted = -(-(sequence.num_computed + count) // pool.block_size) - len(shortest)
        room = [free // count for free, count in zip(pool.free_counts, self.page_counts) if count]
        num_pages = max(0, min(wanted, *room))
        fresh = pool.allocate_each([num_pages * count for count in self.page_counts])
        for group in self.groups:
            sequence.blocks[group] += islice(fresh[group], num_pages)
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

    def let_states_go(self, sequence: Sequence) -> bool:
        """Release the page that the next chunk would overwrite, if others may find its content. Returns whether the
        sequence lacks a page for its next state."""
        for group in self.pool.states:
            ids = sequence.blocks[group]
            if len(ids) == 2 and self.pool.is_recorded(ids[1]):
                self.pool.release([ids.pop()])
                sequence.state_ends = (sequence.state_ends[0], NO_STATE)
        return any(len(sequence.blocks[group]) < 2 for group in self.pool.states)

    def turn_states(self, chunk: Chunk) -> None:
        """From now on the sequence's last state is the one after this chunk's known tokens, unless it is already."""
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens - len(chunk.draft_ids)
        if end not in sequence.state_ends[0]:
            sequence.state_ends = (range(end, end + 1), sequence.state_ends[0])
            for group in self.pool.states:
                sequence.blocks[group].reverse()

    def tables_after(self, sequence: Sequence, num_tokens: int, *, has_states: bool = True) -> list[list[int]]:
        """A sequence's blocks as far as they are to be recorded after its first ``num_tokens``: of states the one after
        exactly these, or none."""
        if not self.pool.states:
            return sequence.blocks
        tables = list(sequence.blocks)
        is_there = [has_states and num_tokens > 0 and num_tokens in ends for ends in sequence.state_ends]
        place = is_there.index(True) if any(is_there) else 2
        for group in self.pool.states:
            ids = tables[group][place : place + 1]
            # Draft tokens were kept after a state that others may find in this page already.
            is_of_fewer = place < 2 and len(sequence.state_ends[place]) > 1 and self.pool.is_recorded(ids[0])
            tables[group] = [] if is_of_fewer else ids
        return tables

    def num_reserved(self, remaining: int) -> list[int]:
        """By pool: the blocks that the chunks of a prompt after the first need, while nothing is released."""
        size = self.pool.block_size
        return self.pool.by_pool(-(-kind.reserved_tokens(remaining) // size) for kind in self.pool.kinds)

    def blocks_of(self, running: Iterable[Sequence]) -> list[int]:
        """All blocks that these sequences hold in these groups."""
        return [
            block_id
            for sequence in running
            for group in (*self.groups, *self.pool.states)
            for block_id in sequence.blocks[group][sequence.first_pages[group] :]
        ]


def reserve_drafts(chunk: Chunk, drafts: list[int], step: Step, pool: BlockPool, num_running: int) -> None:
    """Let a decode verify its sequence's draft tokens, within the budget and the blocks left after one page for each of
    ``num_running`` sequences. Nothing else is planned for the sequence until the step is committed.

    In a state's page, draft tokens are pending (`runtime.kv.forms.Recurrent`)."""
    sequence = chunk.sequence
    if sequence.num_pending != 1:
        return  # they follow another token
    count = min(len(drafts), step.budget, sequence.max_tokens - sequence.num_output_tokens - 1)
    size, end = pool.block_size, chunk.start + 1
    lacking = [max(0, kind.table_pages(end + count, size) - len(ids)) for kind, ids in zip(pool.kinds, sequence.blocks)]
    if any(lacking):
        needed = pool.by_pool(lacking)
        if pool.has_room(needed, num_running):
            for ids, fresh, num_pages in zip(sequence.blocks, pool.allocate_each(needed), lacking):
                ids += islice(fresh, num_pages)
        tables = [ids for ids, kind in zip(sequence.blocks, pool.kinds) if kind.follows_tokens]
        count = min(count, min(map(len, tables)) * size - end)
    if count > 0:
        chunk.draft_ids = drafts[:count]
        chunk.num_tokens += count
        step.num_tokens += count
        step.num_drafts += count
        sequence.num_pending += count


def take_back(chunk: Chunk, num_accepted: int) -> int:
    """Uncount the rejected tokens of a chunk with drafts, as neither computed nor pending; a state's page gives the
    states after the others. Returns the end of its known tokens."""
    sequence = chunk.sequence
    sequence.num_pending -= chunk.num_samples - num_accepted
    if sequence.row is not None:
        sequence.num_computed = chunk.start + num_accepted
        sequence.state_ends = (range(chunk.start + 1, sequence.num_computed + 1), sequence.state_ends[1])
    return chunk.start + 1
