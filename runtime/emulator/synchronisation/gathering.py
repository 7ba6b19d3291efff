"""Lanes of a warp that wait for each other before an instruction which they execute together.

A group that comes alone is parked: set aside until the lanes that it needs stand at the same place. Lanes that end
after others parked before an `.aligned` instruction have gone another way: that is a divergence, found here, or by
`report_parked` when all that live are parked at different places.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba_kernels.cache import njit
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import DONE, FAILED, RETRY
from runtime.emulator.memory.pointers import trailing_zeros
from runtime.emulator.translation.operations import operation


@njit
def _park(warp, mask, needed, site, pc, kind):
    """Sets the lanes of `mask` aside at `pc`; where all of `needed` are there now, they may all run."""
    if warp.parked == 0:
        warp.parked_live = warp.live
    warp.parked |= mask
    warp.parked_kind = kind
    warp.site = site
    warp.stalled |= mask
    pcs = warp.pcs
    all_here = True
    for lane in range(32):
        if (mask >> lane) & 1:
            pcs[lane] = pc
        elif (needed >> lane) & 1 and pcs[lane] != pc:
            all_here = False
    if all_here:
        warp.stalled &= ~needed
    return RETRY


@operation("gather_all", "ll")
def gather_all(warp, mask, site, pc, kind):
    """The lanes of `mask` are about to run the chunk at `pc` whose instruction `site` needs all live lanes."""
    lanes, live = mask, warp.live
    if lanes != live:
        return _park(warp, lanes, live, site, pc, kind)
    before = warp.parked_live
    strict = kind != FaultKind.DEADLOCK
    warp.parked = 0
    warp.parked_live = 0
    if strict and before != live:
        missing = before & ~live
        return report(warp, kind, site, trailing_zeros(missing), 0, live, before, 0, 0)
    return DONE


@operation("gather_members", "p")
def gather_members(warp, mask, site, members):
    """Each lane of `mask` needs the live lanes of its own member mask beside it at instruction `site`."""
    lanes, live = mask, warp.live
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
    warp.parked &= ~lanes
    return DONE


@operation("report_parked", "")
def report_parked(warp, mask, site):
    """All live lanes are parked, and not at one place."""
    kind, live, parked = warp.parked_kind, warp.live, warp.parked
    pcs = warp.pcs
    lane = trailing_zeros(live)
    here = 0
    for other in range(32):
        if (live >> other) & 1 and pcs[other] == pcs[lane]:
            here |= 1 << other
    return report(warp, kind, warp.site, lane, 0, here, parked, 0, 0)


@operation("report_divergence", "l")
def report_divergence(warp, mask, site, kind):
    """The guard of an `.aligned` instruction holds for some of the lanes alone."""
    lanes = mask
    return report(warp, kind, site, trailing_zeros(lanes), 0, lanes, warp.live, 0, 0)
