"""The vector clocks of `clocks.py`: how barriers, releases and acquires order the warps of a launch.

(Lamport's clocks and the happens-before of FastTrack, Flanagan and Freund, PLDI 2009, with warps as agents.)

Every warp of a cluster has a clock and a vector: for each warp of its cluster the highest clock that it is ordered
after. Barriers join vectors; a release stores a vector under an address, an acquire joins what is stored there. Other
clusters' warps are known by a second vector over all warps of the launch, which a warp gets at its first read of a
value that a strong operation of theirs published at gpu scope.

Clocks start above everything that an earlier launch, or an earlier block in the same place, has left in the shadows, so
that they need no clearing.

The functions `*_entry` are compiled once, for the first launch that checks races, and called by their addresses.
"""

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at, u32_at
from runtime.emulator.execution.warp_state import (
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
from runtime.emulator.memory.pointers import address_of, copy_bytes, fill_bytes, popcount
from runtime.emulator.races.clocks import (
    ACQUIRE,
    CLOCK_CLUSTER,
    CLOCK_FIELDS,
    CLOCK_FLOOR,
    CLOCK_HAS_FENCE,
    CLOCK_INDEX,
    CLOCK_NOW,
    CLOCK_OTHERS,
    CLOCK_OTHERS_MEMORY,
    CLOCK_OTHERS_VERSION,
    CLOCK_RACES,
    CLOCK_STRIDE,
    CLOCK_VECTOR,
    COMPLETE,
    CREATE,
    ENTRY_CLUSTER,
    ENTRY_CLUSTER_OWNER,
    ENTRY_COMPLETED,
    ENTRY_FIELDS,
    ENTRY_HAS_FENCE,
    ENTRY_KEY,
    ENTRY_LAUNCH,
    ENTRY_PENDING,
    FENCE,
    FIND,
    MUST_CREATE,
    OVERFLOW_KEY,
    RACES_AGENTS,
    RACES_CLOCK,
    RACES_NEXT,
    RACES_SCRATCH,
    RACES_SHARED_GRANULES,
    RACES_TABLE,
    RACES_TABLE_USED,
    RACES_VERSION,
    RACES_WIDTH,
    RELEASE,
    SCOPE_GPU,
    SHARED_BASE,
    SHARED_FIELDS,
    SHARED_GRANULES,
    SHARED_LATEST_READ,
    SHARED_READS,
    SHARED_WARP_CLOCKS,
    SHARED_WRITES,
    STRONG_WRITE,
    TABLE_ENTRIES,
    TABLE_LIMIT,
    WARP_BARRIER,
    barrier_key,
)


@njit
def take(races, size_bytes):
    """Fresh zeroed memory, 64-byte aligned, that stays until the launch ends."""
    address = races[RACES_NEXT]
    races[RACES_NEXT] = address + (size_bytes + 63) // 64 * 64
    return address


@njit
def entry_of(races, key, create):
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
    if races[RACES_TABLE_USED] >= TABLE_LIMIT and create != MUST_CREATE:  # the overflow entry, after the hashed ones
        address = races[RACES_TABLE] + TABLE_ENTRIES * (ENTRY_FIELDS * 8)
        i64_at(address)[ENTRY_KEY] = OVERFLOW_KEY
        return address
    if create == FIND:
        return address * 0
    entry = i64_at(address)
    entry[ENTRY_KEY] = key
    races[RACES_TABLE_USED] += 1
    return address


@njit
def _vector(races, entry, field, count):
    """An entry's vector, made at first use."""
    if entry[field] == 0:
        entry[field] = take(races, count * 4)
    return entry[field]


@njit
def _join(target_address, source_address, count):
    target, source = u32_at(target_address), u32_at(source_address)
    for index in range(count):
        target[index] = max(target[index], source[index])


@njit
def _is_ahead(source_address, target_address, count):
    """Whether joining would change the target."""
    target, source = u32_at(target_address), u32_at(source_address)
    ahead = 0
    for index in range(count):
        ahead |= source[index] > target[index]
    return ahead != 0


@njit
def _settle(record, races):
    """Recomputes the floor after the vector has changed."""
    vector = u32_at(record[CLOCK_VECTOR])
    lowest = vector[0]
    for index in range(races[RACES_WIDTH]):
        lowest = min(lowest, vector[index])
    record[CLOCK_FLOOR] = lowest


@njit
def tick(record, races):
    """Separates the warp's later accesses from earlier ones."""
    now = record[CLOCK_NOW] + 1
    record[CLOCK_NOW] = now
    u32_at(record[CLOCK_VECTOR])[record[CLOCK_INDEX]] = now
    races[RACES_CLOCK] = max(races[RACES_CLOCK], now)


@njit
def _start_block(block):
    """Gives a block that begins, and its warps, their clocks. The cluster's rank 0 comes first."""
    launch = i64_at(block[BLOCK_LAUNCH])
    races = i64_at(launch[LAUNCH_GLOBAL_RACES])
    width, num_warps, rank = races[RACES_WIDTH], block[BLOCK_NUM_WARPS], block[BLOCK_RANK]
    stride = (width + 15) // 16 * 16
    record_bytes = CLOCK_FIELDS * 8 + stride * 12
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
        record[CLOCK_STRIDE] = stride
        record[CLOCK_HAS_FENCE] = 0
        fill_bytes(vector_address, 0, stride * 12)
        record[CLOCK_OTHERS] = 0
        record[CLOCK_OTHERS_VERSION] = 0
        record[CLOCK_CLUSTER] = cluster * launch[LAUNCH_CLUSTER_SIZE] * num_warps
        record[CLOCK_RACES] = launch[LAUNCH_GLOBAL_RACES]
        vector = u32_at(vector_address)
        for other in range(width):
            vector[other] = base
        vector[record[CLOCK_INDEX]] = base + 1


@njit
def _rows(record, has_fence):
    """How many numbers of CLOCK_VECTOR's rows to join: the first row, or all three where fences have been."""
    return 3 * record[CLOCK_STRIDE] if has_fence else record[CLOCK_STRIDE]


@njit
def _release(warp, key, is_release):
    """An arrival at the object `key` (such as the host address of an mbarrier), held back until `complete`. Without a
    release it brings the accesses that fences have covered."""
    record = i64_at(warp[WARP_CLOCK])
    races = i64_at(record[CLOCK_RACES])
    entry = i64_at(entry_of(races, key, MUST_CREATE))
    vector, stride, has_fence = record[CLOCK_VECTOR], record[CLOCK_STRIDE], record[CLOCK_HAS_FENCE]
    pending = _vector(races, entry, ENTRY_PENDING, 3 * stride)
    if is_release:
        _join(pending, vector, _rows(record, has_fence))
    elif has_fence:
        _join(pending, vector + stride * 4, stride)
        _join(pending + stride * 4, vector + stride * 4, 2 * stride)
    entry[ENTRY_HAS_FENCE] |= has_fence
    tick(record, races)


@njit
def _complete(warp, key):
    """The phase of `key` is complete: later acquirers are ordered after all arrivals."""
    record = i64_at(warp[WARP_CLOCK])
    races = i64_at(record[CLOCK_RACES])
    entry = i64_at(entry_of(races, key, MUST_CREATE))
    count = 3 * record[CLOCK_STRIDE]
    pending = _vector(races, entry, ENTRY_PENDING, count)
    completed = _vector(races, entry, ENTRY_COMPLETED, count)
    copy_bytes(completed, pending, count * 4)
    fill_bytes(pending, 0, count * 4)
    entry[ENTRY_HAS_FENCE] = (entry[ENTRY_HAS_FENCE] & 3) << 2


@njit
def _acquire(warp, key):
    """A wait on `key` has succeeded."""
    record = i64_at(warp[WARP_CLOCK])
    races = i64_at(record[CLOCK_RACES])
    address = entry_of(races, key, FIND)
    if address == 0:
        return
    entry = i64_at(address)
    if entry[ENTRY_COMPLETED] == 0:
        return
    has_fence = entry[ENTRY_HAS_FENCE] >> 2
    count = _rows(record, has_fence)
    if _is_ahead(entry[ENTRY_COMPLETED], record[CLOCK_VECTOR], count):
        _join(record[CLOCK_VECTOR], entry[ENTRY_COMPLETED], count)
        record[CLOCK_HAS_FENCE] |= has_fence
        _settle(record, races)


@njit
def _on_barrier(block, key, waiting):
    """Named barrier `key` is complete; `waiting` is the mask of the warps (by WARP_INDEX) that waited at it."""
    launch = i64_at(block[BLOCK_LAUNCH])
    races = i64_at(launch[LAUNCH_GLOBAL_RACES])
    width, num_warps = races[RACES_WIDTH], block[BLOCK_NUM_WARPS]
    joined_address, stride = races[RACES_SCRATCH], (width + 15) // 16 * 16
    fill_bytes(joined_address, 0, stride * 12)
    warps = block[BLOCK_WARPS]
    version, is_uneven, others, has_fence = 0, False, 0, 0
    for index in range(num_warps):
        if waiting >> index & 1:
            record = i64_at(i64_at(warps + index * (WARP_FIELDS * 8))[WARP_CLOCK])
            _join(joined_address, record[CLOCK_VECTOR], _rows(record, record[CLOCK_HAS_FENCE]))
            has_fence |= record[CLOCK_HAS_FENCE]
            is_uneven |= others != 0 and version != record[CLOCK_OTHERS_VERSION]
            version = record[CLOCK_OTHERS_VERSION]
            others += 1
    entry_address = entry_of(races, barrier_key(address_of(block), key), FIND)
    has_arrivals = False
    if entry_address != 0:
        entry = i64_at(entry_address)
        if entry[ENTRY_PENDING]:
            has_arrivals = True
            _join(joined_address, entry[ENTRY_PENDING], stride * 3)
            fill_bytes(entry[ENTRY_PENDING], 0, stride * 12)
            has_fence |= entry[ENTRY_HAS_FENCE] & 3
            entry[ENTRY_HAS_FENCE] = 0
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
            copy_bytes(record[CLOCK_VECTOR], joined_address, _rows(record, has_fence) * 4)
            record[CLOCK_HAS_FENCE] = has_fence
            u32_at(record[CLOCK_VECTOR])[record[CLOCK_INDEX]] = highest + 1
            record[CLOCK_NOW] = highest + 1
            record[CLOCK_FLOOR] = lowest
    if is_uneven:
        _share_others(races, warps, num_warps, waiting)


@njit
def _share_others(races, warps, num_warps, waiting):
    """Shares the warps' order after other clusters among all warps of a barrier."""
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
def others_of(record, races):
    """The address of the warp's vector over all warps, which it has from now on."""
    if record[CLOCK_OTHERS] == 0:
        size_bytes = races[RACES_AGENTS] * 4
        if record[CLOCK_OTHERS_MEMORY] == 0:
            record[CLOCK_OTHERS_MEMORY] = take(races, size_bytes)
        record[CLOCK_OTHERS] = record[CLOCK_OTHERS_MEMORY]
        fill_bytes(record[CLOCK_OTHERS], 0, size_bytes)
    return record[CLOCK_OTHERS]


@njit
def _on_warp_barrier(warp):
    """bar.warp.sync: the others may read lanes' earlier writes."""
    record = i64_at(warp[WARP_CLOCK])
    tick(record, i64_at(record[CLOCK_RACES]))


@njit
def _on_fence(warp, scope):
    """membar or fence (not of a proxy): later strong writes of the warp publish the accesses before it."""
    record = i64_at(warp[WARP_CLOCK])
    races = i64_at(record[CLOCK_RACES])
    vector, stride = record[CLOCK_VECTOR], record[CLOCK_STRIDE]
    copy_bytes(vector + stride * 4, vector, stride * 4)
    record[CLOCK_HAS_FENCE] |= 1
    if scope >= SCOPE_GPU:
        copy_bytes(vector + stride * 8, vector, stride * 4)
        record[CLOCK_HAS_FENCE] |= 2
    tick(record, races)


@njit
def _strong_write(warp, address, scope, is_release):
    """A strong write (an atomic, say) at host address `address`: publishes accesses that the warp's fences cover."""
    record = i64_at(warp[WARP_CLOCK])
    races = i64_at(record[CLOCK_RACES])
    if not is_release and record[CLOCK_HAS_FENCE] == 0:
        return
    width = races[RACES_WIDTH]
    entry = i64_at(entry_of(races, address, CREATE))
    wide = is_release and scope >= SCOPE_GPU
    if scope >= SCOPE_GPU and (wide or record[CLOCK_HAS_FENCE] & 2):
        everyone = _vector(races, entry, ENTRY_LAUNCH, races[RACES_AGENTS])
        source = record[CLOCK_VECTOR] + (0 if wide else record[CLOCK_STRIDE] * 8)
        _join(everyone + record[CLOCK_CLUSTER] * 4, source, width)
        if record[CLOCK_OTHERS]:
            _join(everyone, record[CLOCK_OTHERS], races[RACES_AGENTS])
    nearby = _vector(races, entry, ENTRY_CLUSTER, width)
    if entry[ENTRY_CLUSTER_OWNER] != record[CLOCK_CLUSTER]:
        entry[ENTRY_CLUSTER_OWNER] = record[CLOCK_CLUSTER]
        fill_bytes(nearby, 0, width * 4)
    if is_release or record[CLOCK_HAS_FENCE] & 1:
        _join(nearby, record[CLOCK_VECTOR] + (0 if is_release else record[CLOCK_STRIDE] * 4), width)
    if is_release:
        tick(record, races)


@njit
def _strong_read(warp, address, scope):
    """A strong read (an atomic, say) at host address `address`: orders the warp after accesses published there."""
    record = i64_at(warp[WARP_CLOCK])
    races = i64_at(record[CLOCK_RACES])
    found = entry_of(races, address, FIND)
    if found == 0:
        return
    entry = i64_at(found)
    width = races[RACES_WIDTH]
    has_changed = False
    is_mine = entry[ENTRY_CLUSTER] != 0 and entry[ENTRY_CLUSTER_OWNER] == record[CLOCK_CLUSTER]
    if is_mine and _is_ahead(entry[ENTRY_CLUSTER], record[CLOCK_VECTOR], width):
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
def known(record, races, agent):
    """The highest clock of a warp, by its number in the launch, that the record's warp is ordered after."""
    local = agent - record[CLOCK_CLUSTER]
    if 0 <= local < races[RACES_WIDTH]:
        return u32_at(record[CLOCK_VECTOR])[local]
    if record[CLOCK_OTHERS]:
        return u32_at(record[CLOCK_OTHERS])[agent]
    return u32_at(record[CLOCK_VECTOR])[0] * 0


@njit
def order_entry(what, warp_address, key, scope, is_release):
    """One warp's events, by the entry's number in `clocks.py`."""
    warp = i64_at(warp_address)
    if what == RELEASE:
        _release(warp, key, is_release)
    elif what == COMPLETE:
        _complete(warp, key)
    elif what == ACQUIRE:
        _acquire(warp, key)
    elif what == WARP_BARRIER:
        _on_warp_barrier(warp)
    elif what == FENCE:
        _on_fence(warp, scope)
    elif what == STRONG_WRITE:
        _strong_write(warp, key, scope, is_release)
    else:
        _strong_read(warp, key, scope)
    return types.int64(0)


@njit
def block_entry(block_address, key, waiting):
    """A block begins (key -1), or its barrier `key` is complete."""
    if key < 0:
        _start_block(i64_at(block_address))
    else:
        _on_barrier(i64_at(block_address), key, waiting)
    return types.int64(0)
