"""The KV pages on the device: their layout, and the write of K and V into them.

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
from collections.abc import Iterator
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import elements_loader, elements_storer
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.math import divide_u32
from numba_kernels.cuda.specialisation import Launch, Specialisation

THREADS = 128
BLOCK_SIZES = (8, 16, 32)
MAX_HEAD_DIM = 512


PAGE_BYTES = {**ITEM_BYTES, "s8": 1, "e4m3": 1}
"""Bytes of a number in a page."""


def page_row(head_dim: int, dtype: str = "f32") -> int:
    """Elements from one token's row to the next in a page of that type."""
    multiple = 16 if PAGE_BYTES[dtype] == 1 else 8
    return -(-head_dim // multiple) * multiple


def page_bytes(num_kv_heads: int, head_dim: int, block_size: int, dtype: str) -> int:
    """Bytes of one page of K, or of V."""
    return num_kv_heads * block_size * page_row(head_dim, dtype) * PAGE_BYTES[dtype]


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


@functools.cache
def _write_kv(dtype: str, head_dim: int, block_size: int, is_vector: bool) -> Specialisation:
    """Arguments: k, v, slot_mapping, k_cache, v_cache; num_tokens, num_kv_heads, k and v elements a token."""
    width = VECTOR_WIDTH[dtype] if is_vector and head_dim % VECTOR_WIDTH[dtype] == 0 else 1
    pieces = page_row(head_dim) // width
    load, store, address = (
        elements_loader(dtype, width), elements_storer(dtype, width), row_address(head_dim, block_size, dtype)
    )  # fmt: skip
    item_bytes = uint64(ITEM_BYTES[dtype])
    has_padding = page_row(head_dim) != head_dim

    @device_function
    def move(source, target, piece, values):
        if has_padding and piece >= uint32(head_dim // width):
            for i in range(width):
                values[i] = float32(0)
        else:
            loaded = load(source)
            for i in range(width):
                values[i] = loaded[i]
        store(target, values)

    @cuda.jit
    def write_kv(k, v, slot_mapping, k_cache, v_cache, num_tokens, num_kv_heads, k_stride, v_stride):
        index = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        piece = uint32(index % uint32(pieces))
        row = uint32(index // uint32(pieces))
        token = divide_u32(row, num_kv_heads)
        if token >= num_tokens:
            return
        slot = slot_mapping[token]
        if slot < 0:
            return
        values = cuda.local.array(width, float32)
        head = uint32(row - token * num_kv_heads)
        block = uint32(uint64(slot) // uint64(block_size))
        offset = uint32(uint32(slot) % uint32(block_size))
        at = uint64(uint32(piece * uint32(width))) * item_bytes
        head_at = uint64(uint32(head * uint32(head_dim))) * item_bytes + at
        k_row = address(k_cache, block, offset, head, num_kv_heads)
        v_row = address(v_cache, block, offset, head, num_kv_heads)
        move(k + uint64(token) * uint64(k_stride) * item_bytes + head_at, k_row + at, piece, values)
        move(v + uint64(token) * uint64(v_stride) * item_bytes + head_at, v_row + at, piece, values)

    name = f"write_kv_{dtype}_d{head_dim}_b{block_size}_x{width}"
    constants = {"dtype": dtype, "head_dim": head_dim, "block_size": block_size, "width": width}
    pointers = (types.uint64, types.uint64, types.CPointer(types.int64), types.uint64, types.uint64)
    return Specialisation(name, write_kv, pointers + (types.uint32,) * 4, THREADS, constants=constants)


def plan_write_kv(
    num_tokens: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str, *, alignment: int = 16
) -> Launch:
    """k and v [num_tokens, num_kv_heads, head_dim], tokens any distance apart; both counts at least 1.

    Arguments: k, v, slot_mapping (int64), k_cache, v_cache addresses; num_tokens, num_kv_heads; elements from one token
    to the next in k and in v. `alignment` in bytes divides k, v and their token strides. ValueError for unsupported
    sizes. The f32 detour within the kernel keeps the bits of every number.
    """
    check_pages(head_dim, block_size, dtype)
    kernel = _write_kv(dtype, head_dim, block_size, alignment % 16 == 0)
    pieces = page_row(head_dim) // kernel.constants["width"]
    return Launch(kernel, (-(-num_tokens * num_kv_heads * pieces // THREADS), 1, 1), (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """The usual head dims with pages of 16 tokens."""
    for dtype in DTYPES:
        for head_dim in (32, 64, 128):
            yield _write_kv(dtype, head_dim, 16, True)
