"""Faults of an emulated kernel: their kinds, the record that compiled code fills, the exception made of it."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from enum import IntEnum
from typing import Self

from runtime.emulator.records import Long, Record
from runtime.emulator.translation.operations import compiled_once
from runtime.errors import DeviceError


class Fault(Record):
    """The first fault of an OS thread of a launch; `kind` is 0 before it."""

    kind, site, lane = Long(), Long(), Long()  # site: the instruction's index
    warp, block = Long(), Long()  # numbers: in the block, and `Block.linear`
    address, a, b, c, d = Long(), Long(), Long(), Long(), Long()


class FaultKind(IntEnum):
    """Kinds by number, which compiled code reports, with their messages.

    A message may use {address:#x} and {a}, {b}, {c}, {d}, numbers whose meaning is the kind's own; those of memory also
    {what} (the access), {there} and {place} (the memory), and {other} (the other access): `fault_text.describe`. The
    driver makes those that are empty here.
    """

    message: str

    def __new__(cls, number: int, message: str = "") -> Self:
        kind = int.__new__(cls, number)
        kind._value_, kind.message = number, message
        return kind

    # control
    TRAP = 1, "trap"
    ASSERT = 2, "an assertion of the kernel failed"
    DIVERGENT_BARRIER = 3, "a barrier that the warp's lanes do not reach together (lanes {a:#010x} of {b:#010x})"
    DIVERGENT_ALIGNED = 4, "an .aligned instruction under divergence (lanes {a:#010x} of {b:#010x})"
    BARRIER_COUNT = 5, "barrier {a} with a thread count of {b}: multiples of 32 up to {c}, the same for all"
    BARRIER_NUMBER = 6, "barrier {a}: there are 0 to 15"
    DEADLOCK = 7, "deadlock"
    BRANCH_INDEX = 8, "brx.idx with index {a} of {b} targets"
    LANE_NOT_IN_MASK = 9, "a lane executes a .sync instruction whose member mask {a:#010x} lacks it"
    # memory and races
    OUT_OF_BOUNDS = 100, "{what}, which is outside of every allocation: {there}"
    ACCESS_AFTER_FREE = 101, "{what}, which has been freed: {there}"
    MISALIGNED = 102, "{what}, which is no multiple of {b}"
    UNINITIALIZED = 103, "{what}, which nothing has written: {there}"
    WRONG_SPACE = 104, "{what}, which is not in the instruction's state space: {there}"
    NO_PEER_ACCESS = 105, "{what}, which belongs to another device: {there}"
    LANES_DIFFER = 106, "two lanes of this instruction write different values to {place}"
    NC_WRITTEN = (
        107, "a .nc load of {place}, which {other} has written in this launch: .nc is for data that nobody writes",
    )  # fmt: skip
    RACE_READ_AFTER_WRITE = 108, "a race: this reads {place}, which {other} has written, and nothing orders the two"
    RACE_WRITE_AFTER_WRITE = (
        109, "a race: this writes {place}, which {other} has written another value to, and nothing orders the two",
    )  # fmt: skip
    RACE_WRITE_AFTER_READ = 110, "a race: this writes {place}, which {other} has read, and nothing orders the two"
    RACE_WITHIN_WARP = (
        111, "a race: this reads {place}, which {other} of the same warp has written, with no bar.warp.sync between "
        "the two",
    )  # fmt: skip
    IMMUTABLE_WRITTEN = 112, "{what}, which was declared immutable: {there}"
    # asynchronous work, tensor cores
    IN_FLIGHT = 300, "{address:#x} is the target of an asynchronous copy in flight (issued by instruction {a})"
    SOURCE_IN_FLIGHT = 301, "{address:#x} is overwritten while an asynchronous operation still reads it"
    BEFORE_DEPENDENCY = (
        302, "a dependent launch touches global memory at {address:#x}, which was not declared immutable, before "
        "griddepcontrol.wait (strong loads may, of what works that had ended have written)",
    )  # fmt: skip
    MISSING_PROXY_FENCE = (
        303, "the async proxy reads shared memory at {address:#x} that warp {a} wrote through the generic proxy, "
        "without fence.proxy.async between",
    )  # fmt: skip
    ACCUMULATOR_IN_FLIGHT = 304, "a register of wgmma that is in flight is touched before its wgmma.wait_group"
    MISSING_WGMMA_FENCE = 305, "wgmma uses a register that was written after the last wgmma.fence"
    WGMMA_DESCRIPTOR = 306, "wgmma descriptor {a:#018x}: base offset, address or alignment is not that of a matrix"
    MBARRIER_INVALID = 307, "{address:#x} holds no initialised mbarrier"
    MBARRIER_ARRIVALS = 308, "mbarrier at {address:#x}: {a} arrivals, {b} pending (1 to 1048575 may be asked)"
    MBARRIER_TRANSACTIONS = 309, "mbarrier at {address:#x}: a transaction count of {a} is out of ±1048575"
    ASYNC_ALIGNMENT = 310, "{address:#x} is not aligned to {a} bytes"
    ASYNC_SIZE = 311, "an asynchronous copy of {a} bytes, {b} of them from the source: not allowed"
    TENSOR_MAP = 312, "the tensor map at {address:#x} does not fit the instruction (field {a}, value {b})"
    MISSING_TENSOR_MAP_FENCE = (
        313, "the tensor map at {address:#x} lies in global memory and this block has executed no "
        "fence.proxy.tensormap::generic.acquire",
    )  # fmt: skip
    CLUSTER_RANK = 314, "block {a} of a cluster of {b} does not exist"
    CLUSTER_BARRIER = 315, "barrier.cluster: lanes {a:#010x} arrive twice, or wait without having arrived"
    EXIT_IN_FLIGHT = 316, "the warp exits while its asynchronous copy (instruction {a}) still uses shared memory"
    REGISTER_BUDGET = 317, "setmaxnreg {a} where a thread has {b} registers and the block {c}"
    BLOCK_EXITED = 318, "{address:#x} lies in the shared memory of block {a} of the cluster, which has exited"
    WARPGROUP = 319, "wgmma by warp {a} of a block of {b} warps: four consecutive warps make a warpgroup"
    NOT_SHARED = 320, "{address:#x} is no address of shared memory"
    MISSING_INIT_FENCE = (
        321, "barrier.cluster.arrive.relaxed after an mbarrier.init, without fence.mbarrier_init: the cluster need "
        "not see it",
    )  # fmt: skip
    # streams and what outlives them
    MISSING_EVENT = 400, "no event orders this access to {address:#x} and that of another stream's work"
    USE_AFTER_FREE = 401
    LEAK = 402
    RANKS_DIFFER = 403


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
