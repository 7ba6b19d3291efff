"""Weights of `hopper_few` as device functions, those of 16 bits; `few_packed` has the packed ones. A block's shared
memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import types

from numba_kernels.cuda.gemm.adapters import tiles
from numba_kernels.cuda.gemm.hopper_ring import BLOCK_K, stage_advancer
from numba_kernels.cuda.intrinsics import mbarrier, tma, wgmma
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element_types import BITS
from numba_kernels.cuda.intrinsics.math import divide_u32
from numba_kernels.cuda.packing import TILE_ROWS, Packing, packing_of
from numba_kernels.cuda.specialisation import HALF_SHARED_BYTES

uint16, uint32 = types.uint16, types.uint32

ARCH = "sm_90a"
WIDTHS = (16, 32, 64)  # rows of x, for which kernels exist
BLOCK_ROWS = 128  # of the weight
_MOST_STAGES = 8
_ROW_BYTES = 2 * BLOCK_K


@dataclass(frozen=True, slots=True)
class Block:
    """The shared memory of a block with `width` rows of x, in order: stages, groups' scales of the stages, a tile's
    sums unless they fit in a stage, sums that adapters add, barriers, scales of rows.

    A stage has the weight, then x in boxes of `BLOCK_K` columns.
    """

    width: int
    weight: str = ""
    takes_adapters: bool = False

    @property
    def packing(self) -> Packing | None:
        """The weight's, or None for 16 bits."""
        return packing_of(self.weight)

    @property
    def depth(self) -> int:
        """Elements of K of a stage."""
        return BLOCK_K if self.packing is None else 2 * BLOCK_K

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight in a stage, without scales."""
        return BLOCK_ROWS * self.depth * (16 if self.packing is None else BITS[self.packing.element]) // 8

    @property
    def stage_bytes(self) -> int:
        return self.weight_bytes + self.width * self.depth * 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of a stage's scales and offsets of groups."""
        if self.packing is None:
            return 0
        a_row_of_two = self.packing.halves * (self.packing.chunk_bytes("bf16") + self.packing.zeros_bytes("bf16"))
        return BLOCK_ROWS // 16 * self.depth // self.packing.slot * TILE_ROWS * a_row_of_two

    @property
    def num_stages(self) -> int:
        """As many as half of a multiprocessor has room for. Three of 16 bits hold 48 KB of the weight, of which 132
        multiprocessors need 33 KB each for memory's bandwidth at a latency of 1 µs."""
        count = (HALF_SHARED_BYTES[ARCH] - self._other_bytes) // (self.stage_bytes + self.scale_bytes + 24)
        return min(_MOST_STAGES, count)

    @property
    def holds_stage(self) -> bool:
        """Whether a tile's sums lie in its last stage."""
        return self.width * BLOCK_ROWS * 4 <= self.stage_bytes

    @property
    def scales_of_groups_at(self) -> int:
        return self.num_stages * self.stage_bytes

    @property
    def sums_at(self) -> int:
        return self.num_stages * (self.stage_bytes + self.scale_bytes)

    @property
    def expanded_at(self) -> int:
        return self.sums_at + (0 if self.holds_stage else self.width * BLOCK_ROWS * 4)

    @property
    def barriers_at(self) -> int:
        return self.expanded_at + self._expanded_bytes

    @property
    def scales_at(self) -> int:
        return self.barriers_at + 8 * (3 * self.num_stages + 2)

    @property
    def shared_bytes(self) -> int:
        return 1024 + self.scales_at + 4 * self.width  # 1024: to begin on such a bound

    @property
    def _expanded_bytes(self) -> int:
        return tiles.expanded_bytes(self.width, BLOCK_ROWS) if self.takes_adapters else 0

    @property
    def _other_bytes(self) -> int:
        """All but the stages, their scales and their barriers."""
        own_sums = 0 if self.holds_stage else self.width * BLOCK_ROWS * 4
        return 1024 + own_sums + self._expanded_bytes + 16 + 4 * self.width


@dataclass(frozen=True, slots=True)
class FewWeight:
    """Device functions of a weight, whose `matrix` is (its map,), or the maps of `few_packed.maps_of`.

    Attributes:
        ask_ahead: ``(matrix, shared, full, row, up, start, end) -> stages``, for one thread: fills the ring with the
            first tile's weight. For a gated unit the second half of a tile's rows is `up` rows further.
        load_tile: ``(x, matrix, ring, stage, phase, num_asked, shares, place)`` -> the next stage and phase: loads a
            tile, of which so many stages have been asked for. `ring` is (shared memory, the addresses of the barriers
            full and empty); `shares` (the block's share of x, of how many, the block's part of K); `place` (row, up,
            start, end).
        arrange: ``(shared, full, ready, stage, phase, num_steps, lane, nothing)`` -> the next stage and phase: a
            warp's, which brings x of a tile into the weight's order of K; None where it has x's.
        multiply_tile: ``(sums, ring, stage, phase, (warp, lane), shares, num_steps, nothing)`` -> (the next stage,
            phase, the last stage): a group's sums of so many stages, at least one. Lane i of each warp arrives at
            ``empty``, of the i-th of the blocks that share x, when a stage has been read; of the last one the caller
            does, if it holds the sums meanwhile. `ring` is (shared memory, full, ready, empty), `nothing` 0.
        scalers: of the weight's rows, see `sums_finisher`.
    """

    ask_ahead: Any
    load_tile: Any
    arrange: Any
    multiply_tile: Any
    scalers: tuple[Any, Any]


