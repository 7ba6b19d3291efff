"""A sequence in parts: where the parts lie, what a block leaves of its part, and the kernel that combines them.

With few queries there are few tiles of rows, and one block walking over a long sequence would leave the device idle.
So the sequence's keys are cut into `num_parts` parts of `part_keys` keys, one a block; each leaves, for each of its
rows, a record of float32 in the workspace [T, Hq, num_parts, record]: the weighted values (not divided), then at
`columns` the largest score and the sum. A part without keys leaves the largest score -inf and the sum 0, and no
values. The combine kernel brings the records to one scale and adds them in order of the parts: deterministic.
https://crfm.stanford.edu/2023/10/12/flashdecoding.html
"""

from __future__ import annotations

import functools

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.attention.online_softmax import (
    MINUS_INFINITY,
    load_sink,
    origin_of,
    reciprocal_of,
    share_of_keys,
    subtract,
)
from numba_kernels.cuda.attention.tiles import tile_shape
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import ITEM_BYTES, elements_storer
from numba_kernels.cuda.intrinsics.integer import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.math import exp2
from numba_kernels.cuda.intrinsics.memory import load_f32
from numba_kernels.cuda.intrinsics.warp import lane_index, maximum_f32
from numba_kernels.cuda.specialisation import Specialisation

WARPS = 4


def record(head_dim: int) -> int:
    """Floats of one part's record of one row: whole tile columns, then largest score and sum, in 16-byte units."""
    return tile_shape("f32", head_dim).columns + 4


@device_function
def part_of(first_key, longest_end, part, part_keys):
    """(first key, end) of a part; the end is not above the first key for a part without keys."""
    begin = uint32(first_key + part * part_keys)
    return begin, minimum_u32(uint32(begin + part_keys), longest_end)


@functools.cache
def combine(dtype: str, head_dim: int, has_sinks: bool) -> Specialisation:
    """A warp combines one row. Arguments: workspace, out [T * Hq, D], sinks [Hq] (0 without), num_rows = T * Hq,
    num_parts, num_q_heads."""
    columns, size = tile_shape("f32", head_dim).columns, record(head_dim)
    per_lane = -(-columns // 32)
    item_bytes, store = uint64(ITEM_BYTES[dtype]), elements_storer(dtype, 1)

    @cuda.jit
    def kernel(workspace, out, sinks, num_rows, num_parts, num_q_heads):
        row = uint32(uint32(cuda.blockIdx.x) * uint32(WARPS) + (uint32(cuda.threadIdx.x) >> uint32(5)))
        if row >= num_rows:
            return
        lane = lane_index()
        sums = cuda.local.array(per_lane, float32)
        value = cuda.local.array(1, float32)
        record_bytes = uint64(size * 4)
        first = workspace + uint64(row) * uint64(num_parts) * record_bytes
        statistics = first + uint64(columns * 4)
        largest = MINUS_INFINITY
        part = uint32(0)
        while part < num_parts:
            largest = maximum_f32(largest, load_f32(statistics + uint64(part) * record_bytes))
            part = uint32(part + uint32(1))
        origin = origin_of(largest)
        for i in range(per_lane):
            sums[i] = float32(0)
        total = float32(0)
        part = uint32(0)
        while part < num_parts:
            at = uint64(part) * record_bytes
            part_total = load_f32(statistics + at + uint64(4))
            if part_total != float32(0):
                factor = exp2(subtract(load_f32(statistics + at), origin))
                total = total + part_total * factor
                for i in range(per_lane):
                    column = uint32(lane + uint32(32 * i))
                    if column < uint32(head_dim):
                        sums[i] = sums[i] + factor * load_f32(first + at + uint64(column) * uint64(4))
            part = uint32(part + uint32(1))
        share = reciprocal_of(total)
        if has_sinks:
            head = uint32(row - divide_u32(row, num_q_heads) * num_q_heads)
            share = share_of_keys(largest, total, load_sink(sinks, head))
        target = out + uint64(row) * uint64(head_dim) * item_bytes
        for i in range(per_lane):
            column = uint32(lane + uint32(32 * i))
            if column < uint32(head_dim):
                value[0] = sums[i] * share
                store(target + uint64(column) * item_bytes, value)

    name = f"attention_combine_{dtype}_d{head_dim}{'_sinks' if has_sinks else ''}"
    argument_types = (types.uint64, types.uint64, types.uint64, types.uint32, types.uint32, types.uint32)
    constants = {"dtype": dtype, "head_dim": head_dim, "has_sinks": has_sinks}
    return Specialisation(name, kernel, argument_types, WARPS * 32, constants=constants)
