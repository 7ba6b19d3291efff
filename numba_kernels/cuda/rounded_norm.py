"""RMSNorm with rows rounded to bytes: `norm.py` and `dynamic_quantisation.py` in one launch, for products of bytes.

The numbers are those of the two launches one after the other, to the bit: the same block has a row, adds up its squares
in the same order, rounds the normalised numbers to x's type, and rounds that to codes. This saves a launch, and the
write and read of 16-bit rows. Codes and scales lie as in `dynamic_quantisation.py`, with zeros for missing rows and
columns: the grid has a block for each of 8 ceil(m / 8) rows.

A row's own largest number is known to its block once it is normalised; a row too long for its threads' registers is
then normalised a third time, from a cache. 128 of K are 16 lanes' numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal

from numba import cuda, types

from numba_kernels.cuda.dynamic_quantisation import GROUP, SLOT, chunk_storer, factor_finder
from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.block import block_sum
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import floats_loader, vector_loader
from numba_kernels.cuda.intrinsics.math import reciprocal_sqrt
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import maximum_u32_of_warp, shuffle_xor_b32
from numba_kernels.cuda.norm import MAX_THREADS, RESIDENT, row_threads, squares_adder, weights_keeper
from numba_kernels.cuda.packing import TILE_BYTES, TILE_ROWS
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

Kind = Literal["rows", "groups", "static"]
_WIDTH = 8  # numbers of a 16-byte access
_INFINITY_BITS = 0x7F800000


@functools.cache
def _kernel(dtype: str, element: str, kind: Kind) -> Specialisation:
    """Arguments: x, weight, codes, scales addresses; m; H; 1 / H; eps; the static scale, and one over it (else 0)."""
    load, load_weight, resident = vector_loader(dtype), floats_loader(_WIDTH), RESIDENT["rms_norm"]
    keep_weights, add_squares = weights_keeper(_WIDTH), squares_adder(dtype, _WIDTH)
    pack, unpack = {
        "bf16": (convert.pack_bf16, convert.unpack_bf16), "f16": (convert.pack_f16, convert.unpack_f16),
    }[dtype]  # fmt: skip
    is_static, is_grouped, is_of_rows = kind == "static", kind == "groups", kind == "rows"
    find_factor, store_chunk = factor_finder(element), chunk_storer(element, is_clamped=is_static)
    bits_of = convert.bits_from_f32

    @device_function
    def normalise(values, loaded, weights, scale, largest):
        """8 numbers as `norm.py` stores them, and the largest magnitude of these and others, as bits."""
        for pair in range(_WIDTH // 2):
            low, high = 2 * pair, 2 * pair + 1
            word = pack(loaded[low] * scale * weights[low], loaded[high] * scale * weights[high])
            values[low], values[high] = unpack(word)
            largest = max(largest, bits_of(values[low]) & uint32(0x7FFFFFFF))
            largest = max(largest, bits_of(values[high]) & uint32(0x7FFFFFFF))
        return largest

    @device_function
    def largest_of_block(largest, greatest):
        largest = maximum_u32_of_warp(largest)
        thread = uint32(cuda.threadIdx.x)
        lane, num_warps = thread & uint32(31), uint32(cuda.blockDim.x) >> uint32(5)
        if lane == uint32(0):
            greatest[thread >> uint32(5)] = largest
        sync_block()
        largest = uint32(0)
        if lane < num_warps:
            largest = greatest[lane]
        return maximum_u32_of_warp(largest)

    @device_function
    def leave_group(target, scales, chunk, num_chunks, values, largest, row, padded_rows):
        """16 lanes' numbers with a scale of their own; all lanes of a warp come here."""
        for i in range(4):
            largest = max(largest, shuffle_xor_b32(largest, uint32(1 << i)))
        factor, scale = find_factor(largest)
        if chunk < num_chunks:
            if (chunk & uint32(GROUP // _WIDTH - 1)) == uint32(0):
                at = uint64(chunk // uint32(GROUP // _WIDTH)) * padded_rows + uint64(row)
                memory.store_f32(scales + at * uint64(4), scale)
            store_chunk(target, chunk, values, factor)

    def round_normed(x, weight, codes, scales, m, size, reciprocal_size, eps, static_scale, static_factor):
        partials, greatest = cuda.shared.array(32, float32), cuda.shared.array(32, uint32)
        values, kept = cuda.local.array(_WIDTH, float32), cuda.local.array((resident, _WIDTH), float32)
        weights = cuda.local.array((resident, _WIDTH), float32)
        row = uint32(cuda.blockIdx.x)
        x += uint64(row) * uint64(size) * uint64(2)
        step, first = uint32(cuda.blockDim.x) * uint32(_WIDTH), uint32(cuda.threadIdx.x) * uint32(_WIDTH)
        slots = uint32(size + uint32(SLOT - 1)) // uint32(SLOT)
        num_chunks = uint32(slots * uint32(SLOT // _WIDTH))
        padded_rows = uint64(uint32(cuda.gridDim.x))
        target = codes + uint64(row // uint32(TILE_ROWS)) * uint64(slots) * uint64(TILE_BYTES)
        target += uint64((row & uint32(TILE_ROWS - 1)) * uint32(64))
        there = size if row < m else uint32(0)  # of a row that x has not
        keep_weights(weights, weight, first, step, there)
        wait_for_previous_grid()  # the weight is immutable; x may be the previous grid's output
        launch_dependents()
        squares = block_sum(add_squares(kept, x, first, step, there), partials)
        scale = reciprocal_sqrt(squares * reciprocal_size + eps)

        largest = uint32(0)  # as bits, which order magnitudes, NaN above all
        for i in range(resident):
            index, of_chunk = first + uint32(i) * step, uint32(0)
            if index < there:
                of_chunk = normalise(kept[i], kept[i], weights[i], scale, of_chunk)
            else:
                for lane in range(_WIDTH):
                    kept[i, lane] = float32(0.0)
            largest = max(largest, of_chunk)
            chunk = index // uint32(_WIDTH)
            if is_grouped:
                leave_group(target, scales, chunk, num_chunks, kept[i], of_chunk, row, padded_rows)
            if is_static:  # noqa: SIM102 - numba prunes what a constant alone decides
                if chunk < num_chunks:
                    store_chunk(target, chunk, kept[i], static_factor)
        start = uint32(resident) * step
        while start < num_chunks * uint32(_WIDTH):  # whole warps together
            index, of_chunk = start + first, uint32(0)
            for lane in range(_WIDTH):
                values[lane] = float32(0.0)
            if index < there:
                loaded_weights = load_weight(weight + uint64(index) * uint64(4))
                of_chunk = normalise(values, load(x + uint64(index) * uint64(2)), loaded_weights, scale, of_chunk)
            largest = max(largest, of_chunk)
            chunk = index // uint32(_WIDTH)
            if is_grouped:
                leave_group(target, scales, chunk, num_chunks, values, of_chunk, row, padded_rows)
            if is_static:  # noqa: SIM102
                if chunk < num_chunks:
                    store_chunk(target, chunk, values, static_factor)
            start += step
        if not is_grouped:
            largest = largest_of_block(largest, greatest)
            factor, row_scale = find_factor(largest)
            if is_static:
                row_scale = static_scale
                if largest > uint32(_INFINITY_BITS):
                    row_scale = convert.f32_from_bits(largest)
            if first == uint32(0):
                memory.store_f32(scales + uint64(row) * uint64(4), row_scale)
        if is_of_rows:
            for i in range(resident):
                chunk = (first + uint32(i) * step) // uint32(_WIDTH)
                if chunk < num_chunks:
                    used = factor if first + uint32(i) * step < there else float32(0.0)
                    store_chunk(target, chunk, kept[i], used)
            index = first + uint32(resident) * step
            while index < num_chunks * uint32(_WIDTH):
                used = float32(0.0)
                for lane in range(_WIDTH):
                    values[lane] = float32(0.0)
                if index < there:
                    loaded_weights = load_weight(weight + uint64(index) * uint64(4))
                    normalise(values, load(x + uint64(index) * uint64(2)), loaded_weights, scale, uint32(0))
                    used = factor
                store_chunk(target, index // uint32(_WIDTH), values, used)
                index += step

    return Specialisation(
        name=f"rounded_norm_{element}_{kind}_{dtype}",
        kernel=cuda.jit(round_normed),
        argument_types=(types.uint64,) * 4 + (types.uint32,) * 2 + (types.float32,) * 4,
        max_threads=MAX_THREADS["rms_norm"],
        constants={"dtype": dtype, "element": element, "kind": kind, "group": GROUP if is_grouped else 0},
        min_capability=80 if element == "s8" else 89,
    )


def plan(
    m: int, size: int, dtype: str, element: str = "s8", *, is_grouped: bool = False, is_static: bool = False
) -> Launch:
    """The launch for x [m, size] of a 16-bit dtype, to "s8" or "e4m3" (sm_89 on), which alone can be grouped.

    8 divides the size, and x begins on a 16-byte bound.

    Arguments: x, weight, codes, scales, m, size, 1 / size, eps, and the static scale and one over it, or twice 0.
    """
    assert not (is_grouped and (is_static or element == "s8"))
    kernel = _kernel(dtype, element, "groups" if is_grouped else "static" if is_static else "rows")
    threads = row_threads("rms_norm", size, _WIDTH)
    return Launch(kernel, (-(-m // TILE_ROWS) * TILE_ROWS, 1, 1), (threads, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation of both types and elements."""
    for dtype in ("bf16", "f16"):
        for element in ("s8", "e4m3"):
            yield _kernel(dtype, element, "rows")
            yield _kernel(dtype, element, "static")
        yield _kernel(dtype, "e4m3", "groups")
