"""Invariants of the scheduler's bookkeeping: all are asserted in tests, the cheapest in every step."""

from __future__ import annotations

import logging
from typing import Protocol

from runtime.engine.errors import InvariantError
from runtime.engine.limits import EngineLimits
from runtime.engine.scheduling.block_pool import BlockPool
from runtime.engine.scheduling.reserved_prefixes import ReservedPrefixes
from runtime.engine.scheduling.sequence import Sequence, State
from runtime.engine.scheduling.step import Step
from runtime.engine.scheduling.stored_prefixes import StoredPrefixes

logger = logging.getLogger("xserv.engine")


class Scheduler(Protocol):
    """The bookkeeping of ``scheduler.Scheduler``."""

    limits: EngineLimits
    pool: BlockPool
    depth: int
    waiting: list[Sequence]
    running: list[Sequence]
    free_rows: list[int]
    open_steps: list[Step]
    stored: StoredPrefixes | None
    reserved: ReservedPrefixes | None


def check_step(scheduler: Scheduler, step: Step) -> None:
    """Compare a planned step with the sequences' state: constant time for each chunk.

    Raises ``InvariantError``, and logs it: the engine must not go on with pages that may be another request's.
    """
    block_size, ref_counts = scheduler.limits.block_size, scheduler.pool.ref_counts
    kinds, switch, states = scheduler.pool.kinds, scheduler.limits.longrope_threshold, scheduler.pool.states
    are_whole = all(kind.is_whole for kind in kinds)
    copied = {source for each in scheduler.open_steps for source, _ in each.held_blocks}
    problem = ""
    for chunk in step.chunks:
        sequence = chunk.sequence
        end = chunk.start + chunk.num_tokens
        if sequence.row is None or end - len(chunk.draft_ids) != sequence.num_computed:
            problem = f"a chunk that ends at {end}, but {sequence.num_computed} computed tokens and row {sequence.row}"
        elif switch is not None and end > switch and not sequence.rotary_offset:
            problem = f"a chunk that ends at {end}, but is rotated as if it ended at {switch}"
        else:
            last_page = (end - 1) // block_size
            tables = sequence.blocks
            if states:
                problem = _state_problem(sequence, end - len(chunk.draft_ids), chunk.start, scheduler.pool)
                tables = [ids for ids, kind in zip(tables, kinds) if kind.follows_tokens]
            for ids in tables:
                if last_page >= len(ids):
                    problem = f"a chunk that ends at {end}, but {len(ids)} blocks of {block_size}"
                elif ref_counts[block_id := ids[last_page]] != 1 and block_id not in copied:
                    problem = f"to write to block {block_id}, which {ref_counts[block_id]} hold"
            if not are_whole:
                for given_up, kind in zip(sequence.first_pages, kinds):
                    if given_up > (first := kind.first_page(chunk.start, block_size)):
                        problem = f"to read page {first} before token {chunk.start}, but has given up {given_up} pages"
        if problem:
            problem = f"choice {sequence.index} of request {sequence.request.request_id!r} has {problem}"
            break
    num_running, num_rows = len(scheduler.running), scheduler.limits.max_num_seqs
    if not problem and num_running + len(scheduler.free_rows) != num_rows:
        problem = f"{num_running} sequences run and {len(scheduler.free_rows)} rows are free, of {num_rows}"
    if not problem and step.num_tokens > step.max_tokens and len(step.chunks) > 1:
        problem = f"{len(step.chunks)} chunks of {step.num_tokens} tokens exceed the budget of {step.max_tokens}"
    if problem:
        message = f"step {step.number}: {problem}"
        logger.error(message)
        raise InvariantError(message)


