"""Schedules the tokens of the next step: pure bookkeeping over token counts and blocks.

        step = scheduler.schedule()   # may be called while the previous step runs, never further ahead
        scheduler.extend(step)        # only if time has passed: drops finished sequences, adds new arrivals
    ...                           # the engine executes the step, unless it has no work
        scheduler.commit(step)        # or abandon(step); then the sampled tokens are appended

Both queues are kept in the policy's order. A sequence gets the blocks of all its known tokens when it starts to run,
and one more whenever its output fills the last; in a cache group that does not keep all tokens it gets those of each
chunk, and gives up those that are not needed after its committed tokens. When a block is missing, a running sequence is
preempted: it gives up its blocks and waits again. The first in order is never the victim, and one request always fits
the pool, so there is always progress. Its parts are separate modules: ``policy`` (the order), ``batching`` (how decodes
and prompts share steps), ``chunking`` (how prompts are cut), ``placement`` (which sequences start, with which content),
``chunked_pages`` (pages of chunks and of drafts), ``preemption`` (the victim, and how its content is restored).

It does not know tensors, models or clocks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from itertools import islice
from typing import Protocol

from runtime.engine.limits import EngineLimits
from runtime.engine.scheduling.batching import BATCHING_STYLES
from runtime.engine.scheduling.block_pool import BlockPool
from runtime.engine.scheduling.chunked_pages import ChunkedPages, reserve_drafts, take_back
from runtime.engine.scheduling.chunking import PromptChunks, PromptTimes, chunking_of
from runtime.engine.scheduling.invariants import check_scheduler, check_step
from runtime.engine.scheduling.placement import Placement, crosses
from runtime.engine.scheduling.policy import Order, policy_of
from runtime.engine.scheduling.preemption import VICTIM_RULES, CostModel
from runtime.engine.scheduling.reserved_prefixes import ReservedPrefixes
from runtime.engine.scheduling.sequence import Request, Sequence, State, choose_rotation, is_at_switch, within_switch
from runtime.engine.scheduling.step import PreemptionWay, Step
from runtime.engine.scheduling.step_limit import StepLimit
from runtime.engine.scheduling.stored_prefixes import StoredPrefixes


class OnPages(Protocol):
    """See `Scheduler.on_pages`."""

    def __call__(self, sequence: Sequence, states: list[list[int]] | None, *, is_final: bool = False) -> None: ...


class Scheduler:
    """The waiting and the running sequences, and their blocks. Not thread-safe: it belongs to the engine's loop.

    depth       steps that may run at once, with 1 a second one may be planned ahead. Each samples for sequences of its
                own, with as many decodes as the others; chunks of a prompt may lie in several
    open_steps  planned and neither committed nor abandoned
    costs, prompt_times  of steps and transfers, and of chunks of prompts; the engine records them
    drafts      draft tokens of running sequences, for the next step that decodes them
    paused      requests whose sequences are held from the next step on, until they are added again
    stored      prefixes that are kept elsewhere, or None
    reserved    those of requests that will come from other engines, or None
    on_pages    called with a choice that will leave this engine (``Request.lease``) once more of its tokens are
                committed, with the states after them, and when it leaves
    """

    def __init__(self, limits: EngineLimits, pool: BlockPool, depth: int = 1) -> None:
        config = limits.scheduling
        self.limits = limits
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.depth = depth
        self.open_steps: list[Step] = []
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_swaps = 0
        self.costs = CostModel()
        self.drafts: dict[Sequence, list[int]] = {}
        self.paused: set[Request] = set()
        self.stored: StoredPrefixes | None = None
        self.reserved: ReservedPrefixes | None = None
        self.on_pages: OnPages | None = None
        self.policy = policy_of(config, limits.max_num_batched_tokens, self.costs.compute_s)
        self._batching = BATCHING_STYLES[config.batching]()
        self.prompt_times = PromptTimes()
        chunking = chunking_of(config, limits.max_num_batched_tokens, depth, self.prompt_times)
        self._chunks = PromptChunks(chunking, self._batching.cuts_prompts)
        self._victim_of = VICTIM_RULES[config.victim]
        self._preemption = config.preemption
        self.free_rows = list(range(limits.max_num_seqs))  # a heap: the lowest row first keeps the rows dense
        self._chunked = ChunkedPages(pool)
        self._stalled: set[Sequence] = set()  # without a page for their next state
        self._placement = Placement(pool, self._chunked, self._chunks)
        pool.chunked_blocks = lambda: self._chunked.blocks_of(self.running)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def following(self) -> Sequence | None:
        """The waiting sequence that starts next; None if none waits."""
        return self.policy.first(self.waiting) if self.waiting else None

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in the waiting queue."""
        sequence.state = State.WAITING
        sequence.order = self.policy.order(sequence)
        insort(self.waiting, sequence, key=_order)
        self.policy.joins(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, wherever it is, and free its blocks, its row and its host slots. Its transfers in a
        planned step are dropped; the engine (or ``extend``) drops its chunk."""
        self._take_out(sequence)
        sequence.state = State.FINISHED

    def limit_steps(self, limit: StepLimit | None) -> None:
        """Limit the tokens and seconds of later steps; with None they have the token budget alone."""
        if limit is not None and self._chunks.limit is not None:
            limit.go_on(self._chunks.limit)
        self._chunks.limit = limit

    def _has_prompts(self) -> bool:
        return any(
            each.num_computed < max(each.num_prompt_tokens, each.num_tokens + each.num_pending - 1)
            for each in self.running
        )

    def _leave(self, sequence: Sequence) -> None:
        """Remove it from the waiting queue."""
        _remove(self.waiting, sequence)
        self.policy.leaves(sequence)

    def _take_out(self, sequence: Sequence) -> None:
        """Remove it from its queue, with its blocks, row and host slots."""
        slots = [slot for slots in sequence.host_slots for slot in slots]
        for step in self.open_steps:
            step.drop_transfers(sequence.held_blocks, slots)
        if sequence.state is State.WAITING:
            self._leave(sequence)
            if self.stored is not None:
                self.stored.drop(sequence)
            if slots:
                assert self.pool.host_pool is not None
                self.pool.host_pool.give(slots)
                sequence.host_slots, sequence.first_pages = [], []
                sequence.num_computed = sequence.num_committed = 0
        elif sequence.state is State.RUNNING:
            _remove(self.running, sequence)
            self._release(sequence)
        self.drafts.pop(sequence, None)

    def schedule(self) -> Step:
        """Plan the next step: choose its chunks, reserve their blocks, count them as computed.

        It has no chunks only if there is no work, or if all running sequences wait for the end of the previous step.
        Raises ``InvariantError`` if the bookkeeping is broken.
        """
        assert len(self.open_steps) < max(2, self.depth), "a step is planned before the first was committed"
        limit, max_tokens = self._chunks.limit, self.limits.max_num_batched_tokens
        step = Step(self.num_steps, max_tokens if limit is None else min(max_tokens, limit.max_tokens))
        self.num_steps += 1
        if limit is not None:
            limit.begin()
        if self.paused:
            self.hold_paused()
        if self.limits.longrope_threshold is not None:
            self._stop_outgrown(self.limits.longrope_threshold)
        if self.pool.states:
            self._renew_states(step)
        if (following := self.following) is not None:
            self._make_room(following, step)
        self._batching.fill(self, step)
        if limit is not None:
            limit.planned(step.chunks, has_prompts=bool(self.waiting) or self._has_prompts())
        self._close(step)
        return step

    def extend(self, step: Step) -> None:
        """Update a planned step that has not begun, after the previous one was committed: drop the sequences that have
        ended since, and admit waiting ones within the budget."""
        step.drop_finished()
        self._batching.extend(self, step)
        self._close(step)

    def commit(self, step: Step, accepted: dict[Sequence, int] | None = None) -> None:
        """The step has run: its tokens lie in their blocks, and full blocks are cached from now on. To be called before
        any of its sequences is finished, or gets the sampled tokens.

        ``accepted`` has, for each sequence with a draft, how many of the sampled tokens are kept. The blocks reserved
        for the others are taken back; those that draft tokens have filled are cached once their tokens are known.
        """
        has_states = bool(self.pool.states)
        self.policy.computed(step.chunks, accepted)
        for chunk in step.chunks:
            sequence = chunk.sequence
            end = chunk.start + chunk.num_tokens
            if chunk.draft_ids:
                end = take_back(chunk, 1 if accepted is None else accepted[sequence])
            if sequence.row is not None:  # else preempted since: these blocks are no longer its own
                keeps_state = has_states and end in sequence.checkpoints
                is_spare = has_states and not keeps_state and not chunk.draft_ids and crosses(chunk.start, end)
                keeps_state = keeps_state or is_spare
                self._count_committed(sequence, end, keeps_state=keeps_state, is_spare=is_spare)
        self._settle(step)

    def _count_committed(
        self, sequence: Sequence, end: int, *, keeps_state: bool = False, is_spare: bool = False
    ) -> None:
        """These tokens of a running sequence are computed and known: cache its full pages, give up those outside
        windows."""
        pool, chain = self.pool, sequence.chain
        sequence.num_committed = end
        is_full = end >= (chain.num_blocks + 1) * self.limits.block_size
        if pool.enable_prefix_caching and (keeps_state or is_full):
            tables = self._chunked.tables_after(sequence, end, has_states=keeps_state)
            pool.record(chain, tables, sequence.first_pages, end, sequence, is_spare=is_spare)
        if self.on_pages is not None and sequence.request.lease:
            has_states = keeps_state and not is_spare
            self.on_pages(sequence, self.states_after(sequence, end) if has_states else None)
        if end >= sequence.gives_up_at:
            self._chunked.give_up(sequence)

    def states_after(self, sequence: Sequence, end: int) -> list[list[int]] | None:
        """A sequence's blocks, of states the one after these tokens, if a planned or committed step ends there and it
        is kept; else None."""
        is_kept = self.pool.states and end in sequence.checkpoints
        return self._chunked.tables_after(sequence, end) if is_kept else None

    def abandon(self, step: Step) -> None:
        """The step has failed: its results do not count. The engine finishes its sequences."""
        self._settle(step)

    def check_invariants(self) -> None:
        """Assert the invariants between two calls. For tests: O(blocks + sequences)."""
        check_scheduler(self)

    def decode(self, step: Step) -> None:
        """Add every running sequence that lacks only its last token, within the budget."""
        block_size, shortest = self._chunked.page_tokens, self._chunked.shortest
        has_chunked = bool(self._chunked.groups)
        decodes: list[Sequence] = []
        wanting: list[Sequence] = []  # those whose next token has no slot
        most = self._most_decodes()
        for sequence in self._idle():
            pending, computed = sequence.num_pending, sequence.num_computed
            if (
                sequence.num_tokens + pending - computed != 1
                or sequence.num_output_tokens + pending >= sequence.max_tokens
            ):
                if not (has_chunked and sequence.num_tokens - computed > 1):
                    continue  # else a prompt, whose next chunk may need a page
                if sequence.least_end > len(sequence.blocks[shortest]) * block_size:
                    wanting.append(sequence)
                continue
            if len(decodes) == most:
                continue  # the step has its share of decodes
            decodes.append(sequence)
            if computed >= len(sequence.blocks[shortest]) * block_size:
                wanting.append(sequence)
        if wanting and not self._add_blocks(wanting, step):
            decodes = [
                s for s in decodes if s.row is not None and s.num_computed < len(s.blocks[shortest]) * block_size
            ]
        step.add_decodes(decodes if len(decodes) <= step.budget else decodes[: max(0, step.budget)])

        if self.drafts:
            # So that draft tokens do not take the room of an image, step by step.
            following = [] if self.following is None else [self.following]
            has_room = not any(each.is_at_whole_picture for each in (*self.running, *following))
            num_running, switch = len(self.running), self.limits.longrope_threshold
            for chunk in step.chunks:
                drafts = self.drafts.pop(chunk.sequence, None)
                if drafts and has_room:
                    if self.pool.states:
                        drafts = drafts[: self.limits.pending_tokens]
                    if switch is not None:
                        drafts = within_switch(drafts, chunk.sequence, chunk.start, switch)
                    reserve_drafts(chunk, drafts, step, self.pool, num_running)

    def prefill(self, step: Step) -> None:
        """Add chunks of the running sequences whose tokens are not all computed."""
        for sequence in self.running:
            if (sequence.num_pending and self.depth > 1 and self._is_open(sequence)) or sequence in self._stalled:
                continue
            if sequence.last_step == step.number:
                continue  # it has just started
            remaining = sequence.num_tokens - sequence.num_computed
            if remaining > 1:
                if self.policy.closes(step, sequence):
                    return
                start = sequence.num_computed
                if self._chunks.cuts_prompts:
                    remaining = next((end - start for end in sequence.checkpoints if end > start), remaining)
                count = self._chunks.size(step, start, remaining, sequence.request.pictures)
                if self._chunked.groups:
                    count = sequence.cut(start + self._chunked.grow(sequence, count)) - start
                if count > 0:
                    step.add(sequence, count, is_first=False)
                if self._chunks.limit is not None and count < sequence.num_tokens - start:
                    self._chunks.limit.is_full = True

    def admit_urgent(self, step: Step) -> None:
        """Start the waiting sequences that go before the rest of prompts that have begun."""
        while (sequence := self.following) is not None and self.policy.is_urgent(sequence, self.running):
            self.admit(step, most=1)
            if sequence.state is State.WAITING:
                return

    def admit(self, step: Step, most: int | None = None) -> None:
        """Start waiting sequences, in order, at most ``most``; none after a preemption, which needed the blocks."""
        while self.free_rows and most != 0 and not step.preempted and step.budget > 0:
            sequence = self.following
            if sequence is None or self.policy.closes(step, sequence):
                return
            if sequence.num_pending or (self.depth > 1 and self._is_open(sequence)):
                return  # it ran: its tokens are known when that step is over
            if self.limits.longrope_threshold is not None:
                choose_rotation(sequence, self.limits.longrope_threshold, self.pool.host_pool)
            if self._placement.refuses(sequence):
                if not self.running and self._drop_read():
                    continue
                return
            if self.stored is not None and not self._restore(self.stored, sequence, step):
                return
            is_new = sequence.num_cached_tokens is None
            count = self._placement.start(sequence, step, len(self.running))
            if not count:
                if not self.running and self._drop_read():
                    continue
                return
            self._leave(sequence)
            if is_new:
                self.policy.starts(sequence)
            sequence.row = heapq.heappop(self.free_rows)
            sequence.state = State.RUNNING
            insort(self.running, sequence, key=_order)
            step.add(sequence, count, is_first=True)
            if self._chunks.limit is not None and not step.chunks[-1].is_last:
                self._chunks.limit.is_full = True
            most = None if most is None else most - 1

    def _drop_read(self) -> bool:
        """Give up blocks of a prefix that is being read back, or of one that was reserved. False if there are none."""
        return any(each is not None and each.drop() for each in (self.stored, self.reserved))

    def _restore(self, stored: StoredPrefixes, sequence: Sequence, step: Step) -> bool:
        """Read what a store has of a new sequence's prefix; False while it has to wait for more. That does not begin
        while a block that is free now is still to be copied from, or written by a step that runs."""
        if sequence.num_cached_tokens is not None or sequence.host_slots or sequence.needs_prompt_logprobs:
            return True
        if self.reserved is not None and self.reserved.covers(sequence):
            return True
        may_begin = self._may_write(stored) and not step.swap_out
        return stored.restore(sequence, len(self.running), may_begin=may_begin)

    def _may_write(self, stored: StoredPrefixes) -> bool:
        """Whether the host may write free blocks."""
        has_copies = self.pool.offloads or any(each.swap_out for each in self.open_steps)
        return not (has_copies or (self.open_steps and not stored.is_ordered))

    def fill_reserved(self) -> None:
        """Read what has arrived of prompts that will come, unless others wait: these go first."""
        if self.reserved is not None and self.reserved.has_pages and not self.waiting:
            assert self.stored is not None
            if self._may_write(self.stored):
                self.reserved.fill(len(self.running))

    def _idle(self) -> list[Sequence]:
        """The running sequences that a step may be planned for."""
        running = self.running
        if self._stalled:
            running = [sequence for sequence in running if sequence not in self._stalled]
        if self.depth == 1 or not self.open_steps:
            return running
        return [sequence for sequence in running if not self._is_open(sequence)]

    def _most_decodes(self) -> int:
        """Most decodes of one step: several open steps divide them."""
        if self.depth == 1:
            return len(self.running)
        decoding = sum(each.num_tokens + each.num_pending - each.num_computed == 1 for each in self.running)
        return -(-decoding // self.depth)

    def _is_open(self, sequence: Sequence) -> bool:
        return any(sequence.last_step == step.number for step in self.open_steps)

    def _add_blocks(self, wanting: list[Sequence], step: Step) -> bool:
        """Give each of these running sequences the pages of its next token, or of an image that may not be cut, in
        order; preempt others until there are enough blocks. False if not all can run on: one was preempted, or, as the
        first in order, lacks a block that a running step holds."""
        size, kinds = self.limits.block_size, self.pool.kinds
        for sequence in wanting:
            if sequence.num_committed < sequence.num_computed and not self._is_open(sequence):
                self._count_committed(sequence, sequence.num_computed)  # with the draft tokens that were kept last
        lacking = {
            sequence: [
                max(0, kind.table_pages(sequence.least_end, size) - len(ids))
                for kind, ids in zip(kinds, sequence.blocks)
            ]
            for sequence in wanting
        }
        needed = self.pool.by_pool(map(sum, zip(*lacking.values())))
        while not self.pool.has_room(needed):
            if self._drop_read():
                continue
            if len(self.running) == 1:
                return False
            victim = self._victim_of(self.policy.victims(self.running))
            own = self.pool.by_pool(lacking.pop(victim, (0,) * len(self.pool.kinds)))
            needed = [count - less for count, less in zip(needed, own)]
            self._preempt(victim, step)
        fresh = self.pool.allocate_each(needed)
        for sequence, counts in lacking.items():
            for ids, of_group, count in zip(sequence.blocks, fresh, counts):
                ids += islice(of_group, count)
        return not step.preempted

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        """Take a running sequence's blocks and row, and return it to the waiting queue."""
        way: PreemptionWay = "recompute"
        num_computed, first_pages = sequence.num_computed, sequence.first_pages
        size, kinds = self.limits.block_size, self.pool.kinds
        tables = [
            ids[first : kind.stored_pages(num_computed, size)]
            for ids, first, kind in zip(sequence.blocks, first_pages, kinds)
        ]
        slots = self._slots_for(sequence, self.pool.by_pool(map(len, tables)))
        if slots is not None:
            way = "swap"
            free = [iter(slots[pool]) for pool in range(len(slots))]
            sequence.host_slots = [list(islice(free[pool], len(ids))) for pool, ids in zip(self.pool.pools, tables)]
            self._take_offloads(step)  # a slot of theirs may be one of these
            for ids, own in zip(tables, sequence.host_slots):
                step.swap_out += zip(ids, own)
            self.num_swaps += 1
        _remove(self.running, sequence)
        self._release(sequence)
        if slots is not None:
            sequence.num_computed, sequence.first_pages = num_computed, first_pages
        self.add(sequence)
        step.preempted.append((sequence, way))
        self.num_preemptions += 1

    def _make_room(self, sequence: Sequence, step: Step) -> None:
        """Preempt running sequences that the next to start outranks until there are a row and the blocks for it."""
        wanted = self._placement.wanted(sequence)
        while len(self.running) > 1 and not (self.free_rows and (not wanted or self.pool.has_room(wanted))):
            victim = self._victim_of(self.policy.victims(self.running))
            if not self.policy.outranks(sequence, victim, self.running):
                return
            self._preempt(victim, step)

    def _renew_states(self, step: Step) -> None:
        """Give each running sequence a page for its next state. The state that would be overwritten stays where others
        may find it; planned steps have read it by the time when the page is written again."""
        self._stalled = set()
        wanting = [
            sequence
            for sequence in self.running
            if self._chunked.let_states_go(sequence) and not sequence.is_drawing_last
        ]
        if wanting:
            self._add_blocks(wanting, step)
            self._stalled = {each for each in self.running if self._chunked.let_states_go(each)}

    def _stop_outgrown(self, switch: int) -> None:
        """Return running sequences that have to be recomputed to the waiting queue."""
        for sequence in [sequence for sequence in self._idle() if is_at_switch(sequence, switch)]:
            _remove(self.running, sequence)
            self._release(sequence)
            self.add(sequence)

    def hold_paused(self) -> None:
        """Remove the sequences of paused requests from both queues and free what they hold. A running one is removed
        once it is in no step that may still be started."""
        for sequence in [*self._idle(), *self.waiting]:
            if sequence.request in self.paused:
                self._take_out(sequence)
                sequence.state = State.HELD

    def _slots_for(self, sequence: Sequence, counts: list[int]) -> list[list[int]] | None:
        """By pool: host slots for a victim's blocks; None if it is to be recomputed."""
        host_pool = self.pool.host_pool
        if host_pool is None or self._preemption == "recompute" or sequence.is_drawing_last or not any(counts):
            return None
        if self._preemption == "auto":
            num_bytes = sum(count * size for count, size in zip(counts, self.limits.block_bytes, strict=True))
            if not self.costs.prefers_swap(sequence.num_computed, num_bytes):
                return None
        return host_pool.take(counts)

    def _release(self, sequence: Sequence) -> None:
        """Free a running sequence's blocks, which stay cached as far as they were committed, and its row."""
        assert sequence.row is not None
        for step in self.open_steps:
            if step.held_blocks:
                self.pool.release(step.let_go(sequence.held_blocks))
        self.pool.record(
            sequence.chain,
            self._chunked.tables_after(sequence, sequence.num_committed),
            sequence.first_pages,
            sequence.num_committed,
            sequence,
            is_final=True,
        )
        if self.stored is not None:
            self.stored.note(sequence)
        if self.on_pages is not None and sequence.request.lease:
            self.on_pages(sequence, None, is_final=True)
        self.pool.release(sequence.held_blocks)
        self.pool.forget(sequence.chain)
        heapq.heappush(self.free_rows, sequence.row)
        sequence.blocks, sequence.first_pages = [], []
        sequence.num_computed = sequence.num_committed = 0
        sequence.row = None
        self._placement.forget_refusal()

    def _close(self, step: Step) -> None:
        """Complete a plan."""
        self._take_offloads(step)
        if self.pool.states:
            for chunk in step.chunks:
                self._chunked.turn_states(chunk)
        is_open = step in self.open_steps
        if step.has_work and not is_open:
            self.open_steps.append(step)
        elif is_open and not step.has_work:  # all its sequences have ended
            self._settle(step)
        check_step(self, step)

    def _take_offloads(self, step: Step) -> None:
        """Add copies of the evicted contents that the host keeps. A slot holds the last that is copied to it."""
        step.swap_out += self.pool.offloads
        self.pool.offloads.clear()

    def _settle(self, step: Step) -> None:
        """Free the blocks and slots that were held during the step."""
        if step in self.open_steps:
            self.open_steps.remove(step)
        if step.held_blocks:
            self.pool.release([source for source, _ in step.held_blocks])
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
