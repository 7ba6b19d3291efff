"""Panels of blocks (`blocks`) out of a file's rows of bytes, arranged on all threads.

A work item takes a panel, block by block: of LANES rows at once it loads 16 bytes each and transposes their words in
registers; words that a file does not keep whole are cut out of such words.
"""

from __future__ import annotations

import functools

import llvmlite.ir as ir
import numpy as np
from numba import carray, njit, types

from numba_kernels.blocks import BLOCKS, Block
from numba_kernels.closure_cache import name_by_content
from numba_kernels.cpu.gemm.packed_words import words_of_rows
from numba_kernels.cpu.intrinsics import atomic, simd
from numba_kernels.cpu.intrinsics.emitted import emitted
from numba_kernels.cpu.intrinsics.simd import I32, I64
from numba_kernels.cpu.layout import PANEL_COLUMNS
from numba_kernels.cpu.running.launch import Fields, Kernel, address, address_of, int32_at
from numba_kernels.cpu.target import LANES

_PIECE = 16  # bytes of a row that are transposed at once
_LINE = LANES * 4
_CACHE_LINE = 64

FIELDS = Fields("*source row_bytes *panels blocks width first_column")


def pack_blocks(stored: str, panels: np.ndarray, rows: np.ndarray, first_column: int, num_workers: int) -> None:
    """Copies ``rows [n, row bytes]`` (uint8, rows contiguous) into the panels' columns from ``first_column`` on. Half
    of a last block may be missing; it becomes zeros."""
    block = BLOCKS[stored]
    if rows.size == 0:
        return
    assert address_of(panels) % _CACHE_LINE == 0, "panels begin on a cache line"
    if missing := -rows.shape[1] % block.source_bytes:
        rows = np.pad(rows, ((0, 0), (0, missing)))
    if rows.strides[1] != 1 or rows.strides[0] < 0:
        rows = np.ascontiguousarray(rows)
    count, row_bytes = rows.shape
    first_panel, last_panel = first_column // PANEL_COLUMNS, (first_column + count - 1) // PANEL_COLUMNS
    pack_blocks_kernel(stored)(
        last_panel - first_panel + 1, num_workers, address_of(rows), rows.strides[0], address_of(panels),
        row_bytes // block.source_bytes, count, first_column,
    )  # fmt: skip


def _runs(block: Block) -> list[tuple[int, int, int]]:
    """A block's runs, as (first byte in the file, first byte here, size): neighbours in both are one run."""
    runs: list[tuple[int, int, int]] = []
    for _, place, moved, size in block.copies:
        if runs and (place - runs[-1][0], moved - runs[-1][1]) == (runs[-1][2],) * 2:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + size)
        else:
            runs.append((place, moved, size))
    return runs


