"""The sixteen named barriers of a block: bar and barrier with sync, arrive and red, thread counts, exited warps.

A warp arrives as a whole, once all its live lanes have; it then counts for 32 threads. A barrier without a thread count
waits for every warp that has not exited. Its generation rises when it completes; a waiting lane keeps the generation
that it came in (`Warp.tokens`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from runtime.emulator.async_copies.proxy import barrier_passed
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import DONE, FAILED, RETRY
from runtime.emulator.memory.pointers import address_of, fill_bytes, popcount, trailing_zeros
from runtime.emulator.races.vector_clocks import barrier_key, on_barrier, release
from runtime.emulator.records import Long, Longs, Record
from runtime.emulator.translation.operations import operation

NUM_BARRIERS = 16


class Barrier(Record):
    """One of a block's barriers."""

    generation = Long()
    expected = Long()  # threads; 0 for all of the block; -1 before the first arrival
    arrived = Long()  # threads
    red_count, red_and, red_or = Long(), Long(), Long()  # of the generation that is gathering
    results = Longs(6)  # count, and, or of the generation before, for even generations; then for odd ones
    waiting = Long()  # mask of the warps that wait, in their block's numbers
    lanes = Longs(32)  # of each warp, the lanes that have arrived


BARRIERS_BYTES = NUM_BARRIERS * Barrier.size_bytes


@njit
def reset_barriers(block):
    """The initial state of all sixteen."""
    fill_bytes(address_of(block.barriers), 0, BARRIERS_BYTES)
    for number in range(NUM_BARRIERS):
        block.barriers[number].expected = -1
        block.barriers[number].red_and = 1


@njit
def _complete_if_full(block, number):
    """Ends the barrier's generation when all expected threads have arrived."""
    barrier = block.barriers[number]
    expected = barrier.expected
    if expected < 0:
        return
    if expected > 0:
        if barrier.arrived < expected:
            return
    else:
        for index in range(block.num_warps):
            if block.warps[index].live & ~barrier.lanes[index]:
                return
    place = 3 * (barrier.generation & 1)
    barrier.results[place] = barrier.red_count
    barrier.results[place + 1] = barrier.red_and
    barrier.results[place + 2] = barrier.red_or
    on_barrier(block.warps, number, barrier.waiting)
    barrier_passed(block, barrier.waiting)
    barrier.waiting = 0
    barrier.generation += 1
    barrier.expected = -1
    barrier.arrived = 0
    barrier.red_count = 0
    barrier.red_and = 1
    barrier.red_or = 0
    for index in range(block.num_warps):
        barrier.lanes[index] = 0
    block.progress += 1


@njit
def settle_barriers(block):
    """After lanes of the block have exited: completes barriers that waited only for them."""
    for number in range(NUM_BARRIERS):
        if block.barriers[number].expected == 0:
            _complete_if_full(block, number)


@njit
def _arrive(warp, number, lanes, expected):
    block, index = warp.block, warp.index
    barrier = block.barriers[number]
    barrier.expected = expected
    arrived = barrier.lanes[index] | lanes
    barrier.lanes[index] = arrived
    if warp.live & ~arrived == 0:
        barrier.arrived += 32
        _complete_if_full(block, number)
        if barrier.expected > 0:
            barrier.lanes[index] = 0  # it may arrive again before the others


@njit
def _is_usable(warp, mask, site, number, threads):
    """Whether there is such a barrier; else after a fault: a bad number, a bad count, not the count of those before."""
    block, lane = warp.block, trailing_zeros(mask)
    limit = block.num_warps * 32
    if number < 0 or number >= NUM_BARRIERS:
        report(warp, FaultKind.BARRIER_NUMBER, site, lane, 0, number, 0, 0, 0)
        return False
    known = block.barriers[number].expected
    if threads < 0 or threads % 32 != 0 or threads > limit or (known >= 0 and known != threads):
        report(warp, FaultKind.BARRIER_COUNT, site, lane, 0, number, threads, limit, 0)
        return False
    return True


@operation("barrier_sync", "ppl")
def barrier_sync(warp, mask, site, numbers, counts, has_count):
    """bar.sync: DONE once the barrier's generation, in which these lanes arrived, has ended."""
    return _sync(warp, mask, site, numbers, counts, has_count, 0, False)


@njit
def _sync(warp, mask, site, numbers, counts, has_count, predicate, is_red):
    lanes = mask
    first = trailing_zeros(lanes)
    number = types.int64(numbers[first])
    threads = types.int64(counts[first]) if has_count else 0
    if has_count and threads == 0:
        threads = -1
    tokens = warp.tokens
    block = warp.block
    new = 0
    for lane in range(32):
        if (lanes >> lane) & 1 and tokens[lane] == 0:
            new |= 1 << lane
    if new:
        if not _is_usable(warp, mask, site, number, threads):
            return FAILED
        barrier = block.barriers[number]
        barrier.waiting |= 1 << warp.index
        for lane in range(32):
            if (new >> lane) & 1:
                tokens[lane] = barrier.generation + 1
        if is_red:
            held = new & predicate
            barrier.red_count += popcount(held)
            if held != new:
                barrier.red_and = 0
            if held != 0:
                barrier.red_or = 1
        _arrive(warp, number, new, threads)
    barrier = block.barriers[number]
    if tokens[first] > barrier.generation:
        return RETRY
    if not is_red:
        for lane in range(32):
            if (lanes >> lane) & 1:
                tokens[lane] = 0
    return DONE


@operation("barrier_arrive", "ppl")
def barrier_arrive(warp, mask, site, numbers, counts, has_count):
    """bar.arrive: counts the lanes and goes on."""
    first = trailing_zeros(mask)
    number, threads = types.int64(numbers[first]), types.int64(counts[first])
    if not _is_usable(warp, mask, site, number, threads if threads else -1):
        return FAILED
    release(warp, barrier_key(address_of(warp.block), number), 1)
    _arrive(warp, number, mask, threads)
    return DONE


@operation("barrier_red", "pplllp")
def barrier_red(warp, mask, site, numbers, counts, has_count, predicate, kind, result):
    """bar.red: as bar.sync, with a result over all threads: kind 0 popc (into a slot), 1 and, 2 or (lane bits)."""
    state = _sync(warp, mask, site, numbers, counts, has_count, predicate, True)
    if state != DONE:
        return state
    lanes = mask
    first = trailing_zeros(lanes)
    tokens = warp.tokens
    block = warp.block
    barrier = block.barriers[types.int64(numbers[first])]
    value = barrier.results[3 * ((tokens[first] - 1) & 1) + kind]
    if kind == 0:
        for lane in range(32):
            if (lanes >> lane) & 1:
                result[lane] = value
    else:
        result[0] = lanes if value else 0
    for lane in range(32):
        if (lanes >> lane) & 1:
            tokens[lane] = 0
    return DONE


@operation("lanes_exited", "")
def lanes_exited(warp, mask, site):
    """Some lanes of a warp ended: the others may have arrived as a whole now."""
    block = warp.block
    index = warp.index
    live = warp.live
    for number in range(NUM_BARRIERS):
        barrier = block.barriers[number]
        arrived = barrier.lanes[index]
        if barrier.expected >= 0 and live != 0 and arrived & mask == 0 and arrived != 0 and live & ~arrived == 0:
            barrier.arrived += 32
            _complete_if_full(block, number)
    return DONE
