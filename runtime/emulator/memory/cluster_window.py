"""Addresses of the asynchronous instructions, resolved: a block of the cluster, host bytes, their shadow bytes.

Such an address is a shared one (offset, with the rank above it when `mapa` made it), or generic; a device address is
the host address itself. Errors are reported in the warp's fault record; a function that may fail returns so.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import u8_at
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import SHARED_OFFSET_MASK, SHARED_RANK_SHIFT, SHARED_WINDOW, block_at
from runtime.emulator.memory.device_memory import IS_BEING_READ, IS_IN_FLIGHT, IS_INITIALISED
from runtime.emulator.memory.pointers import address_of, fill_bytes

malloc = types.ExternalFunction("malloc", types.int64(types.int64))
realloc = types.ExternalFunction("realloc", types.int64(types.int64, types.int64))
free = types.ExternalFunction("free", types.void(types.int64))


@njit
def zeroed(size):
    """The address of new memory, to be freed."""
    address = malloc(size)
    fill_bytes(address, 0, size)
    return address


@njit
def make_room(queue, entry_bytes):
    """Room for one more entry of a list: a record with `count`, `capacity` and `entries`."""
    if queue.count == queue.capacity:
        queue.capacity = 2 * queue.capacity + 16
        queue.entries = realloc(address_of(queue.entries), queue.capacity * entry_bytes)


@njit
def is_shared(address):
    """Whether an int64 is a shared address, plain or in the generic window."""
    return 0 <= address < (1 << 32) or address >= SHARED_WINDOW


@njit
def block_of_rank(warp, site, lane, rank):
    """The block array of a rank of the warp's cluster; 0 and a fault if there is none or it has exited."""
    launch = warp.launch
    if rank < 0 or rank >= launch.cluster_size:
        report(warp, FaultKind.CLUSTER_RANK, site, lane, 0, rank, launch.cluster_size, 0, 0)
        return 0
    block = warp.block.cluster[rank]
    if rank != warp.block.rank and block.num_exited_warps == block.num_warps:
        report(warp, FaultKind.BLOCK_EXITED, site, lane, 0, rank, 0, 0, 0)
        return 0
    return address_of(block)


@njit
def shared_block(warp, site, lane, address):
    """The block array that a shared address lies in; 0 and a fault if it is none."""
    if not is_shared(address):
        report(warp, FaultKind.NOT_SHARED, site, lane, address, 0, 0, 0, 0)
        return 0
    rank = ((address & 0xFFFFFFFF) >> SHARED_RANK_SHIFT) - 1
    return address_of(warp.block) if rank < 0 else block_of_rank(warp, site, lane, rank)


@njit
def shared_host(block, address):
    """The host address of a shared address within its block."""
    return block_at(block).shared + (address & SHARED_OFFSET_MASK)


@njit
def shadow_of(warp, block, host):
    """The address of a host byte's shadow byte, in shared memory of `block` or (0) device memory; 0 if unchecked."""
    if block != 0:
        fields = block_at(block)
        if fields.shared_shadow == 0:
            return 0
        return host - fields.shared + fields.shared_shadow
    launch = warp.launch
    inside = launch.arena <= host < launch.arena + launch.arena_bytes
    return host - launch.arena + launch.arena_shadow if inside else 0


@njit
def aligned(warp, site, lane, address, multiple):
    """0, or 1 and a fault: whether an address is a multiple of `multiple` bytes (a power of two)."""
    if address & (multiple - 1):
        return report(warp, FaultKind.ASYNC_ALIGNMENT, site, lane, address, multiple, 0, 0, 0)
    return 0


@njit
def in_shared(block, host, size):
    fields = block_at(block)
    return fields.shared <= host and host + size <= fields.shared + fields.shared_bytes


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
        kind = FaultKind.IN_FLIGHT if seen & IS_IN_FLIGHT else FaultKind.SOURCE_IN_FLIGHT
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
