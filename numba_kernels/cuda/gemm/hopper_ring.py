"""The Hopper tier's ring of stages in shared memory, between the thread that fills it and the groups that multiply.

Each stage has two barriers: "full" counts the bytes that the TMA has delivered, "empty" the warps that have read them,
in all blocks of the cluster that the bytes went to.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

from numba import types

from numba_kernels.cuda.intrinsics import mbarrier, tma, wgmma
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32

uint16, uint32 = types.uint16, types.uint32

BLOCK_K = 64  # 128 bytes of a row, the longest that the TMA swizzles
GROUP_ROWS = 16  # row tiles that pass over a column tile together
PIECE_COLUMNS = 64  # of the sums, that a warp brings out at a time, where the tile's halves are pieces of so many
PIECE_BYTES = 16 * PIECE_COLUMNS * 4


@dataclass(frozen=True, slots=True)
class Tile:
    """A block's tile of the output.

    Attributes:
        block_n: its columns, 128, 192 or 256.
        num_consumers: groups of four warps that multiply, 64 rows each.
        num_stages: K tiles that shared memory holds.
        cluster: blocks, one below the other, that share the weight's tile: each loads its part of it for all of them.
        num_unpackers: warps that unpack a packed weight (`hopper_unpack.py`); 0 where the TMA brings it.
    """

    block_n: int
    num_consumers: int
    num_stages: int
    cluster: int = 1
    num_unpackers: int = 0

    @property
    def producers(self) -> int:
        """Warps before those that multiply."""
        return max(4, self.num_unpackers)

    @property
    def block_m(self) -> int:
        return 64 * self.num_consumers

    @property
    def num_threads(self) -> int:
        return 32 * self.producers + 128 * self.num_consumers

    @property
    def piece_columns(self) -> int:
        """Columns of a piece that a warp stores at a time; both halves of the tile consist of pieces."""
        return PIECE_COLUMNS if self.block_n // 2 % PIECE_COLUMNS == 0 else PIECE_COLUMNS // 2

    @property
    def piece_bytes(self) -> int:
        """Shared memory of a warp for a piece's float32 sums, or for two pieces of 16 bits."""
        return 16 * self.piece_columns * 4

    @property
    def x_bytes(self) -> int:
        """Bytes of x's part of a stage; the weight's part follows."""
        return self.block_m * BLOCK_K * 2

    @property
    def stage_bytes(self) -> int:
        return self.x_bytes + self.block_n * BLOCK_K * 2

    @property
    def pieces_at(self) -> int:
        """Offset where the stages end and the warps' pieces of sums begin."""
        return self.num_stages * self.stage_bytes

    @property
    def barriers_at(self) -> int:
        """Offset where the pieces end and the barriers begin: full, empty, and two of each consumer's warp."""
        return self.pieces_at + 4 * self.num_consumers * self.piece_bytes

    @property
    def scales_at(self) -> int:
        """Offset where the barriers end and the scales of rows begin, which hopper_split.py leaves there."""
        return self.barriers_at + 8 * (2 * self.num_stages + 2 * 4 * self.num_consumers)

    @property
    def shared_bytes(self) -> int:
        return 1024 + self.scales_at + 4 * self.block_m  # 1024: to begin on such a bound

    def __str__(self) -> str:
        shared = f"_c{self.cluster}" if self.cluster > 1 else ""
        return f"{self.block_m}x{self.block_n}x{BLOCK_K}_s{self.num_stages}{shared}"


Ring = namedtuple("Ring", "shared full empty")
"""Shared addresses: the first stage, and the first barriers of full and of empty stages."""


@functools.cache
def tile_order(group_rows: int) -> Any:
    """A device function ``(index, tiles_m, tiles_n) -> (row tile, column tile)``.

    Down `group_rows` row tiles, then on to the next column tile: concurrent tiles share rows of x and of the weight in
    the second-level cache.
    """

    @device_function
    def place_of(index, tiles_m, tiles_n):
        group_tiles = uint32(uint32(group_rows) * tiles_n)
        group = divide_u32(index, group_tiles)
        inside = uint32(index - group * group_tiles)
        first = uint32(group * uint32(group_rows))
        rows = minimum_u32(uint32(group_rows), uint32(tiles_m - first))
        column = divide_u32(inside, rows)
        return uint32(first + inside - column * rows), column

    return place_of


@functools.cache
def stage_advancer(num_stages: int) -> Any:
    """A device function ``(stage, phase)`` that gives those of the next stage."""

    @device_function
    def next_stage(stage, phase):
        stage = uint32(stage + uint32(1))
        if stage == uint32(num_stages):
            stage = uint32(0)
            phase ^= uint32(1)
        return stage, phase

    return next_stage


@functools.cache
def ring_starter(tile: Tile, num_fillers: int = 0) -> Any:
    """A device function, called by one thread: makes a ring's barriers. The others see them after a barrier. A stage is
    full after so many arrivals: 0 stands for the thread that posts the TMA's bytes, and the warps that unpack."""
    num_stages, num_arrivals = tile.num_stages, 4 * tile.num_consumers * tile.cluster
    num_fillers = num_fillers or 1 + tile.num_unpackers

    @device_function
    def start_ring(full, empty):
        for stage in range(num_stages):
            mbarrier.init(uint32(full + uint32(8 * stage)), uint32(num_fillers))
            mbarrier.init(uint32(empty + uint32(8 * stage)), uint32(num_arrivals))
        mbarrier.fence_init()

    return start_ring


