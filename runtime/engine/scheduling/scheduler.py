"""Who computes which tokens in the next step: pure bookkeeping over token counts and blocks.

    step = scheduler.schedule()   # may be called while the step before it runs, never further ahead
    scheduler.extend(step)        # only if time has passed: leaves out who has ended, lets in who has arrived
    ...                           # the engine executes the step, unless it has no work
    scheduler.commit(step)        # or abandon(step); then the drawn tokens are appended

Both queues are kept in the order that the policy gives. A sequence gets the blocks of all its known tokens when it
starts to run, and one more whenever its output fills the last. When one is missing, a running sequence gives up its own
and waits again: the first in order is never the victim, and one request always fits the pool, so there is always
progress. The parts that can be chosen live in modules of their own: ``policy`` (the order), ``batching`` (how decodes
and prompts share steps), ``chunking`` (how prompts are cut), ``preemption`` (the victim, and how its content comes
back), ``reuse`` (what need not be computed at all).

It knows no tensors, no model and no clock.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, replace

from runtime.engine.config import EngineLimits
from runtime.engine.scheduling.batching import BATCHING_STYLES
from runtime.engine.scheduling.block_pool import BlockPool, Hit
from runtime.engine.scheduling.chunking import chunking_of
from runtime.engine.scheduling.invariants import check_scheduler, check_step
from runtime.engine.scheduling.policy import Order, policy_of
from runtime.engine.scheduling.preemption import VICTIM_RULES, CostModel
from runtime.engine.scheduling.reuse import reusable
from runtime.engine.scheduling.sequence import Sequence, State
from runtime.engine.scheduling.step import PreemptionWay, Step


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The head of the queue could not start; it need not be asked again before so many blocks are free (or others have
    left, which the scheduler notices)."""

    sequence: Sequence
    num_blocks: int

    def holds(self, sequence: Sequence, pool: BlockPool) -> bool:
        return sequence is self.sequence and pool.num_free < self.num_blocks


