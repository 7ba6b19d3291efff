"""Low-rank adapters of a map's rows: ``out[t] = residual[t] + up[a] (down[a] x[t]) + bias[a]``, a the adapter of row t;
x is normalised first (RMSNorm) if the map's product does so.

A block takes some columns of one row. It computes all of ``down x`` that its columns need, a rank or two a warp, and
then its columns: so a map takes one launch, of which no block waits for another, and a row's bits depend on no other
row. Blocks of one row read ``down`` again, from the second-level cache. Which adapter a row has, and which ranks of it
are not zero, is data.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.gemm.epilogue import norm_scale, scale_element
from numba_kernels.cuda.intrinsics.block import block_sum
from numba_kernels.cuda.intrinsics.element import element_loader, element_storer, elements_loader, floats_loader
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.memory import load_b32, load_b64, load_f32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index, warp_sum
from numba_kernels.cuda.specialisation import Launch, Specialisation, access_width

THREADS = 256
COLUMNS = 1024  # of a block
MAX_RANKS = 2048  # of all parts of a map together
RANKS_MULTIPLE = 8  # of a map's ranks
_WARPS = THREADS // 32
_AT_ONCE = 2  # ranks of a warp


@functools.cache
def _kernel(dtype: str, width: int) -> Specialisation:
    """Arguments: see `plan`; x and down are read `width` elements at a time."""
    load, load_up = elements_loader(dtype, width), elements_loader(dtype, VECTOR_WIDTH[dtype])
    load_one, store_one, load_weight = element_loader(dtype), element_storer(dtype), floats_loader(width)
    item_bytes, up_width = uint64(ITEM_BYTES[dtype]), VECTOR_WIDTH[dtype]

    @cuda.jit
    def low_rank(
        x, adapters, downs, ups, ranges, residual, out, norm, depth, columns, ranks, num_slots, num_ranges, eps
    ):  # fmt: skip
        partials = cuda.shared.array(32, float32)
        between = cuda.shared.array(MAX_RANKS, float32)
        sums = cuda.local.array(_AT_ONCE, float32)
        values = cuda.local.array(width, float32)
        row, part, thread = uint64(cuda.blockIdx.y), uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        lane, warp = lane_index(), thread >> uint32(5)
        wait_for_previous_grid()
        launch_dependents()
        slot = load_b32(adapters + row * uint64(4))
        first = end = uint32(0)
        up = bias = uint64(0)
        if slot < num_slots:  # -1 is large
            at = ranges + (uint64(slot) * uint64(num_ranges) + uint64(part)) * uint64(8)
            first, end = load_b32(at), load_b32(at + uint64(4))
            up = load_b64(ups + uint64(slot) * uint64(8))
            bias = load_b64(ups + uint64(slot + num_slots) * uint64(8))
            down = load_b64(downs + uint64(slot) * uint64(8))
            row_bytes = uint64(depth) * item_bytes
            own = x + row * row_bytes
            scale = float32(1)
            if norm != uint64(0):
                squares = float32(0)
                index = uint32(thread * uint32(width))
                while index < depth:
                    loaded = load(own + uint64(index) * item_bytes)
                    for e in range(width):
                        squares += loaded[e] * loaded[e]
                    index = uint32(index + uint32(THREADS * width))
                scale = norm_scale(block_sum(squares, partials), depth, eps)
            rank = uint32(first + warp * uint32(_AT_ONCE))
            while rank < end:
                for i in range(_AT_ONCE):
                    sums[i] = float32(0)
                start = down + uint64(rank) * row_bytes
                index = uint32(lane * uint32(width))
                while index < depth:
                    place = uint64(index) * item_bytes
                    loaded = load(own + place)
                    for e in range(width):
                        values[e] = loaded[e]
                    if norm != uint64(0):
                        weights = load_weight(norm + uint64(index) * uint64(4))
                        for e in range(width):
                            values[e] *= weights[e]
                    for i in range(_AT_ONCE):
                        factors = load(start + uint64(i) * row_bytes + place)
                        for e in range(width):
                            sums[i] += values[e] * factors[e]
                    index = uint32(index + uint32(32 * width))
                for i in range(_AT_ONCE):
                    total = warp_sum(sums[i])
                    if lane == uint32(0):
                        between[rank - first + uint32(i)] = scale_element(total, scale)
                rank = uint32(rank + uint32(_WARPS * _AT_ONCE))
        sync_block()
        column = uint32(part * uint32(COLUMNS) + thread)
        last = min(columns, uint32((part + uint32(1)) * uint32(COLUMNS)))
        while column < last:
            total = float32(0)
            start = up + (uint64(column) * uint64(ranks) + uint64(first)) * item_bytes
            rank = uint32(0)
            while rank < end - first:
                factors = load_up(start + uint64(rank) * item_bytes)
                for e in range(up_width):
                    total += between[rank + uint32(e)] * factors[e]
                rank = uint32(rank + uint32(up_width))
            if bias != uint64(0):
                total += load_f32(bias + uint64(column) * uint64(4))
            place = (row * uint64(columns) + uint64(column)) * item_bytes
            if residual != uint64(0):
                total += load_one(residual + place)
            store_one(out + place, total)
            column = uint32(column + uint32(THREADS))

    return Specialisation(
        name=f"low_rank_{dtype}_x{width}",
        kernel=low_rank,
        argument_types=(types.uint64,) * 8 + (types.uint32,) * 5 + (types.float32,),
        max_threads=THREADS,
        constants={"dtype": dtype, "width": width},
    )


def ranges_of(columns: int) -> int:
    """Blocks of a row."""
    return -(-columns // COLUMNS)


def plan(rows: int, columns: int, depth: int, dtype: str, *, alignment: int = 16) -> Launch:
    """The launch for at least one row and column; `alignment` is that of x and of ``down``.

    Arguments: x [T, K], adapters int32 [T], the addresses of each slot's down [R, K] and, in ``ups [2, S]``, up [N, R]
    and float32 bias [N] or 0; ``ranges [S, entries, 2]`` int32, the ranks from which and up to which a block's
    columns are not zero, multiples of RANKS_MULTIPLE (an entry a block; more may follow); residual [T, N] or 0, out;
    the norm's weights float32 [K], or 0; K, N, R, S, entries; the norm's eps.
    """
    width = access_width(dtype, depth, alignment)
    return Launch(_kernel(dtype, width), (ranges_of(columns), rows, 1), (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for dtype in DTYPES:
        for width in (1, VECTOR_WIDTH[dtype]):
            yield _kernel(dtype, width)
