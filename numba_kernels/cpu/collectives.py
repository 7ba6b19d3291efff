"""What ranks that are processes of one machine say to each other: kernels over memory that all of them map.

The memory, in cache lines of 64 bytes, for R ranks:

| lines | what |
|---|---|
| 0 | 0, or 1 + the rank that has given up; where there are several such memories, that of the first counts |
| 1 … R | how many collectives each rank has met the others at |
| R + 1 … 3 R | twice, by turns: what each rank's collective is, and the place in the model that called it |

and two slots a rank, by turns, for what a collective carries. A collective is three launches: `publish` copies this
rank's numbers to its slot, `meet` says so and waits until all have, and a third reads the slots. Who has met the others
at collective n has read the slots of n - 1, so that two slots are enough. Numbers are added in the order of ranks, on
every rank. As all kernels do these run in recordings: which collective it is they count in memory of their own.
"""

from __future__ import annotations

import functools

import llvmlite.ir as ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from numba_kernels.closure_cache import name_by_content
from numba_kernels.cpu.intrinsics import atomic
from numba_kernels.cpu.running.launch import Fields, Kernel, float32_at, int8_at, int64_at

LINE_BYTES = 64
HAS_ABORTED = 1
DIFFER = 2
"""What `meet` sets its status to: a rank has given up, or ranks called different collectives."""

CHUNK_BYTES = 1 << 15  # a ticket's
SPINS = 2_000  # looks before the processor is left to others
YIELDS = 2_000  # times that it is left before the thread sleeps for a moment
_NAP_US = 50

PUBLISH = Fields("*shared *counter *source slots slot_bytes rank ranks num_bytes")
MEET = Fields("*shared *counter *flag rank ranks description place spins yields")
ADD = Fields("*shared *counter *target slots slot_bytes ranks num_bytes")
GATHER = Fields("*shared *counter *target slots slot_bytes ranks first_byte most_bytes share_bytes row_bytes")


def header_bytes(num_ranks: int) -> int:
    """Bytes in front of the slots."""
    return (1 + 3 * num_ranks) * LINE_BYTES


def _called(name, num_arguments):
    """An intrinsic that calls a function of the C library, whose argument, if it has one, is an int."""

    @intrinsic
    def call(typingctx, argument):
        def codegen(context, builder, signature, args):
            int32 = ir.IntType(32)
            kind = ir.FunctionType(int32, [int32] * num_arguments)
            values = [builder.trunc(args[0], int32)] * num_arguments
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)
            return context.get_dummy_value()

        return types.void(types.intp), codegen

    return call


_sched_yield = _called("sched_yield", 0)
_usleep = _called("usleep", 1)


@njit(nogil=True)
def wait_a_moment(looks, spins=SPINS, yields=YIELDS):
    """What somebody does who has looked so often, before the next look."""
    if looks < spins:
        atomic.pause()
    elif looks < spins + yields:
        _sched_yield(0)
    else:
        _usleep(_NAP_US)


@njit(nogil=True)
def _slot(a, counter, rank):
    """Where a rank's slot of a collective lies."""
    return a.shared + a.slots + ((counter & 1) * a.ranks + rank) * a.slot_bytes


@functools.cache
def publish_kernel() -> Kernel:
    """Copies this rank's bytes to its slot; a ticket is `CHUNK_BYTES`."""

    def publish(arguments, ticket):
        a = carray(arguments, 1)[0]
        target = _slot(a, int64_at(a.counter, 1)[0] + 1, a.rank)
        first = ticket * CHUNK_BYTES
        count = min(CHUNK_BYTES, a.num_bytes - first)
        int8_at(target + first, count)[:] = int8_at(a.source + first, count)

    return Kernel(publish, PUBLISH)


@functools.cache
def meet_kernel() -> Kernel:
    """Says what this rank's collective is, waits for the others' and compares; one ticket. It looks `spins` times at
    once and `yields` times when others have had the processor, then from time to time."""

    @njit(nogil=True)
    @name_by_content
    def wait_for(shared, flag, line, count, spins, yields):
        """Whether the rank has come; no: one has given up."""
        looks = 0
        while atomic.load(shared + line * LINE_BYTES) < count:
            if atomic.load(flag) != 0:
                return False
            looks += 1
            wait_a_moment(looks, spins, yields)
        return True

    def meet(arguments, ticket):
        a = carray(arguments, 1)[0]
        counter = int64_at(a.counter, 1)
        count = counter[0] + 1
        described = a.shared + (1 + a.ranks + (count & 1) * a.ranks) * LINE_BYTES
        mine = int64_at(described + a.rank * LINE_BYTES, 2)
        mine[0], mine[1] = a.description, a.place
        atomic.store(a.shared + (1 + a.rank) * LINE_BYTES, count)
        counter[0] = count
        for rank in range(a.ranks):
            if not wait_for(a.shared, a.flag, 1 + rank, count, a.spins, a.yields):
                a.status = HAS_ABORTED
                return
            if int64_at(described + rank * LINE_BYTES, 2)[0] != a.description:
                a.status = DIFFER
                return

    return Kernel(meet, MEET)


@functools.cache
def add_kernel() -> Kernel:
    """The sum of all ranks' float32; a ticket is `CHUNK_BYTES` of it."""

    def add(arguments, ticket):
        a = carray(arguments, 1)[0]
        count = int64_at(a.counter, 1)[0]
        first = ticket * CHUNK_BYTES
        size = min(CHUNK_BYTES, a.num_bytes - first) // 4
        target = float32_at(a.target + first, size)
        target[:] = float32_at(_slot(a, count, 0) + first, size)
        for rank in range(1, a.ranks):
            added = float32_at(_slot(a, count, rank) + first, size)
            for i in range(size):
                target[i] += added[i]

    return Kernel(add, ADD)


@functools.cache
def gather_kernel() -> Kernel:
    """Rows of ``row_bytes``, of which each rank has ``share_bytes``, and the last one the rest; a ticket is a row.

    The slots hold at most ``most_bytes`` of each share, from ``first_byte`` on.
    """

    def gather(arguments, ticket):
        a = carray(arguments, 1)[0]
        count = int64_at(a.counter, 1)[0]
        for rank in range(a.ranks):
            has = min(a.share_bytes, a.row_bytes - rank * a.share_bytes) - a.first_byte
            size = max(0, min(has, a.most_bytes))
            source = _slot(a, count, rank) + ticket * size
            target = a.target + ticket * a.row_bytes + rank * a.share_bytes + a.first_byte
            int8_at(target, size)[:] = int8_at(source, size)

    return Kernel(gather, GATHER)
