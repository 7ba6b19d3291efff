"""Decides whether a waiting sequence can start, and with which blocks: existing content need not be computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from runtime.engine.scheduling.block_pool import BlockPool, Hit
from runtime.engine.scheduling.chunked_pages import ChunkedPages
from runtime.engine.scheduling.chunking import PromptChunks
from runtime.engine.scheduling.sequence import NO_STATE, Sequence, State
from runtime.engine.scheduling.step import Step
from runtime.kv.groups import NO_BLOCK

_MOST_BOUNDARIES = 2
"""Boundaries of a prompt after which a state is kept: each costs a further chunk."""

_MOST_REPLAYED = 8192
"""A state is kept after each chunk of a prompt that crosses a multiple of so many tokens. A chunk may be longer, and a
chunk with draft tokens keeps none. Such states are the first to be evicted."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The head of the queue could not start; it is tried again when so many blocks of each pool are free."""

    sequence: Sequence
    num_blocks: list[int]

    def holds(self, sequence: Sequence, pool: BlockPool) -> bool:
        return sequence is self.sequence and not pool.has_room(self.num_blocks)


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

    def refuses(self, sequence: Sequence) -> bool:
        """Whether a sequence that could not start still lacks the blocks."""
        return self._refusal is not None and self._refusal.holds(sequence, self._pool)

    def wanted(self, sequence: Sequence) -> list[int]:
        """By pool: the free blocks that a sequence waits for; none if it was not refused."""
        return self._refusal.num_blocks if self._refusal is not None and self._refusal.sequence is sequence else []

    def start(self, sequence: Sequence, step: Step, num_running: int) -> int:
        """Give a waiting sequence its blocks, if there are enough and the step has room for it. Returns how many of its
        tokens the step computes, or 0 if it cannot start.

        One more free page is left for each of the ``num_running`` sequences, so that the new one is not preempted at
        once; in groups that give pages up, the pages of its next chunks are left as well.
        """
        pool = self._pool
        before = pool.free_counts
        hit = reusable(sequence, pool)
        pool.share(hit.shared)
        count, needed = self._first_chunk(sequence, hit, step)
        if hit.partial:
            pool.share(hit.partial.values())
            if not pool.has_room(needed, num_running):  # keeping their sources may be too much
                pool.release(hit.partial.values())
                if pool.states:
                    pool.release(hit.shared)
                    hit = reusable(sequence, pool, has_partial=False)
                    pool.share(hit.shared)
                else:
                    hit = hit.without_partial()
                    if sequence.cut(hit.num_tokens) < hit.num_tokens:
                        pool.release(hit.shared)
                        hit = Hit.none(len(pool.kinds))
                count, needed = self._first_chunk(sequence, hit, step)
        wanted = needed
        if self._chunked.groups and count:
            if num_running:
                reserved = self._chunked.num_reserved(sequence.num_tokens - hit.num_tokens - count)
                wanted = [own + more for own, more in zip(needed, reserved)]
            else:
                count, needed = self._shortened(sequence, hit, count, needed)
                wanted = needed
        if count and pool.has_room(wanted, num_running):
            self._place(sequence, hit, needed, count, step)
            return count
        if count:
            after = zip(wanted, pool.page_counts, before, pool.free_counts)
            self._refusal = _Refusal(sequence, [own + num_running * each + was - now for own, each, was, now in after])
        pool.release(hit.partial.values())
        pool.release(hit.shared)
        return 0

    def _first_chunk(self, sequence: Sequence, hit: Hit, step: Step) -> tuple[int, list[int]]:
        """The tokens that the step may compute of a sequence that starts with ``hit``, and the fresh blocks of each
        pool that it needs for them."""
        remaining = sequence.num_tokens - hit.num_tokens
        if self._chunks.cuts_prompts:
            ends = checkpoints(sequence, hit, self._pool)
            remaining = min([remaining, *(end - hit.num_tokens for end in ends[:1])])
        count = self._chunks.size(step, hit.num_tokens, remaining, sequence.request.pictures)
        return count, self._needed(sequence, hit, count)

    def _needed(self, sequence: Sequence, hit: Hit, count: int) -> list[int]:
        """By pool: the fresh blocks for ``count`` tokens after a hit."""
        counts = self._page_counts(sequence, hit, count)
        return self._pool.by_pool(num_pages - len(ids) + ids.count(None) for ids, num_pages in zip(hit.blocks, counts))

    def _page_counts(self, sequence: Sequence, hit: Hit, count: int) -> list[int]:
        """By group: the pages of a sequence that starts with ``hit`` and ``count`` more tokens, up to the last one."""
        known, computed, size = sequence.num_tokens, hit.num_tokens + count, self._pool.block_size
        return [kind.table_pages(known if kind.is_whole else computed, size) for kind in self._pool.kinds]

    def _shortened(self, sequence: Sequence, hit: Hit, count: int, needed: list[int]) -> tuple[int, list[int]]:
        """A first chunk that fits the blocks: shortened if necessary and allowed."""
        if self._pool.has_room(needed) or not self._chunks.cuts_prompts:
            return count, needed
        size, each = self._pool.block_size, zip(needed, self._pool.free_counts, self._chunked.page_counts)
        num_pages = max(-(-(own - free) // num_groups) for own, free, num_groups in each if num_groups)
        end = (-(-(hit.num_tokens + count) // size) - num_pages) * size
        count = max(0, min(count, sequence.cut(end) - hit.num_tokens))
        return count, self._needed(sequence, hit, count)

    def _place(self, sequence: Sequence, hit: Hit, needed: list[int], count: int, step: Step) -> None:
        """Give a sequence the shared blocks of ``hit`` and ``needed`` fresh ones of each pool, into which the rest
        of the hit is copied."""
        pool = self._pool
        if sequence.host_slots:
            step.returned_slots += [slot for slots in sequence.host_slots for slot in slots]
            sequence.host_slots = []
        elif any(hit.host_slots):
            assert pool.host_pool is not None
            slots = [slot for slots in hit.host_slots for slot in slots]
            pool.host_pool.hold(slots)
            step.held_slots.append(slots)
        of_groups = pool.allocate_each(needed)
        sequence.blocks = []
        for group, num_pages in enumerate(self._page_counts(sequence, hit, count)):
            fresh = of_groups[group]
            host_slots = iter(hit.host_slots[group])
            ids: list[int] = []
            for block_id in hit.blocks[group]:
                if block_id is None:
                    block_id = next(fresh)
                    step.swap_in.append((next(host_slots), block_id))
                ids.append(block_id)
            if group in hit.partial:
                source, target = hit.partial[group], next(fresh)
                step.held_blocks.append((source, target))
                step.copies.append((source, target))
                ids.append(target)
            ids += islice(fresh, num_pages - len(ids))
            sequence.blocks.append(ids)
        pool.count_uses(hit)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = hit.num_tokens
            if not sequence.request.begun:  # else the engine that began it has counted it
                sequence.miss = pool.count_query(sequence.num_tokens, hit)
            if sequence.miss is not None and sequence.request.shows_difference:
                sequence.cached_ids = pool.cached_instead(hit)
        sequence.checkpoints = checkpoints(sequence, hit, pool)
        sequence.first_pages, sequence.gives_up_at = list(hit.first_pages), 0
        sequence.num_computed = hit.num_tokens
        sequence.state_ends = (range(hit.num_tokens, hit.num_tokens + 1), NO_STATE)
        sequence.num_committed = hit.num_shared_pages * pool.block_size


def checkpoints(sequence: Sequence, hit: Hit, pool: BlockPool) -> list[int]:
    """The ends of the chunks of a sequence that starts with ``hit``, after which a state is kept, ascending: the
    prompt's end; the last boundaries that its request names, or else the last end of a page; and the ends of those
    pages that are cached, and that were, but no kept state follows, since there other prompts left this one. None
    without states, or without a prefix cache."""
    if not (pool.states and pool.enable_prefix_caching):
        return []
    request, end = sequence.request, sequence.num_prompt_tokens
    named = request.boundaries[-_MOST_BOUNDARIES:] or ((end - 1) // pool.block_size * pool.block_size,)
    places = {sequence.cut(place) for place in (*named, hit.num_known, hit.num_seen)} | {end}
    return sorted(place for place in places if hit.num_tokens < place <= end)


def crosses(start: int, end: int) -> bool:
    """Whether the state after a chunk is kept for the time alone that computing it again would take."""
    return start // _MOST_REPLAYED < end // _MOST_REPLAYED


def reusable(sequence: Sequence, pool: BlockPool, *, has_partial: bool = True) -> Hit:
    """The location of the first tokens of a waiting sequence: its own swapped blocks (some of which may still be on the
    device), a running choice of the same request, or the prefix cache.

    At most all tokens but the last, whose logits are needed, and no part of an image that may not be cut. Only its own
    if log probabilities of the prompt were requested, since computing it gives them. From the prefix cache only full
    pages unless ``has_partial``.
    """
    if sequence.needs_prompt_logprobs and not sequence.host_slots:
        return replace(Hit.none(len(pool.kinds)), reasons=("prompt_logprobs", "prompt_logprobs"))
    tokens = sequence.prefix_keys(0, sequence.num_tokens - 1)
    if sequence.host_slots:
        return _own(sequence, tokens, pool)
    hit = pool.find(tokens, sequence.chain.salt, has_partial=has_partial)
    difference, differing = hit.difference, hit.differing
    while (end := sequence.cut(hit.num_tokens)) < hit.num_tokens:
        hit = pool.find(tokens[:end], sequence.chain.salt, has_partial=has_partial)
        hit = replace(hit, difference=difference, differing=differing)
    most = min(sequence.num_prompt_tokens, sequence.num_tokens - 1)
    for sibling in sequence.request.sequences:
        is_alike = sibling.rotary_offset == sequence.rotary_offset
        if sibling.state is State.RUNNING and sibling is not sequence and is_alike:
            count = sequence.cut(min(most, sibling.num_committed))
            if count > hit.num_tokens:
                hit = _prefix_of(sibling, count, pool) or hit
    return hit


def _own(sequence: Sequence, tokens: NDArray[np.int32], pool: BlockPool) -> Hit:
    """A swapped sequence's own pages, from the device if it has them."""
    num_full = sequence.num_computed // pool.block_size
    blocks = pool.on_device(tokens, sequence.chain.salt, sequence.first_pages, num_full)
    slots = []
    for ids, own, first in zip(blocks, sequence.host_slots, sequence.first_pages):
        ids += [None] * (first + len(own) - len(ids))
        slots.append([slot for block_id, slot in zip(ids[first:], own) if block_id is None])
    return Hit(blocks, sequence.first_pages, slots, num_tokens=sequence.num_computed, num_pages=num_full)


def _prefix_of(sequence: Sequence, num_tokens: int, pool: BlockPool) -> Hit | None:
    """The first tokens of a running sequence: full pages, and the one after them, whose beginning is copied. None if
    it has given up a page that is needed, or has states, of which it has the last alone."""
    if pool.states:
        return None
    num_full, rest = divmod(num_tokens, pool.block_size)
    first_pages = [kind.first_page(num_full * pool.block_size, pool.block_size) for kind in pool.kinds]
    if any(given_up > first for given_up, first in zip(sequence.first_pages, first_pages)):
        return None
    blocks: list[list[int | None]] = [
        [*[NO_BLOCK] * first, *ids[first:num_full]] for ids, first in zip(sequence.blocks, first_pages)
    ]
    partial = {group: ids[num_full] for group, ids in enumerate(sequence.blocks)} if rest else {}
    return Hit(blocks, first_pages, [[] for _ in blocks], partial, rest, num_tokens, num_full)
