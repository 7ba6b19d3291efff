"""The state that a running warp can reach: indices into the flat int64 arrays of warp, block and launch.

An operation gets ``warp`` (a ``CPointer(int64)``): ``warp[WARP_LANES]``, ``i64_at(warp[WARP_BLOCK])[BLOCK_RANK]``.
Everything is plain memory with one owner: a launch array belongs to one OS thread (fault record and counters too),
block and warp arrays are made anew for each resident block.
"""

from __future__ import annotations

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

# --- launch: one array for each OS thread that runs a part of the grid ---
LAUNCH_PARAMETERS = 0  # address of the parameter bytes
LAUNCH_GRID_X = 1  # blocks; y and z follow
LAUNCH_GRID_Y = 2
LAUNCH_GRID_Z = 3
LAUNCH_BLOCK_X = 4  # threads a block; y and z follow
LAUNCH_BLOCK_Y = 5
LAUNCH_BLOCK_Z = 6
LAUNCH_CLUSTER_X = 7  # blocks a cluster; y and z follow
LAUNCH_CLUSTER_Y = 8
LAUNCH_CLUSTER_Z = 9
LAUNCH_NUM_WARPS = 10  # warps a block
LAUNCH_THREADS = 11  # threads a block
LAUNCH_CLUSTER_SIZE = 12  # blocks a cluster, as a product
LAUNCH_SHARED_BYTES = 13  # static and dynamic
LAUNCH_DYNAMIC_SHARED_BYTES = 14
LAUNCH_CHECKS = 15  # CHECK_… bits
LAUNCH_SEED = 16
LAUNCH_FAULT = 17  # address of the fault record
LAUNCH_COUNTERS = 18  # address of the counters: see counters.py
LAUNCH_ARENA = 19  # device memory: address of its first byte
LAUNCH_ARENA_BYTES = 20
LAUNCH_ARENA_SHADOW = 21  # address of its first shadow byte
LAUNCH_LOCAL_BYTES = 22  # local memory a thread
LAUNCH_NUMBER = 23  # of the launch, counted by the machine
LAUNCH_CONSTANTS = 24  # address of the module's .const bytes
LAUNCH_CONSTANTS_BYTES = 25
LAUNCH_GLOBAL_RACES = 26  # [MEMORY] what the global race checker keeps
LAUNCH_PARAMETER_BYTES = 27
LAUNCH_THREAD_INDEX = 28  # which OS thread this is
LAUNCH_DEPENDENT = 29  # [ASYNC] 1: a programmatic dependent launch, which must execute griddepcontrol.wait
LAUNCH_TRAFFIC = 30  # [MEMORY] address of the memory counters a site: see traffic.py
LAUNCH_REGIONS = 31  # [MEMORY] address of the memory of other devices: see memory/careful_access.py
LAUNCH_SYMBOLS = 40  # address of int64[]: where each .global and .const variable lies
LAUNCH_NUM_SMS = 41
LAUNCH_STEPS = 42  # chunks that ran to their end
LAUNCH_STREAM_ORDER = 43  # [DRIVER] address of the stream checker's data: see races/stream_touch.py; or 0
LAUNCH_CLOSE_WARP = 44  # address of operation close_warp, or 0 where the kernel leaves no open work: closing.py
LAUNCH_CLOSE_BLOCK = 45
LAUNCH_FREE = 32  # fields from here on belong to other folders: add them here by name
LAUNCH_FIELDS = 64

