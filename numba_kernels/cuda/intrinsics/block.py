"""Reductions over all threads of a block, whose number is a multiple of 32.

`partials` is a ``cuda.shared.array(32, float32)`` of the kernel's. The order of additions depends on the number of
threads alone. Every thread gets the result; the barrier at the beginning lets one array serve several reductions.
"""

from __future__ import annotations

from numba import cuda, types

from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.sync import sync_block
from numba_kernels.cuda.intrinsics.warp import lane_index, maximum_f32, warp_max, warp_sum


@device_function
def block_sum(value, partials):
    """The sum of a float32 over the block."""
    lane = lane_index()
    num_warps = types.uint32(cuda.blockDim.x) >> types.uint32(5)
    value = warp_sum(value)
    sync_block()
    if lane == types.uint32(0):
        partials[types.uint32(cuda.threadIdx.x) >> types.uint32(5)] = value
    sync_block()
    total = types.float32(0)
    if lane < num_warps:
        total = partials[lane]
    return warp_sum(total)


@device_function
def block_max(value, partials):
    """The maximum of a float32 over the block; NaN only where every thread has NaN."""
    lane = lane_index()
    num_warps = types.uint32(cuda.blockDim.x) >> types.uint32(5)
    value = warp_max(value)
    sync_block()
    if lane == types.uint32(0):
        partials[types.uint32(cuda.threadIdx.x) >> types.uint32(5)] = value
    sync_block()
    largest = value
    if lane < num_warps:
        largest = maximum_f32(largest, partials[lane])
    return warp_max(largest)
