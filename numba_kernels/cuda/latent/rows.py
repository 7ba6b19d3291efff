"""Latent rows of one sequence, copied out of its pages in order, for the product that expands them."""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_loader, element_storer
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.memory import load_4xb32, load_f32, store_4xb32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.quantised_pages import page_element_loader
from numba_kernels.cuda.specialisation import Specialisation
from numba_kernels.latent_rows import GROUP, LatentBytes

THREADS, ROWS = 128, 4  # a warp copies a row


@functools.cache
def byte_row_loader(width: int, value_dim: int, pages: str) -> Any:
    """A device function ``(row, column) -> float32`` of a row of bytes, whose rotated numbers are the first columns."""
    layout, rotary = LatentBytes(width, value_dim), width - value_dim
    scales_at, rotated_at = layout.value_bytes, layout.rotated_at
    load_byte, load_rotated = page_element_loader(pages), element_loader("bf16")

    @device_function
    def load_number(row, column):
        number = float32(0)
        if column < uint32(rotary):
            number = load_rotated(row + uint64(rotated_at) + uint64(column) * uint64(2))
        else:
            value = uint32(column - uint32(rotary))
            scale = load_f32(row + uint64(scales_at) + uint64(uint32(value // uint32(GROUP))) * uint64(4))
            number = load_byte(row + uint64(value)) * scale
        return number

    return load_number


@functools.cache
def latent_rows(dtype: str, width: int, block_size: int, pages: str = "", value_dim: int = 0) -> Specialisation:
    """Arguments: see `planning.plan_rows`. Grid: rows by fours."""
    pieces, rest = divmod(width * ITEM_BYTES[dtype], 16)
    assert rest == 0
    turns = -(-pieces // 32)
    in_bytes, item, store = pages != "", uint64(ITEM_BYTES[dtype]), element_storer(dtype)
    row_bytes = LatentBytes(width, value_dim).row_bytes if in_bytes else 16 * pieces
    load_number = byte_row_loader(width, value_dim, pages) if in_bytes else None

    @cuda.jit
    def copy_rows(pages, out, seq_lens, block_table, first, num_rows):
        wait_for_previous_grid()
        launch_dependents()
        thread = uint32(cuda.threadIdx.x)
        row = uint32(uint32(cuda.blockIdx.x) * uint32(ROWS) + (thread >> uint32(5)))
        if row >= num_rows:
            return
        place = uint32(first + row)
        is_written = place < uint32(seq_lens[0])
        source = pages
        if is_written:
            block = uint32(block_table[uint64(place // uint32(block_size))])
            slot = uint64(block) * uint64(block_size) + uint64(place % uint32(block_size))
            source = pages + slot * uint64(row_bytes)
        target = out + uint64(row) * uint64(16 * pieces)
        if in_bytes:
            column = uint32(thread & uint32(31))
            while column < uint32(width):
                number = float32(0)
                if is_written:
                    number = load_number(source, column)
                store(target + uint64(column) * item, number)
                column = uint32(column + uint32(32))
            return
        for turn in range(turns):
            piece = uint32((thread & uint32(31)) + uint32(32 * turn))
            if piece < uint32(pieces):
                zero = uint32(0)
                values = (zero, zero, zero, zero)
                if is_written:
                    values = load_4xb32(source + uint64(piece) * uint64(16))
                store_4xb32(target + uint64(piece) * uint64(16), values)

    name = f"latent_rows_{dtype}_w{width}_b{block_size}{f'_{pages}_v{value_dim}' if in_bytes else ''}"
    pointer = types.CPointer(types.int32)
    argument_types = (types.uint64, types.uint64, pointer, pointer, types.uint32, types.uint32)
    constants = {"dtype": dtype, "width": width, "block_size": block_size, "pages": pages}
    return Specialisation(name, copy_rows, argument_types, THREADS, constants=constants)
