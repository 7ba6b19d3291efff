"""Checked ranges of memory for instructions that touch more than a load or a store does.

Each function checks bounds, life, contents, data in flight and races, and reports faults. The checks themselves are two
operations, called by symbol. A write passes the host address of its bytes, `source`, since two writes of the same value
are no race; 0 stands for bytes that do not lie in one piece.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import LOCAL_WINDOW, PARAM_WINDOW
from runtime.emulator.memory.careful_access import check_range, note_range
from runtime.emulator.memory.cluster_window import is_shared, shared_block, shared_host
from runtime.emulator.memory.locate import GLOBAL, PARAM, SHADOW, check_bytes, global_place
from runtime.emulator.memory.pointers import address_of, stack_longs
from runtime.emulator.races.accesses import ATOMIC, LOAD, STORE
from runtime.emulator.translation.operations import compiled_once


@compiled_once("lllllll")
def range_check(warp, site, lane, block, host, size, action, source):
    """A range of shared memory of a block array, or (0) of device memory, pinned and peers' too."""
    if block != 0:
        return check_range(warp, site, lane, block, host, size, action, source)
    place = stack_longs(3)
    if global_place(warp, site, lane, host, size, action, GLOBAL, place):
        return 1
    if check_bytes(warp, site, lane, host, size, action, GLOBAL, place[SHADOW]):
        return 1
    if action == ATOMIC:  # reductions do not race with each other
        return 0
    return note_range(warp, site, lane, types.int64(0), host, size, action, source)


@compiled_once("lllllll")
def range_find(warp, site, lane, address, size, action, place, source):
    """A range at a shared, generic, device or (to read) parameter address; its host address goes to `place`."""
    block, host = types.int64(0), address
    if is_shared(address):
        block = shared_block(warp, site, lane, address)
        if block == 0:
            return 1
        host = shared_host(block, address)
    elif address >= (PARAM_WINDOW if action == STORE else LOCAL_WINDOW):
        return report(warp, FaultKind.WRONG_SPACE, site, lane, address, action, size, GLOBAL, address)
    elif address >= PARAM_WINDOW:
        launch, offset = warp.launch, address - PARAM_WINDOW
        if offset + size > launch.parameter_bytes:
            return report(warp, FaultKind.OUT_OF_BOUNDS, site, lane, offset, action, size, PARAM, offset)
        i64_at(place)[0] = launch.parameters + offset
        return 0
    i64_at(place)[0] = host
    return range_check(warp, site, lane, block, host, size, action, source)


@njit
def global_range(warp, site, lane, address, size, action, source):
    """0, or 1 and a fault: device memory (pinned and peers' too)."""
    return range_check(warp, site, lane, 0, address, size, action, source)


@njit
def shared_range(warp, site, lane, block, host, size, action, source):
    """0, or 1 and a fault: shared memory of a block array, by host address."""
    return range_check(warp, site, lane, block, host, size, action, source)


@njit
def read_any(warp, site, lane, address, size):
    """The host address of bytes to read at a shared, generic, device or parameter address; 0 and a fault."""
    place = stack_longs(1)
    failed = range_find(warp, site, lane, address, size, LOAD, address_of(place), 0)
    return types.int64(0) if failed else place[0]


@njit
def write_any(warp, site, lane, address, size, source):
    """The host address of bytes to write at a shared, generic or device address; 0 and a fault."""
    place = stack_longs(1)
    failed = range_find(warp, site, lane, address, size, STORE, address_of(place), source)
    return types.int64(0) if failed else place[0]
