"""Matrix product with a packed weight: ``out[T, N] = x[T, K] . weight[N, K]^T + bias + residual``.

The weight is packed once into panels ``[ceil(N / PANEL_COLUMNS), K, PANEL_COLUMNS]`` of its stored type, the last one
filled up with zeros. A product with one row streams the panels once, which is all that memory allows; with many rows
each panel is cut along K into blocks that stay in the second-level cache while all row tiles pass over them, and the
tiles fetch the next block meanwhile.
"""

from __future__ import annotations

import functools
import mmap

import numpy as np
from numba import carray, njit

from numba_kernels.cpu.gemm_tile import gemm_tile, panels_at_once
from numba_kernels.cpu.launch import Fields, Kernel, address
from numba_kernels.cpu.target import GEMM_ROWS, PANEL_COLUMNS

MAX_BLOCK_DEPTH = 1024  # K elements of a block: 192 KB of float32 panel
STREAM_AHEAD_BYTES = 4096  # how far a lone pass over the weight prefetches
_HUGE_PAGE_BYTES = 2 << 20
_AT_ONCE = (1, *(panels_at_once(rows) for rows in range(1, GEMM_ROWS + 1)))


def empty_panels(num_columns: int, depth: int, dtype: np.dtype) -> np.ndarray:
    """Zeroed panels for a weight ``[num_columns, depth]``, on huge pages where the system grants them (a tenth more
    bandwidth when they are streamed)."""
    shape = (-(-num_columns // PANEL_COLUMNS), depth, PANEL_COLUMNS)
    size = int(np.prod(shape)) * dtype.itemsize
    if size < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, np.uint8)
    start = -data.ctypes.data % _HUGE_PAGE_BYTES
    return data[start : start + size].view(dtype).reshape(shape)


def pack_rows(panels: np.ndarray, weight: np.ndarray, first_column: int) -> None:
    """Copies ``weight [n, K]`` (any strides) into the panels' columns from ``first_column`` on."""
    done = 0
    while done < weight.shape[0]:
        panel, column = divmod(first_column + done, PANEL_COLUMNS)
        count = min(PANEL_COLUMNS - column, weight.shape[0] - done)
        panels[panel, :, column : column + count] = weight[done : done + count].T
        done += count


FIELDS = Fields("x panels bias residual out num_rows depth width panels_a_ticket rows_a_ticket")


@njit(nogil=True)
def _residual(start, element):
    return start + element * 4 if start != 0 else 0


@functools.cache
def linear_kernel(stored: type) -> Kernel:
    """Writes ``out [T, N]`` for ``x [T, K]``, float32; a ticket is some panels times some rows.

    ``bias`` has one float32 for each of the panels' columns; ``residual [T, N]`` (0 = none) may be ``out`` itself.
    """
    itemsize = np.dtype(stored).itemsize

    def linear(arguments, ticket):
        a = carray(arguments, 1)[0]
        num_panels = -(-a.width // PANEL_COLUMNS)
        row_tickets = -(-a.num_rows // a.rows_a_ticket)
        first_panel = ticket // row_tickets * a.panels_a_ticket
        last_panel = min(num_panels, first_panel + a.panels_a_ticket)
        first_row = ticket % row_tickets * a.rows_a_ticket
        last_row = min(a.num_rows, first_row + a.rows_a_ticket)

        panel_row_bytes = PANEL_COLUMNS * itemsize
        panel_stride = a.depth * panel_row_bytes
        rows = last_row - first_row
        if rows <= GEMM_ROWS:  # one pass over the weight, as fast as memory delivers it
            panel = first_panel
            while panel < last_panel:
                panels = _AT_ONCE[rows] if panel + _AT_ONCE[rows] <= last_panel else 1
                column = panel * PANEL_COLUMNS
                weight = a.panels + panel * panel_stride
                gemm_tile(
                    stored, a.x + first_row * a.depth * 4, a.depth * 4, a.depth, weight, panel_stride,
                    a.bias + column * 4, _residual(a.residual, first_row * a.width + column),
                    a.out + (first_row * a.width + column) * 4, a.width * 4,
                    min(panels * PANEL_COLUMNS, a.width - column),
                    0, True, True, weight + STREAM_AHEAD_BYTES, panel_row_bytes, panels, rows,
                )  # fmt: skip
                panel += panels
            return

        num_blocks = max(1, -(-a.depth // MAX_BLOCK_DEPTH))
        block_depth = -(-a.depth // num_blocks)
        partial_rows = np.empty((rows, PANEL_COLUMNS), np.float32)
        step = -(-panel_row_bytes * GEMM_ROWS // rows)  # all row tiles together prefetch the next block
        for panel in range(first_panel, last_panel):
            column = panel * PANEL_COLUMNS
            columns = min(PANEL_COLUMNS, a.width - column)
            for block in range(num_blocks):
                start = block * block_depth
                depth = min(block_depth, a.depth - start)
                weight = a.panels + panel * panel_stride + start * panel_row_bytes
                ahead = weight + depth * panel_row_bytes
                partial = address(partial_rows)
                for row in range(first_row, last_row, GEMM_ROWS):
                    gemm_tile(
                        stored, a.x + (row * a.depth + start) * 4, a.depth * 4, depth, weight, 0, a.bias + column * 4,
                        _residual(a.residual, row * a.width + column),
                        a.out + (row * a.width + column) * 4, a.width * 4, columns,
                        partial, block == 0, block == num_blocks - 1, ahead, step, 1, min(GEMM_ROWS, last_row - row),
                    )  # fmt: skip
                    ahead += depth * step
                    partial += GEMM_ROWS * PANEL_COLUMNS * 4

    return Kernel(linear, FIELDS)
