"""Lanes of a warp that wait for each other before an instruction which they execute together.

A group that comes alone is parked: set aside until the lanes that it needs stand at the same place. Lanes that end
after others parked before an `.aligned` instruction have gone another way: that is a divergence, found here, or by
`report_parked` when all that live are parked at different places.
"""

from __future__ import annotations

from typing import Any

from numba_kernels.cache import njit
from numba_kernels.pointers import i32_at
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.warp_state import (
    DONE,
    FAILED,
    RETRY,
    WARP_LIVE,
    WARP_PARKED,
    WARP_PARKED_KIND,
    WARP_PARKED_LIVE,
    WARP_PCS,
    WARP_SITE,
    WARP_STALLED,
)
from runtime.emulator.memory.pointers import trailing_zeros
from runtime.emulator.translation.operations import operation

Warp = Any


@njit
def _park(warp, mask, needed, site, pc, kind):
    """Sets the lanes of `mask` aside at `pc`; where all of `needed` are there now, they may all run."""
    if warp[WARP_PARKED] == 0:
        warp[WARP_PARKED_LIVE] = warp[WARP_LIVE]
    warp[WARP_PARKED] |= mask
    warp[WARP_PARKED_KIND] = kind
    warp[WARP_SITE] = site
    warp[WARP_STALLED] |= mask
    pcs = i32_at(warp[WARP_PCS])
    all_here = True
    for lane in range(32):
        if (mask >> lane) & 1:
            pcs[lane] = pc
        elif (needed >> lane) & 1 and pcs[lane] != pc:
            all_here = False
    if all_here:
        warp[WARP_STALLED] &= ~needed
    return RETRY


@operation("gather_all", "ii")
def gather_all(warp: Warp, mask: int, site: int, pc: int, kind: int) -> int:
    """The lanes of `mask` are about to run the chunk at `pc` whose instruction `site` needs all live lanes."""
    lanes, live = int(mask), warp[WARP_LIVE]
    if lanes != live:
        return _park(warp, lanes, live, site, pc, kind)
    before = warp[WARP_PARKED_LIVE]
    strict = kind != FaultKind.DEADLOCK
    warp[WARP_PARKED] = 0
    warp[WARP_PARKED_LIVE] = 0
    if strict and before != live:
        missing = before & ~live
        return report(warp, kind, site, trailing_zeros(missing), 0, live, before, 0, 0)
    return DONE


@operation("gather_members", "p")
def gather_members(warp: Warp, mask: int, site: int, members: Any) -> int:
    """Each lane of `mask` needs the live lanes of its own member mask beside it at instruction `site`."""
    lanes, live = int(mask), warp[WARP_LIVE]
    needed = 0
    for lane in range(32):
        if (lanes >> lane) & 1:
            wanted = int(members[lane])
            if (wanted >> lane) & 1 == 0:
                report(warp, FaultKind.LANE_NOT_IN_MASK, site, lane, 0, wanted, 0, 0, 0)
                return FAILED
            needed |= wanted & live
    if needed & ~lanes:
        return _park(warp, lanes, needed | lanes, site, site, FaultKind.DEADLOCK)
    warp[WARP_PARKED] &= ~lanes
    return DONE


@operation("report_parked", "")
def report_parked(warp: Warp, mask: int, site: int) -> int:
    """All live lanes are parked, and not at one place."""
    kind, live, parked = warp[WARP_PARKED_KIND], warp[WARP_LIVE], warp[WARP_PARKED]
    pcs = i32_at(warp[WARP_PCS])
    lane = trailing_zeros(live)
    here = 0
    for other in range(32):
        if (live >> other) & 1 and pcs[other] == pcs[lane]:
            here |= 1 << other
    return report(warp, kind, warp[WARP_SITE], lane, 0, here, parked, 0, 0)


@operation("report_divergence", "i")
def report_divergence(warp: Warp, mask: int, site: int, kind: int) -> int:
    """The guard of an `.aligned` instruction holds for some of the lanes alone."""
    lanes = int(mask)
    return report(warp, kind, site, trailing_zeros(lanes), 0, lanes, warp[WARP_LIVE], 0, 0)
