"""The check that bytes of shared memory written through the generic proxy are fenced for the async proxy.

TMA stores, bulk copies and wgmma read shared memory through the async proxy. Writes by `st.shared` or cp.async need a
`fence.proxy.async` before that, in the writer, or, after a synchronisation, in the warp that starts the read (PTX ISA,
"Memory consistency model", proxies).

Each 4 bytes carry a stamp: the writer's warp and the block's time, which every fence and every passed barrier moves on.
A fence covers its warp's earlier writes, and every warp's writes before the fencing warp's last synchronisation. So
there are no false reports; a program that synchronised with another warp than the writer may be missed: the race
checker is for that.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at, u32_at
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import block_at
from runtime.emulator.memory.pointers import address_of
from runtime.emulator.translation.ptx import Kernel

_WARPS = 32
_HEADER_BYTES = 8 * _WARPS  # for each warp: its writes before this time are fenced


def needs_proxy(kernel: Kernel) -> bool:
    """Whether a kernel reads shared memory through the async proxy at all."""
    return any(
        ins.opcode.startswith(("wgmma.mma_async", "cp.async.bulk", "cp.reduce.async.bulk"))
        for ins in kernel.instructions
    )


def proxy_bytes(shared_bytes: int) -> int:
    """Bytes of the array at `Block.proxy`, which is zeroed when a block starts."""
    return _HEADER_BYTES + (shared_bytes + 3) // 4 * 4


@njit
def wrote(block, warp, offset, size):
    """A warp of this block stored `size` bytes at an offset of the block's shared memory, through the generic proxy."""
    fields = block_at(block)
    if fields.proxy == 0 or block != address_of(warp.block):
        return
    stamps = u32_at(fields.proxy + _HEADER_BYTES)
    stamp = (fields.proxy_time + 1) << 5 | warp.index
    for word in range(offset >> 2, (offset + size + 3) >> 2):
        stamps[word] = stamp


@njit
def barrier_passed(block, waiting):
    """A barrier of the block is complete; `waiting` is the mask of the warps that wait at it."""
    if block.proxy != 0:
        block.proxy_time += 1
        for index in range(block.num_warps):
            if (waiting >> index) & 1:
                block.warps[index].proxy_seen = block.proxy_time


@njit
def synchronised(warp):
    """The warp saw an mbarrier's phase, or the cluster barrier's, complete."""
    fields = warp.block
    if fields.proxy != 0:
        fields.proxy_time += 1
        warp.proxy_seen = fields.proxy_time


@njit
def fence(warp):
    """The warp executed fence.proxy.async."""
    fields = warp.block
    if fields.proxy == 0:
        return
    fenced = i64_at(fields.proxy)
    fields.proxy_time += 1
    for other in range(_WARPS):
        fenced[other] = max(fenced[other], warp.proxy_seen)
    fenced[warp.index] = fields.proxy_time


@njit
def check_read(warp, site, lane, block, host, size):
    """0, or 1 and a fault: whether bytes of shared memory may be read through the async proxy now."""
    fields = block_at(block)
    if fields.proxy == 0:
        return 0
    stamps = u32_at(fields.proxy + _HEADER_BYTES)
    offset = host - fields.shared
    first, last = offset >> 2, (offset + size + 3) >> 2
    seen = 0
    for word in range(first, last):
        seen |= stamps[word]
    if seen == 0:
        return 0
    fenced = i64_at(fields.proxy)
    for word in range(first, last):
        stamp = stamps[word]
        if stamp != 0:
            writer = stamp & 31
            if (stamp >> 5) > fenced[writer]:
                return report(warp, FaultKind.MISSING_PROXY_FENCE, site, lane, word * 4, writer, 0, 0, 0)
            stamps[word] = 0
    return 0
