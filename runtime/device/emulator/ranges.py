"""Checked ranges of memory for instructions that touch more than a load or a store does.

Each function checks bounds, life, contents, data in flight and races, and reports what is wrong.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba_kernels.cache import njit
from runtime.device.emulator.access import check_range, note_range
from runtime.device.emulator.context import (
    LAUNCH_PARAMETER_BYTES,
    LAUNCH_PARAMETERS,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    WARP_LAUNCH,
)
from runtime.device.emulator.fault import FaultKind, report
from runtime.device.emulator.locate import GLOBAL, PARAM, SHADOW, check_bytes, global_place
from runtime.device.emulator.pointers import i64_at, stack_longs
from runtime.device.emulator.races import ATOMIC, LOAD, STORE
from runtime.device.emulator.window import is_shared, shared_block, shared_host

_OUT_OF_BOUNDS = int(FaultKind.OUT_OF_BOUNDS)
_WRONG_SPACE = int(FaultKind.WRONG_SPACE)


@njit
def global_range(warp, site, lane, address, size, action):
    """0, or 1 and a fault: device memory (pinned and peers' too)."""
    place = stack_longs(3)
    if global_place(warp, site, lane, address, size, action, GLOBAL, place):
        return 1
    if check_bytes(warp, site, lane, address, size, action, GLOBAL, place[SHADOW]):
        return 1
    if action == ATOMIC:  # reductions do not race with each other
        return 0
    return note_range(warp, site, lane, 0, address, size, action)


@njit
def shared_range(warp, site, lane, block, host, size, action):
    """0, or 1 and a fault: shared memory of a block array, by host address."""
    return check_range(warp, site, lane, block, host, size, action)


@njit
def read_any(warp, site, lane, address, size):
    """The host address of bytes to read at a shared, generic, device or parameter address; 0 and a fault."""
    if is_shared(address):
        block = shared_block(warp, site, lane, address)
        if block == 0:
            return 0
        host = shared_host(block, address)
        return 0 if shared_range(warp, site, lane, block, host, size, LOAD) else host
    if address >= LOCAL_WINDOW:
        report(warp, _WRONG_SPACE, site, lane, address, LOAD, size, GLOBAL, address)
        return 0
    if address >= PARAM_WINDOW:
        launch = i64_at(warp[WARP_LAUNCH])
        offset = address - PARAM_WINDOW
        if offset + size > launch[LAUNCH_PARAMETER_BYTES]:
            report(warp, _OUT_OF_BOUNDS, site, lane, offset, LOAD, size, PARAM, offset)
            return 0
        return launch[LAUNCH_PARAMETERS] + offset
    return 0 if global_range(warp, site, lane, address, size, LOAD) else address


@njit
def write_any(warp, site, lane, address, size):
    """The host address of bytes to write at a shared, generic or device address; 0 and a fault."""
    if is_shared(address):
        block = shared_block(warp, site, lane, address)
        if block == 0:
            return 0
        host = shared_host(block, address)
        return 0 if shared_range(warp, site, lane, block, host, size, STORE) else host
    if address >= PARAM_WINDOW:
        report(warp, _WRONG_SPACE, site, lane, address, STORE, size, GLOBAL, address)
        return 0
    return 0 if global_range(warp, site, lane, address, size, STORE) else address
