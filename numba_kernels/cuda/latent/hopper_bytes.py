"""Latent rows of fp8 for Hopper's tiles of bf16: four warps read them into registers, and widen them into panels.

A warp has 16 rows of each tile. It reads group 0's columns of all of them, 16 bytes a lane, then group 1's, while it
widens those before: so that products begin with the first half, and half a tile is on its way. Rotated numbers are
copied by cp.async. Nothing but the widened tile lies in shared memory. A tile's pages are asked into the second-level
cache while the one before last is widened.

    a step of columns, V 512:   2 rows x 256 bytes;   V 256:   4 rows x 128 bytes

Eight neighbouring lanes write four pieces of each of two rows, which lie in different banks.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, int32, uint32, uint64

from numba_kernels.cuda.attention.hopper_tiles import PANEL_COLUMNS, ROW_BYTES
from numba_kernels.cuda.attention.hopper_walk import release
from numba_kernels.cuda.intrinsics import mbarrier, tma
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.convert import f32_from_bits, pack_bf16, unpack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.memory import (
    copy_async_16,
    copy_async_commit,
    copy_async_wait,
    load_b32,
    shared_store_4xb32,
)
from numba_kernels.cuda.intrinsics.mma import put_4
from numba_kernels.cuda.intrinsics.warp import lane_index, shuffle_index_b32, shuffle_xor_b32, sync_warp
from numba_kernels.cuda.latent.hopper_steps import NUM_KEYS, PANEL_BYTES, PARTS, LatentPanels, empty_of
from numba_kernels.latent_rows import LatentBytes

BRINGERS = 4  # warps
WARP_ROWS = NUM_KEYS // BRINGERS
_TWO = "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
_halves_of_bytes = instruction(_TWO, "rr", "r", is_pure=True)
_THERE = "{ .reg .pred there; setp.gt.s32 there, $%d, 0; "
# Zeros, where the second argument, as a signed number, is not positive.
_load_4 = instruction(
    _THERE % 5 + "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
    "@there ld.global.v4.b32 {$0,$1,$2,$3}, [$4]; }",
    "rrrr", "l r",
)  # fmt: skip
_load_2 = instruction(
    _THERE % 3 + "mov.b32 $0, 0; mov.b32 $1, 0; @there ld.global.v2.b32 {$0,$1}, [$2]; }", "rr", "l r"
)
_load_1 = instruction(_THERE % 2 + "mov.b32 $0, 0; @there ld.global.b32 $0, [$1]; }", "r", "l r")
_wait_for_copies = copy_async_wait(0)


def has_bytes(dtype: str, value_dim: int, block_size: int) -> bool:
    """Whether rotated numbers are copied as they are, a half is whole steps, and a warp's rows lie in one page."""
    return dtype == "bf16" and value_dim in (256, 512) and block_size % WARP_ROWS == 0


