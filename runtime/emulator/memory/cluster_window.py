"""Addresses of the asynchronous instructions, resolved: a block of the cluster, host bytes, their shadow bytes.

Such an address is a shared one (offset, with the rank above it when `mapa` made it), or generic; a device address is
the host address itself. Errors are reported in the warp's fault record; a function that may fail returns so.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at, u8_at
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.warp_state import (
    BLOCK_CLUSTER,
    BLOCK_EXITED_WARPS,
    BLOCK_NUM_WARPS,
    BLOCK_SHARED,
    BLOCK_SHARED_BYTES,
    BLOCK_SHARED_SHADOW,
    LAUNCH_ARENA,
    LAUNCH_ARENA_BYTES,
    LAUNCH_ARENA_SHADOW,
    LAUNCH_CLUSTER_SIZE,
    SHARED_OFFSET_MASK,
    SHARED_RANK_SHIFT,
    SHARED_WINDOW,
    WARP_BLOCK,
    WARP_LAUNCH,
)
from runtime.emulator.memory.device_memory import IS_BEING_READ, IS_IN_FLIGHT, IS_INITIALISED

_CLUSTER_RANK = int(FaultKind.CLUSTER_RANK)
_NOT_SHARED = int(FaultKind.NOT_SHARED)
_BLOCK_EXITED = int(FaultKind.BLOCK_EXITED)
_IN_FLIGHT = int(FaultKind.IN_FLIGHT)
_SOURCE_IN_FLIGHT = int(FaultKind.SOURCE_IN_FLIGHT)
_ALIGNMENT = int(FaultKind.ASYNC_ALIGNMENT)

malloc = types.ExternalFunction("malloc", types.int64(types.int64))
realloc = types.ExternalFunction("realloc", types.int64(types.int64, types.int64))
free = types.ExternalFunction("free", types.void(types.int64))


@njit
def is_shared(address):
    """Whether an int64 is a shared address, plain or in the generic window."""
    return 0 <= address < (1 << 32) or address >= SHARED_WINDOW


@njit
def block_of_rank(warp, site, lane, rank):
    """The block array of a rank of the warp's cluster; 0 and a fault if there is none or it has exited."""
    launch = i64_at(warp[WARP_LAUNCH])
    if rank < 0 or rank >= launch[LAUNCH_CLUSTER_SIZE]:
        report(warp, _CLUSTER_RANK, site, lane, 0, rank, launch[LAUNCH_CLUSTER_SIZE], 0, 0)
        return 0
    found = i64_at(i64_at(warp[WARP_BLOCK])[BLOCK_CLUSTER])[rank]
    block = i64_at(found)
    if found != warp[WARP_BLOCK] and block[BLOCK_EXITED_WARPS] == block[BLOCK_NUM_WARPS]:
        report(warp, _BLOCK_EXITED, site, lane, 0, rank, 0, 0, 0)
        return 0
    return found


@njit
def shared_block(warp, site, lane, address):
    """The block array that a shared address lies in; 0 and a fault if it is none."""
    if not is_shared(address):
        report(warp, _NOT_SHARED, site, lane, address, 0, 0, 0, 0)
        return 0
    rank = ((address & 0xFFFFFFFF) >> SHARED_RANK_SHIFT) - 1
    return warp[WARP_BLOCK] if rank < 0 else block_of_rank(warp, site, lane, rank)


@njit
def shared_host(block, address):
    """The host address of a shared address within its block."""
    return i64_at(block)[BLOCK_SHARED] + (address & SHARED_OFFSET_MASK)


@njit
def shadow_of(warp, block, host):
    """The address of a host byte's shadow byte, in shared memory of `block` or (0) device memory; 0 if unchecked."""
    if block != 0:
        fields = i64_at(block)
        if fields[BLOCK_SHARED_SHADOW] == 0:
            return 0
        return host - fields[BLOCK_SHARED] + fields[BLOCK_SHARED_SHADOW]
    launch = i64_at(warp[WARP_LAUNCH])
    inside = launch[LAUNCH_ARENA] <= host < launch[LAUNCH_ARENA] + launch[LAUNCH_ARENA_BYTES]
    return host - launch[LAUNCH_ARENA] + launch[LAUNCH_ARENA_SHADOW] if inside else 0


@njit
def aligned(warp, site, lane, address, multiple):
    """0, or 1 and a fault: whether an address is a multiple of `multiple` bytes (a power of two)."""
    if address & (multiple - 1):
        return report(warp, _ALIGNMENT, site, lane, address, multiple, 0, 0, 0)
    return 0


@njit
def in_shared(block, host, size):
    fields = i64_at(block)
    return fields[BLOCK_SHARED] <= host and host + size <= fields[BLOCK_SHARED] + fields[BLOCK_SHARED_BYTES]


@njit
def claim(warp, site, lane, block, host, size, bit):
    """Marks bytes as the target (IS_IN_FLIGHT) or the source (IS_BEING_READ) of an asynchronous copy.

    Returns 1 and a fault if another copy in flight writes them, or, for a target, reads them.
    """
    at = shadow_of(warp, block, host)
    if at == 0:
        return 0
    shadow = u8_at(at)
    seen = 0
    for index in range(size):
        seen |= shadow[index]
        shadow[index] |= bit
    forbidden = IS_IN_FLIGHT | (IS_BEING_READ if bit == IS_IN_FLIGHT else 0)
    if seen & forbidden:
        kind = _IN_FLIGHT if seen & IS_IN_FLIGHT else _SOURCE_IN_FLIGHT
        return report(warp, kind, site, lane, host, site, 0, 0, 0)
    return 0


@njit
def _mark(warp, block, host, size, cleared, added):
    """Clears and adds bits of bytes' shadow."""
    at = shadow_of(warp, block, host)
    if at != 0:
        shadow = u8_at(at)
        for index in range(size):
            shadow[index] = (shadow[index] & ~cleared) | added


@njit
def landed(warp, block, host, size):
    """Marks bytes as written and no longer in flight."""
    _mark(warp, block, host, size, IS_IN_FLIGHT, IS_INITIALISED)


@njit
def was_read(warp, block, host, size):
    """Ends `claim` of a source."""
    _mark(warp, block, host, size, IS_BEING_READ, 0)
