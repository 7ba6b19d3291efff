"""The part shared by attention kernels: rows of a sequence, visible keys, and loads of tiles to shared memory.

**Rows.** Query heads that share a KV head lie side by side as rows of one tile (grouped-query attention by index, and K
and V read once for all of them): of a sequence and KV head, row r is token r // share and query head
kv_head * share + r % share, with share = num_q_heads / num_kv_heads.

**Sight.** Token j of a chunk of `query_len` tokens, the last of a sequence of `seq_len`, stands at position
seq_len - query_len + j and sees the keys below its `end`, one more than its position, and from end - window on.
`NO_WINDOW` means no window. Where seq_len < query_len (a padded entry of a captured batch) the end is 0, and the row
zeros. A kernel for spans (tokens of a picture that see each other) reads each token's end from `bidirectional_until`,
which never falls within a chunk; the window is counted from its own place. Kernels without a window (`Variant`) carry
none of its arithmetic.

**Tiles** lie in shared memory with 16 bytes of padding a row, so that eight rows' 16-byte pieces fall into different
banks (a row's pitch is an odd number of 16-byte pieces). Copies are
asynchronous (cp.async); rows beyond the end or outside the window, and columns beyond the head dim, are filled with
zeros and never read: a page outside the window may have been freed, and hold anything. Tiles of `quantised_pages` are
bytes, followed by the keys' scales; flash_float32 has them widened as they come.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.memory import (
    copy_async_4,
    copy_async_16,
    copy_async_whole_4,
    copy_async_whole_8,
    copy_async_whole_16,
    load_4xb32,
    load_b16,
    load_b32,
    load_f32,
    load_written_b32,
    shared_load_4xb32,
    shared_load_b32,
    shared_store_4xf32,
    shared_store_b16,
    shared_store_b32,
    store_4xb32,
    store_b16,
    store_b32,
)
from numba_kernels.cuda.kv_cache import PAGE_BYTES, page_row
from numba_kernels.cuda.quantised_pages import byte_widener

NO_WINDOW = 0x7FFFFFFF
WIDE = 256  # heads beyond it have kernels that divide their columns

_shared_load_b16 = instruction("ld.shared.b16 $0, [$1];", "h", "r")

# Every tier's kernel takes these, so that a launch is packed the same way for every choice of `plan`.
ARGUMENT_TYPES = (
    types.uint64,  # q [T, Hq, D]
    types.uint64,  # k_cache
    types.uint64,  # v_cache
    types.uint64,  # out [T, Hq * D]
    types.uint64,  # workspace (float32; 0 where the plan needs none)
    types.uint64,  # arrivals, uint32, zeros between launches; 0 where the plan needs none
    types.uint64,  # sinks [Hq] float32; 0 for a kernel without
    types.uint64,  # k_scales [blocks, KV heads, block size] float32; 0 for pages without
    types.uint64,  # v_scales
    types.CPointer(types.int32),  # query_start [S + 1]
    types.CPointer(types.int32),  # seq_lens [S]
    types.CPointer(types.int32),  # block_tables [S, table_width]
    types.CPointer(types.int32),  # bidirectional_until [T]; 0 for a kernel without spans
    types.uint32,  # num_q_heads
    types.uint32,  # num_kv_heads
    types.uint32,  # share = num_q_heads / num_kv_heads
    types.uint32,  # table_width
    types.uint32,  # window, or NO_WINDOW
    types.uint32,  # num_seqs
    types.uint32,  # workspace_columns: naive: weights a row; decode: blocks that a KV head's keys are to be cut into
    types.float32,  # scale times log2 e
)


@device_function
def visible_end(seq_len, query_len, token):
    """One past the last key that the chunk's token sees."""
    end = uint32(0)
    behind = uint32(uint32(seq_len + token) + uint32(1))
    if behind > query_len:
        end = uint32(behind - query_len)
    return end


@device_function
def rows_of_tile(tile, tile_rows, seq_len, query_len, share):
    """How many rows the chunk has, the first of the tile, and one past the last keys that its first and last row see;
    `share` rows belong to a token."""
    rows = uint32(query_len * share)
    first_row = uint32(tile * uint32(tile_rows))
    last_row = uint32(minimum_u32(uint32(first_row + uint32(tile_rows)), rows) - uint32(1))
    shortest_end = visible_end(seq_len, query_len, divide_u32(first_row, share))
    longest_end = visible_end(seq_len, query_len, divide_u32(last_row, share))
    return rows, first_row, shortest_end, longest_end


