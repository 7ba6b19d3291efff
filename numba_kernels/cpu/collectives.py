"""Collectives of ranks that are processes of one machine: kernels over memory that all of them map.

The memory, in cache lines of 64 bytes, for R ranks:

| lines | contents |
|---|---|
| 0 | 0, or 1 + the rank that has given up; of several such memories the first one's counts |
| 1 … R | how many collectives each rank has reached |
| then `DESCRIBED` times R, by turns | each rank's collective, and the place in the model that called it |

and two slots a rank, by turns, for a collective's data. Such a collective is three launches: `publish` copies this
rank's numbers to its slot, `meet` posts that and waits until all have, and a third reads the slots. A rank that has met
the others has read the slots of the collective before, so that two slots are enough. Numbers are added in the order of
ranks, on every rank. As all kernels do these run in recordings; in memory of their own they count, in words of 8
bytes: the collectives that this rank has reached, those compared with all others', those with data, and the one that
differed from another rank's.

The end of a step carries no data. There `meet` does not wait: the rank goes on, and compares later. Only a rank that is
`MOST_AHEAD` collectives ahead of another waits, until that has caught up.
"""

from __future__ import annotations

import functools

import llvmlite.ir as ir
from numba import carray, njit, types
from numba.core import cgutils

from numba_kernels.closure_cache import name_by_content
from numba_kernels.cpu.intrinsics import atomic
from numba_kernels.cpu.intrinsics.emitted import emitted
from numba_kernels.cpu.running.launch import Fields, Kernel, copy_bytes, float32_at, int64_at

LINE_BYTES = 64
HAS_ABORTED = 1
DIFFER = 2
"""Statuses of `meet`: a rank has given up, or ranks called different collectives."""

CHUNK_BYTES = 1 << 15  # a work item's
MOST_AHEAD = 31
DESCRIBED = 2 * MOST_AHEAD + 2
"""A rank that has reached collective n knows that all have reached n - 1 - MOST_AHEAD, and so have compared all before
n - DESCRIBED + 1; the description of n takes that one's place."""
POSTED, COMPARED, CARRIED, DIFFERENT = range(4)
"""The fields of a rank's own words."""
SPINS = 2_000  # looks before the processor is left to others
YIELDS = 2_000  # times that it is left before the thread sleeps for a moment
_NAP_US = 50
_LONG_NAP_US = 1000  # of one that is far ahead

PUBLISH = Fields("*shared *counter *source slots slot_bytes rank ranks num_bytes")
MEET = Fields("*shared *counter *flag rank ranks description place spins yields waits")
ADD = Fields("*shared *counter *target slots slot_bytes ranks num_bytes")
GATHER = Fields("*shared *counter *target slots slot_bytes ranks first_byte most_bytes share_bytes row_bytes")


def header_bytes(num_ranks: int) -> int:
    """Bytes before the slots."""
    return (1 + (1 + DESCRIBED) * num_ranks) * LINE_BYTES


def _called(name, num_arguments):
    """An intrinsic that calls a function of the C library, whose argument, if it has one, is an int."""

    @emitted(types.void, types.intp)
    def call(builder, argument):
        int32 = ir.IntType(32)
        kind = ir.FunctionType(int32, [int32] * num_arguments)
        values = [builder.trunc(argument, int32)] * num_arguments
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)

    return call


_sched_yield = _called("sched_yield", 0)
_usleep = _called("usleep", 1)


@njit(nogil=True)
def wait_a_moment(looks, spins=SPINS, yields=YIELDS, nap_us=_NAP_US):
    """The back-off of a waiter that has polled so often, before its next poll."""
    if looks < spins:
        atomic.pause()
    elif looks < spins + yields:
        _sched_yield(0)
    else:
        _usleep(nap_us)


@njit(nogil=True)
def _slot(a, number, rank):
    """The address of a rank's slot for a collective, the number-th with data."""
    return a.shared + a.slots + ((number & 1) * a.ranks + rank) * a.slot_bytes


def description_at(num_ranks: int, rank: int, collective: int) -> int:
    """The offset in the memory of the two words that describe a rank's collective, in bytes."""
    return (1 + num_ranks + collective % DESCRIBED * num_ranks + rank) * LINE_BYTES


_description_at = njit(nogil=True)(description_at)


