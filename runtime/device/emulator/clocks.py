"""Who is ordered after whom: vector clocks of warps, for the race checker.

Every warp of a cluster has a clock and a vector: for each warp of its cluster the highest clock that it is ordered
after. Barriers join vectors; a release stores a vector under an address, an acquire joins what is stored there.
(Lamport's clocks and the happens-before of FastTrack, Flanagan and Freund, PLDI 2009, with warps as agents.)

Warps of other clusters are known by a second vector over all warps of the launch, which a warp gets when it first reads
what a strong operation of theirs published at gpu scope. A strong write (an atomic, .relaxed, .release, .volatile)
publishes what its warp knew at its last fence, or all it knows when it is a .release itself; a strong read takes over
what is published at its address, with or without a fence after it: a missing acquire fence is not found, a missing
release fence is.

Clocks start above everything that an earlier launch, or an earlier block in the same place, has left in the shadows, so
that nothing has to be cleared. Everything here returns at once when races are not checked (warp[WARP_CLOCK] is 0).
"""

from __future__ import annotations

from numba_kernels.cache import njit
from runtime.device.emulator.context import (
    BLOCK_CLUSTER,
    BLOCK_LAUNCH,
    BLOCK_NUM_WARPS,
    BLOCK_RANK,
    BLOCK_SHARED_RACES,
    BLOCK_WARPS,
    BLOCK_X,
    BLOCK_Y,
    BLOCK_Z,
    LAUNCH_CLUSTER_SIZE,
    LAUNCH_CLUSTER_X,
    LAUNCH_CLUSTER_Y,
    LAUNCH_CLUSTER_Z,
    LAUNCH_GLOBAL_RACES,
    LAUNCH_GRID_X,
    LAUNCH_GRID_Y,
    WARP_CLOCK,
    WARP_FIELDS,
)
from runtime.device.emulator.pointers import address_of, copy_bytes, fill_bytes, i64_at, popcount, u32_at

SCOPE_CTA, SCOPE_CLUSTER, SCOPE_GPU = 1, 2, 3

# --- what one OS thread keeps for a launch: int64 array at launch[LAUNCH_GLOBAL_RACES] ---
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
RACES_FIELDS = 16

# --- what a block keeps: int64 array at block[BLOCK_SHARED_RACES] ---
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
CLOCK_VECTOR = 3  # address of uint32[warps of the cluster]
CLOCK_FENCED = 4  # the vector at the last fence of any scope
CLOCK_FENCED_GPU = 5  # the vector at the last fence of gpu or system scope
CLOCK_HAS_FENCE = 6  # bit 0: CLOCK_FENCED holds something, bit 1: CLOCK_FENCED_GPU does
CLOCK_OTHERS = 7  # address of uint32[warps of the launch], or 0 while nothing is known of other clusters
CLOCK_OTHERS_VERSION = 8
CLOCK_CLUSTER = 9  # the number of the cluster's first warp among all warps of the launch
CLOCK_RACES = 10  # address of the launch's array
CLOCK_OTHERS_MEMORY = 11  # what CLOCK_OTHERS uses when it is needed; kept from block to block
CLOCK_FIELDS = 16

# --- an entry of the hash table ---
ENTRY_KEY = 0
ENTRY_PENDING = 1  # vector over a cluster: arrived, phase not complete
ENTRY_COMPLETED = 2  # vector over a cluster: what a waiter is ordered after
ENTRY_LAUNCH = 3  # vector over all warps, published at gpu scope
ENTRY_CLUSTER = 4  # vector over a cluster, published at a smaller scope
ENTRY_CLUSTER_OWNER = 5  # CLOCK_CLUSTER of the cluster that ENTRY_CLUSTER is of
ENTRY_FIELDS = 8
TABLE_ENTRIES = 16384
TABLE_LIMIT = 8192
"""Addresses of atomics beyond so many share one entry: a race may then be missed, but none is seen that is not there."""
_OVERFLOW_KEY = 1
FIND, CREATE, MUST_CREATE = 0, 1, 2


@njit
def take(races, size_bytes):  # type: ignore[no-untyped-def]
    """Fresh zeroed memory, 64-byte aligned, that stays until the launch ends."""
    address = races[RACES_NEXT]
    races[RACES_NEXT] = address + (size_bytes + 63) // 64 * 64
    return address