# --- block: one array for each resident block ---
BLOCK_LAUNCH = 0  # address of the launch array
BLOCK_X = 1  # block index; y and z follow
BLOCK_Y = 2
BLOCK_Z = 3
BLOCK_LINEAR = 4  # x + grid_x * (y + grid_y * z)
BLOCK_RANK = 5  # in its cluster
BLOCK_CLUSTER = 6  # address of an array of the addresses of the cluster's block arrays, by rank
BLOCK_SHARED = 7  # address of shared memory's first byte
BLOCK_SHARED_BYTES = 8
BLOCK_SHARED_SHADOW = 9  # address of one byte a shared byte
BLOCK_SHARED_RACES = 10  # [MEMORY] address of what the shared race checker keeps
BLOCK_BARRIERS = 11  # address of the 16 named barriers: see synchronisation/barriers.py
BLOCK_NUM_WARPS = 12
BLOCK_EXITED_WARPS = 13
BLOCK_WARPS = 14  # address of the first warp's array; the next lies WARP_FIELDS further
BLOCK_PROGRESS = 15  # counts what may let a blocked warp of the cluster go on
BLOCK_CLUSTER_BARRIER = 16  # [ASYNC] state of barrier.cluster of this block
BLOCK_PROXY = 17  # [ASYNC] address of what async_copies/proxy.py keeps, or 0
BLOCK_ASYNC = 18  # [ASYNC] address of the queue of bulk copies, or 0: see async_copies/bulk_queue.py
BLOCK_PROXY_TIME = 19  # [ASYNC] counts fences and barriers
BLOCK_MAP_FENCE = 20  # [ASYNC] 1 once a thread has acquired tensor maps
BLOCK_FREE = 24
BLOCK_FIELDS = 64

# --- warp ---
WARP_BLOCK = 0  # address of the block array
WARP_LAUNCH = 1  # address of the launch array
WARP_REGISTERS = 2  # address of the register file
WARP_INDEX = 3  # in its block
WARP_LIVE = 4  # mask of the lanes that have not exited
WARP_LANES = 5  # mask of the lanes that exist
WARP_STALLED = 6  # mask of the lanes that blocked or yielded since `run` was entered
WARP_YIELDED = 7  # 1 when one of those yielded
WARP_PCS = 8  # address of int32[32]: where each lane goes on
WARP_LOCAL = 9  # address of the local memory, of lane 0; the next lane's lies LAUNCH_LOCAL_BYTES further
WARP_STATE = 10  # what `run` returned last
WARP_TOKENS = 11  # address of int64[32]: the lanes' waits at a barrier; 0 for none
WARP_PARKED_LIVE = 12  # the live lanes when a diverged group parked before an aligned instruction
WARP_PARKED = 13  # mask of the lanes so parked
WARP_PARKED_KIND = 23  # the FaultKind if they never come together
WARP_CLOCK = 14  # [MEMORY] address of the vector clock
WARP_SITE = 15  # the instruction at which it last blocked
WARP_LOCAL_SHADOW = 16  # [MEMORY] shadow of local memory, as WARP_LOCAL
WARP_COPIES = 17  # [ASYNC] address of the warp's cp.async queue, or 0: see async_copies/cp_async.py
WARP_WGMMA = 18  # [ASYNC] address of the warp's wgmma queue, or 0: see tensor_cores/wgmma.py
WARP_PROXY_SEEN = 19  # [ASYNC] BLOCK_PROXY_TIME when the warp last passed a barrier
WARP_BEFORE_DEPENDENCY = 20  # [ASYNC] 1 until griddepcontrol.wait in a dependent launch
WARP_MAX_REGISTERS = 21  # [ASYNC] what setmaxnreg set, or 0
WARP_CLUSTER_PHASE = 22  # [ASYNC] barrier.cluster: generation << 32 | lanes that arrived and have not waited
WARP_POLLS = 24  # [ASYNC] mbarrier.test_wait in vain since BLOCK_PROGRESS was WARP_POLLS_PROGRESS
WARP_POLLS_PROGRESS = 25
WARP_HIDES_BARRIER = 26  # [ASYNC] 1 while the cluster need not see an mbarrier.init of the warp
WARP_FREE = 27
WARP_FIELDS = 64

# --- what `run` returns ---
EXITED = 0
FAULT = 1
BLOCKED = 2
YIELDED = 3

# --- what an operation returns ---
DONE = 0
FAILED = 1
RETRY = 2
DONE_BUT_YIELD = 3

# --- LAUNCH_CHECKS ---
CHECK_MEMORY = 1  # live allocation, alignment
CHECK_UNINITIALIZED = 2
CHECK_RACES = 4
CHECK_ASYNC = 8  # data in flight, missing fences
COUNT_MEMORY = 16  # sectors, bank conflicts
