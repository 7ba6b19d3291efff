"""The order between warps: the race checker's view of barriers, fences and atomics.

Entries to `vector_clocks.py` for all operations: cheap where races are not checked (warp[WARP_CLOCK] is 0), and small,
since the work is in functions that are compiled once and called by address. Also the layout of the race checker's data.

A strong write (an atomic, .relaxed, .release, .volatile) publishes the accesses covered by fences of its warp, and of
warps that it is ordered after, or all that its warp is ordered after if it is a .release; a strong read acquires those
published at its address, with or without a fence after it. So a missing release fence is found, a missing acquire fence
is not.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at
from runtime.emulator.execution.warp_state import BLOCK_LAUNCH, LAUNCH_GLOBAL_RACES, WARP_CLOCK
from runtime.emulator.memory.pointers import address_of

SCOPE_CTA, SCOPE_CLUSTER, SCOPE_GPU = 1, 2, 3

# --- one OS thread's data of a launch: int64 array at launch[LAUNCH_GLOBAL_RACES] ---
RACES_BASE = 0  # clocks up to here are of earlier launches
RACES_CLOCK = 1  # the highest clock given out on this thread
RACES_NEXT = 2  # memory for vectors, taken from here upwards
RACES_TABLE = 3  # address of the hash table of published vectors
RACES_TABLE_USED = 4
RACES_AGENTS = 5  # warps of the launch
RACES_WIDTH = 6  # warps of a cluster
RACES_SHIFT = 7  # log2 of the bytes a shadow entry stands for
RACES_GLOBAL_WRITES = 8  # address of uint64 for each granule of the arena
RACES_GLOBAL_READS = 9  # address of 2 uint64 for each granule of the arena
RACES_VERSION = 10  # counts changes of vectors over all warps
RACES_SHARED_GRANULES = 11
RACES_SCRATCH = 12  # address of a vector over a cluster
RACES_CALLS = 13  # addresses of the compiled entries: CALL_… are offsets from here
RACES_FIELDS = 24

# --- a block's data: int64 array at block[BLOCK_SHARED_RACES] ---
SHARED_WRITES = 0  # address of uint64 for each granule: epoch of the last write
SHARED_LATEST_READ = 1  # address of uint32 for each granule: the highest clock of a read
SHARED_READS = 2  # address of uint32[warps of the cluster, granules]: the clock of each warp's last read
SHARED_GRANULES = 3
SHARED_BASE = 4  # the clock at which the block began
SHARED_WARP_CLOCKS = 5  # address of the first warp's record
SHARED_FIELDS = 8

# --- what a warp keeps: int64 array at warp[WARP_CLOCK] ---
CLOCK_NOW = 0
CLOCK_FLOOR = 1  # everything of the cluster up to this clock is ordered before the warp
CLOCK_INDEX = 2  # of the warp in its cluster
CLOCK_VECTOR = 3  # address of uint32[3, stride]: the vector; covered by fences of any scope; of gpu scope
CLOCK_STRIDE = 4  # warps of the cluster, rounded up to 16
CLOCK_HAS_FENCE = 6  # bit 0: the second row is in use, bit 1: the third is
CLOCK_OTHERS = 7  # address of uint32[warps of the launch], or 0 before any order with other clusters
CLOCK_OTHERS_VERSION = 8
CLOCK_CLUSTER = 9  # the number of the cluster's first warp among all warps of the launch
CLOCK_RACES = 10  # address of the launch's array
CLOCK_OTHERS_MEMORY = 11  # CLOCK_OTHERS's memory when needed; kept from block to block
CLOCK_FIELDS = 16

# --- an entry of the hash table ---
ENTRY_KEY = 0
ENTRY_PENDING = 1  # rows as CLOCK_VECTOR's: arrived, phase not complete
ENTRY_COMPLETED = 2  # rows as CLOCK_VECTOR's: a waiter is ordered after them
ENTRY_LAUNCH = 3  # vector over all warps, published at gpu scope
ENTRY_CLUSTER = 4  # vector over a cluster, published at a smaller scope
ENTRY_CLUSTER_OWNER = 5  # CLOCK_CLUSTER of the cluster that ENTRY_CLUSTER is of
ENTRY_HAS_FENCE = 6  # CLOCK_HAS_FENCE of pending (bits 0 and 1) and completed (bits 2 and 3)
ENTRY_FIELDS = 8
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
    if warp[WARP_CLOCK] != 0:
        races = i64_at(i64_at(warp[WARP_CLOCK])[CLOCK_RACES])
        call_address(races[RACES_CALLS + CALL_ORDER], what, address_of(warp), key, scope, is_release)


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
    launch = i64_at(block[BLOCK_LAUNCH])
    if launch[LAUNCH_GLOBAL_RACES] != 0:
        races = i64_at(launch[LAUNCH_GLOBAL_RACES])
        call_address(races[RACES_CALLS + CALL_BLOCK], address_of(block), key, waiting)


@njit
def start_block(block):
    """Gives a block that begins, and its warps, their clocks. The cluster's rank 0 comes first."""
    _block(block, -1, 0)


@njit
def on_barrier(block, key, waiting):
    """Named barrier `key` is complete; `waiting` is the mask of the warps (by WARP_INDEX) that waited at it."""
    if waiting != 0:
        _block(block, key, waiting)