def _state_problem(sequence: Sequence, end: int, start: int, pool: BlockPool) -> str:
    """Why a chunk cannot go from the state after ``start`` tokens to the one after ``end``; "" if it can."""
    after, before = sequence.state_ends
    if after != range(end, end + 1) or start not in before:
        return f"states after {list(after)} and {list(before)} tokens, not after {end} and {start}"
    for group in pool.states:
        ids = sequence.blocks[group]
        if len(ids) != 2 or pool.ref_counts[ids[0]] != 1 or pool.is_recorded(ids[0]):
            return f"to write the state in the first of blocks {ids}, which are not two, or others find it there"
    return ""


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert everything, in O(blocks + sequences). For tests."""
    limits, pool = scheduler.limits, scheduler.pool
    for queue in (scheduler.waiting, scheduler.running):
        orders = [sequence.order for sequence in queue]
        assert orders == sorted(set(orders)), "a queue is out of order or has a sequence twice"
    rows = [sequence.row for sequence in scheduler.running if sequence.row is not None]
    assert len(rows) == len(scheduler.running), "a running sequence has no row"
    assert sorted(rows + scheduler.free_rows) == list(range(limits.max_num_seqs)), "rows are lost or doubled"
    for sequence in scheduler.waiting:
        assert sequence.state is State.WAITING
        assert sequence.row is None, "a waiting sequence has a row"
        assert not sequence.blocks, "a waiting sequence holds blocks"
        counts = [len(slots) + first for slots, first in zip(sequence.host_slots, sequence.first_pages)]
        stored = [kind.stored_pages(sequence.num_computed, limits.block_size) for kind in pool.kinds]
        assert counts == (stored if sequence.num_computed else []), "swapped blocks are miscounted"
    for sequence in scheduler.running:
        assert sequence.state is State.RUNNING
        assert not sequence.host_slots, "a running sequence holds host slots"
        assert sequence.num_committed <= sequence.num_computed, "uncomputed tokens were committed"
        _check_pages(sequence, pool)
        end = sequence.num_tokens + sequence.num_pending
        assert sequence.num_computed < end, "a running sequence has nothing to compute"
    assert len(scheduler.open_steps) <= max(2, scheduler.depth), "too many steps are open"
    if scheduler.depth > 1:
        sampling_sequences: set[Sequence] = set()
        for step in scheduler.open_steps:
            for chunk in step.chunks:
                if not chunk.sequence.is_finished:
                    assert chunk.sequence not in sampling_sequences, (
                        "a sequence is in an open step behind one that draws for it"
                    )
                    if chunk.is_last:
                        sampling_sequences.add(chunk.sequence)
    assert not pool.offloads, "evicted blocks are in no step"
    holds = [[source] for step in scheduler.open_steps for source, _ in step.held_blocks]
    if scheduler.stored is not None:
        holds.append(scheduler.stored.held_blocks)
    if scheduler.reserved is not None:
        holds.append(scheduler.reserved.held_blocks)
    pool.check_invariants([*(sequence.held_blocks for sequence in scheduler.running), *holds])
    if pool.host_pool is not None:
        returned = [step.returned_slots for step in scheduler.open_steps]
        swapped = [slots for sequence in scheduler.waiting for slots in sequence.host_slots]
        pool.host_pool.check_invariants([*swapped, *returned])
    _check_writers(scheduler)


def _check_pages(sequence: Sequence, pool: BlockPool) -> None:
    """Assert that a running sequence has every page that it may still need."""
    size = pool.block_size
    longest = max((len(ids) for ids, kind in zip(sequence.blocks, pool.kinds) if kind.follows_tokens), default=0)
    assert not pool.states or sequence.state_ends[0][-1] == sequence.num_computed, (
        "the last state is not after the computed tokens"
    )
    assert len(sequence.blocks) == len(sequence.first_pages) == len(pool.kinds), "a group is missing"
    for ids, first, kind in zip(sequence.blocks, sequence.first_pages, pool.kinds):
        if not kind.follows_tokens:
            assert len(ids) in (1, 2), "a sequence has a state and the page of the next"
            continue
        assert sequence.num_computed <= len(ids) * size, "computed tokens lie outside the sequence's blocks"
        assert len(ids) == longest or not kind.is_whole, "a group that keeps all tokens has not all pages"
        assert first <= kind.first_page(sequence.num_computed, size), "a page was given up early"
        assert not any(ids[:first]), "a page that was given up has a block"


def _check_writers(scheduler: Scheduler) -> None:
    """Assert that a block to which a sequence still writes is not shared."""
    block_size = scheduler.limits.block_size
    writers: dict[int, object] = {}
    for sequence in scheduler.running:
        for ids, kind in zip(sequence.blocks, scheduler.pool.kinds):
            written = [block_id for block_id in ids if not scheduler.pool.is_recorded(block_id)]
            for block_id in ids[sequence.num_computed // block_size :] if kind.follows_tokens else written:
                assert writers.setdefault(block_id, sequence) is sequence, f"two sequences write to block {block_id}"
    for sequence in scheduler.running:
        for block_id in sequence.held_blocks:
            assert writers.get(block_id, sequence) is sequence, f"block {block_id} is read and written by two"
