"""Faults of an emulated kernel: their kinds, the record that compiled code fills, the exception made of it.

A kind's message may use {address:#x} and {a}, {b}, {c}, {d}, numbers whose meaning is the kind's own.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from enum import IntEnum

from runtime.emulator.records import Long, Record
from runtime.emulator.translation.operations import compiled_once
from runtime.errors import DeviceError


class Fault(Record):
    """The first fault of an OS thread of a launch; `kind` is 0 before it."""

    kind, site, lane = Long(), Long(), Long()  # site: the instruction's index
    warp, block = Long(), Long()  # numbers: in the block, and `Block.linear`
    address, a, b, c, d = Long(), Long(), Long(), Long(), Long()


class FaultKind(IntEnum):
    """Each folder adds its own; numbers are never used twice."""

    # control [CORE]: 1 …
    TRAP = 1
    ASSERT = 2
    DIVERGENT_BARRIER = 3
    DIVERGENT_ALIGNED = 4
    BARRIER_COUNT = 5
    BARRIER_NUMBER = 6
    DEADLOCK = 7
    BRANCH_INDEX = 8
    LANE_NOT_IN_MASK = 9
    # memory and races [MEMORY]: 100 …
    OUT_OF_BOUNDS = 100
    ACCESS_AFTER_FREE = 101
    MISALIGNED = 102
    UNINITIALIZED = 103
    WRONG_SPACE = 104
    NO_PEER_ACCESS = 105
    LANES_DIFFER = 106
    NC_WRITTEN = 107
    RACE_READ_AFTER_WRITE = 108
    RACE_WRITE_AFTER_WRITE = 109
    RACE_WRITE_AFTER_READ = 110
    RACE_WITHIN_WARP = 111
    IMMUTABLE_WRITTEN = 112
    # warp-level [ALU]: 200 …
    # asynchronous work, tensor cores [ASYNC]: 300 …
    IN_FLIGHT = 300
    SOURCE_IN_FLIGHT = 301
    BEFORE_DEPENDENCY = 302
    MISSING_PROXY_FENCE = 303
    ACCUMULATOR_IN_FLIGHT = 304
    MISSING_WGMMA_FENCE = 305
    WGMMA_DESCRIPTOR = 306
    MBARRIER_INVALID = 307
    MBARRIER_ARRIVALS = 308
    MBARRIER_TRANSACTIONS = 309
    ASYNC_ALIGNMENT = 310
    ASYNC_SIZE = 311
    TENSOR_MAP = 312
    MISSING_TENSOR_MAP_FENCE = 313
    CLUSTER_RANK = 314
    CLUSTER_BARRIER = 315
    EXIT_IN_FLIGHT = 316
    REGISTER_BUDGET = 317
    BLOCK_EXITED = 318
    WARPGROUP = 319
    NOT_SHARED = 320
    MISSING_INIT_FENCE = 321
    # streams and what outlives them [DRIVER]: 400 …
    MISSING_EVENT = 400
    USE_AFTER_FREE = 401
    LEAK = 402
    RANKS_DIFFER = 403


MESSAGES: dict[FaultKind, str] = {
    FaultKind.TRAP: "trap",
    FaultKind.ASSERT: "an assertion of the kernel failed",
    FaultKind.DIVERGENT_BARRIER: "a barrier that the warp's lanes do not reach together (lanes {a:#010x} of {b:#010x})",
    FaultKind.DIVERGENT_ALIGNED: "an .aligned instruction under divergence (lanes {a:#010x} of {b:#010x})",
    FaultKind.BARRIER_COUNT: "barrier {a} with a thread count of {b}: multiples of 32 up to {c}, the same for all",
    FaultKind.BARRIER_NUMBER: "barrier {a}: there are 0 to 15",
    FaultKind.DEADLOCK: "deadlock",
    FaultKind.BRANCH_INDEX: "brx.idx with index {a} of {b} targets",
    FaultKind.IN_FLIGHT: "{address:#x} is the target of an asynchronous copy in flight (issued by instruction {a})",
    FaultKind.SOURCE_IN_FLIGHT: "{address:#x} is overwritten while an asynchronous operation still reads it",
    FaultKind.BEFORE_DEPENDENCY: "a dependent launch touches global memory at {address:#x}, which was not declared "
    "immutable, before griddepcontrol.wait",
    FaultKind.MISSING_PROXY_FENCE: "the async proxy reads shared memory at {address:#x} that warp {a} wrote through "
    "the generic proxy, without fence.proxy.async between",
    FaultKind.ACCUMULATOR_IN_FLIGHT: "a register of wgmma that is in flight is touched before its wgmma.wait_group",
    FaultKind.MISSING_WGMMA_FENCE: "wgmma uses a register that was written after the last wgmma.fence",
    FaultKind.WGMMA_DESCRIPTOR: "wgmma descriptor {a:#018x}: base offset, address or alignment is not that of a matrix",
    FaultKind.MBARRIER_INVALID: "{address:#x} holds no initialised mbarrier",
    FaultKind.MBARRIER_ARRIVALS: "mbarrier at {address:#x}: {a} arrivals, {b} pending (1 to 1048575 may be asked)",
    FaultKind.MBARRIER_TRANSACTIONS: "mbarrier at {address:#x}: a transaction count of {a} is out of ±1048575",
    FaultKind.ASYNC_ALIGNMENT: "{address:#x} is not aligned to {a} bytes",
    FaultKind.ASYNC_SIZE: "an asynchronous copy of {a} bytes, {b} of them from the source: not allowed",
    FaultKind.TENSOR_MAP: "the tensor map at {address:#x} does not fit the instruction (field {a}, value {b})",
    FaultKind.MISSING_TENSOR_MAP_FENCE: "the tensor map at {address:#x} lies in global memory and this block has "
    "executed no fence.proxy.tensormap::generic.acquire",
    FaultKind.CLUSTER_RANK: "block {a} of a cluster of {b} does not exist",
    FaultKind.CLUSTER_BARRIER: "barrier.cluster: lanes {a:#010x} arrive twice, or wait without having arrived",
    FaultKind.EXIT_IN_FLIGHT: "the warp exits while its asynchronous copy (instruction {a}) still uses shared memory",
    FaultKind.REGISTER_BUDGET: "setmaxnreg {a} where a thread has {b} registers and the block {c}",
    FaultKind.BLOCK_EXITED: "{address:#x} lies in the shared memory of block {a} of the cluster, which has exited",
    FaultKind.WARPGROUP: "wgmma by warp {a} of a block of {b} warps: four consecutive warps make a warpgroup",
    FaultKind.NOT_SHARED: "{address:#x} is no address of shared memory",
    FaultKind.MISSING_INIT_FENCE: "barrier.cluster.arrive.relaxed after an mbarrier.init, without fence.mbarrier_init: "
    "the cluster need not see it",
    # Heads of memory faults; fault_text.py, which has the allocations, makes the full sentences.
    FaultKind.OUT_OF_BOUNDS: "{b} bytes at {address:#x} are not inside an allocation",
    FaultKind.ACCESS_AFTER_FREE: "{b} bytes at {address:#x} have been freed",
    FaultKind.MISALIGNED: "{b} bytes at {address:#x} are not aligned to {d}",
    FaultKind.UNINITIALIZED: "{b} bytes at {address:#x} are read before anything wrote them",
    FaultKind.WRONG_SPACE: "address {address:#x} is not in the state space of the instruction",
    FaultKind.NO_PEER_ACCESS: "{b} bytes at {address:#x} belong to another device",
    FaultKind.LANES_DIFFER: "two lanes of one instruction write different values to {address:#x}",
    FaultKind.NC_WRITTEN: "a .nc load of {address:#x}, which this launch has written",
    FaultKind.RACE_READ_AFTER_WRITE: "a race: a read of {address:#x} that nothing orders after a write of it",
    FaultKind.RACE_WRITE_AFTER_WRITE: "a race: a write to {address:#x} that nothing orders after another write",
    FaultKind.RACE_WRITE_AFTER_READ: "a race: a write to {address:#x} that nothing orders after a read of it",
    FaultKind.RACE_WITHIN_WARP: (
        "a race: a lane reads what another lane of its warp wrote to {address:#x}, with no bar.warp.sync between"
    ),
    FaultKind.IMMUTABLE_WRITTEN: "{b} bytes at {address:#x} are written, which were declared immutable",
    FaultKind.LANE_NOT_IN_MASK: "a lane executes a .sync instruction whose member mask {a:#010x} lacks it",
    FaultKind.MISSING_EVENT: "no event orders this access to {address:#x} and that of another stream's work",
    FaultKind.USE_AFTER_FREE: "memory at {address:#x} is freed while another stream's work may still use it",
    FaultKind.LEAK: "{a} allocations are alive",
}


@compiled_once("llllllll")
def report(warp, kind, site, lane, address, a, b, c, d):
    """Fills the fault record (the first fault stays) and returns 1, for an operation to return."""
    fault = warp.launch.fault
    if fault.kind == 0:
        fault.kind, fault.site, fault.lane = kind, site, lane
        fault.warp, fault.block, fault.address = warp.index, warp.block.linear, address
        fault.a, fault.b, fault.c, fault.d = a, b, c, d
    return 1


class EmulatorFault(DeviceError):
    """A kernel did something that hardware forbids or that only works by luck.

    Attributes:
        kind: the FaultKind.
        kernel: the kernel's name.
        line: the PTX line, counted from 1; 0 where no instruction is to blame.
        text: that line.
        block: block index (x, y, z).
        thread: thread index (x, y, z).
        address: the address concerned, or 0.
    """

    def __init__(
        self,
        kind: FaultKind,
        detail: str,
        *,
        kernel: str,
        line: int,
        text: str,
        block: tuple[int, int, int],
        thread: tuple[int, int, int],
        address: int,
    ) -> None:
        self.kind, self.kernel, self.line, self.text = kind, kernel, line, text
        self.block, self.thread, self.address = block, thread, address
        where = f"block {block}, thread {thread}"
        super().__init__(f"{kind.name}: {detail}\n  kernel {kernel}, {where}\n  PTX line {line}: {text.strip()}")


def message_of(kind: FaultKind, fault: Fault) -> str:
    """The sentence for a filled record."""
    return MESSAGES[kind].format(address=fault.address, a=fault.a, b=fault.b, c=fault.c, d=fault.d)
