"""The mbarrier instructions: init, inval, arrive and arrive_drop in all forms, expect_tx, complete_tx, waits.

A wait that finds its phase under way first carries out the work in flight towards the mbarrier (bulk copies, cp.async
arrivals): that is when asynchronous work lands. If the phase is still not over, `try_wait` blocks until another warp
makes progress, so a deadlock is detected; `test_wait` returns false and lets others run, until thousands of calls have
seen no progress: then it blocks too.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at
from runtime.emulator.async_copies.bulk_queue import land_for
from runtime.emulator.async_copies.cp_async import land_arrivals
from runtime.emulator.async_copies.proxy import synchronised
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import DONE, DONE_BUT_YIELD, FAILED, RETRY
from runtime.emulator.memory.locate import landed
from runtime.emulator.memory.pointers import address_of
from runtime.emulator.races.vector_clocks import acquire
from runtime.emulator.synchronisation.mbarrier_state import (
    MAX_COUNT,
    add_transactions,
    arrive,
    fresh,
    mbarrier_at,
    parity_of,
    pending_of,
)
from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.operations import operation
from runtime.emulator.translation.ptx import Address, Instruction, Integer, Sink

_MOST_POLLS = 1 << 14
_DROP, _NO_COMPLETE, _EXPECT = 1, 2, 4
_WAIT_PARITY, _WAIT_BLOCKS = 1, 2


@operation("mbarrier_init", "qlp")
def mbarrier_init(warp, mask, site, addresses, offset, counts):
    for lane in range(32):
        if (mask >> lane) & 1:
            address, count = addresses[lane] + offset, types.int64(counts[lane])
            host = mbarrier_at(warp, site, lane, address, True)
            if host == 0:
                return FAILED
            if count < 1 or count > MAX_COUNT:
                return report(warp, FaultKind.MBARRIER_ARRIVALS, site, lane, address, count, 0, 0, 0)
            i64_at(host)[0] = fresh(count)
            landed(warp, address_of(warp.block), host, 8)
            warp.hides_barrier = 1
    return DONE


@operation("mbarrier_inval", "ql")
def mbarrier_inval(warp, mask, site, addresses, offset):
    for lane in range(32):
        if (mask >> lane) & 1:
            host = mbarrier_at(warp, site, lane, addresses[lane] + offset, False)
            if host == 0:
                return FAILED
            i64_at(host)[0] = 0
    return DONE


@operation("mbarrier_arrive", "qqlpl")
def mbarrier_arrive(warp, mask, site, states, addresses, offset, counts, flags):
    """`counts` are arrivals, or with _EXPECT the bytes to expect before one arrival."""
    for lane in range(32):
        if (mask >> lane) & 1:
            host = mbarrier_at(warp, site, lane, addresses[lane] + offset, False)
            if host == 0:
                return FAILED
            before, count = i64_at(host)[0], types.int64(counts[lane])
            if flags & _EXPECT:
                if add_transactions(warp, site, lane, host, count) < 0:
                    return FAILED
                count = 1
            if flags & _NO_COMPLETE and count >= pending_of(before):
                return report(warp, FaultKind.MBARRIER_ARRIVALS, site, lane, host, count, pending_of(before) - 1, 0, 0)
            if arrive(warp, site, lane, host, count, flags & _DROP) < 0:
                return FAILED
            states[lane] = before
    return DONE


@operation("mbarrier_transactions", "qlpl")
def mbarrier_transactions(warp, mask, site, addresses, offset, counts, sign):
    for lane in range(32):
        if (mask >> lane) & 1:
            host = mbarrier_at(warp, site, lane, addresses[lane] + offset, False)
            if host == 0 or add_transactions(warp, site, lane, host, types.int64(counts[lane]) * sign) < 0:
                return FAILED
    return DONE


@njit
def _polls_in_vain(warp):
    """Whether a warp has polled so often, without progress in its block, that it may as well wait."""
    progress = warp.block.progress
    if warp.polled_progress != progress:
        warp.polled_progress, warp.num_polls = progress, 0
    warp.num_polls += 1
    return warp.num_polls > _MOST_POLLS


@operation("mbarrier_wait", "pqlql")
def mbarrier_wait(warp, mask, site, result, addresses, offset, wanted, flags):
    """`wanted` is the parity of the phase to wait for, or the state that an arrive gave."""
    done = types.uint32(0)
    for lane in range(32):
        if (mask >> lane) & 1:
            host = mbarrier_at(warp, site, lane, addresses[lane] + offset, False)
            if host == 0:
                return FAILED
            token = wanted[lane]
            parity = token & 1 if flags & _WAIT_PARITY else parity_of(token)
            if parity_of(i64_at(host)[0]) == parity and (land_arrivals(warp, host) or land_for(warp, host)):
                return FAILED
            if parity_of(i64_at(host)[0]) != parity:
                done |= types.uint32(1) << types.uint32(lane)
                acquire(warp, host)
    if done == 0 and (flags & _WAIT_BLOCKS or _polls_in_vain(warp)):
        return RETRY
    if done != 0:
        synchronised(warp)
    result[0] = done
    return DONE if done == mask else DONE_BUT_YIELD


_PLAIN = ("shared", "shared::cta", "shared::cluster", "cta", "cluster", "release", "acquire", "relaxed", "b64")


def lower_arrive(low: Lowering, ins: Instruction) -> None:
    low.only(*_PLAIN, "expect_tx", "noComplete", first=2)
    operands = ins.operands
    if isinstance(operands[0], Address):
        operands = (Sink(), *operands)
    flags = _DROP if ins.parts[1] == "arrive_drop" else 0
    flags |= _NO_COMPLETE if "noComplete" in ins.parts else 0
    flags |= _EXPECT if "expect_tx" in ins.parts else 0
    if len(operands) not in ((3,) if flags & (_NO_COMPLETE | _EXPECT) else (2, 3)):
        raise low.refuse(f"{len(operands)} operands")
    count = low.slot(operands[2] if len(operands) == 3 else Integer(1), 32)
    base, offset = low.address(operands[1])
    low.call("mbarrier_arrive", low.destination(operands[0], 64), base, offset, count, flags)
