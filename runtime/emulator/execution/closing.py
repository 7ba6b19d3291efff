"""The end of asynchronous work when a warp, a block or a launch ends."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from runtime.emulator.async_copies.bulk_queue import drop, finish, first_into, first_unread
from runtime.emulator.async_copies.cp_async import close_copies, drop_copies
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import CHECK_ASYNC
from runtime.emulator.memory.pointers import address_of
from runtime.emulator.tensor_cores.wgmma import close_wgmma
from runtime.emulator.translation.operations import operation


@operation("close_warp", "l")
def close_warp(warp, mask, site, nothing):
    """All lanes of the warp have exited. Its bulk stores are carried out; returns 1 and a fault, or 0.

    A copy that has not read its shared memory, a wgmma that was never waited for, and, with the block's last warp, a
    copy that will still write the block's shared memory, are faults under CHECK_ASYNC: the memory may belong to another
    block by then. `warp` still counts as running in `num_exited_warps`.
    """
    checked = warp.launch.checks & CHECK_ASYNC
    pending = max(close_wgmma(warp), first_unread(warp))
    if checked and pending >= 0:
        return report(warp, FaultKind.EXIT_IN_FLIGHT, pending, 0, 0, pending, 0, 0, 0)
    if finish(warp) or close_copies(warp):
        return 1
    block = warp.block
    if checked and block.num_exited_warps + 1 == block.num_warps:
        for rank in range(warp.launch.cluster_size):
            pending = first_into(address_of(block), block.cluster[rank])
            if pending >= 0:
                return report(warp, FaultKind.EXIT_IN_FLIGHT, pending, 0, 0, pending, 0, 0, 0)
    return 0


@operation("close_block", "l")
def close_block(warp, mask, site, nothing):
    """The cluster of the warp's block has ended, or the launch is given up: frees what the block's queues hold."""
    block = warp.block
    drop(block)
    for index in range(block.num_warps):
        other = block.warps[index]
        drop_copies(other)
        close_wgmma(other)
    return 0
