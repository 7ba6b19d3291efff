"""The order between warps: the race checker's view of barriers, fences and atomics.

Entries to `vector_clocks.py` for all operations: cheap where races are not checked (warp.clock is 0), and small,
since the work is in functions that are compiled once and called by address. Also the layout of the race checker's data.

A strong write (an atomic, .relaxed, .release, .volatile) publishes the accesses covered by fences of its warp, and of
warps that it is ordered after, or all that its warp is ordered after if it is a .release; a strong read acquires those
published at its address, with or without a fence after it. So a missing release fence is found, a missing acquire fence
is not.
"""

from __future__ import annotations

from collections.abc import Iterable

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from numba_kernels.cache import njit
from runtime.emulator.memory.pointers import address_of
from runtime.emulator.records import Long, Longs, Record, To, at
from runtime.emulator.translation.ptx import TYPE_BYTES, Instruction

SCOPE_CTA, SCOPE_CLUSTER, SCOPE_GPU = 1, 2, 3


class Races(Record):
    """The checker's data of one OS thread of a launch."""

    base = Long()  # clocks up to here are of earlier launches
    clock = Long()  # the highest clock given out on this thread
    next = Long()  # memory for vectors, taken from here upwards
    table = To("Entry")  # hash table of published vectors
    table_used = Long()
    agents = Long()  # warps of the launch
    width = Long()  # warps of a cluster
    shift = Long()  # log2 of the bytes a shadow entry stands for
    global_writes = Long()  # address of uint64 for each granule of the arena
    global_reads = Long()  # address of 2 uint64 for each granule of the arena
    version = Long()  # counts changes of vectors over all warps
    shared_granules = Long()
    scratch = Long()  # address of a vector over a cluster
    calls = Longs(5)  # addresses of the compiled entries, by CALL_…


class SharedRaces(Record):
    """The checker's data of a block."""

    writes = Long()  # address of uint64 for each granule: epoch of the last write
    latest_read = Long()  # address of uint32 for each granule: the highest clock of a read
    reads = Long()  # address of uint32[warps of the cluster, granules]: the clock of each warp's last read
    granules = Long()
    base = Long()  # the clock at which the block began
    warp_clocks = Long()  # address of the first warp's record


class Clock(Record):
    """The checker's data of a warp; the vector follows the record."""

    now = Long()
    floor = Long()  # everything of the cluster up to this clock is ordered before the warp
    index = Long()  # of the warp in its cluster
    vector = Long()  # address of uint32[3, stride]: the vector; covered by fences of any scope; of gpu scope
    stride = Long()  # warps of the cluster, rounded up to 16
    has_fence = Long()  # bit 0: the second row is in use, bit 1: the third is
    others = Long()  # address of uint32[warps of the launch], or 0 before any order with other clusters
    others_version = Long()
    cluster = Long()  # the number of the cluster's first warp among all warps of the launch
    races = To("Races")
    others_memory = Long()  # memory for `others` when needed; kept from block to block


class Entry(Record):
    """An entry of the hash table: the vectors published under a key."""

    key = Long()
    pending = Long()  # rows as Clock.vector's: arrived, phase not complete
    completed = Long()  # rows as Clock.vector's: a waiter is ordered after them
    launch = Long()  # vector over all warps, published at gpu scope
    cluster = Long()  # vector over a cluster, published at a smaller scope
    cluster_owner = Long()  # Clock.cluster of the cluster that `cluster` is of
    has_fence = Long()  # Clock.has_fence of pending (bits 0 and 1) and completed (bits 2 and 3)


races_at, shared_races_at, clock_at, entry_at = at(Races), at(SharedRaces), at(Clock), at(Entry)
TABLE_ENTRIES = 16384
TABLE_LIMIT = 8192
"""Addresses of atomics beyond so many share one entry: then a race may be missed; none is invented."""
OVERFLOW_KEY = 1
FIND, CREATE, MUST_CREATE = 0, 1, 2

# --- the compiled entries; all take and give int64 ---
CALL_ORDER, CALL_BLOCK, CALL_LANE, CALL_RUN, CALL_WARP = range(5)
RELEASE, COMPLETE, ACQUIRE, WARP_BARRIER, FENCE, STRONG_WRITE, STRONG_READ = range(7)


@intrinsic
def call_address(typing_context, function, *arguments):
    """Calls a C function of int64 arguments by its address."""
    kinds = types.BaseTuple.from_types((types.int64,) * len(arguments))

    def generate(context, builder, signature, given):
        long = ir.IntType(64)
        parts = [builder.extract_value(given[1], index) for index in range(len(arguments))]
        kind = ir.FunctionType(long, [long] * len(parts))
        return builder.call(builder.inttoptr(given[0], kind.as_pointer()), parts)

    return types.int64(types.int64, kinds), generate