@njit
def entry_of(races, key, create):  # type: ignore[no-untyped-def]
    """The address of the table's entry for a key, or 0 where there is none and `create` is FIND."""
    slot = ((key >> 2) * 0x9E3779B1 >> 7) & (TABLE_ENTRIES - 1)
    while True:
        address = races[RACES_TABLE] + slot * (ENTRY_FIELDS * 8)
        entry = i64_at(address)
        if entry[ENTRY_KEY] == key:
            return address
        if entry[ENTRY_KEY] == 0:
            break
        slot = (slot + 1) & (TABLE_ENTRIES - 1)
    if races[RACES_TABLE_USED] >= TABLE_LIMIT and create != MUST_CREATE:  # the last place, outside of the hashed ones, is everybody's
        address = races[RACES_TABLE] + TABLE_ENTRIES * (ENTRY_FIELDS * 8)
        i64_at(address)[ENTRY_KEY] = _OVERFLOW_KEY
        return address
    if create == FIND:
        return address * 0
    entry = i64_at(address)
    entry[ENTRY_KEY] = key
    races[RACES_TABLE_USED] += 1
    return address


@njit
def _vector(races, entry, field, count):  # type: ignore[no-untyped-def]
    """An entry's vector, made at first use."""
    if entry[field] == 0:
        entry[field] = take(races, count * 4)
    return entry[field]


@njit
def _join(target_address, source_address, count):  # type: ignore[no-untyped-def]
    target, source = u32_at(target_address), u32_at(source_address)
    for index in range(count):
        target[index] = max(target[index], source[index])


@njit
def _is_ahead(source_address, target_address, count):  # type: ignore[no-untyped-def]
    """Whether joining would change the target."""
    target, source = u32_at(target_address), u32_at(source_address)
    ahead = 0
    for index in range(count):
        ahead |= source[index] > target[index]
    return ahead != 0


@njit
def _settle(record, races):  # type: ignore[no-untyped-def]
    """Recomputes the floor after the vector has changed."""
    vector = u32_at(record[CLOCK_VECTOR])
    lowest = vector[0]
    for index in range(races[RACES_WIDTH]):
        lowest = min(lowest, vector[index])
    record[CLOCK_FLOOR] = lowest


@njit
def tick(record, races):  # type: ignore[no-untyped-def]
    """From now on the warp's accesses are told apart from those before."""
    now = record[CLOCK_NOW] + 1
    record[CLOCK_NOW] = now
    u32_at(record[CLOCK_VECTOR])[record[CLOCK_INDEX]] = now
    races[RACES_CLOCK] = max(races[RACES_CLOCK], now)


