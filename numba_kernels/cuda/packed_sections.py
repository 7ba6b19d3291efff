"""Addresses of the parts of a packed matrix (`packing.py`) in kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import types

from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.packing import TILE_BYTES, TILE_ROWS, Packing


@functools.cache
def sections_of(packing: Packing, dtype: str) -> Callable[..., Any]:
    """A device function ``(weight, rows, k) -> (words, scales, zeros, row scales, slots)``: addresses, and a row's
    slots."""
    slot, uint32, uint64 = packing.slot, types.uint32, types.uint64
    a_slot = TILE_ROWS * packing.halves * packing.chunk_bytes(dtype)
    zeros_a_slot = TILE_ROWS * packing.halves * packing.zeros_bytes(dtype)

    @device_function
    def find(weight, rows, k):
        slots = uint32(k + uint32(slot - 1)) // uint32(slot)
        count = uint64(uint32(rows + uint32(15)) >> uint32(4)) * uint64(slots)
        scales = weight + count * uint64(2 * TILE_BYTES)
        zeros = scales + count * uint64(a_slot)
        return weight, scales, zeros, zeros + count * uint64(zeros_a_slot), slots

    return find