@functools.cache
def end_finder(has_spans: bool) -> Any:
    """A device function ``(bidirectional_until, first_token, seq_len, query_len, token)``: one past the last key that
    the chunk's token sees, or for tokens past the chunk, its last one; `first_token` is the chunk's in the batch."""
    if not has_spans:

        @device_function
        def own_end(bidirectional_until, first_token, seq_len, query_len, token):
            return visible_end(seq_len, query_len, token)

        return own_end

    @device_function
    def read_end(bidirectional_until, first_token, seq_len, query_len, token):
        place = minimum_u32(token, uint32(query_len - uint32(1)))
        return uint32(bidirectional_until[uint32(first_token + place)])

    return read_end


@device_function
def visible_first(end, window):
    """The first key that a token at end - 1 sees."""
    first = uint32(0)
    if end > window:
        first = uint32(end - window)
    return first


@dataclass(frozen=True, slots=True)
class Variant:
    """The features compiled into a kernel, or left out.

    Attributes:
        has_window: whether a row sees its last `window` keys only.
        has_sinks: whether each query head has a logit that joins the softmax's denominator, and no value.
        softcap: scores become softcap tanh(score / softcap); 0 where they stay.
        pages: the type of KV pages of a byte a number: one of `quantised_pages.PAGES`; "" for the dtype.
        has_spans: whether `bidirectional_until` bounds each token's keys.
        is_expanded: whether keys and values are not in pages, but a segment of a sequence's, as rows [keys, heads,
            qk_dim + v_dim] of both (`segments`): so latent rows are expanded for long prompts.
    """

    has_window: bool = False
    has_sinks: bool = False
    softcap: float = 0.0
    pages: str = ""
    has_spans: bool = False
    is_expanded: bool = False

    @property
    def suffix(self) -> str:
        """A suffix for the kernel's name."""
        cap = f"_cap{self.softcap:g}".replace(".", "p").replace("-", "m").replace("+", "") if self.softcap else ""
        pages = f"_{self.pages}" if self.pages else ""
        spans = "_spans" * self.has_spans + "_expanded" * self.is_expanded
        return pages + "_window" * self.has_window + "_sinks" * self.has_sinks + cap + spans


@functools.cache
def is_hidden(has_window: bool) -> Any:
    """A device function ``(key, end, window) -> bool``: whether a row of that `end` does not see the key."""
    if has_window:
        return device_function(lambda key, end, window: key >= end or uint32(key + window) < end)
    return device_function(lambda key, end, window: key >= end)


@functools.cache
def is_outside(has_window: bool) -> Any:
    """A device function ``(key, end, own_end, window) -> bool``: the same for a row that sees keys below `end`, and has
    its window from its `own_end`."""
    if has_window:
        return device_function(lambda key, end, own_end, window: key >= end or uint32(key + window) < own_end)
    return device_function(lambda key, end, own_end, window: key >= end)


@dataclass(frozen=True)
class TileShape:
    """Tiles of heads of one dtype, or of pages of one type, and head dim in shared memory.

    Attributes:
        columns: elements of a row that kernels compute over: the head dim rounded up to 16, of wide heads to 64.
        pitch: bytes from one row to the next.
    """

    dtype: str
    head_dim: int
    columns: int
    pitch: int

    @property
    def pieces(self) -> int:
        """16-byte pieces of a row, without the padding."""
        return self.columns * PAGE_BYTES[self.dtype] // 16


