"""Minimal kernels for two of Hopper's features: a copy by the TMA, and a multicast to a cluster."""

from __future__ import annotations

import functools

from numba import cuda, types

from numba_kernels.cuda.intrinsics import cluster, mbarrier, memory, tma
from numba_kernels.cuda.intrinsics.sync import sync_block
from numba_kernels.cuda.specialisation import TENSOR_MAP, Launch, Specialisation, TensorMapLayout

uint16, uint32 = types.uint16, types.uint32

ROWS, COLUMNS = 64, 64
TILE_BYTES = ROWS * COLUMNS * 2
CLUSTER = 2
_ALIGNMENT = 128  # of the TMA's target


def layout(num_tiles: int) -> TensorMapLayout:
    """``[num_tiles * ROWS, COLUMNS]`` bf16, in boxes of a tile."""
    return TensorMapLayout("bf16", (COLUMNS, num_tiles * ROWS), (COLUMNS * 2,), (COLUMNS, ROWS))


@functools.cache
def copy_kernel(num_blocks: int) -> Specialisation:
    """Each block stores its tile, loaded by the TMA, to ``target[rank]``. In a cluster the first block's copy is
    multicast to all. Arguments: the maps of one tile and of `num_blocks` tiles. One warp."""
    is_multicast = num_blocks > 1
    load, store, wait_read = tma.load(2, is_multicast=is_multicast), tma.store(2), tma.store_wait_read(0)
    blocks = (1 << num_blocks) - 1

    def copy(source, target):
        shared = memory.shared_address(cuda.shared.array(0, uint32))
        tile = uint32((shared + uint32(_ALIGNMENT - 1)) & uint32(0xFFFFFFFF - _ALIGNMENT + 1))
        barrier = uint32(tile + uint32(TILE_BYTES))
        rank = cluster.rank() if is_multicast else uint32(0)
        if uint32(cuda.threadIdx.x) == uint32(0):
            mbarrier.init(barrier, uint32(1))
            mbarrier.fence_init()
            mbarrier.arrive_expecting(barrier, uint32(TILE_BYTES))
        if is_multicast:
            cluster.arrive_relaxed()
            cluster.wait()
        else:
            sync_block()
        if uint32(cuda.threadIdx.x) == uint32(0) and rank == uint32(0):
            if is_multicast:
                load(tile, source, barrier, uint16(blocks), uint32(0), uint32(0))
            else:
                load(tile, source, barrier, uint32(0), uint32(0))
        mbarrier.wait(barrier, uint32(0))
        if uint32(cuda.threadIdx.x) == uint32(0):
            store(tile, target, uint32(0), uint32(rank * uint32(ROWS)))
            tma.store_commit()
            wait_read()
        if is_multicast:  # the issuing block waits until all have received theirs
            cluster.arrive_relaxed()
            cluster.wait()

    return Specialisation(
        f"first_copy_{num_blocks}", cuda.jit(copy), (TENSOR_MAP, TENSOR_MAP), 32, min_capability=90,
        constants={"num_blocks": num_blocks},
    )  # fmt: skip


def plan_copy(num_blocks: int) -> Launch:
    """A launch of `copy_kernel`, on the addresses of one tile and of `num_blocks` tiles."""
    return Launch(
        copy_kernel(num_blocks), (num_blocks, 1, 1), (32, 1, 1), TILE_BYTES + _ALIGNMENT + 8,
        cluster=(num_blocks, 1, 1), maps=((0, layout(1)), (1, layout(num_blocks))),
    )  # fmt: skip
