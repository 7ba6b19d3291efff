"""Matrix product with a packed weight: ``out[T, N] = x[T, K] . weight[N, K]^T + bias + residual``.

The first tickets of a launch arrange the rows of x for the tiles (`operands`), the others wait for them and multiply.
A product with few rows streams the panels once, which is all that memory allows; with many rows each panel is cut along
K into blocks that stay in the first-level cache while all row tiles pass over them, and the tiles fetch the next block
into the second level meanwhile.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import carray, njit

from numba_kernels.closure_cache import name_by_content
from numba_kernels.cpu import atomic
from numba_kernels.cpu.arranged_rows import (
    ELEMENTS_A_WORD,
    GROUP_ROW_WORDS,
    arrange_floats,
    arrange_groups,
    arrange_pairs,
    is_own_operand,
    operand_words,
)
from numba_kernels.cpu.gemm_tile import gemm_tile, panels_at_once
from numba_kernels.cpu.launch import Fields, Kernel, address, address_of, new_array
from numba_kernels.cpu.packed_words import GROUP_WORDS
from numba_kernels.cpu.target import GEMM_ROWS, PANEL_COLUMNS, ROUNDS_TO_BF16

MAX_BLOCK_WORDS = 128  # of K in a block, a multiple of GROUP_WORDS: 24 KB of panel
STREAM_AHEAD_BYTES = 4096  # how far a lone pass over the weight prefetches
TICKET_ROWS = 128  # at most about so many
MAX_ROWS = 1024  # of a launch: more are several, so that their operands stay small
SERIAL_MACS = 600_000  # less work is not worth waking a thread
_AT_ONCE = (1, *(panels_at_once(rows) for rows in range(1, GEMM_ROWS + 1)))
_PANEL_ROW_BYTES = PANEL_COLUMNS * 4

FIELDS = Fields(
    "*x *panels *scales *bias *residual *out *operands num_rows depth width out_width panels_a_ticket rows_a_ticket "
    "tile_rows num_arranging num_tickets arranged finished"
)
_ARRANGED, _FINISHED = (FIELDS.offset(name) for name in ("arranged", "finished"))


@njit(nogil=True)
def _moved(start, size_bytes):
    return start + size_bytes if start != 0 else 0


@functools.cache
def linear_kernel(stored: type) -> Kernel:
    """Writes ``out [T, N]`` for ``x [T, K]``, float32, and panels of ``stored``.

    ``scales`` (of uint8) and ``bias`` have one float32 for each of the panels' columns; ``residual [T, N]`` (0 = none)
    may be ``out`` itself. Tickets ``0 .. num_arranging`` fill ``operands`` with a tile of ``tile_rows`` rows each; the
    others multiply some panels with some rows, a multiple of ``tile_rows``. Without arranging tickets ``operands`` has
    been filled. ``arranged`` and ``finished`` are 0 before a launch and after it.
    """
    elements = ELEMENTS_A_WORD[np.dtype(stored).name]
    is_int8, is_pairs = stored is np.uint8, stored is np.uint16 and ROUNDS_TO_BF16
    span, span_row_words = (GROUP_WORDS, GROUP_ROW_WORDS) if is_int8 else (1, 1 if is_pairs else elements)

    @njit(nogil=True)
    @name_by_content
    def arrange(a, tile, words):
        first = tile * a.tile_rows
        rows = min(a.tile_rows, a.num_rows - first)
        x = a.x + first * a.depth * 4
        target = a.operands + first * (-(-words // span)) * span_row_words * 4
        if is_int8:
            arrange_groups(x, a.depth, rows, target)
        elif is_pairs:
            arrange_pairs(x, a.depth, rows, words, target)
        else:
            arrange_floats(x, a.depth, rows, words * elements, target)

    @njit(nogil=True)
    @name_by_content
    def multiply(a, ticket, words):
        num_panels = -(-a.width // PANEL_COLUMNS)
        row_tickets = -(-a.num_rows // a.rows_a_ticket)
        first_panel = ticket // row_tickets * a.panels_a_ticket
        last_panel = min(num_panels, first_panel + a.panels_a_ticket)
        first_row = ticket % row_tickets * a.rows_a_ticket
        last_row = min(a.num_rows, first_row + a.rows_a_ticket)

        row_bytes = (-(-words // span)) * span_row_words * 4
        panel_stride = words * _PANEL_ROW_BYTES
        rows = last_row - first_row
        is_lone = rows <= a.tile_rows  # one pass over the weight, as fast as memory delivers it
        num_blocks = 1 if is_lone else max(1, -(-words // MAX_BLOCK_WORDS))
        block_words = max(1, -(-words // (num_blocks * span))) * span
        partial_rows = np.empty((0 if is_lone else rows, PANEL_COLUMNS), np.float32)
        step = _PANEL_ROW_BYTES if is_lone else -(-_PANEL_ROW_BYTES * a.tile_rows // rows)
        panel = first_panel
        while panel < last_panel:
            panels = _AT_ONCE[rows] if is_lone and panel + _AT_ONCE[rows] <= last_panel else 1
            column = panel * PANEL_COLUMNS
            columns = min(panels * PANEL_COLUMNS, a.width - column)
            for start in range(0, max(1, words), block_words):
                count = min(block_words, words - start)
                weight = a.panels + panel * panel_stride + start * _PANEL_ROW_BYTES
                # all row tiles together prefetch the next block
                ahead = weight + (STREAM_AHEAD_BYTES if is_lone else count * _PANEL_ROW_BYTES)
                partial = address(partial_rows)
                for row in range(first_row, last_row, a.tile_rows):
                    height = min(a.tile_rows, last_row - row)
                    at = row * a.out_width + column
                    gemm_tile(
                        stored, a.operands + row * row_bytes + start // span * span_row_words * height * 4, count,
                        weight, panel_stride, a.scales + column * 4, a.bias + column * 4, _moved(a.residual, at * 4),
                        a.out + at * 4, a.out_width * 4, columns, partial, start == 0, start + count >= words,
                        ahead, step, panels, height,
                    )  # fmt: skip
                    ahead += count * step
                    partial += height * PANEL_COLUMNS * 4
            panel += panels

    def linear(arguments, ticket):
        block = carray(arguments, 1)
        a = block[0]
        arranged, finished = address(block) + _ARRANGED, address(block) + _FINISHED
        words = -(-a.depth // elements)
        if ticket < a.num_arranging:
            arrange(a, ticket, words)
            atomic.add(arranged, 1)
        else:
            while atomic.load(arranged) < a.num_arranging:
                atomic.pause()
            multiply(a, ticket - a.num_arranging, words)
        if atomic.add(finished, 1) == a.num_tickets - 1:
            atomic.store(arranged, 0)
            atomic.store(finished, 0)

    return Kernel(linear, FIELDS)


def multiply(
    stored: type, x: int, panels: int, scales: int, bias: int, residual: int, out: int,
    rows: int, depth: int, width: int, out_width: int, num_workers: int,
) -> None:  # fmt: skip
    """``out [rows, width]`` from ``x [rows, depth]`` and the addresses of a packed weight, on up to ``num_workers``
    threads; results do not depend on their number, nor on the other rows. Rows of out and residual are ``out_width``
    elements apart."""
    row_words = operand_words(stored, depth)
    for first in range(0, rows, MAX_ROWS):
        count = min(MAX_ROWS, rows - first)
        tickets = tickets_of(count, depth, width, num_workers)
        start = x + first * depth * 4
        if count == 1 and is_own_operand(stored, depth):
            operands, num_arranging = start, 0
        else:
            memory = new_array((count * row_words,), np.float32)
            operands, num_arranging = address_of(memory), -(-count // tickets.tile_rows)
        total = num_arranging + tickets.count
        added = residual + first * out_width * 4 if residual else 0
        linear_kernel(stored)(
            total, tickets.num_workers, start, panels, scales, bias, added, out + first * out_width * 4, operands,
            count, depth, width, out_width, tickets.panels, tickets.rows, tickets.tile_rows, num_arranging, total, 0, 0,
        )  # fmt: skip


class Tickets:
    """How a product is shared: ``count`` tickets of ``panels`` panels and ``rows`` rows, ``tile_rows`` at a time."""

    __slots__ = ("count", "num_workers", "panels", "rows", "tile_rows")

    def __init__(self, count: int, panels: int, rows: int, tile_rows: int, num_workers: int) -> None:
        self.count = count
        self.panels = panels
        self.rows = rows
        self.tile_rows = tile_rows
        self.num_workers = num_workers


@functools.lru_cache(4096)
def tickets_of(rows: int, depth: int, width: int, num_workers: int) -> Tickets:
    """For ``rows`` (at least 1) rows: tiles of equal height, and a few tickets a thread."""
    tile_rows = -(-rows // -(-rows // GEMM_ROWS))
    panels = -(-width // PANEL_COLUMNS)
    if rows * width * depth < SERIAL_MACS or num_workers == 1:
        return Tickets(1, panels, -(-rows // tile_rows) * tile_rows, tile_rows, 1)
    row_tickets = -(-rows // TICKET_ROWS)
    rows_a_ticket = -(-rows // row_tickets // tile_rows) * tile_rows
    row_tickets = -(-rows // rows_a_ticket)
    panels_a_ticket = max(1, panels // (4 * num_workers))
    return Tickets(row_tickets * -(-panels // panels_a_ticket), panels_a_ticket, rows_a_ticket, tile_rows, num_workers)