def _pieces_and_words(block: Block) -> tuple[list[tuple[int, int]], dict[int, list[tuple[int, int, int]]]]:
    """The sources of a column of a block: (first byte in the file, first word here) of whole pieces, and the other
    words, each as (first byte in the file, first byte in the word, 1, 2 or 4 bytes)."""
    pieces: list[tuple[int, int]] = []
    words: dict[int, list[tuple[int, int, int]]] = {word: [] for word in range(block.words)}
    for place, moved, size in _runs(block):
        done = 0
        while done < size:
            word, within = divmod(moved + done, 4)
            if not within and size - done >= _PIECE:
                pieces.append((place + done, word))
                for each in range(_PIECE // 4):
                    del words[word + each]
                done += _PIECE
                continue
            step = next(step for step in (4, 2, 1) if step <= size - done and within % step == 0)
            words[word].append((place + done, within, step))
            done += step
    return pieces, words


def _piece_around(place: int, within: int, size: int, source_bytes: int) -> tuple[int, int, int]:
    """A piece of a block that has ``size`` bytes from ``place`` on inside one of its words: its first byte, that word,
    and the bytes by which they have to move up to be ``within`` bytes from the word's first one (less than 0: down)."""
    first = place - within
    if not 0 <= first <= source_bytes - 4:
        first = min(place, source_bytes - 4)
    word = max(0, -(-(first + _PIECE - source_bytes) // 4))
    return first - 4 * word, word, within - (place - first)


def _arrange_block_of(stored, is_whole):
    """An intrinsic that puts a block of ``columns`` rows, ``row_bytes`` apart, at ``target [words, LANES]``, and
    prefetches as many bytes as LANES of them have from ``ahead`` on, a few lines at a time.

    Lanes from ``columns`` on repeat the last row. With ``is_whole`` there are LANES of them, and the stores, in whole
    vectors, bypass the caches: the data is not read soon, and a line that is written as a whole need not be read
    before.
    """

    @emitted(types.void, *[types.intp] * 5)
    def arrange_block(builder, source, row_bytes, columns, target, ahead):
        block = BLOCKS[stored]
        pieces, words = _pieces_and_words(block)
        by_bytes = [
            block.places[plane.field] // 4 + pair
            for plane in block.planes if plane.field == "high" and plane.run == 4
            for pair in range(block.pairs)
        ]  # fmt: skip
        last = builder.sub(columns, ir.Constant(I64, 1))
        rows = []
        for lane in range(LANES):
            row = ir.Constant(I64, lane)
            if not is_whole:
                row = builder.select(builder.icmp_signed("<", row, last), row, last)
            rows.append(builder.add(source, builder.mul(row, row_bytes)))

        def put(word, value):
            place = simd.offset(builder, target, word * _LINE)
            simd.store(builder, value, place, _LINE if is_whole else 4, is_read_soon=not is_whole)

        def columns_of(place):
            quads = [simd.load(builder, simd.offset(builder, row, place), simd.vector(I32, 4), 1) for row in rows]
            return words_of_rows(builder, quads)

        piece_of = {word: place for place, word in pieces}
        lines = [simd.offset(builder, ahead, line) for line in range(0, LANES * block.source_bytes, _CACHE_LINE)]
        steps = sorted([*piece_of, *words])
        for number, word in enumerate(steps):
            for line in lines[number * len(lines) // len(steps) : (number + 1) * len(lines) // len(steps)]:
                simd.prefetch(builder, line)
            if (piece := piece_of.get(word)) is not None:
                for index, column in enumerate(columns_of(piece)):
                    put(word + index, column)
                continue
            found = simd.splat_constant(I32, 0)
            for place, within, size in words[word]:
                first, place_in_piece, up = _piece_around(place, within, size, block.source_bytes)
                part = columns_of(first)[place_in_piece]  # LLVM leaves out what the others would need
                if up:
                    move = builder.shl if up > 0 else builder.lshr
                    part = move(part, simd.splat_constant(I32, 8 * abs(up)))
                mask = ((1 << 8 * size) - 1) << 8 * within
                found = builder.or_(found, builder.and_(part, simd.splat_constant(I32, mask)))
            put(word, _by_bytes(builder, found) if word in by_bytes else found)

    return arrange_block


def _by_bytes(builder, bits):
    """Bit 4 j + b of each word at bit j of byte b."""

    def number(value):
        return simd.splat_constant(I32, value)

    found = number(0)
    for j in range(8):
        four = builder.and_(builder.lshr(bits, number(4 * j)), number(15))
        spread = builder.and_(builder.mul(four, number(0x00204081)), number(0x01010101))
        found = builder.or_(found, builder.shl(spread, number(j)))
    return found


@functools.cache
def pack_blocks_kernel(stored: str) -> Kernel:
    """Packs columns of one panel a work item."""
    words, source_bytes = BLOCKS[stored].words, BLOCKS[stored].source_bytes
    num_vectors, vector_bytes = PANEL_COLUMNS // LANES, words * LANES * 4
    arrange_block, arrange_part = _arrange_block_of(stored, True), _arrange_block_of(stored, False)

    @njit(nogil=True)
    @name_by_content
    def pack_whole(source, row_bytes, blocks, target):
        """PANEL_COLUMNS rows to a panel."""
        for _ in range(num_vectors):
            for index in range(blocks):
                ahead = source + LANES * (row_bytes + index * source_bytes)  # the next rows' share, as files have them
                place = target + index * num_vectors * vector_bytes
                arrange_block(source + index * source_bytes, row_bytes, LANES, place, ahead)
            source += LANES * row_bytes
            target += vector_bytes

    @njit(nogil=True)
    @name_by_content
    def pack_columns(source, row_bytes, blocks, columns, target):
        """Neighbouring rows of the source, at most LANES, to the same columns of a panel."""
        part = np.empty((words, LANES), np.int32)
        for index in range(blocks):
            ahead = source + columns * row_bytes + index * LANES * source_bytes
            arrange_part(source + index * source_bytes, row_bytes, columns, address(part), ahead)
            for word in range(words):
                place = target + index * num_vectors * vector_bytes + word * LANES * 4
                int32_at(place, columns)[:] = part[word, :columns]

    def pack_panel(arguments, work_item):
        a = carray(arguments, 1)[0]
        panel = a.first_column // PANEL_COLUMNS + work_item
        column = max(panel * PANEL_COLUMNS, a.first_column)
        end = min((panel + 1) * PANEL_COLUMNS, a.first_column + a.width)
        source = a.source + (column - a.first_column) * a.row_bytes
        start = a.panels + panel * a.blocks * num_vectors * vector_bytes
        if end - column == PANEL_COLUMNS:
            pack_whole(source, a.row_bytes, a.blocks, start)
            atomic.fence()  # `put` has gone past the caches
            return
        while column < end:
            inside = column - panel * PANEL_COLUMNS
            lane = inside % LANES
            columns = min(LANES - lane, end - column)
            pack_columns(source, a.row_bytes, a.blocks, columns, start + inside // LANES * vector_bytes + lane * 4)
            column += columns
            source += columns * a.row_bytes

    return Kernel(pack_panel, FIELDS)
