"""Hopper's attention tiles: their layout in shared memory, loads and stores.

A tile of queries, and rings of tiles of keys and of values, each of panels of 64 columns: rows of 128 bytes, swizzled
as the TMA writes and `wgmma` reads them. The two computing groups have rows of their own, or for wide heads share 64
rows: each then scores half of a tile's keys and sums half of the columns, and their weights lie in two more panels.
Columns past the head dim are zeros from the TMA, since they lie outside of the tensor; so are pages that no row of the
block sees, which are requested by an invalid page number.

**Rows** of a tile of queries are the query heads of one KV head (`share` many) of as many whole tokens as fit.

**Pages** come one box each and panel: lane i of the producing warp requests page i % pages of panel i // pages. A
sequence's last page has unwritten rows. Their scores are masked; but a weight of 0 times their contents may be NaN, so
the producing warp zeroes them among the values, before it signals that the tile is full.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import uint32, uint64

from numba_kernels.cuda.attention.tiles import WIDE, head_row
from numba_kernels.cuda.intrinsics import mbarrier, tma
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.memory import shared_load_4xb32, shared_store_4xb32, store_4xb32
from numba_kernels.cuda.intrinsics.warp import (
    ballot,
    count_b32,
    maximum_u32_of_warp,
    shuffle_index_b32,
    sum_u32_of_warp,
    sync_warp,
)
from numba_kernels.cuda.kv_cache import page_row
from numba_kernels.cuda.specialisation import TensorMapLayout

GROUP_ROWS = 64  # of queries, of one of the two computing groups
ROW_BYTES = 128  # of a panel
PANEL_COLUMNS = 64
ALIGNMENT = 1024  # of swizzled tiles
_MOST_TILES = 229_376  # bytes of a block's tiles: its shared memory less barriers and what aligning takes
_NO_PAGE = 0xFFFFFFFF

_load_queries, _load_page = tma.load(3), tma.load(4)


@dataclass(frozen=True)
class HopperTiles:
    """Shared memory of a block, in bytes from an aligned beginning: queries, keys, values, results, barriers.

    Attributes:
        qk_dim, v_dim: numbers of a query and key, and of a value.
        qk_panels, v_panels: of 64 columns; of each an even number where rows are shared.
        num_keys: of a tile of keys or values.
        stages: tiles of a ring, a power of two.
        shares_rows: whether both computing groups have the same rows.
    """

    qk_dim: int
    v_dim: int
    qk_panels: int
    v_panels: int
    num_keys: int
    stages: int
    shares_rows: bool

    @property
    def num_rows(self) -> int:
        return GROUP_ROWS if self.shares_rows else 2 * GROUP_ROWS

    @property
    def own_keys(self) -> int:
        """Keys of a tile that a group scores."""
        return self.num_keys // 2 if self.shares_rows else self.num_keys

    @property
    def own_panels(self) -> int:
        """Panels of columns that a group sums."""
        return self.v_panels // 2 if self.shares_rows else self.v_panels

    @property
    def query_panel_bytes(self) -> int:
        return self.num_rows * ROW_BYTES

    @property
    def panel_bytes(self) -> int:
        return self.num_keys * ROW_BYTES

    @property
    def key_tile_bytes(self) -> int:
        return self.qk_panels * self.panel_bytes

    @property
    def value_tile_bytes(self) -> int:
        return self.v_panels * self.panel_bytes

    @property
    def keys_at(self) -> int:
        return self.qk_panels * self.query_panel_bytes

    @property
    def values_at(self) -> int:
        return self.keys_at + self.stages * self.key_tile_bytes

    @property
    def _behind_values(self) -> int:
        return self.values_at + self.stages * self.value_tile_bytes

    @property
    def out_at(self) -> int:
        """A tile of results, where there is room for it: else it takes the queries' place."""
        return self._behind_values if self.has_own_out else 0

    @property
    def has_own_out(self) -> bool:
        return self.qk_panels <= 3 and self._behind_values + self.v_panels * self.query_panel_bytes <= _MOST_TILES

    @property
    def weights_at(self) -> int:
        """Two panels of weights, of this tile of keys and the one before, then the rows' maxima in each group, where
        groups share rows."""
        return self._behind_values + self.has_own_out * self.v_panels * self.query_panel_bytes

    @property
    def barriers_at(self) -> int:
        """Queries full, empty; values that are zeroed in part; and four rings: keys full, empty; values full, empty."""
        return self.weights_at + self.shares_rows * GROUP_ROWS * (2 * ROW_BYTES + 2 * 4)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, with what aligning it may take."""
        return self.barriers_at + 8 * (3 + 4 * self.stages) + ALIGNMENT


def hopper_tiles(qk_dim: int, v_dim: int) -> HopperTiles:
    """The layout for heads: it fits shared memory and, beside the accumulators, registers."""
    qk_panels, v_panels = -(-qk_dim // PANEL_COLUMNS), -(-v_dim // PANEL_COLUMNS)
    if max(qk_dim, v_dim) > WIDE:
        return HopperTiles(qk_dim, v_dim, qk_panels + qk_panels % 2, v_panels + v_panels % 2, 64, 1, True)
    num_keys = 128 if v_panels <= 2 and qk_panels <= 3 else 64
    return HopperTiles(qk_dim, v_dim, qk_panels, v_panels, num_keys, 4 if qk_panels == v_panels == 1 else 2, False)


def query_layout(dtype: str, tiles: HopperTiles, num_q_heads: int, share: int, num_tokens: int) -> TensorMapLayout:
    """The map of q [num_tokens, num_q_heads, qk_dim]: a box is a panel of one tile's rows."""
    row = tiles.qk_dim * 2
    shape, strides = (tiles.qk_dim, num_q_heads, num_tokens), (row, num_q_heads * row)
    return TensorMapLayout(dtype, shape, strides, (PANEL_COLUMNS, share, tiles.num_rows // share), ROW_BYTES)


def page_layout(dtype: str, head_dim: int, block_size: int, num_kv_heads: int, num_blocks: int) -> TensorMapLayout:
    """The map of pages [num_blocks, num_kv_heads, block_size, page_row]: a box is a panel of one head's rows of one."""
    columns = page_row(head_dim)
    row = columns * 2
    shape = (columns, block_size, num_kv_heads, num_blocks)
    strides = (row, block_size * row, num_kv_heads * block_size * row)
    return TensorMapLayout(dtype, shape, strides, (PANEL_COLUMNS, block_size, 1, 1), ROW_BYTES)


def expanded_layout(
    dtype: str, columns: int, pair: int, block_size: int, num_heads: int, num_rows: int
) -> TensorMapLayout:
    """The map of keys, or of values, among rows [num_rows, num_heads, pair] of both (`Variant.is_expanded`), as pages
    of `block_size` rows."""
    head, row = pair * 2, num_heads * pair * 2
    shape, strides = (columns, block_size, num_heads, num_rows // block_size), (row, head, block_size * row)
    return TensorMapLayout(dtype, shape, strides, (PANEL_COLUMNS, block_size, 1, 1), ROW_BYTES)


@device_function
def _tiles_above(tiles, top, level):
    """How many of a sequence's tiles see more than `level` times a tile's tokens; `top` times is what the last sees."""
    return minimum_u32(tiles, uint32(top - minimum_u32(top, level)))


@device_function
def find_tile(query_start, seq_lens, num_seqs, tile_tokens, group, index, lane):
    """Tile `index` of the batch's: (sequence, its first token, query length and length, the tile's first token of it).

    The tiles of `group` sequences, 32 at most, lie side by side, those that see the most keys first. The sequence is
    num_seqs where there are fewer tiles. All lanes of a warp call it together, one for each sequence.
    """
    seq = num_seqs
    first_token, query_len, seq_len, first = uint32(0), uint32(0), uint32(0), uint32(0)
    base = uint32(0)
    while base < num_seqs:
        own = uint32(base + lane)
        own_first, own_len, own_seq_len = uint32(0), uint32(0), uint32(0)
        if lane < group and own < num_seqs:
            own_first = uint32(query_start[own])
            own_len = uint32(uint32(query_start[uint32(own + uint32(1))]) - own_first)
            own_seq_len = uint32(seq_lens[own])
        tiles = divide_u32(uint32(own_len + tile_tokens - uint32(1)), tile_tokens)
        top = divide_u32(uint32(own_seq_len + tile_tokens - uint32(1)), tile_tokens)
        top = uint32(tiles + (top - minimum_u32(top, tiles)))  # of padding it is less
        count = shuffle_index_b32(sum_u32_of_warp(tiles), uint32(0))  # so that ptxas knows it is uniform
        base = uint32(base + group)
        if index < count:
            level, high = uint32(0), maximum_u32_of_warp(top)
            while level < high:  # the smallest level that no more tiles are above
                middle = uint32((level + high) >> uint32(1))
                if sum_u32_of_warp(_tiles_above(tiles, top, middle)) <= index:
                    high = middle
                else:
                    level = uint32(middle + uint32(1))
            index = uint32(index - sum_u32_of_warp(_tiles_above(tiles, top, level)))
            has_one = top >= level and uint32(top - level) < tiles
            below = count_b32(uint32(ballot(uint32(has_one)) & uint32((uint32(1) << lane) - uint32(1))))
            found = ballot(uint32(has_one and below == index))
            place = count_b32(uint32(found - uint32(1)))
            seq = uint32(uint32(base - group) + place)
            first_token = shuffle_index_b32(own_first, place)
            query_len = shuffle_index_b32(own_len, place)
            seq_len = shuffle_index_b32(own_seq_len, place)
            first = shuffle_index_b32(uint32(uint32(tiles + level - top - uint32(1)) * tile_tokens), place)
            base = num_seqs
        index = uint32(index - count)
    return seq, first_token, query_len, seq_len, first


@functools.cache
def query_bringer(tiles: HopperTiles) -> Any:
    """A device function for one warp: ``(tile, map, barrier, rows, first_head, first_token, lane)``."""
    panels, panel_bytes = tiles.qk_panels, tiles.query_panel_bytes

    @device_function
    def bring(tile, source, barrier, rows, first_head, first_token, lane):
        if lane == uint32(0):
            mbarrier.arrive_expecting(barrier, uint32(rows * uint32(panels * ROW_BYTES)))
        sync_warp()
        if lane < uint32(panels):
            target = uint32(tile + lane * uint32(panel_bytes))
            _load_queries(target, source, barrier, uint32(lane * uint32(PANEL_COLUMNS)), first_head, first_token)

    return bring


@functools.cache
def page_bringer(tiles: HopperTiles, block_size: int, panels: int, is_expanded: bool) -> Any:
    """A device function for one warp, which loads all tiles of keys, or of values, for a tile of queries: so many
    panels. Pages of expanded rows have no block table, but lie in order.

    ``(ring, keys, zeros, pages, turn, stop, lane)``, the first four being tuples: (its address, the map, barriers of
    full and of empty stages); (first_key, first_seen, end); (num_unwritten, unwritten, landed, its phase); (the block
    tables, the sequence's place there, kv_head). `turn` counts all tiles that went through the ring. Keys below
    `first_seen` and from `end` on are not loaded where they are whole pages. In the last tile, rows `unwritten` and
    num_unwritten - 1 more are zeroed, unless num_unwritten is 0; that lands at its own barrier.
    """
    stages, panel_bytes, num_keys = tiles.stages, tiles.panel_bytes, tiles.num_keys
    pages, tile_bytes, phase_shift = num_keys // block_size, panels * panel_bytes, stages.bit_length() - 1
    lanes = pages * panels

    @device_function
    def bring(ring, keys, zeros, pages_of, turn, stop, lane):
        (ring_at, source, full, empty), (first_key, first_seen, end) = ring, keys
        (num_unwritten, unwritten, landed, landed_phase), (block_tables, table, kv_head) = zeros, pages_of
        panel = uint32(lane // uint32(pages))
        page_of_tile = uint32(lane - panel * uint32(pages))
        place = uint32(ring_at + panel * uint32(panel_bytes) + page_of_tile * uint32(block_size * ROW_BYTES))
        column = uint32(panel * uint32(PANEL_COLUMNS))
        key = uint32(first_key + page_of_tile * uint32(block_size))
        while turn < stop:
            page = uint32(_NO_PAGE)
            if key < end and uint32(key + uint32(block_size)) > first_seen:
                page = uint32(key // uint32(block_size))
                if not is_expanded:
                    page = uint32(block_tables[table + uint64(key // uint32(block_size))])
            stage = uint32(turn & uint32(stages - 1))
            is_full = uint32(full + stage * uint32(8))
            phase = uint32((turn >> uint32(phase_shift)) & uint32(1))
            mbarrier.wait(uint32(empty + stage * uint32(8)), uint32(phase ^ uint32(1)))
            barrier = is_full
            is_zeroed = num_unwritten > uint32(0) and uint32(turn + uint32(1)) == stop
            if is_zeroed:
                barrier = landed
            if lane == uint32(0):
                mbarrier.arrive_expecting(barrier, uint32(tile_bytes))
            sync_warp()
            if lane < uint32(lanes):
                target = uint32(place + stage * uint32(tile_bytes))
                _load_page(target, source, barrier, column, uint32(0), kv_head, page)
            if is_zeroed:
                mbarrier.wait(landed, landed_phase)
                first = uint32(ring_at + stage * uint32(tile_bytes) + unwritten * uint32(ROW_BYTES) + lane * uint32(16))
                for i in range(panels):
                    done = uint32(0)
                    while uint32(done + lane) < uint32(num_unwritten * uint32(ROW_BYTES // 16)):
                        zero = uint32(0)
                        shared_store_4xb32(
                            uint32(first + done * uint32(16) + uint32(i * panel_bytes)), (zero, zero, zero, zero)
                        )
                        done = uint32(done + uint32(32))
                tma.fence_shared()
                sync_warp()
                if lane == uint32(0):
                    mbarrier.arrive(is_full)
            key = uint32(key + uint32(num_keys))
            turn = uint32(turn + uint32(1))

    return bring


@functools.cache
def row_zeroer(tiles: HopperTiles, threads: int) -> Any:
    """A device function ``(tile, first_row, thread)``: rows from first_row on of the queries, which no box fills."""
    panels, panel_bytes = tiles.qk_panels, tiles.query_panel_bytes

    @device_function
    def zero_rows(tile, first_row, thread):
        zero = uint32(0)
        for i in range(panels):
            at = uint32(first_row * uint32(ROW_BYTES) + thread * uint32(16))
            while at < uint32(panel_bytes):
                shared_store_4xb32(uint32(tile + at + uint32(i * panel_bytes)), (zero, zero, zero, zero))
                at = uint32(at + uint32(16 * threads))

    return zero_rows


@functools.cache
def sign_flipper(tiles: HopperTiles, num_rows: int) -> Any:
    """A device function ``(tile, thread)`` for 128 threads: changes the signs of so many rows of queries."""
    panels, panel_bytes = tiles.qk_panels, tiles.query_panel_bytes
    signs = 0x80008000

    @device_function
    def flip(tile, thread):
        for i in range(panels * num_rows * ROW_BYTES // 16 // 128):
            panel, part = i // (num_rows // 16), i % (num_rows // 16)
            at = uint32(tile + thread * uint32(16) + uint32(panel * panel_bytes + part * 2048))
            a, b, c, d = shared_load_4xb32(at)
            mask = uint32(signs)
            shared_store_4xb32(at, (uint32(a ^ mask), uint32(b ^ mask), uint32(c ^ mask), uint32(d ^ mask)))

    return flip


@functools.cache
def row_storer(v_dim: int, own_panels: int, panel_bytes: int, shares_rows: bool) -> Any:
    """A device function for a warp: its 16 rows of results go from their place to out, in 16-byte pieces.

    ``(tile, out, place, rows, whose, lane, own)``: the warp's first row in the tile, the tile's rows that exist, (the
    chunk's row at which the tile begins, share, kv_head, num_q_heads, first_token), and the group's number. Groups that
    share rows have `own_panels` each.
    """
    pieces, row_bytes = v_dim // 8, uint64(v_dim * 2)
    own_pieces = 8 * own_panels if shares_rows else pieces

    @device_function
    def store(tile, out, place, rows, whose, lane, own):
        first_row, share, kv_head, num_q_heads, first_token = whose
        first_piece = uint32(0)
        if shares_rows:
            first_piece = uint32(own * uint32(own_pieces))
        index = lane
        while index < uint32(16 * own_pieces):
            below = uint32(index // uint32(own_pieces))
            piece = uint32(first_piece + index - below * uint32(own_pieces))
            row = uint32(place + below)
            if row < rows and (not shares_rows or piece < uint32(pieces)):
                swizzled = uint32(((piece ^ row) & uint32(7)) * uint32(16))
                panel = uint32((piece >> uint32(3)) * uint32(panel_bytes))
                values = shared_load_4xb32(uint32(tile + panel + row * uint32(ROW_BYTES) + swizzled))
                at = head_row(uint32(first_row + row), share, kv_head, num_q_heads, first_token)
                store_4xb32(out + at * row_bytes + uint64(piece) * uint64(16), values)
            index = uint32(index + uint32(32))

    return store
