"""The epilogue of products of few rows, whose sums lie in shared memory in parts: `skinny` and `hopper_few`.

Each part is a stream of K. A block has its streams' sums of all columns of its cluster, as teams of `COLUMNS` columns:
float32 [team, stream, row, COLUMNS], where bits of the column are exchanged by row (`flip_of`) so that there are no
bank conflicts. The blocks share the elements; the thread that finishes one adds its parts in the order of the streams.
"""

from __future__ import annotations

from typing import Any

from numba import types

from numba_kernels.cuda.gemm.adapters import tiles
from numba_kernels.cuda.gemm.epilogue import (
    GATED,
    can_finish_quads,
    finisher,
    quad_finisher,
    quad_gater,
    scale_element,
    scale_quad,
    squares_leaver,
)
from numba_kernels.cuda.gemm.skinny_shape import BLOCK_WARPS as WARPS
from numba_kernels.cuda.gemm.skinny_shape import COLUMNS
from numba_kernels.cuda.intrinsics import cluster, memory
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import divide_u32
from numba_kernels.cuda.intrinsics.warp import count_b32

uint32, uint64, float32 = types.uint32, types.uint64, types.float32


@device_function
def _own_quad(at, block):
    return memory.shared_load_4xf32(at)


@device_function
def _own_sum(at, block):
    return memory.shared_load_f32(at)


@device_function
def _quad_of(at, block):
    return cluster.load_4xf32(cluster.address_in(at, block))


@device_function
def _sum_of(at, block):
    return cluster.load_f32(cluster.address_in(at, block))


@device_function
def add_quads(a, b):
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


_LOADERS, _LOADERS_IN_CLUSTER = (_own_quad, _own_sum), (_quad_of, _sum_of)
"""``(shared address, block of the cluster)`` -> 4 numbers, or one."""