@functools.cache
def publish_kernel() -> Kernel:
    """Copies this rank's bytes to its slot; a work item is `CHUNK_BYTES`."""

    def publish(arguments, work_item):
        a = carray(arguments, 1)[0]
        target = _slot(a, int64_at(a.counter, 4)[CARRIED] + 1, a.rank)
        first = work_item * CHUNK_BYTES
        count = min(CHUNK_BYTES, a.num_bytes - first)
        copy_bytes(target + first, a.source + first, count)

    return Kernel(publish, PUBLISH)


@functools.cache
def meet_kernel() -> Kernel:
    """Posts this rank's collective, and compares it with the others'; one work item. With ``waits`` it waits for all
    ranks; without, it compares those posted. It polls ``spins`` times at once and ``yields`` times after yielding the
    processor, then from time to time."""

    @njit(nogil=True)
    @name_by_content
    def wait_for(shared, flag, line, count, spins, yields, nap_us):
        """Whether the rank has come; False if one has given up."""
        looks = 0
        while atomic.load(shared + line * LINE_BYTES) < count:
            if atomic.load(flag) != 0:
                return False
            looks += 1
            wait_a_moment(looks, spins, yields, nap_us)
        return True

    @njit(nogil=True)
    @name_by_content
    def has_come(a, count):
        """Whether all ranks have come to a collective."""
        for rank in range(a.ranks):  # noqa: SIM110  Numba lacks all()
            if atomic.load(a.shared + (1 + rank) * LINE_BYTES) < count:
                return False
        return True

    @njit(nogil=True)
    @name_by_content
    def described(a, rank, count):
        """A rank's collective, and its place."""
        return int64_at(a.shared + _description_at(a.ranks, rank, count), 2)

    def meet(arguments, work_item):
        a = carray(arguments, 1)[0]
        own = int64_at(a.counter, 4)
        count = own[POSTED] + 1
        mine = described(a, a.rank, count)
        mine[0], mine[1] = a.description, a.place
        atomic.store(a.shared + (1 + a.rank) * LINE_BYTES, count)
        own[POSTED] = count
        own[CARRIED] += a.waits
        awaited, nap_us = (count, _NAP_US) if a.waits else (0, _LONG_NAP_US)
        while own[COMPARED] < count:
            number = own[COMPARED] + 1
            if number > awaited and not has_come(a, number):
                if number > count - MOST_AHEAD:
                    return
                awaited = count - MOST_AHEAD // 2
            own[DIFFERENT] = number
            for rank in range(a.ranks):
                if not wait_for(a.shared, a.flag, 1 + rank, number, a.spins, a.yields, nap_us):
                    a.status = HAS_ABORTED
                    return
                if described(a, rank, number)[0] != described(a, a.rank, number)[0]:
                    a.status = DIFFER
                    return
            own[COMPARED] = number

    return Kernel(meet, MEET)


@functools.cache
def add_kernel() -> Kernel:
    """The sum of all ranks' float32, of two ranks or more; a work item is `CHUNK_BYTES` of it."""

    def add(arguments, work_item):
        a = carray(arguments, 1)[0]
        number = int64_at(a.counter, 4)[CARRIED]
        first = work_item * CHUNK_BYTES
        size = min(CHUNK_BYTES, a.num_bytes - first) // 4
        target = float32_at(a.target + first, size)
        summed, added = float32_at(_slot(a, number, 0) + first, size), float32_at(_slot(a, number, 1) + first, size)
        for i in range(size):
            target[i] = summed[i] + added[i]
        for rank in range(2, a.ranks):
            added = float32_at(_slot(a, number, rank) + first, size)
            for i in range(size):
                target[i] += added[i]

    return Kernel(add, ADD)


@functools.cache
def gather_kernel() -> Kernel:
    """Rows of ``row_bytes``, of which each rank has ``share_bytes``, and the last one the rest; a work item is a row.

    The slots hold at most ``most_bytes`` of each share, from ``first_byte`` on.
    """

    def gather(arguments, work_item):
        a = carray(arguments, 1)[0]
        number = int64_at(a.counter, 4)[CARRIED]
        for rank in range(a.ranks):
            has = min(a.share_bytes, a.row_bytes - rank * a.share_bytes) - a.first_byte
            size = max(0, min(has, a.most_bytes))
            source = _slot(a, number, rank) + work_item * size
            target = a.target + work_item * a.row_bytes + rank * a.share_bytes + a.first_byte
            copy_bytes(target, source, size)

    return Kernel(gather, GATHER)