@functools.cache
def x_loader(block: Block) -> Any:
    """A device function for one thread, ``(x, shared, barrier, stage, shares, start)``: x of a stage, from all blocks
    that share it."""
    width, size, weight_bytes, boxes = block.width, block.stage_bytes, block.weight_bytes, block.depth // BLOCK_K
    load, load_for_all = tma.load(2), tma.load(2, is_multicast=True)

    @device_function
    def load_x(x, shared, barrier, stage, shares, start):
        share, count, part = shares
        rows = divide_u32(uint32(width), count)
        first, of_all = uint32(rows * share), uint16(((uint32(1) << count) - uint32(1)) << uint32(part * count))
        target = uint32(shared + stage * uint32(size) + uint32(weight_bytes) + first * uint32(_ROW_BYTES))
        for box in range(boxes):
            at, column = uint32(target + uint32(box * width * _ROW_BYTES)), uint32(start + uint32(box * BLOCK_K))
            if count > uint32(1):
                load_for_all(at, x, barrier, of_all, column, first)
            else:
                load(at, x, barrier, column, first)

    return load_x


@functools.cache
def loaders(block: Block, load_weight: Any) -> tuple[Any, Any]:
    """`FewWeight.ask_ahead` and `load_tile`, by ``load_weight(matrix, shared, full, stage, row, up, start)``."""
    num_stages, depth, load_x, next_stage = (
        block.num_stages, block.depth, x_loader(block), stage_advancer(block.num_stages)
    )  # fmt: skip

    @device_function
    def ask_ahead(matrix, shared, full, row, up, start, end):
        stage = uint32(0)
        while start < end and stage < uint32(num_stages):
            load_weight(matrix, shared, full, stage, row, up, start)
            stage = uint32(stage + uint32(1))
            start = uint32(start + uint32(depth))
        return stage

    @device_function
    def load_tile(x, matrix, ring, stage, phase, num_asked, shares, place):
        (shared, full, empty), (row, up, start, end) = ring, place
        while start < end:
            if num_asked > uint32(0):
                num_asked = uint32(num_asked - uint32(1))
            else:
                mbarrier.wait(uint32(empty + stage * uint32(8)), phase)
                load_weight(matrix, shared, full, stage, row, up, start)
            load_x(x, shared, uint32(full + stage * uint32(8)), stage, shares, start)
            stage, phase = next_stage(stage, phase)
            start = uint32(start + uint32(depth))
        return stage, phase

    return ask_ahead, load_tile


@functools.cache
def _weight_loader(block: Block, *, is_gated: bool) -> Any:
    """See `loaders`."""
    size, half_bytes, load = block.stage_bytes, BLOCK_ROWS // 2 * _ROW_BYTES, tma.load(2)

    @device_function
    def load_weight(matrix, shared, full, stage, row, up, start):
        barrier, target = uint32(full + stage * uint32(8)), uint32(shared + stage * uint32(size))
        mbarrier.arrive_expecting(barrier, uint32(size))
        behind = up if is_gated else uint32(BLOCK_ROWS // 2)
        load(target, matrix[0], barrier, start, row)
        load(uint32(target + uint32(half_bytes)), matrix[0], barrier, start, uint32(row + behind))

    return load_weight


@functools.cache
def _multiplier(dtype: str, layout: Block) -> Any:
    width, num_stages, size, holds = layout.width, layout.num_stages, layout.stage_bytes, layout.holds_stage
    num_sums = width // 2
    multiply, describe = wgmma.group_multiply(dtype, width, BLOCK_K // 16, 32, 32), wgmma.descriptor(128, 1024)
    wait_but_one, wait_for_all = wgmma.group_wait(1, num_sums), wgmma.group_wait(0, num_sums)
    next_stage = stage_advancer(num_stages)

    @device_function
    def multiply_tile(sums, ring, stage, phase, thread, shares, num_steps, nothing):
        (shared, full, _, empty), (warp, lane) = ring, thread
        first_weight = describe(uint32(shared + (warp >> uint32(2)) * uint32(BLOCK_ROWS // 2 * _ROW_BYTES)))
        first_x = describe(uint32(shared + uint32(BLOCK_ROWS * _ROW_BYTES)))
        last, count = stage, uint32(0)
        while count < num_steps:
            mbarrier.wait(uint32(full + stage * uint32(8)), phase)
            at = uint32(stage * uint32(size // 16))
            multiply(sums, wgmma.advance(first_weight, at), wgmma.advance(first_x, at), count)
            wait_but_one(sums)
            if count > uint32(0) and lane < shares:
                mbarrier.arrive_read(uint32(empty + last * uint32(8)))
            last = stage
            stage, phase = next_stage(stage, phase)
            count = uint32(count + uint32(1))
        wait_for_all(sums)
        if not holds and lane < shares:
            mbarrier.arrive_read(uint32(empty + last * uint32(8)))
        return stage, phase, last

    return multiply_tile


@functools.cache
def plain_weight(dtype: str, block: Block, *, is_gated: bool) -> FewWeight:
    """A weight of 16 bits: `wgmma` reads both factors from the stage."""
    ask_ahead, load_tile = loaders(block, _weight_loader(block, is_gated=is_gated))
    as_it_is = device_function(lambda values, weight, n, k, column: values)
    return FewWeight(ask_ahead, load_tile, None, _multiplier(dtype, block), (as_it_is, as_it_is))