@njit
def start_block(block):  # type: ignore[no-untyped-def]
    """Gives a block that begins, and its warps, their clocks. The cluster's rank 0 comes first."""
    launch = i64_at(block[BLOCK_LAUNCH])
    if launch[LAUNCH_GLOBAL_RACES] == 0:
        return
    races = i64_at(launch[LAUNCH_GLOBAL_RACES])
    width, num_warps, rank = races[RACES_WIDTH], block[BLOCK_NUM_WARPS], block[BLOCK_RANK]
    record_bytes = CLOCK_FIELDS * 8 + (width + 15) // 16 * 64 * 3
    entry = i64_at(entry_of(races, address_of(block), MUST_CREATE))
    if entry[ENTRY_PENDING] == 0:  # this place has not been used in this launch
        granules = races[RACES_SHARED_GRANULES]
        area_address = take(races, SHARED_FIELDS * 8)
        entry[ENTRY_PENDING] = area_address
        area = i64_at(area_address)
        area[SHARED_WRITES] = take(races, granules * 8)
        area[SHARED_LATEST_READ] = take(races, granules * 4)
        area[SHARED_READS] = take(races, granules * 4 * width)
        area[SHARED_GRANULES] = granules
        area[SHARED_WARP_CLOCKS] = take(races, record_bytes * num_warps)
    area = i64_at(entry[ENTRY_PENDING])
    block[BLOCK_SHARED_RACES] = entry[ENTRY_PENDING]
    if rank == 0:
        area[SHARED_BASE] = races[RACES_CLOCK]
        races[RACES_CLOCK] += 1
    else:
        first = i64_at(i64_at(block[BLOCK_CLUSTER])[0])
        area[SHARED_BASE] = i64_at(first[BLOCK_SHARED_RACES])[SHARED_BASE]
    base = area[SHARED_BASE]
    cx, cy, cz = launch[LAUNCH_CLUSTER_X], launch[LAUNCH_CLUSTER_Y], launch[LAUNCH_CLUSTER_Z]
    clusters_x, clusters_y = launch[LAUNCH_GRID_X] // cx, launch[LAUNCH_GRID_Y] // cy
    cluster = block[BLOCK_X] // cx + clusters_x * (block[BLOCK_Y] // cy + clusters_y * (block[BLOCK_Z] // cz))
    for index in range(num_warps):
        warp = i64_at(block[BLOCK_WARPS] + index * (WARP_FIELDS * 8))
        address = area[SHARED_WARP_CLOCKS] + index * record_bytes
        warp[WARP_CLOCK] = address
        record = i64_at(address)
        vector_address = address + CLOCK_FIELDS * 8
        record[CLOCK_NOW] = base + 1
        record[CLOCK_FLOOR] = base
        record[CLOCK_INDEX] = rank * num_warps + index
        record[CLOCK_VECTOR] = vector_address
        record[CLOCK_FENCED] = vector_address + (width + 15) // 16 * 64
        record[CLOCK_FENCED_GPU] = vector_address + (width + 15) // 16 * 128
        record[CLOCK_HAS_FENCE] = 0
        record[CLOCK_OTHERS] = 0
        record[CLOCK_OTHERS_VERSION] = 0
        record[CLOCK_CLUSTER] = cluster * launch[LAUNCH_CLUSTER_SIZE] * num_warps
        record[CLOCK_RACES] = launch[LAUNCH_GLOBAL_RACES]
        vector = u32_at(vector_address)
        for other in range(width):
            vector[other] = base
        vector[record[CLOCK_INDEX]] = base + 1


@njit
def release(warp, key):  # type: ignore[no-untyped-def]
    """An arrival at what `key` names (the host address of an mbarrier, say): held back until `complete`."""
    if warp[WARP_CLOCK] == 0:
        return
    record = i64_at(warp[WARP_CLOCK])
    races = i64_at(record[CLOCK_RACES])
    entry = i64_at(entry_of(races, key, MUST_CREATE))
    _join(_vector(races, entry, ENTRY_PENDING, races[RACES_WIDTH]), record[CLOCK_VECTOR], races[RACES_WIDTH])
    tick(record, races)


@njit
def complete(warp, key):  # type: ignore[no-untyped-def]
    """The phase of `key` is complete: who acquires it from now on is ordered after all who arrived."""
    if warp[WARP_CLOCK] == 0:
        return
    races = i64_at(i64_at(warp[WARP_CLOCK])[CLOCK_RACES])
    entry = i64_at(entry_of(races, key, MUST_CREATE))
    width = races[RACES_WIDTH]
    pending = _vector(races, entry, ENTRY_PENDING, width)
    completed = _vector(races, entry, ENTRY_COMPLETED, width)
    copy_bytes(completed, pending, width * 4)
    fill_bytes(pending, 0, width * 4)


@njit
def acquire(warp, key):  # type: ignore[no-untyped-def]
    """A wait on `key` has succeeded."""
    if warp[WARP_CLOCK] == 0:
        return
    record = i64_at(warp[WARP_CLOCK])
    races = i64_at(record[CLOCK_RACES])
    address = entry_of(races, key, FIND)
    if address == 0:
        return
    entry = i64_at(address)
    if entry[ENTRY_COMPLETED] and _is_ahead(entry[ENTRY_COMPLETED], record[CLOCK_VECTOR], races[RACES_WIDTH]):
        _join(record[CLOCK_VECTOR], entry[ENTRY_COMPLETED], races[RACES_WIDTH])
        _settle(record, races)


@njit
def _barrier_key(block_address, key):  # type: ignore[no-untyped-def]
    """Inside of the block's array, where no mbarrier can be; the array's own address is start_block's."""
    return block_address + 8 + key * 4


@njit
def on_arrive(warp, block, key):  # type: ignore[no-untyped-def]
    """A warp arrives at named barrier `key` of its block without waiting."""
    release(warp, _barrier_key(address_of(block), key))