@functools.cache
def byte_bringer(value_dim: int, block_size: int) -> Any:
    """A device function of the four warps that bring a part's tiles; see its arguments."""
    panels = LatentPanels(value_dim)
    layout = LatentBytes(PANEL_COLUMNS + value_dim, value_dim)
    row_bytes, rotated_at, scales_at = layout.row_bytes, layout.rotated_at, layout.value_bytes
    half, half_bytes, tile_bytes = panels.half, value_dim // 2, panels.tile_bytes
    is_wide = half == 4  # with two scales a half, and eight steps
    step_rows = 8 // half
    steps = WARP_ROWS // step_rows
    flip = step_rows * 16  # of a step's rows in a panel

    @device_function
    def widened(word, scale):
        """Four bytes as two pairs."""
        low, high = _halves_of_bytes(word)
        a, b = unpack_f16(low)
        c, d = unpack_f16(high)
        return pack_bf16(a * scale, b * scale), pack_bf16(c * scale, d * scale)

    @device_function
    def store_values(place, words, scales, source_lane, step):
        scale = f32_from_bits(shuffle_index_b32(scales, uint32(source_lane + uint32(2 * step * step_rows))))
        at = uint32((place ^ uint32(step * flip % ROW_BYTES)) + uint32(step * step_rows * ROW_BYTES))
        for half_of_piece in range(2):
            a, b = widened(words[2 * half_of_piece], scale)
            c, d = widened(words[2 * half_of_piece + 1], scale)
            shared_store_4xb32(uint32(at ^ uint32(16 * half_of_piece)), (a, b, c, d))

    @device_function
    def load_values(at, left, step):
        return _load_4(at + uint64(step * step_rows * row_bytes), uint32(left - int32(step * step_rows)))

    @device_function
    def copy_rotated(tile, rows, left, first_row, lane):
        row, piece = uint32(lane >> uint32(3)), uint32(lane & uint32(7))
        source = rows + uint64(row * uint32(row_bytes) + uint32(rotated_at) + piece * uint32(16))
        target = uint32(tile + uint32(first_row + row) * uint32(ROW_BYTES))
        for step in range(WARP_ROWS // 4):
            size = uint32(0)
            if int32(left - int32(row)) > int32(4 * step):
                size = uint32(16)
            swizzled = uint32((piece ^ row ^ uint32(4 * (step & 1))) * uint32(16))
            at = uint32(target + uint32(4 * step * ROW_BYTES) + swizzled)
            copy_async_16(at, source + uint64(4 * step * row_bytes), size)
        copy_async_commit()

    @device_function
    def load_scales(rows, left, lane):
        """Two scales of row lane / 2, or one."""
        size = 8 if is_wide else 4
        row = uint32(lane >> uint32(1))
        at = rows + uint64(row * uint32(row_bytes) + uint32(scales_at) + (lane & uint32(1)) * uint32(size))
        there = uint32(left - int32(row))
        if is_wide:
            low, high = _load_2(at, there)
            return low, high
        low = _load_1(at, there)
        return low, low

    @device_function
    def of_halves(low, high, lane):
        """A row's left lane has scales 0 and 1, its right one 2 and 3: then they have 0 and 2, and 1 and 3."""
        is_left = (lane & uint32(1)) == uint32(0)
        given = low
        if is_left:
            given = high
        found = shuffle_xor_b32(given, uint32(1))
        if is_left:
            high = found
        else:
            low = found
        return low, high

    @device_function
    def page_at(table, key, stop):
        page = uint32(0)
        if key < stop:
            page = load_b32(table + uint64(key // uint32(block_size)) * uint64(4))
        return page

    @device_function
    def rows_at(pages, page, key):
        """The address of the warp's rows from `key` on."""
        slot = uint64(page) * uint64(block_size) + uint64(key % uint32(block_size))
        return pages + slot * uint64(row_bytes)

    @device_function
    def ask(rows, key, stop, lane):
        if lane == uint32(0) and key < stop:
            tma.prefetch_bytes(rows, uint32(WARP_ROWS * row_bytes))

    @device_function
    def bring(pages, tiles, full, table, key, stop, thread):
        """All tiles of a part from `key` to `stop`; `table` is the address of its sequence's pages."""
        lane = lane_index()
        first_row = uint32((thread >> uint32(5)) * uint32(WARP_ROWS))
        # A lane's row and 16 bytes of a step.
        row, piece, panel = uint32((lane >> uint32(2)) & uint32(1)), uint32(lane & uint32(3)), uint32(lane >> uint32(3))
        if not is_wide:
            row = uint32(row + (lane >> uint32(4)) * uint32(2))
            panel = uint32(panel & uint32(1))
        value_from = uint32(row * uint32(row_bytes) + uint32(panel * uint32(4) + piece) * uint32(16))
        value_to = uint32(
            uint32(PANEL_BYTES) + uint32(first_row + row) * uint32(ROW_BYTES) + panel * uint32(PANEL_BYTES)
            + (uint32(piece * uint32(2)) ^ row) * uint32(16)
        )  # fmt: skip
        scale_lane = uint32(row * uint32(2))
        if is_wide:
            scale_lane = uint32(scale_lane + (lane >> uint32(4)))

        key = uint32(key + first_row)
        next_key = uint32(key + uint32(NUM_KEYS))
        page, next_page = page_at(table, key, stop), page_at(table, next_key, stop)
        rows = rows_at(pages, page, key)
        ask(rows, key, stop, lane)
        ask(rows_at(pages, next_page, next_key), next_key, stop, lane)
        left = int32(stop) - int32(key)  # rows from the warp's first one on, which may be none
        at, there = rows + uint64(value_from), int32(left - int32(row))
        words = cuda.local.array((steps, 4), uint32)
        for step in range(steps):
            put_4(words[step], load_values(at, there, step))
        low, high = load_scales(rows, left, lane)
        next_low, next_high = low, high
        turn = uint32(0)  # of halves
        while int32(left + int32(first_row)) > int32(0):
            side, odd = uint32(turn & uint32(1)), uint32((turn >> uint32(1)) & uint32(1))
            phase = uint32(((turn >> uint32(2)) & uint32(1)) ^ uint32(1))
            tile = uint32(tiles + odd * uint32(tile_bytes))
            is_full = uint32(full + odd * uint32(8 * PARTS))
            part_full = uint32(is_full + uint32(8) + side * uint32(8))
            scales, lane_of_row = high, scale_lane
            if side == uint32(0):
                mbarrier.wait(empty_of(is_full), phase)
                copy_rotated(tile, rows, left, first_row, lane)
                page = next_page
                next_key = uint32(stop - uint32(left) + uint32(2 * NUM_KEYS))
                next_page = page_at(table, next_key, stop)
                if is_wide:
                    low, high = of_halves(low, high, lane)
                scales = low
                at = rows + uint64(uint32(value_from + uint32(half_bytes)))
            else:
                if not is_wide:
                    lane_of_row = uint32(scale_lane + uint32(1))
                left = int32(left - int32(NUM_KEYS))
                rows = rows_at(pages, page, uint32(stop - uint32(left)))
                at = rows + uint64(value_from)
                next_low, next_high = load_scales(rows, left, lane)
            there = int32(left - int32(row))
            mbarrier.wait(empty_of(part_full), phase)
            place = uint32(tile + value_to + side * uint32(half * PANEL_BYTES))
            for step in range(steps):
                store_values(place, words[step], scales, lane_of_row, step)
                put_4(words[step], load_values(at, there, step))
            if side == uint32(0):
                _wait_for_copies()
            tma.fence_shared()
            sync_warp()
            release(part_full, lane)
            if side == uint32(0):
                release(is_full, lane)
                next_key = uint32(stop - uint32(left) + uint32(2 * NUM_KEYS))
                ask(rows_at(pages, next_page, next_key), next_key, stop, lane)
            else:
                low, high = next_low, next_high
            turn = uint32(turn + uint32(1))

    return bring
