"""Products of rows with experts: rows grouped by expert, each run times its expert's matrix.

    out[r] = x[r] . weight[e]^T + bias[e]        for starts[e] <= r < starts[e + 1]

An expert that has rows is read once. Work items are fixed by the most experts that can have rows, since a recorded
launch cannot depend on the routing: the first ones arrange a tile of rows each, the others multiply some panels of an
expert with all its rows, and surplus ones return at once. A row's bits are those of `linear`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, njit

from numba_kernels.closure_cache import name_by_content
from numba_kernels.cpu.gemm.arranged_rows import operand_words
from numba_kernels.cpu.gemm.linear import FIELDS as PRODUCT_FIELDS
from numba_kernels.cpu.gemm.linear import most_tiles, product_parts
from numba_kernels.cpu.intrinsics import atomic
from numba_kernels.cpu.layout import PANEL_COLUMNS
from numba_kernels.cpu.running.launch import (
    Fields,
    Kernel,
    address,
    address_of,
    int32_at,
    int64_at,
    new_array,
)

WORK_ITEMS_A_WORKER = 4  # of each expert: one may have all rows

FIELDS = Fields(
    "*x *tables *starts *active *out *operands num_experts num_active depth x_stride width out_width row_words "
    "panels_a_work_item panel_work_items num_arranging arranged"
)
_ARRANGED = FIELDS.offset("arranged")
_PRODUCT = PRODUCT_FIELDS.record


@functools.cache
def experts_kernel(stored: Any) -> Kernel:
    """Writes ``out [R, N]`` for ``x [R, K]``, float32, and experts' panels of ``stored``.

    ``tables [3, E]`` int64 holds the addresses of each expert's panels, scales and bias. ``active`` int32 are the
    ``num_active`` experts that may have rows, then -1; ``starts [E + 1]`` int32 has their first rows.
    """
    arrange, multiply, elements, unit_words, count_tiles = product_parts(stored)

    @njit(nogil=True)
    @name_by_content
    def fill(a, expert, product):
        """The product of one expert's rows, as arguments of `linear_kernel`."""
        starts, tables = int32_at(a.starts, a.num_experts + 1), int64_at(a.tables, 3 * a.num_experts)
        first = starts[expert]
        rows = starts[expert + 1] - first
        b = product[0]
        b.x = a.x + first * a.x_stride * 4
        b.panels = tables[expert]
        b.scales = tables[a.num_experts + expert]
        b.bias = tables[2 * a.num_experts + expert]
        b.residual = 0
        b.out = a.out + first * a.out_width * 4
        b.operands = a.operands + first * a.row_words * 4
        b.partials = b.low_rank = 0
        b.num_rows, b.depth, b.x_stride = rows, a.depth, a.x_stride
        b.width, b.out_width = a.width, a.out_width
        b.num_segments, b.step_elements = 1, 1
        b.panels_a_work_item, b.row_work_items, b.num_tiles = a.panels_a_work_item, 1, count_tiles(rows)
        b.arranging_parts, b.gate = 1, 0

    def experts(arguments, work_item):
        block = carray(arguments, 1)
        a = block[0]
        arranged = address(block) + _ARRANGED
        words = -(-a.depth // elements) * unit_words
        active, starts = int32_at(a.active, a.num_active), int32_at(a.starts, a.num_experts + 1)
        product = np.empty(1, _PRODUCT)
        if work_item < a.num_arranging:
            tile = work_item
            for place in range(a.num_active):
                expert = active[place]
                if expert < 0:
                    break
                tiles = count_tiles(starts[expert + 1] - starts[expert])
                if tile < tiles:
                    fill(a, expert, product)
                    arrange(product[0], tile, words)
                    break
                tile -= tiles
            atomic.add(arranged, 1)
        else:
            while atomic.load(arranged) < a.num_arranging:
                atomic.pause()
            expert = active[(work_item - a.num_arranging) // a.panel_work_items]
            if expert >= 0:
                fill(a, expert, product)
                multiply(product[0], (work_item - a.num_arranging) % a.panel_work_items, words)

    return Kernel(experts, FIELDS, counter="arranged")


def multiply(
    stored: Any, x: int, tables: int, starts: int, active: int, out: int, rows: int, num_experts: int,
    num_active: int, depth: int, x_stride: int, width: int, out_width: int, num_workers: int,
) -> None:  # fmt: skip
    """``out [rows, width]`` from ``x [rows, depth]`` and experts as in `experts_kernel`; rows of x are ``x_stride``
    elements apart, those of out ``out_width``."""
    row_words = operand_words(stored, depth)
    operands = new_array((rows * row_words,), np.float32)
    panels = -(-width // PANEL_COLUMNS)
    panels_a_work_item = max(1, panels // (WORK_ITEMS_A_WORKER * num_workers))
    panel_work_items = -(-panels // panels_a_work_item)
    num_arranging = most_tiles(stored, rows, num_active)
    total = num_arranging + num_active * panel_work_items
    experts_kernel(stored)(
        total, num_workers, x, tables, starts, active, out, address_of(operands), num_experts, num_active, depth,
        x_stride, width, out_width, row_words, panels_a_work_item, panel_work_items, num_arranging, 0,
    )  # fmt: skip
