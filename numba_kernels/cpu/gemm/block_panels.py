"""Panels of blocks (`blocks`) out of a file's rows of bytes, arranged on all threads.

A ticket takes a panel. It copies LANES rows' blocks, in the order of panels, to a buffer in the first-level cache and
transposes the words there.
"""

from __future__ import annotations

import functools

import llvmlite.ir as ir
import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from numba_kernels.closure_cache import name_by_content
from numba_kernels.cpu.gemm.blocks import BLOCKS
from numba_kernels.cpu.gemm.packed_words import transpose_words
from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.simd import I8, I32
from numba_kernels.cpu.running.launch import Fields, Kernel, address, address_of, int32_at
from numba_kernels.cpu.target import LANES, PANEL_COLUMNS

_BUFFER_WORDS = 128  # of each of LANES rows, so that two buffers stay in the first-level cache

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


def _copy_block_of(stored):
    """An intrinsic that copies a block at ``source`` to its place in a column of words at ``target``."""

    @intrinsic
    def copy_block(typingctx, source, target):
        block = BLOCKS[stored]

        def codegen(context, builder, signature, args):
            source, target = args
            for field, place, moved, size in block.copies:
                done = 0
                while done < size:
                    step = next(width for width in (64, 32, 16, 8, 4, 2, 1) if width <= size - done)
                    kind = simd.vector(I8, step)
                    part = simd.load(builder, simd.offset(builder, source, place + done), kind, 1)
                    if field == "high" and any(plane.field == field and plane.run == 4 for plane in block.planes):
                        part = builder.bitcast(_by_bytes(builder, builder.bitcast(part, I32)), kind)
                    simd.store(builder, part, simd.offset(builder, target, moved + done), 1)
                    done += step
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), codegen

    return copy_block


def _by_bytes(builder, bits):
    """Bit 4 j + b of a word at bit j of byte b."""
    found = ir.Constant(I32, 0)
    for j in range(8):
        four = builder.and_(builder.lshr(bits, ir.Constant(I32, 4 * j)), ir.Constant(I32, 15))
        spread = builder.and_(builder.mul(four, ir.Constant(I32, 0x00204081)), ir.Constant(I32, 0x01010101))
        found = builder.or_(found, builder.shl(spread, ir.Constant(I32, j)))
    return found


@functools.cache
def pack_blocks_kernel(stored: str) -> Kernel:
    """Packs columns of one panel a ticket."""
    block = BLOCKS[stored]
    words, source_bytes = block.words, block.source_bytes
    blocks_at_once = max(1, _BUFFER_WORDS // words)
    row_words = -(-blocks_at_once * words // LANES) * LANES  # of a row in the buffer
    line = row_words * 4
    copy_block = _copy_block_of(stored)

    @njit(nogil=True)
    @name_by_content
    def pack_columns(a, source, columns, target):
        """Neighbouring rows of the source, at most LANES, to the same columns of a panel."""
        buffer, transposed = np.zeros(LANES * row_words, np.int32), np.empty(LANES * row_words, np.int32)
        at, made = address(buffer), address(transposed)
        for first in range(0, a.blocks, blocks_at_once):
            count = min(blocks_at_once, a.blocks - first)
            for column in range(columns):
                row = source + column * a.row_bytes + first * source_bytes
                for index in range(count):
                    copy_block(row + index * source_bytes, at + column * line + index * words * 4)
            if columns == LANES:  # whole transpositions, across blocks
                for word in range(0, count * words, LANES):
                    transpose_words(at + word * 4, line, LANES, LANES, made + word * LANES * 4, LANES * 4)
            for index in range(count):
                place = target + (first + index) * words * PANEL_COLUMNS * 4
                if columns == LANES:
                    size = words * LANES
                    int32_at(place, size)[:] = int32_at(made + index * size * 4, size)
                    continue
                for word in range(0, words, LANES):
                    transpose_words(
                        at + (index * words + word) * 4, line, columns, min(LANES, words - word),
                        place + word * LANES * 4, LANES * 4,
                    )  # fmt: skip

    def pack_panel(arguments, ticket):
        a = carray(arguments, 1)[0]
        panel = a.first_column // PANEL_COLUMNS + ticket
        column = max(panel * PANEL_COLUMNS, a.first_column)
        end = min((panel + 1) * PANEL_COLUMNS, a.first_column + a.width)
        start = a.panels + panel * a.blocks * words * PANEL_COLUMNS * 4
        while column < end:
            inside = column - panel * PANEL_COLUMNS
            lane = inside % LANES
            columns = min(LANES - lane, end - column)
            source = a.source + (column - a.first_column) * a.row_bytes
            pack_columns(a, source, columns, start + (inside // LANES * words * LANES + lane) * 4)
            column += columns

    return Kernel(pack_panel, FIELDS)
