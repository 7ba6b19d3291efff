"""The end of asynchronous work when a warp, a block or a launch ends."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba_kernels.pointers import i64_at
from runtime.emulator.async_copies.bulk_queue import drop, finish, first_into, first_unread
from runtime.emulator.async_copies.cp_async import close_copies
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.warp_state import (
    BLOCK_CLUSTER,
    BLOCK_EXITED_WARPS,
    BLOCK_NUM_WARPS,
    BLOCK_WARPS,
    CHECK_ASYNC,
    LAUNCH_CHECKS,
    LAUNCH_CLUSTER_SIZE,
    WARP_BLOCK,
    WARP_COPIES,
    WARP_FIELDS,
    WARP_LAUNCH,
    WARP_WGMMA,
)
from runtime.emulator.memory.cluster_window import free
from runtime.emulator.tensor_cores.wgmma import close_wgmma
from runtime.emulator.translation.operations import operation

_EXIT = int(FaultKind.EXIT_IN_FLIGHT)


@operation("close_warp", "")
def close_warp(warp, mask, site):
    """All lanes of the warp have exited. Its bulk stores are carried out; returns 1 and a fault, or 0.

    A copy that has not read its shared memory, a wgmma that was never waited for, and, with the block's last warp, a
    copy that will still write the block's shared memory, are faults under CHECK_ASYNC: the memory may belong to another
    block by then. `warp` still counts as running in BLOCK_EXITED_WARPS.
    """
    checked = i64_at(warp[WARP_LAUNCH])[LAUNCH_CHECKS] & CHECK_ASYNC
    pending = max(close_wgmma(warp), first_unread(warp))
    if checked and pending >= 0:
        return report(warp, _EXIT, pending, 0, 0, pending, 0, 0, 0)
    if finish(warp) or close_copies(warp):
        return 1
    block = i64_at(warp[WARP_BLOCK])
    if checked and block[BLOCK_EXITED_WARPS] + 1 == block[BLOCK_NUM_WARPS]:
        cluster = i64_at(block[BLOCK_CLUSTER])
        for rank in range(i64_at(warp[WARP_LAUNCH])[LAUNCH_CLUSTER_SIZE]):
            pending = first_into(warp[WARP_BLOCK], cluster[rank])
            if pending >= 0:
                return report(warp, _EXIT, pending, 0, 0, pending, 0, 0, 0)
    return 0


@operation("close_block", "")
def close_block(warp, mask, site):
    """The cluster of the warp's block has ended, or the launch is given up: frees what the block's queues hold."""
    fields = i64_at(warp[WARP_BLOCK])
    drop(warp[WARP_BLOCK])
    for index in range(fields[BLOCK_NUM_WARPS]):
        other = i64_at(fields[BLOCK_WARPS] + index * (WARP_FIELDS * 8))
        if other[WARP_COPIES] != 0:
            free(other[WARP_COPIES])
            other[WARP_COPIES] = 0
        if other[WARP_WGMMA] != 0:
            free(other[WARP_WGMMA])
            other[WARP_WGMMA] = 0
    return 0
