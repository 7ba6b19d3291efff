"""Within a warp of 32 lanes, all of them active: shuffles and reductions. PTX ISA, "shfl.sync", "redux.sync"."""

from __future__ import annotations

from numba import types

from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function

shuffle_xor_f32 = instruction("shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", "f", "f r")
shuffle_xor_b32 = instruction("shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", "r", "r r")
shuffle_index_f32 = instruction("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "f", "f r")
shuffle_index_b32 = instruction("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "r", "r r")
sync_warp = instruction("bar.warp.sync 0xffffffff;")
maximum_f32 = instruction("max.f32 $0, $1, $2;", "f", "f f", is_pure=True)  # of a number and NaN: the number
lane_index = instruction("mov.u32 $0, %laneid;", "r", is_pure=True)


@device_function
def warp_sum(value):
    """The float32 sum over the lanes, the same bits in each: a butterfly of fixed order."""
    distance = types.uint32(16)
    while distance > types.uint32(0):
        value += shuffle_xor_f32(value, distance)
        distance >>= types.uint32(1)
    return value


@device_function
def warp_max(value):
    """The float32 maximum over the lanes, in each."""
    distance = types.uint32(16)
    while distance > types.uint32(0):
        value = maximum_f32(value, shuffle_xor_f32(value, distance))
        distance >>= types.uint32(1)
    return value
