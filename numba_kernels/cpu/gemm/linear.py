"""Matrix product with a packed weight: ``out[T, N] = x[T, K] . weight[N, K]^T + bias + residual``.

The first work items of a launch arrange the rows of x for the tiles (`operands`), the others wait for them and
multiply. A product with few rows streams the panels once, which is the limit of memory bandwidth; with many rows each
panel is cut along K into blocks that stay in the first-level cache while all row tiles pass over them, and the tiles
prefetch the next block meanwhile (to the cache level of `simd.prefetch`).

In exact mode K may be cut into segments, whose sums are added in a tree (`numba_kernels.split_k`). Sums of segments
wait in slots: segment s in the slot numbered by the count of ones in s, until the one below it is complete.
A last turn of the tile, over no words, finishes the sum in slot 0. Where ranks have added up the segments, a launch
takes their sums instead of panels and rows (`add_partials`), and finishes them in the same way.

Low-rank sums ride on a launch (`low_rank`): some more of its first work items shrink rows of x, and panels' residual is
made with them in `out` just before they are multiplied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit

from numba_kernels.blocks import BLOCKS, X_GROUP
from numba_kernels.closure_cache import name_by_content
from numba_kernels.cpu.activation import gate_rows
from numba_kernels.cpu.gemm.amx_tile import amx_tile_of, release_tiles
from numba_kernels.cpu.gemm.arranged_rows import (
    ELEMENTS_A_WORD,
    GROUP_ROW_WORDS,
    are_integers,
    are_pair_rows,
    are_pairs,
    arrange_block_rows,
    arrange_blocks,
    arrange_floats,
    arrange_groups,
    arrange_pair_rows,
    arrange_pairs,
    is_own_operand,
    operand_words,
    pair_row_words,
)
from numba_kernels.cpu.gemm.block_numbers import is_signed
from numba_kernels.cpu.gemm.block_tile import FEW_ROWS, X_ROW_WORDS, is_one_stream, start_in_rows, x_words
from numba_kernels.cpu.gemm.e4m3_tile import PARTS, UNPACKED_WORDS
from numba_kernels.cpu.gemm.float_tile import gemm_tile_of, panels_at_once
from numba_kernels.cpu.gemm.low_rank import EXPAND, SHRINK, Riding, call_expand, call_shrink
from numba_kernels.cpu.gemm.packed_words import GROUP_WORDS
from numba_kernels.cpu.gemm.unpacked_blocks import (
    PREFIX,
    UNPACKED_ROWS,
    group_row_words,
    unpack_blocks_of,
    unpacked_words,
)
from numba_kernels.cpu.intrinsics import atomic
from numba_kernels.cpu.layout import AMX_ROWS, DOT, GEMM_ROWS, INT8_ROWS, PANEL_COLUMNS, TILE_VECTORS
from numba_kernels.cpu.running.launch import (
    Fields,
    Kernel,
    address,
    address_of,
    float32_at,
    int64_at,
    new_array,
    new_lines,
)
from numba_kernels.cpu.target import LANES
from numba_kernels.split_k import SEGMENTS

MAX_BLOCK_WORDS = 128  # of K in a block, a multiple of GROUP_WORDS: 24 KB of panel with AVX-512, else 8
STREAM_AHEAD_BYTES = 4096  # how far a lone pass over the weight prefetches
BLOCK_STREAM_AHEAD_BYTES = 8192  # of blocks, but for few rows of one stream: 32768 cost Q6_K a sixth of its rate
TICKET_ROWS = 128  # at most about so many
MOST_SIGNED_ROWS = 2 * GEMM_ROWS  # that meet blocks of signed bytes as they lie in panels: see `unpacked_blocks`
MOST_ROWS_WITHOUT_AMX = 2 * GEMM_ROWS  # of integers, where the processor has AMX
UNPACKED_ELEMENTS = 512  # of K that are unpacked at once with vpdpbusd: 24 KB of bytes, and scales
MAX_ROWS = 1024  # of a launch: more are several, so that their operands stay small
_ARRANGED_ALONE = 2048  # elements that another thread would not quantise in less time than it takes to begin
SERIAL_MACS = 600_000  # less work is not worth waking a thread
_WHOLE_MACS = 8_000_000  # of a work item of several tiles: the first block of its weight has not been prefetched
_EXPANDED_VALUES = 196608  # of low-rank sums that are made at a time, about: an adapter's `up` is read as a long stream
_LONE_EXPANDED_VALUES = 8192  # the same of a lone tile, which stay in the first-level cache
_GATED_ROWS = 16  # of up's products, or a tile's, that wait in the first-level cache for their gates
_PANEL_ROW_BYTES = PANEL_COLUMNS * 4
_NUM_SLOTS = SEGMENTS.bit_length()  # one more than a segment's number has ones

FIELDS = Fields(
    "*x *panels *scales *bias *residual *out *operands *partials *low_rank num_rows depth x_stride width out_width "
    "num_segments step_elements panels_a_work_item row_work_items num_tiles num_arranging num_shrinking "
    "arranging_parts gate arranged"
)
_ARRANGED = FIELDS.offset("arranged")


def _stream_ahead(stored):
    """How far a lone pass prefetches, by rows up to FEW_ROWS."""
    block = BLOCKS.get(stored)
    if block is None:
        return (STREAM_AHEAD_BYTES,) * (FEW_ROWS + 1)
    few = STREAM_AHEAD_BYTES if is_one_stream(block) and not block.is_e4m3 else BLOCK_STREAM_AHEAD_BYTES
    return (*FEW_ROWS * (few,), BLOCK_STREAM_AHEAD_BYTES)


@njit(nogil=True)
def _first_row(a, tile):
    """First row of a tile; after the last one: the number of rows. The first tiles may have one row more."""
    return a.num_rows // a.num_tiles * tile + min(tile, a.num_rows % a.num_tiles)


@njit(nogil=True)
def _end_of_height(a, tile):
    """The first tile after this one with another height; after the last one: the number of tiles."""
    higher = a.num_rows % a.num_tiles
    return higher if tile < higher else a.num_tiles


@njit(nogil=True)
def _moved(start, size_bytes):
    return start + size_bytes if start != 0 else 0


@njit(nogil=True)
def _count_ones(number):
    count = 0
    while number:
        count += number & 1
        number >>= 1
    return count


@njit(nogil=True)
def _add(total, other, size):
    """``total += other`` of ``size`` floats at these addresses."""
    sums, more = float32_at(total, size), float32_at(other, size)
    for i in range(size):
        sums[i] += more[i]


def pairs_of(width: int) -> int:
    """Panels that have outputs of up, the second half of ``width``: each, with the panel of its gates, is a pair."""
    return -(-width // PANEL_COLUMNS) - width // 2 // PANEL_COLUMNS


_pairs_of = njit(nogil=True)(pairs_of)


@njit(nogil=True)
def _waiting_rows(a, rows):
    """Rows of the gates of two panels, and of up."""
    return 2 * rows + max(_GATED_ROWS, AMX_ROWS) if a.gate else 0


@njit(nogil=True)
def _first_turn(a, first_pair):
    """The first turn of some pairs: that of the gates before them, if up's first columns belong to these."""
    return 2 * first_pair - (2 if first_pair > 0 and a.width // 2 % PANEL_COLUMNS else 0)


@njit(nogil=True)
def _turn_of(a, turn, first_pair, gates, distance):
    """The panel of a turn, below 0 if there is none, where its products go, and bytes from tile row to tile row there.
    Even turns are of gates, whose panels lie in turn in two places, ``distance`` rows apart; up's rows follow those."""
    pair, place = turn // 2, gates + turn // 2 % 2 * distance * _PANEL_ROW_BYTES
    if turn % 2 == 0:
        return pair if pair * PANEL_COLUMNS < a.width // 2 else -1, place, _PANEL_ROW_BYTES
    panel = a.width // 2 // PANEL_COLUMNS + pair if pair >= first_pair else -1
    return panel, gates + 2 * distance * _PANEL_ROW_BYTES, 0


@njit(nogil=True)
def _gate_rows(a, pair, gates, distance, up, first_row, row, rows):
    """Results of ``rows`` rows from ``row`` on, from the panel of up that is the ``pair``-th. Its first columns belong
    to the gates at the end of the panel before that pair's; ``gates`` is as in `_turn_of`, from ``first_row`` on."""
    half, out = a.width // 2, a.out + row * a.out_width * 4
    gates += (row - first_row) * _PANEL_ROW_BYTES
    shift = half % PANEL_COLUMNS
    for number in range(2):
        column = pair * PANEL_COLUMNS - (1 - number) * shift
        count = min(PANEL_COLUMNS - shift if number else shift, half - column)
        if count <= 0 or column < 0:
            continue
        place, inside = (pair + number + 1) % 2 * distance, 0 if number else PANEL_COLUMNS - shift
        gate_rows(
            a.gate, gates + place * _PANEL_ROW_BYTES + inside * 4, up + number * shift * 4, _PANEL_ROW_BYTES,
            out + column * 4, a.out_width * 4, rows, count,
        )  # fmt: skip


@njit(nogil=True)
def _take(partial, row_bytes, rows, columns, slot, slot_columns):
    """Copies ``[rows, columns]`` of a rank's sums to a slot."""
    for row in range(rows):
        source = float32_at(partial + row * row_bytes, columns)
        target = float32_at(slot + row * slot_columns * 4, columns)
        for column in range(columns):
            target[column] = source[column]


def unpacks(stored: Any) -> bool:
    """Whether blocks of a panel are unpacked for many rows."""
    return stored in BLOCKS and (BLOCKS[stored].is_e4m3 or DOT == "pairs" or TILE_VECTORS > 1)


def uses_amx(stored: Any) -> bool:
    """Whether many rows (of bfloat16 all) meet tiles of AMX."""
    return bool(AMX_ROWS) and (stored is np.uint8 or are_pair_rows(stored) or are_integers(stored))


def most_narrow_rows(stored: Any) -> int:
    """More rows than these meet weights that were unpacked for them, or tiles of AMX."""
    if are_pair_rows(stored):
        return 0
    if not unpacks(stored):
        return MOST_ROWS_WITHOUT_AMX if uses_amx(stored) else MAX_ROWS
    if BLOCKS[stored].is_e4m3:
        return GEMM_ROWS // 2
    if DOT == "bytes":
        return MOST_ROWS_WITHOUT_AMX if uses_amx(stored) else GEMM_ROWS
    return MOST_SIGNED_ROWS if is_signed(BLOCKS[stored]) else GEMM_ROWS


def _narrow_rows(stored: Any) -> int:
    """The most rows of a narrow tile, among more than GEMM_ROWS."""
    return INT8_ROWS if stored is np.uint8 else GEMM_ROWS


def _wide_rows(stored: Any) -> int:
    """The most rows of a wide tile."""
    if uses_amx(stored):
        return AMX_ROWS
    return UNPACKED_ROWS if unpacks(stored) and not BLOCKS[stored].is_e4m3 else GEMM_ROWS


@functools.cache
def tile_counter(stored: Any) -> Callable[[int], int]:
    """A function of a number of rows: the fewest tiles for them. Kernels compile it."""
    most_narrow, wide_rows = most_narrow_rows(stored), _wide_rows(stored)
    narrow_rows = _narrow_rows(stored)

    @name_by_content
    def count_tiles(rows: int) -> int:
        if rows > most_narrow:
            return -(-rows // wide_rows)
        return -(-rows // (narrow_rows if rows > GEMM_ROWS else GEMM_ROWS))

    return count_tiles


def most_tiles(stored: Any, rows: int, groups: int) -> int:
    """An upper bound of the tiles of so many groups of rows, which have ``rows`` rows together."""
    return min(rows, -(-rows // min(_narrow_rows(stored), _wide_rows(stored))) + groups)


class ProductParts(NamedTuple):
    """The parts of a product's kernel.

    Attributes:
        arrange: fills ``operands`` of an argument block ``a`` with one work item's rows; K has so many ``words``.
        multiply: one work item's product.
        elements, unit_words: so many elements of K take so many words of a column.
        count_tiles: the fewest tiles for a number of rows.
    """

    arrange: Any
    multiply: Any
    elements: int
    unit_words: int
    count_tiles: Any


@functools.cache
def product_parts(stored: Any) -> ProductParts:
    """The parts for panels of ``stored``: a class, or a block's name. `linear_kernel` documents the fields."""
    is_block = stored in BLOCKS
    is_int8, is_pairs, is_integers = stored is np.uint8, are_pairs(stored), are_integers(stored)
    # K is cut at multiples of `span` words.
    if is_block:
        elements, unit_words = BLOCKS[stored].elements, BLOCKS[stored].words
        span, span_row_words = unit_words, x_words(BLOCKS[stored])
    else:
        elements, unit_words = ELEMENTS_A_WORD[np.dtype(stored).name], 1
        span, span_row_words = (GROUP_WORDS, GROUP_ROW_WORDS) if is_int8 else (1, 1 if is_pairs else elements)
    start, is_halved, has_power = 0, False, False
    if is_integers:
        start, is_halved = start_in_rows(BLOCKS[stored]), BLOCKS[stored].group < X_GROUP
        has_power = BLOCKS[stored].has_power_scales
    are_rows, has_amx, most_narrow = are_pair_rows(stored), uses_amx(stored), most_narrow_rows(stored)
    is_e4m3, has_buffer = is_block and BLOCKS[stored].is_e4m3, unpacks(stored)
    has_wide = has_amx or has_buffer
    if are_rows:
        span = LANES
    narrow_tile = wide_tile = gemm_tile_of(stored)
    unpack_blocks, buffer_words, step_words_in_buffer, parts, most_words = None, 0, span, 1, MAX_BLOCK_WORDS
    group_words = wide_group_words = X_ROW_WORDS  # of x, beside integers
    if has_buffer:
        unpack_blocks = unpack_blocks_of(stored)
    if has_amx:
        wide_tile = amx_tile_of(PREFIX + stored if is_block else stored)
    elif has_buffer:
        wide_tile = gemm_tile_of(PREFIX + stored)
    if is_e4m3:
        buffer_words = step_words_in_buffer = UNPACKED_WORDS
        most_words, parts = span * 4 // PARTS, PARTS
    elif has_buffer:
        buffer_words, wide_group_words = unpacked_words(BLOCKS[stored]), group_row_words(BLOCKS[stored])
        most_words = MAX_BLOCK_WORDS // TILE_VECTORS
        if DOT == "bytes":
            most_words = span * UNPACKED_ELEMENTS // elements
    wide_span_row_words = span_row_words
    if is_integers:
        wide_span_row_words = span_row_words // X_ROW_WORDS * wide_group_words
    has_pairs = wide_group_words > group_words
    at_once = (1, *(panels_at_once(stored, rows) for rows in range(1, GEMM_ROWS + 1)), *(AMX_ROWS * (1,)))
    if are_rows:
        at_once = (1,) * (AMX_ROWS + 1)
    stream_ahead = _stream_ahead(stored)

    @njit(nogil=True)
    @name_by_content
    def arrange(a, work_item, words):
        tile, part = work_item // a.arranging_parts, work_item % a.arranging_parts
        first = _first_row(a, tile)
        rows = _first_row(a, tile + 1) - first
        x = a.x + first * a.x_stride * 4
        is_wide = a.num_rows > most_narrow
        row_words = wide_span_row_words if is_wide else span_row_words
        target = a.operands + first * (-(-words // span)) * row_words * 4
        if is_integers:
            groups = a.depth // X_GROUP
            begin, end = groups * part // a.arranging_parts, groups * (part + 1) // a.arranging_parts
            x += begin * X_GROUP * 4
            group_size = wide_group_words if is_wide else group_words
            target += begin * group_size * rows * 4
            length, as_pairs = (end - begin) * X_GROUP, has_pairs and is_wide
            if has_amx and is_wide:
                arrange_block_rows(x, a.x_stride, length, rows, start, is_halved, has_power, target)
            else:
                arrange_blocks(x, a.x_stride, length, rows, start, is_halved, has_power, as_pairs, target)
            padding = words // unit_words * (elements // X_GROUP) - groups
            if end == groups and padding:
                float32_at(target + (end - begin) * group_size * rows * 4, padding * group_size * rows)[:] = np.float32(
                    0
                )
        elif is_int8:
            arrange_groups(x, a.x_stride, a.depth, rows, target)
        elif are_rows:
            length = pair_row_words(words)
            arrange_pair_rows(x, a.x_stride, a.depth, rows, words, length, a.operands + first * length * 4)
        elif is_pairs:
            arrange_pairs(x, a.x_stride, a.depth, rows, words // unit_words * elements // 2, target)
        else:
            arrange_floats(x, a.x_stride, a.depth, rows, words // unit_words * elements, target)

    @njit(nogil=True)
    @name_by_content
    def multiply(a, work_item, words):
        num_panels = _pairs_of(a.width) if a.gate else -(-a.width // PANEL_COLUMNS)
        first_panel = work_item // a.row_work_items * a.panels_a_work_item
        last_panel = min(num_panels, first_panel + a.panels_a_work_item)
        row_work_item = work_item % a.row_work_items
        first_tile = a.num_tiles * row_work_item // a.row_work_items
        last_tile = a.num_tiles * (row_work_item + 1) // a.row_work_items
        first_row = _first_row(a, first_tile)

        is_wide = a.num_rows > most_narrow
        is_buffered = has_buffer and is_wide
        x_span_words = wide_span_row_words if is_wide else span_row_words
        row_bytes = pair_row_words(words) * 4 if are_rows else (-(-words // span)) * x_span_words * 4
        panel_stride = words * _PANEL_ROW_BYTES
        rows = _first_row(a, last_tile) - first_row
        is_lone = last_tile - first_tile == 1  # one pass over the weight, as fast as memory delivers it
        is_cut = a.num_segments > 1
        step_words = max(1, a.step_elements // elements * unit_words if is_cut else words)
        num_steps = -(-words // step_words)
        longest = -(-num_steps // a.num_segments) * step_words
        num_blocks = 1 if is_lone and not is_buffered else max(1, -(-longest // most_words))
        block_words = max(1, -(-longest // (num_blocks * span))) * span
        num_slots = _NUM_SLOTS if is_cut else 0 if num_blocks == 1 else 1
        slot_rows = max(rows, GEMM_ROWS)  # a lone tile's panels lie side by side, as far as its accumulators go round
        slots = new_lines((num_slots * slot_rows + _waiting_rows(a, rows)) * PANEL_COLUMNS)
        slot_bytes = slot_rows * _PANEL_ROW_BYTES
        step = -(-_PANEL_ROW_BYTES // (last_tile - first_tile))
        if has_buffer and is_buffered:
            buffer = new_lines(block_words // span * buffer_words * PANEL_COLUMNS)
            step = -(-step // parts)
        expanded, has_sums = 0, 0
        expanding = max(1, _EXPANDED_VALUES // (rows * PANEL_COLUMNS))
        if is_lone:
            expanding = max(at_once[rows], _LONE_EXPANDED_VALUES // (rows * PANEL_COLUMNS))
        turn, end, out_stride, out_step = first_panel, last_panel, a.out_width * 4, a.out_width * 4
        if a.gate:  # a panel of gates, which wait, then one of up, some rows at a time
            turn, end, out_stride = _first_turn(a, first_panel), 2 * last_panel, _PANEL_ROW_BYTES
        while turn < end:
            panel, is_up, gates = turn, a.gate != 0 and turn % 2 == 1, address(slots) + num_slots * slot_bytes
            panels = at_once[rows] if is_lone and not a.gate and panel + at_once[rows] <= end else 1
            target = a.out + (first_row * a.out_width + panel * PANEL_COLUMNS) * 4
            if a.gate:
                panel, target, out_step = _turn_of(a, turn, first_panel, gates, rows)
            turn += panels
            column, columns = panel * PANEL_COLUMNS, min(panels * PANEL_COLUMNS, a.width - panel * PANEL_COLUMNS)
            if panel < 0:
                continue
            residual = _moved(a.residual, (first_row * a.out_width + column) * 4)
            if a.low_rank != 0:
                if panel + panels > expanded:
                    expanded = min(last_panel, panel + expanding)
                    made = min((expanded - panel) * PANEL_COLUMNS, a.width - column)
                    expand = int64_at(a.low_rank + EXPAND, 1)[0]
                    has_sums = call_expand(
                        expand, a.low_rank, column, made, first_row, rows, residual, a.out_width * 4, target,
                        a.out_width * 4,
                    )  # fmt: skip
                residual = target if has_sums else residual
            for segment in range(a.num_segments + is_cut):
                is_end = segment == a.num_segments  # all are added up: the last turn
                first, last, slot = 0, words, address(slots)
                if is_cut:
                    first = min(words, num_steps * segment // a.num_segments * step_words)
                    last = min(words, num_steps * (segment + 1) // a.num_segments * step_words)
                    slot += 0 if is_end else _count_ones(segment) * slot_bytes
                if a.partials != 0 and not is_end:
                    source = a.partials + ((segment * a.num_rows + first_row) * a.out_width + column) * 4
                    _take(source, a.out_width * 4, rows, columns, slot, panels * PANEL_COLUMNS)
                else:
                    for start in range(first, max(first + 1, last), block_words):
                        count = min(block_words, last - start)
                        weight = a.panels + panel * panel_stride + start * _PANEL_ROW_BYTES
                        # all row tiles together prefetch the next block
                        ahead = weight + (stream_ahead[min(rows, FEW_ROWS)] if is_lone else count * _PANEL_ROW_BYTES)
                        is_first = start == first and not is_end
                        is_last = is_end if is_cut else start + count >= last
                        partial = slot
                        if has_buffer and is_buffered:
                            unpack_blocks(weight, count, address(buffer))
                            weight = address(buffer)
                            count = count // span * step_words_in_buffer
                        tile, row = first_tile, first_row
                        while tile < last_tile:
                            height = _first_row(a, tile + 1) - row
                            # Tiles of one height make one call, unless they are AMX's.
                            num_tiles = 1 if has_amx and is_wide else min(_end_of_height(a, tile), last_tile) - tile
                            if is_up and is_last:
                                num_tiles = max(1, min(num_tiles, _GATED_ROWS // height))
                            words_at = start if are_rows else start // span * x_span_words * height
                            arguments = (
                                a.operands + row * row_bytes + words_at * 4,
                                count, weight, panel_stride, a.scales + column * 4, a.bias + column * 4,
                                _moved(residual, (row - first_row) * a.out_width * 4), a.out_width * 4,
                                target + (row - first_row) * out_step, out_stride, columns, partial, is_first,
                                is_last, ahead, step, panels, height, height * row_bytes, num_tiles,
                            )  # fmt: skip
                            if has_wide and is_wide:
                                wide_tile(*arguments)
                            else:
                                narrow_tile(*arguments)
                            if is_up and is_last:
                                _gate_rows(a, turn // 2 - 1, gates, rows, target, first_row, row, num_tiles * height)
                            tile += num_tiles
                            row += num_tiles * height
                            ahead += num_tiles * count * step
                            partial += num_tiles * height * PANEL_COLUMNS * 4
                if is_cut and not is_end:
                    complete = segment
                    while complete & 1:  # the slot below holds the left neighbour
                        _add(slot - slot_bytes, slot, rows * panels * PANEL_COLUMNS)
                        slot -= slot_bytes
                        complete >>= 1
        if has_amx and is_wide:
            release_tiles()

    return ProductParts(arrange, multiply, elements, unit_words, njit(nogil=True)(tile_counter(stored)))


@functools.cache
def linear_kernel(stored: Any) -> Kernel:
    """Writes ``out [T, N]`` for ``x [T, K]``, float32, and panels of ``stored``: a class, or a block's name.

    ``scales`` (of uint8) and ``bias`` have one float32 for each of the panels' columns; ``residual [T, N]`` (0 = none)
    may be ``out`` itself. The rows make ``num_tiles`` tiles. Work items ``0 .. num_arranging`` fill ``operands``
    with one each (for blocks, one of ``arranging_parts`` of its K); the others multiply some panels with one of
    ``row_work_items`` shares of the tiles. Without arranging work items ``operands`` has been filled.

    K is cut into ``num_segments``, 1 or more, at multiples of ``step_elements``. Where ``partials [num_segments, T,
    N]`` are given, they are the segments' sums, and ``depth`` is 0.

    ``low_rank`` is the address of a block of `low_rank.FIELDS`, or 0; work items after the arranging ones shrink for
    it, ``num_shrinking`` or, of a launch after the first with the same rows of x, 0.

    With ``gate`` work items are some pairs of panels (`pairs_of`), and nothing is added to the products.
    """
    arrange, multiply, elements, unit_words, _ = product_parts(stored)

    def linear(arguments, work_item):
        block = carray(arguments, 1)
        a = block[0]
        arranged = address(block) + _ARRANGED
        words = -(-a.depth // elements) * unit_words
        if work_item < a.num_arranging:
            arrange(a, work_item, words)
            atomic.add(arranged, 1)
        elif work_item < a.num_arranging + a.num_shrinking:
            call_shrink(int64_at(a.low_rank + SHRINK, 1)[0], a.low_rank, work_item - a.num_arranging)
            atomic.add(arranged, 1)
        else:
            while atomic.load(arranged) < a.num_arranging + a.num_shrinking:
                atomic.pause()
            multiply(a, work_item - a.num_arranging - a.num_shrinking, words)

    return Kernel(linear, FIELDS, counter="arranged")


def multiply(
    stored: Any, x: int, panels: int, scales: int, bias: int, residual: int, out: int,
    rows: int, depth: int, width: int, out_width: int, num_workers: int, num_segments: int = 1, step_elements: int = 1,
    low_rank: Riding | None = None, first_column: int = 0, gate: int = 0,
) -> None:  # fmt: skip
    """``out [rows, width]`` from ``x [rows, depth]`` and the addresses of a packed weight, on up to ``num_workers``
    threads; results do not depend on their number, nor on the other rows. Rows of out and residual are ``out_width``
    elements apart. K is cut into ``num_segments`` at multiples of ``step_elements``. ``low_rank`` is added; ``out`` is
    that of its rows from ``first_column`` on. ``gate``, a number of `activation.GATED`: then ``out [rows, width / 2]``
    is the function of the first half of the outputs, times the others."""
    row_words = operand_words(stored, depth)
    for first in range(0, rows, MAX_ROWS):
        count = min(MAX_ROWS, rows - first)
        share = (depth, width) if gate == 0 else (2 * depth, pairs_of(width) * PANEL_COLUMNS)
        work_items = work_items_of(count, *share, num_workers, tile_counter(stored)(count))
        start = x + first * depth * 4
        if count == 1 and is_own_operand(stored, depth):
            operands, num_arranging, parts = start, 0, 1
        else:
            memory = new_array((count * row_words,), np.float32)
            parts = _arranging_parts(count, depth, work_items) if are_integers(stored) else 1
            operands, num_arranging = address_of(memory), work_items.num_tiles * parts
        riding, num_shrinking = (0, 0) if low_rank is None else low_rank.block(first_column, first)
        total = num_arranging + num_shrinking + work_items.count
        added = residual + first * out_width * 4 if residual else 0
        linear_kernel(stored)(
            total, work_items.num_workers, start, panels, scales, bias, added, out + first * out_width * 4, operands, 0,
            riding, count, depth, depth, width, out_width, num_segments, step_elements, work_items.panels,
            work_items.row_work_items, work_items.num_tiles, num_arranging, num_shrinking, parts, gate, 0,
        )  # fmt: skip


def add_partials(
    stored: Any, partials: int, num_partials: int, scales: int, bias: int, residual: int, out: int,
    rows: int, width: int, out_width: int, num_workers: int, low_rank: Riding | None = None, first_column: int = 0,
) -> None:  # fmt: skip
    """``out [rows, width]`` from the sums of so many ranks, ``[num_partials, rows, out_width]``, each of some segments
    of K, as `multiply` leaves them where scales are 1 and biases -0; else as there."""
    work_items = work_items_of(rows, num_partials, width, num_workers, tile_counter(stored)(rows))
    riding, num_shrinking = (0, 0) if low_rank is None else low_rank.block(first_column)
    total = num_shrinking + work_items.count
    linear_kernel(stored)(
        total, work_items.num_workers, 0, 0, scales, bias, residual, out, 0, partials, riding, rows, 0, 0,
        width, out_width, num_partials, 1, work_items.panels, work_items.row_work_items, work_items.num_tiles, 0,
        num_shrinking, 1, 0, 0,
    )  # fmt: skip


def _arranging_parts(rows: int, depth: int, work_items: WorkItems) -> int:
    """Parts of a tile's K, so that no thread waits for another that quantises few rows alone."""
    return max(1, min(-(-work_items.num_workers // work_items.num_tiles), rows * depth // _ARRANGED_ALONE))


@functools.lru_cache(64)
def neutral(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales and biases for so many of the panels' columns that change no bit of a sum."""
    return np.ones(columns, np.float32), np.full(columns, -0.0, np.float32)


class WorkItems:
    """The shares of a product: work items of ``panels`` panels and one of ``row_work_items`` shares of ``num_tiles``
    tiles of rows, ``count`` in all."""

    __slots__ = ("count", "num_tiles", "num_workers", "panels", "row_work_items")

    def __init__(self, count: int, panels: int, row_work_items: int, num_tiles: int, num_workers: int) -> None:
        self.count = count
        self.num_workers = num_workers
        self.panels = panels
        self.row_work_items = row_work_items
        self.num_tiles = num_tiles


@functools.lru_cache(4096)
def work_items_of(rows: int, depth: int, width: int, num_workers: int, num_tiles: int) -> WorkItems:
    """The shares for ``rows`` (at least 1) rows in so many tiles: a few work items a thread, or one if it is short."""
    panels = -(-width // PANEL_COLUMNS)
    if rows * width * depth < SERIAL_MACS or num_workers == 1:
        return WorkItems(1, panels, 1, num_tiles, 1)
    row_work_items = -(-rows // TICKET_ROWS)
    panels_a_work_item = max(1, panels // (4 * num_workers))
    if num_tiles > 1:
        least = -(-_WHOLE_MACS // (min(rows, TICKET_ROWS) * PANEL_COLUMNS * depth))
        panels_a_work_item = max(panels_a_work_item, min(least, -(-panels // num_workers)))
    return WorkItems(
        row_work_items * -(-panels // panels_a_work_item), panels_a_work_item, row_work_items, num_tiles, num_workers
    )
