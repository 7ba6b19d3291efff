"""Panels of blocks (`blocks`) out of a file's rows of bytes, arranged on all threads.

A ticket takes a panel, block by block: of LANES rows at once it loads 16 bytes each and transposes their words in
registers; words that a file does not keep whole are put together lane by lane.
"""

from __future__ import annotations

import functools

import llvmlite.ir as ir
import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from numba_kernels.closure_cache import name_by_content
from numba_kernels.cpu.gemm.blocks import BLOCKS, Block
from numba_kernels.cpu.gemm.packed_words import words_of_rows
from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.simd import I8, I16, I32, I64
from numba_kernels.cpu.running.launch import Fields, Kernel, address, address_of, int32_at
from numba_kernels.cpu.target import LANES, PANEL_COLUMNS

_PIECE = 16  # bytes of a row that are transposed at once
_LINE = LANES * 4

FIELDS = Fields("*source row_bytes *panels blocks width first_column")


def pack_blocks(stored: str, panels: np.ndarray, rows: np.ndarray, first_column: int, num_workers: int) -> None:
    """Copies ``rows [n, row bytes]`` (uint8, rows contiguous) into the panels' columns from ``first_column`` on."""
    block = BLOCKS[stored]
    if rows.size == 0:
        return
    if rows.strides[1] != 1 or rows.strides[0] < 0:
        rows = np.ascontiguousarray(rows)
    count, row_bytes = rows.shape
    first_panel, last_panel = first_column // PANEL_COLUMNS, (first_column + count - 1) // PANEL_COLUMNS
    pack_blocks_kernel(stored)(
        last_panel - first_panel + 1, num_workers, address_of(rows), rows.strides[0], address_of(panels),
        row_bytes // block.source_bytes, count, first_column,
    )  # fmt: skip


def _pieces_and_words(block: Block) -> tuple[list[tuple[int, int]], dict[int, list[tuple[int, int, int]]]]:
    """Where a column of a block comes from: (first byte in the file, first word here) of whole pieces, and the other
    words, each as (first byte in the file, first byte in the word, 1, 2 or 4 bytes)."""
    pieces: list[tuple[int, int]] = []
    words: dict[int, list[tuple[int, int, int]]] = {word: [] for word in range(block.words)}
    for _, place, moved, size in block.copies:
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


def _arrange_block_of(stored):
    """An intrinsic that puts a block of ``columns`` rows, ``row_bytes`` apart, at ``target [words, LANES]``.

    Lanes from ``columns`` on repeat the last row.
    """

    @intrinsic
    def arrange_block(typingctx, source, row_bytes, columns, target):
        block = BLOCKS[stored]
        pieces, words = _pieces_and_words(block)
        by_bytes = [
            block.places[plane.field] // 4 + pair
            for plane in block.planes if plane.field == "high" and plane.run == 4
            for pair in range(block.pairs)
        ]  # fmt: skip

        def codegen(context, builder, signature, args):
            source, row_bytes, columns, target = args
            last = builder.sub(columns, ir.Constant(I64, 1))
            rows = []
            for lane in range(LANES):
                row = ir.Constant(I64, lane)
                row = builder.select(builder.icmp_signed("<", row, last), row, last)
                rows.append(builder.add(source, builder.mul(row, row_bytes)))
            for place, word in pieces:
                quads = [simd.load(builder, simd.offset(builder, row, place), simd.vector(I32, 4), 1) for row in rows]
                for index, column in enumerate(words_of_rows(builder, quads)):
                    simd.store(builder, column, simd.offset(builder, target, (word + index) * _LINE))
            for word, parts in words.items():
                found = simd.splat_constant(I32, 0)
                for place, within, size in parts:
                    kind = {1: I8, 2: I16, 4: I32}[size]
                    part = ir.Constant(simd.vector(kind), ir.Undefined)
                    for lane, row in enumerate(rows):
                        value = simd.load(builder, simd.offset(builder, row, place), kind, 1)
                        part = builder.insert_element(part, value, ir.Constant(I32, lane))
                    part = part if size == 4 else builder.zext(part, simd.vector(I32))
                    found = builder.or_(found, builder.shl(part, simd.splat_constant(I32, 8 * within)))
                if word in by_bytes:
                    found = _by_bytes(builder, found)
                simd.store(builder, found, simd.offset(builder, target, word * _LINE))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), codegen

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
    """Packs columns of one panel a ticket."""
    words, source_bytes = BLOCKS[stored].words, BLOCKS[stored].source_bytes
    block_bytes = words * PANEL_COLUMNS * 4
    arrange_block = _arrange_block_of(stored)

    @njit(nogil=True)
    @name_by_content
    def pack_columns(source, row_bytes, blocks, columns, target):
        """Neighbouring rows of the source, at most LANES, to the same columns of a panel."""
        if columns == LANES:
            for index in range(blocks):
                arrange_block(source + index * source_bytes, row_bytes, LANES, target + index * block_bytes)
            return
        part = np.empty((words, LANES), np.int32)
        for index in range(blocks):
            arrange_block(source + index * source_bytes, row_bytes, columns, address(part))
            for word in range(words):
                place = target + index * block_bytes + word * LANES * 4
                int32_at(place, columns)[:] = part[word, :columns]

    def pack_panel(arguments, ticket):
        a = carray(arguments, 1)[0]
        panel = a.first_column // PANEL_COLUMNS + ticket
        column = max(panel * PANEL_COLUMNS, a.first_column)
        end = min((panel + 1) * PANEL_COLUMNS, a.first_column + a.width)
        start = a.panels + panel * a.blocks * block_bytes
        while column < end:
            inside = column - panel * PANEL_COLUMNS
            lane = inside % LANES
            columns = min(LANES - lane, end - column)
            source = a.source + (column - a.first_column) * a.row_bytes
            target = start + (inside // LANES * words * LANES + lane) * 4
            pack_columns(source, a.row_bytes, a.blocks, columns, target)
            column += columns

    return Kernel(pack_panel, FIELDS)