@njit
def on_barrier(block, key, waiting):  # type: ignore[no-untyped-def]
    """Named barrier `key` is complete; `waiting` is the mask of the warps (by WARP_INDEX) that waited at it."""
    launch = i64_at(block[BLOCK_LAUNCH])
    if launch[LAUNCH_GLOBAL_RACES] == 0 or waiting == 0:
        return
    races = i64_at(launch[LAUNCH_GLOBAL_RACES])
    width, num_warps = races[RACES_WIDTH], block[BLOCK_NUM_WARPS]
    joined_address = races[RACES_SCRATCH]
    fill_bytes(joined_address, 0, width * 4)
    warps = block[BLOCK_WARPS]
    version, is_uneven, others = 0, False, 0
    for index in range(num_warps):
        if waiting >> index & 1:
            record = i64_at(i64_at(warps + index * (WARP_FIELDS * 8))[WARP_CLOCK])
            _join(joined_address, record[CLOCK_VECTOR], width)
            is_uneven |= others != 0 and version != record[CLOCK_OTHERS_VERSION]
            version = record[CLOCK_OTHERS_VERSION]
            others += 1
    entry_address = entry_of(races, _barrier_key(address_of(block), key), FIND)
    has_arrivals = False
    if entry_address != 0:
        entry = i64_at(entry_address)
        if entry[ENTRY_PENDING]:
            has_arrivals = True
            _join(joined_address, entry[ENTRY_PENDING], width)
            fill_bytes(entry[ENTRY_PENDING], 0, width * 4)
    joined = u32_at(joined_address)
    highest = joined[0]
    for index in range(width):
        highest = max(highest, joined[index])
    if popcount(waiting) == num_warps and not has_arrivals:
        # The whole block: all go on at a clock above `highest`, so up to there all is ordered.
        first = block[BLOCK_RANK] * num_warps
        for index in range(num_warps):
            joined[first + index] = highest
    lowest = joined[0]
    for index in range(width):
        lowest = min(lowest, joined[index])
    races[RACES_CLOCK] = max(races[RACES_CLOCK], highest + 1)
    for index in range(num_warps):
        if waiting >> index & 1:
            record = i64_at(i64_at(warps + index * (WARP_FIELDS * 8))[WARP_CLOCK])
            copy_bytes(record[CLOCK_VECTOR], joined_address, width * 4)
            u32_at(record[CLOCK_VECTOR])[record[CLOCK_INDEX]] = highest + 1
            record[CLOCK_NOW] = highest + 1
            record[CLOCK_FLOOR] = lowest
    if is_uneven:
        _share_others(races, warps, num_warps, waiting)


@njit
def _share_others(races, warps, num_warps, waiting):  # type: ignore[no-untyped-def]
    """What one warp of a barrier knows of other clusters, all know."""
    count = races[RACES_AGENTS]
    races[RACES_VERSION] += 1
    for index in range(num_warps):
        if waiting >> index & 1:
            mine = i64_at(i64_at(warps + index * (WARP_FIELDS * 8))[WARP_CLOCK])
            others = i64_at(others_of(mine, races))
            for source in range(num_warps):
                if waiting >> source & 1:
                    record = i64_at(i64_at(warps + source * (WARP_FIELDS * 8))[WARP_CLOCK])
                    if record[CLOCK_OTHERS]:
                        _join(address_of(others), record[CLOCK_OTHERS], count)
            mine[CLOCK_OTHERS_VERSION] = races[RACES_VERSION]


@njit
def others_of(record, races):  # type: ignore[no-untyped-def]
    """The address of the warp's vector over all warps, which it has from now on."""
    if record[CLOCK_OTHERS] == 0:
        size_bytes = races[RACES_AGENTS] * 4
        if record[CLOCK_OTHERS_MEMORY] == 0:
            record[CLOCK_OTHERS_MEMORY] = take(races, size_bytes)
        record[CLOCK_OTHERS] = record[CLOCK_OTHERS_MEMORY]
        fill_bytes(record[CLOCK_OTHERS], 0, size_bytes)
    return record[CLOCK_OTHERS]


@njit
def on_warp_barrier(warp):  # type: ignore[no-untyped-def]
    """bar.warp.sync: what lanes wrote before, the others may read after."""
    if warp[WARP_CLOCK] != 0:
        record = i64_at(warp[WARP_CLOCK])
        tick(record, i64_at(record[CLOCK_RACES]))


