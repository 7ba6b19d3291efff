"""Latent rows of one sequence, copied out of its pages in order, for the product that expands them."""

from __future__ import annotations

import functools

from numba import cuda, types, uint32, uint64

from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.memory import load_4xb32, store_4xb32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.specialisation import Specialisation

THREADS, ROWS = 128, 4  # a warp copies a row


@functools.cache
def latent_rows(dtype: str, width: int, block_size: int) -> Specialisation:
    """Arguments: see `planning.plan_rows`. Grid: rows by fours."""
    pieces, rest = divmod(width * ITEM_BYTES[dtype], 16)
    assert rest == 0
    turns = -(-pieces // 32)

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
            source = pages + slot * uint64(16 * pieces)
        target = out + uint64(row) * uint64(16 * pieces)
        for turn in range(turns):
            piece = uint32((thread & uint32(31)) + uint32(32 * turn))
            if piece < uint32(pieces):
                zero = uint32(0)
                values = (zero, zero, zero, zero)
                if is_written:
                    values = load_4xb32(source + uint64(piece) * uint64(16))
                store_4xb32(target + uint64(piece) * uint64(16), values)

    name = f"latent_rows_{dtype}_w{width}_b{block_size}"
    pointer = types.CPointer(types.int32)
    argument_types = (types.uint64, types.uint64, pointer, pointer, types.uint32, types.uint32)
    constants = {"dtype": dtype, "width": width, "block_size": block_size}
    return Specialisation(name, copy_rows, argument_types, THREADS, constants=constants)
