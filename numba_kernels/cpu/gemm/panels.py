"""The packed layout of a weight ``[N, K]``, and how it is made.

Panels ``[ceil(N / PANEL_COLUMNS), ceil(K / e), PANEL_COLUMNS, e]``: a word of 32 bits holds e neighbours in K of one
column, and PANEL_COLUMNS words lie side by side. e is 1 for float32, 2 for bfloat16 and float16 and 4 for int8, whose
elements are unsigned bytes with ZERO_POINT added. Padding past N or K is 0 (for int8, any).

A weight is read once, a panel a work item: rows of K are transposed 16 x 16 words at a time in registers; a source that
lies the other way round is joined row by row. int8 needs each row's largest magnitude first, which leaves the row in
the cache for the second look.
"""

from __future__ import annotations

import functools
import math
import mmap
import threading
from typing import Any

import numpy as np
from numba import carray, njit

from numba_kernels.closure_cache import name_by_content
from numba_kernels.cpu.gemm.arranged_rows import ELEMENTS_A_WORD
from numba_kernels.cpu.gemm.packed_words import (
    GROUP,
    GROUP_WORDS,
    ZERO_POINT,
    block_on_stack,
    half_word,
    inverse_of,
    join_rows,
    largest_bits,
    largest_bits_of_columns,
    quantize_words,
    scale_of,
    transpose_words,
)
from numba_kernels.cpu.layout import PANEL_COLUMNS
from numba_kernels.cpu.running.launch import Fields, Kernel, address_of, float32_at, int32_at, uint32_at
from numba_kernels.cpu.target import LANES

_HUGE_PAGE_BYTES = 2 << 20
_LEAST_SHARED_BYTES = 128 << 10  # less is read before the next page would matter
_SHARED_BYTES = 16 << 20
_LINE_BYTES = 64
_ROW_BYTES = PANEL_COLUMNS * 4
_ROWS_AT_ONCE = 256

FIELDS = Fields("*source row_stride column_stride *panels *scales *largest depth width first_column")


