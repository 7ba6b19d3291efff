"""The layout of KV pages on the device.

A page (block) holds `block_size` (8, 16 or 32) consecutive tokens of one sequence for every KV head of one layer. K
and V are both

    [num_blocks, num_kv_heads, block_size, page_row]      page_row = head_dim rounded up to a multiple of 8 elements

of f32, f16 or bf16, or of a byte (`quantised_pages`): then rounded up to 16, and the scales are another array. One
head's part of a page is one contiguous run, which a block of the attention kernel reads in
16-byte pieces; rows begin at multiples of 16 bytes whatever the head dim. Columns from head_dim on hold zeros, written
with the row, so that kernels may compute over whole pieces. Contents of unwritten rows do not matter; but the TMA reads
whole pages, so that they must have been zeroed once.

A token's slot is block * block_size + offset, int64; -1 if it is not stored. https://arxiv.org/abs/2309.06180
"""

from __future__ import annotations

import functools
from typing import Any

from numba import uint64

from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES

BLOCK_SIZES = (8, 16, 32)
MAX_HEAD_DIM = 512


PAGE_BYTES = {**ITEM_BYTES, "s8": 1, "e4m3": 1}
"""Bytes of a number in a page."""


def page_row(head_dim: int, dtype: str = "f32") -> int:
    """Elements from one token's row to the next in a page of that type."""
    multiple = 16 if PAGE_BYTES[dtype] == 1 else 8
    return -(-head_dim // multiple) * multiple


def check_pages(head_dim: int, block_size: int, dtype: str) -> None:
    """ValueError for unsupported pages."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, must be one of {DTYPES}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}, must be 1 to {MAX_HEAD_DIM}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size is {block_size}, must be one of {BLOCK_SIZES}")


@functools.cache
def row_address(head_dim: int, block_size: int, dtype: str) -> Any:
    """A device function ``(cache, block, offset, head, num_kv_heads) -> address`` of a token's row; all but the address
    uint32."""
    row_bytes = uint64(page_row(head_dim, dtype) * PAGE_BYTES[dtype])

    @device_function
    def address(cache, block, offset, head, num_kv_heads):
        row = (uint64(block) * uint64(num_kv_heads) + uint64(head)) * uint64(block_size) + uint64(offset)
        return cache + row * row_bytes

    return address