@njit
def _order(what, warp, key, scope, is_release):
    if warp.clock:
        races = warp.clock.races
        call_address(races.calls[CALL_ORDER], what, address_of(warp), key, scope, is_release)


@njit
def release(warp, key):
    """An arrival at the object `key` (such as the host address of an mbarrier), held back until `complete`."""
    _order(RELEASE, warp, key, 0, 1)


@njit
def arrive_relaxed(warp, key):
    """The same without a release: waiters see only accesses that the warp's fences have covered."""
    _order(RELEASE, warp, key, 0, 0)


@njit
def complete(warp, key):
    """The phase of `key` is complete: later acquirers are ordered after all arrivals."""
    _order(COMPLETE, warp, key, 0, 0)


@njit
def acquire(warp, key):
    """A wait on `key` has succeeded."""
    _order(ACQUIRE, warp, key, 0, 0)


@njit
def on_warp_barrier(warp):
    """bar.warp.sync: the others may read lanes' earlier writes."""
    _order(WARP_BARRIER, warp, 0, 0, 0)


@njit
def on_fence(warp, scope):
    """membar or fence (not of a proxy): later strong writes of the warp publish the accesses before it."""
    _order(FENCE, warp, 0, scope, 0)


@njit
def strong_write(warp, address, scope, is_release):
    """A strong write (an atomic, say) at host address `address`: publishes accesses that the warp's fences cover."""
    _order(STRONG_WRITE, warp, address, scope, 1 if is_release else 0)


@njit
def strong_read(warp, address, scope):
    """A strong read (an atomic, say) at host address `address`: orders the warp after accesses published there."""
    _order(STRONG_READ, warp, address, scope, 0)


@njit
def barrier_key(block_address, key):
    """Inside of the block's array, where no mbarrier can be; the array's own address stands for the block."""
    return block_address + 8 + key * 4


@njit
def on_arrive(warp, block, key):
    """A warp arrives at named barrier `key` of its block without waiting."""
    release(warp, barrier_key(address_of(block), key))


@njit
def _block(block, key, waiting):
    launch = block.launch
    if launch.races:
        races = launch.races
        call_address(races.calls[CALL_BLOCK], address_of(block), key, waiting)


@njit
def start_block(block):
    """Gives a block that begins, and its warps, their clocks. The cluster's rank 0 comes first."""
    _block(block, -1, 0)


@njit
def on_barrier(block, key, waiting):
    """Named barrier `key` is complete; `waiting` is the mask of the warps (by index) that waited at it."""
    if waiting != 0:
        _block(block, key, waiting)


IN_SHARED, IN_GLOBAL = 0, 1
LOAD, STORE, ATOMIC = range(3)
ACCESS_STRONG, ACCESS_NC, ACCESS_SAME = 1, 2, 4
"""Flags of one lane's access: it is strong; it is a .nc load; it writes what is there already."""


@njit
def lane_races(warp, site, place, block_address, size, lane, action, flags):
    """Checks one lane's access, of `action`, with ACCESS_… flags, at host address `place` (of the shared memory of
    a block, or of device memory where `block_address` is 0). Returns 1 with a fault reported, or 0."""
    races = warp.clock.races
    entry = races.calls[CALL_LANE]
    return call_address(entry, address_of(warp), site, place, block_address, size, lane, action, flags)


@njit
def run_is_fine(warp, first, block_address, size, is_store, lane, lane_bytes):
    """Whether a plain access of lanes from `lane` on to a contiguous range can be no race; then it has been noted."""
    races = warp.clock.races
    entry = races.calls[CALL_RUN]
    return call_address(entry, address_of(warp), first, block_address, size, is_store, lane, lane_bytes) != 0


@njit
def warp_is_fine(warp, mask, addresses, offset, start, limit, block_address, size, is_store):
    """The same of a whole warp's plain access, `size` bytes a lane: see `race_rules.warp_entry`."""
    races = warp.clock.races
    entry, shape = races.calls[CALL_WARP], size | (256 if is_store else 0)
    return (
        call_address(entry, address_of(warp), mask, address_of(addresses), offset, start, limit, block_address, shape)
        != 0
    )


def granule_shift(instructions: Iterable[Instruction]) -> int:
    """log2 of the bytes that a shadow entry stands for: the smallest access to shared or device memory, at most 4."""
    smallest = 4
    for instruction in instructions:
        parts = instruction.parts
        if parts[0] in ("ld", "ldu", "st", "atom", "red") and not {"param", "local", "const"} & set(parts):
            smallest = min(smallest, *(TYPE_BYTES[part] for part in parts if part in TYPE_BYTES))
    return smallest.bit_length() - 1
