"""The state that a running warp can reach: the records of warp, block and launch, and numbers that go with them.

An operation gets its warp's record: ``warp.lanes``, ``warp.block.rank``. Everything is plain memory with one owner: a
launch's record belongs to one OS thread (fault and counters too), those of blocks and warps are made anew for each
resident block.
"""

from __future__ import annotations

from runtime.emulator.records import Ints, Long, LongArray, Record, Table, To, at

LANES = 32
FULL_MASK = 0xFFFFFFFF

# A shared address is an offset; `mapa` makes (rank in cluster + 1) << SHARED_RANK_SHIFT | offset, so that 0 is "mine".
SHARED_RANK_SHIFT = 24
SHARED_OFFSET_MASK = (1 << SHARED_RANK_SHIFT) - 1
# Generic addresses: device memory as it is, shared memory at SHARED_WINDOW + shared address, local at LOCAL_WINDOW +
# offset.
SHARED_WINDOW = 0x7FFF_0000_0000_0000
LOCAL_WINDOW = 0x7FFE_0000_0000_0000
PARAM_WINDOW = 0x7FFD_0000_0000_0000  # a kernel's parameters, after cvta.param


class Launch(Record):
    """One for each OS thread that runs a part of the grid."""

    parameters = Long()  # address of the parameter bytes
    parameter_bytes = Long()
    grid_x, grid_y, grid_z = Long(), Long(), Long()  # blocks
    block_x, block_y, block_z = Long(), Long(), Long()  # threads a block
    cluster_x, cluster_y, cluster_z = Long(), Long(), Long()  # blocks a cluster
    num_warps = Long()  # a block
    num_threads = Long()  # a block
    cluster_size = Long()  # blocks a cluster, as a product
    shared_bytes = Long()  # static and dynamic
    dynamic_shared_bytes = Long()
    checks = Long()  # CHECK_… bits
    fault = To("Fault")
    counters = LongArray()  # see counters.py
    arena = Long()  # device memory: address of its first byte
    arena_bytes = Long()
    arena_shadow = Long()  # address of its first shadow byte
    local_bytes = Long()  # local memory a thread
    number = Long()  # of the launch; 0
    races = To("Races")  # what the race checker keeps, or 0
    is_dependent = Long()  # 1: a programmatic dependent launch, which must execute griddepcontrol.wait
    traffic = To("TrafficCounts")  # one for each instruction, or 0
    regions = Long()  # address of the memory of other devices: see memory/locate.py
    symbols = LongArray()  # where each .global and .const variable lies
    num_sms = Long()
    steps = Long()  # chunks that ran to their end
    stream_order = To("StreamTouch")  # the stream checker's data, or 0
    close_warp = Long()  # address of operation close_warp, or 0 where the kernel leaves no open work: warp_scheduler.py
    close_block = Long()


class Block(Record):
    """One for each resident block."""

    launch = To("Launch")
    x, y, z = Long(), Long(), Long()  # block index
    linear = Long()  # x + grid_x * (y + grid_y * z)
    rank = Long()  # in its cluster
    cluster = Table("Block")  # the cluster's blocks, by rank
    num_warps = Long()
    warps = To("Warp")  # the first; the others follow
    shared = Long()  # address of shared memory's first byte
    shared_shadow = Long()  # address of one byte a shared byte
    barriers = To("Barrier")  # the 16 named ones
    proxy = Long()  # address of what proxy.py keeps, or 0
    shared_bytes = Long()
    # From here on a new block starts with zeros.
    shared_races = To("SharedRaces")
    num_exited_warps = Long()
    progress = Long()  # counts what may let a blocked warp of the cluster go on
    cluster_generation = Long()  # of barrier.cluster; the one of rank 0 counts
    copies = To("CopyQueue")  # bulk copies in flight, or 0
    proxy_time = Long()  # counts fences and barriers
    has_map_fence = Long()  # 1 once a thread has acquired tensor maps


class Warp(Record, size_words=32):
    """One for each warp of a resident block."""

    block = To("Block")
    launch = To("Launch")
    index = Long()  # in its block
    lanes = Long()  # mask of the lanes that exist
    registers = Long()  # address of the register file
    pcs = Ints()  # of 32: where each lane goes on
    tokens = LongArray()  # of 32: the lanes' waits at a barrier; 0 for none
    local = Long()  # address of the local memory of lane 0; the next lane's lies launch.local_bytes further
    local_shadow = Long()  # or 0
    # From here on a new warp starts with zeros.
    live = Long()  # mask of the lanes that have not exited
    stalled = Long()  # mask of the lanes that blocked or yielded since `run` was entered
    has_yielded = Long()  # 1 when one of those yielded
    state = Long()  # what `run` returned last
    site = Long()  # the instruction at which it last blocked
    parked = Long()  # mask of the lanes that wait before an aligned instruction
    parked_live = Long()  # the live lanes when the first of them parked
    parked_kind = Long()  # the FaultKind if they never come together
    clock = To("Clock")  # what the race checker keeps, or 0
    copies = To("CopyList")  # cp.async in flight, or 0
    wgmma = To("WgmmaList")  # wgmma in flight, or 0
    proxy_seen = Long()  # block.proxy_time when the warp last passed a barrier
    is_before_dependency = Long()  # 1 until griddepcontrol.wait in a dependent launch
    is_strong_read = Long()  # 1 while a strong load is checked
    max_registers = Long()  # what setmaxnreg set, or 0
    cluster_phase = Long()  # barrier.cluster: generation << 32 | lanes that arrived and have not waited
    num_polls = Long()  # mbarrier.test_wait in vain since block.progress was polled_progress
    polled_progress = Long()
    hides_barrier = Long()  # 1 while the cluster need not see an mbarrier.init of the warp


launch_at, block_at, warp_at = at(Launch), at(Block), at(Warp)

# --- what `run` returns ---
EXITED, FAULT, BLOCKED, YIELDED = range(4)

# --- what an operation returns ---
DONE, FAILED, RETRY, DONE_BUT_YIELD = range(4)

# --- launch.checks ---
CHECK_MEMORY = 1  # live allocation, alignment
CHECK_UNINITIALIZED = 2
CHECK_RACES = 4
CHECK_ASYNC = 8  # data in flight, missing fences
COUNT_MEMORY = 16  # sectors, bank conflicts
