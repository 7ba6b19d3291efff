"""Vector clocks: how barriers, releases and acquires order the warps of a launch.

(Lamport's clocks and the happens-before of FastTrack, Flanagan and Freund, PLDI 2009, with warps as agents.)

Every warp of a cluster has a clock and a vector: for each warp of its cluster the highest clock that it is ordered
after. Barriers join vectors; a release stores a vector under an address, an acquire joins what is stored there. Other
clusters' warps are known by a second vector over all warps of the launch, which a warp gets at its first read of a
value that a strong operation of theirs published at gpu scope.

Clocks start above everything that an earlier launch, or an earlier block in the same place, has left in the shadows, so
that they need no clearing.

A strong write (an atomic, .relaxed, .release, .volatile) publishes the accesses covered by fences of its warp, and of
warps that it is ordered after, or all that its warp is ordered after if it is a .release; a strong read acquires those
published at its address, with or without a fence after it. So a missing release fence is found, a missing acquire fence
is not. Where races are not checked (warp.clock is 0) nothing is done.
"""

from __future__ import annotations

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at, u32_at
from runtime.emulator.memory.pointers import address_of, copy_bytes, fill_bytes, popcount
from runtime.emulator.races.clocks import (
    CREATE,
    FIND,
    MUST_CREATE,
    OVERFLOW_KEY,
    SCOPE_GPU,
    TABLE_ENTRIES,
    TABLE_LIMIT,
    Clock,
    SharedRaces,
    clock_at,
    entry_at,
    shared_races_at,
)  # fmt: skip
from runtime.emulator.translation.operations import compiled_once

_CLOCK_BYTES, _SHARED_BYTES = Clock.size_bytes, SharedRaces.size_bytes


@njit
def take(races, size_bytes):
    """Fresh zeroed memory, 64-byte aligned, that stays until the launch ends."""
    address = races.next
    races.next = address + (size_bytes + 63) // 64 * 64
    return address


@njit
def entry_of(races, key, create):
    """The table's entry for a key; one at address 0 where there is none and `create` is FIND."""
    slot = ((key >> 2) * 0x9E3779B1 >> 7) & (TABLE_ENTRIES - 1)
    while races.table[slot].key != 0 and races.table[slot].key != key:
        slot = (slot + 1) & (TABLE_ENTRIES - 1)
    if races.table[slot].key == key:
        return races.table[slot]
    if races.table_used >= TABLE_LIMIT and create != MUST_CREATE:  # the overflow entry, after the hashed ones
        races.table[TABLE_ENTRIES].key = OVERFLOW_KEY
        return races.table[TABLE_ENTRIES]
    if create == FIND:
        return entry_at(0)
    races.table[slot].key = key
    races.table_used += 1
    return races.table[slot]


@njit
def vector_or(races, address, count):
    """An entry's vector, made at first use."""
    return take(races, count * 4) if address == 0 else address


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
    vector = u32_at(record.vector)
    lowest = vector[0]
    for index in range(races.width):
        lowest = min(lowest, vector[index])
    record.floor = lowest


@njit
def tick(record, races):
    """Separates the warp's later accesses from earlier ones."""
    now = record.now + 1
    record.now = now
    u32_at(record.vector)[record.index] = now
    races.clock = max(races.clock, now)


@compiled_once("")
def start_block(warp):
    """Gives a block that begins, by its first warp, and its warps, their clocks. The cluster's rank 0 comes first."""
    block, launch = warp.block, warp.launch
    if not launch.races:
        return 0
    races = launch.races
    width, num_warps, rank = races.width, block.num_warps, block.rank
    stride = (width + 15) // 16 * 16
    record_bytes = _CLOCK_BYTES + stride * 12
    entry = entry_of(races, address_of(block), MUST_CREATE)
    if entry.pending == 0:  # this place has not been used in this launch
        granules = races.shared_granules
        area_address = take(races, _SHARED_BYTES)
        entry.pending = area_address
        area = shared_races_at(area_address)
        area.writes = take(races, granules * 8)
        area.latest_read = take(races, granules * 4)
        area.reads = take(races, granules * 4 * width)
        area.granules = granules
        area.warp_clocks = take(races, record_bytes * num_warps)
    area = shared_races_at(entry.pending)
    block.shared_races = entry.pending
    if rank == 0:
        area.base = races.clock
        races.clock += 1
    else:
        first = block.cluster[0]
        area.base = first.shared_races.base
    base = area.base
    cx, cy, cz = launch.cluster_x, launch.cluster_y, launch.cluster_z
    clusters_x, clusters_y = launch.grid_x // cx, launch.grid_y // cy
    cluster = block.x // cx + clusters_x * (block.y // cy + clusters_y * (block.z // cz))
    for index in range(num_warps):
        warp = block.warps[index]
        address = area.warp_clocks + index * record_bytes
        warp.clock = address
        record = clock_at(address)
        vector_address = address + _CLOCK_BYTES
        record.now = base + 1
        record.floor = base
        record.index = rank * num_warps + index
        record.vector = vector_address
        record.stride = stride
        record.has_fence = 0
        fill_bytes(vector_address, 0, stride * 12)
        record.others = 0
        record.others_version = 0
        record.cluster = cluster * launch.cluster_size * num_warps
        record.races = address_of(launch.races)
        vector = u32_at(vector_address)
        for other in range(width):
            vector[other] = base
        vector[record.index] = base + 1
    return 0


