"""Decides whether a waiting sequence can start, and with which blocks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from runtime.engine.scheduling.block_pool import BlockPool, Hit
from runtime.engine.scheduling.chunked_pages import ChunkedPages
from runtime.engine.scheduling.chunking import PromptChunks
from runtime.engine.scheduling.reuse import reusable
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.scheduling.step import Step


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The head of the queue could not start; it is tried again when so many blocks are free."""

    sequence: Sequence
    num_blocks: int

    def holds(self, sequence: Sequence, pool: BlockPool) -> bool:
        return sequence is self.sequence and pool.num_free < self.num_blocks


class Placement:
    """Allocates the blocks of sequences that start; the scheduler assigns their rows."""

    def __init__(self, pool: BlockPool, chunked: ChunkedPages, chunks: PromptChunks) -> None:
        self._pool = pool
        self._chunked = chunked
        self._chunks = chunks
        self._refusal: _Refusal | None = None

    def forget_refusal(self) -> None:
        """A running sequence has left: the head of the queue may be tried again."""
        self._refusal = None

    def start(self, sequence: Sequence, step: Step, num_running: int) -> int:
        """Give a waiting sequence its blocks, if there are enough and the step has room for it. Returns how many of its
        tokens the step computes, or 0 if it cannot start.

        One more free page is left for each of the ``num_running`` sequences, so that the new one is not preempted at
        once; in groups that give pages up, the pages of its next chunks are left as well.
        """
        pool = self._pool
        if self._refusal is not None and self._refusal.holds(sequence, pool):
            return 0
        spare = num_running * len(pool.kinds)
        num_free = pool.num_free
        hit = reusable(sequence, pool)
        pool.share(hit.shared)
        count, needed = self._first_chunk(sequence, hit, step)
        if hit.partial:
            pool.share(hit.partial)
            if needed + spare > pool.num_free:  # keeping their sources may be too much
                pool.release(hit.partial)
                hit = hit.without_partial()
                if sequence.cut(hit.num_tokens) < hit.num_tokens:
                    pool.release(hit.shared)
                    hit = Hit.none(len(pool.kinds))
                count, needed = self._first_chunk(sequence, hit, step)
        if self._chunked.groups and count:
            if num_running:
                spare += self._chunked.num_reserved(sequence.num_tokens - hit.num_tokens - count)
            else:
                count, needed = self._shortened(sequence, hit, count, needed)
        if count and needed + spare <= pool.num_free:
            self._place(sequence, hit, needed, count, step)
            return count
        if count:
            self._refusal = _Refusal(sequence, needed + spare + num_free - pool.num_free)
        pool.release(hit.partial)
        pool.release(hit.shared)
        return 0

    def _first_chunk(self, sequence: Sequence, hit: Hit, step: Step) -> tuple[int, int]:
        """The tokens that the step may compute of a sequence that starts with ``hit``, and the fresh blocks that it
        needs for them."""
        remaining = sequence.num_tokens - hit.num_tokens
        count = self._chunks.size(step, hit.num_tokens, remaining, sequence.request.pictures)
        return count, self._needed(sequence, hit, count)

    def _needed(self, sequence: Sequence, hit: Hit, count: int) -> int:
        """The fresh blocks for ``count`` tokens after a hit."""
        needed = 0
        for ids, num_pages in zip(hit.blocks, self._page_counts(sequence, hit, count)):
            needed += num_pages - len(ids) + ids.count(None)
        return needed

    def _page_counts(self, sequence: Sequence, hit: Hit, count: int) -> list[int]:
        """By group: the pages of a sequence that starts with ``hit`` and ``count`` more tokens, up to the last one."""
        known = -(-sequence.num_tokens // self._pool.block_size)
        computed = -(-(hit.num_tokens + count) // self._pool.block_size)
        return [known if kind.is_whole else computed for kind in self._pool.kinds]

    def _shortened(self, sequence: Sequence, hit: Hit, count: int, needed: int) -> tuple[int, int]:
        """A first chunk that fits the blocks: shortened if necessary and allowed."""
        lacking = needed - self._pool.num_free
        if lacking <= 0 or not self._chunks.cuts_prompts:
            return count, needed
        size, num_groups = self._pool.block_size, len(self._chunked.groups)
        num_pages = -(-lacking // num_groups)
        end = (-(-(hit.num_tokens + count) // size) - num_pages) * size
        count = max(0, sequence.cut(end) - hit.num_tokens)
        return count, self._needed(sequence, hit, count)

    def _place(self, sequence: Sequence, hit: Hit, needed: int, count: int, step: Step) -> None:
        """Give a sequence the shared blocks of ``hit`` and ``needed`` fresh ones, into which the rest of the hit is
        copied."""
        pool = self._pool
        if sequence.host_slots:
            step.returned_slots += [slot for slots in sequence.host_slots for slot in slots]
            sequence.host_slots = []
        elif any(hit.host_slots):
            assert pool.host_pool is not None
            slots = [slot for slots in hit.host_slots for slot in slots]
            pool.host_pool.hold(slots)
            step.held_slots.append(slots)
        fresh = iter(pool.allocate(needed))
        sequence.blocks = []
        for group, num_pages in enumerate(self._page_counts(sequence, hit, count)):
            host_slots = iter(hit.host_slots[group])
            ids: list[int] = []
            for block_id in hit.blocks[group]:
                if block_id is None:
                    block_id = next(fresh)
                    step.swap_in.append((next(host_slots), block_id))
                ids.append(block_id)
            if hit.partial:
                source, target = hit.partial[group], next(fresh)
                step.held_blocks.append((source, target))
                step.copies.append((source, target))
                ids.append(target)
            ids += islice(fresh, num_pages - len(ids))
            sequence.blocks.append(ids)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = hit.num_tokens
            pool.count_query(sequence.num_tokens, hit.num_tokens)
        sequence.first_pages, sequence.gives_up_at = list(hit.first_pages), 0
        sequence.num_computed = hit.num_tokens
        sequence.num_committed = hit.num_shared_pages * pool.block_size
