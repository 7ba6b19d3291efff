"""Rows of x rounded to int8 or e4m3, each by its own largest magnitude, for products of bytes (`gemm/w8a8.py`).

    scales[r] = max |x[r]| / 127 or 448     float32 [8 ceil(m / 8)]
    codes     = round(x[r] / scales[r])     int8 or e4m3, in a packed weight's order: [ceil(m / 8), slots, 32 lanes, 16]

A slot is 64 of K (`packing.py`), so that both factors of a product are read alike. Rows and columns beyond x are zeros.
A row with NaN or infinity has a scale that is not finite, and its results are NaN.

A block has 8 rows, a warp each. A row is read twice; the second time from a cache. With groups (`is_grouped`) each
128 of K of a row have their own largest magnitude, and x is read once; the scales are [ceil(k / 128), 8 ceil(m / 8)].
A static scale is given (`is_static`): x is read once, divided by it and clamped to the codes' range, and each row has
that scale, or NaN if it has a NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numba import cuda, types

from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.byte_mma import e4m3_pair, nearest_s32
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import vector_loader
from numba_kernels.cuda.intrinsics.math import maximum_nan, minimum_nan, reciprocal
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import maximum_u32_of_warp, shuffle_xor_b32
from numba_kernels.cuda.packing import TILE_BYTES, TILE_ROWS
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

SLOT = 64  # elements of K
GROUP = 128  # of K of a row, with a scale
_LARGEST = {"s8": 127.0, "e4m3": 448.0}
_BYTE_ORDER = (0, 2, 1, 3)  # of a word's elements, as packed weights have them
_LAUNCH_S = 2e-6


def sections(m: int, k: int, *, is_grouped: bool = False) -> tuple[int, int]:
    """Bytes of the codes, which the scales follow, and of both."""
    tiles = -(-m // TILE_ROWS)
    codes = tiles * -(-k // SLOT) * TILE_BYTES
    return codes, codes + tiles * TILE_ROWS * 4 * (-(-k // GROUP) if is_grouped else 1)


@device_function
def _integer_word(a, b, c, d):
    low = (nearest_s32(a) & uint32(255)) | ((nearest_s32(b) & uint32(255)) << uint32(8))
    return low | ((nearest_s32(c) & uint32(255)) << uint32(16)) | ((nearest_s32(d) & uint32(255)) << uint32(24))


@device_function
def _clamped(value):
    return minimum_nan(maximum_nan(value, float32(-128.0)), float32(127.0))


@device_function
def _clamped_word(a, b, c, d):
    return _integer_word(_clamped(a), _clamped(b), _clamped(c), _clamped(d))


@device_function
def _e4m3_word(a, b, c, d):
    return e4m3_pair(b, a) | (e4m3_pair(d, c) << uint32(16))


@functools.cache
def factor_finder(element: str) -> Any:
    """A device function ``largest magnitude's bits -> (factor of the numbers, their scale)``. Numbers that are too
    small for the factor become zeros."""
    largest_code = _LARGEST[element]
    least = int(np.float32(largest_code * 2.0**-127).view(np.uint32))  # its factor is finite

    @device_function
    def find_factor(largest):
        magnitude, factor = convert.f32_from_bits(largest), float32(0.0)
        if largest > uint32(least):
            factor = float32(largest_code) * reciprocal(magnitude)
        return factor, magnitude * float32(1 / largest_code)

    return find_factor


@functools.cache
def chunk_storer(element: str, *, is_clamped: bool = False) -> Any:
    """A device function ``(row, chunk, values, factor)``: 8 neighbours of a row, times the factor, as codes. `row` is
    where the codes of its first chunk lie."""
    if element == "s8":
        word_of = _clamped_word if is_clamped else _integer_word
    else:
        word_of = _e4m3_word
    a, b, c, d = _BYTE_ORDER

    @device_function
    def store_chunk(row, chunk, values, factor):
        low = word_of(values[a] * factor, values[b] * factor, values[c] * factor, values[d] * factor)
        high = word_of(values[4 + a] * factor, values[4 + b] * factor, values[4 + c] * factor, values[4 + d] * factor)
        slot, inside = chunk >> uint32(3), chunk & uint32(7)
        at = uint64(slot) * uint64(TILE_BYTES)
        at += uint64(((inside & uint32(3)) << uint32(4)) + ((inside >> uint32(2)) << uint32(3)))
        memory.store_2xb32(row + at, (low, high))

    return store_chunk


def _specialisation(name: str, kernel: Any, dtype: str, element: str, num_floats: int = 0) -> Specialisation:
    return Specialisation(
        name=f"dynamic_quantisation_{name}_{dtype}",
        kernel=cuda.jit(kernel),
        argument_types=(types.uint64,) * 3 + (types.uint32,) * 2 + (types.float32,) * num_floats,
        max_threads=32 * TILE_ROWS,
        constants={"dtype": dtype, "element": element},
        min_capability=80 if element == "s8" else 89,
    )


@functools.cache
def _kernel(dtype: str, element: str) -> Specialisation:
    """Arguments: x, codes, scales addresses; m, k."""
    load, bits_of = vector_loader(dtype), convert.bits_from_f32
    find_factor, store_chunk = factor_finder(element), chunk_storer(element)

    def round_rows(x, codes, scales, m, k):
        wait_for_previous_grid()
        launch_dependents()
        lane, g = uint32(cuda.threadIdx.x) & uint32(31), uint32(cuda.threadIdx.x) >> uint32(5)
        tile = uint32(cuda.blockIdx.x)
        row = uint32(tile * uint32(TILE_ROWS) + g)
        source = x + uint64(row) * uint64(k) * uint64(2)
        largest = uint32(0)  # as bits, which order magnitudes, NaN above all
        if row < m:
            column = uint32(lane * uint32(8))
            while column < k:
                values = load(source + uint64(column) * uint64(2))
                for i in range(8):
                    largest = max(largest, bits_of(values[i]) & uint32(0x7FFFFFFF))
                column = uint32(column + uint32(256))
        factor, scale = find_factor(maximum_u32_of_warp(largest))
        if lane == uint32(0):
            memory.store_f32(scales + uint64(row) * uint64(4), scale)
        slots = uint32(k + uint32(SLOT - 1)) // uint32(SLOT)
        target = codes + uint64(tile) * uint64(slots) * uint64(TILE_BYTES) + uint64(g * uint32(64))
        chunk = lane
        values = cuda.local.array(8, float32)
        while chunk < slots * uint32(8):
            column, used = uint32(chunk * uint32(8)), float32(0.0)
            for i in range(8):
                values[i] = float32(0.0)
            if row < m and column < k:
                loaded, used = load(source + uint64(column) * uint64(2)), factor
                for i in range(8):
                    values[i] = loaded[i]
            store_chunk(target, chunk, values, used)
            chunk = uint32(chunk + uint32(32))

    return _specialisation(element, round_rows, dtype, element)


@functools.cache
def _static_kernel(dtype: str, element: str) -> Specialisation:
    """Arguments: x, codes, scales addresses; m, k; the scale, and one over it."""
    load, bits_of = vector_loader(dtype), convert.bits_from_f32
    store_chunk = chunk_storer(element, is_clamped=True)

    def round_rows(x, codes, scales, m, k, scale, factor):
        wait_for_previous_grid()
        launch_dependents()
        lane, g = uint32(cuda.threadIdx.x) & uint32(31), uint32(cuda.threadIdx.x) >> uint32(5)
        tile = uint32(cuda.blockIdx.x)
        row = uint32(tile * uint32(TILE_ROWS) + g)
        source = x + uint64(row) * uint64(k) * uint64(2)
        slots = uint32(k + uint32(SLOT - 1)) // uint32(SLOT)
        target = codes + uint64(tile) * uint64(slots) * uint64(TILE_BYTES) + uint64(g * uint32(64))
        chunk, largest = lane, uint32(0)  # as bits, which order magnitudes, NaN above all
        values = cuda.local.array(8, float32)
        while chunk < slots * uint32(8):
            column = uint32(chunk * uint32(8))
            for i in range(8):
                values[i] = float32(0.0)
            if row < m and column < k:
                loaded = load(source + uint64(column) * uint64(2))
                for i in range(8):
                    values[i] = loaded[i]
                    largest = max(largest, bits_of(values[i]) & uint32(0x7FFFFFFF))
            store_chunk(target, chunk, values, factor)
            chunk = uint32(chunk + uint32(32))
        largest = maximum_u32_of_warp(largest)
        if lane == uint32(0):
            if largest > uint32(0x7F800000):
                scale = convert.f32_from_bits(largest)
            memory.store_f32(scales + uint64(row) * uint64(4), scale)

    return _specialisation(f"{element}_static", round_rows, dtype, element, num_floats=2)


@functools.cache
def _grouped_kernel(dtype: str) -> Specialisation:
    """Rounds to e4m3, with a scale for each 128 of K. Arguments: x, codes, scales addresses; m, k."""
    load, bits_of = vector_loader(dtype), convert.bits_from_f32
    find_factor, store_chunk = factor_finder("e4m3"), chunk_storer("e4m3")

    def round_rows(x, codes, scales, m, k):
        wait_for_previous_grid()
        launch_dependents()
        lane, g = uint32(cuda.threadIdx.x) & uint32(31), uint32(cuda.threadIdx.x) >> uint32(5)
        tile = uint32(cuda.blockIdx.x)
        row = uint32(tile * uint32(TILE_ROWS) + g)
        source = x + uint64(row) * uint64(k) * uint64(2)
        slots = uint32(k + uint32(SLOT - 1)) // uint32(SLOT)
        padded_rows = uint64(uint32(cuda.gridDim.x) * uint32(TILE_ROWS))
        target = codes + uint64(tile) * uint64(slots) * uint64(TILE_BYTES) + uint64(g * uint32(64))
        values = cuda.local.array(8, float32)
        first = uint32(0)  # chunk of 8 of the warp's 256 elements
        while first < slots * uint32(8):
            chunk = uint32(first + lane)
            column = uint32(chunk * uint32(8))
            largest = uint32(0)  # as bits, which order magnitudes, NaN above all
            for i in range(8):
                values[i] = float32(0.0)
            if row < m and column < k:
                loaded = load(source + uint64(column) * uint64(2))
                for i in range(8):
                    values[i] = loaded[i]
                    largest = max(largest, bits_of(values[i]) & uint32(0x7FFFFFFF))
            for i in range(4):  # 16 lanes have a group
                largest = max(largest, shuffle_xor_b32(largest, uint32(1 << i)))
            factor, scale = find_factor(largest)
            if (lane & uint32(15)) == uint32(0) and column < k:
                at = uint64(column // uint32(GROUP)) * padded_rows + uint64(row)
                memory.store_f32(scales + at * uint64(4), scale)
            if chunk < slots * uint32(8):
                store_chunk(target, chunk, values, factor)
            first = uint32(first + uint32(32))

    made = _specialisation(f"e4m3_g{GROUP}", round_rows, dtype, "e4m3")
    return replace(made, constants={**made.constants, "group": GROUP})


def plan(
    m: int, k: int, dtype: str, element: str = "s8", *, is_grouped: bool = False, is_static: bool = False
) -> Launch:
    """The launch for x [m, k] of a 16-bit dtype, to "s8" or "e4m3" (sm_89 on), which alone can be grouped.

    8 divides k, and x begins on a 16-byte bound.

    Arguments: x, codes, scales, m, k; if static, the scale and one over it.
    """
    assert not (is_grouped and is_static)
    kernel = _grouped_kernel(dtype) if is_grouped else (_static_kernel if is_static else _kernel)(dtype, element)
    return Launch(kernel, (-(-m // TILE_ROWS), 1, 1), (32 * TILE_ROWS, 1, 1))


def seconds(m: int, k: int, memory_bytes: float) -> float:
    """Seconds by the bytes read and written, and a launch."""
    return _LAUNCH_S + (2 * m * k + sections(m, k)[1]) / memory_bytes


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation of both types and elements."""
    for dtype in ("bf16", "f16"):
        for element in _LARGEST:
            yield _kernel(dtype, element)
            yield _static_kernel(dtype, element)
        yield _grouped_kernel(dtype)
