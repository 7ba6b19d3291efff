"""The memory of clusters that run at once: where blocks, warps, registers, shared and local memory lie.

A *slot* holds one resident cluster and is used again for the next one. It is one flat buffer: a header (S_… fields),
the table of its blocks' arrays (BLOCK_CLUSTER), then each block with its warps. `SlotShape` has the sizes, `lay_out`
fills in every address once a launch, `begin_cluster` the fields that change from cluster to cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at, u32_at
from runtime.emulator.execution.warp_state import (
    BLOCK_BARRIERS,
    BLOCK_CLUSTER,
    BLOCK_EXITED_WARPS,
    BLOCK_FIELDS,
    BLOCK_LAUNCH,
    BLOCK_LINEAR,
    BLOCK_NUM_WARPS,
    BLOCK_PROXY,
    BLOCK_RANK,
    BLOCK_SHARED,
    BLOCK_SHARED_BYTES,
    BLOCK_SHARED_SHADOW,
    BLOCK_WARPS,
    BLOCK_X,
    BLOCK_Y,
    BLOCK_Z,
    LAUNCH_BLOCK_X,
    LAUNCH_BLOCK_Y,
    LAUNCH_CLUSTER_X,
    LAUNCH_CLUSTER_Y,
    LAUNCH_CLUSTER_Z,
    LAUNCH_DEPENDENT,
    LAUNCH_GRID_X,
    LAUNCH_GRID_Y,
    LAUNCH_THREADS,
    WARP_BEFORE_DEPENDENCY,
    WARP_BLOCK,
    WARP_FIELDS,
    WARP_INDEX,
    WARP_LANES,
    WARP_LAUNCH,
    WARP_LIVE,
    WARP_LOCAL,
    WARP_LOCAL_SHADOW,
    WARP_PCS,
    WARP_REGISTERS,
    WARP_TOKENS,
    YIELDED,
)
from runtime.emulator.execution.warp_state import WARP_STATE as WARP_STATE
from runtime.emulator.memory.pointers import address_of, copy_bytes, fill_bytes
from runtime.emulator.races.clocks import start_block
from runtime.emulator.synchronisation.barriers import BARRIERS_BYTES, reset_barriers

# --- slot header ---
S_IS_RUNNING = 0
S_CLUSTER = 1  # index of the cluster in the grid
S_LIVE_WARPS = 2
S_BLOCKS = 3  # address of the table of block arrays
S_NUM_BLOCKS = 4
S_IDLE_ROUNDS = 5  # rounds in which every warp blocked
S_POLLING_ROUNDS = 6  # rounds in which warps only polled
S_ORDER = 7  # address of int64[warps of the cluster]: the order in which they run
SLOT_FIELDS = 16

# --- SlotShape.as_array ---
(
    P_BLOCKS, P_WARPS, P_REGISTERS, P_SHARED, P_SHARED_SHADOW, P_LOCAL, P_LOCAL_SHADOW, P_PROXY, P_SHADOW_IMAGE,
    P_CLEAR,
) = range(10)  # fmt: skip

_PCS_BYTES, _TOKENS_BYTES = 128, 256


def _round(size: int) -> int:
    return -(-size // 64) * 64


@dataclass(frozen=True, slots=True)
class SlotShape:
    """Sizes of a slot's parts in bytes.

    Attributes:
        num_blocks: of a cluster.
        num_warps: of a block.
        register_bytes: of a warp's register file.
        shared_bytes: of a block, from shared address 0.
        has_shadow: whether shared and local memory have a shadow.
        local_bytes: of a thread.
        proxy_bytes: of the array at BLOCK_PROXY, or 0.
        clears_registers: whether a block's registers start as zeros; else with old contents.
    """

    num_blocks: int
    num_warps: int
    register_bytes: int
    shared_bytes: int
    has_shadow: bool
    local_bytes: int
    proxy_bytes: int
    clears_registers: bool

    @property
    def warp_bytes(self) -> int:
        local = _round(32 * self.local_bytes)
        return _PCS_BYTES + _TOKENS_BYTES + _round(self.register_bytes) + local * (2 if self.has_shadow else 1)

    @property
    def block_bytes(self) -> int:
        shared = _round(self.shared_bytes)
        own = BLOCK_FIELDS * 8 + _round(BARRIERS_BYTES) + _round(self.proxy_bytes)
        return own + shared * (2 if self.has_shadow else 1) + self.num_warps * (WARP_FIELDS * 8 + self.warp_bytes)

    @property
    def size_bytes(self) -> int:
        header = SLOT_FIELDS * 8 + _round(8 * self.num_blocks) + _round(8 * self.num_blocks * self.num_warps)
        return header + self.num_blocks * self.block_bytes

    def as_array(self, shadow_image: int) -> Any:
        """For `lay_out` and `begin_cluster`. `shadow_image`: address of the bytes that a block's shared shadow begins
        with."""
        shared, local = _round(self.shared_bytes), _round(32 * self.local_bytes)
        shadow = self.has_shadow
        return np.array(
            [
                self.num_blocks, self.num_warps, _round(self.register_bytes), shared, shared if shadow else 0, local,
                local if shadow else 0, _round(self.proxy_bytes), shadow_image, self.clears_registers,
            ],
            dtype=np.int64,
        )  # fmt: skip


class Slot:
    """The buffer of one resident cluster, 64-byte aligned."""

    def __init__(self, shape: SlotShape) -> None:
        self.shape = shape
        self._buffer = np.zeros(shape.size_bytes + 64, dtype=np.uint8)
        self.address = -(-self._buffer.ctypes.data // 64) * 64

    def words(self, address: int, count: int) -> Any:
        """int64 fields that lie in the buffer."""
        start = address - self._buffer.ctypes.data
        return self._buffer[start : start + 8 * count].view(np.int64)


@njit
def lay_out(slot_address, launch_address, shape):
    """Writes every address of a slot, and the thread indices that its warps have in any block."""
    slot, launch = i64_at(slot_address), i64_at(launch_address)
    num_blocks, num_warps = shape[P_BLOCKS], shape[P_WARPS]
    at = slot_address + SLOT_FIELDS * 8
    slot[S_IS_RUNNING] = 0
    slot[S_BLOCKS] = at
    slot[S_NUM_BLOCKS] = num_blocks
    at += (8 * num_blocks + 63) // 64 * 64
    slot[S_ORDER] = at
    for index in range(num_blocks * num_warps):
        i64_at(at)[index] = index
    at += (8 * num_blocks * num_warps + 63) // 64 * 64
    for rank in range(num_blocks):
        i64_at(slot[S_BLOCKS])[rank] = at
        block = i64_at(at)
        fill_bytes(at, 0, BLOCK_FIELDS * 8)
        at += BLOCK_FIELDS * 8
        block[BLOCK_LAUNCH] = launch_address
        block[BLOCK_RANK] = rank
        block[BLOCK_CLUSTER] = slot[S_BLOCKS]
        block[BLOCK_NUM_WARPS] = num_warps
        block[BLOCK_SHARED_BYTES] = 0
        block[BLOCK_WARPS] = at
        at += num_warps * WARP_FIELDS * 8
        block[BLOCK_BARRIERS] = at
        at += (BARRIERS_BYTES + 63) // 64 * 64
        block[BLOCK_PROXY] = at if shape[P_PROXY] else 0
        at += shape[P_PROXY]
        block[BLOCK_SHARED] = at
        at += shape[P_SHARED]
        block[BLOCK_SHARED_SHADOW] = at if shape[P_SHARED_SHADOW] else 0
        at += shape[P_SHARED_SHADOW]
        for index in range(num_warps):
            warp = i64_at(block[BLOCK_WARPS] + index * WARP_FIELDS * 8)
            fill_bytes(address_of(warp), 0, WARP_FIELDS * 8)
            warp[WARP_BLOCK] = address_of(block)
            warp[WARP_LAUNCH] = launch_address
            warp[WARP_INDEX] = index
            warp[WARP_PCS] = at
            at += _PCS_BYTES
            warp[WARP_TOKENS] = at
            at += _TOKENS_BYTES
            warp[WARP_REGISTERS] = at
            at += shape[P_REGISTERS]
            warp[WARP_LOCAL] = at
            at += shape[P_LOCAL]
            warp[WARP_LOCAL_SHADOW] = at if shape[P_LOCAL_SHADOW] else 0
            at += shape[P_LOCAL_SHADOW]
            lanes = min(32, launch[LAUNCH_THREADS] - 32 * index)
            warp[WARP_LANES] = (1 << lanes) - 1
            _write_thread_indices(warp, launch)


@njit
def _write_thread_indices(warp, launch):
    slots = u32_at(warp[WARP_REGISTERS])
    width, height = launch[LAUNCH_BLOCK_X], launch[LAUNCH_BLOCK_Y]
    for lane in range(32):
        thread = 32 * warp[WARP_INDEX] + lane
        slots[lane] = thread % width
        slots[32 + lane] = thread // width % height
        slots[64 + lane] = thread // (width * height)


_TID_BYTES = 384


@njit
def begin_cluster(slot_address, launch_address, shape, cluster, shared_bytes):
    """Makes a laid-out slot the cluster of the given index: everything as a block finds it when it starts."""
    slot, launch = i64_at(slot_address), i64_at(launch_address)
    num_blocks, num_warps = shape[P_BLOCKS], shape[P_WARPS]
    cx, cy, cz = launch[LAUNCH_CLUSTER_X], launch[LAUNCH_CLUSTER_Y], launch[LAUNCH_CLUSTER_Z]
    grid_x, grid_y = launch[LAUNCH_GRID_X], launch[LAUNCH_GRID_Y]
    clusters_x, clusters_y = grid_x // cx, grid_y // cy
    first_x = cluster % clusters_x * cx
    first_y = cluster // clusters_x % clusters_y * cy
    first_z = cluster // (clusters_x * clusters_y) * cz
    for rank in range(num_blocks):
        block = i64_at(i64_at(slot[S_BLOCKS])[rank])
        x, y, z = first_x + rank % cx, first_y + rank // cx % cy, first_z + rank // (cx * cy)
        block[BLOCK_X] = x
        block[BLOCK_Y] = y
        block[BLOCK_Z] = z
        block[BLOCK_LINEAR] = x + grid_x * (y + grid_y * z)
        block[BLOCK_SHARED_BYTES] = shared_bytes
        for field in range(BLOCK_EXITED_WARPS, BLOCK_FIELDS):
            if field != BLOCK_WARPS and field != BLOCK_PROXY:
                block[field] = 0
        reset_barriers(block[BLOCK_BARRIERS])
        if shape[P_PROXY]:
            fill_bytes(block[BLOCK_PROXY], 0, shape[P_PROXY])
        if shape[P_SHARED_SHADOW]:
            copy_bytes(block[BLOCK_SHARED_SHADOW], shape[P_SHADOW_IMAGE], shared_bytes)
        for index in range(num_warps):
            warp = i64_at(block[BLOCK_WARPS] + index * WARP_FIELDS * 8)
            local, shadow = warp[WARP_LOCAL], warp[WARP_LOCAL_SHADOW]
            registers, tokens, lanes = warp[WARP_REGISTERS], warp[WARP_TOKENS], warp[WARP_LANES]
            pcs = warp[WARP_PCS]
            fill_bytes(address_of(warp), 0, WARP_FIELDS * 8)
            warp[WARP_BLOCK], warp[WARP_LAUNCH], warp[WARP_INDEX] = address_of(block), launch_address, index
            warp[WARP_LOCAL], warp[WARP_LOCAL_SHADOW] = local, shadow
            warp[WARP_REGISTERS], warp[WARP_TOKENS], warp[WARP_PCS] = registers, tokens, pcs
            warp[WARP_LANES] = warp[WARP_LIVE] = lanes
            warp[WARP_STATE] = YIELDED
            warp[WARP_BEFORE_DEPENDENCY] = launch[LAUNCH_DEPENDENT]
            fill_bytes(pcs, 0, _PCS_BYTES)
            fill_bytes(tokens, 0, _TOKENS_BYTES)
            if shape[P_CLEAR]:
                fill_bytes(registers + _TID_BYTES, 0, shape[P_REGISTERS] - _TID_BYTES)
            if shadow:
                fill_bytes(shadow, 1, shape[P_LOCAL_SHADOW])
    for rank in range(num_blocks):
        start_block(i64_at(i64_at(slot[S_BLOCKS])[rank]))
    slot[S_CLUSTER] = cluster
    slot[S_IS_RUNNING] = 1
    slot[S_LIVE_WARPS] = num_blocks * num_warps
    slot[S_IDLE_ROUNDS] = 0
    slot[S_POLLING_ROUNDS] = 0