@njit
def on_fence(warp, scope):  # type: ignore[no-untyped-def]
    """membar or fence (not of a proxy): later strong writes of the warp publish what came before it."""
    if warp[WARP_CLOCK] == 0:
        return
    record = i64_at(warp[WARP_CLOCK])
    races = i64_at(record[CLOCK_RACES])
    copy_bytes(record[CLOCK_FENCED], record[CLOCK_VECTOR], races[RACES_WIDTH] * 4)
    record[CLOCK_HAS_FENCE] |= 1
    if scope >= SCOPE_GPU:
        copy_bytes(record[CLOCK_FENCED_GPU], record[CLOCK_VECTOR], races[RACES_WIDTH] * 4)
        record[CLOCK_HAS_FENCE] |= 2
    tick(record, races)


@njit
def strong_write(warp, address, scope, is_release):  # type: ignore[no-untyped-def]
    """An atomic or another strong write at host address `address`: publishes what the warp's fences let it."""
    record = i64_at(warp[WARP_CLOCK])
    races = i64_at(record[CLOCK_RACES])
    if not is_release and record[CLOCK_HAS_FENCE] == 0:
        return
    width = races[RACES_WIDTH]
    entry = i64_at(entry_of(races, address, CREATE))
    wide = is_release and scope >= SCOPE_GPU
    if scope >= SCOPE_GPU and (wide or record[CLOCK_HAS_FENCE] & 2):
        everyone = _vector(races, entry, ENTRY_LAUNCH, races[RACES_AGENTS])
        source = record[CLOCK_VECTOR] if wide else record[CLOCK_FENCED_GPU]
        _join(everyone + record[CLOCK_CLUSTER] * 4, source, width)
        if record[CLOCK_OTHERS]:
            _join(everyone, record[CLOCK_OTHERS], races[RACES_AGENTS])
    nearby = _vector(races, entry, ENTRY_CLUSTER, width)
    if entry[ENTRY_CLUSTER_OWNER] != record[CLOCK_CLUSTER]:
        entry[ENTRY_CLUSTER_OWNER] = record[CLOCK_CLUSTER]
        fill_bytes(nearby, 0, width * 4)
    if is_release or record[CLOCK_HAS_FENCE] & 1:
        _join(nearby, record[CLOCK_VECTOR] if is_release else record[CLOCK_FENCED], width)
    if is_release:
        tick(record, races)


@njit
def strong_read(warp, address, scope):  # type: ignore[no-untyped-def]
    """An atomic or another strong read at host address `address`: orders the warp after what is published there."""
    record = i64_at(warp[WARP_CLOCK])
    races = i64_at(record[CLOCK_RACES])
    found = entry_of(races, address, FIND)
    if found == 0:
        return
    entry = i64_at(found)
    width = races[RACES_WIDTH]
    has_changed = False
    if entry[ENTRY_CLUSTER] and entry[ENTRY_CLUSTER_OWNER] == record[CLOCK_CLUSTER]:
        if _is_ahead(entry[ENTRY_CLUSTER], record[CLOCK_VECTOR], width):
            _join(record[CLOCK_VECTOR], entry[ENTRY_CLUSTER], width)
            has_changed = True
    if entry[ENTRY_LAUNCH] and scope >= SCOPE_GPU:
        others = others_of(record, races)
        if _is_ahead(entry[ENTRY_LAUNCH], others, races[RACES_AGENTS]):
            _join(others, entry[ENTRY_LAUNCH], races[RACES_AGENTS])
            races[RACES_VERSION] += 1
            record[CLOCK_OTHERS_VERSION] = races[RACES_VERSION]
        mine = others + record[CLOCK_CLUSTER] * 4
        if _is_ahead(mine, record[CLOCK_VECTOR], width):
            _join(record[CLOCK_VECTOR], mine, width)
            has_changed = True
    if has_changed:
        _settle(record, races)


@njit
def known(record, races, agent):  # type: ignore[no-untyped-def]
    """The highest clock of a warp, by its number in the launch, that the record's warp is ordered after."""
    local = agent - record[CLOCK_CLUSTER]
    if 0 <= local < races[RACES_WIDTH]:
        return u32_at(record[CLOCK_VECTOR])[local]
    if record[CLOCK_OTHERS]:
        return u32_at(record[CLOCK_OTHERS])[agent]
    return u32_at(record[CLOCK_VECTOR])[0] * 0
