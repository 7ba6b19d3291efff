"""The sixteen named barriers of a block: bar and barrier with sync, arrive and red, thread counts, exited warps.

A warp arrives as a whole, once all its live lanes have; it then counts for 32 threads. A barrier without a thread count
waits for every warp that has not exited. Its generation rises when it completes; a waiting lane keeps the generation
that it came in (WARP_TOKENS).
"""

from __future__ import annotations

from typing import Any

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at
from runtime.emulator.async_copies.proxy import barrier_passed
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.warp_state import (
    BLOCK_BARRIERS,
    BLOCK_NUM_WARPS,
    BLOCK_PROGRESS,
    BLOCK_WARPS,
    DONE,
    FAILED,
    RETRY,
    WARP_BLOCK,
    WARP_FIELDS,
    WARP_INDEX,
    WARP_LIVE,
    WARP_TOKENS,
)
from runtime.emulator.memory.pointers import address_of, popcount, trailing_zeros
from runtime.emulator.races.clocks import on_arrive, on_barrier
from runtime.emulator.translation.operations import operation

Warp = Any

NUM_BARRIERS = 16
# One barrier: an array of int64.
GENERATION = 0
EXPECTED = 1  # threads; 0 for all of the block; -1 before the first arrival
ARRIVED = 2  # threads
RED_COUNT, RED_AND, RED_OR = 3, 4, 5  # of the generation that is gathering
RESULT = 6  # count, and, or of the generation before, for even generations; then for odd ones
WAITING = 12  # mask of the warps that wait, in their block's numbers
LANES = 13  # for each warp of up to 32, the lanes that have arrived
BARRIER_FIELDS = LANES + 32
BARRIERS_BYTES = NUM_BARRIERS * BARRIER_FIELDS * 8

SYNC, ARRIVE = 0, 1


@njit
def reset_barriers(address):
    """The initial state of all sixteen."""
    for number in range(NUM_BARRIERS):
        barrier = i64_at(address + number * BARRIER_FIELDS * 8)
        for field in range(BARRIER_FIELDS):
            barrier[field] = 0
        barrier[EXPECTED] = -1
        barrier[RED_AND] = 1


@njit
def _live(block, index):
    return i64_at(block[BLOCK_WARPS] + index * WARP_FIELDS * 8)[WARP_LIVE]


@njit
def _complete_if_full(block, barrier):
    """Ends the barrier's generation when all expected threads have arrived."""
    expected = barrier[EXPECTED]
    if expected < 0:
        return
    if expected > 0:
        if barrier[ARRIVED] < expected:
            return
    else:
        for index in range(block[BLOCK_NUM_WARPS]):
            if _live(block, index) & ~barrier[LANES + index]:
                return
    place = RESULT + 3 * (barrier[GENERATION] & 1)
    barrier[place] = barrier[RED_COUNT]
    barrier[place + 1] = barrier[RED_AND]
    barrier[place + 2] = barrier[RED_OR]
    key = (address_of(barrier) - block[BLOCK_BARRIERS]) // (BARRIER_FIELDS * 8)
    on_barrier(block, key, barrier[WAITING])
    barrier_passed(block, barrier[WAITING])
    barrier[WAITING] = 0
    barrier[GENERATION] += 1
    barrier[EXPECTED] = -1
    barrier[ARRIVED] = 0
    barrier[RED_COUNT] = 0
    barrier[RED_AND] = 1
    barrier[RED_OR] = 0
    for index in range(block[BLOCK_NUM_WARPS]):
        barrier[LANES + index] = 0
    block[BLOCK_PROGRESS] += 1


@njit
def settle_barriers(block):
    """After lanes of the block have exited: completes barriers that waited only for them."""
    for number in range(NUM_BARRIERS):
        barrier = i64_at(block[BLOCK_BARRIERS] + number * BARRIER_FIELDS * 8)
        if barrier[EXPECTED] == 0:
            _complete_if_full(block, barrier)


@njit
def _arrive(warp, block, barrier, lanes, expected):
    index = warp[WARP_INDEX]
    barrier[EXPECTED] = expected
    arrived = barrier[LANES + index] | lanes
    barrier[LANES + index] = arrived
    if warp[WARP_LIVE] & ~arrived == 0:
        barrier[ARRIVED] += 32
        _complete_if_full(block, barrier)
        if barrier[EXPECTED] > 0:
            barrier[LANES + index] = 0  # it may arrive again before the others