@njit
def _rows(record, has_fence):
    """How many numbers of CLOCK_VECTOR's rows to join: the first row, or all three where fences have been."""
    return 3 * record.stride if has_fence else record.stride


@compiled_once("ll")
def release(warp, key, is_release):
    """An arrival at the object `key` (such as the host address of an mbarrier), held back until `complete`. If it is
    relaxed (`is_release` 0), waiters see only the accesses that fences have covered."""
    if not warp.clock:
        return 0
    record = warp.clock
    races = record.races
    entry = entry_of(races, key, MUST_CREATE)
    vector, stride, has_fence = record.vector, record.stride, record.has_fence
    pending = entry.pending = vector_or(races, entry.pending, 3 * stride)
    if is_release:
        _join(pending, vector, _rows(record, has_fence))
    elif has_fence:
        _join(pending, vector + stride * 4, stride)
        _join(pending + stride * 4, vector + stride * 4, 2 * stride)
    entry.has_fence |= has_fence
    tick(record, races)
    return 0


@compiled_once("l")
def complete(warp, key):
    """The phase of `key` is complete: later acquirers are ordered after all arrivals."""
    if not warp.clock:
        return 0
    record = warp.clock
    races = record.races
    entry = entry_of(races, key, MUST_CREATE)
    count = 3 * record.stride
    pending = entry.pending = vector_or(races, entry.pending, count)
    completed = entry.completed = vector_or(races, entry.completed, count)
    copy_bytes(completed, pending, count * 4)
    fill_bytes(pending, 0, count * 4)
    entry.has_fence = (entry.has_fence & 3) << 2
    return 0


@compiled_once("l")
def acquire(warp, key):
    """A wait on `key` has succeeded."""
    if not warp.clock:
        return 0
    record = warp.clock
    races = record.races
    entry = entry_of(races, key, FIND)
    if not entry or entry.completed == 0:
        return 0
    has_fence = entry.has_fence >> 2
    count = _rows(record, has_fence)
    if _is_ahead(entry.completed, record.vector, count):
        _join(record.vector, entry.completed, count)
        record.has_fence |= has_fence
        _settle(record, races)
    return 0


@njit
def barrier_key(block_address, key):
    """Inside of the block's array, where no mbarrier can be; the array's own address stands for the block."""
    return block_address + 8 + key * 4


@compiled_once("ll")
def on_barrier(warp, key, waiting):
    """Named barrier `key` of the block of a warp is complete; `waiting`: the warps (by index) that waited at it."""
    block, launch = warp.block, warp.launch
    if not launch.races or not waiting:
        return 0
    races = launch.races
    width, num_warps = races.width, block.num_warps
    joined_address, stride = races.scratch, (width + 15) // 16 * 16
    fill_bytes(joined_address, 0, stride * 12)
    warps = block.warps
    version, is_uneven, others, has_fence = 0, False, 0, 0
    for index in range(num_warps):
        if waiting >> index & 1:
            record = warps[index].clock
            _join(joined_address, record.vector, _rows(record, record.has_fence))
            has_fence |= record.has_fence
            is_uneven |= others != 0 and version != record.others_version
            version = record.others_version
            others += 1
    entry = entry_of(races, barrier_key(address_of(block), key), FIND)
    has_arrivals = False
    if entry and entry.pending:
        has_arrivals = True
        _join(joined_address, entry.pending, stride * 3)
        fill_bytes(entry.pending, 0, stride * 12)
        has_fence |= entry.has_fence & 3
        entry.has_fence = 0
    joined = u32_at(joined_address)
    highest = joined[0]
    for index in range(width):
        highest = max(highest, joined[index])
    if popcount(waiting) == num_warps and not has_arrivals:
        # The whole block: all go on at a clock above `highest`, so up to there all is ordered.
        first = block.rank * num_warps
        for index in range(num_warps):
            joined[first + index] = highest
    lowest = joined[0]
    for index in range(width):
        lowest = min(lowest, joined[index])
    races.clock = max(races.clock, highest + 1)
    for index in range(num_warps):
        if waiting >> index & 1:
            record = warps[index].clock
            copy_bytes(record.vector, joined_address, _rows(record, has_fence) * 4)
            record.has_fence = has_fence
            u32_at(record.vector)[record.index] = highest + 1
            record.now = highest + 1
            record.floor = lowest
    if is_uneven:
        _share_others(races, warps, num_warps, waiting)
    return 0


