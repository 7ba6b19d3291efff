"""Within a warp of 32 lanes, all of them active: shuffles and reductions. PTX ISA, "shfl.sync", "redux.sync"."""

from __future__ import annotations

import functools
from typing import Any

from numba import types

from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function

shuffle_xor_f32 = instruction("shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", "f", "f r")
shuffle_xor_b32 = instruction("shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", "r", "r r")
shuffle_index_f32 = instruction("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "f", "f r")
shuffle_index_b32 = instruction("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "r", "r r")
shuffle_up_b32 = instruction("shfl.sync.up.b32 $0, $1, $2, 0, 0xffffffff;", "r", "r r")  # the lowest lanes: their own
or_b32 = instruction("redux.sync.or.b32 $0, $1, 0xffffffff;", "r", "r")  # over all lanes, in each
sum_u32_of_warp = instruction("redux.sync.add.u32 $0, $1, 0xffffffff;", "r", "r")
maximum_u32_of_warp = instruction("redux.sync.max.u32 $0, $1, 0xffffffff;", "r", "r")
ballot = instruction(
    "{ .reg .pred set; setp.ne.b32 set, $1, 0; vote.sync.ballot.b32 $0, set, 0xffffffff; }", "r", "r"
)  # the lanes whose number is not 0, a bit each
count_b32 = instruction("popc.b32 $0, $1;", "r", "r", is_pure=True)
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
def sum_to_lane_u32(value):
    """Inclusive prefix sum of a uint32 over the lanes."""
    distance = types.uint32(1)
    while distance < types.uint32(32):
        below = shuffle_up_b32(value, distance)
        if lane_index() >= distance:
            value = types.uint32(value + below)
        distance = types.uint32(distance << types.uint32(1))
    return value


@device_function
def warp_max(value):
    """The float32 maximum over the lanes, in each."""
    distance = types.uint32(16)
    while distance > types.uint32(0):
        value = maximum_f32(value, shuffle_xor_f32(value, distance))
        distance >>= types.uint32(1)
    return value


@functools.cache
def _exchange(distance: int, num_sums: int) -> Any:
    """A device function ``(sums, lane) -> None``: adds the sums of lanes that far apart.

    If there are more sums than nearer lanes, a lane keeps one half of its sums and gives away the other.
    """
    if distance >= num_sums:

        @device_function
        def add(sums, lane):
            for i in range(num_sums):
                sums[i] += shuffle_xor_f32(sums[i], types.uint32(distance))

        return add

    @device_function
    def halve(sums, lane):
        is_upper = (lane & types.uint32(distance)) != types.uint32(0)
        for i in range(distance):
            low, high = sums[i], sums[i + distance]
            sums[i] = (high if is_upper else low) + shuffle_xor_f32(low if is_upper else high, types.uint32(distance))

    return halve


@functools.cache
def exchange(num_sums: int) -> Any:
    """A device function ``(sums, lane) -> None`` that adds all lanes' sums: lane i then has sum i modulo their number,
    in `sums[0]`."""
    add_16, add_8, add_4, add_2, add_1 = (_exchange(distance, num_sums) for distance in (16, 8, 4, 2, 1))

    @device_function
    def add_all(sums, lane):
        add_16(sums, lane)
        add_8(sums, lane)
        add_4(sums, lane)
        add_2(sums, lane)
        add_1(sums, lane)

    return add_all
