"""One planned step: its chunks and its transfers of blocks."""

from __future__ import annotations

from typing import Literal

import msgspec

from runtime.engine.scheduling.sequence import Sequence

PreemptionWay = Literal["recompute", "swap"]


class Chunk(msgspec.Struct, gc=False):
    """The tokens ``start : start + num_tokens`` of a sequence, to be computed in this step.

    is_first  the sequence was given its row in this step
    is_last   the chunk ends at the last token, known or pending, so the step samples a new one
    draft_ids  draft tokens after the last, computed with it and counted in ``num_tokens``: the step samples
              after each of them, too, and keeps those that verification accepts
    """

    sequence: Sequence
    start: int
    num_tokens: int
    is_first: bool
    is_last: bool
    draft_ids: list[int] | tuple[()] = ()

    @property
    def num_samples(self) -> int:
        """Most tokens that the step samples for it."""
        return 1 + len(self.draft_ids) if self.is_last else 0


class Step(msgspec.Struct, eq=False):
    """Executed in the order ``swap_out``, ``swap_in``, ``copies``, chunks.

    number          counts the steps that were planned
    max_tokens      the budget; only a prompt that may not be cut runs beyond it, alone
    num_tokens      of all chunks
    num_drafts      draft tokens among these
    swap_out        (block, host slot): copied before anything is written to the block
    swap_in         (host slot, block): copied before any chunk reads the block
    copies          (source block, target block), on the device
    preempted       the sequences that gave up their blocks for this step, and how they will get them back
    held_blocks     sources of ``copies``: held until the step has run, or until the owner of the target is gone
    held_slots      host slots of prefixes that ``swap_in`` reads, held until the step has run
    returned_slots  host slots of swapped sequences that ``swap_in`` reads: free when the step has run
    """

    number: int
    max_tokens: int
    num_tokens: int = 0
    num_drafts: int = 0
    chunks: list[Chunk] = []
    swap_out: list[tuple[int, int]] = []
    swap_in: list[tuple[int, int]] = []
    copies: list[tuple[int, int]] = []
    preempted: list[tuple[Sequence, PreemptionWay]] = []
    held_blocks: list[tuple[int, int]] = []
    held_slots: list[list[int]] = []
    returned_slots: list[int] = []

    @property
    def budget(self) -> int:
        """Tokens that may still be added."""
        return self.max_tokens - self.num_tokens

    @property
    def has_transfers(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copies)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to execute: a step without chunks may still have to move blocks."""
        return bool(self.chunks) or self.has_transfers

    def add(self, sequence: Sequence, count: int, *, is_first: bool) -> None:
        """Add the next ``count`` tokens of a sequence and count them as computed, since the next step may be planned
        before this one has run."""
        start = sequence.num_computed
        end = start + count
        is_last = end == sequence.num_tokens + sequence.num_pending
        sequence.num_computed = end
        if is_last:
            sequence.num_pending += 1
        sequence.last_step = self.number
        self.num_tokens += count
        self.chunks.append(Chunk(sequence, start, count, is_first, is_last))

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """``add`` one token of each: the last, known or pending."""
        number, chunks = self.number, self.chunks
        for sequence in sequences:
            start = sequence.num_computed
            sequence.num_computed = start + 1
            sequence.num_pending += 1
            sequence.last_step = number
            chunks.append(Chunk(sequence, start, 1, False, True))
        self.num_tokens += len(sequences)

    def drop_finished(self) -> None:
        """Drop the chunks of sequences that have ended since the step was planned."""
        chunks = [chunk for chunk in self.chunks if not chunk.sequence.is_finished]
        if len(chunks) < len(self.chunks):
            self.chunks = chunks
            self.num_tokens = sum(chunk.num_tokens for chunk in chunks)
            self.num_drafts = sum(len(chunk.draft_ids) for chunk in chunks)

    def drop_transfers(self, block_ids: list[int], host_slots: list[int]) -> None:
        """Drop the copies into blocks and host slots that are about to be freed."""
        if self.swap_in or self.copies:
            blocks = set(block_ids)
            self.swap_in = [pair for pair in self.swap_in if pair[1] not in blocks]
            self.copies = [pair for pair in self.copies if pair[1] not in blocks]
        if self.swap_out and host_slots:
            slots = set(host_slots)
            self.swap_out = [pair for pair in self.swap_out if pair[1] not in slots]

    def let_go(self, block_ids: list[int]) -> list[int]:
        """Release and return the held sources of copies into these blocks, which are about to be freed. Later writes to
        the sources follow the copies."""
        targets = set(block_ids)
        sources = [source for source, target in self.held_blocks if target in targets]
        self.held_blocks = [pair for pair in self.held_blocks if pair[1] not in targets]
        return sources
