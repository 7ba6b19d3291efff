"""Draft tokens of a sequence (speculative decoding): a decode computes them, too, and samples after each."""

from __future__ import annotations

from itertools import islice

from runtime.engine.scheduling.block_pool import BlockPool
from runtime.engine.scheduling.step import Chunk, Step


def reserve_drafts(chunk: Chunk, drafts: list[int], step: Step, pool: BlockPool, num_running: int) -> None:
    """Let a decode verify its sequence's draft tokens, within the budget and the blocks left after one page for each of
    ``num_running`` sequences. Nothing else is planned for the sequence until the step is committed."""
    sequence = chunk.sequence
    if sequence.num_pending != 1:
        return  # they follow another token
    count = min(len(drafts), step.budget, sequence.max_tokens - sequence.num_output_tokens - 1)
    size, end = pool.block_size, chunk.start + 1
    room = min(map(len, sequence.blocks)) * size - end
    if room < count:
        lacking = [max(0, -(-(end + count) // size) - len(ids)) for ids in sequence.blocks]
        if sum(lacking) <= pool.num_free - num_running * len(lacking):
            fresh = iter(pool.allocate(sum(lacking)))
            for ids, num_pages in zip(sequence.blocks, lacking):
                ids += islice(fresh, num_pages)
        count = min(count, min(map(len, sequence.blocks)) * size - end)
    if count > 0:
        chunk.draft_ids = drafts[:count]
        chunk.num_tokens += count
        step.num_tokens += count
        step.num_drafts += count
        sequence.num_pending += count


def take_back(chunk: Chunk, num_accepted: int) -> int:
    """Uncount the rejected tokens of a chunk with drafts, as neither computed nor pending. Returns the end of its known
    tokens."""
    sequence = chunk.sequence
    sequence.num_pending -= chunk.num_draws - num_accepted
    if sequence.row is not None:
        sequence.num_computed = chunk.start + num_accepted
    return chunk.start + 1
