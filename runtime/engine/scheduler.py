"""Who computes which tokens in the next step: pure bookkeeping over token counts and blocks.

Both queues are kept in the order priority, arrival, choice index. One step takes, within
``max_num_batched_tokens``: every running decode; then chunks of the prompts that are running; then waiting
sequences as long as there are rows and blocks for them. A sequence gets the blocks of all its known tokens
when it starts to run, and one more whenever its output fills the last. When a block is missing, the latest
running sequence gives up all of its own and waits again (it will recompute, keeping its output): the first in
order is never a victim and one request always fits the pool, so there is always progress.

It knows no tensors and no model, only ``num_tokens``, ``num_computed`` and ``block_ids`` of sequences.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass

from runtime.engine.block_pool import BlockPool
from runtime.engine.config import EngineLimits
from runtime.engine.sequence import Sequence, State


@dataclass(slots=True)
class Chunk:
    """The tokens ``start : start + num_tokens`` of a sequence, to be computed in this step.

    is_first  the sequence was given its row in this step
    is_last   the chunk ends at the last known token, so the step draws a new one
    """

    sequence: Sequence
    start: int
    num_tokens: int
    is_first: bool
    is_last: bool


class Scheduler:
    """The waiting and the running sequences, and their blocks. Not thread-safe: it belongs to the engine's
    loop."""

    def __init__(self, limits: EngineLimits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._free_rows = list(
            range(limits.max_num_seqs)
        )  # a heap: the lowest row first keeps the rows dense

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence in the waiting queue."""
        sequence.state = State.WAITING
        insort(self.waiting, sequence, key=_order)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks and its row."""
        if sequence.state is State.WAITING:
            _remove(self.waiting, sequence)
        elif sequence.state is State.RUNNING:
            _remove(self.running, sequence)
            self._release(sequence)
        sequence.state = State.FINISHED

    def schedule(self) -> list[Chunk]:
        """Choose the chunks of the next step and reserve their blocks. Empty only when there is no work."""
        chunks: list[Chunk] = []
        budget = self.limits.max_num_batched_tokens
        had_preemption = False
        prefilling: list[Sequence] = []
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            position += 1
            if sequence.num_tokens - sequence.num_computed > 1:
                prefilling.append(sequence)
                continue
            if not self._has_block_for_next(sequence):
                had_preemption |= self._make_room(sequence)
                if sequence.state is not State.RUNNING:
                    break  # it was itself the latest
                sequence.block_ids += self.pool.allocate(1)
            chunks.append(Chunk(sequence, sequence.num_computed, 1, False, True))
            budget -= 1
        for sequence in prefilling:
            if sequence.state is State.RUNNING and budget > 0:
                budget -= self._append_chunk(chunks, sequence, budget, is_first=False)
        while self.waiting and budget > 0 and not had_preemption and self._start(self.waiting[0]):
            sequence = self.waiting.pop(0)
            insort(self.running, sequence, key=_order)
            budget -= self._append_chunk(chunks, sequence, budget, is_first=True)
        return chunks

    def check_invariants(self) -> None:
        """Assert what must hold between two steps. For tests: O(blocks + sequences)."""
        for queue in (self.waiting, self.running):
            orders = [sequence.order for sequence in queue]
            assert orders == sorted(set(orders)), "a queue is out of order or has a sequence twice"
        rows = [sequence.row for sequence in self.running if sequence.row is not None]
        assert len(rows) == len(self.running), "a running sequence has no row"
        assert sorted(rows + self._free_rows) == list(range(self.limits.max_num_seqs)), (
            "rows are lost or doubled"
        )
        for sequence in self.waiting:
            assert sequence.state is State.WAITING
            assert sequence.row is None, "a waiting sequence has a row"
            assert not sequence.block_ids, "a waiting sequence holds blocks"
            assert sequence.num_computed == 0, "a waiting sequence counts computed tokens"
        for sequence in self.running:
            assert sequence.state is State.RUNNING
            capacity = len(sequence.block_ids) * self.limits.block_size
            assert sequence.num_computed <= capacity, "computed tokens lie outside the sequence's blocks"
            assert sequence.num_computed < sequence.num_tokens, "a running sequence has nothing to compute"
        self.pool.check_invariants(sequence.block_ids for sequence in self.running)
        self._check_slots()

    def _check_slots(self) -> None:
        """Assert that blocks which more than one sequence holds are full, and of the same request's
        prompt."""
        owners: dict[int, tuple[int, int, int | None]] = {}
        for sequence in self.running:
            num_shareable = (sequence.num_prompt_tokens - 1) // self.limits.block_size
            for place, block_id in enumerate(sequence.block_ids):
                owner = (sequence.request.number, place, None if place < num_shareable else sequence.row)
                assert owners.setdefault(block_id, owner) == owner, f"block {block_id} serves two places"

    def _append_chunk(self, chunks: list[Chunk], sequence: Sequence, budget: int, *, is_first: bool) -> int:
        remaining = sequence.num_tokens - sequence.num_computed
        count = min(remaining, budget)
        chunks.append(Chunk(sequence, sequence.num_computed, count, is_first, count == remaining))
        return count

    def _start(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its row and the blocks of all its tokens, if there are enough.

        While others run, one more free block is left for each of them, lest the newcomer be preempted at
        once.
        """
        if not self._free_rows:
            return False
        shared = self._shareable_blocks(sequence)
        needed = -(-sequence.num_tokens // self.limits.block_size) - len(shared)
        if needed + len(self.running) > self.pool.num_free:
            return False
        self.pool.share(shared)
        sequence.block_ids = shared + self.pool.allocate(needed)
        sequence.num_computed = len(shared) * self.limits.block_size
        sequence.row = heapq.heappop(self._free_rows)
        sequence.state = State.RUNNING
        return True

    def _shareable_blocks(self, sequence: Sequence) -> list[int]:
        """Full prompt blocks that a running choice of the same request has computed; the last prompt token is
        always left to compute, since its logits are wanted."""
        if sequence.needs_prompt_logprobs:
            return []
        count = (sequence.num_prompt_tokens - 1) // self.limits.block_size
        for sibling in sequence.request.sequences:
            if sibling.state is State.RUNNING and sibling.num_computed >= count * self.limits.block_size:
                return sibling.block_ids[:count]
        return []

    def _has_block_for_next(self, sequence: Sequence) -> bool:
        return sequence.num_tokens <= len(sequence.block_ids) * self.limits.block_size

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt the latest running sequences until a block is free, or until ``sequence`` itself was the
        latest. Returns whether any was preempted."""
        had_preemption = False
        while self.pool.num_free == 0 and sequence.state is State.RUNNING:
            victim = self.running.pop()
            self._release(victim)
            self.add(victim)
            self.num_preemptions += 1
            had_preemption = True
        return had_preemption

    def _release(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self.pool.release(sequence.block_ids)
        heapq.heappush(self._free_rows, sequence.row)
        sequence.block_ids = []
        sequence.num_computed = 0
        sequence.row = None


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


def _remove(queue: list[Sequence], sequence: Sequence) -> None:
    position = bisect_left(queue, sequence.order, key=_order)
    assert queue[position] is sequence, "the sequence is not in its queue"
    del queue[position]
