"""An mbarrier's 64 bits in shared memory, in an encoding of ours, and the steps of its phase.

Bits 0-19 arrivals still pending in this phase, 20-39 arrivals expected of each phase, 40-61 the transaction count
plus 2^21, 62 the phase's parity, 63 set while the object is valid. All arithmetic is int64: a valid object is negative.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.memory.device_memory import IS_IN_FLIGHT, IS_INITIALISED
from runtime.emulator.memory.locate import (
    aligned,
    in_shared,
    shadow_of,
    shared_block,
    shared_host,
)
from runtime.emulator.races.vector_clocks import complete, release
from runtime.emulator.translation.operations import compiled_once

MAX_COUNT = (1 << 20) - 1
_FIELD = MAX_COUNT
_BIAS = 1 << 21
_TX_FIELD = (1 << 22) - 1
_PARITY = 1 << 62
_VALID = -(1 << 63)


@njit
def fresh(count):
    """The object as `mbarrier.init` leaves it."""
    return _VALID | _BIAS << 40 | count << 20 | count


@njit
def is_valid(word):
    return word < 0


@njit
def pending_of(word):
    return word & _FIELD


@njit
def transactions_of(word):
    return ((word >> 40) & _TX_FIELD) - _BIAS


@njit
def parity_of(word):
    """The parity of the phase under way: 0 after init."""
    return (word >> 62) & 1


@njit
def progress(warp):
    """Counts an event that a blocked warp of the cluster may have waited for."""
    cluster = warp.block.cluster
    for rank in range(warp.launch.cluster_size):
        cluster[rank].progress += 1


@compiled_once("llll")
def mbarrier_at(warp, site, lane, address, is_new):
    """The host address of an mbarrier; 0 and a fault if it is none. With `is_new` it need not be initialised."""
    block = shared_block(warp, site, lane, address)
    if block == 0:
        return 0
    host = shared_host(block, address)
    if aligned(warp, site, lane, address, 8):
        return 0
    if not in_shared(block, host, 8):
        report(warp, FaultKind.MBARRIER_INVALID, site, lane, address, 0, 0, 0, 0)
        return 0
    if not is_new:
        at = shadow_of(warp, block, host)
        shadow = i64_at(at)[0] if at != 0 else IS_INITIALISED
        if not shadow & IS_INITIALISED or shadow & IS_IN_FLIGHT or not is_valid(i64_at(host)[0]):
            report(warp, FaultKind.MBARRIER_INVALID, site, lane, address, 0, 0, 0, 0)
            return 0
    return host


@njit
def _settle(warp, host):
    """Ends the phase if no arrival or transaction is pending."""
    word = i64_at(host)[0]
    if pending_of(word) == 0 and transactions_of(word) == 0:
        count = (word >> 20) & _FIELD
        i64_at(host)[0] = (word ^ _PARITY) & ~_FIELD | count
        complete(warp, host)
        progress(warp)
        return 1
    return 0


@compiled_once("llll")
def add_transactions(warp, site, lane, host, count):
    """expect_tx (positive) or complete_tx (negative). Returns -1 and a fault, or 1 when the phase ended, or 0."""
    word = i64_at(host)[0]
    total = transactions_of(word) + count
    if total < -MAX_COUNT or total > MAX_COUNT:
        report(warp, FaultKind.MBARRIER_TRANSACTIONS, site, lane, host, total, 0, 0, 0)
        return -1
    i64_at(host)[0] = word & ~(_TX_FIELD << 40) | (total + _BIAS) << 40
    return _settle(warp, host) if count < 0 else 0


@compiled_once("lllll")
def arrive(warp, site, lane, host, count, drop):
    """`count` arrivals; with `drop` the next phases expect as many fewer. Result as `add_transactions`."""
    word = i64_at(host)[0]
    if count < 1 or count > pending_of(word):
        report(warp, FaultKind.MBARRIER_ARRIVALS, site, lane, host, count, pending_of(word), 0, 0)
        return -1
    release(warp, host, 1)
    word -= count
    if drop:
        word -= count << 20
    i64_at(host)[0] = word
    return _settle(warp, host)


@njit
def add_pending(warp, site, lane, host, count):
    """More arrivals pending in this phase, which will come from cp.async. Returns 1 and a fault, or 0."""
    word = i64_at(host)[0]
    if pending_of(word) + count > MAX_COUNT:
        return report(warp, FaultKind.MBARRIER_ARRIVALS, site, lane, host, count, pending_of(word), 0, 0)
    i64_at(host)[0] = word + count
    return 0
