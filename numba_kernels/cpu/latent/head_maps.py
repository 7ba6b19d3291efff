"""Products of each head's numbers with the head's own matrix, for the maps that latent attention absorbs.

    out[t, h, n] = sum over k of x[t, h, k] weight[h, n, k]

x and out are columns of rows: a head's numbers begin `x_head` elements after those of the head before, a token's
`x_token` after those of the token before; so for out. A work item multiplies some tokens of one head: it arranges them
itself, so that none waits for another. A row's bits are those of `linear`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray

from numba_kernels.cpu.gemm.arranged_rows import operand_words
from numba_kernels.cpu.gemm.linear import FIELDS as PRODUCT_FIELDS
from numba_kernels.cpu.gemm.linear import SERIAL_MACS, product_parts
from numba_kernels.cpu.layout import PANEL_COLUMNS
from numba_kernels.cpu.running.launch import Fields, Kernel, address_of, int64_at, new_array

TOKENS_A_WORK_ITEM = 96  # enough to unpack a block of a weight once for many rows

FIELDS = Fields(
    "*x *tables *out *operands num_tokens num_heads depth width x_token x_head out_token out_head row_words "
    "tokens_a_work_item"
)
_PRODUCT = PRODUCT_FIELDS.record


@functools.cache
def head_maps_kernel(stored: Any) -> Kernel:
    """The kernel for panels of ``stored``, a class or a block's name. ``tables [3, H]`` int64 holds the addresses of
    each head's panels, scales and bias; ``operands`` has ``row_words`` words for each token and head."""
    arrange, multiply, elements, unit_words, count_tiles = product_parts(stored)

    def head_maps(arguments, work_item):
        a = carray(arguments, 1)[0]
        parts = -(-a.num_tokens // a.tokens_a_work_item)
        head, first = work_item // parts, work_item % parts * a.tokens_a_work_item
        rows = min(a.tokens_a_work_item, a.num_tokens - first)
        tables = int64_at(a.tables, 3 * a.num_heads)
        product = np.empty(1, _PRODUCT)
        b = product[0]
        b.x = a.x + (first * a.x_token + head * a.x_head) * 4
        b.panels, b.scales, b.bias = tables[head], tables[a.num_heads + head], tables[2 * a.num_heads + head]
        b.residual = 0
        b.out = a.out + (first * a.out_token + head * a.out_head) * 4
        b.operands = a.operands + (head * a.num_tokens + first) * a.row_words * 4
        b.partials = b.low_rank = 0
        b.num_rows, b.depth, b.x_stride = rows, a.depth, a.x_token
        b.width, b.out_width = a.width, a.out_token
        b.num_segments, b.step_elements = 1, 1
        b.panels_a_work_item, b.row_work_items, b.num_tiles = -(-a.width // PANEL_COLUMNS), 1, count_tiles(rows)
        b.arranging_parts, b.gate = 1, 0
        words = -(-a.depth // elements) * unit_words
        for tile in range(b.num_tiles):
            arrange(product[0], tile, words)
        multiply(product[0], 0, words)

    return Kernel(head_maps, FIELDS)


def multiply_heads(
    stored: Any, x: int, tables: int, out: int, tokens: int, heads: int, depth: int, width: int,
    x_strides: tuple[int, int], out_strides: tuple[int, int], num_workers: int,
) -> None:  # fmt: skip
    """``out`` as above, from ``depth`` numbers of each head; strides are (a token's, a head's), in elements."""
    if tokens == 0:
        return
    row_words = operand_words(stored, depth)
    operands = new_array((tokens * heads * row_words,), np.float32)
    workers = 1 if tokens * heads * depth * width < SERIAL_MACS else num_workers
    head_maps_kernel(stored)(
        heads * -(-tokens // TOKENS_A_WORK_ITEM), workers, x, tables, out, address_of(operands), tokens, heads, depth,
        width, *x_strides, *out_strides, row_words, TOKENS_A_WORK_ITEM,
    )  # fmt: skip