def sums_finisher(
    dtype: str, out_dtype: str, flip_of: Any, team_bytes: int, scalers: tuple[Any, Any], activation: str = "", *,
    has_clusters: bool, takes_adapters: bool = False, has_own_rows: bool = False,
) -> Any:  # fmt: skip
    """A device function of each of a block's warps, which finish the sums of some rows, an element or four a lane.

    ``(given, sums, scales, rows, place, tile, added)`` are the product's arguments; (the shared address of the sums,
    streams of a block); that of row 0's scale; (the number of rows,), which the blocks share, or, if each
    `has_own_rows`, (the first one, the end); (warp, block, lane, blocks), the last one (their number,) or, of blocks
    that are not a whole cluster, (the first one's rank, from one to the next, their number); (first column, teams);
    and, where adapters ride, (the address of the expanded sums, floats of a row of them, these blocks less 1).

    Args:
        team_bytes: of a stream's sums of a team.
        scalers: ``(values of 4 columns or one, weight, n, k, column)``: times scales of the weight's rows.
    """
    finish, finish_quad = finisher(dtype, out_dtype), quad_finisher(dtype, out_dtype)
    leave_squares = squares_leaver(32, 8)
    is_gated = activation != ""
    gated, gate_quad = (GATED[activation], quad_gater(activation)) if is_gated else (None, None)
    columns = COLUMNS // 2 if is_gated else COLUMNS  # of the output, a team
    scale_columns, scale_column = scalers
    load_quad_of, load_sum_of = _LOADERS_IN_CLUSTER if has_clusters else _LOADERS
    load_scale, sums_bytes = memory.shared_load_f32, team_bytes

    @device_function
    def rank_of(block, blocks):
        rank = block
        if has_own_rows:
            rank = uint32(blocks[0] + block * blocks[1])
        return rank

    @device_function
    def sum_quads(at, num_streams, blocks):
        """Sums of 4 neighbours over the streams of all blocks."""
        num_blocks = blocks[-1]
        a, b, c, d = load_quad_of(at, rank_of(uint32(0), blocks))
        block, index = uint32(0), uint32(1)
        while block < num_blocks:
            while index < num_streams:
                more = load_quad_of(uint32(at + index * uint32(sums_bytes)), rank_of(block, blocks))
                a += more[0]
                b += more[1]
                c += more[2]
                d += more[3]
                index += uint32(1)
            block, index = uint32(block + uint32(1)), uint32(0)
        return a, b, c, d

    @device_function
    def sum_elements(at, num_streams, blocks):
        num_blocks = blocks[-1]
        total = load_sum_of(at, rank_of(uint32(0), blocks))
        block, index = uint32(0), uint32(1)
        while block < num_blocks:
            while index < num_streams:
                total += load_sum_of(uint32(at + index * uint32(sums_bytes)), rank_of(block, blocks))
                index += uint32(1)
            block, index = uint32(block + uint32(1)), uint32(0)
        return total

    @device_function
    def finish_sums(given, sums, scales, rows, place, tile, added):
        weight, n, k = given.weight, given.n, given.k
        (shared, num_streams), (warp, block, lane, blocks), (first_column, num_teams) = sums, place, tile
        block_columns = num_teams * uint32(columns)
        in_quads = can_finish_quads(given)
        item_columns = uint32(4) if in_quads else uint32(1)
        num_items = divide_u32(rows[-1] * block_columns, item_columns)
        first_item = uint32(uint32(warp + block * uint32(WARPS)) * uint32(32))
        if has_own_rows:
            first_item = uint32(first_item + divide_u32(rows[0] * block_columns, item_columns))
        while first_item < num_items:
            item = uint32(first_item + lane)
            index = uint32(item * item_columns)
            row, inside = divide_u32(index, block_columns), index & uint32(block_columns - uint32(1))
            stream = shared + divide_u32(inside, uint32(columns)) * num_streams * uint32(sums_bytes)
            at_row = uint32(stream + row * uint32(COLUMNS * 4))
            place, flip = inside & uint32(columns - 1), flip_of(row)
            at, at_up = uint32(at_row + ((place ^ flip) << uint32(2))), uint32(0)
            if is_gated:
                at_up = uint32(at_row + (((place + uint32(columns)) ^ flip) << uint32(2)))
            column, total = uint32(first_column + inside), float32(0.0)
            owner, low, low_up = uint32(0), uint32(0), uint32(0)
            if takes_adapters:  # a cluster's blocks take tiles of columns in turn
                expanded, expanded_row, of_cluster = added
                tile = inside // uint32(tiles.TILE)
                owner = rank_of(tile & of_cluster, blocks)
                tile = uint32((tile >> count_b32(of_cluster)) * uint32(tiles.TILE) + (inside & uint32(tiles.TILE - 1)))
                low = uint32(expanded + uint32(row * expanded_row + tile) * uint32(4))
                low_up = uint32(low + num_teams * uint32(columns * 4))
            if item < num_items and column < n:
                scale = load_scale(uint32(scales + row * uint32(4)))
                if in_quads:
                    values = scale_columns(sum_quads(at, num_streams, blocks), weight, n, k, column)
                    if is_gated:
                        ups = sum_quads(at_up, num_streams, blocks)
                        ups = scale_columns(ups, weight, n, k, uint32(column + n))
                        if takes_adapters:
                            values = add_quads(scale_quad(values, scale), load_quad_of(low, owner))
                            ups = add_quads(scale_quad(ups, scale), load_quad_of(low_up, owner))
                            scale = float32(1.0)
                        values = gate_quad(values, ups, scale)
                    else:
                        values = scale_quad(values, scale)
                        if takes_adapters:
                            values = add_quads(values, load_quad_of(low, owner))
                    total = finish_quad(given, row, column, values)
                else:
                    value = scale_column(sum_elements(at, num_streams, blocks), weight, n, k, column)
                    value = scale_element(value, scale)
                    if takes_adapters:
                        value += load_sum_of(low, owner)
                    if is_gated:
                        up = sum_elements(at_up, num_streams, blocks)
                        up = scale_element(scale_column(up, weight, n, k, uint32(column + n)), scale)
                        if takes_adapters:
                            up += load_sum_of(low_up, owner)
                        value = gated(value, up)
                    finish(given, row, column, value)
            if not is_gated:
                leave_squares(given, total, (lane & uint32(7)) == uint32(0) and item < num_items, row, column)
            if has_own_rows:
                first_item = uint32(first_item + uint32(WARPS * 32))
            else:
                first_item = uint32(first_item + blocks[0] * uint32(WARPS * 32))

    return finish_sums