def panels_shape(num_columns: int, depth: int, dtype: np.dtype) -> tuple[int, int, int, int]:
    """The layout above for a weight ``[num_columns, depth]``."""
    elements = ELEMENTS_A_WORD[dtype.name]
    return -(-num_columns // PANEL_COLUMNS), -(-depth // elements), PANEL_COLUMNS, elements


def panel_bytes(num_columns: int, depth: int, dtype: np.dtype, *, has_scales: bool) -> int:
    """Bytes of the panels, and of one float32 bias, and perhaps scale, for each of their columns."""
    shape = panels_shape(num_columns, depth, dtype)
    return math.prod(shape) * dtype.itemsize + shape[0] * PANEL_COLUMNS * 4 * (1 + has_scales)


def empty_panels(num_columns: int, depth: int, dtype: np.dtype) -> np.ndarray:
    """Zeroed panels for a weight ``[num_columns, depth]``; see `zeroed_bytes`."""
    shape = panels_shape(num_columns, depth, dtype)
    return zeroed_bytes(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def zeroed_bytes(size: int) -> np.ndarray:
    """Zeroed bytes on cache lines of their own, and on huge pages where the system grants them (a tenth more bandwidth
    when they are streamed)."""
    if size < _LEAST_SHARED_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        data = np.zeros(size + _LINE_BYTES, np.uint8)
        start = -data.ctypes.data % _LINE_BYTES
        return data[start : start + size]
    return _shared.take(size) if size < _HUGE_PAGE_BYTES else _huge_pages(size)


def _huge_pages(size: int) -> np.ndarray:
    """Zeroed bytes that begin a huge page, where the system grants one. The rest that does not fill one has small
    pages: a huge one would waste up to a third of the memory for matrices of a little more than 4 MB."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    data = np.frombuffer(memory, np.uint8)
    start = -data.ctypes.data % _HUGE_PAGE_BYTES
    end = start + size // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    memory.madvise(mmap.MADV_HUGEPAGE, 0, end)
    memory.madvise(mmap.MADV_NOHUGEPAGE, end)
    return data[start : start + size]


class _SharedPages:
    """Pieces of huge pages for weights that are smaller than one, an expert's above all. Their memory is given back
    when the last weight on it is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = np.empty(0, np.uint8)

    def take(self, size: int) -> np.ndarray:
        """Zeroed bytes on cache lines of their own."""
        whole = -(-size // _LINE_BYTES) * _LINE_BYTES
        with self._lock:
            if whole > self._rest.size:
                self._rest = _huge_pages(_SHARED_BYTES)
            taken, self._rest = self._rest[:size], self._rest[whole:]
        return taken


_shared = _SharedPages()


def largest_of_rows(weight: np.ndarray) -> np.ndarray:
    """Float32 ``[n]``: the largest magnitude of each row of ``weight [n, K]`` (float32, uint16 or int16 bits, any
    strides). That of a row with NaN is NaN."""
    unsigned = np.dtype(f"u{weight.itemsize}")
    magnitude = unsigned.type(np.iinfo(unsigned).max >> 1)
    rows = np.zeros(len(weight), unsigned)
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        part = weight[first : first + _ROWS_AT_ONCE].view(unsigned) & magnitude
        rows[first : first + _ROWS_AT_ONCE] = part.max(1, initial=unsigned.type(0))  # as their bits are ordered
    if weight.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.view(np.float16 if weight.dtype == np.int16 else np.float32).astype(np.float32)


def pack(
    panels: np.ndarray, scales: np.ndarray, weight: np.ndarray, first_column: int, num_workers: int,
    largest: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Copies ``weight [n, K]`` (float32, uint16 or int16 bits, any strides) into the panels' columns from
    ``first_column`` on; into panels of uint8 it is rounded, and ``scales`` gets a float32 for each column: by the
    ``largest`` magnitude of its row, float32 ``[n]``, where that is given because the row is sharded."""
    if weight.size == 0:
        return
    itemsize = weight.itemsize
    if itemsize not in weight.strides or min(weight.strides) < 0:
        weight = np.ascontiguousarray(weight)
    count, depth = weight.shape
    first_panel, last_panel = first_column // PANEL_COLUMNS, (first_column + count - 1) // PANEL_COLUMNS
    kinds: tuple[Any, Any] = weight.dtype.type, panels.dtype.type
    pack_kernel(*kinds)(
        last_panel - first_panel + 1, num_workers, address_of(weight), weight.strides[0], weight.strides[1],
        address_of(panels), address_of(scales), 0 if largest is None else address_of(largest), depth, count,
        first_column,
    )  # fmt: skip


@functools.cache
def pack_kernel(stored: Any, packed: Any) -> Kernel:
    """Packs columns of one panel a work item; strides are bytes, one of them an element's."""
    is_int8 = packed is np.uint8
    elements = ELEMENTS_A_WORD[np.dtype(packed).name]
    itemsize = np.dtype(stored).itemsize
    line = LANES * 4

    @njit(nogil=True)
    @name_by_content
    def pack_rows(source, row_stride, depth, columns, scales, largest, target):
        """Columns (rows of the source) whose elements are neighbours in memory."""
        words = -(-depth // elements)
        if not is_int8:
            whole = depth // elements
            for word in range(0, whole, LANES):
                count = min(LANES, whole - word)
                transpose_words(source + word * 4, row_stride, columns, count, target + word * _ROW_BYTES, _ROW_BYTES)
            if whole < words:  # one 16-bit element is left
                last = uint32_at(target + whole * _ROW_BYTES, columns)
                for column in range(columns):
                    last[column] = half_word(source + column * row_stride + (depth - 1) * itemsize)
            return
        quads = block_on_stack()
        inverses = np.empty(LANES, np.float32)
        for column in range(columns):
            row = source + column * row_stride
            bits = np.int32(0)
            if largest != 0:
                bits = int32_at(largest, columns)[column]
            else:
                for element in range(0, depth, GROUP):
                    bits = max(bits, largest_bits(stored, row + element * itemsize, min(GROUP, depth - element)))
            scales[column] = scale_of(bits)
            inverses[column] = inverse_of(bits)
        for element in range(0, depth, GROUP):
            count = min(GROUP, depth - element)
            for column in range(columns):
                row = source + column * row_stride + element * itemsize
                quantize_words(stored, row, count, inverses[column], np.int32(ZERO_POINT), quads + column * line)
            word = element // 4
            transpose_words(
                quads, line, columns, min(GROUP_WORDS, words - word), target + word * _ROW_BYTES, _ROW_BYTES
            )

    @njit(nogil=True)
    @name_by_content
    def pack_columns(source, stride, depth, columns, scales, largest, target):
        """Columns that are neighbours in memory."""
        inverses = np.empty(LANES, np.float32)
        if is_int8:
            bits = largest
            if largest == 0:
                bits = block_on_stack()
                largest_bits_of_columns(stored, source, stride, depth, columns, bits)
            for column in range(columns):
                scales[column] = scale_of(int32_at(bits, columns)[column])
                inverses[column] = inverse_of(int32_at(bits, columns)[column])
        join_rows(stored, packed, source, stride, depth, columns, np.int64(inverses.ctypes.data), target, _ROW_BYTES)

    def pack_panel(arguments, work_item):
        a = carray(arguments, 1)[0]
        panel = a.first_column // PANEL_COLUMNS + work_item
        column = max(panel * PANEL_COLUMNS, a.first_column)
        end = min((panel + 1) * PANEL_COLUMNS, a.first_column + a.width)
        words = -(-a.depth // elements)
        while column < end:
            columns = min(LANES, end - column)
            source = a.source + (column - a.first_column) * a.row_stride
            inside = column - panel * PANEL_COLUMNS
            target = a.panels + (panel * words * PANEL_COLUMNS + inside) * 4
            scales = float32_at(a.scales + column * 4, columns)
            largest = 0 if a.largest == 0 else a.largest + (column - a.first_column) * 4
            if a.column_stride == itemsize:
                pack_rows(source, a.row_stride, a.depth, columns, scales, largest, target)
            else:
                pack_columns(source, a.column_stride, a.depth, columns, scales, largest, target)
            column += columns

    return Kernel(pack_panel, FIELDS)