@njit
def _share_others(races, warps, num_warps, waiting):
    """Shares the warps' order after other clusters among all warps of a barrier."""
    count = races.agents
    races.version += 1
    for index in range(num_warps):
        if waiting >> index & 1:
            mine = warps[index].clock
            others = i64_at(others_of(mine, races))
            for source in range(num_warps):
                if waiting >> source & 1:
                    record = warps[source].clock
                    if record.others:
                        _join(address_of(others), record.others, count)
            mine.others_version = races.version


@njit
def others_of(record, races):
    """The address of the warp's vector over all warps, which it has from now on."""
    if record.others == 0:
        size_bytes = races.agents * 4
        if record.others_memory == 0:
            record.others_memory = take(races, size_bytes)
        record.others = record.others_memory
        fill_bytes(record.others, 0, size_bytes)
    return record.others


@compiled_once("")
def on_warp_barrier(warp):
    """bar.warp.sync: the others may read lanes' earlier writes."""
    if not warp.clock:
        return 0
    record = warp.clock
    tick(record, record.races)
    return 0


@compiled_once("l")
def on_fence(warp, scope):
    """membar or fence (not of a proxy): later strong writes of the warp publish the accesses before it."""
    if not warp.clock:
        return 0
    record = warp.clock
    races = record.races
    vector, stride = record.vector, record.stride
    copy_bytes(vector + stride * 4, vector, stride * 4)
    record.has_fence |= 1
    if scope >= SCOPE_GPU:
        copy_bytes(vector + stride * 8, vector, stride * 4)
        record.has_fence |= 2
    tick(record, races)
    return 0


@compiled_once("lll")
def strong_write(warp, address, scope, is_release):
    """A strong write (an atomic, say) at host address `address`: publishes accesses that the warp's fences cover."""
    if not warp.clock:
        return 0
    record = warp.clock
    races = record.races
    if not is_release and record.has_fence == 0:
        return 0
    width = races.width
    entry = entry_of(races, address, CREATE)
    wide = is_release and scope >= SCOPE_GPU
    if scope >= SCOPE_GPU and (wide or record.has_fence & 2):
        everyone = entry.launch = vector_or(races, entry.launch, races.agents)
        source = record.vector + (0 if wide else record.stride * 8)
        _join(everyone + record.cluster * 4, source, width)
        if record.others:
            _join(everyone, record.others, races.agents)
    nearby = entry.cluster = vector_or(races, entry.cluster, width)
    if entry.cluster_owner != record.cluster:
        entry.cluster_owner = record.cluster
        fill_bytes(nearby, 0, width * 4)
    if is_release or record.has_fence & 1:
        _join(nearby, record.vector + (0 if is_release else record.stride * 4), width)
    if is_release:
        tick(record, races)
    return 0


@compiled_once("ll")
def strong_read(warp, address, scope):
    """A strong read (an atomic, say) at host address `address`: orders the warp after accesses published there."""
    if not warp.clock:
        return 0
    record = warp.clock
    races = record.races
    entry = entry_of(races, address, FIND)
    if not entry:
        return 0
    width = races.width
    has_changed = False
    is_mine = entry.cluster != 0 and entry.cluster_owner == record.cluster
    if is_mine and _is_ahead(entry.cluster, record.vector, width):
        _join(record.vector, entry.cluster, width)
        has_changed = True
    if entry.launch and scope >= SCOPE_GPU:
        others = others_of(record, races)
        if _is_ahead(entry.launch, others, races.agents):
            _join(others, entry.launch, races.agents)
            races.version += 1
            record.others_version = races.version
        mine = others + record.cluster * 4
        if _is_ahead(mine, record.vector, width):
            _join(record.vector, mine, width)
            has_changed = True
    if has_changed:
        _settle(record, races)
    return 0


@njit
def known(record, races, agent):
    """The highest clock of a warp, by its number in the launch, that the record's warp is ordered after."""
    local = agent - record.cluster
    if 0 <= local < races.width:
        return u32_at(record.vector)[local]
    if record.others:
        return u32_at(record.others)[agent]
    return u32_at(record.vector)[0] * 0