def tile_shape(dtype: str, head_dim: int) -> TileShape:
    """The shape of tiles for heads of this dtype and dimension."""
    multiple = 16 if head_dim <= WIDE else 64
    columns = -(-head_dim // multiple) * multiple
    pieces = columns * PAGE_BYTES[dtype] // 16
    return TileShape(dtype, head_dim, columns, (pieces | 1) * 16)


@functools.cache
def list_reader(is_early: bool) -> Any:
    """A device function ``(numbers, index)``: a number of a list of int32. An early one is read at the list's address,
    past the first-level cache, before `wait_for_previous_grid`."""

    @device_function
    def read_early(numbers, index):
        return load_written_b32(numbers + uint64(index) * uint64(4))

    return read_early if is_early else device_function(lambda numbers, index: uint32(numbers[index]))


@functools.cache
def key_tile_copier(
    dtype: str, head_dim: int, block_size: int, num_keys: int, threads: int, has_window: bool, is_early: bool = False
) -> tuple[Any, Any, Any]:
    """Three device functions that `threads` threads (a block's, or a warp's lanes) call to copy rows of K or V.

    A thread copies one 16-byte piece of 1, 2, 4 or 8 neighbouring rows, which lie in one page: it looks for one page a
    tile, and its addresses differ by constants. Tiles begin at multiples of 8 keys.

    ``column(cache, kv_head, num_kv_heads, thread)``: the address of the thread's piece in a page's first row.
    ``locate(block_tables, table, first_key, seen, end_key, num_kv_heads, thread)``: how far from there its rows of the
    tile lie, uint64; the same for K and V. `block_tables` (`list_reader`) is offset by `table` to the sequence's row.
    ``copy(tile, column, offset, first_key, seen, end_key, thread)``: rows of keys first_key to first_key + num_keys - 1
    go to the shared address `tile`; those from end_key on become zeros, with a window those below `seen` too.
    Asynchronous: commit and wait.
    """
    shape = tile_shape(dtype, head_dim)
    pieces, pitch = shape.pieces, shape.pitch
    row_bytes = page_row(head_dim, dtype) * PAGE_BYTES[dtype]
    stored_pieces = row_bytes // 16
    unit = rows_of_thread(num_keys, pieces, threads)
    busy = num_keys // unit * pieces  # threads that have rows
    page_bytes = block_size * row_bytes
    read = list_reader(is_early)

    @device_function
    def column(cache, kv_head, num_kv_heads, thread):
        piece = uint32(thread % uint32(pieces))
        return cache + uint64(kv_head) * uint64(page_bytes) + uint64(uint32(piece * uint32(16)))

    @device_function
    def locate(block_tables, table, first_key, seen, end_key, num_kv_heads, thread):
        key = uint32(first_key + uint32(thread // uint32(pieces)) * uint32(unit))
        offset = uint64(0)
        if key < end_key and (not has_window or uint32(key + uint32(unit)) > seen):
            block = read(block_tables, table + uint64(key // uint32(block_size)))
            inside = uint32(uint32(key % uint32(block_size)) * uint32(row_bytes))
            offset = uint64(block) * uint64(uint32(num_kv_heads * uint32(page_bytes))) + uint64(inside)
        return offset

    @device_function
    def copy(tile, column, offset, first_key, seen, end_key, thread):
        row = uint32(uint32(thread // uint32(pieces)) * uint32(unit))
        piece = uint32(thread % uint32(pieces))
        target = uint32(tile + row * uint32(pitch) + piece * uint32(16))
        source = column + offset
        if busy == threads or thread < uint32(busy):
            is_whole = stored_pieces == pieces and uint32(first_key + uint32(num_keys)) <= end_key
            if is_whole and (not has_window or first_key >= seen):
                for i in range(unit):
                    copy_async_whole_16(uint32(target + uint32(i * pitch)), source + uint64(i * row_bytes))
            else:
                for i in range(unit):
                    size = uint32(0)
                    key = uint32(first_key + row + uint32(i))
                    if key < end_key and piece < uint32(stored_pieces) and (not has_window or key >= seen):
                        size = uint32(16)
                    copy_async_16(uint32(target + uint32(i * pitch)), source + uint64(i * row_bytes), size)

    return column, locate, copy


def rows_of_thread(num_keys: int, pieces: int, threads: int) -> int:
    """Neighbouring rows of a tile that a thread copies."""
    return next(rows for rows in (1, 2, 4, 8) if rows * threads >= num_keys * pieces)


@functools.cache
def scale_copier(
    pages: str, head_dim: int, block_size: int, num_keys: int, threads: int, has_window: bool
) -> tuple[Any, Any]:
    """``(column, copy)`` as `key_tile_copier`'s, for the scales of the keys: `copy` takes its `offset`, and puts them
    to the shared address `target`, zeros where a row is one."""
    pieces = tile_shape(pages, head_dim).pieces
    row_bytes = page_row(head_dim, pages)
    unit = rows_of_thread(num_keys, pieces, threads)
    busy = num_keys // unit * pieces

    @device_function
    def column(scales, kv_head):
        return scales + uint64(kv_head) * uint64(block_size * 4)

    @device_function
    def copy(target, column, offset, first_key, seen, end_key, thread):
        row = uint32(uint32(thread // uint32(pieces)) * uint32(unit))
        if thread < uint32(busy) and thread % uint32(pieces) == uint32(0):
            source = column + offset // uint64(row_bytes) * uint64(4)
            place = uint32(target + row * uint32(4))
            if uint32(first_key + uint32(num_keys)) <= end_key and (not has_window or first_key >= seen):
                if unit == 1:
                    copy_async_whole_4(place, source)
                elif unit == 2:
                    copy_async_whole_8(place, source)
                else:
                    for i in range(unit // 4):
                        copy_async_whole_16(uint32(place + uint32(16 * i)), source + uint64(16 * i))
            else:
                for i in range(unit):
                    size = uint32(0)
                    key = uint32(first_key + row + uint32(i))
                    if key < end_key and (not has_window or key >= seen):
                        size = uint32(4)
                    copy_async_4(uint32(place + uint32(4 * i)), source + uint64(4 * i), size)

    return column, copy


@functools.cache
def page_copier(
    dtype: str, pages: str, head_dim: int, block_size: int, num_keys: int, threads: int, has_window: bool
) -> tuple[Any, Any, Any, Any]:
    """``(locate, column, scales_of, copy)`` of pages, of `pages` or the dtype: `key_tile_copier`'s and `scale_copier`'s
    functions, ``copy(tile, column, scales, offset, …)``. Scales follow a tile's rows; float32 has them multiplied."""
    sizes = head_dim, block_size, num_keys, threads, has_window
    column, locate, copy_rows = key_tile_copier(pages or dtype, *sizes)
    of_head, copy_scales = scale_copier(pages or dtype, *sizes)
    has_scales, scales_at = pages != "", num_keys * tile_shape(pages or dtype, head_dim).pitch

    @device_function
    def copy(tile, column, scales, offset, first_key, seen, end_key, thread):
        copy_rows(tile, column, offset, first_key, seen, end_key, thread)
        if has_scales:
            copy_scales(uint32(tile + uint32(scales_at)), scales, offset, first_key, seen, end_key, thread)

    scales_of = device_function(lambda scales, kv_head, num_kv_heads: of_head(scales, kv_head))
    return locate, column, scales_of, widening_copier(pages, *sizes) if has_scales and dtype == "f32" else copy


@functools.cache
def run_copier(
    dtype: str, head_dim: int, block_size: int, num_keys: int, num_runs: int, threads: int, has_window: bool,
    is_early: bool = False,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """``(column, scales_of, locate, copy)``: `key_tile_copier`'s and `scale_copier`'s functions for tiles of which a
    thread copies `num_runs` pieces of neighbouring rows: ``locate(offsets, …)`` and ``copy(tile, column, scales,
    offsets, …)``. Scales follow the tile's rows."""
    keys, pitch = num_keys // num_runs, tile_shape(dtype, head_dim).pitch
    column, locate_run, copy_run = key_tile_copier(
        dtype, head_dim, block_size, keys, threads, has_window, is_early
    )  # fmt: skip
    scales_of, copy_scales = scale_copier(dtype, head_dim, block_size, keys, threads, has_window)
    has_scales, scales_at = PAGE_BYTES[dtype] == 1, num_keys * pitch

    @device_function
    def locate(offsets, block_tables, table, first_key, seen, end_key, num_kv_heads, thread):
        for i in range(num_runs):
            at = uint32(first_key + uint32(i * keys))
            offsets[i] = locate_run(block_tables, table, at, seen, end_key, num_kv_heads, thread)

    @device_function
    def copy(tile, column, scales, offsets, first_key, seen, end_key, thread):
        for i in range(num_runs):
            at = uint32(first_key + uint32(i * keys))
            copy_run(uint32(tile + uint32(i * keys * pitch)), column, offsets[i], at, seen, end_key, thread)
            if has_scales:
                place = uint32(tile + uint32(scales_at + 4 * i * keys))
                copy_scales(place, scales, offsets[i], at, seen, end_key, thread)

    return column, scales_of, locate, copy


@functools.cache
def widening_copier(pages: str, head_dim: int, block_size: int, num_keys: int, threads: int, has_window: bool) -> Any:
    """A device function ``copy(tile, column, scales, offset, first_key, seen, end_key, thread)``: as
    `key_tile_copier`'s of pages of bytes, but they come as float32, times their scales. Not asynchronous."""
    shape, wide = tile_shape(pages, head_dim), tile_shape("f32", head_dim)
    pieces, pitch, row_bytes = shape.pieces, wide.pitch, page_row(head_dim, pages)
    unit = rows_of_thread(num_keys, pieces, threads)
    busy = num_keys // unit * pieces
    widen = byte_widener(pages)

    @device_function
    def copy(tile, column, scales, offset, first_key, seen, end_key, thread):
        words = cuda.local.array(4, uint32)
        row = uint32(uint32(thread // uint32(pieces)) * uint32(unit))
        piece = uint32(thread % uint32(pieces))
        if thread < uint32(busy):
            for i in range(unit):
                key = uint32(first_key + row + uint32(i))
                scale = float32(0)
                for j in range(4):
                    words[j] = uint32(0)
                if key < end_key and (not has_window or key >= seen):
                    a, b, c, d = load_4xb32(column + offset + uint64(i * row_bytes))
                    words[0] = a
                    words[1] = b
                    words[2] = c
                    words[3] = d
                    scale = load_f32(scales + offset // uint64(row_bytes) * uint64(4) + uint64(4 * i))
                target = uint32(tile + uint32(row + uint32(i)) * uint32(pitch) + piece * uint32(64))
                for j in range(4):
                    word = words[j]
                    four = (
                        widen(word) * scale,
                        widen(uint32(word >> uint32(8))) * scale,
                        widen(uint32(word >> uint32(16))) * scale,
                        widen(uint32(word >> uint32(24))) * scale,
                    )
                    shared_store_4xf32(uint32(target + uint32(16 * j)), four)

    return copy


@device_function
def head_row(row, share, kv_head, num_q_heads, first_token):
    """The row of q or out, seen as [T * Hq, D], of row `row` of a sequence and KV head; uint64."""
    token = divide_u32(row, share)
    head = uint32(kv_head * share + (row - token * share))
    return uint64(uint32(first_token + token)) * uint64(num_q_heads) + uint64(head)


@device_function
def sink_head(row, share, kv_head):
    """The query head of a row of a sequence and KV head; one that exists for rows beyond the end, too."""
    return uint32(kv_head * share + (row - divide_u32(row, share) * share))


@functools.cache
def query_tile_copier(dtype: str, head_dim: int, num_rows: int, threads: int) -> Any:
    """A device function ``copy(tile, q, place, thread)``: rows first_row to first_row + num_rows - 1 of q, those from
    `rows` on zeros; `place` is (first_row, rows, share, kv_head, num_q_heads, first_token). Partly asynchronous: commit
    and wait."""
    shape, item = tile_shape(dtype, head_dim), ITEM_BYTES[dtype]
    unit, pitch, row_bytes = _unit_of(head_dim, item), shape.pitch, uint64(head_dim * item)
    pieces, stored_pieces = shape.columns * item // unit, head_dim * item // unit
    load_bits, store_bits, bits = (
        (load_b32, shared_store_b32, types.uint32) if item == 4 else (load_b16, shared_store_b16, types.uint16)
    )

    @device_function
    def bring_element(target, source, size):
        value = bits(0)
        if size > uint32(0):
            value = load_bits(source)
        store_bits(target, value)

    bring = copy_async_16 if unit == 16 else bring_element

    @device_function
    def copy(tile, q, place, thread):
        first_row, rows, share, kv_head, num_q_heads, first_token = place
        index = thread
        while index < uint32(num_rows * pieces):
            below = uint32(index // uint32(pieces))
            piece = uint32(index - below * uint32(pieces))
            row = uint32(first_row + below)
            source = q
            size = uint32(0)
            if row < rows and piece < uint32(stored_pieces):
                at = head_row(row, share, kv_head, num_q_heads, first_token)
                source = q + at * row_bytes + uint64(piece) * uint64(unit)
                size = uint32(unit)
            bring(uint32(tile + below * uint32(pitch) + piece * uint32(unit)), source, size)
            index = uint32(index + uint32(threads))

    return copy


@functools.cache
def output_tile_copier(dtype: str, head_dim: int, num_rows: int, threads: int) -> Any:
    """A device function ``copy(tile, out, place, thread)``: a tile of finished rows in shared memory goes to out, but
    for rows from `rows` on; `place` as in `query_tile_copier`."""
    pitch, item = tile_shape(dtype, head_dim).pitch, ITEM_BYTES[dtype]
    unit, row_bytes = _unit_of(head_dim, item), uint64(head_dim * item)
    pieces = head_dim * item // unit
    take, put = {
        16: (shared_load_4xb32, store_4xb32), 4: (shared_load_b32, store_b32), 2: (_shared_load_b16, store_b16)
    }[unit]  # fmt: skip

    @device_function
    def copy(tile, out, place, thread):
        first_row, rows, share, kv_head, num_q_heads, first_token = place
        index = thread
        while index < uint32(num_rows * pieces):
            below = uint32(index // uint32(pieces))
            piece = uint32(index - below * uint32(pieces))
            row = uint32(first_row + below)
            if row < rows:
                values = take(uint32(tile + below * uint32(pitch) + piece * uint32(unit)))
                at = head_row(row, share, kv_head, num_q_heads, first_token)
                put(out + at * row_bytes + uint64(piece) * uint64(unit), values)
            index = uint32(index + uint32(threads))

    return copy


def _unit_of(head_dim: int, item: int) -> int:
    """Bytes that are copied at once: a row of q or out is whole units."""
    return 16 if head_dim * item % 16 == 0 else item