@njit
def _find(warp, mask, site, number, threads):
    """The barrier's address; 0 after a fault: a bad number, a bad count, or not the count of those before."""
    block = i64_at(warp[WARP_BLOCK])
    lane = trailing_zeros(int(mask))
    limit = block[BLOCK_NUM_WARPS] * 32
    if number < 0 or number >= NUM_BARRIERS:
        report(warp, FaultKind.BARRIER_NUMBER, site, lane, 0, number, 0, 0, 0)
        return 0
    address = block[BLOCK_BARRIERS] + number * BARRIER_FIELDS * 8
    if threads != 0 and (threads < 0 or threads % 32 != 0 or threads > limit):
        report(warp, FaultKind.BARRIER_COUNT, site, lane, 0, number, threads, limit, 0)
        return 0
    known = i64_at(address)[EXPECTED]
    if known >= 0 and known != threads:
        report(warp, FaultKind.BARRIER_COUNT, site, lane, 0, number, threads, limit, 0)
        return 0
    return address


@operation("barrier_sync", "ppi")
def barrier_sync(warp: Warp, mask: int, site: int, numbers: Any, counts: Any, has_count: int) -> int:
    """bar.sync: DONE once the barrier's generation, in which these lanes arrived, has ended."""
    return _sync(warp, mask, site, numbers, counts, has_count, 0, False)


@njit
def _sync(warp, mask, site, numbers, counts, has_count, predicate, is_red):
    lanes = int(mask)
    first = trailing_zeros(lanes)
    number = int(numbers[first])
    threads = int(counts[first]) if has_count else 0
    if has_count and threads == 0:
        threads = -1
    tokens = i64_at(warp[WARP_TOKENS])
    block = i64_at(warp[WARP_BLOCK])
    new = 0
    for lane in range(32):
        if (lanes >> lane) & 1 and tokens[lane] == 0:
            new |= 1 << lane
    if new:
        address = _find(warp, mask, site, number, threads)
        if address == 0:
            return FAILED
        barrier = i64_at(address)
        barrier[WAITING] |= 1 << warp[WARP_INDEX]
        for lane in range(32):
            if (new >> lane) & 1:
                tokens[lane] = barrier[GENERATION] + 1
        if is_red:
            held = new & int(predicate)
            barrier[RED_COUNT] += popcount(held)
            if held != new:
                barrier[RED_AND] = 0
            if held != 0:
                barrier[RED_OR] = 1
        _arrive(warp, block, barrier, new, threads)
    barrier = i64_at(block[BLOCK_BARRIERS] + number * BARRIER_FIELDS * 8)
    if tokens[first] > barrier[GENERATION]:
        return RETRY
    if not is_red:
        for lane in range(32):
            if (lanes >> lane) & 1:
                tokens[lane] = 0
    return DONE


@operation("barrier_arrive", "ppi")
def barrier_arrive(warp: Warp, mask: int, site: int, numbers: Any, counts: Any, has_count: int) -> int:
    """bar.arrive: counts the lanes and goes on."""
    first = trailing_zeros(int(mask))
    threads = int(counts[first]) if has_count else -1
    address = _find(warp, mask, site, int(numbers[first]), threads if threads else -1)
    if address == 0:
        return FAILED
    block = i64_at(warp[WARP_BLOCK])
    on_arrive(warp, block, int(numbers[first]))
    _arrive(warp, block, i64_at(address), int(mask), threads)
    return DONE


@operation("barrier_red", "ppiiip")
def barrier_red(
    warp: Warp, mask: int, site: int, numbers: Any, counts: Any, has_count: int, predicate: int, kind: int, result: Any
) -> int:
    """bar.red: as bar.sync, with a result over all threads: kind 0 popc (into a slot), 1 and, 2 or (lane bits)."""
    state = _sync(warp, mask, site, numbers, counts, has_count, predicate, True)
    if state != DONE:
        return state
    lanes = int(mask)
    first = trailing_zeros(lanes)
    tokens = i64_at(warp[WARP_TOKENS])
    block = i64_at(warp[WARP_BLOCK])
    barrier = i64_at(block[BLOCK_BARRIERS] + int(numbers[first]) * BARRIER_FIELDS * 8)
    value = barrier[RESULT + 3 * ((tokens[first] - 1) & 1) + kind]
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
def lanes_exited(warp: Warp, mask: int, site: int) -> int:
    """Some lanes of a warp ended: the others may have arrived as a whole now."""
    block = i64_at(warp[WARP_BLOCK])
    index = warp[WARP_INDEX]
    live = warp[WARP_LIVE]
    for number in range(NUM_BARRIERS):
        barrier = i64_at(block[BLOCK_BARRIERS] + number * BARRIER_FIELDS * 8)
        arrived = barrier[LANES + index]
        if barrier[EXPECTED] >= 0 and live != 0 and arrived & int(mask) == 0 and arrived != 0 and live & ~arrived == 0:
            barrier[ARRIVED] += 32
            _complete_if_full(block, barrier)
    return DONE
