"""Rotary position embedding (https://arxiv.org/abs/2104.09864) of x [T, H, D], f32, f16 or bf16, arithmetic in float32.

    half-split:   out[i], out[i + R/2]      = x[i] c - x[i + R/2] s,  x[i + R/2] c + x[i] s      i < R/2
    interleaved:  out[2i], out[2i + 1]      = x[2i] c - x[2i + 1] s,  x[2i + 1] c + x[2i] s

with c = cos[position, i], s = sin[position, i] out of float32 tables [P, R/2], which the host makes (linear, llama3,
YaRN scaling live there); R <= D is even, and other dimensions stay. Halves may be spread: R/2 elements from D/2 on take
the second half's place (Gemma 4). sin and cos are never computed on the device.

A head is cut into units of two runs of `width` elements each, so that a lane holds both partners of every pair that
it rotates: runs u and R/2 + u for half-split tables, neighbouring runs for interleaved ones. `head_cut` has the cut,
and `load`, `rotate`, `store` for the `qkv` kernel. A run is 16 bytes where the sizes allow it, else one element. A head
belongs to 1, 2, 4 ... 32 lanes; no result depends on other tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import float32, uint32, uint64

from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import elements_loader, elements_storer, floats_loader
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH


@dataclass(frozen=True)
class HeadCut:
    """The spread of one head of D elements over lanes, and the device functions that move it.

    Attributes:
        width: elements of a run; a unit is two runs, held in two local arrays `low` and `high` of `width` float32.
        num_units, lanes, rounds: a head has `num_units` units; lane l of its `lanes` has units l, l + lanes ...
        places(unit): offsets of its runs, in elements.
        load(head_address, unit, low, high): reads a unit.
        rotate(unit, low, high, cos_address, sin_address): rotates it, given the addresses of the position's table rows.
        store(head_address, unit, low, high): writes it.
    """

    width: int
    num_units: int
    lanes: int
    rounds: int
    places: Any
    load: Any
    rotate: Any
    store: Any


def check_rotary(dtype: str, head_dim: int, rotary: int, alignment: int) -> None:
    """ValueError for unsupported heads and rotations."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, must be one of {DTYPES}")
    if not 1 <= head_dim <= 1024:
        raise ValueError(f"head_dim is {head_dim}, must be 1 to 1024")
    if rotary < 0 or rotary > head_dim or rotary % 2:
        raise ValueError(f"rotary is {rotary}, must be even and at most head_dim = {head_dim}")
    if alignment % ITEM_BYTES[dtype]:
        raise ValueError(f"alignment is {alignment} bytes, must be a multiple of the element's {ITEM_BYTES[dtype]}")


@functools.cache
def head_cut(
    dtype: str, head_dim: int, rotary: int, interleaved: bool, is_vector: bool, is_spread: bool = False
) -> HeadCut:
    """For heads of `head_dim`, the first `rotary` of which are rotated, or as many spread over both halves. With
    `is_vector` runs have 16 bytes where possible."""
    width = VECTOR_WIDTH[dtype]
    if not is_vector or rotary % (2 * width) or (head_dim - rotary) % (2 * width):
        width = 1
    rotated_units = rotary // 2 // width
    rest_runs = -(-(head_dim - rotary) // 2) // width  # units after the rotated ones
    num_units = rotated_units + rest_runs
    lanes = 1
    while lanes < min(num_units, 32):
        lanes *= 2
    item_bytes = uint64(ITEM_BYTES[dtype])
    load_run, store_run, load_table = elements_loader(dtype, width), elements_storer(dtype, width), floats_loader(width)
    pairs_neighbours, half_width = interleaved and width > 1, width // 2
    is_odd = head_dim % 2 == 1  # then the last unit's second run does not exist

    @device_function
    def places(unit):
        """Offsets of the unit's two runs in the head."""
        if interleaved:
            first = uint32(unit * uint32(2 * width))
            second = uint32(first + uint32(width))
        else:
            first = uint32(unit * uint32(width))
            second = uint32(first + uint32(rotary // 2))
        if is_spread:
            second = uint32(first + uint32(head_dim // 2))
        elif unit >= uint32(rotated_units):
            first = uint32(uint32(rotary) + (unit - uint32(rotated_units)) * uint32(width))
            second = uint32(first + uint32(rest_runs * width))
        return first, second

    @device_function
    def load(head, unit, low, high):
        first, second = places(unit)
        run = load_run(head + uint64(first) * item_bytes)
        for i in range(width):
            low[i] = run[i]
        if not is_odd or second < uint32(head_dim):
            run = load_run(head + uint64(second) * item_bytes)
            for i in range(width):
                high[i] = run[i]
        else:
            high[0] = float32(0)

    @device_function
    def rotate(unit, low, high, cos, sin):
        if unit < uint32(rotated_units):
            row = uint64(unit) * uint64(4 * width)
            c = load_table(cos + row)
            s = load_table(sin + row)
            if pairs_neighbours:
                for i in range(half_width):
                    x = low[2 * i]
                    y = low[2 * i + 1]
                    low[2 * i] = x * c[i] - y * s[i]
                    low[2 * i + 1] = y * c[i] + x * s[i]
                    x = high[2 * i]
                    y = high[2 * i + 1]
                    high[2 * i] = x * c[half_width + i] - y * s[half_width + i]
                    high[2 * i + 1] = y * c[half_width + i] + x * s[half_width + i]
            else:
                for i in range(width):
                    x = low[i]
                    y = high[i]
                    low[i] = x * c[i] - y * s[i]
                    high[i] = y * c[i] + x * s[i]

    @device_function
    def store(head, unit, low, high):
        first, second = places(unit)
        store_run(head + uint64(first) * item_bytes, low)
        if not is_odd or second < uint32(head_dim):
            store_run(head + uint64(second) * item_bytes, high)

    return HeadCut(width, num_units, lanes, -(-num_units // lanes), places, load, rotate, store)
