"""Tier 3: a tile in registers. Lesson: shared memory has a bandwidth too.

Against the tiled tier it changes

- the work of a thread: 8x8 elements of the output (4x4 for small products) live in its registers. A step in k reads 16
  numbers from shared memory for 64 multiply-adds, where the tiled tier reads 2 for 1;
- the loads: 16 bytes at a time, from global memory and, four neighbours in a register tile, from shared memory;
- the layout: both tiles lie k-major, [k, row], so that a thread's rows are neighbours. Loads along k, two chunks of 16
  bytes a row, which is a sector, are stored across it; rows are exchanged in groups of 16 in the second
  chunk, so that the lanes which hold different k of one row do not meet in a bank;
- the order in time: the next tile travels from global memory to registers while this one is multiplied, then goes to
  the other of two buffers: one barrier a tile.

Elements of 16 bits become float32 on their way to shared memory. Where rows do not lie on 16-byte bounds (`is_aligned`
false) elements are loaded one by one. The order of each sum is the naive tier's: k from first to last.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.gemm.epilogue import (
    ARGUMENT_TYPES,
    DTYPE_PAIRS,
    can_finish_quads,
    finisher,
    product_kernel,
    quad_finisher,
    scale_element,
    scale_of_row,
    scale_quad,
)
from numba_kernels.cuda.gemm.product import NOT_PLAIN, Machine, Product
from numba_kernels.cuda.gemm.split_k import in_segment, segment_of
from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_loader, vector_loader
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.sync import sync_block
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

THREADS = 256  # 16 x 16, each with per_thread x per_thread elements
K_CHUNKS = 2  # 16-byte chunks of a row that a tile is deep
PER_THREAD = (4, 8)


@functools.cache
def _chunk_loader(dtype: str, is_aligned: bool) -> Any:
    """A device function ``(address, count, chunk) -> None``: the first of VECTOR_WIDTH neighbours, the rest zero.

    Where chunks are aligned, `count` is all or nothing.
    """
    width, item_bytes = VECTOR_WIDTH[dtype], ITEM_BYTES[dtype]
    if is_aligned:
        load_vector = vector_loader(dtype)

        @device_function
        def load_chunk(address, count, chunk):
            for i in range(width):
                chunk[i] = float32(0.0)
            if count > uint32(0):
                values = load_vector(address)
                for i in range(width):
                    chunk[i] = values[i]

        return load_chunk
    load = element_loader(dtype)

    @device_function
    def load_elements(address, count, chunk):
        for i in range(width):
            element = float32(0.0)
            if uint32(i) < count:
                element = load(address + uint64(i * item_bytes))
            chunk[i] = element

    return load_elements


@functools.cache
def _kernel(
    dtype: str, out_dtype: str, per_thread: int, is_weight_layout: bool, is_aligned: bool, is_cut: bool = False
) -> Specialisation:
    load_chunk, finish, finish_quad = (
        _chunk_loader(dtype, is_aligned), finisher(dtype, out_dtype), quad_finisher(dtype, out_dtype)
    )  # fmt: skip
    load_4, store, store_4 = memory.shared_load_4xf32, memory.shared_store_f32, memory.shared_store_4xf32
    width, item_bytes = VECTOR_WIDTH[dtype], ITEM_BYTES[dtype]
    block = 16 * per_thread  # of rows, and of columns
    quads = per_thread // 4  # a thread's rows and columns are quads, 64 apart
    k_bytes = block * 4
    depth = K_CHUNKS * width
    tile_bytes = depth * k_bytes
    shared_floats = 4 * depth * block

    # A tile of x, and of a weight, is loaded [block rows, depth] in chunks along k; of plain B [depth, block columns].
    passes = max(1, block * K_CHUNKS // THREADS)
    k_pass_rows = THREADS // K_CHUNKS
    n_chunks = block // width
    n_pass_rows = THREADS // n_chunks
    loaders = min(THREADS, block * K_CHUNKS)  # threads that have a chunk in each pass

    @device_function
    def k_major(k_index, row):
        """The byte offset of an element in a tile ``[k, row]``."""
        return (k_index * uint32(block) + (row ^ (k_index // uint32(width) << uint32(4)))) * uint32(4)

    @device_function
    def load_along_k(matrix, first_row, num_rows, k, end, start, thread, chunks):
        """This thread's chunks of rows of a ``[num_rows, k]`` matrix, zeros from column `end` on. Rows beyond the last
        repeat it."""
        column = start + thread % uint32(K_CHUNKS) * uint32(width)
        count = end - column if column < end else uint32(0)
        for i in range(passes):
            row = min(first_row + thread // uint32(K_CHUNKS) + uint32(i * k_pass_rows), num_rows - uint32(1))
            load_chunk(matrix + (uint64(row) * uint64(k) + uint64(column)) * uint64(item_bytes), count, chunks[i])

    @device_function
    def store_along_k(tile, thread, chunks):
        for i in range(passes):
            row = thread // uint32(K_CHUNKS) + uint32(i * k_pass_rows)
            for g in range(width // 4):
                place = tile + k_major(thread % uint32(K_CHUNKS) * uint32(width) + uint32(4 * g), row)
                for e in range(4):
                    store(place + uint32(e * k_bytes), chunks[i, 4 * g + e])

    @device_function
    def load_across_k(matrix, first_column, num_columns, k, end, start, thread, chunks):
        """This thread's chunks of a ``[k, num_columns]`` matrix, zeros from row `end` on."""
        column = first_column + thread % uint32(n_chunks) * uint32(width)
        count = num_columns - column if column < num_columns else uint32(0)
        for i in range(passes):
            row = start + thread // uint32(n_chunks) + uint32(i * n_pass_rows)
            place = uint64(row) * uint64(num_columns) + uint64(column)
            load_chunk(matrix + place * uint64(item_bytes), count if row < end else uint32(0), chunks[i])

    @device_function
    def store_across_k(tile, thread, chunks):
        for i in range(passes):
            k_index = thread // uint32(n_chunks) + uint32(i * n_pass_rows)
            chunk = thread % uint32(n_chunks)
            place = tile + k_major(k_index, chunk * uint32(width))
            first = (chunks[i, 0], chunks[i, 1], chunks[i, 2], chunks[i, 3])
            if width == 4:
                store_4(place, first)
            else:  # chunks that are 128 bytes apart meet in a bank: these store their halves in turn
                second = (chunks[i, 4], chunks[i, 5], chunks[i, 6], chunks[i, 7])
                is_turned = chunk & uint32(4) != uint32(0)
                turn = uint32(16) if is_turned else uint32(0)
                store_4(place + turn, second if is_turned else first)
                store_4(place + uint32(16) - turn, first if is_turned else second)

    @device_function
    def multiply(x_quads, weight_quads, sums):
        """One k: this thread's rows times its columns."""
        a = cuda.local.array(per_thread, float32)
        b = cuda.local.array(per_thread, float32)
        for q in range(quads):
            a[4 * q], a[4 * q + 1], a[4 * q + 2], a[4 * q + 3] = load_4(x_quads + uint32(q * 64 * 4))
            b[4 * q], b[4 * q + 1], b[4 * q + 2], b[4 * q + 3] = load_4(weight_quads + uint32(q * 64 * 4))
        for i in range(per_thread):
            for j in range(per_thread):
                sums[i, j] += a[i] * b[j]

    load_weight = load_along_k if is_weight_layout else load_across_k
    store_weight = store_along_k if is_weight_layout else store_across_k

    @device_function
    def multiply_tile(given):
        x, weight, m, n, k = given.x, given.weight, given.m, given.n, given.k
        # Two buffers, each a tile of x and one of the weight.
        shared = memory.shared_address(cuda.shared.array(shared_floats, float32))
        thread = uint32(cuda.threadIdx.x)
        tiles_m = (m + uint32(block - 1)) // uint32(block)
        column_tile = uint32(cuda.blockIdx.x) // tiles_m
        first_row = (uint32(cuda.blockIdx.x) - column_tile * tiles_m) * uint32(block)
        first_column = column_tile * uint32(block)
        # A warp has 4 x 8 threads: 4 quads of rows, each read by 8 lanes at once, and 8 quads of columns.
        lane, warp = thread & uint32(31), thread >> uint32(5)
        row_quad = ((warp >> uint32(1)) * uint32(4) + (lane >> uint32(3))) * uint32(4)
        column_quad = ((warp & uint32(1)) * uint32(8) + (lane & uint32(7))) * uint32(4)
        x_place, weight_place = uint32(row_quad * uint32(4)), uint32(uint32(tile_bytes) + column_quad * uint32(4))

        sums = cuda.local.array((per_thread, per_thread), float32)
        for i in range(per_thread):
            for j in range(per_thread):
                sums[i, j] = float32(0.0)
        x_chunks = cuda.local.array((passes, width), float32)
        weight_chunks = cuda.local.array((passes, width), float32)
        has_chunks = thread < uint32(loaders)

        start, end = uint32(0), k
        if is_cut:
            start, length = segment_of(k)
            end = uint32(start + length)
            given = in_segment(given)
        buffer = shared
        if has_chunks:
            load_along_k(x, first_row, m, k, end, start, thread, x_chunks)
            load_weight(weight, first_column, n, k, end, start, thread, weight_chunks)
        while start < end:
            if has_chunks:
                store_along_k(buffer, thread, x_chunks)
                store_weight(buffer + uint32(tile_bytes), thread, weight_chunks)
            sync_block()
            start += uint32(depth)
            if has_chunks and start < end:
                load_along_k(x, first_row, m, k, end, start, thread, x_chunks)
                load_weight(weight, first_column, n, k, end, start, thread, weight_chunks)
            chunk = uint32(0)
            while chunk < uint32(K_CHUNKS):  # in which rows keep their places
                place = uint32(buffer + chunk * uint32(width * k_bytes))
                x_quads = uint32(place + (x_place ^ uint32(chunk << uint32(6))))
                weight_quads = uint32(place + (weight_place ^ uint32(chunk << uint32(6))))
                for i in range(width):
                    multiply(uint32(x_quads + uint32(i * k_bytes)), uint32(weight_quads + uint32(i * k_bytes)), sums)
                chunk = uint32(chunk + uint32(1))
            # The other buffer is free: all have passed the barrier after its last use.
            buffer = shared + uint32(2 * tile_bytes) - (buffer - shared)

        # Row after row; registers cannot be indexed, so the sums move up by a row each time.
        in_quads = can_finish_quads(given)
        index = uint32(0)
        while index < uint32(per_thread):
            row = first_row + row_quad + (index >> uint32(2)) * uint32(64) + (index & uint32(3))
            scale = scale_of_row(given, row) if row < m else float32(1.0)
            for q in range(quads):
                column = first_column + column_quad + uint32(64 * q)
                if row < m and column < n:
                    if in_quads:
                        values = (sums[0, 4 * q], sums[0, 4 * q + 1], sums[0, 4 * q + 2], sums[0, 4 * q + 3])
                        values = scale_quad(values, scale)
                        finish_quad(given, row, column, values)
                    else:
                        for j in range(4):
                            if column + uint32(j) < n:
                                value = scale_element(sums[0, 4 * q + j], scale)
                                finish(given, row, column + uint32(j), value)
            for i in range(per_thread - 1):
                for j in range(per_thread):
                    sums[i, j] = sums[i + 1, j]
            index += uint32(1)

    layout, alignment = "nk" if is_weight_layout else "kn", "aligned" if is_aligned else "any"
    return Specialisation(
        name=f"gemm_register_{dtype}_{out_dtype}_{block}x{block}_{layout}_{alignment}{'_segments' if is_cut else ''}",
        kernel=product_kernel(multiply_tile),
        argument_types=ARGUMENT_TYPES,
        max_threads=THREADS,
        min_blocks=2,
        constants={
            "dtype": dtype, "out_dtype": out_dtype, "per_thread": per_thread, "layout": layout,
            "is_aligned": is_aligned, "is_cut": is_cut,
        },
    )  # fmt: skip