class Scheduler:
    """The waiting and the running sequences, and their blocks. Not thread-safe: it belongs to the engine's loop.

    open_steps  planned and neither committed nor abandoned, at most two
    costs       what steps and transfers take, as far as ``observe`` was told
    """

    def __init__(self, limits: EngineLimits, pool: BlockPool) -> None:
        config = limits.scheduling
        self.limits = limits
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.open_steps: list[Step] = []
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_swaps = 0
        self.costs = CostModel()
        self.policy = policy_of(config, self.costs.compute_s)
        self._batching = BATCHING_STYLES[config.batching]()
        self._chunking = chunking_of(config, limits.max_num_batched_tokens)
        self._victim_of = VICTIM_RULES[config.victim]
        self._preemption = config.preemption
        self.free_rows = list(range(limits.max_num_seqs))  # a heap: the lowest row first keeps the rows dense
        self._refused: _Refusal | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in the waiting queue."""
        sequence.state = State.WAITING
        sequence.order = self.policy.order(sequence)
        insort(self.waiting, sequence, key=_order)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks, its row and its host slots. What a planned step
        would still move for it is left out; its chunk is the engine's to drop (or ``extend``'s)."""
        for step in self.open_steps:
            step.drop_transfers(sequence.block_ids, sequence.host_slots)
        if sequence.state is State.WAITING:
            _remove(self.waiting, sequence)
            if sequence.host_slots:
                assert self.pool.host_pool is not None
                self.pool.host_pool.give(sequence.host_slots)
                sequence.host_slots = []
        elif sequence.state is State.RUNNING:
            _remove(self.running, sequence)
            self._release(sequence)
        sequence.state = State.FINISHED

    def schedule(self) -> Step:
        """Plan the next step: choose its chunks, reserve their blocks, count them as computed.

        It is without chunks only when there is no work, or when all running sequences wait for the end of the step
        before. Raises ``InvariantError`` when the bookkeeping is broken.
        """
        assert len(self.open_steps) < 2, "a third step is planned before the first was committed"
        step = Step(self.num_steps, self.limits.max_num_batched_tokens)
        self.num_steps += 1
        self._batching.fill(self, step)
        self._close(step)
        return step

    def extend(self, step: Step) -> None:
        """Bring a planned step up to date that has not begun, after the one before was committed: leave out the
        sequences that have ended since, and let waiting ones in as far as the budget allows."""
        step.drop_finished()
        self._batching.extend(self, step)
        self._close(step)

    def commit(self, step: Step) -> None:
        """The step has run: its tokens lie in their blocks, full blocks can be found from now on. To be called before
        any of its sequences is finished."""
        pool = self.pool
        block_size = self.limits.block_size
        records = pool.enable_prefix_caching
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.row is not None:  # else preempted since: these blocks are no longer its own
                end = sequence.num_committed = chunk.start + chunk.num_tokens
                if records and end >= (sequence.chain.num_blocks + 1) * block_size:
                    pool.record(sequence.chain, sequence.block_ids, end, sequence)
        self._settle(step)

    def abandon(self, step: Step) -> None:
        """The step has failed: nothing it computed counts. Its sequences are the engine's to finish."""
        self._settle(step)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took this long."""
        self.costs.observe_step(num_tokens, seconds)

    def observe_transfer(self, num_blocks: int, seconds: float) -> None:
        """Moving so many blocks between device and host took this long."""
        self.costs.observe_transfer(num_blocks, seconds)

    def check_invariants(self) -> None:
        """Assert what must hold between two calls. For tests: O(blocks + sequences)."""
        check_scheduler(self)

    def decode(self, step: Step) -> None:
        """Add every running sequence that lacks nothing but its last token, as far as the budget goes."""
        block_size = self.limits.block_size
        decodes: list[Sequence] = []
        wanting: list[Sequence] = []  # those whose next token has no slot
        for sequence in self.running:
            pending, computed = sequence.num_pending, sequence.num_computed
            if (
                sequence.num_tokens + pending - computed != 1
                or sequence.num_output_tokens + pending >= sequence.max_tokens
            ):
                continue
            decodes.append(sequence)
            if computed >= len(sequence.block_ids) * block_size:
                wanting.append(sequence)
        if wanting and not self._add_blocks(wanting, step):
            decodes = [s for s in decodes if s.block_ids and s.num_computed < len(s.block_ids) * block_size]
        step.add_decodes(decodes if len(decodes) <= step.budget else decodes[: max(0, step.budget)])

    def prefill(self, step: Step) -> None:
        """Add chunks of the running sequences whose tokens are not all computed."""
        for sequence in self.running:
            if sequence.num_tokens - sequence.num_computed > 1:
                count = self._chunk_size(sequence, step)
                if count > 0:
                    step.add(sequence, count, is_first=False)

    def admit(self, step: Step, most: int | None = None) -> None:
        """Let waiting sequences start, in order, at most ``most``. None after a preemption: its blocks were needed."""
        while self.waiting and most != 0 and not step.preempted and step.budget > 0:
            sequence = self.waiting[0]
            if not self._start(sequence, step):
                return
            del self.waiting[0]
            insort(self.running, sequence, key=_order)
            step.add(sequence, self._chunk_size(sequence, step), is_first=True)
            most = None if most is None else most - 1

    def _chunk_size(self, sequence: Sequence, step: Step) -> int:
        """Tokens that this step may compute of the sequence's; 0: none."""
        remaining = sequence.num_tokens - sequence.num_computed
        if self._batching.cuts_prompts:
            return min(remaining, step.budget, self._chunking.most(sequence.num_computed))
        return remaining if self._has_room(step, remaining) else 0

    def _has_room(self, step: Step, num_tokens: int) -> bool:
        """Whether the step can take the prompt whose last tokens these are: as much of it as fits, or, if it may not
        be cut, all of it, beyond the budget only alone."""
        return self._batching.cuts_prompts or num_tokens <= step.budget or not step.chunks

    def _start(self, sequence: Sequence, step: Step) -> bool:
        """Give a waiting sequence its row and the blocks of all its tokens, if there are enough and if the step has
        room for it.

        While others run, one more free block is left for each of them, lest the newcomer be preempted at once.
        """
        pool, spare = self.pool, len(self.running)
        if not self.free_rows or (self._refused is not None and self._refused.holds(sequence, pool)):
            return False
        num_free = pool.num_free
        hit = reusable(sequence, pool)
        needed = -(-sequence.num_tokens // self.limits.block_size) - len(hit.block_ids)
        pool.share(hit.block_ids)
        if hit.partial is not None:
            pool.share([hit.partial[0]])
            if needed + spare > pool.num_free:  # to keep its source might be what is too much
                pool.release([hit.partial[0]])
                hit = replace(hit, partial=None, num_tokens=hit.num_tokens - hit.partial[1])
        has_blocks = needed + spare <= pool.num_free
        if not has_blocks or not self._has_room(step, sequence.num_tokens - hit.num_tokens):
            if not has_blocks:
                self._refused = _Refusal(sequence, needed + spare + num_free - pool.num_free)
            if hit.partial is not None:
                pool.release([hit.partial[0]])
            pool.release(hit.block_ids)
            return False
        self._place(sequence, hit, needed, step)
        return True

    def _place(self, sequence: Sequence, hit: Hit, needed: int, step: Step) -> None:
        """Start a sequence with the shared blocks of ``hit`` and ``needed`` fresh ones, into which the rest of the hit
        is copied."""
        pool = self.pool
        if sequence.host_slots:
            step.returned_slots += sequence.host_slots
            sequence.host_slots = []
        elif hit.host_slots:
            assert pool.host_pool is not None
            pool.host_pool.hold(hit.host_slots)
            step.held_slots.append(hit.host_slots)
        fresh = pool.allocate(needed)
        step.swap_in += zip(hit.host_slots, fresh)
        if hit.partial is not None:
            step.held_blocks.append((hit.partial[0], fresh[0]))
            step.copies.append((hit.partial[0], fresh[0]))
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = hit.num_tokens
            pool.count_query(sequence.num_tokens, hit.num_tokens)
        sequence.block_ids = hit.block_ids + fresh
        sequence.num_computed = hit.num_tokens
        sequence.num_committed = len(hit.block_ids) * self.limits.block_size
        sequence.row = heapq.heappop(self.free_rows)
        sequence.state = State.RUNNING

    def _add_blocks(self, wanting: list[Sequence], step: Step) -> bool:
        """Give each of these running sequences one more block, in order; preempt others until there are enough. False
        when not all run on: preempted, or, if it is the first in order, left without a block by what a step under way
        holds."""
        num_wanting = len(wanting)
        while len(wanting) > self.pool.num_free and len(self.running) > 1:
            victim = self._victim_of(self.running)
            self._preempt(victim, step)
            wanting = [sequence for sequence in wanting if sequence is not victim]
        block_ids = self.pool.allocate(min(len(wanting), self.pool.num_free))
        for sequence, block_id in zip(wanting, block_ids):
            sequence.block_ids.append(block_id)
        return len(block_ids) == num_wanting and not step.preempted

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        """Take a running sequence's blocks and row, and let it wait."""
        way: PreemptionWay = "recompute"
        num_computed = sequence.num_computed
        num_blocks = -(-num_computed // self.limits.block_size)
        slots = self._slots_for(sequence, num_blocks)
        if slots is not None:
            way = "swap"
            step.swap_out += zip(sequence.block_ids, slots)
            sequence.host_slots = slots
            self.num_swaps += 1
        _remove(self.running, sequence)
        self._release(sequence)
        sequence.num_computed = num_computed if slots is not None else 0
        self.add(sequence)
        step.preempted.append((sequence, way))
        self.num_preemptions += 1

    def _slots_for(self, sequence: Sequence, num_blocks: int) -> list[int] | None:
        """Host slots for a victim's blocks; None: it shall be computed again."""
        host_pool = self.pool.host_pool
        if host_pool is None or self._preemption == "recompute" or sequence.is_drawing_last or num_blocks == 0:
            return None
        if self._preemption == "auto" and not self.costs.prefers_swap(sequence.num_computed, num_blocks):
            return None
        return host_pool.take(num_blocks)

    def _release(self, sequence: Sequence) -> None:
        """Free a running sequence's blocks, which stay findable as far as they were committed, and its row."""
        assert sequence.row is not None
        for step in self.open_steps:
            if step.held_blocks:
                self.pool.release(step.let_go(sequence.block_ids))
        self.pool.record(sequence.chain, sequence.block_ids, sequence.num_committed, sequence, is_final=True)
        self.pool.release(sequence.block_ids)
        sequence.chain.reset()
        heapq.heappush(self.free_rows, sequence.row)
        sequence.block_ids = []
        sequence.num_computed = sequence.num_committed = 0
        sequence.row = None
        self._refused = None

    def _close(self, step: Step) -> None:
        """The last touches of a plan."""
        if self.pool.offloads:
            step.swap_out += self.pool.offloads
            self.pool.offloads.clear()
        is_open = any(each is step for each in self.open_steps)
        if step.has_work and not is_open:
            self.open_steps.append(step)
        elif is_open and not step.has_work:  # all its sequences have ended
            self._settle(step)
        check_step(self, step)

    def _settle(self, step: Step) -> None:
        """Free what was held for the time of the step."""
        self.open_steps = [each for each in self.open_steps if each is not step]
        self.pool.release(source for source, _ in step.held_blocks)
        host_pool = self.pool.host_pool
        if host_pool is not None:
            for slots in step.held_slots:
                host_pool.release(slots)
            host_pool.give(step.returned_slots)
        step.held_blocks, step.held_slots, step.returned_slots = [], [], []


def _order(sequence: Sequence) -> Order:
    return sequence.order


def _remove(queue: list[Sequence], sequence: Sequence) -> None:
    position = bisect_left(queue, sequence.order, key=_order)
    assert queue[position] is sequence, "the sequence is not in its queue"
    del queue[position]
