"""What goes wrong in an emulated kernel: the kinds, the record that compiled code fills, the exception made of it.

The record is int64[16]: kind, site (index of the instruction), lane, warp, linear block, address, then auxiliary numbers
whose meaning is the kind's own. A kind's message may use {address:#x}, {a}, {b}, {c}, {d}.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from numba_kernels.cache import njit
from runtime.device.emulator.context import (
    BLOCK_LINEAR,
    LAUNCH_FAULT,
    WARP_BLOCK,
    WARP_INDEX,
    WARP_LAUNCH,
)
from runtime.device.emulator.pointers import i64_at

RECORD_FIELDS = 16


class FaultKind(IntEnum):
    """Each room adds its own; numbers are never used twice."""

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
    # warp-level [ALU]: 200 …
    # asynchronous work, tensor cores [ASYNC]: 300 …


MESSAGES: dict[FaultKind, str] = {
    FaultKind.TRAP: "trap",
    FaultKind.ASSERT: "an assertion of the kernel failed",
    FaultKind.DIVERGENT_BARRIER: "a barrier that the warp's lanes do not reach together (lanes {a:#010x} of {b:#010x})",
    FaultKind.DIVERGENT_ALIGNED: "an .aligned instruction under divergence (lanes {a:#010x} of {b:#010x})",
    FaultKind.BARRIER_COUNT: "barrier {a} with a thread count of {b}: a positive multiple of 32, the same for all, at most {c}",
    FaultKind.BARRIER_NUMBER: "barrier {a}: there are 0 to 15",
    FaultKind.DEADLOCK: "deadlock",
    FaultKind.BRANCH_INDEX: "brx.idx with index {a} of {b} targets",
    FaultKind.LANE_NOT_IN_MASK: "a lane executes a .sync instruction whose member mask {a:#010x} lacks it",
}


@njit
def report(warp, kind, site, lane, address, a, b, c, d):  # type: ignore[no-untyped-def]
    """Fills the fault record (the first fault stays) and returns 1, for an operation to return."""
    record = i64_at(i64_at(warp[WARP_LAUNCH])[LAUNCH_FAULT])
    if record[0] == 0:
        record[0] = kind
        record[1] = site
        record[2] = lane
        record[3] = warp[WARP_INDEX]
        record[4] = i64_at(warp[WARP_BLOCK])[BLOCK_LINEAR]
        record[5] = address
        record[6] = a
        record[7] = b
        record[8] = c
        record[9] = d
    return 1


class EmulatorFault(Exception):
    """A kernel did what hardware forbids or what only works by luck.

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


def message_of(kind: FaultKind, record: Any) -> str:
    """The sentence for a filled record."""
    a, b, c, d = (int(value) for value in record[6:10])
    return MESSAGES[kind].format(address=int(record[5]), a=a, b=b, c=c, d=d)