def why_not(product: Product, machine: Machine) -> str:
    """Why it cannot compute a product; "" if it can."""
    return "" if product.is_plain else NOT_PLAIN


def seconds(product: Product, machine: Machine) -> float:
    """Seconds by its work in tiles of 64. 16-bit factors are tensor_core's."""
    if product.x != "f32":
        return math.inf
    return 2 * product.n * product.k * -(-product.m // 64) * 64 / machine.float_flops


def plan(product: Product, machine: Machine) -> Launch:
    """A launch for a product that it can compute and that is not empty: the larger tile where it fills the GPU."""
    tiles = {
        per_thread: -(-product.m // (16 * per_thread)) * -(-product.n // (16 * per_thread)) for per_thread in PER_THREAD
    }
    parts = max(1, product.num_segments)
    can_be_large = product.is_weight_layout and product.is_aligned
    per_thread = 8 if tiles[8] * parts >= machine.num_multiprocessors and can_be_large else 4
    kernel = _kernel(product.x, product.out, per_thread, product.is_weight_layout, product.is_aligned, parts > 1)
    return Launch(kernel, (tiles[per_thread], parts, 1), (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for dtype, out_dtype in DTYPE_PAIRS:
        yield _kernel(dtype, out_dtype, 8, True, True)
        for is_weight_layout, is_aligned in itertools.product((True, False), (True, False)):
            yield _kernel(dtype, out_dtype, 4, is_weight_layout, is_aligned)
    for dtype in DTYPES:
        for per_thread, is_aligned in ((8, True), (4, True), (4, False)):
            yield _kernel(dtype, "f32", per_thread, True, is_aligned, is_cut=True)
