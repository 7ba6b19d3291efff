"""What must hold of the scheduler's bookkeeping: all of it in tests, the cheapest part of it in every step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from runtime.engine.errors import InvariantError
from runtime.engine.scheduling.sequence import State
from runtime.engine.scheduling.step import Step

if TYPE_CHECKING:
    from runtime.engine.scheduling.scheduler import Scheduler

logger = logging.getLogger("xserv.engine")


def check_step(scheduler: Scheduler, step: Step) -> None:
    """Compare a planned step with the sequences' state: constant time for each chunk.

    Raises ``InvariantError``, and logs it: the engine must not go on with pages that may be another request's.
    """
    block_size, num_holders = scheduler.limits.block_size, scheduler.pool.num_holders
    copied = {source for each in scheduler.open_steps for source, _ in each.held_blocks}
    problem = ""
    for chunk in step.chunks:
        sequence = chunk.sequence
        end = chunk.start + chunk.num_tokens
        if sequence.row is None or end != sequence.num_computed or end > len(sequence.block_ids) * block_size:
            problem = (
                f"a chunk that ends at {end}, but {sequence.num_computed} computed tokens in "
                f"{len(sequence.block_ids)} blocks of {block_size}, row {sequence.row}"
            )
        else:
            block_id = sequence.block_ids[(end - 1) // block_size]
            if num_holders(block_id) != 1 and block_id not in copied:
                problem = f"to write to block {block_id}, which {num_holders(block_id)} hold"
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
        assert not sequence.block_ids, "a waiting sequence holds blocks"
        num_swapped = -(-sequence.num_computed // limits.block_size)
        assert len(sequence.host_slots) == num_swapped, "swapped blocks are miscounted"
    for sequence in scheduler.running:
        assert sequence.state is State.RUNNING
        assert not sequence.host_slots, "a running sequence holds host slots"
        assert sequence.num_committed <= sequence.num_computed, "uncomputed tokens were committed"
        capacity = len(sequence.block_ids) * limits.block_size
        assert sequence.num_computed <= capacity, "computed tokens lie outside the sequence's blocks"
        end = sequence.num_tokens + sequence.num_pending
        assert sequence.num_computed < end, "a running sequence has nothing to compute"
    assert len(scheduler.open_steps) <= 2, "too many steps are open"
    assert not pool.offloads, "evicted blocks are in no step"
    holds = [[source] for step in scheduler.open_steps for source, _ in step.held_blocks]
    pool.check_invariants([*(sequence.block_ids for sequence in scheduler.running), *holds])
    if pool.host_pool is not None:
        returned = [step.returned_slots for step in scheduler.open_steps]
        pool.host_pool.check_invariants([*(sequence.host_slots for sequence in scheduler.waiting), *returned])
    _check_writers(scheduler)


def _check_writers(scheduler: Scheduler) -> None:
    """Assert that no block into which a sequence still writes is another's, too."""
    block_size = scheduler.limits.block_size
    writers: dict[int, object] = {}
    for sequence in scheduler.running:
        for block_id in sequence.block_ids[sequence.num_computed // block_size :]:
            assert writers.setdefault(block_id, sequence) is sequence, f"two sequences write to block {block_id}"
    for sequence in scheduler.running:
        for block_id in sequence.block_ids:
            assert writers.get(block_id, sequence) is sequence, f"block {block_id} is read and written by two"