@functools.cache
def tile_loader(tile: Tile, *, is_gated: bool = False) -> Any:
    """Three device functions for one thread, the producer: loads one tile's data by the TMA, stage by stage.

    `load_tile`, ``(x, weight, ring, (stage, phase, num_asked), (rank, row, first, up), (start, end))``, waits where the
    consumers are not done with a stage; `stage` and `phase` go on from tile to tile. The weight's tile, from row
    `first` on, is loaded by all blocks of the cluster, a part each, for all of them. For a gated unit half of its rows
    are of the gate's half of the weight, the others `up` rows further.

    `ask_ahead` comes before a block's first tile: it prefetches the weight's part of all stages, and returns their
    number. Weights are immutable, so that this need not wait for the previous grid.

    `wait_until_read_by_all` comes after the last one: once every consumer of the cluster has arrived at every stage,
    this block's shared memory is no longer in use.
    """
    num_stages, stage_bytes, x_bytes, blocks = tile.num_stages, tile.stage_bytes, tile.x_bytes, tile.cluster
    num_parts = 2 if is_gated else blocks  # of the weight's tile
    part_rows = tile.block_n // num_parts
    part_bytes = part_rows * BLOCK_K * 2
    loads_all, next_stage = blocks < num_parts, stage_advancer(num_stages)
    load, load_for_all = tma.load(2), tma.load(2, is_multicast=True)

    @device_function
    def load_weight(weight, ring, stage, rank, first, up, start):
        barrier = uint32(ring.full + stage * uint32(8))
        mbarrier.arrive_expecting(barrier, uint32(stage_bytes))
        target = uint32(ring.shared + stage * uint32(stage_bytes) + uint32(x_bytes) + rank * uint32(part_bytes))
        behind = up if is_gated else uint32(part_rows)
        if blocks > 1:
            row = uint32(first + rank * behind)
            load_for_all(target, weight, barrier, uint16((1 << blocks) - 1), start, row)
        else:
            load(target, weight, barrier, start, first)
            if loads_all:
                load(uint32(target + uint32(part_bytes)), weight, barrier, start, uint32(first + behind))

    @device_function
    def ask_ahead(weight, ring, rank, first, up, start, end):
        stage = uint32(0)
        while start < end and stage < uint32(num_stages):
            load_weight(weight, ring, stage, rank, first, up, start)
            stage = uint32(stage + uint32(1))
            start = uint32(start + uint32(BLOCK_K))
        return stage

    @device_function
    def load_tile(x, weight, ring, at, place, span):
        (stage, phase, num_asked), (rank, row, first, up), (start, end) = at, place, span
        while start < end:
            if num_asked > uint32(0):
                num_asked = uint32(num_asked - uint32(1))
            else:
                mbarrier.wait(uint32(ring.empty + stage * uint32(8)), phase)
                load_weight(weight, ring, stage, rank, first, up, start)
            target = uint32(ring.shared + stage * uint32(stage_bytes))
            load(target, x, uint32(ring.full + stage * uint32(8)), start, row)
            stage, phase = next_stage(stage, phase)
            start = uint32(start + uint32(BLOCK_K))
        return stage, phase

    @device_function
    def wait_until_read_by_all(empty, stage, phase):
        count = uint32(0)
        while count < uint32(num_stages):
            mbarrier.wait(uint32(empty + stage * uint32(8)), phase)
            stage, phase = next_stage(stage, phase)
            count = uint32(count + uint32(1))

    return ask_ahead, load_tile, wait_until_read_by_all


@functools.cache
def tile_multiplier(dtype: str, tile: Tile) -> Any:
    """A device function ``(sums, (x_part, weight_part), ring, (stage, phase), lane, num_steps)`` for a group of
    consumers: a tile's sums, of `num_steps` stages, at least one.

    While one stage is multiplied, the next one's products are issued; the stage before it has then been read, and lane
    i of each warp arrives at block i's barrier `empty`.
    """
    num_sums, num_stages, stage_bytes, blocks = tile.block_n // 2, tile.num_stages, tile.stage_bytes, tile.cluster
    multiply, describe = wgmma.group_multiply(dtype, tile.block_n, BLOCK_K // 16, 32, 32), wgmma.descriptor(128, 1024)
    wait_but_one, wait_for_all = wgmma.group_wait(1, num_sums), wgmma.group_wait(0, num_sums)
    next_stage = stage_advancer(num_stages)
    arrive = mbarrier.arrive_read if blocks > 1 else mbarrier.arrive

    @device_function
    def multiply_tile(sums, parts, ring, at, lane, num_steps):
        first_x, first_weight, (stage, phase) = describe(parts[0]), describe(parts[1]), at
        read = ring.empty
        count = uint32(0)
        while count < num_steps:
            mbarrier.wait(uint32(ring.full + stage * uint32(8)), phase)
            units = uint32(stage * uint32(stage_bytes // 16))
            multiply(sums, wgmma.advance(first_x, units), wgmma.advance(first_weight, units), count)
            wait_but_one(sums)
            if count > uint32(0) and lane < uint32(blocks):
                arrive(read)
            read = uint32(ring.empty + stage * uint32(8))
            stage, phase = next_stage(stage, phase)
            count = uint32(count + uint32(1))
        wait_for_all(sums)
        if lane < uint32(blocks):
            arrive(read)
        return stage, phase

    return multiply_tile
